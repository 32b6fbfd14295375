"""The tail of the flow: per-lane buffers of finished batches, let go in strict round-robin.

The next lane is the unfinished one with the fewest turns, lowest number first. From aligned lanes that is strict
round-robin, also when lanes end early; after a restart in the middle of a step on another topology it levels the
lanes first. It needs nothing but each lane's turns, so it is the same lane that a saved pointer would name.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Tail(Generic[T]):
    """Buffers of the owned lanes. One thread puts, one takes; the length of a buffer may be read by both."""

    def __init__(self, turns: dict[int, int]) -> None:
        self.buffers: dict[int, deque[T]] = {lane: deque() for lane in turns}
        self._order = [(done, lane) for lane, done in turns.items()]
        self.on_first: Callable[[], None] | None = None
        """Called when a lane's empty buffer gets its first item: someone may wait for it."""
        heapq.heapify(self._order)

    def put(self, lane: int, item: T) -> None:
        """Appends to a lane's buffer."""
        self.buffers[lane].append(item)
        if self.on_first is not None and len(self.buffers[lane]) == 1:
            self.on_first()

    def waiting(self, lane: int) -> int:
        """Items in a lane's buffer."""
        return len(self.buffers[lane])

    @property
    def turn(self) -> tuple[int, int] | None:
        """(turns done, lane) of the lane that is next; None when every lane is finished."""
        return self._order[0] if self._order else None

    def peek(self) -> T | None:
        """The next item, or None where it is not there yet."""
        lane = self._order[0][1]
        return self.buffers[lane][0] if self.buffers[lane] else None

    def pop(self) -> tuple[int, T]:
        """(lane, item): takes the next item as the lane's turn."""
        done, lane = self._order[0]
        heapq.heapreplace(self._order, (done + 1, lane))
        return lane, self.buffers[lane].popleft()

    def pass_by(self) -> int:
        """Counts a turn of the next lane that takes nothing; returns the lane."""
        done, lane = self._order[0]
        heapq.heapreplace(self._order, (done + 1, lane))
        return lane

    def finish(self) -> int:
        """Takes the next item as the lane's end; returns the lane, which has no turn any more."""
        _, lane = heapq.heappop(self._order)
        self.buffers[lane].popleft()
        return lane

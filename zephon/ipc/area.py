"""Room for large messages beside a ring: written once by the producer, read in place by the consumer.

An area is a stretch of a segment that nobody has reserved yet. The producer alone deals out its blocks, and reserves
pages when it first needs them; where there are none, the message takes the ring. A block belongs to the consumer until
the last view of it is gone; the consumer then names it to the producer (by whatever message goes that way next). So
nothing ever waits for room here, however long a message is held back.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.limits import memory_left


class Lease(weakref.ref[NDArray[Any]]):
    """Knows the number of the memory that its array lies in, also when that array is gone."""

    __slots__ = ("number",)
    number: int


def lease(array: NDArray[Any], number: int, freed: deque[Lease]) -> Lease:
    """A lease that is appended to `freed` when the last view of `array` is gone. To be kept until then.

    `array` must be an `np.frombuffer` of its own: views of a slice of a common array would outlive it, as numpy
    collapses `.base`. The callback runs no Python code: what it did could be cut short by a Ctrl-C.
    """
    made = Lease(array, freed.append)
    made.number = number
    return made


class Area:
    """The producer's side: deals out blocks of `memory`, which begins at `offset` of the file `fd`."""

    def __init__(self, memory: memoryview, fd: int, offset: int) -> None:
        self.memory = memory
        self._fd, self._offset = fd, offset
        self._reserved = 0  # bytes from the start that have pages
        self._taken: list[tuple[int, int]] = []  # (start, stop), in order

    def occupy(self, blocks: list[tuple[int, int]]) -> None:
        """Blocks (start, size) that the consumer still has from a producer before this one."""
        self._taken = sorted((start, start + size) for start, size in blocks)

    def take(self, size: int) -> int | None:
        """The start of a free block of `size` bytes; None where there is no room, or no memory for it."""
        size += -size % mmap.PAGESIZE
        start = 0
        for taken, stop in self._taken:
            if taken - start >= size:
                break
            start = stop
        if start + size > len(self.memory) or not self._reserve(start + size):
            return None
        insort(self._taken, (start, start + size))
        return start

    def _reserve(self, stop: int) -> bool:
        """Sees to it that the first `stop` bytes have pages: a write without one would be a SIGBUS."""
        more = stop - self._reserved
        if more <= 0:
            return True
        left = memory_left()
        if left is not None and more > left:
            return False
        try:
            os.posix_fallocate(self._fd, self._offset + self._reserved, more)
        except OSError:
            return False
        self._reserved = stop
        return True

    def give_back(self, starts: list[int]) -> None:
        """The consumer is done with the blocks that start there."""
        done = set(starts)
        self._taken = [block for block in self._taken if block[0] not in done]


class AreaReader:
    """The consumer's side: views on blocks, and who still holds some."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._held: dict[int, tuple[int, Lease]] = {}  # by start: size, lease
        self._freed: deque[Lease] = deque()

    def view(self, start: int, size: int) -> NDArray[np.uint8]:
        """The block, in place, for as long as any view of it lives."""
        array = np.frombuffer(self._memory, np.uint8, size, start)
        self._held[start] = (size, lease(array, start, self._freed))
        return array

    def take_freed(self) -> list[int]:
        """The starts of blocks that nobody holds any more, since the last call."""
        freed = []
        while self._freed:
            freed.append(self._freed.popleft().number)
            del self._held[freed[-1]]
        return freed

    def held(self) -> list[tuple[int, int]]:
        """(start, size) of the blocks that someone holds."""
        self.take_freed()
        return [(start, size) for start, (size, _) in self._held.items()]

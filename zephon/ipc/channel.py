"""Messages of any size over a ring: a sender that never blocks, a receiver that puts parts together again.

A message goes as one frame where it fits, else as several; each frame begins with 8 bytes: how many bytes of the
message follow in later frames (0: the last one). A large message may lie in an area beside the ring instead; its frame
then says where (`area.py`). Two wake-ups belong to a channel: `data` announces frames to the receiver, `credit` tells
the sender that room was given back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.ipc import stray
from zephon.ipc.area import Area, AreaReader
from zephon.ipc.ring import Ring
from zephon.ipc.wake import Wake

_LAST = (0).to_bytes(8, "little")
_IN_AREA = (2**64 - 1).to_bytes(8, "little")
LARGE_BYTES = 1 << 17  # of a message, from which on a copy more costs more than the handling of a block


class Sender:
    """The producer's end. What does not fit waits here, in order, until `flush` finds room."""

    def __init__(self, ring: Ring, data: Wake, credit: Wake, area: Area | None = None) -> None:
        self.ring, self.data, self.credit, self.area = ring, data, credit, area
        self._most = ring.most_payload - len(_LAST)
        self._waiting: deque[list[Any]] = deque()

    @property
    def empty(self) -> bool:
        """Whether nothing waits for room."""
        return not self._waiting

    def send(self, parts: Sequence[Any]) -> bool:
        """Takes a message; returns whether all of it is in the ring now. The parts must stay as they are until then."""
        stray.leave()
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        if self.area is not None and size >= LARGE_BYTES and (start := self.area.take(size)) is not None:
            _fill(self.area.memory, start, views)
            self._waiting.append([_IN_AREA, start.to_bytes(8, "little"), size.to_bytes(8, "little")])
        elif size <= self._most:
            self._waiting.append([_LAST, *views])
        else:
            self._waiting.extend(self._frames(views, size))
        return self.flush()

    def _frames(self, views: list[memoryview], left: int) -> list[list[Any]]:
        """A large message cut into frames."""
        frames: list[list[Any]] = []
        frame: list[memoryview] = []
        room = self._most
        for view in views:
            while view.nbytes:
                piece = view[:room]
                frame.append(piece)
                view, room, left = view[piece.nbytes :], room - piece.nbytes, left - piece.nbytes
                if room == 0 or left == 0:
                    frames.append([left.to_bytes(8, "little"), *frame])
                    frame, room = [], self._most
        return frames

    def flush(self) -> bool:
        """Publishes what fits. Returns whether nothing waits any more."""
        while self._waiting:
            stray.leave()
            if not self.ring.put(self._waiting[0]):
                return False
            self._waiting.popleft()
            self.data.post()
        return True

    def send_waiting(self, parts: Sequence[Any], alive: Any, timeout_s: float = 1.0) -> None:
        """Sends, waiting for room. `alive()` is asked at every time-out and may raise."""
        done = self.send(parts)
        while not done:
            if self.credit.wait(timeout_s):
                self.credit.take()
            else:
                alive()
            done = self.flush()


def _fill(memory: memoryview, start: int, views: list[memoryview]) -> None:
    """Puts the views into memory, end to end."""
    for view in views:
        memory[start : start + view.nbytes] = view
        start += view.nbytes


def _memory(size: int) -> memoryview:
    """Memory of a message's own, not cleared first."""
    return memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]


class Receiver:
    """The consumer's end. Reads announced frames only; after the sender's death, with `drain`, all published ones."""

    def __init__(self, ring: Ring, data: Wake, credit: Wake, area: AreaReader | None = None) -> None:
        self.ring, self.data, self.credit, self.area = ring, data, credit, area
        self._announced = 0
        self._message: memoryview | None = None
        self._filled = 0
        self._drain = False

    def drain(self) -> None:
        """The sender is dead: reads up to what it published, announced or not."""
        self._drain = True

    def note(self) -> None:
        """Takes in what was announced, and leaves the frames where they are."""
        self._announced += self.data.take()

    def receive(self) -> memoryview | NDArray[np.uint8] | None:
        """The next complete message, in memory of its own or in the area; None where there is none yet. Never waits."""
        stray.leave()
        while True:
            if not self._announced:
                self.note()
            if not self._announced and not self._drain:
                return None
            frame = self.ring.get()
            if frame is None:
                return None
            self._announced = max(0, self._announced - 1)
            message = self._take(frame)
            frame.release()
            self.ring.release()
            self.credit.post()
            if message is not None:
                return message

    def _take(self, frame: memoryview) -> memoryview | NDArray[np.uint8] | None:
        """Adds a frame to the message it is a part of; returns the message when it is complete."""
        if frame[:8] == _IN_AREA:
            assert self.area is not None
            return self.area.view(int.from_bytes(frame[8:16], "little"), int.from_bytes(frame[16:24], "little"))
        left = int.from_bytes(frame[:8], "little")
        size = frame.nbytes - 8
        if self._message is None:
            self._message, self._filled = _memory(size + left), 0
        self._message[self._filled : self._filled + size] = frame[8:]
        self._filled += size
        if left:
            return None
        message, self._message = self._message, None
        return message

"""A byte ring between one producer and one consumer process, in shared memory.

    offset  0  HEAD   8 bytes, written by the producer alone: bytes ever published
    offset 64  TAIL   8 bytes, written by the consumer alone: bytes ever released
    offset 128 ...    `capacity` bytes of frames

A frame is 16 bytes (its size in the ring, its payload's size) and the payload, padded to 8. A frame never crosses the
end of the ring: where it would, a marker fills the rest. Free space is capacity - (HEAD - TAIL).

An empty ring starts again at its beginning once a quarter of it was used: where the consumer keeps up, the rest is
never touched. What is skipped so counts as used until the first frame behind it is released.

Publishing is one aligned 8-byte store to HEAD, through a memoryview cast to "Q" (`struct.pack_into` would clear the
cell first), so a frame that was being written when its producer died was never there. The consumer reads only frames
that the wake-up (`wake.py`) announced, or, after the producer's death, all up to HEAD: writing and reading the eventfd
order the memory between the processes. Nobody polls a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

HEAD: Final = 0
TAIL: Final = 64
DATA: Final = 128
FRAME_HEADER: Final = 16
_MARKER: Final = (1 << 64) - 1
LEAST_CAPACITY: Final = 4096
RESTART: Final = 4  # parts of the ring: fewer, and more memory is touched; more, and less fits after a restart

Buffer = bytes | bytearray | memoryview


def ring_bytes(capacity: int) -> int:
    """Shared memory that a ring of `capacity` bytes needs."""
    return DATA + capacity


class Ring:
    """One end of a ring over `memory`; which end is decided by the methods called.

    Producer: `room`, `put`. Consumer: `get`, `release`. `capacity` is a multiple of 8, at least 4096.
    """

    def __init__(self, memory: memoryview, capacity: int) -> None:
        assert capacity % 8 == 0, capacity
        assert capacity >= LEAST_CAPACITY, capacity
        self.capacity = capacity
        self._cells = memory[: DATA + capacity].cast("Q")
        self._bytes = memory[: DATA + capacity]
        self._read = self._cells[TAIL // 8]  # consumer: bytes handed out, released or not

    def reset(self) -> None:
        """Empties the ring. Only while neither end is in use."""
        self._cells[HEAD // 8] = self._cells[TAIL // 8] = 0
        self._read = 0

    @property
    def most_payload(self) -> int:
        """The largest payload that surely fits once the ring is empty: half of it, as a frame may not wrap."""
        return self.capacity // 2 - FRAME_HEADER

    def put(self, parts: Sequence[Buffer]) -> bool:
        """Producer: publishes one frame made of `parts`; False where there is no room for it now. Never waits."""
        payload = sum(map(_nbytes, parts))
        size = FRAME_HEADER + (payload + 7 & ~7)
        head, tail = self._cells[HEAD // 8], self._cells[TAIL // 8]
        at = head % self.capacity
        restart = head == tail and at >= max(size, self.capacity // RESTART)
        skip = self.capacity - at if restart or at + size > self.capacity else 0
        if head + skip + size - tail > self.capacity:
            return False
        if skip:
            self._cells[(DATA + at) // 8] = _MARKER
            at = 0
        cell = (DATA + at) // 8
        self._cells[cell], self._cells[cell + 1] = size, payload
        to = DATA + at + FRAME_HEADER
        for part in parts:
            view = memoryview(part).cast("B")
            self._bytes[to : to + len(view)] = view
            to += len(view)
        self._cells[HEAD // 8] = head + skip + size  # publishes; pairs with the read of HEAD in `get`
        return True

    def get(self) -> memoryview | None:
        """Consumer: the payload of the next frame, in place; None where there is none. Valid until `release`."""
        if self._read == self._cells[HEAD // 8]:
            return None
        at = self._read % self.capacity
        if self._cells[(DATA + at) // 8] == _MARKER:
            self._read += self.capacity - at
            at = 0
        cell = (DATA + at) // 8
        size, payload = self._cells[cell], self._cells[cell + 1]
        self._read += size
        return self._bytes[DATA + at + FRAME_HEADER : DATA + at + FRAME_HEADER + payload]

    def release(self) -> None:
        """Consumer: gives all that `get` handed out back to the producer."""
        self._cells[TAIL // 8] = self._read

    def close(self) -> None:
        """Lets go of the memory, so that its mapping can be closed."""
        self._cells.release()
        self._bytes.release()


def _nbytes(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)

"""A device whose copies happen when the test says so: until then the bytes of the source must stay what they are.

Like CUDA it knows what it reads by address, and keeps no reference to it. What it writes it keeps, as the device's
allocator does.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import torch


class LateCopies:
    """Fills in for `CudaCopies`. `log` is what happened, in order."""

    device = "late"

    def __init__(self, pinned: bool = True) -> None:
        self.log: list[str] = []
        self.marks: list[LateDone] = []
        self.pins = LatePins(self) if pinned else None

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def start(self, tensors: list[Any]) -> tuple[list[Any], LateDone]:
        moved = [torch.full_like(tensor, -1) for tensor in tensors]
        sources = [(weakref.ref(old), old.data_ptr(), old.numel() * old.element_size()) for old in tensors]
        self.log.append(f"start {len(self.marks)}")
        self.marks.append(LateDone(self, len(self.marks), list(zip(moved, sources, strict=True))))
        return moved, self.marks[-1]

    def hand_over(self, tensors: list[Any], done: LateDone) -> None:
        self.log.append(f"hand over {done.number}")

    def finish(self) -> None:
        """All copies that were started happen now."""
        for mark in self.marks:
            mark.finish()


class LateDone:
    """A mark behind the copies of one batch."""

    def __init__(self, owner: LateCopies, number: int, pairs: list[tuple[Any, tuple[Any, int, int]]]) -> None:
        self._owner, self.number, self._pairs = owner, number, pairs
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self._owner.log.append(f"wait {self.number}")
        self.finish()

    def finish(self) -> None:
        if not self.is_done:
            for new, (old, address, size) in self._pairs:
                assert old() is not None, "what a copy reads was let go"
                ctypes.memmove(new.data_ptr(), address, size)
            self._owner.log.append(f"done {self.number}")
        self.is_done = True


class LatePins:
    """What CUDA would hold registered."""

    def __init__(self, owner: LateCopies) -> None:
        self._owner = owner
        self.pinned: dict[int, int] = {}  # address: bytes
        self.most = 0

    def pin(self, memory: Any) -> None:
        address, size = place(memory)
        assert address not in self.pinned, "registered twice"
        self.pinned[address] = size
        self.most = max(self.most, len(self.pinned))
        self._owner.log.append("pin")

    def unpin(self, memory: Any) -> None:
        self._owner.finish()
        del self.pinned[place(memory)[0]]
        self._owner.log.append("unpin")

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in registered memory."""
        return any(start <= tensor.data_ptr() < start + size for start, size in self.pinned.items())


def place(memory: Any) -> tuple[int, int]:
    view = np.frombuffer(memory, np.uint8)
    return int(view.__array_interface__["data"][0]), len(view)

"""How tensors come onto a device: the few calls of torch and CUDA that `loader.py` needs, and their order.

With CUDA: copies run on a stream of their own, and an event is recorded behind those of each batch. Before the user's
stream touches the tensors it waits for that event, on the device; the allocator is told that it uses them. Slots are
registered with CUDA, so that a copy from them takes no time of the CPU. torch tracks no streams for such memory, so
whoever starts a copy keeps the source until the event is done.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np

from zephon.drive import Pins
from zephon.errors import ConfigError

log = logging.getLogger("zephon")


class Done(Protocol):
    """A mark behind copies: an event of the device."""

    def query(self) -> bool:
        """Whether the copies are done."""

    def synchronize(self) -> None:
        """Returns once they are."""


class Copies(Protocol):
    """What the loader asks of a device."""

    device: Any
    pins: Pins | None
    """What is told of the memory that batches lie in, if it is to be registered."""

    def is_tensor(self, value: Any) -> bool:
        """Whether a field is a tensor: those go to the device."""

    def start(self, tensors: list[Any]) -> tuple[list[Any], Done | None]:
        """Starts the copies: (tensors on the device, the mark behind their copies; None: all done)."""

    def hand_over(self, tensors: list[Any], done: Done) -> None:
        """The user gets them now: its stream must not touch them before they are there."""


class PlainCopies:
    """To the CPU, where a tensor stays what it is; to any other device a copy that is waited for."""

    pins: Pins | None = None

    def __init__(self, torch: Any, device: Any) -> None:
        self.device, self._torch = device, torch

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor)

    def start(self, tensors: list[Any]) -> tuple[list[Any], Done | None]:
        return [tensor.to(self.device) for tensor in tensors], None

    def hand_over(self, tensors: list[Any], done: Done) -> None:
        """Nothing is under way."""


class CudaCopies:
    """On a stream of its own, from pinned memory where that can be had."""

    def __init__(self, torch: Any, device: Any) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self._torch = device, torch
        self._stream = torch.cuda.Stream(device)
        self.pins: Pins | None = CudaPins(torch, device, self._stream)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor)

    def start(self, tensors: list[Any]) -> tuple[list[Any], Done | None]:
        cuda = self._torch.cuda
        with cuda.stream(self._stream):
            moved = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            done = cuda.Event()
            done.record(self._stream)
        return moved, done

    def hand_over(self, tensors: list[Any], done: Done) -> None:
        users = self._torch.cuda.current_stream(self.device)
        users.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(users)  # its memory is of the copying stream: not to be reused before this one is done


class CudaPins:
    """Registers mappings with CUDA. Where it refuses one, that is said once, and copies come from unpinned memory."""

    def __init__(self, torch: Any, device: Any, stream: Any) -> None:
        self._torch, self._device, self._stream = torch, device, stream
        self._pinned: set[int] = set()
        self._refused = False

    def pin(self, memory: Any) -> None:
        if self._refused:
            return
        address, size = _place(memory)
        cuda = self._torch.cuda
        with cuda.device(self._device):  # else CUDA would start on another device than the user's
            result = cuda.cudart().cudaHostRegister(address, size, 0)
            if int(result) == 0:
                self._pinned.add(address)
                return
            self._refused = True
            self._clear_error()
        log.warning(
            "to_device: CUDA does not pin %s MiB of shared memory (%s); batches are copied from unpinned memory, which "
            "takes longer and overlaps less; raise the limit of locked memory (ulimit -l), or lower the batch size",
            f"{size / 2**20:,.1f}",
            cuda.cudart().cudaGetErrorString(result),
        )

    def _clear_error(self) -> None:
        """CUDA keeps the refusal as this thread's last error, and the next kernel would be blamed for it."""
        try:
            self._torch.ones(1, device=self._device)
        except RuntimeError:
            return

    def unpin(self, memory: Any) -> None:
        address, _ = _place(memory)
        if address in self._pinned:
            self._pinned.remove(address)
            self._stream.synchronize()
            with self._torch.cuda.device(self._device):
                self._torch.cuda.cudart().cudaHostUnregister(address)


def _place(memory: Any) -> tuple[int, int]:
    """(address, bytes) of a mapping."""
    view = np.frombuffer(memory, np.uint8)
    return int(view.__array_interface__["data"][0]), len(view)


def copies_to(device: Any) -> Copies:
    """The way to a device, given as torch takes it: "cuda", "cuda:1", "cpu", a torch.device, a number.

    Raises ConfigError where torch is missing or has no such device.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError("to_device(...) needs torch: pip install zephon[torch]") from None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"to_device({device!r}): {str(error).splitlines()[0]}") from None
    if found.type != "cuda":
        return PlainCopies(torch, found)
    if not torch.cuda.is_available():
        raise ConfigError(f"to_device({device!r}): torch finds no CUDA device here; to_device('cpu') works anywhere")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise ConfigError(f"to_device({device!r}): there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return CudaCopies(torch, found)

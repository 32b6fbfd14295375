"""The calls of CUDA and their order, recorded by a stand-in for torch: there is no device here."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.device.late import place
from zephon.device.copies import CudaCopies


class Recorder:
    """The part of torch that is used. `log`: every call, in order, with the stream and device that are current."""

    def __init__(self, refuses: int = 0) -> None:
        self.log: list[str] = []
        self.streams, self.current_device, self.refuses = ["user"], "cuda:0", refuses
        self.cuda = SimpleNamespace(
            Stream=self._stream, Event=self._event, stream=self._in_stream, device=self._on_device,
            current_stream=lambda device: SimpleNamespace(
                name=self.streams[-1], wait_event=lambda event: self._note(f"{self.streams[-1]} waits for {event.name}")
            ),
            current_device=lambda: 0, cudart=lambda: self,
        )  # fmt: skip

    def _note(self, what: str) -> None:
        self.log.append(what)

    def device(self, kind: str, index: int) -> Any:
        return SimpleNamespace(type=kind, index=index)

    def _stream(self, device: Any) -> Any:
        return SimpleNamespace(name="side", synchronize=lambda: self._note("side synchronised"))

    def _event(self) -> Any:
        return SimpleNamespace(name="event", record=lambda stream: self._note(f"event recorded on {stream.name}"))

    @contextmanager
    def _in_stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        before, self.current_device = self.current_device, f"{device.type}:{device.index}"
        yield
        self.current_device = before

    def tensor(self, name: str) -> Any:
        def to(device: Any, non_blocking: bool = False) -> Any:
            self._note(f"{name} to {device.type}:{device.index} on {self.streams[-1]}, non_blocking={non_blocking}")
            return SimpleNamespace(record_stream=lambda stream: self._note(f"{name} is used by {stream.name}"))

        return SimpleNamespace(to=to)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._note(f"register {size} on {self.current_device}")
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self._note(f"unregister on {self.current_device}")
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def ones(self, size: int, device: Any) -> Any:
        self._note("a kernel")
        raise RuntimeError("CUDA error of before")


def test_copies_on_a_stream_of_their_own_and_an_event_behind_them() -> None:
    torch = Recorder()
    copies: Any = CudaCopies(torch, SimpleNamespace(type="cuda", index=1))
    moved, done = copies.start([torch.tensor("a"), torch.tensor("b")])
    copies.hand_over(moved, done)
    assert torch.log == [
        "a to cuda:1 on side, non_blocking=True",
        "b to cuda:1 on side, non_blocking=True",
        "event recorded on side",
        "user waits for event",
        "a is used by user",
        "b is used by user",
    ]


def test_the_current_device_where_none_is_named() -> None:
    assert CudaCopies(Recorder(), SimpleNamespace(type="cuda", index=None)).device.index == 0


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 8192) as made:
        yield made


def test_memory_is_registered_on_the_loaders_device_and_let_go_behind_the_copies(memory: mmap.mmap) -> None:
    torch = Recorder()
    pins = CudaCopies(torch, SimpleNamespace(type="cuda", index=1)).pins
    assert pins is not None
    pins.pin(memory)
    pins.unpin(memory)
    pins.unpin(memory)  # not registered any more
    assert torch.log == ["register 8192 on cuda:1", "side synchronised", "unregister on cuda:1"]
    assert place(memory)[1] == 8192
    assert torch.current_device == "cuda:0"


def test_a_refusal_is_said_once(memory: mmap.mmap, caplog: pytest.LogCaptureFixture) -> None:
    torch = Recorder(refuses=2)
    pins = CudaCopies(torch, SimpleNamespace(type="cuda", index=0)).pins
    assert pins is not None
    with caplog.at_level(logging.WARNING, logger="zephon"):
        pins.pin(memory)
        pins.pin(memory)
        pins.unpin(memory)
    assert torch.log == ["register 8192 on cuda:0", "a kernel"]  # the error that CUDA keeps is taken away
    [said] = [record.getMessage() for record in caplog.records]
    assert "does not pin 0.0 MiB of shared memory (error 2)" in said
    assert "ulimit -l" in said

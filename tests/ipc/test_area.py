"""Areas: blocks never overlap while anyone looks at one, pages are there before they are written, nothing waits."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zephon.ipc.area import Area, AreaReader
from zephon.ipc.channel import LARGE_BYTES, Receiver, Sender
from zephon.ipc.ring import LEAST_CAPACITY, Ring, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake

PAGE = mmap.PAGESIZE
AREA = 16 * PAGE


def segment_of(area: int = AREA) -> tuple[Segment, memoryview, int]:
    """(segment, area, its offset): one reserved page, then the area."""
    segment = Segment.create(PAGE, unreserved=area)
    return segment, memoryview(segment.map)[PAGE : PAGE + area], PAGE


class AreaMachine(RuleBasedStateMachine):
    """A producer that dies and is replaced, and a consumer that holds blocks and tells of them late."""

    @initialize()
    def start(self) -> None:
        self.segment, self.memory, self.offset = segment_of()
        self.producer = Area(self.memory, self.segment.fd, self.offset)
        self.reader = AreaReader(self.memory)
        self.views: list[tuple[int, np.ndarray[Any, Any], int]] = []
        self.number = 0

    @rule(size=st.one_of(st.integers(1, 3 * PAGE), st.just(AREA), st.just(AREA + 1)))
    def send(self, size: int) -> None:
        start = self.producer.take(size)
        if start is None:
            assert size > PAGE or self.producer._taken, "no room in an empty area"
            return
        self.number += 1
        value = self.number % 251
        self.memory[start : start + size] = bytes([value]) * size
        self.views.append((start, self.reader.view(start, size)[:], value))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @rule()
    def tell(self) -> None:
        self.producer.give_back(self.reader.take_freed())

    @rule()
    def die(self) -> None:
        """A new producer knows only what the consumer says."""
        self.producer = Area(self.memory, self.segment.fd, self.offset)
        self.producer.occupy(self.reader.held())

    @invariant()
    def what_is_looked_at_stays(self) -> None:
        for _, view, value in self.views:
            assert (view == value).all()

    def teardown(self) -> None:
        self.views.clear()
        self.producer.give_back(self.reader.take_freed())
        assert self.reader.held() == []
        assert self.producer.take(AREA) == 0, "all that was given back can be had again"


TestArea = AreaMachine.TestCase
TestArea.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_without_memory_there_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    segment, memory, offset = segment_of()
    area = Area(memory, segment.fd, offset)
    assert area.take(PAGE) == 0

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert area.take(PAGE) is None
    area.give_back([0])
    assert area.take(PAGE) == 0, "what has pages can be used again"
    monkeypatch.undo()
    monkeypatch.setattr("zephon.ipc.area.memory_left", lambda: PAGE - 1)
    assert area.take(PAGE) is None, "the container's limit counts too"


@pytest.fixture
def channel() -> Iterator[tuple[Sender, Receiver]]:
    segment, memory, offset = segment_of(4 * LARGE_BYTES)
    ring, wakes = memoryview(bytearray(ring_bytes(LEAST_CAPACITY))), (Wake(), Wake())
    area = Area(memory, segment.fd, offset)
    yield (
        Sender(Ring(ring, LEAST_CAPACITY), *wakes, area),
        Receiver(Ring(ring, LEAST_CAPACITY), *wakes, AreaReader(memory)),
    )
    for wake in wakes:
        wake.close()


def test_large_messages_take_the_area_and_keep_their_place(channel: tuple[Sender, Receiver]) -> None:
    sender, receiver = channel
    messages = [bytes([i]) * size for i, size in enumerate([10, LARGE_BYTES, 20, LARGE_BYTES + 5, 30])]
    for message in messages:
        assert sender.send([message[:7], message[7:]])
    got = [receiver.receive() for _ in messages]
    assert [bytes(g) for g in got if g is not None] == messages
    assert isinstance(got[1], np.ndarray), "in place"
    assert receiver.receive() is None


def test_a_full_area_leaves_the_ring(channel: tuple[Sender, Receiver]) -> None:
    """A consumer that holds everything back gets the rest through the ring, in parts."""
    sender, receiver = channel
    held, message = [], bytes(range(256)) * (LARGE_BYTES // 256)
    for _ in range(12):
        done = sender.send([message])
        while (got := receiver.receive()) is None:
            done = sender.flush()
        held.append(got)
        assert done
    assert [bytes(each) for each in held] == [message] * 12
    assert sum(isinstance(each, np.ndarray) for each in held) == 4
    del got
    held.clear()
    gc.collect()
    assert receiver.area is not None
    assert sender.area is not None
    sender.area.give_back(receiver.area.take_freed())
    assert sender.send([message])
    assert isinstance(receiver.receive(), np.ndarray)

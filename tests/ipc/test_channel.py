"""The channel against a plain queue: messages of any size, a full ring, the sender's death at any frame."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from zephon.ipc.channel import Receiver, Sender
from zephon.ipc.ring import LEAST_CAPACITY, Buffer, Ring, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake

MOST = LEAST_CAPACITY // 2 - 24  # bytes of a message that still go as one frame through the smallest ring


def message_of(number: int, size: int) -> bytes:
    return np.arange(number, number + size, dtype=np.uint32).astype(np.uint8).tobytes()


def frames_of(size: int) -> int:
    return max(1, -(-size // MOST))


class Counting(Ring):
    """A ring that counts what was published."""

    published = 0

    def put(self, parts: Sequence[Buffer]) -> bool:
        done = super().put(parts)
        self.published += done
        return done


SIZES = st.one_of(st.integers(0, 64), st.integers(0, 5 * LEAST_CAPACITY), st.sampled_from([MOST - 1, MOST, MOST + 1]))


class ChannelMachine(RuleBasedStateMachine):
    """A channel over the smallest ring beside a list of the messages that were sent."""

    @initialize()
    def start(self) -> None:
        self.memory = memoryview(bytearray(ring_bytes(LEAST_CAPACITY)))
        self.data, self.credit = Wake(), Wake()
        self.number = 0
        self.fresh()

    def fresh(self) -> None:
        """Two new ends, as after a death."""
        Ring(self.memory, LEAST_CAPACITY).reset()
        self.data.take()
        self.credit.take()
        self.ring = Counting(self.memory, LEAST_CAPACITY)
        self.sender = Sender(self.ring, self.data, self.credit)
        self.receiver = Receiver(Ring(self.memory, LEAST_CAPACITY), self.data, self.credit)
        self.sent: list[bytes] = []
        self.received = 0

    def whole(self) -> int:
        """How many messages have all of their frames in the ring or behind it."""
        left, whole = self.ring.published, 0
        for message in self.sent:
            left -= frames_of(len(message))
            whole += left >= 0
        return whole

    def take(self, what: Any) -> None:
        if what is None:
            assert self.received == self.whole(), "a whole message was there"
            return
        assert self.received < self.whole()
        assert what == self.sent[self.received]
        self.received += 1

    @rule(size=SIZES, cuts=st.lists(st.floats(0, 1), max_size=4))
    def send(self, size: int, cuts: list[float]) -> None:
        self.number += 1
        message = message_of(self.number, size)
        at = sorted(round(cut * size) for cut in cuts)
        parts = [message[a:b] for a, b in zip([0, *at], [*at, size], strict=True)]
        self.sent.append(message)
        done = self.sender.send([memoryview(p) if i % 2 else p for i, p in enumerate(parts)])
        assert done == (self.whole() == len(self.sent))

    @rule()
    def flush(self) -> None:
        assert self.sender.flush() == (self.whole() == len(self.sent))

    @rule()
    def note(self) -> None:
        self.receiver.note()

    @rule()
    def receive(self) -> None:
        self.take(self.receiver.receive())

    @rule()
    def receive_all(self) -> None:
        """Nothing that was sent is stuck: flush and receive in turn come to the end."""
        for _ in range(2 * sum(frames_of(len(message)) for message in self.sent) + 2):
            self.sender.flush()
            self.take(self.receiver.receive())
        assert self.received == len(self.sent)

    @rule(announced=st.booleans())
    def die(self, announced: bool) -> None:
        """The sender dies, perhaps between the last store and its announcement. Whole messages are not lost."""
        if not announced:
            self.data.take()
        self.receiver.drain()
        whole = self.whole()
        while (message := self.receiver.receive()) is not None:
            self.take(message)
        assert self.received == whole
        self.fresh()

    def teardown(self) -> None:
        for wake in (self.data, self.credit):
            wake.close()


TestChannel = ChannelMachine.TestCase
TestChannel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ends(capacity: int = LEAST_CAPACITY) -> tuple[Sender, Receiver]:
    memory, data, credit = memoryview(Segment.create(ring_bytes(capacity)).map), Wake(), Wake()
    return Sender(Ring(memory, capacity), data, credit), Receiver(Ring(memory, capacity), data, credit)


def content(receiver: Receiver) -> bytes | None:
    message = receiver.receive()
    return None if message is None else bytes(message)


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"", b""], [memoryview(b"")], [np.empty(0, np.uint8).data]])
def test_an_empty_message_arrives(parts: list[Buffer]) -> None:
    sender, receiver = ends()
    assert sender.send(parts)
    assert content(receiver) == b""
    assert receiver.receive() is None


def test_parts_of_other_formats_are_sent_as_bytes() -> None:
    sender, receiver = ends()
    array = np.arange(700, dtype=np.float64)
    assert not sender.send([array.data, b"tail"])
    got: list[Any] = []
    while not got:
        sender.flush()
        got = [message for message in [receiver.receive()] if message is not None]
    assert got == [array.tobytes() + b"tail"]


def test_a_message_is_memory_of_its_own() -> None:
    sender, receiver = ends()
    sender.send([b"first"])
    first = receiver.receive()
    assert first is not None
    for _ in range(200):
        sender.send([b"other"])
        receiver.receive()
    assert bytes(first) == b"first"
    first[0] = 0


@given(sizes=st.lists(SIZES, min_size=1, max_size=12))
@settings(max_examples=40)
def test_a_sender_that_was_refused_needs_no_more_than_the_credit(sizes: list[int]) -> None:
    """Every release posts a credit, so a sender that waits for it is always woken."""
    sender, receiver = ends()
    for number, size in enumerate(sizes):
        done = sender.send([message_of(number, size)])
        message: Any = None
        while message is None:
            sender.credit.take()
            message = receiver.receive()
            assert done or message is not None or sender.credit.wait(0), "no one wakes the sender"
            done = sender.flush()
        assert message == message_of(number, size)


def send_all(sender: Sender, sizes: list[int]) -> None:
    """The child's part. Exits with 3 where the parent is gone."""
    for number, size in enumerate(sizes):
        sender.send_waiting([message_of(number, size)], lambda: os._exit(3), 5.0)


@pytest.mark.parametrize("capacity", [LEAST_CAPACITY, 1 << 16])
def test_large_and_small_messages_between_two_processes(capacity: int) -> None:
    sizes = [0, 1, MOST, MOST + 1, 300_000, 7, 1_000_000, 0] + [size * 97 % 5000 for size in range(300)]
    sender, receiver = ends(capacity)
    pid = os.fork()
    if pid == 0:
        send_all(sender, sizes)
        os._exit(0)
    for number, size in enumerate(sizes):
        while (message := receiver.receive()) is None:
            assert receiver.data.wait(10), "nothing came for 10 seconds"
        assert message == message_of(number, size)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_waiting_sender_asks_whether_anyone_is_there() -> None:
    sender, _ = ends()
    asked: list[int] = []

    def gone() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise ConnectionError("nobody reads")

    with pytest.raises(ConnectionError):
        sender.send_waiting([bytes(3 * LEAST_CAPACITY)], gone, 0.01)
    assert len(asked) == 3


@pytest.mark.parametrize("after", [0, 1, 10, 60])
def test_a_sender_killed_at_any_moment_leaves_whole_messages(after: int) -> None:
    sizes = [number * 211 % 9000 for number in range(5000)]
    sender, receiver = ends()
    pid = os.fork()
    if pid == 0:
        send_all(sender, sizes)
        os._exit(0)
    number = 0

    def receive() -> bool:
        nonlocal number
        message = receiver.receive()
        if message is not None:
            assert message == message_of(number, sizes[number])
            number += 1
        return message is not None

    while number < after:
        if not receive():
            receiver.data.wait(10)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    receiver.drain()
    while receive():
        pass
    assert number >= after


def test_frames_are_read_only_when_announced() -> None:
    """The store that publishes and the announcement are two steps: the second one orders the memory."""
    sender, receiver = ends()
    sender.ring.put([(0).to_bytes(8, "little"), b"quiet"])
    assert receiver.receive() is None
    sender.data.post()
    assert content(receiver) == b"quiet"


def test_waiting_messages_keep_their_order() -> None:
    sender, receiver = ends()
    expected = deque(message_of(i, 1500 + i) for i in range(20))
    for message in list(expected):
        sender.send([message])
    while expected:
        received = content(receiver)
        if received is None:
            assert not sender.flush() or receiver.data.wait(0)
        else:
            assert received == expected.popleft()
    assert receiver.receive() is None

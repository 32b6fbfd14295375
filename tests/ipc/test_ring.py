"""The ring against a plain queue: any sizes, any capacity, wraps, both ends in one process and in two."""

from __future__ import annotations

import os
import signal
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zephon.ipc.ring import DATA, FRAME_HEADER, HEAD, LEAST_CAPACITY, RESTART, TAIL, Ring, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake

CAPACITIES = st.one_of(st.just(LEAST_CAPACITY), st.integers(LEAST_CAPACITY // 8, 1200).map(lambda n: n * 8))


def two_ends(capacity: int) -> tuple[Ring, Ring, memoryview]:
    """(producer, consumer, memory) over ordinary memory, with a guard behind the ring."""
    memory = memoryview(bytearray(ring_bytes(capacity) + 64))
    memory[ring_bytes(capacity) :] = b"G" * 64
    return Ring(memory, capacity), Ring(memory, capacity), memory


def size_of(payload: int) -> int:
    return FRAME_HEADER + -(-payload // 8) * 8


class RingMachine(RuleBasedStateMachine):
    """A ring beside a deque of the same payloads."""

    @initialize(capacity=CAPACITIES)
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.producer, self.consumer, self.memory = two_ends(capacity)
        self.published: deque[bytes] = deque()
        self.handed_out: list[tuple[memoryview, bytes]] = []
        self.number = 0

    def fits(self, length: int) -> bool:
        """Whether there is room: for the frame, and for what is left free before the end that it may not cross."""
        cells = self.memory[:DATA].cast("Q")
        head, tail = cells[HEAD // 8], cells[TAIL // 8]
        at = head % self.capacity
        to_end = self.capacity - at
        restart = head == tail and at >= max(size_of(length), self.capacity // RESTART)
        wasted = to_end if restart or to_end < size_of(length) else 0
        return bool(head + wasted + size_of(length) - tail <= self.capacity)

    @rule(data=st.data(), cuts=st.lists(st.floats(0, 1), max_size=3))
    def put(self, data: st.DataObject, cuts: list[float]) -> None:
        most = self.producer.most_payload
        length = data.draw(st.one_of(st.integers(0, 40), st.integers(0, most), st.integers(most - 9, most)))
        self.number += 1
        payload = bytes((self.number + i) % 251 for i in range(length))
        at = sorted(round(cut * length) for cut in cuts)
        parts = [payload[a:b] for a, b in zip([0, *at], [*at, length], strict=True)]
        fits = self.fits(length)
        done = self.producer.put([memoryview(p) if i % 2 else p for i, p in enumerate(parts)])
        assert done == fits
        assert done or self.published or self.handed_out, "refused by an empty ring"
        if done:
            self.published.append(payload)

    @rule()
    def get(self) -> None:
        frame = self.consumer.get()
        if not self.published:
            assert frame is None
            return
        assert frame is not None
        expected = self.published.popleft()
        assert bytes(frame) == expected
        self.handed_out.append((frame, expected))

    @rule()
    def release(self) -> None:
        self.check_handed_out()
        self.consumer.release()
        self.handed_out.clear()

    @precondition(lambda self: not self.handed_out)
    @rule()
    def reset(self) -> None:
        """A new start on the same memory, as after a death."""
        self.producer.reset()
        self.producer, self.consumer = (Ring(self.memory, self.capacity) for _ in range(2))
        self.published.clear()

    @invariant()
    def check_handed_out(self) -> None:
        """What was handed out and not given back stays as it is."""
        for frame, payload in self.handed_out:
            assert bytes(frame) == payload

    @invariant()
    def check_cells(self) -> None:
        cells = self.memory[:DATA].cast("Q")
        head, tail = cells[HEAD // 8], cells[TAIL // 8]
        assert 0 <= head - tail <= self.capacity
        assert head % 8 == tail % 8 == 0
        assert bytes(self.memory[ring_bytes(self.capacity) :]) == b"G" * 64, "written behind the ring"


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@given(capacity=CAPACITIES, lengths=st.lists(st.floats(0, 1), min_size=1, max_size=80))
@settings(max_examples=60)
def test_any_frame_of_the_largest_size_fits_into_an_empty_ring(capacity: int, lengths: list[float]) -> None:
    producer, consumer, _ = two_ends(capacity)
    for length in lengths:
        payload = bytes(round(length * producer.most_payload))
        assert producer.put([payload])
        assert producer.put([b"x" * producer.most_payload]) or producer.most_payload + len(payload) > capacity // 4
        while (frame := consumer.get()) is not None:
            assert frame.nbytes in (len(payload), producer.most_payload)
        consumer.release()


def test_a_consumer_that_keeps_up_leaves_most_of_the_ring_untouched() -> None:
    """An empty ring starts again at its beginning, so it takes the memory that is needed and not all it has."""
    capacity = 1 << 16
    memory = memoryview(bytearray(b"G" * ring_bytes(capacity)))
    memory[:DATA] = bytes(DATA)
    producer, consumer = Ring(memory, capacity), Ring(memory, capacity)
    for i in range(300):
        payload = bytes([i % 251]) * (100 + i % 900)
        assert producer.put([payload])
        frame = consumer.get()
        assert frame is not None
        assert bytes(frame) == payload
        consumer.release()
    touched = capacity // RESTART + size_of(1000)
    assert memory[DATA + touched :] == b"G" * (capacity - touched)


def test_a_frame_that_was_not_published_was_never_there() -> None:
    """The bytes of a frame are there before HEAD is: what a producer leaves behind in the middle is not read."""
    producer, consumer, memory = two_ends(LEAST_CAPACITY)
    assert producer.put([b"first"])
    torn = size_of(5)
    memory[DATA + torn : DATA + torn + 8] = (4096).to_bytes(8, "little")
    memory[DATA + torn + 8 : DATA + torn + 40] = b"\xff" * 32
    assert bytes(consumer.get() or b"") == b"first"
    assert consumer.get() is None
    consumer.release()
    assert producer.put([b"second"])
    assert bytes(consumer.get() or b"") == b"second"


def test_a_full_ring_takes_again_after_a_release_only() -> None:
    producer, consumer, _ = two_ends(LEAST_CAPACITY)
    payload = bytes(producer.most_payload)
    assert producer.put([payload])
    assert producer.put([payload])
    assert not producer.put([b""])
    assert consumer.get() is not None
    assert not producer.put([payload])
    consumer.release()
    assert producer.put([payload])


@pytest.mark.parametrize("capacity", [0, 4088, 4100])
def test_a_capacity_below_the_least_or_not_in_words_is_a_mistake(capacity: int) -> None:
    with pytest.raises(AssertionError):
        Ring(memoryview(bytearray(ring_bytes(8192))), capacity)


def test_close_lets_the_mapping_go() -> None:
    made = Segment.create(ring_bytes(LEAST_CAPACITY))
    memory = memoryview(made.map)
    ring = Ring(memory, LEAST_CAPACITY)
    ring.put([b"x"])
    ring.close()
    memory.release()
    made.map.close()  # raises BufferError while a view is left
    os.close(made.fd)


def payload_of(number: int, most: int) -> bytes:
    return bytes([number % 251]) * (number * 37 % most)


@pytest.mark.parametrize("capacity", [LEAST_CAPACITY, 1 << 16])
def test_two_processes_exchange_frames_in_order(capacity: int) -> None:
    """One million bytes and more through a ring of a few thousand, with the wake-ups that order the memory."""
    made, data, credit = Segment.create(ring_bytes(capacity)), Wake(), Wake()
    memory = memoryview(made.map)
    frames = 3000
    pid = os.fork()
    if pid == 0:
        ring = Ring(memory, capacity)
        for number in range(frames):
            while not ring.put([payload_of(number, 1500)]):
                credit.wait(10)
                credit.take()
            data.post()
        os._exit(0)
    ring, announced, number = Ring(memory, capacity), 0, 0
    while number < frames:
        if not announced:
            assert data.wait(10), "nothing came for 10 seconds"
            announced = data.take()
        frame = ring.get()
        assert frame is not None
        assert frame == payload_of(number, 1500)
        ring.release()
        credit.post()
        number, announced = number + 1, announced - 1
    assert ring.get() is None
    assert os.waitpid(pid, 0)[1] == 0
    for wake in (data, credit):
        wake.close()


@pytest.mark.parametrize("after", [0, 1, 17, 400])
def test_a_killed_producer_leaves_a_whole_prefix(after: int) -> None:
    """SIGKILL in the middle of a stream of puts: all frames up to HEAD are whole and in order."""
    capacity = 1 << 20
    made, data = Segment.create(ring_bytes(capacity)), Wake()
    memory = memoryview(made.map)
    pid = os.fork()
    if pid == 0:
        ring, number = Ring(memory, capacity), 0
        while True:
            if ring.put([payload_of(number, 3000)]):
                number += 1
            data.post()
    while data.take() < after:
        data.wait(10)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ring, number = Ring(memory, capacity), 0
    while (frame := ring.get()) is not None:
        assert frame == payload_of(number, 3000)
        number += 1
    assert number > 0 or after == 0
    data.close()

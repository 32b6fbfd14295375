"""The ring between two processes, for long: every frame arrives whole, once and in order, at any pace of either end."""

from __future__ import annotations

import os
import random
import zlib
from typing import NoReturn

import pytest

from zephon.ipc.ring import LEAST_CAPACITY, Ring, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake

WAIT_S = 30.0
POOL = random.Random(5).randbytes(1 << 14)  # payloads are cut from it
HEAD_BYTES = 12  # number, checksum of what follows


@pytest.fixture
def frames(pytestconfig: pytest.Config) -> int:
    """10^7 with `--long`, else 10^5."""
    return 10_000_000 if pytestconfig.getoption("--long") else 100_000


def sizes(seed: int, most: int) -> random.Random:
    """The same numbers in both processes: small frames mostly, now and then one of the largest size."""
    assert most > HEAD_BYTES
    return random.Random(seed)


def next_size(chosen: random.Random, most: int) -> int:
    return int((most - HEAD_BYTES) * chosen.random() ** 6)


def produce(ring: Ring, data: Wake, credit: Wake, frames: int, seed: int) -> NoReturn:
    """Announces frames one by one or several at once."""
    status = 1
    try:
        chosen, pace = sizes(seed, ring.most_payload), random.Random(seed + 1)
        unannounced, at_once = 0, 1
        for number in range(frames):
            size = next_size(chosen, ring.most_payload)
            start = number * 31 % (len(POOL) - size)
            payload = POOL[start : start + size]
            parts = [number.to_bytes(8, "little"), zlib.crc32(payload).to_bytes(4, "little"), payload]
            while not ring.put(parts):
                if unannounced:
                    data.post(unannounced)
                    unannounced = 0
                if not credit.wait(WAIT_S):
                    os._exit(2)
                credit.take()
            unannounced += 1
            if unannounced >= at_once:
                data.post(unannounced)
                unannounced, at_once = 0, pace.choice((1, 1, 1, 7, 60))
        if unannounced:
            data.post(unannounced)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize(("capacity", "seed"), [(LEAST_CAPACITY, 1), (1 << 15, 2)])
def test_frames_with_checksums_between_two_processes(capacity: int, seed: int, frames: int) -> None:
    made, data, credit = Segment.create(ring_bytes(capacity)), Wake(), Wake()
    memory = memoryview(made.map)
    pid = os.fork()
    if pid == 0:
        produce(Ring(memory, capacity), data, credit, frames // 2, seed)
    ring, chosen, pace = Ring(memory, capacity), sizes(seed, capacity // 2), random.Random(seed + 2)
    number = announced = 0
    unreleased, at_once = 0, 1
    try:
        while number < frames // 2:
            if not announced:
                if unreleased:
                    ring.release()
                    credit.post()
                    unreleased = 0
                assert data.wait(WAIT_S), f"nothing behind frame {number}"
                announced = data.take()
            frame = ring.get()
            assert frame is not None, f"frame {number} was announced and is not there"
            payload = frame[HEAD_BYTES:]
            assert int.from_bytes(frame[:8], "little") == number
            assert payload.nbytes == next_size(chosen, ring.most_payload)
            assert int.from_bytes(frame[8:12], "little") == zlib.crc32(payload)
            number, announced, unreleased = number + 1, announced - 1, unreleased + 1
            if unreleased >= at_once:
                ring.release()
                credit.post()
                unreleased, at_once = 0, pace.choice((1, 1, 3, 20))
        assert ring.get() is None
    finally:
        _, status = os.waitpid(pid, 0)
        for wake in (data, credit):
            wake.close()
        os.close(made.fd)
    assert status == 0

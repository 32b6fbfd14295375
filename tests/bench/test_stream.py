"""How a stream is timed, and what the readers of /proc see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from zephon.bench import data, operators, proc, stream
from zephon.bench.spec import Spec

linux = pytest.mark.skipif(not proc.has_proc(), reason="reads /proc")


class Clock:
    """A clock that moves only when a batch comes."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(stream, "time", found)
    return found


def batches(clock: Clock, seconds: float, count: int) -> Iterator[int]:
    for _ in range(count):
        clock.now += seconds
        yield 10


def test_the_rate_is_what_came_by_the_time_it_took(clock: Clock) -> None:
    asked = []

    def count(batch: int) -> float:
        asked.append(batch)
        return batch

    spec = Spec(workload="w1", seconds=3.0, warm_s=1.0)
    sample = stream.timed(spec, lambda: batches(clock, 0.25, 1000), count)
    assert sample.first_batch_s == 0.25
    assert sample.rate == 40
    assert len(asked) == 1 + 4 + 12  # first, warm-up, measured


def test_a_stream_that_ends_starts_again(clock: Clock) -> None:
    starts = []

    def start() -> Iterator[int]:
        starts.append(clock.now)
        return batches(clock, 0.25, 3)

    sample = stream.timed(Spec(workload="w1", seconds=2.0, warm_s=0.0), start, float)
    assert sample.rate == 40
    assert len(starts) == 4
    with pytest.raises(RuntimeError, match="no batch at all"):
        stream.timed(Spec(workload="w1"), lambda: iter(()), float)


@linux
def test_cpu_and_memory_of_this_process_are_seen() -> None:
    before = proc.cpu_s(os.getpid())
    while proc.cpu_s(os.getpid()) == before:
        operators.spin(100_000)
    assert proc.cpu_by_kind(os.getpid(), "zephon")["trainer"] > before
    small = proc.pss_bytes(os.getpid())
    held = np.ones(20_000_000, np.uint8)
    assert proc.pss_bytes(os.getpid()) - small > 0.9 * held.nbytes
    assert proc.tree_pss_mb(os.getpid()) > 20
    assert proc.machine_cpu_s() > proc.cpu_s(os.getpid())


@linux
def test_a_tree_is_found_in_the_order_of_its_start() -> None:
    waits = [sys.executable, "-c", "input()"]
    children = [subprocess.Popen(waits, stdin=subprocess.PIPE) for _ in range(2)]
    pids = [child.pid for child in children]
    try:
        assert [pid for pid in proc.descendants(os.getpid()) if pid in pids] == pids
        assert all(proc.is_alive(pid) for pid in pids)
        kinds = proc.kinds(os.getpid(), "torch")
        assert kinds[os.getpid()] == "trainer"
        assert all(kinds[pid] == "worker" for pid in pids)
    finally:
        for child in children:
            child.communicate(b"\n")
    assert not any(proc.is_alive(pid) for pid in pids)


def test_records_are_as_large_as_said() -> None:
    record = data.text_record(5)
    assert record == {"id": 5, "text": data.texts()[5]}
    assert len(record["text"]) == 184
    assert len({data.text_record(row)["text"] for row in range(32)}) == 32
    assert operators.make_array({"id": 3})["image"].nbytes == operators.ARRAY_BYTES


def test_costs_are_as_said() -> None:
    assert set(data.costs_us("1ms")) == {1000.0}
    slow = data.costs_us("slow1pct")
    assert np.mean(slow == 10_000) == pytest.approx(0.01, rel=0.01)
    assert np.median(data.costs_us("lognormal")) == pytest.approx(100, rel=0.1)
    assert [data.CostRecords("100us", 2.0)(row)["loops"] for row in (0, 7)] == [200, 200]


def test_a_turn_makes_no_object() -> None:
    operators.spin(10_000)
    tracemalloc.start()
    try:
        operators.spin(50_000)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_more_turns_take_longer() -> None:
    begun = time.thread_time()
    operators.spin(1000)
    few = time.thread_time() - begun
    operators.spin(1_000_000)
    assert time.thread_time() - begun - few > few
    assert operators.calibrate() > 0

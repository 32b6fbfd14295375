"""L7, L8: processes die at named points in named ways: the bytes are the oracle's, or an error says who is to act.

By default every point is met by one or two ways of dying, and every way is met; `--long` runs all pairs.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import Enrich
from tests.process.helpers import children, digests, ids, launcher, line, lives, slow, to_the_error, wait_until
from zephon.errors import DataError, OperatorError, WorkerError
from zephon.testing.oracle import OracleLane
from zephon.testing.points import DEATHS, ENGINE_POINTS, LAUNCHER_POINTS, SLOW_S, WAYS, WORKER_POINTS, Faults

pytestmark = pytest.mark.law("L7")

ROWS, BATCH, LANES = 320, 4, 2
TIMES = 2  # deaths at a point: a task is halved, and halved again


def large(record: dict[str, Any]) -> dict[str, Any]:
    """So large that a task's result goes through the area beside the ring."""
    return {**record, "large": np.full(9000, record["id"])}


def work(**options: Any) -> zp.Pipeline:
    """Its batches fill slots of their own, so that most of it is still to be done behind the first batch."""
    settings = {"canonical_replicas": LANES, "prefetch_batches": 1, **options}
    return line(ROWS, Enrich(), large, batch=BATCH, **settings)


def of_oracle(pipeline: zp.Pipeline) -> list[str]:
    """The digests of all batches, lanes in turn (which have equally many)."""
    lanes = [[batch.digest for batch in OracleLane(pipeline, lane)] for lane in range(LANES)]
    return [digest for turn in zip(*lanes, strict=True) for digest in turn]


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return of_oracle(work(runner="inline"))


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as kit:
        yield kit


def pairs(points: tuple[str, ...], ways: tuple[str, ...], chosen: int) -> list[Any]:
    """All pairs; those beyond `chosen` a point wait for `--long`."""
    found = []
    for number, point in enumerate(points):
        own = [ways[(number * chosen + i) % len(ways)] for i in range(chosen)]
        found += [(point, way) if way in own else slow(point, way) for way in ways]
    return found


@pytest.mark.parametrize(("point", "way"), pairs(WORKER_POINTS, DEATHS, 1))
def test_a_worker_dies_at_a_point(point: str, way: str, faults: Faults, wanted: list[str]) -> None:
    """From its start on, and in the middle of the run."""
    faults.arm(point, way, times=TIMES)
    with work() as pipeline:
        iterator = iter(pipeline)
        found = [batch.digest() for batch in itertools.islice(iterator, 9)]
        if not faults.armed():
            faults.arm(point, way, skip=1)
        found += [batch.digest() for batch in iterator]
    assert found == wanted
    hits = faults.hits()
    assert len(hits) >= TIMES
    assert {hit.point for hit in hits} == {point}
    assert len({hit.pid for hit in hits}) == len(hits)


@pytest.mark.parametrize("restarting", ["starting", slow("setup"), slow("task"), slow("idle")])
def test_a_worker_dies_while_another_one_restarts(restarting: str, faults: Faults, wanted: list[str]) -> None:
    with work(parallelism=3) as pipeline:
        iterator = iter(pipeline)
        found = [next(iterator).digest()]
        faults.arm("operator", "KILL")
        faults.arm(restarting, "sibling", times=2)
        found += [batch.digest() for batch in iterator]
    assert found == wanted
    assert {"KILL", "sibling"} <= {hit.way for hit in faults.hits()}


def test_all_points_in_one_run(faults: Faults) -> None:
    """Several of them in turn, in one pipeline of two stages, whose second one is sent records."""
    options: dict[str, Any] = {"parallelism": {"map": 1, "large": 2}, "task_records": 16, "max_worker_retries": 1000}
    rows = 2000
    ways = itertools.cycle(DEATHS)
    left = list(WORKER_POINTS)
    with line(rows, Enrich(), large, batch=BATCH, **options) as pipeline:
        found: list[int] = []
        for batch in pipeline:
            found += ids([batch])
            if left and not faults.armed():
                faults.arm(left.pop(), next(ways), skip=len(left) % 3)
    assert found == list(range(rows))
    assert len(faults.hits()) >= len(WORKER_POINTS) - 3


def behind_the_first(batches: Iterable[zp.Batch], begin: Callable[[], None]) -> Iterator[zp.Batch]:
    """Calls `begin` once the first batch was taken."""
    for number, batch in enumerate(batches):
        yield batch
        if number == 0:
            begin()


@pytest.mark.parametrize(("point", "way"), pairs(ENGINE_POINTS + LAUNCHER_POINTS, DEATHS, 1))
def test_the_engine_or_the_launcher_dies_at_a_point(point: str, way: str, faults: Faults, wanted: list[str]) -> None:
    """An error within 5 s that says how to go on; the state of the last batch goes on exactly; nothing is left."""
    early = point in LAUNCHER_POINTS[:2]
    if early:
        faults.arm(point, way)
    found: list[str] = []
    tree: list[int] = []

    def begin() -> None:
        tree.extend([launcher(), *children(launcher())])
        faults.arm(point, way, skip=1 if point in ENGINE_POINTS else 0)
        if point == "launcher reaps":
            faults.arm("operator", "KILL")

    with work() as pipeline:
        error = to_the_error(behind_the_first(pipeline, begin), found, digests)
        assert isinstance(error, WorkerError)
        assert re.search(r"died .*load it to go on", str(error))
        assert point in [hit.point for hit in faults.hits()]
        state = pipeline.state_dict()
    assert wait_until(lambda: not any(map(lives, tree)), 5)
    assert bool(found) != early
    faults.disarm()
    with work() as again:
        again.load_state_dict(state)
        found += [batch.digest() for batch in again]
    assert found == wanted


def test_slow_reads_change_nothing(faults: Faults, wanted: list[str]) -> None:
    faults.arm("reading", "slow", times=4)
    began = time.monotonic()
    with work() as pipeline:
        assert [batch.digest() for batch in pipeline] == wanted
    assert len(faults.hits()) == 4
    assert time.monotonic() - began > SLOW_S


def test_a_read_that_fails_is_named_and_the_run_goes_on_from_there(faults: Faults, wanted: list[str]) -> None:
    with work() as pipeline:
        iterator = iter(pipeline)
        found = [next(iterator).digest()]
        faults.arm("reading", "fail")
        with pytest.raises(DataError, match=r"dataset 'toy', shard list, row \d+: .*a fault on purpose") as raised:
            found += [batch.digest() for batch in iterator]
        assert isinstance(raised.value.__cause__, OSError)
        state = pipeline.state_dict()
        delivered = sum(lane["samples"] for lane in state["lanes"].values()) // BATCH
    with work() as again:
        again.load_state_dict(state)
        assert wanted[:delivered] + [batch.digest() for batch in again] == wanted


class Hungry:
    """Asks for more memory than its process may have, at one id."""

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 37:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
            bytearray(1 << 40)
        return record


def test_memory_that_an_operator_cannot_have_is_its_error() -> None:
    with line(60, Hungry()) as pipeline, pytest.raises(MemoryError) as raised:
        list(pipeline)
    assert isinstance(raised.value, OperatorError)
    wanted = r"operator 'map' failed on .* row 37: MemoryError: the address space of a process is 2,147,483,648 bytes "
    assert re.search(wanted + r"here; raise that \(ulimit -v\), or lower ring_bytes, ", str(raised.value))


class Leaves:
    """Ends by SystemExit at one id: an exception of the user's, not a death."""

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 37:
            raise SystemExit(3)
        return record


class Threads:
    """Starts a thread for every record, which ends: some with a result, some by SystemExit, some by an exception."""

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        import _thread
        import threading

        made: list[int] = []

        def count() -> None:
            made.append(record["id"])
            if record["id"] % 2:
                _thread.exit()

        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
        return {**record, "made": made[0]}


class LosesMainThread:
    """Once, at one id: the main thread is gone, and another one stays, as when a C library calls pthread_exit."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "lost")

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 20 and not os.path.exists(self.path):
            import ctypes
            import threading

            open(self.path, "w").close()
            library, stays = ctypes.CDLL(None), threading.Event()
            threading.Thread(target=lambda: (stays.set(), library.pause()), daemon=True).start()
            stays.wait()
            WAYS["thread"]()
        return record


def test_a_worker_whose_main_thread_alone_ends_is_replaced(tmp_path: Path) -> None:
    began = time.monotonic()
    with line(64, LosesMainThread(tmp_path)) as pipeline:
        assert ids(pipeline) == list(range(64))
    assert (tmp_path / "lost").exists()
    assert time.monotonic() - began < 8  # a start, and up to 5 s


def test_sys_exit_of_an_operator_is_its_error() -> None:
    with line(60, Leaves()) as pipeline, pytest.raises(OperatorError, match=r"row 37.*SystemExit"):
        list(pipeline)


class LeavesInSetup(zp.Operator):
    def setup(self) -> None:
        raise SystemExit(0)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def test_sys_exit_of_a_setup_is_its_error() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(8)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset])).apply(LeavesInSetup()).batch(4)
    with (
        pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running,
        pytest.raises(OperatorError, match=r"'apply' failed on setup\(\).*SystemExit"),
    ):
        list(running)


def test_threads_of_an_operator_may_end() -> None:
    with line(60, Threads()) as pipeline:
        assert ids(pipeline) == list(range(60))


def test_little_shared_memory(faults: Faults, wanted: list[str]) -> None:
    """Rings fit, and large results go through them, as no block of the area can be had."""
    faults.short_shm(800_000)
    with work(ring_bytes=4096, task_records=32) as pipeline:
        assert [batch.digest() for batch in pipeline] == wanted


def test_too_little_shared_memory(faults: Faults) -> None:
    faults.short_shm(100_000)
    with work() as pipeline, pytest.raises(zp.errors.ConfigError, match=r"no room for \d+ MiB of shared memory"):
        next(iter(pipeline))


def test_without_the_kit_no_point_is_there(tmp_path: Path) -> None:
    """No process below the trainer has loaded it."""

    def loaded(record: dict[str, Any]) -> dict[str, Any]:
        import sys

        return {**record, "loaded": "zephon.testing.points" in sys.modules}

    with line(16, loaded) as pipeline:
        assert not any(flag for batch in pipeline for flag in batch["loaded"])
    with Faults(), line(16, loaded) as pipeline:
        assert all(flag for batch in pipeline for flag in batch["loaded"])


def test_a_board_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEPHON_FAULTS", str(tmp_path / "none"))
    with line(16) as pipeline, pytest.raises(zp.errors.ConfigError, match="unset that variable"):
        list(pipeline)

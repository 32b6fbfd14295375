"""L1, L7: large arrays that workers write into batch slots themselves: the bytes are the oracle's, whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.helpers import children, launcher, slow, wait_until
from zephon.ipc.columns import make_columns
from zephon.ipc.in_slots import Places, SlotWriter
from zephon.plan.limits import aligned
from zephon.testing.oracle import OracleLane
from zephon.testing.points import DEATHS, Faults

pytestmark = pytest.mark.law("L1")

SIZE = 70_000  # bytes of a row: large enough to have a place
ROWS = 700
DROPPED = {180, 181, 190, 520}  # far enough apart that rows before and behind have places


def images(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"], "x": np.full(SIZE, record["id"] % 251, np.uint8)}


def other_shapes(record: dict[str, Any]) -> dict[str, Any]:
    """Shape, dtype and what is large change, some of them inside of a batch, and come back."""
    n = record["id"]
    part = n // 148 % 4
    shape, dtype = [((SIZE,), "u1"), ((2, SIZE // 2), "u1"), ((SIZE // 4,), "f4"), ((9,), "u1")][part]
    return {"id": n, "x": np.full(shape, n % 251, dtype), "y": np.full((SIZE, 1 + (part == 3)), n % 251, np.uint8)}


def mixed(record: dict[str, Any]) -> dict[str, Any]:
    """Large and small, text, ragged, nested; and large ones that do not lie in one piece, or of another byte order."""
    n = record["id"]
    made = {
        "id": n,
        "x": np.full((SIZE, 2), n % 251, np.uint8)[:, 0],
        "big-endian": np.full(SIZE // 4, n, ">u4"),
        "fortran": np.asfortranarray(np.arange(n, n + SIZE).reshape(7, -1)),
        "text": f"record {n}" * (n % 5),
        "small": np.array([n, -n]),
        "ragged": np.arange(n % 7),
        "nested": {"n": [n]},
    }
    return made if n % 50 else {**made, "now and then": np.zeros(SIZE, np.uint8)}


def only_some(record: dict[str, Any]) -> bool:
    return record["id"] not in DROPPED


def several(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [images({"id": record["id"] * 2 + i}) for i in range(1 + (record["id"] in DROPPED))]


def fails_rarely(record: dict[str, Any]) -> dict[str, Any]:
    if record["id"] in DROPPED:
        raise ValueError("a bad record")
    return images(record)


MAKE: dict[str, Callable[[zp.Pipeline], zp.Pipeline]] = {
    "one field": lambda p: p.map(images),
    "other shapes": lambda p: p.map(other_shapes),
    "mixed": lambda p: p.map(mixed),
    "filtered": lambda p: p.filter(only_some).map(images),
    "several": lambda p: p.flat_map(several),
    "skipped": lambda p: p.map(fails_rarely, on_error="skip"),
    "a second stage": lambda p: p.filter(only_some).map(images, name="last"),
    "grouped": lambda p: p.shuffle(16).map(images),
}


def made(what: str, rows: int, batch: int, lanes: int = 1, **options: Any) -> zp.Pipeline:
    if what == "a second stage":
        options["parallelism"] = {"only_some": 1, "last": 2}
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(rows)])
    pipeline = MAKE[what](zp.Pipeline(zp.StaticMixture([dataset], seed=1, shuffle="none", chunk_size=16))).batch(batch)
    return pipeline.options(
        **{"runner": "process", "parallelism": 2, "canonical_replicas": lanes, "task_records": 6, **options}
    )


def of_oracle(pipeline: zp.Pipeline, lanes: int) -> list[list[str]]:
    inline = pipeline.options(runner="inline")
    return [[batch.digest for batch in OracleLane(inline, lane)] for lane in range(lanes)]


def by_lane(batches: Iterator[zp.Batch], lanes: int) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(lanes)]
    for batch in batches:
        found[batch.lane_id].append(batch.digest())
    return found


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as kit:
        yield kit


@pytest.mark.parametrize(
    ("what", "batch", "lanes", "options"),
    [
        ("one field", 8, 1, {"task_records": 5}),
        ("one field", 7, 3, {}),
        ("one field", 16, 1, {"task_records": 40, "parallelism": 1}),
        slow("one field", 1, 1, {}),
        slow("one field", 8, 8, {"parallelism": 3}),
        slow("one field", 5, 2, {"prefetch_batches": 9, "task_records": None}),
        ("other shapes", 6, 1, {}),
        slow("other shapes", 8, 2, {"task_records": 3}),
        ("mixed", 5, 2, {}),
        ("filtered", 8, 1, {}),
        slow("several", 8, 2, {}),
        slow("skipped", 6, 1, {"task_records": 4}),
        slow("a second stage", 8, 2, {}),
        slow("grouped", 8, 2, {}),
    ],
)
def test_bytes(what: str, batch: int, lanes: int, options: dict[str, Any], faults: Faults) -> None:
    """And some rows were written to slots, as the kit was told by a worker; behind a shuffle none are."""
    faults.arm("row", "note")
    with made(what, ROWS, batch, lanes, **options) as pipeline:
        found = by_lane(iter(pipeline), lanes)
    assert found == of_oracle(pipeline, lanes)
    assert len(faults.hits()) == (what != "grouped")


def test_a_restart_in_the_middle() -> None:
    """The first records behind it may have been delivered: they have no place."""
    with made("one field", 160, 4, 2, task_records=5) as pipeline:
        whole = [batch.digest() for batch in pipeline]
    with made("one field", 160, 4, 2, task_records=5) as pipeline:
        iterator = iter(pipeline)
        first = [next(iterator).digest() for _ in range(7)]
        state = pipeline.state_dict()
    with made("one field", 160, 4, 2, task_records=11) as pipeline:
        pipeline.load_state_dict(state)
        assert first + [batch.digest() for batch in pipeline] == whole


@pytest.mark.law("L7")
@pytest.mark.parametrize("way", [way if way in ("KILL", "thread") else slow(way) for way in DEATHS])
def test_a_worker_dies_in_the_middle_of_a_row(way: str, faults: Faults) -> None:
    with made("one field", 400, 8, 2) as pipeline:
        iterator = iter(pipeline)
        found = [next(iterator)]
        faults.arm("row", way, times=3, skip=1)
        digests = by_lane(iter([*found, *iterator]), 2)
    assert digests == of_oracle(pipeline, 2)
    assert len(faults.hits()) == 3


@pytest.mark.law("L7")
def test_rows_of_a_worker_that_stood_still_are_its_own(faults: Faults) -> None:
    """Stopped in the middle of a row and killed: by the time that others write there, it can no more."""
    with made("one field", 300, 8) as pipeline:
        iterator = iter(pipeline)
        found = [next(iterator).digest()]
        faults.arm("row", "note")
        found += [batch.digest() for batch in islice(iterator, 6)]
        pid = wait_until(faults.hits, what="a row")[0].pid
        assert pid in children(launcher())
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        found += [batch.digest() for batch in iterator]
    assert [found] == of_oracle(pipeline, 1)


@pytest.mark.parametrize("keep", ["all", "every third"])
def test_a_trainer_that_keeps_batches(keep: str) -> None:
    """Case A20: slots that it holds are written to by nobody, and the rest goes on."""
    kept = []
    with made("one field", 240, 4, prefetch_batches=1) as pipeline:
        for number, batch in enumerate(pipeline):
            if keep == "all" or number % 3 == 0:
                kept.append((number, batch))
        del batch
    want = of_oracle(pipeline, 1)[0]
    assert [batch.digest() for _, batch in kept] == [want[number] for number, _ in kept]
    assert len(kept) >= len(want) // 3


def test_where_slots_cannot_be_mapped(faults: Faults) -> None:
    """A system that hides /proc: rows travel as all others do."""
    faults.arm("row", "note")
    with made("no proc", 100, 8) as pipeline:
        found = by_lane(iter(pipeline), 1)
    assert found == of_oracle(pipeline, 1)
    assert not faults.hits()


class HideProc:
    """From the worker that it runs in."""

    def __init__(self) -> None:
        self.of_the_test = os.getpid()

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        from zephon.ipc import in_slots

        real = os.open

        def hidden(path: Any, *rest: Any, **settings: Any) -> int:
            if str(path).startswith("/proc/"):
                raise PermissionError(path)
            return real(path, *rest, **settings)

        if os.getpid() != self.of_the_test and in_slots.os is os:
            in_slots.os = type("os", (), {"open": staticmethod(hidden), "close": os.close, "O_RDWR": os.O_RDWR})  # type: ignore[assignment]
        return images(record)


MAKE["no proc"] = lambda p: p.map(HideProc())


@pytest.mark.parametrize(
    ("most", "size", "records"),
    [(13, 16, 8), (40, 16, 32), (16, 16, 16), (13, 17, 13), (6, 30, 6), (1, 16, 1)],
)
def test_tasks_end_where_batches_end(most: int, size: int, records: int) -> None:
    """Where that makes them at most half as large."""
    assert aligned(most, size) == records


def test_another_file_under_the_number_of_a_slot_is_not_touched(tmp_path: Path) -> None:
    """The engine is dead, its process number is another program's, and that has a file open there."""
    path = tmp_path / "precious"
    path.write_bytes(bytes(1 << 20))
    columns = make_columns([images({"id": 1})])
    with open(path, "r+b") as file:
        stat = os.fstat(file.fileno())
        field = ["x", "|u1", [SIZE], 0]
        for inode, is_it in ((stat.st_ino + 1, False), (stat.st_ino, True)):
            slot = [1, file.fileno(), 1 << 20, stat.st_dev, inode]
            SlotWriter().put(columns, Places(os.getpid(), [slot], [[1, 0, 1]], [field]))
            assert any(path.read_bytes()) == is_it

"""Records that are groups: what goes wrong with one is told with all of its rows, and the remedy helps."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import Die, wait_for
from tests.process.helpers import ids, slow, to_the_error
from tests.process.test_stalls import WARN, Warned, goes_on, warned
from zephon.errors import DataError, OperatorError, WorkerError
from zephon.record import Block, Group, Lineage, Pointers
from zephon.runners.who import describe_handle, leave_out

__all__ = ["warned"]  # a fixture

Records = list[dict[str, Any]]
ROWS = range(32, 40)
NAMED = "a group of 8 records: dataset 'toy', shard list, row 32, 33, 34, 35, 36, 37, 38, 39"


def source(exclude: list[tuple[str, int]] = []) -> zp.Pipeline:  # noqa: B006
    """Ids 0 to 63 on one lane."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)], exclude=exclude)
    return zp.Pipeline(zp.StaticMixture([dataset], seed=1, shuffle="none", chunk_size=16))


def run(pipeline: zp.Pipeline, runner: str = "process", **options: Any) -> zp.Pipeline:
    """Batches of 4 out of two workers."""
    settings = {"runner": runner, "parallelism": 2, "canonical_replicas": 1, "task_records": 4, **options}
    return pipeline.batch(4).options(**settings)


class At37:
    """Does something to a group in which there is one id."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def __call__(self, records: Records) -> Records:
        if any(record["id"] == 37 for record in records):
            self.do()
        return records


class Exit:
    def __call__(self) -> None:
        os._exit(3)


class Segfault:
    def __call__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()


class Fail:
    def __call__(self) -> None:
        raise KeyError("no such key")


class Wait:
    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self) -> None:
        wait_for(Path(self.folder, "go on"))


@pytest.mark.law("L7")
@pytest.mark.parametrize(("do", "how"), [(Exit(), "exit status 3"), slow(Segfault(), "SIGSEGV")])
def test_a_group_that_kills_is_named_with_its_rows_and_the_remedy_works(do: Callable[[], None], how: str) -> None:
    """All other records come, from the state that was kept, in groups of others."""
    with run(source().map_batches(At37(do), 8)) as pipeline:
        found: list[int] = []
        error = to_the_error(iter(pipeline), found)
        state = pipeline.state_dict()
    assert isinstance(error, WorkerError)
    assert found == list(range(32))
    text = str(error)
    assert f"lane 0, {NAMED} killed its worker 3 times, alone, in 'map_batches': {how}; " in text
    excluded = eval(re.search(r"exclude=(\[.*?\])\)", text)[1])  # type: ignore[index]
    assert excluded == [("list", row) for row in ROWS]
    allowed = eval(re.search(r"the state still loads, with allow=(\[.*\])", text)[1])  # type: ignore[index]
    with run(source(excluded).map_batches(At37(do), 8)) as mended:
        mended.load_state_dict(state, allow=allowed)
        assert found + ids(mended) == [i for i in range(64) if i not in ROWS]


@pytest.mark.law("L8")
@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_an_exception_on_a_group_names_its_rows(runner: str) -> None:
    with run(source().map_batches(At37(Fail()), 8), runner) as pipeline:
        error = to_the_error(iter(pipeline), [])
    assert isinstance(error, OperatorError)
    assert isinstance(error, KeyError)
    assert error.where == f"lane 0, {NAMED}"
    assert str(error) == f"operator 'map_batches' failed on lane 0, {NAMED}: KeyError: 'no such key'"


class Child:
    """Raises on the second record of the group that has one id."""

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 33:
            raise ValueError("bad")
        return record


class Same:
    def __call__(self, records: Records) -> Records:
        return records


class Unreadable:
    """Raises an error of ours on one id, as a check of the user's own may."""

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 33:
            raise DataError("not to be read")
        return record


@pytest.mark.law("L8")
@pytest.mark.parametrize("runner", ["inline", slow("threads"), "process"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_child_of_a_group_is_told_with_the_rows_of_the_group(runner: str, apart: bool) -> None:
    """In the same stage, and in a later one, to which the child alone is sent."""
    for function, told in ((Child(), "failed on"), (Unreadable(), "")):
        options = {"parallelism": {"map_batches": 2, "map": 1}} if apart and runner != "inline" else {}
        with run(source().map_batches(Same(), 8).map(function), runner, **options) as pipeline:
            error = to_the_error(iter(pipeline), [])
        child = "" if options else "child 1 of "
        assert f"lane 0, {child}{NAMED}" in str(error)
        assert f"operator 'map' {told}".rstrip() in str(error)


class Pairs(zp.Accumulator):
    """Pairs of records, built where a worker is about to get them."""

    method = "pairs"

    def __init__(self) -> None:
        self.held: dict[int, list[Any]] = {}

    def open(self, lane: int, key: Any) -> None:
        self.held[lane] = []

    def push(self, lane: int, refs: Any) -> zp.Emitted:
        emitted = zp.Emitted()
        self.held[lane] += [(cursor, 0, length) for cursor, length, _ in refs]
        if len(self.held[lane]) == 2:
            emitted.add(0, self.held[lane])
            self.held[lane] = []
        return emitted

    def flush(self, lane: int) -> zp.Emitted:
        return zp.Emitted()

    def build(self, parts: Any) -> dict[str, Any]:
        return {"id": parts[0][0]["id"], "other": parts[1][0]["id"]}


@pytest.mark.law("L7")
def test_a_pair_of_ones_own_that_kills_a_later_stage() -> None:
    with run(source().apply(Pairs()).map(Die(36, 3))) as pipeline, pytest.raises(WorkerError) as raised:
        list(pipeline)
    assert "a group of 2 records: dataset 'toy', shard list, row 36, 37 killed" in str(raised.value)
    assert "exclude=[('list', 36), ('list', 37)]" in str(raised.value)


@pytest.mark.law("L8")
def test_a_stall_on_a_group_is_told_with_its_rows(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    with run(source().map_batches(At37(Wait(tmp_path)), 8), **WARN) as pipeline:
        assert ids(pipeline) == list(range(64))
    assert re.match(r"worker \d: operator 'map_batches' has been on lane 0, ", warned.texts[0])
    assert f"{NAMED} for " in warned.texts[0]


@pytest.mark.law("L10")
@pytest.mark.parametrize("runner", ["inline", "process"])
def test_skip_drops_the_group_and_counts_its_records(runner: str) -> None:
    with run(source().map_batches(At37(Fail()), 8, on_error="skip"), runner) as pipeline:
        assert ids(pipeline) == [i for i in range(64) if i not in ROWS]
        assert pipeline.counts()["dropped"] == {0: {"map_batches.error": 8}}


# -- the words -------------------------------------------------------------------------------------------------------


class Joins:
    """Stands for an accumulator."""


def group_of(*rows: tuple[int, int]) -> Group:
    """A group of records of these (dataset, row)."""
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    items = Pointers(columns[0].astype(np.int32), columns[1], np.zeros(len(rows), np.int64))
    block = Block([{}] * len(rows), Lineage(items, range(len(rows))))
    return Group(Joins(), [(block[i], 0, 1) for i in range(len(rows))])


DATASETS = [zp.Dataset.from_list(name, [{"id": i} for i in range(200)]) for name in "ab"]


def test_rows_are_named_by_dataset_and_the_others_counted() -> None:
    handle = group_of(*((0, i) for i in range(20)), (1, 5), (0, 3))
    assert describe_handle(DATASETS, handle) == (
        "a group of 22 records: dataset 'a', shard list, row 0, 1, 2, 3, 4, 5, 6, 7 and 12 more; "
        "dataset 'b', shard list, row 5"
    )


def test_rows_are_named_by_shard(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"id": 1}\n' * 3)
    dataset = zp.Dataset.from_path("files", tmp_path)
    told = describe_handle([dataset], group_of((0, 1), (0, 4), (0, 2), (0, 5)))
    assert told == "a group of 4 records: dataset 'files', shard a.jsonl, row 1, 2; shard b.jsonl, row 1, 2"


def test_a_group_of_one_is_its_record() -> None:
    assert describe_handle(DATASETS, group_of((1, 7))) == "dataset 'b', shard list, row 7"


def test_rows_of_two_datasets_are_left_out_of_both() -> None:
    told = leave_out(DATASETS, {0: [1], 1: [2, 3]}, False)
    assert "Dataset(..., exclude=[('list', 1)]) of 'a' and Dataset(..., exclude=[('list', 2), ('list', 3)]) of" in told
    assert told.endswith("allow=['datasets.a.exclude', 'datasets.b.exclude']")


def test_too_many_rows_are_not_listed() -> None:
    told = leave_out(DATASETS, {0: list(range(65))}, False)
    assert told.startswith("try its rows in smaller groups")
    assert len(told) < 250

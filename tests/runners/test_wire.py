"""Tasks and results as messages: what a worker gets and gives is what was handed over, whatever its shape."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.values import record_lists, same
from tests.laws.harness import examples
from zephon.errors import DataError, OperatorError, ZephonError, operator_error
from zephon.flow.task import Out, Slice, Task
from zephon.record import Block, Group, Handle, Lineage, Pointers, first_origin, origins_of, record_of, start_of
from zephon.runners.wire import read_report, read_task, write_report, write_result, write_task


def joined(parts: list[Any]) -> bytearray:
    return bytearray(b"".join(bytes(part) for part in parts))


def no_blame(number: int, index: int, error: Exception) -> ZephonError:
    raise AssertionError(f"slice {number}, record {index}: {error}")


class Plain:
    """Records as they are."""

    def build(self, handle: Handle) -> Any:
        return record_of(handle)

    def unsendable_build(self, handle: Handle, error: Exception) -> ZephonError:
        raise AssertionError(str(error))


@st.composite
def pointer_slices(draw: st.DrawFn) -> list[Slice]:
    """Slices of one or more lanes, also empty ones that carry a mark alone."""
    slices = []
    for lane in draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)):
        size = draw(st.integers(0, 5))
        rows = draw(st.lists(st.integers(0, 2**62), min_size=size, max_size=size))
        datasets = draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size))
        epochs = draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size))
        items = Pointers(np.array(datasets, np.int32), np.array(rows, np.int64), np.array(epochs, np.int64))
        slices.append(Slice(lane, draw(st.integers(0, 3)), items, range(size), size - 1))
    return slices


@examples(0.4)
@given(pointer_slices(), st.integers(0, 2**40))
def test_tasks_of_pointers(slices: list[Slice], seq: int) -> None:
    raw = joined(write_task(seq, slices, Plain()))
    task, _ = read_task(raw)
    raw[:] = bytes(len(raw))  # nothing in the task refers to the message
    assert task.seq == seq
    assert task.num_records == sum(map(len, slices))
    for got, wanted in zip(task.slices, slices, strict=True):
        assert (got.lane, got.pass_index, len(got)) == (wanted.lane, wanted.pass_index, len(wanted))
        assert isinstance(got.items, Pointers)
        assert isinstance(wanted.items, Pointers)
        for name in ("dataset", "row", "epoch"):
            assert getattr(got.items, name).tolist() == getattr(wanted.items, name).tolist()


def test_pointers_of_a_source_of_the_users_own() -> None:
    """Other dtypes, strides and broadcasts than those of our sources."""
    items = Pointers(np.broadcast_to(np.int64(3), 4), np.arange(8)[::-2], np.zeros(4, np.uint8))
    (got,) = read_task(joined(write_task(0, [Slice(0, 0, items, range(4), 3)], Plain())))[0].slices
    assert isinstance(got.items, Pointers)
    assert got.items.dataset.tolist() == [3] * 4
    assert got.items.row.tolist() == [7, 5, 3, 1]
    assert got.items.epoch.tolist() == [0] * 4


def block_of(records: list[dict[Any, Any]], path: bool = False) -> Block:
    size = len(records)
    items = Pointers(np.arange(size, dtype=np.int32), np.arange(size) * 10, np.arange(size) + 1)
    return Block(records, Lineage(items, range(size), [(i, 2) for i in range(size)] if path else None))


@examples(0.4)
@given(st.lists(record_lists(), min_size=1, max_size=3), st.booleans())
def test_tasks_of_records(lists: list[list[dict[Any, Any]]], path: bool) -> None:
    """What a later stage is sent: the records, and who they are."""
    blocks = [block_of(records, path) for records in lists]
    slices = [
        Slice(lane, 1, [block[i] for i in range(len(block))], range(len(block)), len(block) - 1)
        for lane, block in enumerate(blocks)
    ]
    raw = joined(write_task(3, slices, Plain()))
    task, _ = read_task(raw)
    raw[:] = bytes(len(raw))
    for got, wanted in zip(task.slices, slices, strict=True):
        assert isinstance(got.items, list)
        assert isinstance(wanted.items, list)
        for a, b in zip(got.items, wanted.items, strict=True):
            assert same(dict(record_of(a)), dict(record_of(b)))
            assert origins_of(a) == origins_of(b)
            assert start_of(a) == 0


class Joins:
    """An accumulator's part in a task: builds one record of several."""

    def build(self, parts: list[tuple[dict[str, Any], int, int]]) -> dict[str, Any]:
        return {"ids": [record["id"] for record, _, _ in parts], "cut": [(start, stop) for _, start, stop in parts]}


def test_groups_are_built_on_the_way() -> None:
    block = block_of([{"id": i} for i in range(4)])
    start, stop = (cast(int, np.int64(place)) for place in (5, 9))
    group = Group(Joins(), [(block[2], start, stop), (block[0], 0, 1)])
    (got,) = read_task(joined(write_task(0, [Slice(7, 0, [group, block[1]], range(2), 1)], Plain())))[0].slices
    first, second = got.items  # type: ignore[misc]
    assert record_of(first) == {"ids": [2, 0], "cut": [(5, 9), (0, 1)]}
    assert first_origin(first) == (2, 20, 3, ())
    assert start_of(first) == 5
    assert record_of(second) == {"id": 1}


@st.composite
def outs(draw: st.DrawFn) -> list[Out]:
    """Results of several slices: whole or with gaps, with paths, lengths, drops and failures."""
    measured = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        records = draw(record_lists()) if draw(st.integers(0, 3)) else []
        size = len(records)
        index: Any = range(size)
        if draw(st.booleans()):
            index = sorted(draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)))
        path: list[tuple[int, ...]] | None = [(i, 1) for i in range(size)] if draw(st.booleans()) else None
        lengths = draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size)) if measured else None
        drops = draw(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["a.filtered", "ß.x"]), st.integers(1, 9))))
        failed = draw(st.booleans())
        error = operator_error(draw(st.sampled_from([ValueError("v"), KeyError(1)])), "op", "row 3")
        found.append(Out(records, index, path, lengths, drops, (size, error) if failed else None))
    return found


@examples(0.4)
@given(outs(), st.dictionaries(st.sampled_from(["fetch", "map"]), st.floats(0, 9)))
def test_results(wanted: list[Out], seconds: dict[str, float]) -> None:
    result = read_report(joined(write_result(wanted, seconds, no_blame)))
    assert result is not None
    found, measured = result
    assert measured == seconds
    for got, out in zip(found, wanted, strict=True):
        assert len(got.records) == len(out.records)
        assert all(map(same, map(dict, got.records), map(dict, out.records)))
        assert list(got.index) == list(out.index)
        assert isinstance(got.index, range) == isinstance(out.index, range)
        assert (got.path, got.lengths, got.drops) == (out.path, out.lengths, out.drops)
        assert (got.failure is None) == (out.failure is None)
        if got.failure and out.failure:
            assert got.failure[0] == out.failure[0]
            assert str(got.failure[1]) == str(out.failure[1])
            assert isinstance(got.failure[1], type(out.failure[1].__cause__))


def blame(number: int, index: int, error: Exception) -> ZephonError:
    return DataError(f"slice {number}, record {index}: {type(error).__name__}")


def test_a_slice_ends_before_its_first_record_that_cannot_be_sent() -> None:
    """The other slices are whole; what came before it in its slice is delivered."""
    good = [{"x": i} for i in range(4)]
    bad: list[dict[str, Any]] = [{"x": 0}, {"x": 1}, {"x": threading.Lock()}, {"x": 3}]
    wanted = [
        Out(list(good), range(4)),
        Out(bad, [0, 0, 5, 6], [(0,), (1,), (), ()], [7, 8, 9, 10], [(1, "a.b", 1)], (9, DataError("later"))),
        Out(list(good), range(4), failure=(4, DataError("own"))),
    ]
    found, _ = read_report(joined(write_result(wanted, {}, blame)))  # type: ignore[misc]
    assert [len(out.records) for out in found] == [4, 2, 4]
    assert (list(found[1].index), found[1].path, found[1].lengths) == ([0, 0], [(0,), (1,)], [7, 8])
    assert found[1].failure is not None
    assert found[1].failure[0] == 5
    assert str(found[1].failure[1]) == "slice 1, record 5: TypeError"
    assert str(found[2].failure[1]) == "own"  # type: ignore[index]


def test_amounts_that_are_numpy_numbers() -> None:
    wanted = [Out([{"x": 1}], range(1), None, [np.int64(3)], [(0, "a.b", np.int64(2))])]  # type: ignore[list-item]
    found, _ = read_report(joined(write_result(wanted, {}, no_blame)))  # type: ignore[misc]
    assert found[0].drops == [(0, "a.b", 2)]
    assert found[0].lengths == [3]


def test_reports() -> None:
    assert read_report(joined(write_report("ready"))) is None
    error = operator_error(FileNotFoundError(2, "no model"), "tokenize", "setup()")
    with pytest.raises(OperatorError, match="tokenize") as raised:
        read_report(joined(write_report("failed", error)))
    assert isinstance(raised.value, FileNotFoundError)


def test_an_empty_task_and_an_empty_result() -> None:
    empty = Pointers(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
    task, _ = read_task(
        joined(write_task(1, [Slice(0, 0, empty, range(0), -1), Slice(1, 0, empty, range(0), -1)], Plain()))
    )
    assert isinstance(task, Task)
    assert [len(piece) for piece in task.slices] == [0, 0]
    found, _ = read_report(joined(write_result([Out([], range(0)), Out([], [])], {}, no_blame)))  # type: ignore[misc]
    assert [len(out.records) for out in found] == [0, 0]

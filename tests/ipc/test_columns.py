"""Records as columns: what goes in comes out, type by type, and batches cut from columns are those cut from records."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.values import VALUES, record_lists, same
from tests.laws.harness import examples
from zephon.batch import LazyList
from zephon.ipc.codec import dump
from zephon.ipc.columns import Columns, make_column, make_columns
from zephon.ipc.message import ALIGNMENT, describe_columns, read_message, rebuild_columns, write_message
from zephon.ops.batch import stack_records
from zephon.record import MISSING

Records = list[dict[Any, Any]]


def message(columns: Columns) -> bytearray:
    description, buffers = describe_columns(columns)
    return bytearray(b"".join(bytes(part) for part in write_message(description, buffers)))


def carried(records: Records) -> Columns:
    """Through a message and back."""
    return rebuild_columns(*read_message(message(make_columns(records))))


def check(records: Records) -> None:
    got = carried(records)
    assert len(got) == len(records)
    for before, after in zip(records, got, strict=True):
        assert type(after) is dict or type(after) is type(before)
        assert same(dict(before), dict(after)), (before, after)


@examples(0.5)
@given(record_lists())
def test_any_records_come_back_as_they_were(records: Records) -> None:
    check(records)


@examples(0.5)
@given(st.lists(VALUES, min_size=1, max_size=4))
def test_any_values_under_one_name_come_back_as_they_were(values: list[Any]) -> None:
    check([{"x": value} for value in values])


@examples(0.5)
@given(record_lists(), st.data())
def test_cuts_and_slices_are_the_records_there(records: Records, data: st.DataObject) -> None:
    columns = carried(records)
    start = data.draw(st.integers(0, len(records)))
    stop = data.draw(st.integers(start, len(records)))
    for piece in (columns.cut(start, stop), columns[start:stop], make_columns(records).cut(start, stop)):
        assert len(piece) == stop - start
        assert all(map(same, map(dict, piece), map(dict, records[start:stop])))
        again = rebuild_columns(*read_message(message(piece)))  # what a later stage is sent
        assert all(map(same, map(dict, again), map(dict, records[start:stop])))


def pieces_of(data: st.DataObject, count: int) -> list[tuple[list[Any], int, int]]:
    """Runs of one or more lists of records, as a batch is cut from several results."""
    pieces = []
    for _ in range(count):
        records = data.draw(record_lists(string_names=True))
        start = data.draw(st.integers(0, len(records) - 1))
        pieces.append((records, start, data.draw(st.integers(start + 1, len(records)))))
    return pieces


def decoded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: v.values() if isinstance(v, LazyList) else v for name, v in fields.items()}


def same_fields(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return set(a) == set(b) and all(same(a[name], b[name]) for name in a)


@examples(0.5)
@given(st.data(), st.integers(1, 3), st.booleans())
def test_a_batch_of_columns_is_the_batch_of_their_records(data: st.DataObject, count: int, alike: bool) -> None:
    pieces = pieces_of(data, count)
    if alike:
        pieces += [pieces[0]] * count
    columns = [(carried(records), start, stop) for records, start, stop in pieces]
    fields = Columns.collate(columns, np.empty)
    wanted = stack_records([dict(record) for records, start, stop in pieces for record in records[start:stop]])
    decode = stack_records([dict(records[i]) for records, start, stop in columns for i in range(start, stop)])
    assert same_fields(decode, wanted)
    if fields is not None:
        assert same_fields(decoded(fields), wanted), (decoded(fields), wanted)
        for value in fields.values():
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous
                assert value.dtype.isnative


def test_plain_records_take_the_short_way() -> None:
    """A batch of ordinary records must not be decoded, and text stays as it is until someone asks."""
    records = [{"id": i, "text": f"row {i}", "x": np.full(3, i), "f": i / 2} for i in range(8)]
    fields = Columns.collate([(carried(records), 1, 4), (carried(records), 0, 8)], np.empty)
    assert fields is not None
    assert isinstance(fields["text"], LazyList)
    assert fields["x"].shape == (11, 3)


ONE_BY_ONE: dict[str, list[Any]] = {
    "numpy text of several lengths": [np.str_("abc"), np.str_("abcdef")],
    "numpy bytes of several lengths": [np.bytes_(b"a"), np.bytes_(b"abc")],
    "voids of several lengths": [np.void(b"abc"), np.void(b"abcdef")],
    "times of several units": [np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-01T00:00:01", "ns")],
    "spans of several units": [np.timedelta64(1, "D"), np.timedelta64(1, "s")],
    "a number beyond 64 bits": [1, 2**64],
    "the ends of 64 bits": [2**63 - 1, -(2**63)],
    "true beside 1": [True, 1],
    "1 beside 1.0": [1, 1.0],
    "a surrogate": ["\ud800", "a"],
    "a negative zero": [-0.0, 0.0],
    "absent": [MISSING, MISSING],
    "0-d": [np.array(7), np.array(8)],
    "0-d big-endian": [np.array(7, ">i8"), np.array(8, ">i8")],
    "empty in one dimension": [np.empty((3, 0)), np.empty((0, 5))],
    "empty and ragged": [np.empty((3, 0)), np.empty((2, 0))],
    "big-endian and ragged": [np.arange(3, dtype=">i8"), np.arange(4, dtype=">i8")],
    "big-endian beside little": [np.arange(3, dtype=">i8"), np.arange(3, dtype="<i8")],
    "structured": [np.zeros(2, [("a", "i4")]), np.ones(2, [("a", "i4")])],
    "objects": [np.array([1, None], object), np.array(["x", ()], object)],
    "negative strides": [np.arange(6)[::-1], np.arange(6)[::-1]],
    "broadcast": [np.broadcast_to(np.arange(3), (4, 3))] * 2,
    "tuples": [(1, 2), (3,)],
    "none": [None, None],
    "large arrays": [np.arange(20_000, dtype=">f4"), np.arange(20_000, 40_000, dtype=">f4")],
    "large arrays, read backwards": [np.arange(20_000)[::-1], np.zeros(20_000, int)],
    "large 2-d arrays, transposed": [np.arange(30_000).reshape(100, 300).T, np.zeros((300, 100), int)],
    "with dtype metadata": [np.zeros(2, np.dtype("i4", metadata={"a": 1}))] * 2,
}


@pytest.mark.filterwarnings("ignore:metadata on a dtype:UserWarning")
@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_found_one_by_one(kind: str) -> None:
    records: Records = [{"x": value} for value in ONE_BY_ONE[kind]]
    check(records)
    columns = carried(records)
    fields = Columns.collate([(columns, 0, 1), (columns, 1, len(columns))], np.empty)
    assert fields is not None
    assert same_fields(decoded(fields), stack_records(records))


@pytest.mark.parametrize(
    "records",
    [
        [{}, {}],
        [{}, {"a": 1}],
        [{"": 1}],
        [{"\ud800": 1}],
        [{1: 2, None: 3, (1, "b"): 4}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{np.str_("a"): 1}],
    ],
)
def test_records_with_odd_fields(records: Records) -> None:
    check(records)


def test_arrays_keep_their_byte_order() -> None:
    for values in ([np.arange(3, dtype=">i8")] * 2, [np.arange(n, dtype=">f4") for n in (1, 2)]):
        assert [record["x"].dtype for record in carried([{"x": value} for value in values])] == [values[0].dtype] * 2


def test_no_records_at_all() -> None:
    columns = rebuild_columns(*read_message(message(make_columns([]))))
    assert len(columns) == 0
    assert list(columns) == []


def test_values_of_one_result_share_no_memory_with_each_other_or_the_sender() -> None:
    array = np.arange(4)
    columns = carried([{"x": array, "y": array, "r": array}, {"x": array, "y": array, "r": array[:2]}])
    first, second = columns
    first["x"][:] = 9
    first["r"][:] = 9
    assert second["x"].tolist() == [0, 1, 2, 3]
    assert first["y"].tolist() == [0, 1, 2, 3]
    assert second["r"].tolist() == [0, 1]
    assert array.tolist() == [0, 1, 2, 3]


@dataclasses.dataclass
class Holder:
    inside: Any


def test_values_of_local_classes_and_functions_travel() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

    two = 2
    records: Records = [{"x": Local(1), "f": lambda n: n + two}, {"x": Holder(3), "f": threading.Thread}]
    got = list(carried(records))
    assert got[0]["x"] == Local(1)
    assert type(got[0]["x"]) is Local
    assert got[0]["f"](5) == 7
    assert got[1]["f"] is threading.Thread


@pytest.mark.parametrize("make", [threading.Lock, lambda: (i for i in "ab"), threading.current_thread])
def test_what_cannot_be_sent_raises(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        make_columns([{"x": make()}])


@pytest.mark.parametrize("mode", ["r", "rb", "w"])
def test_an_open_file_is_never_sent(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with path.open(mode) as file, pytest.raises(TypeError, match="cannot pickle"):
        dump(Holder(file))


def test_buffers_are_aligned_and_views() -> None:
    columns = make_columns([{"a": 1, "b": "x", "c": np.arange(3, dtype="u1"), "d": 0.5}])
    raw = message(columns)
    _, buffers = read_message(raw)
    whole = np.frombuffer(raw, np.uint8)
    start = whole.__array_interface__["data"][0]
    for buffer in buffers:
        assert buffer.size == 0 or np.shares_memory(buffer, whole)
        assert (buffer.__array_interface__["data"][0] - start) % ALIGNMENT == 0


def test_a_column_needs_one_value_to_know_its_kind() -> None:
    assert make_column([True]).kind == "bool"
    assert make_column([1]).kind == "int"
    assert make_column(["a"]).kind == "str"
    assert make_column([np.int32(1)]).kind == "generic"
    assert make_column([None]).kind == "pickle"

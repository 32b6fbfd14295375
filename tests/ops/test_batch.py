"""batch: how samples become columns, and how lanes are cut into batches."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from zephon.ops.batch import stack_records

from ..cases.helpers import ids, list_of, on, pipeline, stream

WORKERS = [0, 2]


def column(*values: Any) -> Any:
    """What the values of one field become."""
    return stack_records([{"x": value} for value in values])["x"]


class Level(enum.IntEnum):
    LOW = 1


ARRAYS: list[tuple[list[Any], str]] = [
    ([1, 2, 3], "int64"),
    ([-(2**63), 2**63 - 1], "int64"),
    ([1.5, float("nan")], "float64"),
    ([True, False], "bool"),
    ([np.int64(1), np.int64(2)], "int64"),
    ([np.int8(1), np.int8(-2)], "int8"),
    ([np.float32(1), np.float32(2)], "float32"),
    ([np.True_, np.False_], "bool"),
    ([np.array(1, "u2"), np.array(2, "u2")], "uint16"),
    # a Python number counts as the type that it is stacked as
    ([1, np.int64(2)], "int64"),
    ([np.int64(1), 2], "int64"),
    ([1.0, np.float64(2)], "float64"),
    ([np.float64(1), 2.0], "float64"),
    ([True, np.False_], "bool"),
    ([np.array(1), 2], "int64"),
]


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_one_type_and_shape_is_an_array(number: int) -> None:
    values, dtype = ARRAYS[number]
    found = column(*values)
    assert isinstance(found, np.ndarray)
    assert found.dtype == dtype
    assert found.shape == (len(values),)
    np.testing.assert_array_equal(found, np.array(values))


LISTS: list[list[Any]] = [
    [1, 2.0],
    [1, True],
    [True, 1],
    [0.5, True],
    [1, 2**63],
    [2**70, 1],
    [-(2**63) - 1, 0],
    [1, None],
    [None, None],
    ["a", "b"],
    ["a", 1],
    [b"a", b"b"],
    [[1, 2], [3, 4]],
    [(1, 2), (3, 4)],
    [{"a": 1}, {"a": 2}],
    [{1}, {2}],
    [1 + 2j, 3j],
    [np.int64(1), np.int32(2)],
    [np.float32(1), 1.0],
    [np.int32(1), 1],
    [np.int64(1), 1.0],
    [np.int64(1), True],
    [np.zeros(2), np.zeros(3)],
    [np.zeros(2), np.zeros(2, "f4")],
    [np.zeros(2), [0.0, 0.0]],
    [np.zeros((2, 3)), np.zeros((3, 2))],
    [np.zeros(()), np.zeros(1)],
    [np.array(["a"]), np.array(["bb"])],
    [np.array([None]), np.array([1], object)],
    [1, "a", None, 2.0],
    [object, int],
]


@pytest.mark.parametrize("number", range(len(LISTS)))
def test_anything_else_is_the_list_of_values(number: int) -> None:
    values = LISTS[number]
    found = column(*values)
    assert isinstance(found, list)
    assert len(found) == len(values)
    for value, was in zip(found, values, strict=True):
        assert type(value) is type(was)
        np.testing.assert_equal(value, was)


def test_absent_fields() -> None:
    found = stack_records([{"a": 1}, {"b": 2}, {"a": 3, "b": None}])
    assert list(found) == ["a", "b"]
    assert found["a"] == [1, zp.MISSING, 3]
    assert found["b"] == [zp.MISSING, 2, None]
    assert found["a"][1] is zp.MISSING
    array = stack_records([{"a": np.zeros(2)}, {}])["a"]
    assert array[1] is zp.MISSING
    assert stack_records([{}, {}]) == {}


def test_fields_are_sorted_by_name() -> None:
    assert list(stack_records([{"b": 1, "B": 1, "a": 1, "é": 1, "10": 1, "9": 1, "": 1}])) == [
        "", "10", "9", "B", "a", "b", "é",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [">i8", ">f4", ">u2", ">c8", ">M8[s]", ">U3", [("a", ">i4")]])
def test_big_endian_becomes_native(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    found = column(array, array.copy())
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.dtype.isnative
    assert found.shape == (2, 2, 3)


def test_byte_orders_may_mix() -> None:
    """The order of bytes is no difference of type: both become native."""
    found = column(np.array([1, 2], ">i8"), np.array([3, 4], "<i8"))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[1, 2], [3, 4]]


def test_columns_are_contiguous_and_own_their_memory() -> None:
    a = np.arange(6).reshape(2, 3)
    for view in (a[::-1], a.T, a[:, ::2], np.broadcast_to(np.arange(3), (2, 3)), np.asfortranarray(a)):
        found = column(view, view)
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert min(found.strides) > 0
        assert not np.shares_memory(found, view)
        np.testing.assert_array_equal(found, [view, view])


SCALARS = st.one_of(
    st.integers(-(2**65), 2**65), st.floats(), st.booleans(), st.none(), st.text(max_size=2), st.binary(max_size=2)
)


@given(st.lists(SCALARS, min_size=1, max_size=6))
def test_no_value_is_ever_changed(values: list[Any]) -> None:
    found = column(*values)
    for value, was in zip(list_of(found), values, strict=True):
        assert type(value) is type(was)
        assert value == was or (value != value and was != was)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("lanes", [1, 3])
@given(num=st.integers(1, 40), size=st.integers(1, 15), drop_last=st.booleans())
def test_lanes_are_cut_by_count(workers: int, lanes: int, num: int, size: int, drop_last: bool) -> None:
    line = pipeline(num, chunk_size=4).batch(size, drop_last=drop_last).options(canonical_replicas=lanes)
    line = on(line, workers)
    found: dict[int, list[list[int]]] = {lane: [] for lane in range(lanes)}
    for batch in line:
        assert batch.num_samples == len(batch["id"])
        found[batch.lane_id].append(batch["id"].tolist())
    source = line._session.resolved.source
    for lane in range(lanes):
        rows = [row for i in range(num) for row in source.chunk(lane, lanes, 0, i).row.tolist()]
        rest = len(rows) % size if drop_last else 0
        kept = rows[: len(rows) - rest]
        assert found[lane] == [kept[at : at + size] for at in range(0, len(kept), size)]
        assert line.counts()["dropped"][lane] == ({"batch.drop_last": rest} if rest else {})


@pytest.mark.parametrize("workers", WORKERS)
def test_drop_last_of_a_lane_that_is_too_short(workers: int) -> None:
    line = on(pipeline(5).batch(8, drop_last=True), workers)
    assert list(line) == []
    assert line.counts() == {"delivered": {0: 0}, "dropped": {0: {"batch.drop_last": 5}}}
    assert list(stream(line, passes=3)) == []
    assert line.counts()["dropped"] == {0: {"batch.drop_last": 15}}


def test_batches_run_through_flushes() -> None:
    """A flush empties shuffle and pack; it never cuts a batch short."""
    line = on(pipeline(30, chunk_size=4).shuffle(3).batch(7).options(flush_every_k_chunks=1), 0)
    assert [batch.num_samples for batch in line] == [7, 7, 7, 7, 2]


def test_without_batch_each_item_is_one_sample() -> None:
    batches = list(pipeline([{"id": 1, "t": "a"}, {"id": 2, "t": "b"}]))
    assert [(b.num_samples, b["id"].tolist(), b["t"]) for b in batches] == [(1, [1], ["a"]), (1, [2], ["b"])]


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3", None, [2]])
def test_the_size_is_checked(size: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="size"):
        pipeline(3).batch(size)


ADDERS: list[Callable[[zp.Pipeline], Any]] = [
    lambda line: line.batch(2),
    lambda line: line.map(dict),
    lambda line: line.filter(bool),
    lambda line: line.flat_map(list),
    lambda line: line.map_batches(list, 2),
    lambda line: line.shuffle(2),
    lambda line: line.pack(2),
    lambda line: line.tokenize(list),
]


@pytest.mark.parametrize("number", range(len(ADDERS)))
def test_batch_is_the_last_step_and_there_is_one(number: int) -> None:
    with pytest.raises(zp.errors.ConfigError, match="batch must be the last"):
        ADDERS[number](pipeline(3).batch(2))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_value_that_cannot_be_stacked_names_the_lane(workers: int) -> None:
    class Hostile:
        dtype = shape = property(lambda self: 1 / 0)

        def __array__(self) -> Any:
            raise RuntimeError("no")

    line = on(
        pipeline(6).map(lambda record: {"id": record["id"], "x": Hostile()} if record["id"] == 3 else record), workers
    )
    iterator = iter(line.batch(2))
    assert ids([next(iterator)]) == [0, 1]
    with pytest.raises(zp.errors.OperatorError, match=r"'batch'.*lane 0"):
        next(iterator)


def test_int_subclasses_stay_what_they_are() -> None:
    assert column(Level.LOW, Level.LOW) == [Level.LOW, Level.LOW]

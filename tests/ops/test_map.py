"""map: one record in, one record out; what may be returned, what is an error, what a function may do to records."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import zephon as zp

from ..cases.helpers import ids, on, pipeline, rows, stream

WORKERS = [0, 2]


def plus(record: dict[str, Any], amount: int = 1) -> dict[str, Any]:
    return {"id": record["id"] + amount}


class Adder:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return plus(record, self.amount)

    def method(self, record: dict[str, Any]) -> dict[str, Any]:
        return plus(record, self.amount)

    @staticmethod
    def static(record: dict[str, Any]) -> dict[str, Any]:
        return plus(record, 1)

    @classmethod
    def of_class(cls, record: dict[str, Any]) -> dict[str, Any]:
        return plus(record, 1)


class Positional(NamedTuple):
    id: int


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (plus, "plus"),
        (lambda record: plus(record), "map"),
        (functools.partial(plus, amount=1), "map"),
        (Adder(1), "map"),
        (Adder(1).method, "method"),
        (Adder.static, "static"),
        (Adder.of_class, "of_class"),
        (functools.partial(Adder(1)), "map"),
    ],
)
def test_every_kind_of_function(fn: Callable[..., Any], name: str, workers: int) -> None:
    line = on(pipeline(10).map(fn), workers)
    assert ids(line) == list(range(1, 11))
    assert f"map[{name}]" in repr(line)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [OrderedDict, lambda record: defaultdict(int, record)])
def test_a_subclass_of_dict_is_a_record(kind: Callable[[Any], Any], workers: int) -> None:
    assert ids(on(pipeline(5).map(kind), workers)) == list(range(5))


NOT_RECORDS: list[Callable[[dict[str, Any]], Any]] = [
    lambda record: None,
    lambda record: [record],
    lambda record: (record,),
    lambda record: (r for r in [record]),
    lambda record: "text",
    lambda record: 3,
    lambda record: MappingProxyType(record),
    lambda record: UserDict(record),
    lambda record: Positional(1),
    lambda record: np.array([1]),
    lambda record: record.items(),
    lambda record: dict,
    lambda record: NotImplemented,
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(NOT_RECORDS)))
def test_anything_else_is_an_error_that_names_it(number: int, workers: int) -> None:
    fn = NOT_RECORDS[number]
    kind = type(fn({"id": 0})).__name__
    with pytest.raises(zp.errors.OperatorError, match=rf"'map'.*row 0.*\b{kind}\b") as caught:
        list(on(pipeline(5).map(fn), workers))
    assert isinstance(caught.value, TypeError)
    line = on(pipeline(5).map(fn, on_error="skip"), workers)
    assert list(line) == []
    assert line.counts()["dropped"] == {0: {"map.error": 5}}


@pytest.mark.parametrize("workers", WORKERS)
def test_field_names_are_strings(workers: int) -> None:
    """A batch sorts its fields by name: a name that is no string (as of `Dataset.from_list`) is refused."""
    for bad in (1, None, ("a",), b"a"):
        with pytest.raises(zp.errors.ZephonError, match="field name"):
            list(on(pipeline(5).map(lambda record, bad=bad: {**record, bad: 1}), workers))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_function_may_change_the_record_that_it_got(workers: int) -> None:
    def in_place(record: dict[str, Any]) -> dict[str, Any]:
        record["id"] += 100
        record["tags"].append("seen")
        return record

    line = on(pipeline([{"id": i, "tags": []} for i in range(10)]).map(in_place), workers)
    for _ in range(2):
        line.load_state_dict(line.options().state_dict())
        batches = list(line)
        assert ids(batches) == list(range(100, 110))
        assert all(batch["tags"] == [["seen"]] for batch in batches)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("task_records", [1, 7, 64])
def test_one_dict_returned_for_every_record(task_records: int, workers: int) -> None:
    """A function that fills one dict again and again: each record is what it was when it was returned."""

    def reuse(record: dict[str, Any], buffer: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
        buffer["id"] = record["id"]
        return buffer

    line = pipeline(20).map(reuse, version="1").batch(4)
    assert ids(on(line, min(workers, 1), task_records=task_records)) == list(range(20))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_constant_that_a_later_step_changes_in_place(workers: int) -> None:
    constant = {"id": 1, "n": 0}

    def count(record: dict[str, Any]) -> dict[str, Any]:
        record["n"] += 1
        return record

    line = on(pipeline(20).map(lambda record: constant, version="1").map(count), workers)
    assert ids(line, "n") == [1] * 20
    assert constant["n"] == 0


@pytest.mark.parametrize("workers", WORKERS)
def test_an_empty_record_is_a_sample_without_fields(workers: int) -> None:
    batches = list(on(pipeline(5).map(lambda record: {}).batch(2), workers))
    assert [batch.num_samples for batch in batches] == [2, 2, 1]
    assert [dict(batch) for batch in batches] == [{}, {}, {}]
    assert [len(batch.origins) for batch in batches] == [2, 2, 1]


@pytest.mark.parametrize("bad", [None, 1, "plus", {"id": 1}])
def test_only_functions(bad: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="map"):
        pipeline(5).map(bad)


@pytest.mark.parametrize("bad", ["ignore", None, True, ""])
def test_on_error_is_checked(bad: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="on_error"):
        pipeline(5).map(plus, on_error=bad)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_function_that_takes_no_record_fails_on_the_first(workers: int) -> None:
    def none_at_all() -> dict[str, Any]:
        return {}

    with pytest.raises(TypeError, match="'none_at_all'"):
        list(on(pipeline(5).map(none_at_all), workers))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_generator_function_is_no_map(workers: int) -> None:
    def generates(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield record

    with pytest.raises(zp.errors.OperatorError, match="flat_map"):
        list(on(pipeline(5).map(generates), workers))


def test_maps_in_a_row_and_over_passes() -> None:
    line = pipeline(rows(6)).map(plus).map(plus).map(plus)
    assert "map[plus].map[plus_2].map[plus_3]" in repr(line)
    assert ids(stream(line, passes=2)) == [3, 4, 5, 6, 7, 8] * 2

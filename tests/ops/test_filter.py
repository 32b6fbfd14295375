"""filter: what counts as yes, what is counted as dropped, and what cannot be asked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zephon as zp

from ..cases.helpers import ids, on, pipeline, resumed, saved

WORKERS = [0, 2]


def third(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 3 == 0)


class Answer:
    """Its truth is what it was made with; None: asking raises."""

    def __init__(self, truth: bool | None) -> None:
        self.truth = truth

    def __bool__(self) -> bool:
        if self.truth is None:
            raise ValueError("I will not say")
        return self.truth


class StopsAsked:
    def __bool__(self) -> bool:
        raise StopIteration


YES_AND_NO: list[tuple[Any, Any]] = [
    (True, False),
    (np.True_, np.False_),
    (np.array(1), np.array(0)),
    (np.array([True]), np.array([False])),
    (1, 0),
    (np.int64(2), np.int64(0)),
    (0.1, 0.0),
    ("yes", ""),
    ([0], []),
    ({"a": 1}, {}),
    (object(), None),
    (Answer(True), Answer(False)),
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(YES_AND_NO)))
def test_truth_decides(number: int, workers: int) -> None:
    yes, no = YES_AND_NO[number]
    line = on(pipeline(20).filter(lambda record: yes if record["id"] % 3 == 0 else no), workers)
    assert ids(line) == list(range(0, 20, 3))
    assert line.counts() == {"delivered": {0: 7}, "dropped": {0: {"filter.filtered": 13}}}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("verdict", [np.array([True, False]), np.array([1, 1]), Answer(None), StopsAsked()])
def test_what_has_no_truth_is_an_error_of_the_operator(verdict: Any, workers: int) -> None:
    def unclear(record: dict[str, Any]) -> Any:
        return verdict if record["id"] == 4 else True

    line = on(pipeline(10).filter(unclear), workers)
    iterator = iter(line)
    assert ids([next(iterator) for _ in range(4)]) == [0, 1, 2, 3]
    with pytest.raises(zp.errors.OperatorError, match=r"'unclear'.*row 4"):
        next(iterator)
    line = on(pipeline(10).filter(unclear, on_error="skip"), workers)
    assert ids(line) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert line.counts()["dropped"] == {0: {"unclear.error": 1}}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_filter_may_change_the_record(workers: int) -> None:
    def mark(record: dict[str, Any]) -> bool:
        record["seen"] = True
        return third(record)

    batches = list(on(pipeline(9).filter(mark), workers))
    assert ids(batches) == [0, 3, 6]
    assert ids(batches, "seen") == [True] * 3


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_left_is_an_end(workers: int) -> None:
    line = on(pipeline(50).filter(lambda record: False).batch(4), workers)
    assert list(line) == []
    assert line.counts() == {"delivered": {0: 0}, "dropped": {0: {"filter.filtered": 50}}}
    assert list(line) == []
    assert line.counts()["dropped"] == {0: {"filter.filtered": 100}}


@pytest.mark.parametrize("workers", WORKERS)
def test_nothing_left_of_an_endless_source_names_the_filter(workers: int) -> None:
    def never(record: dict[str, Any]) -> bool:
        return False

    line = on(pipeline(50, end="repeat").filter(third).filter(never).batch(4), workers)
    with pytest.raises(zp.errors.DataError, match="never"):
        next(iter(line))


def test_counts_are_those_up_to_the_last_delivered_sample() -> None:
    line = on(pipeline(30).filter(third).batch(2), 2)
    iterator = iter(line)
    assert line.counts() == {"delivered": {0: 0}, "dropped": {0: {}}}
    next(iterator)  # 0 and 3
    assert line.counts() == {"delivered": {0: 2}, "dropped": {0: {"third.filtered": 2}}}
    next(iterator)  # 6 and 9
    assert line.counts() == {"delivered": {0: 4}, "dropped": {0: {"third.filtered": 6}}}
    again = resumed(line, saved(line))
    assert again.counts() == line.counts()
    list(again)
    assert again.counts() == {"delivered": {0: 10}, "dropped": {0: {"third.filtered": 20}}}


def test_two_filters_are_counted_apart() -> None:
    line = pipeline(30).filter(third).filter(third).filter(lambda record: record["id"] < 9, name="small")
    assert ids(line) == [0, 3, 6]
    assert line.counts()["dropped"] == {0: {"third.filtered": 20, "small.filtered": 7}}


@pytest.mark.parametrize("fn", [functools.partial(lambda limit, r: r["id"] < limit, 4), {0, 1}.issuperset])
def test_callables_of_other_kinds(fn: Callable[..., Any]) -> None:
    line = pipeline([{"id": i} for i in range(4)])
    if isinstance(fn, functools.partial):
        assert ids(line.filter(fn)) == [0, 1, 2, 3]
    else:
        assert list(line.filter(fn)) == []  # asks whether the field names are within the set


def test_only_functions() -> None:
    with pytest.raises(zp.errors.ConfigError, match="filter"):
        pipeline(3).filter(True)  # type: ignore[arg-type]

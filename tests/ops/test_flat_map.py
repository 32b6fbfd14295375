"""flat_map: any number of records out of one; whole or not at all, each its own dict, each with its path."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import zephon as zp

from ..cases.helpers import digests, ids, on, pipeline, resumed, saved

WORKERS = [0, 2]
Records = list[dict[str, Any]]


def copies(record: dict[str, Any]) -> Records:
    return [{"id": record["id"], "copy": copy} for copy in range(record["id"] % 4)]


class Lazily:
    """Iterable by the old protocol of indexes is not what we take; this one has __iter__."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)


FORMS: list[Callable[[Records], Iterable[dict[str, Any]]]] = [
    list,
    tuple,
    iter,
    lambda made: (record for record in made),
    lambda made: map(dict, made),
    deque,
    Lazily,
    lambda made: dict(enumerate(made)).values(),
    lambda made: np.array(made, dtype=object),
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_iterable_of_dicts(number: int, workers: int) -> None:
    line = on(pipeline(10).flat_map(lambda record: FORMS[number](copies(record))), workers)
    assert ids(line) == [i for i in range(10) for _ in range(i % 4)]
    assert line.counts()["dropped"] == {0: {"flat_map.empty": 3}}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("made", [None, {"id": 1}, "text", b"bytes", 3, object(), [None], ["text"], [[{"id": 1}]], [3]])
def test_anything_else_is_an_error(made: Any, workers: int) -> None:
    def cut(record: dict[str, Any]) -> Any:
        return made if record["id"] == 5 else copies(record)

    with pytest.raises(zp.errors.OperatorError, match=r"'cut'.*row 5") as caught:
        list(on(pipeline(10).flat_map(cut), workers))
    assert isinstance(caught.value, TypeError)
    line = on(pipeline(10).flat_map(cut, on_error="skip"), workers)
    assert ids(line) == [i for i in range(10) for _ in range(i % 4) if i != 5]
    assert line.counts()["dropped"] == {0: {"cut.empty": 3, "cut.error": 1}}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("error", [ValueError("late"), StopIteration(), SystemExit(0), GeneratorExit()])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_generator_that_fails_midway_gives_nothing_of_its_record(
    error: BaseException, batch: int, workers: int
) -> None:
    def late(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"id": record["id"]}
        yield {"id": record["id"]}
        if record["id"] == 3:
            raise error

    found = []
    line = on(pipeline(10).flat_map(late).batch(batch), workers)
    with pytest.raises(zp.errors.OperatorError, match=r"'late'.*row 3"):  # noqa: PT012
        for item in line:
            found += ids([item])
    assert found == [0, 0, 1, 1, 2, 2]
    if isinstance(error, Exception):
        line = on(pipeline(10).flat_map(late, on_error="skip").batch(batch), workers)
        assert ids(line) == [i for i in range(10) for _ in range(2) if i != 3]
        assert line.counts()["dropped"] == {0: {"late.error": 1}}


@pytest.mark.parametrize("workers", WORKERS)
def test_an_iterator_that_stops_at_once_or_has_a_return_value(workers: int) -> None:
    def returns(record: dict[str, Any]) -> Any:
        yield from copies(record)
        return [{"id": -1}]

    assert ids(on(pipeline(8).flat_map(returns), workers)) == [i for i in range(8) for _ in range(i % 4)]


@pytest.mark.parametrize("workers", WORKERS)
def test_siblings_are_dicts_of_their_own(workers: int) -> None:
    """The same dict several times: a later change of one is not seen in the others, nor in the next record's."""
    constant = {"n": 0}

    def number(record: dict[str, Any]) -> dict[str, Any]:
        record["n"] += 1
        return record

    line = pipeline(6).flat_map(lambda record: [constant, constant, record | {"n": 0}], version="1").map(number)
    assert ids(on(line, workers), "n") == [1] * 18
    assert constant == {"n": 0}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_record_refilled_by_a_generator(workers: int) -> None:
    def refill(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for copy in range(3):
            record["copy"] = copy
            yield record

    assert ids(on(pipeline(4).flat_map(refill), workers), "copy") == [0, 1, 2] * 4


@pytest.mark.parametrize("workers", WORKERS)
def test_the_bound_on_children(workers: int) -> None:
    """One more than the bound is an error; an endless generator ends there too."""

    def endless(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            yield {"id": record["id"]}

    with pytest.raises(zp.errors.DataError, match=r"'endless'.*row 0.*1,024.*max_children"):
        list(on(pipeline(3).flat_map(endless), workers))

    def many(record: dict[str, Any]) -> Records:
        return [record] * record["id"]

    assert len(list(on(pipeline(6).flat_map(many, max_children=5), workers))) == 15
    with pytest.raises(zp.errors.DataError, match=r"'many'.*row 5.*\b4\b"):
        list(on(pipeline(6).flat_map(many, max_children=4), workers))
    line = on(pipeline(6).flat_map(many, max_children=4, on_error="skip"), workers)
    assert len(list(line)) == 10
    assert line.counts()["dropped"] == {0: {"many.empty": 1, "many.error": 1}}


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "3", None])
def test_the_bound_is_checked(bad: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="max_children"):
        pipeline(3).flat_map(copies, max_children=bad)


@pytest.mark.parametrize("workers", WORKERS)
def test_origins_tell_the_child_path(workers: int) -> None:
    line = on(pipeline(4).flat_map(copies).flat_map(copies).batch(3), workers)
    found = [origin for batch in line for [origin] in batch.origins]
    expected = [("toy", "list", i, (a, b)) for i in range(4) for a in range(i % 4) for b in range(i % 4)]
    assert found == expected


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_cuts_between_siblings(lanes: int, workers: int) -> None:
    line = pipeline(24).flat_map(copies).flat_map(copies).batch(5).options(canonical_replicas=lanes)
    reference = digests(on(line, 0))
    for cut in range(len(reference) + 1):
        part = on(line, workers, task_records=3).take(cut)
        assert digests(part) == reference[:cut]
        assert digests(resumed(line, saved(part))) == reference[cut:]


@pytest.mark.parametrize("workers", WORKERS)
def test_records_with_equal_ids_are_not_mixed_up(workers: int) -> None:
    """Nothing but the place tells siblings apart here."""
    line = on(pipeline([{"x": 1}] * 8).flat_map(lambda record: [record] * 3).batch(4), workers)
    part = line.take(2)
    list(part)
    assert sum(batch.num_samples for batch in resumed(line, saved(part))) == 16

"""Case A8: a state saved exactly at the end of an epoch, before and after StopIteration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import zephon as zp

from .helpers import current_pass, digests, ids, on, pipeline, resumed, saved, stream

PASSES = 3


def line_of(records: int, drop_last: bool, workers: int, lanes: int = 1) -> zp.Pipeline:
    line = pipeline(records, shuffle="global").batch(8, drop_last=drop_last).options(canonical_replicas=lanes)
    return on(line, workers)


def states_at_end(line: zp.Pipeline, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state after the last batch of pass `number`, state after its StopIteration)."""
    here = line.options()
    for _ in range(number):
        list(here)
    before = saved(here)
    for _ in here:
        before = saved(here)
    return before, saved(here)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize(("records", "drop_last"), [(32, False), (34, False), (34, True)])
@pytest.mark.parametrize("number", [0, PASSES - 1])
@pytest.mark.parametrize("lanes", [1, 3])
def test_both_moments_resume_into_the_next_pass(
    workers: int, records: int, drop_last: bool, number: int, lanes: int
) -> None:
    line = line_of(records, drop_last, workers, lanes)
    reference = [digests(batches) for batches in by_pass(line.options())]
    before, after = states_at_end(line, number)
    assert before != after

    ending = resumed(line, before)
    assert digests(ending) == []  # ends the pass that had nothing more
    assert saved(ending) == after
    tail = [digests(batches) for batches in by_pass(ending, number + 1)]
    assert tail == reference[number + 1 :]

    going = resumed(line, after)
    assert current_pass(going) == number + 1
    tail = [digests(batches) for batches in by_pass(going, number + 1)]
    assert tail == reference[number + 1 :]
    assert digests(stream(resumed(line, before), PASSES)) == digests(stream(resumed(line, after), PASSES))


def by_pass(line: zp.Pipeline, start: int = 0) -> list[list[zp.Batch]]:
    """The batches of passes start .. PASSES - 1, each pass checked for its number and for being whole."""
    found = []
    for number in range(start, PASSES):
        batches = list(line)
        assert {batch.pass_index for batch in batches} == {number}
        assert current_pass(line) == number + 1
        found.append(batches)
    return found


def test_each_pass_has_its_own_order_and_is_complete() -> None:
    passes = [ids(batches) for batches in by_pass(line_of(34, False, 2))]
    assert all(sorted(found) == list(range(34)) for found in passes)
    assert len({tuple(found) for found in passes}) == PASSES


def test_what_drop_last_drops_is_counted_in_every_pass_and_after_every_resume() -> None:
    line = line_of(34, True, 2)
    for number in range(PASSES):
        before, after = states_at_end(line, number)
        for state, full_passes in ((before, number), (after, number + 1)):
            counts = resumed(line, state).counts()
            assert counts["delivered"] == {0: 32 * (number + 1)}
            assert counts["dropped"][0].get("batch.drop_last", 0) == 2 * full_passes


@pytest.mark.parametrize("workers", [0, 4])
def test_epochs_inside_one_pass(workers: int) -> None:
    """The end of an epoch inside a pass is a place like any other."""
    line = on(pipeline(32, shuffle="global", epochs=3).batch(8), workers)
    reference = ids(line.options())
    assert all(sorted(reference[at : at + 32]) == list(range(32)) for at in (0, 32, 64))
    assert len({tuple(reference[at : at + 32]) for at in (0, 32, 64)}) == 3
    for count in (4, 8, 12):
        part = line.take(count)
        list(part)
        assert ids(resumed(line, saved(part))) == reference[8 * count :]


def test_take_that_ends_with_the_pass_has_not_ended_it() -> None:
    line = line_of(32, False, 2)
    exact, more = line.take(4), line.take(5)
    assert len(list(exact)) == len(list(more)) == 4
    assert current_pass(exact) == 0
    assert current_pass(more) == 1
    second = resumed(line, saved(more))
    assert {batch.pass_index for batch in second} == {1}
    ending = resumed(line, saved(exact))
    assert list(ending) == []
    assert digests(ending) == digests(resumed(line, saved(more)))


def test_a_lane_that_ended_before_the_others() -> None:
    """Unequal lanes: states taken while one lane is over and another is not."""
    line = on(pipeline(13, shuffle="global", chunk_size=4).batch(2).options(canonical_replicas=3), 2)
    reference = digests(stream(line.options(), PASSES))
    for cut in range(len(reference) + 1):
        part = line.options()
        found = digests(itertools.islice(stream(part, PASSES), cut))
        assert found == reference[:cut]
        assert digests(stream(resumed(line, saved(part)), PASSES)) == reference[cut:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_source_has_no_end_to_save(workers: int) -> None:
    line = on(pipeline(10, shuffle="global", end="repeat").batch(4), workers)
    reference = ids(line.take(20))
    assert sorted(reference[:10]) == sorted(reference[10:20]) == list(range(10))
    for count in (2, 5, 10):
        part = line.take(count)
        list(part)
        assert current_pass(part) == 0
        assert ids(resumed(line, saved(part)).take(20 - count)) == reference[4 * count :]

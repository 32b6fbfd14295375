"""map_batches: groups of one lane, cut by count and by flush alone, mapped whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp

from ..cases.helpers import digests, ids, on, pipeline, resumed, saved

WORKERS = [0, 2]
Records = list[dict[str, Any]]


def groups(records: Records) -> Records:
    """Each record with the ids of its group."""
    return [{"id": record["id"], "group": [r["id"] for r in records]} for record in records]


def seen(line: zp.Pipeline, lane: int = 0) -> list[list[int]]:
    """The groups of a lane, in order."""
    found: list[list[int]] = []
    for batch in line:
        if batch.lane_id == lane:
            found += [group for group in list_field(batch) if not found or group != found[-1]]
    return found


def list_field(batch: zp.Batch) -> list[list[int]]:
    group: list[list[int]] = batch["group"]
    return group


@given(
    num=st.integers(1, 60),
    size=st.integers(1, 20),
    chunk=st.integers(1, 9),
    flush=st.integers(1, 4),
    lanes=st.integers(1, 3),
    keep=st.integers(1, 4),
)
def test_groups_are_those_of_a_plain_loop(num: int, size: int, chunk: int, flush: int, lanes: int, keep: int) -> None:
    line = pipeline(num, chunk_size=chunk).filter(lambda record: record["id"] % keep == 0, version=str(keep))
    line = line.map_batches(groups, size).options(canonical_replicas=lanes, flush_every_k_chunks=flush)
    line = on(line, 0)
    for lane in range(lanes):
        expected = []
        source = line._session.resolved.source
        window: list[int] = []
        for index in range(num + 1):
            rows = source.chunk(lane, lanes, 0, index).row.tolist()
            if not rows or (index and index % flush == 0):
                expected += [window[at : at + size] for at in range(0, len(window), size)]
                window = []
            window += [row for row in rows if row % keep == 0]
        line.load_state_dict(line.options().state_dict())
        assert seen(line, lane) == expected


@pytest.mark.parametrize("workers", WORKERS)
def test_the_function_may_do_anything_with_its_list(workers: int) -> None:
    def shuffle_in_place(records: Records) -> Records:
        records.reverse()
        records.append({"id": -1})
        return records

    line = on(pipeline(6).map_batches(shuffle_in_place, 3), workers)
    assert ids(line) == [2, 1, 0, -1, 5, 4, 3, -1]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_generator_fewer_more_and_none(workers: int) -> None:
    def some(records: Records) -> Iterator[dict[str, Any]]:
        for record in records[: records[0]["id"] % 5]:
            yield record
            yield record

    line = on(pipeline(12).map_batches(some, 3).batch(2), workers)
    expected = [i for first in (0, 3, 6, 9) for i in range(first, first + min(3, first % 5)) for _ in range(2)]
    assert ids(line) == expected
    assert line.counts()["dropped"] == {0: {"map_batches.empty": 3}}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("made", [None, {"id": 1}, [None], "text", 3, {"id": [1, 2, 3]}])
def test_anything_but_records_is_an_error(made: Any, workers: int) -> None:
    def group(records: Records) -> Any:
        return made

    with pytest.raises(zp.errors.OperatorError, match=r"'map_batches'.*row 0") as caught:
        list(on(pipeline(6).map_batches(group, 3), workers))
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_comes_behind_the_groups_before_it(workers: int) -> None:
    def group(records: Records) -> Records:
        if records[0]["id"] == 6:
            raise KeyError("six")
        return records

    line = on(pipeline(12).map_batches(group, 3), workers)
    found = []
    with pytest.raises(KeyError, match=r"'map_batches'.*row 6") as caught:  # noqa: PT012
        for batch in line:
            found += ids([batch])
    assert isinstance(caught.value, zp.errors.OperatorError)
    assert found == [0, 1, 2, 3, 4, 5]
    mended = on(pipeline(12).map_batches(lambda records: records, 3), workers)
    mended.load_state_dict(saved(line), allow=["map_batches.code"])
    assert ids(mended) == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("workers", WORKERS)
def test_skip_drops_the_group_and_no_other(workers: int) -> None:
    def group(records: Records) -> Records:
        if records[0]["id"] == 3:
            raise ValueError("three")
        return records

    line = on(pipeline(12).map_batches(group, 3, on_error="skip").batch(2), workers)
    assert ids(line) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert set(line.counts()["dropped"][0]) == {"map_batches.error"}


def test_the_group_may_be_larger_than_the_usual_bound_on_children() -> None:
    workers = 2
    line = pipeline(1030, chunk_size=1030).map_batches(lambda records: records, 1030).batch(1030)
    assert len(ids(on(line, workers))) == 1030
    with pytest.raises(zp.errors.DataError, match="max_children"):
        list(on(pipeline(9).map_batches(lambda records: records * 2, 3, max_children=5), workers))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_cuts_inside_a_group(lanes: int, workers: int) -> None:
    line = pipeline(40, chunk_size=4).map_batches(groups, 5).flat_map(lambda record: [record] * (record["id"] % 3))
    line = line.batch(2).options(canonical_replicas=lanes, flush_every_k_chunks=2)
    reference = digests(on(line, 0))
    for cut in range(len(reference) + 1):
        part = on(line, workers, task_records=2).take(cut)
        assert digests(part) == reference[:cut]
        assert digests(resumed(line, saved(part))) == reference[cut:]


@pytest.mark.parametrize("workers", WORKERS)
def test_two_in_a_row_and_origins(workers: int) -> None:
    line = on(pipeline(8).map_batches(groups, 4).map_batches(lambda records: records, 2), workers)
    origins = [batch.origins[0] for batch in line]
    assert [[origin[2] for origin in of] for of in origins[:2]] == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3", None])
def test_the_size_is_checked(size: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="size"):
        pipeline(3).map_batches(groups, size)


def test_without_flushes_only_the_last_group_is_short() -> None:
    line = on(pipeline(23, chunk_size=4, shuffle="none").map_batches(groups, 5), 0).options(flush_every_k_chunks=0)
    assert seen(line) == [list(range(i, min(23, i + 5))) for i in range(0, 23, 5)]

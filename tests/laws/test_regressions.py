"""Breaches of a law that were found by trying to break it, each with the smallest program that showed it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import zephon as zp
from zephon.ops.accumulator import Key, Ref
from zephon.testing.oracle import OracleLane


def rows(name: str, count: int, start: int = 0) -> zp.Dataset:
    return zp.Dataset.from_list(name, [{"id": start + i} for i in range(count)])


def over(*datasets: zp.Dataset, **settings: Any) -> zp.Pipeline:
    return zp.Pipeline(zp.StaticMixture(datasets, **settings)).options(runner="inline")


@pytest.mark.law("L5")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda r: dict(id=r["id"], kept=1), lambda r: dict(id=r["id"], size=1)),  # noqa: C408
        (lambda r: {"id": sorted(r, key=len, reverse=True)}, lambda r: {"id": sorted(r, reverse=len, key=True)}),
    ],
)
def test_a_keyword_is_part_of_a_function(one: Any, other: Any) -> None:
    state = over(rows("a", 6)).map(one, name="m").batch(1).state_dict()
    with pytest.raises(zp.errors.CheckpointError, match=r"m\.code"):
        over(rows("a", 6)).map(other, name="m").batch(1).load_state_dict(state)


@pytest.mark.law("L5")
def test_the_order_of_datasets_is_part_of_a_mixture() -> None:
    a, b = rows("a", 30), rows("b", 50, 100)
    settings: dict[str, Any] = {"weights": {"a": 1, "b": 1}, "seed": 3, "chunk_size": 4, "end": "redistribute"}
    state = over(a, b, **settings).batch(1).state_dict()
    with pytest.raises(zp.errors.CheckpointError, match=r"source\.datasets"):
        over(b, a, **settings).batch(1).load_state_dict(state)


@pytest.mark.law("L5")
@pytest.mark.parametrize(("was", "now"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_equal_numbers_of_another_kind_are_another_definition(was: Any, now: Any) -> None:
    def line(value: Any) -> zp.Pipeline:
        step = Scale()
        step.value = value
        return over(rows("a", 6)).apply(step).batch(1)

    with pytest.raises(zp.errors.CheckpointError, match=r"apply\.value"):
        line(now).load_state_dict(line(was).state_dict())


@pytest.mark.law("L5")
def test_a_state_with_odd_numbers_fits_its_own_pipeline() -> None:
    def line() -> zp.Pipeline:
        step = Scale()
        step.value = [float("nan"), 2**70]
        return over(rows("a", 6)).apply(step).batch(1)

    line().load_state_dict(json.loads(json.dumps(line().state_dict())))


class Scale(zp.Operator):
    value: Any = None

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


@pytest.mark.law("L1")
def test_siblings_share_no_values() -> None:
    def cut(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"meta": record["meta"], "n": n} for n in (1, 2, 3)]

    def mark(record: dict[str, Any]) -> dict[str, Any]:
        record["meta"]["n"] = record["n"]
        return record

    toy = zp.Dataset.from_list("toy", [{"meta": {}} for _ in range(4)])
    line = over(toy, shuffle="none").flat_map(cut).shuffle(2).map(mark).batch(1)
    for task_records in (1, 2, 64):
        found = [(int(b["n"][0]), b["meta"][0]["n"]) for b in line.options(task_records=task_records)]
        assert all(n == marked for n, marked in found), task_records


@pytest.mark.law("L2")
def test_the_first_step_is_short_also_where_groups_are_in_different_passes() -> None:
    def group(number: int, groups: int) -> zp.Pipeline:
        line = over(rows("a", 40), seed=3, chunk_size=2).batch(2)
        return line.options(canonical_replicas=2, dp_degree=groups, dp_group_id=number)

    first, second = group(0, 2), group(1, 2)
    list(first)
    iterators = [iter(first), iter(second)]
    for iterator, count in zip(iterators, (3, 8), strict=True):  # three turns into pass 1; eight into pass 0
        for _ in range(count):
            next(iterator)
    resumed = group(1, 2)
    resumed.load_state_dict(zp.merge_states([first.state_dict(), second.state_dict()]))
    list(resumed.steps())
    steps = [[batch.step for batch in step] for step in resumed.steps()]
    assert steps[:3] == [[0, 1, 2], [3], [4]]


class Greedy(zp.Accumulator):
    """Reads the last ref of every push."""

    batched = True
    preserves = True
    method = "greedy"

    def open(self, lane: int, key: Key) -> None:
        pass

    def push(self, lane: int, refs: Sequence[Ref]) -> zp.Emitted:
        assert refs[-1]
        emitted = zp.Emitted()
        for trigger, ref in enumerate(refs):
            emitted.add(trigger, ref)
        return emitted

    def flush(self, lane: int) -> zp.Emitted:
        return zp.Emitted()


class Mute(Greedy):
    def push(self, lane: int, refs: Sequence[Ref]) -> zp.Emitted:
        return None  # type: ignore[return-value]


@pytest.mark.law("L1")
def test_an_accumulator_is_not_called_where_a_filter_left_nothing() -> None:
    line = over(rows("a", 40), chunk_size=4).filter(lambda r: r["id"] == 7).apply(Greedy()).batch(2)
    assert [len(batch["id"]) for batch in line] == [1]


class Ahead(Greedy):
    def push(self, lane: int, refs: Sequence[Ref]) -> zp.Emitted:
        emitted = zp.Emitted()
        emitted.add(len(refs), refs[0])
        return emitted


class Unpaired(Greedy):
    def push(self, lane: int, refs: Sequence[Ref]) -> zp.Emitted:
        emitted = zp.Emitted()
        emitted.groups += refs
        return emitted


@pytest.mark.law("L8")
@pytest.mark.parametrize(
    ("step", "words"),
    [(Mute, "NoneType, not Emitted"), (Ahead, "triggers must not fall"), (Unpaired, "use emitted.add")],
)
def test_what_an_accumulator_must_return_is_said(step: type[Greedy], words: str) -> None:
    with pytest.raises(zp.errors.OperatorError, match=rf"'greedy'.*{words}"):
        list(over(rows("a", 4)).apply(step()).batch(2))


@pytest.mark.law("L6")
def test_a_thousand_datasets_fit_a_header() -> None:
    names = [f"dolma-v1_7/cc_en_head/part-{number:05d}" for number in range(1000)] + [
        f"語料庫{n}" * 4 for n in range(150)
    ]
    state = over(*(rows(name, 1) for name in names)).batch(1).state_dict()
    lanes = state.pop("lanes")
    assert len(lanes) == 1
    assert len(json.dumps(state)) <= 65_536


@pytest.mark.law("L10")
@pytest.mark.parametrize("task_records", [1, 64])
def test_an_event_that_fails_counts_nothing(task_records: int) -> None:
    """A flush lets several records go: one is dropped by pack, a later one fails in the stage between."""

    def fail(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 99:
            raise ValueError("99")
        return record

    ids = [*range(6), 99]
    toy = zp.Dataset.from_list("toy", [{"id": i, "input_ids": [] if i % 2 else [i]} for i in ids])
    line = (
        over(toy, shuffle="none", chunk_size=7).shuffle(8).map(fail).pack(1).batch(1).options(task_records=task_records)
    )
    truth, found = oracle(line), []
    iterator = iter(line)
    for _ in truth:
        next(iterator)
        found.append(line.counts()["dropped"][0])
    assert found == truth
    with pytest.raises(zp.errors.OperatorError, match="99"):
        next(iterator)


def oracle(line: zp.Pipeline) -> list[dict[str, int]]:
    """The drops behind each batch of lane 0, up to its error."""
    found: list[dict[str, int]] = []
    with suppress(zp.errors.ZephonError):
        found.extend(batch.dropped for batch in OracleLane(line, 0))
    return found


class Odd(zp.WorkSource):
    """A source of the user's own that gives whatever pointers it is told to."""

    def __init__(self, dataset: zp.Dataset, pointers: Any) -> None:
        super().__init__([dataset])
        self.pointers = pointers

    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> zp.Pointers:
        empty = np.empty(0, np.int64)
        return self.pointers if index == 0 else zp.Pointers(empty.astype(np.int32), empty, empty)

    def length(self, pass_index: int) -> int:
        return len(self.pointers.row)

    def fingerprint(self) -> dict[str, Any]:
        return {}


@pytest.mark.law("L10")
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([-1], [0], [0]), "index below 1"),
        (([3], [0], [0]), "index below 1"),
        (([0, 0], [0], [0]), "one length"),
        (([0.5], [0], [0]), "whole numbers"),
    ],
)
def test_pointers_that_lead_nowhere_are_refused(columns: Any, words: str) -> None:
    pointers = zp.Pointers(*map(np.array, columns))
    with pytest.raises(zp.errors.ConfigError, match=words):
        list(zp.Pipeline(Odd(rows("a", 3), pointers)).batch(1).options(runner="inline"))


@pytest.mark.law("L1")
def test_the_packs_of_one_long_document_have_their_own_random_numbers() -> None:
    def draw(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**record, "draw": int(rng.integers(2**31))}

    long = zp.Dataset.from_list("long", [{"input_ids": list(range(40))}])
    line = over(long).pack(10).map_batches(lambda group: group, 1).map(draw).batch(1)
    draws = [int(batch["draw"][0]) for batch in line]
    assert len(set(draws)) == len(draws) == 4

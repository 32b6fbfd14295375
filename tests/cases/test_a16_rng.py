"""Case A16: the random numbers of an operator belong to (seed, pass, epoch, record), never to a worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zephon as zp

from .helpers import ids, on, pipeline, resumed, rows, saved, stream

Triple = tuple[int, ...]


def draw(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**record, "draw": rng.integers(2**31, size=3)}


def draw_kw(record: dict[str, Any], *, rng: np.random.Generator) -> dict[str, Any]:
    return draw(record, rng)


def triples(batches: Any) -> list[tuple[int, Triple]]:
    """(id, what was drawn) of every sample."""
    return [
        (i, tuple(drawn))
        for batch in batches
        for i, drawn in zip(batch["id"].tolist(), batch["draw"].tolist(), strict=True)
    ]


def line_of(workers: int, lanes: int = 1, seed: int = 5, **settings: Any) -> zp.Pipeline:
    line = pipeline(64, shuffle="global", seed=seed).map(draw).batch(4).options(canonical_replicas=lanes)
    return on(line, workers, **settings)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_distinct_for_records_and_equal_for_workers(workers: int) -> None:
    found = triples(line_of(workers, task_records=1 + workers))
    assert len({drawn for _, drawn in found}) == 64
    assert found == triples(line_of(0))
    part = line_of(workers).take(5)
    list(part)
    assert triples(resumed(line_of(workers), saved(part))) == found[20:]


def test_lanes_change_nothing() -> None:
    expected = dict(triples(line_of(0)))
    for lanes in (2, 3, 8):
        assert dict(triples(line_of(2, lanes))) == expected


def test_passes_epochs_and_seeds_are_disjoint() -> None:
    of_passes = triples(stream(line_of(2), passes=2))
    assert len({drawn for _, drawn in of_passes}) == 128
    epochs = pipeline(64, shuffle="global", epochs=2).map(draw)
    assert len({drawn for _, drawn in triples(epochs)}) == 128
    other = triples(line_of(2, seed=6))
    assert {drawn for _, drawn in other}.isdisjoint(drawn for _, drawn in of_passes)


def test_a_resume_under_another_seed_draws_as_before() -> None:
    part = line_of(2).take(5)
    list(part)
    assert triples(resumed(line_of(2, seed=99), saved(part))) == triples(line_of(0))[20:]


def test_equal_rows_of_two_datasets_differ() -> None:
    datasets = [zp.Dataset.from_list(name, rows(16)) for name in ("a", "b")]
    found = triples(zp.Pipeline(zp.StaticMixture(datasets, shuffle="none")).map(draw))
    assert len({drawn for _, drawn in found}) == 32


def both(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**record, "other": rng.integers(2**31, size=3)}


def test_two_operators_draw_apart_and_a_name_keys_the_draw() -> None:
    batch = next(iter(pipeline(8).map(draw).map(both).batch(8)))
    assert not (batch["draw"] == batch["other"]).any()
    named = [triples(pipeline(8).map(draw, name=name)) for name in ("x", "x", "y")]
    assert named[0] == named[1]
    assert {drawn for _, drawn in named[0]}.isdisjoint(drawn for _, drawn in named[2])


class Caller:
    """A callable with state, and a method."""

    def __call__(self, record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return draw(record, rng)

    def method(self, record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return draw(record, rng)


@pytest.mark.parametrize("fn", [draw_kw, lambda r, rng=None: draw(r, rng), Caller(), Caller().method])
def test_every_kind_of_function_receives_it(fn: Callable[..., Any]) -> None:
    assert triples(pipeline(8).map(fn, name="same")) == triples(pipeline(8).map(draw, name="same"))


def test_filter_flat_map_and_map_batches_receive_it() -> None:
    def keep(record: dict[str, Any], rng: np.random.Generator) -> bool:
        return bool(rng.random() < 0.5)

    kept = ids(on(pipeline(64).filter(keep), 2))
    assert 10 < len(kept) < 54
    assert kept == ids(on(pipeline(64).filter(keep), 0))

    def cut(record: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
        return [{"id": record["id"], "draw": rng.integers(2**31, size=3)} for _ in range(rng.integers(4))]

    children = triples(on(pipeline(64).flat_map(cut), 2))
    assert children == triples(on(pipeline(64).flat_map(cut), 0))
    assert len({drawn for _, drawn in children}) == len(children)

    def group(records: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
        return [draw(record, rng) for record in records]

    grouped = triples(on(pipeline(64).map_batches(group, 5), 2))
    assert grouped == triples(on(pipeline(64).map_batches(group, 5), 0))
    assert len({drawn for _, drawn in grouped}) == 64


def three(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**record, "copy": copy} for copy in range(3)]


def test_siblings_draw_apart_at_every_depth_and_behind_a_stage() -> None:
    line = pipeline(8).flat_map(three).flat_map(three)
    direct = triples(on(line.map(draw), 2))
    assert len({drawn for _, drawn in direct}) == 72
    later = triples(on(line.shuffle(10).map(draw), 2))
    assert sorted(later) == sorted(direct)


def test_two_sequences_that_start_in_one_document_draw_apart() -> None:
    def long(record: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.arange(40)}

    def on_pack(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"id": 0, "draw": rng.integers(2**31, size=3)}

    found = triples(on(pipeline(3).map(long).pack(4).map(on_pack), 2))
    assert len({drawn for _, drawn in found}) == 30
    assert found == triples(on(pipeline(3).map(long).pack(4).map(on_pack), 0))


def global_state() -> tuple[Any, ...]:
    legacy = np.random.get_state(legacy=False)
    return random.getstate(), legacy["state"]["key"].tobytes(), legacy["state"]["pos"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_consumers_own_random_numbers_are_left_alone(workers: int) -> None:
    random.seed(1)
    np.random.seed(1)
    before = global_state()
    line = line_of(workers).options(canonical_replicas=2)
    list(line)
    with line_of(workers) as again:
        next(iter(again))
        saved(again)
    assert global_state() == before


def test_drawing_more_in_one_record_leaves_the_next_alone() -> None:
    def greedy(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        rng.random(record["id"] * 100)
        return {**record, "draw": rng.integers(2**31, size=3)}

    found = triples(pipeline(64).map(greedy, name="draw"))
    assert found[0] == triples(pipeline(64).map(draw))[0]
    assert len({drawn for _, drawn in found}) == 64
    assert found == triples(on(pipeline(64).map(greedy, name="draw"), 3))

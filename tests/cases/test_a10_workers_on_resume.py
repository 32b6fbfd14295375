"""Case A10: the number of workers is no part of the stream: any number saves, any number resumes, 0 included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zephon as zp

from .helpers import ids, on, resumed, saved, shards

SAVING = [0, 1, 2, 5]
RESUMING = [0, 1, 3, 8, 12]
CUTS = [5, 11, 25]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> zp.Dataset:
    return shards(tmp_path_factory.mktemp("shards"), 8, 13)


def line_over(data: zp.Dataset, lanes: int = 1) -> zp.Pipeline:
    mixture = zp.StaticMixture([data], seed=3, chunk_size=8)
    return zp.Pipeline(mixture).options(canonical_replicas=lanes)


def execution(number: int) -> dict[str, int]:
    """Settings of execution that differ from leg to leg."""
    return {"prefetch_batches": 1 + number % 5, "task_records": 1 + 7 * (number % 4)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("workers", SAVING)
def test_any_count_resumes_what_any_count_saved(data: zp.Dataset, workers: int, cut: int) -> None:
    line = line_over(data).batch(4)
    reference = ids(on(line, 0))
    assert sorted(reference) == list(range(104))
    part = on(line, workers, **execution(workers)).take(cut)
    assert ids(part) == reference[: 4 * cut]
    state = saved(part)
    for others in RESUMING:
        new = on(line, others, **execution(others + cut))
        new.load_state_dict(state)
        assert ids(new) == reference[4 * cut :]


def test_the_state_itself_does_not_know_the_count(data: zp.Dataset) -> None:
    line = line_over(data).batch(4)
    states = []
    for workers in SAVING:
        part = on(line, workers, **execution(workers)).take(11)
        list(part)
        states.append(saved(part))
    assert states == [states[0]] * len(states)


def odd(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 2)


def twice(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": record["id"], "copy": copy} for copy in range(2)]


def reverse(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return records[::-1]


CHAINS: dict[str, Callable[[zp.Pipeline], zp.Pipeline]] = {
    "stateless": lambda line: line.filter(odd).flat_map(twice),
    "shuffle": lambda line: line.flat_map(twice).shuffle(9),
    "groups": lambda line: line.map_batches(reverse, 5).flat_map(twice),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_chain_of_counts(data: zp.Dataset, chain: str, lanes: int) -> None:
    """Every leg runs on another number of workers; the last batch is short by the rule."""
    line = CHAINS[chain](line_over(data, lanes)).batch(3).options(flush_every_k_chunks=2)
    reference = ids(on(line, 0))
    found: list[int] = []
    state = saved(line.options())
    for count, workers in enumerate([0, 3, 1, 8, 0, 5]):
        here = on(line, workers).take(count)
        here.load_state_dict(state)
        found += ids(here)
        state = saved(here)
    assert found + ids(resumed(line, state, runner="threads", parallelism=12)) == reference


@pytest.mark.parametrize("change", [{"parallelism": {"odd": 3, "twice": 1}}, {"parallelism": "auto"}, {}])
def test_stages_of_their_own_change_nothing(data: zp.Dataset, change: dict[str, Any]) -> None:
    """A parallelism for one operator cuts the fused stage in two; siblings then meet a boundary between stages."""
    line = line_over(data, 2).filter(odd).flat_map(twice).batch(4)
    reference = ids(on(line, 0))
    for task_records in (1, 2, 5, 64):
        for cut in (0, 3, 9):
            part = line.options(runner="threads", task_records=task_records, **change).take(cut)
            assert ids(part) == reference[: 4 * cut]
            assert ids(resumed(line, saved(part), runner="inline")) == reference[4 * cut :]

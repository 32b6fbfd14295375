"""to_torch() under torchdata's StatefulDataLoader: the scenarios of its public tests, written afresh.

Saved in the middle and at the end of an epoch, before the first batch, between snapshots, over several epochs, with and
without workers that stay, on other numbers of workers, after an error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest

import zephon as zp
from tests.process.helpers import slow
from tests.torch_loader.helpers import Found, Workers, error_of, found, line, passes
from zephon.errors import CheckpointError
from zephon.torch_loader import pipeline_state

stateful = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

LANES, ROWS, COUNT = 4, 24, 12
"""A small run: 12 batches a pass, 3 of each lane."""

WANTED: list[list[Found]] = []


@pytest.fixture(scope="module", autouse=True)
def wanted() -> None:
    """Four passes of the pipeline itself."""
    WANTED[:] = passes(small(), 4)


def small(**options: Any) -> zp.Pipeline:
    return line(LANES, ROWS, **options)


def stateful_loader(workers: int, every: int = 1, stays: bool = False, **settings: Any) -> Any:
    """A StatefulDataLoader over a dataset of its own; what hangs is an error."""
    return stateful.StatefulDataLoader(
        small().to_torch(),
        batch_size=None,
        num_workers=workers,
        snapshot_every_n_steps=every,
        persistent_workers=stays,
        timeout=60 if workers else 0,
        **settings,
    )


def carried(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state through a file."""
    read: dict[str, Any] = json.loads(json.dumps(state))
    return read


def saved(batches: Any, count: int) -> dict[str, Any]:
    """The state of a StatefulDataLoader behind `count` batches; beyond COUNT behind the end of the epoch."""
    iterator = iter(batches)
    got = found(itertools.islice(iterator, count))
    assert got == WANTED[0][:count]
    state = carried(batches.state_dict())
    getattr(iterator, "_shutdown_workers", int)()
    return state


MODES = [
    (0, 1, False),
    slow(1, 1, True),
    slow(1, 1, False),
    (3, 1, False),
    slow(2, 1, False),
    (2, 2, True),
    slow(3, 3, False),
    slow(3, 3, True),
    slow(4, 5, True),
    slow(6, 1, False),
]
"""Workers, batches between snapshots, whether workers stay. 3 workers are 2, and one with nothing to do."""


@pytest.mark.law("L4")
@pytest.mark.parametrize("cut", [slow(1), 5, slow(8), slow(COUNT - 2)])
@pytest.mark.parametrize(("workers", "every", "stays"), MODES)
def test_in_the_middle_of_an_epoch(workers: int, every: int, stays: bool, cut: int) -> None:
    """The rest of the epoch, then the next ones, batch for batch; the same again from a state of the second leg."""
    state = saved(stateful_loader(workers, every, stays), cut)
    again = stateful_loader(workers, every, stays)
    again.load_state_dict(state)
    iterator = iter(again)
    assert found(itertools.islice(iterator, 2)) == WANTED[0][cut : cut + 2]
    third = stateful_loader(workers, every, stays)
    third.load_state_dict(carried(again.state_dict()))
    assert found(iterator) == WANTED[0][cut + 2 :]
    assert [found(again), found(again)] == WANTED[1:3]
    assert [found(third), found(third)] == [WANTED[0][cut + 2 :], WANTED[1]]


@pytest.mark.parametrize(("workers", "every", "stays"), MODES)
def test_at_the_end_of_an_epoch(workers: int, every: int, stays: bool) -> None:
    """Behind its end the next pass follows; behind its last batch alone an epoch with nothing in it comes first."""
    behind_end, behind_last = (stateful_loader(workers, every, stays) for _ in range(2))
    behind_end.load_state_dict(saved(stateful_loader(workers, every, stays), COUNT + 1))
    assert [found(behind_end), found(behind_end)] == WANTED[1:3]
    behind_last.load_state_dict(saved(stateful_loader(workers, every, stays), COUNT))
    assert [found(behind_last), found(behind_last)] == [[], WANTED[1]]


@pytest.mark.parametrize(("workers", "every", "stays"), MODES)
def test_before_the_first_batch(workers: int, every: int, stays: bool) -> None:
    """A state that was asked for first, and one of an iterator that gave nothing, begin at the beginning."""
    first = stateful_loader(workers, every, stays)
    state = carried(first.state_dict())
    assert found(first) == WANTED[0]
    again = stateful_loader(workers, every, stays)
    again.load_state_dict(state)
    assert [found(again), found(again)] == WANTED[:2]
    again.load_state_dict(saved(stateful_loader(workers, every, stays), 0))
    assert found(again) == WANTED[0]


@pytest.mark.parametrize(("workers", "every", "stays"), MODES)
def test_in_a_later_epoch(workers: int, every: int, stays: bool) -> None:
    epochs = stateful_loader(workers, every, stays)
    assert [found(epochs), found(epochs)] == WANTED[:2]
    iterator = iter(epochs)
    assert found(itertools.islice(iterator, 6)) == WANTED[2][:6]
    again = stateful_loader(workers, every, stays)
    again.load_state_dict(carried(epochs.state_dict()))
    assert [found(again), found(again)] == [WANTED[2][6:], WANTED[3]]
    assert found(iterator) == WANTED[2][6:]


@pytest.mark.parametrize(("workers", "ahead"), [(2, 1), slow(2, 6), slow(4, 3)])
def test_how_far_workers_are_ahead_changes_nothing(workers: int, ahead: int) -> None:
    state = saved(stateful_loader(workers, 1, prefetch_factor=ahead), 7)
    again = stateful_loader(workers, 1, prefetch_factor=7 - ahead)
    again.load_state_dict(state)
    assert found(again) == WANTED[0][7:]


@pytest.mark.law("L3")
@pytest.mark.parametrize("workers", [0, 2, slow(3), slow(4)])
def test_on_another_number_of_workers(workers: int) -> None:
    """The StatefulDataLoader itself refuses it; the pipeline's state in it fits any, torch or not."""
    for cut in (0, 5, COUNT, COUNT + 1):
        state = saved(stateful_loader(workers), cut)
        ours = pipeline_state(state)
        alone = small()
        alone.load_state_dict(ours)
        rest = found(alone) or found(alone)
        assert rest == (WANTED[0][cut:] or WANTED[1])
        for others in range(6):
            dataset = small().to_torch()
            dataset.load_state_dict(ours)
            assert (found(Workers(dataset, others)) or found(Workers(dataset, others))) == rest
    other = stateful_loader(1 if workers else 2)
    other.load_state_dict(state)
    with pytest.raises(AssertionError):
        iter(other)
    real = stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=0 if workers else 2)
    dataset.load_state_dict(pipeline_state(saved(stateful_loader(workers), 5)))
    assert [found(real), found(real)] == [WANTED[0][5:], WANTED[1]]


def test_a_batch_of_it_has_a_state_too() -> None:
    """Also behind a resume, where workers go on in the middle, once all of them were heard of."""
    again = stateful_loader(2)
    again.load_state_dict(saved(stateful_loader(2), 5))
    iterator = iter(again)
    first, second = next(iterator), next(iterator)
    again.dataset.state_dict(after=second)
    for number, batch in enumerate([first, second, *iterator], start=6):
        alone = small()
        alone.load_state_dict(again.dataset.state_dict(after=batch))
        assert found(alone) == WANTED[0][number:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_ends_the_epoch_and_not_the_run(workers: int) -> None:
    """The state behind what came before the error leads to it again; with better data, past it."""

    def build(bad: int) -> zp.Pipeline:
        def check(record: dict[str, Any]) -> dict[str, Any]:
            if record["id"] == bad:
                raise KeyError(bad)
            return record

        dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(ROWS)])
        pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, chunk_size=4)).map(check, version="1").batch(2)
        return pipeline.options(canonical_replicas=LANES, runner="inline")

    def over(bad: int) -> Any:
        dataset = build(bad).to_torch()
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, timeout=60 if workers else 0)

    broken = over(21)
    kind, text, got = error_of(broken)
    assert kind is zp.errors.OperatorError
    assert "KeyError: 21" in text
    assert 0 < len(got) < COUNT
    state = carried(broken.state_dict())
    again = over(21)
    again.load_state_dict(state)
    assert error_of(again)[2] == []
    mended = over(-1)
    mended.load_state_dict(state)
    assert found(got) + found(mended) == found(build(-1))


@pytest.mark.law("L5")
@pytest.mark.parametrize("workers", [0, 2])
def test_another_seed_or_batch_size(workers: int) -> None:
    """Workers of later epochs would not know; the way around keeps the state's seed."""
    state = saved(stateful_loader(workers), 8)

    def other(seed: int, batch: int) -> zp.Pipeline:
        dataset = zp.Dataset.from_list("toy", [{"id": i, "text": str(i)} for i in range(ROWS)])
        pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=seed, chunk_size=4)).shuffle(6).batch(batch)
        return pipeline.options(canonical_replicas=LANES, runner="inline")

    for seed, batch, text in ((9, 2, "seed 3, the pipeline 9"), (3, 1, "batch_size 2, the pipeline 1")):
        dataset = other(seed, batch).to_torch()
        epochs = stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
        epochs.load_state_dict(state)
        if workers:
            assert text in error_of(epochs)[1]
        dataset.load_state_dict(pipeline_state(state))
        alone = other(3, batch)
        alone.load_state_dict(pipeline_state(state))
        assert found(Workers(dataset, 2)) == found(alone)
    assert found(Workers(dataset, 2))[0][2] == 1


def test_states_that_are_not_one() -> None:
    behind = saved(stateful_loader(2, every=4), 6)
    with pytest.raises(CheckpointError, match="2 batches old"):
        pipeline_state(behind)
    for wrong in ({}, {"dataset_state": {}}, small().state_dict(), 5):
        with pytest.raises(CheckpointError, match="StatefulDataLoader"):
            pipeline_state(wrong)  # type: ignore[arg-type]
    state = saved(stateful_loader(2), 6)
    state["_snapshot"]["_worker_snapshots"]["worker_1"]["dataset_state"]["seed"] = 4
    with pytest.raises(CheckpointError, match="not of one run"):
        pipeline_state(state)
    other = stateful.StatefulDataLoader(line(6).to_torch(), batch_size=None, num_workers=2)
    other.load_state_dict(saved(stateful_loader(2), 6))
    assert error_of(other)[0] is CheckpointError


def test_a_snapshot_costs_what_its_lanes_cost() -> None:
    """L6: the part of a worker is that of its lanes; the header is the pipeline's."""
    state = saved(stateful_loader(2), 6)
    whole = small().state_dict()
    for part in state["_snapshot"]["_worker_snapshots"].values():
        found_part = dict(part["dataset_state"])
        assert found_part.pop("loader")["shares"] == 2
        assert len(found_part.pop("lanes")) == 2
        assert found_part == {name: value for name, value in whole.items() if name != "lanes"}

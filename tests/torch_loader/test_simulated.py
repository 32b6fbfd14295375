"""L2 to L4 and L10 with the lanes divided among a DataLoader's workers: random pipelines, workers and places.

The workers live in this process: real ones start slowly. test_dataloader.py and test_stateful.py have those.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Lane, examples, in_turn, truths
from tests.torch_loader.helpers import Workers, by_lane, found, line, passes
from zephon.testing.recipes import Recipe
from zephon.testing.strategies import recipes


@pytest.mark.law("L2")
@examples(0.25)
@given(recipe=recipes(max_lanes=6), workers=st.integers(0, 7), chance=st.integers(0, 9))
def test_every_lane_is_the_oracles_for_two_passes(recipe: Recipe, workers: int, chance: int) -> None:
    lanes = truths(recipe, passes=2)
    dataset = recipe.build().to_torch()
    for number in range(2):
        here = {lane: lanes[lane, number] for lane in range(recipe.num_lanes)}
        got = found(Workers(dataset, workers, chance=chance))
        assert by_lane(got) == {
            (lane, number): [batch.digest for batch in one.batches] for lane, one in here.items() if one.batches
        }
        if workers < 2 or len({len(one.batches) for one in here.values()}) == 1:
            assert [lane for lane, *_ in got] == [lane for lane, _ in in_turn(here)[0]]


def counted(lanes: dict[tuple[int, int], Lane], lane: int, number: int, samples: int) -> tuple[int, dict[str, int]]:
    """(delivered, dropped) of a lane behind so many samples of a pass, as the oracle has it."""
    total = 0
    for batch in lanes[lane, number].batches if samples else ():
        total += len(batch.origins)
        if total == samples:
            return batch.delivered, batch.dropped
    assert not samples
    before = lanes.get((lane, number - 1))
    delivered = before.batches[-1].delivered if before and before.batches else 0
    return delivered, before.dropped if before else {}


def check_state(recipe: Recipe, lanes: dict[tuple[int, int], Lane], state: dict[str, Any]) -> None:
    """Every lane's counts, as a pipeline with this state gives them, equal the oracle's."""
    pipeline = recipe.build()
    pipeline.load_state_dict(json.loads(json.dumps(state)))
    counts = pipeline.counts()
    for lane in range(recipe.num_lanes):
        place = state["lanes"][str(lane)]
        delivered, dropped = counted(lanes, lane, place["pass"], place["samples"])
        assert counts["delivered"][lane] == delivered
        assert counts["dropped"][lane] == dropped


@pytest.mark.law("L3")
@pytest.mark.law("L10")
@examples(0.25)
@given(recipe=recipes(max_lanes=6), data=st.data())
def test_any_workers_save_and_any_resume(recipe: Recipe, data: st.DataObject) -> None:
    """Legs on different numbers of workers, and now and then on none of ours: nothing is skipped or given twice."""
    lanes = truths(recipe, passes=1)
    got: list[Any] = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        workers, chance = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 9))
        dataset = recipe.build().to_torch()
        if state is not None:
            dataset.load_state_dict(state)
        stop = data.draw(st.integers(0, 12))
        leg = list(itertools.islice(Workers(dataset, workers, data.draw(st.integers(0, 3)), chance), stop))
        got += found(leg)
        if leg:
            state = dataset.state_dict(after=leg[-1])
            check_state(recipe, lanes, state)
    rest = recipe.build()
    if state is not None:
        rest.load_state_dict(state)
    got += found(rest) if state is None or min(p["pass"] for p in state["lanes"].values()) == 0 else []
    assert by_lane(got) == {key: [b.digest for b in one.batches] for key, one in lanes.items() if one.batches}


@pytest.mark.law("L4")
@given(
    lanes=st.integers(1, 6),
    workers=st.integers(0, 7),
    others=st.integers(0, 7),
    stop=st.integers(0, 30),
    chance=st.integers(0, 5),
)
@examples(0.2)
def test_the_rotation_goes_on_where_it_stopped(lanes: int, workers: int, others: int, stop: int, chance: int) -> None:
    """Lanes of one length: batch for batch in the pipeline's own order, and the passes behind it too."""
    first, second = passes(line(lanes), 2)
    dataset = line(lanes).to_torch()
    leg = list(itertools.islice(Workers(dataset, workers, chance=chance), stop))
    assert found(leg) == first[:stop]
    again = line(lanes).to_torch()
    if leg:
        again.load_state_dict(dataset.state_dict(after=leg[-1]))
    assert found(Workers(again, others, chance=chance)) == first[stop:]
    assert found(Workers(again, others, chance=chance)) == second


@pytest.mark.law("L2")
@examples(0.15)
@given(recipe=recipes(max_lanes=6), data=st.data())
def test_states_are_the_pipelines_own(recipe: Recipe, data: st.DataObject) -> None:
    """With one share the state behind every batch is the same as without torch, over passes."""
    plain, dataset = recipe.build(), recipe.build().to_torch()
    for _ in range(2):
        workers = data.draw(st.integers(0, 1))
        for ours, theirs in itertools.zip_longest(plain, Workers(dataset, workers)):
            assert dataset.state_dict(after=theirs) == plain.state_dict(after=ours)


def test_other_ranks_join_the_state() -> None:
    """Three ranks with workers save; two with others go on, or one without torch."""
    [whole] = passes(line(6), 1)
    states, got = [], []
    for group in range(3):
        dataset = line(6, dp_degree=3, dp_group_id=group).to_torch()
        leg = list(itertools.islice(Workers(dataset, 2 - group), 5))
        got += found(leg)
        states.append(dataset.state_dict(after=leg[-1]))
    state = zp.merge_states(states)
    rest = []
    for group in range(2):
        dataset = line(6, dp_degree=2, dp_group_id=group).to_torch()
        dataset.load_state_dict(state)
        rest += found(Workers(dataset, 3))
    alone = line(6)
    alone.load_state_dict(state)
    assert sorted(found(alone)) == sorted(rest)
    assert sorted(got + rest) == sorted(whole)

"""L2: a lane's stream, and what a global step is made of, do not depend on who owns the lane."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Lane, examples, plain, run, same_group, truths
from zephon.testing.recipes import Recipe, Rows, Step
from zephon.testing.strategies import Group, executions, recipes, topologies

pytestmark = pytest.mark.law("L2")

GlobalStep = dict[int, list[str]]
"""Lane -> digests of its batches."""


def steps_of(recipe: Recipe, groups: Group, **options: Any) -> list[list[GlobalStep]]:
    """For each group, its global steps."""
    found = []
    for group in range(groups.dp_degree):
        pipeline = recipe.build(**groups.options(group), **options)
        assert pipeline.batches_per_step == recipe.options["cycles_per_step"] * len(pipeline.lanes)
        own: list[GlobalStep] = []
        for number, batches in enumerate(pipeline.steps()):
            assert {batch.step for batch in batches} == {number}
            own.append({lane: [b.digest() for b in batches if b.lane_id == lane] for lane in pipeline.lanes})
        found.append(own)
    return found


def check_steps(found: list[list[GlobalStep]], lanes: dict[int, Lane], cycles: int) -> None:
    """Step s holds turns s * cycles .. (s + 1) * cycles - 1 of every lane, in whichever group."""
    for own in found:
        ends = [-(-len(lanes[lane].batches) // cycles) for lane in (own[0] if own else ())]
        assert len(own) == max(ends, default=0)
        for number, step in enumerate(own):
            for lane, digests in step.items():
                turns = lanes[lane].batches[number * cycles : (number + 1) * cycles]
                assert digests == [batch.digest for batch in turns], (number, lane)


@examples(0.5)
@given(recipe=recipes(), data=st.data())
def test_lanes_and_steps_on_any_topology(recipe: Recipe, data: st.DataObject) -> None:
    lanes = {lane: found for (lane, _), found in truths(recipe).items()}
    cycles = recipe.options["cycles_per_step"]
    for _ in range(2):
        groups = data.draw(topologies(recipe.num_lanes))
        options = data.draw(executions(recipe))
        owned = []
        for group in range(groups.dp_degree):
            pipeline = recipe.build(**groups.options(group), **options)
            assert pipeline.lanes == groups.lanes(group, recipe.num_lanes)
            owned += pipeline.lanes
            same_group(run(pipeline), {lane: lanes[lane] for lane in pipeline.lanes}, cycles, groups)
        assert sorted(owned) == list(range(recipe.num_lanes))
        check_steps(steps_of(recipe, groups, **options), lanes, cycles)


def levelled(lanes: dict[int, Lane], turns: dict[int, int], cycles: int) -> list[GlobalStep]:
    """What must follow where lanes had different turns: up to where the most advanced lane's step ends; then whole."""
    most = max(turns.values())
    target = -(-most // cycles) * cycles
    if min(turns.values()) == target:
        target += cycles
    found: list[GlobalStep] = []
    at = dict(turns)
    while any(at[lane] < len(lanes[lane].batches) for lane in at) or not found:
        found.append({lane: [b.digest for b in lanes[lane].batches[at[lane] : target]] for lane in at})
        at, target = dict.fromkeys(at, target), target + cycles
    return found


@examples(0.5)
@given(recipe=recipes(), data=st.data())
def test_steps_after_a_restore_in_the_middle_of_one(recipe: Recipe, data: st.DataObject) -> None:
    """The first step levels the lanes; each group's part of every step is what the lanes' turns say."""
    lanes = {lane: found for (lane, _), found in truths(recipe).items()}
    cycles = recipe.options["cycles_per_step"]
    turns: dict[int, int] = {}
    states = []
    before = data.draw(topologies(recipe.num_lanes))
    for group in range(before.dp_degree):
        pipeline = recipe.build(**before.options(group))
        left = sum(len(lanes[lane].batches) for lane in pipeline.lanes)
        taken = run(pipeline, data.draw(st.integers(0, min(left, 12)))).batches
        turns |= {lane: sum(batch.lane == lane for batch in taken) for lane in pipeline.lanes}
        states.append(pipeline.state_dict())
        pipeline.close()
    state = plain(zp.merge_states(states))
    turns = {lane: done for lane, done in turns.items() if state["lanes"][str(lane)]["pass"] == 0}
    assume(turns)
    wanted = levelled(lanes, turns, cycles)
    after, numbers = data.draw(topologies(recipe.num_lanes)), set()
    for group in range(after.dp_degree):
        pipeline = recipe.build(**after.options(group))
        pipeline.load_state_dict(state)
        own = [lane for lane in pipeline.lanes if lane in turns]
        found = [{lane: [b.digest() for b in step if b.lane_id == lane] for lane in own} for step in pipeline.steps()]
        expected = [{lane: step[lane] for lane in own} for step in wanted]
        assert without_end(found) == without_end(expected), (turns, group)
        numbers.add(len(found))
    even = len({len(lane.batches) for lane in lanes.values()}) == 1 and len(turns) == recipe.num_lanes
    assert not even or len(numbers) == 1


def without_end(steps: list[GlobalStep]) -> list[GlobalStep]:
    """The steps up to the last one in which there is a batch."""
    last = max((number for number, step in enumerate(steps, 1) if any(step.values())), default=0)
    return steps[:last]


@pytest.mark.parametrize("strategy", ["contiguous", "interleaved"])
@pytest.mark.parametrize("dp_degree", range(1, 9))
def test_even_lanes_give_every_group_the_same_number_of_steps(dp_degree: int, strategy: Any) -> None:
    """8 lanes of 40 samples: 5 whole steps of 2 cycles of 4, on every topology."""
    recipe = Recipe(
        (Rows("alpha", (120, 200)),),
        {"seed": 3, "chunk_size": 5},
        (Step("shuffle", (7,)), Step("batch", (4,))),
        {"canonical_replicas": 8, "cycles_per_step": 2, "flush_every_k_chunks": 2},
    )
    groups = Group(dp_degree, strategy)
    found = steps_of(recipe, groups)
    assert [len(own) for own in found] == [5] * dp_degree
    sizes = [[sum(map(len, step.values())) for step in own] for own in found]
    assert sizes == [[2 * len(groups.lanes(group, 8))] * 5 for group in range(dp_degree)]
    together = [{lane: digests for own in found for lane, digests in own[s].items()} for s in range(5)]
    assert together == steps_of(recipe, Group(1, "contiguous"))[0]


def test_the_split_of_the_design() -> None:
    """8 lanes over 3 groups: 3, 3 and 2."""
    assert [Group(3, "contiguous").lanes(group, 8) for group in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [Group(3, "interleaved").lanes(group, 8) for group in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]

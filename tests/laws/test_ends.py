"""A common last step under the laws: a function of the data alone, on any topology, over any restores, counts exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.chain import PASSES
from tests.laws.ends import EndsChain, Together, ending_with
from tests.laws.harness import State, examples, first_pass, plain, same_lane, seen, truth
from zephon.testing.recipes import Recipe, Rows, Step
from zephon.testing.strategies import executions, recipes, topologies

LAST = st.sampled_from(["drop", "pad"])


@st.composite
def ending_recipes(draw: st.DrawFn, regroups: bool | None = None) -> Recipe:
    """A pipeline whose groups end together: by the data, or after a number of steps."""
    if draw(st.integers(0, 3)) == 0:
        endless = draw(st.booleans())
        recipe = draw(recipes(endless=endless, max_lanes=4, regroups=regroups).filter(gives_batches))
        return ending_with(recipe, last_step="pad", steps_per_pass=draw(st.integers(1, 4)))
    return ending_with(draw(recipes(max_lanes=4, regroups=regroups)), last_step=draw(LAST))


def gives_batches(recipe: Recipe) -> bool:
    """Whether there is a batch in each pass that can fill the place of others."""
    lanes = range(recipe.num_lanes)
    return all(any(truth(recipe, lane, number, 1).batches for lane in lanes) for number in range(PASSES))


@pytest.mark.law("L2")
@examples(0.2)
@given(recipe=ending_recipes(), data=st.data())
def test_all_groups_have_the_same_whole_steps(recipe: Recipe, data: st.DataObject) -> None:
    run, cycles = Together(recipe), recipe.options["cycles_per_step"]
    groups, options = data.draw(topologies(recipe.num_lanes)), data.draw(executions(recipe))
    with run.agreeing():
        for group in range(groups.dp_degree):
            pipeline = recipe.build(**groups.options(group), **options)
            found: dict[int, list[Any]] = {lane: [] for lane in pipeline.lanes}
            number = -1
            for number, step in enumerate(pipeline.steps()):
                assert [batch.lane_id for batch in step] == pipeline.lanes * cycles
                assert {batch.step for batch in step} == {number}
                for batch in step:
                    assert batch.padding == (batch.num_samples == 0) == (not batch.origins)
                    found[batch.lane_id].append(batch)
            assert number + 1 == run.steps[0]
            for lane, batches in found.items():
                assert [b.digest() for b in batches] == [b.digest for b in run.wanted[lane, 0].batches]
            assert known_length(pipeline) in (None, sum(map(len, found.values())))


def known_length(pipeline: zp.Pipeline) -> int | None:
    try:
        return len(pipeline)
    except TypeError:
        return None


@pytest.mark.law("L3")
@examples(0.2)
@given(recipe=ending_recipes(), data=st.data())
def test_any_chain_of_restores(recipe: Recipe, data: st.DataObject) -> None:
    """Batches, their counts, and those behind each pass are the oracle's, wherever the groups stopped."""
    chain = EndsChain(recipe)
    with chain.truth.agreeing():
        for _ in range(data.draw(st.integers(1, 4))):
            leg(chain, data)
        for pipeline in chain.pipelines(data.draw(topologies(recipe.num_lanes))):
            chain.go(pipeline, None, True)
            for lane, lost in pipeline.counts()["dropped"].items():
                assert lost == {name: n for name, n in chain.wanted[lane, 1].dropped.items() if n}
    chain.check()


def leg(chain: EndsChain, data: st.DataObject) -> None:
    """All groups of some topology start from the chain's state, and stop less than two steps apart, as ranks do."""
    groups, options = data.draw(topologies(chain.recipe.num_lanes)), data.draw(executions(chain.recipe))
    here = 0 if chain.state is None else first_pass(chain.state)
    if here == len(chain.truth.steps):
        return
    done = [len(chain.found[lane, here]) for lane in range(chain.recipe.num_lanes)]
    steps = chain.truth.steps[here]
    last = data.draw(st.integers(min(done) // chain.truth.cycles, steps))
    states: list[State] = []
    for pipeline in chain.pipelines(groups, **options):
        before, begun = (chain.need(pipeline.lanes, here, last + n) for n in (-1, 0))
        least = min(before + 1, begun)
        most = chain.need(pipeline.lanes, here, min(last + 1, steps))
        is_over = last == steps and data.draw(st.booleans())
        chain.go(pipeline, most if is_over else data.draw(st.integers(least, most)), is_over)
        states.append(pipeline.state_dict())
    chain.merge(states)


@st.composite
def counted_recipes(draw: st.DrawFn) -> Recipe:
    """A pipeline whose lengths are arithmetic, excluded rows included."""
    recipe = draw(ending_recipes(regroups=False))
    datasets = tuple(Rows(each.name, each.shards, each.number, each.exclude, (), "raise") for each in recipe.datasets)
    steps = (Step("shuffle", (draw(st.integers(1, 9)),)), Step("batch", (draw(st.integers(1, 5)), draw(st.booleans()))))
    recipe = dataclasses.replace(recipe, datasets=datasets, steps=steps)
    if "steps_per_pass" in recipe.options and not gives_batches(recipe):
        return ending_with(recipe, steps_per_pass=None)
    return recipe


@pytest.mark.law("L3")
@examples(0.2)
@given(recipe=counted_recipes(), data=st.data())
def test_groups_far_apart_where_the_end_is_arithmetic(recipe: Recipe, data: st.DataObject) -> None:
    """Nothing is asked of anyone, so groups may stop anywhere, the end of the pass included."""
    chain = EndsChain(recipe)
    for _ in range(data.draw(st.integers(1, 3))):
        groups = data.draw(topologies(chain.recipe.num_lanes))
        states: list[State] = []
        for pipeline in chain.pipelines(groups):
            here = pipeline._session.pass_index
            if here < PASSES:
                length = sum(len(chain.wanted[lane, here].batches) for lane in pipeline.lanes)
                assert known_length(pipeline) == length
            left = chain.left(pipeline.lanes)
            chain.go(pipeline, data.draw(st.integers(0, left)), data.draw(st.booleans()))
            states.append(pipeline.state_dict())
        chain.merge(states)
    for pipeline in chain.pipelines(data.draw(topologies(chain.recipe.num_lanes))):
        chain.go(pipeline, None, True)
    chain.check()


@pytest.mark.law("L4")
@examples(0.1)
@given(recipe=ending_recipes(), data=st.data())
def test_a_group_goes_on_in_its_own_order(recipe: Recipe, data: st.DataObject) -> None:
    """At every batch of a pass, pads included, though a step is read ahead."""
    run = Together(recipe)
    groups = data.draw(topologies(recipe.num_lanes))
    own = groups.options(data.draw(st.integers(0, groups.dp_degree - 1)))
    with run.agreeing():
        pipeline = recipe.build(**own)
        states = [pipeline.state_dict()]
        whole = []
        for batch in pipeline:
            whole.append(seen(pipeline, batch))
            states.append(plain(pipeline.state_dict()))
            assert plain(pipeline.state_dict(after=batch)) == states[-1]
        at = data.draw(st.integers(0, len(whole)))
        again = recipe.build(**own)
        again.load_state_dict(states[at])
        assert [seen(again, batch) for batch in again] == whole[at:]


@pytest.mark.law("L1")
@examples(0.1)
@given(recipe=ending_recipes(), data=st.data())
def test_take_ends_before(recipe: Recipe, data: st.DataObject) -> None:
    """`take` leaves the pass unfinished, and its state goes on."""
    run = Together(recipe)
    number = data.draw(st.integers(0, run.steps[0] * run.cycles * recipe.num_lanes))
    first = recipe.build().take(number)
    found = [seen(first, batch) for batch in first]
    assert len(found) == number
    rest = recipe.build()
    rest.load_state_dict(plain(first.state_dict()))
    found += [seen(rest, batch) for batch in rest]
    for lane in range(recipe.num_lanes):
        same_lane([one for one in found if one.lane == lane], run.wanted[lane, 0].batches)

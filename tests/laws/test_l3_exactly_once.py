"""L3: over any chain of states and restores, on any topologies, nothing is skipped and nothing delivered twice."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.chain import PASSES, Chain
from tests.laws.harness import Run, State, examples, first_pass, plain, run, same_error, same_lane, truths
from zephon.testing.recipes import Recipe
from zephon.testing.scheduler import forced_order
from zephon.testing.strategies import Group, executions, recipes, topologies

pytestmark = pytest.mark.law("L3")


def leg(chain: Chain, data: st.DataObject) -> None:
    """All groups of some topology start from the chain's state, and each stops where it likes."""
    groups, options = data.draw(topologies(chain.recipe.num_lanes)), data.draw(executions(chain.recipe))
    states: list[State] = []
    for pipeline in chain.pipelines(groups, **options):
        here = min(PASSES - 1, first_pass(pipeline.state_dict()))
        left, left_here = chain.left(pipeline.lanes), chain.left(pipeline.lanes, here)
        corners = st.sampled_from([0, min(1, left), left_here, min(left, left_here + 1), left])
        chain.go(pipeline, data.draw(st.one_of(corners, st.integers(0, left))), data.draw(st.booleans()))
        states.append(pipeline.state_dict())
    chain.merge(states)


@examples(1.0)
@given(recipe=recipes(), data=st.data())
def test_any_chain_of_restores(recipe: Recipe, data: st.DataObject) -> None:
    chain = Chain(recipe)
    for _ in range(data.draw(st.integers(0, 5))):
        leg(chain, data)
    for pipeline in chain.pipelines(data.draw(topologies(recipe.num_lanes))):
        chain.go(pipeline, None, True)
        counts = pipeline.counts()["dropped"]
        assert counts == {lane: chain.wanted[lane, PASSES - 1].dropped for lane in pipeline.lanes}
    chain.check()


@examples(0.15)
@given(recipe=recipes(), data=st.data(), seed=st.integers(0, 2**32))
def test_any_chain_of_restores_in_any_order_of_completion(recipe: Recipe, data: st.DataObject, seed: int) -> None:
    """What was read ahead is no part of a state."""
    chain = Chain(recipe)
    with forced_order(seed):
        for _ in range(data.draw(st.integers(1, 3))):
            leg(chain, data)
        for pipeline in chain.pipelines(data.draw(topologies(recipe.num_lanes))):
            chain.go(pipeline, None, True)
    chain.check()


def stopped(pipeline: zp.Pipeline, most: int) -> tuple[Run, State]:
    """Up to `most` batches, or to an error, and the state behind them."""
    found = run(pipeline, most)
    state = plain(pipeline.state_dict())
    pipeline.close()
    return found, state


@examples(0.25)
@given(recipe=recipes(failing="maybe"), data=st.data())
def test_a_state_behind_an_error_meets_it_again(recipe: Recipe, data: st.DataObject) -> None:
    """Each lane is alone in its group, and stops somewhere, at its error too; then it goes on, and meets the error."""
    groups = Group(recipe.num_lanes, "contiguous")
    for (lane, _), wanted in truths(recipe).items():
        most = data.draw(st.integers(0, len(wanted.batches) + (wanted.error is not None)))
        first, state = stopped(recipe.build(**groups.options(lane)), most)
        same_error(first.error, wanted.error if most > len(wanted.batches) else None)
        again = recipe.build(**groups.options(lane))
        again.load_state_dict(state)
        rest = run(again)
        same_lane(first.batches + rest.batches, wanted.batches, lane)
        same_error(rest.error, wanted.error)
        assert first.error is None or str(first.error) == str(rest.error)


@examples(0.1)
@given(recipe=recipes(), data=st.data())
def test_load_then_save_is_the_identity(recipe: Recipe, data: st.DataObject) -> None:
    pipeline = recipe.build()
    list(islice(pipeline, data.draw(st.integers(0, 20))))
    state = plain(pipeline.state_dict())
    pipeline.close()
    for _ in range(3):
        other = recipe.build()
        other.load_state_dict(state)
        assert plain(other.state_dict()) == state
        iter(other)
        assert plain(other.state_dict()) == state


def test_a_state_of_every_batch_goes_on_behind_it() -> None:
    """`state_dict(after=batch)` of any earlier batch, not of the last one alone."""
    recipe = Recipe.small()
    pipeline = recipe.build()
    batches = list(pipeline)
    states = [plain(pipeline.state_dict(after=batch)) for batch in batches]
    wanted = [batch.digest() for batch in batches]
    for number, state in enumerate(states, 1):
        pipeline.load_state_dict(state)
        assert [batch.digest() for batch in pipeline] == wanted[number:]

"""L4: restored on an unchanged topology, a group goes on as if it had not stopped, in the middle of a cycle too."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Seen, State, examples, first_pass, plain, seen
from zephon.testing.recipes import Recipe
from zephon.testing.strategies import Group, executions, recipes, topologies

pytestmark = pytest.mark.law("L4")

PASSES = 2


def go(pipeline: zp.Pipeline, most: int | None = None) -> list[Seen]:
    """A group's batches in its own order, through the ends of passes."""
    found: list[Seen] = []
    while first_pass(pipeline.state_dict()) < PASSES and (most is None or len(found) < most):
        left = None if most is None else most - len(found)
        found.extend(seen(pipeline, batch) for batch in islice(iter(pipeline), left))
    return found


def in_the_middle(recipe: Recipe, groups: Group, data: st.DataObject) -> State:
    """A merged state for which every group stopped where it liked."""
    states = []
    for group in range(groups.dp_degree):
        pipeline = recipe.build(**groups.options(group))
        go(pipeline, data.draw(st.integers(0, 12)))
        states.append(pipeline.state_dict())
        pipeline.close()
    return plain(zp.merge_states(states))


@examples(1.0)
@given(recipe=recipes(), data=st.data())
def test_a_group_goes_on_in_its_own_order(recipe: Recipe, data: st.DataObject) -> None:
    """Also where it began in the middle of a step that another topology left behind."""
    state = in_the_middle(recipe, data.draw(topologies(recipe.num_lanes)), data) if data.draw(st.booleans()) else None
    groups = data.draw(topologies(recipe.num_lanes))
    topology = groups.options(data.draw(st.integers(0, groups.dp_degree - 1)))
    uninterrupted = recipe.build(**topology)
    if state is not None:
        uninterrupted.load_state_dict(state)
    wanted = go(uninterrupted)

    found: list[Seen] = []
    for _ in range(data.draw(st.integers(1, 4))):
        pipeline = recipe.build(**topology, **data.draw(executions(recipe)))
        if state is not None:
            pipeline.load_state_dict(state)
        found += go(pipeline, data.draw(st.integers(0, max(0, len(wanted) - len(found)))))
        state = plain(pipeline.state_dict())  # a group's own state is enough for the same group
        pipeline.close()
    last = recipe.build(**topology)
    last.load_state_dict(state or {})
    assert found + go(last) == wanted

"""L1: the runner, parallelism, task size, prefetch and the order in which workers finish change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.harness import Lane, examples, run, same_group, same_lane, truth, truths
from zephon.testing.recipes import Children, DropIds, Fail, FailFlush, Long, Merge, Pairs, Recipe, Rows, Short, Step
from zephon.testing.scheduler import Order, forced_order
from zephon.testing.strategies import executions, recipes

pytestmark = pytest.mark.law("L1")

ORDERS: st.SearchStrategy[Order] = st.sampled_from(["random", "random", "first", "last"])


def wanted_lanes(recipe: Recipe) -> dict[int, Lane]:
    return {lane: found for (lane, _), found in truths(recipe).items()}


def check_inline(recipe: Recipe, **options: Any) -> None:
    """One pass on one group in this thread is the oracle's."""
    same_group(run(recipe.build(**options)), wanted_lanes(recipe), recipe.options["cycles_per_step"], options)


@examples(1.0)
@given(recipe=recipes(), data=st.data())
def test_any_order_of_completion(recipe: Recipe, data: st.DataObject) -> None:
    lanes = wanted_lanes(recipe)
    for _ in range(2):
        options = data.draw(executions(recipe))
        slow = data.draw(st.one_of(st.none(), st.integers(0, recipe.num_lanes - 1)))
        with forced_order(data.draw(st.integers(0, 2**32)), data.draw(ORDERS), slow):
            found = run(recipe.build(**options))
        same_group(found, lanes, recipe.options["cycles_per_step"], options)


@examples(0.5)
@given(recipe=recipes(), data=st.data())
def test_inline(recipe: Recipe, data: st.DataObject) -> None:
    check_inline(recipe, **data.draw(executions(recipe)))


@examples(0.2)
@given(recipe=recipes(), data=st.data())
def test_threads(recipe: Recipe, data: st.DataObject) -> None:
    options = data.draw(executions(recipe))
    with recipe.build(runner="threads", **options) as pipeline:
        same_group(run(pipeline), wanted_lanes(recipe), recipe.options["cycles_per_step"], options)


@examples(0.75)
@given(recipe=recipes(failing="maybe"), data=st.data())
def test_a_failing_record_ends_every_run_at_the_same_place(recipe: Recipe, data: st.DataObject) -> None:
    lanes, cycles = wanted_lanes(recipe), recipe.options["cycles_per_step"]
    texts = set()
    for runner in ("inline", "virtual"):
        options = data.draw(executions(recipe))
        if runner == "inline":
            found = run(recipe.build(**options))
        else:
            with forced_order(data.draw(st.integers(0, 2**32)), data.draw(ORDERS)):
                found = run(recipe.build(**options))
        same_group(found, lanes, cycles, options)
        texts.add(str(found.error))
    assert len(texts) == 1


@examples(0.05)
@given(recipe=recipes(failing="maybe"), data=st.data())
def test_a_failing_record_under_threads(recipe: Recipe, data: st.DataObject) -> None:
    options = data.draw(executions(recipe))
    with recipe.build(runner="threads", **options) as pipeline:
        same_group(run(pipeline), wanted_lanes(recipe), recipe.options["cycles_per_step"], options)


@examples(0.15)
@given(recipe=recipes(endless=True), data=st.data(), turns=st.integers(1, 6))
def test_an_endless_pass(recipe: Recipe, data: st.DataObject, turns: int) -> None:
    options = data.draw(executions(recipe))
    with forced_order(data.draw(st.integers(0, 2**32))):
        pipeline = recipe.build(**options).take(turns * recipe.num_lanes)
        found = run(pipeline)
    for lane in range(recipe.num_lanes):
        wanted = truth(recipe, lane, most=turns)
        assert len(wanted.batches) == turns
        same_lane([batch for batch in found.batches if batch.lane == lane], wanted.batches, options)


def of(*steps: Step, rows: int = 8, lanes: int = 1, **options: Any) -> Recipe:
    """A small recipe without shuffle: ids 0, 1, 2, ... in order."""
    mixture = {"shuffle": "none", "chunk_size": 4}
    options = {"canonical_replicas": lanes, "cycles_per_step": 1, **options}
    return Recipe((Rows("alpha", (rows,)),), mixture, steps, options)


PAIRS = Pairs()
FOUND = {
    # Each of these was a difference between engine and oracle once.
    "drops behind the last sample of a short batch": of(
        Step("filter", (DropIds(frozenset({7})),)), Step("batch", (4,))
    ),
    "one accumulator instance applied twice": of(Step("apply", (PAIRS,)), Step("apply", (PAIRS,))),
    "what a record gave to pack before its failing child": of(
        Step("flat_map", (Long(),)), Step("pack", (4,), {"oversize": "error"}), Step("batch", (1,))
    ),
    "a failing flush at the end of a lane": of(Step("apply", (FailFlush(),)), Step("batch", (3,))),
    "a failing group of the last flush": of(Step("map_batches", (Short(), 3)), Step("batch", (4,))),
    "drops of a flush that fails later in the chain": of(
        Step("apply", (Pairs(),)), Step("apply", (FailFlush(),)), Step("batch", (2,)), rows=7
    ),
    "a merged group of text": of(Step("map_batches", (Merge(), 2)), Step("batch", (2, True)), flush_every_k_chunks=1),
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("task_records", [1, 3, 512])
def test_found_before(found: str, task_records: int) -> None:
    recipe = FOUND[found]
    lanes = wanted_lanes(recipe)
    same_group(run(recipe.build(task_records=task_records)), lanes, 1)
    with forced_order(task_records):
        same_group(run(recipe.build(parallelism=4, task_records=task_records)), lanes, 1)


@pytest.mark.parametrize("parallelism", [1, {"flat_map": 1, "flat_map_2": 2}])
def test_an_error_names_a_child_of_a_child_alike_in_one_stage_and_in_two(parallelism: Any) -> None:
    once = Step("flat_map", (Children(1, 1),))
    recipe = of(once, once, Step("map", (Fail(frozenset({3})),)), Step("batch", (2,)))
    assert "row 3, child 0.0:" in str(run(recipe.build(parallelism=parallelism)).error)


@pytest.mark.parametrize("one", [31_192, 3_132])
def test_a_dry_stretch_is_judged_the_same_at_any_task_size(one: int) -> None:
    """One record of 16,384 passes; it comes again 11 pointers behind a round of the data, or 24 before one."""
    rows = (5_000, 5_000, 5_000, 1_384)
    datasets = tuple(Rows(f"part{number}", (length,), number) for number, length in enumerate(rows))
    mixture = {"seed": 3, "chunk_size": 256, "end": "repeat"}
    keep = Step("filter", (DropIds(frozenset(range(4 * 10_000)) - {one}),))
    recipe = Recipe(datasets, mixture, (keep, Step("batch", (1,))), {"canonical_replicas": 1})
    wanted = run(recipe.build(task_records=16).take(2))
    for size in (100, 256):
        found = run(recipe.build(task_records=size).take(2))
        assert (len(found.batches), str(found.error)) == (len(wanted.batches), str(wanted.error)), size
        assert found.batches == wanted.batches

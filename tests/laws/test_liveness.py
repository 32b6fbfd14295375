"""DESIGN 4.6: the flow never stands still, and what it keeps ready for a lane is bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.harness import examples, run, same_group, truths
from zephon.engine import Engine
from zephon.plan.limits import lane_batches, lane_limit
from zephon.testing.recipes import Add, Children, DropIds, Merge, Recipe, Rows, Step
from zephon.testing.scheduler import Order, forced_order
from zephon.testing.strategies import ids_of_lanes

pytestmark = [pytest.mark.law("L8"), pytest.mark.law("L9")]

MOST_CHILDREN = 3
MOVES_A_POINTER = 12  # pumps and completions a pointer may cost: a few for each of at most three stages


class Watch:
    """Sees an engine after every move: no lane may have more ready than the bound allows."""

    def __init__(self, samples_a_pointer: int, held: int) -> None:
        self._samples, self._held = samples_a_pointer, held
        self.most = Counter[int]()

    def __call__(self, engine: Engine) -> None:
        for lane, buffer in engine.tail.buffers.items():
            self.most[lane] = max(self.most[lane], len(buffer))

    def bound(self, engine: Engine) -> int:
        """T - 1 + ceil((Q e + held + B - 1) / B) batches, and the mark of the lane's end."""
        job = engine.job
        pointers = lane_limit(job.plan, job.task_records)
        size = job.plan.batch.size
        return lane_batches(job.prefetch_batches, pointers, self._samples, self._held, size) + 1


@st.composite
def tight(draw: st.DrawFn) -> tuple[Recipe, int]:
    """A pipeline with a lane that gives nothing, up to 64 lanes, and stages behind accumulators; and what it holds."""
    lanes = draw(st.sampled_from([1, 2, 3, 8, 64]))
    rows = Rows("alpha", (draw(st.integers(1, 6 * lanes)),))
    mixture = {"shuffle": "none", "chunk_size": draw(st.integers(1, 4))}
    bare = Recipe((rows,), mixture, (), {"canonical_replicas": lanes})
    dry = draw(st.lists(st.integers(0, lanes - 1), max_size=3, unique=True))
    held, steps = 0, [Step("filter", (DropIds(ids_of_lanes(bare, dry)),))]
    if draw(st.booleans()):
        steps.append(Step("flat_map", (Children(0, MOST_CHILDREN),)))
    if draw(st.booleans()):
        held = draw(st.integers(1, 5))
        steps.append(Step("map_batches", (Merge(), held)))
    if draw(st.booleans()):
        buffer = draw(st.integers(1, 9))
        held += buffer
        steps.append(Step("shuffle", (buffer,)))
        steps.append(Step("map", (Add(1),)))
    steps.append(Step("batch", (draw(st.integers(1, 4)),)))
    options = {"canonical_replicas": lanes, "cycles_per_step": 1, "flush_every_k_chunks": draw(st.integers(1, 4))}
    return Recipe((rows,), mixture, tuple(steps), options), held


ORDERS: st.SearchStrategy[Order] = st.sampled_from(["random", "first", "last"])


@examples(1.0)
@given(tight=tight(), seed=st.integers(0, 2**32), order=ORDERS, data=st.data())
def test_it_always_moves_and_stays_within_its_bound(
    tight: tuple[Recipe, int], seed: int, order: Order, data: st.DataObject
) -> None:
    recipe, held = tight
    small = st.integers(1, 2)
    parallelism, task_records, prefetch = data.draw(small), data.draw(small), data.draw(small)
    watch = Watch(MOST_CHILDREN, held)
    slow = data.draw(st.integers(0, recipe.num_lanes - 1))
    with forced_order(seed, order, slow, watch) as drivers:
        found = run(recipe.build(parallelism=parallelism, task_records=task_records, prefetch_batches=prefetch))
    same_group(found, {lane: lane_truth for (lane, _), lane_truth in truths(recipe).items()}, 1)
    [driver] = drivers
    pointers = recipe.source().length(0)
    assert pointers is not None
    assert driver.moves <= 50 + MOVES_A_POINTER * (pointers + recipe.num_lanes)
    assert max(watch.most.values()) <= watch.bound(driver.engine)


def test_sixty_four_lanes_of_one_group_and_one_that_passes_nothing() -> None:
    """The starved lane is asked for first; it must neither stop the others' workers nor let the others run ahead."""
    mixture = {"shuffle": "none", "chunk_size": 8}
    options = {"canonical_replicas": 64, "cycles_per_step": 1, "flush_every_k_chunks": 2}
    bare = Recipe((Rows("alpha", (64 * 100,)),), mixture, (), options)
    starve = Step("filter", (DropIds(ids_of_lanes(bare, [0])),))
    steps = (starve, Step("map_batches", (Merge(), 3)), Step("batch", (2,)))
    recipe = Recipe(bare.datasets, mixture, steps, options)
    watch = Watch(1, 3)
    with forced_order(7, "last", 0, watch) as drivers:
        found = run(recipe.build(parallelism=2, task_records=1, prefetch_batches=1))
    assert found.error is None
    assert Counter(batch.lane for batch in found.batches) == dict.fromkeys(range(1, 64), 19)
    assert max(watch.most.values()) <= watch.bound(drivers[0].engine)


@pytest.mark.parametrize("seed", range(5))
def test_what_waits_between_stages_is_within_the_bound(seed: int) -> None:
    """A second stage that finishes nothing until the first can do no more, then all at once; nobody takes a batch."""
    steps = (Step("map", (Add(1),)), Step("map", (Add(2),)), Step("batch", (1,)))
    options = {"canonical_replicas": 1, "cycles_per_step": 1}
    recipe = Recipe((Rows("alpha", (200,)),), {"shuffle": "none"}, steps, options)
    watch = Watch(1, 0)
    pipeline = recipe.build(parallelism={"map": 1, "map_2": 8}, task_records=1, prefetch_batches=1)
    with forced_order(seed) as drivers:
        pipeline._session.drive(0)
    engine, (first, second) = drivers[0].engine, drivers[0].schedule.pools
    while engine.pump() or first.unfinished:
        while first.unfinished:
            first.complete(0)
    while second.unfinished:
        second.complete(0)
    while engine.pump() or drivers[0].move():
        watch(engine)
    bound = watch.bound(engine)
    engine.close()
    assert 1 < watch.most[0] <= bound

"""L1 across the process runner: ring sizes, task sizes, workers, stages and restores change no byte and no order."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Lane, examples, plain, run, same_group, truths
from tests.process.functions import Enrich, burn
from tests.process.helpers import digests, line
from zephon.testing.recipes import (
    Along,
    Children,
    Keep,
    Merge,
    Noise,
    Pairs,
    Recipe,
    Reverse,
    Rows,
    SortRuns,
    Step,
    Thin,
    Words,
)
from zephon.testing.strategies import executions, recipes

pytestmark = pytest.mark.law("L1")


def of(*steps: Step, lanes: int = 3, shuffle: str = "global") -> Recipe:
    """A recipe over two datasets of several shards, with a row left out."""
    datasets = (Rows("alpha", (31, 9, 40), exclude=(5,)), Rows("beta", (33,), 1))
    mixture = {"shuffle": shuffle, "chunk_size": 7, "seed": 3, "weights": [3, 1], "end": "redistribute"}
    return Recipe(datasets, mixture, steps, {"canonical_replicas": lanes, "cycles_per_step": 2})


BATCH = Step("batch", (5,))
FIXED: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "one to one, random": (of(Step("map", (Noise(),)), Step("filter", (Keep(3, 1),)), BATCH), {}),
    "children, tiny tasks": (of(Step("flat_map", (Children(0, 4),)), BATCH), {"task_records": 1, "ring_bytes": 4096}),
    "two stages": (
        of(Step("map", (Noise(),)), Step("flat_map", (Children(1, 3),)), Step("filter", (Keep(5, 0),)), BATCH),
        {"parallelism": {"map": 1, "flat_map": 2, "filter": 1}, "task_records": 3},
    ),
    "rows of a training step, of many widths": (
        of(Step("tokenize", (Words(),)), Step("batch", (3,)), Step("to_training", (), {"pad_to_multiple_of": 4})),
        {},
    ),
    "packs of a training step, flat": (
        of(
            Step("tokenize", (Words(),)),
            Step("pack", (8,)),
            Step("batch", (3,)),
            Step("to_training", (-1,), {"flatten": True}),
        ),
        {},
    ),
    "groups, records cross twice": (
        of(Step("map_batches", (Thin(), 4)), Step("map_batches", (Reverse(), 3)), BATCH),
        {"parallelism": 2, "task_records": 5, "ring_bytes": 4096},
    ),
    "tokens to packs": (
        of(
            Step("tokenize", (Words(),), {"max_length": 4, "overflow": "split"}),
            Step("shuffle", (10,)),
            Step("pack", (11,), {"pad_id": 7}),
            Step("batch", (2,)),
            lanes=2,
        ),
        {"parallelism": 3, "task_records": 16},
    ),
    "packs with what belongs to the tokens": (
        of(
            Step("tokenize", (Words(),)),
            Step("map", (Along(),)),
            Step("pack", (11, "best_fit_wrap"), {"num_bins": 4, "fields": {"labels": -100}, "homogeneous": "dataset"}),
            Step("batch", (2,)),
        ),
        {"parallelism": 2, "task_records": 8},
    ),
    "packs of whole records": (
        of(
            Step("tokenize", (Words(),)),
            Step("pack", (11, "best_fit"), {"num_bins": 4, "output": "list"}),
            Step("batch", (2,)),
        ),
        {"parallelism": 2, "task_records": 8},
    ),
    "accumulators in a row": (
        of(Step("apply", (SortRuns(5),)), Step("apply", (Pairs(),)), Step("map_batches", (Merge(), 2)), BATCH),
        {"parallelism": 4, "task_records": 512},
    ),
    "no operators": (of(BATCH, lanes=8), {"parallelism": 1, "prefetch_batches": 1}),
}


def wanted(recipe: Recipe) -> dict[int, Lane]:
    return {lane: found for (lane, _), found in truths(recipe).items()}


def check(recipe: Recipe, **options: Any) -> None:
    with recipe.build(runner="process", **options) as pipeline:
        same_group(run(pipeline), wanted(recipe), recipe.options["cycles_per_step"], options)


@pytest.mark.parametrize("name", FIXED)
def test_fixed_pipelines(name: str) -> None:
    recipe, options = FIXED[name]
    check(recipe, **options)


PROCESS = st.fixed_dictionaries({"ring_bytes": st.sampled_from([4096, 5000, 16_384, 1 << 20])})


@examples(0.03)
@given(recipe=recipes(max_lanes=5), data=st.data())
def test_any_pipeline(recipe: Recipe, data: st.DataObject) -> None:
    check(recipe, **data.draw(executions(recipe)), **data.draw(PROCESS))


@examples(0.015)
@given(recipe=recipes(failing="maybe", max_lanes=4), data=st.data())
def test_a_failing_record(recipe: Recipe, data: st.DataObject) -> None:
    check(recipe, **data.draw(executions(recipe)), **data.draw(PROCESS))


@pytest.mark.slow
@examples(1.0)
@given(recipe=recipes(failing="maybe"), data=st.data())
def test_many_pipelines(recipe: Recipe, data: st.DataObject) -> None:
    check(recipe, **data.draw(executions(recipe)), **data.draw(PROCESS))


def rich(**options: Any) -> zp.Pipeline:
    return line(100, Enrich(), burn, batch=7, **{"canonical_replicas": 3, **options})


def test_every_form_of_column_gives_the_bytes_of_inline() -> None:
    reference = digests(rich(runner="inline"))
    for options in (
        {"ring_bytes": 4096, "task_records": 1},
        {"parallelism": {"burn": 1, "map": 3}},
        {"parallelism": 4},
    ):
        with rich(**options) as pipeline:
            assert digests(pipeline) == reference, options


def test_a_chain_of_restores_across_runners() -> None:
    """States of one runner continue in another, in the middle of a step and on other settings."""
    reference = digests(rich(runner="inline"))
    legs = [("process", 4), ("inline", 3), ("process", 1), ("threads", 2), ("process", None)]
    found: list[str] = []
    state = None
    for number, (runner, count) in enumerate(legs):
        with rich(runner=runner, parallelism=1 + number % 3, task_records=1 + 5 * number) as pipeline:
            if state is not None:
                pipeline.load_state_dict(state)
            found += digests(islice(iter(pipeline), count))
            state = plain(pipeline.state_dict())
    assert found == reference


def test_two_pipelines_at_once() -> None:
    """Training and evaluation, batch by batch in turn; one is closed while the other one goes on."""
    reference = digests(rich(runner="inline"))
    with rich() as one, rich(parallelism=1) as other:
        pairs = list(islice(zip(one, other, strict=True), 6))
        assert [digests(pair) for pair in pairs] == [[digest] * 2 for digest in reference[:6]]
        other.close()
        assert digests(one) == reference


def test_the_second_pass_of_one_pipeline() -> None:
    with rich() as processes, rich(runner="inline") as inline:
        for _ in range(2):
            assert digests(processes) == digests(inline)

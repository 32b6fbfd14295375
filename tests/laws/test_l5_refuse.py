"""L5: a changed definition is refused by the names of its fields; each of them can be allowed; the rest may change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Seen, State, examples, plain, run, seen
from zephon.errors import CheckpointError
from zephon.plan.fingerprint import differences
from zephon.testing.recipes import Add, Keep, Pairs, Recipe, Rows, Step, Words
from zephon.testing.strategies import executions, recipes, topologies

pytestmark = pytest.mark.law("L5")

DATASETS = (Rows("alpha", (40, 30)), Rows("beta", (30,), 1))
MIXTURE = {"weights": [2, 1], "seed": 5, "chunk_size": 4}
OPTIONS = {"canonical_replicas": 2, "cycles_per_step": 2, "flush_every_k_chunks": 2}
STEPS = {
    "keep": Step("filter", (Keep(3, 1),), {"name": "keep"}),
    "add": Step("map", (Add(1),), {"name": "add"}),
    "words": Step("tokenize", (Words(),), {"name": "words", "max_length": 6}),
    "shuffle": Step("shuffle", (7,)),
    "pack": Step("pack", (8,)),
    "batch": Step("batch", (2,)),
}


def recipe_of(
    changes: dict[str, Step | None] | None = None,
    *,
    datasets: tuple[Rows, ...] = DATASETS,
    mixture: dict[str, Any] | None = None,
    order: list[str] | None = None,
    **options: Any,
) -> Recipe:
    """The recipe above with steps replaced or, where None, left out, and settings changed."""
    steps = {**STEPS, **(changes or {})}
    chosen = [step for name in order or steps if (step := steps[name]) is not None]
    return Recipe(datasets, {**MIXTURE, **(mixture or {})}, tuple(chosen), {**OPTIONS, **options})


def state_after(recipe: Recipe, batches: int) -> State:
    """The state of one group, as JSON carries it."""
    with recipe.build() as pipeline:
        assert len(list(islice(pipeline, batches))) == batches
        return plain(pipeline.state_dict())


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


CHANGES: dict[str, tuple[Recipe, list[str]]] = {
    "a function": (recipe_of({"keep": Step("filter", (Keep(4, 1),), {"name": "keep"})}), ["keep.code"]),
    "a policy": (
        recipe_of({"add": Step("map", (Add(1),), {"name": "add", "on_error": "skip"})}),
        ["add.on_error"],
    ),
    "a declared version": (
        recipe_of({"add": Step("map", (Add(1),), {"name": "add", "version": "2"})}),
        ["add.code"],
    ),
    "a tokenizer": (
        recipe_of({"words": Step("tokenize", (words,), {"name": "words", "max_length": 6})}),
        ["words.tokenizer"],
    ),
    "max_length of tokenize": (
        recipe_of({"words": Step("tokenize", (Words(),), {"name": "words", "max_length": 5})}),
        ["words.max_length"],
    ),
    "overflow": (
        recipe_of({"words": Step("tokenize", (Words(),), {"name": "words", "max_length": 6, "overflow": "truncate"})}),
        ["words.overflow"],
    ),
    "buffer_size": (recipe_of({"shuffle": Step("shuffle", (8,))}), ["shuffle.buffer_size"]),
    "mode": (recipe_of({"shuffle": Step("shuffle", (7, "block"))}), ["shuffle.mode"]),
    "max_length of pack": (recipe_of({"pack": Step("pack", (9,))}), ["pack.max_length"]),
    "oversize": (recipe_of({"pack": Step("pack", (8,), {"oversize": "drop"})}), ["pack.oversize"]),
    "pad_id": (recipe_of({"pack": Step("pack", (8,), {"pad_id": 3})}), ["pack.pad_id"]),
    "the algorithm": (recipe_of({"pack": Step("pack", (8, "best_fit"))}), ["pack.algorithm", "pack.num_bins"]),
    "max_sequences": (recipe_of({"pack": Step("pack", (8,), {"max_sequences": 2})}), ["pack.max_sequences"]),
    "min_length": (recipe_of({"pack": Step("pack", (8,), {"min_length": 2})}), ["pack.min_length"]),
    "homogeneous": (recipe_of({"pack": Step("pack", (8,), {"homogeneous": "dataset"})}), ["pack.homogeneous"]),
    "loss_mask": (recipe_of({"pack": Step("pack", (8,), {"loss_mask": True})}), ["pack.loss_mask"]),
    "drop_last": (recipe_of({"batch": Step("batch", (2, True))}), ["batch.drop_last"]),
    "the order": (recipe_of(order=["add", "keep", "words", "shuffle", "pack", "batch"]), ["order"]),
    "a removed operator": (
        recipe_of({"add": None}),
        ["add.type", "add.code", "add.on_error", "order"],
    ),
    "a removed accumulator": (
        recipe_of({"shuffle": None}),
        ["shuffle.type", "shuffle.buffer_size", "shuffle.mode", "order"],
    ),
    "an added operator": (
        recipe_of({"more": Step("map", (Add(2),), {"name": "more"})}, order=["keep", "more", *list(STEPS)[1:]]),
        ["more.type", "more.code", "more.on_error", "order"],
    ),
    "an added accumulator": (
        recipe_of({"pairs": Step("apply", (Pairs(),))}, order=["keep", "add", "pairs", *list(STEPS)[2:]]),
        ["pairs.type", "pairs.class", "order"],
    ),
    "weights": (recipe_of(mixture={"weights": zp.MixtureSchedule({0: [2, 1], 64: [1, 1]})}), ["source.weights"]),
    "chunk_size": (recipe_of(mixture={"chunk_size": 5}), ["source.chunk_size"]),
    "the shuffle of the source": (recipe_of(mixture={"shuffle": "none"}), ["source.shuffle"]),
    "epochs": (recipe_of(mixture={"epochs": 2}), ["source.epochs"]),
    "the end": (recipe_of(mixture={"end": "stop"}), ["source.end", "source.epochs"]),
    "another end": (
        recipe_of(mixture={"end": "repeat", "max_epochs": 2}),
        ["source.end", "source.epochs", "source.max_epochs"],
    ),
    "rows": (
        recipe_of(datasets=(Rows("alpha", (40, 31)), DATASETS[1])),
        ["datasets.alpha.rows", "datasets.alpha.hash"],
    ),
    "content": (recipe_of(datasets=(Rows("alpha", (40, 30), 2), DATASETS[1])), ["datasets.alpha.hash"]),
    "shards": (
        recipe_of(datasets=(Rows("alpha", (30, 30, 10)), DATASETS[1])),
        ["datasets.alpha.shards", "datasets.alpha.hash"],
    ),
    "excluded rows": (
        recipe_of(datasets=(Rows("alpha", (40, 30), exclude=(3,)), DATASETS[1])),
        ["datasets.alpha.exclude"],
    ),
    "flush_every_k_chunks": (recipe_of(flush_every_k_chunks=3), ["flush_every_k_chunks"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_name_and_allowed_by_name(change: str) -> None:
    other, fields = CHANGES[change]
    state = state_after(recipe_of(), 5)
    pipeline = other.build()
    with pytest.raises(CheckpointError) as caught:
        pipeline.load_state_dict(state)
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert sorted(named) == sorted(fields)
    for left_out in fields:
        with pytest.raises(CheckpointError, match=left_out):
            pipeline.load_state_dict(state, allow=[field for field in fields if field != left_out])
    # Refused, the pipeline is as it was; allowed, it goes on, and its own states obey L3 again.
    assert all(lane["samples"] == 0 for lane in pipeline.state_dict()["lanes"].values())
    check_goes_on(other, state, fields)


def check_goes_on(recipe: Recipe, state: State, fields: list[str]) -> None:
    """From an allowed state, one run to the end is the same as any two."""
    whole = recipe.build()
    whole.load_state_dict(state, allow=fields)
    wanted = run(whole)
    assert wanted.error is None
    for most in range(min(9, len(wanted.batches) + 1)):
        first = recipe.build()
        first.load_state_dict(state, allow=fields)
        found = run(first, most)
        second = recipe.build()
        second.load_state_dict(plain(first.state_dict()))
        first.close()
        assert found.batches + run(second).batches == wanted.batches, most


def test_an_accumulator_may_join_a_run_that_had_none() -> None:
    """The state's place is then in the middle of a chunk, where a window never begins."""
    bare = {"shuffle": None, "pack": None}
    before, after = recipe_of({**bare}), recipe_of({"pack": None})
    for batches in range(1, 12):
        fields = ["shuffle.type", "shuffle.buffer_size", "shuffle.mode", "order"]
        check_goes_on(after, state_after(before, batches), fields)


LONG = {"shuffle": 300, "pack": {"algorithm": "best_fit", "num_bins": 20}, "between": False, "keep": 0}


def held_line(**changes: Any) -> zp.Pipeline:
    """A line without windows, whose shuffle and pack hold records."""
    setting = {**LONG, **changes}
    rows = zp.Dataset.from_list("rows", [{"input_ids": [i] * (1 + i % 7), "id": i} for i in range(3000)])
    line = zp.Pipeline(zp.StaticMixture(rows, seed=3, chunk_size=8)).filter(Keep(5, setting["keep"]), name="keep")
    line = line.shuffle(setting["shuffle"])
    line = line.map(Add(0), name="between") if setting["between"] else line
    line = line.pack(16, **setting["pack"]) if setting["pack"] else line
    line = line.ensure_mixture([1], buffer_size=9) if setting.get("mixture") else line
    return line.batch(4).options(canonical_replicas=2, runner="inline", flush_every_k_chunks=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shuffle": 500}, r"'shuffle' cannot be set otherwise .*shuffle\.buffer_size: the state has 300, this .* 500"),
        ({"shuffle": 20}, r"shuffle\.buffer_size"),
        ({"pack": {"algorithm": "best_fit_wrap", "num_bins": 20}}, r"pack\.algorithm"),
        ({"pack": {"algorithm": "best_fit", "num_bins": 5}}, r"pack\.num_bins"),
        (
            {"shuffle": 500, "pack": {"algorithm": "wrap"}},
            r"'shuffle', 'pack' cannot be .*buffer_size.*pack\.algorithm",
        ),
        ({"pack": None}, r"steps that hold records are 'shuffle', 'pack', this pipeline's 'shuffle'; "),
        ({"between": True}, r"are 'shuffle', 'pack', this pipeline's 'shuffle', then behind operators 'pack'; "),
        ({"mixture": True}, r"this pipeline's 'shuffle', 'pack', 'ensure_mixture'; "),
    ],
)
def test_what_holds_records_is_not_set_otherwise_whatever_is_allowed(changes: dict[str, Any], says: str) -> None:
    """The state that the change would need does not exist: documents would be lost and come twice without a word."""
    begun, other = held_line().take(150), held_line(**changes)
    list(begun)
    state = plain(begun.state_dict())
    assert all(lane["held"] for lane in state["lanes"].values())
    fields = [d.field for d in differences(state["fingerprint"], other._session.resolved.fingerprint)]
    for allow in ([], fields):
        with pytest.raises(CheckpointError, match=f"(?s){says}.*allow= cannot pass it; go back .* between two passes"):
            other.load_state_dict(state, allow=allow)
    finished = held_line()
    list(finished)
    other.load_state_dict(plain(finished.state_dict()), allow=fields)  # between two passes nothing is held
    assert next(iter(other)).step == 0


def test_what_comes_before_it_may_change_with_leave_until_it_shows() -> None:
    begun, other = held_line().take(150), held_line(keep=1)
    list(begun)
    state = plain(begun.state_dict())
    with pytest.raises(CheckpointError, match=r"allow=\['keep\.code'\]"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow=["keep.code"])
    with pytest.raises(CheckpointError, match=r"held when the state was taken .* dropped as keep\.filtered"):
        next(iter(other))


def test_all_fields_of_a_dataset_or_a_step_may_be_allowed_together() -> None:
    """`datasets.alpha` is all of that dataset, and of no other whose name begins so."""
    datasets = (Rows("alpha", (40, 30)), Rows("alpha.two", (30,), 1))
    state = state_after(recipe_of(datasets=datasets), 5)
    other = recipe_of(datasets=(Rows("alpha", (30, 30, 10)), Rows("alpha.two", (30,), 1)))
    check_goes_on(other, state, ["datasets.alpha"])
    second = recipe_of(datasets=(datasets[0], Rows("alpha.two", (20, 10), 1))).build()
    for allow in (["datasets.alpha"], ["datasets"], ["datasets.alpha.two.rows"], [""]):
        with pytest.raises(CheckpointError, match=r"(?m)^  datasets\.alpha\.two\.hash: ") as caught:
            second.load_state_dict(state, allow=allow)
        assert "datasets.alpha.two.shards" in str(caught.value)
    second.load_state_dict(state, allow=["datasets.alpha.two"])
    pack = recipe_of({"pack": Step("pack", (8, "best_fit"))}).build()
    pack.load_state_dict(state_after(recipe_of(), 5), allow=["pack"])


def test_what_was_allowed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also by the pipelines that are made of the one that loaded the state; what they allow besides is new."""

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text.split(":")[0] for text in found if "allow" in text]

    state = state_after(recipe_of(), 5)
    loaded = CHANGES["buffer_size"][0].build()
    loaded.load_state_dict(state, allow=["shuffle.buffer_size", "flush_every_k_chunks", "nothing"])
    assert said() == [
        "allowed change of shuffle.buffer_size",
        "allow='flush_every_k_chunks' names no field that differs",
        "allow='nothing' names no field that differs",
    ]
    list(loaded.take(2))
    assert said() == []
    list(loaded.options(flush_every_k_chunks=4).take(2))
    assert said() == ["allowed change of flush_every_k_chunks"]
    loaded.load_state_dict(state, allow=["shuffle"])
    assert said() == ["allowed change of shuffle.buffer_size"]


def test_an_explicit_number_of_lanes_is_kept_for_life() -> None:
    state = state_after(recipe_of(), 4)
    for lanes in (1, 3, 4):
        pipeline = recipe_of(canonical_replicas=lanes).build()
        with pytest.raises(CheckpointError, match=f"canonical_replicas={lanes}.*2 lanes"):
            pipeline.load_state_dict(state, allow=["canonical_replicas"])
    unset = recipe_of(canonical_replicas=None).build()
    unset.load_state_dict(state)
    assert unset.lanes == [0, 1]


def test_the_seed_comes_from_the_state_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    recipe, other = recipe_of(), recipe_of(mixture={"seed": 6})
    wanted = run(recipe.build()).batches
    pipeline = other.build()
    with caplog.at_level(logging.INFO, "zephon"):
        pipeline.load_state_dict(state_after(recipe, 5))
    assert any("seed 5 comes from the state" in record.getMessage() for record in caplog.records)
    assert run(pipeline).batches == wanted[5:]
    assert run(other.build()).batches != wanted


def step_digests(pipeline: zp.Pipeline) -> list[dict[int, list[Any]]]:
    """Per global step and lane, the origins of its samples in order: what does not depend on the batch size."""
    return [
        {lane: [o for b in step if b.lane_id == lane for o in b.origins] for lane in pipeline.lanes}
        for step in pipeline.steps()
    ]


@pytest.mark.parametrize(("size", "cycles"), [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_the_batch_shape_may_change_between_steps(size: int, cycles: int, steps: int) -> None:
    def shaped(size: int, cycles: int) -> Recipe:
        return recipe_of({"batch": Step("batch", (size,)), "pack": None}, cycles_per_step=cycles)

    before = shaped(4, 2).build()
    wanted = step_digests(shaped(4, 2).build())
    iterator = before.steps()
    for _ in range(steps):
        next(iterator)
    after = shaped(size, cycles).build()
    after.load_state_dict(plain(before.state_dict()))
    found = list(after.steps())
    assert [batch.step for batch in found[0]] == [steps] * len(found[0])
    after.load_state_dict(plain(before.state_dict()))
    assert step_digests(after) == wanted[steps:]
    before.close()


@pytest.mark.parametrize("batches", [1, 2, 3, 5, 6])
@pytest.mark.parametrize(("size", "cycles"), [(4, 1), (1, 4), (2, 1), (3, 2)])
def test_the_batch_shape_may_not_change_in_the_middle_of_a_step(batches: int, size: int, cycles: int) -> None:
    """2 lanes of 2 batches a step: only every fourth batch ends one."""
    other = recipe_of({"batch": Step("batch", (size,))}, cycles_per_step=cycles).build()
    with pytest.raises(CheckpointError, match="in the middle of a global step"):
        other.load_state_dict(state_after(recipe_of(), batches))


def test_the_batch_shape_may_not_change_where_lanes_are_mid_step_in_different_passes() -> None:
    recipe = recipe_of()
    first = recipe.build(dp_degree=2, dp_group_id=0)
    list(first)
    list(islice(first, 1))  # lane 0: one batch of two into the next pass
    second = recipe.build(dp_degree=2, dp_group_id=1)
    list(islice(second, 2))  # lane 1: one whole step of this one
    merged = plain(zp.merge_states([first.state_dict(), second.state_dict()]))
    first.close()
    second.close()
    with pytest.raises(CheckpointError, match="in the middle of a global step"):
        recipe_of({"batch": Step("batch", (4,))}, cycles_per_step=1).build().load_state_dict(merged)


@examples(0.25)
@given(recipe=recipes(), data=st.data())
def test_what_is_no_data_setting_may_change(recipe: Recipe, data: st.DataObject) -> None:
    """Runner, parallelism, task size, prefetch, take and topology are in no fingerprint."""
    most = data.draw(st.integers(0, 10))
    first = recipe.build(**data.draw(executions(recipe)))
    list(islice(first, most))
    state = plain(first.state_dict())
    first.close()
    groups = data.draw(topologies(recipe.num_lanes))
    found: dict[int, list[Seen]] = {}
    for options in (groups.options(0), {"runner": "threads"}, data.draw(executions(recipe))):
        with recipe.build(**options).take(3) as other:
            other.load_state_dict(state)
            for batch in other:
                found.setdefault(batch.lane_id, []).append(seen(other, batch))
    wanted = recipe.build()
    wanted.load_state_dict(state)
    rest = run(wanted).batches + run(wanted).batches  # where a group's lanes are through with a pass, of the next one
    for lane, batches in found.items():
        own = [batch for batch in rest if batch.lane == lane]
        assert all(batch in own for batch in batches)


Damage = Callable[[State], Any]

DAMAGES: dict[str, Damage] = {
    "no format": lambda state: state.pop("format"),
    "another format": lambda state: state.update(format="other"),
    "a later schema": lambda state: state.update(schema=99),
    "no seed": lambda state: state.pop("seed"),
    "a seed of text": lambda state: state.update(seed="5"),
    "lanes as a list": lambda state: state.update(lanes=list(state["lanes"].values())),
    "a lane that cannot be": lambda state: state["lanes"].update({"2": state["lanes"]["0"]}),
    "a lane without a number": lambda state: state["lanes"].update(x=state["lanes"].pop("0")),
    "a lane that is gone": lambda state: state["lanes"].pop("1"),
    "a negative place": lambda state: state["lanes"]["0"].update(chunk=-1),
    "a place of text": lambda state: state["lanes"]["0"].update(offset="3"),
    "a field that is gone": lambda state: state["lanes"]["1"].pop("samples"),
    "counts cut short": lambda state: state["lanes"]["1"].update(counts="gA=="),
    "no batch size": lambda state: state.update(batch_size=None),
    "a fingerprint of text": lambda state: state.update(fingerprint="abc"),
    "a fingerprint with a part gone": lambda state: state["fingerprint"].pop("operators"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused(damage: str) -> None:
    state = state_after(recipe_of(), 3)
    DAMAGES[damage](state)
    pipeline = recipe_of().build()
    with pytest.raises(CheckpointError):
        pipeline.load_state_dict(state)
    assert len(list(islice(pipeline, 1))) == 1  # and can be used as before
    pipeline.close()


@pytest.mark.parametrize("state", [None, [], "state", 3, {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError):
        recipe_of().build().load_state_dict(state)

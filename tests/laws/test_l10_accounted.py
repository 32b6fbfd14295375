"""L10: a pass reads its schedule's pointers, each once, and every loss is counted once, at its own time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.chain import PASSES, Chain
from tests.laws.harness import Recorder, examples, plain, run
from zephon.testing.oracle import OracleLane
from zephon.testing.recipes import Recipe, make_dataset
from zephon.testing.strategies import Group, executions, recipes, topologies
from zephon.work.static_mixture import StaticMixture

pytestmark = pytest.mark.law("L10")

Pointer = tuple[int, int, int]


def recorded(recipe: Recipe) -> tuple[StaticMixture, list[Recorder]]:
    """The recipe's source over datasets that note what is read."""
    recorders = [Recorder(make_dataset(rows)) for rows in recipe.datasets]
    return StaticMixture(recorders, **recipe.mixture), recorders


def schedule(recipe: Recipe, pass_index: int) -> list[Pointer]:
    """(dataset, epoch, row) of every pointer of a pass, by positions rather than by lanes."""
    source = recipe.source()
    length = source.length(pass_index)
    assert length is not None
    found = source.pointers(pass_index, 0, length)
    return list(zip(found.dataset.tolist(), found.epoch.tolist(), found.row.tolist(), strict=True))


@examples(0.5)
@given(recipe=recipes(), data=st.data())
def test_a_pass_reads_its_schedule_once(recipe: Recipe, data: st.DataObject) -> None:
    source, recorders = recorded(recipe)
    wanted = schedule(recipe, 0)
    assert len(set(wanted)) == len(wanted)
    pipeline = recipe.build(source, **data.draw(executions(recipe)))
    assert run(pipeline).error is None
    for number, (rows, recorder) in enumerate(zip(recipe.datasets, recorders, strict=True)):
        kept = Counter(row for dataset, _, row in wanted if dataset == number and row not in rows.exclude)
        assert Counter(recorder.rows) == kept


@examples(0.5)
@given(recipe=recipes(regroups=False))
def test_every_pointer_is_delivered_or_counted(recipe: Recipe) -> None:
    """Where nothing regroups or multiplies: pointers of a lane = samples + losses, each with a reason."""
    assume(all(step.method != "flat_map" for step in recipe.steps))
    pipeline = recipe.build()
    assert run(pipeline).error is None
    counts, source = pipeline.counts(), recipe.source()
    for lane in range(recipe.num_lanes):
        index = pointers = 0
        while found := len(source.chunk(lane, recipe.num_lanes, 0, index)):
            index, pointers = index + 1, pointers + found
        assert counts["delivered"][lane] + sum(counts["dropped"][lane].values()) == pointers


@examples(0.5)
@given(recipe=recipes(shares=True), data=st.data())
def test_what_went_out_of_turn_is_noted_like_a_loss(recipe: Recipe, data: st.DataObject) -> None:
    """Notes are no losses; the oracle has the same, and a restore does not count them again."""
    whole = recipe.build(**data.draw(executions(recipe)))
    batches = run(whole).batches
    counts = whole.counts()
    for lane in range(recipe.num_lanes):
        oracle = OracleLane(recipe.build(), lane)
        list(oracle)
        assert counts["noted"][lane] == {name: n for name, n in oracle.noted.items() if n}
    first, second = recipe.build(), recipe.build()
    run(first, data.draw(st.integers(0, len(batches))))
    second.load_state_dict(plain(first.state_dict()))
    first.close()
    run(second)
    assert second.counts() == counts


class Falls:
    """Looks at the counts of pipelines as they go on, and fails where one falls."""

    def __init__(self) -> None:
        self._most: dict[tuple[int, str], int] = {}

    def __call__(self, pipeline: zp.Pipeline) -> None:
        for key, amount in self._flat(pipeline).items():
            assert amount >= self._most.get(key, 0), key
            self._most[key] = amount

    def same(self, pipeline: zp.Pipeline) -> None:
        """A pipeline that was just restored reports what the last owners of its lanes reported."""
        now = self._flat(pipeline)
        assert {key: n for key, n in now.items() if n} == {
            key: n for key, n in self._most.items() if n and key[0] in pipeline.lanes
        }

    @staticmethod
    def _flat(pipeline: zp.Pipeline) -> dict[tuple[int, str], int]:
        counts = pipeline.counts()
        flat = {(lane, reason): n for lane, lost in counts["dropped"].items() for reason, n in lost.items()}
        return flat | {(lane, "delivered"): n for lane, n in counts["delivered"].items()}


@examples(0.5)
@given(recipe=recipes(), data=st.data())
def test_counts_never_fall_and_a_replay_does_not_count_again(recipe: Recipe, data: st.DataObject) -> None:
    chain, falls = Chain(recipe), Falls()
    chain.look = falls
    for _ in range(data.draw(st.integers(1, 4))):
        states = []
        for pipeline in chain.pipelines(data.draw(topologies(recipe.num_lanes)), **data.draw(executions(recipe))):
            falls.same(pipeline)
            chain.go(pipeline, data.draw(st.integers(0, min(8, chain.left(pipeline.lanes)))), data.draw(st.booleans()))
            states.append(pipeline.state_dict())
        chain.merge(states)
    for pipeline in chain.pipelines(Group(1, "contiguous")):
        falls.same(pipeline)
        chain.go(pipeline, None, True)
        lost = pipeline.counts()["dropped"]
        assert lost == {lane: chain.wanted[lane, PASSES - 1].dropped for lane in range(recipe.num_lanes)}

"""How a pass ends: what can be counted in advance, the settings in states, errors, and pads as a trainer sees them."""

from __future__ import annotations

import json
import logging
import operator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import zephon as zp
from zephon.plan.ends import MOST_WALKED

from .cases.helpers import saved


def odd(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 2)


def rows(number: int, name: str = "toy", **settings: Any) -> zp.Dataset:
    return zp.Dataset.from_list(name, [{"id": i} for i in range(number)], **settings)


def line(number: int, size: int = 2, drop_last: bool = False, keep: Any = None, **options: Any) -> zp.Pipeline:
    """Batches of `size` of a dataset or a number of rows; `keep` filters."""
    dataset = rows(number) if isinstance(number, int) else number
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=1, chunk_size=3))
    pipeline = pipeline.filter(keep) if keep else pipeline.map(dict, name="same").shuffle(4)
    settings = {"runner": "inline", "canonical_replicas": 3, "dp_degree": 1}
    return pipeline.batch(size, drop_last).options(**{**settings, **options})


def lengths(pipeline: zp.Pipeline, passes: int = 2) -> list[int]:
    return [sum(1 for _ in pipeline) for _ in range(passes)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("number", [1, 2, 5, 8, 9, 10, 17, 18, 19, 40])
def test_the_length_is_that_of_a_pass(number: int, drop_last: bool) -> None:
    for options in ({}, {"last_step": "drop"}, {"last_step": "pad"}, {"dp_degree": 2, "dp_group_id": 1}):
        pipeline = line(number, drop_last=drop_last, cycles_per_step=2, **options)
        assert lengths(pipeline) == [len(pipeline)] * 2, options
        assert pipeline  # also where it is empty
        assert len(list(pipeline)) == len(pipeline)


def test_the_length_does_not_move_with_the_iterator() -> None:
    pipeline = line(19)
    stream = iter(pipeline)
    next(stream)
    assert len(pipeline) == 10
    again = line(19)
    again.load_state_dict(pipeline.state_dict())
    assert len(again) == 10
    assert len(again.take(4)) == 4
    assert len(again.take(40)) == 10
    pipeline.close()


def test_excluded_rows_are_counted() -> None:
    excluded = rows(40, exclude=[("list", i) for i in (0, 3, 4, 5, 30, 31)])
    for options in ({}, {"last_step": "drop"}, {"last_step": "pad"}):
        pipeline = line(excluded, **options)
        for _ in range(2):  # each pass deals them out anew
            assert [len(pipeline)] == lengths(pipeline, 1)
    with patch("zephon.plan.ends.MOST_WALKED", 39), pytest.raises(TypeError, match="excluded"):
        len(line(excluded))
    assert MOST_WALKED > 39


UNKNOWN = {
    "filter": (lambda p: p.filter(odd), "operator 'odd' may give more or fewer"),
    "flat_map": (lambda p: p.flat_map(lambda r: [r, r]), "'flat_map' may give"),
    "skip": (lambda p: p.map(dict, on_error="skip"), "'dict' may give"),
    "pack": (lambda p: p.tokenize(lambda t: [1], "id").pack(4), "'pack' may give"),
    "split": (lambda p: p.tokenize(lambda t: [1], "id", max_length=4), "'tokenize' may give"),
    "batches": (lambda p: p.map_batches(lambda rs: rs, 4), "may give"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_length_that_cannot_be_known_says_why(name: str) -> None:
    add, why = UNKNOWN[name]
    pipeline = add(zp.Pipeline(zp.StaticMixture([rows(9)]))).batch(2).options(runner="inline")
    with pytest.raises(TypeError, match=why):
        len(pipeline)
    assert operator.length_hint(pipeline, -1) == -1
    assert pipeline


def test_known_are_the_lengths_of_tokenize_and_of_a_given_number_of_steps() -> None:
    pipeline = zp.Pipeline(zp.StaticMixture([rows(9)])).tokenize(lambda t: [1], "id", max_length=4, overflow="truncate")
    assert len(pipeline.batch(2).options(runner="inline")) == 5
    endless = zp.Pipeline(zp.StaticMixture([rows(9)], end="repeat")).batch(2).options(canonical_replicas=3, dp_degree=1)
    with pytest.raises(TypeError, match="endless"):
        len(endless)
    assert len(endless.options(steps_per_pass=5, cycles_per_step=2)) == 30


def test_a_source_of_ones_own_may_say_how_long_its_lanes_are() -> None:
    class Mute(zp.StaticMixture):
        def lane_length(self, lane: int, num_lanes: int, pass_index: int) -> int | None:
            return None

    class Wrong(zp.StaticMixture):
        def lane_length(self, lane: int, num_lanes: int, pass_index: int) -> int | None:
            return self.datasets[0].num_rows

    settings: dict[str, Any] = {"runner": "inline", "canonical_replicas": 3, "dp_degree": 1}
    with pytest.raises(TypeError, match=r"Mute\.lane_length"):
        len(zp.Pipeline(Mute([rows(9)])).batch(2).options(**settings))
    for last_step in ("drop", "pad"):
        pipeline = zp.Pipeline(Wrong([rows(9)])).batch(2).options(**settings, last_step=last_step)
        if last_step == "drop":
            with pytest.raises(zp.errors.DataError, match=r"has less than the 5 batches.*wrong lane_length"):
                list(pipeline)
        else:
            assert len(list(pipeline)) == 15


def test_a_given_number_of_steps() -> None:
    """Of an endless source, and of a finite one; what lies beyond is no part of the pass."""
    endless = zp.Pipeline(zp.StaticMixture([rows(9)], end="repeat", seed=4)).batch(2)
    endless = endless.options(runner="inline", canonical_replicas=2, dp_degree=1, steps_per_pass=3)
    first, second = ([batch.digest() for batch in endless] for _ in range(2))
    assert len(first) == len(second) == 6
    assert first != second
    assert saved(endless)["lanes"]["1"]["pass"] == 2
    finite = line(40, steps_per_pass=2)
    assert lengths(finite) == [6, 6]
    assert finite.counts()["dropped"] == {0: {}, 1: {}, 2: {}}


def test_a_lane_that_has_less_than_the_given_steps() -> None:
    """By arithmetic before anything starts; else when it ends."""
    with pytest.raises(zp.errors.ConfigError, match=r"wants 4 batches of every lane, and lane 1 has 3 in a pass"):
        iter(line(19, cycles_per_step=2, steps_per_pass=2))
    with pytest.raises(zp.errors.DataError, match=r"lane \d ended after 1 batches of pass 0, but steps_per_pass=3"):
        list(line(19, 4, keep=odd, steps_per_pass=3))
    padded = line(19, 4, keep=odd, steps_per_pass=3, last_step="pad")
    assert lengths(padded) == [9, 9]


def test_pads() -> None:
    """Copies of the first batch of the lowest lane that has one, in memory of their own; they count no sample."""
    pipeline = line(19, 3, last_step="pad")
    batches = list(pipeline)
    real, pads = [b for b in batches if not b.padding], [b for b in batches if b.padding]
    assert pads
    assert sum(batch.num_samples for batch in real) == 19
    first = real[0]["id"].copy()
    for pad in pads:
        assert (pad.num_samples, pad.origins) == (0, [])
        np.testing.assert_array_equal(pad["id"], first)
        pad["id"][:] = -1
    assert pads[0].copy().padding
    assert not real[0].padding
    assert sum(pipeline.counts()["delivered"].values()) == 19


def test_an_error_beyond_the_last_step_is_raised_all_the_same() -> None:
    """What is dropped is read first, and a record that cannot be made is an error wherever it lies."""
    lanes: list[list[int]] = [[], [], []]
    for batch in line(10, 1):
        lanes[batch.lane_id] += batch["id"].tolist()
    last = max(lanes, key=len)[-1]

    def fails(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == last:
            raise ValueError("no")
        return record

    pipeline = zp.Pipeline(zp.StaticMixture([rows(10)], seed=1, chunk_size=3)).map(fails).shuffle(4).batch(1)
    pipeline = pipeline.options(runner="inline", canonical_replicas=3, dp_degree=1, last_step="drop")
    stream, found = iter(pipeline), []
    with pytest.raises(zp.errors.OperatorError, match="no"):
        found.extend(stream)
    assert next(stream, None) is None
    assert first_pass_of(pipeline) == 0


def first_pass_of(pipeline: zp.Pipeline) -> int:
    return min(lane["pass"] for lane in saved(pipeline)["lanes"].values())


def test_states_of_before_can_be_read_and_a_change_is_refused() -> None:
    plain = line(19)
    next(iter(plain))
    state = saved(plain)
    assert not {"last_step", "steps_per_pass"} & set(state["fingerprint"])
    with pytest.raises(zp.errors.CheckpointError, match=r"last_step: the state has \(absent\), this pipeline 'drop'"):
        line(19, last_step="drop").load_state_dict(state)
    changed = line(19, last_step="drop")
    changed.load_state_dict(state, allow=["last_step"])
    assert len(list(changed)) == 8
    assert changed.counts()["dropped"][0] == {"last_step.dropped": 1}
    back = line(19)
    with pytest.raises(zp.errors.CheckpointError, match="last_step"):
        back.load_state_dict(saved(changed))


@pytest.mark.parametrize("last_step", ["drop", "pad"])
def test_another_batch_size_in_the_middle_of_a_pass(last_step: str) -> None:
    """The number of steps follows from what each lane has left, for which all lanes must be known."""
    before = line(43, 4, last_step=last_step)
    for _, _ in zip(range(2), before.steps(), strict=False):
        pass
    state = saved(before)
    steps = []
    for group in range(2):
        after = line(43, 3, last_step=last_step, dp_degree=2, dp_group_id=group)
        after.load_state_dict(state)
        steps.append([len(step) for step in after.steps()])
    number = 2 if last_step == "drop" else 3  # 15, 14 and 14 samples, of which each lane has had 8
    assert steps == [[2] * number, [1] * number]
    own = {**state, "lanes": {lane: state["lanes"][lane] for lane in ("0", "1")}}
    alone = line(43, 3, last_step=last_step, dp_degree=2, dp_group_id=0)
    alone.load_state_dict(own)
    with pytest.raises(zp.errors.ConfigError, match="load one of all lanes"):
        iter(alone)


def test_ranks_that_may_end_apart_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where torch.distributed says that there are others; not where all lanes have equally many batches."""
    group = {"dp_degree": 3, "dp_group_id": 0}
    with patch("zephon.session.initialised", lambda: object()), caplog.at_level(logging.WARNING, "zephon"):
        list(line(18, **group))
        list(line(18, last_step="pad", **group))
        assert "last_step" not in caplog.text
        pipeline = line(19, **group)
        assert [sum(1 for _ in pipeline) for _ in range(2)] == [4, 4]
    assert caplog.text.count("options(last_step='drop')") == 1


def test_explain_says_how_a_pass_ends() -> None:
    assert "a pass ends with the last batch of this group's lanes\n" in line(19).explain()
    assert "the first one after 3; what lanes have beyond it is dropped" in line(19, last_step="drop").explain()
    assert (
        "a pass ends after 7 global steps; what a lane lacks" in line(19, last_step="pad", steps_per_pass=7).explain()
    )
    agreed = line(19, keep=odd, last_step="pad", dp_degree=3, dp_group_id=1).explain()
    assert "they agree as they go, as operator 'odd' may give more or fewer records" in agreed


def test_a_state_is_plain_and_small() -> None:
    """A pad is a turn in it, and no more."""
    pipeline = line(19, 3, last_step="pad", dp_degree=3, dp_group_id=2)
    states = [saved(pipeline) for batch in pipeline if batch.padding]
    assert states
    assert len(json.dumps(states[-1]["lanes"]["2"])) < 300
    assert states[-1]["lanes"]["2"]["turns"] == 3


@pytest.mark.parametrize("last_step", ["drop", "pad"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_on_a_device(last_step: str, is_counted: bool) -> None:
    """What reads ahead of the user has pads too, and a state of what the user has."""
    pytest.importorskip("torch")
    keep = None if is_counted else odd
    wanted = [batch.digest() for batch in line(25, 2, keep=keep, last_step=last_step)]
    loader = line(25, 2, keep=keep, last_step=last_step).to_device("cpu")
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    assert [batch.digest() for batch in batches] == wanted
    assert any(batch.padding for batch in batches) == (last_step == "pad")
    for number, state in enumerate(states, 1):
        rest = line(25, 2, keep=keep, last_step=last_step)
        rest.load_state_dict(state)
        assert [batch.digest() for batch in rest] == wanted[number:]

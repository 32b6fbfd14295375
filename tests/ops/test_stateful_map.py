"""stateful_map: equal to the machine run by hand lane by lane; errors, bounds, states and keys of every kind."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zephon as zp
from zephon.errors import ConfigError, DataError, OperatorError
from zephon.ops.accumulator import Key
from zephon.ops.stateful_map import MOST_VALUE_BYTES, StatefulMap, plain_value
from zephon.plan import limits
from zephon.testing.machines import Limit, Mean, Ranks, Residue

from ..cases.helpers import digests, ids, list_of, on, pipeline, resumed, saved

WORKERS = [0, 2]


class Dedupe(zp.Machine):
    """Keeps the first record of each key."""

    def init(self, lane: int) -> dict[Any, bool]:
        return {}

    def push(self, state: dict[Any, bool], key: Any) -> bool:
        return key not in state and state.setdefault(key, True)


class Answers(zp.Machine):
    """Answers what a list says, record by record; `last` at a flush."""

    def __init__(self, answers: list[Any], last: list[Any] | None = None) -> None:
        self.answers, self.last = answers, last or []

    def init(self, lane: int) -> list[int]:
        return [0]

    def push(self, state: list[int], key: Any) -> Any:
        state[0] += 1
        answer = self.answers[state[0] - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def flush(self, state: list[int]) -> list[Any]:
        return self.last


def by_id(record: dict[str, Any]) -> Any:
    return record["id"]


def by_three(record: dict[str, Any]) -> Any:
    return record["id"] % 3


def run(machine: Any, rows: int, **settings: Any) -> list[Any]:
    """The ids that come out of an inline pipeline of one lane, one window."""
    return ids(pipeline(rows).stateful_map(machine, key=by_id, **settings).batch(1).options(runner="inline"))


@pytest.mark.parametrize("workers", WORKERS)
def test_dedupe_keeps_the_first_of_each_key_and_counts_the_rest(workers: int) -> None:
    line = on(pipeline(20).stateful_map(Dedupe, key=by_three, name="once").batch(2), workers)
    assert ids(line) == [0, 1, 2]
    assert line.counts()["dropped"] == {0: {"once.dropped": 17}}


def test_a_window_begins_with_a_fresh_state() -> None:
    line = pipeline(32).stateful_map(Dedupe, key=by_three).batch(1)  # chunks of 8
    assert ids(line.options(runner="inline", flush_every_k_chunks=2)) == [0, 1, 2, 16, 17, 18]


def test_lanes_are_apart() -> None:
    line = pipeline(48).stateful_map(Dedupe, key=by_three).batch(1)
    found = list(line.options(canonical_replicas=3, runner="inline"))
    assert sorted((batch.lane_id, batch["id"].tolist()[0]) for batch in found) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 8),
        (1, 9),
        (1, 10),
        (2, 16),
        (2, 17),
        (2, 18),
    ]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_value_is_written_on_every_record(workers: int) -> None:
    line = on(pipeline(10).stateful_map(Mean(4), key=by_id, into="mean").batch(3), workers)
    batches = list(line)
    assert ids(batches) == [0, 1, 2, 4, 5, 6, 8, 9]
    means = [sum(range(n + 1)) / (n + 1) for n in (0, 1, 2, 4, 5, 6, 8, 9)]
    assert [v for batch in batches for v in list_of(batch["mean"])] == means
    assert batches[0]["mean"].dtype == np.float64
    assert line.counts()["dropped"] == {0: {"stateful_map.dropped": 2}}


def test_records_wait_and_leave_in_their_order() -> None:
    line = pipeline(7).stateful_map(Ranks(3), key=lambda r: -r["id"], into="rank").batch(10).options(runner="inline")
    (batch,) = line
    assert batch["id"].tolist() == [1, 2, 4, 5, 6]
    assert batch["rank"].tolist() == [1, 0, 1, 0, 0]
    assert line.counts()["dropped"] == {0: {"stateful_map.dropped": 2}}


def test_several_in_a_row_with_a_shuffle_between() -> None:
    line = (
        pipeline(60)
        .stateful_map(Mean(7), key=by_id, into="mean")
        .shuffle(5)
        .stateful_map(Limit(4), key=by_three, name="limit")
        .stateful_map(Ranks(2), key=lambda r: r["mean"], into="rank", max_held=4)
        .batch(4)
    )
    assert digests(on(line, 2)) == digests(on(line, 0))
    assert len(ids(on(line, 0))) == 3 * 4 // 2  # a window is the whole lane


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([True, 1], "True or False is wanted"),
        ([True, None], "True or False is wanted"),
        ([True, (1, 2)], "True or False is wanted"),
        ([True, [True, True]], "2 answers came for 1 records"),
        ([[], True], "while 1 records wait"),
        ([True, ValueError("bad key")], "bad key"),
        ([[], [True]], "flush gave 0 answers, and 1 records wait"),
    ],
)
def test_wrong_answers_name_operator_and_record(answers: list[Any], says: str) -> None:
    with pytest.raises((OperatorError, DataError), match=says) as raised:
        run(Answers(answers), 2, name="judge")
    assert "operator 'judge'" in str(raised.value)
    assert ("row 1" in str(raised.value)) != ("at a flush" in str(raised.value))


@pytest.mark.parametrize(("value", "says"), [((1, 2), "is a tuple"), ([[1]], "of type list"), ({}, "of type dict")])
def test_a_field_takes_plain_values(value: Any, says: str) -> None:
    with pytest.raises(OperatorError, match=rf"row 0: .*the answer {says}|row 0: .*the answer is {says}"):
        run(Answers([value]), 1, into="x")


def test_a_waiting_record_that_a_flush_answers() -> None:
    assert run(Answers([[], [True], []], [False, True]), 3) == [0, 2]


def test_too_many_that_wait() -> None:
    assert run(Answers([[], [], [], [True] * 4], []), 4, max_held=3) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="3 records wait for an answer, and max_held is 2"):
        run(Answers([[], [], [], [True] * 4], []), 4, max_held=2)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("make", [lambda: KeyError("k"), lambda: SystemExit(3), lambda: StopIteration()])
def test_what_a_machine_raises_names_the_record(workers: int, make: Callable[[], BaseException]) -> None:
    line = on(pipeline(9).stateful_map(Answers([True] * 5 + [make()]), key=by_id).batch(2), workers)
    batches = iter(line)
    assert ids([next(batches), next(batches)]) == [0, 1, 2, 3]
    with pytest.raises(OperatorError, match=r"operator 'stateful_map'.*row 5"):
        list(batches)


def test_a_ctrl_c_in_a_machine_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Answers([KeyboardInterrupt()]), 1)


@pytest.mark.parametrize("workers", WORKERS)
def test_what_a_key_raises_names_the_record(workers: int) -> None:
    line = on(pipeline(9).stateful_map(Dedupe, key=Residue(100, bad=frozenset({4}))).batch(2), workers)
    batches = iter(line)
    assert ids([next(batches), next(batches)]) == [0, 1, 2, 3]
    with pytest.raises(OperatorError, match=r"operator 'stateful_map'.*row 4: .*no key for 4"):
        list(batches)


NANS = [math.nan, ("x", math.nan), (1, ("y", (np.float32("nan"),))), np.float64("nan")]


@pytest.mark.law("L1")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("key", NANS, ids=repr)
def test_a_key_that_is_nan_is_refused_with_its_record(key: Any, workers: int) -> None:
    """One NaN is not another, so a dict finds it by identity: not the same under every runner."""
    line = on(pipeline(9).stateful_map(Limit(2), key=lambda r: key if r["id"] == 4 else 0.5, name="m"), workers)
    with pytest.raises(DataError, match=r"operator 'm'.*row 4: the key is or holds NaN"):
        list(line.batch(2))


def test_an_answer_may_be_nan() -> None:
    (batch,) = pipeline(1).stateful_map(Answers([math.nan]), key=by_id, into="x").batch(1).options(runner="inline")
    assert np.isnan(batch["x"]).tolist() == [True]


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**63), 2**64 - 1, 1.5, "", "text", "é" * 512, b"raw", (), (1, "a", (b"b", None)), "x" * 1024],
)
def test_plain_values_stay_as_they_are(value: Any) -> None:
    assert plain_value(value, "it") == value
    assert type(plain_value(value, "it")) is type(value)


def test_numbers_of_numpy_become_python_s() -> None:
    for given, wanted in [(np.int32(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a")]:
        found = plain_value((given,), "it")[0]
        assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1], "the key is of type list: None, bool, int"),
        ((1, {2}), "a part of the key is of type set"),
        (np.arange(2), "of type ndarray"),
        (np.datetime64("2020-01-01"), "of type datetime64"),
        (2**64, "beyond 64 bits"),
        ("a\ud800", "half a surrogate pair"),
        ("é" * 513, "1,026 bytes"),
        ("x" * (MOST_VALUE_BYTES + 1), "1,025 bytes, and at most 1,024"),
        (("x" * 600, b"y" * 600), "1,200 bytes"),
        ((1,) * 129, "1,032 bytes"),
    ],
)
def test_other_values_are_refused(value: Any, says: str) -> None:
    with pytest.raises((TypeError, DataError), match=says):
        plain_value(value, "the key")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((dict, by_id), "subclass of zephon.Machine, or an instance of one, is wanted, not dict"),
        ((lambda: 1, by_id), "not function"),
        ((Dedupe, "id"), "key='id'"),
        ((Dedupe, by_id, ""), "into=''"),
        ((Dedupe, by_id, None, 0), "max_held=0"),
        ((Dedupe, by_id, None, 1, 0), "max_state_bytes=0"),
    ],
)
def test_wrong_settings_are_told_at_once(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StatefulMap(*arguments)


class Fixed(zp.Machine):
    """Begins with what it is given."""

    def __init__(self, state: Any) -> None:
        self.start = state

    def init(self, lane: int) -> Any:
        return self.start

    def push(self, state: Any, key: Any) -> bool:
        return True


def test_a_state_that_push_cannot_change() -> None:
    with pytest.raises(OperatorError, match=r"opening the window.*gave int, which push cannot change"):
        run(Fixed(0), 1)


KEY = Key(1, 0, 0, 0, "m")


@dataclasses.dataclass
class Point:
    x: int = 0


TWICE: list[int] = []


@pytest.mark.law("L3")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("state", "says"),
    [
        (collections.Counter(a=1), r"state is of type Counter"),
        (collections.defaultdict(int), r"state is of type defaultdict"),
        (Point(), r"state is of type Point"),
        ({"groups": {1: {2}}}, r"state\['groups'\]\[1\] is of type set"),
        ({"groups": {1: [(1, 2)]}}, r"state\['groups'\]\[1\]\[0\] is of type tuple"),
        ({"t": datetime.datetime(2020, 1, 1)}, r"state\['t'\] is of type datetime"),
        ({"a": TWICE, "b": TWICE}, r"state\['a'\] and state\['b'\] are one list"),
        ([{"n": 2**70}], r"state\[0\]\['n'\] is a whole number beyond 64 bits"),
    ],
)
def test_a_state_that_would_not_come_back_stops_the_lane(
    state: Any, says: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 5)
    line = pipeline(2000).stateful_map(Fixed(state), key=by_id, name="m", max_held=1).batch(2)
    with pytest.raises(
        DataError, match=rf"operator 'm', lane 0, at a state: .*{says}.*; give Fixed `state` and `load`"
    ):
        list(on(line.options(canonical_replicas=1, flush_every_k_chunks=0), workers))


def test_a_state_that_is_too_large_is_told_with_its_size() -> None:
    operator = StatefulMap(Fixed({"x": "y" * 200}), by_id, max_state_bytes=100, name="m")
    operator.open(3, KEY)
    with pytest.raises(DataError, match=r"the machine's state has 205 bytes, and max_state_bytes is 100"):
        operator.state(3)


def test_keys_of_a_state_come_back_as_they_were() -> None:
    keys = [1, -5, 2**63, "a", b"b", (1, "a", (2,)), None, True, 0.5]
    first, second = StatefulMap(Dedupe, by_id), StatefulMap(Dedupe, by_id)
    first.open(0, KEY)
    first.push(0, [(i, key, 0) for i, key in enumerate(keys)])
    second.load(0, KEY, first.state(0))
    emitted = second.push(0, [(i, key, 0) for i, key in enumerate(keys)])
    assert len(emitted.drops) == len(keys)
    assert emitted.groups == []
    assert list(second._states[0]) == list(first._states[0])


def test_a_resume_at_every_batch_goes_on_the_same() -> None:
    line = (
        pipeline(50)
        .stateful_map(Ranks(3), key=lambda r: r["id"] * 7 % 11, into="rank", max_held=4)
        .stateful_map(Limit(9), key=by_three, name="limit")
        .batch(2)
        .options(canonical_replicas=2, flush_every_k_chunks=2, runner="inline")
    )
    whole, states = [], [saved(line)]
    for batch in line:
        whole.append(batch.digest())
        states.append(saved(line))
    assert len(whole) > 5
    for done, state in enumerate(states):
        assert digests(resumed(line, state)) == whole[done:]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_whole_pass_without_a_window_is_resumed_by_what_is_held(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 5)
    line = (
        pipeline(90)
        .shuffle(6)
        .stateful_map(Dedupe, key=lambda r: (r["id"] % 25, "k"), name="once", max_held=1)
        .stateful_map(Ranks(4), key=lambda r: r["id"] * 7 % 11, into="rank", max_held=4)
        .shuffle(3)
        .stateful_map(Mean(6), key=by_id, into="mean", max_held=1)
        .batch(2)
        .options(canonical_replicas=lanes, flush_every_k_chunks=0, runner="inline")
    )
    whole, states = [], [saved(line)]
    for batch in line:
        whole.append(batch.digest())
        states.append(saved(line))
    counts = line.counts()
    assert sum(dropped["once.dropped"] for dropped in counts["dropped"].values()) >= 90 - 25 * lanes
    assert len(whole) > 4
    assert any(lane.get("chunk") for lane in states[-2]["lanes"].values())  # not the pass from its start
    for done, state in enumerate(states):
        again = resumed(line, state)
        assert digests(again) == whole[done:]
        assert again.counts() == counts


def test_a_state_that_is_too_large_stops_the_lane() -> None:
    line = pipeline(4000).stateful_map(Dedupe, key=by_id, max_state_bytes=1000, name="once").batch(2)
    with pytest.raises(DataError, match=r"operator 'once', lane 0, at a state: .*max_state_bytes is 1,000"):
        list(line.options(flush_every_k_chunks=0, runner="inline"))


def test_the_fingerprint_knows_machine_and_key() -> None:
    def fields(machine: Any, key: Any, **settings: Any) -> Any:
        return pipeline(2).stateful_map(machine, key=key, **settings)._definition.steps["stateful_map"]

    first = fields(Limit(3), by_id)
    assert first == fields(Limit(3), by_id, max_state_bytes=5)
    assert {f for f in first if first[f] != fields(Limit(4), by_id)[f]} == {"machine"}
    assert {f for f in first if first[f] != fields(Dedupe, by_id)[f]} == {"machine"}
    assert {f for f in first if first[f] != fields(Limit(3), by_three)[f]} == {"key"}
    assert {f for f in first if first[f] != fields(Limit(3), by_id, into="x")[f]} == {"into"}
    assert fields(Limit(3), by_id, version="1") == fields(Limit(4), by_three, version="1")


def test_attached_fields_reach_the_next_operators_and_packs() -> None:
    rows = [{"id": i, "input_ids": np.arange(1 + i % 4)} for i in range(40)]
    line = (
        pipeline(rows)
        .stateful_map(Mean, key=by_id, into="mean")
        .map(lambda r: {**r, "input_ids": r["input_ids"] + int(r["mean"])})
        .shuffle(6)
        .pack(8)
        .batch(2)
    )
    assert digests(on(line, 2)) == digests(on(line, 0))
    total = sum(int(batch["input_ids"].sum()) for batch in on(line, 0))
    assert total == sum(int(row["input_ids"].sum()) + len(row["input_ids"]) * (row["id"] // 2) for row in rows)


def test_explain_says_what_waits() -> None:
    line = pipeline(5).stateful_map(Ranks(3), key=by_id, into="rank", max_held=7, max_state_bytes=5000)
    text = line.batch(2).explain()
    assert "7 records that wait, and the machine's state (max_state_bytes=5,000, " in text


def test_it_comes_first_in_its_stage_so_that_nothing_else_holds_a_key() -> None:
    line = pipeline(5).shuffle(2).stateful_map(Dedupe, key=by_id).shuffle(3).pack(4).batch(1)
    stages = [[a.name for a in stage.accumulators] for stage in line._session.resolved.plan.stages]
    assert stages == [["shuffle"], ["stateful_map", "shuffle_2"], ["pack"]]
    operator = StatefulMap(Dedupe, by_id)
    operator.open(0, KEY)
    assert operator.push(0, [("a", "key", 3)]).groups == [("a", 1, 3)]

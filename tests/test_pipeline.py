"""How a pipeline is built and used: immutability, names, and the rules of `iter`, one by one."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zephon as zp

from .cases.helpers import current_pass, digests, first, ids, on, pipeline, resumed, saved

WORKERS = [0, 2]


def line_of(workers: int, num: int = 24, size: int = 4, **settings: Any) -> zp.Pipeline:
    return on(pipeline(num, shuffle="global").batch(size), workers, **settings)


# -- building -------------------------------------------------------------------------------------------------------


def clean(record: dict[str, Any]) -> dict[str, Any]:
    return record


STEPS: list[Callable[[zp.Pipeline], zp.Pipeline]] = [
    lambda line: line.map(clean),
    lambda line: line.filter(bool),
    lambda line: line.flat_map(lambda record: [record]),
    lambda line: line.map_batches(list, 2),
    lambda line: line.shuffle(3),
    lambda line: line.batch(5),
    lambda line: line.options(runner="inline", canonical_replicas=3),
    lambda line: line.take(1),
]


@pytest.mark.parametrize("number", range(len(STEPS)))
@pytest.mark.parametrize("started", [False, True])
def test_every_method_gives_a_new_pipeline_and_leaves_the_old_one(number: int, started: bool) -> None:
    line = on(pipeline(24), 2)
    expected, text = digests(line.options()), repr(line)
    iterator = iter(line)
    taken = digests([next(iterator), next(iterator)]) if started else []
    new = STEPS[number](line)
    assert new is not line
    assert (repr(line), line.lanes) == (text, [0])
    list(new)
    assert taken + digests(iterator) == expected  # not even ended by the new one


def test_one_pipeline_may_have_many_successors() -> None:
    base = pipeline(12).map(clean)
    odd = base.filter(lambda record: record["id"] % 2 == 1)
    even = base.filter(lambda record: record["id"] % 2 == 0)
    a, b = iter(odd), iter(even)
    found = [(ids([x])[0], ids([y])[0]) for x, y in zip(a, b, strict=True)]
    assert found == [(1, 0), (3, 2), (5, 4), (7, 6), (9, 8), (11, 10)]
    assert ids(base) == list(range(12))


class Passing(zp.Operator):
    method = "passing"

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def names(line: zp.Pipeline) -> list[str]:
    return [part.split("[")[1] for part in repr(line).split("]")[:-1]]


def test_names() -> None:
    line = pipeline(3).map(clean).map(clean).filter(clean).map(lambda r: r).map(lambda r: r)
    assert names(line) == ["clean", "clean_2", "clean_3", "map", "map_2"]
    line = pipeline(3).map(functools.partial(clean)).map(clean, name="mine").map(clean, name="mine")
    assert names(line) == ["map", "mine", "mine_2"]
    line = pipeline(3).map(clean, name="x_2").map(clean, name="x").map(clean, name="x").map(clean, name="x")
    assert names(line) == ["x_2", "x", "x_3", "x_4"]
    line = pipeline(3).shuffle(2).shuffle(2).map_batches(clean, 2).map_batches(clean, 2, name="b").shuffle(2, name="b")
    assert names(line) == ["shuffle", "shuffle_2", "map_batches", "b", "b_2"]
    line = pipeline(3).apply(Passing()).apply(Passing()).batch(2)
    assert names(line) == ["passing", "passing_2", "batch"]


def test_one_instance_applied_twice_is_two_steps() -> None:
    step = Passing()
    line = pipeline(3).apply(step).apply(step)
    assert names(line) == ["passing", "passing_2"]
    assert step.name is None
    with pytest.raises(zp.errors.ConfigError, match="apply"):
        pipeline(3).apply(clean)  # type: ignore[arg-type]


class Holds(zp.Operator):
    """Has whatever it is given as an attribute of that name."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


class HoldsTogether(zp.Accumulator):
    """The same, as an accumulator."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class SaysWhatCounts(Holds):
    def settings(self) -> dict[str, Any]:
        return {"level": self.level}  # type: ignore[attr-defined]


OPEN: list[Callable[[], Any]] = [threading.Lock, lambda: open(__file__), lambda: (i for i in range(3))]  # noqa: SIM115


@pytest.mark.parametrize("make", OPEN)
def test_an_attribute_that_cannot_be_compared_is_named(make: Callable[[], Any]) -> None:
    value = make()
    base = pipeline(4)
    with pytest.raises(zp.errors.ConfigError) as caught:
        base.apply(Holds(size=3)).apply(Holds(size=3, source=value))
    text = str(caught.value)
    assert text.startswith("operator 'apply_2' (Holds), 'source': TypeError: cannot pickle ")
    assert text.endswith(
        "each must be a plain value or a function: make it private (_source), opened in an operator's setup(), or let "
        "settings() say what decides the step"
    )
    with pytest.raises(zp.errors.ConfigError, match=r"operator 'calm' \(SaysWhatCounts\), 'level': TypeError: cannot"):
        base.apply(SaysWhatCounts(level=value), name="calm")
    for fine in (Holds(size=3, _source=value), SaysWhatCounts(level=3, source=value)):
        assert len(list(on(base.apply(fine).batch(2), 0))) == 2
    getattr(value, "close", bool)()


@pytest.mark.parametrize("name", ["source", "_source"])
def test_an_accumulator_that_cannot_be_copied_is_named(name: str) -> None:
    with pytest.raises(zp.errors.ConfigError) as caught:
        pipeline(4).apply(HoldsTogether(size=3, **{name: threading.Lock()}))
    assert str(caught.value).startswith(
        f"operator 'apply' (HoldsTogether), '{name}': TypeError: cannot pickle '_thread.lock' object; an accumulator is"
    )


@pytest.mark.parametrize("bad", [-1, True, 1.5, "3", None])
def test_take_is_checked(bad: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="take"):
        line_of(0).take(bad)


# -- iter -----------------------------------------------------------------------------------------------------------


def test_a_pipeline_has_no_next() -> None:
    assert not hasattr(line_of(0), "__next__")
    assert not isinstance(line_of(0), Iterator)
    with pytest.raises(TypeError):
        next(line_of(0))  # type: ignore[call-overload]
    assert iter(iterator := iter(line_of(0))) is iterator


@pytest.mark.parametrize("workers", WORKERS)
def test_after_the_end_the_next_iter_is_the_next_pass(workers: int) -> None:
    line = line_of(workers)
    iterator = iter(line)
    passes = [list(iterator), list(line), list(line)]
    assert [sorted(ids(batches)) for batches in passes] == [list(range(24))] * 3
    assert len({tuple(ids(batches)) for batches in passes}) == 3
    assert [{batch.pass_index for batch in batches} for batches in passes] == [{0}, {1}, {2}]
    assert [[batch.step for batch in batches] for batches in passes] == [list(range(6))] * 3
    assert next(iterator, "over") == "over"


@pytest.mark.parametrize("workers", WORKERS)
def test_after_a_break_iter_repeats_and_says_so(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    line = line_of(workers)
    everything = digests(line.options())
    with caplog.at_level(logging.WARNING, "zephon"):
        assert digests(first(line, 2)) == everything[:2]
        assert caplog.messages == []
        state = saved(line)
        assert digests(first(line, 3)) == everything[:3]
        [message] = caplog.messages
        assert "load the state" in message
    line.load_state_dict(state)
    assert digests(line) == everything[2:]


@pytest.mark.parametrize("workers", WORKERS)
def test_after_a_break_behind_a_load_iter_repeats_from_the_loaded_state(workers: int) -> None:
    line = line_of(workers)
    everything = digests(line.options())
    first(line, 2)
    line.load_state_dict(saved(line))
    assert digests(first(line, 2)) == everything[2:4]
    assert digests(first(line, 1)) == everything[2:3]
    assert digests(line) == everything[2:]
    assert current_pass(line) == 1


@pytest.mark.parametrize("workers", WORKERS)
def test_a_break_in_the_second_pass_repeats_that_pass(workers: int) -> None:
    line = line_of(workers)
    list(line)
    second = digests(first(line, 3))
    assert digests(line)[:3] == second
    assert current_pass(line) == 2


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("started", [False, True])
def test_one_live_iterator(workers: int, started: bool) -> None:
    line = line_of(workers)
    old = iter(line)
    if started:
        next(old)
    new = iter(line)
    for _ in range(2):
        with pytest.raises(zp.errors.Closed, match="newer"):
            next(old)
    assert len(list(new)) == 6
    with pytest.raises(zp.errors.Closed):
        next(old)


@pytest.mark.parametrize("workers", WORKERS)
def test_load_ends_the_old_iterator(workers: int) -> None:
    line = line_of(workers)
    old = iter(line)
    next(old)
    line.load_state_dict(saved(line))
    with pytest.raises(zp.errors.Closed, match="state"):
        next(old)
    assert len(list(line)) == 5


@pytest.mark.parametrize("workers", WORKERS)
def test_a_load_that_fails_changes_nothing(workers: int) -> None:
    line = line_of(workers)
    everything = digests(line.options())
    iterator = iter(line)
    found = digests([next(iterator)])
    good = saved(line)
    wrong: list[Any] = [
        good | {"schema": 99},
        good | {"lanes": {}},
        {},
        None,
        [],
        good | {"canonical_replicas": 3},
        "text",
    ]
    for bad in wrong:
        with pytest.raises(zp.errors.CheckpointError):
            line.load_state_dict(bad)
        found += digests([next(iterator)]) if len(found) < 5 else []
    assert found + digests(iterator) == everything


@pytest.mark.parametrize("workers", WORKERS)
def test_a_state_before_stop_iteration_ends_that_pass(workers: int) -> None:
    line = line_of(workers)
    iterator = iter(line)
    for _ in range(6):
        next(iterator)
    before = saved(line)
    new = resumed(line, before)
    assert list(new) == []
    second = digests(new)
    assert next(iterator, None) is None
    assert digests(line) == second


# -- take, close, with ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 100])
def test_take(workers: int, count: int) -> None:
    line = line_of(workers)
    everything = digests(line.options())
    part = line.take(count)
    assert digests(part) == everything[:count]
    assert digests(resumed(line, saved(part))) == everything[count:] or count > 6
    assert len(list(line.take(3).take(2))) == 2  # the last one counts
    assert len(list(line.take(2).take(3))) == 3
    again = line.take(2)
    assert digests(again) == digests(again) == everything[:2]  # each iterator of it ends there


@pytest.mark.parametrize("workers", WORKERS)
def test_close_and_with(workers: int) -> None:
    line = line_of(workers)
    line.close()  # nothing was begun
    with line as same:
        assert same is line
        iterator = iter(line)
        kept = next(iterator)
    line.close()
    with pytest.raises(zp.errors.Closed, match="closed"):
        next(iterator)
    assert line.counts()["delivered"] == {0: 4}
    state = line.state_dict()
    assert line.state_dict(after=kept) == state
    assert len(list(resumed(line, state))) == 5
    assert len(list(line)) == 6


@pytest.mark.parametrize("workers", WORKERS)
def test_with_ends_on_an_error_of_the_body(workers: int) -> None:
    with pytest.raises(RuntimeError, match="mine"), line_of(workers) as line:  # noqa: PT012
        iterator = iter(line)
        next(iterator)
        raise RuntimeError("mine")
    with pytest.raises(zp.errors.Closed):
        next(iterator)


# -- state and counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
def test_state_after_any_batch(workers: int) -> None:
    line = line_of(workers).options(canonical_replicas=3)
    everything = digests(line.options())
    batches = [(batch, saved(line)) for batch in line]
    final = line.state_dict()
    for number, (batch, state) in enumerate(batches):
        assert line.state_dict(after=batch) == state
        assert digests(resumed(line, line.state_dict(after=batch))) == everything[number + 1 :]
    assert line.state_dict() == final


def test_state_after_a_batch_of_an_earlier_iterator_or_pass() -> None:
    line = line_of(2)
    kept = first(line, 2)
    state = saved(line)
    list(line)
    second = first(line, 1)
    assert line.state_dict(after=kept[1]) == state
    assert line.state_dict(after=second[0]) == line.state_dict()


@pytest.mark.parametrize("stranger", [None, "copy", "other"])
def test_state_after_a_batch_that_is_not_ours(stranger: str | None) -> None:
    line, other = line_of(0), line_of(0)
    [batch] = first(other, 1)
    if stranger == "copy":
        batch = zp.Batch(dict(batch), 0, 0, 0, 4)
    if stranger is None:
        batch = zp.Batch({}, 0, 0, 0, 0)
    with pytest.raises(zp.errors.CheckpointError, match="this pipeline"):
        line.state_dict(after=batch)


@pytest.mark.parametrize("workers", WORKERS)
def test_state_before_the_first_batch(workers: int) -> None:
    line = line_of(workers)
    begin = saved(line)
    iterator = iter(line)
    assert saved(line) == begin
    next(iterator)
    assert saved(line) != begin
    assert digests(resumed(line, begin)) == digests(line.options())


@pytest.mark.parametrize("workers", WORKERS)
def test_counts_add_up_over_passes_and_resumes(workers: int) -> None:
    base = pipeline(24).filter(lambda record: record["id"] % 4 > 0).batch(4)
    line = on(base, workers)
    assert line.counts() == {"delivered": {0: 0}, "dropped": {0: {}}}
    for number in (1, 2):
        list(line)
        assert line.counts() == {"delivered": {0: 18 * number}, "dropped": {0: {"filter.filtered": 6 * number}}}
    first(line, 1)
    assert line.counts()["delivered"] == {0: 40}
    new = resumed(line, saved(line))
    assert new.counts() == line.counts()
    list(new)
    assert new.counts() == {"delivered": {0: 54}, "dropped": {0: {"filter.filtered": 18}}}


def test_counts_are_a_copy() -> None:
    line = line_of(0)
    list(line)
    line.counts()["delivered"].clear()
    line.counts()["dropped"][0]["x"] = 1
    assert line.counts() == {"delivered": {0: 24}, "dropped": {0: {}}}


def test_a_loaded_state_goes_along_to_a_new_pipeline_and_is_checked_again() -> None:
    line = line_of(0)
    first(line, 2)
    loaded = resumed(line, saved(line))
    assert digests(loaded.take(2)) == digests(loaded.options(runner="threads"))[:2]
    with pytest.raises(zp.errors.CheckpointError, match="canonical_replicas"):
        iter(loaded.options(canonical_replicas=2))


@pytest.mark.parametrize("allow", ["batch.drop_last", 3, None])
def test_allow_is_a_list_of_names(allow: Any) -> None:
    line = line_of(0)
    with pytest.raises((zp.errors.ConfigError, TypeError)):
        line.load_state_dict(saved(line), allow=allow)


def test_steps_and_iter_are_one_iterator() -> None:
    line = line_of(2).options(canonical_replicas=2)
    steps = line.steps()
    assert [batch.lane_id for batch in next(steps)] == [0, 1]
    assert {lane["turns"] for lane in saved(line)["lanes"].values()} == {1}
    rest = [batch for step in resumed(line, saved(line)).steps() for batch in step]
    assert digests(batch for step in steps for batch in step) == digests(rest)
    assert current_pass(line) == 1


def test_a_copied_pipeline_is_one_of_its_own() -> None:
    line = line_of(0)
    iterator = iter(line)
    next(iterator)
    other = copy.copy(line).options()
    assert len(list(other)) == 6
    assert len(list(iterator)) == 5

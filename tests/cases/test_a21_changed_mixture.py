"""Case A21: the mixture's weights or sources changed on resume. Refused with both values; allowed, a change begins only
behind what was read, and every source goes on at its own offset."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import examples
from zephon.plan import limits

from .helpers import digests, ids, on, rows, saved

A, B, C = range(200), range(1000, 1200), range(2000, 2200)
CHUNK = 8


def dataset(name: str) -> zp.Dataset:
    first = {"a": 0, "b": 1000, "c": 2000}[name]
    return zp.Dataset.from_list(name, rows(200, first=first))


def line_of(weights: Any, names: str = "ab", lanes: int = 1, **settings: Any) -> zp.Pipeline:
    settings = {"seed": 4, "chunk_size": CHUNK, "end": "repeat", **settings}
    line = zp.Pipeline(zp.StaticMixture([dataset(name) for name in names], weights, **settings)).batch(4)
    return line.options(canonical_replicas=lanes, runner="inline")


def state_after(line: zp.Pipeline, batches: int) -> dict[str, Any]:
    part = line.take(batches)
    assert len(list(part)) == batches
    return saved(part)


def restored(line: zp.Pipeline, state: dict[str, Any], *allow: str) -> zp.Pipeline:
    new = line.take(10**6)
    new.load_state_dict(state, allow=list(allow))
    return new


def refused(line: zp.Pipeline, state: dict[str, Any], *allow: str) -> str:
    with pytest.raises(zp.errors.CheckpointError) as caught:
        restored(line, state, *allow)
    return str(caught.value)


def proposed(text: str) -> zp.MixtureSchedule | None:
    """The schedule that an error writes down."""
    found = re.search(r"zp\.MixtureSchedule\(\{.*?\)", text)
    return eval(found[0], {"zp": zp}) if found else None


def test_the_recipe_is_refused_field_by_field() -> None:
    state = state_after(line_of([1, 1]), 25)
    text = refused(line_of([2, 1]), state)
    assert "source.weights: the state has {'a': 1, 'b': 1}, this pipeline {'a': 2, 'b': 1}" in text
    text = refused(line_of([1, 1, 1], "abc"), state)
    for field in ("source.weights", "source.datasets", "datasets.c.rows"):
        assert re.search(rf"^  {field}: the state has ", text, re.MULTILINE), text
    assert "source.datasets: the state has ['a', 'b'], this pipeline ['b', 'a']" in refused(
        line_of([1, 1], "ba"), state
    )


@pytest.mark.parametrize("lanes", [1, 3])
def test_allowed_in_the_middle_of_a_pass_it_is_still_refused_and_says_from_where_on(lanes: int) -> None:
    state = state_after(line_of([1, 1], lanes=lanes), 24)
    text = refused(line_of([2, 1], lanes=lanes), state, "source.weights")
    assert "Lanes have read up to position 96," in text  # 24 batches of 4: whole rows of chunks either way
    assert "zp.MixtureSchedule({0: {'a': 1, 'b': 1}, 96: {'a': 2, 'b': 1}})" in text
    assert "position 0 on" in text


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [3, 24, 25, 70])
def test_what_the_error_proposes_goes_on_without_loss_or_repeat(lanes: int, workers: int, batches: int) -> None:
    old = line_of([1, 1], lanes=lanes)
    state = state_after(old, batches)
    text = refused(line_of([2, 1], lanes=lanes), state, "source.weights")
    schedule = eval(re.search(r"zp\.MixtureSchedule\(\{.*?\}\}\)", text)[0], {"zp": zp})  # type: ignore[index]
    [(_, before), (position, after)] = schedule.points
    assert (before, after) == ({"a": 1, "b": 1}, {"a": 2, "b": 1})
    new = on(line_of(schedule, lanes=lanes), workers)
    whole = ids(line_of(schedule, lanes=lanes).take(300))
    assert whole[: 4 * batches] == ids(old.take(batches))
    gone_on = restored(new, state, "source.weights").take(300 - batches)
    gone_on.load_state_dict(state, allow=["source.weights"])
    rest = ids(gone_on)
    assert rest == whole[4 * batches :]
    for source in (A, B):  # each in epochs of its own, complete but for the last: nothing lost, nothing early twice
        counts = Counter(i for i in whole if i in source)
        assert max(counts.values()) - min(counts[i] for i in source) <= 1 + (lanes > 1)
    tail = rest[-300:]
    assert abs(sum(i in A for i in tail) - 200) <= 4
    # The state that follows is one of the new definition: nothing needs to be allowed any more.
    later = saved(gone_on)
    assert len(ids(restored(new, later).take(2))) == 8
    assert position % (CHUNK * lanes) == 0


def test_a_source_may_join_and_one_may_leave_behind_what_was_read() -> None:
    state = state_after(line_of([1, 1]), 25)
    joins = zp.MixtureSchedule({0: {"a": 1, "b": 1, "c": 0}, 104: {"a": 1, "b": 0, "c": 1}})
    fields = [f"datasets.c.{name}" for name in dataset("c").fingerprint()]
    new = line_of(joins, "abc")
    whole = ids(new.take(90))
    assert whole[:100] == ids(line_of([1, 1]).take(25))
    line = restored(new, state, "source.weights", "source.datasets", *fields).take(65)
    line.load_state_dict(state, allow=["source.weights", "source.datasets", *fields])
    assert ids(line) == whole[100:]
    early = zp.MixtureSchedule({0: {"a": 1, "b": 1, "c": 0}, 96: {"a": 1, "b": 0, "c": 1}})
    text = refused(line_of(early, "abc"), state, "source.weights", "source.datasets", *fields)
    assert "differ from position 96 on" in text
    assert "104: {'a': 1, 'b': 0, 'c': 1}" in text
    gone = [f"datasets.b.{name}" for name in dataset("b").fingerprint()]
    text = refused(line_of([1], "a"), state, "source.weights", "source.datasets", *gone)
    assert "dataset 'b' is gone: keep it, with weight 0" in text
    assert "104: {'a': 1, 'b': 0}}), in samples, with the datasets 'a', 'b' in this order" in text


def test_a_line_under_way_is_kept_to_its_end() -> None:
    line = {0: {"a": 1, "b": 0}, 200: {"a": 1, "b": 1}, 400: {"a": 0, "b": 1}}
    state = state_after(line_of(zp.MixtureSchedule(line, change="linear", ramp_steps=16)), 30)  # 120 samples
    bent = zp.MixtureSchedule({0: [1, 0], 200: [1, 4]}, change="linear", ramp_steps=16)
    for weights in ([1, 4], bent):
        text = refused(line_of(weights), state, "source.weights", "source.change", "source.ramp_steps")
        assert "a line that has begun stays as it is to its end, so change them behind position 200:" in text
        assert "{0: {'a': 1, 'b': 0}, 200: {'a': 1, 'b': 1}, 201: {'a': 1, 'b': 4}}, change='linear'" in text
    schedule = proposed(text)
    assert schedule is not None
    restored(line_of(schedule), state, "source.weights")
    state = state_after(line_of(zp.MixtureSchedule(line, change="linear", ramp_steps=16)), 120)  # behind the last line
    text = refused(line_of([1, 4]), state, "source")
    assert "400: {'a': 0, 'b': 1}, 480: {'a': 0, 'b': 1}, 481: {'a': 1, 'b': 4}}" in text


def test_where_no_schedule_would_be_accepted_none_is_written_down() -> None:
    """Under "redistribute" there are none, and "epochs" waits for what is to leave."""
    for end in ("redistribute", "epochs"):
        state = state_after(line_of([1, 1], end=end), 10)
        text = refused(line_of([1], "a", end=end), state, "source", "datasets.b")
        assert "MixtureSchedule" not in text
        assert text.endswith("Go on with the state's weights, or change them between two passes")


def test_another_order_of_the_sources() -> None:
    """It breaks ties between them, so it is another stream from the first sample on."""
    state = state_after(line_of([1, 1]), 25)
    assert "differ from position 0 on" in refused(line_of([1, 1], "ba"), state, "source.datasets", "source.weights")


def test_between_passes_and_before_the_first_batch_anything_may_change() -> None:
    finite = {"end": "stop"}
    state = state_after(line_of([1, 1], **finite), 0)
    line = restored(line_of([3, 1], **finite), state, "source.weights")
    assert ids(line) == ids(line_of([3, 1], **finite))
    first = line_of([1, 1], **finite)
    list(first)
    second = restored(line_of([3, 1], **finite), saved(first), "source.weights")
    other = line_of([3, 1], **finite)
    list(other)
    assert digests(second) == digests(other)  # the second pass of the new definition


def test_where_a_pass_that_would_end_elsewhere_is_near_its_end() -> None:
    """The last row of chunks is dealt by the length of the pass."""
    old = line_of([1, 1], lanes=3, end="epochs")
    length = old._definition.source.length(0)
    assert length == 400
    state = state_after(old, 99)
    longer = zp.MixtureSchedule({0: [1, 1], 400: [1, 2]})
    same = restored(line_of(longer, lanes=3, end="epochs"), state, "source.weights")  # it ends before the change
    assert len(ids(same)) == 4
    held = [f"source.{name}" for name in ("weights", "epochs")]
    text = refused(line_of(longer, lanes=3, end="epochs", epochs=2), state, *held)
    assert "the pass would end elsewhere" in text


@pytest.mark.parametrize(("window", "read"), [(3, 96), (0, 128)])
def test_windows_count_as_read_to_their_end(window: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without windows: to where the next state is due, 16 pointers behind the last, which is at 48."""
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 16)

    def shuffled(weights: Any, **options: Any) -> zp.Pipeline:
        source = zp.StaticMixture([dataset("a"), dataset("b")], weights, seed=4, chunk_size=CHUNK, end="repeat")
        line = zp.Pipeline(source).shuffle(10).batch(4)
        return line.options(canonical_replicas=2, runner="inline", flush_every_k_chunks=window, **options)

    state = state_after(shuffled([1, 1]), 20)  # 40 samples a lane: in the second window of 24
    text = refused(shuffled([2, 1]), state, "source.weights")
    assert f"up to position {read}," in text
    schedule = zp.MixtureSchedule({0: [1, 1], read: [2, 1]})
    whole = ids(shuffled(schedule).take(60))
    line = restored(shuffled(schedule), state, "source.weights").take(40)
    line.load_state_dict(state, allow=["source.weights"])
    assert ids(line) == whole[80:]
    assert "differ from position 90 on" in refused(
        shuffled(zp.MixtureSchedule({0: [1, 1], 90: [2, 1]})), state, "source.weights"
    )


@pytest.mark.parametrize("window", [0, 2])
def test_where_records_are_held_a_dataset_that_leaves_keeps_its_place(window: int) -> None:
    def shuffled(weights: Any, names: str) -> zp.Pipeline:
        source = zp.StaticMixture([dataset(n) for n in names], weights, seed=4, chunk_size=CHUNK, end="repeat")
        line = zp.Pipeline(source).shuffle(10).batch(4)
        return line.options(canonical_replicas=2, runner="inline", flush_every_k_chunks=window)

    state = state_after(shuffled([1, 1], "ab"), 20)
    text = refused(shuffled([3, 1], "cb"), state, *_ALLOW)
    assert "dataset 'a' is gone" in text
    assert "with the datasets 'a', 'b', 'c' in this order" in text
    schedule = proposed(text)
    assert schedule is not None
    assert schedule.points[-1][1] == {"a": 0, "b": 1, "c": 3}
    line = restored(shuffled(schedule, "abc"), state, *_ALLOW).take(40)
    line.load_state_dict(state, allow=_ALLOW)
    assert ids(line) == ids(shuffled(schedule, "abc").take(60))[80:]


def test_a_schedule_may_grow() -> None:
    first = {0: [1, 1], 40: [3, 1]}
    state = state_after(line_of(zp.MixtureSchedule(first)), 25)  # type: ignore[arg-type]
    grown = zp.MixtureSchedule({**first, 200: [1, 5]})  # type: ignore[dict-item]
    whole = ids(line_of(grown).take(80))
    line = restored(line_of(grown), state, "source.weights").take(55)
    line.load_state_dict(state, allow=["source.weights"])
    assert ids(line) == whole[100:]
    line_change = zp.MixtureSchedule({0: [1, 1], 40: [3, 1], 60: [1, 1]}, change="linear")
    text = refused(line_of(line_change), state, "source.weights", "source.change", "source.ramp_steps")
    assert "differ from position 0 on" in text


def test_a_line_may_be_followed_by_another() -> None:
    first = {0: [1, 1], 40: [3, 1]}
    settings: dict[str, Any] = {"change": "linear", "ramp_steps": 4}
    state = state_after(line_of(zp.MixtureSchedule(first, **settings)), 25)  # type: ignore[arg-type]
    grown = zp.MixtureSchedule({**first, 200: [3, 1], 240: [1, 1]}, **settings)  # type: ignore[dict-item]
    whole = ids(line_of(grown).take(80))
    line = restored(line_of(grown), state, "source.weights").take(55)
    line.load_state_dict(state, allow=["source.weights"])
    assert ids(line) == whole[100:]


def test_weights_in_tokens_are_proposed_in_tokens() -> None:
    settings: dict[str, Any] = {"weights_in": "tokens", "mean_tokens": {"a": "12.5", "b": 40}}
    old = line_of([1, 1], **settings)
    state = state_after(old, 25)
    text = refused(line_of([3, 1], **settings), state, "source.weights")
    assert "zp.MixtureSchedule({0: {'a': 1, 'b': 1}, 104: {'a': 3, 'b': 1}}), in tokens" in text
    schedule = zp.MixtureSchedule({0: {"a": 1, "b": 1}, 104: {"a": 3, "b": 1}})
    whole = ids(line_of(schedule, **settings).take(50))
    line = restored(line_of(schedule, **settings), state, "source.weights").take(25)
    line.load_state_dict(state, allow=["source.weights"])
    assert ids(line) == whole[100:]


@examples(0.2)
@given(
    old=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    new=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    lanes=st.integers(1, 4),
    chunk=st.integers(1, 11),
    batches=st.integers(1, 40),
    window=st.one_of(st.none(), st.integers(1, 3)),
)
def test_what_the_error_proposes_is_always_the_same_run(
    old: list[int], new: list[int], lanes: int, chunk: int, batches: int, window: int | None
) -> None:
    """Whatever was read: the proposed schedule has the state's past, goes on from it, and is accepted as it stands."""
    datasets = [dataset(name) for name in "abc"]

    def line(weights: Any) -> zp.Pipeline:
        source = zp.StaticMixture(datasets, weights, seed=4, chunk_size=chunk, end="repeat")
        pipeline = zp.Pipeline(source)
        pipeline = pipeline.shuffle(5) if window else pipeline
        return pipeline.batch(3).options(
            canonical_replicas=lanes, runner="inline", flush_every_k_chunks=window, dp_degree=1
        )

    before = line(old).take(batches)
    delivered = ids(before)
    state = saved(before)
    same = line(old)._session.resolved.fingerprint == line(new)._session.resolved.fingerprint
    assume(not same)
    text = refused(line(new), state, "source.weights")
    schedule = eval(re.search(r"zp\.MixtureSchedule\(\{.*?\}\}\)", text)[0], {"zp": zp})  # type: ignore[index]
    whole = ids(line(schedule).take(batches + 30))
    assert whole[: len(delivered)] == delivered
    after = line(schedule).take(30)
    after.load_state_dict(state, allow=["source.weights"])
    assert ids(after) == whole[len(delivered) :]
    position = schedule.points[1][0]
    assert position <= (max(int(lane["chunk"]) for lane in state["lanes"].values()) + (window or 1)) * lanes * chunk


_MEANS = {"a": "12.5", "b": 40, "c": 7}
_ALLOW = ["source", *(f"datasets.{name}" for name in "abc")]


@st.composite
def mixtures(draw: st.DrawFn, ends: st.SearchStrategy[str]) -> tuple[str, dict[str, Any]]:
    """(names, settings): one to three datasets in some order, with weights, schedules and lines."""
    names = "".join(draw(st.permutations("abc")))[: draw(st.integers(1, 3))]
    one = st.lists(st.integers(0, 4), min_size=len(names), max_size=len(names)).filter(any)
    at = sorted(draw(st.sets(st.integers(1, 150), max_size=2)))
    settings: dict[str, Any] = {"weights": draw(one), "end": draw(ends)}
    if at and settings["end"] != "redistribute":
        points = {position: draw(one) for position in (0, *at)}
        change = draw(st.sampled_from(["steps", "linear"]))
        settings["weights"] = zp.MixtureSchedule(points, change=change, ramp_steps=draw(st.integers(1, 9)))
    if draw(st.booleans()):
        settings |= {"weights_in": "tokens", "mean_tokens": [_MEANS[name] for name in names]}
    return names, settings


@examples(0.5)
@given(
    old=mixtures(st.sampled_from(["repeat", "repeat", "stop", "epochs", "redistribute"])),
    new=mixtures(st.just("repeat")),
    lanes=st.integers(1, 3),
    chunk=st.integers(1, 11),
    batches=st.integers(1, 60),
)
def test_what_the_error_proposes_is_accepted_whatever_changed(
    old: tuple[str, dict[str, Any]], new: tuple[str, dict[str, Any]], lanes: int, chunk: int, batches: int
) -> None:
    """Datasets that join, leave or change places, lines, tokens, ends: what is written is accepted as it stands."""

    def line(names: str, settings: dict[str, Any]) -> zp.Pipeline:
        datasets = [zp.Dataset.from_list(name, rows(60, first={"a": 0, "b": 1000, "c": 2000}[name])) for name in names]
        source = zp.StaticMixture(datasets, **{"seed": 4, "chunk_size": chunk, **settings})
        return zp.Pipeline(source).batch(3).options(canonical_replicas=lanes, runner="inline", dp_degree=1)

    new = new[0], {**new[1], "end": old[1]["end"]}
    try:
        before, after = line(*old).take(batches), line(*new)
    except zp.errors.ConfigError:  # an end that bears no such weights
        assume(False)
    delivered = ids(before)
    state = saved(before)
    length = before._definition.source.length(0)
    assume(length is None or len(delivered) + 3 * lanes < length)  # no lane gave the short batch of its end
    try:
        after.load_state_dict(state, allow=_ALLOW)
    except zp.errors.CheckpointError as error:
        text = str(error)
    else:
        return
    schedule = proposed(text)
    if schedule is None:
        assert old[1]["end"] != "repeat"
        return
    order = re.search(r"with the datasets (.*?) in this order", text)
    names = "".join(eval(f"[{order[1]}]")) if order else new[0]
    settings = {"weights": schedule, "end": old[1]["end"]}
    if ", in tokens" in text:
        means = re.search(r"mean_tokens=(\{.*?\})", text)
        settings |= {"weights_in": "tokens", "mean_tokens": eval(means[1]) if means else [_MEANS[n] for n in names]}
    whole = ids(line(names, settings).take(batches + 20))
    assert whole[: len(delivered)] == delivered
    gone_on = line(names, settings).take(20)
    gone_on.load_state_dict(state, allow=_ALLOW)
    assert ids(gone_on) == whole[len(delivered) :]
    assert {name for name, weight in schedule.points[-1][1].items() if weight} <= set(new[0])

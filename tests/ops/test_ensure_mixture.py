"""ensure_mixture: the plain rule in a loop; shares at every prefix; dry datasets, strict and not; nothing lost."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from zephon.ops.accumulator import Key, Ref
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.record import Record
from zephon.testing.contracts import check_accumulator

from ..cases.helpers import digests, ids, on, resumed, rows, saved

KEY = Key(1, 0, 0, 0, "ensure_mixture")


def plain(weights: list[int], refs: list[Ref], size: int, is_tokens: bool) -> tuple[list[Any], int]:
    """(order in which cursors leave, how many of them out of turn), by looking at every dataset for every record."""
    held: list[list[Ref]] = [[] for _ in weights]
    given = [0] * len(weights)
    out, forced = [], 0

    def far(c: int) -> tuple[float, int]:
        return (given[c] + (0 if is_tokens else 0.5)) / weights[c], c

    def let_go(is_full: bool) -> bool:
        nonlocal forced
        due = min((c for c, weight in enumerate(weights) if weight), key=far)
        chosen = min((c for c in range(len(weights)) if held[c]), key=far, default=None)
        if chosen is None or (chosen != due and not is_full):
            return False
        forced += chosen != due
        cursor, length, _ = held[chosen].pop(0)
        given[chosen] += length if is_tokens else 1
        out.append(cursor)
        return True

    for ref in refs:
        held[ref[2]].append(ref)
        while let_go(sum(map(len, held)) > size):
            pass
    while let_go(True):
        pass
    return out, forced


def of(weights: list[int], size: int, **settings: Any) -> EnsureMixture:
    return EnsureMixture({f"d{c}": weight for c, weight in enumerate(weights)}, size, **settings)


def driven(step: EnsureMixture, refs: list[Ref], cuts: list[int]) -> tuple[list[Any], int]:
    step.open(0, KEY)
    out, forced, at = [], 0, 0
    for stop in [*sorted(min(cut, len(refs)) for cut in cuts), len(refs)]:
        emitted = step.push(0, refs[at:stop])
        assert emitted.failure is None
        assert len(step.state(0).items) <= step.buffer_size
        out += [ref[0] for ref in emitted.groups]
        forced += sum(n for _, _, n in emitted.drops)
        at = stop
    emitted = step.flush(0)
    assert step.state(0).items == []
    return out + [ref[0] for ref in emitted.groups], forced + sum(n for _, _, n in emitted.drops)


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    drawn=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=80),
    size=st.integers(1, 12),
    unit=st.sampled_from(["samples", "tokens"]),
    cuts=st.lists(st.integers(0, 80), max_size=5),
)
def test_it_is_the_plain_rule(
    weights: list[int], drawn: list[tuple[int, int]], size: int, unit: str, cuts: list[int]
) -> None:
    refs: list[Ref] = [(i, length, c % len(weights)) for i, (c, length) in enumerate(drawn)]
    expected = plain(weights, refs, size, unit == "tokens")
    assert driven(of(weights, size, unit=unit), refs, cuts) == expected
    assert sorted(expected[0]) == list(range(len(refs)))


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_the_contract_of_accumulators(unit: str) -> None:
    records = [{"id": i, "input_ids": np.arange(1 + i * 5 % 7)} for i in range(40)]
    for size in (1, 4, 100):
        check_accumulator(lambda size=size: of([3, 1], size, unit=unit), records)  # type: ignore[misc]


def shuffled(weights: list[int], count: int, seed: int) -> list[int]:
    """Datasets of `count` records at the right shares in random order: what a filter makes of a mixture."""
    share = np.array(weights) / sum(weights)
    return np.random.default_rng(seed).choice(len(weights), count, p=share).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("weights", [[1, 1], [9, 1], [5, 3, 2], [70, 20, 5, 4, 1], [1] * 8])
def test_every_prefix_has_its_shares_as_long_as_the_buffer_can(weights: list[int]) -> None:
    refs: list[Ref] = [(i, 1, c) for i, c in enumerate(shuffled(weights, 6000, 3))]
    component = [ref[2] for ref in refs]
    step = of(weights, 1500)
    step.open(0, KEY)
    emitted = step.push(0, refs)
    assert emitted.drops == []
    out = np.array([component[ref[0]] for ref in emitted.groups])
    assert len(out) > 4500
    share = np.array(weights) / sum(weights)

    def worst(order: np.ndarray[Any, Any]) -> float:
        given = np.cumsum(order[:, None] == np.arange(len(weights)), 0)
        return float(np.abs(given - share * np.arange(1, len(order) + 1)[:, None]).max())

    assert worst(out) < 2
    assert worst(np.array(component)) > 10  # what came in


def test_shares_of_tokens_hold_to_within_a_document() -> None:
    rng = np.random.default_rng(1)
    arrived = shuffled([1, 2, 1], 4000, 4)
    refs: list[Ref] = [(i, int(rng.integers(1, [20, 200, 60][c])), c) for i, c in enumerate(arrived)]
    weights = [20, 400, 60]  # about what comes, in tokens
    step = of(weights, 4000, unit="tokens")
    step.open(0, KEY)
    out = step.push(0, refs).groups
    given, total = np.zeros(3), 0
    for _, length, c in out:
        given[c] += length
        total += length
        assert np.abs(given - total * np.array(weights) / 480).max() < 200


def test_a_dry_dataset_lets_others_go_out_of_turn_and_catches_up() -> None:
    step = of([1, 1], 3)
    step.open(0, KEY)
    emitted = step.push(0, [(i, 1, 0) for i in range(8)])
    assert [ref[0] for ref in emitted.groups] == [0, 1, 2, 3, 4]  # the first is in turn; then three are held
    assert emitted.drops == [(t, "out_of_turn", 1) for t in (4, 5, 6, 7)]
    emitted = step.push(0, [(i, 1, 1) for i in range(10, 16)])
    assert [ref[0] for ref in emitted.groups] == [10, 11, 12, 13, 14, 5, 15, 6]
    assert emitted.drops == []
    assert [ref[0] for ref in step.flush(0).groups] == [7]


def test_strict_names_the_dry_dataset() -> None:
    step = of([3, 1, 2], 4, strict=True)
    step.open(0, KEY)
    emitted = step.push(0, [(i, 1, 2 * (i % 2)) for i in range(20)])
    assert emitted.failure is not None
    at, error = emitted.failure
    assert "dataset 'd1' has run dry: its share is due, and the buffer is full with 3 of 'd2', 2 of 'd0'" in str(error)
    assert len(emitted.groups) + 5 == at + 1  # all that came before is delivered or held
    step.open(0, KEY)
    assert step.push(0, [(0, 1, 2), (1, 1, 0), (2, 1, 0)]).failure is None
    assert step.flush(0).failure is None  # what is held at a lane's end is let go, shares or not


def records_of(name: str, count: int, first: int) -> zp.Dataset:
    return zp.Dataset.from_list(name, [{**row, "name": name} for row in rows(count, first=first)])


def rarely(record: Record) -> bool:
    """Drops two thirds of `b`, in bursts."""
    return record["name"] != "b" or record["id"] % 60 < 20


def line_of(size: int = 60, weights: Any = (3, 3), shares: Any = None, **settings: Any) -> zp.Pipeline:
    source = zp.StaticMixture(
        [records_of("a", 600, 0), records_of("b", 1800, 10_000)],
        list(weights),
        seed=5,
        chunk_size=16,
        shuffle="none",
        end="repeat",
    )
    line = zp.Pipeline(source).filter(rarely).ensure_mixture(shares, buffer_size=size, **settings).batch(4)
    return line.options(canonical_replicas=2, flush_every_k_chunks=1000, runner="inline")


@pytest.mark.parametrize("workers", [0, 2])
def test_declared_shares_after_a_filter(workers: int) -> None:
    """The source draws three of `b` where one is wanted: behind the filter the shares are the declared ones."""
    line = on(line_of(200, [1, 3], shares={"a": 1, "b": 1}), workers).take(120)
    found = {0: [0, 0], 1: [0, 0]}
    for batch in line:
        for i in ids([batch]):
            found[batch.lane_id][i >= 10_000] += 1
            a, b = found[batch.lane_id]
            assert abs(a - b) <= 1
    assert line.counts()["noted"] == {0: {}, 1: {}}
    assert line.counts()["dropped"][0].keys() == {"rarely.filtered"}


def test_drift_is_counted_and_comes_back_on_a_resume() -> None:
    line = line_of(10)
    part = line.take(90)
    reference = digests(part)
    counts = part.counts()
    assert counts["noted"][0]["ensure_mixture.out_of_turn"] > 20
    assert "ensure_mixture.out_of_turn" not in counts["dropped"][0]
    first = line.take(37)
    assert digests(first) == reference[:37]
    rest = resumed(line, saved(first)).take(53)
    rest.load_state_dict(saved(first))
    assert digests(rest) == reference[37:]
    assert rest.counts() == counts


@pytest.mark.parametrize("workers", [0, 2])
def test_strict_in_a_pipeline_ends_the_lane_with_an_error(workers: int) -> None:
    line = on(line_of(8, strict=True).options(flush_every_k_chunks=0), workers)
    with pytest.raises(zp.errors.DataError, match=r"operator 'ensure_mixture', .*dataset 'b' has run dry"):
        list(line.take(500))


@pytest.mark.parametrize("window", [None, 1, 1000])
def test_strict_wants_no_windows(window: int | None) -> None:
    """At the end of each all that is held would go, in turn or not, and shares would drift without an error."""
    line = line_of(60, strict=True).options(flush_every_k_chunks=window)
    for use in (line.explain, line.state_dict, lambda: next(iter(line))):
        with pytest.raises(zp.errors.ConfigError, match=r"'ensure_mixture'.*strict=True.*flush_every_k_chunks=0"):
            use()
    assert "strict=True" in line.options(flush_every_k_chunks=0).explain()


@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    size=st.integers(1, 80),
    window=st.one_of(st.none(), st.integers(0, 8)),
)
def test_strict_shares_hold_until_the_error_or_the_end(weights: list[int], size: int, window: int | None) -> None:
    """Whatever the source draws and the buffer holds: no delivered prefix of a lane drifts, or nothing runs at all."""
    settings: dict[str, Any] = {"weights": weights, "shares": {"a": 1, "b": 1}, "strict": True}
    found: dict[int, list[int]] = {0: [0, 0], 1: [0, 0]}
    try:
        for batch in line_of(size, **settings).options(flush_every_k_chunks=window).take(150):
            for i in ids([batch]):
                found[batch.lane_id][i >= 10_000] += 1
                assert abs(found[batch.lane_id][0] - found[batch.lane_id][1]) <= 1
    except zp.errors.DataError:
        assert window == 0  # it has run dry
    except zp.errors.ConfigError:
        assert window != 0


def test_strict_lets_the_rest_go_at_a_lanes_end_and_counts_it() -> None:
    source = zp.StaticMixture([records_of("a", 60, 0), records_of("b", 40, 10_000)], [1, 1], end="redistribute")
    line = zp.Pipeline(source).ensure_mixture(buffer_size=30, strict=True).batch(5)
    line = line.options(canonical_replicas=1, flush_every_k_chunks=0, runner="inline")
    assert len(ids(line)) == 100
    assert line.counts()["noted"] == {0: {"ensure_mixture.out_of_turn": 19}}


def test_nothing_is_lost_at_windows_and_ends() -> None:
    source = zp.StaticMixture([records_of("a", 100, 0), records_of("b", 37, 10_000)], [1, 1], end="redistribute")
    line = zp.Pipeline(source).ensure_mixture(buffer_size=9).batch(5)
    found = Counter(ids(line.options(canonical_replicas=3, flush_every_k_chunks=1, runner="inline")))
    assert found == Counter([*range(100), *range(10_000, 10_037)])


def test_behind_pack_a_sequence_is_of_its_first_document() -> None:
    def words(record: Record) -> Record:
        return {**record, "input_ids": np.full(3, record["id"])}

    source = zp.StaticMixture(
        [records_of("a", 300, 0), records_of("b", 300, 10_000)], [1, 1], end="repeat", chunk_size=64
    )
    line = zp.Pipeline(source).map(words).shuffle(50).pack(8)
    line = line.ensure_mixture(unit="tokens", weights=[1, 1], buffer_size=200).batch(1)
    batches = list(line.options(canonical_replicas=1, runner="inline", flush_every_k_chunks=100).take(150))
    given = Counter[str]()
    for batch in batches:
        given[batch.origins[0][0][0]] += 8
        assert abs(given["a"] - given["b"]) <= 8


def test_explain_and_settings() -> None:
    text = line_of().explain()
    assert "'ensure_mixture' buffer_size=60 unit=samples strict=False weights=1:1" in text
    assert "    shares are held within a window of 16,000 pointers: at its end up to 60 held records go, " in text
    assert "shares are held along the whole" in line_of().options(flush_every_k_chunks=0).explain()
    assert re.search(r"^  held +60 records +'ensure_mixture'$", text, re.MULTILINE)
    state = saved(line_of())
    with pytest.raises(zp.errors.CheckpointError, match=r"ensure_mixture\.buffer_size: the state has 60"):
        line_of(61).load_state_dict(state)
    with pytest.raises(zp.errors.CheckpointError, match=r"ensure_mixture\.weights: the state has \{'a': 1, 'b': 1\}"):
        line_of(shares=[2, 1]).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"buffer_size": 0}, "buffer_size=0"),
        ({"unit": "bytes"}, "unit='bytes'"),
        ({"strict": 1}, "strict=1"),
        ({"unit": "tokens"}, "the source's weights are in samples"),
        ({"weights": [1]}, "1 entries for 2 datasets"),
        ({"weights": {"a": 1, "c": 1}}, "no dataset 'c'"),
        ({"weights": [0, 0]}, "all weights are 0"),
        ({"weights": [1, 0]}, "dataset 'b' is drawn by the source and has weight 0"),
        ({"weights": [-1, 1]}, "weight of dataset 'a' is -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    line = zp.Pipeline(zp.StaticMixture([records_of("a", 5, 0), records_of("b", 5, 10)], [1, 1]))
    with pytest.raises(zp.errors.ConfigError, match=text):
        line.ensure_mixture(**settings)


def test_what_the_source_must_say() -> None:
    datasets = [records_of("a", 5, 0), records_of("b", 5, 10)]
    only = zp.Pipeline(zp.StaticMixture(datasets, [1, 0]))
    with pytest.raises(zp.errors.ConfigError, match="dataset 'b' has a weight and is never drawn"):
        only.ensure_mixture([1, 1])
    changing = zp.Pipeline(zp.StaticMixture(datasets, zp.MixtureSchedule({0: [1, 1], 4: [1, 2]}), end="repeat"))
    with pytest.raises(zp.errors.ConfigError, match="weights change along the pass"):
        changing.ensure_mixture()
    tokens = zp.Pipeline(zp.StaticMixture(datasets, [1, 2], weights_in="tokens", end="repeat"))
    assert tokens.ensure_mixture(unit="tokens")._definition.nodes[0].settings()["weights"] == {"a": 1, "b": 2}
    with pytest.raises(zp.errors.ConfigError, match="weights are in tokens; say unit='tokens'"):
        tokens.ensure_mixture()

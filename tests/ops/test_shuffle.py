"""shuffle: equal to a reservoir, or blocks, in plain Python with the same hash; a permutation of each window; even."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from zephon.ops.accumulator import Emitted, Key, Ref
from zephon.ops.shuffle import Shuffle
from zephon.testing.contracts import check_accumulator

from ..cases.helpers import digests, ids, on, pipeline, resumed, saved, stream

MASK = 2**64 - 1


def splitmix(key: int, number: int) -> int:
    """Number `number` of the splitmix64 sequence of `key`."""
    x = (key + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def blocks(key: int, items: list[Any], size: int) -> list[Any]:
    """One window: block by block, each in random order, the draws counted over all."""
    out: list[Any] = []
    for start in range(0, len(items), size):
        held = items[start : start + size]
        places = [(splitmix(key, start + n) >> 32) * (n + 1) >> 32 for n in range(len(held))]
        for last in range(len(held) - 1, -1, -1):
            held[last], held[places[last]] = held[places[last]], held[last]
        out += held
    return out


def reservoir(key: int, items: list[Any], size: int) -> list[Any]:
    """One window: the buffer fills, each newcomer takes a random place, the rest leaves in random order."""
    held: list[Any] = []
    out: list[Any] = []
    drawn = 0

    def below(bound: int) -> int:
        nonlocal drawn
        drawn += 1
        return (splitmix(key, drawn - 1) >> 32) * bound >> 32

    for item in items:
        if len(held) < size:
            held.append(item)
            continue
        place = below(size)
        out.append(held[place])
        held[place] = item
    places = [below(n) for n in range(1, len(held) + 1)]
    for last in range(len(held) - 1, -1, -1):
        place = places[last]
        held[last], held[place] = held[place], held[last]
    return out + held


def refs(count: int) -> list[Ref]:
    return [(i, 1, 0) for i in range(count)]


def drive(shuffle: Shuffle, key: Key, count: int, cuts: list[int]) -> tuple[list[Any], list[int]]:
    """(what left, how many had entered before each left), with the refs handed over in parts."""
    shuffle.open(key.lane, key)
    out: list[Any] = []
    entered: list[int] = []
    at = 0
    for stop in [*sorted({min(cut, count) for cut in cuts}), count]:
        emitted: Emitted = shuffle.push(key.lane, refs(count)[at:stop])
        out += [ref[0] for ref in emitted.groups]
        entered += [at + trigger for trigger in emitted.triggers]
        at = stop
    return out + [ref[0] for ref in shuffle.flush(key.lane).groups], entered


KEYS = st.builds(
    Key,
    seed=st.integers(0, 2**64 - 1),
    lane=st.integers(0, 70),
    pass_index=st.integers(0, 3),
    first_chunk=st.integers(0, 10**6),
    name=st.text(max_size=4),
)


@given(key=KEYS, size=st.integers(1, 40), count=st.integers(0, 120), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_it_is_the_plain_reservoir(key: Key, size: int, count: int, cuts: list[int]) -> None:
    out, entered = drive(Shuffle(size), key, count, cuts)
    assert out == reservoir(key.hash64(), list(range(count)), size)
    assert entered == list(range(size, count))  # each newcomer behind the buffer releases one at once


@given(key=KEYS, size=st.integers(1, 40), count=st.integers(0, 120), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_it_is_the_plain_blocks(key: Key, size: int, count: int, cuts: list[int]) -> None:
    out, entered = drive(Shuffle(size, "block"), key, count, cuts)
    assert out == blocks(key.hash64(), list(range(count)), size)
    assert entered == [(i // size + 1) * size - 1 for i in range(count // size * size)]  # with the last of its block


@pytest.mark.parametrize("mode", ["reservoir", "block"])
def test_the_contract_of_accumulators(mode: Any) -> None:
    for size in (1, 5, 100):
        check_accumulator(lambda size=size: Shuffle(size, mode), [{"id": i} for i in range(40)])  # type: ignore[misc]


def test_a_block_moves_nothing_by_more_than_its_size() -> None:
    out, _ = drive(Shuffle(50, "block"), Key(1, 0, 0, 0, "shuffle"), 1000, [])
    assert max(abs(i - origin) for i, origin in enumerate(out)) < 50
    assert sorted(out) == list(range(1000))
    with pytest.raises(zp.errors.ConfigError, match="mode='full'"):
        pipeline(3).shuffle(4, "full")  # type: ignore[arg-type]


@given(key=KEYS, other=KEYS, size=st.integers(1, 10), count=st.integers(0, 40))
def test_lanes_know_nothing_of_each_other(key: Key, other: Key, size: int, count: int) -> None:
    if key.lane == other.lane:
        return
    shuffle = Shuffle(size)
    shuffle.open(key.lane, key)
    shuffle.open(other.lane, other)
    out: list[Any] = []
    for ref in refs(count):
        out += [r[0] for r in shuffle.push(key.lane, [ref]).groups]
        shuffle.push(other.lane, [ref, ref])
    shuffle.flush(other.lane)
    out += [r[0] for r in shuffle.flush(key.lane).groups]
    assert out == reservoir(key.hash64(), list(range(count)), size)


@given(
    num=st.integers(0, 80),
    size=st.integers(1, 30),
    chunk=st.integers(1, 9),
    flush=st.integers(1, 4),
    lanes=st.integers(1, 3),
)
def test_each_window_of_a_pipeline_is_a_reservoir_of_its_own(
    num: int, size: int, chunk: int, flush: int, lanes: int
) -> None:
    line = pipeline(max(num, 1), chunk_size=chunk).shuffle(size)
    line = on(line, 0).options(canonical_replicas=lanes, flush_every_k_chunks=flush)
    found: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
    for batch in line:
        found[batch.lane_id] += ids([batch])
    source = line._session.resolved.source
    for lane in range(lanes):
        expected: list[int] = []
        for first in range(0, max(num, 1) + 1, flush):
            window = [r for i in range(first, first + flush) for r in source.chunk(lane, lanes, 0, i).row.tolist()]
            expected += reservoir(Key(source.seed, lane, 0, first, "shuffle").hash64(), window, size)
        assert found[lane] == expected


def test_a_buffer_as_large_as_the_window_reaches_every_order() -> None:
    orders: Counter[tuple[Any, ...]] = Counter()
    for seed in range(2400):
        out, _ = drive(Shuffle(4), Key(seed, 0, 0, 0, "s"), 4, [])
        orders[tuple(out)] += 1
    assert len(orders) == 24
    assert sum((n - 100) ** 2 / 100 for n in orders.values()) < 58  # chi-squared, 23 degrees: 1 in 10,000 is above


def test_who_leaves_is_even() -> None:
    left: Counter[int] = Counter()
    for seed in range(4000):
        out, _ = drive(Shuffle(8), Key(seed, 3, 1, 16, "s"), 9, [])
        left[out[0]] += 1
    assert sum((left[i] - 500) ** 2 / 500 for i in range(8)) < 30  # 7 degrees: 1 in 10,000 is above
    assert left[8] == 0


def test_windows_lanes_passes_seeds_and_names_have_their_own_order() -> None:
    base = Key(1, 0, 0, 0, "shuffle")
    keys = [base, Key(2, 0, 0, 0, "shuffle"), Key(1, 1, 0, 0, "shuffle"), Key(1, 0, 1, 0, "shuffle")]
    keys += [Key(1, 0, 0, 8, "shuffle"), Key(1, 0, 0, 0, "shuffle_2")]
    assert len({tuple(drive(Shuffle(16), key, 64, [])[0]) for key in keys}) == len(keys)
    line = pipeline(64, chunk_size=64).shuffle(16)
    passes = ids(stream(line, passes=2))
    assert sorted(passes[:64]) == sorted(passes[64:]) == list(range(64))
    assert passes[:64] != passes[64:]
    twice = ids(pipeline(64, chunk_size=64).shuffle(16).shuffle(16))
    assert sorted(twice) == list(range(64))
    assert twice != passes[:64]


@pytest.mark.parametrize("size", [1, 2**32 - 1])
def test_the_smallest_and_the_largest_buffer(size: int) -> None:
    line = pipeline(20, chunk_size=20).shuffle(size)
    found = ids(line)
    assert sorted(found) == list(range(20))
    assert (found == list(range(20))) == (size == 1)  # a buffer of one only passes on


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3", None, 2**32])
def test_the_size_is_checked(size: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="buffer_size"):
        pipeline(3).shuffle(size)


@pytest.mark.parametrize("mode", ["reservoir", "block"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("lanes", [1, 3])
def test_any_workers_and_a_resume_at_every_batch(workers: int, lanes: int, mode: Any) -> None:
    line = (
        pipeline(48, chunk_size=4).shuffle(7, mode).batch(3).options(canonical_replicas=lanes, flush_every_k_chunks=2)
    )
    reference = digests(on(line, 0))
    for cut in range(len(reference) + 1):
        part = on(line, workers, task_records=5).take(cut)
        assert digests(part) == reference[:cut]
        assert digests(resumed(line, saved(part))) == reference[cut:]


def test_it_drops_nothing_and_keeps_records_as_they_are() -> None:
    records = [{"id": i, "text": "x" * i, "n": None if i % 2 else [i]} for i in range(40)]
    line = on(pipeline(records).shuffle(9).batch(4), 2)
    found = {i: (text, n) for b in line for i, text, n in zip(b["id"].tolist(), b["text"], b["n"], strict=True)}
    assert found == {r["id"]: (r["text"], r["n"]) for r in records}
    assert line.counts() == {"delivered": {0: 40}, "dropped": {0: {}}}

"""The algorithms of pack, on lengths alone: no document is lost or cut in vain, and each decision is the plain one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.accumulator import Part
from zephon.ops.bins import LOOK, BestFit, Filler, FirstFit, Limits, Tournament, Wrap
from zephon.ops.pack import ALGORITHMS


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Small enough that every bound is met often."""
    max_length = draw(st.integers(1, 24))
    return Limits(
        max_length=max_length,
        num_bins=draw(st.integers(1, 9)),
        max_sequences=draw(st.one_of(st.just(sys.maxsize), st.integers(1, 5))),
        min_length=draw(st.one_of(st.just(1), st.integers(1, max_length))),
    )


def lengths_for(bounds: Limits) -> st.SearchStrategy[list[int]]:
    """Documents of every length that pack hands on, some of many sequences."""
    most = st.sampled_from([bounds.max_length, bounds.max_length, 3 * bounds.max_length + 2])
    return st.lists(most.flatmap(lambda top: st.integers(bounds.min_length, max(top, bounds.min_length))), max_size=60)


def filled(filler: Filler, lengths: list[int]) -> list[list[Part]]:
    """All sequences of the documents 0, 1, ... with these lengths."""
    for cursor, length in enumerate(lengths):
        filler.add(cursor, length)
    filler.flush()
    return filler.out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(data=st.data(), bounds=limits())
def test_every_document_leaves_once_within_the_bounds(algorithm: str, data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    filler = ALGORITHMS[algorithm](bounds)
    sequences = filled(filler, lengths)
    pieces: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(lengths))}
    for parts in sequences:
        assert 0 < sum(stop - start for _, start, stop in parts) <= bounds.max_length
        assert 0 < len(parts) <= bounds.max_sequences
        for cursor, start, stop in parts:
            assert stop - start >= bounds.min_length
            pieces[cursor].append((start, stop))
    rests = []
    for cursor, found in pieces.items():
        assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(found)]  # in order, no gap
        rest = lengths[cursor] - (found[-1][1] if found else 0)
        assert 0 <= rest < bounds.min_length
        rests += [rest] if rest else []
    assert sorted(filler.lost) == sorted(rests)
    assert list(filler.held()[0]) == []


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit"])
@given(data=st.data(), bounds=limits())
def test_what_fits_is_not_cut(algorithm: str, data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    for parts in filled(ALGORITHMS[algorithm](bounds), lengths):
        for cursor, start, stop in parts:
            rest = lengths[cursor] % bounds.max_length
            assert (start, stop) == (lengths[cursor] - rest, lengths[cursor]) or stop - start == bounds.max_length


@given(data=st.data(), bounds=limits())
def test_best_fit_wrap_cuts_only_to_fill_a_sequence(data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    for parts in filled(BestFit(bounds, split=True), lengths):
        cut = [part for part in parts if part[2] - part[1] < bounds.max_length and part[2] < lengths[part[0]]]
        assert len(cut) <= 1
        if cut:
            assert cut == parts[-1:]
            assert sum(stop - start for _, start, stop in parts) == bounds.max_length


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(data=st.data(), bounds=limits())
def test_what_is_held_goes_on_in_another(algorithm: str, data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    at = data.draw(st.integers(0, len(lengths)))
    whole = filled(ALGORITHMS[algorithm](bounds), lengths)
    first, second = ALGORITHMS[algorithm](bounds), ALGORITHMS[algorithm](bounds)
    for cursor in range(at):
        first.add(cursor, lengths[cursor])
    parts, sizes = first.held()
    assert sum(sizes) == len(parts)
    second.load(parts, sizes)
    assert second.held() == (parts, sizes)
    for cursor in range(at, len(lengths)):
        second.add(cursor, lengths[cursor])
    second.flush()
    assert first.out + second.out == whole


@given(data=st.data(), bounds=limits())
def test_first_fit_is_the_plain_one(data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    assert filled(FirstFit(bounds), lengths) == plain_first_fit(bounds, lengths)


def plain_first_fit(bounds: Limits, lengths: list[int]) -> list[list[Part]]:
    """Looks at every open sequence."""
    done: list[list[Part]] = []
    bins: list[list[Part]] = []
    for cursor, length in enumerate(lengths):
        start = whole(cursor, length, bounds, done)
        if length - start < bounds.min_length:
            continue
        place = next((each for each in bins if units(each) + length - start <= bounds.max_length), None)
        if place is None:
            if len(bins) == bounds.num_bins:
                fullest = max(bins, key=units)  # the first of equals
                bins.remove(fullest)
                done.append(fullest)
            place = []
            bins.append(place)
        place.append((cursor, start, length))
        if bounds.max_length - units(place) < bounds.min_length or len(place) == bounds.max_sequences:
            bins.remove(place)
            done.append(place)
    return done + bins


@pytest.mark.parametrize("split", [False, True])
@given(data=st.data(), bounds=limits())
def test_best_fit_is_the_plain_one(split: bool, data: st.DataObject, bounds: Limits) -> None:
    lengths = data.draw(lengths_for(bounds))
    assert filled(BestFit(bounds, split), lengths) == plain_best_fit(bounds, lengths, split)


def plain_best_fit(bounds: Limits, lengths: list[int], split: bool) -> list[list[Part]]:
    """Looks at every document that waits."""
    done: list[list[Part]] = []
    waiting: list[Part] = []
    for cursor, length in enumerate(lengths):
        start = whole(cursor, length, bounds, done)
        if length - start < bounds.min_length:
            continue
        waiting.append((cursor, start, length))
        enough = units(waiting) >= 2 * bounds.max_length or len(waiting) >= 2 * bounds.max_sequences
        if len(waiting) > bounds.num_bins and enough:
            done.append(plain_fill(bounds, waiting, split))
    while waiting:
        done.append(plain_fill(bounds, waiting, split))
    return done


def plain_fill(bounds: Limits, waiting: list[Part], split: bool) -> list[Part]:
    """Takes the next sequence out of what waits."""
    parts = [waiting.pop(0)]
    while (free := bounds.max_length - units(parts)) and waiting and len(parts) < bounds.max_sequences:
        fitting = [part for part in waiting if size(part) <= free]
        is_last = len(parts) + 1 == bounds.max_sequences
        longer = any(size(part) > free for part in waiting)
        if fitting and not (is_last and split and longer and max(map(size, fitting)) < free):
            best = plain_best(fitting, free, is_last or (not longer and free - largest(fitting) >= largest(fitting)))
            waiting.remove(best)
            parts.append(best)
            continue
        cuttable = [part for part in waiting if size(part) >= free + bounds.min_length]
        if split and cuttable and free >= bounds.min_length:
            cut = min(cuttable, key=size)  # the oldest of the shortest
            waiting[waiting.index(cut)] = (cut[0], cut[1] + free, cut[2])
            parts.append((cut[0], cut[1], cut[1] + free))
        break
    return parts


def plain_best(fitting: list[Part], free: int, alone: bool) -> Part:
    """The oldest of the best length: of the LOOK largest, what leaves the least with one more behind it."""
    chosen = largest(fitting)
    if not alone:
        left = {}
        for length in sorted({size(part) for part in fitting}, reverse=True)[:LOOK]:
            others = [size(part) for part in fitting if size(part) <= min(length, free - length)]
            if free - length >= length:  # the piece itself is no second one
                others.remove(length)
            left[length] = free - length - max(others, default=0)
        chosen = min(left, key=lambda length: (left[length], -length))
    return next(part for part in fitting if size(part) == chosen)


def largest(parts: list[Part]) -> int:
    return max(map(size, parts))


def size(part: Part) -> int:
    return part[2] - part[1]


def units(parts: list[Part]) -> int:
    return sum(map(size, parts))


def whole(cursor: int, length: int, bounds: Limits, done: list[list[Part]]) -> int:
    """Lets the full sequences of a document go; returns where the rest begins."""
    start = 0
    while length - start >= bounds.max_length:
        done.append([(cursor, start, start + bounds.max_length)])
        start += bounds.max_length
    return start


def test_few_short_documents_wait_until_they_fill_sequences() -> None:
    """A pool that counted documents alone would let go of sequences that are almost empty."""
    for split in (False, True):
        sequences = filled(BestFit(Limits(1_000, num_bins=2), split), [7] * 1_000)
        assert len(sequences) == 8 - split  # 142 documents a sequence, or 142.9


def test_none_waits_for_more_sequences_than_there_are_bins() -> None:
    """An awkward length is not put off for ever."""
    filler = BestFit(Limits(100, num_bins=5))
    filler.add("awkward", 34)
    for i in range(40):
        filler.add(i, 50)
    assert ["awkward" in [cursor for cursor, _, _ in parts] for parts in filler.out].index(True) <= 5


@given(
    numbers=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    changes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9))),
)
def test_the_tournament_finds_the_first(numbers: list[int], changes: list[tuple[int, int]]) -> None:
    tree = Tournament(numbers, len(numbers))
    for place, number in [(0, numbers[0]), *changes]:
        if place < len(numbers):
            numbers[place] = tree[place] = number
        for least in range(1, 11):
            assert tree.first(least) == next((i for i, found in enumerate(numbers) if found >= least), -1)


@pytest.mark.parametrize(
    ("filler", "parts", "sizes"),
    [
        (Wrap(Limits(4)), [(0, 0, 4)], [1]),
        (FirstFit(Limits(4)), [(0, 0, 4)], [1]),
        (FirstFit(Limits(4)), [], [0]),
        (FirstFit(Limits(4, num_bins=1)), [(0, 0, 1), (1, 0, 1)], [1, 1]),
        (BestFit(Limits(4)), [(0, 0, 4)], [1]),
        (BestFit(Limits(4)), [(0, 1, 1)], [1]),
    ],
)
def test_what_none_can_hold_is_refused(filler: Any, parts: list[Part], sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"units are held|open|waits"):
        filler.load(parts, sizes)

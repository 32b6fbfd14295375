"""Documents into sequences of a bounded length: pure decisions on lengths, one filler for each algorithm.

A filler takes the documents of one group of a lane in order, (cursor, length) each, and puts sequences that are done,
lists of parts, into `out`. Every document leaves once, whole or in parts that follow each other; what is too short to
be a part of its own goes to `lost`, by its length. No decision looks at all that is held: each costs a binary search or
a walk down a tree, and a shift of small integers in one block of memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Protocol

import msgspec

from zephon.ops.accumulator import Part

LOOK = 8
"""Lengths that best fit tries for a place, from the largest that fits. With 1, four times the padding and more."""

_PLACES = 16  # for open sequences, to begin with
_SHIFT = 48  # a key is length << 48 | number: sorted by length, then by age
_NUMBER = (1 << _SHIFT) - 1


class Limits(msgspec.Struct, frozen=True):
    """What bounds a sequence (units, pieces), a piece of a split document, and what is held."""

    max_length: int
    num_bins: int = 256
    max_sequences: int = sys.maxsize
    min_length: int = 1


class Filler(Protocol):
    """The contract of an algorithm. One that was loaded goes on as the one whose `held` it was given."""

    out: list[list[Part]]
    lost: list[int]

    def add(self, cursor: Any, length: int) -> None:
        """Takes a document of at least one unit, of any length."""

    def flush(self) -> None:
        """Lets all that is held go into `out`."""

    def held(self) -> tuple[Sequence[Part], list[int]]:
        """(parts, how many of them stand in each open sequence), in an order from which `load` goes on."""

    def load(self, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        """Takes over what another one held; this one is new. Raises ValueError for what none can hold."""


class Wrap:
    """End to end, cut where a sequence is full. Holds one open sequence."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.out: list[list[Part]] = []
        self.lost: list[int] = []
        self._open: list[Part] = []
        self._room = limits.max_length

    def add(self, cursor: Any, length: int) -> None:
        limits, start = self._limits, 0
        least, most = limits.min_length, limits.max_sequences
        while length - start >= least:
            stop = min(length, start + self._room)
            self._open.append((cursor, start, stop))
            self._room -= stop - start
            start = stop
            if self._room < least or len(self._open) == most:
                self.flush()
        if start < length:
            self.lost.append(length - start)

    def flush(self) -> None:
        if self._open:
            self.out.append(self._open)
            self._open, self._room = [], self._limits.max_length

    def held(self) -> tuple[Sequence[Part], list[int]]:
        return self._open.copy(), [len(self._open)]

    def load(self, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        most = self._limits.max_length
        self._open, self._room = list(parts), most - _units(parts)
        if self._room <= 0:
            raise ValueError(f"{most - self._room:,} units are held, and a sequence has {most:,}")


class FirstFit:
    """Each document to the sequence that was opened first among those with room for it.

    At most `num_bins` are open. Where none has room and all are open, the fullest is let go (of equals the oldest).
    Johnson, Fast algorithms for bin packing, 1974, with a tournament over the free room of the sequences.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.out: list[list[Part]] = []
        self.lost: list[int] = []
        self._bins: dict[int, list[Part]] = {}  # by place, ascending, in the order of opening
        self._keys: list[int] = []  # free << 48 | place of every open sequence, ascending
        self._room = Tournament([], _PLACES)
        self._end = 0  # the next place

    def add(self, cursor: Any, length: int) -> None:
        start = _cut_whole(cursor, length, self._limits, self.out)
        if length - start >= self._limits.min_length:
            self._put((cursor, start, length))
        elif start < length:
            self.lost.append(length - start)

    def _put(self, part: Part) -> None:
        limits, length = self._limits, part[2] - part[1]
        place = self._room.first(length)
        if place < 0:
            place, free = self._opened(), limits.max_length
        else:
            free = self._room[place]
            del self._keys[bisect_left(self._keys, free << _SHIFT | place)]
        parts = self._bins.setdefault(place, [])
        parts.append(part)
        free -= length
        if free < limits.min_length or len(parts) == limits.max_sequences:
            self._close(place)
        else:
            self._room[place] = free
            insort(self._keys, free << _SHIFT | place)

    def _opened(self) -> int:
        """The place of a new sequence, behind all others."""
        if len(self._bins) == self._limits.num_bins:
            self._close(self._keys.pop(0) & _NUMBER)
        if self._end == len(self._room):
            self._lay(list(self._bins.values()))
        self._end += 1
        return self._end - 1

    def _close(self, place: int) -> None:
        self.out.append(self._bins.pop(place))
        self._room[place] = 0

    def _lay(self, bins: list[list[Part]]) -> None:
        """Gives open sequences the places from 0 on, and leaves as many free behind them."""
        free = [self._limits.max_length - _units(parts) for parts in bins]
        self._bins, self._end = dict(enumerate(bins)), len(bins)
        self._keys = sorted(room << _SHIFT | place for place, room in enumerate(free))
        self._room = Tournament(free, max(_PLACES, 2 * len(free)))

    def flush(self) -> None:
        self.out += self._bins.values()
        self._lay([])

    def held(self) -> tuple[Sequence[Part], list[int]]:
        return list(chain.from_iterable(self._bins.values())), list(map(len, self._bins.values()))

    def load(self, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        if len(sizes) > self._limits.num_bins:
            raise ValueError(f"{len(sizes):,} sequences are open, more than num_bins={self._limits.num_bins:,}")
        rest = iter(parts)
        bins = [[next(rest) for _ in range(size)] for size in sizes]
        if not all(0 < _units(each) < self._limits.max_length for each in bins):
            raise ValueError(f"an open sequence is empty, or longer than max_length={self._limits.max_length:,}")
        self._lay(bins)


class BestFit:
    """Candidates wait; the oldest begins a sequence, and the others fill it, the best fitting first.

    Up to `num_bins` candidates wait, or more while they make fewer than two sequences. So none waits longer than that
    many sequences. The best is the largest that fits or, of the LOOK largest lengths that do, the one that leaves the
    least with a second piece behind it. `split`: where none fits, the shortest of the others is cut to fill the place,
    and its rest waits on in its turn.

    The textbook's best fit, which puts each document into an open sequence as it comes, has five to thirty times the
    padding, however many it keeps open: docs/packing.md has the table.
    """

    def __init__(self, limits: Limits, split: bool = False) -> None:
        self._limits, self._split = limits, split
        self.out: list[list[Part]] = []
        self.lost: list[int] = []
        self._waiting: dict[int, Part] = {}  # by number, in the order of arrival
        self._lengths: list[int] = []  # all lengths that wait, ascending
        self._numbers: dict[int, list[int]] = {}  # of the pieces of each length, as a heap
        self._units = 0
        self._next = 0
        self._oldest = 0  # no number below it waits

    def add(self, cursor: Any, length: int) -> None:
        limits = self._limits
        start = _cut_whole(cursor, length, limits, self.out) if length >= limits.max_length else 0
        if length - start < limits.min_length:
            if start < length:
                self.lost.append(length - start)
            return
        self._wait((cursor, start, length))
        num = len(self._waiting)
        if num > limits.num_bins and (self._units >= 2 * limits.max_length or num >= 2 * limits.max_sequences):
            self.out.append(self._fill())

    def _wait(self, part: Part) -> None:
        self._waiting[self._next] = part
        self._enter(part[2] - part[1], self._next)
        self._next += 1
        self._units += part[2] - part[1]

    def _enter(self, length: int, number: int) -> None:
        numbers = self._numbers.get(length)
        if numbers is None:
            self._numbers[length] = [number]
            insort(self._lengths, length)
        else:
            heappush(numbers, number)

    def _leave(self, at: int) -> int:
        """The number of the oldest piece of the length at a position of `_lengths`, which leaves them."""
        numbers = self._numbers[self._lengths[at]]
        if len(numbers) == 1:
            del self._numbers[self._lengths.pop(at)]
        return heappop(numbers)

    def _fill(self) -> list[Part]:
        """The next sequence."""
        lengths, waiting, most = self._lengths, self._waiting, self._limits.max_sequences
        while self._oldest not in waiting:
            self._oldest += 1
        parts = [waiting.pop(self._oldest)]
        length = parts[0][2] - parts[0][1]
        self._leave(bisect_left(lengths, length))  # the oldest of all is the oldest of its length
        free = self._limits.max_length - length
        while free and lengths and len(parts) < most:
            at = self._best(free, len(parts) + 1 == most)
            if at < 0:
                free = self._cut(parts, free)
                break
            free -= lengths[at]
            parts.append(waiting.pop(self._leave(at)))
        self._units -= self._limits.max_length - free
        return parts

    def _best(self, free: int, is_last: bool) -> int:
        """The position of the best length for a place of `free` units; -1: none fits, or one is to be cut."""
        lengths = self._lengths
        at = bisect_right(lengths, free) - 1
        if at < 0 or free - lengths[at] >= lengths[-1]:  # whatever comes next fits as well
            return at
        if is_last:  # with no second piece only an exact fit saves a cut
            return at if lengths[at] == free or not self._split or at + 1 == len(lengths) else -1
        least, best = free, at
        for first in range(at, max(at - LOOK, -1), -1):
            left = free - lengths[first]
            second = bisect_right(lengths, left, 0, first + 1) - 1
            if second == first and len(self._numbers[lengths[first]]) == 1:  # the piece itself
                second -= 1
            if second >= 0:
                left -= lengths[second]
            if left < least:
                least, best = left, first
                if not left:
                    break
        return best

    def _cut(self, parts: list[Part], free: int) -> int:
        """Fills a place with the beginning of a longer piece, where both of its parts may be; returns what is free."""
        least = self._limits.min_length
        at = bisect_left(self._lengths, free + least)
        if not self._split or free < least or at == len(self._lengths):
            return free
        number = self._leave(at)
        cursor, start, stop = self._waiting[number]
        parts.append((cursor, start, start + free))
        self._waiting[number] = (cursor, start + free, stop)
        self._enter(stop - start - free, number)
        return 0

    def flush(self) -> None:
        while self._waiting:
            self.out.append(self._fill())

    def held(self) -> tuple[Sequence[Part], list[int]]:
        return list(self._waiting.values()), [len(self._waiting)]

    def load(self, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        most = self._limits.max_length
        if not all(start < stop < start + most for _, start, stop in parts):
            raise ValueError(f"a part that waits is empty, or not shorter than max_length={most:,}")
        for part in parts:
            self._wait(part)


class Tournament:
    """Numbers by place, and the first place whose number is at least some other: each leaf's winner is the larger."""

    def __init__(self, numbers: Sequence[int], num_places: int) -> None:
        self._size = 1 << (num_places - 1).bit_length()  # at least num_places; 0 where there is no number
        leaves = [*numbers, *[0] * (self._size - len(numbers))]
        self._tree = [*[0] * self._size, *leaves]  # node i has the children 2i and 2i + 1
        for i in range(self._size - 1, 0, -1):
            self._tree[i] = max(self._tree[2 * i], self._tree[2 * i + 1])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        return self._tree[self._size + place]

    def __setitem__(self, place: int, number: int) -> None:
        tree, i = self._tree, self._size + place
        tree[i] = number
        while i > 1:
            larger = max(tree[i], tree[i ^ 1])
            i >>= 1
            if tree[i] == larger:
                return
            tree[i] = larger

    def first(self, least: int) -> int:
        """The first place with a number of at least `least` (more than 0); -1 where there is none."""
        tree, i = self._tree, 1
        if tree[1] < least:
            return -1
        while i < self._size:
            i *= 2
            if tree[i] < least:
                i += 1
        return i - self._size


def _cut_whole(cursor: Any, length: int, limits: Limits, out: list[list[Part]]) -> int:
    """Lets every full sequence of a long document go by itself; returns where its rest begins."""
    most = limits.max_length
    stop = length - length % most
    out += [[(cursor, start, start + most)] for start in range(0, stop, most)]
    return stop


def _units(parts: Sequence[Part]) -> int:
    return sum(stop - start for _, start, stop in parts)

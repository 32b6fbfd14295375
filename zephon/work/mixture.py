"""The merge of several sequences in given proportions, at any position, without state.

The k-th element of component c has the key (k div W_c, (k mod W_c + u_c) / W_c, c), W the integer weights, u the
phases, the middle part a double. The merge is all elements in the order of their keys. It has the period P = sum(W):
every W_c elements of each c. This is Webster-like apportionment (stride scheduling; Waldspurger, Weihl, 1995) with
golden-ratio phases, so that a prefix of any length holds each component's share to within a few elements.

Nothing is merged up to the wanted positions. Below "time" t, in periods, component c has W_c t elements to within one,
so a window of times around the wanted positions holds them all, and one sort of the window orders them. The counts
at the window's edge are exact, so the positions are.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError, InternalError
from zephon.work.source import MAX_POSITION

_GOLDEN: Final = 0.6180339887498949
INSET: Final = 1e-6  # keeps phases inside (0, 1)

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


def phases(weights: Sequence[int]) -> list[float]:
    """One phase in (0, 1) a component: golden steps by the rank of (weight, index). Without them equal weights would
    come in bursts of their number."""
    ranked = sorted(range(len(weights)), key=lambda c: (weights[c], c))
    found = [0.0] * len(weights)
    for rank, c in enumerate(ranked):
        found[c] = golden_phase(rank)
    return found


def golden_phase(rank: int) -> float:
    """The phase of the component with this rank."""
    return (0.5 + rank * _GOLDEN) % 1.0 * (1.0 - 2.0 * INSET) + INSET


class Segment(NamedTuple):
    """A stretch of the merge in which the same components take part."""

    start: int  # position of its first element
    gone: int  # elements of the components that ended before it
    period: int  # sum of the weights of those that take part
    only: int  # the component, where one alone is left; else -1


class Mixture:
    """The merge of components with integer weights; with `limits`, component c ends after limits[c] elements.

    When one has ended the others go on with their keys, so their proportions stay. Weights and limits are at
    least 1, and the weights' sum is at most 2^48. `phase`: of each component, in (0, 1); else golden steps.
    """

    def __init__(
        self, weights: Sequence[int], limits: Sequence[int] | None = None, phase: Sequence[float] | None = None
    ) -> None:
        self.weights = tuple(weights)
        self.period = sum(self.weights)
        self._weight = np.array(self.weights, np.int64)
        self._width = self._weight.astype(np.float64)
        self._phase = np.array(phases(self.weights) if phase is None else phase)
        self._limit = np.array(limits if limits is not None else [MAX_POSITION] * len(self.weights), np.int64)
        self._cap = self._limit // self._weight + 1  # from this period on, a component has ended
        # Each count is within one of its share, plus roundings of at most an eighth where the period nears 2^48.
        self._margin = len(self.weights) + len(self.weights) // 8 + 2
        self._segments = self._find_segments(limits is not None)
        self._starts = [segment.start for segment in self._segments]

    def key(self, component: int, k: int) -> tuple[int, float, int]:
        """What the merge is sorted by; `k` may be an integer of any size."""
        period, rest = divmod(k, self.weights[component])
        return period, (rest + float(self._phase[component])) / float(self._width[component]), component

    def place(self, component: int, k: int) -> int:
        """The position of a component's k-th element (from 0) in the merge without limits."""
        period, _, _ = key = self.key(component, k)
        return period * self.period + int(self._before(key).sum())

    def reaches(self, component: int, k: int) -> bool:
        """Whether the merge without limits ever comes to a component's k-th element."""
        return True

    def counts(self, position: int) -> list[int]:
        """Elements of each component before a position of the merge without limits."""
        component, k = self.chunk(position, 1)
        key = self.key(int(component[0]), int(k[0]))
        return [key[0] * weight + below for weight, below in zip(self.weights, self._before(key).tolist(), strict=True)]

    def chunk(self, start: int, count: int) -> tuple[NDArray[np.intp], I64]:
        """(component, k) of positions start .. start + count - 1: two arrays of shape (count,), count at least 1.

        All positions must lie within the merge.
        """
        stop = start + count
        if stop > MAX_POSITION:
            raise ConfigError(f"position {stop - 1} of a pass was asked for: positions end at 2**62")
        first, last = self._segment_at(start), self._segment_at(stop - 1)
        if first is last and first.only >= 0:
            component = np.full(count, first.only, np.intp)
            return component, np.arange(start - first.gone, stop - first.gone, dtype=np.int64)
        low = divmod(max(0, start - first.gone - self._margin), first.period)
        high = divmod(stop - last.gone + self._margin, last.period)
        fractions = np.array([[low[1] / first.period], [high[1] / last.period]])
        below = self._below(fractions)
        k_low, k_high = self._counts(low[0], below[0]), self._counts(high[0], below[1])
        return self._sorted(k_low, k_high - k_low, start - int(k_low.sum()), count)

    def _sorted(self, k_low: I64, sizes: I64, skip: int, count: int) -> tuple[NDArray[np.intp], I64]:
        """Sort the window that holds sizes[c] elements of each c from k_low[c] on; `count` of them, after `skip`."""
        component = np.repeat(np.arange(len(sizes)), sizes)
        k = np.arange(len(component)) + np.repeat(k_low - np.cumsum(sizes) + sizes, sizes)
        period, rest = np.divmod(k, self._weight[component])
        fraction = (rest + self._phase[component]) / self._width[component]
        # The window lies component by component and both sorts are stable, so equal keys stay in that order.
        one_period = int(period.min()) == int(period.max())
        order = np.argsort(fraction, kind="stable") if one_period else np.lexsort((fraction, period))
        wanted = order[max(0, skip) : skip + count]
        if len(wanted) != count:
            raise InternalError(f"the window of a chunk of {count} pointers holds {len(order)} from {-skip} on")
        return component[wanted], k[wanted]

    def _below(self, fraction: F64) -> I64:
        """How many of a period's W_c elements have a key below `fraction` in [0, 1]; of shape (..., C).

        The first guess comes from real arithmetic; it is then corrected on the keys themselves, as rounded.
        """
        k = np.floor(fraction * self._width + (1.0 - self._phase))
        while True:
            up = (k + self._phase) / self._width < fraction
            down = (k - 1.0 + self._phase) / self._width >= fraction
            if not (up.any() or down.any()):
                below: I64 = k.astype(np.int64)
                return below
            k += up
            k -= down

    def _before(self, key: tuple[int, float, int]) -> I64:
        """Elements of each component before `key` within the key's own period; of shape (C,)."""
        _, fraction, component = key
        below = self._below(np.array(fraction))
        # An equal fraction comes before if its component does. The W_c-th would be in the next period.
        equal = ((below + self._phase) / self._width == fraction) & (below < self._weight)
        below[:component] += equal[:component]
        return below

    def _counts(self, period: int, below: I64) -> I64:
        """Elements of each component in whole periods and a part of one, at most its limit."""
        whole = np.minimum(self._cap, min(period, MAX_POSITION)) * self._weight
        counts: I64 = np.minimum(whole + below, self._limit)
        return counts

    def _segment_at(self, position: int) -> Segment:
        return self._segments[bisect.bisect_right(self._starts, position) - 1]

    def _find_segments(self, limited: bool) -> list[Segment]:
        left = set(range(len(self.weights)))
        found = [Segment(0, 0, self.period, 0 if len(left) == 1 else -1)]
        if not limited:
            return found
        gone, period = 0, self.period
        for key in sorted(self.key(c, int(limit) - 1) for c, limit in enumerate(self._limit)):
            component = key[2]
            left.discard(component)
            gone += int(self._limit[component])
            period -= self.weights[component]
            if left:
                start = int(self._counts(key[0], self._before(key)).sum()) + 1
                found.append(Segment(start, gone, period, next(iter(left)) if len(left) == 1 else -1))
        return found

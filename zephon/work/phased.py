"""A merge whose weights change at given positions, at any position, without state.

Phase j holds the positions [H_j, H_j+1) exactly, and is the static merge of its weights. Every component goes on behind
the elements that the phases before have given, so none is lost or given twice. What is known once are those numbers,
N_c, and the component's due E_c: the sum of its share over all positions before H_j. The next element of c is due
where E_c reaches N_c + u_c, so within phase j its phase is N_c + u_c - E_c. What is owed is thus carried on, and the
error of a long row of short phases (a ramp) is that of one. Dues are kept in units of 2^-64.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zephon.work.mixture import INSET, Mixture, golden_phase

UNIT_BITS: Final = 64

Step = tuple[int, tuple[int, ...]]
"""(position, integer weights from there on); 0: not drawn."""


class _Phase(NamedTuple):
    start: int
    drawn: list[int]  # the components that take part
    component: NDArray[np.intp]  # the same
    given: NDArray[np.int64]  # of each of them, elements before this phase
    merge: Mixture  # of them alone


class PhasedMixture:
    """The merge of components under steps of weights. It answers what `Mixture` answers."""

    def __init__(self, steps: Sequence[Step]) -> None:
        num_components = len(steps[0][1])
        self._first_phase = _first_phases(steps)
        self._phases: list[_Phase] = []
        self._given: list[list[int]] = [[] for _ in range(num_components)]  # by component, before each phase
        self._starts = [start for start, _ in steps]
        given, due = [0] * num_components, [0] * num_components
        for number, (start, weights) in enumerate(steps):
            phase = self._phase(start, weights, given, due)
            self._phases.append(phase)
            for c, n in enumerate(given):
                self._given[c].append(n)
            if number + 1 < len(steps):
                length, period = steps[number + 1][0] - start, sum(weights)
                for c, n in zip(phase.drawn, phase.merge.counts(length), strict=True):
                    given[c] += n
                    due[c] += (length * weights[c] << UNIT_BITS) // period

    def _phase(self, start: int, weights: Sequence[int], given: Sequence[int], due: Sequence[int]) -> _Phase:
        drawn = [c for c, weight in enumerate(weights) if weight]
        ahead = {c: (given[c] << UNIT_BITS) + int(self._first_phase[c] * (1 << UNIT_BITS)) - due[c] for c in drawn}
        late = sorted((c for c in drawn if ahead[c] <= 0), key=lambda c: (Fraction(ahead[c], weights[c]), c))
        # Those that are overdue have keys below all others, in the order in which they were due.
        least = INSET / (2.0 * max(weights) * (len(drawn) + 1))
        phase = {c: min(max(ahead[c] / (1 << UNIT_BITS), INSET), 1.0 - INSET) for c in drawn}
        phase |= {c: weights[c] * (rank + 1) * least for rank, c in enumerate(late)}
        merge = Mixture([weights[c] for c in drawn], phase=[phase[c] for c in drawn])
        index = np.array(drawn, np.intp)
        return _Phase(start, drawn, index, np.array([given[c] for c in drawn], np.int64), merge)

    def reaches(self, component: int, k: int) -> bool:
        """Whether the merge ever comes to a component's k-th element: not if its weight is 0 from some position on."""
        return component in self._phases[-1].drawn or k < self._given[component][-1]

    def key(self, component: int, k: int) -> tuple[int, int, float, int]:
        """What the merge is sorted by, for an element that it reaches."""
        number, period, fraction = self._find(component, k)
        return number, period, fraction, component

    def _find(self, component: int, k: int) -> tuple[int, int, float]:
        number = bisect.bisect_right(self._given[component], k) - 1  # the last one: others there have none of it
        phase = self._phases[number]
        period, fraction, _ = phase.merge.key(phase.drawn.index(component), k - self._given[component][number])
        return number, period, fraction

    def place(self, component: int, k: int) -> int:
        """The position of a component's k-th element, for one that the merge reaches."""
        number = bisect.bisect_right(self._given[component], k) - 1
        phase = self._phases[number]
        return phase.start + phase.merge.place(phase.drawn.index(component), k - self._given[component][number])

    def chunk(self, start: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """(component, k) of positions start .. start + count - 1: two arrays of shape (count,), count at least 1."""
        first = bisect.bisect_right(self._starts, start) - 1
        last = bisect.bisect_left(self._starts, start + count) - 1
        bounds = [start, *self._starts[first + 1 : last + 1], start + count]
        parts = []
        for phase, (low, high) in zip(self._phases[first : last + 1], pairwise(bounds), strict=True):
            own, k = phase.merge.chunk(low - phase.start, high - low)
            parts.append((phase.component[own], k + phase.given[own]))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([c for c, _ in parts]), np.concatenate([k for _, k in parts])


def _first_phases(steps: Sequence[Step]) -> list[float]:
    """A golden phase for each component by the order in which they appear: a later step does not change an earlier."""
    order: dict[int, None] = {}
    for _, weights in steps:
        new = [c for c, weight in enumerate(weights) if weight and c not in order]
        order |= dict.fromkeys(sorted(new, key=lambda c: (weights[c], c)))
    ranks = {c: rank for rank, c in enumerate(order)}
    return [golden_phase(ranks.get(c, 0)) for c in range(len(steps[0][1]))]

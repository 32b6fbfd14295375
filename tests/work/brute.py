"""The truth that the arithmetic is held against: plain loops over every pointer of a pass."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.record import Pointers


class Rows:
    """A dataset that holds nothing but its table of shards."""

    def __init__(self, name: str, num_rows: int, shard_rows: Sequence[int] | None = None) -> None:
        self.name = name
        self.num_rows = num_rows
        self.shard_rows: NDArray[np.int64] = np.array([num_rows] if shard_rows is None else shard_rows, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "rows": self.num_rows}


def phases(weights: Sequence[int]) -> list[float]:
    order = sorted(range(len(weights)), key=lambda c: (weights[c], c))
    rank = {c: rank for rank, c in enumerate(order)}
    return [(0.5 + rank[c] * 0.6180339887498949) % 1.0 * (1.0 - 2e-6) + 1e-6 for c in range(len(weights))]


def merge(
    weights: Sequence[int], limits: Sequence[int] | None = None, u: Sequence[float] | None = None
) -> Iterator[tuple[int, int]]:
    """(component, k) of the full merge, one by one from its start; exhausted components are left out."""
    u = phases(weights) if u is None else u

    def key(c: int, k: int) -> tuple[int, float, int]:
        return k // weights[c], (k % weights[c] + u[c]) / weights[c], c

    heap = [(key(c, 0), 0) for c in range(len(weights))]
    heapq.heapify(heap)
    while heap:
        (_, _, c), k = heapq.heappop(heap)
        yield c, k
        if limits is None or k + 1 < limits[c]:
            heapq.heappush(heap, (key(c, k + 1), k + 1))


def phased(steps: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int]]:
    """(component, k) of a merge whose weights change at positions, endless.

    Each phase is a plain merge whose phases say when every component is due: what is owed from before comes first.
    """
    seen: list[int] = []
    for _, weights in steps:
        seen += sorted((c for c, w in enumerate(weights) if w and c not in seen), key=lambda c: (weights[c], c))
    golden = {c: (0.5 + rank * 0.6180339887498949) % 1.0 * (1.0 - 2e-6) + 1e-6 for rank, c in enumerate(seen)}
    given, due = dict.fromkeys(seen, 0), dict.fromkeys(seen, 0)
    for number, (start, weights) in enumerate(steps):
        drawn = [c for c, w in enumerate(weights) if w]
        ahead = {c: given[c] * 2**64 + int(golden[c] * 2**64) - due[c] for c in drawn}
        late = sorted((c for c in drawn if ahead[c] <= 0), key=lambda c: Fraction(ahead[c], weights[c]))
        least = 1e-6 / (2.0 * max(weights) * (len(drawn) + 1))
        u = {c: min(max(ahead[c] / 2**64, 1e-6), 1 - 1e-6) for c in drawn}
        u.update((c, weights[c] * (rank + 1) * least) for rank, c in enumerate(late))
        endless = merge([weights[c] for c in drawn], u=[u[c] for c in drawn])
        length = steps[number + 1][0] - start if number + 1 < len(steps) else None
        before = dict(given)
        for own, k in islice(endless, length):
            c = drawn[own]
            given[c] += 1
            yield c, before[c] + k
        for c in drawn:
            due[c] += ((length or 0) * weights[c] << 64) // sum(weights)


def position(weights: Sequence[int], component: int, k: int) -> int:
    """How many elements of the merge without limits come before (component, k): a bisection on the keys themselves."""
    u = phases(weights)
    period, rest = divmod(k, weights[component])
    target = ((rest + u[component]) / weights[component], component)
    total = period * sum(weights)
    for c, weight in enumerate(weights):

        def key(r: int, c: int = c, weight: int = weight) -> tuple[float, int]:
            return (r + u[c]) / weight, c

        total += bisect_left(range(weight), target, key=key)
    return total


def one_pass(
    weights: Sequence[int], rows: Sequence[int], end: str, epochs: int = 1, max_epochs: int | None = None
) -> Iterator[tuple[int, int]]:
    """(component, k) of a whole pass, by counting what each component has given."""
    return ended(merge(weights, rows if end == "redistribute" else None), rows, end, epochs, max_epochs)


def ended(
    pointers: Iterator[tuple[int, int]], rows: Sequence[int], end: str, epochs: int = 1, max_epochs: int | None = None
) -> Iterator[tuple[int, int]]:
    """The first of these pointers, up to where a pass ends."""
    given = [0] * len(rows)
    for c, k in pointers:
        yield c, k
        given[c] += 1
        whole = [g // n for g, n in zip(given, rows, strict=True)]
        if end == "epochs" and min(whole) >= epochs:
            return
        if end == "stop" and max(whole) >= 1:
            return
        if end == "repeat" and max_epochs is not None and max(whole) >= max_epochs:
            return


def first(iterator: Iterator[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return list(islice(iterator, count))


def triples(pointers: Pointers) -> list[tuple[int, int, int]]:
    """(dataset, epoch, row) of each pointer."""
    return list(zip(pointers.dataset.tolist(), pointers.epoch.tolist(), pointers.row.tolist(), strict=True))

"""Where the samples of a batch came from, kept without their payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.record import Block, Group, Handle, Handles, Lineage, Origin, Pointers, origins_of

Ints = NDArray[np.int64]


class Origins:
    """The origins of samples as columns: how many each has (None: one), and the dataset, row and path of all."""

    __slots__ = ("counts", "dataset", "path", "row")

    def __init__(self, counts: Ints | None, dataset: Ints, row: Ints, path: list[tuple[int, ...]] | None) -> None:
        self.counts, self.dataset, self.row, self.path = counts, dataset, row, path

    def samples(self) -> list[tuple[Origin, ...]]:
        """The origins of each sample; an origin's epoch is not kept."""
        paths: Iterable[tuple[int, ...]] = self.path or [()] * len(self.row)
        flat = [
            (dataset, row, 0, tuple(path))
            for dataset, row, path in zip(self.dataset.tolist(), self.row.tolist(), paths, strict=True)
        ]
        if self.counts is None:
            return [(origin,) for origin in flat]
        ends = np.cumsum(self.counts).tolist()
        return [tuple(flat[end - count : end]) for end, count in zip(ends, self.counts.tolist(), strict=True)]

    def cut(self, start: int, stop: int) -> Origins:
        """Those of the samples start .. stop - 1."""
        counts = None if self.counts is None else self.counts[start:stop]
        if self.counts is not None:
            start, stop = int(self.counts[:start].sum()), int(self.counts[:stop].sum())
        path = None if self.path is None else self.path[start:stop]
        return Origins(counts, self.dataset[start:stop], self.row[start:stop], path)


def origins_in(segments: list[tuple[Handles, int, int]], empty: Callable[..., Any] = np.empty) -> Origins:
    """The origins of the samples in these runs of handles. `empty(shape, dtype)` gives the memory of the columns."""
    parts = [_of_run(*segment) for segment in segments]
    total = sum(len(row) for _, _, row, _ in parts)
    whole = Origins(None, empty(total, np.int64), empty(total, np.int64), None)
    at = 0
    for _, dataset, row, _ in parts:
        whole.dataset[at : at + len(row)] = dataset
        whole.row[at : at + len(row)] = row
        at += len(row)
    if any(counts is not None for counts, _, _, _ in parts):
        every = [np.ones(len(row), np.int64) if counts is None else counts for counts, _, row, _ in parts]
        whole.counts = np.concatenate(every)
    if any(path for _, _, _, path in parts):
        whole.path = [step for _, _, row, path in parts for step in (path or [()] * len(row))]
    return whole


_Part = tuple[Ints | None, Any, Any, list[tuple[int, ...]] | None]
"""(counts, dataset, row, path) of a run: views, where it has them."""


def _of_run(samples: Handles, start: int, stop: int) -> _Part:
    if isinstance(samples, Block) and isinstance(samples.lineage.items, Pointers):
        return _of_pointers(samples.lineage, samples.lineage.items, start, stop)
    if (part := _of_plain([samples[i] for i in range(start, stop)])) is not None:
        return part
    found = [origins_of(samples[i]) for i in range(start, stop)]
    flat = [origin for sample in found for origin in sample]
    counts = None if len(flat) == len(found) else np.array([len(sample) for sample in found], np.int64)
    path = [origin[3] for origin in flat] if any(origin[3] for origin in flat) else None
    dataset = np.array([origin[0] for origin in flat], np.int64)
    return counts, dataset, np.array([origin[1] for origin in flat], np.int64), path


def _of_plain(handles: list[Handle]) -> _Part | None:
    """The origins of records that are as pointers gave them, or of groups of such; None where there is anything else.

    Number by number: behind a shuffle hardly two neighbours lie in one block, and numpy costs more for each.
    """
    counts, flat = None, handles
    if isinstance(handles[0], Group):
        counts = [len(group.parts) for group in handles if isinstance(group, Group)]
        flat = [part[0] for group in handles if isinstance(group, Group) for part in group.parts]
        if len(counts) < len(handles):
            return None
    dataset: list[int] = []
    row: list[int] = []
    for handle in flat:
        if type(handle) is not tuple:
            return None
        block, i = handle
        lineage = block.lineage
        items = lineage.items
        if lineage.path or type(items) is not Pointers:
            return None
        item = lineage.index[i]
        dataset.append(items.dataset.item(item))
        row.append(items.row.item(item))
    many = np.array(counts, np.int64) if counts is not None and len(flat) > len(handles) else None
    return many, np.array(dataset, np.int64), np.array(row, np.int64), None


def _of_pointers(lineage: Lineage, pointers: Pointers, start: int, stop: int) -> _Part:
    index = lineage.index[start:stop]
    chosen = slice(index.start, index.stop) if isinstance(index, range) else index
    path = lineage.path[start:stop] if lineage.path else None
    return None, pointers.dataset[chosen], pointers.row[chosen], path

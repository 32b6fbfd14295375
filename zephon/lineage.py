"""Where the samples of a batch came from, kept without their payload."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from zephon.record import Block, Handles, Lineage, Origin, Pointers, origins_of

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


def origins_in(segments: list[tuple[Handles, int, int]]) -> Origins:
    """The origins of the samples in these runs of handles."""
    parts = [_of_run(*segment) for segment in segments]
    if len(parts) == 1:
        return parts[0]
    counts = None
    if any(part.counts is not None for part in parts):
        counts = np.concatenate([np.ones(len(p.row), np.int64) if p.counts is None else p.counts for p in parts])
    path = None
    if any(part.path for part in parts):
        path = [step for part in parts for step in (part.path or [()] * len(part.row))]
    dataset, row = np.concatenate([p.dataset for p in parts]), np.concatenate([p.row for p in parts])
    return Origins(counts, dataset, row, path)


def _of_run(samples: Handles, start: int, stop: int) -> Origins:
    if isinstance(samples, Block) and isinstance(samples.lineage.items, Pointers):
        return _of_pointers(samples.lineage, samples.lineage.items, start, stop)
    found = [origins_of(samples[i]) for i in range(start, stop)]
    flat = [origin for sample in found for origin in sample]
    counts = None if len(flat) == len(found) else np.array([len(sample) for sample in found], np.int64)
    path = [origin[3] for origin in flat] if any(origin[3] for origin in flat) else None
    dataset = np.array([origin[0] for origin in flat], np.int64)
    return Origins(counts, dataset, np.array([origin[1] for origin in flat], np.int64), path)


def _of_pointers(lineage: Lineage, pointers: Pointers, start: int, stop: int) -> Origins:
    index = lineage.index[start:stop]
    chosen = slice(index.start, index.stop) if isinstance(index, range) else index
    path = lineage.path[start:stop] if lineage.path else None
    dataset = pointers.dataset[chosen].astype(np.int64)
    return Origins(None, dataset, pointers.row[chosen], path)

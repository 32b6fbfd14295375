"""Who a record is, in words: dataset, shard and row, or those of all records that it was put together from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from zephon.flow.task import Slice, Task
from zephon.io.dataset import Dataset
from zephon.record import Handle, Origin, Pointers, first_origin, num_parts, origins_of, start_of

MOST_NAMED = 8  # rows of one dataset that a text names; the others are counted
MOST_EXCLUDED = 64  # rows that a remedy lists

_Rows = dict[int, list[int]]
"""Rows by the index of their dataset."""


class Who:
    """Who the records of a task are (the contract `Items` of operators)."""

    def __init__(self, task: Task, datasets: Sequence[Dataset]) -> None:
        self._slices, self._datasets = task.slices, datasets
        self._ends = list(accumulate(map(len, task.slices)))

    def _at(self, index: int) -> tuple[Slice, int]:
        number = bisect_right(self._ends, index)
        return self._slices[number], index - (self._ends[number] - len(self._slices[number]))

    def origin(self, index: int) -> tuple[Origin, int]:
        """(first origin, start in it)."""
        piece, i = self._at(index)
        items = piece.items
        if isinstance(items, Pointers):
            return (int(items.dataset[i]), int(items.row[i]), int(items.epoch[i]), ()), 0
        return first_origin(items[i]), start_of(items[i])

    def dataset(self, index: int) -> int:
        """The index of the dataset of a record."""
        return self.origin(index)[0][0]

    def key(self, index: int) -> tuple[Any, ...]:
        (dataset, row, epoch, path), start = self.origin(index)
        return self._at(index)[0].pass_index, self._datasets[dataset].name, epoch, row, start, path

    def is_group(self, index: int) -> bool:
        """Whether a record was put together from several."""
        piece, i = self._at(index)
        return not isinstance(piece.items, Pointers) and num_parts(piece.items[i]) > 1

    def where(self, index: int, path: tuple[int, ...] = ()) -> str:
        piece, i = self._at(index)
        if isinstance(piece.items, Pointers) or not self.is_group(index):
            dataset, row, epoch, before = self.origin(index)[0]
            return f"lane {piece.lane}, {describe_origin(self._datasets, (dataset, row, epoch, before + path))}"
        child = f"child {'.'.join(map(str, path))} of " if path else ""
        return f"lane {piece.lane}, {child}{describe_handle(self._datasets, piece.items[i])}"

    def rows(self, index: int) -> _Rows:
        """All rows that a record was made of."""
        piece, i = self._at(index)
        origins = [self.origin(index)[0]] if isinstance(piece.items, Pointers) else origins_of(piece.items[i])
        return _rows_of(origins)


def describe_origin(datasets: Sequence[Dataset], origin: Origin) -> str:
    """An origin in words: dataset, shard, row, child."""
    number, row, _, path = origin
    shard, row_in_shard = datasets[number].locate(row)
    child = f", child {'.'.join(map(str, path))}" if path else ""
    return f"dataset '{datasets[number].name}', shard {shard}, row {row_in_shard}{child}"


def describe_handle(datasets: Sequence[Dataset], handle: Handle) -> str:
    """A record in flight in words; of a group, with its rows, where this process knows them."""
    origins = origins_of(handle)
    if len(origins) < num_parts(handle):
        return describe_by_first(datasets, handle)
    if len(origins) == 1:
        return describe_origin(datasets, origins[0])
    found = [_named(datasets[number], rows) for number, rows in _rows_of(origins).items()]
    return f"a group of {num_parts(handle):,} records: {'; '.join(found)}"


def _named(dataset: Dataset, rows: list[int]) -> str:
    """Rows of one dataset in words: the first ones by shard, and the number of the others."""
    shards: dict[str, list[str]] = {}
    for shard, row in map(dataset.locate, rows[:MOST_NAMED]):
        shards.setdefault(shard, []).append(str(row))
    named = "; ".join(f"shard {shard}, row {', '.join(found)}" for shard, found in shards.items())
    more = f" and {len(rows) - MOST_NAMED:,} more" if len(rows) > MOST_NAMED else ""
    return f"dataset '{dataset.name}', {named}{more}"


def describe_by_first(datasets: Sequence[Dataset], handle: Handle) -> str:
    """A group in words where only its first row is known: in a worker, whose texts the engine completes."""
    number, row, epoch, _ = first_origin(handle)
    first = describe_origin(datasets, (number, row, epoch, ()))
    return f"a group of {num_parts(handle):,} records, the first of them {first}"


def leave_out(datasets: Sequence[Dataset], found: _Rows, is_regrouped: bool) -> str:
    """How to go on without some rows, in words. is_regrouped: accumulators took them in, so a state may hold them."""
    names = [datasets[number].name for number in found]
    several = sum(map(len, found.values())) > 1
    excludes = [
        f"Dataset(..., exclude={list(map(datasets[number].locate, rows))!r})"
        + (f" of '{datasets[number].name}'" if len(found) > 1 else "")
        for number, rows in found.items()
    ]
    if sum(map(len, found.values())) > MOST_EXCLUDED:
        told = "try its rows in smaller groups, and leave the one that does it out with Dataset(..., exclude=[...])"
    elif several:
        told = (
            f"leave all of its rows out with {' and '.join(excludes)} (or try them in smaller groups, and leave out "
            "the one that does it)"
        )
    else:
        told = f"leave the record out with {excludes[0]}"
    allowed = f"the state still loads, with allow={[f'datasets.{name}.exclude' for name in names]!r}"
    return f"{told}; {allowed}{', or an older one does, from before a shuffle or the like took them in' * is_regrouped}"


def _rows_of(origins: Sequence[Origin]) -> _Rows:
    """The distinct rows, in order."""
    found: dict[int, dict[int, None]] = {}
    for number, row, _, _ in origins:
        found.setdefault(number, {})[row] = None
    return {number: list(rows) for number, rows in found.items()}

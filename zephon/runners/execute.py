"""What a worker does with a task: fetch the rows, run the fused operators, measure, and hand back one Out a slice."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zephon.errors import DataError, ShardError, ZephonError, describe
from zephon.flow.task import Out, Slice, Task
from zephon.io.dataset import Dataset
from zephon.ops.base import At, Operator, Rows, as_zephon_error, let_through
from zephon.plan.graph import StagePlan
from zephon.record import Group, Handle, Origin, Pointers, Record, first_origin, join, record_of, start_of
from zephon.runners.whereabouts import FETCH, LENGTHS, OPERATORS, Spot, Whereabouts

Loaded = Record | ZephonError | None
"""A record, why it cannot be read or built, or None for an excluded row."""


class StageWork:
    """The work of one stage, ready to run in any thread or process of its pool."""

    def __init__(
        self,
        plan: StagePlan,
        datasets: Sequence[Dataset],
        seed: int,
        interrupts: bool,
        max_record_bytes: int = sys.maxsize,
    ) -> None:
        self._plan, self._datasets, self._seed, self._interrupts = plan, datasets, seed, interrupts
        self.max_record_bytes = max_record_bytes
        """Of one record that crosses to another process."""

    def setup(self, where: Whereabouts) -> None:
        """Prepares every operator, once in each worker."""
        for number, operator in enumerate(self._plan.operators):
            where.enter(OPERATORS + number)
            try:
                operator.setup()
            except ZephonError:
                raise
            except BaseException as error:
                let_through(error, self._interrupts)
                raise as_zephon_error(error, operator.name or operator.method, "setup(), before any record") from error

    def share(self) -> None:
        """Loads what the workers of one machine can share, in the process that they are forked from."""
        for operator in self._plan.operators:
            operator.share()

    def run(
        self, task: Task, where: Whereabouts, loaded: list[Loaded] | None = None
    ) -> tuple[list[Out], dict[str, float]]:
        """One Out a slice, and the seconds that each kind of work took. `where` tells what it is on meanwhile.

        loaded: what `load` gave, where that was called already.
        """
        clock = _Clock()
        who = _Who(task, self._datasets)
        rows = Rows([], who, self._seed, self._interrupts, where.record)
        if loaded is None:
            where.enter(FETCH)
            loaded = self.load(task, rows.at)
        self._take_in(loaded, rows)
        clock.lap("fetch")
        for number, operator in enumerate(self._plan.operators):
            where.enter(OPERATORS + number)
            operator.run(rows)
            clock.lap(operator.name or operator.method)
        where.enter(LENGTHS)
        lengths = self._measure(rows)
        if (reads := self._plan.reads) is not None:
            rows.records = [{name: record[name] for name in reads if name in record} for record in rows.records]
        outs = _split(task, rows, lengths)
        clock.lap("split")
        return outs, clock.seconds

    @property
    def operators(self) -> Sequence[Operator]:
        """The operators, in order."""
        return self._plan.operators

    @property
    def names(self) -> list[str]:
        """The operators, in order."""
        return [operator.name or operator.method for operator in self.operators]

    def blame(self, piece: Slice) -> tuple[str, tuple[str, int]]:
        """(the first record of a slice in words, its (shard, row) for `exclude`)."""
        who = _Who(Task(0, [piece]), self._datasets)
        dataset, row = who.origin(0)[0][:2]
        return who.where(0), self._datasets[dataset].locate(row)

    def describe(self, spot: Spot, slices: Sequence[Slice]) -> str:
        """What a worker that works on `slices` is on, in words."""
        if not spot.task:
            return f"operator '{self.names[spot.step - OPERATORS]}' has been in setup(), before any record,"
        name, total = self._step(spot.step), sum(map(len, slices))
        if not total:
            return f"{name} has been running"
        who = _Who(Task(0, list(slices)), self._datasets)
        if spot.record < total:
            return f"{name} has been on {who.where(spot.record)}"
        return f"{name} has been on {total:,} records at once, the first of them {who.where(0)},"

    def _step(self, step: int) -> str:
        """A step in words."""
        measure = self._plan.measure
        if step == FETCH:
            return "fetch"
        if step == LENGTHS and measure is not None:
            return f"operator '{measure.name or measure.method}', which measures,"
        if step >= OPERATORS:
            return f"operator '{self.names[step - OPERATORS]}'"
        return f"putting together the results of '{' -> '.join(self.names) or 'fetch'}'"

    def refuse(self, task: Task, number: int, index: int, problem: Exception | int) -> ZephonError:
        """The error of a record that cannot cross to another process: what pickling raised, or its size."""
        who, at = _Who(task, self._datasets), sum(map(len, task.slices[:number])) + index
        where = who.where(at)
        name = self.names[-1] if self.names else "fetch"
        if isinstance(problem, int):
            dataset, row = who.origin(at)[0][:2]
            return DataError(
                f"operator '{name}' made a record of {problem:,} bytes on {where}; max_record_bytes="
                f"{self.max_record_bytes:,} is the most that may cross between processes: raise it with options("
                "max_record_bytes=...), make smaller records, or leave the row out with Dataset(..., "
                f"exclude=[{self._datasets[dataset].locate(row)}])"
            )
        return as_zephon_error(_unsendable(problem), name, where)

    def load(self, task: Task, at: At) -> list[Loaded]:
        """The records of a task, read for pointers and built for handles. `at` tells which one it is on."""
        pointers = [piece.items for piece in task.slices if isinstance(piece.items, Pointers)]
        if pointers:
            return self._fetch(join(pointers), at)
        loaded: list[Loaded] = []
        for handle in (handle for piece in task.slices for handle in cast("list[Handle]", piece.items)):
            at[0] = len(loaded)
            loaded.append(self.build(handle))
        return loaded

    def _take_in(self, loaded: list[Loaded], rows: Rows) -> None:
        """Puts what was loaded into `rows`, and what was not among its drops and failures."""
        rows.index, rows.records = range(len(loaded)), loaded  # type: ignore[assignment]
        if set(map(type, loaded)) == {dict}:
            return
        kept = []
        for i, record in enumerate(loaded):
            if isinstance(record, dict):
                kept.append(i)
            else:
                self._not_loaded(rows, i, record)
        rows.keep(kept)

    def build(self, handle: Handle) -> Record | ZephonError:
        """The record of a handle, or what its accumulator's `build` raised, here or before it was sent."""
        try:
            made: Any = record_of(handle)
            if isinstance(made, (dict, ZephonError)):
                return made
            raise TypeError(f"its build returned {type(made).__name__}, not a dict")
        except BaseException as error:
            let_through(error, self._interrupts)
            return build_error(error, handle, self._datasets)

    def unsendable_build(self, handle: Handle, error: Exception) -> ZephonError:
        """The error of a record, made by an accumulator, that cannot cross to another process."""
        return build_error(_unsendable(error), handle, self._datasets)

    def _not_loaded(self, rows: Rows, i: int, problem: ZephonError | None) -> None:
        """An excluded row (None), or one that cannot be read or built: counted, or an error mark."""
        dataset = self._datasets[rows.items.dataset(i)]  # type: ignore[attr-defined]
        if problem is None:
            rows.drops.append((i, f"{dataset.name}.excluded", 1))
        elif dataset.on_error == "skip" and isinstance(problem, DataError) and not isinstance(problem, ShardError):
            # a shard that this rank cannot read, another one may
            rows.drops.append((i, f"{dataset.name}.error", 1))
        else:
            rows.failures.append((i, (), problem))

    def _fetch(self, pointers: Pointers, at: At) -> list[Loaded]:
        """The records of pointers; None for an excluded row. A task's rows of one dataset are read together."""
        first = self._datasets[int(pointers.dataset[0])]
        if (pointers.dataset == pointers.dataset[0]).all() and not first.is_excluded(pointers.row).any():
            return first.read(pointers.row, _noting(at, None))  # type: ignore[return-value]
        found: list[Loaded] = [None] * len(pointers)
        for number, dataset in enumerate(self._datasets):
            positions = np.flatnonzero(pointers.dataset == number)
            if not len(positions):
                continue
            rows = pointers.row[positions]
            positions = positions[~dataset.is_excluded(rows)]
            read = dataset.read(pointers.row[positions], _noting(at, positions))
            for position, record in zip(positions.tolist(), read, strict=True):
                found[position] = record
        return found

    def _measure(self, rows: Rows) -> list[int] | None:
        """The lengths that the accumulators behind this stage want; a record without one fails."""
        plan = self._plan.measure
        if plan is None:
            return None
        lengths, kept = [], []
        for i, (number, record) in enumerate(zip(rows.index, rows.records, strict=True)):
            rows.at[0] = number
            try:
                lengths.append(plan.measure(record))
                kept.append(i)
            except BaseException as error:
                rows.let_through(error)
                rows.fail(i, error, plan.name or plan.method, "raise")
        rows.keep(kept)
        return lengths


def _unsendable(error: Exception) -> Exception:
    """What keeps a result from being sent. For want of memory nothing is wrong with the result itself."""
    if isinstance(error, MemoryError):
        return error
    problem = TypeError(f"its result cannot be sent between processes: {describe(error)}")
    problem.__cause__ = error
    return problem


def _noting(at: At, positions: NDArray[np.int64] | None) -> Callable[[int], None]:
    """Notes in `at` which record is read next, given its number among those read: the record at that position."""

    def note(number: int) -> None:
        at[0] = number if positions is None else int(positions[number])

    return note


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._at
        self._at = now


class _Who:
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

    def where(self, index: int, path: tuple[int, ...] = ()) -> str:
        dataset, row, epoch, before = self.origin(index)[0]
        return (
            f"lane {self._at(index)[0].lane}, {describe_origin(self._datasets, (dataset, row, epoch, before + path))}"
        )


def describe_origin(datasets: Sequence[Dataset], origin: Origin) -> str:
    """An origin in words: dataset, shard, row, child."""
    number, row, _, path = origin
    shard, row_in_shard = datasets[number].locate(row)
    child = f", child {'.'.join(map(str, path))}" if path else ""
    return f"dataset '{datasets[number].name}', shard {shard}, row {row_in_shard}{child}"


def describe_handle(datasets: Sequence[Dataset], handle: Handle) -> str:
    """A record in flight in words, by its first origin."""
    return describe_origin(datasets, first_origin(handle))


def build_error(error: BaseException, handle: Handle, datasets: Sequence[Dataset]) -> ZephonError:
    """What an accumulator's `build` raised on a group, with its name and the group's first record."""
    op = handle.op if isinstance(handle, Group) else None
    name = (op.name or op.method) if op is not None else "fetch"
    return as_zephon_error(error, name, describe_handle(datasets, handle))


def _split(task: Task, rows: Rows, lengths: list[int] | None) -> list[Out]:
    """The rows of a task slice by slice. What follows a failure in its slice is left out."""
    index = rows.index
    whole = isinstance(index, range) and not rows.failures
    outs, start, at = [], 0, 0
    drops = sorted(rows.drops, key=lambda drop: drop[0]) if len(rows.drops) > 1 else rows.drops
    drop_at = 0
    for piece in task.slices:
        end = start + len(piece)
        stop = end if whole else _reach(index, at, end)
        failure = _first_failure(rows, start, end)
        last = _before(rows, at, stop, failure)
        dropped = drop_at
        while dropped < len(drops) and drops[dropped][0] < end:
            dropped += 1
        outs.append(
            Out(
                rows.records[at:last],
                range(len(piece)) if whole else [i - start for i in index[at:last]],
                rows.path[at:last] if rows.path else None,
                lengths[at:last] if lengths is not None else None,
                [(i - start, reason, amount) for i, reason, amount in drops[drop_at:dropped]],
                (failure[0] - start, failure[2]) if failure else None,
            )
        )
        start, at, drop_at = end, stop, dropped
    return outs


def _reach(index: Sequence[int], at: int, end: int) -> int:
    """The first position from `at` on whose item is not below `end`."""
    while at < len(index) and index[at] < end:
        at += 1
    return at


Failure = tuple[int, tuple[int, ...], ZephonError]


def _first_failure(rows: Rows, start: int, end: int) -> Failure | None:
    """The failure that comes first among the items start .. end - 1."""
    here = [failure for failure in rows.failures if start <= failure[0] < end]
    return min(here, key=lambda failure: failure[:2]) if here else None


def _before(rows: Rows, at: int, stop: int, failure: Failure | None) -> int:
    """The end of the records at .. stop - 1 that come before the failure."""
    if failure is None:
        return stop
    while at < stop and (rows.index[at], rows.path[at] if rows.path else ()) < failure[:2]:
        at += 1
    return at

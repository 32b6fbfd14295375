"""Makes again, on a restart, what a row of accumulators held of a lane.

The pointers of these records come first in the lane, before everything new, and pass the pools as any others do; what
comes of them is given to the accumulators as what they hold, instead of being pushed. Behind a later pool the records
of one pool are handed to the next. So a restart reads what was held, whatever else the lane has read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon.errors import CheckpointError, ZephonError
from zephon.flow.held import Path, Rows, Table, leaves
from zephon.flow.task import Mark, Out, Run, Slice
from zephon.record import Attached, Group, Handle, Pointers, event_place

Load = Callable[[Table, dict[int, Handle], dict[int, Any]], None]
Wanted = tuple[int, Path, int]
"""(number, what of its child path is still ahead, the stage behind whose pool it stands)."""


class Remake:
    """What row `row` held of one lane.

    place: the event that the lane starts again from. load: gives the accumulators what they held, once it is there.
    """

    def __init__(self, lane: int, pass_index: int, place: int, rows: Rows, row: int, table: Table, load: Load) -> None:
        self._lane, self._pass_index, self._place = lane, pass_index, place
        self._rows, self._last, self._table, self._load = rows, rows.stages[row], table, load
        self._handles: dict[int, Handle] = {}
        self._lengths: dict[int, Any] = {}
        by_event: dict[int, list[Wanted]] = {}
        for number, (before, event, path) in enumerate(leaves(table, place)):
            by_event.setdefault(event, []).append((number, path, rows.stages[before]))
        self._events = sorted(by_event)
        self._level = 0
        self._items = [by_event[event] for event in self._events]
        """What is wanted of each item that this level's pool is given."""
        self._next: list[tuple[Handle, list[Wanted]]] = []
        self._done = self._dealt = 0

    def start(self) -> None:
        """To be called once: where nothing is held, the accumulators are ready at once."""
        if not self._events:
            self._load(self._table, {}, {})

    def deal(self, most: int, pointers: Callable[[list[int]], Pointers]) -> Slice | None:
        """The next pointers, or None behind the last."""
        events = self._events[self._dealt : self._dealt + most]
        if not events:
            return None
        self._dealt += len(events)
        items, through = pointers(events), self._place - 1
        piece = Slice(self._lane, self._pass_index, items, events, through, num_pointers=len(events))
        piece.remake = self
        return piece

    def took(self, piece: Slice, out: Out) -> Run:
        """What a pool made of the next slice. Gives an empty run, or the items of the next pool, or an error."""
        through = self._place - 1
        run = Run(piece.lane, piece.pass_index, [], [], through, num_pointers=piece.num_pointers)
        try:
            if out.failure is not None:
                raise out.failure[1]
            self._sort(piece, out)
            while self._level <= self._last and self._done == len(self._items):
                self._climb(run)
            if self._level > self._last:
                self._load(self._table, self._handles, self._lengths)
        except ZephonError as error:
            run.mark = Mark("error", through, error)
        return run

    def _sort(self, piece: Slice, out: Out) -> None:
        """Finds what is wanted among what became of a slice."""
        block, found = out.block(piece.items, piece.events), 0
        for i in range(len(block)):
            path = out.path[i] if out.path else ()
            ahead: list[Wanted] = []
            for number, whole, stage in self._items[self._done + out.index[i]]:
                if whole[: len(path)] != path or (stage == self._level and whole != path):
                    continue
                found += 1
                if stage > self._level:
                    ahead.append((number, whole[len(path) :], stage))
                    continue
                self._handles[number] = block[i]
                if out.lengths is not None:
                    self._lengths[number] = out.lengths[i]
            if ahead:
                self._next.append((block[i], ahead))
        stop = self._done + len(piece)
        if found < sum(map(len, self._items[self._done : stop])):
            raise self._lost(out)
        self._done = stop

    def _climb(self, run: Run) -> None:
        """All items of one pool are there: `run` gets those of the next one."""
        made: dict[int, list[Wanted]] = {}
        for i, node in enumerate(self._table.nodes):
            number, stage = -1 - i, self._rows.stages[node.row]
            if node.op < 0:
                made.setdefault(node.item, []).append((number, node.path, stage))
            elif stage == self._level:
                parts = [(self._handles[part], start, stop) for part, start, stop in node.parts]
                self._handles[number] = _group(self._rows.ops[node.op], parts, node.written)
        self._next += [
            (self._handles[item], wanted)
            for item, wanted in made.items()
            if self._rows.stages[self._table.nodes[-1 - item].row] == self._level
        ]
        self._level += 1
        self._items, self._done = [wanted for _, wanted in self._next], 0
        if self._next:
            run.samples, self._next = [handle for handle, _ in self._next], []
            run.events, run.remake = [self._place - 1] * len(run.samples), self

    def _lost(self, out: Out) -> CheckpointError:
        where = ""
        if self._level == 0:
            chunk, offset = event_place(self._events[self._done])
            where = f" (from pointer {offset} of chunk {chunk} on)"
        reasons = ", ".join(sorted({reason for _, reason, _ in out.drops}))
        return CheckpointError(
            f"lane {self._lane}: a record that was held when the state was taken{where} cannot be made again"
            f"{f': dropped as {reasons}' if reasons else ''}; its row is left out now, or an operator gives other "
            "children of it than it did; undo that, or load an older state"
        )


def _group(op: Any, parts: list[tuple[Handle, int, int]], written: list[Any]) -> Group:
    return Attached(op, parts[0][0], written[0]) if written else Group(op, parts)

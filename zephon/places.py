"""Places in batch slots for large arrays, given to records when their task is handed out, before they are made.

Where no accumulator stands before `batch`, the n-th record of a lane is a row of the lane's batch n // size, unless
something is dropped before it. So a worker can write its array to that row at once, and nothing is left to copy when
the batch is put together. What a field looks like is taken from the batch before. All this only says where bytes may
lie: the batcher goes by the records, and a batch whose rows do not lie as they should is put together by copying.

A row of a slot is given once, and the slot stays as it is as long as a task or a record has a row in it: see
`Arena.open`. Slots are given while there are some to spare, so nothing ever waits for one here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zephon.arena import Arena, Slot
from zephon.flow.batcher import Cut
from zephon.flow.progress import LaneState
from zephon.flow.task import Out, Slice
from zephon.ipc.columns import LARGE_BYTES, Bytes, Columns, Stack, is_plain_name, is_sendable
from zephon.ipc.in_slots import Places, Run
from zephon.ipc.message import ALIGNMENT
from zephon.record import Block
from zephon.runners.base import Given

PAUSE_BATCHES = 16  # of a lane whose records are dropped now and then: their rows do not lie as they should


class _Layout(NamedTuple):
    """Where rows lie in a slot: the fields as in `ipc.in_slots.Places`, one behind the other."""

    fields: tuple[tuple[str, str, tuple[int, ...], int], ...] = ()
    num_bytes: int = 0
    row_bytes: int = 0
    """Of one record."""


class _Lane:
    """Where a lane's next record goes: its number, and the slot of the batch that it belongs to."""

    def __init__(self, number: int) -> None:
        self.number = number  # below 0: it was delivered before the restart
        self.slot: tuple[int, Bytes] | None = None
        self.pause = 0


class SlotPlaces:
    """The places that one engine gives to the records of its last stage; batches are of `size`."""

    def __init__(self, arena: Arena, size: int, states: Mapping[int, LaneState]) -> None:
        self._arena, self._size = arena, size
        self._lanes = {lane: _Lane(-state.skip) for lane, state in states.items()}
        self._layout, self._slot_bytes = _Layout(), 0
        self._pid = os.getpid()

    def give(self, slices: Sequence[Slice]) -> Given:
        """Places for the records of the next task, lane by lane, as far as there are slots to spare."""
        if not self._layout.fields:
            for lane, piece in ((self._lanes[piece.lane], piece) for piece in slices):
                lane.number, lane.slot = lane.number + len(piece), None
            return Given()
        runs: list[Run] = []
        memories: dict[int, Bytes] = {}
        for piece in slices:
            self._give_lane(self._lanes[piece.lane], len(piece), runs, memories)
        slots = [slot.file for slot in self._arena.slots.values()]
        placed = sum(count for number, _, count in runs if number)
        told = Places(self._pid, slots, runs, self._layout.fields)
        return Given(told, memories, placed * self._layout.row_bytes)

    def _give_lane(self, lane: _Lane, left: int, runs: list[Run], memories: dict[int, Bytes]) -> None:
        while left:
            row = lane.number % self._size
            if row == 0 and lane.number >= 0:
                lane.slot = self._next_slot(lane)
            count = min(left, self._size - row)
            if lane.slot is not None:
                memories[lane.slot[0]] = lane.slot[1]
            runs.append([lane.slot[0] if lane.slot else 0, row, count])
            lane.number, left = lane.number + count, left - count
            if lane.number % self._size == 0:
                lane.slot = None  # whoever has a row in it keeps it

    def _next_slot(self, lane: _Lane) -> tuple[int, Bytes] | None:
        """A slot for the batch that begins; None where there is none to spare."""
        if lane.pause:
            lane.pause -= 1
            return None
        opened = self._arena.open(self._slot_bytes, self._layout.num_bytes)
        return (opened[0].number, opened[1]) if opened else None

    def took(self, slices: Sequence[Slice], outs: Sequence[Out]) -> None:
        """What the oldest task became. Where records were lost, those behind them are rows of other numbers."""
        for piece, out in zip(slices, outs, strict=True):
            if more := len(out.records) - len(piece):
                lane = self._lanes[piece.lane]
                lane.number, lane.slot, lane.pause = lane.number + more, None, PAUSE_BATCHES

    def learn(self, fields: Mapping[str, Any], num_samples: int, num_bytes: int) -> None:
        """Notes what a batch looks like, and how much of a slot it took: the next ones will likely do so too."""
        if num_samples != self._size:
            return
        layout = _layout(fields)
        if layout != self._layout:  # a slot has one layout: no row of another one may lie there
            self._layout = layout
            for lane in self._lanes.values():
                lane.slot = None
        self._slot_bytes = max(num_bytes, layout.num_bytes)

    def home(self, cut: Cut) -> Slot | None:
        """The slot in which a batch lies already, with all fields that have places."""
        memories = set[int]()
        memory = None
        for samples, start, stop in cut.segments:
            if not isinstance(samples, Block) or not isinstance(samples.records, Columns):
                return None
            start, stop = samples.records.start + start, samples.records.start + stop
            for column in samples.records.columns.values():
                if isinstance(column, Stack):
                    memory = column.parts[start].base
                    memories.update(id(part.base) for part in column.parts[start:stop])
        return self._arena.home(memory) if len(memories) == 1 else None


def _layout(fields: Mapping[str, Any]) -> _Layout:
    """Rows of large arrays, field behind field."""
    found, at, row_bytes = [], 0, 0
    for name, value in fields.items():
        if not isinstance(value, np.ndarray) or value.nbytes < LARGE_BYTES * len(value):
            continue
        if is_plain_name(name) and is_sendable(value.dtype):
            found.append((name, value.dtype.str, value.shape[1:], at))
            at += value.nbytes + -value.nbytes % ALIGNMENT
            row_bytes += value.nbytes // len(value)
    return _Layout(tuple(found), at, row_bytes)

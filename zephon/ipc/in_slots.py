"""Rows of large arrays that a worker writes straight into batch slots, and what its result says in their place.

The engine names a place for each record of a task: a row of a slot (`zephon/places.py`). A field whose rows are of the
shape and dtype that it expects there is written to these rows; the result holds their numbers, and the bytes of those
that had no place. A worker maps a slot, once, by the descriptor that the engine's process has of it; where the system
does not allow that, the rows travel as all others do.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zephon.ipc.columns import Array, Bytes, Columns, Stack

Run = list[int]
"""[number of a slot (0: none), first row, how many rows], in the order of a task's records."""


class Places(NamedTuple):
    """What a worker is told, as plain data."""

    pid: int
    """The engine's."""
    slots: Sequence[Sequence[int]]
    """[number, descriptor, bytes, device, inode] of each slot that there is."""
    runs: Sequence[Run]
    fields: Sequence[Sequence[Any]]
    """[name, dtype, shape of a row, where the rows begin in a slot] of each field that has places."""


class InSlots(Stack):
    """A column as a worker sends it: most of its rows lie in slots, and `rest` holds the others."""

    form = "slots"

    def __init__(self, parts: Sequence[Array], start: int, runs: Sequence[Run], rest: list[Array]) -> None:
        super().__init__(parts)
        self.start, self.runs, self.rest = start, runs, rest

    def describe(self) -> list[Any]:
        return [self.parts[0].dtype.str, list(self.parts[0].shape), self.start, self.runs]

    def buffers(self) -> list[Array | list[Array]]:
        return [[np.ascontiguousarray(part) for part in self.rest]]


def rows_in_slots(description: Sequence[Any], rest: Bytes, slots: Mapping[int, Bytes]) -> Stack:
    """The column of a description: views on the slots, and on `rest` for rows that are in none."""
    dtype, shape, start, runs = description
    size, at, parts = np.dtype(dtype).itemsize * math.prod(shape), 0, []
    for number, row, count in runs:
        memory, first = (slots[number], start + row * size) if number else (rest, at)
        at += 0 if number else count * size
        parts += [memory[a : a + size].view(dtype).reshape(shape) for a in range(first, first + count * size, size)]
    return Stack(parts)


class SlotWriter:
    """A worker's mappings of the slots."""

    def __init__(self) -> None:
        self._maps: dict[int, Bytes | None] = {}

    def put(self, columns: Columns, places: Places | None) -> Columns:
        """The same records, those fields in slots that have places there. Slots that are no more are let go.

        Nothing is written where another number of records came out than went in.
        """
        known = {slot[0]: slot for slot in places.slots} if places else {}
        for number in self._maps.keys() - known.keys():
            del self._maps[number]
        if places is None or columns.num_records != sum(count for _, _, count in places.runs):
            return columns
        maps = {number: self._map(places.pid, *known[number]) for number, _, _ in places.runs if number}
        runs = [[number if maps.get(number) is not None else 0, row, count] for number, row, count in places.runs]
        if not any(number for number, _, _ in runs):
            return columns
        written = dict(columns.columns)
        for name, dtype, shape, start in places.fields:
            column = written.get(name)
            if type(column) is Stack and column.parts[0].dtype.str == dtype and [*column.parts[0].shape] == [*shape]:
                written[name] = InSlots(column.parts, start, runs, _write(column.parts, start, runs, maps))
        return Columns(written, columns.num_records)

    def _map(self, pid: int, number: int, fd: int, size: int, *file: int) -> Bytes | None:
        if number not in self._maps:
            self._maps[number] = None
            with contextlib.suppress(OSError, ValueError):
                self._maps[number] = _mapped(f"/proc/{pid}/fd/{fd}", size, file)
        return self._maps[number]


def _mapped(path: str, size: int, file: tuple[int, ...]) -> Bytes | None:
    """The memory of a slot. None where another file is there: the engine is dead, and its number a new process's."""
    own = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(own)
        if (found.st_dev, found.st_ino) != file:
            return None
        return np.frombuffer(mmap.mmap(own, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
    finally:
        os.close(own)


def _write(parts: Sequence[Array], start: int, runs: Sequence[Run], maps: Mapping[int, Bytes | None]) -> list[Array]:
    """Writes rows to their places; returns those that have none."""
    rest: list[Array] = []
    size, rows = parts[0].nbytes, iter(parts)
    for number, row, count in runs:
        memory = maps[number] if number else None
        for i in range(row, row + count):
            part = next(rows)
            if memory is None:
                rest.append(part)
            else:
                at = start + i * size
                _put(memory[at : at + size].view(part.dtype).reshape(part.shape), part)
    return rest


def _put(place: Array, row: Array) -> None:
    place[...] = row

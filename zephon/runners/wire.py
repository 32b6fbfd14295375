"""Tasks and results as messages between the engine process and its workers.

A task of the first stage is pointers; of a later stage it is records as columns, with the identity of each. A result
is the records of all slices as one set of columns, and for every slice how many of them are its own.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from zephon.errors import ZephonError
from zephon.flow.task import Out, Slice, Task
from zephon.ipc.codec import dump
from zephon.ipc.columns import Array, Columns, make_columns
from zephon.ipc.in_slots import Places
from zephon.ipc.message import describe_columns, read_message, rebuild_columns, write_message
from zephon.record import Block, Handle, Lineage, Origin, Pointers, Record, first_origin, join, num_parts, start_of


class KnownLineage(Lineage):
    """The lineage of records that were sent to a worker: of each the first origin, and its start.

    `parts`: of how many records the groups among them are.
    """

    __slots__ = ("known", "parts")

    def __init__(self, known: list[tuple[Origin, int]], parts: dict[int, int]) -> None:
        super().__init__([], range(len(known)))
        self.known, self.parts = known, parts

    def origins(self, i: int) -> tuple[Origin, ...]:
        return (self.known[i][0],)

    def first(self, i: int) -> Origin:
        return self.known[i][0]

    def start(self, i: int) -> int:
        return self.known[i][1]

    def num_parts(self, i: int) -> int:
        return self.parts.get(i, 1)


class Notes(NamedTuple):
    """What a worker is told along with a task."""

    freed: Sequence[int] = ()
    """Starts of the blocks of its area that were given back."""
    held: Sequence[tuple[int, int]] = ()
    """(start, size) of those that are held still, from a worker before it."""
    alone: bool = False
    """The task, or one near it, may have killed a worker: nothing else is to be begun beside it."""
    places: Places | None = None
    """Where in batch slots its large arrays may be written."""


_NOTHING = Notes()
_NO_SLOTS: Mapping[int, Any] = MappingProxyType({})


class Builder(Protocol):
    """Makes records of handles; what goes wrong is the error of that record, and travels in its place."""

    def build(self, handle: Handle) -> Record | ZephonError:
        """The record of a handle."""

    def unsendable_build(self, handle: Handle, error: Exception) -> ZephonError:
        """The error of a record that cannot cross to another process."""


def write_task(
    seq: int,
    slices: Sequence[Slice],
    builder: Builder,
    notes: Notes = _NOTHING,
) -> list[Any]:
    """The message of a task, as parts."""
    shape = [[piece.lane, piece.pass_index, len(piece)] for piece in slices]
    pointers = [piece.items for piece in slices if isinstance(piece.items, Pointers)]
    if pointers:
        whole = join(pointers)
        columns = [(whole.dataset, np.int32), (whole.row, np.int64), (whole.epoch, np.int64)]
        return write_message(
            [seq, shape, None, notes], [np.ascontiguousarray(column, kind) for column, kind in columns]
        )
    handles: list[Handle] = [handle for piece in slices for handle in piece.items]  # type: ignore[union-attr]
    description, parts = describe_columns(_build_columns(handles, builder))
    known = [[*first_origin(handle), int(start_of(handle))] for handle in handles]
    return write_message([seq, shape, [description, known, _groups(handles)], notes], parts)


def _groups(handles: Sequence[Handle]) -> list[tuple[int, int]]:
    """(position, number of parts) of each group, or record that came from one."""
    found: list[tuple[int, int]] = []
    plain: Block | None = None  # one whose records are no groups
    for i, handle in enumerate(handles):
        if isinstance(handle, tuple):
            if handle[0] is plain:
                continue
            if handle[0].lineage.is_pointers:
                plain = handle[0]
                continue
        if (parts := num_parts(handle)) > 1:
            found.append((i, parts))
    return found


def _build_columns(handles: Sequence[Handle], builder: Builder) -> Columns:
    """The records of handles as columns."""
    records: list[Any] = [builder.build(handle) for handle in handles]
    try:
        return make_columns(records)
    except Exception:
        for i, record in enumerate(records):
            try:
                make_columns([record])
            except Exception as error:
                records[i] = builder.unsendable_build(handles[i], error)
        return make_columns(records)


def read_task(memory: Any) -> tuple[Task, Notes]:
    """The task of a message, and what else it says. Nothing refers to `memory` any more."""
    (seq, shape, later, (freed, held, alone, places)), buffers = read_message(memory)
    notes = Notes(freed, [(start, size) for start, size in held], alone, places and Places(*places))
    if later is None:
        return Task(seq, _pointer_slices(shape, buffers)), notes
    description, known, groups = later
    columns = rebuild_columns(description, iter([b.copy() for b in buffers]))
    lineage = KnownLineage(
        [((d, row, epoch, tuple(path)), start) for d, row, epoch, path, start in known], dict(groups)
    )
    block = Block(list(columns), lineage)
    slices, at = [], 0
    for lane, pass_index, size in shape:
        slices.append(Slice(lane, pass_index, [block[i] for i in range(at, at + size)], range(size), size - 1))
        at += size
    return Task(seq, slices), notes


def _pointer_slices(shape: list[list[int]], buffers: Iterator[Any]) -> list[Slice]:
    dataset = next(buffers).view(np.int32).copy()
    row, epoch = (next(buffers).view(np.int64).copy() for _ in range(2))
    slices, at = [], 0
    for lane, pass_index, size in shape:
        items = Pointers(dataset, row, epoch).cut(at, at + size)
        slices.append(Slice(lane, pass_index, items, range(size), size - 1))
        at += size
    return slices


Blame = Callable[[int, int, Exception | int], ZephonError]
"""(slice, index in it, what pickling raised or the record's bytes) -> the error that names the record."""


def write_result(
    outs: list[Out],
    seconds: dict[str, float],
    blame: Blame,
    max_record_bytes: int = sys.maxsize,
    put: Callable[[Columns], Columns] | None = None,
) -> list[Any]:
    """The message of a result, as parts. A record that cannot be sent becomes the failure of its slice.

    So does one of more than `max_record_bytes` when encoded. Where all of them together are smaller, none is looked at.
    `put` writes columns of a whole task to where they may lie instead.
    """
    try:
        columns = make_columns([record for out in outs for record in out.records])
        description, buffers = describe_columns(columns)
        fits = sum(map(_size, buffers)) <= max_record_bytes
        if fits and put is not None:
            description, buffers = describe_columns(put(columns))
    except Exception:
        fits = False
    if not fits:
        description, buffers = [], []  # what was encoded need not stay in memory while it is encoded again
        for number, out in enumerate(outs):
            _cut_unsendable(number, out, blame, max_record_bytes)
        description, buffers = describe_columns(make_columns([record for out in outs for record in out.records]))
    shape, extra = [], []
    for out in outs:
        whole = isinstance(out.index, range)
        shape.append([len(out.records), len(out.index) if whole else -1])
        if not whole:
            buffers.append(np.array(out.index, np.int64))
        measured = ""
        if out.lengths is not None:
            measured, packed = _pack_lengths(out.lengths)
            buffers.append(packed)
        failure = [out.failure[0], dump(out.failure[1])] if out.failure else None
        drops = [(i, reason, int(amount)) for i, reason, amount in out.drops]
        extra.append([measured, out.path, drops, failure])
    return write_message(["result", description, shape, extra, seconds], buffers)


def _pack_lengths(lengths: list[Any]) -> tuple[str, Array]:
    """Lengths as a buffer, and how: as numbers, or, where they are keys of any plain type, pickled."""
    if set(map(type, lengths)) <= {int}:
        try:
            return "int", np.array(lengths, np.int64)
        except OverflowError:
            pass
    return "any", np.frombuffer(dump(lengths), np.uint8)


def _unpack_lengths(kind: str, buffer: Any) -> list[Any]:
    lengths: list[Any] = buffer.view(np.int64).tolist() if kind == "int" else pickle.loads(buffer)
    return lengths


def _size(buffer: Array | list[Array]) -> int:
    return sum(array.nbytes for array in buffer) if isinstance(buffer, list) else buffer.nbytes


def _problem(record: Record, max_record_bytes: int) -> Exception | int | None:
    """Why a record cannot be sent: what encoding raises, or its size; None where it can."""
    try:
        size = sum(map(_size, describe_columns(make_columns([record]))[1]))
    except Exception as error:
        return error
    return size if size > max_record_bytes else None


def _cut_unsendable(number: int, out: Out, blame: Blame, max_record_bytes: int) -> None:
    """Ends a slice before its first record that cannot be sent to another process."""
    for i, record in enumerate(out.records):
        problem = _problem(record, max_record_bytes)
        if problem is not None:
            out.failure = (out.index[i], blame(number, out.index[i], problem))
            out.index = [out.index[j] for j in range(i)]
            out.records = out.records[:i]
            out.path = out.path[:i] if out.path else None
            out.lengths = out.lengths[:i] if out.lengths is not None else None
            return


def write_report(kind: str, error: BaseException | None = None) -> list[Any]:
    """What a worker says apart from results: that it is "ready", or that it "failed", with the error."""
    return write_message([kind, dump(error) if error is not None else None], [])


def read_report(memory: Any, slots: Mapping[int, Any] = _NO_SLOTS) -> tuple[list[Out], dict[str, float]] | None:
    """(outs, seconds) of a result; None for "ready"; raises what "failed" says.

    The records are views on `memory`, and on `slots` where they were written there.
    """
    (kind, *what), buffers = read_message(memory)
    if kind == "failed":
        raise _error(what[0])
    return None if kind == "ready" else _read_result(what, buffers, slots)


def _read_result(
    what: list[Any], buffers: Iterator[Any], slots: Mapping[int, Any]
) -> tuple[list[Out], dict[str, float]]:
    description, shape, extra, seconds = what
    columns = rebuild_columns(description, buffers, slots)
    outs = []
    ends = list(accumulate(count for count, _ in shape))
    for (count, whole), (measured, path, drops, failure), end in zip(shape, extra, ends, strict=True):
        index: Sequence[int] = range(whole) if whole >= 0 else next(buffers).view(np.int64).tolist()
        lengths = _unpack_lengths(measured, next(buffers)) if measured else None
        outs.append(
            Out(
                columns.cut(end - count, end),
                index,
                [tuple(step) for step in path] if path is not None else None,
                lengths,
                [tuple(drop) for drop in drops],
                (failure[0], _error(failure[1])) if failure else None,
            )
        )
    return outs, seconds


def _error(raw: bytes) -> ZephonError:
    error: ZephonError = pickle.loads(raw)
    return error

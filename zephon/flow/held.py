"""What the accumulators of a stage hold of a lane, as bytes without payload, and back.

Accumulators without operators between them are a *row*; the rows of a pipeline do not depend on its stages, which the
parallelism of the operators decides. A record before a row is named by what it was made of, a pointer's event or a
group of an earlier row, and by its child path since then; a group by its parts. So nothing here depends on how the
pipeline ran. Numbers of pointers' records count up from 0, those of the rest down from -1.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import count
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.ops.accumulator import Accumulator, Held
from zephon.record import EVENT_BITS, MAX_CHUNK_SIZE, Attached, Group, Handle, event_at, event_place

CHECKSUM_BYTES = 8
_PLAIN, _PACKED = b"\0", b"\1"
Path = tuple[int, ...]
Column = int | list[Any]
"""Whole numbers: one for all of them, or [dtype, bytes]; anything else as a plain list behind an empty dtype."""


class Table(msgspec.Struct, array_like=True):
    """What one row holds of a lane. `nodes[i]` is the number -1 - i."""

    names: list[str]
    """Of the accumulators."""
    size: int
    """Records of pointers."""
    rows: Column
    """Before which row each one stands."""
    chunks: Column
    """How many chunks before the place each one lies."""
    offsets: Column
    paths: list[Path] | None
    nodes: list[Node]
    states: list[tuple[int, Column, Column, Column, Any]]
    """Of each accumulator: how many items, their numbers, the two columns beside them, and what else it must know."""


class Node(msgspec.Struct, array_like=True):
    """A record that was made of a group, before row `row`; or the group, of accumulator `op`."""

    row: int
    item: int = 0
    path: Path = ()
    op: int = -1
    parts: list[tuple[int, int, int]] = []
    written: list[Any] = []
    """What is written on the one part, where the group is `Attached`."""


class Rows(msgspec.Struct, frozen=True):
    """The rows of an engine."""

    stages: list[int]
    """Behind the pool of which stage each row stands."""
    ops: list[Accumulator]
    """All accumulators, in order."""
    of_op: list[int]
    """The row of each."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Table).decode


def write_held(rows: Rows, row: int, all_held: Sequence[tuple[str, Held]], place: int) -> bytes:
    """The table of row `row`: (name, what it holds) of each accumulator. place: the event to start again from."""
    writer = _Writer(rows)
    states: list[tuple[int, Column, Column, Column, Any]] = []
    for _, held in all_held:
        handles, first, second = zip(*held.items, strict=True) if held.items else ((), (), ())
        numbers = writer.numbers(handles, row)
        states.append((len(numbers), write_column(numbers), write_column(first), write_column(second), held.plain))
    events = np.array(writer.events, np.int64)
    raw = _encode(
        Table(
            [name for name, _ in all_held],
            len(writer.events),
            write_column(writer.before),
            write_column(event_place(place)[0] - (events >> EVENT_BITS)),
            write_column(events & MAX_CHUNK_SIZE),
            writer.paths if any(writer.paths) else None,
            writer.nodes,
            states,
        )
    )
    raw = _PACKED + zlib.compress(raw, 1) if writer.nodes else _PLAIN + raw  # columns are short already
    return raw + _checksum(raw)


def _checksum(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=CHECKSUM_BYTES).digest()


class _Writer:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._op = {id(op): i for i, op in enumerate(rows.ops)}
        self.before: list[int] = []
        self.events: list[int] = []
        self.paths: list[Path] = []
        self.nodes: list[Node] = []
        self._leaves: dict[tuple[int, Path], dict[int, int]] = {}
        """The numbers of pointers' records: by row and child path, then by event."""
        self._known: dict[Any, int] = {}

    def numbers(self, handles: Sequence[Handle], row: int) -> Sequence[int]:
        """The numbers of records before a row. Most are one record of a pointer each: these are named all at once."""
        events = _plain_events(handles)
        if events is not None and not self.events:
            known = dict(zip(events, count(), strict=False))
            if len(known) == len(events):
                self._leaves[row, ()] = known
                self.before, self.events, self.paths = [row] * len(events), events, [()] * len(events)
                return range(len(events))
        return [self.number(handle, row) for handle in handles]

    def number(self, handle: Handle, row: int) -> int:
        """The number of a record before a row; what it is made of is written down where it is met first."""
        if isinstance(handle, Group):
            return self._group(handle)
        base, path = _base(handle)
        if isinstance(base, int):
            known = self._leaves.setdefault((row, path), {})
            number = known.setdefault(base, len(self.events))
            if number == len(self.events):
                self.before.append(row)
                self.events.append(base)
                self.paths.append(path)
            return number
        key = (row, id(base), path)
        if key not in self._known:
            self._add(key, Node(row, self._group(base), path))
        return self._known[key]

    def _group(self, group: Group) -> int:
        if id(group) not in self._known:
            op = self._op[id(group.op)]
            row = self._rows.of_op[op]
            parts = [(self.number(part, row), start, stop) for part, start, stop in group.parts]
            written = [group.value] if isinstance(group, Attached) else []
            self._add(id(group), Node(row, op=op, parts=parts, written=written))
        return self._known[id(group)]

    def _add(self, key: Any, node: Node) -> None:
        self.nodes.append(node)
        self._known[key] = -len(self.nodes)


def _plain_events(handles: Sequence[Any]) -> list[int] | None:
    """The events of records that are all of pointers and without a child path; else None."""
    if not set(map(type, handles)) <= {tuple}:
        return None
    for block in set(map(itemgetter(0), handles)):
        if not block.lineage.is_plain():
            return None
    return [block.lineage.plain[i] for block, i in handles]


def _base(handle: Any) -> tuple[int | Group, Path]:
    """The event of the pointer, or the group, that a record was made of, and its child path since then."""
    path: Path = ()
    while not isinstance(handle, Group):
        block, i = handle
        lineage = block.lineage
        item = lineage.index[i]
        if lineage.path:
            path = lineage.path[i] + path
        if lineage.events is not None:
            return lineage.events[item], path
        handle = lineage.items[item]
    return handle, path


def read_held(raw: bytes) -> Table:
    """The table of `write_held`. Raises ValueError."""
    raw, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
    if checksum != _checksum(raw):
        raise ValueError("what a lane's accumulators hold is damaged: its checksum is another one")
    try:
        return _decode(zlib.decompress(raw[1:]) if raw[:1] == _PACKED else raw[1:])
    except (zlib.error, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"what a lane's accumulators hold cannot be read: {error}") from error


def leaves(table: Table, place: int) -> list[tuple[int, int, Path]]:
    """(row, event, child path) of each record of a pointer."""
    chunk, size = event_place(place)[0], table.size
    columns = (read_column(column, size) for column in (table.rows, table.chunks, table.offsets))
    paths = table.paths or [()] * size
    return [(row, event_at(chunk - n, at), path) for row, n, at, path in zip(*columns, paths, strict=True)]


def load_held(
    table: Table, accumulators: Sequence[Accumulator], handles: dict[int, Handle], lengths: dict[int, Any]
) -> list[Held]:
    """What each accumulator is given back. Raises ValueError where a record has another length than it had."""
    if any(accumulator.keyed for accumulator in accumulators):
        lengths = {}  # they are keys, and nobody holds one
    found = []
    for accumulator, (size, numbers, first, second, plain) in zip(accumulators, table.states, strict=True):
        items = list(zip(*(read_column(column, size) for column in (numbers, first, second)), strict=True))
        for number, a, b in items:
            length = lengths.get(number, a if accumulator.preserves else b)
            if a != length if accumulator.preserves else b > length:
                raise ValueError(f"a record that was {a if accumulator.preserves else b} long is {length} long now")
        found.append(Held([(handles[number], a, b) for number, a, b in items], plain))
    return found


def write_column(values: Sequence[Any] | NDArray[np.int64]) -> Column:
    """A column, in as few bytes as a dtype allows."""
    if not len(values):
        return 0
    if isinstance(values, range):
        return ["+", values[0]]
    if not isinstance(values, np.ndarray) and not all(_is_whole(kind) for kind in set(map(type, values))):
        return ["", list(values)]
    array = np.asarray(values, np.int64)
    low, high = int(array.min()), int(array.max())
    if low == high:
        return low
    if high - low == len(values) - 1 and (np.diff(array) == 1).all():
        return ["+", low]
    kind = next(k for k in ("u1", "u2", "u4", "i1", "i2", "i4", "i8") if _fits(low, high, k))
    return [kind, array.astype(f"<{kind}").tobytes()]


def _is_whole(kind: type) -> bool:
    return kind is int or issubclass(kind, np.integer)


def _fits(low: int, high: int, kind: str) -> bool:
    limits = np.iinfo(kind)
    return bool(limits.min <= low and high <= limits.max)


def read_column(column: Column, size: int) -> list[Any]:
    """The `size` values of `write_column`."""
    if isinstance(column, int):
        return [column] * size
    kind, raw = column
    if kind == "":
        return list(raw)
    if kind == "+":
        return list(range(raw, raw + size))
    array: NDArray[Any] = np.frombuffer(raw, f"<{kind}")
    return array.tolist()  # type: ignore[no-any-return]

"""Records as columns: how they cross from one process to another, and how batches are cut from them without decoding.

A column holds one field of n records in one of three forms:

    fixed   an array [n, *shape]: bool, int, float, or arrays and numpy scalars of one dtype and shape
    ragged  arrays of one dtype that differ in their first dimension alone: end to end, with n + 1 offsets
    blob    anything else, each value for itself: UTF-8 for str, the bytes for bytes, pickle (protocol 5) for the rest

Values come back as they went in, type by type (a tuple stays a tuple). Records that differ in their fields, that are
no plain dicts or have odd names travel whole, as one blob column. Nothing is decoded before someone asks for a record
or a list.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from zephon.batch import LazyList
from zephon.ipc.adjacent import in_one_piece
from zephon.ipc.codec import dump
from zephon.ops.batch import stack_values
from zephon.record import Record

Bytes = NDArray[np.uint8]
Array = NDArray[Any]
LARGE_BYTES: Final = 1 << 16  # from here on a copy costs more than the handling of one more buffer
WHOLE: Final = ""  # the name of the one column of records that differ in their fields

_SCALARS: Final[dict[type, Any]] = {bool: np.bool_, int: np.int64, float: np.float64}


class Fixed:
    """Row i is `array[i]`; `kind` says what it was: bool, int, float, array or generic (a numpy scalar)."""

    form = "fixed"

    def __init__(self, kind: str, array: Array) -> None:
        self.kind, self.array = kind, array

    def value(self, i: int) -> Any:
        if self.kind == "array":
            return self.array[i, ...]
        return self.array[i] if self.kind == "generic" else self.array[i].item()

    def __len__(self) -> int:
        return len(self.array)

    @property
    def make(self) -> tuple[Any, ...]:
        """What two columns must have in common to be one."""
        return self.kind, self.array.dtype, self.array.shape[1:]

    def pieces(self, start: int, stop: int) -> list[Array]:
        """Rows start .. stop - 1, each piece as [n, *shape]."""
        return [self.array[start:stop]]

    def cut(self, start: int, stop: int) -> Fixed:
        return Fixed(self.kind, self.array[start:stop])

    def describe(self) -> list[Any]:
        return [self.kind, self.array.dtype.str, list(self.array.shape)]

    def buffers(self) -> list[Array | list[Array]]:
        return [np.ascontiguousarray(self.array)]


class Stack(Fixed):
    """A fixed column of large arrays, each where it lies: where it was made, or in the slot that it was written to."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self.kind, self.parts = "array", parts

    @property
    def array(self) -> Array:  # type: ignore[override]
        return np.stack(self.parts)

    def value(self, i: int) -> Any:
        return self.parts[i]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def make(self) -> tuple[Any, ...]:
        return self.kind, self.parts[0].dtype, self.parts[0].shape

    def pieces(self, start: int, stop: int) -> list[Array]:
        return [part[None] for part in self.parts[start:stop]]

    def cut(self, start: int, stop: int) -> Stack:
        return Stack(self.parts[start:stop])

    def describe(self) -> list[Any]:
        first = self.parts[0]
        return [self.kind, first.dtype.str, [len(self.parts), *first.shape]]

    def buffers(self) -> list[Array | list[Array]]:
        return [[np.ascontiguousarray(part) for part in self.parts]]


class Ragged:
    """Row i is `flat[offsets[i]:offsets[i + 1]]`."""

    form = "ragged"
    kind = "array"

    def __init__(self, flat: Array, offsets: NDArray[np.int64]) -> None:
        self.flat, self.offsets = flat, offsets

    def value(self, i: int) -> Array:
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def cut(self, start: int, stop: int) -> Ragged:
        first = self.offsets[start]
        return Ragged(self.flat[first : self.offsets[stop]], self.offsets[start : stop + 1] - first)

    def describe(self) -> list[Any]:
        return [self.flat.dtype.str, list(self.flat.shape), len(self.offsets)]

    def buffers(self) -> list[Array | list[Array]]:
        return [self.offsets, np.ascontiguousarray(self.flat)]


class Blob(LazyList):
    """Row i is decoded from `data[offsets[i]:offsets[i + 1]]` as `kind` (str, bytes or pickle) says."""

    form = "blob"

    def __init__(self, kind: str, data: Bytes, offsets: NDArray[np.int64]) -> None:
        self.kind, self.data, self.offsets = kind, data, offsets

    def value(self, i: int) -> Any:
        raw = self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()
        return _DECODE[self.kind](raw)

    def values(self) -> list[Any]:
        """All rows, decoded."""
        at = self.offsets.tolist()
        raw = self.data[at[0] : at[-1]].tobytes()
        if at[0]:
            at = [offset - at[0] for offset in at]
        if self.kind == "str" and raw.isascii():  # decoded at one go
            text = raw.decode("ascii")
            return [text[a:b] for a, b in pairwise(at)]
        decode = _DECODE[self.kind]
        return [decode(raw[a:b]) for a, b in pairwise(at)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def view(self, start: int, stop: int) -> Blob:
        """Rows start .. stop - 1 over the same data."""
        return Blob(self.kind, self.data, self.offsets[start : stop + 1])

    def cut(self, start: int, stop: int) -> Blob:
        first = self.offsets[start]
        return Blob(self.kind, self.data[first : self.offsets[stop]], self.offsets[start : stop + 1] - first)

    def describe(self) -> list[Any]:
        return [self.kind, len(self.data), len(self.offsets)]

    def buffers(self) -> list[Array | list[Array]]:
        return [self.offsets, self.data]


Column = Fixed | Ragged | Blob

_DECODE: Final[dict[str, Any]] = {
    "str": lambda raw: raw.decode("utf-8", "surrogatepass"),
    "bytes": bytes,
    "pickle": pickle.loads,
}


def make_column(values: Sequence[Any]) -> Column:
    """The column of these values (at least one). Raises what pickle raises for a value that cannot be sent."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in _SCALARS:
        try:
            return Fixed(kind.__name__, np.array(values, _SCALARS[kind]))
        except OverflowError:  # a whole number beyond 64 bits
            return pickled(values)
    if kind is str:
        return _texts(values)
    if kind is bytes:
        return _blob("bytes", values, b"".join(values))
    if kind is np.ndarray:
        column = _arrays(values)
        if column is not None:
            return column
    elif kind is not None and issubclass(kind, np.generic) and not issubclass(kind, np.flexible):
        dtypes = {v.dtype for v in values}  # times of one type may differ in their unit
        if len(dtypes) == 1 and is_sendable(values[0].dtype):
            return Fixed("generic", np.array(values, values[0].dtype))
    return pickled(values)


def pickled(values: Sequence[Any]) -> Blob:
    """Values as a blob column, each pickled for itself."""
    raw = list(map(dump, values))
    return _blob("pickle", raw, b"".join(raw))


def is_sendable(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype's short name says everything, and its bytes are its value."""
    return (
        dtype.itemsize > 0
        and not dtype.hasobject
        and dtype.names is None
        and dtype.metadata is None
        and np.dtype(dtype.str) == dtype
    )


def _arrays(values: Sequence[Array]) -> Column | None:
    dtypes, shapes = {v.dtype for v in values}, {v.shape for v in values}
    dtype = values[0].dtype
    if len(dtypes) > 1 or not is_sendable(dtype):
        return None
    if len(shapes) == 1:
        if values[0].nbytes >= LARGE_BYTES:
            return Stack(values)
        array = np.empty((len(values), *values[0].shape), dtype)
        for i, value in enumerate(values):
            array[i, ...] = value
        return Fixed("array", array)
    if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
        return None
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return Ragged(np.concatenate(values, dtype=dtype), offsets)


def _texts(values: Sequence[str]) -> Blob:
    """Text as a blob column. ASCII, where a character is a byte, is encoded at one go."""
    text = "".join(values)
    if text.isascii():
        return _blob("str", values, text.encode("ascii"))
    raw = [value.encode("utf-8", "surrogatepass") for value in values]
    return _blob("str", raw, b"".join(raw))


def _blob(kind: str, values: Sequence[Any], data: bytes) -> Blob:
    """`data` is the values end to end."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return Blob(kind, np.frombuffer(data, np.uint8), offsets)


class Columns(Sequence[Record]):
    """Records start .. start + n - 1 of `columns`: a sequence that makes a dict when asked for one.

    `stacking`: what decides how a field of a batch is made of each column, where that is copying alone (fixed columns,
    text and bytes); None where values must be looked at. Batches of equal `stacking` have fields of equal make.
    """

    __slots__ = ("columns", "num_records", "stacking", "start")

    def __init__(
        self,
        columns: dict[str, Column],
        num_records: int,
        start: int = 0,
        stacking: tuple[tuple[Any, ...], ...] | None = None,
    ) -> None:
        self.columns, self.num_records, self.start, self.stacking = columns, num_records, start, stacking

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self.cut(*i.indices(self.num_records)[:2])
        at = range(self.start, self.start + self.num_records)[i]
        if WHOLE in self.columns:
            return cast(Record, self.columns[WHOLE].value(at))
        return {name: column.value(at) for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(self.num_records))

    def cut(self, start: int, stop: int) -> Columns:
        """The records start .. stop - 1, as a view."""
        return Columns(self.columns, stop - start, self.start + start, self.stacking)

    @property
    def fields(self) -> Collection[str] | None:
        """The fields that every record has; None where the records differ in them."""
        return None if WHOLE in self.columns else self.columns.keys()

    def flat(self, name: str) -> tuple[Array, Sequence[int]] | None:
        """A field of arrays of one dimension end to end, and where each begins; None for any other field."""
        column = self.columns.get(name)
        if isinstance(column, Ragged) and column.flat.ndim == 1:
            return column.flat, column.offsets[self.start : self.start + self.num_records].tolist()
        return None

    @staticmethod
    def collate(pieces: list[tuple[Any, int, int]], empty: Callable[..., Any]) -> dict[str, Any] | None:
        """The fields of a batch of these runs of records, cut from the columns; None where they must be decoded.

        A field of strings stays a Blob: whoever receives the batch decodes it.
        """
        names = set(pieces[0][0].columns) if isinstance(pieces[0][0], Columns) else set()
        if not names or WHOLE in names:
            return None
        runs = _runs(pieces)
        if runs is None or not all(columns.keys() == names for columns, _, _ in runs):
            return None
        return {name: _join([(columns[name], a, b) for columns, a, b in runs], empty) for name in names}


def _runs(pieces: list[tuple[Any, int, int]]) -> list[tuple[dict[str, Column], int, int]] | None:
    """Pieces of Columns as (columns, start, stop), those that lie side by side as one; None where one is none."""
    runs: list[tuple[dict[str, Column], int, int]] = []
    last, last_stop = None, -1
    for records, start, stop in pieces:
        if not isinstance(records, Columns):
            return None
        columns, start, stop = records.columns, records.start + start, records.start + stop
        if columns is last and start == last_stop:
            runs[-1] = (columns, runs[-1][1], stop)
        else:
            runs.append((columns, start, stop))
        last, last_stop = columns, stop
    return runs


def _join(runs: list[tuple[Column, int, int]], empty: Callable[..., Any]) -> Any:
    """Runs of columns of one field as the field of a batch, by the rule of `ops.batch.stack_values`."""
    first = runs[0][0]
    if isinstance(first, Fixed) and all(_alike(first, column) for column, _, _ in runs):
        pieces = [piece for column, start, stop in runs for piece in cast(Fixed, column).pieces(start, stop)]
        if isinstance(first, Stack) and (whole := in_one_piece(pieces)) is not None:
            return whole
        joined = empty((sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype.newbyteorder("="))
        at = 0
        for piece in pieces:
            joined[at : at + len(piece)] = piece
            at += len(piece)
        return joined
    if isinstance(first, Blob) and first.kind != "pickle" and all(column.kind == first.kind for column, _, _ in runs):
        return _joined_blob(first.kind, cast("list[tuple[Blob, int, int]]", runs), empty)
    return stack_values([column.value(i) for column, start, stop in runs for i in range(start, stop)], empty)


def _alike(one: Fixed, other: Column) -> bool:
    return one is other or (isinstance(other, Fixed) and other.make == one.make)


def _joined_blob(kind: str, runs: list[tuple[Blob, int, int]], empty: Callable[..., Any]) -> Blob:
    """The rows of the runs as one column."""
    spans = [(int(blob.offsets[start]), int(blob.offsets[stop])) for blob, start, stop in runs]
    offsets = empty(1 + sum(stop - start for _, start, stop in runs), np.int64)
    data = empty(sum(b - a for a, b in spans), np.uint8)
    offsets[0] = at = size = 0
    for (blob, start, stop), (a, b) in zip(runs, spans, strict=True):
        np.add(blob.offsets[start + 1 : stop + 1], size - a, out=offsets[at + 1 : at + 1 + stop - start])
        data[size : size + b - a] = blob.data[a:b]
        at, size = at + stop - start, size + b - a
    return Blob(kind, data, offsets)


def make_columns(records: Sequence[Record]) -> Columns:
    """Records as columns. Raises what pickle raises for a value that cannot be sent."""
    if not records:
        return Columns({}, 0)
    alike = set(map(type, records)) == {dict} and len(set(map(tuple, records))) == 1
    names = list(records[0]) if alike else []
    if alike and names and all(map(is_plain_name, names)):
        return Columns({name: make_column([r[name] for r in records]) for name in names}, len(records))
    return Columns({WHOLE: pickled(records)}, len(records))


def is_plain_name(name: Any) -> bool:
    """Whether a field's name can stand in a description: text without lone surrogates."""
    return type(name) is str and name != WHOLE and not any("\ud800" <= letter <= "\udfff" for letter in name)

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
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.batch import LazyList
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

    def cut(self, start: int, stop: int) -> Fixed:
        return Fixed(self.kind, self.array[start:stop])

    def describe(self) -> list[Any]:
        return [self.kind, self.array.dtype.str, list(self.array.shape)]

    def buffers(self) -> list[Array | list[Array]]:
        return [np.ascontiguousarray(self.array)]


class Stack(Fixed):
    """A fixed column of large arrays that still lie where they were made: they are copied once, into the message."""

    def __init__(self, parts: Sequence[Array]) -> None:
        self.kind, self.parts = "array", parts

    @property
    def array(self) -> Array:  # type: ignore[override]
        return np.stack(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

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
        decode, raw, at = _DECODE[self.kind], self.data.tobytes(), self.offsets.tolist()
        return [decode(raw[a:b]) for a, b in pairwise(at)]

    def __len__(self) -> int:
        return len(self.offsets) - 1

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
        return _blob("str", [v.encode("utf-8", "surrogatepass") for v in values])
    if kind is bytes:
        return _blob("bytes", values)
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
    return _blob("pickle", list(map(dump, values)))


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
    np.cumsum([len(v) for v in values], out=offsets[1:])
    return Ragged(np.concatenate(values, dtype=dtype), offsets)


def _blob(kind: str, raw: Sequence[bytes]) -> Blob:
    offsets = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(r) for r in raw], out=offsets[1:])
    return Blob(kind, np.frombuffer(b"".join(raw), np.uint8), offsets)


class Columns(Sequence[Record]):
    """n records by column: a sequence that makes a dict when asked for one."""

    __slots__ = ("columns", "num_records")

    def __init__(self, columns: dict[str, Column], num_records: int) -> None:
        self.columns, self.num_records = columns, num_records

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return self.cut(*i.indices(self.num_records)[:2])
        if WHOLE in self.columns:
            return cast(Record, self.columns[WHOLE].value(i))
        return {name: column.value(i) for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(self.num_records))

    def cut(self, start: int, stop: int) -> Columns:
        """The records start .. stop - 1, as views."""
        return Columns({name: c.cut(start, stop) for name, c in self.columns.items()}, stop - start)

    @staticmethod
    def collate(pieces: list[tuple[Any, int, int]], empty: Callable[..., Any]) -> dict[str, Any] | None:
        """The fields of a batch of these runs of records, cut from the columns; None where they must be decoded.

        A field of strings stays a Blob: whoever receives the batch decodes it.
        """
        names = set(pieces[0][0].columns) if isinstance(pieces[0][0], Columns) else set()
        if not names or WHOLE in names:
            return None
        if not all(isinstance(records, Columns) and set(records.columns) == names for records, _, _ in pieces):
            return None
        fields = {}
        for name in names:
            fields[name] = _join([records.columns[name].cut(a, b) for records, a, b in pieces], empty)
        return fields


def _join(columns: list[Column], empty: Callable[..., Any]) -> Any:
    """Columns of one field as the field of a batch, by the rule of `ops.batch.stack_values`."""
    first = columns[0]
    if isinstance(first, Fixed) and all(_alike(first, column) for column in columns):
        total = sum(len(column.array) for column in columns if isinstance(column, Fixed))
        joined = empty((total, *first.array.shape[1:]), first.array.dtype.newbyteorder("="))
        at = 0
        for column in columns:
            array = cast(Fixed, column).array
            joined[at : at + len(array)] = array
            at += len(array)
        return joined
    if isinstance(first, Blob) and first.kind != "pickle" and all(column.kind == first.kind for column in columns):
        return _joined_blob(first.kind, cast("list[Blob]", columns))
    return stack_values([column.value(i) for column in columns for i in range(len(column))], empty)


def _alike(one: Fixed, other: Column) -> bool:
    return (
        isinstance(other, Fixed)
        and other.kind == one.kind
        and other.array.dtype == one.array.dtype
        and other.array.shape[1:] == one.array.shape[1:]
    )


def _joined_blob(kind: str, blobs: list[Blob]) -> Blob:
    if len(blobs) == 1:
        return blobs[0]
    starts = list(accumulate((len(blob.data) for blob in blobs), initial=0))
    shifted = [blob.offsets[1:] + start for blob, start in zip(blobs, starts, strict=False)]
    return Blob(kind, np.concatenate([b.data for b in blobs]), np.concatenate([blobs[0].offsets[:1], *shifted]))


def make_columns(records: Sequence[Record]) -> Columns:
    """Records as columns. Raises what pickle raises for a value that cannot be sent."""
    if not records:
        return Columns({}, 0)
    names = list(records[0])
    alike = len(set(map(tuple, records))) == 1 and set(map(type, records)) == {dict}
    if alike and names and all(map(is_plain_name, names)):
        return Columns({name: make_column([r[name] for r in records]) for name in names}, len(records))
    return Columns({WHOLE: pickled(records)}, len(records))


def is_plain_name(name: Any) -> bool:
    """Whether a field's name can stand in a description: text without lone surrogates."""
    return type(name) is str and name != WHOLE and not any("\ud800" <= letter <= "\udfff" for letter in name)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
ALIGNMENT: Final = 16


def describe_columns(columns: Columns) -> tuple[list[Any], list[Array | list[Array]]]:
    """(plain description, buffers) of columns."""
    described = [[name, c.form, *c.describe()] for name, c in columns.columns.items()]
    return [columns.num_records, described], [b for c in columns.columns.values() for b in c.buffers()]


def rebuild_columns(description: list[Any], buffers: Iterator[Bytes]) -> Columns:
    """The columns of a description over their buffers, as views."""
    columns: dict[str, Column] = {}
    for name, form, *what in description[1]:
        if form == "fixed":
            columns[name] = Fixed(what[0], next(buffers).view(what[1]).reshape(what[2]))
        elif form == "ragged":
            offsets = next(buffers).view(np.int64)
            columns[name] = Ragged(next(buffers).view(what[0]).reshape(what[1]), offsets)
        else:
            offsets = next(buffers).view(np.int64)
            columns[name] = Blob(what[0], next(buffers), offsets)
    return Columns(columns, description[0])


def write_message(head: Any, buffers: Sequence[Array | list[Array]]) -> list[Any]:
    """A message as parts: its head (plain data), then the buffers (arrays, or arrays end to end), aligned to 16 bytes.

    Layout: 8 bytes length of the packed head; the head [head, [bytes of each buffer]]; padding; buffers with padding.
    """
    whole = [buffer if isinstance(buffer, list) else [buffer] for buffer in buffers]
    sizes = [sum(array.nbytes for array in arrays) for arrays in whole]
    packed = _encode([head, sizes])
    parts: list[Any] = [len(packed).to_bytes(8, "little"), packed, bytes(-(8 + len(packed)) % ALIGNMENT)]
    for arrays, size in zip(whole, sizes, strict=True):
        parts += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
        parts.append(bytes(-size % ALIGNMENT))
    return parts


def read_message(memory: Any) -> tuple[Any, Iterator[Bytes]]:
    """(head, buffers as views on `memory`)."""
    raw = np.frombuffer(memory, np.uint8)
    size = int.from_bytes(memory[:8], "little")
    head, sizes = _decode(memory[8 : 8 + size])
    return head, _views(raw, 8 + size + -(8 + size) % ALIGNMENT, sizes)


def _views(raw: Bytes, at: int, sizes: list[int]) -> Iterator[Bytes]:
    for size in sizes:
        yield raw[at : at + size]
        at += size + -size % ALIGNMENT

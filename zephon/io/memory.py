"""Records in memory: every record encoded once, in one block, so that each read gives a fresh one.

The block lies in this process's heap until the process runner starts. A large one then moves into a shared segment,
which all processes map: it is there once, and does not travel with the orders.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError, describe
from zephon.io.formats import Unreadable
from zephon.ipc.segment import Segment
from zephon.record import Record

LIST_FORMAT: Final = "list"
SHARED_FROM_BYTES: Final = 1 << 20  # a smaller block travels as fast by value, and needs no descriptor


class Encoded:
    """One read-only block of bytes, `view`. Ordinary pickling copies it; the process runner shares it."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.view = memoryview(data).toreadonly()
        self._segment: Segment | None = None

    @classmethod
    def attach(cls, fd: int, size: int) -> Encoded:
        """The block of another process, mapped. `fd` stays open, as its children may need it."""
        return cls(memoryview(Segment(fd, size, writable=False).map))

    def share(self) -> int | None:
        """Moves a large block into a segment; returns its descriptor, which is this block's. None: it stays."""
        if self._segment is None and len(self.view) >= SHARED_FROM_BYTES:
            try:
                segment = Segment.create(len(self.view))
            except ConfigError:  # no room: then by value, as a small one
                return None
            segment.map[: len(self.view)] = self.view
            self.view, self._segment = memoryview(segment.map)[: len(self.view)].toreadonly(), segment
            weakref.finalize(self, os.close, segment.fd).atexit = False
        return self._segment.fd if self._segment is not None else None

    def __len__(self) -> int:
        return len(self.view)

    def __reduce__(self) -> tuple[type[Encoded], tuple[bytes]]:
        return Encoded, (bytes(self.view),)


class ListShard(msgspec.Struct, frozen=True, eq=False):
    """Records in memory. `blob` holds their pickles one behind the other, record i at offsets[i] .. offsets[i + 1].

    `offsets` int64 [rows + 1]; `digest` is the hex hash of the content, equal in every process. See Shard.
    """

    name: str
    offsets: NDArray[np.int64]
    blob: Encoded
    digest: str

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(self.offsets) - 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all encoded records."""
        return len(self.blob)

    @property
    def block_rows(self) -> int | None:
        """Single rows are cheap."""
        return None

    def read(self, rows: NDArray[np.int64]) -> list[Record | Unreadable]:
        """See Shard.read."""
        view = self.blob.view
        starts, stops = self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        return [_decode(view[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def _decode(encoded: memoryview) -> Record | Unreadable:
    try:
        record: Record = pickle.loads(encoded)
    except MemoryError:
        raise
    except Exception as error:  # a class that is gone here, or whose own code raises
        problem = Unreadable(f"the record cannot be unpickled: {describe(error)}")
        problem.__cause__ = error
        return problem
    return record


def shard_of(dataset: str, records: Any) -> ListShard:
    """Encode a sequence of dicts. Raises ConfigError that names the first record that is no record."""
    _check_sequence(dataset, records)
    blob = bytearray()
    offsets = [0]
    content = hashlib.blake2b(digest_size=16)
    for i, record in enumerate(records):
        _check_record(dataset, i, record)
        try:
            blob += pickle.dumps(dict(record), protocol=5)
            content.update(canonical_bytes(dict(record)))  # an encoding says itself where it ends
        except Exception as error:
            raise ConfigError(
                f"dataset '{dataset}': record {i} cannot be pickled: {describe(error)}; records travel between "
                "processes: hold plain data (numbers, strings, arrays, lists, dicts)"
            ) from error
        offsets.append(len(blob))
    return ListShard(LIST_FORMAT, np.array(offsets, np.int64), Encoded(bytes(blob)), content.hexdigest())


def _check_sequence(dataset: str, records: Any) -> None:
    if isinstance(records, Sequence) and not isinstance(records, (str, bytes, bytearray, memoryview)):
        return
    if isinstance(records, np.ndarray) and records.dtype == object and records.ndim == 1:
        return
    if isgeneratorfunction(records) or isasyncgenfunction(records):
        what = f"a generator function ('{records.__name__}'): its records have no numbers"
        remedy = f"pass a list, `list({records.__name__}())`"
    elif isinstance(records, Iterator):
        what = f"a one-shot {type(records).__name__}: it can be read once, and not from record i"
        remedy = "pass a list, `list(...)` of it if it ends"
    elif isinstance(records, Mapping):
        what, remedy = "one dict, not a list of dicts", "pass `[record, ...]`, or `list(records.values())`"
    elif isinstance(records, Set):
        what, remedy = f"a {type(records).__name__}: it has no fixed order", "pass a list in the order you want"
    elif isinstance(records, (str, bytes, bytearray)):
        what, remedy = f"{type(records).__name__}, not records", "for a file, use Dataset.from_path"
    else:
        what, remedy = f"a {type(records).__name__}", "pass a list of dicts, `list(...)` of it if it can be iterated"
    raise ConfigError(
        f"dataset '{dataset}': from_list was given {what}; it takes a sequence of dicts, so that any record can be "
        f"read again by its number: {remedy}, or write the records to a file for Dataset.from_path"
    )


def _check_record(dataset: str, i: int, record: Any) -> None:
    if not isinstance(record, dict):
        raise ConfigError(
            f"dataset '{dataset}': record {i} is a {type(record).__name__}; a record is a dict, field name to value"
        )
    for key in record:
        if not isinstance(key, str):
            raise ConfigError(f"dataset '{dataset}': record {i} has the field name {key!r}; field names are strings")

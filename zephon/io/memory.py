"""Records in memory: every record encoded once, in one block, so that each read gives a fresh one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError, describe
from zephon.io.formats import Unreadable
from zephon.record import Record

LIST_FORMAT: Final = "list"


class ListShard(msgspec.Struct, frozen=True, eq=False):
    """Records in memory. `blob` holds their pickles one behind the other, record i at offsets[i] .. offsets[i + 1].

    `offsets` int64 [rows + 1]; `digest` is the hex hash of the content, equal in every process. See Shard.
    """

    name: str
    offsets: NDArray[np.int64]
    blob: bytes
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
        view = memoryview(self.blob)
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
    return ListShard(LIST_FORMAT, np.array(offsets, np.int64), bytes(blob), content.hexdigest())


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

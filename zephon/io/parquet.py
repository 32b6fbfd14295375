"""Parquet: rows are read by row group, and the groups read last stay decoded.

A record is what `Table.to_pylist` gives. One row costs its whole row group the first time, so shuffles that go by block
("blocks", "shards") suit this format; "global" on large row groups decodes a group for every row.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.errors import describe
from zephon.io.formats import Shard, Unreadable
from zephon.io.lru import Lru
from zephon.limits import import_error
from zephon.record import Record

_DECODED_BYTES: Final = 128 << 20  # of row groups that a process keeps
_OPEN_FILES: Final = 32


class ParquetFormat:
    """`fmt="parquet"`. Needs pyarrow."""

    name = "parquet"
    suffixes = (".parquet", ".pq")
    other_suffixes = ()

    def open(self, path: str, name: str, index_dir: str | None) -> Shard:
        """Read the footer. See Format.open."""
        opened = _OpenFile(path)
        return ParquetShard(name, opened.rows, opened.stamp[0], opened.largest_group, path)


class ParquetShard(msgspec.Struct, frozen=True):
    """A Parquet file. `block_rows` is the size of its largest row group. See Shard."""

    name: str
    rows: int
    size_bytes: int
    block_rows: int | None
    path: str

    def read(self, rows: NDArray[np.int64]) -> list[Record | Unreadable]:
        """See Shard.read. A row group that cannot be decoded is the fault of each of its rows."""
        opened = self._opened()
        groups = np.searchsorted(opened.stops, rows, side="right")
        cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
        records: list[Record | Unreadable] = []
        for start, stop in pairwise(cuts):
            group = int(groups[start])
            records += _records(opened, group, rows[start:stop] - opened.start_of(group))
        return records

    def _opened(self) -> _OpenFile:
        opened = _open_files.get(self.path)
        if opened is None or _stamp(os.stat(self.path)) != opened.stamp:
            opened = _OpenFile(self.path)
            _open_files.put(self.path, opened)
        if (opened.stamp[0], opened.rows) != (self.size_bytes, self.rows):
            raise Unreadable(
                f"the file changed after the dataset was made ({self.size_bytes:,} bytes and {self.rows:,} rows then, "
                f"{opened.stamp[0]:,} and {opened.rows:,} now)"
            )
        return opened


class _OpenFile:
    """An open file and where its row groups end. Raises Unreadable where its footer is none."""

    def __init__(self, path: str) -> None:
        parquet = _pyarrow_parquet()
        self.path = path
        self.stamp = _stamp(os.stat(path))
        try:
            self.file = parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
            metadata = self.file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        except Exception as error:
            if _is_of_the_system(error):
                raise
            raise _as_unreadable("not a Parquet file that can be read", error) from error
        self.stops = np.cumsum(np.array(sizes, np.int64))
        self.rows = sum(sizes)
        self.largest_group = max(sizes, default=None)
        self.lock = threading.Lock()  # one reader decodes; the others find its result

    def start_of(self, group: int) -> int:
        """The first row of a row group."""
        return int(self.stops[group - 1]) if group else 0

    def group(self, group: int) -> Any:
        """A decoded row group (pyarrow.Table), from the cache if it is there."""
        key = (self.path, self.stamp, group)
        table = _tables.get(key)
        if table is None:
            with self.lock:
                table = _tables.get(key)
                if table is None:
                    table = self.file.read_row_group(group, use_threads=False)
                    _tables.put(key, table, weight=table.nbytes)
        return table


_open_files: Final[Lru[_OpenFile]] = Lru(lambda: _OPEN_FILES)
_tables: Final[Lru[Any]] = Lru(lambda: _DECODED_BYTES)


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _pyarrow_parquet() -> Any:
    try:
        from pyarrow import parquet
    except Exception as error:
        raise import_error(error, "pyarrow", "reading Parquet", "zephon[parquet]") from error
    return parquet


def _is_of_the_system(error: Exception) -> bool:
    """pyarrow raises OSError for broken content too, but then without an error number."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def _as_unreadable(what: str, error: Exception) -> Unreadable:
    problem = Unreadable(f"{what}: {describe(error)}")
    problem.__cause__ = error
    return problem


def _records(opened: _OpenFile, group: int, rows: NDArray[np.int64]) -> Iterator[Record | Unreadable]:
    """The records of ascending rows of one row group."""
    try:
        table = opened.group(group)
    except Exception as error:
        if _is_of_the_system(error):
            raise
        problem = _as_unreadable(f"row group {group} cannot be decoded", error)
        return iter([problem] * len(rows))
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows) and bool(np.all(np.diff(rows) == 1)):
        chosen = table.slice(first, len(rows))
    else:
        chosen = table.take(rows)
    return iter(_to_records(chosen))


def _to_records(table: Any) -> list[Record | Unreadable]:
    try:
        records: list[Record | Unreadable] = table.to_pylist()
    except MemoryError:
        raise
    except Exception:  # one value has no Python form: find the rows at fault
        return [_to_record(table.slice(i, 1)) for i in range(len(table))]
    return records


def _to_record(table: Any) -> Record | Unreadable:
    try:
        record: Record = table.to_pylist()[0]
    except Exception as error:
        return _as_unreadable("a value has no Python form", error)
    return record

"""Dataset: named rows, numbered through all its shards, each of which can be read at any time."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zephon.errors import ConfigError, DataError, ShardError, describe
from zephon.io import files, memory
from zephon.io.formats import Format, Shard, Unreadable
from zephon.io.jsonl import JsonlFormat
from zephon.io.parquet import ParquetFormat
from zephon.record import Record

FORMATS: Final[tuple[Format, ...]] = (JsonlFormat(), ParquetFormat())

_REMEDY_SHARD: Final = "restore the file, or make the dataset again"


class Dataset:
    """Rows 0 .. num_rows - 1 over all shards, in order. Immutable, picklable (without what is open), thread-safe.

    Made by `from_path` or `from_list`. A row keeps its number when others are excluded: `read` still reads an excluded
    row, and who draws rows asks `is_excluded`. `on_error` says what the pipeline does with a row that cannot be read;
    `read` itself only reports it.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        format_name: str,
        exclude: Iterable[tuple[str | int, int]] = (),
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a dataset's name is a non-empty string, not {name!r}: states and errors use it")
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"dataset '{name}': on_error={on_error!r}; it is 'raise' or 'skip'")
        self._name = name
        self._shards = tuple(shards)
        self._format_name = format_name
        self._on_error = on_error
        self._shard_rows = _frozen(np.array([shard.rows for shard in self._shards], np.int64))
        self._stops = _frozen(np.cumsum(self._shard_rows))
        self._num_rows = int(self._shard_rows.sum())
        self._excluded = _frozen(self._excluded_rows(exclude))
        self._hash = _hash(self._shards)

    @classmethod
    def from_path(
        cls,
        name: str,
        path: Any,
        fmt: str | Format | None = None,
        exclude: Iterable[tuple[str | int, int]] = (),
        on_error: Literal["raise", "skip"] = "raise",
        *,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> Dataset:
        """The rows of JSONL or Parquet files.

        `path`: a folder (searched through), a file, a glob, or a list of those; `zephon/io/files.py` says which files
        are taken, in which order, and what they are called. `fmt`: "jsonl" or "parquet" (default: by suffix), or a
        Format of your own. `exclude`: (shard, row in shard) pairs, the shard by relative name or by index.
        `index_dir`: where indexes of line offsets are kept (default: `~/.cache/zephon`; see `index_cache.py`); it is
        no data setting.

        Raises ConfigError for a wrong argument, DataError for a file that cannot be read.
        """
        found_format, found = files.find(name, path, files.chosen_format(name, fmt, FORMATS), FORMATS)
        index = None if index_dir is None else os.path.abspath(index_dir)
        shards = [_open(name, found_format, file, index) for file in found]
        return cls(name, shards, found_format.name, exclude, on_error)

    @classmethod
    def from_list(cls, name: str, records: Any, exclude: Iterable[tuple[str | int, int]] = ()) -> Dataset:
        """Records in memory: a list, or another sequence, of dicts with string keys; it may be empty.

        They are encoded now: later changes of the list or its records do not reach the dataset, and every read gives
        fresh objects. The one shard is called "list".

        Raises ConfigError for what is no such sequence (generators, iterators, sets, dicts, strings), and for a record
        that is no dict or cannot be pickled.
        """
        return cls(name, [memory.shard_of(name, records)], memory.LIST_FORMAT, exclude)

    @property
    def name(self) -> str:
        """The name that mixtures, errors and states use."""
        return self._name

    @property
    def num_rows(self) -> int:
        """Number of rows, excluded ones too."""
        return self._num_rows

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, in order, relative, with forward slashes."""
        return tuple(shard.name for shard in self._shards)

    @property
    def shard_rows(self) -> NDArray[np.int64]:
        """Number of rows of every shard, int64 [shards], read-only."""
        return self._shard_rows

    @property
    def block_rows(self) -> int | None:
        """Rows that cost about as much as one to read together (the largest row group); None where rows are cheap."""
        return max((shard.block_rows for shard in self._shards if shard.block_rows), default=None)

    @property
    def exclude(self) -> tuple[tuple[str, int], ...]:
        """The excluded rows as (shard name, row in shard), in order, each once."""
        return tuple(self.locate(row) for row in self._excluded.tolist())

    @property
    def excluded_rows(self) -> NDArray[np.int64]:
        """The excluded rows as numbers over all shards, ascending, int64, read-only."""
        return self._excluded

    @property
    def on_error(self) -> Literal["raise", "skip"]:
        """What a pipeline does with a row that cannot be read."""
        return self._on_error

    def __repr__(self) -> str:
        return f"Dataset('{self._name}', {self._format_name}, {self.num_rows:,} rows in {len(self._shards):,} shards)"

    def locate(self, row: int) -> tuple[str, int]:
        """(shard name, row in shard) of a row. Raises ConfigError where there is no such row."""
        self._check(np.array([row], np.int64))
        shard, inside = self._place(row)
        return self._shards[shard].name, inside

    def is_excluded(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """Which of `rows` (int64) are excluded: bool, of the same shape."""
        wanted = np.asarray(rows, np.int64)
        if not len(self._excluded):
            return np.zeros(wanted.shape, bool)
        at = np.searchsorted(self._excluded, wanted)
        return np.equal(self._excluded[np.minimum(at, len(self._excluded) - 1)], wanted)

    def read(self, rows: ArrayLike, on: Callable[[int], None] | None = None) -> list[Record | DataError]:
        """The records of `rows` (int64 [n], any order, repeats allowed), in that order, each a fresh object.

        A row that cannot be read is a DataError in its place, with the original exception as `__cause__`, and the
        others are unaffected. It is a ShardError where its whole shard cannot be read, or there is no memory for the
        row; that is never to be skipped.
        Raises ConfigError for a row that does not exist. Before each shard is read, `on` is called with the number in
        `rows` of the first row that is wanted of it.
        """
        wanted = np.asarray(rows, np.int64)
        if not len(wanted):
            return []
        order = np.argsort(wanted, kind="stable")
        ascending = wanted[order]
        self._check(ascending[[0, -1]])
        shards = np.searchsorted(self._stops, ascending, side="right")
        cuts = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), len(wanted)]
        records: list[Record | DataError] = []
        for start, stop in pairwise(cuts):
            if on is not None:
                on(int(order[start]))
            shard = int(shards[start])
            records += self._read_shard(shard, ascending[start:stop] - self._start(shard))
        places = order.tolist()
        if places == list(range(len(places))):
            return records
        result = records.copy()
        for place, record in zip(places, records, strict=True):
            result[place] = record
        return result

    def fingerprint(self) -> dict[str, Any]:
        """What the data is, as plain data: format, rows, shards, a hash of names, sizes and rows of the shards.

        For a list the hash is over its content. It holds no times, no absolute paths, and not the dataset's name.
        What else changes the rows that are delivered is in it where it is set: `exclude`, `on_error`.
        """
        content: dict[str, Any] = {
            "format": self._format_name,
            "rows": self.num_rows,
            "shards": len(self._shards),
            "hash": self._hash,
        }
        if len(self._excluded):
            content["exclude"] = [list(pair) for pair in self.exclude]
        if self._on_error != "raise":
            content["on_error"] = self._on_error
        return content

    def _read_shard(self, index: int, rows: NDArray[np.int64]) -> list[Record | DataError]:
        shard = self._shards[index]
        try:
            records = shard.read(rows)
        except ConfigError:
            raise
        except MemoryError as error:
            if len(rows) > 1:  # one by one, so that those that fit are there and the first that does not is named
                return [record for row in rows for record in self._read_shard(index, np.array([row]))]
            return [self._memory_error(shard, int(rows[0]), error)]
        except Exception as error:
            return [self._shard_error(shard, row, error) for row in rows.tolist()]
        if Unreadable in set(map(type, records)):
            return [
                self._row_error(shard, row, record) if isinstance(record, Unreadable) else record
                for row, record in zip(rows.tolist(), records, strict=True)
            ]
        return records  # type: ignore[return-value]  # no Unreadable is in it

    def _row_error(self, shard: Shard, row: int, problem: Unreadable) -> DataError:
        where = f"row {row}" if problem.line is None else f"line {problem.line} (row {row})"
        error = DataError(
            f"dataset '{self._name}', shard {shard.name}, {where}: {problem.what}; mend the "
            f"{'row' if problem.line is None else 'line'}, list it in exclude=[({shard.name!r}, {row})], "
            "or skip such rows with Dataset.from_path(..., on_error='skip')"
        )
        error.__cause__ = problem.__cause__
        return error

    def _shard_error(self, shard: Shard, row: int, problem: Exception) -> ShardError:
        what, cause = _reason(problem)
        error = ShardError(f"dataset '{self._name}', shard {shard.name}, row {row}: {what}; {_REMEDY_SHARD}")
        error.__cause__ = cause
        return error

    def _memory_error(self, shard: Shard, row: int, problem: MemoryError) -> ShardError:
        """A row for which there is no memory here; another machine may have it, so it is never skipped."""
        error = ShardError(
            f"dataset '{self._name}', shard {shard.name}, row {row}: no memory is left to read it; give the job more, "
            f"lower parallelism or task_records, or leave the row out with exclude=[({shard.name!r}, {row})]"
        )
        error.__cause__ = problem
        return error

    def _start(self, shard: int) -> int:
        return int(self._stops[shard] - self._shard_rows[shard])

    def _place(self, row: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._stops, row, side="right"))
        return shard, row - self._start(shard)

    def _check(self, ascending: NDArray[np.int64]) -> None:
        for row in ascending.tolist():
            if not 0 <= row < self.num_rows:
                raise ConfigError(f"dataset '{self._name}' has no row {row}: its {self.num_rows:,} rows count from 0")

    def _excluded_rows(self, exclude: Iterable[tuple[str | int, int]]) -> NDArray[np.int64]:
        by_name = {shard.name: i for i, shard in enumerate(self._shards)}
        if not isinstance(exclude, Iterable):
            raise ConfigError(
                f"dataset '{self._name}': exclude is {exclude!r}; it is an iterable of (shard name or index, row in "
                "that shard), and () for no row"
            )
        rows = [self._excluded_row(entry, by_name) for entry in exclude]
        return np.array(sorted(set(rows)), np.int64)

    def _excluded_row(self, entry: Any, by_name: dict[str, int]) -> int:
        try:
            named, row = entry
            inside = _whole(row)
            shard = by_name.get(named) if isinstance(named, str) else _whole(named)
        except (TypeError, ValueError):
            raise ConfigError(
                f"dataset '{self._name}': exclude holds {entry!r}; an entry is (shard name or index, row in that shard)"
            ) from None
        if shard is None or not 0 <= shard < len(self._shards):
            known = ", ".join(repr(shard.name) for shard in self._shards[:4])
            more = ", ..." if len(self._shards) > 4 else ""
            raise ConfigError(f"dataset '{self._name}': exclude names shard {named!r}; its shards are {known}{more}")
        if not 0 <= inside < self._shards[shard].rows:
            raise ConfigError(
                f"dataset '{self._name}': exclude names row {row!r} of shard {self._shards[shard].name!r}, which has "
                f"{self._shards[shard].rows:,} rows, counted from 0"
            )
        return self._start(shard) + inside


def _whole(number: Any) -> int:
    if isinstance(number, (bool, np.bool_)):
        raise TypeError("a bool is no number of a row")
    return operator.index(number)


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.flags.writeable = False
    return array


def _open(dataset: str, found_format: Format, file: files.Found, index_dir: str | None) -> Shard:
    try:
        return found_format.open(file.path, file.name, index_dir)
    except (Unreadable, OSError) as error:
        what, cause = _reason(error)
        raise DataError(
            f"dataset '{dataset}', shard {file.name}: {what}; mend or remove the file ('{file.path}')"
        ) from cause


def _reason(problem: Exception) -> tuple[str, BaseException | None]:
    """(what to say, the original exception) of a failure that concerns a whole file."""
    if isinstance(problem, Unreadable):
        return problem.what, problem.__cause__
    if isinstance(problem, FileNotFoundError):
        return "the file is gone", problem.with_traceback(None)
    if isinstance(problem, OSError):
        return f"the file cannot be read ({describe(problem)})", problem.with_traceback(None)
    return f"its format failed with {describe(problem)}", problem


def _hash(shards: Sequence[Shard]) -> str:
    """Over names, sizes and row counts; over the content where the shard knows it."""
    if len(shards) == 1 and isinstance(shards[0], memory.ListShard):
        return shards[0].digest
    content = hashlib.blake2b(digest_size=16)
    for shard in shards:
        name = shard.name.encode()
        for number in (len(name), shard.size_bytes, shard.rows):
            content.update(number.to_bytes(8, "little"))
        content.update(name)
    return content.hexdigest()

"""JSONL: one JSON object a line, read at any row by the index of `jsonl_index.py`.

A row is what `json.loads` gives for its text, decoded as strict UTF-8. msgspec parses it where it can: what it accepts
it gives as json.loads does (a property test), and what it refuses (NaN, Infinity, 1e999, lone surrogates) goes to
json.loads.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.io.formats import Shard, Unreadable
from zephon.io.index_cache import cached
from zephon.io.jsonl_index import JsonlIndex, index_file, physical_line
from zephon.io.lru import Lru
from zephon.record import Record

_GAP_BYTES: Final = 16 << 10  # rows closer than this are read together: skipping costs more than reading
_SPAN_BYTES: Final = 4 << 20  # and at most this much at once, unless one row is longer
_EXCERPT: Final = 40  # characters of a broken row that its exception keeps on either side
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class JsonlFormat:
    """`fmt="jsonl"`. Files that end in .json are read line by line too, where they are named."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")
    other_suffixes = (".json",)

    def open(self, path: str, name: str, index_dir: str | None) -> Shard:
        """Index the file, or find its index in the cache. See Format.open."""
        opened = _OpenFile(path, index_dir, verify=True)
        _open_files.discard(path)  # what is open there may be an older version of the file
        return JsonlShard(name, opened.index.rows, opened.size_bytes, path, index_dir)


class JsonlShard(msgspec.Struct, frozen=True):
    """A JSONL file. See Shard."""

    name: str
    rows: int
    size_bytes: int
    path: str
    index_dir: str | None

    @property
    def block_rows(self) -> int | None:
        """Single rows are cheap."""
        return None

    def read(self, rows: NDArray[np.int64]) -> list[Record | Unreadable]:
        """See Shard.read."""
        opened = self._opened()
        starts = opened.index.offsets[rows].tolist()
        stops = opened.index.offsets[rows + 1].tolist()
        records: list[Record | Unreadable] = []
        for line in _lines(opened.fd, starts, stops):
            try:
                records.append(_decode(line))
            except MemoryError:
                raise
            except Exception:  # also json.loads' idea of JSON is tried before the row counts as broken
                record = parse(bytes(line))
                if isinstance(record, Unreadable):
                    record.line = physical_line(opened.index, int(rows[len(records)]), opened.fd, read_exactly)
                records.append(record)
        return records

    def _opened(self) -> _OpenFile:
        """The file, opened by this process and unchanged since. Raises Unreadable where it is not what it was."""
        opened = _open_files.get(self.path)
        if opened is None or not opened.is_current():
            opened = _OpenFile(self.path, self.index_dir, verify=False, size_bytes=self.size_bytes)
            _open_files.put(self.path, opened)
        if (opened.size_bytes, opened.index.rows) != (self.size_bytes, self.rows):
            raise _changed(self.size_bytes, opened.size_bytes)
        return opened


class _OpenFile:
    """A descriptor and the index of what it reads. Closed when the last reader lets go of it."""

    __slots__ = ("_stamp", "fd", "index", "size_bytes")

    def __init__(self, path: str, index_dir: str | None, verify: bool, size_bytes: int | None = None) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        found = os.fstat(self.fd)
        self.size_bytes = found.st_size
        self._stamp = _stamp(found)
        if size_bytes is not None and size_bytes != self.size_bytes:
            raise _changed(size_bytes, self.size_bytes)  # before an index is built in vain
        self.index = JsonlIndex.from_cells(cached("jsonl", path, found, self._build, index_dir, verify))
        if not self.is_current():
            raise Unreadable("the file changes while it is being indexed; wait until it is complete")

    def _build(self) -> NDArray[np.int64]:
        return index_file(self.fd, self.size_bytes, read_exactly).to_cells()

    def is_current(self) -> bool:
        """False once the file was written to, deleted, or replaced under its name."""
        return _stamp(os.fstat(self.fd)) == self._stamp

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _stamp(stat: os.stat_result) -> tuple[int, int, bool]:
    return stat.st_size, stat.st_mtime_ns, stat.st_nlink > 0


def _changed(before: int, now: int) -> Unreadable:
    sizes = f"{before:,} bytes then, {now:,} now" if before != now else "same size, other rows"
    return Unreadable(f"the file changed after the dataset was made ({sizes})")


def _max_open_files() -> int:
    """An eighth of the descriptors this process may have; a file takes one, and one for a mapped index."""
    try:
        import resource
    except ImportError:  # Windows
        return 64
    return max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


_open_files: Final[Lru[_OpenFile]] = Lru(_max_open_files)


def _lines(fd: int, starts: list[int], stops: list[int]) -> Iterator[bytes | memoryview]:
    """The bytes of every row, in ascending order of their places; neighbours come from one read."""
    first, num_rows = 0, len(starts)
    for i in range(1, num_rows + 1):
        if i < num_rows and starts[i] - stops[i - 1] <= _GAP_BYTES and stops[i] - starts[first] <= _SPAN_BYTES:
            continue
        base = starts[first]
        read = read_exactly(fd, stops[i - 1] - base, base)
        if i - first == 1:
            yield read
        else:
            span = memoryview(read)
            for j in range(first, i):
                yield span[starts[j] - base : stops[j] - base]
        first = i


def parse(line: bytes) -> Record | Unreadable:
    """The record of one line as json.loads gives it, or why there is none. Never raises for any content."""
    line = line.rstrip(b" \t\r\n")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"invalid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        wrong = line[error.start : error.end]  # not the whole record
        return _caused_by(what, UnicodeDecodeError(error.encoding, wrong, 0, len(wrong), error.reason))
    except json.JSONDecodeError as error:
        error.doc = error.doc[max(0, error.pos - _EXCERPT) : error.pos + _EXCERPT]
        return _caused_by(f"invalid JSON: {error.msg} at column {error.colno}", error)
    except RecursionError as error:
        return _caused_by("invalid JSON: nested too deeply", error)
    except ValueError as error:  # an integer of more digits than Python converts
        return _caused_by(f"invalid JSON: {error}", error)
    if not isinstance(value, dict):
        return Unreadable(f"not an object: the line holds {_json_kind(value)}; a record is a JSON object")
    return value


def _caused_by(what: str, error: Exception) -> Unreadable:
    problem = Unreadable(what)
    problem.__cause__ = error.with_traceback(None)  # a traceback would keep the record alive
    return problem


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


_seek_lock: Final = threading.Lock()


def _seek_and_read(fd: int, length: int, offset: int) -> bytes:
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


_pread: Final = getattr(os, "pread", _seek_and_read)  # Windows has no pread


def read_exactly(fd: int, length: int, offset: int) -> bytes:
    """`length` bytes at `offset`, whatever the file's position. Raises Unreadable where the file ends before that."""
    data: bytes = _pread(fd, length, offset)
    if len(data) == length:
        return data
    parts, got = [data], len(data)
    while got < length:  # one read gives at most 2 GiB
        more = _pread(fd, length - got, offset + got)
        if not more:
            raise Unreadable(f"the file ends at byte {offset + got:,}, {length - got:,} bytes too early")
        parts.append(more)
        got += len(more)
    return b"".join(parts)

"""Keeps what was computed from a file (where its rows start) on disk, so that it is computed once a file.

An entry is a one-dimensional little-endian int64 .npy file: a header of eight cells, then the content.

    cell   0       1         2     3         4      5      6         7
           _MAGIC  _VERSION  size  mtime_ns  inode  built  checksum  number of cells of content

It lies at <folder>/<hash of kind and absolute path>/<hash of size, mtime_ns and inode>.npy, so that machines which
share the folder, but not the data, do not replace each other's entries. It is written aside and renamed: a reader sees
a whole entry or none. Large entries are memory-mapped, so the processes of a machine share their pages. Of many
processes that want the same one, as the ranks of a job do at its start, one builds it and the others wait: a lock file
says so, which the kernel unlocks when its owner dies. Nothing here is needed for correctness: whatever cannot be read,
written or locked is built again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat as stat_module
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int64]

_MAGIC: Final = 0x5A45_5048_4F4E_4958
_VERSION: Final = 1  # raise it when the content of an entry, or how it is computed, changes
_HEADER_CELLS: Final = 8
_MAP_FROM_BYTES: Final = 64 << 10  # smaller entries are read: a mapping costs a descriptor and a page
_SETTLED_NS: Final = 2_000_000_000  # a file younger than this when indexed may change without a new mtime
_STALE_S: Final = 30 * 86_400.0
_MOST_WAIT_S: Final = 600.0  # for another process, which may be stopped

_unsaved: dict[str, Cells] = {}  # where no folder can be written, this process remembers, by the entry's name


def cached(
    kind: str, path: str, stat: os.stat_result, build: Callable[[], Cells], folder: str | None, verify: bool
) -> Cells:
    """The entry of `kind` for the file at `path` (absolute) as `stat` describes it, from the cache or from `build`.

    Returns a read-only int64 array, as `build` made it. `folder` None means the default: `$XDG_CACHE_HOME/zephon`
    or `~/.cache/zephon`, and where that cannot be written a folder of this user under the temporary directory. With
    `verify` the checksum is compared, which reads the whole entry. Raises only what `build` raises.
    """
    stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino & (1 << 63) - 1)
    entry = _entry_name(kind, path, stamp)
    for place in _folders(folder, make=False):
        cells = _load(os.path.join(place, entry), stamp, verify)
        if cells is not None:
            return cells
    if entry in _unsaved:
        return _unsaved[entry]
    with _turn(_folders(folder, make=True), entry) as file:
        if (cells := _load(file, stamp, verify)) is not None:  # another one built it meanwhile
            return cells
        built_ns = time.time_ns()
        cells = build()
        cells.flags.writeable = False
        return _keep(_folders(folder, make=True), entry, stamp, built_ns, cells)


@contextmanager
def _turn(folders: Iterator[str], entry: str) -> Iterator[str]:
    """Waits while another process builds the entry, whose file it gives; not for ever, nor where there are no locks."""
    for place in folders:
        file = os.path.join(place, entry)
        try:
            os.makedirs(os.path.dirname(file), exist_ok=True)
            lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError:
            continue
        try:
            _lock(lock)
            yield file
            with suppress(OSError):
                os.unlink(f"{file}.lock")
        finally:
            _unlock(lock)
        return
    yield ""


def _lock(file: int) -> None:
    """Locks a file, where that can be had."""
    try:
        import fcntl
    except ImportError:
        return
    deadline, pause_s = time.monotonic() + _MOST_WAIT_S, 0.01
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        except OSError:  # a file system without locks
            return


def _unlock(file: int) -> None:
    """Unlocks and closes it: a process that was forked meanwhile has it too, and would keep the lock while it lives."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def _entry_name(kind: str, path: str, stamp: tuple[int, int, int]) -> str:
    of_path = hashlib.blake2b(f"{kind}\0".encode() + os.fsencode(path), digest_size=12).hexdigest()
    of_stamp = hashlib.blake2b(repr(stamp).encode(), digest_size=8).hexdigest()
    return os.path.join(of_path, f"{of_stamp}.npy")


def _folders(chosen: str | None, make: bool) -> Iterator[str]:
    if chosen is not None:
        yield chosen
        return
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(home):  # a user without a home gives "~"
        yield os.path.join(home, "zephon")
    import tempfile

    shared = os.path.join(tempfile.gettempdir(), f"zephon-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")
    if _is_private(shared, make):
        yield shared


def _is_private(folder: str, make: bool) -> bool:
    """Whether the folder exists (or can be made, with `make`) and nobody else can put entries into it."""
    try:
        if make:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return stat_module.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _load(file: str, stamp: tuple[int, int, int], verify: bool) -> Cells | None:
    """The content of an entry that is whole and belongs to this stamp, else None."""
    try:
        cells = _map(file)
    except (OSError, ValueError):
        return None
    if cells is None or len(cells) < _HEADER_CELLS:
        return None
    magic, version, *found, built_ns, checksum, count = cells[:_HEADER_CELLS].tolist()
    content = cells[_HEADER_CELLS:]
    if (magic, version, tuple(found), count) != (_MAGIC, _VERSION, stamp, len(content)):
        return None
    if abs(built_ns - stamp[1]) < _SETTLED_NS or (verify and zlib.crc32(content.data) != checksum):
        return None
    return content


def _map(file: str) -> Cells | None:
    """All cells of a .npy file of int64, mapped or read. Faster than numpy.load, which parses the header as Python."""
    with open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        head = handle.read(128)
        start = 10 + int.from_bytes(head[8:10], "little")
        if head[:8] != b"\x93NUMPY\x01\x00" or b"'descr': '<i8'" not in head or size < start or (size - start) % 8:
            return None
        if size < _MAP_FROM_BYTES:
            return np.frombuffer(head[start:] + handle.read(), "<i8")
        whole = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(whole, "<i8", offset=start)


def _keep(folders: Iterator[str], entry: str, stamp: tuple[int, int, int], built_ns: int, cells: Cells) -> Cells:
    header = np.array([_MAGIC, _VERSION, *stamp, built_ns, zlib.crc32(cells.data), len(cells)], "<i8")
    for place in folders:
        file = os.path.join(place, entry)
        try:
            _write(file, header, cells)
        except OSError:
            continue
        saved = _load(file, stamp, verify=False)
        return cells if saved is None else saved
    _unsaved[entry] = cells
    return cells


def _write(file: str, header: Cells, cells: Cells) -> None:
    import tempfile

    folder = os.path.dirname(file)
    os.makedirs(folder, exist_ok=True)
    handle, aside = tempfile.mkstemp(suffix=".tmp", dir=folder)
    try:
        with open(handle, "wb") as out:
            shape = {"descr": "<i8", "fortran_order": False, "shape": (len(header) + len(cells),)}
            np.lib.format.write_array_header_1_0(out, shape)
            out.write(header.data)
            out.write(cells.astype("<i8", copy=False).data)
        os.replace(aside, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    _drop_stale(folder)


def _drop_stale(folder: str) -> None:
    """Remove what earlier versions of the same file, and writers that were killed, left behind long ago."""
    oldest = time.time() - _STALE_S
    for name in os.listdir(folder):
        file = os.path.join(folder, name)
        with suppress(OSError):
            if os.stat(file).st_mtime < oldest:
                os.unlink(file)

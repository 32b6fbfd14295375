"""The cache of indexes: used where it is right, built again where it is not, and never needed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zephon.io import Dataset, index_cache
from zephon.io.index_cache import cached

CONTENT = np.arange(20_000, dtype=np.int64) ** 2  # large enough to be mapped


class Builder:
    """Counts how often it is asked."""

    def __init__(self, content: np.ndarray = CONTENT) -> None:
        self.content = content
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return self.content.copy()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"x" * 100)
    os.utime(path, ns=(10**18, 10**18))  # old: an index of a file just written is not trusted
    return path


def get(
    source: Path, build: Callable[[], Any], folder: Path | None = None, verify: bool = True, kind: str = "k"
) -> np.ndarray:
    cells = cached(kind, str(source), os.stat(source), build, None if folder is None else str(folder), verify)
    assert cells.dtype == np.int64
    assert not cells.flags.writeable
    return cells


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npy"))


@pytest.mark.parametrize("size", [0, 1, 100, 20_000])
def test_an_entry_is_built_once(source: Path, cache_home: Path, size: int) -> None:
    build = Builder(CONTENT[:size])
    for _ in range(3):
        assert get(source, build).tolist() == CONTENT[:size].tolist()
    assert build.calls == 1
    (entry,) = entries(cache_home)
    assert np.load(entry)[8:].tolist() == CONTENT[:size].tolist()  # a plain .npy file
    assert not list(cache_home.rglob("*.tmp"))


def test_large_entries_are_mapped(source: Path) -> None:
    cells = get(source, Builder())
    with open("/proc/self/maps") as maps:
        assert ".npy" in maps.read()
    del cells


def change_size(source: Path) -> None:
    source.write_bytes(b"x" * 101)
    os.utime(source, ns=(10**18, 10**18))


def change_time(source: Path) -> None:
    os.utime(source, ns=(10**18, 10**18 + 1))


def change_inode(source: Path) -> None:
    other = source.with_name("other")
    other.write_bytes(source.read_bytes())
    os.utime(other, ns=(10**18, 10**18))
    other.rename(source)


@pytest.mark.parametrize("change", [change_size, change_time, change_inode])
def test_a_changed_file_is_indexed_again(source: Path, change: Callable[[Path], None]) -> None:
    get(source, Builder())
    change(source)
    build = Builder(CONTENT[:7])
    assert get(source, build).tolist() == CONTENT[:7].tolist()
    assert build.calls == 1


def test_paths_and_kinds_have_entries_of_their_own(source: Path) -> None:
    get(source, Builder())
    linked = source.with_name("linked")
    os.link(source, linked)
    for other in (Builder(CONTENT[:3]), Builder(CONTENT[:4])):
        path, kind = (linked, "k") if other.content.size == 3 else (source, "other kind")
        assert len(get(path, other, kind=kind)) == other.content.size


def test_a_file_just_written_is_not_trusted(source: Path) -> None:
    # It may be written to again within the same tick of the file system's clock.
    source.write_bytes(b"y" * 100)
    build = Builder()
    get(source, build)
    get(source, build)
    assert build.calls == 2


def cut(entry: Path) -> None:
    os.truncate(entry, entry.stat().st_size - 8)


def empty(entry: Path) -> None:
    os.truncate(entry, 0)


def zero(entry: Path) -> None:
    entry.write_bytes(bytes(entry.stat().st_size))


def other_version(entry: Path) -> None:
    cells = np.load(entry)
    cells[1] += 1
    np.save(entry, cells)


def other_type(entry: Path) -> None:
    np.save(entry, np.load(entry).astype(np.float64))


def text(entry: Path) -> None:
    entry.write_text("not numbers")


def flip(entry: Path) -> None:
    cells = np.load(entry)
    cells[-3] ^= 1 << 40
    np.save(entry, cells)


@pytest.mark.parametrize("damage", [cut, empty, zero, other_version, other_type, text, flip])
@pytest.mark.parametrize("size", [50, 20_000])
def test_a_damaged_entry_is_built_again(
    source: Path, cache_home: Path, size: int, damage: Callable[[Path], None]
) -> None:
    get(source, Builder(CONTENT[:size]))
    (entry,) = entries(cache_home)
    damage(entry)
    build = Builder(CONTENT[:size])
    for _ in range(2):
        assert get(source, build).tolist() == CONTENT[:size].tolist()
    assert build.calls == 1


def test_where_nothing_can_be_written_only_time_is_lost(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(blocked))
    monkeypatch.setattr(index_cache, "_unsaved", {})
    build = Builder()
    for _ in range(3):
        assert get(source, build).tolist() == CONTENT.tolist()
    assert build.calls == 1  # this process remembers it


def test_a_home_that_cannot_be_written_leaves_the_temporary_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    build = Builder()
    get(source, build)
    get(source, build)
    assert build.calls == 1
    (entry,) = entries(tmp_path)
    assert entry.parent.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["open to others", "a link"])
def test_a_temporary_folder_that_others_can_write_is_not_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    shared = tmp_path / f"zephon-{os.getuid()}"
    if how == "a link":
        shared.symlink_to(theirs)
    else:
        shared.mkdir()
        shared.chmod(0o777)
    get(source, Builder())
    assert not entries(tmp_path)


def test_a_folder_can_be_chosen(source: Path, tmp_path: Path, cache_home: Path) -> None:
    chosen = tmp_path / "deep" / "chosen"
    get(source, Builder(), folder=chosen)
    assert len(entries(chosen)) == 1
    assert not cache_home.exists()


def test_of_many_at_once_one_builds(source: Path, cache_home: Path) -> None:
    """The others wait for it, and find what it built."""
    begun, all_there = threading.Event(), threading.Barrier(6)
    calls: list[int] = []
    results: list[bool] = []

    def build() -> np.ndarray:
        calls.append(1)
        begun.set()
        all_there.wait()
        return CONTENT.copy()

    def first() -> None:
        results.append(get(source, build).tolist() == CONTENT.tolist())

    def later() -> None:
        begun.wait()
        all_there.wait()  # what follows finds nothing yet, or just so
        results.append(get(source, build).tolist() == CONTENT.tolist())

    threads = [threading.Thread(target=work) for work in (first, *[later] * 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6
    assert len(calls) == 1
    assert len(entries(cache_home)) == 1
    assert not list(cache_home.rglob("*.tmp"))
    assert not list(cache_home.rglob("*.lock"))


BUILDER = """
import os, sys, time
import numpy as np
from zephon.io.index_cache import cached
path, log, how = sys.argv[1:]
def build():
    with open(log, "a") as file:
        file.write("built\\n")
    if how == "dies":
        print("building", flush=True)
        sys.stdin.read()
    return np.arange(20_000, dtype=np.int64) ** 2
print(int(cached("k", path, os.stat(path), build, None, True).sum()))
"""


def test_who_waits_for_a_process_that_dies_builds_itself(source: Path, cache_home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", BUILDER, str(source), str(log)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "dies"], **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "building\n"
        others = [subprocess.Popen([*command, "builds"], **pipes) for _ in range(3)]
        waiting = [wait_for_lock(other.pid) for other in others]
        first.kill()
        found = [int(other.communicate(timeout=60)[0]) for other in others]
    assert all(waiting)
    assert found == [int(CONTENT.sum())] * 3
    assert log.read_text() == "built\n" * 2


def wait_for_lock(pid: int) -> bool:
    """Whether a process came as far as having the lock file open."""
    pause = threading.Event()
    for _ in range(2000):
        with contextlib.suppress(OSError):
            if any(os.readlink(link).endswith(".lock") for link in Path(f"/proc/{pid}/fd").iterdir()):
                return True
        pause.wait(0.01)
    return False


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(source: Path, cache_home: Path) -> None:
    """As a DataLoader's worker is, by another thread: it has the lock file open for as long as it lives."""
    read, write = os.pipe()
    children: list[int] = []

    def build() -> np.ndarray:
        children.append(os.fork())
        if not children[0]:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        raise ValueError("no rows")

    try:
        with pytest.raises(ValueError, match="no rows"):
            get(source, build)
        (file,) = cache_home.rglob("*.lock")
        with file.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(children[0], 0)


def test_nobody_waits_for_ever(source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that builds may be stopped."""
    monkeypatch.setattr(index_cache, "_MOST_WAIT_S", 0.1)
    inner = Builder()

    def build() -> np.ndarray:
        return get(source, inner)  # as another process would, while this one has the lock

    assert get(source, build).tolist() == CONTENT.tolist()
    assert inner.calls == 1


def test_long_dead_entries_are_removed(source: Path, cache_home: Path) -> None:
    get(source, Builder())
    (old,) = entries(cache_home)
    leftover = old.with_name("killed.tmp")
    leftover.write_text("")
    recent = old.with_name("recent.npy")
    recent.write_text("")
    for file in (old, leftover):
        os.utime(file, (1, 1))
    change_time(source)
    get(source, Builder())
    assert not old.exists()
    assert not leftover.exists()
    assert recent.exists()


def test_a_failed_write_leaves_nothing(source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.os, "replace", full)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(cache_home / "absent" / "deep"))
    assert get(source, Builder()).tolist() == CONTENT.tolist()
    assert not [path for path in cache_home.rglob("*") if path.is_file()]


def test_a_dataset_notices_a_damaged_index(tmp_path: Path, cache_home: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(20_000)))
    os.utime(path, (1, 1))
    first = Dataset.from_path("web", path)
    assert first.read([12_345]) == [{"id": 12_345}]
    (entry,) = entries(cache_home)
    cells = np.load(entry)
    cells[8 + 1 + 12_345] += 7  # the offset of a row; the entry is mapped by what `first` has open
    np.save(entry, cells)
    second = Dataset.from_path("web", path)
    assert second.read(range(20_000)) == [{"id": i} for i in range(20_000)]
    assert first.read([12_345]) == [{"id": 12_345}]


def test_a_dataset_keeps_its_index_where_it_is_told(tmp_path: Path, cache_home: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 0}\n')
    made = Dataset.from_path("web", tmp_path / "x.jsonl", index_dir=tmp_path / "index")
    assert made.read([0]) == [{"id": 0}]
    assert len(entries(tmp_path / "index")) == 1
    assert not cache_home.exists()

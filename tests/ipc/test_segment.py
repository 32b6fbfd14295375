"""Segments: reserved at once, without a lasting name, and with what to do where there is no room."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest

from zephon.errors import ConfigError
from zephon.ipc import segment
from zephon.ipc.segment import Segment, reap, start_time

SHM = Path("/dev/shm")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 1 << 20])
def test_a_segment_is_zeroed_and_whole_pages(size: int) -> None:
    made = Segment.create(size)
    try:
        assert made.size == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        assert made.map[:] == bytes(made.size)
        assert os.fstat(made.fd).st_size == made.size
        assert os.fstat(made.fd).st_blocks * 512 >= made.size  # reserved, not only promised
    finally:
        made.close()


def test_another_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    made = Segment.create(100)
    other = Segment(os.dup(made.fd), made.size)
    made.map[7] = 42
    assert other.map[7] == 42
    other.close()
    made.close()


def test_no_name_and_no_descriptor_is_left() -> None:
    before, names = open_descriptors(), set(os.listdir(SHM))
    made = Segment.create(1 << 16)
    assert set(os.listdir(SHM)) == names
    made.close()
    assert open_descriptors() == before


def test_close_leaves_a_mapping_that_is_still_looked_at() -> None:
    made = Segment.create(4096)
    view = memoryview(made.map)
    view[0] = 9
    made.close()
    assert view[0] == 9
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.fd)
    view.release()
    made.close()  # again, and now the mapping too


def test_the_descriptor_is_inherited_only_where_asked() -> None:
    made = Segment.create(4096)
    assert not os.get_inheritable(made.fd)
    made.close()


@pytest.mark.parametrize("problem", ["full", "read-only", "no posix_ipc"])
def test_a_memfd_where_dev_shm_cannot_serve(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    if problem == "full":
        calls: list[int] = []
        real = os.posix_fallocate

        def full_once(fd: int, start: int, size: int) -> None:
            calls.append(fd)
            if len(calls) == 1:
                raise OSError(errno.ENOSPC, "no space left")
            real(fd, start, size)

        monkeypatch.setattr(os, "posix_fallocate", full_once)
    elif problem == "read-only":
        monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
    else:
        monkeypatch.setitem(sys.modules, "posix_ipc", None)
    before, names = open_descriptors(), set(os.listdir(SHM))
    made = Segment.create(8192)
    assert "memfd" in os.readlink(f"/proc/self/fd/{made.fd}")
    assert made.map[:] == bytes(8192)
    made.close()
    assert open_descriptors() == before
    assert set(os.listdir(SHM)) == names


def test_no_room_anywhere_is_one_sized_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before, names = open_descriptors(), set(os.listdir(SHM))
    with pytest.raises(ConfigError, match=r"no room for 12 MiB .* ring_bytes or parallelism"):
        Segment.create(12 << 20)
    assert open_descriptors() == before
    assert set(os.listdir(SHM)) == names


def test_a_name_that_someone_else_removed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container with the same /dev/shm cannot see that the owner lives."""
    real = posix_ipc.SharedMemory

    def made_and_reaped(name: str, *args: object, **kwargs: object) -> object:
        memory = real(name, *args, **kwargs)
        posix_ipc.unlink_shared_memory(name)
        return memory

    monkeypatch.setattr(posix_ipc, "SharedMemory", made_and_reaped)
    made = Segment.create(4096)
    made.map[0] = 1
    made.close()


def test_start_time_names_a_process_for_good() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) > 0
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert start_time(dead.pid) == 0


@pytest.fixture
def names() -> list[Path]:
    """Names in /dev/shm that the test makes."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = f"{os.getpid()}-{start_time(os.getpid())}"
    return [
        SHM / f"zephon-{dead.pid}-12345-abcd",  # its owner is gone
        SHM / f"zephon-{os.getpid()}-1-abcd",  # its owner's number belongs to another process now
        SHM / f"zephon-{mine}-abcd",  # its owner lives
        SHM / f"zephon-{os.getpid()}-abc-def",  # not ours: no start time
        SHM / f"zephon-cache-of-{os.getpid()}",
        SHM / f"zephon-{os.getpid()}",
        SHM / f"other-{dead.pid}-1-abcd",
    ]


def test_reap_removes_what_the_dead_left_and_nothing_else(names: list[Path]) -> None:
    for path in names:
        path.touch()
    try:
        removed = reap()
        assert {names[0].name, names[1].name} <= set(removed)
        assert [path.exists() for path in names] == [False, False, True, True, True, True, True]
        assert not set(reap()) & {path.name for path in names}
    finally:
        for path in names:
            path.unlink(missing_ok=True)


def test_reap_without_dev_shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(segment, "_SHM", tmp_path / "missing")
    assert reap() == []

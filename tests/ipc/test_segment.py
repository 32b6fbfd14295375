"""Segments: reserved at once, without a name, and what happens where there is no room."""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from zephon import limits
from zephon.errors import ConfigError
from zephon.ipc import segment
from zephon.ipc.segment import Segment

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


def no_room(calls: int) -> Callable[[int, int, int], None]:
    """A posix_fallocate that fails so many times."""
    real, left = os.posix_fallocate, [calls]

    def reserve(fd: int, start: int, size: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "no space left")
        real(fd, start, size)

    return reserve


def refuse(*args: object, **kwargs: object) -> int:
    raise OSError(errno.EROFS, "read-only file system")


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR])
def test_posix_shared_memory_where_unnamed_files_are_refused(refusal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in /dev/shm, reserved, not inherited, and its name is gone. A memfd is not asked for."""
    real, refused = os.open, []

    def without_tmpfile(path: str, flags: int, *args: int, **settings: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(refusal, os.strerror(refusal))
        return real(path, flags, *args, **settings)

    monkeypatch.setattr(os, "open", without_tmpfile)
    monkeypatch.setattr(os, "memfd_create", refuse)
    before, names = open_descriptors(), set(os.listdir(SHM))
    made = Segment.create(10_000)
    try:
        assert refused == [str(SHM)]
        assert os.fstat(made.fd).st_dev == SHM.stat().st_dev
        assert os.fstat(made.fd).st_blocks * 512 >= made.size == 12_288
        assert os.fstat(made.fd).st_mode & 0o777 == 0o600
        assert os.readlink(f"/proc/self/fd/{made.fd}").startswith(f"{SHM}/zephon-{os.getpid()}-")
        assert not os.get_inheritable(made.fd)
        assert set(os.listdir(SHM)) == names
        made.map[:3] = b"abc"
        assert os.pread(made.fd, 3, 0) == b"abc"
    finally:
        made.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("problem", ["full", "missing", "read-only"])
def test_a_memfd_where_dev_shm_cannot_serve(problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if problem == "full":
        monkeypatch.setattr(os, "posix_fallocate", no_room(1))
    elif problem == "missing":
        monkeypatch.setattr(segment, "_SHM", str(tmp_path / "missing"))
    else:
        monkeypatch.setattr(segment, "_unnamed", refuse)
    before = open_descriptors()
    made = Segment.create(8192)
    assert "memfd" in os.readlink(f"/proc/self/fd/{made.fd}")
    assert made.map[:] == bytes(8192)
    made.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_limit_of_the_process_is_not_blamed_on_dev_shm(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few descriptors, too little address space: the error says which limit it was."""

    def refused(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    before = open_descriptors()
    monkeypatch.setattr(mmap, "mmap", refused)
    if number == errno.EMFILE:
        monkeypatch.setattr(os, "open", refused)
        monkeypatch.setattr(os, "memfd_create", refused)
    wanted = "open files here.*ulimit -n" if number == errno.EMFILE else "or lower ring_bytes"
    with pytest.raises(ConfigError, match=rf"shared memory of 12 MiB hit a limit .*{wanted}"):
        Segment.create(12 << 20)
    monkeypatch.undo()
    assert open_descriptors() == before


def test_no_room_anywhere_is_one_sized_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room(2))
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"no room for 12 MiB .* ring_bytes, parallelism or the size"):
        Segment.create(12 << 20)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("limit", "fits"), [("max", True), (str(300 << 20), True), (str(111 << 20), False), (str(1 << 20), False)]
)
def test_a_memory_limit_is_checked_before_anything_is_reserved(
    limit: str, fits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What can be given back (the page cache) does not count: 100 MiB are in use."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.stat").write_text(f"anon {60 << 20}\nfile {900 << 20}\nshmem {40 << 20}\n")
    monkeypatch.setattr(limits, "_CGROUP", str(tmp_path))
    if fits:
        Segment.create(12 << 20).close()
    else:
        left = max(0, int(limit) - (100 << 20)) >> 20
        with pytest.raises(ConfigError, match=f"no room for 12 MiB .* limit leaves {left} MiB"):
            Segment.create(12 << 20)


def test_a_process_killed_at_any_moment_leaves_no_name() -> None:
    """There is never a name, not even for a moment."""
    names = set(os.listdir(SHM))
    pid = os.fork()
    if pid == 0:
        while True:
            Segment.create(1 << 20).close()
    try:
        for _ in range(200):
            assert not [name for name in set(os.listdir(SHM)) - names if name.startswith("zephon")]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_descriptor_from_a_socket_is_not_passed_to_programs() -> None:
    made = Segment.create(4096)
    received = os.dup(made.fd)
    os.set_inheritable(received, True)  # as the kernel hands it over
    other = Segment(received, made.size)
    assert not os.get_inheritable(other.fd)
    other.close()
    made.close()

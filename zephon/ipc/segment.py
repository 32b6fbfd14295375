"""Shared memory without a lasting name: made, reserved page by page, unlinked, passed on by inheritance.

A segment comes from /dev/shm through posix_ipc. Every page is reserved at once (posix_fallocate), so too little room
is an error now and not a SIGBUS later. The name lives only between its making and the next line, and says who made
it (pid and start time), so `reap` can remove what a process that was killed right there has left. Where /dev/shm is
missing or too small, a memfd takes its place: it counts against the memory limit of the cgroup alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

from zephon.errors import ConfigError

_PREFIX = "zephon-"
_SHM = Path("/dev/shm")
_WRITE_BITS = 0o600


class Segment:
    """Shared memory of `size` bytes with one mapping in this process. `fd` may be inherited by children."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.map = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment, zeroed. Raises ConfigError where neither /dev/shm nor memory has room for it."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = _named(size)
        if fd is None:
            fd = _memfd(size)
        return cls(fd, size)

    def close(self) -> None:
        """Unmaps where no view is left, and closes the descriptor."""
        with contextlib.suppress(BufferError):
            self.map.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _named(size: int) -> int | None:
    """A reserved and unlinked segment of /dev/shm, or None where there is no room or no /dev/shm."""
    try:
        import posix_ipc
    except ImportError:
        return None
    name = f"/{_PREFIX}{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(4)}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=_WRITE_BITS, size=0)
    except (OSError, posix_ipc.Error, ValueError):
        return None
    try:
        os.posix_fallocate(memory.fd, 0, size)
    except OSError:
        os.close(memory.fd)
        return None
    finally:
        with contextlib.suppress(posix_ipc.ExistentialError):  # a container that cannot see this process reaped it
            posix_ipc.unlink_shared_memory(name)
    return int(memory.fd)


def _memfd(size: int) -> int:
    fd = os.memfd_create("zephon", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        reason = "out of memory" if error.errno in (errno.ENOSPC, errno.ENOMEM) else str(error)
        raise ConfigError(
            f"no room for {size / 2**20:,.0f} MiB of shared memory, neither in /dev/shm nor in memory ({reason}); "
            "lower ring_bytes or parallelism, or give the container more memory"
        ) from error
    return fd


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where it does not exist. (pid, start) names it for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def reap() -> list[str]:
    """Removes names that killed processes left in /dev/shm; returns them. Names of live owners are never touched."""
    removed = []
    for path in _SHM.glob(f"{_PREFIX}*") if _SHM.is_dir() else ():
        fields = path.name[len(_PREFIX) :].split("-")
        if len(fields) != 3 or not all(field.isdecimal() for field in fields[:2]):
            continue  # not one of ours
        if start_time(int(fields[0])) != int(fields[1]):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed

"""Shared memory without a name: reserved page by page, and passed on by inheritance or over a socket.

There are three ways to such memory, and the first that works is taken:

1. an unnamed file of /dev/shm (O_TMPFILE): it never has a name, so nothing is left behind, whoever is killed when;
2. where its file system, or the kernel, knows no O_TMPFILE: POSIX shared memory by `posix_ipc`, whose name is removed
   right after it was made. A SIGKILL between these two calls leaves a name, so it is second;
3. where /dev/shm is missing, read-only or too small: a memfd.

Every page is reserved at once (posix_fallocate), so too little room is an error now and not a SIGBUS later. All count
against the memory limit of the container, where an overrun is no error but a kill: that is checked first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

from zephon.errors import ConfigError

_SHM = "/dev/shm"
_CGROUP = "/sys/fs/cgroup"
_OWNER_ONLY = 0o600
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # from the file system, or from an old kernel


class Segment:
    """Shared memory of `size` bytes with one mapping in this process. `fd` is for forked children, and for sockets."""

    def __init__(self, fd: int, size: int, writable: bool = True) -> None:
        self.fd, self.size = fd, size
        os.set_inheritable(fd, False)  # one that came over a socket would be passed to programs
        self.map = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)

    @classmethod
    def create(cls, size: int, unreserved: int = 0) -> Segment:
        """A new segment, zeroed. Raises ConfigError where neither /dev/shm nor memory has room for it.

        Its last `unreserved` bytes (whole pages) have no memory yet: who writes there must reserve it first.
        """
        reserved = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        left = room()
        if left is not None and reserved > left:
            raise _too_large(reserved, f"the container's memory limit leaves {max(0, left) / 2**20:,.0f} MiB")
        fd = _reserved(_unnamed, reserved)
        if fd is None:
            fd = _reserved(_memfd, reserved)
        if fd is None:
            raise _too_large(reserved, "neither /dev/shm nor memory has it")
        if unreserved:
            os.truncate(fd, reserved + unreserved)
        return cls(fd, reserved + unreserved)

    def close(self) -> None:
        """Unmaps where no view is left, and closes the descriptor."""
        with contextlib.suppress(BufferError):
            self.map.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)


def _unnamed() -> int:
    try:
        return os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _OWNER_ONLY)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return _unlinked()
        raise


def _unlinked() -> int:
    import posix_ipc

    name = f"/zephon-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=_OWNER_ONLY)
    except posix_ipc.Error as error:  # one of the kinds that are no OSError
        raise OSError(str(error)) from error
    memory.unlink()
    return int(memory.fd)


def _memfd() -> int:
    return os.memfd_create("zephon", os.MFD_CLOEXEC)


def _reserved(make: Callable[[], int], size: int) -> int | None:
    """A descriptor with `size` bytes behind it; None where they cannot be had this way."""
    try:
        fd = make()
    except OSError:
        return None
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        return None
    return fd


def room() -> int | None:
    """Bytes that the container's memory limit leaves (cgroup v2); None where there is no limit to be seen."""
    try:
        limit = int(_read("memory.max"))
        used = dict(line.split() for line in _read("memory.stat").splitlines())
        return limit - int(used["anon"]) - int(used["shmem"])
    except (OSError, ValueError, KeyError):  # no such file, or "max"
        return None


def _read(name: str) -> str:
    with open(os.path.join(_CGROUP, name), encoding="ascii") as file:
        return file.read()


def _too_large(size: int, why: str) -> ConfigError:
    return ConfigError(
        f"no room for {size / 2**20:,.0f} MiB of shared memory: {why}; lower ring_bytes, parallelism or the size of a "
        "batch, or give the container more memory"
    )

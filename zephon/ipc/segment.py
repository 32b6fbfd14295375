"""Shared memory without a name: reserved page by page, and passed on by inheritance or over a socket.

There are three ways to such memory, and the first that works is taken:

1. an unnamed file of /dev/shm (O_TMPFILE): it never has a name, so nothing is left behind, whoever is killed when;
2. where its file system, or the kernel, knows no O_TMPFILE: POSIX shared memory by `posix_ipc`, whose name is removed
   right after it was made. A SIGKILL between these two calls leaves a name (which `names.py` removes), so it is second;
3. where /dev/shm is missing, read-only or too small: a memfd.

Every page is reserved at once (posix_fallocate), so too little room is an error now and not a SIGBUS later. All count
against the memory limit of the container, where an overrun is no error but a kill: that is checked first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator

from zephon.errors import ConfigError
from zephon.limits import limit_error, memory_left

_SHM = "/dev/shm"
_OWNER_ONLY = 0o600
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # from the file system, or from an old kernel


class Segment:
    """Shared memory of `size` bytes with one mapping in this process. `fd` is for forked children, and for sockets."""

    def __init__(self, fd: int, size: int, writable: bool = True) -> None:
        self.fd, self.size = fd, size
        os.set_inheritable(fd, False)  # one that came over a socket would be passed to programs
        try:
            self.map = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except OSError as error:  # address space, or descriptors: a mapping keeps one of its own
            os.close(fd)
            raise _refused(error, size) from error

    @classmethod
    def create(cls, size: int, unreserved: int = 0) -> Segment:
        """A new segment, zeroed. Raises ConfigError where there is no room for it, or a limit of this process is hit.

        Its last `unreserved` bytes (whole pages) have no memory yet: who writes there must reserve it first.
        """
        reserved = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        left = memory_left()
        if left is not None and reserved > left:
            raise _too_large(reserved, f"the container's memory limit leaves {max(0, left) / 2**20:,.0f} MiB")
        try:
            fd = _reserved(_unnamed, reserved)
        except OSError:
            try:
                fd = _reserved(_memfd, reserved)
            except OSError as error:
                raise _refused(error, reserved) from error
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
        return _tmpfile()
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return _unlinked()
        raise


def _tmpfile() -> int:
    return os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _OWNER_ONLY)


def _unlinked() -> int:
    try:
        import posix_ipc
    except ImportError as error:
        raise OSError(str(error)) from error

    from zephon.ipc import names

    names.reap(_SHM)
    try:
        memory = posix_ipc.SharedMemory(f"/{names.new()}", posix_ipc.O_CREX, mode=_OWNER_ONLY)
    except posix_ipc.Error as error:  # one of the kinds that are no OSError
        raise OSError(str(error)) from error
    memory.unlink()
    return int(memory.fd)


def _memfd() -> int:
    return os.memfd_create("zephon", os.MFD_CLOEXEC)


def ways() -> Iterator[tuple[str, OSError | None]]:
    """Each way to shared memory by its name, and why it does not work here (None: it does)."""
    named = "named and unlinked (posix_ipc)"
    for name, make in (("unnamed files (O_TMPFILE)", _tmpfile), (named, _unlinked), ("memfd", _memfd)):
        try:
            os.close(_reserved(make, mmap.PAGESIZE))
            yield name, None
        except OSError as error:
            yield name, error


def _reserved(make: Callable[[], int], size: int) -> int:
    """A descriptor with `size` bytes behind it. Raises OSError where they cannot be had this way."""
    fd = make()
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _refused(error: OSError, size: int) -> ConfigError:
    """The error where the system refuses a segment: for want of descriptors or address space, or of room."""
    known = limit_error(error, f"shared memory of {size / 2**20:,.0f} MiB")
    if known is None or error.errno == errno.ENOSPC:
        return _too_large(size, "neither /dev/shm nor memory has it")
    return known


def _too_large(size: int, why: str) -> ConfigError:
    return ConfigError(
        f"no room for {size / 2**20:,.0f} MiB of shared memory: {why}; lower ring_bytes, parallelism or the size of a "
        "batch, or give the container more memory"
    )

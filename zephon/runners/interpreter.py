"""A further interpreter, set up as this one is: its flags, its environment, where it finds modules, standard files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterable

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_GLIBC = "GLIBC_TUNABLES"
# For the C library. Arrays of some hundred KB come from the heap, which keeps what it had: else each of them is mapped
# afresh and given back, and the page faults cost ten times what is done with it. And copies of so much go past the
# caches: a batch's slot is not read soon, and the C library's own limit for that may be hundreds of MB on a part of a
# large machine. `rep movsb` would be taken first, and is slow on some of AMD's. Other C libraries ignore all of it.
_TUNABLES = {
    "glibc.malloc.mmap_threshold": 32 << 20,  # the most that it takes
    "glibc.malloc.trim_threshold": 64 << 20,
    "glibc.cpu.x86_non_temporal_threshold": 1 << 19,
    "glibc.cpu.x86_rep_movsb_threshold": 1 << 40,
}
# The path comes in a file: an argument may have 128 KiB.
_CODE = """
import sys
with open({fd}, "rb") as file:
    sys.path[:] = file.read().decode("utf-8", "surrogateescape").split("\\0")
"""


def arguments(path_fd: int, code: str) -> list[str]:
    """The command line that runs code with the module search path in a file of `write_path`."""
    return [sys.executable, *_flags(), "-c", _CODE.format(fd=path_fd) + code]


def write_path(path: Iterable[object]) -> int:
    """A descriptor of an unnamed file with a module search path, read from its start. What imports pass over is not."""
    fd = apart(os.memfd_create("zephon-path", os.MFD_CLOEXEC))
    with open(fd, "wb", closefd=False) as file:
        file.write("\0".join(entry for entry in path if isinstance(entry, str)).encode("utf-8", "surrogateescape"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def environment() -> dict[str, str]:
    """The environment of the tree: one thread for each numeric library, one hash seed for all processes.

    And a C library that is set up for large arrays; what the user says of it (GLIBC_TUNABLES) counts.
    """
    ignored = "PYTHON" if sys.flags.ignore_environment else "\0"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    threads = dict.fromkeys(_ONE_THREAD, "1")
    tunables = ":".join([*(f"{name}={value:#x}" for name, value in _TUNABLES.items()), inherited.get(_GLIBC, "")])
    own = {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0", _GLIBC: tunables.rstrip(":")}
    return {**inherited, **threads, **own}


def _flags() -> list[str]:
    """The flags of this interpreter. -I and -E would hide the hash seed as well: see `environment`."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    flags = [flag for flag in flags if flag not in ("-I", "-E")]
    if sys.flags.isolated:
        flags += ["-s", "-P"]
    for name, value in sys._xoptions.items():
        option = name if value is True else f"{name}={value}"
        flags += [] if option in flags else ["-X", option]
    return flags


def apart(fd: int) -> int:
    """The descriptor, above those of standard input, output and error, which may be closed: others write to these."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def socket_pair(kind: socket.SocketKind) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that block, apart from standard input, output and error."""
    ends = socket.socketpair(socket.AF_UNIX, kind)
    first, second = (socket.socket(fileno=apart(end.detach())) for end in ends)
    for end in (first, second):
        end.settimeout(None)  # socket.setdefaulttimeout is the user's
    return first, second


def open_standard_files() -> None:
    """Gives standard input, output and error to whom they are closed: what is opened next would take their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def tell(text: str) -> None:
    """Writes a line to standard error, if there is one, whatever user code made of `sys.stderr`."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))

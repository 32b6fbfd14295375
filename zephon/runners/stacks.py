"""The Python stack of a worker process, or of the engine, taken from outside, also while C code holds its interpreter.

The process lets faulthandler answer a signal by writing the stack to an unnamed file, in the signal handler itself. A
file, not a pipe: a full pipe would stop it. The handler restarts system calls, runs no Python code, and dumps
the main thread alone, as the frames of others may change meanwhile.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from itertools import takewhile

MOST_BYTES = 16_384
_OWN = (("worker.py", "serve"), ("engine_process.py", "run"))  # the loops below which all is of interest


def signal_number() -> int:
    """The signal that asks for a stack: a real-time one, which hardly any code uses for itself."""
    return int(signal.SIGRTMAX) - 3


def make_file() -> int:
    """A descriptor for the stacks of one process. Every write goes to the end."""
    fd = os.memfd_create("zephon-stack", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def listen(fd: int) -> None:
    """From now on this process answers. Called by its main thread."""
    faulthandler.register(signal_number(), file=fd, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number()})  # the trainer may block it: all inherit that


def clear(fd: int) -> None:
    """Forgets what was written, before a stack is asked for."""
    os.ftruncate(fd, 0)


def read(fd: int) -> str:
    """What was written so far, the most recent call first, down to where the process's own code begins."""
    text = os.pread(fd, MOST_BYTES, 0).decode("utf-8", "replace")
    return "".join(takewhile(lambda line: not _is_own(line), text.splitlines(keepends=True)))


def _is_own(line: str) -> bool:
    return any(file in line and line.rstrip().endswith(f" in {function}") for file, function in _OWN)

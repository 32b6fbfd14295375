"""Ends what user code started below a launcher and left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable

PR_SET_CHILD_SUBREAPER = 36
MOST_S = 1.0  # for processes to die; more only where the kernel holds one
TRACKER_S = 0.5  # for a resource tracker to unlink what its processes left, once these are dead
_TRACKER = b"resource_tracker import main"  # of multiprocessing, and of libraries that have their own


def adopt_orphans() -> None:
    """What loses its parent below this process becomes its child, whatever session it is in."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def collect_orphans(children: Iterable[int]) -> None:
    """Takes the status of dead processes that this one adopted; `children` are those of its own."""
    own = set(children)
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
            os.waitpid(dead.si_pid, 0)


def end_session(session: int) -> None:
    """Ends all processes of a session but this one; where it is this one's own, what left the session too.

    A resource tracker ends by itself when its processes are dead, and unlinks what they left: it gets time for that.
    """
    own = session == os.getpid()
    if own:
        _let_go_of_tracker()

    def living() -> set[int]:
        found = _members(session) | _children() if own else _members(session)
        return {pid for pid in found if not _ends(pid, 0)}

    _kill(lambda: {pid for pid in living() if not _is_tracker(pid)})
    end_s = time.monotonic() + TRACKER_S
    for pid in living():
        _ends(pid, end_s - time.monotonic())
    _kill(living)


def _kill(find: Callable[[], set[int]]) -> None:
    """Kills what `find` finds until it finds nothing: what a process started is found when that one is dead."""
    end_s = time.monotonic() + MOST_S
    while found := find():
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            _ends(pid, end_s - time.monotonic())
        if time.monotonic() > end_s:
            return


def _ends(pid: int, timeout_s: float) -> bool:
    """Whether a process is dead, all its threads, within a time; one that nobody collected is dead too."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(pidfd)


def _members(session: int) -> set[int]:
    """The processes of a session but this one."""
    found = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == session and pid != os.getpid():
                found.add(pid)
    return found


def _children() -> set[int]:
    """The children of this process, also those in sessions of their own."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
            found |= set(map(int, file.read().split()))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return _TRACKER in file.read()
    return False


def _let_go_of_tracker() -> None:
    """A tracker that this process uses itself, for what a module made when it was imported, waits for it as well."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    with contextlib.suppress(Exception):
        os.close(module._resource_tracker._fd)  # type: ignore[union-attr]

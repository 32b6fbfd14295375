"""Names in /dev/shm, for the moment that one exists (`segment.py`): whose they are; those of dead owners are removed.

A name says who made it: pid, the time when that process started, and its pid namespace, as a pid means nothing without
it: containers can share /dev/shm and not their pids. A name is removed only if its owner surely is no more.
"""

from __future__ import annotations

import contextlib
import os
import re

_NAME = re.compile(r"zephon-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")


def new() -> str:
    """A name that no one else has or had."""
    pid = os.getpid()
    return f"zephon-{pid}-{_started(pid) or 0}-{_namespace()}-{os.urandom(8).hex()}"


def reap(folder: str) -> None:
    """Removes the names of dead owners. What cannot be judged, or removed, stays."""
    own = _namespace()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            found = _NAME.fullmatch(name)
            if found and own and int(found[3]) == own and _is_dead(int(found[1]), int(found[2])):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _is_dead(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start time is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    now = _started(pid)
    return bool(now and started and now != started)


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _namespace() -> int:
    """The number of this process's pid namespace; 0 where that cannot be seen."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0

"""What the system lets this process have: memory and CPUs of its cgroups, descriptors, processes, address space.

A cgroup is asked with all those above it, as each of them may hold a limit: version 2, and version 1 where that is
mounted. A file that is missing or says "max" is no limit.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from zephon.errors import ConfigError, describe

_CGROUP = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"
_NO_LIMIT = 1 << 60  # version 1 writes a number of this size where there is no limit


def memory_left() -> int | None:
    """Bytes that the memory limits of the container leave; None where there is none to be seen.

    What can be given back (the page cache) does not count as used.
    """
    found = [limit - used for limit, used in _memory()]
    return min(found) if found else None


def memory_limit() -> int | None:
    """The least memory limit of the container, in bytes; None where there is none to be seen."""
    return min((limit for limit, _ in _memory()), default=None)


def cpu_limit() -> float | None:
    """CPUs' worth of time that the container may use; None where there is no limit to be seen."""
    found = []
    for folder in _groups("cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            found.append(quota / period)
    return min(found, default=None)


def process_limit() -> tuple[int, int] | None:
    """(most, current) processes and threads of the container, where it limits them; None where it does not."""
    found = []
    for folder in _groups("pids"):
        most = _number(folder, "pids.max")
        if most is not None:
            found.append((most, _number(folder, "pids.current") or 0))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """(limit, used) of each memory cgroup with a limit."""
    for folder in _groups("memory"):
        limit = _number(folder, "memory.max") or _number(folder, "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        rows = (line.split() for line in (_read(folder, "memory.stat") or "").splitlines())
        stat = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
        anonymous = stat.get("anon", stat.get("total_rss", stat.get("rss", 0)))
        yield limit, anonymous + stat.get("total_shmem", stat.get("shmem", 0))


def _groups(controller: str) -> Iterator[str]:
    """The folders of this process's cgroup and of those above it, for a controller."""
    first = os.path.join(_CGROUP, controller)
    root, own = (first, controller) if os.path.isdir(first) else (_CGROUP, "")
    path = _own_path(own)
    while True:
        yield os.path.join(root, path) if path else root
        if not path:
            return
        path = os.path.dirname(path)


def _own_path(controller: str) -> str:
    """Where this process is in the hierarchy of a controller of version 1, or of version 2 (an empty name)."""
    for line in (_read("", _OWN) or "").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path.strip("/")
    return ""


def _quota(folder: str) -> tuple[int, int]:
    """(microseconds of CPU, in so many microseconds); zeros where there is no limit."""
    if (both := _read(folder, "cpu.max")) is not None:
        quota, _, period = both.strip().partition(" ")
        return (int(quota), int(period)) if quota.isdecimal() and period.isdecimal() else (0, 0)
    return _number(folder, "cpu.cfs_quota_us") or 0, _number(folder, "cpu.cfs_period_us") or 0


def _number(folder: str, name: str) -> int | None:
    text = (_read(folder, name) or "").strip()
    return int(text) if text.isdecimal() else None


def _read(folder: str, name: str) -> str | None:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def resource_limit(name: str) -> tuple[int | None, int | None]:
    """(soft, hard) limit of a resource, for example "NOFILE"; None for what is not limited, or not known here."""
    try:
        import resource

        found = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    except (ImportError, AttributeError, ValueError, OSError):
        return None, None
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in found)
    return soft, hard


def raise_descriptors(wanted: int) -> None:
    """Lets this process have `wanted` open files, as far as its hard limit goes."""
    soft, hard = resource_limit("NOFILE")
    if soft is not None and soft < wanted:
        import resource

        most = wanted if hard is None else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.RLIM_INFINITY if hard is None else hard))


def num_descriptors() -> int:
    """Open files of this process."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:  # not one more is possible
        return resource_limit("NOFILE")[0] or 0


def limit_error(error: BaseException, who: str) -> ConfigError | None:
    """The error where a limit of the system stopped `who`, with the limit and the remedy; None where it was not one."""
    remedy = _remedy(error)
    return None if remedy is None else ConfigError(f"{who} hit a limit of the system: {describe(error)}: {remedy}")


def _remedy(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if number == errno.EMFILE:
        return (
            f"a process may have {_shown('NOFILE')} open files here; raise that (ulimit -n), lower parallelism, "
            "or keep fewer batches"
        )
    if number == errno.ENFILE:
        return "the machine has no more open files; raise fs.file-max, or end other programs"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return (
            f"this user may have {_shown('NPROC')} processes and threads here, and a container may have a limit of its "
            "own (pids.max); raise that (ulimit -u), or lower parallelism"
        )
    if number == errno.ENOMEM:
        return memory_remedy()
    if number == errno.ENOSPC:
        return "no room is left; free some, or lower ring_bytes, parallelism or the size of a batch"
    if number == errno.EFBIG and resource_limit("FSIZE")[0] is not None:
        return (
            f"a file, and shared memory is one, may have {_shown('FSIZE')} bytes here (RLIMIT_FSIZE); raise that "
            "(ulimit -f), or lower ring_bytes, parallelism or the size of a batch"
        )
    return None


def memory_remedy() -> str:
    """What to do where a process can have no more memory."""
    limited = resource_limit("AS")[0] is not None
    why = f"the address space of a process is {_shown('AS')} bytes here; raise that (ulimit -v)" if limited else ""
    lower = "or lower ring_bytes, parallelism, prefetch_batches or the size of a batch"
    return f"{why or 'give the container more memory'}, {lower}"


def import_error(error: Exception, module: str, who: str, extra: str) -> ConfigError:
    """The error where `who` cannot import a library: it is not there, or it is and its import failed.

    extra: what pip installs it with.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return ConfigError(f"{who} needs {module}, which is not installed: pip install {extra!r}")
    remedy = memory_remedy() if _wants_memory(error) else "mend that installation"
    return ConfigError(f"{who} needs {module}, which is installed, but its import failed: {describe(error)}; {remedy}")


def _wants_memory(error: Exception) -> bool:
    """Whether an import failed for want of memory; the loader of shared libraries says so in words only."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("failed to map segment", "annot allocate memory")
    )


def _shown(name: str) -> str:
    soft, _ = resource_limit(name)
    return "unlimited" if soft is None else f"{soft:,}"

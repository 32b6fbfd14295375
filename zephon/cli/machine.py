"""What `zephon doctor` looks at: one function a part of the machine, each yields what it found and the remedy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from zephon.arena import MOST_SLOTS, engine_descriptors, trainer_descriptors
from zephon.errors import describe
from zephon.identity import affinity_cpus, available_cpus, local_ranks
from zephon.ipc.segment import Segment, ways
from zephon.limits import cpu_limit, memory_left, memory_limit, process_limit, resource_limit
from zephon.options import ExecutionOptions
from zephon.session import DEFAULT_RUNNER

Status = Literal["ok", "warning", "failure"]
SHM = "/dev/shm"
LINUX = sys.platform == "linux"
LEAST_PYTHON = (3, 11)
LITTLE_SHM = 64 << 20
LITTLE_MEMORY = 512 << 20
SLOW_START_S = 5.0
START = "a real start"
START_WORKERS = 2
START_ROWS, START_BATCH = 64, 4
REQUIRED = ("numpy", "msgspec", "cloudpickle")
OPTIONAL = {
    "torch": "for output='torch': pip install 'zephon[torch]'",
    "tokenizers": "for .tokenize with a tokenizer.json: pip install 'zephon[text]'",
    "pyarrow": "for Parquet: pip install 'zephon[parquet]'",
}
ON_UNIX = {
    "posix_ipc": "needed where /dev/shm refuses unnamed files: pip install posix_ipc",
    "uvloop": "the engine's loop is slower without it: pip install uvloop",
}


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    remedy: str | None = None


def look() -> Iterator[Check]:
    """All checks, the real start last."""
    yield from _system()
    yield from _cpus()
    yield from _memory()
    if LINUX:
        yield from _shared_memory()
        yield from _descriptors()
        yield from _processes()
        yield from _kernel()
    yield from _packages()
    if LINUX:
        yield _start()


def _judged(name: str, found: str, remedy: str, good: bool, bad: Status = "warning") -> Check:
    return Check(name, "ok", found) if good else Check(name, bad, found, remedy)


def _system() -> Iterator[Check]:
    version = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    yield _judged("Python", version, "use Python 3.11 or newer", sys.version_info >= LEAST_PYTHON, "failure")
    place = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield _judged("platform", place, "worker processes need Linux; threads work here, more slowly", LINUX)
    why = "as on every Linux" if LINUX else "as this is no Linux"
    yield Check("default runner", "ok", f"{DEFAULT_RUNNER}, {why}")


def _cpus() -> Iterator[Check]:
    cpus, allowed, limit = os.cpu_count() or 1, affinity_cpus(), cpu_limit()
    cgroup = "no limit by a cgroup" if limit is None else f"the cgroup allows the time of {limit:g}"
    shared = f", for {ranks} ranks (LOCAL_WORLD_SIZE)" if (ranks := local_ranks()) > 1 else ""
    workers = f"parallelism='auto' means {available_cpus()} workers a stage"
    found = f"{allowed} of {cpus} by affinity, {cgroup}{shared}; {workers}"
    remedy = "workers and trainer share one CPU: give the job more (cpus of the container, taskset, cpus-per-task)"
    yield _judged("CPUs", found, remedy, available_cpus() > 1)


def _memory() -> Iterator[Check]:
    limit, left, free = memory_limit(), memory_left(), _available()
    cgroup = f"{_size(max(0, left or 0))} of the cgroup's {_size(limit)} left" if limit else "no limit by a cgroup"
    found = [cgroup] if free is None else [f"{_size(free)} available", cgroup]
    least = min((size for size in (left, free) if size is not None), default=LITTLE_MEMORY)
    remedy = "end other programs, or give the container more; else lower parallelism, ring_bytes, prefetch_batches"
    yield _judged("memory", ", ".join(found), remedy, least >= LITTLE_MEMORY)


def _available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _shared_memory() -> Iterator[Check]:
    try:
        disk = os.statvfs(SHM)
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        found, enough = f"{_size(free)} free of {_size(size)}", free >= LITTLE_SHM
    except OSError as error:
        found, enough = f"{error.strerror}", False
    remedy = "memfd takes its place, so this may stay so; to use it: docker run --shm-size=1g, or a Memory volume there"
    yield _judged("/dev/shm", found, remedy, enough)
    problems = list(ways())
    for name, problem in problems:
        yield _judged(name, "works" if problem is None else str(problem), _ANOTHER_WAY, problem is None)
    wanted = ExecutionOptions().ring_bytes * available_cpus()
    try:
        Segment.create(wanted).close()
        yield Check("shared memory", "ok", f"{_size(wanted)} could be reserved")
    except Exception as error:
        yield Check("shared memory", "failure", describe(error), "give /dev/shm or the container more memory")


_ANOTHER_WAY = "nothing to do where another way works: see the row 'shared memory'"


def _descriptors() -> Iterator[Check]:
    soft, hard = resource_limit("NOFILE")
    engine = engine_descriptors(available_cpus(), MOST_SLOTS)
    here = trainer_descriptors(MOST_SLOTS)
    found = f"{_number(soft)}, and up to {_number(hard)} if asked for; {max(here, engine)} are enough"
    good = (soft is None or soft >= here) and (hard is None or hard >= engine)
    yield _judged("open files (NOFILE)", found, "raise it: ulimit -n 4096, or LimitNOFILE= of the service", good)


def _processes() -> Iterator[Check]:
    wanted, (soft, _), group = available_cpus() + 2, resource_limit("NPROC"), process_limit()
    left = None if group is None else group[0] - group[1]
    cgroup = "no limit by a cgroup" if group is None else f"the cgroup has {group[1]:,} of {group[0]:,}"
    found = f"the user may have {_number(soft)} with threads, {cgroup}; a stage takes {wanted}"
    good = (soft is None or soft >= 4 * wanted) and (left is None or left >= wanted)
    yield _judged("processes (NPROC)", found, "raise it: ulimit -u, or pids.max of the container", good)
    space = resource_limit("AS")[0]
    remedy = "mappings count, used or not: raise it (ulimit -v unlimited), and limit memory by a cgroup instead"
    yield _judged("address space (AS)", "unlimited" if space is None else _size(space), remedy, space is None)


def _kernel() -> Iterator[Check]:
    def pidfd() -> int:
        return os.pidfd_open(os.getpid())

    for name, make in (("pidfd_open", pidfd), ("eventfd", lambda: os.eventfd(0))):
        try:
            os.close(make())
            yield Check(name, "ok", "works")
        except (OSError, AttributeError) as error:
            remedy = "it needs Linux 5.3 or newer, and a sandbox that allows it; until then use runner='threads'"
            yield Check(name, "failure", describe(error), remedy)


def _packages() -> Iterator[Check]:
    yield Check("zephon", "ok", f"{_version('zephon') or 'not installed, used from its folder'}")
    for name in REQUIRED:
        version = _version(name)
        yield _judged(name, version or "missing", f"pip install {name}", version is not None, "failure")
    for name, remedy in (ON_UNIX if os.name == "posix" else {}).items():
        version = _version(name)
        yield _judged(name, version or "missing", remedy, version is not None)
    for name, remedy in OPTIONAL.items():
        version = _version(name)
        yield Check(name, "ok", version or f"not installed; {remedy}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _start() -> Check:
    """A small pipeline with worker processes, from its start to its end."""
    import zephon as zp

    rows = zp.Dataset.from_list("doctor", [{"id": i} for i in range(START_ROWS)])
    source = zp.StaticMixture([rows], seed=0, shuffle="none", chunk_size=8)
    settings: dict[str, Any] = {"canonical_replicas": 1, "dp_degree": 1, "dp_group_id": 0, "task_records": 4}
    began, first_s, found = time.perf_counter(), 0.0, []
    try:
        pipeline = zp.Pipeline(source).map(_double).batch(START_BATCH)
        with pipeline.options(runner="process", parallelism=START_WORKERS, **settings) as running:
            for batch in running:
                first_s = first_s or time.perf_counter() - began
                found += batch["id"].tolist()
    except Exception as error:
        return Check(START, "failure", describe(error), "see the rows above; until then use runner='threads'")
    if found != [2 * i for i in range(START_ROWS)]:
        return Check(START, "failure", f"other content came out: {found}", "please report this")
    took = (
        f"{START_WORKERS} workers, first batch after {first_s:.2f} s, "
        f"{len(found) // START_BATCH} batches and the end after {time.perf_counter() - began:.2f} s"
    )
    slow = "is the machine overloaded, or are the packages on a slow network file system?"
    return _judged(START, took, slow, first_s < SLOW_START_S)


def _double(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": 2 * record["id"]}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"

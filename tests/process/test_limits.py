"""L8, L9: limits of the system. It works within them, or one error before the first batch says what to do."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.helpers import ROOT, Script, ids, line, slow
from tests.process.test_small_shm import needs_mount

pytestmark = pytest.mark.law("L9")

JOB = """
import os, signal, sys
import numpy as np
import zephon as zp
SIZE = int(sys.argv[-1])
def big(record):
    if record["id"] == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"id": record["id"], "x": np.full(SIZE, record["id"] % 100, np.uint8), "worker": os.getpid()}
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(160)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(big).batch(2)
workers = {"parallelism": int(sys.argv[1])} if sys.argv[1] != "auto" else {}
found, kept, seen = [], [], set()
try:
    with pipeline.options(runner="process", canonical_replicas=2, task_records=2, **workers) as pipeline:
        for batch in pipeline:
            found += batch["id"].tolist()
            kept.append(batch)
            seen |= set(batch["worker"].tolist())
except zp.errors.ZephonError as error:
    print(f"{type(error).__name__} after {len(found)}: {error}")
    sys.exit(7)
assert sorted(found) == list(range(160))
assert all((batch["x"] == batch["id"][:, None] % 100).all() for batch in kept)
print(len(seen), "done")
"""


def run(before: str, workers: int | str, size: int, folder: Path, dies: int = -1) -> tuple[int, str]:
    """(exit status, output) of the job, in a shell that ran `before`: all batches kept, so all slots in use."""
    path = folder / "job.py"
    path.write_text(JOB.replace("DIES", str(dies)))
    command = f"{before} {sys.executable} {path} {workers} {size}"
    code = f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"
    status, out, err = Script(code, env={"OPENBLAS_NUM_THREADS": "1"}).end(60)
    assert "Traceback" not in err, err
    return status, out


@pytest.mark.parametrize(
    ("before", "workers"),
    [
        ("ulimit -n 256;", 20),
        slow("ulimit -n 128;", 4),
        ("ulimit -Sn 64;", 40),  # the launcher may have more than the trainer: it takes what the hard limit allows
    ],
)
def test_few_descriptors_are_enough(before: str, workers: int, tmp_path: Path) -> None:
    """Every batch is kept: there are fewer slots then, and further batches are copies."""
    status, out = run(before, workers, 50_000, tmp_path)
    assert (status, out.split()[-1]) == (0, "done")


@pytest.mark.parametrize(("number", "workers"), [(256, 64), (128, 40), (34, 1)])
def test_too_few_descriptors_are_one_error_with_sizes(number: int, workers: int, tmp_path: Path) -> None:
    status, out = run(f"ulimit -n {number};", workers, 10, tmp_path)
    assert status == 7, out
    wanted = rf"ConfigError after 0: {workers} workers and 5 batches in flight need \d+ open files .*but {number} there"
    assert re.match(wanted, out), out
    assert "lower parallelism, prefetch_batches or to_device's depth, or raise the limit (ulimit -n)" in out


@pytest.mark.parametrize("blocks", [0, 100])
def test_a_limit_on_the_size_of_files_is_named(blocks: int, tmp_path: Path) -> None:
    """Shared memory is a file too."""
    status, out = run(f"ulimit -f {blocks};", 2, 10, tmp_path)
    assert status == 7, out
    assert f"may have {blocks * 1024:,} bytes here (RLIMIT_FSIZE); raise that (ulimit -f)" in out


def test_a_trainer_that_runs_out_of_descriptors_later() -> None:
    """A new slot's descriptor cannot come along: an error that says so. The state is good."""

    def sized(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "x": np.zeros(1000 << (record["id"] // 8), np.uint8)}

    found: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with line(96, sized, batch=1, prefetch_batches=1) as pipeline:
        batches = iter(pipeline)
        found += ids(itertools.islice(batches, 8))
        lowest = os.open("/dev/null", os.O_RDONLY)  # the next number that would be given out
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(
                zp.errors.ConfigError, match=rf"hit a limit .* may have {lowest} open files .*ulimit -n"
            ):
                found.extend(int(batch["id"][0]) for batch in batches)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        state = pipeline.state_dict()
    assert 8 <= len(found) < 96
    with line(96, sized, batch=1) as again:
        again.load_state_dict(state)
        assert found + ids(again) == list(range(96))


USERS = itertools.count(100_000 + os.getpid())  # a new one each time: what ends still counts for its user


def as_user(processes: int) -> str:
    """A shell's beginning that makes it a user with no other processes, who may have so many."""
    caps = "+dac_override,+dac_read_search"  # to read these files nevertheless
    become = f"setpriv --reuid {next(USERS)} --clear-groups --inh-caps {caps} --ambient-caps {caps}"
    return f"{become} bash -c 'ulimit -u {processes}; exec \"$@\"' -"


def may_be_another_user() -> bool:
    """Whether a process can run as a user who has no other processes, and still read these files."""
    if shutil.which("setpriv") is None or os.getuid() != 0:
        return False
    command = f"{as_user(1)} {sys.executable} -c ''"
    return subprocess.run(["bash", "-c", command], capture_output=True, timeout=20, check=False).returncode == 0


needs_user = pytest.mark.skipif(not may_be_another_user(), reason="no process as another user here")


@needs_user
@pytest.mark.parametrize("processes", [1, 2, slow(3), 4, slow(5)])
def test_too_few_processes_are_one_error(processes: int, tmp_path: Path) -> None:
    """The trainer, the launcher, the engine and three workers need six: wherever it fails, it says so."""
    status, out = run(as_user(processes), 3, 10, tmp_path)
    assert status == 7, out
    assert re.match(r"ConfigError after \d+: the (start of the )?launcher .*hit a limit of the system", out), out
    assert f"this user may have {processes} processes and threads here" in out
    assert "raise that (ulimit -u), or lower parallelism" in out


@needs_user
def test_exactly_enough_processes(tmp_path: Path) -> None:
    status, out = run(as_user(6), 3, 10, tmp_path)
    assert (status, out.split()[-1]) == (0, "done"), out


@needs_user
def test_a_thread_too_many_under_runner_threads(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("DIES", "-1").replace('runner="process"', 'runner="threads"'))
    command = f"{as_user(1)} {sys.executable} {path} 2 10"
    code = f"import os; os.execvp('bash', ['bash', '-c', {command!r}])"
    status, out, err = Script(code, env={"OPENBLAS_NUM_THREADS": "1"}).end(60)
    assert status == 7, out + err
    assert out.startswith("ConfigError after 0: the start of runner 'threads' hit a limit of the system: RuntimeError")
    assert "this user may have 1 processes and threads here" in out


# The launcher's forks fail from the fourth on: engine and two workers are there, no replacement is.
NO_FORK = """
import errno, os
real, left = os.fork, [3]
def fork():
    left[0] -= 1
    if left[0] < 0:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
"""


@pytest.mark.law("L8")
def test_a_replacement_that_cannot_be_forked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    status, out = run(f"PYTHONPATH={tmp_path}:{ROOT}", 2, 10, tmp_path, dies=150)
    assert status == 7, out
    assert re.search(r"ConfigError after \d+: the launcher hit a limit of the system: BlockingIOError", out), out


def test_a_small_address_space(tmp_path: Path) -> None:
    """Batches of 120 MB in processes that may have 300: the engine cannot, and says so."""
    status, out = run("ulimit -v 300000;", 2, 60_000_000, tmp_path)
    assert status == 7, out
    assert re.match(r"(ConfigError|OperatorError) after 0: ", out), out
    assert "MemoryError" in out or "Cannot allocate memory" in out
    assert "address space of a process is 307,200,000 bytes here; raise that (ulimit -v)" in out


@pytest.mark.slow
def test_an_address_space_that_is_enough(tmp_path: Path) -> None:
    status, out = run("ulimit -v 600000;", 2, 100_000, tmp_path)
    assert (status, out.split()[-1]) == (0, "done")


def in_container(folder: Path, **files: str) -> str:
    """A shell's beginning that sees a made-up cgroup of version 2."""
    group = folder / "cgroup"
    group.mkdir()
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text)
    return f"unshare -m sh -c 'mount --bind {group} /sys/fs/cgroup && exec \"$@\"' -"


@needs_mount
@pytest.mark.parametrize(("cpus", "workers"), [("100000 100000", 1), ("max 100000", None)])
def test_default_parallelism_follows_the_cgroup(cpus: str, workers: int | None, tmp_path: Path) -> None:
    status, out = run(in_container(tmp_path, cpu__max=f"{cpus}\n"), "auto", 10, tmp_path)
    wanted = workers or len(os.sched_getaffinity(0))
    assert (status, out.split()) == (0, [str(wanted), "done"])


@needs_mount
@pytest.mark.parametrize("left_kib", [5 << 10, 400])
def test_a_memory_limit_that_leaves_little(left_kib: int, tmp_path: Path) -> None:
    """Rings shrink to fit; where not even the smallest do, it is one sized error."""
    used = 495 << 20
    before = in_container(tmp_path, memory__max=f"{used + (left_kib << 10)}\n", memory__stat=f"anon {used}\nshmem 0\n")
    status, out = run(before, 2, 10, tmp_path)
    if left_kib > 1024:
        assert (status, out.split()) == (0, ["2", "done"])
    else:
        assert status == 7, out
        wanted = (
            "ConfigError after 0: no room for 1 MiB of shared memory: the container's memory limit leaves 0 MiB; low"
        )
        assert out.startswith(wanted), out


def test_no_signal_but_an_error_where_dev_shm_fills_up_later(tmp_path: Path) -> None:
    """A write into memory that is only promised would be SIGBUS: the trainer would die of a signal."""
    filling = "import errno, os\nreal = os.posix_fallocate\ncalls = []\n"
    filling += "def reserve(fd, start, size):\n    calls.append(size)\n    if size > 3 << 20 and len(calls) > 1:\n"
    filling += "        raise OSError(errno.ENOSPC, 'no space left')\n    return real(fd, start, size)\n"
    (tmp_path / "sitecustomize.py").write_text(filling + "os.posix_fallocate = reserve\n")
    status, out = run(f"PYTHONPATH={tmp_path}:{ROOT}", 2, 4_000_000, tmp_path)
    assert status == 7, out
    assert status != -signal.SIGBUS
    assert "no room for" in out
    assert "neither /dev/shm nor memory has it" in out

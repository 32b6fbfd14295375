"""L9: little /dev/shm, or none, is noticed before the first batch: it works, or there is one error with sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.helpers import ROOT, Script, slow

pytestmark = pytest.mark.law("L9")


def may_mount() -> bool:
    """Whether this user may have a /dev/shm of its own for one process."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


needs_mount = pytest.mark.skipif(not may_mount(), reason="no private mounts for this user")

JOB = """
import os, sys
import numpy as np
import zephon as zp
def run(size):
    def big(record):
        return {"id": record["id"], "x": np.full(size, record["id"], np.uint8), "text": "x" * 1000}
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(40)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(big).batch(2)
    found = []
    for batch in pipeline.options(runner="process", parallelism=4, canonical_replicas=2):
        assert (batch["x"] == batch["id"][:, None].astype(np.uint8)).all()
        found += batch["id"].tolist()
    assert sorted(found) == list(range(40))
try:
    for size in map(int, sys.argv[1:]):
        run(size)
except zp.errors.ZephonError as error:
    print(error)
    sys.exit(7)
print("done")
"""
TMPFS = "mount -t tmpfs -o {} tmpfs /dev/shm"
MOUNTS = {
    "8 MB": TMPFS.format("size=8m"),
    "64 MB": TMPFS.format("size=64m"),
    "full": TMPFS.format("size=24m") + " && head -c 23M /dev/zero > /dev/shm/full",
    "read-only": TMPFS.format("ro"),
    # a /dev without it
    "missing": "mkdir {0}/dev && mount -t tmpfs tmpfs {0}/dev && cp -a /dev/null /dev/zero /dev/urandom {0}/dev && "
    "mount --move {0}/dev /dev && [ ! -e /dev/shm ]",
}


@needs_mount
@pytest.mark.parametrize("mount", ["8 MB", slow("64 MB"), "full", slow("read-only"), "missing"])
def test_a_small_full_read_only_or_missing_dev_shm(mount: str, tmp_path: Path) -> None:
    """Batches of 2 KB, then of 6 MB: they work, with memory of another kind where there is no room."""
    path = tmp_path / "job.py"
    path.write_text(JOB)
    command = f"{MOUNTS[mount].format(tmp_path)} && exec {sys.executable} {path} 1000 3000000"
    code = f"import os; os.execvp('unshare', ['unshare', '-m', 'sh', '-c', {command!r}])"
    status, out, err = Script(code).end(60)
    assert (status, out.strip(), err) == (0, "done", "")


# Reservations of so many bytes and more fail, in all processes.
NO_MEMORY = """
import errno, os
real = os.posix_fallocate
def full(fd, start, size):
    if size >= LIMIT:
        raise OSError(errno.ENOSPC, "no space left")
    return real(fd, start, size)
os.posix_fallocate = full
"""


@pytest.mark.parametrize(("limit", "wanted"), [(0, 17), (20 << 20, 29)])
def test_no_room_at_all_is_one_sized_error(limit: int, wanted: int, tmp_path: Path) -> None:
    """For the rings before the first batch; for a batch in its place. The trainer lives on, nothing is left."""
    (tmp_path / "sitecustomize.py").write_text(NO_MEMORY.replace("LIMIT", str(limit)))
    script = Script(JOB, 12_000_000, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    status, out, err = script.end()
    assert (status, err) == (7, "")
    assert f"no room for {wanted} MiB of shared memory" in out
    assert "lower ring_bytes, parallelism or the size of a batch" in out

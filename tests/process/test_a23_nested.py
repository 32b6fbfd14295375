"""Case A23 and forks: a loader inside of a pool's worker, a pool inside of an operator, children of the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import Full
from tests.process.helpers import Script, children, digests, ids, kill, launcher, line, run_script, slow

POOL = """
import multiprocessing, os, sys, threading
import zephon as zp
class Pair(tuple):
    pass
def double(record):
    return {**record, "y": 2 * record["id"], "pair": Pair([1])}
def load(seed):
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(60)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=seed)).map(double).batch(4)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running:
        found = [int(y) for batch in running for y in batch["y"] if type(batch["pair"][0]) is Pair]
        if sys.argv[1] == "wait":
            next(iter(running))
            print("loaded", flush=True)
            threading.Event().wait(60)
    assert multiprocessing.current_process().daemon
    return sorted(found)
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        for found in pool.map(load, [1, 2], chunksize=1):
            assert found == list(range(0, 120, 2))
    print("done")
"""


@pytest.mark.parametrize("method", ["fork", slow("forkserver"), "spawn"])
def test_two_loaders_inside_the_daemonic_workers_of_a_pool(method: str, tmp_path: Any) -> None:
    path = tmp_path / "job.py"
    path.write_text(POOL)
    status, out, err = run_script("", argv=[str(path), "run", method])
    assert (status, out.strip(), err) == (0, "done", "")


@pytest.mark.parametrize("method", [slow("fork"), "forkserver", slow("spawn")])
def test_nothing_is_left_when_the_outer_pool_dies(method: str, tmp_path: Any) -> None:
    """Killed, with all its workers, in the middle of their loaders."""
    path = tmp_path / "job.py"
    path.write_text(POOL)
    script = Script("", argv=[str(path), "wait", method])
    assert [script.readline(), script.readline()] == ["loaded", "loaded"]
    for pid, command in script.processes().items():
        if "launcher" not in command:
            kill(pid)
    script.process.communicate()
    script.nothing_left()


class Pooled(zp.Operator):
    """Has a pool of its own in every worker."""

    def setup(self) -> None:
        self.pool = multiprocessing.get_context("fork").Pool(2)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.pool.apply(abs, (-record["id"],))}


def test_an_operator_with_a_pool_of_its_own() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(24)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(Pooled()).batch(4)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running:
        assert ids(running) == list(range(24))
    assert not children(os.getpid())


class Ending(zp.Operator):
    """Starts processes in several ways, which would run for long, and terminates them."""

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        ends = [program.wait(10)]
        for method in ("fork", "spawn"):
            child = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join(10)
            ends.append(child.exitcode if child.exitcode is not None else 0)
        return {"id": record["id"], "ends": np.array(ends)}


def test_processes_that_an_operator_starts_can_be_terminated() -> None:
    """Its own process holds SIGTERM off; those that it starts do not."""
    pipeline = zp.Pipeline(zp.StaticMixture([zp.Dataset.from_list("toy", [{"id": 1}])])).apply(Ending()).batch(1)
    with pipeline.options(runner="process", parallelism=1, canonical_replicas=1) as running:
        assert next(iter(running))["ends"].tolist() == [[-signal.SIGTERM] * 3]


def forked(work: Any) -> int:
    """Runs `work` in a forked child, which then ends as an interpreter does: (exit status)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(10)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_of_the_trainer_is_harmless() -> None:
    """The child drops, closes or uses what it inherited: the trainer does not notice."""
    reference = digests(line(120, Full(9), runner="inline"))
    pipeline = line(120, Full(9), prefetch_batches=1)
    iterator = iter(pipeline)
    kept = [next(iterator)]
    holder = {"iterator": iterator, "batches": [next(iterator)]}
    kept.append(holder["batches"][0])  # type: ignore[index]
    found = digests(kept)

    def use() -> None:
        with pytest.raises(zp.errors.Closed, match="forked"):
            list(iterator)

    def metrics() -> None:
        assert isinstance(pipeline.metrics(), dict)

    def collect() -> None:
        kept.clear()
        holder.clear()
        del globals()["_unused"]

    globals()["_unused"] = 1
    for work in (pipeline.close, metrics, use, collect):
        assert forked(work) == 0, work
        found += digests(islice(iterator, 2))
    found += digests(iterator)
    pipeline.close()
    assert found == reference
    assert kept[0]["x"][0].tolist() == [0] * 9


def test_a_fork_that_ends_as_an_interpreter_does() -> None:
    """At exit the child runs what is left to be closed, and leaves the tree of its parent alone."""
    code = """
import os, sys
import zephon as zp
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(400)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).batch(4)
iterator = iter(pipeline.options(runner="process", parallelism=2, canonical_replicas=1, prefetch_batches=1))
found = [next(iterator)]
pid = os.fork()
if pid == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
found += list(iterator)
assert [int(i) for batch in found for i in batch["id"]] == list(range(400))
"""
    status, _, err = run_script(code)
    assert (status, err) == (0, "")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_closing_is_quick_while_a_forked_child_lives() -> None:
    """The child has copies of all sockets."""
    pipeline = line(400)
    iterator = iter(pipeline)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        began, boss = time.monotonic(), launcher()
        pipeline.close()
        assert time.monotonic() - began < 1.5
        assert boss not in children(os.getpid())
    finally:
        kill(pid)
        os.waitpid(pid, 0)


def test_a_subprocess_of_the_trainer_inherits_nothing() -> None:
    """Sockets and segments are not passed to programs that the trainer starts."""
    code = "import os; print(len(os.listdir('/proc/self/fd')))"
    command = [sys.executable, "-c", code]
    before = subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False)
    with line(400) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        inside = subprocess.run(command, capture_output=True, text=True, check=True, close_fds=False)
    assert inside.stdout == before.stdout

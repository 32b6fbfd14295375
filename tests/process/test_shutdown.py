"""L8: whoever ends a job in whatever way, all of it is gone in under 2 s, and Python has nothing to complain about.

Every script runs in Python's development mode, where an object that was not closed is a warning.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from itertools import islice
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Full, burn
from tests.process.helpers import (
    Script,
    children,
    ids,
    is_clean,
    launcher,
    line,
    lives,
    open_descriptors,
    slow,
    wait_until,
)

pytestmark = pytest.mark.law("L8")

MOST_S = 2.0
START = """
import gc, json, os, signal, sys, threading, time
import zephon as zp
def work(record):
    return {**record, "sum": sum(range(2000)), "pad": "x" * 1000}
def made(runner="process"):
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(100_000)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, shuffle="none")).map(work).batch(4)
    return pipeline.options(runner=runner, parallelism=2, canonical_replicas=2, task_records=4)
def ready():
    print("ready", flush=True)
pipeline = made()
"""
ENDS = {
    "close": ("next(iter(pipeline)); ready(); pipeline.close()", 0),
    "with": ("with pipeline:\n  for batch in pipeline:\n    break\n  ready()", 0),
    "break": ("for batch in pipeline:\n  ready()\n  break", 0),
    "an exception in the loop": ("for batch in pipeline:\n  ready()\n  raise ValueError('mine')", 1),
    "an exception in with": ("with pipeline:\n  for batch in pipeline:\n    ready()\n    raise ValueError('mine')", 1),
    "garbage": (
        "live = iter(pipeline); next(live); me = [live, pipeline]; me.append(me)\nready(); del live, pipeline, me",
        0,
    ),
    "collected": (
        "live = iter(pipeline); next(live); me = [live, pipeline]; me.append(me)\nready(); del live, pipeline, me\n"
        "gc.collect()\nwith open(f'/proc/self/task/{os.getpid()}/children') as file:\n  assert not file.read().strip()",
        0,
    ),
    "a live iterator": ("live = iter(pipeline); next(live); ready()", 0),
    "two live pipelines": ("other = made(); pair = zip(pipeline, other)\nnext(pair); ready()", 0),
    "two, one closed": (
        "other = made(); live = iter(pipeline); next(live); next(iter(other))\nready(); other.close(); next(live)",
        0,
    ),
    "a generator around it": (
        "def around():\n  with pipeline:\n    yield from pipeline\nlive = around(); next(live); ready()",
        0,
    ),
    "a thread that started it and ended": (
        "live = iter(pipeline)\nthread = threading.Thread(target=next, args=[live]); thread.start(); thread.join()\n"
        "for _ in range(300): next(live)\nready()",
        0,
    ),
    "sys.exit in the loop": ("for batch in pipeline:\n  ready()\n  sys.exit(4)", 4),
    "an end while it starts": (
        "live = iter(pipeline)\nthreading.Thread(target=next, args=[live], daemon=True).start()\nready()",
        0,
    ),
}


def timed(script: Script, number: int = 0, group: bool = False) -> tuple[float, int, str, str]:
    """Waits for "ready", sends a signal, if any: (seconds to the end, status, output, errors), nothing left behind."""
    assert script.readline() == "ready"
    began = time.monotonic()
    if number:
        (os.killpg if group else os.kill)(script.pid, number)
    script.process.wait(30)
    took = time.monotonic() - began
    return took, *script.end()


def develop(code: str) -> Script:
    return Script(START + code, env={"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "default"})


FEWER = {"with", "break", "an exception in with", "collected", "two, one closed"}  # as others are, but for a little


@pytest.mark.parametrize("way", [slow(way) if way in FEWER else way for way in ENDS])
def test_a_script_ends(way: str) -> None:
    code, wanted = ENDS[way]
    took, status, _, err = timed(develop(code))
    assert status == wanted, err
    assert took < MOST_S
    if wanted == 1:
        assert err.count("Traceback") == 1
        assert err.endswith("ValueError: mine\n")
        err = err.replace("Traceback", "")
        is_clean(err)
    else:
        assert err == ""


STATE = """
def save(*_):
    state = pipeline.state_dict()
    print(json.dumps(sum(lane["samples"] for lane in state["lanes"].values())), flush=True)
    sys.exit(0)
taken = 0
for batch in pipeline:
    taken += batch.num_samples
    if taken == 40:
        ready()
"""


@pytest.mark.parametrize("group", [False, True], ids=["trainer", "group"])
def test_sigterm_without_a_handler(group: bool) -> None:
    took, status, _, err = timed(develop(STATE), signal.SIGTERM, group)
    assert (status, err) == (-signal.SIGTERM, "")
    assert took < MOST_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True], ids=["trainer", "group"])
def test_a_handler_may_still_save_a_state(number: int, group: bool) -> None:
    """Inside of the handler itself, wherever the trainer is just then."""
    code = STATE.replace("taken = 0", f"signal.signal({int(number)}, save)\ntaken = 0")
    took, status, out, err = timed(develop(code), number, group)
    assert (status, err) == (0, "")
    assert took < MOST_S
    assert int(json.loads(out.splitlines()[-1])) >= 40


def test_sigint_to_the_trainer_alone() -> None:
    took, status, _, err = timed(develop(STATE), signal.SIGINT)
    assert status == -signal.SIGINT
    assert took < MOST_S
    assert err.count("KeyboardInterrupt") == 1
    is_clean(err.replace("Traceback", "", 1))


def test_signals_to_the_processes_below_change_nothing() -> None:
    """SIGINT and SIGTERM, as a terminal or a scheduler sends them to all; the trainer holds them off."""
    with line(400, burn, prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 2))
        tree = [launcher(), *children(launcher())]
        for pid in tree:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
        found += ids(iterator)
    assert found == list(range(400))
    assert len(tree) == 4
    wait_until(lambda: not any(map(lives, tree)), 5)


def test_a_start_from_a_thread_that_ends() -> None:
    """The tree belongs to the trainer, not to the thread that started it; and so it is with a worker's replacement."""
    descriptors = open_descriptors()
    pipeline = line(400, burn, prefetch_batches=1)
    iterator = iter(pipeline)
    found: list[int] = []

    def begin() -> None:
        found.extend(ids(islice(iterator, 2)))

    for _ in range(2):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    tree = [launcher(), *children(launcher())]
    os.kill(tree[-1], signal.SIGKILL)
    found += ids(iterator)
    assert found == list(range(400))
    pipeline.close()
    assert not any(map(lives, tree))
    assert open_descriptors() <= descriptors


def test_two_live_pipelines_end_apart() -> None:
    """Each has its own tree; the end of one, by any way, is not the end of the other."""
    descriptors, threads = open_descriptors(), threading.active_count()
    one, two = line(400, burn, prefetch_batches=1), line(400, burn, prefetch_batches=1)
    first, second = iter(one), iter(two)
    found = ids(islice(first, 2)) + ids(islice(second, 2))
    trees = {pid: children(pid) for pid in children(os.getpid()) if len(children(pid)) == 3}
    assert len(trees) == 2
    del first, one
    gc.collect()
    wait_until(lambda: sum(map(lives, trees)) == 1, 2)
    assert found == [*range(8), *range(8)]
    assert ids(second) == list(range(8, 400))
    two.close()
    assert not any(lives(pid) for boss, tree in trees.items() for pid in (boss, *tree))
    del second, two
    assert open_descriptors() <= descriptors
    assert threading.active_count() == threads


def test_open_and_close_again_and_again(pytestconfig: pytest.Config) -> None:
    """1,000 times with `--long`, else 12; descriptors, threads and processes stay as they are, each end is quick."""
    cycles = 1000 if pytestconfig.getoption("--long") else 12
    descriptors, threads, slowest = open_descriptors(), threading.active_count(), 0.0
    for cycle in range(cycles):
        pipeline = line(64, Full(100 + cycle % 3 * 20_000), parallelism=1 + cycle % 2)
        assert ids(islice(iter(pipeline), 1 + cycle % 4)) == list(range(4 + cycle % 4 * 4))
        began = time.monotonic()
        pipeline.close()
        slowest = max(slowest, time.monotonic() - began)
        del pipeline
        assert open_descriptors() <= descriptors, cycle
        assert threading.active_count() == threads, cycle
        assert not children(os.getpid()), cycle
    assert slowest < MOST_S


def test_errors_of_many_pipelines_leave_nothing(pytestconfig: pytest.Config) -> None:
    """Pipelines that fail in their middle, and are not closed by anyone."""

    def fails(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 9:
            raise ValueError("mine")
        return record

    descriptors = open_descriptors()
    for cycle in range(100 if pytestconfig.getoption("--long") else 5):
        with pytest.raises(zp.errors.OperatorError):
            list(line(64, fails))
        assert open_descriptors() <= descriptors, cycle
        assert not children(os.getpid()), cycle


DAEMON = """
import atexit, threading
thread = None
atexit.register(lambda: thread.join(10))  # behind the loader's own, so that the thread has time to complain
import sys
import zephon as zp
from tests.process.functions import wait_for
def stand(record):
    if record["id"] == 9:
        wait_for("/nowhere", 20)
    return record
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(stand).batch(4)
pipeline = pipeline.options(runner="process", parallelism=1, canonical_replicas=1, task_records=4)
taken = threading.Event()
def take():
    for batch in pipeline:
        taken.set()
thread = threading.Thread(target=take, daemon=True)
thread.start()
assert taken.wait(20)
"""


def test_a_daemon_thread_that_waits_for_a_batch_says_nothing_at_the_exit() -> None:
    assert Script(DAEMON).end() == (0, "", "")

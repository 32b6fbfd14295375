"""Processes that are stopped (SIGSTOP) while they wait: whoever waits for them is told; only a time-out ends one."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import islice
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich
from tests.process.helpers import Script, digests, engine, kill, launcher, line, lives, rests, wait_until, workers
from tests.process.test_stalls import WARN, Warned, warned
from zephon.errors import WorkerError
from zephon.runners.engine_watch import LauncherWatch

__all__ = ["warned"]  # a fixture

pytestmark = pytest.mark.law("L8")

STOPPED = "has been stopped (SIGSTOP, or a debugger)"


def idle(**options: Any) -> zp.Pipeline:
    """A pipeline whose processes rest soon after its first batch, as nobody takes more."""
    return line(3000, Enrich(), prefetch_batches=1, task_records=16, **options)


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    return digests(idle(runner="inline"))


def at_rest(pipeline: zp.Pipeline) -> tuple[Any, list[str]]:
    """The iterator, and the digests of what was taken of it."""
    iterator = iter(pipeline)
    found = digests(islice(iterator, 1))
    for pid in (engine(), *workers()):
        rests(pid)
    return iterator, found


def test_an_idle_worker_that_tasks_wait_for(warned: Warned, wanted: list[str]) -> None:
    with idle(**WARN) as pipeline:
        iterator, found = at_rest(pipeline)
        victim = workers()[1]
        kill(victim, signal.SIGSTOP)
        warned.then = lambda: kill(victim, signal.SIGCONT)
        assert found + digests(iterator) == wanted
    assert warned.texts[0].startswith(f"worker 1 {STOPPED}, while tasks wait for it, for ")


@pytest.mark.law("L7")
def test_a_time_out_makes_a_death_of_it(warned: Warned, wanted: list[str]) -> None:
    with idle(stall_timeout_s=1.0) as pipeline:
        iterator, found = at_rest(pipeline)
        victim = workers()[0]
        kill(victim, signal.SIGSTOP)
        assert found + digests(iterator) == wanted
        assert not lives(victim)
    [text] = warned.texts
    assert text.startswith(f"worker 0 {STOPPED}, while tasks wait for it, for ")
    assert "its worker is ended and the work tried again (stall_timeout_s)" in text


def test_an_idle_engine(warned: Warned, wanted: list[str]) -> None:
    with idle(**WARN) as pipeline:
        iterator, found = at_rest(pipeline)
        victim = engine()
        kill(victim, signal.SIGSTOP)
        warned.then = lambda: kill(victim, signal.SIGCONT)
        assert found + digests(iterator) == wanted
    assert warned.texts[0].startswith(f"the engine process {STOPPED} for ")


def test_a_time_out_ends_an_idle_engine() -> None:
    with idle(stall_timeout_s=1.0) as pipeline:
        iterator, _ = at_rest(pipeline)
        kill(engine(), signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"the engine process has been stopped .* the engine is ended"):
            list(iterator)


def test_a_launcher_that_could_not_replace_a_worker(warned: Warned, wanted: list[str]) -> None:
    with idle(**WARN) as pipeline:
        iterator, found = at_rest(pipeline)
        victim = launcher()
        kill(victim, signal.SIGSTOP)
        kill(workers()[0])
        warned.then = lambda: kill(victim, signal.SIGCONT)
        assert found + digests(iterator) == wanted
    assert warned.texts[0].startswith(f"the launcher process {STOPPED} for ")


@pytest.mark.slow
def test_a_time_out_ends_the_wait_for_a_launcher() -> None:
    with idle(stall_timeout_s=1.0) as pipeline:
        iterator, _ = at_rest(pipeline)
        tree = [launcher(), engine(), *workers()]
        kill(tree[0], signal.SIGSTOP)
        kill(tree[2])
        with pytest.raises(WorkerError, match=r"the launcher process has been stopped .*stall_timeout_s.*continue it"):
            list(iterator)
    assert not any(map(lives, tree))


@pytest.mark.parametrize("who", [[0], [0, 1, 2, 3]], ids=["launcher", "all"])
def test_closing_takes_under_two_seconds(who: list[int]) -> None:
    with idle() as pipeline:
        kept = at_rest(pipeline)
        tree = [launcher(), engine(), *workers()]
        for i in who:
            kill(tree[i], signal.SIGSTOP)
        began = time.monotonic()
        pipeline.close()
        assert time.monotonic() - began < 2
        del kept
    wait_until(lambda: not any(map(lives, tree)), 5)


# -- scripts ---------------------------------------------------------------------------------------------------------

CODE = """
from itertools import islice
import zephon as zp
from tests.process.functions import Enrich
from tests.process.helpers import line
iterator = iter(line(3000, Enrich(), prefetch_batches=1, stall_warn_s=0.5, stall_timeout_s=0.5))
next(iterator)
print("running", flush=True)
input()
print(sum(batch.num_samples for batch in iterator), flush=True)
"""


def test_nothing_is_left_where_the_trainer_ends_while_the_launcher_is_stopped() -> None:
    script = Script(CODE)
    assert script.readline() == "running"
    workers(2, script.pid)
    kill(launcher(script.pid), signal.SIGSTOP)
    kill(script.pid)
    script.process.communicate()
    script.nothing_left()


def test_a_whole_job_that_is_stopped_and_continued_is_not_punished() -> None:
    """Also where each of its processes is stopped, for much longer than the limits, which Ctrl-Z does not do."""
    read, write = os.pipe()
    script = Script(CODE, stdin=read)
    os.close(read)
    assert script.readline() == "running"
    boss = launcher(script.pid)
    tree = [boss, engine(script.pid), *workers(2, script.pid)]
    for pid in (script.pid, *tree):
        kill(pid, signal.SIGSTOP)
    os.write(write, b"go on\n")
    threading.Event().wait(1.5)
    for pid in (script.pid, *tree):
        kill(pid, signal.SIGCONT)
    os.close(write)
    assert script.readline() == "2996"
    status, _, err = script.end()
    assert (status, err) == (0, "")


def test_looks_in_a_row_count_and_not_time() -> None:
    said: list[str] = []
    watch = LauncherWatch(3.0, 8.0, 1.0)
    for state in "TTSTTSttSTT":
        watch.look(state, said.append)
    assert not said
    for _ in range(5):
        watch.look("T", said.append)
    assert [text.split(" for ")[1][:5] for text in said] == ["3.0 s", "6.0 s"]
    with pytest.raises(WorkerError, match=r"for 8\.0 s \(stall_timeout_s\)"):
        watch.look("T", said.append)

"""The kit that kills workers: whom it finds, whom it spares, what it counts."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich, burn
from tests.process.helpers import children, digests, engine, launcher, line, lives, wait_until
from zephon.testing import faults
from zephon.testing.faults import UNREACHED_RETRIES, Killer, kill, workers

pytestmark = pytest.mark.law("L7")


def test_the_workers_of_all_stages_are_found_and_nobody_else() -> None:
    gc.collect()  # an earlier test's error may hold a pipeline
    before = set(workers())
    with line(400, burn, burn, parallelism={"burn": 1, "burn_2": 2}) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        found = wait_until(lambda: len(new := set(workers()) - before) == 3 and new, what="three workers")
        assert found == set(children(launcher())) - {engine()}
        with line(400, burn, parallelism=1) as other:
            second = iter(other)
            next(second)
            wait_until(lambda: len(set(workers()) - before) == 4, what="a worker of the other one")
    wait_until(lambda: not any(map(lives, found)))
    assert set(workers()) <= before


def test_only_workers_are_killed() -> None:
    """Neither a child of this process, nor a process that is no child of it, nor one that is gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert not kill(stranger.pid)
        assert not kill(1)
        assert stranger.poll() is None
        assert stranger.stdin is not None
        stranger.stdin.close()
        stranger.kill()
    assert not kill(stranger.pid)
    with line(400, burn) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        assert not kill(launcher())
        victim = wait_until(workers)[0]
        assert kill(victim, signal.SIGSEGV)
        wait_until(lambda: not lives(victim))
        assert not kill(victim)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_killed_all_along(seed: str) -> None:
    """Behind the first batch for the first time, then every three batches or so, and at times of the thread's."""
    options: dict[str, Any] = {"batch": 8, "canonical_replicas": 2}
    killer = Killer(seed, apart=3)
    with killer, line(4000, Enrich(), burn, max_worker_retries=UNREACHED_RETRIES, **options) as pipeline:
        found = digests(itertools.islice(killer.watch(pipeline), 80))
    assert found == digests(itertools.islice(line(4000, Enrich(), burn, runner="inline", **options), 80))
    assert killer.kills >= 5  # a point comes within five batches, and where all are dead, once one is there again
    assert 0 <= killer.kills_at_work <= killer.kills


class Sluggish(zp.Operator):
    """Its setup takes as long as loading a small model does."""

    def setup(self) -> None:
        threading.Event().wait(0.25)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def test_workers_that_start_slowly_get_the_time_to() -> None:
    """One that is killed again before it is ready, and again, would look like one that cannot start at all."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(1000)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(Sluggish()).batch(2)
    settings: dict[str, Any] = {"runner": "process", "parallelism": 1, "canonical_replicas": 1}
    settings |= {"task_records": 1, "prefetch_batches": 1}  # so that a worker is always needed soon
    killer = Killer(apart=1)
    with killer, pipeline.options(max_worker_retries=UNREACHED_RETRIES, **settings) as killed:
        ids = [int(i) for batch in itertools.islice(killer.watch(killed), 40) for i in batch["id"]]
    assert ids == list(range(80))
    assert killer.kills > 12  # more than a pool bears in a row


def test_nobody_is_killed_but_while_a_stream_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(faults, "workers", lambda: [7])
    monkeypatch.setattr(faults, "kill", lambda pid: not killed.append(pid))
    with Killer(apart=1) as killer:
        stream = killer.watch(iter("abc"))
        assert not killed
        assert list(stream) == ["a", "b", "c"]
        seen = len(killed)
        assert seen == killer.kills >= 3
        threading.Event().wait(3 * faults.PAUSE_S[1])
        assert len(killed) == seen

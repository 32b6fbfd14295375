"""W8: how long the stream stalls after SIGKILL of a worker, idle or busy; after that of the trainer, until all is gone.

The stream is W2's of 100 us a record, whose batches come every few milliseconds, so a stall shows. After each kill the
longest wait for a batch within a second counts. The numbers of all records delivered are compared with the source's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from zephon.batch import Batch
from zephon.bench import pipelines, proc
from zephon.bench.rounds import start_child
from zephon.bench.spec import ZEPHON, Sample, Spec
from zephon.errors import WorkerError
from zephon.pipeline import Pipeline

WATCHED_S = 1.0  # after each kill
REST_S = 0.3  # without a consumer, after which workers have nothing to do
LEFTOVERS_S = 5.0  # by then nothing may be left
START_S = 30.0


def measure(spec: Spec) -> Sample:
    """Seconds, the median of several kills."""
    return _trainer(spec) if spec.variant == "trainer" else _workers(spec)


def _as_w2(spec: Spec, seconds: float) -> Spec:
    return msgspec.structs.replace(spec, workload="w2:100us", seconds=seconds)


def _workers(spec: Spec) -> Sample:
    """Kills workers for as long as the measurement lasts, one at a time."""
    pipeline, _, _ = pipelines.work(_as_w2(spec, spec.seconds))
    seen: list[Any] = []
    stalls: list[float] = []
    with pipeline:
        stream = iter(pipeline)
        seen.append(next(stream)["id"].copy())
        usual = _longest_wait(stream, seen, WATCHED_S)
        end = time.perf_counter() + spec.seconds
        while time.perf_counter() < end or not stalls:
            if spec.variant == "idle":
                time.sleep(REST_S)
            os.kill(_a_worker(), signal.SIGKILL)
            stalls.append(_longest_wait(stream, seen, WATCHED_S))
        same = _is_the_stream(pipeline, np.concatenate(seen))
    details = {"worst": max(stalls), "usual": usual, "kills": len(stalls), "same_records": same}
    return Sample(rate=sorted(stalls)[len(stalls) // 2], details=details)


def _a_worker() -> int:
    workers = [pid for pid, kind in proc.kinds(os.getpid(), ZEPHON).items() if kind == "worker"]
    return random.choice(workers)


def _longest_wait(stream: Iterator[Batch], seen: list[Any], seconds: float) -> float:
    longest, begun = 0.0, time.perf_counter()
    before = begun
    while before - begun < seconds:
        seen.append(next(stream)["id"].copy())
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest


def _is_the_stream(pipeline: Pipeline, numbers: Any) -> bool:
    """Whether these are the source's rows, each once, in order."""
    source, length = pipeline._definition.source, 0
    wanted: list[Any] = []
    while length < len(numbers):
        wanted.append(source.chunk(0, 1, 0, len(wanted)).row)
        length += len(wanted[-1])
    return bool(np.array_equal(np.concatenate(wanted)[: len(numbers)], numbers))


def _trainer(spec: Spec) -> Sample:
    """Kills a trainer in the middle of its work, and waits until its processes and shared names are gone."""
    names = proc.shared_names()
    child = start_child(_as_w2(spec, 60.0))
    try:
        tree = _whole_tree(child.pid, spec.parallelism)
    finally:
        child.kill()
    begun = time.perf_counter()
    child.wait()
    left, new = tree, proc.shared_names() - names
    while (left or new) and time.perf_counter() - begun < LEFTOVERS_S:
        time.sleep(0.002)
        left, new = [pid for pid in left if proc.is_alive(pid)], proc.shared_names() - names
    seconds = time.perf_counter() - begun
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return Sample(rate=seconds, details={"processes_left": len(left), "names_left": len(new)})


def _whole_tree(root: int, workers: int) -> list[int]:
    """The processes below a trainer, once all workers use the CPU."""
    end = time.perf_counter() + START_S
    while time.perf_counter() < end:
        found = proc.kinds(root, ZEPHON)
        busy = [pid for pid, kind in found.items() if kind == "worker" and proc.cpu_s(pid) > REST_S]
        if len(busy) >= workers:
            return [pid for pid in found if pid != root]
        time.sleep(0.02)
    raise WorkerError(f"the trainer had not started its {workers} workers after {START_S:.0f} s")

"""consumer: what a batch costs the trainer's own thread, whatever its size.

Untimed, the thread waits until the engine has sent something. Timed, in CPU time of this thread, it asks for the batch
and for each of its fields, and lets go of the batch before, which gives the slot back. It is busy while it waits, as a
thread that trains is; `after_sleep_us` is the same where it slept, and others had its core and its caches meanwhile.

`consumer:16MB` asks for numpy arrays, `consumer:16MB:torch` for tensors, `consumer:16MB:device` for tensors of
`to_device("cpu")`, which reads ahead.
"""

from __future__ import annotations

import select
import time
from typing import Any

import numpy as np

from zephon.bench import data
from zephon.bench.operators import Record
from zephon.bench.pipelines import MADE_ROWS, endless
from zephon.bench.spec import Sample, Spec
from zephon.errors import WorkerError

SIZES = {"1KB": (8, 128), "1MB": (16, 65_536), "16MB": (16, 1_048_576)}
"""Records of a batch, and bytes of each."""
PATIENCE_S = 30


class MakeBytes:
    """An array of zeros in each record: what it costs the workers is small beside what is measured."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, record: Record) -> Record:
        return {**record, "x": np.zeros(self.size, np.uint8)}


def measure(spec: Spec) -> Sample:
    """CPU microseconds of the trainer's thread a batch, mean."""
    size, _, what = spec.variant.partition(":")
    records, size_bytes = SIZES[size]
    pipeline = endless(data.made_dataset("consumer", data.id_record, MADE_ROWS)).map(MakeBytes(size_bytes))
    output = "torch" if what == "torch" else "numpy"
    pipeline = pipeline.batch(records).options(
        runner=spec.runner, parallelism=spec.parallelism, canonical_replicas=1, output=output
    )
    begun = time.perf_counter()
    used: Any = pipeline.to_device("cpu") if what == "device" else pipeline
    with used:
        batches = iter(used)
        next(batches)
        first_batch_s = time.perf_counter() - begun
        driver = (batches._source if what == "device" else batches)._driver
        _timed(batches, driver, spec.warm_s, busy=True)
        slept_us = np.mean(_timed(batches, driver, spec.seconds / 3, busy=False)) / 1e3
        times_us = np.array(_timed(batches, driver, spec.seconds, busy=True)) / 1e3
    return Sample(
        rate=float(times_us.mean()),
        first_batch_s=first_batch_s,
        trainer_us_per_batch=float(times_us.mean()),
        details={
            "median_us": float(np.median(times_us)),
            "p99_us": float(np.quantile(times_us, 0.99)),
            "after_sleep_us": float(slept_us),
        },
    )


def _timed(batches: Any, driver: Any, seconds: float, busy: bool) -> list[int]:
    """Nanoseconds of CPU of each batch, at least one."""
    times: list[int] = []
    stop = time.perf_counter() + seconds
    poll = select.poll()
    poll.register(driver._socket, select.POLLIN)

    while not times or time.perf_counter() < stop:
        patience = time.perf_counter() + PATIENCE_S
        while driver.tail.peek() is None and not poll.poll(0 if busy else PATIENCE_S * 1000):
            if time.perf_counter() > patience:
                raise WorkerError(f"no batch came within {PATIENCE_S} s")
        began = time.thread_time_ns()
        batch = next(batches)
        for name in batch:
            batch[name]
        times.append(time.thread_time_ns() - began)
    return times

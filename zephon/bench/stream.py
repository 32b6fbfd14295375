"""How a stream of batches is timed: the first batch, a warm-up, then as many as come in the time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from zephon.bench import proc
from zephon.bench.spec import Sample, Spec

Count = Callable[[Any], float]
"""batch -> how many units of the workload are in it. Touches every field, as a training step would."""


def timed(spec: Spec, start: Callable[[], Iterator[Any]], count: Count, units_per_record: float = 1.0) -> Sample:
    """Times what `start()` gives, in units a second. A stream that ends is started again."""
    begun = time.perf_counter()
    stream = _Endless(start)
    count(next(stream))
    first_batch_s = time.perf_counter() - begun
    _consume(stream, count, spec.warm_s)
    cpu, machine = _cpu(spec)
    units, took = _consume(stream, count, spec.seconds)
    cpu_end, machine_end = _cpu(spec)
    used = {kind: cpu_end[kind] - cpu.get(kind, 0.0) for kind in cpu_end}
    records = units / units_per_record
    return Sample(
        rate=units / took,
        first_batch_s=first_batch_s,
        cpu_us={kind: seconds / records * 1e6 for kind, seconds in used.items()},
        pss_mb=proc.tree_pss_mb(os.getpid()) if cpu_end else None,
        other_cores=max(0.0, (machine_end - machine - sum(used.values())) / took) if cpu_end else None,
    )


def _cpu(spec: Spec) -> tuple[dict[str, float], float]:
    if not proc.has_proc():
        return {}, 0.0
    return proc.cpu_by_kind(os.getpid(), spec.system), proc.machine_cpu_s()


def _consume(stream: Iterator[Any], count: Count, seconds: float) -> tuple[float, float]:
    """(units, seconds) of at least one batch, for about `seconds`."""
    units, begun = 0.0, time.perf_counter()
    while True:
        units += count(next(stream))
        took = time.perf_counter() - begun
        if took >= seconds:
            return units, took


class _Endless(Iterator[Any]):
    """A stream that begins again where it ends. Raises RuntimeError where it has nothing at all."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start
        self._stream = start()

    def __next__(self) -> Any:
        for _ in range(2):
            for batch in self._stream:
                return batch
            self._stream = self._start()
        raise RuntimeError("the pipeline gave no batch at all")

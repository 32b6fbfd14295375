"""W9: what a chunk and a start cost as the lanes of the run and the rows of the dataset grow. Both should stay flat.

A process owns one lane of the run, as a rank of a large job does. The time of a chunk is the median over chunks of 256
pointers of that lane. The start runs from the definition of the pipeline to its first batch of 32 records that cost
nothing, in the process itself, so that starting processes does not hide what grows. `all_lanes_s` is the start of a
process that owns every lane: it must read ahead 32 records of each before lane 0 has its batch.
"""

from __future__ import annotations

import statistics
import time

from zephon.bench import data, operators
from zephon.bench.spec import Sample, Spec
from zephon.pipeline import Pipeline
from zephon.work.static_mixture import StaticMixture

CHUNKS = 200
MOST_S = 1.0


def measure(spec: Spec) -> Sample:
    """Microseconds a chunk; `first_batch_s` is the start."""
    rows, lanes = round(float(spec.variant)), spec.lanes or 1
    begun = time.perf_counter()
    _first_batch(rows, lanes, lanes)
    start = time.perf_counter()
    _first_batch(rows, lanes, 1)
    all_lanes_s = time.perf_counter() - start
    return Sample(
        rate=_chunk_us(rows, lanes, min(spec.seconds, MOST_S)),
        first_batch_s=start - begun,
        details={"all_lanes_s": all_lanes_s},
    )


def _source(rows: int) -> StaticMixture:
    return StaticMixture([data.made_dataset("w9", data.id_record, rows)], seed=1, end="repeat")


def _first_batch(rows: int, lanes: int, groups: int) -> None:
    pipeline = Pipeline(_source(rows)).map(operators.identity).batch(32)
    settings = {"canonical_replicas": lanes, "dp_degree": groups, "dp_group_id": 0}
    with pipeline.options(runner="inline", parallelism=1, **settings) as pipeline:
        next(iter(pipeline))


def _chunk_us(rows: int, lanes: int, seconds: float) -> float:
    source, times = _source(rows), []
    begun = time.perf_counter()
    for index in range(CHUNKS):
        at = time.perf_counter()
        source.chunk(lanes - 1, lanes, 0, index)
        times.append(time.perf_counter() - at)
        if at - begun > seconds:
            break
    return statistics.median(times) * 1e6

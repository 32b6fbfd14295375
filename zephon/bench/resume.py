"""W6: how long a restore takes to its first batch, how large a state is, and how many records are read again.

The pipeline is W3's on four lanes. A state behind n batches is made without running n batches: the pipeline really runs
to the middle of a window (18 batches a lane), and then every lane's place is moved on by whole windows, its counters of
samples and turns with it. A restore goes to the start of the place's window and replays from there, so what it costs
depends on where in its window a place lies, which is kept, and on whatever depends on progress, which is the question.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from zephon.batch import Batch
from zephon.bench import pipelines
from zephon.bench.pipelines import W3_BATCH
from zephon.bench.spec import BARE, Sample, Spec
from zephon.errors import InternalError
from zephon.pipeline import Pipeline

LANES = 4
TURNS = 18  # batches a lane that are really run
WINDOW_CHUNKS = 8  # flush_every_k_chunks where an operator regroups
WINDOW_TURNS = 37  # batches that a window of this corpus gives, about
_BATCHES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}


def measure(spec: Spec) -> Sample:
    """Seconds from `load_state_dict` to the first batch; of the bare limit: from `iter`, with no state."""
    count, _, where = spec.variant.partition(":")
    other = {"dp_degree": 2, "dp_group_id": 0} if where == "other" else {}
    pipeline = _pipeline(spec).options(**other)
    if spec.system == BARE:
        seconds, _, _ = _first_batch(pipeline, None)
        return Sample(rate=seconds, first_batch_s=seconds)
    state = state_after(_pipeline(spec).options(runner="inline"), _BATCHES[count])
    seconds, first, stream = _first_batch(pipeline, state)
    batches = [first, *(next(stream) for _ in pipeline.lanes[1:])]
    again = [read_again(pipeline, state, batch) for batch in batches]
    pipeline.close()
    details = {"state_bytes": len(json.dumps(state)), "records_read_again": sum(again), "owned_lanes": len(again)}
    return Sample(rate=seconds, first_batch_s=seconds, details=details)


def _pipeline(spec: Spec) -> Pipeline:
    as_w3 = msgspec.structs.replace(spec, workload="w3", runner=spec.runner or "process", lanes=LANES)
    return pipelines.work(as_w3).pipeline


def _first_batch(pipeline: Pipeline, state: dict[str, Any] | None) -> tuple[float, Batch, Iterator[Batch]]:
    begun = time.perf_counter()
    if state is not None:
        pipeline.load_state_dict(state)
    stream = iter(pipeline)
    first = next(stream)
    pipelines.touch(first)
    return time.perf_counter() - begun, first, stream


def state_after(pipeline: Pipeline, num_batches: int) -> dict[str, Any]:
    """A state as after `num_batches` batches of all lanes: see the module."""
    for _ in zip(range(TURNS * LANES), pipeline, strict=False):
        pass
    state = pipeline.state_dict()
    pipeline.close()
    turns = num_batches // LANES
    windows = (turns - TURNS) // WINDOW_TURNS
    for place in state["lanes"].values():
        place["chunk"] += windows * WINDOW_CHUNKS
        moved = turns - place["turns"]
        place["turns"] += moved
        place["samples"] += moved * W3_BATCH
        place["delivered"] += moved * W3_BATCH
    return state


def read_again(pipeline: Pipeline, state: dict[str, Any], batch: Batch) -> int:
    """Records of the batch's lane between its place in the state and the first undelivered sample."""
    place, first = state["lanes"][str(batch.lane_id)], batch.origins[0][0]
    source = pipeline._definition.source
    done = 0
    for index in range(place["chunk"], place["chunk"] + WINDOW_CHUNKS):
        rows = source.chunk(batch.lane_id, LANES, place["pass"], index).row[place["offset"] if not done else 0 :]
        for row in rows.tolist():
            if source.datasets[0].locate(row) == first[1:3]:  # type: ignore[attr-defined]
                return done
            done += 1
    raise InternalError(f"lane {batch.lane_id}: its first sample is not of the window that the state names")

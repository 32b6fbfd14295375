"""W6: how long a restore takes to its first batch, how large a state is, and how many records are read again.

The pipeline is W3's on four lanes. A state behind n batches is made without running n batches: the pipeline really runs
to the middle of a window (18 batches a lane), and then every lane's place is moved on by whole windows, its counters of
samples and turns with it. A restore goes to the start of the place's window and replays from there, so what it costs
depends on where in its window a place lies, which is kept, and on whatever depends on progress, which is the question.

`held`: tokenise, shuffle(8192), best_fit, and no windows at all. It reads the corpus again and again in its own order,
so that a place moved by whole epochs holds records of the same lengths.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from zephon.batch import Batch
from zephon.bench import corpus, pipelines
from zephon.bench.pipelines import W3_BATCH
from zephon.bench.spec import BARE, Sample, Spec
from zephon.errors import InternalError
from zephon.flow.held import read_held
from zephon.io.dataset import Dataset
from zephon.pipeline import Pipeline
from zephon.work.static_mixture import StaticMixture

LANES = 4
TURNS = 18  # batches a lane that are really run
WINDOW_CHUNKS = 8  # flush_every_k_chunks where an operator regroups
WINDOW_TURNS = 37  # batches that a window of this corpus gives, about
HELD_TURNS = 25  # batches a lane that are really run of `held`: about half way between two of its states
HELD_BUFFER = 8_192
_BATCHES = {"1k": 1_000, "10k": 10_000, "100k": 100_000}


def measure(spec: Spec) -> Sample:
    """Seconds from `load_state_dict` to the first batch; of the bare limit: from `iter`, with no state."""
    count, _, where = spec.variant.partition(":")
    if where == "held":
        return _measure_held(spec, _BATCHES[count])
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


def _measure_held(spec: Spec, num_batches: int) -> Sample:
    begun = _held_pipeline(spec)
    if spec.system == BARE:
        seconds, _, _ = _first_batch(begun, None)
        begun.close()
        return Sample(rate=seconds, first_batch_s=seconds, details={"records_read": _reads(spec, None)})
    state, held = held_after(spec, num_batches)
    seconds, _, _ = _first_batch(begun, state)
    begun.close()
    details = {
        "state_bytes": len(json.dumps(state)),
        "lane_bytes": max(len(json.dumps(lane)) for lane in state["lanes"].values()),
        "records_held": held,
        "records_read": _reads(spec, state),
        "owned_lanes": LANES,
    }
    return Sample(rate=seconds, first_batch_s=seconds, details=details)


def _held_pipeline(spec: Spec, wrap: Callable[[Dataset], Any] = lambda dataset: dataset) -> Pipeline:
    found = corpus.make(spec.folder)
    dataset = wrap(Dataset.from_path("w6", found.shards, index_dir=found.index_dir))
    pipeline = Pipeline(StaticMixture([dataset], seed=1, end="repeat", shuffle="none")).tokenize(found.tokenizer)
    pipeline = pipeline.shuffle(HELD_BUFFER).pack(pipelines.PACK_LENGTH, "best_fit").batch(W3_BATCH)
    runner, workers = spec.runner or "process", spec.parallelism
    return pipeline.options(
        runner=runner, parallelism=workers, canonical_replicas=LANES, dp_degree=1, flush_every_k_chunks=0
    )


def held_after(spec: Spec, num_batches: int) -> tuple[dict[str, Any], int]:
    """A state as after `num_batches` batches of all lanes, and how many records its lanes hold."""
    pipeline = _held_pipeline(spec).options(runner="inline")
    for _ in zip(range(HELD_TURNS * LANES), pipeline, strict=False):
        pass
    state = pipeline.state_dict()
    pipeline.close()
    turns = num_batches // LANES
    source = pipeline._definition.source
    together = LANES * source.chunk_size  # type: ignore[attr-defined]
    period = math.lcm(source.datasets[0].num_rows, together) // together  # chunks after which all is as before
    epochs = turns // HELD_TURNS  # about what so many batches read
    for place in state["lanes"].values():
        moved = turns - place["turns"]
        place["chunk"] += epochs * period
        place["turns"] += moved
        place["samples"] += moved * W3_BATCH
        place["delivered"] += moved * W3_BATCH
    tables = (read_held(base64.b64decode(raw)) for lane in state["lanes"].values() for raw in lane["held"])
    return state, sum(table.size for table in tables)


class _Counted:
    """A dataset that counts the rows it was asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self.rows = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def read(self, rows: Any, on: Any = None) -> Any:
        self.rows += len(rows)
        return self._dataset.read(rows, on)


def _reads(spec: Spec, state: dict[str, Any] | None) -> int:
    """Records that are read before the first batch, where no worker reads ahead."""
    counted: list[_Counted] = []

    def wrap(dataset: Dataset) -> _Counted:
        counted.append(_Counted(dataset))
        return counted[0]

    pipeline = _held_pipeline(spec, wrap).options(runner="inline", task_records=64, prefetch_batches=1)
    _first_batch(pipeline, state)
    pipeline.close()
    return counted[0].rows


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

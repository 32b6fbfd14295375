"""L6: a state is small at any progress, and a restore reads no more than one window again."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zephon as zp
from tests.laws.harness import Recorder, State, plain
from zephon.checkpoint.schema import write_counts
from zephon.flow.held import read_held
from zephon.plan import limits
from zephon.testing.machines import Mean, Residue
from zephon.testing.recipes import Add, Keep, Reverse, Words
from zephon.work.static_mixture import StaticMixture

pytestmark = pytest.mark.law("L6")

MOST_LANE_BYTES = 300
MOST_HEADER_BYTES = 64 * 1024
BILLION = 10**9


class Endless:
    """A dataset of any size that takes no memory: row i is {"id": i, "text": ...}."""

    on_error = "raise"

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.num_rows = name, rows
        self.shard_rows: NDArray[np.int64] = np.full(1, rows, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        return {"format": "endless", "rows": self.num_rows, "shards": 1, "hash": "0" * 32}

    def is_excluded(self, rows: Any) -> NDArray[np.bool_]:
        return np.zeros(len(rows), np.bool_)

    def locate(self, row: int) -> tuple[str, int]:
        return "s0", row

    def read(self, rows: Any, on: Any = None) -> list[dict[str, Any]]:
        return [{"id": int(row), "text": f"{row} of many words"} for row in rows]


def pipeline_of(datasets: list[Any], lanes: int, **options: Any) -> zp.Pipeline:
    """A pipeline for text as people write it, with every policy that counts."""
    return (
        zp.Pipeline(StaticMixture(datasets, seed=2**63, end="repeat"))
        .filter(Keep(3, 1), name="keep_the_good_ones")
        .map(Add(1), name="clean")
        .tokenize(Words(), max_length=4, overflow="truncate", on_error="skip")
        .shuffle(64)
        .pack(64, oversize="truncate")
        .batch(8, drop_last=True)
        .options(runner="inline", canonical_replicas=lanes, dp_degree=1, **options)
    )


def advanced(state: State, samples: int) -> State:
    """The same state as it would be after so many samples of every lane."""
    for lane in state["lanes"].values():
        losses = len(state["reasons"]) - 2 * 2  # all but those of the datasets
        counts = write_counts((samples,) * losses, (max(0, samples - 255),) * losses)
        lane |= {"pass": 1000, "chunk": samples, "offset": 255, "skip": 8191, "samples": samples}
        lane |= {"turns": samples // 8, "delivered": 1000 * samples}
        lane |= {"counts": counts}
    return state


def lane_bytes(state: State) -> int:
    """The largest lane of a state as JSON."""
    return max(len(json.dumps(lane)) for lane in state["lanes"].values())


@pytest.mark.parametrize("samples", [0, 10**6, BILLION])
def test_bytes_a_lane(samples: int) -> None:
    state = pipeline_of([Endless("web", BILLION), Endless("books", BILLION)], 64).state_dict()
    assert len(state["lanes"]) == 64
    assert lane_bytes(advanced(state, samples)) <= MOST_LANE_BYTES


def test_bytes_of_a_hundred_datasets() -> None:
    datasets = [Endless(f"a-dataset-with-a-long-name-{number:04d}", BILLION) for number in range(100)]
    state = plain(pipeline_of(datasets, 8).state_dict())
    lanes = state.pop("lanes")
    assert len(json.dumps(state)) <= MOST_HEADER_BYTES
    assert lane_bytes({"lanes": lanes}) <= MOST_LANE_BYTES


def test_bytes_do_not_grow_with_progress() -> None:
    pipeline = pipeline_of([Endless("web", BILLION)], 2)
    sizes = []
    for number, batch in enumerate(islice(pipeline, 200)):
        state = pipeline.state_dict()
        assert pipeline.state_dict(after=batch) == state
        if number in (9, 199):
            sizes.append(len(json.dumps(state)))
    pipeline.close()
    assert sizes[1] - sizes[0] <= 2 * 32  # a digit more here and there


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit", "best_fit_wrap"])
def test_bytes_a_held_record(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 24 beside the 300 of the lane, far into a long chunk of a billion rows, where numbers are long."""
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 256)
    pipeline = zp.Pipeline(StaticMixture([Endless("web", BILLION)], seed=1, chunk_size=2**22, shuffle="global"))
    pipeline = pipeline.tokenize(Words()).shuffle(1000).pack(64, algorithm, num_bins=64).batch(8)
    pipeline = pipeline.options(runner="inline", canonical_replicas=2, dp_degree=1, flush_every_k_chunks=0)
    most = 0
    for _ in islice(pipeline, 80):
        for lane in plain(pipeline.state_dict())["lanes"].values():
            held = [read_held(base64.b64decode(raw)) for raw in lane.get("held", ())]
            records = sum(table.size + len(table.nodes) for table in held)
            most = max(most, records)
            assert len(json.dumps(lane)) <= MOST_LANE_BYTES + 24 * records, records
    pipeline.close()
    assert most >= 1000


MADE: dict[str, Callable[[zp.Pipeline], zp.Pipeline]] = {
    "groups of one": lambda line: line.map_batches(Reverse(), 1).shuffle(500),
    "groups of groups": lambda line: line.map_batches(Reverse(), 1).map_batches(Reverse(), 1).shuffle(500),
    "groups of four, shuffled twice": lambda line: line.shuffle(100).map_batches(Reverse(), 4).shuffle(500),
    "packs that are held whole": lambda line: line.pack(8, "best_fit", num_bins=8).shuffle(300),
    "a number on each": lambda line: line.stateful_map(Mean(5), key=Residue(9), into="mean").shuffle(500),
}


@pytest.mark.parametrize("made", MADE)
def test_bytes_of_held_records_that_accumulators_made(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they were made of is counted too: a record of a pointer, a part of a group, is a held record."""
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 256)
    line = zp.Pipeline(StaticMixture([Endless("web", BILLION)], seed=1, chunk_size=2**22, shuffle="global"))
    line = MADE[made](line.tokenize(Words())).batch(8)
    line = line.options(runner="inline", canonical_replicas=1, dp_degree=1, flush_every_k_chunks=0)
    list(islice(line, 40))
    lane = plain(line.state_dict())["lanes"]["0"]
    line.close()
    tables = [read_held(base64.b64decode(raw)) for raw in lane["held"]]
    records = sum(state[0] for table in tables for state in table.states)
    assert records >= 300
    pointers = sum(table.size for table in tables)
    assert len(json.dumps(lane)) <= MOST_LANE_BYTES + 24 * max(records, pointers)


def reads_of_restore(lanes: int, window: int, at: int, regroups: bool) -> int:
    """Rows read again by one lane that stopped behind `at` samples of a 1 : 1 pipeline; windows of `window` chunks."""
    recorder = Recorder(Endless("web", lanes * 10_000))
    pipeline = zp.Pipeline(StaticMixture([recorder], chunk_size=10, end="repeat", shuffle="none")).map(Add(1))
    if regroups:
        pipeline = pipeline.shuffle(5).options(flush_every_k_chunks=window)
    pipeline = pipeline.batch(1).options(runner="inline", canonical_replicas=lanes, dp_degree=1, task_records=1)
    pipeline = pipeline.options(prefetch_batches=1)
    list(islice(pipeline, at * lanes))
    state = plain(pipeline.state_dict())
    pipeline.close()
    recorder.rows.clear()
    pipeline.load_state_dict(state)
    next(iter(pipeline))
    pipeline.close()
    own = {row for row in recorder.rows if row // 10 % lanes == 0}  # those of lane 0
    return sum(row // (10 * lanes) * 10 + row % 10 < at for row in own)


@pytest.mark.parametrize("at", [1, 7, 10, 29, 30, 31, 59, 60, 900, 907])
def test_a_restore_reads_one_window_at_most(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 1024)  # not within a window of 30
    again = reads_of_restore(2, 3, at, regroups=True)
    assert again == (at % 30 or again) <= 30
    assert reads_of_restore(2, 3, at, regroups=False) <= 1


@pytest.mark.parametrize("at", [1, 7, 10, 29, 30, 31, 59, 60, 900, 907])
def test_a_restore_without_windows_reads_what_was_held_and_a_little(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the 5 records of the shuffle, and the 7 pointers between two states of it."""
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 7)
    assert reads_of_restore(2, 0, at, regroups=True) <= 5 + 7 + 10  # by whole chunks of 10


@pytest.mark.parametrize("chunk", [8, 8 * 10**6, 8 * 10**9])
def test_a_restore_does_not_slow_down_with_progress(chunk: int) -> None:
    """The rows that a far state asks for before its first batch are those that an early one asks for."""
    recorder = Recorder(Endless("web", 10**13))
    source = StaticMixture([recorder], chunk_size=16, shuffle="global", end="repeat")
    pipeline = zp.Pipeline(source).shuffle(4).batch(4)
    pipeline = pipeline.options(runner="inline", canonical_replicas=4, dp_degree=1, task_records=4, prefetch_batches=1)
    state = plain(pipeline.state_dict())
    for lane in state["lanes"].values():
        lane.update(chunk=chunk, skip=100, samples=chunk * 16 + 100, turns=chunk * 4 + 25)
    pipeline.load_state_dict(state)
    assert next(iter(pipeline)).step == chunk * 4 + 25
    pipeline.close()
    assert len(recorder.rows) <= 4 * (8 * 16 + 16)

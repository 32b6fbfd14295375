"""What was seen to fail in a published loader, one test each, where no other file has it (docs/reliability.md)."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

import zephon as zp
from tests.cases.helpers import ids, pipeline, rows, source
from zephon.work.static_mixture import StaticMixture

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")


@pytest.mark.parametrize("lanes", [1, 4])
def test_640_samples_in_chunks_of_100_are_640(lanes: int) -> None:
    """Seen: 600. The last chunk may be short; it is never dropped."""
    line = zp.Pipeline(source(640, chunk_size=100)).batch(32).options(canonical_replicas=lanes, runner="inline")
    assert sorted(ids(line)) == list(range(640))


def test_a_thousand_records_over_four_ranks_are_as_many_batches_for_each() -> None:
    """Seen: 32, 24, 32 and 32 batches."""
    found: list[list[Any]] = []
    for rank in range(4):
        line = zp.Pipeline(source(1000, chunk_size=64)).batch(8)
        group = line.options(canonical_replicas=4, dp_degree=4, dp_group_id=rank, runner="inline")
        found.append(list(group))
    assert [len(batches) for batches in found] == [32, 32, 32, 32]
    assert sorted(i for batches in found for i in ids(batches)) == list(range(1000))


def test_a_chunk_costs_the_same_at_any_number_of_lanes() -> None:
    """Seen: 46 ms at 1 lane, 2.2 s at 64, 12.6 s at 256, for one owned chunk of 16k."""

    def cost_s(lanes: int) -> float:
        """CPU seconds of the best of five chunks."""
        source = StaticMixture([zp.Dataset.from_list("toy", rows(100_000))], seed=1, chunk_size=16_384, end="repeat")
        best = float("inf")
        for index in range(5):
            began = time.process_time()
            source.chunk(lanes - 1, lanes, 0, index)
            best = min(best, time.process_time() - began)
        return best

    one = cost_s(1)
    assert cost_s(64) < 5 * one + 0.01
    assert cost_s(256) < 5 * one + 0.01


@pytest.mark.parametrize("every", [1, 3])
def test_no_token_is_dropped_where_packing_is_flushed(every: int) -> None:
    """Seen: the tail of each flush was dropped. It is padded here, and every token is there once."""
    records = [{"id": i, "input_ids": [1000 * i + at for at in range(1 + i % 7)]} for i in range(100)]
    line = pipeline(records).pack(8).batch(2).options(flush_every_k_chunks=every, runner="inline")
    tokens = [int(t) for b in line for t in b["input_ids"][b["segment_ids"] != 0]]
    assert sorted(tokens) == sorted(token for record in records for token in record["input_ids"])


def shout(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "text": record["text"].upper()}


def measure(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "length": len(record["text"])}


@needs_linux
def test_two_operators_on_short_rows_in_processes() -> None:
    """Seen: 3,100 records/s in processes, and 7 to 10 s to start. One hop a stage here, and a start of a moment."""
    dataset = zp.Dataset.from_list("toy", [{"id": i, "text": "x" * 800} for i in range(8000)])
    line = zp.Pipeline(zp.StaticMixture([dataset])).map(shout).map(measure).batch(32)
    line = line.options(runner="process", parallelism=2, canonical_replicas=1)
    assert "stage 0" in line.explain()
    assert "stage 1" not in line.explain(), "both operators belong into one stage"
    starts, rates = [], []
    for _ in range(3):
        began = time.perf_counter()
        with line as running:
            batches = iter(running)
            next(batches)
            first = time.perf_counter()
            count = sum(len(batch["id"]) for batch in batches)
            rates.append(count / (time.perf_counter() - first))
            starts.append(first - began)
        if max(rates) > 9300 and min(starts) < 3.5:
            return  # three times the rate, half the start
    raise AssertionError(f"{rates} records/s, first batch after {starts} s")


@pytest.mark.parametrize("runner", ["inline", "threads", pytest.param("process", marks=needs_linux)])
def test_metrics_are_on(runner: str) -> None:
    """Seen: off by default, for their cost."""
    line = pipeline(400).map(lambda record: record, name="work").batch(4).options(runner=runner)
    with line as running:
        batches = iter(running)
        for _ in range(20):
            next(batches)
        metrics = running.metrics()
    assert metrics["seconds"]["work"] > 0
    assert metrics["totals"]["batches"] >= 20

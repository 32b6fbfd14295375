"""L9: memory of the tree is flat over thousands of batches, and what the trainer holds is bounded."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich, Full
from tests.process.helpers import children, launcher, line, rests

pytestmark = pytest.mark.law("L9")

MIB = 1 << 20


def memory(pid: int) -> int:
    """Bytes that a process has of its own, and its share of what it has with others."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(row.split()[1]) for row in file if row.startswith("Pss:")) * 1024


def tree_memory() -> int:
    boss = launcher()
    return sum(map(memory, [os.getpid(), boss, *children(boss)]))


def endless(pipeline: zp.Pipeline) -> Iterator[zp.Batch]:
    while True:
        yield from pipeline


def sampled(rows: int, rounds: int, batches: int, **options: Any) -> list[int]:
    """The memory of the tree behind each of some rounds of so many batches: arrays, text and nested values."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(rows)])
    with line(0, Enrich(), dataset=dataset, batch=8, **options) as pipeline:
        iterator = iter(pipeline)
        samples = []
        for _ in range(rounds):
            for batch in islice(iterator, batches):
                assert len(batch["text"]) == len(batch["meta"]) == 8
            del batch
            gc.collect()
            samples.append(tree_memory())
    return samples


def test_flat_over_thousands_of_batches() -> None:
    """Four passes of a small dataset would restart, so one long one."""
    samples = sampled(40_000, 4, 500, canonical_replicas=4, ring_bytes=65_536)
    assert samples[-1] < samples[0] * 1.05 + 4 * MIB, samples


def test_large_batches_reuse_their_slots() -> None:
    """300 batches of 2 MiB: the tree never has more than a dozen of them at once."""
    with line(2000, Full(MIB // 32), batch=8, prefetch_batches=2, task_records=4) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        first = tree_memory()
        for _ in islice(iterator, 40):
            continue  # areas of results, and the workers' heaps, are touched as they are needed
        before = tree_memory()
        most = 0
        for number, batch in enumerate(islice(iterator, 200)):
            assert batch["x"].nbytes == 2 * MIB
            if number % 20 == 0:
                most = max(most, tree_memory())
    assert most - before < 12 * 2 * MIB + 16 * MIB
    assert most - first < 12 * 2 * MIB + 16 * MIB + 2 * 16 * MIB  # and an area of each worker


def test_a_trainer_that_stops_reading_holds_the_tree_back() -> None:
    """Nothing runs ahead of the consumer by more than slots and rings: the workers come to rest."""
    own = memory(os.getpid())  # of all that earlier tests have loaded
    with line(20_000, Full(4096), batch=4, canonical_replicas=2, prefetch_batches=2, task_records=8) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        for pid in children(launcher()):
            rests(pid)
        assert tree_memory() - own < 300 * MIB
        assert sum(len(batch["id"]) for batch in islice(iterator, 50)) == 200


@pytest.mark.slow
def test_flat_over_very_many_batches() -> None:
    samples = sampled(400_000, 8, 6000, canonical_replicas=8, parallelism=2)
    assert samples[-1] < samples[1] * 1.05, samples

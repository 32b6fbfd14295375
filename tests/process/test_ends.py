"""A pass that ends with the same step for all, under the process runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zephon as zp
from zephon.testing.oracle import OraclePass


@pytest.mark.parametrize("last_step", ["drop", "pad"])
def test_a_common_last_step_of_worker_processes(last_step: str) -> None:
    """Steps are read ahead and kept, pads are made in this process, and slots do not run out."""
    rows = [{"id": i, "x": np.full(300, i)} for i in range(400)]
    pipeline = zp.Pipeline(zp.StaticMixture([zp.Dataset.from_list("toy", rows)], seed=2, chunk_size=7))
    pipeline = pipeline.filter(keep_some).batch(4)
    settings = {"canonical_replicas": 5, "dp_degree": 1, "cycles_per_step": 3, "last_step": last_step}
    pipeline = pipeline.options(runner="process", parallelism=2, prefetch_batches=1, **settings)
    truth = OraclePass(pipeline)
    with pipeline:
        kept = list(pipeline)
        found = [[b.digest() for b in kept if b.lane_id == lane] for lane in range(5)]
        assert found == [[batch.digest for batch in lane] for lane in truth.lanes]
        assert any(batch.padding for batch in kept) == (last_step == "pad")
        counts = pipeline.counts()["dropped"]
    assert counts == {lane: {name: n for name, n in truth.dropped[lane].items() if n} for lane in range(5)}


def keep_some(record: dict[str, Any]) -> bool:
    return record["id"] % 7 > 1 and record["id"] % 5 > 0

"""Rows of `from_list` lie in one segment that engine and workers map, and are in nobody's heap a second time."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import Enrich
from tests.process.helpers import digests, engine, kill, launcher, line, open_descriptors, wait_until, workers
from zephon.runners import orders, spawn

ROWS = 3000
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def rows(name: str = "toy") -> zp.Dataset:
    """Some 3 MB."""
    records = [{"id": i, "body": chr(97 + i % 26) * 1000, "v": np.arange(i % 5), "w": (i, None)} for i in range(ROWS)]
    return zp.Dataset.from_list(name, records)


def read_only_mappings(pid: int) -> list[int]:
    """Bytes of the shared memory that a process may only read."""
    found = re.findall(r"^(\w+)-(\w+) r--s .*(?:/dev/shm|memfd)", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    return [int(end, 16) - int(start, 16) for start, end in found]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_large_list_is_mapped_and_not_sent(fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fresh:
        monkeypatch.setattr(spawn, "_CODE", THREAD + spawn._CODE)
    sent: list[int] = []
    real = orders.pack

    def pack(what: Any) -> Any:
        packed = real(what)
        sent.append(len(packed[0]))
        return packed

    monkeypatch.setattr(orders, "pack", pack)
    before = open_descriptors()
    dataset = rows()
    with line(dataset=dataset, prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = digests(islice(iterator, 2))
        for pid in (launcher(), engine(), *workers()):
            wait_until(lambda pid=pid: max(read_only_mappings(pid), default=0) >= 3_000_000)  # one may still start
        kill(workers()[0])
        found += digests(iterator)
    assert sent[0] < 200_000
    assert found == digests(line(dataset=dataset, runner="inline"))
    assert found == digests(line(dataset=rows(), runner="inline"))  # of a block that was never shared
    del pipeline, iterator, dataset
    assert open_descriptors() == before


def test_several_lists_large_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second does not fit into the message of descriptors and goes by value."""
    monkeypatch.setattr(orders, "MOST_SHARED", 1)

    def pipeline(runner: str) -> zp.Pipeline:
        small = zp.Dataset.from_list("small", [{"id": i} for i in range(50)])
        source = zp.StaticMixture([rows("a"), small, rows("b")], seed=3, end="redistribute")
        settings: dict[str, Any] = {"runner": runner, "parallelism": 2, "canonical_replicas": 2}
        return zp.Pipeline(source).map(Enrich()).batch(50).options(**settings)

    with pipeline("process") as process:
        assert digests(process) == digests(pipeline("inline"))

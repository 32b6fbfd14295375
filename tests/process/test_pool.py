"""The engine's side of a pool, without processes: what becomes of tasks whose worker dies."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import zephon as zp
from zephon.errors import WorkerError
from zephon.flow.task import Mark, Slice, Task
from zephon.plan.graph import StagePlan
from zephon.record import Pointers
from zephon.runners.execute import StageWork
from zephon.runners.process import ProcessPool
from zephon.runners.rings import lay_out, wire
from zephon.runners.wire import write_report


def pointers(*rows: int) -> Pointers:
    """Rows of the first dataset."""
    return Pointers(np.zeros(len(rows), np.int32), np.array(rows, np.int64), np.zeros(len(rows), np.int64))


@pytest.mark.law("L7")
@pytest.mark.parametrize("at", [0, 1, 2])
def test_slices_without_records_beside_the_record_that_kills(at: int) -> None:
    """A task may be one record among marks: each slice has its result, and the record is named."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(8)])
    slices = [Slice(lane, 0, pointers(), [], 0, Mark("flush", 1)) for lane in range(3)]
    slices[at] = Slice(at, 0, pointers(5), [4], 4)
    forked: list[int] = []
    wirings, _ = wire(lay_out([1], 1 << 16))
    pool = ProcessPool(StageWork(StagePlan([], [], None, 1, ""), [dataset], 1, False), wirings[0], forked.append, 3)
    pool.submit(Task(0, slices))
    for _ in range(3):
        _, results, _, _ = wirings[0][0].worker_ends()
        assert results.send(write_report("ready"))
        assert pool.take() is None
        pool.died(0, signal.SIGSEGV)
    assert len(forked) == 3
    outs = pool.take()
    assert outs is not None
    assert [out.failure is not None for out in outs] == [number == at for number in range(3)]
    failed, error = outs[at].failure  # type: ignore[misc]
    assert failed == 0
    assert isinstance(error, WorkerError)
    assert f"lane {at}, dataset 'toy', shard list, row 5 killed its worker 3 times, alone" in str(error)

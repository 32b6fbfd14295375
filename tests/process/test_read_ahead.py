"""Rows that a worker waits for are read while the operators of the task before run; nobody is blamed for another."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import msgspec
import pytest

import zephon as zp
from tests.process.helpers import digests, ids, line
from zephon.errors import OperatorError, WorkerError
from zephon.flow.task import Task
from zephon.runners.ahead import LEAST_WAIT_S, LOOK_AGAIN, WAITS_IN_A_ROW, Ahead


class FarShard(msgspec.Struct, frozen=True, eq=False):
    """Rows that come from far away: whoever reads some waits for them. One of them may be deadly."""

    name: str
    rows: int
    deadly: int = -1
    size_bytes: int = 0
    block_rows: int | None = None

    def read(self, rows: Any) -> list[Any]:
        wait(0.003)
        if self.deadly in rows:
            os._exit(3)
        return [{"id": row} for row in rows.tolist()]


def wait(seconds: float) -> None:
    select.select([], [], [], seconds)


def far(rows: int, deadly: int = -1, **settings: Any) -> zp.Dataset:
    return zp.Dataset("far", [FarShard("s", rows, deadly)], "made", **settings)


def burn(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "sum": sum(range(2000))}


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_bytes_are_the_same(lanes: int) -> None:
    options: dict[str, Any] = {"canonical_replicas": lanes, "dataset": far(400)}
    found = digests(line(400, burn, **options))
    assert found == digests(line(400, burn, runner="inline", **options))


def test_a_row_that_kills_while_it_is_read_ahead_is_the_one_that_is_named() -> None:
    """Its neighbours' operators were running when it killed; they are not blamed, and are delivered."""
    with line(200, burn, dataset=far(200, deadly=77), max_worker_retries=2) as pipeline:
        found: list[int] = []
        with pytest.raises((WorkerError, OperatorError), match=r"row 77\b.*exclude=\[\('s', 77\)\]"):
            found.extend(row for batch in pipeline for row in ids([batch]))
    assert found == list(range(76))
    with line(200, burn, dataset=far(200, deadly=77, exclude=[("s", 77)])) as pipeline:
        assert ids(pipeline) == [i for i in range(200) if i != 77]


class Library:
    """A loader whose books come when they are told to."""

    def __init__(self, slow: bool) -> None:
        self.slow, self.may_come, self.asked = slow, threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def load(self, task: Task, at: Any) -> list[Any]:
        self.threads.append(threading.current_thread())
        if task.seq and self.slow:
            self.asked.set()
            assert self.may_come.wait(10)
        elif self.slow:
            wait(4 * LEAST_WAIT_S)
        if task.seq == 2:
            raise OSError("the library burnt down")
        return [task.seq]


def cell() -> Any:
    return memoryview(bytearray(8)).cast("Q")


def test_reading_goes_on_beside_the_caller() -> None:
    library = Library(slow=True)
    ahead, tasks = Ahead(library), [Task(seq, []) for seq in range(3)]
    for number in range(WAITS_IN_A_ROW):
        assert not ahead.useful, f"{number} waits may be the machine's affair"
        assert ahead.rows(tasks[0], cell())[0] == [0]
    assert ahead.useful
    ahead.begin(tasks[1])
    assert library.asked.wait(10), "it is being read, and this thread is free"
    library.may_come.set()
    assert ahead.rows(tasks[1], cell())[0] == [1]
    ahead.begin(tasks[2])
    with pytest.raises(OSError, match="burnt down"):
        ahead.rows(tasks[2], cell())
    assert len(set(library.threads)) == 2
    assert ahead.rows(tasks[1], cell())[0] == [1], "one that was not begun is read at once"


def test_reading_ahead_ends_where_nothing_is_waited_for() -> None:
    library = Library(slow=True)
    ahead = Ahead(library)
    for _ in range(WAITS_IN_A_ROW):
        ahead.rows(Task(0, []), cell())
    library.slow = False
    begun = 0
    while ahead.useful:
        ahead.begin(task := Task(1, []))
        assert ahead.rows(task, cell())[0] == [1]
        begun += 1
    assert begun == LOOK_AGAIN - 1
    assert ahead.rows(Task(1, []), cell())[0] == [1], "one is read as before, and did not wait"
    assert not ahead.useful


def test_what_lies_at_hand_is_not_read_ahead() -> None:
    library = Library(slow=False)
    ahead = Ahead(library)
    for seq in (0, 1) * WAITS_IN_A_ROW:
        assert ahead.rows(Task(seq, []), cell())[0] == [seq]
    assert not ahead.useful
    assert len(set(library.threads)) == 1

"""The table of passes: what workers find is the same whichever of them is faster."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.laws.harness import examples  # noqa: E402
from zephon.errors import ConfigError  # noqa: E402
from zephon.torch_loader.passes import MAX_WORKERS, Passes  # noqa: E402


class Epoch:
    """An iteration of some workers, which begin passes one by one; those that stay may run ahead."""

    def __init__(self, table: Passes, workers: int, seed: int, rounds: int, first: int) -> None:
        self.table, self.workers, self.seed = table, workers, seed
        self.left = dict.fromkeys(range(workers), rounds)
        self.next = dict.fromkeys(range(workers), first)

    def begin(self, worker: int) -> None:
        number = self.table.next_pass(worker, self.workers, self.seed)
        number = 0 if number is None else number
        assert number == self.next[worker]
        self.table.begin(worker, self.workers, self.seed, number)
        self.next[worker] += 1
        self.left[worker] -= 1
        if not self.left[worker]:
            del self.left[worker]


@examples(0.5)
@given(data=st.data())
def test_every_worker_finds_the_pass_behind_the_last_iteration(data: st.DataObject) -> None:
    """Whatever the numbers of workers, the order in which they begin, and also where seeds repeat."""
    table, first = Passes(1, 0), 0
    for _ in range(data.draw(st.integers(1, 5))):
        workers, rounds = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
        epoch = Epoch(table, max(1, workers), data.draw(st.integers(0, 2)), rounds, first)
        while epoch.left:
            epoch.begin(data.draw(st.sampled_from(sorted(epoch.left))))
        first += rounds


def test_what_was_counted_before_a_pass() -> None:
    table = Passes(2, 3)
    assert table.counted(1, 4) is None
    table.end(1, 3, (10, (1, 2, 3)))
    assert table.counted(1, 4) == table.counted(1, 3) == (10, (1, 2, 3))
    assert table.counted(1, 2) is table.counted(0, 4) is None
    table.end(1, 4, (20, (4, 5, 6)))  # by a fast worker
    assert table.counted(1, 3) == (10, (1, 2, 3))
    assert table.counted(1, 5) == (20, (4, 5, 6))
    other = Passes(2, 3, table.shared)
    assert other.counted(1, 4) == (20, (4, 5, 6))
    other.renew()
    assert (table.version, table.counted(1, 4)) == (1, None)


def test_a_state_for_every_worker_forgets_what_was_before() -> None:
    table = Passes(1, 0)
    for number in (8, 9):
        for worker in range(3):
            table.begin(worker, 3, number, number)
    for worker in range(2):
        table.forget(worker, 2)
        table.begin(worker, 2, 20, 4)
    assert [table.next_pass(worker, 2, 21) for worker in range(2)] == [5, 5]
    with pytest.raises(ConfigError, match=f"at most {MAX_WORKERS} workers"):
        table.next_pass(MAX_WORKERS, MAX_WORKERS + 1, 0)


def test_workers_that_begin_at_once_find_the_same() -> None:
    """Two threads stand for them, cell by cell in the same table: what one notes while the other reads is not taken."""
    tables, rounds, wrong = Passes(1, 0), 3000, []
    other, meet = Passes(1, 0, tables.shared), threading.Barrier(2, timeout=60)

    def work(table: Passes, worker: int) -> None:
        for number in range(rounds):
            meet.wait()
            begun = table.next_pass(worker, 2, number)
            table.begin(worker, 2, number, begun or 0)
            if (begun or 0) != number:
                wrong.append((worker, number, begun))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=work, args=(other, 1))
        thread.start()
        work(tables, 0)
        thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not wrong

"""A virtual pool: no threads, and tasks that complete in an order drawn from a seed.

Any order in which workers may finish can be forced, and a failure replays from its seed. `VirtualDriver` stands in
for the drivers of `zephon/drive.py`; `forced_order` puts it under a whole pipeline.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from zephon.drive import DRIVERS, Driver, Pins
from zephon.engine import Engine, Job, TailItem
from zephon.errors import InternalError
from zephon.flow.task import Out, Task
from zephon.runners import inline
from zephon.runners.base import Meter
from zephon.runners.execute import StageWork
from zephon.runners.whereabouts import Whereabouts

Order = Literal["random", "first", "last"]
"""Which unfinished task completes next: any, the oldest, the youngest."""


class _Submitted:
    """A task, and its result once it completed."""

    __slots__ = ("outs", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.outs: list[Out] | None = None


class VirtualPool:
    """Tasks lie here until the schedule completes them; results leave in the order of submission."""

    def __init__(self, work: StageWork, room: int, notify: Callable[[], None]) -> None:
        self._work, self._room, self._notify = work, room, notify
        self._tasks: deque[_Submitted] = deque()
        self.unfinished: list[_Submitted] = []
        self.meter = Meter()
        self._where = Whereabouts()
        work.setup(self._where)

    def has_room(self) -> bool:
        return len(self._tasks) < self._room

    def submit(self, task: Task) -> None:
        submitted = _Submitted(task)
        self._tasks.append(submitted)
        self.unfinished.append(submitted)

    def take(self) -> list[Out] | None:
        if not self._tasks or self._tasks[0].outs is None:
            return None
        return self._tasks.popleft().outs

    def complete(self, number: int) -> None:
        """Runs one of the unfinished tasks now."""
        submitted = self.unfinished.pop(number)
        submitted.outs, _ = self._work.run(submitted.task, self._where)
        self._notify()

    def close(self, timeout_s: float) -> None:
        self._tasks.clear()
        self.unfinished.clear()


class Schedule:
    """The `pools` of one engine, a stage each, and all that is decided at random about them.

    `slow_lane`: tasks with records of this lane complete only when nothing else can move.
    """

    def __init__(self, seed: int, order: Order = "random", slow_lane: int | None = None) -> None:
        self.random = random.Random(seed)
        self._order, self._slow_lane = order, slow_lane
        self.pools: list[VirtualPool] = []
        self.notified = 0

    def make_pool(self, work: StageWork, workers: int, notify: Callable[[], None]) -> VirtualPool:
        """A pool with room for `workers` to three times as many tasks (the contract `MakePool`)."""
        self.pools.append(VirtualPool(work, self.random.randint(workers, 3 * workers), notify))
        return self.pools[-1]

    def note(self) -> None:
        """Counts what pools told the driver."""
        self.notified += 1

    def complete_one(self, forced: bool) -> bool:
        """Completes one task of any stage; only of the slow lane's tasks where `forced`. False: there is none."""
        choices = [(pool, i) for pool in self.pools for i, one in enumerate(pool.unfinished) if not self._slow(one)]
        if forced and not choices:
            choices = [(pool, i) for pool in self.pools for i in range(len(pool.unfinished))]
        if not choices:
            return False
        pool, i = {"first": choices[0], "last": choices[-1]}.get(self._order) or self.random.choice(choices)
        pool.complete(i)
        return True

    def _slow(self, submitted: _Submitted) -> bool:
        return any(piece.lane == self._slow_lane and len(piece) for piece in submitted.task.slices)


class VirtualDriver:
    """Moves an engine and its virtual pools in turns drawn from a seed (the contract `Driver`).

    `moves` counts pumps and completions. `look`, if given, sees the engine after each of them: a place for checks of
    what must hold at any moment. Raises InternalError where nothing can move though a batch is awaited.
    """

    pins: Pins | None = None

    def __init__(self, job: Job, schedule: Schedule, look: Callable[[Engine], None] | None = None) -> None:
        self.schedule, self._look = schedule, look
        self.moves = 0
        self.engine = Engine(job, schedule.make_pool, inline.INTERRUPTS, schedule.note)
        self.tail, self.read_metrics = self.engine.tail, self.engine.read_metrics

    def move(self) -> bool:
        """One pump or one completion. False: there is nothing left to do."""
        self.moves += 1
        moved = self._pump_or_complete()
        if self._look is not None:
            self._look(self.engine)
        return moved

    def _pump_or_complete(self) -> bool:
        if self.schedule.random.random() < 0.5 and self.schedule.complete_one(forced=False):
            return True
        return self.engine.pump() or self.schedule.complete_one(forced=True)

    def wait(self) -> None:
        while self.tail.peek() is None:
            if not self.move():
                raise InternalError("the flow stands still though a batch is awaited")

    def poll(self) -> None:
        """Runs ahead of the consumer by a few moves."""
        for _ in range(self.schedule.random.randrange(4)):
            self.move()

    def took(self, item: TailItem) -> TailItem:
        """Runs ahead of the consumer by a few moves."""
        self.poll()
        return item

    def close(self) -> None:
        self.engine.close()


@contextmanager
def forced_order(
    seed: int, order: Order = "random", slow_lane: int | None = None, look: Callable[[Engine], None] | None = None
) -> Iterator[list[VirtualDriver]]:
    """Pipelines with runner="inline" that start in this block run on virtual pools. Gives the list of their drivers."""
    drivers: list[VirtualDriver] = []

    def drive(job: Job) -> Driver:
        drivers.append(VirtualDriver(job, Schedule(seed, order, slow_lane), look))
        return drivers[-1]

    before = DRIVERS["inline"]
    DRIVERS["inline"] = drive
    try:
        yield drivers
    finally:
        DRIVERS["inline"] = before

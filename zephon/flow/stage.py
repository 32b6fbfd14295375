"""One stage of the flow: tasks go to a pool, results come back in the order of their numbers, accumulators decide.

A stage never waits. `dispatch` hands out a task where the pool has room; `take` takes the oldest result where it is
finished and the way to the next stage is free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from zephon.errors import InternalError
from zephon.flow.accumulate import Chain
from zephon.flow.task import Drop, Mark, Out, Run, Slice, Task
from zephon.record import Block, Handle


class Pool(Protocol):
    """What executes the tasks of one stage: the contract of a runner.

    Called by one thread. `submit` and `take` never block. Results are given in the order of submission.
    """

    def has_room(self) -> bool:
        """Whether another task may be submitted now."""

    def submit(self, task: Task) -> None:
        """Hands over a task that has records."""

    def take(self) -> list[Out] | None:
        """One Out a slice of the oldest task submitted and not yet taken, or None while it is not finished."""


class Input(Protocol):
    """Where a stage's slices come from."""

    def deal(self, num_records: int) -> list[Slice]:
        """Slices for the next task."""

    def stop(self, lane: int) -> None:
        """Ends a lane."""


class Stage:
    """Tasks on their way through one pool, and the accumulators behind it."""

    def __init__(self, source: Input, pool: Pool, chain: Chain, task_records: int) -> None:
        self._input, self._pool, self._chain = source, pool, chain
        self.task_records = task_records
        self._tasks: deque[Task] = deque()
        self._seq = 0
        self._joiners: dict[int, Joiner] = {}
        self._stopped: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether no task is on its way."""
        return not self._tasks

    def dispatch(self) -> bool:
        """Hands out tasks while there are records and room; returns whether there was one."""
        worked = False
        while self._pool.has_room() and (slices := self._input.deal(self.task_records)):
            task = Task(self._seq, slices)
            self._seq += 1
            self._tasks.append(task)
            if task.num_records:
                self._pool.submit(task)
            worked = True
        return worked

    def take(self) -> list[Run] | None:
        """What the oldest task became, lane by lane; None where it is not finished."""
        if not self._tasks:
            return None
        task = self._tasks[0]
        outs = self._pool.take() if task.num_records else [Out([], ()) for _ in task.slices]
        if outs is None:
            return None
        if len(outs) != len(task.slices):
            raise InternalError(f"task {task.seq} of {len(task.slices)} slices gave {len(outs)} results")
        self._tasks.popleft()
        runs = []
        for piece, out in zip(task.slices, outs, strict=True):
            if piece.lane in self._stopped:
                continue
            if piece.remake is not None:
                run = piece.remake.took(piece, out)
            else:
                run = self._chain.push(self._joiners.setdefault(piece.lane, Joiner()).join(piece, out))
            if run.mark is not None and run.mark.kind == "error":
                self.stop(run.lane)  # also for later slices of this task
            runs.append(run)
        return runs

    def stop(self, lane: int) -> None:
        """Ends a lane: what is still on its way is discarded."""
        self._stopped.add(lane)
        self._input.stop(lane)


class Joiner:
    """Turns the outs of one lane's slices into runs of complete events: a later stage may cut an event in two."""

    def __init__(self) -> None:
        self._samples: list[Handle] = []
        self._events: list[int] = []
        self._lengths: list[int] = []
        self._drops: list[Drop] = []

    def join(self, piece: Slice, out: Out) -> Run:
        """The events that this slice completes. What belongs to an open event waits for the next slice."""
        mark, through = piece.mark, piece.through
        if out.failure is not None:
            failed, error = out.failure
            mark, through = Mark("error", piece.events[failed], error), piece.events[failed] - 1
        block = out.block(piece.items, piece.events)
        events = piece.events if isinstance(out.index, range) else [piece.events[i] for i in out.index]
        drops = self._in_order(piece, out)
        if self._events or self._drops or not piece.closed or out.failure is not None:
            return self._merge(piece, block, events, out.lengths, drops, mark, through)
        return Run(piece.lane, piece.pass_index, block, events, through, out.lengths, drops, mark, piece.num_pointers)

    @staticmethod
    def _in_order(piece: Slice, out: Out) -> list[Drop]:
        """The drops of earlier stages and of this one, by event."""
        own = [(piece.events[i], reason, amount) for i, reason, amount in out.drops]
        if not piece.drops and len(own) < 2:
            return own
        return sorted([*piece.drops, *own], key=lambda drop: drop[0])

    def _merge(
        self,
        piece: Slice,
        block: Block,
        events: Sequence[int],
        lengths: list[int] | None,
        drops: list[Drop],
        mark: Mark | None,
        through: int,
    ) -> Run:
        self._samples += [block[i] for i in range(len(block))]
        self._events += events
        self._lengths += lengths or [1] * len(block)
        self._drops += drops
        # What came out before a record that failed is delivered; what its event dropped is not decided.
        failed = mark is not None and mark.kind == "error"
        cut = len(self._events) if failed else bisect_right(self._events, through)
        run = Run(
            piece.lane,
            piece.pass_index,
            self._samples[:cut],
            self._events[:cut],
            through,
            self._lengths[:cut],
            [drop for drop in self._drops if drop[0] <= through],
            mark,
            piece.num_pointers,
        )
        self._samples, self._events, self._lengths = self._samples[cut:], self._events[cut:], self._lengths[cut:]
        self._drops = [drop for drop in self._drops if drop[0] > through]
        return run


class Pending:
    """Between two stages: runs of the earlier one wait here, and become slices of the later one."""

    def __init__(self, upstream: Stage, most_records: int) -> None:
        self._upstream, self._most = upstream, most_records
        self._runs: deque[Run] = deque()
        self._at = 0
        self._waiting = 0

    @property
    def has_room(self) -> bool:
        """Whether the earlier stage may take another result."""
        return self._waiting < self._most

    def put(self, run: Run) -> None:
        """Appends what the earlier stage made."""
        self._runs.append(run)
        self._waiting += len(run.samples)

    def deal(self, num_records: int) -> list[Slice]:
        slices = []
        while self._runs and (num_records > 0 or not len(self._runs[0].samples)):
            piece = self._cut(num_records)
            slices.append(piece)
            num_records -= len(piece)
        return slices

    def _cut(self, most: int) -> Slice:
        """The next records of the first run: to its end with its mark, or a part of it."""
        run, start = self._runs[0], self._at
        stop = min(len(run.samples), start + most)
        items = [run.samples[i] for i in range(start, stop)]
        events = run.events[start:stop]
        self._waiting -= stop - start
        if stop == len(run.samples):
            self._runs.popleft()
            self._at = 0
            mark, through, pointers = run.mark, run.through, run.num_pointers
        else:
            self._at = stop
            last = events[-1]
            mark, through, pointers = None, last - (run.events[stop] == last), 0
        given = bisect_right(run.drops, through, key=lambda drop: drop[0])
        drops, run.drops = run.drops[:given], run.drops[given:]
        closed = not events or events[-1] <= through or (mark is not None and mark.kind == "error")
        piece = Slice(run.lane, run.pass_index, items, events, through, mark, closed, drops, pointers)
        piece.remake = run.remake
        return piece

    def stop(self, lane: int) -> None:
        """Forgets a lane's runs, and ends it in the earlier stages too."""
        if self._runs and self._runs[0].lane == lane:
            self._at = 0
        self._runs = deque(run for run in self._runs if run.lane != lane)
        self._waiting = sum(len(run.samples) for run in self._runs) - self._at
        self._upstream.stop(lane)

"""The process runner's pool, as the engine process sees it: worker processes behind rings.

Every worker has a ring of its own for tasks and one for results. Its results are in the order of its tasks, so the
result of the oldest task of all is at the head of the ring of the worker that got it: the rings are the reorder
buffer. A task goes to the worker with the fewest unfinished ones.

A worker that dies is replaced on the same rings, emptied: a dead process writes no more, and what it had published was
taken first. Exactly its unfinished pieces of work go to the replacement. A piece that was being worked on when the
worker died is a suspect: it is cut, around the record that the worker was on where that is known and else in halves,
until one record alone has killed its worker `max_retries` times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from zephon.errors import WorkerError
from zephon.flow.task import Out, Slice, Task
from zephon.ipc.area import Area, AreaReader
from zephon.ipc.channel import Receiver, Sender
from zephon.ipc.ring import Ring, ring_bytes
from zephon.ipc.wake import Wake
from zephon.plan.limits import TASKS_PER_WORKER
from zephon.record import Pointers, Record
from zephon.runners.base import Given, Meter, Placer
from zephon.runners.deaths import cause, how
from zephon.runners.execute import StageWork
from zephon.runners.watchdog import Stall
from zephon.runners.whereabouts import CELLS_BYTES, STOPPED, WHOLE, Spot, Whereabouts
from zephon.runners.wire import Builder, Notes, read_report, write_task

LEAST_TASKS = 2  # of a worker, however large: one that it works on, and the next
MOST_FAILED_STARTS = 10  # in a row: someone kills at random, or setup() does
Fork = Callable[[int], None]


class Wiring(msgspec.Struct, frozen=True):
    """The rings and wake-ups of one worker. Made before the forks, so that all sides have them."""

    tasks: memoryview
    results: memoryview
    task_capacity: int
    result_capacity: int
    task_data: Wake
    task_credit: Wake
    result_data: Wake
    result_credit: Wake
    area: memoryview
    """For large results; see `ipc/area.py`."""
    area_file: tuple[int, int]
    """(descriptor, offset) of the area."""
    cells: memoryview
    """Where the worker stands; see `whereabouts.py`."""
    stack_file: int
    """The descriptor that it writes its stack to when asked; see `stacks.py`."""

    @staticmethod
    def size(task_capacity: int, result_capacity: int) -> int:
        """Reserved shared memory of one worker."""
        return ring_bytes(task_capacity) + ring_bytes(result_capacity) + CELLS_BYTES

    def reset(self) -> None:
        """Empties the rings and takes back every wake-up. Only while there is no worker on them."""
        for wake in (self.task_data, self.task_credit, self.result_data, self.result_credit):
            wake.take()
        Ring(self.tasks, self.task_capacity).reset()
        Ring(self.results, self.result_capacity).reset()
        Whereabouts(self.cells).reset()

    def engine_ends(self) -> tuple[Sender, Receiver]:
        """(tasks, results) for the engine. The worker may be there already."""
        return (
            Sender(Ring(self.tasks, self.task_capacity), self.task_data, self.task_credit),
            Receiver(Ring(self.results, self.result_capacity), self.result_data, self.result_credit),
        )

    def worker_ends(self) -> tuple[Receiver, Sender, Whereabouts, int]:
        """(tasks, results, where it stands, its stack file) for the worker."""
        return (
            Receiver(Ring(self.tasks, self.task_capacity), self.task_data, self.task_credit),
            Sender(
                Ring(self.results, self.result_capacity),
                self.result_data,
                self.result_credit,
                Area(self.area, *self.area_file),
            ),
            Whereabouts(self.cells),
            self.stack_file,
        )


class _Piece:
    """Some slices of a task that one worker does at a time; all of them, unless the task killed a worker."""

    __slots__ = ("kills", "outs", "places", "slices", "starts")

    def __init__(self, slices: list[Slice], starts: list[tuple[int, int]]) -> None:
        self.slices = slices
        self.starts = starts
        """For each slice, its number in the task, and how many records of that slice come before it."""
        self.kills = 0
        self.outs: list[Out] | None = None
        self.places = Given()

    @property
    def num_records(self) -> int:
        return sum(map(len, self.slices))

    def cut(self, record: int | None) -> list[_Piece]:
        """What comes before a record, it alone, and what comes behind it; two halves where there is None."""
        total = self.num_records
        bounds = {total // 2} if record is None else {record, record + 1}
        return [self._part(start, stop) for start, stop in pairwise(sorted({0, *bounds, total}))]

    def _part(self, start: int, stop: int) -> _Piece:
        part, at = _Piece([], []), 0
        for piece, (number, before) in zip(self.slices, self.starts, strict=True):
            a, b = max(start - at, 0), min(stop - at, len(piece))
            if b > a:
                part.slices.append(_sub_slice(piece, a, b))
                part.starts.append((number, before + a))
            at += len(piece)
        return part


def _sub_slice(piece: Slice, start: int, stop: int) -> Slice:
    items = piece.items.cut(start, stop) if isinstance(piece.items, Pointers) else piece.items[start:stop]
    return Slice(piece.lane, piece.pass_index, items, piece.events[start:stop], piece.through)


class _Job:
    """A task on its way, as pieces in order, all with the worker of one index."""

    __slots__ = ("index", "pieces", "task")

    def __init__(self, task: Task, index: int) -> None:
        self.task, self.index = task, index
        self.pieces = [_Piece(list(task.slices), [(i, 0) for i in range(len(task.slices))])]

    @property
    def done(self) -> bool:
        return all(piece.outs is not None for piece in self.pieces)

    def outs(self) -> list[Out]:
        """One Out a slice of the task, put together from the pieces."""
        if len(self.pieces) == 1:
            return self.pieces[0].outs or []
        parts: list[list[tuple[int, Out]]] = [[] for _ in self.task.slices]
        for piece in self.pieces:
            for (number, start), out in zip(piece.starts, piece.outs or [], strict=True):
                parts[number].append((start, out))
        return [_joined(part) for part in parts]


def _joined(parts: list[tuple[int, Out]]) -> Out:
    """The outs of consecutive parts of one slice as one; nothing behind the first failure."""
    whole = Out([], [])
    records: list[Record] = []
    index: list[int] = []
    paths: list[tuple[int, ...]] = []
    lengths: list[int] = []
    for start, out in parts:
        records += out.records
        index += [start + i for i in out.index]
        paths += out.path or [()] * len(out.records)
        lengths += out.lengths or [1] * len(out.records)
        whole.drops += [(start + i, reason, amount) for i, reason, amount in out.drops]
        if out.failure is not None:
            whole.failure = (start + out.failure[0], out.failure[1])
            break
    whole.records, whole.index, whole.lengths = records, index, lengths
    whole.path = paths if any(paths) else None
    return whole


class _Worker:
    """One worker process, from the engine's side."""

    def __init__(self, index: int, wiring: Wiring, area: AreaReader | None = None) -> None:
        self.index, self.wiring = index, wiring
        self.tasks, self.results = wiring.engine_ends()
        self.area = area or AreaReader(wiring.area)
        self.results.area = self.area
        self._held = self.area.held()  # of a worker before this one, to be told with the first task
        self.assigned: deque[_Piece] = deque()
        self.where = Whereabouts(wiring.cells)
        self.collected = 0
        self.stall: Stall | None = None
        """Why it is ended, if it is."""
        self.ready = self.stopped = False

    def spot(self) -> Spot | None:
        """Where it stands; None where it waits, unless it is stopped while tasks wait for it."""
        spot = self.where.spot()
        if spot is None and self.stopped and self.assigned:
            return Spot(self.collected + 1, STOPPED, WHOLE)
        return spot

    def assign(self, piece: _Piece, builder: Builder, alone: bool = False) -> None:
        self.assigned.append(piece)
        notes = Notes(self.area.take_freed(), self._held, alone, piece.places.told)
        self.tasks.send(write_task(0, piece.slices, builder, notes))
        self._held = []

    def piece_at(self, spot: Spot) -> _Piece | None:
        """What it works on; None in setup."""
        number = spot.task - 1 - self.collected
        return self.assigned[number] if 0 <= number < len(self.assigned) else None


class ProcessPool:
    """The workers of one stage. `fork(index)` asks for a worker process on the wiring of that index."""

    def __init__(
        self, work: StageWork, wirings: Sequence[Wiring], fork: Fork, max_retries: int, placer: Placer | None = None
    ) -> None:
        self._work, self._fork, self._max_retries = work, fork, max_retries
        self._workers = [_Worker(i, wiring) for i, wiring in enumerate(wirings)]
        self._placer = placer
        self._jobs: deque[_Job] = deque()
        self._limit = len(wirings) * TASKS_PER_WORKER
        self._records = 0  # under way
        self._most_bytes = sum(wiring.area.nbytes for wiring in wirings) // 2  # of their results
        self._failed_starts = 0
        self.meter = Meter()

    def has_room(self) -> bool:
        deep = LEAST_TASKS if self.meter.bytes_of(self._records) > self._most_bytes else TASKS_PER_WORKER
        return len(self._jobs) < self._limit and min(len(w.assigned) for w in self._workers) < deep

    def submit(self, task: Task) -> None:
        worker = min(self._workers, key=lambda w: len(w.assigned))
        job = _Job(task, worker.index)
        if self._placer is not None:
            job.pieces[0].places = self._placer.give(task.slices)
        self._jobs.append(job)
        self._records += task.num_records
        worker.assign(job.pieces[0], self._work)

    def take(self) -> list[Out] | None:
        for worker in self._workers:
            worker.tasks.flush()
        if not self._jobs:
            return None
        job = self._jobs[0]
        worker = self._workers[job.index]
        while not job.done:
            if not self._collect(worker):
                return None
        self._jobs.popleft()
        self._records -= job.task.num_records
        outs = job.outs()
        if self._placer is not None:
            self._placer.took(job.task.slices, outs)
        return outs

    def _collect(self, worker: _Worker) -> bool:
        """Takes one message of a worker; returns whether there was one. What is not taken yet waits in its ring."""
        message = worker.results.receive()
        if message is None:
            return False
        places = worker.assigned[0].places if worker.assigned else Given()
        result = read_report(message, places.memories)
        if result is None:
            worker.ready = True
            self._failed_starts = 0
            return True
        piece = worker.assigned.popleft()
        worker.collected += 1
        piece.outs, seconds = result
        for part, out in zip(piece.slices, piece.outs, strict=True):
            if out.failure is not None:
                self._work.name_rows(part, out.failure)
        self.meter.add(seconds, piece.num_records, len(message) + places.num_bytes)
        return True

    def died(self, index: int, status: int) -> tuple[str, str]:
        """Replaces a worker process that died, whether there is work for it or not. Returns (cause, who died).

        `status`: as waitpid gives it.
        """
        worker = self._workers[index]
        worker.results.drain()
        while self._collect(worker):
            pass
        told = cause(status, worker.stall), f"worker {index}, where {self._last_words(worker)}"
        self.meter.deaths[told[0]] += 1
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS + 2 * len(self._workers):  # all may be killed at once
                raise WorkerError(
                    f"{self._failed_starts} workers in a row died while they started, in the setup of "
                    f"'{' -> '.join(self._work.names)}': {how(status, worker.stall)}; mend that setup, or use "
                    "runner='threads' to see it"
                )
        elif worker.assigned and not _was_stopped(worker.stall):
            self._suspect(worker, status)
        self._replace(worker)
        return told

    def _last_words(self, worker: _Worker) -> str:
        """What a dead worker was on, as far as its cells tell."""
        spot = worker.where.spot()
        piece = worker.piece_at(spot) if spot is not None else None
        if spot is None or (spot.task and piece is None):
            return "nothing was being worked on"
        return self._work.describe(spot, piece.slices if piece else [], "was").rstrip(",")

    def _suspect(self, worker: _Worker, status: int) -> None:
        """The first unfinished piece was being worked on: cut it, or count against its only record."""
        piece = worker.assigned[0]
        if piece.num_records > 1:
            job = next(job for job in self._jobs if piece in job.pieces)
            parts = piece.cut(self._last_record(worker, piece))
            at = job.pieces.index(piece)
            job.pieces[at : at + 1] = parts
            worker.assigned.popleft()
            worker.assigned.extendleft(reversed(parts))
            return
        piece.kills += 1
        if piece.kills >= self._max_retries:
            worker.assigned.popleft()
            error = self._killer(piece, status, worker.stall)
            piece.outs = [Out([], [], failure=(0, error) if len(part) else None) for part in piece.slices]

    @staticmethod
    def _last_record(worker: _Worker, piece: _Piece) -> int | None:
        """The number in `piece` of the record that a dead worker was on, where its cells tell."""
        spot = worker.where.spot()
        known = spot is not None and worker.piece_at(spot) is piece and spot.record < piece.num_records
        return spot.record if spot is not None and known else None

    def _killer(self, piece: _Piece, status: int, stall: Stall | None) -> WorkerError:
        where, remedy = self._work.blame(next(part for part in piece.slices if len(part)))
        names = " -> ".join(self._work.names) or "fetch"
        did, mend = ("killed", "") if stall is None else ("stalled", ", raise stall_timeout_s")
        return WorkerError(
            f"the record at {where} {did} its worker {piece.kills} times, alone, in '{names}': {how(status, stall)}; "
            f"mend the operator{mend}, or {remedy}"
        )

    def spots(self) -> list[Spot | None]:
        """Where each worker stands; None where it waits."""
        return [worker.spot() for worker in self._workers]

    def set_stopped(self, index: int, stopped: bool) -> None:
        """Whether a worker process is stopped: what it does then does not show where it stands."""
        self._workers[index].stopped = stopped

    def stack_file(self, index: int) -> int:
        """The descriptor that a worker writes its stack to."""
        return self._workers[index].wiring.stack_file

    def describe(self, stall: Stall) -> str:
        """Which worker stands where, in words."""
        if _was_stopped(stall):
            return f"worker {stall.index} has been stopped (SIGSTOP, or a debugger), while tasks wait for it,"
        piece = self._workers[stall.index].piece_at(stall.spot)
        return f"worker {stall.index}: {self._work.describe(stall.spot, piece.slices if piece else [])}"

    def condemn(self, stall: Stall) -> str:
        """Notes that its worker is about to be killed for it; returns what follows from that."""
        self._workers[stall.index].stall = stall
        return "its worker is ended and the work tried again"

    def _replace(self, worker: _Worker) -> None:
        """A fresh process on the same rings gets exactly what is unfinished."""
        worker.wiring.reset()
        fresh = _Worker(worker.index, worker.wiring, worker.area)
        self._workers[worker.index] = fresh
        self._fork(worker.index)
        for piece in worker.assigned:
            fresh.assign(piece, self._work, alone=True)

    def wakes(self) -> dict[int, Callable[[], None]]:
        """By descriptor, what to call when it is readable: a result is there."""
        return {
            worker.wiring.result_data.fd: lambda index=index: self._workers[index].results.note()  # type: ignore[misc]
            for index, worker in enumerate(self._workers)
        }

    def credits(self) -> dict[int, Callable[[], Any]]:
        """The same for room in task rings that are full. With room a worker's credit is nothing to wake up for."""
        full = (worker.wiring.task_credit for worker in self._workers if not worker.tasks.empty)
        return {credit.fd: credit.take for credit in full}

    def close(self, timeout_s: float) -> None:
        """Nothing: the launcher ends the processes."""


def _was_stopped(stall: Stall | None) -> bool:
    """Whether a worker stood still between two tasks, for which no record is to blame."""
    return stall is not None and stall.spot.step == STOPPED

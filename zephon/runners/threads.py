"""The threads runner: a pool of threads a stage, for operators that work outside the GIL (tokenizers, numpy, reads)."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from zephon.errors import WorkerError, describe
from zephon.flow.task import Out, Task
from zephon.plan.limits import TASKS_PER_WORKER
from zephon.runners.base import Meter
from zephon.runners.execute import StageWork
from zephon.runners.watchdog import Stall, Watchdog
from zephon.runners.whereabouts import Spot, Whereabouts

INTERRUPTS = False  # a KeyboardInterrupt in a worker thread is always the user's own


class _Job:
    """A task and, once it ran, its result or what went wrong."""

    __slots__ = ("done", "error", "outs", "seconds", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.done = False
        self.outs: list[Out] = []
        self.seconds: dict[str, float] = {}
        self.error: BaseException | None = None


class ThreadPool:
    """`workers` daemon threads that run tasks as they come; results leave in the order of submission."""

    def __init__(self, work: StageWork, workers: int, notify: Callable[[], None]) -> None:
        self._work, self._notify = work, notify
        self._jobs: deque[_Job] = deque()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._limit = workers * TASKS_PER_WORKER
        self.meter = Meter()
        self._where = [Whereabouts() for _ in range(workers)]
        self._on: list[_Job | None] = [None] * workers
        work.setup(Whereabouts())  # in the caller's thread
        self._threads: list[threading.Thread] = []
        try:
            for i in range(workers):
                thread = threading.Thread(target=self._serve, args=(i,), name=f"zephon-worker-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(1.0)
            raise

    def _serve(self, index: int) -> None:
        where = self._where[index]
        while (job := self._queue.get()) is not None:
            self._on[index] = job
            where.begin()
            try:
                job.outs, job.seconds = self._work.run(job.task, where)
            except BaseException as error:  # not from user code, which Rows catches: ours
                job.error = error
            where.leave()
            self._on[index] = None
            job.done = True
            self._notify()

    def spots(self) -> list[Spot | None]:
        """Where each worker stands; None where it waits."""
        return [where.spot() for where in self._where]

    def describe(self, stall: Stall) -> str:
        """Which worker stands where for how long, in words, and its stack."""
        job, frame = self._on[stall.index], sys._current_frames().get(self._threads[stall.index].ident or 0)
        what = self._work.describe(stall.spot, job.task.slices if job is not None else [])
        stack = "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (it ended)"
        return f"worker {stall.index}: {what} for {stall.seconds:,.1f} s; its stack:\n{stack}"

    def has_room(self) -> bool:
        return len(self._jobs) < self._limit

    def submit(self, task: Task) -> None:
        job = _Job(task)
        self._jobs.append(job)
        self._queue.put(job)

    def take(self) -> list[Out] | None:
        if not self._jobs or not self._jobs[0].done:
            return None
        job = self._jobs.popleft()
        if job.error is not None:
            raise WorkerError(f"a worker thread failed on task {job.task.seq}: {describe(job.error)}") from job.error
        self.meter.add(job.seconds, job.task.num_records)
        return job.outs

    def close(self, timeout_s: float) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class ThreadWatch:
    """Says which threads of some pools have stalled. A thread cannot be ended, so that is all it does."""

    def __init__(self, pools: Sequence[object], warn_s: float | None, say: Callable[[str], None]) -> None:
        self._pools = [(pool, Watchdog(warn_s, None)) for pool in pools if isinstance(pool, ThreadPool)]
        self._say = say
        self.period_s = Watchdog(warn_s, None).period_s
        self._next_s = 0.0

    def look(self) -> None:
        """Looks, if it is time to. To be called at least every `period_s`."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + self.period_s
        for pool, watchdog in self._pools:
            for stall in watchdog.look(pool.spots(), now):
                told = pool.describe(stall)
                if pool.spots()[stall.index] == stall.spot:  # else the stack may be of other work
                    self._say(told)

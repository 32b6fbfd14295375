"""The threads runner: a pool of threads a stage, for operators that work outside the GIL (tokenizers, numpy, reads)."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from zephon.errors import WorkerError, describe
from zephon.flow.task import Out, Task
from zephon.plan.limits import TASKS_PER_WORKER
from zephon.runners.base import Meter
from zephon.runners.execute import StageWork

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
        work.setup()
        self._threads: list[threading.Thread] = []
        try:
            for i in range(workers):
                thread = threading.Thread(target=self._serve, name=f"zephon-worker-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(1.0)
            raise

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job.outs, job.seconds = self._work.run(job.task)
            except BaseException as error:  # not from user code, which Rows catches: ours
                job.error = error
            job.done = True
            self._notify()

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

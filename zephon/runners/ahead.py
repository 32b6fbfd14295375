"""Reads the rows of a worker's next task while its operators run, where reading means waiting.

From memory or a page cache there is nothing to overlap, and a second thread would only fight for the interpreter. So
the thread starts where the worker had to wait for the rows of some tasks in a row (a disk, a network), and now and then
a task is read as before, to see whether that is still so.
"""

from __future__ import annotations

import queue
import resource
import threading
import time
from typing import Any, Protocol

from zephon.flow.task import Task
from zephon.ipc import stray
from zephon.ops.base import At
from zephon.runners.whereabouts import WHOLE

LEAST_WAIT_S = 0.0005  # for the rows of a task; less is not worth a change of threads
WAITS_IN_A_ROW = 4  # a single one may be the machine's affair
LOOK_AGAIN = 32  # tasks


class Loader(Protocol):
    """What reads the rows of a task."""

    def load(self, task: Task, at: At) -> list[Any]:
        """The records of a task; `at` tells which one is read."""


class Ahead:
    """The rows of one task at a time, read here or by the thread."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._wanted: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[Any, float, BaseException | None]] = queue.SimpleQueue()
        self._task: Task | None = None
        self._thread: threading.Thread | None = None
        self._waited = self._begun = 0

    @property
    def useful(self) -> bool:
        """Whether reading has been found to wait, so that `begin` is worth its while."""
        return self._waited >= WAITS_IN_A_ROW and self._begun % LOOK_AGAIN != LOOK_AGAIN - 1

    def begin(self, task: Task) -> None:
        """Begins to read the rows of the task that comes next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="zephon-read-ahead", daemon=True)
            self._thread.start()
        self._task = task
        self._begun += 1
        self._wanted.put(task)

    def rows(self, task: Task, at: At) -> tuple[list[Any], float]:
        """(the records of a task, the seconds that reading them took)."""
        if self._task is not task:
            return self._load(task, at)
        self._task = None
        found, seconds, error = self._read.get()
        if error is not None:
            raise error
        return found, seconds

    def _load(self, task: Task, at: At) -> tuple[list[Any], float]:
        began, cpu, waits = time.perf_counter(), time.thread_time(), _waits()
        found = self._loader.load(task, at)
        seconds = time.perf_counter() - began
        waited = _waits() > waits and seconds - (time.thread_time() - cpu) >= LEAST_WAIT_S
        self._waited = min(self._waited + 1, WAITS_IN_A_ROW) if waited else 0
        self._begun += self._begun % LOOK_AGAIN == LOOK_AGAIN - 1
        return found, seconds

    def _serve(self) -> None:
        at = memoryview(bytearray(8)).cast("Q")  # nobody looks there
        at[0] = WHOLE
        while True:
            task = self._wanted.get()
            began = time.perf_counter()
            try:
                self._read.put((self._loader.load(task, at), time.perf_counter() - began, None))
            except BaseException as error:
                self._read.put((None, 0.0, error))
            stray.leave()


def _waits() -> int:
    """How often this thread gave up the CPU by itself: a wait, and not another program's turn."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

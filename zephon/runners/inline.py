"""The inline runner: a task runs when it is taken, in the thread that asks. No concurrency at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zephon.flow.task import Out, Task
from zephon.runners.base import Meter
from zephon.runners.execute import StageWork
from zephon.runners.whereabouts import Whereabouts

INTERRUPTS = True  # on the main thread a Ctrl-C cannot be told from a KeyboardInterrupt that user code raises


class InlinePool:
    """Holds one task, and runs it when its result is wanted."""

    def __init__(self, work: StageWork, workers: int, notify: Callable[[], None]) -> None:
        self._work = work
        self._tasks: deque[Task] = deque()
        self.meter = Meter()
        self._where = Whereabouts()  # nobody looks: who could tell runs the work
        work.setup(self._where)

    def has_room(self) -> bool:
        return not self._tasks

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def take(self) -> list[Out] | None:
        if not self._tasks:
            return None
        task = self._tasks.popleft()
        outs, seconds = self._work.run(task, self._where)
        self.meter.add(seconds, task.num_records)
        return outs

    def close(self, timeout_s: float) -> None:
        self._tasks.clear()

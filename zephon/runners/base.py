"""The contract of a runner: one pool a stage, and one way to be told that something was done."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from zephon.errors import Closed
from zephon.flow.stage import Pool
from zephon.flow.task import Out, Slice
from zephon.ipc.in_slots import Places
from zephon.runners.execute import StageWork

TASK_S = 0.016
"""Seconds of work in a task. What wakes finds cold caches: a task costs the engine some 200 us and the worker 30.

Longer tasks also even out records of unequal cost: with 1 % of them 100 times slower, 2 workers of 8 tasks each were
busy 0.94 of the time at 4 ms and 0.97 at 16 ms, 8 workers 0.82 and 0.97 (simulated).
"""


class Meter:
    """The work of the results taken so far: seconds by name, records, and the bytes that they came as.

    And the deaths of workers by cause.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.records = 0
        self.bytes = 0
        self.deaths: Counter[str] = Counter()

    def add(self, seconds: dict[str, float], num_records: int, num_bytes: int = 0) -> None:
        """Adds a result."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
        self.records += num_records
        self.bytes += num_bytes

    def bytes_of(self, num_records: int) -> float:
        """What the results of so many records will likely be, going by those so far."""
        return self.bytes * num_records / self.records if self.records else 0.0

    def task_records(self, most: int, most_bytes: int) -> int:
        """Records that are `TASK_S` of work, and at most `most_bytes` as a result."""
        if not self.records:
            return most
        each = max(sum(self.seconds.values()) / self.records, 1e-9)
        fit = most_bytes * self.records // self.bytes if self.bytes else most
        return max(1, min(most, fit, int(TASK_S / each)))


class RunnerPool(Pool, Protocol):
    """A pool that an engine can also measure and end."""

    meter: Meter

    def close(self, timeout_s: float) -> None:
        """Ends the workers. Results not taken are lost; nothing may be submitted any more."""


class Given(NamedTuple):
    """The places of a task's records."""

    told: Places | None = None
    """What the worker is told of them."""
    memories: Mapping[int, Any] = MappingProxyType({})
    """The slots, by number, which are kept for the task by this."""
    num_bytes: int = 0
    """Of all records that have one."""


class Placer(Protocol):
    """Who gives places in slots: `zephon/places.py`."""

    def give(self, slices: Sequence[Slice]) -> Given:
        """Places for the records of the next task."""

    def took(self, slices: Sequence[Slice], outs: Sequence[Out]) -> None:
        """What the oldest task became that has not been told yet."""


MakePool = Callable[[StageWork, int, Callable[[], None]], RunnerPool]
"""(work, workers, notify) -> pool. The pool calls `notify` from any thread when a result is ready."""


class _Process:
    """Which process this is, without a system call a batch."""

    pid = os.getpid()

    @classmethod
    def renew(cls) -> None:
        cls.pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.renew)


def check_process(pid: int) -> None:
    """Raises Closed where the process of this number is another one, which forked this one."""
    if _Process.pid != pid:
        raise Closed("this iterator belongs to the process that forked this one; make a pipeline of your own here")


class Turns:
    """Threads that take from one iterator take turns. In a fork, whoever held it is not there to let it go."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            check_process(self._pid)
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

"""Deaths of workers on purpose: finds the worker processes of a live pipeline, and kills them at seeded moments.

    killer = Killer("0")
    with killer, pipeline:
        for batch in killer.watch(pipeline):
            ...
    assert killer.kills

Workers die of SIGKILL, as they do where memory runs out. Some kills are the consumer's: behind seeded batches, in part
once all workers rest, in part in the middle of whatever they do. A thread adds kills at random times. The moments come
from the seed; what a worker does just then is the machine's affair, so no two runs are quite the same.

Linux only, as the process runner is. The pipeline needs a `max_worker_retries` beyond reach: whoever kills at random
hits one record several times in the end. For deaths at named points, slow and failing reads see `points.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")

UNREACHED_RETRIES = 1_000_000  # for `max_worker_retries`
PAUSE_S = (0.01, 0.2)  # between two kills of the thread
MOST_IN_A_ROW = 4  # then nobody is killed until all have surely started: a pool gives up behind ten failed starts
LEAST_REST_S = 0.3
MOST_WAIT_S = 1.0  # for workers to rest
LOOK_S = 0.005  # between two looks at them
_LAUNCHER = "zephon.runners.launcher"


# -- who is there ------------------------------------------------------------------------------------------------------


def launchers(trainer: int | None = None) -> list[int]:
    """The launchers of all live pipelines of a process (default: this one)."""
    return [pid for pid in _children(trainer or os.getpid()) if _LAUNCHER in _command(pid)]


def workers(trainer: int | None = None) -> list[int]:
    """The worker processes of all live pipelines of a process (default: this one).

    Each launcher forks its engine first of all; every other child of it is a worker, of any stage.
    """
    return [pid for launcher in launchers(trainer) for pid in _children(launcher)[1:] if state_of(pid) not in "ZX"]


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does (R runs, S sleeps, Z is dead); X where there is none."""
    fields = _stat(pid)
    return fields[0] if fields else "X"


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Sends a signal to a child of a child of this process; False where it is gone, or its number is someone else's."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        fields = _stat(pid)
        if (
            not fields or fields[0] in "ZX" or int(fields[1]) not in launchers()
        ):  # behind pidfd_open: the number is its own for certain
            return False
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _children(pid: int) -> list[int]:
    """In the order in which they were made, dead ones included."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, ..."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


# -- the kills ---------------------------------------------------------------------------------------------------------


class Killer:
    """Kills workers of this process's pipelines while a stream is watched; a context that ends its thread.

    `apart`: batches between two kills of the consumer, on average; the first one comes behind the first batch.
    `kills` counts them, `kills_at_work` those of them that hit a worker which was not asleep.
    """

    def __init__(self, seed: str = "0", apart: int = 4) -> None:
        self._apart = apart
        self.kills = self.kills_at_work = 0
        self._points, self._times = random.Random(f"{seed} points"), random.Random(f"{seed} times")
        self._victims = random.Random(f"{seed} victims")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watching = False
        self._at_point = False  # the thread leaves the workers alone, or they would never rest
        self._rest_s = LEAST_REST_S
        self._in_a_row, self._rests_until = 0, 0.0
        self._thread = threading.Thread(target=self._kill_at_times, name="zephon-killer")

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, stream: Iterable[Item]) -> Generator[Item, None, None]:
        """The items of a stream. Workers are killed between them, from the first item to the end of the stream.

        The first item comes once workers have started, so they take no longer than that to start again.
        """
        begun, left = time.monotonic(), 1
        try:
            for item in stream:
                if not self._watching:
                    self._rest_s = max(self._rest_s, time.monotonic() - begun)
                    self._watching = True
                yield item
                left -= 1
                if not left:
                    killed = self._kill_at_point()
                    left = self._points.randint(1, 2 * self._apart - 1) if killed else 1
        finally:
            with self._lock:  # a kill under way belongs to this stream, and comes to its end
                self._watching = False

    def _kill_at_point(self) -> bool:
        """One kill of the consumer's; it waits where workers must have time to start.

        False where all are dead, and not yet replaced.
        """
        self._at_point = True
        self._over.wait(max(0.0, self._rests_until - time.monotonic()))
        if self._points.random() < 0.4:
            self._wait_for_rest()
        killed = self._kill()
        self._at_point = False
        return killed

    def _wait_for_rest(self) -> None:
        """Until all workers were asleep three times in a row, or for so long that they will not be."""
        end, seen = time.monotonic() + MOST_WAIT_S, 0
        while seen < 3 and time.monotonic() < end:
            seen = seen + 1 if all(state_of(pid) == "S" for pid in workers()) else 0
            self._over.wait(LOOK_S)

    def _kill_at_times(self) -> None:
        while not self._over.wait(self._times.uniform(*PAUSE_S)):
            if not self._at_point:
                self._kill()

    def _kill(self) -> bool:
        """Kills one worker, where there is one and it is no time of rest; returns whether it did."""
        with self._lock:
            if not self._watching or time.monotonic() < self._rests_until:
                return False
            alive = workers()
            if not alive:
                return False
            victim = self._victims.choice(alive)
            state = state_of(victim)
            if not kill(victim):
                return False
            self.kills += 1
            self.kills_at_work += state != "S"
            self._in_a_row += 1
            if self._in_a_row >= MOST_IN_A_ROW:
                self._in_a_row, self._rests_until = 0, time.monotonic() + self._rest_s
            return True

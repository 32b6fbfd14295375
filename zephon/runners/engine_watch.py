"""Watches the engine from outside: what runs there, on one thread, can stop all lanes.

In the engine process its cells are looked at by the launcher, which can ask for its stack, and end it. Under "threads"
the consumer looks while it waits; a thread cannot be ended.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from zephon.errors import WorkerError
from zephon.plan.graph import Plan
from zephon.runners.watchdog import Stall, Watchdog
from zephon.runners.whereabouts import ACCUMULATORS, BATCH, DEALING, STOPPED, WHOLE, Spot, Whereabouts, is_stopped

if TYPE_CHECKING:
    from zephon.runners.rings import Station

REMEDY = "mend what it is on, or raise stall_timeout_s; the state of the last batch is good: load it to go on"


def describe(plan: Plan, spot: Spot) -> str:
    """What the engine is on, in words."""
    if spot.step == STOPPED:
        return "the engine process has been stopped (SIGSTOP, or a debugger)"
    if spot.step == DEALING:
        return "the engine has been dealing out tasks (the source's chunk(), groups for the next stage)"
    if spot.step == BATCH:
        name = plan.batch.name or plan.batch.method
    elif spot.step >= ACCUMULATORS:
        accumulator = plan.accumulators[spot.step - ACCUMULATORS]
        name = accumulator.name or accumulator.method
    else:
        return "the engine has been between two of its operators"
    return f"operator '{name}', in the engine, has been on lane {spot.record}"


class WatchedEngine:
    """The engine process, as a guard sees it (the contract `Watched`)."""

    def __init__(self, plan: Plan, station: Station) -> None:
        self._plan, self._where, self._stack_file = plan, Whereabouts(station.cells), station.stack_file
        self.condemned = False
        self.stopped = False

    def spots(self) -> list[Spot | None]:
        return [self._where.spot() or (Spot(0, STOPPED, WHOLE) if self.stopped else None)]

    def stack_file(self, index: int) -> int:
        return self._stack_file

    def describe(self, stall: Stall) -> str:
        return describe(self._plan, stall.spot)

    def condemn(self, stall: Stall) -> str:
        self.condemned = True
        return f"the engine is ended: {REMEDY}"


class LauncherWatch:
    """What a trainer that waits, and hears nothing, says of a launcher that is stopped: then nobody else looks.

    Looks are counted, and no clock is read: a trainer that was stopped itself has not waited.
    """

    def __init__(self, warn_s: float | None, timeout_s: float | None, period_s: float) -> None:
        self._warn_s, self._timeout_s, self._period_s = warn_s or float("inf"), timeout_s or float("inf"), period_s
        self._seconds = 0.0

    def look(self, state: str, say: Callable[[str], None]) -> None:
        """To be called once in `period_s`. Raises WorkerError where it was stopped for too long."""
        self._seconds = self._seconds + self._period_s if is_stopped(state) else 0.0
        told = f"the launcher process has been stopped (SIGSTOP, or a debugger) for {self._seconds:,.1f} s"
        if self._seconds >= self._timeout_s:
            raise WorkerError(f"{told} (stall_timeout_s); continue it, or load the state of the last batch to go on")
        if self._seconds >= self._warn_s:
            self._warn_s = 2 * self._seconds
            say(f"{told}, and no batch comes; continue it (kill -CONT)")


class EngineThreadWatch:
    """Says where the engine's thread has stalled."""

    def __init__(self, plan: Plan, where: Whereabouts, warn_s: float | None, say: Callable[[str], None]) -> None:
        self._plan, self._where, self._say = plan, where, say
        self._watchdog = Watchdog(warn_s, None)
        self.period_s = self._watchdog.period_s
        self._next_s = 0.0

    def look(self, thread: threading.Thread) -> None:
        """Looks, if it is time to. To be called at least every `period_s` by whoever waits for the engine."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + self.period_s
        for stall in self._watchdog.look([self._where.spot()], now):
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "  (it ended)"
            if self._where.spot() == stall.spot:  # else the stack may be of other work
                self._say(f"{describe(self._plan, stall.spot)} for {stall.seconds:,.1f} s; its stack:\n{stack}")

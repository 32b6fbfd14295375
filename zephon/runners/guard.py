"""Watches the workers of one process pool: says who has stalled, with its stack, and ends who did for too long."""

from __future__ import annotations

import signal
from collections.abc import Callable

from zephon.runners import stacks
from zephon.runners.process import ProcessPool
from zephon.runners.watchdog import Stall, Watchdog

PATIENCE_S = 1.0  # for a stack: a process that is stopped, or waits inside the kernel, does not answer
MOST_STACKS = 4  # asked for at a time: where all of many workers wait for one disk, a few say enough


class _Ask:
    """A stall whose worker was asked for its stack. The answer is complete once it grows no more."""

    __slots__ = ("asked_s", "length", "stall")

    def __init__(self, stall: Stall, asked_s: float) -> None:
        self.stall, self.asked_s, self.length = stall, asked_s, 0


class Guard:
    """`send_signal(index, number)` reaches a worker process; `say(text)` reaches the user."""

    def __init__(
        self,
        pool: ProcessPool,
        warn_s: float | None,
        timeout_s: float | None,
        send_signal: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._pool, self._send_signal, self._say = pool, send_signal, say
        self._watchdog = Watchdog(warn_s, timeout_s)
        self._asks: dict[int, _Ask] = {}

    @property
    def period_s(self) -> float:
        """When to look again: soon, where an answer is awaited."""
        return min(self._watchdog.period_s, PATIENCE_S / 10) if self._asks else self._watchdog.period_s

    def look(self, now_s: float) -> None:
        """Looks once."""
        for ask in list(self._asks.values()):
            self._hear(ask, now_s)
        for stall in self._watchdog.look(self._pool.spots(), now_s):
            if stall.index in self._asks:
                self._asks[stall.index].stall = stall
                continue
            ask = self._asks[stall.index] = _Ask(stall, now_s)
            if len(self._asks) > MOST_STACKS:
                self._conclude(ask, "")
                continue
            stacks.clear(self._pool.stack_file(stall.index))
            self._send_signal(stall.index, stacks.signal_number())

    def _hear(self, ask: _Ask, now_s: float) -> None:
        """Reads what a worker answered, and concludes when that is all."""
        text = stacks.read(self._pool.stack_file(ask.stall.index))
        if text and len(text) == ask.length:
            self._conclude(ask, f"; its stack:\n{text.rstrip()}")
        elif now_s - ask.asked_s >= PATIENCE_S:
            self._conclude(ask, "; it gives no stack: it is stopped, or waits inside the kernel")
        ask.length = len(text)

    def _conclude(self, ask: _Ask, stack: str) -> None:
        """Says what is known of a stall, unless the worker went on meanwhile; ends the worker where it is deadly."""
        del self._asks[ask.stall.index]
        stall = ask.stall
        if self._pool.spots()[stall.index] != stall.spot:
            return
        told = f"{self._pool.describe(stall)} for {stall.seconds:,.1f} s"
        if stall.deadly:
            told += "; its worker is ended and the work tried again (stall_timeout_s)"
            self._pool.condemn(stall)
            self._send_signal(stall.index, signal.SIGKILL)
        self._say(told + stack)

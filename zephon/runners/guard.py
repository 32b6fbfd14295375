"""Watches a pool's workers, or the engine: says who has stalled, with its stack, and ends who did for too long."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from zephon.runners import stacks
from zephon.runners.watchdog import Stall, Watchdog
from zephon.runners.whereabouts import Spot

PATIENCE_S = 1.0  # for a stack: a process that is stopped, or waits inside the kernel, does not answer
MOST_STACKS = 4  # asked for at a time: where all of many workers wait for one disk, a few say enough


class Watched(Protocol):
    """Processes, by index."""

    def spots(self) -> Sequence[Spot | None]:
        """Where each one stands; None where it waits, or is dead."""

    def stack_file(self, index: int) -> int:
        """The descriptor that it writes its stack to."""

    def describe(self, stall: Stall) -> str:
        """Which one stands where, in words."""

    def condemn(self, stall: Stall) -> str:
        """Notes that it is about to be killed for it; returns what follows from that, in words."""


class _Ask:
    """A stall whose process was asked for its stack. The answer is complete once it grows no more."""

    __slots__ = ("asked_s", "length", "stall")

    def __init__(self, stall: Stall, asked_s: float) -> None:
        self.stall, self.asked_s, self.length = stall, asked_s, 0


class Guard:
    """`send_signal(index, number)` reaches a process; `say(text)` reaches the user."""

    def __init__(
        self,
        watched: Watched,
        warn_s: float | None,
        timeout_s: float | None,
        send_signal: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._watched, self._send_signal, self._say = watched, send_signal, say
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
        for stall in self._watchdog.look(self._watched.spots(), now_s):
            if stall.index in self._asks:
                self._asks[stall.index].stall = stall
                continue
            ask = self._asks[stall.index] = _Ask(stall, now_s)
            if len(self._asks) > MOST_STACKS:
                self._conclude(ask, "")
                continue
            stacks.clear(self._watched.stack_file(stall.index))
            self._send_signal(stall.index, stacks.signal_number())

    def _hear(self, ask: _Ask, now_s: float) -> None:
        """Reads what a process answered, and concludes when that is all."""
        text = stacks.read(self._watched.stack_file(ask.stall.index))
        if text and len(text) == ask.length:
            self._conclude(ask, f"; its stack:\n{text.rstrip()}")
        elif now_s - ask.asked_s >= PATIENCE_S:
            self._conclude(ask, "; it gives no stack: it is stopped, or waits inside the kernel")
        ask.length = len(text)

    def _conclude(self, ask: _Ask, stack: str) -> None:
        """Says what is known of a stall, unless the process went on meanwhile; ends it where that is deadly."""
        del self._asks[ask.stall.index]
        stall = ask.stall
        if self._watched.spots()[stall.index] != stall.spot:
            return
        told = f"{self._watched.describe(stall)} for {stall.seconds:,.1f} s"
        if stall.deadly:
            told += f"; {self._watched.condemn(stall)} (stall_timeout_s)"
            self._send_signal(stall.index, signal.SIGKILL)
        self._say(told + stack)

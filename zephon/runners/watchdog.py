"""Decides which workers have stalled: those that stand where they stood for too long. No clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zephon.runners.whereabouts import Spot

LOOKS = 10  # in the shorter one of the two limits
SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.01, 1.0


class Stall(msgspec.Struct, frozen=True):
    """A worker that stands still."""

    index: int
    spot: Spot
    seconds: float
    deadly: bool
    """It is over `stall_timeout_s`; else it is to be warned of."""


class _Seen:
    """Where a worker stood when it was last looked at, for how long so far, and when that is worth a warning."""

    __slots__ = ("seconds", "spot", "warn_s")

    def __init__(self, spot: Spot | None, warn_s: float) -> None:
        self.spot, self.seconds, self.warn_s = spot, 0.0, warn_s


class Watchdog:
    """Looks at workers now and then. Each warning about one spot takes twice as long to come as the one before.

    Time counts only while somebody looks: after a job was stopped and continued, or its machine slept, nobody has
    stalled.
    """

    def __init__(self, warn_s: float | None, timeout_s: float | None) -> None:
        self._warn_s, self._timeout_s = warn_s or float("inf"), timeout_s or float("inf")
        shortest = min(self._warn_s, self._timeout_s) / LOOKS
        self.period_s = min(max(shortest, SHORTEST_PERIOD_S), LONGEST_PERIOD_S)
        self._seen: dict[int, _Seen] = {}
        self._looked_s: float | None = None

    def look(self, spots: Sequence[Spot | None], now_s: float) -> list[Stall]:
        """Who is to be warned of or ended now. `spots`: where each worker stands, None where it waits."""
        passed = min(now_s - self._looked_s, 2 * self.period_s) if self._looked_s is not None else 0.0
        self._looked_s = now_s
        found = (self._judge(index, spot, passed) for index, spot in enumerate(spots))
        return [stall for stall in found if stall is not None]

    def _judge(self, index: int, spot: Spot | None, passed: float) -> Stall | None:
        seen = self._seen.get(index)
        if seen is None or spot is None or spot != seen.spot:
            self._seen[index] = _Seen(spot, self._warn_s)
            return None
        seen.seconds += passed
        stall = Stall(index, spot, seen.seconds, deadly=seen.seconds >= self._timeout_s)
        if stall.deadly:
            del self._seen[index]
            return stall
        if seen.seconds < seen.warn_s:
            return None
        seen.warn_s = 2 * seen.seconds
        return stall

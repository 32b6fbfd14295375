"""How far a lane has come: the value that a state keeps, and how it moves with every batch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from zephon.errors import ConfigError

Counts = tuple[int, ...]
"""Drops by reason, in the order of the plan's reasons."""


class LaneState(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A lane's place, and what was delivered and dropped up to it.

    The place (pass, chunk, offset, skip) names an event to start again from, and how many of the samples that follow
    were delivered already. `samples` and `turns` are those delivered in this pass, `delivered` those of the whole run.
    `counts` holds the drops decided up to the trigger of the last delivered sample; `place_counts` those decided
    before the place, so that a replay from there does not count again.
    """

    pass_index: int = 0
    chunk: int = 0
    offset: int = 0
    skip: int = 0
    samples: int = 0
    turns: int = 0
    delivered: int = 0
    counts: Counts = ()
    place_counts: Counts = ()
    held: tuple[bytes, ...] = ()
    """What each row of accumulators held just before the place's event; empty where all begin there afresh."""

    def next_pass(self, counts: Counts) -> LaneState:
        """The start of the pass after this one, with the drops of this one complete."""
        return LaneState(pass_index=self.pass_index + 1, delivered=self.delivered, counts=counts, place_counts=counts)


class Counter:
    """Running drops of a lane, asked in the order of events: how many before an event, how many with it."""

    def __init__(self, reasons: dict[str, int], start: Counts) -> None:
        self._reasons, self._now = reasons, list(start)
        self._event = -1
        self.before: Counts = start
        """The drops decided before the event last asked for."""

    def at(self, event: int, drops: list[tuple[int, str, int]], position: int) -> int:
        """Takes in the drops from `position` on, up to and including `event`; returns the new position."""
        if event != self._event:
            position = self._take(drops, position, event - 1)
            self._event, self.before = event, tuple(self._now)
        return self._take(drops, position, event)

    def _take(self, drops: list[tuple[int, str, int]], position: int, last: int) -> int:
        while position < len(drops) and drops[position][0] <= last:
            _, reason, amount = drops[position]
            if reason not in self._reasons:
                raise ConfigError(f"something was dropped as {reason!r}, which no operator declares in its `reasons`")
            self._now[self._reasons[reason]] += amount
            position += 1
        return position

    @property
    def now(self) -> Counts:
        """The drops decided up to and including the event last asked for."""
        return tuple(self._now)


def losses(reasons: Mapping[str, int], was: Counts, now: Counts) -> str:
    """What was dropped since `was`, in words, the most first; empty where nothing was."""
    lost = [(now[i] - was[i], reason) for reason, i in reasons.items()]
    return ", ".join(f"'{reason}' {n:,}" for n, reason in sorted(lost, reverse=True) if n)


def all_lost(reasons: Mapping[str, int], began: Mapping[int, LaneState], ended: Mapping[int, LaneState]) -> str:
    """What dropped all samples of a whole pass, in words; empty where some came, or it did not begin with its start."""
    if any(place.samples or ended[lane].delivered != place.delivered for lane, place in began.items()):
        return ""
    was, now = ([sum(n) for n in zip(*(p.counts for p in places.values()), strict=True)] for places in (began, ended))
    return losses(reasons, tuple(was), tuple(now))

"""Where the time went: seconds by kind of work, and simple totals. Kept by one thread."""

from __future__ import annotations

from collections import defaultdict


class Metrics:
    """Seconds of work by name ("fetch", an operator's name, "accumulate", "collate", "wait") and totals by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.totals: defaultdict[str, int] = defaultdict(int)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """A copy, as plain data."""
        return {"seconds": dict(self.seconds), "totals": dict(self.totals)}

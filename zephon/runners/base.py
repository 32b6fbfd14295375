"""The contract of a runner: one pool a stage, and one way to be told that something was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zephon.flow.stage import Pool
from zephon.runners.execute import StageWork


class RunnerPool(Pool, Protocol):
    """A pool that an engine can also measure and end."""

    seconds: dict[str, float]
    """Seconds of work by name, of the results taken so far."""

    def close(self, timeout_s: float) -> None:
        """Ends the workers. Results not taken are lost; nothing may be submitted any more."""


MakePool = Callable[[StageWork, int, Callable[[], None]], RunnerPool]
"""(work, workers, notify) -> pool. The pool calls `notify` from any thread when a result is ready."""

"""How processes ended, in words; and what is said of deaths that the run survived."""

from __future__ import annotations

import signal
from collections import Counter

from zephon.runners.watchdog import Stall

QUIET_S = 60.0  # between two lines of the log about workers that died


def os_signal(status: int) -> int:
    """The signal that ended a process; 0 where it exited. `status`: as waitpid gives it."""
    return status & 0x7F


def cause(status: int, stall: Stall | None = None) -> str:
    """What ended a process, in a word or two. `stall`: why it was killed, if it was."""
    if stall is not None:
        return "stall_timeout_s"
    number = os_signal(status)
    if not number:
        return f"exit status {status >> 8}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how(status: int, stall: Stall | None = None) -> str:
    """The same in an error's words, with what it may come from."""
    if stall is not None:
        return f"it stood still for {stall.seconds:,.1f} s (stall_timeout_s)"
    hint = " (out of memory? the kernel kills so)" if os_signal(status) == signal.SIGKILL else ""
    return cause(status) + hint


class Survived:
    """Which deaths a log tells: the first, then at most one a minute, with the number of all by cause."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._next_s = float("-inf")

    def tell(self, cause: str, who: str, now_s: float) -> str | None:
        """The line for one more death; None where it is too soon for another one. `who` died: in words."""
        self._counts[cause] += 1
        if now_s < self._next_s:
            return None
        self._next_s = now_s + QUIET_S
        so_far = ", ".join(f"{count:,} x {name}" for name, count in self._counts.items())
        return (
            f"a worker died ({cause}): {who}. It is replaced, and the batches stay the same. Deaths so far: {so_far} "
            "(metrics()['deaths'] counts them, this log tells of one a minute at most)"
        )

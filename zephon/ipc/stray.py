"""Processes that user code forks, and that come back from it into our own code instead of ending.

Such a process has the rings, wake-ups and sockets of the one that it was forked from, and would use them as well. So
it ends before it touches them.
"""

from __future__ import annotations

import contextlib
import os

_of: list[int] = []  # in such a process, the one that it was forked from


def mark() -> None:
    """This process was forked by user code. It may do as it likes, as long as it does not come back."""
    _of[:] = [os.getppid()]


def leave() -> None:
    """Ends this process where it is such a one. Called behind user code, and before anything shared is touched."""
    if _of:
        text = (
            f"zephon: process {os.getpid()}, which user code forked from process {_of[0]} of the pipeline, came back "
            "from that code; it is ended here, as it would do the pipeline's work again; end a forked child with "
            "os._exit()\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(1)

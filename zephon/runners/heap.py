"""The heap of a process: holes given back to the system, and how often Python looks for cycles."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def trim() -> None:
    """Gives back whole free pages of the C heap: what was read and parsed at the start leaves holes.

    A C library other than glibc has no such call: nothing is done.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """For the engine, which holds many small tuples and makes no cycles of them: looking took a sixth of its time."""
    gc.set_threshold(50_000, *gc.get_threshold()[1:])

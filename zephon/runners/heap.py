"""Freed memory back to the system: what was read and parsed at the start leaves holes that nobody else can use."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Gives back whole free pages of the C heap. A C library other than glibc has no such call: nothing is done."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

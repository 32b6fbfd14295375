"""What the trainer and the engine process share: how errors cross, and the bounds of their messages.

Apart from `engine_process.py`, so that the trainer need not import an event loop.
"""

from __future__ import annotations

import pickle
from typing import Any, cast

from zephon.errors import ZephonError
from zephon.ipc.codec import dump
from zephon.ipc.segment import Segment

MOST_ERROR_BYTES = 100_000
MOST_DESCRIPTORS = 16  # new slots in one message


def write_error(error: ZephonError, fds: list[int]) -> list[Any]:
    """An error as plain data; a large one goes into memory of its own, whose descriptor is added to `fds`."""
    raw = dump(error)
    if len(raw) <= MOST_ERROR_BYTES:
        return [raw]
    segment = Segment.create(len(raw))
    segment.map[: len(raw)] = raw
    fds.append(segment.fd)
    return [len(raw)]


def read_error(what: bytes | int, fds: list[int]) -> ZephonError:
    """The error of `write_error`."""
    if isinstance(what, bytes):
        return cast(ZephonError, pickle.loads(what))
    segment = Segment(fds.pop(0), what)
    try:
        return cast(ZephonError, pickle.loads(segment.map))
    finally:
        segment.close()

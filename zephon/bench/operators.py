"""The functions that the workloads run on records, whatever system runs them."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain, repeat
from typing import Any

import numpy as np

Record = dict[str, Any]

ARRAY_SHAPE = (3, 448, 448)  # uint8
ARRAY_BYTES = 3 * 448 * 448
SPIN_BLOCK = 8192  # turns
CALIBRATION_LOOPS = 400_000
CALIBRATION_TRIES = 15


def identity(record: Record) -> Record:
    """W1: nothing."""
    return record


def spin(loops: int) -> None:
    """Work of the interpreter: `loops` turns of its own loop over an iterator, under the GIL; a sleep would not need
    the CPU.

    A turn runs no byte code and makes no object. A loop written in Python runs at two speeds, some 20 % apart, and
    which one depends on what the process did before the call: a loader's worker then seems slower than a bare process
    that does the same. Between blocks of some 10 us another thread may have the GIL.
    """
    for turns in chain(repeat(SPIN_BLOCK, loops // SPIN_BLOCK), (loops % SPIN_BLOCK,)):
        deque(repeat(None, turns), maxlen=0)


def spin_record(record: Record) -> Record:
    """W2: as many turns of `spin` as the record says."""
    spin(record["loops"])
    return record


def make_array(record: Record) -> Record:
    """W4: an array of 602,112 bytes, uint8 [3, 448, 448], filled with a number of the record."""
    return {"id": record["id"], "image": np.full(ARRAY_SHAPE, record["id"] & 255, np.uint8)}


def calibrate() -> float:
    """Turns of `spin` in a microsecond of CPU: the best of some tries, since other programs only ever slow it down."""
    best = float("inf")
    for _ in range(CALIBRATION_TRIES):
        begun = time.thread_time()
        spin(CALIBRATION_LOOPS)
        best = min(best, time.thread_time() - begun)
    return CALIBRATION_LOOPS / best / 1e6

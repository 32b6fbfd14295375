"""The functions that the workloads run on records, whatever system runs them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

Record = dict[str, Any]

ARRAY_SHAPE = (3, 448, 448)  # uint8
ARRAY_BYTES = 3 * 448 * 448
CALIBRATION_LOOPS = 200_000
CALIBRATION_TRIES = 15


def identity(record: Record) -> Record:
    """W1: nothing."""
    return record


def spin(loops: int) -> int:
    """Pure Python work: `loops` turns of a loop. It holds the GIL and needs the CPU, as a sleep would not."""
    value = 0
    for i in range(loops):
        value ^= i
    return value


def spin_record(record: Record) -> Record:
    """W2: as many turns as the record says."""
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

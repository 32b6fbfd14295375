"""What `to_training` costs the engine a batch: 8 samples of 2,048 tokens, packed, or of 1,024 to 2,048 unpacked.

    python bench/training.py

The median of 300 calls, written to memory that is used again, as a slot is.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from zephon.ops.batch import stack_records
from zephon.ops.training import ToTraining

CALLS = 300


def batches() -> dict[str, dict[str, Any]]:
    """A packed batch and one of rows of different lengths."""
    rng = np.random.default_rng(0)
    positions, segments = np.tile(np.arange(512), 4), np.repeat(np.arange(1, 5), 512)
    packed = [
        {"input_ids": rng.integers(1, 50_000, 2048), "position_ids": positions, "segment_ids": segments, "num_pad": 0}
        for _ in range(8)
    ]
    rows = [{"input_ids": rng.integers(1, 50_000, n)} for n in rng.integers(1024, 2049, 8)]
    return {"packed": stack_records(packed), "rows": stack_records(rows)}


class Slot:
    """Memory that every call fills again."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.used = 0

    def empty(self, shape: Any, dtype: Any) -> Any:
        if self.used == len(self.arrays):
            self.arrays.append(np.empty(shape, dtype))
        self.used += 1
        return self.arrays[self.used - 1]


def median_us(fields: dict[str, Any], flatten: bool) -> float:
    """Microseconds of one call."""
    formatter, slot, times = ToTraining(flatten=flatten, mask_boundaries=True), Slot(), []
    for _ in range(CALLS):
        slot.used = 0
        began = time.perf_counter()
        formatter.format(fields, slot.empty)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6


if __name__ == "__main__":
    for name, fields in batches().items():
        for flatten in (False, True):
            print(f"{name}, {'flat' if flatten else 'padded'}: {median_us(fields, flatten):.0f} us")

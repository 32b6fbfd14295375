"""Datasets whose rows are computed when they are read: nothing of them is held, whatever their size.

A row is a function of its number, so every system (Zephon, torch, bare loops) reads the same rows at the same cost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.bench.operators import Record
from zephon.io.dataset import Dataset
from zephon.io.formats import Unreadable

TEXT_LENGTH = 184  # characters of a W1 text: with the id about 200 bytes a record
NUM_TEXTS = 4096
NUM_COSTS = 4096
BASE_US = {"100us": 100.0, "1ms": 1000.0, "lognormal": 100.0, "slow1pct": 100.0}
LOGNORMAL_SIGMA = 1.0  # of the logarithm; `lognormal` has a median of 100 us
SLOW_EVERY, SLOW_TIMES = 100, 100  # slow1pct: one record of 100 is 100 times slower


@cache
def texts() -> list[str]:
    """The texts of W1, all different: one that repeats within a batch would pickle as a reference."""
    return [f"{i:04d} ".ljust(TEXT_LENGTH, "abcdefgh "[i % 9]) for i in range(NUM_TEXTS)]


def text_record(row: int) -> Record:
    """W1: a number and a text of 184 characters."""
    return {"id": row, "text": texts()[row % NUM_TEXTS]}


def id_record(row: int) -> Record:
    """W4: a number."""
    return {"id": row}


def costs_us(variant: str) -> NDArray[np.float64]:
    """Microseconds of the records of a W2 variant, float64 [4096]: row r costs what stands at r mod 4096."""
    base, rng = BASE_US[variant], np.random.default_rng(1)
    if variant == "lognormal":
        return base * np.exp(LOGNORMAL_SIGMA * rng.standard_normal(NUM_COSTS))
    costs = np.full(NUM_COSTS, base)
    if variant == "slow1pct":
        costs[: round(NUM_COSTS / SLOW_EVERY)] *= SLOW_TIMES
    return rng.permutation(costs)


class CostRecords:
    """W2: rows that say how many turns of `spin` they cost."""

    def __init__(self, variant: str, loops_per_us: float) -> None:
        self.loops = [max(1, round(cost * loops_per_us)) for cost in costs_us(variant).tolist()]
        self.mean_loops = sum(self.loops) / len(self.loops)

    def __call__(self, row: int) -> Record:
        return {"id": row, "loops": self.loops[row % NUM_COSTS]}


class MadeShard(msgspec.Struct, frozen=True, eq=False):
    """Rows made by `make`. See `zephon.io.formats.Shard`."""

    name: str
    rows: int
    make: Callable[[int], Record]
    size_bytes: int = 0
    block_rows: int | None = None

    def read(self, rows: NDArray[np.int64]) -> list[Record | Unreadable]:
        """See Shard.read."""
        make = self.make
        return [make(row) for row in rows.tolist()]


def made_dataset(name: str, make: Callable[[int], Record], rows: int) -> Dataset:
    """A dataset of `rows` rows that `make` computes."""
    return Dataset(name, [MadeShard("made", rows, make)], "made")

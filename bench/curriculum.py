"""Time per pointer of the curriculum: chunk sizes, lanes, rows, positions and shuffles. Figures should stay flat.

    python bench/curriculum.py [--seconds 0.2]

Prints the median microseconds a pointer over chunks in lane order, as one process that owns all lanes reads them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.work import StaticMixture
from zephon.work.shuffle import SHUFFLE_MODES


class Rows:
    """A dataset of any size that holds nothing."""

    def __init__(self, name: str, num_rows: int, num_shards: int = 1) -> None:
        self.name = name
        self.num_rows = num_rows
        cuts = np.arange(num_shards + 1) * (num_rows // num_shards)
        cuts[-1] = num_rows
        self.shard_rows: NDArray[np.int64] = np.diff(cuts)

    def fingerprint(self) -> dict[str, Any]:
        return {"name": self.name, "num_rows": self.num_rows}


def microseconds_a_pointer(source: StaticMixture, num_lanes: int, first_index: int, seconds: float) -> float:
    """Median over chunks, after a warm-up of a tenth of the time."""
    times: list[float] = []
    start = time.perf_counter()
    number = 0
    while (elapsed := time.perf_counter() - start) < seconds or len(times) < 3:
        begun = time.perf_counter()
        index, lane = divmod(number, num_lanes)
        pointers = source.chunk(lane, num_lanes, 0, first_index + index)
        if elapsed > seconds / 10:
            times.append((time.perf_counter() - begun) / len(pointers))
        number += 1
    return statistics.median(times) * 1e6


def mixture(rows: int, chunk_size: int, **settings: Any) -> StaticMixture:
    """Five datasets of `rows` rows each, endless."""
    datasets = [Rows(f"d{c}", rows, num_shards=10) for c in range(5)]
    return StaticMixture(datasets, [0.7, 0.2, 0.1, 0.05, 0.3], chunk_size=chunk_size, end="repeat", **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.2, help="time of one measurement")
    seconds = parser.parse_args().seconds
    sizes = (256, 1024)

    def show(label: str, figures: list[float]) -> None:
        print(f"{label:<34}" + "".join(f"{figure:>12.3f}" for figure in figures))

    print(f"{'us a pointer at chunk size':<34}" + "".join(f"{size:>12}" for size in sizes))
    for exponent in range(3, 11):
        by_size = [microseconds_a_pointer(mixture(10**exponent, s), 8, 100, seconds) for s in sizes]
        show(f"5 datasets of 10^{exponent} rows, 8 lanes", by_size)
    for lanes in (1, 8, 64, 256, 1024):
        show(
            f"10^10 rows, {lanes} lanes", [microseconds_a_pointer(mixture(10**10, s), lanes, 0, seconds) for s in sizes]
        )
    for exponent in (0, 6, 12, 15):
        by_size = [microseconds_a_pointer(mixture(10**10, s), 1, 10**exponent // s, seconds) for s in sizes]
        show(f"10^10 rows, position 10^{exponent}", by_size)
    for mode in SHUFFLE_MODES:
        by_size = [microseconds_a_pointer(mixture(10**8, s, shuffle=mode), 8, 100, seconds) for s in sizes]
        show(f"10^8 rows, shuffle={mode}", by_size)
    for count in (1, 2, 30, 300):
        for mode in ("none", "global"):
            datasets = [Rows(f"d{c}", 10**8) for c in range(count)]
            by_size = [
                microseconds_a_pointer(
                    StaticMixture(datasets, [c + 1 for c in range(count)], chunk_size=s, end="repeat", shuffle=mode),
                    8,
                    100,
                    seconds,
                )
                for s in sizes
            ]
            show(f"{count} datasets, shuffle={mode}", by_size)
    begun = time.perf_counter()
    mixture(10**10, 256).chunk(0, 1, 0, 0)
    print(f"construction and first chunk at 10^10 rows: {(time.perf_counter() - begun) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()

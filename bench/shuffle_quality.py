"""How well `shuffle` mixes: each mode by buffer size, with and without windows and a shuffled source, against a full
permutation.

    python bench/shuffle_quality.py
    python bench/shuffle_quality.py --page-only     # the table and the picture again, from bench/results/shuffle.json

131,072 rows of one lane go through the accumulator alone, without a payload, in pushes of 128. Distances are in rows of
the source, as shares of what a full permutation has (n / 3). Writes bench/results/shuffle.json and shuffle.png, and the
table in docs/shuffling.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray

import zephon as zp
from zephon.ops.accumulator import Key
from zephon.ops.shuffle import Mode, Shuffle

HERE = Path(__file__).parent
RESULT = HERE / "results" / "shuffle.json"
PAGE = HERE.parent / "docs" / "shuffling.md"
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
ROWS = 1 << 17
BUFFERS = (256, 1_024, 4_096, 16_384, 65_536)
WINDOW = 2_048  # the default: flush_every_k_chunks=8, chunk_size=256
AT_ONCE = 128
NEAR, TOPICS, BATCH = 64, 16, 64
SHOWN = 4_096  # the buffer whose displacements the picture has

Order = NDArray[np.int64]


def shuffled(rows: Order, size: int, mode: Mode, window: int = ROWS) -> tuple[Order, float]:
    """The rows in the order in which they leave, and the CPU microseconds a record."""
    step = Shuffle(size, mode)
    refs = [(row, 1, 0) for row in rows.tolist()]
    out: list[Any] = []
    begun = time.process_time()
    for start in range(0, len(refs), window):
        step.open(0, Key(1, 0, 0, start, "shuffle"))
        for at in range(start, min(len(refs), start + window), AT_ONCE):
            out += step.push(0, refs[at : min(start + window, at + AT_ONCE)]).groups
        out += step.flush(0).groups
    seconds = time.process_time() - begun
    return np.array([ref[0] for ref in out]), seconds / len(refs) * 1e6


def source_order(shuffle: str) -> Order:
    """The rows of a pass of one dataset in the source's own order."""
    dataset = zp.Dataset.from_list("rows", [{"i": 0}] * ROWS)
    return zp.StaticMixture([dataset], seed=1, shuffle=shuffle).pointers(0, 0, ROWS).row  # type: ignore[arg-type]


def figures(order: Order) -> dict[str, float]:
    """How far an order is from the stored one; 1, 0.1 %, 1 and 15.7 topics for a full permutation."""
    steps = np.abs(np.diff(order))
    moved = np.abs(order - np.arange(ROWS))
    topics = (order * TOPICS // ROWS).reshape(-1, BATCH)
    return {
        "neighbours": float(steps.mean() / (ROWS / 3)),
        "near": float((steps <= NEAR).mean()),
        "displacement": float(moved.mean() / (ROWS / 3)),
        "furthest": int(moved.max()),
        "topics": float(np.mean([len(set(batch)) for batch in topics.tolist()])),
    }


def measure() -> list[dict[str, Any]]:
    """A row for each way to shuffle."""
    stored, blocks = np.arange(ROWS), source_order("blocks")
    found: list[dict[str, Any]] = [
        {"name": "source, shuffle='global'", "buffer": None, **figures(source_order("global"))}
    ]
    for size in BUFFERS:
        for name, rows, mode, window in (
            ("reservoir", stored, "reservoir", ROWS),
            ("block", stored, "block", ROWS),
            ("reservoir, default windows", stored, "reservoir", WINDOW),
            ("source 'blocks', then reservoir", blocks, "reservoir", ROWS),
        ):
            order, cost = shuffled(rows, size, mode, window)  # type: ignore[arg-type]
            found.append({"name": name, "buffer": size, **figures(order), "us": cost})
    found.append({"name": "source, shuffle='blocks'", "buffer": None, **figures(blocks)})
    found.append({"name": "source, shuffle='none'", "buffer": None, **figures(stored)})
    return found


def curves() -> dict[str, list[int]]:
    """The displacements of the picture: 101 percentiles of (place - row), by mode."""
    stored = np.arange(ROWS)
    orders = {mode: shuffled(stored, SHOWN, mode)[0] for mode in ("reservoir", "block")}  # type: ignore[arg-type]
    return {name: np.percentile(stored - order, range(101)).astype(int).tolist() for name, order in orders.items()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| shuffle | buffer | neighbours apart | within 64 rows | moved by | furthest | topics | us a record |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        size = "-" if row["buffer"] is None else f"{row['buffer']:,}"
        cost = f"{row['us']:.2f}" if "us" in row else "-"
        lines.append(
            f"| {row['name']} | {size} | {row['neighbours']:.3f} | {row['near']:.1%} | {row['displacement']:.3f} | "
            f"{row['furthest']:,} | {row['topics']:.1f} | {cost} |"
        )
    return "\n".join(lines) + "\n"


COLOURS = {
    "reservoir": "#1f6feb",
    "block": "#d9822b",
    "reservoir, default windows": "#9aa4af",
    "source 'blocks', then reservoir": "#2da44e",
}


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Neighbours' distance by buffer on the left; how far records move, for one buffer, on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    left.axhline(1, color="#000", lw=1, ls="--", label="full permutation")
    for name, colour in COLOURS.items():
        rows = [row for row in result["rows"] if row["name"] == name]
        left.plot([r["buffer"] for r in rows], [r["neighbours"] for r in rows], "-o", color=colour, ms=3, label=name)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(BUFFERS, [f"{size:,}" for size in BUFFERS])
    left.set_xlabel(f"buffer_size, of {ROWS:,} rows", fontsize=8)
    left.set_ylabel("mean distance of neighbours / (n / 3)", fontsize=8)
    for name, places in result["displacements"].items():
        right.plot(np.array(places[:-1]) / SHOWN, range(100), color=COLOURS[name], label=name)
    right.set_xlim(-1.1, 4)
    right.set_xlabel(f"places that a record moves back, in buffers of {SHOWN:,}", fontsize=8)
    right.set_ylabel("% of records", fontsize=8)
    for axis in (left, right):
        axis.legend(fontsize=8, frameon=False)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-only", action="store_true")
    if not parser.parse_args().page_only:
        result = {
            "machine": record.machine(),
            "date": datetime.date.today().isoformat(),
            "command": "python bench/shuffle_quality.py",
            "rows": measure(),
            "displacements": curves(),
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    save_plot(result, RESULT.with_suffix(".png"))
    filled = {"machine": record.told(result) + ".\n", "quality": table(result["rows"])}
    PAGE.write_text(BLOCK.sub(lambda block: block[1] + filled[block[2]] + block[3], PAGE.read_text()))


if __name__ == "__main__":
    main()

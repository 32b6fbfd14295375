"""How fast batches come onto a CUDA device, from pinned slots and unpinned ones, and whether that overlaps compute.

    python bench/device.py [--megabytes 64] [--batches 40] [--compute-ms 10] [--picture bench/results/device.png]

A pipeline of worker processes makes batches; a loop takes them from `to_device("cuda")` and multiplies matrices for
about `--compute-ms`. Events of the device say when each copy and each computation ran. Prints a line of JSON for each
of the two ways: GB/s of the copies, and the share of their time in which the device computed too; draws both timelines.
Pinned, a copy is one transfer that the device makes by itself; unpinned, the CPU first copies to a buffer of CUDA's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zephon as zp

NO_TORCH = "bench/device.py measures copies to a CUDA device with torch, and torch is not installed here."
NO_DEVICE = (
    "bench/device.py measures copies to a CUDA device, and torch finds none on this machine: there is nothing to "
    "measure. Run it on a machine with one."
)
MATRIX = 4096
SHOWN = 12  # batches in the picture
AHEAD = 2  # computations that the CPU is ahead of the device

Span = tuple[float, float]
"""(start, end) in milliseconds."""


class Timeline(NamedTuple):
    """When copies and computations ran on the device."""

    name: str
    copies: list[Span]
    computes: list[Span]
    megabytes: float

    @property
    def gb_per_s(self) -> float:
        """Speed of the copies while they ran."""
        return self.megabytes / 1e3 * len(self.copies) / (total(self.copies) / 1e3)

    @property
    def overlapped(self) -> float:
        """Share of the copies' time in which something was computed."""
        return sum(min(b, d) - max(a, c) for a, b in self.copies for c, d in self.computes if min(b, d) > max(a, c)) / (
            total(self.copies)
        )


def total(spans: list[Span]) -> float:
    """Milliseconds of all spans."""
    return sum(end - start for start, end in spans)


class Made:
    """An array of so many bytes in each record."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "x": np.full(self.size, record["id"] % 251, np.uint8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--compute-ms", type=float, default=10)
    parser.add_argument("--picture", default=str(Path(__file__).parent / "results" / "device.png"))
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit(NO_TORCH)
    if not torch.cuda.is_available():
        sys.exit(NO_DEVICE)
    found = [measure(torch, args, pinned) for pinned in (True, False)]
    for timeline in found:
        figures = {"gb_per_s": round(timeline.gb_per_s, 2), "overlapped": round(timeline.overlapped, 3)}
        span = timeline.computes[-1][1] - timeline.computes[0][0]
        busy = round(total(timeline.computes) / span, 3)
        device = torch.cuda.get_device_name()
        print(json.dumps({"slots": timeline.name, **figures, "device_computes": busy, "device": device}))
    draw(found, args.picture)


def measure(torch: Any, args: Any, pinned: bool) -> Timeline:
    """One run of the loop."""
    from zephon.device.copies import CudaCopies
    from zephon.device.loader import DeviceLoader

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    copied: list[tuple[Any, Any]] = []

    class Timed(CudaCopies):
        def start(self, tensors: list[Any]) -> Any:
            with torch.cuda.stream(self._stream):
                before = mark()
            moved, done = super().start(tensors)
            with torch.cuda.stream(self._stream):
                copied.append((before, mark()))
            return moved, done

    copies = Timed(torch, torch.device("cuda"))
    if not pinned:
        copies.pins = None
    matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    turns = calibrate(torch, matrix, args.compute_ms)
    computes, base = [], mark()
    with DeviceLoader(pipeline(args), copies) as loader:
        for batch in loader:
            before = mark()
            seed = batch["x"].sum()
            for _ in range(turns):
                seed = (matrix @ matrix)[0, 0] + seed
            computes.append((before, mark()))
            if len(computes) > AHEAD:  # a loop that trains looks at its loss now and then
                computes[-AHEAD - 1][1].synchronize()
    torch.cuda.synchronize()

    def spans(marks: list[tuple[Any, Any]]) -> list[Span]:
        return [(base.elapsed_time(start), base.elapsed_time(end)) for start, end in marks]

    name = "pinned" if pinned else "unpinned"
    return Timeline(name, spans(copied)[2:], spans(computes)[2:], args.megabytes)  # the first ones warm up


def calibrate(torch: Any, matrix: Any, milliseconds: float) -> int:
    """Products of matrices that take so long."""
    for _ in range(3):
        matrix @ matrix
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        matrix @ matrix
    end.record()
    torch.cuda.synchronize()
    return max(1, round(milliseconds * 20 / start.elapsed_time(end)))


def pipeline(args: Any) -> zp.Pipeline:
    """Batches of 16 records."""
    rows = zp.Dataset.from_list("rows", [{"id": i} for i in range(16 * args.batches)])
    source = zp.StaticMixture([rows], seed=1)
    made = zp.Pipeline(source).map(Made(int(args.megabytes * 1e6 / 16)), name="made", version="1").batch(16)
    return made.options(runner="process", canonical_replicas=1, dp_degree=1)


def draw(timelines: list[Timeline], picture: str) -> None:
    """Copies above computations, one panel for each way."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(timelines), 1, figsize=(9, 1.9 * len(timelines)), squeeze=False)
    for panel, timeline in zip(panels[:, 0], timelines, strict=True):
        for row, (spans, color) in enumerate([(timeline.computes, "#4c72b0"), (timeline.copies, "#dd8452")]):
            shown = [(start - timeline.computes[0][0], end - start) for start, end in spans[:SHOWN]]
            panel.broken_barh(shown, (row - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.5)
        panel.set_yticks([0, 1], ["compute", "copy"])
        told = f"{timeline.gb_per_s:.1f} GB/s, {timeline.overlapped:.0%} of copying overlaps compute"
        panel.set_title(f"{timeline.name} slots: {told}", fontsize=9, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

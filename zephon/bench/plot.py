"""Rows as a picture: one bar a system, the bare limit dashed, one panel a workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zephon.bench.report import number
from zephon.bench.spec import ZEPHON, Row
from zephon.bench.workloads import find
from zephon.errors import ConfigError

_COLOURS = {ZEPHON: "#1f6feb", "bare": "#9aa4af", "peer": "#d9822b"}
_BAR_INCHES, _PANEL_INCHES = 0.32, 0.9


def save_plot(rows: Sequence[Row], path: str, title: str) -> None:
    """Draws the rows into a PNG. Raises ConfigError where matplotlib is missing or the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install zephon[cli]") from error
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.workload, []).append(row)
    heights = [_BAR_INCHES * len(panel) + _PANEL_INCHES for panel in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8.5, sum(heights) + 0.4), height_ratios=heights, squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    for axis, (workload, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(axis, panel)
        if len(panels) > 1:
            axis.set_title(workload, fontsize=9, loc="left")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw(axis: Any, panel: list[Row]) -> None:
    """One workload: bars from top to bottom in the order of the table."""
    places = range(len(panel))
    rates = [row.rate for row in panel]
    spans = [_span(row) for row in panel]
    errors = [
        [max(0.0, r - s[0]) for r, s in zip(rates, spans, strict=True)],
        [max(0.0, s[1] - r) for r, s in zip(rates, spans, strict=True)],
    ]
    axis.barh(places, rates, color=[_colour(row) for row in panel], height=0.7, xerr=errors, ecolor="#555", capsize=2)
    axis.set_yticks(places, [_label(row) for row in panel], fontsize=8)
    axis.invert_yaxis()
    for place, row, (_, high) in zip(places, panel, spans, strict=True):
        share = f"  ({row.share_of_bare:.2f} of bare)" if row.share_of_bare is not None else ""
        axis.text(max(high, row.rate), place, f"  {number(row.rate)}{share}", va="center", fontsize=8)
    axis.set_xlabel(panel[0].unit, fontsize=8)
    axis.xaxis.set_major_formatter(lambda value, _: number(value))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlim(0, max(high for _, high in spans) * 1.3)
    axis.spines[["top", "right"]].set_visible(False)


def _span(row: Row) -> tuple[float, float]:
    """The least and the most of a row's rounds."""
    rates = row.details.get("rates") or [row.rate]
    return min(rates), max(rates)


def _label(row: Row) -> str:
    if row.system != ZEPHON:
        return row.system if row.system.startswith("bare") else f"{row.system}, {row.parallelism} workers"
    lanes = f", {row.lanes} lanes" if find(row.workload).lanes else ""
    workers = "" if row.runner == "inline" else f", {row.parallelism} workers"
    return f"zephon {row.runner}{workers}{lanes}"


def _colour(row: Row) -> str:
    return _COLOURS.get(row.system) or _COLOURS["bare" if row.system.startswith("bare") else "peer"]

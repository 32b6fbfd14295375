"""Rows as a table for people and as lines of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from rich.table import Table

from zephon.bench.spec import Row
from zephon.bench.workloads import find

KINDS = ("trainer", "engine", "worker")


def json_line(row: Row) -> str:
    """A row as one line of JSON."""
    return json.dumps(msgspec.to_builtins(row))


def make_table(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("workload", "system", "runner"):
        table.add_column(column, overflow="fold")
    for column in ("workers", "lanes", "rate", "unit", "of bare", "min", "max", "first s"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    for kind in KINDS:
        table.add_column(f"{kind} us", justify="right", no_wrap=True)
    table.add_column("PSS MB", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    """A row as text, column by column of the table."""
    cpu = row.details.get("cpu_us_per_record", {})
    return [
        row.workload,
        row.system,
        row.runner or "-",
        str(row.parallelism),
        number(row.lanes),
        number(row.rate),
        row.unit,
        *(number(share) for share in (row.share_of_bare, row.share_min, row.share_max)),
        number(row.first_batch_s),
        *(number(cpu.get(kind)) for kind in KINDS),
        number(row.peak_pss_mb),
    ]


def number(value: float | None) -> str:
    """Three digits that count; '-' where there is nothing."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def extras(rows: Sequence[Row]) -> list[str]:
    """What belongs to single workloads and has no column, as lines of text."""
    lines = []
    shown = ("rates", "cpu_us_per_record", "other_cores")
    for row in rows:
        found = {name: value for name, value in row.details.items() if name not in shown}
        if found:
            told = ", ".join(f"{name} {_plain(value)}" for name, value in found.items())
            lines.append(f"{row.workload} {row.system}, {number(row.lanes)} lanes: {told}")
    others = [row.details["other_cores"] for row in rows if "other_cores" in row.details]
    if others and max(others) > BUSY_CORES:
        lines.append(
            f"NOTICE: other programs used up to {max(others):.1f} cores meanwhile; shares are fairer than rates, and "
            "neither is good"
        )
    return lines


BUSY_CORES = 0.2


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value)
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def heading(name: str, rounds: int, seconds: float) -> str:
    """What a table shows."""
    workload = find(name)
    better = "less is better" if workload.less_is_better else "more is better"
    return f"{name}: {workload.what}; {rounds} rounds of {seconds:g} s, medians; {better}"

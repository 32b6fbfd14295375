"""`zephon doctor`: what this machine gives to the library, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zephon.cli import FOUND
from zephon.cli.machine import Check, look
from zephon.cli.output import json_lines

_WIDTH = 118  # of the table where the output is no terminal
_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="One JSON object a check to FILE; '-': standard output."),
    ] = None,
) -> None:
    """Look at this machine: CPUs, memory, limits, packages, and a real start of worker processes.

    Exit status: 0 everything that is needed is there (there may be warnings), 1 something fails.
    """
    console = Console(stderr=json_file == "-", highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    with console.status("looking at this machine ..."):
        checks = list(look())
    with json_lines(json_file) as lines:
        if lines is not None:
            lines.writelines(f"{msgspec.json.encode(check).decode()}\n" for check in checks)
    console.print(_table(checks))
    console.print()
    console.print(_summary(checks), markup=False, soft_wrap=True)
    if any(check.status == "failure" for check in checks):
        raise typer.Exit(FOUND)


def _table(checks: Sequence[Check]) -> Table:
    """A row a check; the remedy stands below what was found."""
    table = Table(box=None, pad_edge=False)
    for column in ("check", "status", "found"):
        table.add_column(column, justify="left", overflow="fold", no_wrap=column != "found")
    for check in checks:
        found = Text(check.found)
        if check.remedy is not None:
            found.append(f"\n-> {check.remedy}", style="italic")
        table.add_row(check.name, Text(check.status, style=_STYLES[check.status]), found)
    return table


def _summary(checks: Sequence[Check]) -> str:
    """One line that says it all."""
    failures = [check.name for check in checks if check.status == "failure"]
    warnings = [check.name for check in checks if check.status == "warning"]
    if failures:
        return f"{len(failures)} of {len(checks)} checks failed: {', '.join(failures)}"
    if warnings:
        return f"it works, with {len(warnings)} warning{'s'[: len(warnings) > 1]}: {', '.join(warnings)}"
    return f"all is well: {len(checks)} checks"

"""`zephon verify TARGET`: proves for one's own pipeline that the stream does not depend on how or where it runs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import IO, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from zephon.cli import FOUND, INTERRUPTED
from zephon.cli.output import json_lines
from zephon.cli.target import load_target
from zephon.errors import ConfigError
from zephon.testing.verify import DEATHS, Check, Verification

_WIDTH = 118  # of the table where the output is no terminal


def verify(
    target: Annotated[
        str, typer.Argument(help="module.py:name or package.module:name of a pipeline, or of a function that makes one")
    ],
    batches: Annotated[
        int, typer.Option(min=1, help="Batches that each check compares, of all groups together.")
    ] = 200,
    runners: Annotated[
        str | None, typer.Option(help="Runners, with commas between. Default: all of this version.")
    ] = None,
    topologies: Annotated[
        str | None, typer.Option(help="Numbers of groups, with commas between. Default: 1,2,4.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Chooses where restarts are, and to which topology; with --kill, who dies when.")
    ] = 0,
    kill: Annotated[
        bool, typer.Option("--kill", help="Also run while worker processes are killed again and again, idle and busy.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="One JSON object a check to FILE; '-': standard output."),
    ] = None,
) -> None:
    """Prove that a pipeline gives the same stream under every runner and topology, and after restarts.

    Exit status: 0 all checks agree with the oracle, 1 one differs or the pipeline raises (or, with --kill, no worker
    was killed in one), 2 wrong use.
    """
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(json_lines(json_file))
        # What the pipeline's own code prints must not run into the JSON.
        stack.enter_context(contextlib.redirect_stdout(sys.stderr if json_file == "-" else sys.stdout))
        logging.getLogger("zephon").setLevel(logging.ERROR)  # uneven topologies are meant here
        verification = Verification(
            load_target(target),
            batches=batches,
            runners=_names(runners),
            topologies=_numbers(topologies),
            seed=seed,
            target=target,
            deaths=kill,
        )
        try:
            checks = _run(verification, lines)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        console = Console(stderr=json_file == "-", highlight=False)
        if not console.is_terminal:
            console.width = _WIDTH
        _report(console, target, verification, checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(FOUND)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(name) for name in _names(text) or ()]
    except ValueError:
        raise ConfigError(
            f"--topologies {text}: whole numbers with commas between are wanted, for example 1,2,4"
        ) from None


def _run(verification: Verification, lines: IO[str] | None) -> list[Check]:
    """Runs the checks under a progress bar, and writes each as a line of JSON as soon as it is done."""
    checks = []
    terminal = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} batches"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("verify", total=len(verification.setups) * verification.batches)
        verification.on_batch = lambda: progress.advance(task)
        for number, check in enumerate(verification, start=1):
            checks.append(check)
            if lines is not None:
                print(json.dumps(_as_json(check)), file=lines, flush=True)
            progress.update(task, description=f"check {number} of {len(verification.setups)}")
            progress.update(task, completed=number * verification.batches)
    return checks


def _as_json(check: Check) -> dict[str, Any]:
    """A check as one flat object; its difference as an object with pass, step and lane as fields."""
    plain: dict[str, Any] = msgspec.to_builtins(check)
    if check.difference is not None:
        at = plain["difference"].pop("at")
        plain["difference"] |= dict(zip(("pass", "step", "lane"), at, strict=True))
    return plain


def _report(console: Console, target: str, verification: Verification, checks: list[Check]) -> None:
    """The table, the first difference, and one last line that says it all."""
    table = Table(title=f"{target}: {verification.num_lanes} lanes", title_justify="left", box=None, pad_edge=False)
    for column, justify in (
        ("check", "left"),
        ("runner", "left"),
        ("workers", "right"),
        ("task", "right"),
        ("groups", "right"),
        ("restarts", "right"),
        ("batches", "right"),
        *([("killed", "right")] if verification.deaths else []),
        ("outcome", "left"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for check in checks:
        task = str(check.task_records or "auto")
        cells = (check.runner, check.parallelism, task, check.topology, check.restarts, check.batches)
        killed = [str(check.kills) if check.check == DEATHS else ""] if verification.deaths else []
        table.add_row(check.check, *map(str, cells), *killed, _outcome(check))
    console.print(table)
    console.print()
    for line in _last_lines(checks):
        console.print(line, markup=False, soft_wrap=True)


def _outcome(check: Check) -> str:
    difference = check.difference
    if difference is None:
        return "equal" if check.ok else "nobody died"
    return f"{'raises' if difference.what == 'raises' else 'differs'} at {difference.at}"


def _last_lines(checks: list[Check]) -> list[str]:
    differing = [check for check in checks if check.difference is not None and check.difference.what != "raises"]
    raising = [
        check.difference for check in checks if check.difference is not None and check.difference.what == "raises"
    ]
    if differing:
        check = differing[0]
        assert check.difference is not None
        where = f"{check.check}, runner {check.runner}, {check.topology} groups"
        cause = [f"likely cause: {check.difference.cause}"] if check.difference.cause else []
        summary = f"DIFFERS: {len(differing)} of {len(checks)} configurations, first at {check.difference} ({where})"
        return [*cause, summary]
    if raising:
        first = min(raising, key=lambda difference: difference.at)
        return [f"RAISES: {first.text} (at {first.at}, and so does the oracle: no configuration differs)"]
    if not all(check.ok for check in checks):
        unharmed = sum(not check.ok for check in checks)
        return [
            f"NOT PROVEN: in {unharmed} of {len(checks)} configurations no worker was killed; "
            "compare more, with --batches"
        ]
    fewest = min(check.batches for check in checks)
    kills, at_work = sum(check.kills for check in checks), sum(check.kills_at_work for check in checks)
    killed = f"; {kills} workers were killed, {at_work} of them at work" if kills else ""
    return [f"verified: {fewest} batches x {len(checks)} configurations equal the oracle's{killed}"]

"""`zephon bench WORKLOAD`: the speed of the library, or of one's own pipeline, beside the bare limit and the peers."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from zephon.bench import corpus, operators, peers, proc, report, workloads
from zephon.bench.plot import save_plot
from zephon.bench.rounds import measure, run_rounds
from zephon.bench.spec import Row, Spec
from zephon.cli.output import json_lines
from zephon.cli.target import load_target
from zephon.errors import ConfigError
from zephon.options import Options

MEASURER = "zephon.cli.measure"  # can load a TARGET
_WIDTH = 150  # of the table where the output is no terminal


def bench(
    workload: Annotated[
        str,
        typer.Argument(help="w1 to w9, engine, consumer, a variant (w2:1ms), or your own pipeline as module.py:name"),
    ],
    runner: Annotated[str | None, typer.Option(help="Runners, with commas between: process, threads, inline.")] = None,
    parallelism: Annotated[str, typer.Option(help="Workers, with commas between.")] = "2",
    lanes: Annotated[str | None, typer.Option(help="Owned lanes, with commas between; for w1, w9 and engine.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every system is measured once in each.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds of one measurement, after a warm-up.")] = 3.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="One JSON object a line; '-': standard output.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw the rows.")] = None,
    peers_wanted: Annotated[
        str, typer.Option("--peers", help="Other loaders to measure too: torch, torch-numpy.")
    ] = "",
) -> None:
    """Measure the library, or your pipeline, beside the bare limit of the same rounds."""
    specs = _specs(workload, runner, parallelism, lanes, peers_wanted, seconds)
    console = Console(stderr=json_file == "-", highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(json_lines(json_file))
        rows = _run(specs, rounds)
        for row in rows if lines is not None else ():
            print(report.json_line(row), file=lines, flush=True)
    title = report.heading(workload, rounds, seconds)
    console.print(report.make_table(rows, title))
    for line in report.extras(rows):
        console.print(line)
    if plot is not None:
        save_plot(rows, plot, title)


def _specs(
    workload: str, runner: str | None, parallelism: str, lanes: str | None, peers_wanted: str, seconds: float
) -> list[Spec]:
    """The contestants, with everything that can be wrong found before the first measurement."""
    if not proc.has_proc():
        raise ConfigError("zephon bench reads CPU and memory of its processes from /proc: it needs Linux")
    others = tuple(_names(peers_wanted))
    peers.check(others)
    wanted = workloads.Wanted(
        workload,
        _runners(runner),
        _numbers("--parallelism", parallelism),
        _numbers("--lanes", lanes) if lanes is not None else (),
        others,
        seconds,
        operators.calibrate() if workload.startswith(("w2", "w8")) else 0.0,
        corpus.default_folder(),
    )
    specs = workloads.contestants(wanted)
    if workload.partition(":")[0] in ("w3", "w6", "w7"):
        corpus.make(wanted.folder)  # once, and not in anyone's time
    if workloads.find(workload) is workloads.TARGET:
        load_target(workload).close()  # a wrong target is told here, once
    return specs


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _runners(text: str | None) -> tuple[str, ...]:
    names = tuple(_names(text or "process"))
    for name in names:
        Options().replace({"runner": name})  # raises for an unknown one
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(name) for name in _names(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} {text}: whole numbers of at least 1 with commas between are wanted, as in 1,2,4")
    return numbers


def _run(specs: list[Spec], rounds: int) -> list[Row]:
    """The rounds, under a progress bar."""
    terminal = Console(stderr=True)
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(specs) * rounds)
        done = iter(range(len(specs) * rounds))

        def on_start(what: str) -> None:
            progress.update(task, description=what, completed=next(done))

        own = workloads.find(specs[0].workload) is workloads.TARGET
        return run_rounds(specs, rounds, on_start, partial(measure, module=MEASURER) if own else measure)

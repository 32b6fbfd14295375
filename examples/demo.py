"""The demonstration: a run that loses half of its groups and changes their number twice, beside one that does not.

A group is what holds one copy of the model: a GPU, or several that share the work on it. Here each group is a Pipeline
object of its own in this process, and all of them take their steps together, as in training. `make demo` runs it.

Use: `python examples/demo.py [STEPS]`; without a number, the whole pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

import zephon as zp

sys.path.insert(0, str(Path(__file__).parent))  # for those who import this file instead of running it
import pretrain

RUNNER, WORKERS = "process", 2
# Number of groups, the share of the run at which that ends, and how.
LEGS = ((4, 0.37, "groups 2 and 3 are lost"), (2, 0.71, "a group is added"), (3, 1.0, "the end"))
NUM_CHECKPOINTS = 15  # in the whole run
LABELS = {"fetch": "read rows", "keep": "filter", "tokenize": "tokenise", "collate": "build batches"}
LABELS |= {"engine": "order, shuffle, decide what is packed", "split": "sort results by lane"}
PRINTED_EVERY = 10  # steps, where nobody watches; all are compared


class Step(NamedTuple):
    """A global step: what all groups together feed to the model before the optimizer moves."""

    number: int
    digest: str
    num_tokens: int


def start_groups(num_groups: int, saved: str | None = None) -> list[zp.Pipeline]:
    """One pipeline a group, as each would be made on its own machine. `saved` is a merged state as JSON."""
    groups = []
    for group in range(num_groups):
        pipeline = pretrain.pipeline().options(
            runner=RUNNER, parallelism=WORKERS, dp_degree=num_groups, dp_group_id=group
        )
        if saved is not None:
            pipeline.load_state_dict(json.loads(saved))
        groups.append(pipeline)
    return groups


def count_processes() -> int:
    """The processes below this one, as Linux counts them; 0 elsewhere."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below = children.get(os.getpid(), [])
    for pid in below:  # it grows as we go
        below += children.get(pid, [])
    return len(below)


def run_together(groups: list[zp.Pipeline]) -> Iterator[Step]:
    """The global steps of groups that work side by side."""
    for parts in zip_longest(*(group.steps() for group in groups), fillvalue=[]):
        # By lane; the sort is stable, so the turns of a lane within the step keep their order.
        batches = sorted((batch for part in parts for batch in part), key=lambda batch: batch.lane_id)
        total = hashlib.sha256()
        for batch in batches:
            total.update(f"{batch.step} {batch.lane_id} {batch.digest()}\n".encode())
        num_tokens = sum(batch["input_ids"].size - int(batch["num_pad"].sum()) for batch in batches)
        yield Step(batches[0].step, total.hexdigest()[:16], num_tokens)


def introduce(say: Callable[[str], None]) -> int:
    """Says what will run; returns the number of chunks in the pass."""
    source = pretrain.source()
    names = " and ".join(f"{dataset.num_rows:,} documents of '{dataset.name}'" for dataset in source.datasets)
    num_chunks = -(-(source.length(0) or 0) // source.chunk_size)
    say("A run whose number of groups (copies of the model) changes, beside one that is never interrupted.\n")
    say(f"[bold]data[/]      {names}, mixed 0.7 : 0.3")
    say("[bold]pipeline[/]  mixture > filter > tokenise > shuffle > pack 2048 > batch 8")
    say(f"[bold]lanes[/]     4, each of {num_chunks // 4 // 4} windows of 4 chunks of {source.chunk_size} documents")
    say(f"[bold]runner[/]    {RUNNER}: every group has an engine, {WORKERS} workers and a launcher of their own")
    return num_chunks


class Demo:
    """What was found so far, and where it is shown."""

    def __init__(self, console: Console, bar: Progress, limit: int | None) -> None:
        self.console, self.bar, self.limit = console, bar, limit
        self.expected: dict[int, str] = {}  # digest by step of the uninterrupted run
        self.compared: Counter[int] = Counter()  # times that a step was compared
        self.wrong: set[int] = set()
        self.seconds: list[Counter[str]] = []  # where the time went, uninterrupted and interrupted

    def say(self, text: str = "") -> None:
        """One line."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def run_uninterrupted(self) -> None:
        """One group that owns all lanes. The bar follows the chunks, whose number is known beforehand."""
        (pipeline,) = groups = start_groups(1)
        num_chunks = introduce(self.say)
        task = self.bar.add_task("uninterrupted", total=self.limit or num_chunks)
        self.say("\n[bold]Uninterrupted: 1 group owns the lanes [0 1 2 3][/]")
        began, num_tokens, steps = time.perf_counter(), 0, run_together(groups)
        for step in islice(steps, self.limit):
            self.expected[step.number] = step.digest
            num_tokens += step.num_tokens
            chunks = sum(lane["chunk"] for lane in pipeline.state_dict()["lanes"].values())
            self.bar.update(task, completed=len(self.expected) if self.limit else chunks)
        self.seconds.append(self.finish(groups, len(self.expected), num_tokens, time.perf_counter() - began))
        self.bar.remove_task(task)

    def run_interrupted(self) -> None:
        """The same run on changing numbers of groups; each change goes on from the last checkpoint."""
        self.seconds.append(Counter())
        task = self.bar.add_task("interrupted", total=len(self.expected))
        saved, at = None, 0
        for num_groups, share, ending in LEGS:
            groups = start_groups(num_groups, saved)
            lanes = " ".join(f"[{' '.join(map(str, group.lanes))}]" for group in groups)
            self.say(f"\n[bold]{num_groups} groups own the lanes {lanes}[/]")
            note = "" if self.console.is_terminal else f"     (every {PRINTED_EVERY}th is shown, each is compared)"
            self.say(f"[dim] step  this run          uninterrupted{note}[/]")
            first, stop = at, round(share * len(self.expected))
            whole = share == 1.0 and self.limit is None  # to the end of the data, so that a step too many would show
            began, num_tokens, steps = time.perf_counter(), 0, run_together(groups)
            for step in islice(steps, None if whole else stop - first):
                self.compare(step, step.number in (first, stop - 1))
                self.bar.update(task, completed=step.number + 1)
                num_tokens += step.num_tokens
                if (step.number + 1) % max(2, len(self.expected) // NUM_CHECKPOINTS) == 0:
                    saved, at = json.dumps(zp.merge_states(group.state_dict() for group in groups)), step.number + 1
            self.seconds[-1] += self.finish(groups, stop - first, num_tokens, time.perf_counter() - began)
            if share < 1.0:
                checkpoint = f"the last checkpoint has steps 0 to {at - 1} ({len(saved or ''):,} bytes)"
                self.say(f"  [yellow]{ending} after step {stop - 1}[/]; {checkpoint}")
        self.bar.remove_task(task)

    def compare(self, step: Step, is_edge: bool) -> None:
        """One step beside that of the uninterrupted run."""
        expected = self.expected.get(step.number, "(none)")
        equal = step.digest == expected
        if not equal:
            self.wrong.add(step.number)
        if not equal or is_edge or self.console.is_terminal or step.number % PRINTED_EVERY == 0:
            mark = "[green]equal[/]" if equal else "[bold red]DIFFERENT[/]"
            again = "[dim], again[/]" if self.compared[step.number] else ""
            self.say(f"{step.number:5}  {step.digest}  {expected:16}  {mark}{again}")
        self.compared[step.number] += 1

    def finish(self, groups: list[zp.Pipeline], num_steps: int, num_tokens: int, seconds: float) -> Counter[str]:
        """Ends the groups; returns where their time went."""
        rate = f"{num_tokens:,} tokens in {seconds:.1f} s: {num_tokens / seconds:,.0f} tokens/s"
        self.say(f"  {num_steps} steps, {rate}, on {count_processes()} processes")
        spent: Counter[str] = Counter()
        for group in groups:
            group.close()
            spent.update(group.metrics()["seconds"])
        return spent

    def show_seconds(self) -> None:
        """Where the time went."""
        self.say("\n[bold]Where the time went[/]                        uninterrupted  interrupted")
        self.say("  [dim]seconds of all processes, waiting for a CPU included[/]")
        for name, seconds in self.seconds[0].most_common():
            self.say(f"  {LABELS.get(name, name):<38} {seconds:14.2f}  {self.seconds[1][name]:11.2f}")

    def verdict(self) -> bool:
        """The last line."""
        self.wrong |= self.expected.keys() ^ self.compared.keys()
        repeated = sum(self.compared.values()) - len(self.compared)
        if self.wrong:
            text = f"{len(self.wrong)} of {len(self.expected)} steps do not match; the first is step {min(self.wrong)}."
            self.say(f"\n[bold red]{text}[/]")
        else:
            again = f" ({repeated} of them twice)" if repeated else ""
            self.say(f"\n[bold green]All {len(self.expected)} steps match{again}.[/]")
        return not self.wrong


def main(limit: int | None = None, console: Console | None = None) -> bool:
    """Runs the demonstration on the first `limit` steps (None: the whole pass). Returns whether every step matched."""
    if limit is not None and limit < 6:
        raise ValueError(f"{limit} steps: at least 6 are needed to change the number of groups twice")
    console = console or Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        demo = Demo(console, bar, limit)
        demo.run_uninterrupted()
        demo.run_interrupted()
    demo.show_seconds()
    return demo.verdict()


if __name__ == "__main__":
    logging.getLogger("zephon").setLevel(logging.ERROR)  # what it has to say of an uneven split, the demonstration says
    sys.exit(0 if main(int(sys.argv[1]) if len(sys.argv) > 1 else None) else 1)

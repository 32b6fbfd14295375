"""A training run that is killed and goes on, again and again, on another number of ranks, beside one that is not.

Both train the small GPT of gpt.py under torchrun. Every global step of the interrupted run is compared with the
uninterrupted one: the digest of what all ranks were fed, which must be equal, and the loss, which may differ by what
the order of float sums does. `make elastic-demo` runs it; it needs Linux and torch.

Use: `python examples/elastic_demo.py [--whole RANKS] [--legs RANKS:STEP ...]`; a leg is killed when its step is done,
but the last one, which ends there.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from make_corpus import make_corpus

HERE = Path(__file__).parent
LEGS = ("4:60", "2:75", "3:90", "8:105", "5:119")
TOLERANCE = 1e-5  # of a loss, in float32: sums over ranks are made in another order
PRINTED_EVERY = 10  # steps; all are compared
LINE = re.compile(r"step (\d+) loss (\S+) batch (\w+)")


class Step(NamedTuple):
    """A global step, as gpt.py reports it."""

    number: int
    loss: float
    batch: str
    """Digest of what all ranks together were fed."""


class Leg(NamedTuple):
    """What so many ranks did until they were killed, or to the end."""

    num_ranks: int
    steps: list[Step]
    killed: bool
    seconds: float


def train(folder: Path, num_ranks: int, last: int, save_every: int, kill: bool = False) -> Iterator[Step]:
    """Runs gpt.py under torchrun to step `last`, from the checkpoint in `folder` if there is one.

    With `kill` all ranks get SIGKILL when step `last` is done, in the middle of what they do then.
    """
    steps = last + 1000 if kill else last + 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [str(HERE / "gpt.py"), f"--steps={steps}", f"--save-every={save_every}", f"--folder={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as torchrun,
    ):
        assert torchrun.stdout is not None
        try:
            for found in filter(None, map(LINE.match, torchrun.stdout)):
                step = Step(int(found[1]), float(found[2]), found[3])
                yield step
                if kill and step.number >= last:  # who was slow to kill the leg before may begin behind it
                    kill_all(torchrun.pid)
        finally:
            kill_all(torchrun.pid)  # where this generator is left early; else they are gone
        if torchrun.wait() and not kill:
            errors.seek(0)
            raise SystemExit(f"training on {num_ranks} ranks failed:\n{errors.read()[-5000:]}")


def kill_all(torchrun: int) -> None:
    """SIGKILL for torchrun and its ranks: they can do nothing about it, and nothing is saved."""
    ranks: list[int] = []
    for file in Path(f"/proc/{torchrun}/task").glob("*/children"):
        with suppress(OSError):  # that thread has just ended
            ranks += map(int, file.read_text().split())
    for pid in (torchrun, *ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Demo:
    """What the uninterrupted run did, and what was found different from it."""

    def __init__(self, folder: Path, save_every: int) -> None:
        self.folder, self.save_every = folder, save_every
        self.whole: dict[int, Step] = {}
        self.legs: list[Leg] = []

    def run_whole(self, num_ranks: int, last: int) -> None:
        """The run that nobody disturbs."""
        began = time.monotonic()
        for step in train(self.folder / "whole", num_ranks, last, self.save_every):
            self.whole[step.number] = step
        print(f"uninterrupted: {num_ranks} ranks, {len(self.whole)} steps, {time.monotonic() - began:.0f} s")

    def run_leg(self, num_ranks: int, last: int, kill: bool) -> None:
        """A part of the run that is disturbed; it goes on from the last checkpoint of the one before."""
        began, steps = time.monotonic(), []
        print(f"\n{num_ranks} ranks\n step  fed             uninterrupted           loss  uninterrupted")
        for step in train(self.folder / "legs", num_ranks, last, self.save_every, kill):
            steps.append(step)
            if len(steps) == 1 or step.number % PRINTED_EVERY == 0 or step.number == last or self.differs(step):
                beside = self.whole.get(step.number, Step(step.number, float("nan"), "(none)"))
                mark = "DIFFERENT" if self.differs(step) else "equal"
                print(f"{step.number:5}  {step.batch}  {beside.batch:16} {step.loss:10.6f} {beside.loss:10.6f}  {mark}")
        self.legs.append(Leg(num_ranks, steps, kill, time.monotonic() - began))

    def differs(self, step: Step) -> bool:
        """Whether a step is not that of the uninterrupted run. A killed leg may go beyond the other's end."""
        beside = self.whole.get(step.number)
        if beside is None:
            return step.number <= max(self.whole)
        return step.batch != beside.batch or not abs(step.loss - beside.loss) <= TOLERANCE

    def apart(self, leg: Leg) -> float:
        """The largest difference between losses."""
        both = (step for step in leg.steps if step.number in self.whole)
        return max((abs(step.loss - self.whole[step.number].loss) for step in both), default=0.0)

    def verdict(self) -> bool:
        """The table of all legs and the last line; whether all is well."""
        print("\nranks   steps      how it ended       batches equal   losses differ by at most   seconds")
        for leg in self.legs:
            equal = sum(step.batch == self.whole[step.number].batch for step in leg.steps if step.number in self.whole)
            steps = f"{leg.steps[0].number:3} to {leg.steps[-1].number:3}" if leg.steps else "none"
            found = f"{equal:12} of {len(leg.steps):<3}    {self.apart(leg):18.1e} {leg.seconds:16.0f}"
            print(f"{leg.num_ranks:5}   {steps:10}   {'SIGKILL' if leg.killed else 'the end':7}   {found}")
        wrong = {step.number for leg in self.legs for step in leg.steps if self.differs(step)}
        wrong |= self.whole.keys() - {step.number for leg in self.legs for step in leg.steps}
        if wrong or not self.whole:
            print(f"\n{len(wrong)} of {len(self.whole)} steps do not match; the first is step {min(wrong, default=0)}.")
            return False
        print(f"\nAll {len(self.whole)} steps match: the same batches, and losses within {TOLERANCE:g}.")
        return True

    def plot(self, file: Path) -> None:
        """Both curves, and how far apart they are."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (above, below) = pyplot.subplots(
            2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained"
        )
        whole = list(self.whole.values())
        style = {"color": "0.75", "linewidth": 6, "solid_capstyle": "round"}
        above.plot([step.number for step in whole], [step.loss for step in whole], label="uninterrupted", **style)
        for leg in self.legs:
            steps = [step for step in leg.steps if step.number in self.whole]
            numbers = [step.number for step in steps]
            (line,) = above.plot(numbers, [step.loss for step in steps], label=f"{leg.num_ranks} ranks", linewidth=1.5)
            apart = [abs(step.loss - self.whole[step.number].loss) for step in steps]
            below.plot(numbers, apart, ".", color=line.get_color(), markersize=4)
            if leg.killed:
                above.plot(numbers[-1], steps[-1].loss, "x", color=line.get_color(), markersize=9, markeredgewidth=2)
        above.set(ylabel="loss of the global step", title="killed (x) and resumed on another number of ranks")
        above.legend(frameon=False)
        below.set(ylabel="difference", xlabel="global step", ylim=(0, None))
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
        pyplot.close(figure)


def legs_of(given: Sequence[str]) -> list[tuple[int, int]]:
    """(ranks, last step) of each leg. Raises ValueError."""
    legs = [(int(ranks), int(step)) for ranks, step in (leg.split(":") for leg in given)]
    steps = [-1, *(step for _, step in legs)]
    if not all(1 <= ranks <= 24 for ranks, _ in legs) or not all(a < b for a, b in pairwise(steps)):
        raise ValueError("legs that cannot be")
    return legs


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", type=int, default=4, help="ranks of the uninterrupted run")
    parser.add_argument("--legs", nargs="+", default=LEGS, metavar="RANKS:STEP")
    parser.add_argument("--save-every", type=int, default=8, help="steps")
    parser.add_argument("--plot", type=Path, help="where to draw both curves (PNG)")
    args = parser.parse_args()
    try:
        legs = legs_of(args.legs)
    except ValueError:
        parser.error(f"--legs {' '.join(args.legs)}: RANKS:STEP wanted, ranks of 1 to 24, steps that rise from 0 on")
    if not (1 <= args.whole <= 24 and args.save_every >= 1):
        parser.error("--whole: 1 to 24 ranks; --save-every: at least 1 step")
    make_corpus()
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder), args.save_every)
        demo.run_whole(args.whole, legs[-1][1])
        for number, (num_ranks, last) in enumerate(legs, start=1):
            demo.run_leg(num_ranks, last, kill=number < len(legs))
    if args.plot is not None:
        demo.plot(args.plot)
    return demo.verdict()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(0 if main() else 1)

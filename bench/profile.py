"""Where the time goes: py-spy on the trainer, the engine and a worker of one workload.

    python bench/profile.py w1 [--lanes 64] [--seconds 6] [--top 20] [--parallelism 2]

Prints for each process the lines that the most samples stood in ("own") and below ("with callees"). Waiting counts as
time where it is a system call without the GIL, so read `wait`, `recv_fds` and the event loop's own line as idle.
Needs py-spy and the right to attach to processes of one's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from zephon.bench import corpus, operators, proc
from zephon.bench.rounds import start_child
from zephon.bench.spec import ZEPHON, Spec

WARM_S = 2.5
RATE = 250  # samples a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="w1, w2:100us, w3, w4, or module.py:name")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--top", type=int, default=20, help="lines to print of each process")
    chosen = parser.parse_args()
    spec = Spec(
        workload=chosen.workload,
        runner="process",
        parallelism=chosen.parallelism,
        lanes=chosen.lanes,
        seconds=chosen.seconds + 2 * WARM_S + 30,
        loops_per_us=operators.calibrate(),
        folder=corpus.default_folder(),
    )
    child = start_child(spec, "zephon.cli.measure")
    try:
        time.sleep(WARM_S)
        for kind, stacks in record(one_of_each(child.pid), chosen.seconds).items():
            show(kind, stacks, chosen.top)
    finally:
        child.kill()
        child.wait()


def one_of_each(root: int) -> dict[str, int]:
    """{kind: pid}: the trainer, the engine and the first worker."""
    found: dict[str, int] = {}
    for pid, kind in proc.kinds(root, ZEPHON).items():
        found.setdefault(kind, pid)
    found.pop("launcher", None)
    return found


def record(pids: dict[str, int], seconds: float) -> dict[str, Counter[str]]:
    """{kind: {stack: samples}}, all processes at the same time."""
    spy = shutil.which("py-spy") or os.path.join(os.path.dirname(sys.executable), "py-spy")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for kind, pid in pids.items():
            command = [spy, "record", "-r", str(RATE), "-d", str(round(seconds)), "-f", "raw", "-p", str(pid)]
            command += ["-o", f"{folder}/{kind}"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for process in running:
            process.wait()
        for kind in pids:
            stacks: Counter[str] = Counter()
            for line in Path(folder, kind).read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                stacks[stack] += int(count)
            found[kind] = stacks
    return found


def show(kind: str, stacks: Counter[str], top: int) -> None:
    """Prints the lines that hold the most samples."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for stack, count in stacks.items():
        frames = stack.split(";")
        own[frames[-1]] += count
        for frame in set(frames):
            below[frame] += count
    total = sum(stacks.values())
    print(f"\n{kind}: {total} samples")
    for name, lines in (("own", own), ("with callees", below)):
        print(f"  {name}")
        for frame, count in lines.most_common(top):
            print(f"    {count / total:6.1%}  {frame}")


if __name__ == "__main__":
    main()

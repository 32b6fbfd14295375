"""Runs text through worker processes for a long time: memory must not grow, and every batch must be the right one.

    python bench/soak.py [--minutes 10] [--parallelism 2] [--lanes 4] [--folder CORPUS]

The work is w3's of `zephon bench`: JSONL, tokenise, pack, batch, without end. A child process trains on it, that is, it
folds the digest of every batch into one chain. From outside the memory (PSS) of its whole tree is sampled every second:
the median of the last tenth of the time may be at most 5 % above that of the second tenth (the first one warms up).

Two references check the chain. The oracle makes the first batches, for a tenth of the time. Another number of workers
makes the last tenth again, from the state that the child saved there. Exit status: 0 all is well, 1 something is not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zephon.bench import corpus, pipelines, proc
from zephon.bench.rounds import environment
from zephon.bench.spec import ZEPHON, Spec
from zephon.pipeline import Pipeline
from zephon.testing.oracle import OracleLane

MOST_GROWTH = 0.05
INTERVAL_S = 1.0
EVERY = 20  # batches between two notes of the chain
FIRST = ""  # the chain before any batch


class Note(NamedTuple):
    """The chain behind so many batches; with the state there, where that was saved."""

    batches: int
    chain: str
    state: dict[str, Any] | None = None


class Size(NamedTuple):
    """Memory of the tree at one moment, MB by kind of process."""

    second: float
    by_kind: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())


def main() -> int:
    wanted = arguments()
    if wanted.child:
        train(wanted)
        return 0
    corpus.make(wanted.folder)
    sizes, notes = watched(wanted)
    failures = [*judge_memory(sizes, wanted.minutes * 60), *judge_chain(notes, wanted)]
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print(f"sound: {notes[-1].batches:,} batches in {wanted.minutes:g} minutes, memory and content as they must be")
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--folder", default=corpus.default_folder(), help="where the corpus is, or is made")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(wanted: argparse.Namespace, parallelism: int) -> Pipeline:
    """The pipeline under test."""
    fields: dict[str, Any] = {"runner": "process", "parallelism": parallelism, "lanes": wanted.lanes}
    return pipelines.work(Spec(workload="w3", folder=wanted.folder, **fields)).pipeline


def chained(digests: Iterable[str], chain: str = FIRST) -> Iterator[str]:
    """The chain behind every batch."""
    for digest in digests:
        chain = hashlib.blake2b((chain + digest).encode(), digest_size=16).hexdigest()
        yield chain


# -- the child ---------------------------------------------------------------------------------------------------------


def train(wanted: argparse.Namespace) -> None:
    """Takes batches for the given time; writes a note every now and then, the last one behind the last batch."""
    begun, seconds, saved = time.monotonic(), wanted.minutes * 60, False
    with work(wanted, wanted.parallelism) as pipeline:
        for number, chain in enumerate(chained(batch.digest() for batch in pipeline), start=1):
            if number % EVERY:
                continue
            passed = time.monotonic() - begun
            state = pipeline.state_dict() if not saved and passed > seconds * 0.9 else None
            saved = saved or state is not None
            print(json.dumps(Note(number, chain, state)), flush=True)
            if passed > seconds and state is None:
                return


# -- the watcher -------------------------------------------------------------------------------------------------------


def watched(wanted: argparse.Namespace) -> tuple[list[Size], list[Note]]:
    """What the child's tree weighed, second by second, and what it noted. Its failure is ours."""
    command = [sys.executable, str(Path(__file__)), "--child"]
    for name in ("minutes", "parallelism", "lanes", "folder"):
        command += [f"--{name}", str(getattr(wanted, name))]
    sizes: list[Size] = []
    with tempfile.TemporaryFile("w+") as said:
        child, begun = subprocess.Popen(command, stdout=said, env=environment()), time.monotonic()
        try:
            while child.poll() is None:
                sizes.append(Size(time.monotonic() - begun, proc.tree_pss_by_kind(child.pid, ZEPHON)))
                time.sleep(INTERVAL_S)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            sys.exit(f"the run failed with exit status {child.returncode}; the reason stands above")
        said.seek(0)
        return sizes, [Note(*json.loads(line)) for line in said]


def judge_memory(sizes: list[Size], seconds: float) -> Iterator[str]:
    tenths = [[size for size in sizes if n <= size.second / seconds * 10 < n + 1] for n in range(10)]
    for number, tenth in enumerate(tenths, start=1):
        if tenth:
            middle = sorted(tenth, key=lambda size: size.total)[len(tenth) // 2]
            kinds = ", ".join(f"{kind} {size:.1f}" for kind, size in middle.by_kind.items())
            print(f"tenth {number:2} of the time: {middle.total:6.1f} MB ({kinds}), {len(tenth)} samples")
    if not tenths[1] or not tenths[9]:
        yield "the run was too short for its memory to be sampled"
        return
    early, late = (statistics.median(size.total for size in tenths[n]) for n in (1, 9))
    print(f"memory: {early:.1f} MB early, {late:.1f} MB late ({late / early - 1:+.2%})")
    if late / early - 1 > MOST_GROWTH:
        yield f"memory grew by {late / early - 1:.1%}, more than {MOST_GROWTH:.0%}"


def judge_chain(notes: list[Note], wanted: argparse.Namespace) -> Iterator[str]:
    """The first batches against the oracle, the last ones against another number of workers."""
    number = 0
    for expected in first_of_oracle(notes, wanted):
        number += 1
        if expected is not None and expected.chain != notes[number // EVERY - 1].chain:
            yield f"a batch before number {expected.batches} is not the oracle's"
            return
    print(f"the first {number:,} batches are the oracle's")
    saved = next(note for note in notes if note.state is not None)
    left = notes[-1].batches - saved.batches
    with work(wanted, wanted.parallelism + 1) as again:
        again.load_state_dict(saved.state or {})
        digests = (batch.digest() for batch in itertools.islice(again, left))
        *_, last = chained(digests, saved.chain)
    if last != notes[-1].chain:
        yield f"a batch behind number {saved.batches} is another one with {wanted.parallelism + 1} workers"
        return
    print(f"the last {left:,} batches are the same with {wanted.parallelism + 1} workers")


def first_of_oracle(notes: list[Note], wanted: argparse.Namespace) -> Iterator[Note | None]:
    """One item a batch of the oracle's, for a tenth of the time: a note where the child made one, else None."""
    end = time.monotonic() + wanted.minutes * 6
    lanes = [iter(OracleLane(work(wanted, 1), lane)) for lane in range(wanted.lanes)]
    digests = (next(lane).digest for lane in itertools.cycle(lanes))
    for number, chain in enumerate(chained(digests), start=1):
        yield Note(number, chain) if number % EVERY == 0 else None
        if number == notes[-1].batches or (number % EVERY == 0 and time.monotonic() > end):
            return


if __name__ == "__main__":
    sys.exit(main())

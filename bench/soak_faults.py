"""Lets everything that can die die, for half an hour: every batch must be the oracle's, and nothing may grow or stay.

    make soak [ARGS="--minutes 10"], or python bench/soak_faults.py [--minutes 30] [--seed 0] [--every 1.5]

A chain of runs: groups of random topologies with random numbers of workers and sizes of tasks, read at random speeds,
each continued from the merged states of the one before. Meanwhile, every 1.5 seconds or so, a worker dies at a random
named point (`zephon/testing/points.py`) in a random way, or of a SIGKILL at any moment; now and then the engine or the
launcher does, and the group goes on from its last state. Order, content, origins and counts of every batch are compared
with the oracle's.

Reported: kills, restarts, batches, and the stall after the death of a worker: the longest wait for a batch within the
second behind it. Exit status: 0 all is well, 1 something is not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import random
import re
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zephon as zp
from zephon.bench import proc
from zephon.checkpoint.merge import merge_states
from zephon.testing import faults
from zephon.testing.legs import Leg, configure, play, prepare
from zephon.testing.points import DEATHS, ENGINE_POINTS, LAUNCHER_POINTS, WORKER_POINTS, Faults
from zephon.testing.streams import Ended, Fault, Gave, Streams
from zephon.testing.walk import Walk

LANES, NUM_PASSES, BATCH = 4, 2, 8
ROWS = (6000, 3000)
GROUP_BATCHES = (40, 400)  # of a group, between two restarts
DELAYS_S = (0.0, 0.0, 0.0, 0.001, 0.004, 0.02)  # of the consumer behind every batch; another one is chosen now and then
PAUSE_S = 1.5  # sometimes it stops for so long
WATCHED_S = 1.0  # after each death
LEFT_S = 5.0
MOST_GROWTH = {"trainer": 0.05, "launcher": 0.3, "engine": 0.3, "worker": 0.3}  # from the second tenth to the last one
GROWTH_MB = 2.0  # beside that; only the trainer lives for all of the time, the others do different work in every group
SHARE_OF_ENGINE = 0.1  # of the deaths
SHARE_OF_OUTSIDE = 0.2  # of the deaths: at no named point

Record = dict[str, Any]


def enrich(record: Record) -> Record:
    """Work of some tenths of a millisecond, and so many bytes that results go through the area for large ones too."""
    n = record["id"]
    return {**record, "sum": sum(range(n % 7 * 1000 + 3000)), "x": np.full(1500, n), "tokens": np.arange(n % 9)}


def keep(record: Record) -> bool:
    return bool(record["id"] % 11)


def children(record: Record) -> Iterator[Record]:
    for child in range(record["id"] % 3):
        yield {**record, "child": child}


def work() -> zp.Pipeline:
    """The pipeline under test."""
    first, second = (
        zp.Dataset.from_list(name, [{"id": i} for i in range(start, start + rows)])
        for name, start, rows in (("one", 0, ROWS[0]), ("two", 100_000, ROWS[1]))
    )
    source = zp.StaticMixture([first, second], weights=[3, 1], seed=7, chunk_size=32, end="redistribute")
    return zp.Pipeline(source).map(enrich).filter(keep).flat_map(children).shuffle(64).batch(BATCH)


class Figures:
    """What is reported in the end."""

    def __init__(self) -> None:
        self.batches = self.legs = self.resumed = self.passes = 0
        self.outside = Counter[str]()
        self.stalls: list[float] = []
        self.usual: list[float] = []


# -- who dies ----------------------------------------------------------------------------------------------------------


class Reaper:
    """A thread that lets something die every now and then, while a group is read."""

    def __init__(self, kit: Faults, seed: str, every_s: float, figures: Figures) -> None:
        self._kit, self._every_s, self._figures = kit, every_s, figures
        self._random = random.Random(seed)
        self._over, self._lock, self._live = threading.Event(), threading.Lock(), False
        self.deaths: list[float] = []  # of workers, from outside
        self.trees = 0  # engines and launchers killed from outside
        self._thread = threading.Thread(target=self._run, name="soak-reaper")

    def __enter__(self) -> Reaper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, live: bool) -> None:
        """Whether a group is being read."""
        with self._lock:
            self._live = live
            if not live:
                self._kit.disarm()

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(0.2, 1.8) * self._every_s):
            with self._lock:
                if self._live:
                    self._kill()

    def _kill(self) -> None:
        chosen = self._random
        armed = bool(self._kit.armed())  # nobody came there: then from outside
        self._kit.disarm()
        tree = chosen.random() < SHARE_OF_ENGINE
        if armed or chosen.random() < SHARE_OF_OUTSIDE:
            self._from_outside(tree and not armed)
            return
        point = chosen.choice(ENGINE_POINTS + LAUNCHER_POINTS[1:] if tree else WORKER_POINTS)
        self._kit.arm(point, chosen.choice(DEATHS), skip=chosen.choice((0, 0, 1, 3)) if not tree else 0)
        if point in ("starting", "setup", *LAUNCHER_POINTS):  # which is passed only if somebody dies
            self._kit.arm("result", "KILL")

    def _from_outside(self, tree: bool) -> None:
        boss = faults.launchers()
        if tree and boss:
            victims = [boss[0], *faults._children(boss[0])[:1]]  # the launcher, the engine
            self.trees += 1
            os.kill(self._random.choice(victims), 9)
            self._figures.outside["engine or launcher"] += 1
        elif alive := faults.workers():
            at = time.monotonic()
            if faults.kill(self._random.choice(alive)):
                self.deaths.append(at)
                self._figures.outside["worker"] += 1


# -- the consumer ------------------------------------------------------------------------------------------------------


class Pace:
    """The consumer's speed, which changes."""

    def __init__(self, seed: str) -> None:
        self._random, self._left, self._delay_s = random.Random(seed), 0, 0.0

    def rest(self) -> None:
        if not self._left:
            self._left, self._delay_s = self._random.randint(5, 100), self._random.choice(DELAYS_S)
            if self._random.random() < 0.05:
                time.sleep(PAUSE_S)
        self._left -= 1
        if self._delay_s:
            time.sleep(self._delay_s)


class Wait(NamedTuple):
    """From the question for a batch to the batch."""

    asked_s: float
    came_s: float


class Soak:
    """Runs from the start to the end of the last pass, one after the other."""

    def __init__(self, wanted: argparse.Namespace, kit: Faults, reaper: Reaper, figures: Figures) -> None:
        self._prepared = prepare(work(), LANES)
        self._streams = Streams(self._prepared, NUM_PASSES)
        self._kit, self._reaper, self._figures = kit, reaper, figures
        self._random, self._pace = random.Random(f"{wanted.seed} legs"), Pace(f"{wanted.seed} pace")
        self._seen: set[Any] = set()  # hits
        for lane in range(LANES):  # the oracle's part, before the time begins
            for number in range(NUM_PASSES):
                turn = 0
                while not isinstance(self._streams.at(lane, (number, turn)), Ended):
                    turn += 1

    def run(self, end_s: float) -> str:
        """One run, or what is left of the time; returns what is wrong, if anything is."""
        places = dict.fromkeys(range(LANES), (0, 0))
        states: list[dict[str, Any]] = []
        while time.monotonic() < end_s and min(places.values()) < (NUM_PASSES, 0):
            leg = self._leg()
            state = merge_states(states) if states else None
            states = []
            for group in range(leg.topology):
                with configure(self._prepared, leg, group) as pipeline:
                    lanes = pipeline.lanes
                walk = Walk(self._streams, {lane: places[lane] for lane in lanes})
                wrong, own = self._group(leg, group, state, walk, end_s)
                if wrong:
                    return f"{leg}, group {group}: {wrong}"
                places |= walk.places
                states.append(own)
            self._figures.legs += 1
        return ""

    def _leg(self) -> Leg:
        chosen = self._random
        return Leg(
            "process",
            chosen.randint(1, LANES),
            chosen.choice((1, 2, 2, 3, "split")),
            chosen.choice((None, 1, 7, 16, 32)),
            chosen.randint(1, 3),
            chosen.choice(("contiguous", "interleaved")),
            faults.UNREACHED_RETRIES,
        )

    def _group(
        self, leg: Leg, group: int, state: dict[str, Any] | None, walk: Walk, end_s: float
    ) -> tuple[str, dict[str, Any]]:
        """Reads one group up to its share, through any number of deaths; (what is wrong, its state)."""
        share = self._random.randint(*GROUP_BATCHES)
        while True:
            trees = self._trees()
            with configure(self._prepared, leg, group) as pipeline:
                if state is not None:
                    pipeline.load_state_dict(state)
                ended, wrong = self._read(pipeline, walk, share, end_s)
                if ended and not wrong:
                    return "", json.loads(json.dumps(pipeline.state_dict()))
                if not wrong.startswith("WorkerError") or self._trees() == trees:
                    return wrong, {}
                state = json.loads(json.dumps(pipeline.state_dict()))
            self._figures.resumed += 1

    def _trees(self) -> int:
        """Deaths of engines and launchers so far."""
        return self._reaper.trees + sum(hit.point not in WORKER_POINTS for hit in self._kit.hits())

    def _read(self, pipeline: zp.Pipeline, walk: Walk, share: int, end_s: float) -> tuple[bool, str]:
        """(whether the share was read, what came instead)."""
        waits: list[Wait] = []
        events, asked = play(pipeline), 0.0
        try:
            while walk.delivered < share and not walk.finished and time.monotonic() < end_s:
                event, _ = next(events)
                came = time.monotonic()
                if isinstance(event, Fault):
                    return False, str(event)
                difference = walk.check(event, lambda: b"")
                if difference is not None:
                    return True, str(difference)
                if isinstance(event, Gave):
                    self._figures.batches += 1
                    if asked:
                        waits.append(Wait(asked, came))
                    self._reaper.watch(live=True)
                    self._pace.rest()
                    asked = time.monotonic()
                else:
                    self._figures.passes += 1
                    self._stalls(waits)
                    waits, asked = [], 0.0  # the next one starts everything again
            return True, ""
        finally:
            self._reaper.watch(live=False)
            events.close()
            self._stalls(waits)

    def _stalls(self, waits: list[Wait]) -> None:
        """The longest wait behind every death of a worker in this stretch; and behind moments without one."""
        if not waits:
            return
        first, last = waits[0].asked_s, waits[-1].came_s
        hits = [hit for hit in self._kit.hits() if hit not in self._seen]
        self._seen.update(hits)
        moments = [hit.at_s for hit in hits if hit.point in WORKER_POINTS] + self._reaper.deaths
        self._reaper.deaths = []
        self._figures.stalls += [_longest(waits, at) for at in moments if first <= at <= last]
        quiet = first + WATCHED_S * self._random.random()
        while quiet < last:
            if not any(quiet - WATCHED_S <= at <= quiet + WATCHED_S for at in moments):
                self._figures.usual.append(_longest(waits, quiet))
            quiet += WATCHED_S


def _longest(waits: list[Wait], at_s: float) -> float:
    """Of the waits that end after a moment and begin within a second of it; what was waited before does not count."""
    behind = (wait for wait in waits if wait.came_s > at_s and wait.asked_s < at_s + WATCHED_S)
    return max((wait.came_s - max(wait.asked_s, at_s) for wait in behind), default=0.0)


# -- what is measured beside -------------------------------------------------------------------------------------------


class Memory:
    """A thread that weighs a process of each kind every second, MB."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.sizes: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-memory")

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            by_kind: dict[str, list[float]] = defaultdict(list)
            for pid, kind in proc.kinds(os.getpid(), "zephon").items():
                if size := own_mb(pid):
                    by_kind[kind].append(size)
            means = {kind: sum(sizes) / len(sizes) for kind, sizes in by_kind.items()}
            self.sizes.append((time.monotonic() - self.begun, means))


def own_mb(pid: int) -> float:
    """Anonymous and shared memory of a process in MB, without its files: their PSS falls and rises with neighbours."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE)) * 1024 / 1e6
    return 0.0


def judge_memory(sizes: list[tuple[float, dict[str, float]]], seconds: float) -> Iterator[str]:
    """What grew."""
    for kind, growth in MOST_GROWTH.items():
        tenths = [[s[kind] for at, s in sizes if kind in s and n <= at / seconds * 10 < n + 1] for n in range(10)]
        if not tenths[1] or not tenths[9]:
            yield f"the run was too short for the memory of the {kind} to be sampled"
            continue
        early, late = statistics.median(tenths[1]), statistics.median(tenths[9])
        print(f"memory of a {kind}: {early:.1f} MB early, {late:.1f} MB late ({late / early - 1:+.1%})")
        if late > early * (1 + growth) + GROWTH_MB:
            yield f"memory of the {kind} grew by {late / early - 1:.1%}"


def left(descriptors: int, threads: int, names: set[str]) -> Iterator[str]:
    """What is left behind, up to five seconds after the end."""

    def new_names() -> list[str]:  # a neighbour's come and go
        return sorted(name for name in proc.shared_names() - names if name.startswith("zephon-"))

    gc.collect()
    end = time.monotonic() + LEFT_S
    while (proc.descendants(os.getpid()) or new_names()) and time.monotonic() < end:
        time.sleep(0.05)
    if below := proc.descendants(os.getpid()):
        yield f"processes are left: {sorted(below)}"
    if new := new_names():
        yield f"names in /dev/shm are left: {new}"
    if (now := len(os.listdir("/proc/self/fd"))) > descriptors:
        yield f"{now - descriptors} descriptors are left"
    if (running := threading.active_count()) > threads:
        yield f"{running - threads} threads are left"


def report(kit: Faults, figures: Figures, minutes: float) -> None:
    hits = kit.hits()
    kills = len(hits) + sum(figures.outside.values())
    print(
        f"{minutes:g} minutes: {kills} kills ({len(hits)} at named points, {figures.outside['worker']} workers and "
        f"{figures.outside['engine or launcher']} engines or launchers at any moment), {figures.legs} restarts on "
        f"other topologies, {figures.resumed} after a death of engine or launcher, {figures.passes} passes of groups, "
        f"{figures.batches:,} batches"
    )
    for what, counted in (("points", Counter(h.point for h in hits)), ("ways", Counter(h.way for h in hits))):
        print(f"{what}: {', '.join(f'{name} {count}' for name, count in sorted(counted.items()))}")
    for what, stalls in (("after the death of a worker", figures.stalls), ("without one", figures.usual)):
        if stalls:
            p95 = sorted(stalls)[int(0.95 * (len(stalls) - 1))]
            print(
                f"longest wait for a batch in the second {what}: median {statistics.median(stalls) * 1000:.1f} ms, "
                f"95 % {p95 * 1000:.0f} ms, worst {max(stalls) * 1000:.0f} ms ({len(stalls)} of them)"
            )


def main() -> int:
    wanted = arguments()
    logging.getLogger("zephon").setLevel(logging.ERROR)  # which group has more lanes is of no interest here
    descriptors, threads, names = len(os.listdir("/proc/self/fd")), threading.active_count(), proc.shared_names()
    figures, failures = Figures(), []
    with Faults() as kit, Reaper(kit, str(wanted.seed), wanted.every, figures) as reaper:
        soak = Soak(wanted, kit, reaper, figures)
        with Memory() as memory:
            end_s = memory.begun + wanted.minutes * 60
            while time.monotonic() < end_s and not failures:
                if wrong := soak.run(end_s):
                    failures.append(wrong)
        report(kit, figures, wanted.minutes)
    failures += judge_memory(memory.sizes, wanted.minutes * 60)
    failures += left(descriptors, threads, names)
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("sound: every batch is the oracle's, memory is flat, nothing is left")
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=1.5, metavar="S", help="seconds between two deaths, on average")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

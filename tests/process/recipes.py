"""The recipes of cases A4, A17, A19, A20 and A23 as functions that assert: run as a script by `run_recipe.py`.

So each of them can be run under every start method of multiprocessing that a user may have set, by the script itself
or inside of a child process of that method.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import zephon as zp
from tests.process.functions import Full, Raise, wait_for
from tests.process.helpers import (
    children,
    engine,
    ids,
    kill,
    launcher,
    line,
    lives,
    rests,
    to_the_error,
    wait_until,
    workers,
)
from tests.process.raising import HoldsALock, NoText, ThreeArguments, caused, local_class
from zephon.arena import MOST_SLOTS

Record = dict[str, Any]
MIB = 1 << 20

# -- A4: one record far larger than the rest ---------------------------------------------------------------------------

AT = 100


def text_of(record: int, size: int) -> str:
    """So many bytes, of another content for each record."""
    return (f"{record}," * (1 + size // 2))[:size]


class Blow:
    """The text of record 100, made in a worker: the reader has not seen it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, record: Record) -> Record:
        return {**record, "text": text_of(AT, self.size)} if record["id"] == AT else record


def write_rows(path: Path, sizes: list[int]) -> None:
    """200 rows; row 100 has one field for each size. JSONL, or Parquet by the suffix."""
    rows = []
    for i in range(200):
        names = ["text", *(f"more_{n}" for n in range(1, len(sizes)))]
        rows.append({"id": i, **{n: text_of(i, s if i == AT else 5) for n, s in zip(names, sizes, strict=True)}})
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def a04(folder: Path, unit: int = MIB, suffix: str = ".jsonl", runner: str = "process") -> None:
    """Sizes around a unit, a row whose fields are three units together, a row that a stage blows up; W = 2 or 0."""
    cases: list[tuple[list[int], int]] = [([size], 0) for size in (unit - 1, unit, unit + 1, 4 * unit)]
    for number, (sizes, blown) in enumerate([*cases, ([unit - 1] * 3, 0), ([5], 4 * unit)]):
        path = folder / f"{number}{suffix}"
        write_rows(path, sizes)
        dataset = zp.Dataset.from_path("toy", path, index_dir=folder / "index")
        functions = [Blow(blown)] if blown else []
        with line(0, *functions, dataset=dataset, batch=4, runner=runner, prefetch_batches=2) as pipeline:
            found: list[int] = []
            for batch in pipeline:
                found += ids([batch])
                for place, i in enumerate(ids([batch])):
                    for name, size in zip([n for n in batch if n != "id"], [blown] if blown else sizes, strict=True):
                        wanted = text_of(i, size if i == AT else 5)
                        assert digest(batch[name][place]) == digest(wanted), (number, i, name)
        assert found == list(range(200))
        path.unlink()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- A17: exceptions that are hard to rebuild --------------------------------------------------------------------------


RAISED: dict[str, Callable[[], BaseException]] = {
    "a": lambda: ThreeArguments("three", 1, 2),
    "b": HoldsALock,
    "c": local_class,
    "d": NoText,
    "e": caused,
    "f": lambda: SystemExit(3),
    "g": lambda: ValueError("x" * 5_000_000),
}


def a17(kind: str, num_workers: int) -> None:
    """Rows 0 to 6 come, then the error within 5 s, with row and stage in its text; it is not caught here."""
    made = line(20, Raise(7, RAISED[kind]), batch=1, parallelism=num_workers or 1)
    pipeline = made if num_workers else made.options(runner="inline")
    found: list[int] = []
    with pipeline:
        error = to_the_error(pipeline, found)
    assert found == list(range(7))
    assert "operator 'map' failed on lane 0, dataset 'toy', shard list, row 7: " in str(error)
    assert type(RAISED[kind]()).__name__ in str(error)
    print("told", flush=True)
    raise error


# -- A19: workers and jobs that die ------------------------------------------------------------------------------------


class Busy:
    """Takes some time; at one id it waits until a file is there."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def __call__(self, record: Record) -> Record:
        if record["id"] == self.at:
            (self.folder / "standing").touch()
            wait_for(self.folder / "go on")
        return {**record, "sum": sum(range(20_000)), "pad": "x" * 500}


def a19_killed(folder: Path) -> None:
    """(1) Four workers, killed while they are idle, inside of a stage, and while they wait for room in their rings."""
    pipeline = line(400, Busy(folder, 200), parallelism=4, prefetch_batches=1, ring_bytes=4096)
    with pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 2))
        for pid in workers(4):  # full rings, and nobody takes: asleep with half a result
            rests(pid)
        for pid in workers(4)[:2]:
            kill(pid)
        wait_until(lambda: len(children(launcher())) == 5, 10, "new workers")
        while not (folder / "standing").exists():
            found += ids(islice(iterator, 1))
        for pid in workers(4):
            kill(pid)
        (folder / "go on").touch()
        found += ids(iterator)
    assert found == list(range(400))


class DiesInSetup(zp.Operator):
    def setup(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def process(self, record: Record) -> Record:
        return record


def a19_initialiser(folder: Path) -> None:
    """(2) Workers that die in their initialiser: an error within 10 s that says how, and hints at memory."""
    began = time.monotonic()
    source = zp.StaticMixture([zp.Dataset.from_list("toy", [{"id": 1}])])
    pipeline = zp.Pipeline(source).apply(DiesInSetup()).batch(1).options(runner="process", parallelism=4)
    error = to_the_error(pipeline, [], most_s=10)
    assert time.monotonic() - began < 10
    assert isinstance(error, zp.errors.WorkerError)
    assert "died while they started, in the setup of 'apply': SIGKILL (out of memory?" in str(error)


def a19_job(path: Path) -> None:
    """(3), (4) A job that goes on from its last state, if there is one; it logs each batch, and saves the state."""
    (path.with_suffix(".pid")).write_text(str(os.getpid()))
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(400)])
    source = zp.StaticMixture([dataset], seed=3, chunk_size=16)
    pipeline = zp.Pipeline(source).map(Busy(path.parent, -1)).batch(4)
    options = {"parallelism": 4, "canonical_replicas": 2, "task_records": 4, "prefetch_batches": 2}
    state, log = path.with_suffix(".state"), path.with_suffix(".log").open("a", buffering=1)
    with log, pipeline.options(runner="process", **options) as running:
        if state.exists():
            running.load_state_dict(json.loads(state.read_text()))
        for batch in running:
            print(json.dumps(ids([batch])), file=log)
            path.with_suffix(".new").write_text(json.dumps(running.state_dict()))
            path.with_suffix(".new").replace(state)


# -- A20: batches that are kept ----------------------------------------------------------------------------------------

KEEP: dict[str, Callable[[int, Any], Any]] = {
    "all": lambda number, x: x,
    "every third": lambda number, x: x if number % 3 == 0 else None,
    "slices": lambda number, x: x[:, ::2],
    "memoryviews": lambda number, x: memoryview(x),
}


def a20(num_batches: int = 2000) -> None:
    """4 workers, two batches prepared, 256 descriptors: all ways of keeping, and three held while another one takes."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for how, keep in KEEP.items():
        kept: list[tuple[int, Any]] = []

        def hold(number: int, x: Any, keep: Any = keep, kept: Any = kept) -> None:
            if (found := keep(number, x)) is not None:
                kept.append((number, found))

        took_all(how, num_batches, hold)
        assert len(kept) >= num_batches // 3
        for number, found in kept:
            assert (np.asarray(found) == number).all(), (how, number)
    with Holder(3) as holder:
        took_all("three held", num_batches, holder.hand)
        assert holder.seen == num_batches


def took_all(how: str, num_batches: int, keep: Callable[[int, Any], None]) -> None:
    """Takes all batches: no stall, and no more descriptors than those of the slots, however many are kept."""
    most, longest, began = len(os.listdir("/proc/self/fd")) + 2 * MOST_SLOTS + 4, 0.0, time.monotonic()
    with line(num_batches, Full(64), batch=1, prefetch_batches=2, parallelism=4) as pipeline:
        for number, batch in enumerate(pipeline):
            longest = max(longest, time.monotonic() - began)
            keep(number, batch["x"])
            assert len(os.listdir("/proc/self/fd")) <= most, (how, number)
            began = time.monotonic()
    assert number == num_batches - 1
    assert longest < 5, (how, longest)


class Holder:
    """A thread that holds the last few arrays that it was handed, looks at them, and lets go of the oldest one."""

    def __init__(self, most: int) -> None:
        self.most, self.seen = most, 0
        self._changed, self._handed, self._over = threading.Condition(), list[tuple[int, Any]](), False
        self._thread = threading.Thread(target=self._hold)

    def hand(self, number: int, x: Any) -> None:
        """Returns once the thread holds it."""
        with self._changed:
            self._handed.append((number, x))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._handed, 5)

    def _hold(self) -> None:
        held: list[tuple[int, Any]] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._handed or self._over)
                if self._over:
                    return
                held += self._handed
                self._handed.clear()
                self._changed.notify_all()
            for number, x in held:
                assert (x == number).all(), number
            self.seen = number + 1
            del held[: -self.most]

    def __enter__(self) -> Holder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(10)


# -- A23: processes inside of processes --------------------------------------------------------------------------------


def half(number: int) -> int:
    return number // 2


class Pooled(zp.Operator):
    """Opens a pool of two for each of a few records, or one in `setup` for all."""

    def __init__(self, method: str, folder: Path) -> None:
        self.method, self.folder, self.pool = method, folder, None

    def setup(self) -> None:
        self.pool = multiprocessing.get_context(self.method).Pool(2)

    def process(self, record: Record) -> Record:
        number = 2 * record["id"]
        if record["id"] == 5:  # one of its own as well
            with multiprocessing.get_context(self.method).Pool(2) as pool:
                assert pool.map(half, [number, 8]) == [5, 4]
        return {"id": self.pool.apply(half, (number,))}  # type: ignore[attr-defined]


def a23_stage(method: str, folder: Path) -> None:
    """A stage that opens pools. They end with the pipeline, as the killed workers cannot end them."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(16)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(Pooled(method, folder)).batch(4)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running:
        assert ids(running) == list(range(16))
    for pid in children(os.getpid()):
        assert "launcher" not in Path(f"/proc/{pid}/cmdline").read_text()


def load(seed: int) -> list[int]:
    """A loader with two workers, inside of a worker of a pool, which is daemonic."""
    assert multiprocessing.current_process().daemon
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(60)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=seed)).map(Full(8)).batch(4)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running:
        return sorted(ids(running))


def load_and_wait(folder: Path) -> None:
    """The same, but it stays in the middle."""
    pipeline = line(400, Full(8), prefetch_batches=1)
    iterator = iter(pipeline)
    next(iterator)
    (folder / f"loaded-{os.getpid()}").touch()
    threading.Event().wait(60)


def a23_loader(method: str) -> None:
    """Two loaders in a pool of two."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(load, [1, 2], chunksize=1) == [list(range(60))] * 2


def a23_outer(method: str, folder: Path) -> None:
    """Two loaders in a pool that is terminated, as leaving the `with` does: no tree of theirs lives on."""
    with multiprocessing.get_context(method).Pool(2) as pool:
        waiting = pool.map_async(load_and_wait, [folder] * 2, chunksize=1)
        wait_until(lambda: len(list(folder.glob("loaded-*"))) == 2, 30, "two loaders")
        trainers = [int(path.name.partition("-")[2]) for path in folder.glob("loaded-*")]
        trees = [pid for trainer in trainers for pid in (launcher(trainer), *children(launcher(trainer)))]
        assert len(trees) == 8
        assert engine(trainers[0]) in trees
        assert not waiting.ready()
    wait_until(lambda: not any(map(lives, [*trainers, *trees])), 5, "the end of the loaders' trees")


# -- run as a script ---------------------------------------------------------------------------------------------------


def run(name: str, *arguments: str) -> None:
    """One recipe, by name; paths are made of arguments that begin with a slash, numbers of digits."""
    known = [Path(a) if a.startswith("/") else int(a) if a.isdecimal() else a for a in arguments]
    with contextlib.ExitStack() as stack:
        if name == "a04":
            known.insert(0, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        globals()[name](*known)


def main(method: str, place: str, name: str, *arguments: str) -> int:
    """Runs a recipe under a start method, here or in a child process of that method; returns the exit status."""
    multiprocessing.set_start_method(method)
    status = 0
    if place == "child":
        child = multiprocessing.Process(target=run, args=(name, *arguments))
        child.start()
        child.join()
        status = child.exitcode or 0
    else:
        run(name, *arguments)
    assert multiprocessing.get_start_method() == method
    return status

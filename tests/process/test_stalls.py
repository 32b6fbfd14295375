"""Stalls: who stands still is named with its record and its stack; a time-out makes a death of it."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich, Stand, wait_for
from tests.process.helpers import digests, ids, kill, line, wait_until, workers
from zephon.errors import WorkerError

pytestmark = pytest.mark.law("L8")

Record = dict[str, Any]
WARN = {"stall_warn_s": 0.5}  # on a busy machine a worker may not run for a while


class Warned(logging.Handler):
    """Keeps what the log says; `then` is called at each warning, so that a test may end the stall that it is about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.then: Callable[[], Any] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.then()


@pytest.fixture
def warned() -> Iterator[Warned]:
    handler, log = Warned(), logging.getLogger("zephon")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def goes_on(folder: Path) -> Callable[[], None]:
    return (folder / "go on").touch


# -- who and where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["process", "threads"])
def test_a_warning_names_operator_record_and_stack(runner: str, warned: Warned, tmp_path: Path) -> None:
    """It comes while the trainer waits in `next`: nothing else would end this stall."""
    warned.then = goes_on(tmp_path)
    functions = (Enrich(), Stand(tmp_path, 37))
    with line(64, *functions, runner=runner, task_records=64, **WARN) as pipeline:
        found = digests(pipeline)
    assert found == digests(line(64, *functions, runner="inline"))
    text = warned.texts[0]
    assert re.match(
        r"worker \d: operator 'map_2' has been on lane 0, dataset 'toy', shard list, row 37 for [\d.]+ s; its stack:",
        text,
    )
    assert "in wait_for" in text
    assert "in __call__" in text
    assert "in serve" not in text
    assert "Enrich" not in text


class Twice:
    """Two children for each record."""

    def __call__(self, record: Record) -> list[Record]:
        return [{**record}, {**record}]


def test_the_record_is_the_one_that_was_handed_in(warned: Warned, tmp_path: Path) -> None:
    """Behind a filter and a flat_map positions are no longer those of the task; here the task began on two lanes."""
    warned.then = goes_on(tmp_path)
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=16)
    chain = zp.Pipeline(source).filter(_even).flat_map(Twice()).map(Stand(tmp_path, 38)).batch(4)
    options = {"runner": "process", "parallelism": 1, "canonical_replicas": 2, "task_records": 64}
    with chain.options(**options, **WARN) as pipeline:
        assert sum(batch.num_samples for batch in pipeline) == 64
    assert "on lane 0, dataset 'toy', shard list, row 38 for" in warned.texts[0]


def _even(record: Record) -> bool:
    return record["id"] % 2 == 0


def test_a_second_stage(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    with line(48, Enrich(), Stand(tmp_path, 21), parallelism={"map": 1, "map_2": 1}, **WARN) as pipeline:
        assert ids(pipeline) == list(range(48))
    assert "operator 'map_2' has been on lane 0, dataset 'toy', shard list, row 21 for" in warned.texts[0]


class OverAll(zp.Operator):
    """An operator that takes a whole task at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def run(self, rows: Any) -> None:
        wait_for(Path(self.folder, "go on"))


def test_an_operator_that_takes_whole_tasks(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    with applied(OverAll(tmp_path), 20, task_records=20, **WARN) as pipeline:
        assert ids(pipeline) == list(range(20))
    wanted = (
        "operator 'apply' has been on 20 records at once, the first of them lane 0, dataset 'toy', shard list, row 0,"
    )
    assert wanted in warned.texts[0]


def applied(operator: zp.Operator, rows: int, **options: Any) -> zp.Pipeline:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(rows)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none", chunk_size=64)).apply(operator).batch(4)
    return pipeline.options(**{"runner": "process", "parallelism": 1, "canonical_replicas": 1, **options})


class StuckSetup(OverAll):
    def setup(self) -> None:
        wait_for(Path(self.folder, "go on"))

    def run(self, rows: Any) -> None:
        pass


def test_setup(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    with applied(StuckSetup(tmp_path), 20, **WARN) as pipeline:
        assert ids(pipeline) == list(range(20))
    assert "operator 'apply' has been in setup(), before any record, for " in warned.texts[0]
    assert "in setup" in warned.texts[0].splitlines()[-1]


class StuckReads(OverAll):
    """Reads of the file `b.jsonl` hang until a file is there."""

    def setup(self) -> None:
        from zephon.io import jsonl

        before, folder = jsonl._pread, self.folder

        def pread(fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("b.jsonl"):
                wait_for(Path(folder, "go on"))
            return bytes(before(fd, length, offset))

        jsonl._pread = pread  # type: ignore[misc]

    def run(self, rows: Any) -> None:
        pass


def test_a_read(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    for name, first in (("a", 0), ("b", 8)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(first, first + 8)))
    dataset = zp.Dataset.from_path("files", tmp_path / "*.jsonl", index_dir=tmp_path / "index")
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=16)
    options = {"runner": "process", "parallelism": 1, "canonical_replicas": 1, "task_records": 16}
    with zp.Pipeline(source).apply(StuckReads(tmp_path)).batch(4).options(**options, **WARN) as pipeline:
        assert ids(pipeline) == list(range(16))
    assert "fetch has been on lane 0, dataset 'files', shard b.jsonl, row 0 for" in warned.texts[0]


class HoldsTheGil:
    """Waits inside C code that keeps the interpreter, until somebody writes to a pipe."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, record: Record) -> Record:
        if record["id"] == 9:
            fd = os.open(self.path, os.O_RDWR)
            assert ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1) == 1  # not cut short by a signal
            os.close(fd)
        return record


def test_c_code_that_holds_the_interpreter(warned: Warned, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    warned.then = partial(os.write, writer, b"x")
    with line(16, HoldsTheGil(tmp_path / "pipe"), **WARN) as pipeline:
        assert ids(pipeline) == list(range(16))
    os.close(writer)
    assert "row 9 for" in warned.texts[0]
    assert "in __call__" in warned.texts[0]


def test_a_stopped_worker_has_no_stack(warned: Warned, tmp_path: Path) -> None:
    with line(64, Stand(tmp_path, 20), parallelism=1, **WARN) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 1))
        wait_until((tmp_path / "standing").exists)
        [worker] = workers(1)
        kill(worker, signal.SIGSTOP)
        warned.then = lambda: (goes_on(tmp_path)(), kill(worker, signal.SIGCONT))
        found += ids(iterator)
    assert found == list(range(64))
    assert "row 20" in warned.texts[0]
    assert warned.texts[0].endswith("it gives no stack: it is stopped, or waits inside the kernel")


def test_it_is_said_again_at_growing_intervals(warned: Warned, tmp_path: Path) -> None:
    warned.then = lambda: goes_on(tmp_path)() if len(warned.texts) == 3 else None
    with line(64, Stand(tmp_path, 20), **WARN) as pipeline:
        assert ids(pipeline) == list(range(64))
    seconds = [float(re.search(r" for ([\d.]+) s; its stack", text)[1]) for text in warned.texts]  # type: ignore[index]
    assert len(seconds) == 3
    assert all(later > 1.9 * earlier for earlier, later in pairwise(seconds))


def test_a_consumer_that_takes_nothing_is_no_fault(warned: Warned) -> None:
    """Workers wait for room in their rings, for much longer than the limit."""
    with line(3000, Enrich(), prefetch_batches=1, ring_bytes=4096, stall_timeout_s=0.6, **WARN) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 1))
        threading.Event().wait(1.5)
        found += ids(iterator)
    assert found == list(range(3000))
    assert not warned.texts


def test_inline_says_nothing(warned: Warned, tmp_path: Path) -> None:
    timer = threading.Timer(1.2, goes_on(tmp_path))
    timer.start()
    assert ids(line(64, Stand(tmp_path, 20), runner="inline", **WARN)) == list(range(64))
    timer.join()
    assert not warned.texts


# -- the time-out ----------------------------------------------------------------------------------------------------


class StandOnce:
    """Never comes back from some ids, but only once from each: a file remembers."""

    def __init__(self, folder: Path, at: set[int]) -> None:
        self.folder, self.at = str(folder), at

    def __call__(self, record: Record) -> Record:
        path = Path(self.folder, f"stood-at-{record['id']}")
        if record["id"] in self.at and not path.exists():
            path.touch()
            threading.Event().wait()
        return record


@pytest.mark.law("L7")
def test_who_stalls_once_is_replaced_and_nothing_is_lost(warned: Warned, tmp_path: Path) -> None:
    function = StandOnce(tmp_path, {3, 40})
    with line(64, Enrich(), function, task_records=16, canonical_replicas=2, stall_timeout_s=1.0) as pipeline:
        found = digests(pipeline)
    assert len(list(tmp_path.iterdir())) == 2
    assert found == digests(line(64, Enrich(), function, canonical_replicas=2, runner="inline"))
    told = [text for text in warned.texts if "its worker is ended and the work tried again (stall_timeout_s)" in text]
    assert len(told) == 2
    assert all("in __call__" in text for text in told)


class StandAlways(StandOnce):
    def __call__(self, record: Record) -> Record:
        if record["id"] in self.at:
            threading.Event().wait()
        return record


@pytest.mark.law("L7")
def test_a_record_that_stalls_again_and_again_is_an_error(tmp_path: Path) -> None:
    """However many records its task has: the worker tells which one it was on."""
    began = time.monotonic()
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(3000)])
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=4096)
    chain = zp.Pipeline(source).map(StandAlways(tmp_path, {1037}), on_error="skip").batch(4)
    options = {"runner": "process", "parallelism": 2, "canonical_replicas": 1, "task_records": 2048}
    found: list[int] = []
    with chain.options(**options, stall_timeout_s=0.5) as pipeline, pytest.raises(WorkerError) as raised:
        found.extend(i for batch in pipeline for i in ids([batch]))
    assert time.monotonic() - began < 10
    assert found == list(range(1036))
    assert re.search(
        r"the record at lane 0, dataset 'toy', shard list, row 1037 stalled its worker 3 times, alone, in 'map': "
        r"it stood still for [\d.]+ s \(stall_timeout_s\); .*raise stall_timeout_s.*exclude=\[\('list', 1037\)\]",
        str(raised.value),
    )


class NeverReady(zp.Operator):
    def setup(self) -> None:
        threading.Event().wait()


def test_a_setup_that_never_ends() -> None:
    with applied(NeverReady(), 20, stall_timeout_s=0.1) as pipeline, pytest.raises(WorkerError) as raised:
        list(pipeline)
    assert re.search(r"in the setup of 'apply': it stood still for [\d.]+ s \(stall_timeout_s\)", str(raised.value))


@pytest.mark.law("L7")
def test_the_record_a_worker_died_on_is_found_at_once(tmp_path: Path) -> None:
    """Not by halving: a task of 2,048 records costs one death more than the record alone."""
    deaths = tmp_path / "deaths"
    dying = line(2048, DieCounting(deaths, 1500), chunk_size=4096, task_records=2048, parallelism=1)
    with dying as pipeline, pytest.raises(WorkerError, match=r"row 1500 killed its worker 3 times"):
        list(pipeline)
    assert deaths.stat().st_size == 4


class DieCounting:
    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = str(path), at

    def __call__(self, record: Record) -> Record:
        if record["id"] == self.at:
            with open(self.path, "a") as file:
                file.write("x")
            os._exit(1)
        return record

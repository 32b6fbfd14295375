"""Stalls in the engine itself, where accumulators and `batch` run for all lanes: told like those of workers."""

from __future__ import annotations

import re
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich, wait_for
from tests.process.helpers import digests, engine, ids, kill, lives, slow, to_the_error, wait_until
from tests.process.test_stalls import WARN, Warned, goes_on, warned
from zephon.errors import WorkerError

__all__ = ["warned"]  # a fixture

pytestmark = pytest.mark.law("L8")


class Pairs(zp.Accumulator):
    """Pairs of records; one hook waits, in lane 1, until a file is there."""

    method = "pairs"
    measures = True
    batched = True

    def __init__(self, hook: str, folder: Path, at: int = 21) -> None:
        self.hook, self.folder, self.at = hook, str(folder), at
        self.held: dict[int, list[Any]] = {}

    def stand(self, hook: str) -> None:
        if hook == self.hook:
            Path(self.folder, "standing").touch()
            wait_for(Path(self.folder, "go on"))

    def measure(self, record: dict[str, Any]) -> int:
        return int(record["id"]) + 1

    def open(self, lane: int, key: Any) -> None:
        self.held[lane] = []
        if lane:
            self.stand("open")

    def push(self, lane: int, refs: Any) -> zp.Emitted:
        emitted = zp.Emitted()
        for position, (cursor, length, _) in enumerate(refs):
            if length == self.at + 1:
                self.stand("push")
            self.held[lane].append((cursor, 0, length))
            if len(self.held[lane]) == 2:
                emitted.add(position, self.held[lane])
                self.held[lane] = []
        return emitted

    def flush(self, lane: int) -> zp.Emitted:
        if lane:
            self.stand("flush")
        return zp.Emitted()

    def group_length(self, group: Any) -> int:
        return len(group)

    def build(self, parts: Any) -> dict[str, Any]:
        found = [int(record["id"]) for record, _, _ in parts]
        if self.at in found:
            self.stand("build")
        return {"id": found[0], "other": found[-1]}


LATE = 53  # a row in the last chunk of lane 1: batches come before it


def paired(hook: str, folder: Path, at: int = 21, **options: Any) -> zp.Pipeline:
    """64 ids on two lanes, 16 in a chunk, in pairs."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=16)
    pipeline = zp.Pipeline(source).map(Enrich()).apply(Pairs(hook, folder, at)).batch(2)
    settings = {"runner": "process", "parallelism": 2, "canonical_replicas": 2, "flush_every_k_chunks": 1}
    return pipeline.options(**{**settings, "task_records": 8, "prefetch_batches": 1, **options})


@pytest.mark.parametrize(  # under "threads" the trainer itself opens the first windows
    ("runner", "hook"),
    [
        ("process", "open"),
        ("process", "push"),
        slow("process", "flush"),
        ("process", "build"),
        ("threads", "push"),
        slow("threads", "flush"),
        slow("threads", "build"),
    ],
)
def test_a_warning_names_operator_lane_and_stack(runner: str, hook: str, warned: Warned, tmp_path: Path) -> None:
    """It comes while the trainer waits in `next`, of whatever hook of the user's own accumulator."""
    warned.then = goes_on(tmp_path)
    with paired(hook, tmp_path, runner=runner, **WARN) as pipeline:
        found = digests(pipeline)
    assert found == digests(paired(hook, tmp_path, runner="inline"))
    told = re.compile(r"operator 'pairs', in the engine, has been on lane 1 for [\d.]+ s; its stack:\n")
    texts = [text for text in warned.texts if told.match(text)]
    assert texts, warned.texts
    for wanted in ("in wait_for", "in stand", f"in {hook}"):
        assert wanted in texts[0]
    assert "asyncio" not in texts[0]


class Slow(zp.StaticMixture):
    """A source whose third chunk takes its time."""

    folder = ""

    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> zp.Pointers:
        if index == 2:
            wait_for(Path(self.folder, "go on"))
        return super().chunk(lane, num_lanes, pass_index, index)

    def chunks(self, lane: int, num_lanes: int, pass_index: int, first: int, most: int) -> list[zp.Pointers]:
        return [self.chunk(lane, num_lanes, pass_index, first)]


def test_a_source_that_stands_still(warned: Warned, tmp_path: Path) -> None:
    warned.then = goes_on(tmp_path)
    source = Slow([zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])], shuffle="none", chunk_size=16)
    source.folder = str(tmp_path)
    options = {"runner": "process", "parallelism": 1, "canonical_replicas": 1}
    with zp.Pipeline(source).batch(4).options(**options, **WARN) as pipeline:
        assert ids(pipeline) == list(range(64))
    assert warned.texts[0].startswith("the engine has been dealing out tasks (the source's chunk(), ")
    assert "in chunk" in warned.texts[0]


@pytest.mark.parametrize("hook", ["push", slow("build")])
def test_the_time_out_ends_it_with_an_error(hook: str, tmp_path: Path) -> None:
    """Nothing is left, and the state of the last batch resumes exactly."""
    found: list[str] = []
    with paired(hook, tmp_path, stall_timeout_s=1.0) as pipeline:
        error = to_the_error(pipeline, found, digests, 1.0 + 5)
        assert isinstance(error, WorkerError)
        state = pipeline.state_dict()
    assert re.match(
        r"operator 'pairs', in the engine, has been on lane 1 for [\d.]+ s; the engine is ended: mend what it is on, "
        rf"or raise stall_timeout_s; the state of the last batch is good: load it to go on \(stall_timeout_s\); its "
        rf"stack:\n(.*\n)+.* in {hook}\n",
        str(error),
    ), str(error)
    goes_on(tmp_path)()
    with paired(hook, tmp_path) as again:
        again.load_state_dict(state)
        found += digests(again)
    assert found == digests(paired(hook, tmp_path, runner="inline"))


def test_the_error_waits_for_a_trainer_that_takes_nothing(tmp_path: Path) -> None:
    """The engine is long gone when it is asked for more. Few pointers at a time: batches are sent before it stands."""
    few = {"task_records": 1, "parallelism": 1}
    with paired("push", tmp_path, LATE, stall_timeout_s=0.5, **few) as pipeline:
        iterator = iter(pipeline)
        found = [next(iterator).digest()]
        victim = engine()
        wait_until(lambda: not lives(victim), 10, "the engine's end")
        error = to_the_error(iterator, found, digests)
        assert isinstance(error, WorkerError)
        assert "operator 'pairs', in the engine, has been on lane 1" in str(error)
    assert len(found) > 1


def test_an_engine_that_is_stopped_gives_no_stack(warned: Warned, tmp_path: Path) -> None:
    stackless = "it gives no stack: it is stopped, or waits inside the kernel"

    def stop() -> None:
        wait_until((tmp_path / "standing").exists)
        kill(engine(), 19)

    def go_on() -> None:
        if warned.texts[-1].endswith(stackless):  # else it was told before it was stopped
            goes_on(tmp_path)()
            kill(engine(), 18)

    warned.then = go_on
    stopper = threading.Thread(target=stop)
    stopper.start()
    with paired("push", tmp_path, LATE, **WARN) as pipeline:
        found = digests(pipeline)
    stopper.join()
    assert found == digests(paired("push", tmp_path, LATE, runner="inline"))
    assert any(text.endswith(stackless) for text in warned.texts)


def test_a_consumer_that_takes_nothing_is_no_fault(warned: Warned, tmp_path: Path) -> None:
    """The engine waits, for much longer than the limit; and it is busy for much longer than that, call by call."""
    goes_on(tmp_path)()
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(6000)])
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=64)
    pipeline = zp.Pipeline(source).map(Enrich()).apply(Pairs("none", tmp_path)).batch(2)
    options = {"runner": "process", "parallelism": 2, "canonical_replicas": 2, "flush_every_k_chunks": 4}
    with pipeline.options(**options, stall_timeout_s=0.6, **WARN) as running:
        iterator = iter(running)
        found = sum(batch.num_samples for batch in islice(iterator, 1))
        threading.Event().wait(1.5)
        found += sum(batch.num_samples for batch in iterator)
    assert found == 3000
    assert not warned.texts

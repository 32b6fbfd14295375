"""The engine process dies of user code that runs in it: how it ended and what it was on is told."""

from __future__ import annotations

import os
import re
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Enrich
from tests.process.helpers import digests, slow, to_the_error
from tests.process.test_engine_stalls import LATE, Pairs
from zephon.errors import OperatorError, WorkerError
from zephon.runners.engine_watch import WatchedEngine
from zephon.runners.rings import Station
from zephon.runners.whereabouts import CELLS_BYTES, FLOW, IDLE, Whereabouts


class Dying(Pairs):
    """Pairs that end their process in one hook, as long as a file is there."""

    def __init__(self, hook: str, folder: Path, how: int, at: int = LATE) -> None:
        super().__init__(hook, folder, at)
        self.how = how

    def stand(self, hook: str) -> None:
        if hook == self.hook and Path(self.folder, "deadly").exists():
            if self.how >= 0:
                os._exit(self.how)
            os.kill(os.getpid(), -self.how)
            signal.pause()


def dying(hook: str, folder: Path, how: int, behind: bool = False, **options: Any) -> zp.Pipeline:
    """64 ids on two lanes in pairs; with `behind` a worker gets the pairs."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])
    source = zp.StaticMixture([dataset], shuffle="none", chunk_size=16)
    pipeline = zp.Pipeline(source).map(Enrich()).apply(Dying(hook, folder, how))
    pipeline = pipeline.map(Last()) if behind else pipeline
    settings = {"runner": "process", "parallelism": 2, "canonical_replicas": 2, "flush_every_k_chunks": 1}
    return pipeline.batch(2).options(**{**settings, "task_records": 8, "prefetch_batches": 1, **options})


class Last:
    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


@pytest.mark.law("L8")
@pytest.mark.parametrize(
    ("hook", "how", "told"),
    [
        ("push", 3, "exit status 3"),
        ("flush", 0, "exit status 0"),
        ("build", -signal.SIGSEGV, "SIGSEGV"),
        slow("open", -signal.SIGABRT, "SIGABRT"),
        slow("push", -signal.SIGKILL, r"SIGKILL \(out of memory\? the kernel kills so\)"),
    ],
)
def test_an_accumulator_that_ends_the_engine_is_named(hook: str, how: int, told: str, tmp_path: Path) -> None:
    """And the state of the last batch resumes exactly, once that is mended."""
    (tmp_path / "deadly").touch()
    found: list[str] = []
    with dying(hook, tmp_path, how) as pipeline:
        error = to_the_error(pipeline, found, digests)
        state = pipeline.state_dict()
    assert isinstance(error, WorkerError)
    assert re.fullmatch(
        rf"the engine process died \({told}; operator 'pairs', in the engine, was on lane 1: if it dies there again, "
        r"mend that\)\. The state of the last batch is good: load it to go on",
        str(error),
    ), str(error)
    (tmp_path / "deadly").unlink()
    with dying(hook, tmp_path, how) as again:
        again.load_state_dict(state)
        found += digests(again)
    assert found == digests(dying(hook, tmp_path, how, runner="inline"))


@pytest.mark.law("L8")
def test_a_build_for_the_next_stage_that_ends_the_engine_is_named(tmp_path: Path) -> None:
    (tmp_path / "deadly").touch()
    with dying("build", tmp_path, -signal.SIGSEGV, behind=True) as pipeline:
        error = to_the_error(pipeline, [])
    assert "died (SIGSEGV; operator 'pairs', in the engine, was building a group for the next stage: " in str(error)


class Deadly(zp.StaticMixture):
    """A source whose third chunk ends the process."""

    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> zp.Pointers:
        if index == 2:
            os._exit(5)
        return super().chunk(lane, num_lanes, pass_index, index)

    def chunks(self, lane: int, num_lanes: int, pass_index: int, first: int, most: int) -> list[zp.Pointers]:
        return [self.chunk(lane, num_lanes, pass_index, first)]


@pytest.mark.law("L8")
def test_a_source_that_ends_the_engine_is_named() -> None:
    source = Deadly([zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])], shuffle="none", chunk_size=16)
    options = {"runner": "process", "parallelism": 1, "canonical_replicas": 1}
    with zp.Pipeline(source).batch(4).options(**options) as pipeline:
        error = to_the_error(pipeline, [])
    assert "died (exit status 5; the engine was dealing out tasks (the source's chunk(), " in str(error)


@pytest.mark.parametrize("step", [IDLE, FLOW])
def test_an_engine_that_was_on_no_code_of_the_users_blames_none(step: int) -> None:
    cells = memoryview(bytearray(CELLS_BYTES))
    Whereabouts(cells).call(step, 1)
    plan = zp.Pipeline(zp.StaticMixture([zp.Dataset.from_list("toy", [{"id": 1}])])).batch(1)._session.resolved.plan
    assert WatchedEngine(plan, Station(cells, -1)).post_mortem(signal.SIGKILL) == (
        "the engine process died (SIGKILL (out of memory? the kernel kills so)). "
        "The state of the last batch is good: load it to go on"
    )


@pytest.mark.law("L8")
@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
@pytest.mark.parametrize("behind", [False, True])
def test_what_build_raises_is_told_once_and_with_its_place(runner: str, behind: bool, tmp_path: Path) -> None:
    with raising(tmp_path, behind, runner) as pipeline:
        error = to_the_error(pipeline, [])
    assert isinstance(error, OperatorError)
    assert "'pairs'" in str(error)
    assert "a group of 2 records: dataset 'toy', shard list, row 52, 53: ValueError: no pair" in str(error)
    shown = "".join(traceback.format_exception(error))
    assert "During handling" not in shown
    assert "raised in a worker" not in shown
    assert ("raised in the engine:" in shown) == (runner == "process")
    assert shown.count(", in stand") == 1


class Raising(Pairs):
    def stand(self, hook: str) -> None:
        if hook == self.hook:
            raise ValueError("no pair")


def raising(folder: Path, behind: bool, runner: str) -> zp.Pipeline:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(64)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none", chunk_size=16))
    pipeline = pipeline.apply(Raising("build", folder, LATE))
    pipeline = pipeline.map(Last()) if behind else pipeline
    settings = {"runner": runner, "parallelism": 1, "canonical_replicas": 1, "flush_every_k_chunks": 1}
    return pipeline.batch(2).options(**settings)

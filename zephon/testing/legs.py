"""How a pipeline is run for a comparison: one leg of a chain of restarts, in this process or in a fresh one.

legs 1 .. n-1 in this process, leg n in a child with another hash seed:
parent -- request (JSON, stdin) --> child: builds the target again, loads the state, plays, -- events (stdout) -->
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal

import msgspec

from zephon.batch import Batch
from zephon.errors import ConfigError, WorkerError
from zephon.ops.base import Operator
from zephon.pipeline import Pipeline
from zephon.testing.streams import Event, Fault, Gave, Stopped, fault_of, sample_digests

Played = Generator[tuple[Event, Batch | None], None, None]
"""The events of a group; each batch with what it gave."""

SPLIT = "split"
"""As `parallelism`: 1 and 2 workers in turn, so that neighbouring operators never share a stage."""


class Leg(msgspec.Struct, frozen=True):
    """How the groups of one topology run, between two restarts."""

    runner: str
    topology: int
    parallelism: int | Literal["split"] = 1
    task_records: int | None = None
    prefetch_batches: int = 2
    mapping_strategy: str = "contiguous"
    max_worker_retries: int = 3

    def workers(self, pipeline: Pipeline) -> int | dict[str, int]:
        """`parallelism` as an option of this pipeline."""
        if isinstance(self.parallelism, int):
            return self.parallelism
        operators = [n for n in pipeline._definition.nodes if isinstance(n, Operator)]
        return {node.name or node.method: 1 + i % 2 for i, node in enumerate(operators)} or 1


def prepare(pipeline: Pipeline, num_lanes: int) -> Pipeline:
    """What every leg starts from: without the pipeline's own topology, execution settings, `take` and loaded state.

    Lanes are compared to their own ends, so `last_step` and `steps_per_pass` are set aside too.
    """
    if not pipeline._definition.options.data.deterministic:
        raise ConfigError("deterministic=False gives up the order that this compares; verify with deterministic=True")
    new = pipeline._derive(limit=None)
    new._inherited = (None, None)
    topology = {"world_size": None, "global_rank": None, "dp_degree": 1, "dp_group_id": 0}
    ends = {"last_step": None, "steps_per_pass": None}
    return new.options(canonical_replicas=num_lanes, runner="inline", parallelism=1, output="numpy", **topology, **ends)


def configure(prepared: Pipeline, leg: Leg, group: int) -> Pipeline:
    """One group of a leg."""
    return prepared.options(
        runner=leg.runner,
        parallelism=leg.workers(prepared),
        task_records=leg.task_records,
        prefetch_batches=leg.prefetch_batches,
        dp_degree=leg.topology,
        dp_group_id=group,
        mapping_strategy=leg.mapping_strategy,
        max_worker_retries=leg.max_worker_retries,
    )


def play(pipeline: Pipeline) -> Played:
    """The events of a pipeline, pass after pass, with the batches themselves. An error is the last event."""
    try:
        while True:
            for batch in pipeline:
                yield _gave(pipeline, batch), batch
            yield Stopped(pipeline.counts()["dropped"]), None
    except Exception as error:
        yield fault_of(error), None


def _gave(pipeline: Pipeline, batch: Batch) -> Gave:
    counts = pipeline.counts()
    return Gave(
        batch.lane_id,
        batch.pass_index,
        batch.step,
        batch.digest(),
        batch.origins,
        counts["dropped"][batch.lane_id],
        counts["delivered"][batch.lane_id],
        tuple(map(str, batch)),
    )


class GroupRequest(msgspec.Struct, frozen=True):
    """What a fresh process does for one group: from `state`, at most `quota` batches and `passes` ends of a pass."""

    group: int
    state: dict[str, Any] | None
    quota: int
    passes: int


class Request(msgspec.Struct, frozen=True):
    """What a fresh process is asked for."""

    target: str
    path: list[str]
    num_lanes: int
    leg: Leg
    groups: list[GroupRequest]


# Found before `sys.path` is the parent's, so only what the interpreter brings is used here.
_BOOTSTRAP = "import json, sys; text = sys.stdin.read(); sys.path[:] = json.loads(text)['path']; "
_BOOTSTRAP += "from zephon.testing.legs import serve; serve(text)"


def play_fresh(target: str, num_lanes: int, leg: Leg, groups: list[GroupRequest]) -> list[list[Event]]:
    """The events of every group, from a process that builds the target anew. Its hash seed is not this one's.

    Raises WorkerError where the process ends without an answer.
    """
    request = Request(target, sys.path, num_lanes, leg, groups)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", _BOOTSTRAP],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=False,
    )
    try:
        return msgspec.json.decode(done.stdout, type=list[list[Event]])
    except msgspec.MsgspecError as error:
        raise WorkerError(
            f"the fresh process that builds {target} again ended with status {done.returncode} and without an answer; "
            "what it said is above"
        ) from error


def serve(text: str) -> None:
    """The fresh process: plays what is asked for, and writes the events to what was its standard output."""
    from zephon.cli.target import load_target

    request = msgspec.json.decode(text, type=Request)
    with _stdout_kept() as answer:
        try:
            prepared = prepare(load_target(request.target), request.num_lanes)
            played = [_serve_group(prepared, request.leg, group) for group in request.groups]
        except Exception as error:
            played = [[fault_of(error)] for _ in request.groups]
        answer(msgspec.json.encode(played))


@contextlib.contextmanager
def _stdout_kept() -> Iterator[Callable[[bytes], int]]:
    """What is printed meanwhile, also by compiled code, goes to standard error. Gives a function that writes."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        yield kept.write
    finally:
        kept.close()


def _serve_group(prepared: Pipeline, leg: Leg, request: GroupRequest) -> list[Event]:
    with configure(prepared, leg, request.group) as pipeline:
        if request.state is not None:
            pipeline.load_state_dict(request.state)
        events: list[Event] = []
        batches = ends = 0
        for event, batch in play(pipeline):
            if batch is not None and isinstance(event, Gave):
                event = msgspec.structs.replace(event, samples=sample_digests(batch))
            events.append(event)
            batches += isinstance(event, Gave)
            ends += isinstance(event, Stopped)
            if batches == request.quota or ends == request.passes or isinstance(event, Fault):
                break
        return events

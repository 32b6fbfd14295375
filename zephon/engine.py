"""The flow, top to bottom. Read this first.

    source -> feed -> stage 0 [pool, accumulators] -> ... -> stage n [pool, accumulators] -> batchers -> tail

`Engine.pump` moves everything as far as it goes and never waits; `drive.py` decides who calls it. Which results are
finished when decides only how soon a batch is ready, never what is in it: results are taken in the order of their
numbers, and all that follows is a function of that order.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zephon.batch import Batch, lineage_of
from zephon.flow.accumulate import Chain
from zephon.flow.batcher import Cut, Failed, Item, LaneBatcher
from zephon.flow.feed import Feed, LaneFeed
from zephon.flow.progress import LaneState
from zephon.flow.stage import Input, Pending, Stage
from zephon.flow.tail import Tail
from zephon.flow.task import Run
from zephon.io.dataset import Dataset
from zephon.metrics import Metrics
from zephon.ops.base import Caught, as_zephon_error
from zephon.ops.batch import collate
from zephon.plan.graph import Plan
from zephon.runners.base import MakePool, RunnerPool
from zephon.runners.execute import StageWork, describe_handle
from zephon.work.source import WorkSource

LEAST_DRY_POINTERS = 16_384
STOP_TIMEOUT_S = 1.0


class Ready(msgspec.Struct, frozen=True):
    """A finished batch, and its lane's state behind it."""

    batch: Batch
    state: LaneState


class Job(msgspec.Struct, frozen=True):
    """What an engine works on: a plan over a source, for some lanes of one pass."""

    plan: Plan
    source: WorkSource
    datasets: Sequence[Dataset]
    num_lanes: int
    pass_index: int
    lanes: Mapping[int, LaneState]
    """Where each owned lane starts; lanes already in a later pass are not among them."""
    cycles_per_step: int
    task_records: int
    prefetch_batches: int


class Engine:
    """The state of one run over a pass. One thread pumps; one takes from `tail`."""

    def __init__(self, job: Job, make_pool: MakePool, caught: Caught, notify: Callable[[], None]) -> None:
        self.job = job
        self.metrics = Metrics()
        self.tail: Tail[Ready | Item] = Tail({lane: state.turns for lane, state in job.lanes.items()})
        self.batchers = {lane: self._batcher(state) for lane, state in job.lanes.items()}
        works = [StageWork(stage, job.datasets, job.source.seed, caught) for stage in job.plan.stages]
        self.pools: list[RunnerPool] = []
        try:
            for stage, work in zip(job.plan.stages, works, strict=True):
                self.pools.append(make_pool(work, stage.parallelism, notify))
        except BaseException:
            self.close()
            raise
        self.feed = Feed(self._lane_feeds(), self._lane_limit(), self._has_room)
        self.stages, self.pendings = self._connect()

    def _batcher(self, state: LaneState) -> LaneBatcher:
        plan, source = self.job.plan, self.job.source
        name = plan.batch.name or plan.batch.method
        drop_last = f"{name}.drop_last" if plan.batch.drop_last else None
        dry_limit = None
        if source.length(self.job.pass_index) is None:
            share = -(-source.epoch_length(self.job.pass_index) // self.job.num_lanes)
            dry_limit = max(share, LEAST_DRY_POINTERS)
        return LaneBatcher(state, plan.batch.size, drop_last, plan.regroups, plan.reasons, dry_limit)

    def _lane_feeds(self) -> list[LaneFeed]:
        job = self.job
        return [
            LaneFeed(job.source, lane, job.num_lanes, s.pass_index, s.chunk, s.offset, job.plan.flush_every)
            for lane, s in job.lanes.items()
        ]

    def _lane_limit(self) -> int:
        """Pointers of one lane on their way: enough for a lane that the others wait for to use every worker."""
        return (self.job.plan.stages[0].parallelism * 3 + 1) * self.job.task_records

    def _has_room(self, lane: int) -> bool:
        return self.tail.waiting(lane) < self.job.prefetch_batches

    def _connect(self) -> tuple[list[Stage], list[Pending]]:
        """The stages in order, and what lies between them."""
        job = self.job
        stages: list[Stage] = []
        pendings: list[Pending] = []
        source: Input = self.feed
        for plan, pool in zip(job.plan.stages, self.pools, strict=True):
            chain = Chain(
                copy.deepcopy(plan.accumulators), job.source.seed, lambda handle: describe_handle(job.datasets, handle)
            )
            for lane, state in job.lanes.items():
                chain.open(lane, state.pass_index, state.chunk)
            stages.append(Stage(source, pool, chain, job.task_records))
            pendings.append(Pending(stages[-1], 2 * job.task_records * plan.parallelism))
            source = pendings[-1]
        return stages, pendings[:-1]

    def pump(self) -> bool:
        """Takes what is finished, last stage first, then hands out new tasks. Returns whether anything moved."""
        began, worked = time.perf_counter(), False
        for number in reversed(range(len(self.stages))):
            while self._way_is_free(number) and (runs := self.stages[number].take()) is not None:
                self._pass_on(number, runs)
                worked = True
        for stage in self.stages:
            worked |= stage.dispatch()
        if worked:
            self.metrics.seconds["engine"] += time.perf_counter() - began
        return worked

    def _way_is_free(self, number: int) -> bool:
        return number >= len(self.pendings) or self.pendings[number].has_room

    def _pass_on(self, number: int, runs: list[Run]) -> None:
        """Runs of a stage go to the next one, or into batches."""
        for run in runs:
            if number < len(self.pendings):
                self.pendings[number].put(run)
                continue
            for item in self.batchers[run.lane].push(run):
                finished = self._batch(run, item) if isinstance(item, Cut) else item
                self.tail.put(run.lane, finished)
                if isinstance(finished, Failed):
                    self.stages[-1].stop(run.lane)
                    break

    def _batch(self, run: Run, cut: Cut) -> Ready | Failed:
        """The batch of a cut: payload is put together only here."""
        began = time.perf_counter()
        try:
            fields = collate(cut.segments)
        except Exception as error:
            return Failed(
                as_zephon_error(error, self.job.plan.batch.name or "batch", f"lane {run.lane}, turn {cut.turn}")
            )
        num_samples = sum(stop - start for _, start, stop in cut.segments)
        lineage = [lineage_of(*segment) for segment in cut.segments]
        step = cut.turn // self.job.cycles_per_step
        batch = Batch(fields, run.lane, step, run.pass_index, num_samples, lineage, self._locate)
        self.metrics.seconds["collate"] += time.perf_counter() - began
        self.metrics.totals["batches"] += 1
        self.metrics.totals["samples"] += num_samples
        return Ready(batch, cut.state)

    def _locate(self, dataset: int, row: int) -> tuple[str, str, int]:
        shard, row_in_shard = self.job.datasets[dataset].locate(row)
        return self.job.datasets[dataset].name, shard, row_in_shard

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """Where the time went so far."""
        snapshot = self.metrics.snapshot()
        for pool in self.pools:
            for name, value in pool.seconds.items():
                snapshot["seconds"][name] = snapshot["seconds"].get(name, 0.0) + value
        return snapshot

    def close(self) -> None:
        """Ends the pools."""
        for pool in self.pools:
            pool.close(STOP_TIMEOUT_S)

"""The flow, top to bottom. Read this first.

    source -> feed -> stage 0 [pool, accumulators] -> ... -> stage n [pool, accumulators] -> batchers -> tail

`Engine.pump` moves everything as far as it goes and never waits; `drive.py` decides who calls it. Which results are
finished when decides only how soon a batch is ready, never what is in it: results are taken in the order of their
numbers, and all that follows is a function of that order.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np

from zephon.batch import Batch
from zephon.errors import CheckpointError, ZephonError
from zephon.flow.accumulate import Chain
from zephon.flow.batcher import Cut, Failed, Item, LaneBatcher
from zephon.flow.feed import Feed, LaneFeed
from zephon.flow.held import Rows, read_held
from zephon.flow.progress import LaneState
from zephon.flow.remake import Remake
from zephon.flow.stage import Input, Pending, Stage
from zephon.flow.tail import Tail
from zephon.flow.task import Run
from zephon.io.dataset import Dataset
from zephon.lineage import origins_in
from zephon.metrics import Metrics
from zephon.ops.accumulator import Accumulator
from zephon.ops.base import as_zephon_error, let_through
from zephon.ops.batch import collate
from zephon.plan.graph import Plan
from zephon.plan.limits import aligned, lane_limit, pending_limit
from zephon.record import event_at, first_origin, record_of
from zephon.runners.base import MakePool, RunnerPool
from zephon.runners.execute import StageWork, build_error
from zephon.runners.whereabouts import ACCUMULATORS, BATCH, DEALING, FLOW, Whereabouts
from zephon.runners.who import describe_handle, describe_origin
from zephon.work.source import WorkSource

LEAST_DRY_POINTERS = 32_768
STOP_TIMEOUT_S = 1.0
FIRST_TASK_RECORDS = 8  # before it is known what a record costs
RINGS_IN_TASK = 2  # the most that its results take: half of an area for large ones (`runners/rings.py`)


class Ready(msgspec.Struct, frozen=True):
    """A finished batch, and its lane's state behind it."""

    batch: Batch
    state: LaneState
    slot: int = 0
    """The number of the slot that it lies in, where it lies in one."""


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
    """Records of a task; where `adaptive`, the most there may be."""
    adaptive: bool
    prefetch_batches: int
    save_every: int = 0
    """Pointers of a lane between two states of its accumulators; 0: a restart begins with the window."""
    ring_bytes: int = 0
    max_worker_retries: int = 0
    stall_warn_s: float | None = None
    stall_timeout_s: float | None = None
    slots: int = 0
    """Batch slots at least, where the engine is a process of its own."""
    most_slots: int = 0
    """Batch slots at most."""
    read_ahead: int = 0
    """Batches that whoever takes them keeps, beside the one that the user has."""
    max_record_bytes: int = 0

    def locate(self, dataset: int, row: int) -> tuple[str, str, int]:
        """(dataset name, shard name, row in shard) of a row."""
        shard, row_in_shard = self.datasets[dataset].locate(row)
        return self.datasets[dataset].name, shard, row_in_shard


TailItem = Ready | Item


class Engine:
    """The state of one run over a pass. One thread pumps; one takes from `tail`.

    `build`: batches are put together as they are cut. Else the tail holds the cuts, and who takes one builds it.
    `where` always tells what the engine is on.
    """

    def __init__(
        self,
        job: Job,
        make_pool: MakePool,
        interrupts: bool,
        notify: Callable[[], None],
        build: bool = True,
        where: Whereabouts | None = None,
    ) -> None:
        self.job = job
        self._build, self._interrupts = build, interrupts
        self._thread = threading.get_ident()
        self.where = where or Whereabouts()
        self.metrics = Metrics()
        self.tail: Tail[TailItem] = Tail({lane: state.turns for lane, state in job.lanes.items()})
        self.batchers = {lane: self._batcher(state) for lane, state in job.lanes.items()}
        self.pools: list[RunnerPool] = []
        try:
            for stage in job.plan.stages:
                work = StageWork(stage, job.datasets, job.source.seed, interrupts)
                self.pools.append(make_pool(work, stage.parallelism, notify))
            chains = self._chains()
            self.feed = Feed(self._lane_feeds(chains), lane_limit(job.plan, job.task_records), self._has_room)
            self.stages, self.pendings = self._connect(chains)
        except BaseException:
            self.close()
            raise
        self.where.leave()

    def _batcher(self, state: LaneState) -> LaneBatcher:
        plan, source = self.job.plan, self.job.source
        name = plan.batch.name or plan.batch.method
        drop_last = f"{name}.drop_last" if plan.batch.drop_last else None
        dry_chunks = None
        if source.length(self.job.pass_index) is None:
            share = -(-source.epoch_length(self.job.pass_index) // self.job.num_lanes)
            chunk_size = max(1, len(source.chunk(0, self.job.num_lanes, self.job.pass_index, 0)))
            # Two rounds: a lane sees other rows in each, and may miss a rare one for almost that long.
            dry_chunks = -(-max(2 * share, LEAST_DRY_POINTERS) // chunk_size)
        return LaneBatcher(state, plan.batch.size, drop_last, plan.regroups, plan.reasons, dry_chunks)

    def _lane_feeds(self, chains: list[Chain]) -> list[LaneFeed]:
        job, every = self.job, self.job.plan.flush_every
        feeds = []
        for lane, s in job.lanes.items():
            remakes = self._opened(lane, s, chains)
            place = (job.num_lanes, s.pass_index, s.chunk, s.offset)
            feeds.append(LaneFeed(job.source, lane, *place, every, job.save_every, remakes))
        return feeds

    def _opened(self, lane: int, state: LaneState, chains: list[Chain]) -> list[Remake]:
        """Opens the accumulators of a lane; where they held something, gives what is to be made again for them."""
        every = self.job.plan.flush_every
        window = state.chunk // every * every if every else 0
        if not state.held:
            for chain in chains:
                chain.open(lane, state.pass_index, state.chunk if every else 0)
            return []
        rows, found = chains[0].rows, [chain for chain in chains if chain]
        if len(state.held) != len(found):
            raise CheckpointError(
                f"lane {lane}: the state is of {len(state.held)} rows of accumulators, not {len(found)}"
            )
        place, remakes = event_at(state.chunk, state.offset), []
        for number, (chain, raw) in enumerate(zip(found, state.held, strict=True)):
            load = partial(chain.load, lane, (state.pass_index, window))
            remakes.append(Remake(lane, state.pass_index, place, rows, number, read_held(raw), load))
            remakes[-1].start()
        return remakes

    def _has_room(self, lane: int) -> bool:
        return self.tail.waiting(lane) < self.job.prefetch_batches

    def _chains(self) -> list[Chain]:
        """The accumulators of each stage."""
        job = self.job
        steps: dict[int, int] = {}

        def note(accumulator: Accumulator | None, lane: int) -> None:
            self.where.call(steps[id(accumulator)] if accumulator is not None else FLOW, lane)

        chains = []
        for plan in job.plan.stages:
            own = [copy.deepcopy(accumulator) for accumulator in plan.accumulators]
            steps.update(zip(map(id, own), count(ACCUMULATORS + len(steps)), strict=False))
            for accumulator in own:
                self._watch_build(accumulator, steps[id(accumulator)])
            describe = partial(describe_handle, job.datasets)
            chains.append(Chain(own, job.source.seed, describe, self._interrupts, note))
        stages = [number for number, chain in enumerate(chains) if chain]
        rows = [(op, row) for row, number in enumerate(stages) for op in chains[number].accumulators]
        for chain in chains:
            chain.rows = Rows(stages, [op for op, _ in rows], [row for _, row in rows])
        return chains

    def _watch_build(self, accumulator: Accumulator, step: int) -> None:
        """Has its `build` and `collate` noted as a step of its own, where the engine calls them."""

        def watched(call: Callable[..., Any], *args: Any) -> Any:
            if threading.get_ident() != self._thread:  # a worker thread's cells are its own
                return call(*args)
            before = self.where.within(step)
            try:
                return call(*args)
            finally:
                self.where.within(before)

        for name in ("build", "collate"):
            if (call := getattr(accumulator, name, None)) is not None:
                object.__setattr__(accumulator, name, partial(watched, call))

    def _connect(self, chains: list[Chain]) -> tuple[list[Stage], list[Pending]]:
        """The stages in order, and what lies between them."""
        job = self.job
        stages: list[Stage] = []
        pendings: list[Pending] = []
        source: Input = self.feed
        for plan, pool, chain in zip(job.plan.stages, self.pools, chains, strict=True):
            first = min(FIRST_TASK_RECORDS, job.task_records) if job.adaptive else job.task_records
            stages.append(Stage(source, pool, chain, first))
            pendings.append(Pending(stages[-1], pending_limit(plan.parallelism, job.task_records)))
            source = pendings[-1]
        return stages, pendings[:-1]

    def pump(self) -> bool:
        """Takes what is finished, last stage first, then hands out new tasks. Returns whether anything moved.

        Who then waits calls `where.leave()`.
        """
        self._thread = threading.get_ident()
        began, worked, seconds = time.perf_counter(), False, self.metrics.seconds
        collated = seconds["collate"]
        for number in reversed(range(len(self.stages))):
            while self._way_is_free(number) and (runs := self.stages[number].take()) is not None:
                self._pass_on(number, runs)
                worked = True
        self._set_pace()
        self.where.call(DEALING)
        for stage in self.stages:
            worked |= stage.dispatch()
        self.where.call(FLOW)
        if worked:
            seconds["engine"] += time.perf_counter() - began - (seconds["collate"] - collated)
        return worked

    def _set_pace(self) -> None:
        """Sizes tasks by what the records cost so far, unless the user said how large they are."""
        if not self.job.adaptive:
            return
        for stage, pool in zip(self.stages, self.pools, strict=True):
            if pool.meter.records:
                most = pool.meter.task_records(self.job.task_records, self.job.ring_bytes * RINGS_IN_TASK)
                stage.task_records = aligned(most, self.job.plan.batch.size)

    def _way_is_free(self, number: int) -> bool:
        return number >= len(self.pendings) or self.pendings[number].has_room

    def _pass_on(self, number: int, runs: list[Run]) -> None:
        """Runs of a stage go to the next one, or into batches."""
        self.where.call(FLOW)
        for run in runs:
            if number < len(self.pendings):
                self.pendings[number].put(run)
                continue
            self.feed.returned(run.lane, run.num_pointers)
            for item in self.batchers[run.lane].push(run):
                finished = self._batch(run, item) if self._build and isinstance(item, Cut) else item
                self.tail.put(run.lane, finished)
                if isinstance(finished, Failed):
                    self.stages[-1].stop(run.lane)
                    break

    def _batch(self, run: Run, cut: Cut) -> Ready | Failed:
        """The batch of a cut: payload is put together only here."""
        self.where.call(BATCH, run.lane)
        began, problem = time.perf_counter(), None
        try:
            fields = collate(cut.segments, np.empty, self.job.plan.formatters)
        except BaseException as error:
            let_through(error, self._interrupts)
            problem = error
        if problem is not None:  # here, so that it is not the context of what is raised on the search for its cause
            return Failed(self.batch_error(problem, run.lane, cut))
        num_samples = cut.num_samples
        origins = origins_in(cut.segments).samples
        step = cut.turn // self.job.cycles_per_step
        batch = Batch(fields, run.lane, step, run.pass_index, num_samples, origins, self.job.locate)
        self.metrics.seconds["collate"] += time.perf_counter() - began
        self.count_batch(num_samples)
        return Ready(batch, cut.state)

    def batch_error(self, error: BaseException, lane: int, cut: Cut) -> ZephonError:
        """The error of a batch that cannot be put together: of the group that cannot be built, or of the batch."""
        handles = [samples[i] for samples, start, stop in cut.segments for i in range(start, stop)]
        for handle in handles:
            try:
                record_of(handle)
            except BaseException as found:
                let_through(found, self._interrupts)
                return build_error(found, handle, self.job.datasets)
        batch = self.job.plan.batch
        where = f"lane {lane}, turn {cut.turn}, from {describe_origin(self.job.datasets, first_origin(handles[0]))} on"
        return as_zephon_error(error, batch.name or batch.method, where)

    def count_batch(self, num_samples: int) -> None:
        """Notes a finished batch in the metrics."""
        self.metrics.totals["batches"] += 1
        self.metrics.totals["samples"] += num_samples

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """Where the time went so far, and which deaths of workers were survived."""
        snapshot: dict[str, dict[str, float]] = {**self.metrics.snapshot(), "deaths": {}}
        for pool in self.pools:
            for name, value in pool.meter.seconds.items():
                snapshot["seconds"][name] = snapshot["seconds"].get(name, 0.0) + value
            for cause, number in pool.meter.deaths.items():
                snapshot["deaths"][cause] = snapshot["deaths"].get(cause, 0) + number
        return snapshot

    def close(self) -> None:
        """Ends the pools: all of them, also where a Ctrl-C ends the wait for one."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        with contextlib.ExitStack() as stack:
            for pool in self.pools:
                stack.callback(self._close_pool, pool, deadline)

    @staticmethod
    def _close_pool(pool: RunnerPool, deadline: float) -> None:
        pool.close(max(0.0, deadline - time.monotonic()))

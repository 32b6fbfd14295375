"""engine: the serial part of the engine alone, on one core: source, feed, accumulators, batcher and tail, no payload.

The name says which operators: `engine:shuffle+wrap+batch`. A pool that does nothing hands out lengths, as workers send
them, so that no record is read, moved or collated. What is timed is the real `Engine`; only its pool is another one.
Document lengths are log-normal. `flush_every_k_chunks` is 0, so states of what is held are taken on the way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from zephon.bench import data, proc
from zephon.bench.spec import Sample, Spec
from zephon.engine import Engine, Job
from zephon.errors import ConfigError
from zephon.flow.batcher import Cut
from zephon.flow.task import Out, Task
from zephon.io.dataset import Dataset
from zephon.lineage import origins_in
from zephon.ops.pack import ALGORITHMS
from zephon.ops.stateful_map import Machine
from zephon.pipeline import Pipeline
from zephon.plan.limits import MOST_TASK_RECORDS, save_every
from zephon.record import Record
from zephon.runners.base import Meter
from zephon.runners.heap import collect_rarely
from zephon.work.static_mixture import StaticMixture

ROWS = 10**9
MAX_LENGTH = 2048  # tokens of a sequence
BUFFER_SIZE = 8192  # records of a shuffle
MEDIAN_LENGTH, SIGMA = 400, 1.0  # tokens of a document: log-normal, the mean is 660
NUM_LENGTHS = 1 << 16
MOST_SEEN = 64  # keys that stateful_map remembers
PREFETCH_BATCHES = 8


def chain(pipeline: Pipeline, operators: str) -> Pipeline:
    """The pipeline with operators named as in "shuffle+wrap+batch". Raises ConfigError for a name that is none.

    shuffle, stateful_map, batch, or an algorithm of pack; batches hold 8 sequences of a pack, or 32 records.
    """
    names = operators.split("+")
    for name in names:
        if name == "shuffle":
            pipeline = pipeline.shuffle(BUFFER_SIZE)
        elif name == "batch":
            pipeline = pipeline.batch(32 if set(names) <= {"shuffle", "stateful_map", "batch"} else 8)
        elif name == "stateful_map":
            pipeline = pipeline.stateful_map(Seen, key=_key)
        elif name in ALGORITHMS:
            pipeline = pipeline.pack(MAX_LENGTH, name)
        else:
            known = ", ".join(["shuffle", "stateful_map", "batch", *ALGORITHMS])
            raise ConfigError(f"engine:{operators}: {name!r} cannot be measured; what can is {known}")
    if names[-1] != "batch":
        raise ConfigError(f"engine:{operators}: the last operator must be batch, as in engine:shuffle+wrap+batch")
    return pipeline


class Seen(Machine):
    """Keeps the first of each key: of the lengths that the pool hands out. Then it forgets, so that records go on."""

    def init(self, lane: int) -> dict[int, bool]:
        return {}

    def push(self, state: dict[int, bool], key: int) -> bool:
        if key in state:
            return False
        state[key] = True
        if len(state) == MOST_SEEN:
            state.clear()
        return True


def _key(record: Record) -> int:
    return 0  # never called: there are no records


def check(operators: str) -> None:
    """Raises ConfigError where `operators` cannot be measured."""
    chain(Pipeline(_source()), operators)


def measure(spec: Spec) -> Sample:
    """Records a second. `details`: microseconds of CPU a record by part, without what the part calls."""
    collect_rarely()  # as the engine's process does
    begun = time.perf_counter()
    engine = _engine(spec)
    parts = Parts()
    parts.watch(engine)
    read = engine.pools[0].meter
    run = _Run(engine, parts)
    run.go_on(0.0)
    first_batch_s = time.perf_counter() - begun
    run.go_on(spec.warm_s)
    parts.seconds.clear()
    records, cpu, machine = read.records, time.process_time(), proc.machine_cpu_s()
    took = run.go_on(spec.seconds)
    records, cpu = read.records - records, time.process_time() - cpu
    return Sample(
        rate=records / took,
        first_batch_s=first_batch_s,
        cpu_us={"engine": cpu / records * 1e6},
        other_cores=max(0.0, (proc.machine_cpu_s() - machine - cpu) / took),
        details={f"{part}_us": seconds / records * 1e6 for part, seconds in sorted(parts.seconds.items())},
    )


def _source() -> StaticMixture:
    return StaticMixture([data.made_dataset("null", data.id_record, ROWS)], seed=1)


def _engine(spec: Spec) -> Engine:
    settings: dict[str, Any] = {"canonical_replicas": spec.lanes or 1, "dp_degree": 1, "dp_group_id": 0}
    pipeline = chain(Pipeline(_source()), spec.variant)
    session = pipeline.options(parallelism=1, flush_every_k_chunks=0, **settings)._session
    plan, source = session.resolved.plan, session.resolved.source
    job = Job(
        plan=plan,
        source=source,
        datasets=cast("Sequence[Dataset]", source.datasets),
        num_lanes=session.resolved.topology.num_lanes,
        pass_index=0,
        lanes=session.start,
        cycles_per_step=1,
        task_records=MOST_TASK_RECORDS,
        adaptive=False,
        prefetch_batches=PREFETCH_BATCHES,
        save_every=save_every(plan, session._chunk_size(0)),
    )
    return Engine(job, lambda work, workers, notify: NullPool(), False, lambda: None, build=False)


class Nothing(Sequence[Record]):
    """Records without fields."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return {}


class NullPool:
    """A pool that has nothing to do: every record is there at once, with a length."""

    def __init__(self) -> None:
        self.meter = Meter()
        self._tasks: deque[Task] = deque()
        drawn = np.random.default_rng(1).lognormal(np.log(MEDIAN_LENGTH), SIGMA, NUM_LENGTHS)
        self._lengths: list[int] = np.maximum(1, drawn.astype(np.int64)).tolist()

    def has_room(self) -> bool:
        return not self._tasks

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def take(self) -> list[Out] | None:
        if not self._tasks:
            return None
        task = self._tasks.popleft()
        at = self.meter.records % (NUM_LENGTHS - MOST_TASK_RECORDS)
        outs = []
        for size in map(len, task.slices):
            outs.append(Out(Nothing(size), range(size), None, self._lengths[at : at + size]))
            at += size
        self.meter.add({}, task.num_records)
        return outs

    def close(self, timeout_s: float) -> None:
        self._tasks.clear()


class Parts:
    """Seconds of CPU by part of the engine, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        def timed(*args: Any) -> Any:
            began = time.process_time()
            self._inner.append(0.0)
            try:
                return call(*args)
            finally:
                took = time.process_time() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def _watch(self, thing: Any, part: str, *methods: str) -> None:
        for method in methods:
            setattr(thing, method, self.timed(part, getattr(thing, method)))

    def watch(self, engine: Engine) -> None:
        """Times the parts of an engine from now on."""
        self._watch(engine, "pump", "pump")
        self._watch(engine.feed, "feed", "deal")
        for stage in engine.stages:
            self._watch(stage, "stage", "take")
            self._watch(stage._chain, "chain", "push")
            self._watch(stage._chain, "states", "_save")
            for accumulator in stage._chain.accumulators:
                self._watch(accumulator, accumulator.name or accumulator.method, "push", "flush")
        for batcher in engine.batchers.values():
            self._watch(batcher, "batcher", "push")
        self._watch(engine.tail, "tail", "put", "pop")
        for pool in engine.pools:
            self._watch(pool, "null_pool", "take")


class _Run:
    """Pumps an engine, and takes its batches in the tail's order, as the engine's process does."""

    def __init__(self, engine: Engine, parts: Parts) -> None:
        self._engine = engine
        self._origins = parts.timed("origins", lambda cut: origins_in(cut.segments))

    def go_on(self, seconds: float) -> float:
        """Runs for about so long, and at least to the next batch; returns the seconds that it took."""
        tail, begun = self._engine.tail, time.perf_counter()
        while True:
            self._engine.pump()
            is_cut = False
            while isinstance(tail.peek(), Cut):
                _, cut = tail.pop()
                self._origins(cut)
                is_cut = True
            took = time.perf_counter() - begun
            if is_cut and took >= seconds:
                return took

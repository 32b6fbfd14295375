"""A pipeline in use: where it starts, the one live iterator, and the state.

The start is the beginning, a loaded state, or the pass behind the last finished one. Delivered is what the iterator
returned to the user, nothing else.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from zephon.agree import find_agreement
from zephon.batch import Batch
from zephon.checkpoint.restore import Allowed, check_definition, check_held, check_holders, check_source, fit_lanes
from zephon.checkpoint.schema import State, write_state
from zephon.collective import Exchange, initialised
from zephon.drive import DRIVERS, USER, Driver, Reader
from zephon.ends import Agreement, Alone, Ends, Pads, Position, first_batch, position_of, together
from zephon.engine import Job
from zephon.errors import CheckpointError, ConfigError
from zephon.flow.progress import LaneState, all_lost
from zephon.identity import available_cpus, find_identity
from zephon.io.dataset import Dataset
from zephon.iterate import BatchIterator
from zephon.limits import limit_error
from zephon.means import with_known_means
from zephon.ops.base import Node
from zephon.options import Options
from zephon.plan.ends import (
    APART,
    Ending,
    Unknown,
    batches_of_group,
    check_given,
    ending,
    may_end_apart,
    no_way,
)
from zephon.plan.fingerprint import Fingerprint, fingerprint
from zephon.plan.graph import LAST_STEP_DROPPED, Plan, make_plan
from zephon.plan.lanes import Topology, resolve_topology
from zephon.plan.limits import save_every, task_records
from zephon.work.source import WorkSource, losses_of

log = logging.getLogger("zephon")

DEFAULT_RUNNER = "process" if sys.platform == "linux" else "threads"


class Definition(msgspec.Struct, frozen=True):
    """What the user wrote."""

    source: WorkSource
    nodes: tuple[Node, ...]
    steps: dict[str, dict[str, Any]]
    """What each node was when it was declared, for the fingerprint."""
    options: Options
    limit: int | None = None


class Resolved(msgspec.Struct, frozen=True):
    """A definition in this process: its plan, and the lanes that it owns."""

    source: WorkSource
    plan: Plan
    topology: Topology
    fingerprint: Fingerprint


def _find_topology(options: Options, replicas: int | None) -> Topology:
    """Who this process is; says what the user should know of it."""
    identity = find_identity()
    if identity is not None:
        log.info("rank %d of %d, from %s", identity.rank, identity.world_size, identity.origin)
    topology, notices = resolve_topology(options.topology, replicas, identity)
    for notice in notices:
        log.warning("%s", notice)
    return topology


class Session:
    """The mutable part of one Pipeline object."""

    def __init__(
        self,
        definition: Definition,
        loaded: State | None = None,
        allow: Allowed | None = None,
        topology: Topology | None = None,
    ) -> None:
        """topology: who this process is, where another one has found that out for it."""
        self.definition = definition
        self.loaded = loaded
        self.allow = allow or Allowed()
        self.resolved = self._resolve(topology)
        self._iterator: weakref.ref[BatchIterator] | None = None
        self.last_metrics: dict[str, dict[str, float]] = {"seconds": {}, "totals": {}, "deaths": {}}
        self.start = self._first_start()
        self.current = dict(self.start)
        self.before_step: tuple[dict[int, LaneState], dict[int, LaneState]] | None = None
        """(`current`, what it was before the step whose list the user does not have yet)."""
        self._most_turns = self._most_advanced()
        self.started = False
        self._endings: dict[int, Ending | None] = {}
        self._pass_index = min(self._most_turns, default=0)  # of the run: other groups may not have ended it
        self.exchange = Exchange(self.resolved.topology, definition.options.topology)

    def _resolve(self, topology: Topology | None) -> Resolved:
        definition, state = self.definition, self.loaded
        options = definition.options
        replicas = options.data.canonical_replicas
        if state is not None and replicas not in (None, state.canonical_replicas):
            raise CheckpointError(
                f"canonical_replicas={replicas}, but the state was written with {state.canonical_replicas} lanes; "
                "a run keeps its number of lanes for life: leave the option unset, or give the state's number"
            )
        if state is not None and replicas is None:
            replicas = state.canonical_replicas
            log.info("canonical_replicas=%d comes from the state", replicas)
        if topology is None:
            topology = _find_topology(options, replicas)
        if not options.data.deterministic and topology.world_size > topology.num_groups:
            raise ConfigError(
                f"deterministic=False with {topology.world_size} ranks in {topology.num_groups} groups: the ranks of "
                "one group would get different batches; leave deterministic=True"
            )
        source = definition.source
        if state is not None and state.seed != source.seed:
            log.warning("the seed %d comes from the state, not %d from the source", state.seed, source.seed)
            source = source.with_seed(state.seed)
        was = state.fingerprint.get("source") if state is not None else None
        source = with_known_means(source, definition.nodes, definition.steps, was)
        plan = make_plan(definition.nodes, options, losses_of(source), available_cpus())
        resolved = Resolved(source, plan, topology, fingerprint(source, definition.steps, plan, options.data))
        if state is not None:
            check_holders(state, resolved.fingerprint, plan)
            for notice in check_definition(state, resolved.fingerprint, source, self.allow):
                log.warning("%s", notice)
            check_source(state, source, plan)
            check_held(state, source, plan)
        return resolved

    def _first_start(self) -> dict[int, LaneState]:
        """Where the owned lanes begin."""
        plan, lanes = self.resolved.plan, self.resolved.topology.lanes
        if self.loaded is None:
            zero = (0,) * len(plan.reasons)
            return {lane: LaneState(counts=zero, place_counts=zero) for lane in lanes}
        missing = [lane for lane in lanes if lane not in self.loaded.lanes]
        if missing:
            raise CheckpointError(
                f"the state lacks lanes {missing} that this group owns (it holds {sorted(self.loaded.lanes)}); "
                "load what zephon.merge_states made of the states of all groups; where torch's distributed checkpoint "
                "loads, it asks the new pipeline which lanes there are: set canonical_replicas there too"
            )
        fitted = self._fitted(self.loaded)
        return {lane: fitted[lane] for lane in lanes}

    def _fitted(self, state: State) -> dict[int, LaneState]:
        plan = self.resolved.plan
        return fit_lanes(state, plan.reasons, plan.batch.size, self.definition.options.data.cycles_per_step)

    def _most_advanced(self) -> dict[int, tuple[int, int]]:
        """By pass: (fewest, most) turns of any lane of the loaded state, owned or not."""
        turns: dict[int, list[int]] = {}
        states = self._fitted(self.loaded) if self.loaded is not None else self.start
        for place in states.values():
            turns.setdefault(place.pass_index, []).append(place.turns)
        first = min(turns, default=0)  # lanes that are still there begin later passes with no turn
        return {n: (min(done) if n == first else 0, max(done)) for n, done in turns.items()}

    def first_target(self, pass_index: int) -> tuple[int, bool]:
        """(the turns that every lane has behind the first global step of `steps()`, whether that step is short).

        After a restore in the middle of a step it is short: up to where the most advanced lane's step ends.
        """
        cycles = self.definition.options.data.cycles_per_step
        fewest, most = self._most_turns.get(pass_index, (0, 0))
        target = -(-most // cycles) * cycles
        return (target, True) if fewest < target else (target + cycles, False)

    def iterate(self, reader: Reader = USER) -> BatchIterator:
        """A new iterator from the start, for `reader`; it ends the one before."""
        execution = self.definition.options.execution
        if execution.output == "torch" and importlib.util.find_spec("torch") is None:
            raise ConfigError("output='torch' needs torch: pip install zephon[torch], or leave output='numpy'")
        self._check_ends()
        self.end_iterator("a newer iterator of the same pipeline took its place")
        if self.started and self.current != self.start:
            log.warning("iterating again from the pipeline's start; to go on where you were, load the state")
        self.started = True
        self.current = dict(self.start)
        iterator = BatchIterator(self, reader)
        self._iterator = weakref.ref(iterator)
        return iterator

    @property
    def pass_index(self) -> int:
        """The pass of the next iterator: the first of the owned lanes'; where groups end together, of all lanes'."""
        own = min((place.pass_index for place in self.start.values()), default=0)
        return own if self.ending(own) is None else min(own, self._pass_index)

    def begin_at(self, start: Mapping[int, LaneState], pass_index: int) -> None:
        """Makes these places of the owned lanes the start of the next iterator, which is in this pass."""
        self.start = {lane: start[lane] for lane in self.resolved.topology.lanes}
        self._pass_index = pass_index

    def _places(self) -> dict[int, LaneState]:
        """Where lanes of the run stand, as far as this process knows."""
        return {**(self._fitted(self.loaded) if self.loaded is not None else {}), **self.start}

    def ending(self, pass_index: int) -> Ending | None:
        """How a pass ends; None where each group delivers all that it has."""
        if pass_index not in self._endings:
            data = self.definition.options.data
            self._endings[pass_index] = ending(*self._pass(pass_index), data, self._places())
        return self._endings[pass_index]

    def _pass(self, pass_index: int) -> tuple[Plan, WorkSource, int, int]:
        return self.resolved.plan, self.resolved.source, self.resolved.topology.num_lanes, pass_index

    def _agreement(self) -> Agreement | None:
        resolved = self.resolved
        return find_agreement(resolved.topology, self.definition.options, resolved.fingerprint)

    def _check_ends(self) -> None:
        """Raises ConfigError where groups must end together and cannot; says so where they may end apart."""
        number, data, groups = self.pass_index, self.definition.options.data, self.resolved.topology.num_groups
        found = self.ending(number)
        if found is None:
            if groups > 1 and not self.started and initialised() is not None and may_end_apart(*self._pass(number)):
                log.warning("%s", APART)
        elif found.steps is None:
            if self._agreement() is None:
                raise ConfigError(no_way(found.why))
        elif found.given and not found.pad:
            check_given(*self._pass(number), data, self._places())

    def ends(self) -> Ends | None:
        """What ends the next pass together with the other groups, who are asked where they are. None: nothing does."""
        number, plan = self.pass_index, self.resolved.plan
        found = self.ending(number)
        if found is None:
            return None
        agreement = self._agreement() if found.steps is None else Alone()
        assert agreement is not None  # `_check_ends` saw to it
        position = Position(number, 0, 0, False)
        if found.steps is None:
            position = together(agreement.meet(position_of(self.start.values())))
        cycles, reason = self.definition.options.data.cycles_per_step, plan.reasons.get(LAST_STEP_DROPPED, -1)
        pads = Pads(partial(self._first_batch, position.pass_index), cycles)
        return Ends(found, cycles, agreement, position, self.current, pads.make, reason)

    def _first_batch(self, pass_index: int) -> Batch | None:
        """The first batch of the lowest lane that has one, made in this process, from the begin of the pass."""
        zero = (0,) * len(self.resolved.plan.reasons)
        start = LaneState(pass_index=pass_index, counts=zero, place_counts=zero)
        lanes = range(self.resolved.topology.num_lanes)
        found = (first_batch(self._job(pass_index, {lane: start})) for lane in lanes)
        return next((batch for batch in found if batch is not None), None)

    def num_batches(self) -> int:
        """Batches of this group in a whole pass. Raises TypeError, as `len` wants, where that is not known."""
        data, limit = self.definition.options.data, self.definition.limit
        found = batches_of_group(*self._pass(self.pass_index), data, self.resolved.topology.lanes)
        if isinstance(found, Unknown):
            raise TypeError(
                f"the batches of a pass cannot be counted in advance: {found.why}; for torch's DataLoader, which may "
                "have asked, there is pipeline.to_torch()"
            )
        return found if limit is None else min(found, limit)

    def end_iterator(self, reason: str) -> None:
        """Closes the live iterator."""
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is not None:
            iterator.end(reason)
        self._iterator = None

    @property
    def _delivered(self) -> Mapping[int, LaneState]:
        """Where the owned lanes stand behind what the user has."""
        places, before = self.before_step or (None, {})
        return before if places is self.current else self.current

    def finish_pass(self) -> None:
        """The iterator came to the end of its pass: the next one begins there."""
        if lost := all_lost(self.resolved.plan.reasons, self.start, self.current):
            log.warning("not one sample came out of this pass; dropped by %s", lost)
        self.start = dict(self.current)
        self._pass_index = min((place.pass_index for place in self.start.values()), default=0)

    def _job(self, pass_index: int, lanes: dict[int, LaneState], read_ahead: int = 0) -> Job:
        """The work of an engine, for lanes that are in this pass."""
        execution, resolved = self.definition.options.execution, self.resolved
        return Job(
            plan=resolved.plan,
            source=resolved.source,
            datasets=cast("Sequence[Dataset]", resolved.source.datasets),
            num_lanes=resolved.topology.num_lanes,
            pass_index=pass_index,
            lanes=lanes,
            cycles_per_step=self.definition.options.data.cycles_per_step,
            task_records=task_records(execution.task_records),
            adaptive=execution.task_records is None,
            prefetch_batches=execution.prefetch_batches,
            save_every=save_every(resolved.plan, self._chunk_size(pass_index)),
            ring_bytes=execution.ring_bytes,
            max_worker_retries=execution.max_worker_retries,
            max_record_bytes=execution.max_record_bytes,
            stall_warn_s=execution.stall_warn_s,
            stall_timeout_s=execution.stall_timeout_s,
            read_ahead=read_ahead,
        )

    def drive(self, pass_index: int, reader: Reader = USER) -> Driver:
        """A running engine for the owned lanes that are in this pass."""
        execution = self.definition.options.execution
        lanes = {lane: place for lane, place in self.start.items() if place.pass_index == pass_index}
        job = self._job(pass_index, lanes, reader.ahead)
        if not lanes:  # others are still in a pass that all lanes of this group have ended
            return DRIVERS["inline"](job)
        if execution.runner is None and DEFAULT_RUNNER == "threads":
            log.warning("runner='threads': the process runner, which is faster, needs Linux")
        runner = execution.runner or DEFAULT_RUNNER
        try:
            driver = DRIVERS[runner](job)
            driver.pins = reader.pins
            return driver
        except Exception as error:
            if (known := limit_error(error, f"the start of runner '{runner}'")) is not None:
                raise known from error
            raise

    def _chunk_size(self, pass_index: int) -> int:
        return len(self.resolved.source.chunk(0, self.resolved.topology.num_lanes, pass_index, 0))

    def places(self, after: Batch) -> Mapping[int, LaneState]:
        """Where the owned lanes stood behind a batch."""
        owner, places = getattr(after, "_progress", None) or (None, ())
        if owner is not self:
            raise CheckpointError("state_dict(after=batch): the batch did not come from this pipeline object")
        return dict(zip(self.start, places, strict=True))

    def check_state(self) -> None:
        """Raises CheckpointError where the pipeline has no state."""
        if not self.definition.options.data.deterministic:
            raise CheckpointError(
                "deterministic=False gives up the order that a resume needs, so there is no state; "
                "leave deterministic=True to checkpoint"
            )

    def state(self, places: Mapping[int, LaneState] | None = None) -> dict[str, Any]:
        """The state behind the last delivered batch, or at `places` of the owned lanes."""
        self.check_state()
        lanes = self._delivered if places is None else places
        if not self.started and self.loaded is None:  # then every lane of the run is at its beginning
            lanes = dict.fromkeys(range(self.resolved.topology.num_lanes), next(iter(lanes.values())))
        return write_state(self.state_of(lanes))

    def state_of(self, lanes: Mapping[int, LaneState]) -> State:
        """A state of this pipeline with these lanes."""
        plan = self.resolved.plan
        return State(
            seed=self.resolved.source.seed,
            canonical_replicas=self.resolved.topology.num_lanes,
            cycles_per_step=self.definition.options.data.cycles_per_step,
            batch_size=plan.batch.size,
            fingerprint=self.resolved.fingerprint,
            reasons=list(plan.reasons),
            lanes=dict(lanes),
        )

    def metrics(self) -> dict[str, dict[str, float]]:
        """Where the time of the live or last iterator went."""
        iterator = self._iterator() if self._iterator is not None else None
        return iterator.metrics() if iterator is not None else self.last_metrics

    def counts(self, places: Mapping[int, LaneState] | None = None) -> dict[str, Any]:
        """What was delivered and dropped, by lane and reason, up to the last delivered sample, or up to `places`."""
        lanes = self._delivered if places is None else places
        reasons, notes = self.resolved.plan.reasons, self.resolved.plan.notes

        def counted(noted: bool) -> dict[int, dict[str, int]]:
            kept = {name: i for name, i in reasons.items() if (name in notes) is noted}
            return {
                lane: {name: place.counts[i] for name, i in kept.items() if place.counts[i]}
                for lane, place in lanes.items()
            }

        delivered = {lane: place.delivered for lane, place in lanes.items()}
        return {"delivered": delivered, "dropped": counted(False)} | ({"noted": counted(True)} if notes else {})

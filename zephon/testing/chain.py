"""A chain of restarts, compared with the oracle: legs one after the other, each from the states of the one before."""

from __future__ import annotations

import contextlib
import json
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from zephon.batch import Batch
from zephon.checkpoint.merge import merge_states
from zephon.errors import ZephonError
from zephon.pipeline import Pipeline
from zephon.plan.lanes import Topology
from zephon.testing.faults import Killer
from zephon.testing.legs import GroupRequest, Leg, Played, configure, play, play_fresh
from zephon.testing.scheduler import forced_order
from zephon.testing.streams import Event, Fault, Place, Streams, fault_of, sample_digests
from zephon.testing.walk import At, Difference, Walk

State = dict[str, Any]

_KILLS = 16  # of the consumer's, in a check of deaths
_REMEMBERED = 4  # batches that a state may lie before the last one


class Setup(msgspec.Struct, frozen=True):
    """One check: the legs of its chain. `forced`: tasks complete in a random order; `fresh`: the last leg runs in
    another process, from `target`; `deaths`: workers are killed all along."""

    check: str
    legs: tuple[Leg, ...]
    forced: bool = False
    fresh: bool = False
    deaths: bool = False


class Chain:
    """One run of a setup. `batches` counts those compared so far; `on_batch` is told of each; `killer` counts deaths.

    Compares `num_batches` of all groups together; restarts come within the first `cut_within` of them.
    """

    def __init__(
        self,
        prepared: Pipeline,
        streams: Streams,
        setup: Setup,
        num_batches: int,
        cut_within: int | None = None,
        seed: str = "0",
        target: str | None = None,
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        self._prepared, self._streams, self._setup = prepared, streams, setup
        self._num_batches, self._cut_within = num_batches, cut_within or num_batches
        self._target, self._on_batch = target, on_batch
        self._random = random.Random(seed)
        self.killer = Killer(seed, max(1, num_batches // _KILLS)) if setup.deaths else None
        self._places: dict[int, Place] = dict.fromkeys(range(streams.num_lanes), (0, 0))
        self._states: list[State] = []
        self._last: Leg | None = None
        self.batches = 0

    def run(self) -> Difference | None:
        """The first difference, or None. An error that the oracle raises too is one with `what` = "raises"."""
        with contextlib.ExitStack() as stack:
            if self._setup.forced:
                stack.enter_context(forced_order(self._random.randrange(1 << 30)))
            if self.killer is not None:
                stack.enter_context(self.killer)
            for leg, cut in zip(self._setup.legs, [*self._cuts(), None], strict=True):
                until = self._num_batches if cut is None else cut
                try:
                    found = self._leg(leg, max(0, until - self.batches), cut is None)
                except ZephonError as error:  # a state that cannot be taken, merged or loaded
                    return Difference("state", f"the restart failed: {fault_of(error)}", self._next_place())
                if found:
                    return min(found, key=lambda difference: (difference.what == "raises", difference.at))
        return None

    def _cuts(self) -> list[int]:
        """Batches of all groups together behind which each leg but the last one ends, one after the other."""
        return sorted(self._random.randrange(self._cut_within + 1) for _ in self._setup.legs[1:])

    def _leg(self, leg: Leg, quota: int, is_last: bool) -> list[Difference]:
        """Runs the groups of a leg one after the other; keeps their places and states."""
        starts = self._starts(leg)
        shares = [self._share(leg, group, quota, is_last) for group in range(leg.topology)]
        played = self._play_fresh(leg, starts, shares) if self._setup.fresh and is_last else None
        found, states = [], []
        for group, (start, share) in enumerate(zip(starts, shares, strict=True)):
            with configure(self._prepared, leg, group) as pipeline:
                walk = Walk(self._streams, {lane: self._places[lane] for lane in pipeline.lanes})
                recent: deque[tuple[Batch, dict[int, Place]]] = deque(maxlen=_REMEMBERED)
                events = ((event, None) for event in played[group]) if played else _played_here(pipeline, start)
                with contextlib.closing(self.killer.watch(events) if self.killer else events) as watched:
                    difference = self._follow(watched, walk, share, recent)
                if difference is not None:
                    found.append(difference)
                elif not is_last:
                    states.append(self._state(pipeline, walk, recent))
                self._places |= walk.places
        self._states, self._last = states, leg
        return found

    def _follow(
        self,
        events: Played,
        walk: Walk,
        quota: int,
        recent: deque[tuple[Batch, dict[int, Place]]],
    ) -> Difference | None:
        """Compares one group's events, at most `quota` batches."""
        done = 0
        while done < quota and not walk.finished:
            event, batch = next(events, (None, None))
            difference = walk.check(event, lambda batch=batch: sample_digests(batch) if batch else b"")  # type: ignore[misc]
            if isinstance(event, Fault) and event.kind == "CheckpointError":  # of a fresh process
                return Difference("state", f"the restart failed: {event}", walk.due())
            if difference is not None:
                return difference
            if isinstance(event, Fault):
                return Difference("raises", f"the pipeline raises {event}", walk.due())
            if batch is not None:
                recent.append((batch, dict(walk.places)))
            if walk.delivered > done:
                done = walk.delivered
                self.batches += 1
                if self._on_batch is not None:
                    self._on_batch()
        return None

    def _share(self, leg: Leg, group: int, quota: int, is_last: bool) -> int:
        """Batches of one group. Before a restart the groups stop at different places of a step."""
        topology = Topology(self._streams.num_lanes, leg.topology, group, leg.mapping_strategy, 1, 0)
        num_lanes = len(topology.lanes)
        share = -(-quota * num_lanes // self._streams.num_lanes)
        if is_last:
            return max(share, num_lanes)
        return max(0, share + self._random.choice((-1, 0, 0, 1, num_lanes - 1)))

    def _state(self, pipeline: Pipeline, walk: Walk, recent: deque[tuple[Batch, dict[int, Place]]]) -> State:
        """The group's state, through JSON: behind the last batch, or behind one a little before it."""
        if recent and self._random.random() < 0.3:
            batch, places = self._random.choice(list(recent))
            walk.places = places
            state = pipeline.state_dict(after=batch)
        else:
            state = pipeline.state_dict()
        loaded: State = json.loads(json.dumps(state))
        return loaded

    def _starts(self, leg: Leg) -> list[State | None]:
        """What each group of a leg loads: nothing at first, then its own state, or that of all groups."""
        if self._last is None:
            return [None] * leg.topology
        same = (leg.topology, leg.mapping_strategy) == (self._last.topology, self._last.mapping_strategy)
        if same and self._random.random() < 0.5:
            return list(self._states)
        return [merge_states(self._states)] * leg.topology

    def _play_fresh(self, leg: Leg, starts: list[State | None], shares: list[int]) -> list[list[Event]]:
        assert self._target is not None
        passes = self._streams.num_passes + 1
        groups = [GroupRequest(*each, passes) for each in zip(range(leg.topology), starts, shares, strict=True)]
        return play_fresh(self._target, self._streams.num_lanes, leg, groups)

    def _next_place(self) -> At:
        lane, (pass_index, turn) = min(self._places.items(), key=lambda item: (item[1], item[0]))
        return At(pass_index, turn // self._streams.cycles_per_step, lane)


def _played_here(pipeline: Pipeline, start: State | None) -> Played:
    """The events of a group in this process, from a state, which is loaded at once, or from the beginning."""
    if start is not None:
        pipeline.load_state_dict(start)
    return play(pipeline)

"""What the laws of a common last step share: the truth with its end, and groups that agree though they run in turn."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import zephon as zp
import zephon.session
from tests.laws.chain import PASSES, Chain
from tests.laws.harness import Lane, _behind
from zephon.ends import Alone, Found, Position, position_of
from zephon.flow.progress import LaneState
from zephon.options import Options
from zephon.plan.lanes import Topology
from zephon.testing.oracle import OracleBatch, OraclePass
from zephon.testing.recipes import Recipe
from zephon.testing.strategies import Group


def ending_with(recipe: Recipe, **options: Any) -> Recipe:
    """The recipe with other data options."""
    return dataclasses.replace(recipe, options={**recipe.options, **options})


class Together:
    """The truth of a run over PASSES passes, and the other groups' part of every agreement.

    `turns[p]`: batches that each lane has in pass p. `state`: what the groups have loaded, or None.
    """

    def __init__(self, recipe: Recipe) -> None:
        passes = [OraclePass(recipe.build(), number) for number in range(PASSES)]
        self.cycles = recipe.options["cycles_per_step"]
        self.turns, self.steps = [each.turns for each in passes], [each.steps for each in passes]
        self.state: dict[str, Any] | None = None
        self.is_loaded = False
        self.wanted: dict[tuple[int, int], Lane] = {}
        for lane in range(recipe.num_lanes):
            delivered, dropped = 0, Counter[str]()
            for number, each in enumerate(passes):
                batches: list[OracleBatch] = [_behind(batch, delivered, dropped) for batch in each.lanes[lane]]
                delivered += sum(len(batch.origins) for batch in batches)
                dropped += each.dropped[lane]
                self.wanted[lane, number] = Lane(batches, dict(dropped), None)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Inside, groups agree with the truth, wherever they need to."""
        with patch.object(zephon.session, "find_agreement", self._find):
            yield

    def _find(self, topology: Topology, options: Options, fingerprint: Any) -> Any:
        return Alone() if len(topology.lanes) == topology.num_lanes else _WithTheTruth(self, topology.lanes)


class _WithTheTruth:
    """An agreement in which the truth answers for the others. What this group tells must be true too."""

    def __init__(self, truth: Together, lanes: list[int]) -> None:
        self._truth, self._lanes = truth, lanes

    def meet(self, own: Position) -> list[Position]:
        state, self._pass_index = self._truth.state, own.pass_index
        loaded, self._truth.is_loaded = self._truth.is_loaded, False
        if state is None or not loaded:  # all begin the pass together
            return [own, Position(own.pass_index, 0, 0, False)]
        others = {lane: place for lane, place in state["lanes"].items() if int(lane) not in self._lanes}
        places = [LaneState(pass_index=place["pass"], turns=place["turns"]) for place in others.values()]
        self._pass_index = min(own.pass_index, position_of(places).pass_index)
        return [own, position_of(places)]

    def tell(self, step: int, own: Found) -> None:
        self._step = step

    def answered(self) -> bool:
        return True

    def answer(self) -> Found:
        start, stop = self._step * self._truth.cycles, (self._step + 1) * self._truth.cycles
        turns = self._truth.turns[self._pass_index]
        return Found(any(n > start for n in turns), any(n < stop for n in turns))

    def close(self) -> None:
        pass


class EndsChain(Chain):
    """A run that stops and goes on, beside the truth with its end."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.truth = recipe, Together(recipe)
        self.wanted = self.truth.wanted
        self.found = {key: [] for key in self.wanted}
        self.state = None
        self.look = lambda pipeline: None

    def pipelines(self, groups: Group, **options: Any) -> Iterator[zp.Pipeline]:
        for pipeline in super().pipelines(groups, **options):
            self.truth.is_loaded = True
            yield pipeline

    def merge(self, states: list[dict[str, Any]]) -> None:
        super().merge(states)
        self.truth.state = self.state

    def need(self, lanes: list[int], pass_index: int, steps: int) -> int:
        """Batches that the lanes lack of the first `steps` steps of a pass."""
        turns = max(0, steps) * self.truth.cycles
        return sum(max(0, turns - len(self.found[lane, pass_index])) for lane in lanes)

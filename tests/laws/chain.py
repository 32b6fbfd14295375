"""A run that stops and goes on: what was delivered over any number of restores, beside the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import zephon as zp
from tests.laws.harness import Lane, Seen, State, first_pass, plain, same_lane, seen, truths
from zephon.testing.recipes import Recipe
from zephon.testing.strategies import Group

PASSES = 2


class Chain:
    """A run over PASSES passes. `found` is all that was delivered, by lane and pass; `state` the last merged one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.wanted: dict[tuple[int, int], Lane] = truths(recipe, PASSES)
        self.found: dict[tuple[int, int], list[Seen]] = {key: [] for key in self.wanted}
        self.state: State | None = None
        self.look: Callable[[zp.Pipeline], None] = lambda pipeline: None

    def left(self, lanes: list[int], pass_index: int | None = None) -> int:
        """Batches that the lanes have still to give, in one pass or in all."""
        keys = [key for key in self.wanted if key[0] in lanes and pass_index in (None, key[1])]
        return sum(len(self.wanted[key].batches) - len(self.found[key]) for key in keys)

    def pipelines(self, groups: Group, **options: Any) -> Iterator[zp.Pipeline]:
        """The pipelines of a topology, each at the chain's state; closed when the next one is asked for."""
        for group in range(groups.dp_degree):
            with self.recipe.build(**groups.options(group), **options) as pipeline:
                if self.state is not None:
                    pipeline.load_state_dict(self.state)
                yield pipeline

    def go(self, pipeline: zp.Pipeline, most: int | None, see_end: bool) -> None:
        """Takes `most` batches, or all, through the ends of passes.

        `see_end`: where nothing is left of a pass behind the last of them, StopIteration is seen too.
        """
        taken = 0
        while (here := first_pass(pipeline.state_dict())) < PASSES:
            left = self.left(pipeline.lanes, here)
            wanted = left if most is None else min(left, most - taken)
            iterator = iter(pipeline)
            for batch in islice(iterator, wanted):
                self.found[batch.lane_id, batch.pass_index].append(seen(pipeline, batch))
                self.look(pipeline)
                taken += 1
            if taken == most and not (see_end and wanted == left):
                return
            assert next(iterator, None) is None, "a pass is longer than it must be"
            self.look(pipeline)
            if taken == most:
                return

    def merge(self, states: list[State]) -> None:
        """Makes the states of all groups, through JSON, the start of what follows."""
        self.state = plain(zp.merge_states([plain(state) for state in states]))

    def check(self) -> None:
        """Everything once, in order, with the counts of an uninterrupted run."""
        for key, wanted in self.wanted.items():
            same_lane(self.found[key], wanted.batches, key)

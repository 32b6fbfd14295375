"""Batches of a dataset that arrived in the trainer's process: enough to say where all lanes were behind one of them.

A worker knows its own lanes alone, and works ahead. So each batch carries what it moved, and its number among those of
its worker. A DataLoader takes one of each worker in turn, from worker 0 on: behind batch n of worker w stand n + 1
batches of every worker up to w, and n of the others, or all, if it had fewer. What arrived ahead does not count.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from zephon.errors import CheckpointError
from zephon.flow.progress import LaneState

KEPT: Final = 64
"""Batches of each worker behind any of which a state can be had."""

Iteration = tuple[int, int, int, int]
"""One iteration over a dataset: how often it was given a state, its workers, the epoch's seed, the pass."""


class Place(NamedTuple):
    """Where a batch comes from, and what it moved."""

    dataset: str
    iteration: Iteration
    worker: int
    number: int
    """Batches of this worker before it in the pass."""
    moved: dict[int, LaneState]
    start: dict[int, LaneState]
    """With a worker's first batch: where lanes stood before it, of the whole group if the worker knows."""


class _Arrived:
    """The batches of one iteration."""

    def __init__(self) -> None:
        self.base: dict[int, LaneState] = {}
        self.workers: dict[int, deque[tuple[int, dict[int, LaneState]]]] = {}
        self.kept_from: dict[int, int] = {}

    def note(self, place: Place) -> None:
        kept = self.workers.setdefault(place.worker, deque())
        if kept and place.number <= kept[-1][0]:  # a copy
            return
        self.base = place.start | self.base
        kept.append((place.number, place.moved))
        if len(kept) > KEPT:
            number, moved = kept.popleft()
            self.base.update(moved)
            self.kept_from[place.worker] = number + 1

    def behind(self, place: Place) -> dict[int, LaneState]:
        lanes = dict(self.base)
        for worker, kept in self.workers.items():
            count = place.number + (worker <= place.worker)
            if count < self.kept_from.get(worker, 0):
                raise CheckpointError(
                    f"state_dict(after=batch): more than {KEPT} batches of a worker came after it; ask sooner, and "
                    f"keep prefetch_factor below {KEPT}"
                )
            for number, moved in kept:
                if number < count:
                    lanes.update(moved)
        return lanes


class Seen:
    """The batches of a dataset's last two iterations. Any thread may note: a pinning one does."""

    def __init__(self, lanes: Sequence[int]) -> None:
        self._lanes = lanes
        self._iterations: dict[Iteration, _Arrived] = {}
        self._lock = threading.Lock()
        self.from_workers = False

    def note(self, place: Place) -> None:
        """Takes in a batch; one that is known changes nothing."""
        with self._lock:
            if place.iteration not in self._iterations:
                self._iterations[place.iteration] = _Arrived()
                for old in list(self._iterations)[:-2]:
                    del self._iterations[old]
            self._iterations[place.iteration].note(place)
            self.from_workers = bool(place.iteration[1])

    def behind(self, place: Place) -> dict[int, LaneState]:
        """Where the group's lanes were behind a batch. Raises CheckpointError where that is not known any more."""
        with self._lock:
            arrived = self._iterations.get(place.iteration)
            if arrived is None:
                raise CheckpointError("state_dict(after=batch): the batch is of an iteration that is long over")
            lanes = arrived.behind(place)
        missing = [lane for lane in self._lanes if lane not in lanes]
        if missing:
            raise CheckpointError(
                f"state_dict(after=batch): the workers of lanes {missing} have not been heard of since their state was "
                "loaded; ask the StatefulDataLoader, or later"
            )
        return {lane: lanes[lane] for lane in self._lanes}

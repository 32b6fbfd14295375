"""ensure_mixture: holds the declared shares of datasets behind steps that change them.

Each dataset has a queue in every lane. The next to leave is of the dataset that is furthest behind: the least
(given + h) / weight, h a half for samples and nothing for tokens (stride scheduling; Waldspurger, Weihl, 1995). Where
its queue is empty the lane waits, and what comes meanwhile is held, up to `buffer_size` records.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from zephon.errors import ConfigError, DataError, InternalError
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Ref
from zephon.ops.base import check_count, token_ids
from zephon.record import Record
from zephon.work.source import WorkSource
from zephon.work.static_mixture import StaticMixture
from zephon.work.weights import by_dataset, exact_number, integer_weights

UNITS = ("samples", "tokens")


class EnsureMixture(Accumulator):
    """Lets the records of each lane go in the order that keeps the shares; loses and changes none.

    As long as no more than `buffer_size` records must be held for it, every prefix of a lane's window has each
    dataset's share to within a few records (of tokens: a few of the longest). A dataset that stays behind for longer
    has run dry. Then, by default, the one that is next in line goes in its place, and is counted as `out_of_turn`, also
    when what is held is let go at a flush; the dry one is owed its share, and catches up when it comes. `strict`: it
    is an error instead that names the dataset; only at a lane's end what is held still goes, and is counted. So there
    must be no flush before: it wants flush_every_k_chunks=0.
    """

    method = "ensure_mixture"
    preserves = True
    batched = True
    reasons = ("out_of_turn",)
    notes = ("out_of_turn",)

    def __init__(
        self,
        weights: dict[str, int],
        buffer_size: int,
        unit: str = "samples",
        strict: bool = False,
        field: str = "input_ids",
        name: str | None = None,
    ) -> None:
        self.buffer_size = check_count("buffer_size", buffer_size, self.method, most=2**32 - 1)
        if unit not in UNITS:
            raise ConfigError(f"ensure_mixture(unit={unit!r}): it must be 'samples' or 'tokens'")
        if not isinstance(strict, bool):
            raise ConfigError(f"ensure_mixture(strict={strict!r}): True or False is wanted")
        self.weights, self.unit, self.strict, self.field, self.name = weights, unit, strict, field, name
        self.measures = unit == "tokens"
        self._names, self._weights = list(weights), list(weights.values())
        self._head_start = 0.0 if self.measures else 0.5
        self._lanes: dict[int, _Lane] = {}

    @property
    def one_to_one(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        fields = {f: getattr(self, f) for f in ("weights", "buffer_size", "unit", "strict")}
        return {"type": self.method, **fields, **({"field": self.field} if self.measures else {})}

    def check_windows(self, flush_every: int) -> None:
        if self.strict and flush_every:
            raise ConfigError(
                f"'{self.name or self.method}' has strict=True and flush_every_k_chunks={flush_every}: at the end of "
                f"each window up to {self.buffer_size:,} held records go, in turn or not, and shares would drift "
                "without an error; say options(flush_every_k_chunks=0), which flushes at a lane's end only, or "
                "strict=False, which counts what goes out of turn"
            )

    def measure(self, record: Record) -> int:
        """Tokens; a packed sequence counts with its padding."""
        ids = record.get(self.field)
        if type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype == np.int64:  # as tokenize and pack give them
            return len(ids)
        if self.field not in record:
            raise KeyError(f"no field {self.field!r}; the record has {sorted(map(str, record))}; tokenize first")
        return len(token_ids(ids))

    def open(self, lane: int, key: Key) -> None:
        self._lanes[lane] = _Lane(self._weights, self._head_start, [0] * len(self._weights))

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted, state = Emitted(), self._lanes[lane]
        add, most, is_measured = emitted.add, self.buffer_size, self.measures
        for trigger, ref in enumerate(refs):
            if not state.put(ref):
                emitted.fail(trigger, self._unexpected(ref[2]))
                break
            while state.held:
                at = state.next()
                if at:  # the dataset that is due has no record
                    if state.held <= most:
                        break
                    if self.strict:
                        emitted.fail(trigger, self._dry(state))
                        return emitted
                    emitted.drop(trigger, "out_of_turn")
                add(trigger, state.take(at, is_measured))
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted, state = Emitted(), self._lanes[lane]
        forced = 0
        while state.held:
            at = state.next()
            forced += bool(at)
            emitted.add(0, state.take(at, self.measures))
        if forced:
            emitted.drop(0, "out_of_turn", forced)
        return emitted

    def _unexpected(self, component: int) -> DataError:
        name = self._names[component]
        return DataError(f"a record of dataset {name!r}, which has weight 0 here: give it a weight, or do not draw it")

    def _dry(self, state: _Lane) -> DataError:
        counts = {self._names[c]: len(queue) for c, queue in enumerate(state.queues) if queue}
        held = ", ".join(f"{number:,} of {name!r}" for name, number in sorted(counts.items(), key=lambda i: -i[1])[:4])
        return DataError(
            f"dataset {self._names[state.order[0][1]]!r} has run dry: its share is due, and the buffer is full with "
            f"{held}. Give it more weight in the source, less here (weights=), raise buffer_size="
            f"{self.buffer_size:,}, or leave strict=False, which lets others go out of turn and counts them"
        )

    @property
    def holds(self) -> int:
        return self.buffer_size

    def state(self, lane: int) -> Held:
        state = self._lanes[lane]
        return Held(list(chain.from_iterable(state.queues)), state.given.copy())

    def load(self, lane: int, key: Key, held: Held) -> None:
        given = held.plain
        if not isinstance(given, list) or len(given) != len(self._weights) or len(held.items) > self.buffer_size:
            raise ValueError(
                f"{len(held.items):,} records are held and {held.plain!r} was given: no state of this step"
            )
        state = _Lane(self._weights, self._head_start, list(given))
        if not all(state.put(ref) for ref in held.items):
            raise ValueError("a record is held of a dataset that has weight 0 here")
        self._lanes[lane] = state


class _Lane:
    """What is held of one lane, and what each dataset was given. `order`: (how far it has come, dataset), ascending."""

    __slots__ = ("given", "head_start", "held", "order", "queues", "weights")

    def __init__(self, weights: list[int], head_start: float, given: list[int]) -> None:
        self.weights, self.head_start, self.given = weights, head_start, given
        self.queues: list[deque[Ref]] = [deque() for _ in weights]
        self.held = 0
        self.order = sorted((self._far(c), c) for c, weight in enumerate(weights) if weight)

    def _far(self, component: int) -> float:
        return (self.given[component] + self.head_start) / self.weights[component]

    def put(self, ref: Ref) -> bool:
        """Holds a record; False where its dataset has no weight."""
        component = ref[2]
        if not self.weights[component]:
            return False
        self.queues[component].append(ref)
        self.held += 1
        return True

    def next(self) -> int:
        """The place in `order` of the first dataset that has a record; something is held."""
        queues = self.queues
        for at, (_, component) in enumerate(self.order):
            if queues[component]:
                return at
        raise InternalError("records are held, and no queue has one")

    def take(self, at: int, is_measured: bool) -> Ref:
        """The next record of the dataset at this place in `order`."""
        component = self.order.pop(at)[1]
        ref = self.queues[component].popleft()
        self.held -= 1
        self.given[component] += ref[1] if is_measured else 1
        insort(self.order, (self._far(component), component))
        return ref


def declared_weights(source: WorkSource, weights: Any, unit: str) -> dict[str, int]:
    """The shares to hold, by dataset name: as given, else as the source declares them, in the same unit.

    Raises ConfigError where the source declares none or others, and where a dataset is drawn and has no weight.
    """
    names = [dataset.name for dataset in source.datasets]
    mixture = source if isinstance(source, StaticMixture) else None
    if weights is None:
        exact = _of_source(mixture, unit)
    else:
        values = by_dataset(weights, names, "ensure_mixture(weights=...)")
        exact = [
            exact_number(v, f"ensure_mixture: the weight of dataset {n!r}") for n, v in zip(names, values, strict=True)
        ]
    if not any(exact):
        raise ConfigError("ensure_mixture(weights=...): all weights are 0; at least one must be positive")
    for name, weight, drawn in zip(names, exact, mixture.shares.drawn if mixture else (), strict=False):
        if drawn != bool(weight):
            problem = "is drawn by the source and has weight 0" if drawn else "has a weight and is never drawn"
            raise ConfigError(f"ensure_mixture(weights=...): dataset {name!r} {problem}; they must agree")
    integers = iter(integer_weights([weight for weight in exact if weight]))
    return {name: next(integers) if weight else 0 for name, weight in zip(names, exact, strict=True)}


def _of_source(mixture: StaticMixture | None, unit: str) -> list[Any]:
    if mixture is None:
        raise ConfigError("ensure_mixture: this source declares no weights; give weights= by dataset name")
    shares = mixture.shares
    if any(exact != shares.points[0][1] for _, exact in shares.points):
        raise ConfigError(
            "ensure_mixture: the source's weights change along the pass (MixtureSchedule), and a lane's buffer does "
            "not know where it is in it; give weights= that hold all along, or leave it out and let the source make up "
            "for what is dropped: StaticMixture(weights_in='tokens', mean_tokens=what a row of each dataset gives, in "
            "tokens or in samples)"
        )
    if shares.unit != unit:
        raise ConfigError(
            f"ensure_mixture(unit={unit!r}): the source's weights are in {shares.unit}; say unit={shares.unit!r}, or "
            "give weights="
        )
    return shares.points[0][1]

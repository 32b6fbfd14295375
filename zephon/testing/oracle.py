"""The oracle: the same pipeline, one lane, one record and one step at a time, short enough to check by eye.

It shares with the engine what an operator does to one record and what an accumulator decides on one ref. It has no
tasks, slices, marks, workers, reordering, places or limits: those are what it checks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from zephon.batch import Batch
from zephon.errors import ShardError, ZephonError
from zephon.ops.accumulator import Accumulator, Emitted, Key
from zephon.ops.base import Operator, Rows, as_zephon_error
from zephon.ops.batch import Batch as BatchNode
from zephon.ops.batch import Formatter, apply_formatters, stack_records
from zephon.pipeline import Pipeline
from zephon.record import Attached


class Item(NamedTuple):
    """A record, what it was made of (dataset, row, epoch, child path), and where in the first of these it starts."""

    record: Any
    origins: tuple[Any, ...]
    start: int = 0


class OracleBatch(NamedTuple):
    """A batch as it must be, and the lane's drops and deliveries behind it."""

    digest: str
    origins: list[list[tuple[str, str, int, tuple[int, ...]]]]
    dropped: dict[str, int]
    delivered: int


class OracleLane:
    """One lane of one pass. Iterating gives its batches; then `dropped` is final, or its error is raised."""

    def __init__(self, pipeline: Pipeline, lane: int, pass_index: int = 0) -> None:
        resolved = pipeline._session.resolved
        self.source, self.batch_node = resolved.source, resolved.plan.batch
        self.num_lanes, self.flush_every = resolved.topology.num_lanes, resolved.plan.flush_every
        self.lane, self.pass_index = lane, pass_index
        self.formatters = resolved.plan.formatters
        nodes = [n for n in pipeline._definition.nodes if not isinstance(n, (BatchNode, Formatter))]
        self.parts: list[Any] = [
            copy.deepcopy(p) if isinstance(p, Accumulator) else p for n in nodes for p in n.expand()
        ]
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.failure: ZephonError | None = None

    def __iter__(self) -> Iterator[OracleBatch]:
        held: list[tuple[Item, dict[str, int]]] = []  # each with what was dropped up to the event that released it
        delivered = 0
        size, drop_last = self.batch_node.size, self.batch_node.drop_last
        for released, decided, last in self._events():
            rest = (len(held) + len(released)) % size if last and drop_last else 0
            if rest:
                decided[f"{self.batch_node.name or 'batch'}.drop_last"] += rest
            self.dropped += decided
            held += [(item, dict(self.dropped)) for item in released]
            del held[len(held) - rest :]
            while len(held) >= size or (last and held):
                samples, held = held[:size], held[size:]
                delivered += len(samples)
                yield self._batch([item for item, _ in samples], samples[-1][1], delivered)
            if self.failure is not None:
                raise self.failure

    def _events(self) -> Iterator[tuple[list[Item], Counter[str], bool]]:
        """For each event of the lane, what it released and dropped, and whether it is the last: pointers and marks."""
        for part in self.parts:
            if isinstance(part, Operator):
                part.setup()
        index = 0
        self._open(0)
        pointers = self.source.chunk(self.lane, self.num_lanes, self.pass_index, 0)
        while len(pointers):
            for i in range(len(pointers)):
                dropped: Counter[str] = Counter()
                items = self._fetch(int(pointers.dataset[i]), int(pointers.row[i]), int(pointers.epoch[i]), dropped)
                released = self._through(0, items, dropped)
                yield released, dropped if self.failure is None else Counter(), False
            index += 1
            pointers = self.source.chunk(self.lane, self.num_lanes, self.pass_index, index)
            if len(pointers) and self.flush_every and index % self.flush_every == 0:
                yield (*self._flush(), False)
                self._open(index)
        released, dropped = self._flush()
        yield released, dropped, self.failure is None

    def _open(self, first_chunk: int) -> None:
        for part in self.parts:
            if isinstance(part, Accumulator):
                name = part.name or part.method
                part.open(self.lane, Key(self.source.seed, self.lane, self.pass_index, first_chunk, name))

    def _flush(self) -> tuple[list[Item], Counter[str]]:
        released: list[Item] = []
        dropped: Counter[str] = Counter()
        for number, part in enumerate(self.parts):
            if isinstance(part, Accumulator) and self.failure is None:
                items = self._accumulated(part, partial(part.flush, self.lane), dropped)
                released += self._through(number + 1, items, dropped)
        return released, dropped if self.failure is None else Counter()

    def _fetch(self, number: int, row: int, epoch: int, dropped: Counter[str]) -> list[Item]:
        dataset: Any = self.source.datasets[number]
        if dataset.is_excluded(np.array([row]))[0]:
            dropped[f"{dataset.name}.excluded"] += 1
            return []
        record = dataset.read(np.array([row]))[0]
        if isinstance(record, dict):
            return [Item(record, ((number, row, epoch, ()),))]
        if dataset.on_error == "skip" and not isinstance(record, ShardError):
            dropped[f"{dataset.name}.error"] += 1
        else:
            self.failure = record
        return []

    def _through(self, first: int, items: list[Item], dropped: Counter[str]) -> list[Item]:
        """What leaves the chain when `items` enter part number `first`. After a failure only what came before it."""
        for part in self.parts[first:]:
            made: list[Item] = []
            for item in items:
                failed = self.failure
                self.failure = None
                if isinstance(part, Operator):
                    made += self._operate(part, item, dropped)
                else:
                    made += self._push(part, item, dropped)
                if self.failure is not None:
                    break
                self.failure = failed
            items = made
        return items

    def _operate(self, operator: Operator, item: Item, dropped: Counter[str]) -> list[Item]:
        rows = Rows([item.record], _Who(self, item), self.source.seed)
        operator.run(rows)
        for _, reason, amount in rows.drops:
            dropped[reason] += amount
        paths = rows.path or [()] * len(rows.records)
        made = list(zip(rows.records, paths, strict=True))
        if rows.failures:
            _, at, self.failure = min(rows.failures, key=lambda failure: failure[:2])
            made = [(record, path) for record, path in made if path < at]
        extended = [tuple((d, r, e, before + path) for d, r, e, before in item.origins) for _, path in made]
        return [Item(record, origins, item.start) for (record, _), origins in zip(made, extended, strict=True)]

    def _push(self, part: Accumulator, item: Item, dropped: Counter[str]) -> list[Item]:
        try:
            length = part.measure(item.record) if part.measures else 1
        except Exception as error:
            self.failure = as_zephon_error(error, part.name or part.method, self.where(item))
            return []
        ref = (item, length, item.origins[0][0])
        return self._accumulated(part, lambda: part.push(self.lane, [ref]), dropped)

    def _accumulated(self, part: Accumulator, call: Any, dropped: Counter[str]) -> list[Item]:
        """The items that one call of an accumulator let go, built."""
        name = part.name or part.method
        try:
            emitted: Emitted = call()
            if emitted.failure is not None:
                raise emitted.failure[1]
        except Exception as error:
            self.failure = as_zephon_error(error, name, f"lane {self.lane}")
            return []
        for _, reason, amount in emitted.drops:
            (self.noted if reason in part.notes else dropped)[f"{name}.{reason}"] += amount
        if part.preserves:
            return [_attached(ref[0]) for ref in emitted.groups]
        return [
            Item(
                part.build([(item.record, start, stop) for item, start, stop in group]),
                tuple(origin for item, _, _ in group for origin in item.origins),
                group[0][1] or group[0][0].start,
            )
            for group in emitted.groups
        ]

    def _batch(self, samples: list[Item], dropped: dict[str, int], delivered: int) -> OracleBatch:
        fields = self.fields_of(samples)
        origins = [[(*self.place(d, row), path) for d, row, _, path in item.origins] for item in samples]
        digest = Batch(fields, self.lane, 0, 0, len(samples)).digest()
        return OracleBatch(digest, origins, {k: n for k, n in dropped.items() if n}, delivered)

    def fields_of(self, samples: list[Item]) -> dict[str, Any]:
        """The fields of a batch."""
        return apply_formatters(stack_records([item.record for item in samples]), self.formatters)

    def place(self, number: int, row: int) -> tuple[str, str, int]:
        """(dataset, shard, row in shard)."""
        dataset: Any = self.source.datasets[number]
        return (dataset.name, *dataset.locate(row))

    def where(self, item: Item) -> str:
        """An item in words."""
        return f"lane {self.lane}, {self.place(item.origins[0][0], item.origins[0][1])}"


def _attached(cursor: Any) -> Item:
    """An item that a preserving accumulator let go, with the field that it wrote on it."""
    if not isinstance(cursor, Attached):
        return cursor  # type: ignore[no-any-return]
    item: Item = cursor.parts[0][0]
    return item._replace(record={**item.record, cursor.op.into: cursor.value})


class OraclePass:
    """One pass of all lanes where `last_step` or `steps_per_pass` says how it ends: `lanes[l]` is what lane l delivers.

    `dropped[l]`: the lane's drops of the pass. A batch without origins is a pad, and counts nothing.
    """

    def __init__(self, pipeline: Pipeline, pass_index: int = 0) -> None:
        data = pipeline._definition.options.data
        pads, cycles, given = data.last_step == "pad", data.cycles_per_step, data.steps_per_pass
        most = None if given is None else given * cycles + pads  # with pads it is seen whether a lane has ended
        oracles = [OracleLane(pipeline, n, pass_index) for n in range(pipeline._session.resolved.topology.num_lanes)]
        self.lanes = [list(islice(oracle, most)) for oracle in oracles]
        self.turns = [len(own) for own in self.lanes]  # of batches that are no pads
        at_least, at_most = [n // cycles for n in self.turns], [-(-n // cycles) for n in self.turns]
        self.steps = given or (max(at_most) if pads else min(at_least))
        whole = self.steps * cycles
        first = next((own[0] for own in self.lanes if own), None)
        self.dropped: list[Counter[str]] = []
        for oracle, own in zip(oracles, self.lanes, strict=True):
            goes_on = len(own) == most  # what lies behind the last step is no part of the pass then
            self.dropped.append(Counter(own[whole - 1].dropped) if goes_on else +oracle.dropped)
            if data.last_step == "drop" and given is None and (beyond := own[whole:]):
                self.dropped[-1]["last_step.dropped"] += sum(len(batch.origins) for batch in beyond)
            del own[whole:]
            if pads and first is not None:
                counts = (own[-1].dropped, own[-1].delivered) if own else ({}, 0)
                own += [OracleBatch(first.digest, [], *counts)] * (whole - len(own))


class _Who:
    """Who the one record is (the contract `Items` of operators)."""

    def __init__(self, lane: OracleLane, item: Item) -> None:
        self._lane, self._item = lane, item

    def key(self, index: int) -> tuple[Any, ...]:
        dataset, row, epoch, path = self._item.origins[0]
        return self._lane.pass_index, self._lane.source.datasets[dataset].name, epoch, row, self._item.start, path

    def where(self, index: int, path: tuple[int, ...] = ()) -> str:
        return self._lane.where(self._item)

"""Pipelines as plain values: what a random test draws, prints when it fails, and builds again and again.

A `Recipe` names datasets, a mixture, steps and data options; `build` makes the pipeline. Its functions are small
frozen dataclasses, so a failing example reads like the script that it stands for. Every record has a unique `id`, a
`text` of 0 to 8 words, a small array `x`, and every fifth one a `tag`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import msgspec
import numpy as np

from zephon.io.dataset import Dataset
from zephon.io.memory import shard_of
from zephon.ops.accumulator import Accumulator, Emitted, Key, Part, Ref
from zephon.pipeline import Pipeline
from zephon.record import Record
from zephon.work.source import WorkSource
from zephon.work.static_mixture import StaticMixture

ID_STRIDE = 10_000  # ids of dataset number d start at d * ID_STRIDE


@dataclasses.dataclass(frozen=True)
class Rows:
    """A dataset in memory: rows of each shard, rows left out, rows that cannot be read."""

    name: str
    shards: tuple[int, ...]
    number: int = 0
    exclude: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    on_error: str = "raise"

    def __post_init__(self) -> None:
        if not sum(self.shards) < ID_STRIDE:
            raise ValueError(f"a dataset of a recipe has fewer than {ID_STRIDE} rows")


@dataclasses.dataclass(frozen=True)
class Step:
    """One method of a pipeline with its arguments."""

    method: str
    args: tuple[Any, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A pipeline as a value. `options` are data options; `build` takes the others."""

    datasets: tuple[Rows, ...]
    mixture: dict[str, Any]
    steps: tuple[Step, ...]
    options: dict[str, Any]

    @property
    def num_lanes(self) -> int:
        """canonical_replicas."""
        return int(self.options["canonical_replicas"])

    @classmethod
    def small(cls, **options: Any) -> Recipe:
        """One with a little of everything: two datasets, 3 lanes, windows, packs, and losses of several kinds."""
        steps = (
            Step("filter", (Keep(5, 2),)),
            Step("flat_map", (Children(0, 2),)),
            Step("shuffle", (6,)),
            Step("tokenize", (Words(),), {"max_length": 5, "overflow": "truncate"}),
            Step("pack", (8,)),
            Step("batch", (2, True)),
        )
        mixture = {"weights": [2, 1], "seed": 11, "chunk_size": 5}
        defaults = {"canonical_replicas": 3, "cycles_per_step": 2, "flush_every_k_chunks": 2}
        return cls((Rows("alpha", (50, 30)), Rows("beta", (40,), 1)), mixture, steps, {**defaults, **options})

    def source(self) -> StaticMixture:
        """The mixture."""
        return StaticMixture([make_dataset(rows) for rows in self.datasets], **self.mixture)

    def build(self, source: WorkSource | None = None, **options: Any) -> Pipeline:
        """A pipeline, of one group unless `options` say otherwise; `source` stands in for the recipe's own."""
        chain = self._chain if source is None else self._chained(source)
        return chain.options(**{"runner": "inline", "dp_degree": 1, "dp_group_id": 0, **self.options, **options})

    @cached_property
    def _chain(self) -> Pipeline:
        """The steps without options. A Pipeline is immutable, so every build may start from the same one."""
        return self._chained(self.source())

    def _chained(self, source: WorkSource) -> Pipeline:
        pipeline = Pipeline(source)
        for step in self.steps:
            pipeline = getattr(pipeline, step.method)(*step.args, **step.settings)
        return pipeline


@lru_cache(256)
def make_dataset(rows: Rows) -> Dataset:
    """The dataset of a spec. Shards are called s0, s1, ..."""
    shards, first = [], 0
    for number, length in enumerate(rows.shards):
        records = [_record(rows, i) for i in range(first, first + length)]
        shards.append(msgspec.structs.replace(shard_of(rows.name, records), name=f"s{number}"))
        first += length
    starts = np.cumsum([0, *rows.shards])
    shard_of_row = [int(np.searchsorted(starts, row, side="right")) - 1 for row in rows.exclude]
    exclude = [(shard, int(row - starts[shard])) for row, shard in zip(rows.exclude, shard_of_row, strict=True)]
    return Dataset(rows.name, shards, "list", exclude, rows.on_error)  # type: ignore[arg-type]


def _record(rows: Rows, row: int) -> Record:
    number = rows.number * ID_STRIDE + row
    words = [str(number * 7 % 97 + i) for i in range(number * 5 % 9)]
    record: Record = {"id": number, "text": " ".join(words), "x": np.array([number, -number], np.int32)}
    if number % 5 == 0:
        record["tag"] = "five"
    if row in rows.broken:
        record["trap"] = _Trap()
    return record


class _Trap:
    """Makes a record that cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, ()


def _spring() -> NoReturn:
    raise ValueError("this record is broken")


def number(record: Record) -> int:
    """A whole number that a record of any kind has."""
    if "id" in record:
        return int(record["id"])
    return int(np.sum(record["input_ids"])) if "input_ids" in record else len(record)


@dataclasses.dataclass(frozen=True)
class Add:
    """A map: one more field."""

    amount: int

    def __call__(self, record: Record) -> Record:
        return {**record, "sum": number(record) + self.amount}


@dataclasses.dataclass(frozen=True)
class Change:
    """A map that changes its record in place."""

    field: str = "seen"

    def __call__(self, record: Record) -> Record:
        record[self.field] = int(record.get(self.field, 0)) + 1
        return record


@dataclasses.dataclass(frozen=True)
class Noise:
    """A map with random numbers."""

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        return {**record, "noise": float(rng.random())}


@dataclasses.dataclass(frozen=True)
class Keep:
    """A filter: drops one residue class."""

    modulus: int
    residue: int

    def __call__(self, record: Record) -> bool:
        return number(record) % self.modulus != self.residue % self.modulus


@dataclasses.dataclass(frozen=True)
class KeepRandom:
    """A filter with random numbers."""

    share: float

    def __call__(self, record: Record, rng: np.random.Generator) -> bool:
        return bool(rng.random() < self.share)


@dataclasses.dataclass(frozen=True)
class DropIds:
    """A filter: drops the records with these ids (a lane's, so that the lane runs dry)."""

    ids: frozenset[int]

    def __call__(self, record: Record) -> bool:
        return number(record) not in self.ids


@dataclasses.dataclass(frozen=True)
class Children:
    """A flat_map: `least` to `most` children, by the record's number."""

    least: int
    most: int

    def __call__(self, record: Record) -> Iterator[Record]:
        for child in range(self.least + number(record) % (self.most - self.least + 1)):
            yield {**record, "child": child}


@dataclasses.dataclass(frozen=True)
class Fail:
    """A map that fails on some ids."""

    ids: frozenset[int]
    error: type[Exception] = ValueError

    def __call__(self, record: Record) -> Record:
        if number(record) in self.ids:
            raise self.error(f"bad record {number(record)}")
        return record


@dataclasses.dataclass(frozen=True)
class FailLate:
    """A flat_map that fails behind its first child on some ids."""

    ids: frozenset[int]

    def __call__(self, record: Record) -> list[Record]:
        if number(record) in self.ids:
            return [record, "no record"]  # type: ignore[list-item]
        return [record]


@dataclasses.dataclass(frozen=True)
class Long:
    """A flat_map: a child of 4 tokens, then one of 9."""

    def __call__(self, record: Record) -> list[Record]:
        return [{**record, "input_ids": [1] * length} for length in (4, 9)]


@dataclasses.dataclass(frozen=True)
class Reverse:
    """A function of map_batches: the same records, last first."""

    def __call__(self, records: list[Record]) -> list[Record]:
        return records[::-1]


@dataclasses.dataclass(frozen=True)
class Thin:
    """A function of map_batches: every second record, with the size of its group."""

    def __call__(self, records: list[Record]) -> list[Record]:
        return [{**record, "of": len(records)} for record in records[1::2]]


@dataclasses.dataclass(frozen=True)
class Merge:
    """A function of map_batches: one record out of all."""

    def __call__(self, records: list[Record]) -> list[Record]:
        words = " ".join(str(record.get("text", "")) for record in records)
        return [{"id": sum(map(number, records)), "text": words, "ids": [number(r) for r in records]}]


@dataclasses.dataclass(frozen=True)
class Short:
    """A function of map_batches that fails on a group of fewer than 3."""

    def __call__(self, records: list[Record]) -> list[Record]:
        if len(records) < 3:
            raise ValueError("a short group")
        return records


@dataclasses.dataclass(frozen=True)
class Words:
    """A tokenizer: a number for each word."""

    def __call__(self, text: str) -> list[int]:
        return [1 + sum(word.encode()) for word in text.split()]


@dataclasses.dataclass(frozen=True)
class Along:
    """A map: a label for each token, and a loss mask for every second record."""

    def __call__(self, record: Record) -> Record:
        ids = np.asarray(record["input_ids"], np.int64)
        mask = {"loss_mask": ids % 3 > 0} if number(record) % 2 else {}
        return {**record, "labels": -ids, **mask}


class Pairs(Accumulator):
    """Two neighbours into one record; the last one of a window, if alone, is dropped and counted."""

    method = "pairs"
    reasons = ("single",)

    def __init__(self) -> None:
        self._held: dict[int, list[Part]] = {}

    def __repr__(self) -> str:
        return "Pairs()"

    def open(self, lane: int, key: Key) -> None:
        self._held[lane] = []

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            self._held[lane].append((cursor, 0, length))
            if len(self._held[lane]) == 2:
                emitted.add(trigger, self._held[lane])
                self._held[lane] = []
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        if self._held[lane]:
            emitted.drop(0, "single")
        self._held[lane] = []
        return emitted

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        texts = " ".join(str(record.get("text", "")) for record, _, _ in parts)
        ids = [i for record, _, _ in parts for i in record.get("input_ids", ())]
        total = sum(number(record) for record, _, _ in parts)
        return {"id": total, "text": texts, "input_ids": np.array(ids, np.int64)}


class FailFlush(Pairs):
    """Pairs whose flush fails."""

    def flush(self, lane: int) -> Emitted:
        raise ValueError("a flush that fails")


class SortRuns(Accumulator):
    """Lets runs of `size` records go sorted by their length, longest first."""

    method = "sort_runs"
    preserves = True
    measures = True
    batched = True

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: dict[int, list[Ref]] = {}

    def __repr__(self) -> str:
        return f"SortRuns({self.size})"

    def measure(self, record: Record) -> int:
        return len(str(record.get("text", ""))) + number(record) % 3

    def open(self, lane: int, key: Key) -> None:
        self._held[lane] = []

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, ref in enumerate(refs):
            self._held[lane].append(ref)
            if len(self._held[lane]) == self.size:
                self._release(lane, trigger, emitted)
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        self._release(lane, 0, emitted)
        return emitted

    def _release(self, lane: int, trigger: int, emitted: Emitted) -> None:
        for ref in sorted(self._held[lane], key=lambda ref: -ref[1]):
            emitted.add(trigger, ref)
        self._held[lane] = []

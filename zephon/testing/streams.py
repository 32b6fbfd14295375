"""What every lane must give, from the oracle, and what a group gave, as plain values that can be compared.

A group's run is a list of events: a batch (`Gave`), the end of a pass (`Stopped`), an error (`Fault`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from zephon.canonical import canonical_bytes
from zephon.engine import LEAST_DRY_POINTERS
from zephon.errors import DataError, OperatorError, ZephonError, describe
from zephon.pipeline import Pipeline
from zephon.testing.oracle import Item, OracleBatch, OracleLane

Origin = tuple[str, str, int, tuple[int, ...]]
"""(dataset, shard, row in shard, child path)."""

Origins = list[list[Origin]]
"""Per sample, what it was made of, in order."""

Place = tuple[int, int]
"""(pass, turns of the lane in it): where a lane is, in the oracle's words."""

_LANE = re.compile(r"^lane \d+(, |$)")
_DRY = "not one sample came out of an endless source"
_WHERE = re.compile(r"^operator '(?P<operator>[^']*)', .*?: ", re.DOTALL)
DIGEST_BYTES = 8


class Fault(msgspec.Struct, frozen=True, tag=True):
    """An error, reduced to what must be the same in every run. `text` is the whole message, for people."""

    kind: str
    operator: str
    what: str
    where: str
    text: str

    def same(self, other: Fault) -> bool:
        """Whether both are the same error of the same record; places are compared where both name a row."""
        if (self.kind, self.operator, self.what) != (other.kind, other.operator, other.what):
            return False
        return self.where == other.where or ", row " not in self.where or ", row " not in other.where

    def __str__(self) -> str:
        if self.operator and self.where:
            return f"{self.what} in operator '{self.operator}' at {self.where}"
        return f"{self.kind}: {self.text}"


def fault_of(error: BaseException) -> Fault:
    """The fault of an exception that a pipeline or the oracle raised."""
    if isinstance(error, OperatorError):
        cause = error.__cause__ or error
        what = describe(cause)
        # Fused operators name a child of a child in two steps, others in one: ", child 0, child 1" is ", child 0.1".
        record, *children = error.where.split(", child ")
        record = _LANE.sub("", record)
        where = f"{record}, child {'.'.join(children)}" if children else record
        return Fault(type(cause).__name__, error.operator, what, where, str(error))
    text = str(error) if isinstance(error, ZephonError) else describe(error).partition(": ")[2]
    found = _WHERE.match(text)
    what = _DRY if _DRY in text else text[found.end() :] if found else text
    return Fault(type(error).__name__, found["operator"] if found else "", what, "", text)


class Gave(msgspec.Struct, frozen=True, tag=True):
    """A batch that a pipeline delivered, and its lane's counts behind it. `samples`: see `sample_digests`."""

    lane: int
    pass_index: int
    step: int
    digest: str
    origins: Origins
    dropped: dict[str, int]
    delivered: int
    fields: tuple[str, ...] = ()
    samples: bytes = b""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The end of a pass of a group: what each of its lanes dropped up to there."""

    dropped: dict[int, dict[str, int]]


Event = Gave | Stopped | Fault


class Expected(msgspec.Struct, frozen=True):
    """A batch as the oracle made it; `origins` encoded, counts over all passes so far."""

    digest: str
    origins: bytes
    dropped: dict[str, int]
    delivered: int
    fields: tuple[str, ...]
    samples: bytes

    def same(self, gave: Gave) -> bool:
        """Whether a delivered batch is this one, counts included."""
        counts = (self.dropped, self.delivered) == (gave.dropped, gave.delivered)
        return counts and self.digest == gave.digest and self.origins == msgspec.msgpack.encode(gave.origins)


class Ended(msgspec.Struct, frozen=True):
    """The end of a lane's pass."""

    dropped: dict[str, int]
    delivered: int


def sample_digests(fields: Mapping[str, Any]) -> bytes:
    """A digest of 8 bytes for every field of every sample of a batch, sample by sample.

    A batch that a formatter made has fields of other first dimensions: it counts as one sample.
    """
    columns = list(fields.values())
    if len({np.shape(c)[:1] if isinstance(c, np.ndarray) else (len(c),) for c in columns}) > 1:
        columns = [[column] for column in columns]
    return b"".join(
        hashlib.blake2b(canonical_bytes(column[i]), digest_size=DIGEST_BYTES).digest()
        for i in range(len(columns[0]) if columns else 0)
        for column in columns
    )


class _Lane(OracleLane):
    """The oracle's lane, which also digests single samples, and gives up on an endless pass that gives nothing."""

    fields: tuple[str, ...] = ()
    samples = b""

    def _batch(self, samples: list[Item], dropped: dict[str, int], delivered: int) -> OracleBatch:
        fields = self.fields_of(samples)
        self.fields, self.samples = tuple(map(str, fields)), sample_digests(fields)
        return super()._batch(samples, dropped, delivered)

    def _events(self) -> Iterator[tuple[list[Item], Counter[str], bool]]:
        endless = self.source.length(self.pass_index) is None
        share = -(-self.source.epoch_length(self.pass_index) // self.num_lanes)
        dry, limit = 0, max(share, LEAST_DRY_POINTERS)
        for event in super()._events():
            yield event
            dry = 0 if event[0] else dry + 1
            if endless and dry >= limit:
                raise DataError(f"lane {self.lane}: {_DRY}")

    def where(self, item: Item) -> str:
        dataset, row, _, path = item.origins[0]
        name, shard, row_in_shard = self.place(dataset, row)
        child = f", child {'.'.join(map(str, path))}" if path else ""
        return f"lane {self.lane}, dataset '{name}', shard {shard}, row {row_in_shard}{child}"


class Streams:
    """The oracle's stream of every lane, pass by pass, each batch computed once, when it is first asked for."""

    def __init__(self, pipeline: Pipeline, num_passes: int) -> None:
        self._pipeline, self.num_passes = pipeline, num_passes
        self.num_lanes: int = pipeline._session.resolved.topology.num_lanes
        self.cycles_per_step = pipeline._definition.options.data.cycles_per_step
        self._known: dict[Place, list[Expected | Ended | Fault]] = {}
        self._running: dict[Place, tuple[_Lane, Iterator[OracleBatch]]] = {}

    def at(self, lane: int, place: Place) -> Expected | Ended | Fault:
        """What a lane gives at a place that follows from the ones before."""
        pass_index, turn = place
        known = self._known.setdefault((lane, pass_index), [])
        while len(known) <= turn:
            known.append(self._next(lane, pass_index))
        return known[turn]

    def _next(self, lane: int, pass_index: int) -> Expected | Ended | Fault:
        key = (lane, pass_index)
        if key not in self._running:
            oracle = _Lane(self._pipeline, lane, pass_index)
            self._running[key] = (oracle, iter(oracle))
        oracle, batches = self._running[key]
        before, delivered = self._behind(lane, pass_index - 1)
        try:
            batch = next(batches, None)
        except Exception as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # a Ctrl-C that came while a user's function ran
                raise KeyboardInterrupt from error
            return fault_of(error)
        dropped = dict(Counter(before) + Counter(oracle.dropped if batch is None else batch.dropped))
        if batch is None:
            own = self._known[key][-1:]
            return Ended(dropped, own[0].delivered if own and isinstance(own[0], Expected) else delivered)
        origins = msgspec.msgpack.encode(batch.origins)
        return Expected(batch.digest, origins, dropped, delivered + batch.delivered, oracle.fields, oracle.samples)

    def _behind(self, lane: int, pass_index: int) -> tuple[dict[str, int], int]:
        """Counts behind a complete pass."""
        if pass_index < 0:
            return {}, 0
        ended = self._known[lane, pass_index][-1]
        assert isinstance(ended, Ended)
        return ended.dropped, ended.delivered

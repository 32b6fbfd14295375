"""One group's run compared with the oracle, event by event: the first difference, and what it is.

`Walk` keeps every lane's place itself, and asks the pipeline under test for nothing: neither its state nor its order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from zephon.testing.streams import (
    DIGEST_BYTES,
    Ended,
    Event,
    Expected,
    Fault,
    Gave,
    Origin,
    Origins,
    Place,
    Stopped,
    Streams,
)


class At(NamedTuple):
    """Where in a run: lane -1 is the end of a group's pass."""

    pass_index: int
    step: int
    lane: int

    def __str__(self) -> str:
        where = f"step {self.step}, lane {self.lane}" if self.lane >= 0 else "the end of the pass"
        return f"{where}, pass {self.pass_index}" if self.pass_index else where


class Difference(msgspec.Struct, frozen=True):
    """The first place at which a run is not the oracle's.

    `what`: order, origins, digest, counts, length, error (of an operator), failure (any other error), state; where the
    run raises as the oracle does, "raises". `sample` is the position in the batch, `origin` what that sample was made
    of.
    """

    what: str
    text: str
    at: At
    sample: int | None = None
    field: str | None = None
    origin: Origin | None = None
    cause: str | None = None

    def __str__(self) -> str:
        return f"{self.at}: {self.text}"


class Wanted(msgspec.Struct, frozen=True):
    """What must come next: a lane's turn, or (lane -1) the end of the pass."""

    lane: int
    turn: int
    item: Expected | Fault | None


class Walk:
    """One group's way through its lanes: which lane is next, and what it must give.

    The next lane is the one with the fewest turns in the group's pass, lowest number first. A lane that has no more
    is passed over, and waits at the start of its next pass.
    """

    def __init__(self, streams: Streams, places: Mapping[int, Place]) -> None:
        self.streams, self.places = streams, dict(places)
        self.delivered = 0
        self.stopped: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self.pass_index = min(pass_index for pass_index, _ in self.places.values())
        self._order = [(turn, lane) for lane, (p, turn) in self.places.items() if p == self.pass_index]
        heapq.heapify(self._order)
        self.stopped = []

    @property
    def finished(self) -> bool:
        """Whether every lane has been through all passes that are compared."""
        return self.pass_index >= self.streams.num_passes

    def wanted(self) -> Wanted:
        """What must come next."""
        while self._order:
            turn, lane = self._order[0]
            item = self.streams.at(lane, (self.pass_index, turn))
            if not isinstance(item, Ended):
                return Wanted(lane, turn, item)
            heapq.heappop(self._order)
            self.places[lane] = (self.pass_index + 1, 0)
            self.stopped.append(lane)
        return Wanted(-1, 0, None)

    def due(self) -> At:
        """Pass, step and lane of what must come next."""
        wanted = self.wanted()
        return self._at(wanted.lane, wanted.turn)

    def check(self, event: Event | None, samples: Callable[[], bytes]) -> Difference | None:
        """Takes the next event of the run; None where it is what must come.

        `samples` gives the digests of a batch's samples, where the event does not hold them.
        """
        wanted = self.wanted()
        if isinstance(event, Gave) and isinstance(wanted.item, Expected):
            difference = self._batch(wanted, wanted.item, event, samples)
            if difference is None:
                heapq.heapreplace(self._order, (wanted.turn + 1, wanted.lane))
                self.places[wanted.lane] = (self.pass_index, wanted.turn + 1)
                self.delivered += 1
            return difference
        if isinstance(event, Stopped) and wanted.item is None:
            return self._end(event)
        if isinstance(event, Fault) and isinstance(wanted.item, Fault) and wanted.item.same(event):
            return None
        return self._other(wanted, event)

    def _at(self, lane: int, turn: int) -> At:
        return At(self.pass_index, turn // self.streams.cycles_per_step, lane)

    def _batch(self, wanted: Wanted, expected: Expected, gave: Gave, samples: Callable[[], bytes]) -> Difference | None:
        at = self._at(wanted.lane, wanted.turn)
        got = At(gave.pass_index, gave.step, gave.lane)
        if got != at:
            return Difference("order", f"a batch of {got} came, where one of {at} is due", at)
        if expected.same(gave):
            return None
        origins = msgspec.msgpack.decode(expected.origins, type=Origins)
        if origins != gave.origins:
            return _origins_differ(origins, gave.origins, at)
        if expected.digest != gave.digest:
            return _content_differs(expected, gave, gave.samples or samples(), at)
        return _counts_differ(expected.dropped, gave.dropped, expected.delivered, gave.delivered, at, gave.origins)

    def _end(self, event: Stopped) -> Difference | None:
        for lane in self.stopped:
            turns = len(self.streams._known[lane, self.pass_index]) - 1
            ended = self.streams.at(lane, (self.pass_index, turns))
            assert isinstance(ended, Ended)
            if ended.dropped != event.dropped[lane]:
                return _counts_differ(ended.dropped, event.dropped[lane], 0, 0, self._at(lane, turns), [])
        self._begin()
        return None

    def _other(self, wanted: Wanted, event: Event | None) -> Difference:
        """An event of another kind than the one that must come."""
        if isinstance(event, Fault):
            due = f"raises {wanted.item}" if isinstance(wanted.item, Fault) else "goes on"
            text, what = f"the run raised {event}; the oracle {due}", "error" if event.operator else "failure"
        elif isinstance(wanted.item, Fault):
            text, what = f"the oracle raises {wanted.item}; the run goes on", "error"
        elif isinstance(event, Gave):
            text, what = "the run gave a batch more than the oracle", "length"
        else:
            text, what = "the run ended; the oracle has more batches", "length"
        at = self._at(wanted.lane, wanted.turn)
        return Difference(what, text, at)


def origin_in_words(origin: Origin) -> str:
    """An origin for people: dataset, shard, row, child."""
    dataset, shard, row, path = origin
    child = f", child {'.'.join(map(str, path))}" if path else ""
    return f"dataset '{dataset}', shard {shard}, row {row}{child}"


def _made_of(origins: list[Origin]) -> str:
    if not origins:
        return "nothing"
    more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
    return origin_in_words(origins[0]) + more


def _origins_differ(expected: Origins, got: Origins, at: At) -> Difference:
    if len(expected) != len(got):
        return Difference("origins", f"the batch has {len(got)} samples; the oracle's has {len(expected)}", at=at)
    i = next(i for i in range(len(got)) if expected[i] != got[i])
    one, other = expected[i], got[i]
    j = next((j for j in range(min(len(one), len(other))) if one[j] != other[j]), min(len(one), len(other)))
    text = f"sample {i} is made of {_made_of(other[j:])}; the oracle's of {_made_of(one[j:])}"
    if j:
        text += f" (behind {j} equal origins)"
    return Difference("origins", text, sample=i, origin=(one[j:] or other[j:])[0], at=at)


def _content_differs(expected: Expected, gave: Gave, samples: bytes, at: At) -> Difference:
    width = len(expected.fields)
    for position in range(min(len(expected.samples), len(samples)) // DIGEST_BYTES):
        here = slice(position * DIGEST_BYTES, (position + 1) * DIGEST_BYTES)
        if expected.samples[here] != samples[here] and len(expected.samples) == len(samples):
            i, field = position // width, expected.fields[position % width]
            text = f"sample {i} differs in field '{field}'; it is made of {_made_of(gave.origins[i])}"
            return Difference("digest", text, sample=i, field=field, origin=gave.origins[i][0], at=at)
    text = f"the batch has other fields, dtypes or shapes than the oracle's, which has {', '.join(expected.fields)}"
    return Difference("digest", text, at=at)


def _counts_differ(
    expected: dict[str, int], got: dict[str, int], due: int, delivered: int, at: At, origins: Origins
) -> Difference:
    names = sorted({*expected, *got})
    wrong = [f"{n} {got.get(n, 0)} (the oracle: {expected.get(n, 0)})" for n in names if expected.get(n) != got.get(n)]
    if due != delivered:
        wrong.append(f"samples delivered {delivered} (the oracle: {due})")
    behind = f" behind {origin_in_words(origins[-1][-1])}" if origins and origins[-1] else " at the end of the pass"
    origin = origins[-1][-1] if origins and origins[-1] else None
    return Difference("counts", f"counts differ{behind}: {', '.join(wrong)}", origin=origin, at=at)

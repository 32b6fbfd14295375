"""What moves between the parts of the flow: marks, slices and tasks on the way in, outs and runs on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from zephon.errors import ZephonError
from zephon.record import Block, Handle, Handles, Lineage, Pointers, Record

Drop = tuple[int, str, int]
"""(event, reason, amount), in the order of events."""


class Mark(msgspec.Struct, frozen=True):
    """A point in a lane's stream: a flush sentinel, the lane's end, or the error that ends it. Carries no data."""

    kind: Literal["flush", "end", "error", "save"]
    event: int
    error: ZephonError | None = None
    saved: tuple[bytes, ...] = ()
    """Of a "save": what each row of accumulators so far holds behind this event; see `flow/held.py`."""
    num_held: int = 0
    """How many records that is."""

    @property
    def flushes(self) -> bool:
        """Whether accumulators let go of everything here."""
        return self.kind in ("flush", "end")


class Slice:
    """Consecutive records of one lane inside a task, and the mark behind them.

    `events[i]` is the event of record i. `closed` says that the last event has no further record behind this slice.
    `drops` and `through` come from the stage before: what was lost up to the event `through`, the last one that this
    slice completes. `num_pointers`: how many pointers those complete events were. `remake`: these records were held
    when the state was taken, and are made again for it.
    """

    __slots__ = (
        "_size",
        "closed",
        "drops",
        "events",
        "items",
        "lane",
        "mark",
        "num_pointers",
        "pass_index",
        "remake",
        "through",
    )

    def __init__(
        self,
        lane: int,
        pass_index: int,
        items: Pointers | list[Handle],
        events: Sequence[int],
        through: int,
        mark: Mark | None = None,
        closed: bool = True,
        drops: list[Drop] | None = None,
        num_pointers: int = 0,
    ) -> None:
        self.lane, self.pass_index = lane, pass_index
        self.items, self.events, self.through = items, events, through
        self.mark, self.closed, self.drops = mark, closed, drops or []
        self.num_pointers = num_pointers
        self.remake: Any = None
        self._size = len(events)  # asked often, with many lanes

    def __len__(self) -> int:
        return self._size


class Task:
    """The unit handed to a worker: slices of one or more lanes, numbered densely within a stage."""

    __slots__ = ("num_records", "seq", "slices")

    def __init__(self, seq: int, slices: list[Slice]) -> None:
        self.seq, self.slices = seq, slices
        self.num_records = sum(map(len, slices))


class Out:
    """What the operators of a stage made of one slice.

    `index`, `path`: as in `Lineage`. `lengths`: measured for the accumulators (None: all 1). `drops`: (index, reason,
    amount). `failure`: (index, error) of the first record that failed; nothing behind it is here.
    """

    __slots__ = ("drops", "failure", "index", "lengths", "path", "records")

    def __init__(
        self,
        records: Sequence[Record],
        index: Sequence[int],
        path: list[tuple[int, ...]] | None = None,
        lengths: list[int] | None = None,
        drops: list[tuple[int, str, int]] | None = None,
        failure: tuple[int, ZephonError] | None = None,
    ) -> None:
        self.records, self.index, self.path, self.lengths = records, index, path, lengths
        self.drops, self.failure = drops or [], failure

    def block(self, items: Any, events: Sequence[int]) -> Block:
        """The records with their lineage."""
        known = events if isinstance(items, Pointers) else None
        return Block(self.records, Lineage(items, self.index, self.path, known))


class Run:
    """Consecutive complete events of one lane behind a stage: the samples they gave, what they lost, and a mark.

    `samples` is a sequence of handles; `events[i]` the event that released sample i (never falling); `through` the
    last complete event; `num_pointers` how many pointers those events were; `remake` as in `Slice`.
    """

    __slots__ = (
        "drops",
        "events",
        "lane",
        "lengths",
        "mark",
        "num_pointers",
        "pass_index",
        "remake",
        "samples",
        "through",
    )

    def __init__(
        self,
        lane: int,
        pass_index: int,
        samples: Handles,
        events: Sequence[int],
        through: int,
        lengths: list[int] | None = None,
        drops: list[Drop] | None = None,
        mark: Mark | None = None,
        num_pointers: int = 0,
    ) -> None:
        self.lane, self.pass_index = lane, pass_index
        self.samples, self.events, self.lengths = samples, events, lengths
        self.through, self.drops, self.mark = through, drops or [], mark
        self.num_pointers = num_pointers
        self.remake: Any = None

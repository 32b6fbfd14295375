"""map_batches: a function over `size` records of one lane at a time.

Two steps: an accumulator groups, lane by lane, and the next pool stage maps the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Part, Ref
from zephon.ops.base import MAX_CHILDREN, Node, Rows, check_count
from zephon.ops.flat_map import FlatMap
from zephon.record import Record

GROUP = "records"


class MapBatches(FlatMap):
    """`fn` receives a list of up to `size` records of one lane, and gives an iterable of records.

    At a flush the group may be shorter. A group may become at most `max_children` records. What `fn` raises with
    on_error="skip" drops its whole group, counted as `<name>.error` with the number of the group's records.
    """

    method = "map_batches"

    def __init__(
        self,
        fn: Callable[..., Any],
        size: int,
        name: str | None = None,
        version: str | None = None,
        on_error: str = "raise",
        max_children: int | None = None,
    ) -> None:
        self.size = check_count("size", size, self.method)
        super().__init__(fn, name or self.method, version, on_error, max_children or max(MAX_CHILDREN, size))

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "size": self.size}

    def expand(self) -> list[Node]:
        return [GroupBy(self), self]

    def run(self, rows: Rows) -> None:
        groups = [record[GROUP] for record in rows.records]
        sizes = dict(zip(rows.index, map(len, groups), strict=True))
        rows.records, before = groups, len(rows.drops)  # the function sees the list that came as a record
        super().run(rows)
        rows.drops[before:] = [(i, reason, sizes[i]) for i, reason, _ in rows.drops[before:]]  # records, not groups


class GroupBy(Accumulator):
    """Collects `size` records of a lane into one record {"records": [...]} for the next pool stage."""

    method = "map_batches"
    batched = True

    def __init__(self, owner: MapBatches) -> None:
        self.size = owner.size
        self.name = owner.name
        self._held: dict[int, list[Part]] = {}

    def open(self, lane: int, key: Key) -> None:
        self._held[lane] = []

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted, held = Emitted(), self._held[lane]
        for trigger, (cursor, length, _) in enumerate(refs):
            held.append((cursor, 0, length))
            if len(held) == self.size:
                emitted.add(trigger, held)
                held = self._held[lane] = []
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        if self._held[lane]:
            emitted.add(0, self._held[lane])
            self._held[lane] = []
        return emitted

    @property
    def holds(self) -> int:
        return self.size

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy())

    def load(self, lane: int, key: Key, held: Held) -> None:
        if len(held.items) >= self.size:
            raise ValueError(f"{len(held.items):,} records are held, and a group has size={self.size:,}")
        self._held[lane] = list(held.items)

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {GROUP: [record for record, _, _ in parts]}

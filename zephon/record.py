"""The values that flow: pointers, events, records in flight. No behaviour beyond slicing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]

EVENT_BITS: Final = 24
MAX_CHUNK_SIZE: Final = (1 << EVENT_BITS) - 1


@final
class Missing:
    """The value of a field that a sample of a batch does not have. One instance: `zephon.MISSING`."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()


class Pointers(msgspec.Struct, frozen=True, eq=False):
    """Addresses of records, no data: three arrays of one length.

    `dataset` int32, index into the source's datasets; `row` int64, row within the dataset counted over all its
    shards; `epoch` int64, which time through that dataset within the pass.
    """

    dataset: NDArray[np.int32]
    row: NDArray[np.int64]
    epoch: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)

    def cut(self, start: int, stop: int) -> Pointers:
        """The pointers start .. stop - 1, as views."""
        return Pointers(self.dataset[start:stop], self.row[start:stop], self.epoch[start:stop])


def join(pointers: Sequence[Pointers]) -> Pointers:
    """The pointers of all, one after the other."""
    if len(pointers) == 1:
        return pointers[0]
    columns = ([getattr(p, name) for p in pointers] for name in ("dataset", "row", "epoch"))
    return Pointers(*(np.concatenate(column) for column in columns))


def event_at(chunk: int, offset: int) -> int:
    """The number of an event of a lane: a pointer of a chunk, or (offset = its length) the mark behind the chunk."""
    return chunk << EVENT_BITS | offset


def event_place(event: int) -> tuple[int, int]:
    """(chunk, offset) of an event."""
    return event >> EVENT_BITS, event & MAX_CHUNK_SIZE


Origin = tuple[int, int, int, tuple[int, ...]]
"""(dataset, row, epoch, child path): where a piece of a sample came from."""


class Lineage:
    """Where the records of a block came from, without their payload.

    `index[i]` is the number of the handed-in item that record i came from, `path[i]` its child path since then
    (None: all empty). The items are pointers in the first stage, handles of earlier records in a later one. `events`:
    the event of each pointer.
    """

    __slots__ = ("_known", "events", "index", "items", "path", "plain")

    def __init__(
        self,
        items: Pointers | list[Any],
        index: Sequence[int],
        path: list[tuple[int, ...]] | None = None,
        events: Sequence[int] | None = None,
    ) -> None:
        self.items, self.index, self.path, self.events = items, index, path, events
        self._known: tuple[int, tuple[Origin, ...]] | None = None
        self.plain: Sequence[int] = ()  # see `is_plain`

    def is_plain(self) -> bool:
        """Whether the records are of pointers and have no child paths; `plain` has the event of each then."""
        if self.path or self.events is None:
            return False
        if len(self.plain) != len(self.index):
            whole = self.index == range(len(self.events))
            self.plain = self.events if whole else [self.events[item] for item in self.index]
        return True

    @property
    def is_pointers(self) -> bool:
        """Whether the items are pointers, so that this holds no payload."""
        return isinstance(self.items, Pointers)

    def origins(self, i: int) -> tuple[Origin, ...]:
        """The origins of record i, in order."""
        item, path = self.index[i], self.path[i] if self.path else ()
        if isinstance(self.items, Pointers):
            return (self.first(i),)
        # Siblings share the origins of the item that they came from, which may be many: they are looked up once.
        if self._known is None or self._known[0] != item:
            self._known = (item, origins_of(self.items[item]))
        origins = self._known[1]
        return tuple((d, row, epoch, before + path) for d, row, epoch, before in origins) if path else origins

    def first(self, i: int) -> Origin:
        """The first origin of record i."""
        item, path = self.index[i], self.path[i] if self.path else ()
        items = self.items
        if isinstance(items, Pointers):
            return int(items.dataset[item]), int(items.row[item]), int(items.epoch[item]), path
        dataset, row, epoch, before = first_origin(items[item])
        return dataset, row, epoch, before + path

    def num_parts(self, i: int) -> int:
        """Of how many records an accumulator put together what record i came from; 1 where none did."""
        return 1 if isinstance(self.items, Pointers) else num_parts(self.items[self.index[i]])

    def start(self, i: int) -> int:
        """Where in its first origin record i begins, in measured units: not 0 for the rest of a split document."""
        return 0 if isinstance(self.items, Pointers) else start_of(self.items[self.index[i]])


class Block:
    """Records of one lane that one task made: a sequence of handles (block, position)."""

    __slots__ = ("lineage", "records")

    def __init__(self, records: Sequence[Record], lineage: Lineage) -> None:
        self.records, self.lineage = records, lineage

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> tuple[Block, int]:
        return self, i


class Group:
    """A handle of what an accumulator put together: `op` and its parts (handle, start, stop). Built on demand."""

    __slots__ = ("op", "parts")

    def __init__(self, op: Any, parts: list[tuple[Any, int, int]]) -> None:
        self.op, self.parts = op, parts

    def pieces(self) -> list[tuple[Record, int, int]]:
        """The parts with their records in place of handles."""
        return [(record_of(handle), start, stop) for handle, start, stop in self.parts]

    def build(self) -> Record:
        """The record."""
        return self.op.build(self.pieces())  # type: ignore[no-any-return]


class Attached(Group):
    """A handle of a record that an accumulator wrote something on: one more field, `op.into`, which is `value`."""

    __slots__ = ("value",)

    def __init__(self, op: Any, handle: Any, value: Any) -> None:
        super().__init__(op, [(handle, 0, 1)])
        self.value = value

    def build(self) -> Record:
        return {**record_of(self.parts[0][0]), self.op.into: self.value}


Handle = tuple[Block, int] | Group
"""A record in flight, with or without payload in it."""

Handles = Block | list[Handle]
"""A sequence of handles."""


def record_of(handle: Handle) -> Record:
    """The record itself."""
    if isinstance(handle, Group):
        return handle.build()
    return handle[0].records[handle[1]]


def origins_of(handle: Handle) -> tuple[Origin, ...]:
    """What a record was made of, in order."""
    if isinstance(handle, Group):
        return tuple(origin for part, _, _ in handle.parts for origin in origins_of(part))
    return handle[0].lineage.origins(handle[1])


def first_origin(handle: Handle) -> Origin:
    """The first of a record's origins."""
    if isinstance(handle, Group):
        return first_origin(handle.parts[0][0])
    return handle[0].lineage.first(handle[1])


def num_parts(handle: Handle) -> int:
    """Of how many records an accumulator put together this one, or what it came from; 1 where none did."""
    if isinstance(handle, Group):
        return len(handle.parts) if len(handle.parts) > 1 else num_parts(handle.parts[0][0])
    return handle[0].lineage.num_parts(handle[1])


def start_of(handle: Handle) -> int:
    """Where in its first origin a record begins, in measured units."""
    if isinstance(handle, Group):
        first, start, _ = handle.parts[0]
        return start or start_of(first)
    return handle[0].lineage.start(handle[1])

"""Batch slots without any process: contents stay, memory is bounded, and whoever holds some never stops the rest."""

from __future__ import annotations

import gc
import os
from collections import deque
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.slots import slot
from zephon import arena
from zephon.arena import Arena, NoRoom, Slot, SlotView, most_slots, write_description, write_fields, write_origins
from zephon.errors import ConfigError
from zephon.ipc.area import Lease
from zephon.ipc.columns import Blob, make_column
from zephon.lineage import Origins

__all__ = ["slot"]  # a fixture

SMALL: dict[str, Any] = {
    "ARENA_BYTES": 1 << 19,
    "LEAST_SLOT_BYTES": 1 << 13,
    "MOST_SLOTS": 16,
}  # a scaled-down arena: quick to fill


class ArenaMachine(RuleBasedStateMachine):
    """An engine that writes, and a trainer that takes, keeps and lets go by the driver's rule."""

    @initialize(least=st.integers(4, 6))
    def start(self, least: int) -> None:
        self.patch = mock.patch.multiple(arena, **SMALL)
        self.patch.start()
        self.arena, self.least = Arena(least), least
        self.flying: deque[tuple[Slot, int, int]] = deque()
        self.held: list[tuple[Slot, int, int]] = []
        self.rows: list[tuple[Any, int]] = []  # memory of open slots, and what was written there
        self.sizes: dict[int, int] = {}  # what the trainer has mapped
        self.written = 0

    @precondition(lambda self: self.arena.has_slot)
    @rule(size=st.one_of(st.integers(1, 9000), st.integers(1, 200_000)))
    def write(self, size: int) -> None:
        self.written += 1
        value = self.written % 251

        def put(slot: Slot) -> int:
            slot.empty(size, np.uint8)[:] = value
            return size

        self.send(*self.arena.write(put), value)

    def send(self, slot: Slot, size: int, value: int) -> None:
        for number in self.arena.take_retired():
            del self.sizes[number]
        if not slot.announced:
            slot.announced = True
            assert slot.number not in self.sizes
        self.sizes[slot.number] = slot.segment.size
        self.flying.append((slot, size, value))

    @rule(size=st.integers(1, 9000), room=st.integers(0, 200_000))
    def open(self, size: int, room: int) -> None:
        """Rows of a batch are on their way to a slot."""
        if (opened := self.arena.open(size + room, size)) is None:
            return
        slot, memory = opened
        assert len(slot.bytes) >= size + room
        assert slot.number not in self.arena.leased
        self.written += 1
        memory[:] = self.written % 251
        self.rows.append((memory, self.written % 251))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), fits=st.booleans())
    def finish(self, data: st.DataObject, fits: bool) -> None:
        """A batch that lies in its slot. What else it has may not fit there: then it is put together as any other."""
        memory, value = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        home = self.arena.home(memory)
        assert home is not None
        kept = home.kept
        assert (memory == value).all(), "another batch was written over its rows"

        def put(slot: Slot) -> int:
            if slot is home and not fits:
                raise NoRoom
            if slot is not home:
                slot.empty(kept, np.uint8)[:] = memory[:kept]
            return kept

        if fits or self.arena.has_slot:
            self.send(*self.arena.write(put, home), value)

    @precondition(lambda self: self.rows)
    @rule()
    def abandon(self) -> None:
        """No batch is made of what lies there."""
        self.rows.pop()

    @precondition(lambda self: self.flying)
    @rule(keep=st.booleans())
    def take(self, keep: bool) -> None:
        """The next batch: kept, used and let go, or (where too many are kept) copied."""
        batch = self.flying.popleft()
        most = most_slots(self.least, max(self.sizes.values()))
        if keep and len(self.held) + 1 <= most // 2:
            self.held.append(batch)
        else:
            self.release(batch)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    def release(self, batch: tuple[Slot, int, int]) -> None:
        slot, size, value = batch
        assert (slot.bytes[:size] == value).all(), "written over while it was leased"
        self.arena.release(slot.number)

    @invariant()
    def keeping_never_stops_the_rest(self) -> None:
        assert self.flying or self.arena.has_slot

    @invariant()
    def memory_is_bounded(self) -> None:
        wanted = self.arena._wanted
        mapped = sum(self.sizes.values())
        assert mapped <= max(SMALL["ARENA_BYTES"], self.least * wanted) + (1 + arena.OPEN_SLOTS) * wanted
        assert len(self.arena.slots) <= SMALL["MOST_SLOTS"] + 1

    @invariant()
    def what_is_leased_is_known(self) -> None:
        leased = {slot.number for slot, _, _ in [*self.flying, *self.held]}
        assert set(self.arena.leased) == leased
        assert leased <= set(self.sizes)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()
            self.rows.clear()
            for slot in self.arena.slots.values():
                slot.bytes = np.empty(0, np.uint8)
                slot.segment.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


FIELDS: dict[str, Any] = {
    "a": np.arange(6).reshape(2, 3),
    "empty": np.empty((2, 0), ">f4").astype("f4"),
    "0-d rows": np.array([1, 2], "u1"),
    "structured": np.array([(1, 2.5), (3, 4.5)], [("i", "i4"), ("f", "f8")]),
    "times": np.array(["2020", "2021"], "M8[ns]"),
    "text": make_column(["a", "ß\ud800"]),
    "raw": make_column([b"\0", b""]),
    "list": [(1, None), {"k": [2]}],
    "\ud800": np.array([True, False]),
    "": np.zeros(2, "c16"),
}


def test_fields_and_origins_come_out_as_they_went_in(slot: Slot) -> None:
    slot.empty(3, np.uint8)[:] = 1  # so that nothing begins at 0
    fields = {**FIELDS, "in place": slot.empty((2, 5), np.int16)}
    fields["in place"][:] = 7
    origins = Origins(np.array([1, 2]), np.array([0, 1, 1]), np.array([5, 6, 2**40]), [(), (1, 2), (3,)])
    place = write_description(slot, [write_fields(slot, fields), write_origins(slot, origins)])
    view = SlotView(slot.segment.map, slot.used)
    described = view.description(*place)
    got = view.fields(described[0])
    assert list(got) == list(fields)
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype
            assert got[name].shape == value.shape
            assert np.array_equal(got[name], value)
            assert got[name].flags.writeable
        else:
            assert got[name].values() == (value.values() if isinstance(value, Blob) else value)
    assert view.origins(described[1])().samples() == origins.samples()


HOLDERS = {
    "array": lambda x: x,
    "slice": lambda x: x[1:, ::2],
    "element": lambda x: x[0, 0:1],
    "transposed": lambda x: x.T,
    "cast": lambda x: x.view(np.uint8),
    "memoryview": memoryview,
    "buffer of a view": lambda x: memoryview(x[0]).cast("B")[3:],
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "subclass": lambda x: x.view(np.matrix),
    "iterator": iter,
    "flat": lambda x: x.flat,
    "asarray of a memoryview": lambda x: np.asarray(memoryview(x)),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_lease_ends_with_the_last_view_of_any_kind(kind: str, slot: Slot) -> None:
    described = write_fields(slot, {"x": np.arange(12).reshape(3, 4)})
    freed: deque[Lease] = deque()
    view = SlotView(slot.segment.map, slot.used)
    lease = view.lease(9, freed)
    held = HOLDERS[kind](view.fields(described)["x"])
    del view
    gc.collect()
    assert not freed
    del held
    gc.collect()
    assert [each.number for each in freed] == [9]
    assert freed[0] is lease


@pytest.mark.parametrize("left", [None, 1 << 20], ids=["refused", "short"])
def test_where_memory_is_short_no_slot_is_opened(left: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there already may be used for rows; other batches get what is left."""

    def refuse(*args: Any) -> Slot:
        raise ConfigError("no room")

    made = Arena(4)
    slot, _ = made.write(lambda slot: slot.empty(1 << 20, np.uint8))
    monkeypatch.setattr(arena, "memory_left", lambda: left)
    monkeypatch.setattr(arena, "Slot", refuse)
    assert made.open(1 << 20, 1 << 20) is None
    made.release(slot.number)
    opened = made.open(1 << 20, 1 << 20)
    assert opened is not None
    assert opened[0] is slot
    slot.segment.close()


def test_a_put_that_fails_gives_its_slot_back() -> None:
    made, before = Arena(4), len(os.listdir("/proc/self/fd"))

    def fail(slot: Slot) -> None:
        raise ValueError("a field")

    for _ in range(100):
        with pytest.raises(ValueError, match="a field"):
            made.write(fail)
    assert made.has_slot
    assert len(os.listdir("/proc/self/fd")) <= before + 2

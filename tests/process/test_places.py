"""Rows of slots without any process: none is given twice, none lies in another, and they are those of the batches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon import arena, places
from zephon.arena import Arena
from zephon.flow.progress import LaneState
from zephon.flow.task import Out, Slice
from zephon.places import SlotPlaces
from zephon.runners.base import Given

SIZE = 4  # records of a batch


def slices(*counts: int) -> list[Slice]:
    """One for each lane."""
    return [Slice(lane, 0, [], range(count), count - 1) for lane, count in enumerate(counts)]


def outs(*counts: int) -> list[Out]:
    return [Out([{}] * count, range(count)) for count in counts]


def batch(row_bytes: int, names: str = "x") -> dict[str, Any]:
    return {name: np.zeros((SIZE, row_bytes), np.uint8) for name in names}


ARENAS: list[Arena] = []


def close_all() -> None:
    while ARENAS:
        for slot in ARENAS.pop().slots.values():
            slot.segment.close()


@pytest.fixture
def large_from_8_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(places, "LARGE_BYTES", 8)
    monkeypatch.setattr(arena, "LEAST_SLOT_BYTES", 4096)
    yield
    close_all()


def made(lanes: int = 1, skip: int = 0) -> SlotPlaces:
    ARENAS.append(Arena(4))
    found = SlotPlaces(ARENAS[-1], SIZE, {lane: LaneState(skip=skip) for lane in range(lanes)})
    found.learn(batch(16), SIZE, 1024)
    return found


def rows(found: Given) -> list[int | None]:
    """Of each record of a task: its row, or None."""
    assert found.told is not None
    return [row + i if number else None for number, row, count in found.told.runs for i in range(count)]


@pytest.mark.usefixtures("large_from_8_bytes")
@pytest.mark.parametrize("tasks", [(8,), (3, 5), (1, 1, 1, 1, 4)])
def test_rows_are_those_of_the_batches(tasks: tuple[int, ...]) -> None:
    placer = made()
    given = [placer.give(slices(count)) for count in tasks]
    assert [row for found in given for row in rows(found)] == [0, 1, 2, 3] * 2
    assert len({number for found in given for number in found.memories}) == 2


@pytest.mark.usefixtures("large_from_8_bytes")
def test_what_was_delivered_before_a_restart_has_no_place() -> None:
    assert rows(made(skip=6).give(slices(12))) == [None] * 6 + [0, 1, 2, 3, 0, 1]


@pytest.mark.usefixtures("large_from_8_bytes")
def test_rows_behind_a_loss_are_right_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that was begun is left alone: what lies in its slot lies one row too far."""
    monkeypatch.setattr(places, "PAUSE_BATCHES", 1)
    placer = made()
    assert rows(placer.give(slices(6))) == [0, 1, 2, 3, 0, 1]
    placer.took(slices(6), outs(5))
    assert rows(placer.give(slices(12))) == [None] * 3 + [None] * 4 + [0, 1, 2, 3, 0]


@pytest.mark.usefixtures("large_from_8_bytes")
def test_a_batch_of_another_make() -> None:
    """A slot has one layout: who is in the middle of a batch gives no more of its rows."""
    placer = made()
    first = placer.give(slices(2))
    placer.learn(batch(32), SIZE, 1024)
    assert rows(placer.give(slices(4))) == [None, None, 0, 1]
    placer.learn({"x": [1, 2, 3, 4]}, SIZE, 64)
    assert placer.give(slices(3)).told is None
    placer.learn(batch(16), SIZE, 1024)
    assert rows(placer.give(slices(4))) == [None, None, None, 0]
    assert rows(first) == [0, 1]


@pytest.mark.usefixtures("large_from_8_bytes")
def test_few_slots_are_open_at_a_time() -> None:
    """Lanes that begin when none is to spare have no places; those that are let go are given again."""
    placer = made(lanes=9)
    first = placer.give(slices(*[1] * 9))
    assert rows(first) == [0] * arena.OPEN_SLOTS + [None] * (9 - arena.OPEN_SLOTS)
    rest = placer.give(slices(*[3] * 9))
    del first, rest
    assert rows(placer.give(slices(*[1] * 9))).count(0) == arena.OPEN_SLOTS


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["give", "give", "took", "lost", "learn", "let go"]), st.integers(1, 9)), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_no_byte_is_given_twice(steps: list[Step]) -> None:
    """As long as the slot is the same one, whatever is lost and whatever batches look like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "LARGE_BYTES", 8)
        patch.setattr(arena, "LEAST_SLOT_BYTES", 4096)
        patch.setattr(places, "PAUSE_BATCHES", 0)
        placer, tasks = made(), deque[tuple[int, Given]]()
        used: list[tuple[weakref.ref[Any], set[int]]] = []  # of each slot that was opened, its bytes that were given
        for what, n in steps:
            if what == "give":
                found = placer.give(slices(n))
                tasks.append((n, found))
                take_note(found, used)
            elif what == "learn":
                placer.learn(batch(16 * n, "xyz"[: 1 + n % 3]), SIZE, 2048)
            elif tasks and what != "let go":
                count, _ = tasks.popleft()
                placer.took(slices(count), outs(count if what == "took" else count // 2))
    close_all()


def take_note(found: Given, used: list[tuple[weakref.ref[Any], set[int]]]) -> None:
    for number, row, count in found.told.runs if found.told else []:
        if not number:
            continue
        memory = found.memories[number]
        taken = next((taken for known, taken in used if known() is memory), None)
        if taken is None:
            taken = set[int]()
            used.append((weakref.ref(memory), taken))
        for _, _, (size,), start in found.told.fields if found.told else []:
            own = set(range(start + row * size, start + (row + count) * size))
            assert not own & taken
            assert max(own) < len(memory)
            taken |= own

"""Slots and copies that are late: what is read stays, and comes back when nobody refers to it and no copy reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zephon as zp
from tests.device.late import LateCopies, place
from tests.process.functions import Full
from tests.process.helpers import line, wait_until
from zephon import drive_process
from zephon.device.loader import DeviceLoader

KB = 128  # int64 in 1 KB


def loader_of(pipeline: zp.Pipeline, copies: LateCopies, depth: int = 2) -> DeviceLoader:
    return DeviceLoader(pipeline, copies, depth)


def leased(loader: DeviceLoader) -> int:
    """Slots that something in this process refers to."""
    assert loader._live is not None
    driver: Any = loader._live()._source._driver  # type: ignore[union-attr]
    return len(driver._leases) - len(driver._freed)


def waiting(loader: DeviceLoader) -> int:
    """Slots whose batches nobody has taken from the tail yet."""
    return len(loader._live()._source._driver._untaken)  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [64, 8 * KB, 512 * KB])
def test_copies_that_happen_long_after(size: int) -> None:
    """At the very end: each reads what its batch held, so no slot was written over meanwhile."""
    copies = LateCopies(pinned=False)
    with loader_of(line(60, Full(size), batch=1, prefetch_batches=1), copies) as loader:
        got = [batch["x"] for batch in loader]
        assert all((x == -1).all() for x in got)
        copies.finish()
    assert len(got) == 60
    for number, x in enumerate(got):
        assert (x == number).all()


def test_a_slot_comes_back_when_its_copy_is_done() -> None:
    copies = LateCopies()
    with loader_of(line(60, Full(512 * KB), batch=1, prefetch_batches=1), copies) as loader:
        batches = iter(loader)
        kept = [next(batches) for _ in range(2)]
        under_way = len(copies.marks)
        assert under_way >= 2
        assert leased(loader) - waiting(loader) == under_way  # all of them, though nobody has the host's batches
        copies.finish()
        next(batches)
        assert leased(loader) - waiting(loader) == len(copies.marks) - under_way
        assert all((batch["x"] == number).all() for number, batch in enumerate(kept))


def test_fields_that_stay_on_the_host_keep_their_slot() -> None:
    def tell(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "text": f"row {record['id']}", "day": np.datetime64("2024-01-01") + record["id"]}

    copies = LateCopies()
    with loader_of(line(300, tell, batch=1, prefetch_batches=1), copies) as loader:
        kept = []
        for batch in loader:
            copies.finish()
            kept.append(batch)
    for number, batch in enumerate(kept):
        assert batch["text"] == [f"row {number}"]
        assert batch["day"] == np.datetime64("2024-01-01") + number
        assert batch["id"].tolist() == [number]


@pytest.mark.parametrize("by_step", [False, True])
def test_copies_start_before_their_batch_is_handed_over(by_step: bool) -> None:
    copies = LateCopies(pinned=False)
    with loader_of(line(8, Full(4), batch=1, runner="inline"), copies, depth=2) as loader:
        for _ in loader.steps() if by_step else loader:
            pass
    expected = ["start 0", "start 1", "start 2", "hand over 0"]
    for number in range(1, 8):
        expected += [f"start {number + 2}"] * (number + 2 < 8) + [f"hand over {number}"]
    assert copies.log[: len(expected)] == expected
    assert {event.split()[0] for event in copies.log[len(expected) :]} == {"wait", "done"}  # as it was closed


def test_closing_waits_for_copies_before_memory_goes() -> None:
    copies = LateCopies()
    loader = loader_of(line(60, Full(512 * KB), batch=1, prefetch_batches=1), copies)
    batches = iter(loader)
    kept = [next(batches)["x"] for _ in range(4)]
    started = len(copies.marks)
    loader.close()
    assert all(mark.is_done for mark in copies.marks)
    waits = [i for i, event in enumerate(copies.log) if event.startswith("wait")]
    assert len(waits) == started
    assert max(waits) < copies.log.index("unpin")
    assert copies.log.count("pin") == copies.log.count("unpin") > 0
    assert not copies.pins.pinned  # type: ignore[union-attr]
    assert started == len(copies.marks)
    for number, x in enumerate(kept):
        assert (x == number).all()
    with pytest.raises(zp.errors.Closed, match="the loader was closed"):
        next(batches)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_loader_that_is_dropped_waits_too(pinned: bool) -> None:
    copies = LateCopies(pinned)
    loader = loader_of(line(60, Full(512 * KB), batch=1, prefetch_batches=1), copies)
    x = next(iter(loader))["x"]
    del loader
    assert copies.marks
    assert all(mark.is_done for mark in copies.marks)
    assert (x == 0).all()


def test_each_slot_is_pinned_once_and_every_copy_reads_a_pinned_one() -> None:
    """Batches grow, so that slots are retired on the way."""

    def grow(record: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.full(2000 * (1 + record["id"]), record["id"])}

    copies = LateCopies()
    pins, start, inside = copies.pins, copies.start, []
    assert pins is not None

    def watched(tensors: list[Any]) -> Any:
        inside.append(all(map(pins.holds, tensors)))
        return start(tensors)

    copies.start = watched  # type: ignore[method-assign]
    with loader_of(line(40, grow, batch=1, prefetch_batches=1), copies) as loader:
        for number, batch in enumerate(loader):
            copies.finish()
            assert (batch["x"] == number).all()
    assert inside == [True] * 40
    assert copies.log.count("unpin") == copies.log.count("pin") > pins.most  # some went before the end
    assert not pins.pinned


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(address, bytes) of every slot that this process maps."""
    found: list[tuple[int, int]] = []
    segment = drive_process.Segment

    def opened(*args: Any) -> Any:
        made = segment(*args)
        found.append(place(made.map))
        return made

    monkeypatch.setattr(drive_process, "Segment", opened)
    return found


def lies_in(slots: list[tuple[int, int]], x: Any) -> bool:
    start, stop = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    return any(at <= start < stop <= at + length for at, length in slots)


@pytest.mark.parametrize(("size", "batch"), [(16, 4), (8 * KB, 2), (512 * KB, 1)])
def test_output_torch_and_the_cpu_copy_nothing(size: int, batch: int, slots: list[tuple[int, int]]) -> None:
    """The tensors lie in the slots."""
    plain = line(24, Full(size), batch=batch)
    for batches in (plain.options(output="torch"), plain.to_device("cpu")):
        with batches:
            for found in batches:
                assert isinstance(found["x"], torch.Tensor)
                assert lies_in(slots, found["x"])


def test_reading_ahead_has_slots_of_its_own(slots: list[tuple[int, int]]) -> None:
    """With large batches there are few slots; the batches ahead must not be what makes the user's private copies."""
    with line(30, Full(4096 * KB), batch=1, prefetch_batches=1).to_device("cpu", depth=3) as loader:
        batches: Any = iter(loader)
        deepest = 0
        for number in range(20):
            batch = next(batches)
            assert lies_in(slots, batch["x"])
            deepest = max(deepest, len(batches._ahead))
            if number > 2:
                wait_until(batches._source.ready, what="a batch")
        assert deepest == 3

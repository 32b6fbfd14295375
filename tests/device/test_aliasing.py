"""Tensors over slots: whoever holds anything of a batch keeps its memory as it is; whoever lets go gives it back."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import zephon as zp
from tests.process.functions import Full
from tests.process.helpers import line
from tests.slots import slot
from zephon.arena import Slot, SlotView, write_fields
from zephon.ipc.area import Lease

__all__ = ["slot"]  # a fixture

VIEWS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: x,
    "slice": lambda x: x[1:, ::2],
    "element": lambda x: x[0, 0],
    "transposed": lambda x: x.T,
    "cast": lambda x: x.view(torch.uint8),
    "reshaped": lambda x: x.reshape(-1)[1:],
    "expanded": lambda x: x.expand(2, *x.shape),
    "detached": lambda x: x.detach(),
    "strided": lambda x: x.as_strided((2,), (1,), 3),
    "storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.numpy(),
    "memoryview": lambda x: memoryview(x.numpy()),
    "split": lambda x: x.unbind()[2],
    "torch.from_dlpack": lambda x: torch.from_dlpack(x),
    "np.from_dlpack": lambda x: np.from_dlpack(x),
    "numpy, torch": lambda x: torch.from_dlpack(np.from_dlpack(x)),
    "autograd": lambda x: (torch.ones((), dtype=torch.float64, requires_grad=True) * x).grad_fn,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_lease_ends_with_the_last_view_of_any_kind(kind: str, slot: Slot) -> None:
    described = write_fields(slot, {"x": np.arange(12.0).reshape(3, 4)})
    freed: deque[Lease] = deque()
    view = SlotView(slot.segment.map, slot.used)
    lease = view.lease(9, freed)
    held = VIEWS[kind](zp.Batch(view.fields(described), 0, 0, 0, 3).to_torch()["x"])
    del view
    gc.collect()
    assert not freed
    del held
    gc.collect()
    assert freed.popleft() is lease


@pytest.mark.parametrize("of", ["array", "tensor"])
def test_dlpack_without_torch_tensors(of: str, slot: Slot) -> None:
    """What JAX and others take: no copy, and the slot is kept."""
    described = write_fields(slot, {"x": np.arange(12).reshape(3, 4)})
    freed: deque[Lease] = deque()
    view = SlotView(slot.segment.map, slot.used)
    lease = view.lease(9, freed)
    batch = zp.Batch(view.fields(described), 0, 0, 0, 3)
    source = batch["x"] if of == "array" else batch.to_torch()["x"]
    there = torch.from_dlpack(source)
    back = np.from_dlpack(there)
    source[1, 1] = 77
    assert there[1, 1] == back[1, 1] == 77
    del source, batch, view, there
    gc.collect()
    assert not freed
    assert back.tolist() == [[0, 1, 2, 3], [4, 77, 6, 7], [8, 9, 10, 11]]
    del back
    gc.collect()
    assert freed.popleft() is lease


HELD = ["slice", "storage", "numpy", "np.from_dlpack", "strided"]


@pytest.mark.parametrize("size", [64, 20_000])
def test_what_is_held_never_changes(size: int) -> None:
    """Every view of every batch of a run that is far longer than there are slots."""
    kept: list[tuple[int, str, Any]] = []
    with line(150, Full(size), batch=2, prefetch_batches=1).to_device("cpu") as loader:
        for number, batch in enumerate(loader):
            if number % 3 == 0:
                kind = HELD[number // 3 % len(HELD)]
                kept.append((2 * number, kind, VIEWS[kind](batch["x"])))
    assert len(kept) == 25
    for row, kind, held in kept:
        if kind == "storage":
            found = torch.empty(0, dtype=torch.int64).set_(held)
        else:
            found = torch.as_tensor(held).reshape(-1)
        rows = {"slice": {row + 1}, "strided": {row}}.get(kind, {row, row + 1})
        assert set(found.tolist()) == rows


@pytest.mark.parametrize("size", [64, 20_000])
def test_a_write_touches_no_other_batch(size: int) -> None:
    """Small batches share a slot; each of them is the user's alone."""
    with line(120, Full(size), batch=1, prefetch_batches=2).to_device("cpu", depth=3) as loader:
        kept = []
        for number, batch in enumerate(loader):
            assert (batch["x"] == number).all()
            batch["x"].fill_(-number)
            kept.append(batch["x"])
    for number, x in enumerate(kept):
        assert (x == -number).all()


def test_whoever_lets_go_gives_slots_back() -> None:
    """Large batches: in a long run with one of them held, no batch is ever copied and few slots exist."""
    with line(80, Full(400_000), batch=1, prefetch_batches=1).to_device("cpu") as loader:
        numbers, held = set(), None
        for number, batch in enumerate(loader):
            driver: Any = loader._live()._source._driver  # type: ignore[union-attr, misc]
            numbers |= set(driver._slots)
            held = batch["x"] if number == 3 else held
        assert (held == 3).all()
    assert len(numbers) <= 8


def test_a_batch_in_memory_of_its_own() -> None:
    [batch, *_] = line(4, Full(8), batch=1, output="torch", runner="inline")
    copied = batch.copy()
    copied["x"].fill_(9)
    assert (batch["x"] == 0).all()
    assert copied.lane_id == batch.lane_id

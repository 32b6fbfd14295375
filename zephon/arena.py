"""Batch slots: shared memory that the engine process writes batches into and the trainer maps without copying.

A slot is a segment of its own, made when first needed and large enough for a batch; its descriptor goes to the trainer
once. A slot that a batch outgrows is retired, and so is one that larger slots leave no room for. A batch in the trainer
is views on one `np.frombuffer` of the slot (a slice of a common array would be freed too early: numpy collapses
`.base`); when the last view is gone, a weakref callback notes that the slot is free. The callback runs no Python code:
what it did could be cut short by a Ctrl-C, which Python would then swallow.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.ipc.area import Lease, lease
from zephon.ipc.codec import dump
from zephon.ipc.columns import Blob, Bytes, is_plain_name, is_sendable, pickled
from zephon.ipc.message import ALIGNMENT
from zephon.ipc.segment import Segment
from zephon.limits import memory_left, num_descriptors, resource_limit
from zephon.lineage import Origins

GROWTH = 1.25  # a new slot is this much larger than the batch that needs it
LEAST_SLOT_BYTES = 1 << 16
MOST_SLOTS = 16
WORKER_DESCRIPTORS = 5  # of one worker in the engine and in the launcher: four wake-ups, a pidfd
ENGINE_DESCRIPTORS = 40  # of the rest there: sockets, the event loop, rings and shared lists
SPARE_DESCRIPTORS = 8  # left to the trainer for what else it opens
OPEN_SLOTS = 4  # that rows are on their way to, at most: they come on top of the others
ARENA_BYTES = 16 << 20  # of all slots together, where more than the least number is possible

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Slot:
    """One slot, on the engine's side. `empty` gives memory in it, until it is full."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.segment = Segment.create(size)
        self.announced = False
        self.bytes = np.frombuffer(self.segment.map, np.uint8)
        self.used = 0
        stat = os.fstat(self.segment.fd)
        self.file = [number, self.segment.fd, self.segment.size, stat.st_dev, stat.st_ino]
        """By what a worker finds it: `ipc/in_slots.py`."""
        self.kept = 0
        """Bytes at its start for rows that workers write there; see `Arena.open`."""

    def empty(self, shape: Any, dtype: Any) -> NDArray[Any]:
        """An array in the slot. Raises NoRoom."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = dtype.itemsize * math.prod(shape)
        start, self.used = self.used, self.used + size + -size % ALIGNMENT
        if self.used > len(self.bytes):
            raise NoRoom
        array: NDArray[Any] = self.bytes[start : start + size].view(dtype).reshape(shape)
        return array


class NoRoom(Exception):
    """A slot is too small for a batch."""


def affordable_slots(least: int, workers: int) -> int:
    """The most slots there may be, `MOST_SLOTS` or `least` if that is more, where the limits of open files allow them.

    A slot takes two descriptors in this process and two in the engine. Raises ConfigError where not even `least` are
    possible.
    """
    soft, hard = resource_limit("NOFILE")
    most = max(least, MOST_SLOTS)
    if soft is not None:
        most = min(most, (soft - trainer_descriptors(0)) // 2)
    if hard is not None:
        most = min(most, (hard - engine_descriptors(workers, 0)) // 2)
    if most < least:
        engine, here = engine_descriptors(workers, least), trainer_descriptors(least)
        raise ConfigError(
            f"{workers} workers and {least} batches in flight need {engine} open files in the engine's "
            f"process and {here} in this one, but {hard or 'any number'} there and {soft} here are allowed "
            "(RLIMIT_NOFILE); lower parallelism, prefetch_batches or to_device's depth, or raise the limit (ulimit -n)"
        )
    return most


def engine_descriptors(workers: int, slots: int) -> int:
    """Open files that the engine, or the launcher, needs."""
    return ENGINE_DESCRIPTORS + WORKER_DESCRIPTORS * workers + 2 * slots


def trainer_descriptors(slots: int) -> int:
    """Open files that this process needs, with those that it has."""
    return num_descriptors() + SPARE_DESCRIPTORS + 2 * slots


def most_slots(least: int, slot_bytes: int, most: int | None = None) -> int:
    """How many slots there may be: more where batches are small, so that several travel at a time."""
    return max(least, min(MOST_SLOTS if most is None else most, ARENA_BYTES // slot_bytes))


class Arena:
    """The slots of one engine, and who has them. There are at least `least_slots` for a large batch, `most` at most."""

    def __init__(self, least_slots: int, most: int | None = None) -> None:
        self._least, self._most = least_slots, MOST_SLOTS if most is None else most
        self._free: list[Slot] = []
        self._numbers = 0
        self._bytes = 0  # of all slots
        self.leased: dict[int, Slot] = {}
        self.slots: dict[int, Slot] = {}
        self._open: dict[int, tuple[Slot, Lease]] = {}
        self._let_go: deque[Lease] = deque()
        self._wanted = LEAST_SLOT_BYTES
        self._retired: list[int] = []

    @property
    def has_slot(self) -> bool:
        """Whether a batch can be written now."""
        self._sweep()
        return bool(self._free) or (len(self.slots) < self._most and self._bytes + self._wanted <= self._most_bytes)

    @property
    def _most_bytes(self) -> int:
        """Those that are open come on top: `least` of them are always left to batches that are put together here."""
        return max(ARENA_BYTES, self._least * self._wanted) + len(self._open) * self._wanted

    def open(self, size: int, kept: int) -> tuple[Slot, Bytes] | None:
        """A slot of at least `size` bytes, of which the first `kept` are for rows of a batch that is on its way.

        It is open, or leased, as long as any view of the memory that comes with it lives. None: there is none to spare.
        """
        self._sweep()
        if len(self._open) >= min(OPEN_SLOTS, (self._most - self._least) // 2):
            return None
        slot = next((slot for slot in reversed(self._free) if len(slot.bytes) >= size), None)
        if slot is not None:
            self._free.remove(slot)
        elif len(self.slots) < self._most and self._bytes <= self._most_bytes and self._wanted >= size:
            slot = self._new_if_plenty()
        if slot is None:
            return None
        memory = np.frombuffer(slot.segment.map, np.uint8)
        self._open[slot.number] = slot, lease(memory, slot.number, self._let_go)
        slot.kept = kept
        return slot, memory

    def _sweep(self) -> None:
        """Takes back open slots that nobody has rows in any more."""
        while self._let_go:
            slot, _ = self._open.pop(self._let_go.popleft().number)
            if slot.number not in self.leased:
                self._recycle(slot)

    def home(self, memory: Any) -> Slot | None:
        """The open slot that came with this memory."""
        return next((slot for slot, known in self._open.values() if known() is memory), None)

    def write(self, put: Callable[[Slot], Any], home: Slot | None = None) -> tuple[Slot, Any]:
        """Leases a slot, and writes a batch into it with `put`, again in a larger one where it does not fit.

        home: the slot that its rows lie in.
        """
        if home is not None:
            home.used = home.kept
            with contextlib.suppress(NoRoom):
                written = put(home)
                self.leased[home.number] = home
                return home, written
        while True:
            slot = self._free.pop() if self._free else self._new()
            slot.used = 0
            try:
                written = put(slot)
            except NoRoom:
                self._wanted = max(self._wanted, 2 * len(slot.bytes), int(slot.used * GROWTH))
                self._retire(slot)
                continue
            except BaseException:
                self._free.append(slot)
                raise
            self.leased[slot.number] = slot
            return slot, written

    def _new(self) -> Slot:
        while self._free and self._bytes + self._wanted > self._most_bytes:
            self._retire(self._free.pop())
        self._numbers += 1
        slot = self.slots[self._numbers] = Slot(self._numbers, self._wanted)
        self._bytes += slot.segment.size
        return slot

    def _new_if_plenty(self) -> Slot | None:
        """A slot, where memory is left for as many as other batches may want."""
        left = memory_left()
        if left is not None and left < (self._least + 1) * self._wanted:
            return None
        with contextlib.suppress(ConfigError):
            return self._new()
        return None

    def _retire(self, slot: Slot) -> None:
        self._bytes -= slot.segment.size
        del self.slots[slot.number]
        slot.bytes = np.empty(0, np.uint8)
        slot.segment.close()
        if slot.announced:
            self._retired.append(slot.number)

    def take_retired(self) -> list[int]:
        """The slots that the trainer knows and that are no more, since the last call."""
        retired, self._retired = self._retired, []
        return retired

    def release(self, number: int) -> None:
        """The trainer has let go of a slot."""
        self._sweep()
        slot = self.leased.pop(number)
        if number not in self._open:
            self._recycle(slot)

    def _recycle(self, slot: Slot) -> None:
        if slot.segment.size < self._wanted and self._bytes > self._most_bytes - self._wanted:
            self._retire(slot)  # the next batch will likely want a larger one, and there must be room for that
        else:
            self._free.append(slot)


def write_fields(slot: Slot, fields: dict[str, Any]) -> list[list[Any]]:
    """Puts what is not in the slot yet (lists above all) there; returns the description of all fields."""
    described = []
    for name, value in fields.items():
        sent_name = name if is_plain_name(name) else dump(name)
        if isinstance(value, np.ndarray):
            dtype: str | bytes = value.dtype.str if is_sendable(value.dtype) else dump(value.dtype)
            described.append([sent_name, dtype, list(value.shape), _place(slot, value)])
        else:
            blob = value if isinstance(value, Blob) else pickled(value)
            offsets, data = _place(slot, blob.offsets), _place(slot, blob.data)
            described.append([sent_name, blob.kind, len(blob.offsets), offsets, len(blob.data), data])
    return described


def write_origins(slot: Slot, origins: Origins) -> list[Any]:
    """Puts the origins of a batch into the slot; returns their description."""
    counts = None if origins.counts is None else [len(origins.counts), _copied(slot, origins.counts)]
    return [counts, len(origins.row), _place(slot, origins.dataset), _place(slot, origins.row), origins.path]


def write_description(slot: Slot, described: Any) -> list[int]:
    """Puts a description, plain data of any length, into the slot; returns [offset, size]."""
    raw = _encode(described)
    return [_copied(slot, np.frombuffer(raw, np.uint8)), len(raw)]


def _place(slot: Slot, array: NDArray[Any]) -> int:
    """Where in the slot an array lies; it is copied there first if it lies elsewhere."""
    base = slot.bytes.__array_interface__["data"][0]
    at = array.__array_interface__["data"][0] - base
    if array.nbytes and 0 <= at < len(slot.bytes):
        return int(at)
    return _copied(slot, array)


def _copied(slot: Slot, array: NDArray[Any]) -> int:
    """Copies an array into the slot; returns its offset there."""
    start = slot.used
    slot.empty(array.shape, array.dtype)[...] = array
    return start


class SlotView:
    """What is in a slot, on the trainer's side: arrays over the slot's memory, as long as anyone holds one."""

    def __init__(self, memory: Any, size: int) -> None:
        self._lease = np.frombuffer(memory, np.uint8, size)
        self._raw = memoryview(memory)

    def lease(self, number: int, freed: deque[Lease]) -> Lease:
        """A lease that is appended to `freed` when the last array is gone. To be kept until then."""
        return lease(self._lease, number, freed)

    def description(self, start: int, size: int) -> Any:
        """What `write_description` put there."""
        return _decode(self._raw[start : start + size])

    def array(self, dtype: str | bytes, shape: Sequence[int], start: int) -> NDArray[Any]:
        """The array at an offset."""
        kind: np.dtype[Any] = pickle.loads(dtype) if isinstance(dtype, bytes) else np.dtype(dtype)
        return np.ndarray(shape, kind, self._lease, start)

    def fields(self, described: list[list[Any]]) -> dict[str, Any]:
        """The fields of a batch. Lists are decoded when asked for; until then they too hold the slot."""
        fields: dict[str, Any] = {}
        for name, kind, *what in described:
            name = pickle.loads(name) if isinstance(name, bytes) else name
            if len(what) == 2:
                fields[name] = self.array(kind, *what)
            else:
                num, offsets_at, size, data_at = what
                offsets = self.array("<i8", [num], offsets_at)
                fields[name] = Blob(kind, self.array("|u1", [size], data_at), offsets)
        return fields

    def origins(self, described: list[Any]) -> Callable[[], Origins]:
        """Gives the origins of a batch, which are copied out of the slot now, and made into columns when asked for."""
        counts, total, dataset, row, path = described
        places = [(total, dataset), (total, row), *([counts] if counts is not None else [])]
        return partial(_origins, [bytes(self._raw[start : start + 8 * size]) for size, start in places], path)


def _origins(columns: list[bytes], path: list[tuple[int, ...]] | None) -> Origins:
    dataset, row, *counts = (np.frombuffer(column, "<i8") for column in columns)
    return Origins(counts[0] if counts else None, dataset, row, path)

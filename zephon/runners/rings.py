"""The rings and wake-ups between the engine and its workers: laid out once by the launcher, mapped by every process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from zephon.ipc.ring import LEAST_CAPACITY, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake
from zephon.limits import memory_left
from zephon.runners.process import Wiring
from zephon.runners.stacks import make_file
from zephon.runners.whereabouts import CELLS_BYTES

TASK_CAPACITY = 1 << 18
MOST_RING_MEMORY = 128 << 20  # reserving pages costs 0.4 s a GiB
PARTS_OF_MEMORY = 4  # rings take at most one of so many parts of what the container's memory limit leaves
MOST_AREA_MEMORY = 64 << 20  # for large results, of all workers; reserved only as far as it is used
RINGS_IN_AREA = 4  # an area is at most this many times as large as a ring
WAKES = 4  # of one worker, in the order of the fields of `Wiring`


class Layout(msgspec.Struct, frozen=True):
    """What a process needs to find all rings. The descriptors are valid in whoever inherited them."""

    capacity: int
    """Of a ring of results."""
    area: int
    """Bytes of an area of large results."""
    segments: list[tuple[int, int]]
    """(descriptor, bytes) of each stage."""
    wakes: list[list[list[int]]]
    """Four descriptors for each worker of each stage."""
    stacks: list[list[int]]
    """A descriptor for each worker of each stage."""
    engine_stack: int
    """The same for the engine."""

    def descriptors(self) -> Iterator[int]:
        """All of them."""
        yield from (fd for fd, _ in self.segments)
        yield from (fd for stage in self.wakes for worker in stage for fd in worker)
        yield from (fd for stage in self.stacks for fd in stage)
        yield self.engine_stack


class Station(msgspec.Struct, frozen=True):
    """Where the engine tells what it is on. Its cells lie behind the rings of the first stage."""

    cells: memoryview
    """See `whereabouts.py`."""
    stack_file: int
    """The descriptor that it writes its stack to when asked; see `stacks.py`."""


def lay_out(workers: Sequence[int], wanted_ring_bytes: int) -> Layout:
    """The rings of all stages, in one segment a stage. They shrink where there are many workers, or little memory.

    Behind the rings lies an area for each worker, which takes no memory until large results need it.
    """
    left = memory_left()
    memory = MOST_RING_MEMORY if left is None else min(MOST_RING_MEMORY, max(0, left) // PARTS_OF_MEMORY)
    most = memory // max(1, sum(workers)) - TASK_CAPACITY
    capacity = max(LEAST_CAPACITY, min(wanted_ring_bytes, most)) // 4096 * 4096
    area = min(RINGS_IN_AREA * capacity, MOST_AREA_MEMORY // max(1, sum(workers)) // 4096 * 4096)
    size = Wiring.size(TASK_CAPACITY, capacity)
    segments = [Segment.create(size * count + CELLS_BYTES, unreserved=area * count) for count in workers]
    wakes = [[[Wake().fd for _ in range(WAKES)] for _ in range(count)] for count in workers]
    stacks = [[make_file() for _ in range(count)] for count in workers]
    return Layout(capacity, area, [(segment.fd, segment.size) for segment in segments], wakes, stacks, make_file())


def wire(layout: Layout) -> tuple[list[list[Wiring]], Station]:
    """(the wirings of a layout, the engine's station), mapped in this process."""
    cut, size = ring_bytes(TASK_CAPACITY), Wiring.size(TASK_CAPACITY, layout.capacity)
    wirings, stations = [], []
    for (fd, whole), wakes, stacks in zip(layout.segments, layout.wakes, layout.stacks, strict=True):
        memory = memoryview(Segment(fd, whole).map)
        stage = []
        for index, fds in enumerate(wakes):
            own, at = memory[index * size : (index + 1) * size], whole - layout.area * (index + 1)
            rings = (own[:cut], own[cut:-CELLS_BYTES], TASK_CAPACITY, layout.capacity)
            one, two, three, four = map(Wake, fds)
            area = (memory[at : at + layout.area], (fd, at))
            stage.append(Wiring(*rings, one, two, three, four, *area, own[-CELLS_BYTES:], stacks[index]))
        wirings.append(stage)
        stations.append(Station(memory[len(wakes) * size :][:CELLS_BYTES], layout.engine_stack))
    return wirings, stations[0]

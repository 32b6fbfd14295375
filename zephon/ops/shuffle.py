"""shuffle: a streaming reservoir, or blocks, in each lane.

Reservoir: the buffer fills; from then on each record that enters takes the place of one chosen at random, which leaves.
Block: the buffer fills, and all of it leaves in random order. A flush lets the rest go in random order. Choices are a
hash of (window's key, running number), so no generator state exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Ref
from zephon.ops.base import check_count

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """The numbers start .. start + count - 1 of the splitmix64 sequence of `key` (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GOLDEN + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


Mode = Literal["reservoir", "block"]


class Shuffle(Accumulator):
    """A buffer of `buffer_size` records a lane. Opened afresh in every window, so it shuffles within windows."""

    method = "shuffle"
    preserves = True
    batched = True

    def __init__(self, buffer_size: int, mode: Mode = "reservoir", name: str | None = None) -> None:
        self.buffer_size = check_count("buffer_size", buffer_size, self.method, most=2**32 - 1)
        if mode not in get_args(Mode):
            raise ConfigError(f"shuffle(mode={mode!r}): it must be 'reservoir' or 'block'")
        self.mode = mode
        self.name = name
        self._held: dict[int, list[Ref]] = {}
        self._drawn: dict[int, int] = {}
        self._key: dict[int, int] = {}

    @property
    def one_to_one(self) -> bool:
        return True

    def settings(self) -> dict[str, Any]:
        return {"type": self.method, "buffer_size": self.buffer_size, "mode": self.mode}

    def open(self, lane: int, key: Key) -> None:
        self._held[lane], self._drawn[lane], self._key[lane] = [], 0, key.hash64()

    def _draw(self, lane: int, bounds: NDArray[np.uint64]) -> list[int]:
        """A random whole number below each bound (< 2^32; Lemire's multiply-shift, bias below 2^-32)."""
        numbers = splitmix64(self._key[lane], self._drawn[lane], len(bounds)) >> np.uint64(32)
        self._drawn[lane] += len(bounds)
        chosen: list[int] = ((numbers * bounds) >> np.uint64(32)).tolist()
        return chosen

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        if self.mode == "block":
            return self._push_block(lane, refs)
        emitted, held = Emitted(), self._held[lane]
        room = max(0, min(self.buffer_size - len(held), len(refs)))
        held.extend(refs[:room])
        slots = self._draw(lane, np.full(len(refs) - room, self.buffer_size, np.uint64))
        for trigger, slot in enumerate(slots, room):
            emitted.add(trigger, held[slot])
            held[slot] = refs[trigger]
        return emitted

    def _push_block(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted, at = Emitted(), 0
        while (missing := self.buffer_size - len(self._held[lane])) <= len(refs) - at:
            self._held[lane].extend(refs[at : at + missing])
            at += missing
            emitted.groups += self._let_go(lane)
            emitted.triggers += [at - 1] * self.buffer_size
        self._held[lane].extend(refs[at:])
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        emitted.groups = self._let_go(lane)
        emitted.triggers = [0] * len(emitted.groups)
        return emitted

    def _let_go(self, lane: int) -> list[Ref]:
        """All that is held, in random order."""
        held, self._held[lane] = self._held[lane], []
        # Fisher and Yates: each position, from the last, swaps with one at or before it.
        for last, slot in enumerate(reversed(self._draw(lane, np.arange(1, len(held) + 1, dtype=np.uint64)))):
            end = len(held) - 1 - last
            held[end], held[slot] = held[slot], held[end]
        return held

    @property
    def holds(self) -> int:
        return self.buffer_size

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy(), self._drawn[lane])

    def load(self, lane: int, key: Key, held: Held) -> None:
        self.open(lane, key)
        if len(held.items) > self.buffer_size - (self.mode == "block"):
            raise ValueError(f"{len(held.items):,} records are held, more than buffer_size={self.buffer_size:,}")
        self._held[lane], self._drawn[lane] = list(held.items), held.plain

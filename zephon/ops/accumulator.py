"""The contract of accumulators: single-threaded, lane-aware state that decides on metadata.

Called serially and in order. State and decisions depend only on the lane's own refs and on the window's key; a window
opens the accumulator afresh. What it emits is a list of groups; payload is touched later, by `build`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError, describe
from zephon.ops.base import Node, in_words
from zephon.ops.plain import encode_plain
from zephon.record import Record

Ref = tuple[Any, int, int]
"""(cursor, length, component): an opaque handle of a record, its measured length, the index of its dataset.

Of an accumulator that is `keyed` the second is what it measured, any plain value.
"""

Part = tuple[Any, int, int]
"""(cursor, start, stop): a piece of a record, in units of its measured length."""

Drop = tuple[int, str, int]
"""(trigger, reason, amount): what was lost on purpose, and the position of the ref that decided it."""


class Key(msgspec.Struct, frozen=True):
    """What a window's decisions may depend on, besides the refs themselves."""

    seed: int
    lane: int
    pass_index: int
    first_chunk: int
    name: str

    def hash64(self) -> int:
        """The key as one number, for counter-based random choices."""
        fields = [self.seed, self.lane, self.pass_index, self.first_chunk, self.name]
        return int.from_bytes(hashlib.blake2b(canonical_bytes(fields), digest_size=8).digest(), "little")


class Emitted:
    """What one call of an accumulator let go, in order.

    `groups[i]` was released by the ref at position `triggers[i]` of the call (never falling; ignored for a flush).
    A group is a list of parts, or, of an accumulator that `preserves` records, one of the refs it was given (its
    cursor perhaps `Attached`).
    """

    __slots__ = ("drops", "failure", "groups", "triggers")

    def __init__(self) -> None:
        self.failure: tuple[int, BaseException] | None = None
        self.triggers: list[int] = []
        self.groups: list[Any] = []
        self.drops: list[Drop] = []

    def add(self, trigger: int, group: list[Part] | Ref) -> None:
        """Releases a group because of the ref at position `trigger`."""
        self.triggers.append(trigger)
        self.groups.append(group)

    def drop(self, trigger: int, reason: str, amount: int = 1) -> None:
        """Counts a loss under one of the accumulator's `reasons`."""
        self.drops.append((trigger, reason, amount))

    def fail(self, trigger: int, error: BaseException) -> None:
        """Refuses the ref at position `trigger`: the lane ends there with this error. Only the first one counts."""
        if self.failure is None:
            self.failure = (trigger, error)


class Held(msgspec.Struct, frozen=True):
    """What an accumulator holds of a lane between two pushes, without payload.

    `items`: refs or parts, (cursor, number, number), in an order that only the accumulator need understand. `plain`:
    whatever else it must know, as plain data: None, bools, numbers, text, bytes, lists and dicts of these, which come
    back from msgpack as they were. Anything else is refused, see `ops/plain.py`.
    """

    items: Sequence[tuple[Any, int, int]] = ()
    plain: Any = None


def check_held(held: object) -> Held:
    """What `state` returned, if it is a Held that a state carries. Raises TypeError."""
    if not isinstance(held, Held):
        raise TypeError(f"state() returned {type(held).__name__}: a zephon.Held is wanted")
    try:
        encode_plain(held.plain, "Held.plain")
    except TypeError as error:
        raise TypeError(f"{error}; give None, bools, numbers, text, bytes, lists and dicts of these") from error
    return held


class Accumulator(Node):
    """Regroups or reorders the records of each lane; subclass it, and give `open`, `push`, `flush` and `build`.

    `state` and `load` say what it holds, so that a restart can go on in the middle of a window. They are used where
    every accumulator of the pipeline has both; else a restart reads the open window again, and
    `flush_every_k_chunks=0`, where no window ever ends, is a ConfigError.

    `preserves`: it emits the refs themselves, whole and unchanged (a shuffle), and needs no `build`.
    `measures`: it wants lengths; `measure` then runs in the workers for every record.
    `keyed`: what `measure` gives is no length but any plain value, for this accumulator alone: it emits length 1.
    `batched`: `push` may be given several refs at once; else it gets them one by one.
    `reads`: the fields of a record that `build` looks at, where it is not all of them; others may be missing there.

    One that can do better than `build` and stack its records may also have `collate(groups, empty)`: the fields of a
    batch of groups, whose parts are (handle, start, stop), as `build` and `stack_records` would make them. A handle's
    record is `record_of(handle)`; `empty(shape, dtype)` gives the memory of an array.
    """

    preserves: bool = False
    measures: bool = False
    keyed: bool = False
    batched: bool = False
    reads: tuple[str, ...] | None = None

    def measure(self, record: Record) -> int:
        """The length of a record, in the accumulator's own unit (tokens, bytes). Runs in the workers."""
        return 1

    def open(self, lane: int, key: Key) -> None:
        """Begins a window of a lane with no held refs."""
        raise ConfigError(f"{type(self).__qualname__} must define open(self, lane, key)")

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        """Takes the lane's next refs. Cutting them into more calls must not change what is emitted."""
        raise ConfigError(f"{type(self).__qualname__} must define push(self, lane, refs)")

    def flush(self, lane: int) -> Emitted:
        """Ends the window: lets everything go that is held."""
        raise ConfigError(f"{type(self).__qualname__} must define flush(self, lane)")

    @property
    def holds(self) -> int:
        """About how many refs it holds of a lane, at most: how often a state of it is worth taking."""
        return 1

    def state(self, lane: int) -> Held:
        """What is held of the lane now. Nothing that is pushed later may change the value returned."""
        raise ConfigError(f"{type(self).__qualname__} must define state(self, lane)")

    def load(self, lane: int, key: Key, held: Held) -> None:
        """In place of `open`: goes on where `state` was taken. The cursors are others, for the same records.

        `key` is the one that the window was opened with. Raises ValueError for what is no state of this accumulator.
        """
        raise ConfigError(f"{type(self).__qualname__} must define load(self, lane, key, held)")

    @property
    def has_state(self) -> bool:
        """Whether the class has `state` and `load` of its own."""
        kind = type(self)
        return kind.state is not Accumulator.state and kind.load is not Accumulator.load

    def check_windows(self, flush_every: int) -> None:
        """Raises ConfigError where it does not work with flushes of a lane every so many chunks; 0: at its end only."""

    def group_length(self, group: list[Part]) -> int:
        """The measured length of a built group."""
        return sum(stop - start for _, start, stop in group)

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        """One record out of the pieces (record, start, stop) of a group."""
        raise ConfigError(f"{type(self).__qualname__} must define build(self, parts)")


def own_copy(accumulator: Accumulator) -> Accumulator:
    """A copy that shares no state. Raises ConfigError, which names an attribute that cannot be copied."""
    try:
        return copy.deepcopy(accumulator)
    except Exception as error:
        raise ConfigError(
            f"{in_words(accumulator)}{_uncopied(accumulator)}: {describe(error)}; an accumulator is copied for each "
            "run, and its attributes with it: let it hold plain values and functions, and nothing that is open"
        ) from error


def _uncopied(accumulator: Accumulator) -> str:
    """The first attribute that cannot be copied, in words."""
    for name, value in vars(accumulator).items():
        try:
            copy.deepcopy(value)
        except Exception:
            return f", {name!r}"
    return ""

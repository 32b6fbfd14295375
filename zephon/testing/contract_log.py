"""Running an accumulator under the eyes of the contract: what it let go, ref by ref, and whether that has its form."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zephon.errors import describe
from zephon.ops.accumulator import Accumulator, Emitted, Key, Ref
from zephon.record import Attached
from zephon.testing.contract_base import broken

FLUSH = 1 << 30  # the trigger of what a flush lets go: behind every ref


class Let(NamedTuple):
    """One thing that an accumulator let go: by which ref of the window, and "group", "drop" or "failure" with its
    value."""

    trigger: int
    kind: str
    value: Any


class Window(NamedTuple):
    """The refs of one lane between two openings."""

    lane: int
    key: Key
    refs: list[Ref]

    def single(self) -> range:
        """The cuts of one ref a push."""
        return range(1, len(self.refs))


def run_window(accumulator: Accumulator, window: Window, cuts: Sequence[int] | None = None) -> list[Let]:
    """The log of one window from open to flush: one ref a push, or cut at `cuts`."""
    return interleaved([(accumulator, window)], random.Random(0), cuts)[0]


def interleaved(
    pairs: Sequence[tuple[Accumulator, Window]], rng: random.Random, cuts: Sequence[int] | None = None
) -> list[list[Let]]:
    """The logs of several windows at once: all open, then their pushes mixed at random, then all flush."""
    for accumulator, window in pairs:
        _guarded(accumulator, "open", lambda a=accumulator, w=window: a.open(w.lane, w.key))  # type: ignore[misc]
    waiting = {i: pushes(*pair, cuts) for i, pair in enumerate(pairs)}
    logs: list[list[Let]] = [[] for _ in pairs]
    while waiting:
        i = rng.choice(list(waiting))
        lets = next(waiting[i], None)
        if lets is None or failed(logs[i]):
            del waiting[i]
        else:
            logs[i] += lets
    for (accumulator, window), log in zip(pairs, logs, strict=True):
        if not failed(log):
            log += flush(accumulator, window.lane)
    return logs


def failed(log: Sequence[Let]) -> bool:
    """Whether the accumulator refused a ref: the lane ends there."""
    return bool(log) and log[-1].kind == "failure"


def pushes(accumulator: Accumulator, window: Window, cuts: Sequence[int] | None = None) -> Iterator[list[Let]]:
    """What each push lets go; the pushes are cut at `cuts`, or hold one ref each."""
    for start, stop in pairwise([0, *(window.single() if cuts is None else cuts), len(window.refs)]):
        if start < stop or cuts is not None:  # only a `batched` accumulator is called without refs
            yield _push(accumulator, window.lane, window.refs[start:stop], start)


def _guarded(accumulator: Accumulator, method: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise broken(accumulator, f"raised in {method}(): {describe(error)}") from error


def _emitted(accumulator: Accumulator, method: str, call: Callable[[], Any]) -> Emitted:
    emitted = _guarded(accumulator, method, call)
    if not isinstance(emitted, Emitted):
        raise broken(accumulator, f"returned {type(emitted).__name__} from {method}(): a zephon.Emitted is wanted")
    return emitted


def _push(accumulator: Accumulator, lane: int, refs: list[Ref], start: int) -> list[Let]:
    """The log of one push; checks that triggers are in range and never fall."""
    emitted = _emitted(accumulator, "push", lambda: accumulator.push(lane, refs))
    if len(emitted.triggers) != len(emitted.groups):
        raise broken(
            accumulator,
            f"gave {len(emitted.groups)} groups and {len(emitted.triggers)} triggers from push(): release every group "
            "by emitted.add(trigger, group)",
        )
    failure = [emitted.failure[0]] if emitted.failure else []
    for trigger in (*emitted.triggers, *failure, *(trigger for trigger, _, _ in emitted.drops)):
        if isinstance(trigger, bool) or not isinstance(trigger, int) or not 0 <= trigger < len(refs):
            raise broken(
                accumulator,
                f"gave the trigger {trigger!r} for {len(refs)} refs: a trigger is the position, in this push, of the "
                "ref that decided it",
            )
    if emitted.triggers != sorted(emitted.triggers):
        raise broken(
            accumulator,
            f"gave falling triggers {emitted.triggers}: groups leave in the order of the refs that release them",
        )
    lets = _lets(accumulator, emitted, emitted.triggers)
    if emitted.failure is not None:
        at, error = emitted.failure
        lets = [let for let in lets if let.trigger < at] + [Let(at, "failure", describe(error))]
    return [let._replace(trigger=start + let.trigger) for let in sorted(lets, key=lambda let: let.trigger)]


def flush(accumulator: Accumulator, lane: int) -> list[Let]:
    """What a flush lets go."""
    emitted = _emitted(accumulator, "flush", lambda: accumulator.flush(lane))
    lets = _lets(accumulator, emitted, [FLUSH] * len(emitted.groups))
    return [let._replace(trigger=FLUSH) for let in lets]


def check_flushed(accumulator: Accumulator, window: Window) -> None:
    """A flush lets everything go at once: a second one finds nothing."""
    if failed(run_window(accumulator, window)):
        return
    again = flush(accumulator, window.lane)
    if again:
        raise broken(
            accumulator,
            f"still holds something after flush(): a second one let {len(again)} more go; flush must let everything go "
            "at once, and forget it",
        )


def _lets(accumulator: Accumulator, emitted: Emitted, triggers: Sequence[int]) -> list[Let]:
    lets = [Let(t, "group", _group(accumulator, group)) for t, group in zip(triggers, emitted.groups, strict=True)]
    return lets + [Let(t, "drop", _dropped(accumulator, reason, amount)) for t, reason, amount in emitted.drops]


def _group(accumulator: Accumulator, group: Any) -> Any:
    """A group as a value that compares: a ref of an accumulator that preserves, else a list of parts."""
    if accumulator.preserves:
        if not isinstance(group, tuple) or len(group) != 3:
            raise broken(
                accumulator,
                f"says preserves = True and emitted {group!r}: it must emit the refs that it was given, one at a time, "
                "as they are",
            )
        return (_unwrapped(group[0]), *group[1:]) if accumulator.keyed else group
    if not isinstance(group, list) or not group or any(not isinstance(p, tuple) or len(p) != 3 for p in group):
        raise broken(
            accumulator,
            f"emitted {group!r}: a group is a list of at least one (cursor, start, stop); to emit refs as they are, "
            "set preserves = True",
        )
    return list(group)


class Written(NamedTuple):
    """A cursor on which a keyed accumulator wrote a value."""

    cursor: Any
    value: Any


def _unwrapped(cursor: Any) -> Any:
    return Written(cursor.parts[0][0], cursor.value) if isinstance(cursor, Attached) else cursor


def _dropped(accumulator: Accumulator, reason: Any, amount: Any) -> tuple[str, int]:
    if reason not in accumulator.reasons:
        raise broken(
            accumulator,
            f"drops for the reason {reason!r}, which it does not declare: give the class "
            f"reasons = {(*accumulator.reasons, reason)!r}",
        )
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 1:
        raise broken(accumulator, f"drops {amount!r} for {reason!r}: a whole number of at least 1 is wanted")
    return reason, amount


def check_covered(accumulator: Accumulator, window: Window, log: Sequence[Let]) -> None:
    """Every unit of every ref leaves once, in range, in its own window; what does not is declared a loss."""
    if failed(log):
        return
    whole = [(ref[0], 1, ref[2]) for ref in window.refs] if accumulator.keyed else window.refs
    refs = {ref[0]: ref for ref in whole}
    pieces: dict[Any, list[tuple[int, int]]] = {cursor: [] for cursor in refs}
    for let in log:
        if let.kind == "group":
            for part in [let.value] if accumulator.preserves else let.value:
                _take_piece(accumulator, part, refs, pieces)
    drops = [let.value for let in log if let.kind == "drop"]
    dropped = sum(amount for reason, amount in drops if reason not in accumulator.notes)
    lost = [i for i, ref in enumerate(whole) if not _is_whole(accumulator, ref[1], pieces[ref[0]])]
    if len(lost) > dropped:
        raise broken(
            accumulator,
            f"lost records: {len(lost)} of {len(refs)} did not leave completely by the flush (the first is number "
            f"{lost[0]} of its window), and {dropped} were counted as dropped; emit them, or count them with "
            "emitted.drop(trigger, reason) under one of `reasons`",
        )


def _take_piece(
    accumulator: Accumulator, part: Any, refs: dict[Any, Ref], pieces: dict[Any, list[tuple[int, int]]]
) -> None:
    """Notes one emitted part, after a look at its cursor and range."""
    if isinstance(part[0], Written):
        part = (part[0].cursor, *part[1:])
    cursor, start, stop = part
    if cursor not in refs:
        raise broken(
            accumulator,
            f"emitted the cursor {cursor!r}, which was not pushed in this window of this lane: a flush leaks into the "
            "next window, or open() does not reset, or lanes share state",
        )
    ref = refs[cursor]
    if accumulator.preserves:
        if part != ref:
            raise broken(
                accumulator, f"says preserves = True and emitted {part!r} for {ref!r}: refs must leave unchanged"
            )
        start, stop = 0, ref[1]
    elif not all(isinstance(n, (int, np.integer)) for n in (start, stop)) or not 0 <= start <= stop <= ref[1]:
        raise broken(
            accumulator, f"emitted the range {start}..{stop} of a record of length {ref[1]}: it must lie in 0..{ref[1]}"
        )
    pieces[cursor].append((int(start), int(stop)))


def _is_whole(accumulator: Accumulator, length: int, pieces: list[tuple[int, int]]) -> bool:
    """Whether the pieces are the whole record. Raises ContractBroken where one comes twice."""
    at, is_whole = 0, bool(pieces)
    for start, stop in sorted(pieces):
        if start < at or (length == 0 and len(pieces) > 1):
            raise broken(
                accumulator,
                f"doubled a record: units {start}..{min(at, stop)} of {length} left more than once; emit each (cursor, "
                "start, stop) once",
            )
        is_whole &= start == at
        at = stop
    return is_whole and at == length

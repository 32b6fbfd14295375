"""The contract of accumulators: decisions from the lane's own refs and the key, nothing lost, nothing doubled.

A script of windows is run several ways: each one alone in a fresh instance, one ref at a time (the truth to compare
with); all lanes mixed in one instance; one window after the other; cut into pushes at random; in copies.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from zephon.canonical import canonical_bytes
from zephon.errors import describe
from zephon.ipc.columns import make_columns
from zephon.ops.accumulator import Accumulator, Held, Key, Ref, check_held
from zephon.ops.batch import stack_records
from zephon.ops.stateful_map import StatefulMap
from zephon.record import Block, Lineage, Record
from zephon.testing.contract_base import ContractBroken, broken, check_settings, content, travelled
from zephon.testing.contract_log import (
    Let,
    Window,
    check_covered,
    check_flushed,
    failed,
    flush,
    interleaved,
    pushes,
    run_window,
)

_WINDOWS = 3
_ENDS = 8  # a window is also ended before each of its last refs, and at as many random ones

Make = Callable[[], Accumulator]
Log = Sequence[Let]


def check_accumulator(make: Make, records: Sequence[Record], lanes: int = 3, seed: int = 0) -> None:
    """Raises ContractBroken where what `make` gives does not keep the contract of accumulators.

    make: gives a fresh instance each time. records: what the pipeline would push; `measure` and `build` see them.
    lanes: how many lanes share one instance.

    Checked: it survives deepcopy and cloudpickle; settings() are plain and stable; the same refs and key give the same
    in another instance, among other lanes, in other cuts (where `batched`) and after open; triggers and (cursor, start,
    stop) are in range; every unit of every ref leaves exactly once, or is dropped under a declared reason; a flush lets
    everything go; a state taken anywhere and loaded elsewhere goes on the same; `preserves` is true; build and measure
    are functions of what they are given.
    """
    first = make()
    if not isinstance(first, Accumulator):
        raise ContractBroken(f"{type(first).__name__} is no zephon.Accumulator: make it a subclass")
    if len(records) < 2 or lanes < 2:
        raise ContractBroken("check_accumulator needs two lanes, and twenty records or so of different lengths")
    rng = random.Random(seed)
    windows = _windows(first, _measured(first, records), lanes, rng)
    truth = [run_window(make(), window) for window in windows]
    for window, log in zip(windows, truth, strict=True):
        check_flushed(make(), window)
        check_covered(first, window, log)
    _flushed_anywhere(make, windows[0], random.Random(seed))
    _same_key(make, windows, truth)
    _copies(make, windows[0], truth[0], rng)
    _lanes_apart(make, windows, truth, lanes, rng)
    _windows_apart(make, windows, truth)
    _reopened(make, windows[0], truth[0])
    if first.batched:
        _cuts(make, windows, truth, rng)
    if first.has_state:
        _resumed(make, windows, truth, rng)
    check_settings(first, lambda: [run_window(first, window) for window in windows])
    if not first.preserves:
        _built(make(), records, truth)


def _measured(accumulator: Accumulator, records: Sequence[Record]) -> list[int]:
    """The lengths of the records, as the workers take them."""
    return [_length(accumulator, i, record) if accumulator.measures else 1 for i, record in enumerate(records)]


def _length(accumulator: Accumulator, i: int, record: Record) -> int:
    before = content(record, accumulator)
    try:
        length, again = accumulator.measure(record), accumulator.measure(record)
    except Exception as error:
        raise broken(accumulator, f"raised in measure() on record {i}: {describe(error)}") from error
    if not accumulator.keyed and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
        raise broken(
            accumulator,
            f"gave the length {length!r} for record {i} from measure(): a whole number, 0 or more, is wanted",
        )
    if again != length or content(record, accumulator) != before:
        raise broken(
            accumulator,
            f"has a measure() that is no function of the record: record {i} had another length the second time, or was "
            "changed by it",
        )
    return length


def _windows(accumulator: Accumulator, lengths: Sequence[int], lanes: int, rng: random.Random) -> list[Window]:
    """Each lane's windows, one row of lanes after the other. A cursor is (lane, window, number of the record)."""
    name = accumulator.name or accumulator.method
    windows = []
    for number in range(_WINDOWS):
        for lane in range(lanes):
            is_empty = number == 1 and lane == 0  # all its records were filtered away before
            chosen = [] if is_empty else rng.sample(range(len(lengths)), len(lengths))
            refs: list[Ref] = [((lane, number, i), lengths[i], i % 2) for i in chosen]
            windows.append(Window(lane, Key(17, lane, 0, 8 * number, name), refs))
    return windows


def _same(one: Log, other: Log) -> bool:
    """Whether two logs are equal; groups and drops are ordered among themselves, between them only by trigger."""
    return [let for let in one if let.kind != "drop"] == [let for let in other if let.kind != "drop"] and sorted(
        let for let in one if let.kind == "drop"
    ) == sorted(let for let in other if let.kind == "drop")


def _flushed_anywhere(make: Make, window: Window, rng: random.Random) -> None:
    """A flush behind any number of refs loses nothing: a whole window may leave no rest to let go."""
    length = len(window.refs)
    ends = {*range(max(1, length - _ENDS), length), *rng.sample(range(1, length), min(_ENDS, length - 1))}
    for end in sorted(ends):
        accumulator, ended = make(), window._replace(refs=window.refs[:end])
        check_flushed(make(), ended)
        check_covered(accumulator, ended, run_window(accumulator, ended))


def _remedy(accumulator: Accumulator) -> str:
    """Where random numbers may come from. A machine has no key of a window."""
    if isinstance(accumulator, StatefulMap):
        return "let the machine decide by its state and the keys of records alone"
    return "draw random numbers from key.hash64()"


def _same_key(make: Make, windows: Sequence[Window], truth: Sequence[Log]) -> None:
    for window, log in zip(windows, truth, strict=True):
        other = make()
        if not _same(run_window(other, window), log):
            raise broken(
                other,
                "decides by something else than the refs and the key: two instances with the same key let different "
                f"things go; {_remedy(other)}, and use neither the clock nor a global",
            )


def _copies(make: Make, window: Window, log: Log, rng: random.Random) -> None:
    """deepcopy and cloudpickle give instances that work, and that share nothing with the first."""
    original = make()
    try:
        copied = copy.deepcopy(original)
    except Exception as error:
        raise broken(
            original,
            f"cannot be copied by copy.deepcopy: {describe(error)}; an engine works on a copy of its own, so leave "
            "locks, files and models out",
        ) from error
    for each in interleaved([(original, window), (copied, window), (travelled(original), window)], rng):
        if not _same(each, log):
            raise broken(
                original,
                "shares state with its copies: what is pushed to one shows in another; make all state in __init__ and "
                "open(), none of it in the class or the module",
            )


def _windows_apart(make: Make, windows: Sequence[Window], truth: Sequence[Log]) -> None:
    """The windows of one lane one after the other in one instance."""
    for lane in sorted({window.lane for window in windows}):
        accumulator = make()
        for window, log in zip(windows, truth, strict=True):
            if window.lane != lane:
                continue
            found = run_window(accumulator, window)
            check_covered(accumulator, window, found)
            if not _same(found, log):
                raise broken(
                    accumulator,
                    "remembers something of the window before: open(lane, key) must begin afresh, with the key",
                )


def _reopened(make: Make, window: Window, log: Log) -> None:
    """A window that is opened without a flush of the one before: a run that starts anew."""
    accumulator = make()
    accumulator.open(window.lane, window.key)
    half = window._replace(refs=window.refs[: -(-len(window.refs) // 2)])
    list(pushes(accumulator, half))
    if not _same(run_window(accumulator, window), log):
        raise broken(
            accumulator,
            "does not reset in open(): what was held before shows in the new window; open(lane, key) must begin with "
            "nothing held, and reset counters and random numbers",
        )


def _lanes_apart(make: Make, windows: Sequence[Window], truth: Sequence[Log], lanes: int, rng: random.Random) -> None:
    """All lanes at once in one instance, their refs mixed at random."""
    for first in range(0, len(windows), lanes):
        accumulator, row = make(), range(first, first + lanes)
        for at, log in zip(row, interleaved([(accumulator, windows[at]) for at in row], rng), strict=True):
            if not _same(log, truth[at]):
                raise broken(
                    accumulator,
                    f"keeps state across lanes: lane {windows[at].lane} lets other things go when other lanes come "
                    "between; keep all state in dictionaries by lane",
                )


def _cuts(make: Make, windows: Sequence[Window], truth: Sequence[Log], rng: random.Random) -> None:
    """`batched`: the same refs in other pushes, also all in one, and empty ones."""
    for window, log in zip(windows, truth, strict=True):
        middle, inside = len(window.refs) // 2, window.single()
        for cuts in ([], [0, middle, middle], sorted(rng.sample(inside, len(inside) // 3))):
            accumulator = make()
            if not _same(run_window(accumulator, window, cuts), log):
                raise broken(
                    accumulator,
                    "depends on how refs are cut into pushes: the same refs in other pushes let other things go; "
                    "decide ref by ref, or set batched = False",
                )


def _resumed(make: Make, windows: Sequence[Window], truth: Sequence[Log], rng: random.Random) -> None:
    """A state taken between any two refs, and loaded into a fresh instance: the window goes on as it would have."""
    for window, log in zip(windows, truth, strict=True):
        accumulator, so_far, at = make(), list[Let](), 0
        accumulator.open(window.lane, window.key)
        for stop in sorted(rng.sample(range(len(window.refs) + 1), min(8, len(window.refs) + 1))):
            so_far += _moved(pushes(accumulator, window._replace(refs=window.refs[at:stop])), at)
            if failed(so_far):
                break
            at, held = stop, _held(accumulator, window)
            before, other = copy.deepcopy(held), make()
            other.load(window.lane, window.key, Held(list(held.items), _back(held.plain)))
            rest = _moved(pushes(other, window._replace(refs=window.refs[at:])), at)
            rest += [] if failed(rest) else flush(other, window.lane)
            if not _same(so_far + rest, log):
                raise broken(
                    other,
                    f"does not go on where its state was taken: with the state behind ref {at} of {len(window.refs)} "
                    "other things were let go; state(lane) must say all that later decisions depend on",
                )
            list(pushes(accumulator, window._replace(refs=window.refs[at : at + 1])))
            accumulator.load(window.lane, window.key, before)
            if held != before:
                raise broken(accumulator, "changes a state that it gave away before: state(lane) must return copies")


def _moved(lets: Iterable[list[Let]], by: int) -> list[Let]:
    """A log with its triggers counted from the window's start, up to a failure."""
    log: list[Let] = []
    for some in lets:
        log += [let._replace(trigger=by + let.trigger) for let in some]
        if failed(log):
            break
    return log


def _held(accumulator: Accumulator, window: Window) -> Held:
    """The state, if it has its form."""
    known = {ref[0] for ref in window.refs}
    try:
        state = accumulator.state(window.lane)
    except Exception as error:
        raise broken(accumulator, f"raised in state(): {describe(error)}") from error
    try:
        held = check_held(state)
    except TypeError as error:
        raise broken(accumulator, f"gives a state that cannot be kept: {error}") from error
    for item in held.items:
        if not (isinstance(item, tuple) and len(item) == 3 and item[0] in known):
            raise broken(accumulator, f"holds {item!r}: refs or parts are wanted, (cursor, number, number)")
    return held


def _back(plain: Any) -> Any:
    """Plain data as a state gives it back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))


def _built(accumulator: Accumulator, records: Sequence[Record], truth: Sequence[Log]) -> None:
    """build, group_length and collate are functions of the pieces, and leave the records as they are."""
    groups = [let.value for log in truth for let in log if let.kind == "group"]
    if accumulator.reads is not None:  # all that is left of the records
        records = [{name: record[name] for name in accumulator.reads if name in record} for record in records]
    built = [_build(accumulator, _pieces(records, group)) for group in groups]
    for group in groups:
        length = accumulator.group_length(group)
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise broken(accumulator, f"gave the length {length!r} from group_length(): a whole number is wanted")
    collate: Any = getattr(accumulator, "collate", None)
    if collate is None or not groups:
        return
    for kept in (copy.deepcopy(list(records)), make_columns(records)):  # as they are, and as a worker sends them
        block = Block(kept, Lineage([], range(len(records))))
        parts = [[(block[cursor[2]], start, stop) for cursor, start, stop in group] for group in groups]
        columns = collate(parts, np.empty)
        if canonical_bytes({name: columns[name] for name in sorted(columns)}) != canonical_bytes(stack_records(built)):
            raise broken(accumulator, "gives another batch from collate() than from build() record by record")


def _pieces(records: Sequence[Record], group: Any) -> list[tuple[Record, int, int]]:
    return [(copy.deepcopy(records[cursor[2]]), start, stop) for cursor, start, stop in group]


def _build(accumulator: Accumulator, pieces: list[tuple[Record, int, int]]) -> Record:
    before = content([record for record, _, _ in pieces], accumulator)
    try:
        made = accumulator.build(pieces)
        if not isinstance(made, dict):
            raise broken(accumulator, f"returned {type(made).__name__} from build(): a dict is wanted")
        first, second = content(made, accumulator), content(accumulator.build(pieces), accumulator)
    except ContractBroken:
        raise
    except Exception as error:
        raise broken(accumulator, f"raised in build(): {describe(error)}") from error
    if content([record for record, _, _ in pieces], accumulator) != before:
        raise broken(accumulator, "changes the records that it is given in build(): copy what you change")
    if second != first:
        raise broken(accumulator, "has a build() that is no function of the pieces: twice the same gave two records")
    return made

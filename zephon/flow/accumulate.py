"""The accumulators behind one pool, called lane by lane in order, on metadata alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from zephon.errors import CheckpointError, ZephonError, describe
from zephon.flow.held import Rows, Table, load_held, write_held
from zephon.flow.task import Drop, Mark, Run
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Ref, check_held
from zephon.ops.base import as_zephon_error, let_through
from zephon.record import Block, Group, Handle, Pointers, event_place, first_origin


class Chain:
    """A row of accumulators. What one emits, the next one takes; every flush runs through all of them, in order."""

    def __init__(
        self,
        accumulators: list[Accumulator],
        seed: int,
        describe: Callable[[Handle], str],
        interrupts: bool = False,
        note: Callable[[Accumulator | None, int], None] = lambda accumulator, lane: None,
    ) -> None:
        """`note` is called where a call of an accumulator begins, with the lane; with None once they are done."""
        self.accumulators, self._seed, self._describe = accumulators, seed, describe
        self._interrupts, self._note = interrupts, note
        self.rows = Rows([], [], [])
        """Those of the engine, to be set before the first push."""

    def __bool__(self) -> bool:
        return bool(self.accumulators)

    def open(self, lane: int, pass_index: int, chunk: int) -> None:
        """Begins a window of a lane: every accumulator starts afresh."""
        for accumulator in self.accumulators:
            name = accumulator.name or accumulator.method
            self._note(accumulator, lane)
            try:
                accumulator.open(lane, Key(self._seed, lane, pass_index, chunk, name))
            except BaseException as error:
                let_through(error, self._interrupts)
                raise as_zephon_error(error, name, f"lane {lane}, opening the window at chunk {chunk}") from error

    def load(
        self, lane: int, key: tuple[int, int], table: Table, handles: dict[int, Handle], lengths: dict[int, Any]
    ) -> None:
        """In place of `open`: every accumulator holds again what it held. key: (pass, the window's first chunk)."""
        names = [accumulator.name or accumulator.method for accumulator in self.accumulators]
        try:
            if names != table.names:
                raise ValueError(f"the state was written with {table.names}, this pipeline has {names} there")
            all_held = load_held(table, self.accumulators, handles, lengths)
            for name, accumulator, held in zip(names, self.accumulators, all_held, strict=True):
                self._note(accumulator, lane)
                accumulator.load(lane, Key(self._seed, lane, *key, name), held)
        except Exception as error:
            raise CheckpointError(
                f"lane {lane}: what its accumulators held when the state was taken does not fit this pipeline: "
                f"{describe(error)}; make the pipeline that of the state, or load an older one"
            ) from error

    def _save(self, lane: int, mark: Mark) -> Mark:
        """The mark with what is held behind it."""
        held: list[tuple[str, Held]] = []
        name = ""
        try:
            for accumulator in self.accumulators:
                name = accumulator.name or accumulator.method
                held.append((name, check_held(accumulator.state(lane))))
            saved = (*mark.saved, write_held(self.rows, len(mark.saved), held, mark.event + 1))
        except BaseException as error:
            let_through(error, self._interrupts)
            return Mark("error", mark.event, as_zephon_error(error, name, f"lane {lane}, at a state"))
        num_held = mark.num_held + sum(len(each.items) for _, each in held)
        return msgspec.structs.replace(mark, saved=saved, num_held=num_held)

    def push(self, run: Run) -> Run:
        """The run that comes out when `run` goes in."""
        if not self.accumulators:
            return run
        refs, events, mark = _refs(run), run.events, run.mark
        drops = list(run.drops)
        for accumulator in self.accumulators:
            refs, events, failed = self._through(accumulator, run.lane, refs, events, mark, drops)
            mark = failed or mark
        through = run.through
        if mark is not None and mark.kind == "error":  # what the event that failed dropped is not decided
            through = mark.event - 1
            drops = [drop for drop in drops if drop[0] <= through]
        drops.sort(key=lambda drop: drop[0])  # stable: each accumulator's own drops are in order already
        if mark is not None and mark.kind == "flush":
            self.open(run.lane, run.pass_index, event_place(mark.event)[0] + 1)
        elif mark is not None and mark.kind == "save":
            mark = self._save(run.lane, mark)
        self._note(None, run.lane)
        handles = [ref[0] for ref in refs]
        return Run(run.lane, run.pass_index, handles, events, through, None, drops, mark, run.num_pointers)

    def _through(
        self,
        accumulator: Accumulator,
        lane: int,
        refs: Sequence[Ref],
        events: Sequence[int],
        mark: Mark | None,
        drops: list[Drop],
    ) -> tuple[list[Ref], list[int], Mark | None]:
        """Pushes refs through one accumulator, and flushes it at the mark. Returns what came out."""
        name = accumulator.name or accumulator.method
        emitted, out = self._push(accumulator, name, lane, refs)
        out_events = [events[trigger] for trigger in emitted.triggers]
        drops.extend((events[trigger], f"{name}.{reason}", n) for trigger, reason, n in emitted.drops)
        if emitted.failure is not None:
            at, error = emitted.failure
            return out, out_events, Mark("error", events[at], _known(error))
        if mark is None or not mark.flushes:
            return out, out_events, None
        flushed, more = self._call(accumulator, name, lane, None, f"lane {lane}, at a flush")
        drops.extend((mark.event, f"{name}.{reason}", n) for _, reason, n in flushed.drops)
        failed = Mark("error", mark.event, _known(flushed.failure[1])) if flushed.failure is not None else None
        return out + more, out_events + [mark.event] * len(more), failed

    def _push(self, accumulator: Accumulator, name: str, lane: int, refs: Sequence[Ref]) -> tuple[Emitted, list[Ref]]:
        """One call, or one call a ref where the accumulator asks for that."""
        if not refs:
            return Emitted(), []
        if accumulator.batched:
            return self._call(accumulator, name, lane, refs, None)
        whole = Emitted()
        out: list[Ref] = []
        for at, ref in enumerate(refs):
            one, made = self._call(accumulator, name, lane, [ref], None)
            out += made
            whole.triggers += [at] * len(made)
            whole.drops += [(at, reason, n) for _, reason, n in one.drops]
            if one.failure is not None:
                whole.failure = (at, one.failure[1])
                break
        return whole, out

    def _call(
        self, accumulator: Accumulator, name: str, lane: int, refs: Sequence[Ref] | None, where: str | None
    ) -> tuple[Emitted, list[Ref]]:
        """A push, or (refs None) a flush, and what it let go as refs. What it raises is the failure of a ref.

        Nothing is kept of a ref that failed, nor of those behind it.
        """
        emitted, out = Emitted(), []
        is_last = accumulator is self.accumulators[-1]
        self._note(accumulator, lane)
        try:
            emitted = _checked(accumulator.flush(lane) if refs is None else accumulator.push(lane, refs), refs)
            for group in emitted.groups:  # a loop: inside a generator a StopIteration would become another error
                out.append(_ref(accumulator, group, is_last))  # noqa: PERF401
        except BaseException as error:
            let_through(error, self._interrupts)
            emitted.fail(emitted.triggers[len(out)] if len(out) < len(emitted.triggers) else 0, error)
        if emitted.failure is not None:
            at, problem = emitted.failure
            let_through(problem, self._interrupts)
            where = where or self._describe((refs or [])[at][0])
            emitted.failure = (at, as_zephon_error(problem, name, where))
            kept = len(out) if refs is None else bisect_left(emitted.triggers, at, 0, len(out))
            del out[kept:]
        del emitted.triggers[len(out) :]
        return emitted, out


def _checked(emitted: object, refs: Sequence[Ref] | None) -> Emitted:
    """What an accumulator returned, if it keeps the contract."""
    if not isinstance(emitted, Emitted):
        raise TypeError(f"it returned {type(emitted).__name__}, not Emitted")
    triggers = emitted.triggers
    if refs is not None and len(triggers) != len(emitted.groups):
        raise TypeError(f"it emitted {len(emitted.groups)} groups and {len(triggers)} triggers; use emitted.add")
    if refs is not None and triggers and (triggers[0] < 0 or triggers[-1] >= len(refs) or sorted(triggers) != triggers):
        raise ValueError(f"triggers must not fall, and lie below {len(refs)}, the number of refs of the push")
    return emitted


def _known(error: BaseException) -> ZephonError:
    assert isinstance(error, ZephonError)
    return error


def _refs(run: Run) -> list[Ref]:
    samples = run.samples
    lengths = run.lengths or [1] * len(samples)
    if isinstance(samples, Block) and isinstance(samples.lineage.items, Pointers):
        handles: list[Handle] = [(samples, i) for i in range(len(samples))]
        datasets = samples.lineage.items.dataset.tolist()
        components = [datasets[item] for item in samples.lineage.index]
    else:
        handles = [samples[i] for i in range(len(samples))]
        components = list(map(_component, handles))
    return list(zip(handles, lengths, components, strict=True))


def _component(handle: Handle) -> int:
    return first_origin(handle)[0]


def _ref(accumulator: Accumulator, group: object, is_last: bool) -> Ref:
    """What one accumulator emitted, as the next one takes it. Behind the last one nobody asks for the component."""
    if accumulator.preserves:
        if not (isinstance(group, tuple) and len(group) == 3 and isinstance(group[0], (tuple, Group))):
            raise TypeError("it has preserves = True, so it must emit the refs that it was given, not groups of parts")
        return group
    parts: list[tuple[Handle, int, int]] = group  # type: ignore[assignment]
    return Group(accumulator, parts), accumulator.group_length(parts), 0 if is_last else _component(parts[0][0])

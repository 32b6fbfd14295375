"""The accumulators behind one pool, called lane by lane in order, on metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zephon.errors import ZephonError
from zephon.flow.task import Drop, Mark, Run
from zephon.ops.accumulator import Accumulator, Emitted, Key, Ref
from zephon.ops.base import as_zephon_error
from zephon.record import Group, Handle, event_place, origins_of


class Chain:
    """A row of accumulators. What one emits, the next one takes; every flush runs through all of them, in order."""

    def __init__(self, accumulators: list[Accumulator], seed: int, describe: Callable[[Handle], str]) -> None:
        self._accumulators, self._seed, self._describe = accumulators, seed, describe

    def __bool__(self) -> bool:
        return bool(self._accumulators)

    def open(self, lane: int, pass_index: int, chunk: int) -> None:
        """Begins a window of a lane: every accumulator starts afresh."""
        for accumulator in self._accumulators:
            name = accumulator.name or accumulator.method
            accumulator.open(lane, Key(self._seed, lane, pass_index, chunk, name))

    def push(self, run: Run) -> Run:
        """The run that comes out when `run` goes in."""
        if not self._accumulators:
            return run
        refs, events, mark = _refs(run), run.events, run.mark
        drops = list(run.drops)
        for accumulator in self._accumulators:
            refs, events, failed = self._through(accumulator, run.lane, refs, events, mark, drops)
            mark = failed or mark
        through = run.through if mark is run.mark or mark is None else mark.event - 1
        drops.sort(key=lambda drop: drop[0])  # stable: each accumulator's own drops are in order already
        if mark is not None and mark.kind == "flush":
            self.open(run.lane, run.pass_index, event_place(mark.event)[0] + 1)
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
        out, out_events = [], []
        emitted = self._push(accumulator, lane, refs)
        failed = self._failure(emitted, events, name)
        for trigger, group in zip(emitted.triggers, emitted.groups, strict=True):
            if failed is None or events[trigger] < failed.event:
                out.append(_ref(accumulator, group))
                out_events.append(events[trigger])
        drops.extend((events[t], f"{name}.{reason}", n) for t, reason, n in emitted.drops)
        if failed is not None or mark is None or not mark.flushes:
            return out, out_events, failed
        flushed = self._guarded(lambda: accumulator.flush(lane), name, f"lane {lane}, at a flush")
        failed = self._failure(flushed, [mark.event], name)
        if failed is None:
            out.extend(_ref(accumulator, group) for group in flushed.groups)
            out_events.extend([mark.event] * len(flushed.groups))
            drops.extend((mark.event, f"{name}.{reason}", n) for _, reason, n in flushed.drops)
        return out, out_events, failed

    def _push(self, accumulator: Accumulator, lane: int, refs: Sequence[Ref]) -> Emitted:
        """One call, or one call a ref where the accumulator asks for that."""
        name = accumulator.name or accumulator.method
        if accumulator.batched:
            emitted = accumulator.push(lane, refs)
            if emitted.failure is not None:
                at, error = emitted.failure
                emitted.failure = (at, as_zephon_error(error, name, self._describe(refs[at][0])))
            return emitted
        whole = Emitted()
        for at, ref in enumerate(refs):
            where = self._describe(ref[0])
            one = self._guarded(lambda ref=ref: accumulator.push(lane, [ref]), name, where)  # type: ignore[misc]
            whole.groups += one.groups
            whole.triggers += [at] * len(one.groups)
            whole.drops += [(at, reason, n) for _, reason, n in one.drops]
            if one.failure is not None:
                whole.failure = (at, as_zephon_error(one.failure[1], name, where))
                break
        return whole

    @staticmethod
    def _guarded(call: Callable[[], Emitted], name: str, where: str) -> Emitted:
        """The call's result, or one that holds its exception."""
        try:
            return call()
        except Exception as error:
            failed = Emitted()
            failed.failure = (0, as_zephon_error(error, name, where))
            return failed

    @staticmethod
    def _failure(emitted: Emitted, events: Sequence[int], name: str) -> Mark | None:
        """The error mark of a call that failed."""
        if emitted.failure is None:
            return None
        at, error = emitted.failure
        where = "at a flush"
        return Mark(
            "error", events[at], error if isinstance(error, ZephonError) else as_zephon_error(error, name, where)
        )


def _refs(run: Run) -> list[Ref]:
    handles = [run.samples[i] for i in range(len(run.samples))]
    lengths = run.lengths or [1] * len(handles)
    return [(handle, length, _component(handle)) for handle, length in zip(handles, lengths, strict=True)]


def _component(handle: Handle) -> int:
    return origins_of(handle)[0][0]


def _ref(accumulator: Accumulator, group: object) -> Ref:
    """What one accumulator emitted, as the next one takes it."""
    if accumulator.preserves:
        return group  # type: ignore[return-value]
    parts: list[tuple[Handle, int, int]] = group  # type: ignore[assignment]
    return Group(accumulator, parts), accumulator.group_length(parts), _component(parts[0][0])

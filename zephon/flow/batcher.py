"""The entrance to `batch`: cuts each lane's samples into batches, and knows the place behind each of them."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from zephon.errors import CheckpointError, DataError, ZephonError
from zephon.flow.progress import Counter, Counts, LaneState, losses
from zephon.flow.task import Drop, Run
from zephon.ops.batch import Segment
from zephon.record import event_place

EXCLUDED = ".excluded"  # behind the name of a dataset: the reason of a drop


class Cut(msgspec.Struct, frozen=True):
    """A batch to be: runs of samples (handles, start, stop), its turn in the pass, and the lane's state behind it."""

    segments: list[Segment]
    turn: int
    state: LaneState

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return sum(stop - start for _, start, stop in self.segments)


class End(msgspec.Struct, frozen=True):
    """The lane has no more batches in this pass; `state` is the start of its next one."""

    state: LaneState


class Failed(msgspec.Struct, frozen=True):
    """The lane ends here with an error."""

    error: ZephonError


Item = Cut | End | Failed


class LaneBatcher:
    """One lane: drops what was delivered before a restart, cuts batches of `size`, and keeps the restart event.

    `windows`: an accumulator regroups, so a restart begins behind the last flush or save mark. Else it begins at the
    pointer of the last delivered sample. A batch leaves in the same call that brings its last sample, so the last mark
    then always lies before the first sample that the batch does not hold.
    """

    def __init__(
        self,
        state: LaneState,
        size: int,
        drop_last: str | None,
        windows: bool,
        reasons: dict[str, int],
        dry_chunks: int | None,
    ) -> None:
        self._size, self._drop_last, self._windows, self._reasons = size, drop_last, windows, reasons
        self._state = state
        self._skip = state.skip
        self._held = 0
        self._segments: list[Segment] = []
        self._counter = Counter(reasons, state.place_counts)
        self._window = (state.chunk, state.offset, state.samples - state.skip, state.place_counts, state.held)
        self._most_held = -1
        self._last: tuple[int, int, Counts, Counts] = (-1, 0, (), ())
        self._dry_chunks = dry_chunks
        self._dry_since, self._dry_from = state.chunk, state.place_counts

    def push(self, run: Run) -> list[Item]:
        """Takes the lane's next complete events; returns what they finish."""
        items: list[Item] = []
        if self._is_dry(run):
            return [Failed(self._dry_error(run.lane))]
        first, position = min(self._skip, len(run.samples)), 0
        self._skip -= first
        if first:  # delivered before the restart, but samples all the same
            event = run.events[first - 1]
            position = self._counter.at(event, run.drops, 0)
            self._dry_since, self._dry_from = event_place(event)[0], self._counter.now
            if not self._skip and (missed := self._newly_excluded()):
                return [Failed(self._excluded_error(run.lane, missed))]
        drops = self._with_last(run, len(run.samples) - first)
        position = self._cut_all(run, first, drops, items, position)
        self._counter.at(run.through, drops, position)
        if run.mark is not None:
            self._pass_mark(run, items)
        return items

    def _with_last(self, run: Run, arriving: int) -> list[Drop]:
        """The run's drops, with the remainder that `drop_last` gives up at the lane's end."""
        rest = (self._held + arriving) % self._size
        if self._drop_last is None or run.mark is None or run.mark.kind != "end" or not rest:
            return run.drops
        return [*run.drops, (run.mark.event, self._drop_last, rest)]

    def _cut_all(self, run: Run, at: int, drops: list[Drop], items: list[Item], position: int) -> int:
        """Cuts every full batch, and holds the rest. Takes and returns the position in `drops` that was reached."""
        samples, events = run.samples, run.events
        while at < len(samples):
            stop = min(len(samples), at + self._size - self._held)
            self._segments.append((samples, at, stop))
            self._held += stop - at
            event = events[stop - 1]
            position = self._counter.at(event, drops, position)
            same = stop - bisect_left(events, event, 0, stop)
            self._last = (event, same, self._counter.before, self._counter.now)
            self._dry_since, self._dry_from = event_place(event)[0], self._counter.now
            if self._held == self._size:
                items.append(self._cut())
            at = stop
        return position

    def _cut(self) -> Cut:
        """The held samples as a batch."""
        event, same, before, counts = self._last
        samples = self._state.samples + self._held
        if self._windows:
            chunk, offset, samples_before, place_counts, held = self._window
            skip = samples - samples_before
        else:
            (chunk, offset), skip, place_counts, held = event_place(event), same, before, ()
        turn = self._state.turns
        self._state = LaneState(
            pass_index=self._state.pass_index,
            chunk=chunk,
            offset=offset,
            skip=skip,
            samples=samples,
            turns=turn + 1,
            delivered=self._state.delivered + self._held,
            counts=counts,
            place_counts=place_counts,
            held=held,
        )
        cut = Cut(self._segments, turn, self._state)
        self._segments, self._held = [], 0
        return cut

    def _pass_mark(self, run: Run, items: list[Item]) -> None:
        mark = run.mark
        assert mark is not None
        if mark.error is not None:
            items.append(Failed(mark.error))
        elif mark.kind == "end":
            if self._held and self._drop_last is None:
                items.append(self._cut())
            items.append(End(self._state.next_pass(self._counter.now)))
        else:
            if mark.kind == "flush":  # a changed operator gave fewer samples than were delivered of this window
                self._skip = 0
            entered = self._state.samples + self._held - self._skip
            saved = mark.kind == "save"
            chunk, offset = event_place(mark.event + 1) if saved else (event_place(mark.event)[0] + 1, 0)
            self._window = (chunk, offset, entered, self._counter.now, mark.saved)
            if saved and mark.num_held > self._most_held:  # something came through, if not as far as here
                self._most_held = mark.num_held
                self._dry_since, self._dry_from = chunk, self._counter.now

    def _is_dry(self, run: Run) -> bool:
        """Whether too many whole chunks of an endless pass gave nothing. Judged by chunks, so not by how they are cut.

        Where accumulators hold records, only a flush tells that there was nothing, or that they hold no more than they
        did once: what they hold may come and go without end.
        """
        mark = run.mark
        settled = mark is not None and (
            mark.kind == "flush" or (mark.kind == "save" and mark.num_held <= self._most_held)
        )
        if self._dry_chunks is None or (self._windows and (len(run.samples) or not settled)):
            return False
        first = run.events[0] if len(run.samples) else run.through
        return event_place(first)[0] - self._dry_since > self._dry_chunks

    def _newly_excluded(self) -> list[str]:
        """Datasets with rows before the last delivered sample that are left out now, and were not before the restart.

        They, or what was made of them, may have been delivered; the samples to be dropped now are other ones then.
        """
        now = self._counter.now
        names = [(name.removesuffix(EXCLUDED), i) for name, i in self._reasons.items() if name.endswith(EXCLUDED)]
        return [name for name, i in names if now[i] != self._state.counts[i]]

    def _excluded_error(self, lane: int, datasets: list[str]) -> CheckpointError:
        return CheckpointError(
            f"lane {lane}: exclude= of dataset {', '.join(map(repr, datasets))} changed for rows that come before the "
            "last sample that this state delivered, so what follows cannot go on exactly there; leave out only rows "
            "behind it, or load an older state"
        )

    def _dry_error(self, lane: int) -> DataError:
        culprits = losses(self._reasons, self._dry_from, self._counter.now)
        return DataError(
            f"lane {lane} read {self._dry_chunks:,} chunks, two full passes of its data, and not one sample came out "
            f"of an endless source; dropped by {culprits or 'no counted reason'}; mend the operator, or give the "
            "source an end"
        )

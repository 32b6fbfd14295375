"""The head of the flow: pointers of the owned lanes, dealt in turn into tasks of the first stage.

A lane is fed if and only if its tail has room and fewer than `lane_limit` of its pointers are on their way. No limit
spans lanes, so a full lane never stops another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Final

import numpy as np

from zephon.errors import ConfigError
from zephon.flow.remake import Remake
from zephon.flow.task import Mark, Slice
from zephon.record import MAX_CHUNK_SIZE, Pointers, event_at, event_place, join
from zephon.work.source import WorkSource

AHEAD_POINTERS: Final = 1024  # of a lane that are made at once: up to about here the cost of one falls


def check_pointers(pointers: Pointers, num_datasets: int, where: str) -> None:
    """Raises ConfigError for what a source of the user's own may get wrong, before it loses a row."""
    problem = None
    columns = [getattr(pointers, name, None) for name in ("dataset", "row", "epoch")]
    if not all(isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype.kind in "iu" for c in columns):
        problem = "dataset, row and epoch must be one-dimensional arrays of whole numbers"
    elif len({len(column) for column in columns if column is not None}) > 1:
        problem = "dataset, row and epoch must be of one length"
    elif len(pointers) > MAX_CHUNK_SIZE:
        problem = f"a chunk has at most {MAX_CHUNK_SIZE:,} pointers, not {len(pointers):,}"
    elif len(pointers) and not 0 <= pointers.dataset.min() <= pointers.dataset.max() < num_datasets:
        problem = f"dataset must be an index below {num_datasets}"
    if problem:
        raise ConfigError(f"the source's chunk() at {where}: {problem}")


class LaneFeed:
    """The pointers of one lane from a given place on, and the marks between them."""

    def __init__(
        self,
        source: WorkSource,
        lane: int,
        num_lanes: int,
        pass_index: int,
        chunk: int,
        offset: int,
        flush_every: int,
        save_every: int = 0,
        remakes: Iterable[Remake] = (),
    ) -> None:
        self._source, self._num_lanes, self._flush_every = source, num_lanes, flush_every
        self._save_every, self._remakes = save_every, deque(remakes)
        self._since = 0
        """Pointers since the last place: the next state is due so that it does not depend on where a run began."""
        self.lane, self.pass_index = lane, pass_index
        self._chunk, self._offset = chunk, offset
        self._ahead: deque[Pointers] = deque()
        self._at_once = 1
        self._pointers = self._load()
        self._earlier = chunk, self._pointers  # a chunk of which records are made again
        while 0 < self._length <= self._offset:  # the place is the mark behind a chunk
            self._chunk, self._offset = self._chunk + 1, 0
            self._pointers = self._load()
        self.ended = False
        self.on_the_way = 0

    def _load(self) -> Pointers:
        """The current chunk. The lane's first chunks come one by one, for a quick start, later ones several at once."""
        if not self._ahead:
            lane, index = self.lane, self._chunk
            self._ahead.extend(self._source.chunks(lane, self._num_lanes, self.pass_index, index, self._at_once))
            self._at_once = min(2 * self._at_once, max(1, AHEAD_POINTERS // max(1, len(self._ahead[0]))))
        pointers = self._ahead.popleft()
        check_pointers(pointers, len(self._source.datasets), f"lane {self.lane}, chunk {self._chunk}")
        self._length = len(pointers)
        return pointers

    def take(self, most: int) -> Slice:
        """The next `most` pointers at most, never beyond a chunk, with the mark that follows them."""
        while self._remakes:
            if (piece := self._remakes[0].deal(most, self._pointers_of)) is not None:
                self.on_the_way += len(piece)
                return piece
            self._remakes.popleft()
        start, length = self._offset, self._length
        stop = min(length, start + most)
        if self._save_every:
            stop = min(stop, start + self._save_every - self._since)
        size = stop - start
        pointers = self._pointers.cut(start, stop)
        first = event_at(self._chunk, start)
        mark = None
        if stop == length:
            mark = self._move_to(stop)
        else:
            self._offset = stop
        self._since += size
        if mark is None and self._save_every and self._since == self._save_every:
            mark = Mark("save", first + size - 1)
        if mark is not None:
            self._since = 0
        self.on_the_way += size
        through = mark.event if mark else first + size - 1
        events = range(first, first + size)
        return Slice(self.lane, self.pass_index, pointers, events, through, mark, num_pointers=size)

    def _pointers_of(self, events: list[int]) -> Pointers:
        """The pointers of earlier events of this pass, ascending."""
        found = []
        for chunk, some in groupby(events, lambda event: event_place(event)[0]):
            if chunk != self._earlier[0]:
                self._earlier = chunk, self._source.chunk(self.lane, self._num_lanes, self.pass_index, chunk)
            whole = self._earlier[1]
            at = [event_place(event)[1] for event in some]
            found.append(Pointers(whole.dataset[at], whole.row[at], whole.epoch[at]))
        return join(found)

    def _move_to(self, length: int) -> Mark | None:
        """Steps behind the end of the current chunk."""
        behind = event_at(self._chunk, length)
        if length == 0:  # the lane had nothing more from the start
            self.ended = True
            return Mark("end", behind)
        self._chunk, self._offset = self._chunk + 1, 0
        self._pointers = self._load()
        if not self._length:
            self.ended = True
            return Mark("end", behind)
        if self._flush_every and self._chunk % self._flush_every == 0:
            return Mark("flush", behind)
        return None


class Feed:
    """Deals the pointers of the owned lanes, one of each lane in turn, skipping finished and full lanes.

    A task's records are grouped by lane, so a turn of one pointer each is dealt as an equal share each.
    """

    def __init__(self, lanes: list[LaneFeed], lane_limit: int, has_room: Callable[[int], bool]) -> None:
        self.lanes = {feed.lane: feed for feed in lanes}
        self._order = [feed.lane for feed in lanes]
        self._limit, self._has_room = lane_limit, has_room
        self._next = 0

    def deal(self, num_records: int) -> list[Slice]:
        """Slices for one task: fewer than `num_records` pointers only if no eligible lane has more."""
        slices: list[Slice] = []
        left = num_records
        while left and (eligible := self._eligible()):
            share, extra = divmod(left, len(eligible))
            for turn, feed in enumerate(eligible):
                want = min(share + (turn < extra), self._limit - feed.on_the_way)
                if want:
                    slices.append(feed.take(want))
                    left -= len(slices[-1])
                    self._next = self._order.index(feed.lane) + 1 if not share else self._next
        return slices

    def _eligible(self) -> list[LaneFeed]:
        """Lanes that may be fed now, in turn order."""
        order = self._order[self._next :] + self._order[: self._next]
        feeds = (self.lanes[lane] for lane in order)
        return [f for f in feeds if not f.ended and f.on_the_way < self._limit and self._has_room(f.lane)]

    def returned(self, lane: int, num_records: int) -> None:
        """Notes that pointers of a lane came out of the last stage."""
        self.lanes[lane].on_the_way -= num_records

    def stop(self, lane: int) -> None:
        """Ends a lane: nothing more of it is fed."""
        self.lanes[lane].ended = True

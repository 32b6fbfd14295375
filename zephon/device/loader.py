"""`pipeline.to_device(...)`: batches on a device, copied ahead of the user, with a state that counts what the user has.

A batch is copied from its slot as soon as it is there; up to `depth` of them wait on the device. The copy of a batch
keeps the batch in host memory, and with it its slot, until the device says that it is done: so a slot comes back when
nobody refers to it and no copy reads it. On the CPU nothing is copied: the tensors lie in the slots.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zephon.batch import Batch
from zephon.device.copies import Copies, Done
from zephon.drive import Reader
from zephon.errors import Closed, ConfigError
from zephon.flow.progress import LaneState
from zephon.iterate import BatchIterator
from zephon.runners.base import Turns, check_process

if TYPE_CHECKING:
    from zephon.pipeline import Pipeline


class DeviceLoader:
    """The batches of a pipeline with their numeric arrays as tensors on a device, and all else as it was.

    Each `iter` begins at the loader's start, as a pipeline's does; one iterator is live at a time. State and counts are
    those behind the last batch that the loader's own iterator returned, however far it has read ahead. The loader has
    its pipeline to itself: the one that it was made of does not move.
    """

    def __init__(self, pipeline: Pipeline, copies: Copies, depth: int = 2) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ConfigError(f"to_device(depth={depth!r}): a whole number of at least 1 is wanted")
        self._pipeline, self._copies, self._depth = pipeline, copies, depth
        self._under_way: deque[tuple[Done, Batch]] = deque()
        """Copies that may still read host memory, and the batch that keeps it."""
        self._pid = os.getpid()
        self._closer = weakref.finalize(self, _wait_for, self._under_way, self._pid)
        self._live: weakref.ref[DeviceIterator] | None = None
        self._places: Mapping[int, LaneState] | None = None
        """Where the owned lanes stand for the user; None: where the pipeline's own iterator stands."""

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(by_step=False)

    def steps(self) -> Iterator[list[Batch]]:
        """This group's batches of one global step at a time; see `Pipeline.steps`. Whole steps are read ahead."""
        return self._iterate(by_step=True).steps()

    def _iterate(self, by_step: bool) -> DeviceIterator:
        self._end("a newer iterator of the same loader took its place")
        session = self._pipeline._session
        source = session.iterate(Reader(self._depth, self._copies.pins))
        self._places = dict(session.start)
        iterator = DeviceIterator(self, source, by_step)
        self._live = weakref.ref(iterator)
        return iterator

    def _end(self, reason: str) -> None:
        iterator = self._live() if self._live is not None else None
        if iterator is not None:
            iterator.end(reason)
        self._live = None

    @property
    def lanes(self) -> list[int]:
        """The lanes that this group owns, ascending."""
        return self._pipeline.lanes

    @property
    def batches_per_step(self) -> int:
        """Batches of this group in a whole global step."""
        return self._pipeline.batches_per_step

    def counts(self) -> dict[str, Any]:
        """`Pipeline.counts`, up to the last sample that the user has."""
        return self._pipeline._session.counts(self._places)

    def metrics(self) -> dict[str, dict[str, float]]:
        """See `Pipeline.metrics`."""
        return self._pipeline.metrics()

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """The place behind the last batch that the user has, or behind `after`. See `Pipeline.state_dict`."""
        session = self._pipeline._session
        return session.state(self._places if after is None else session.places(after))

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """Makes `state`, of a pipeline or of a loader, the start of the next `iter`. See `Pipeline.load_state_dict`."""
        self._pipeline.load_state_dict(state, allow)
        self._end("a state was loaded")
        self._places = None

    def checkpoint(self, *, group: Any = None, timeout_s: float = 300.0) -> dict[str, Any]:
        """The state of all ranks, each behind the last batch that its user has. See `Pipeline.checkpoint`."""
        return self._pipeline._session.exchange.checkpoint(self.state_dict, group, timeout_s)

    def close(self) -> None:
        """Waits for copies that are under way, and ends the live iterator and everything that works for it."""
        try:
            self._end("the loader was closed")
            _wait_for(self._under_way, self._pid)
        finally:
            self._pipeline.close()

    def __enter__(self) -> DeviceLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{self._pipeline!r}.to_device({str(self._copies.device)!r}, depth={self._depth})"


def _wait_for(under_way: deque[tuple[Done, Batch]], pid: int) -> None:
    """Lets go of host memory once nothing reads it any more. A process that was forked has no part in it."""
    while under_way and os.getpid() == pid:
        under_way[0][0].synchronize()
        under_way.popleft()


class Moving(NamedTuple):
    """A batch whose tensors are on the device, or will be once `done` is."""

    batch: Batch
    tensors: list[Any]
    done: Done | None


class DeviceIterator(Iterator[Batch]):
    """Takes batches from `source` ahead of the user, and starts their copies at once.

    It never waits for a batch (or, step by step, for the first of a step) while it has one to return.
    """

    def __init__(self, loader: DeviceLoader, source: BatchIterator, by_step: bool) -> None:
        self._loader, self._source, self._session = loader, source, loader._pipeline._session
        self._units = source.steps() if by_step else ([batch] for batch in source)
        self._copies, self._depth = loader._copies, loader._depth
        self._ahead: deque[list[Moving]] = deque()
        self._under_way = loader._under_way
        self._behind: Exception | None = None
        """What comes behind the batches that are ahead: an error, or the end."""
        self._ended: str | None = None
        self._failed = False
        self._pid, self._turns = os.getpid(), Turns()

    def __next__(self) -> Batch:
        return self._next()[0]

    def steps(self) -> Iterator[list[Batch]]:
        """Step by step, where `source` is read so."""
        while True:
            try:
                step = self._next()
            except StopIteration:
                return
            yield step

    def _next(self) -> list[Batch]:
        with self._turns:
            check_process(self._pid)
            try:
                unit = self._take() if self._ended is None else None
                if unit and self._ended is None:
                    self._loader._places = self._session.places(unit[-1].batch)  # last of all
            except BaseException as error:  # in the middle of something, as a Ctrl-C: the next could lose data
                if self._ended is not None and isinstance(error, Exception):  # another thread has closed it meanwhile
                    raise self._why_none() from error
                self.end(f"{type(error).__name__} stopped it; to go on, load the state")
                raise
            if unit is None or self._ended is not None:
                raise self._why_none()
            return [moving.batch for moving in unit]

    def _take(self) -> list[Moving] | None:
        """The next unit, with the copies of those behind it started as far as they are there."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        if not self._ahead:
            self._read()
        if not self._ahead:
            return None
        unit = self._ahead.popleft()
        while self._behind is None and sum(map(len, self._ahead)) < self._depth and self._source.ready():
            self._read()
        for moving in unit:
            if moving.done is not None:
                self._copies.hand_over(moving.tensors, moving.done)
        return unit

    def _why_none(self) -> Exception:
        """What to raise where there is no batch: the end, from the second time on behind an error too."""
        if self._ended is not None:
            return Closed(f"this iterator is over: {self._ended}")
        found, self._behind = self._behind or StopIteration(), StopIteration()
        if isinstance(found, StopIteration):
            if not self._failed:
                self._loader._places = None  # the pass is complete, and all of it was returned
        else:
            self._failed = True
            self._source.end("an error")
        return found

    def _read(self) -> None:
        """Takes a unit from the source and starts its copies. An error waits for its turn."""
        if self._behind is None:
            try:
                self._ahead.append([self._start(batch) for batch in next(self._units)])
            except Exception as error:
                self._behind = error

    def _start(self, batch: Batch) -> Moving:
        host = batch.to_torch()
        numeric = {name: value for name, value in host._fields.items() if self._copies.is_tensor(value)}
        tensors, done = self._copies.start(list(numeric.values()))
        if done is not None:
            self._under_way.append((done, host))
        return Moving(host._with({**host._fields, **dict(zip(numeric, tensors, strict=True))}), tensors, done)

    def end(self, reason: str) -> None:
        """Closes the iterator, once the copies under way are done; its next `next` raises Closed."""
        if not isinstance(self._behind, StopIteration) or self._ahead:
            self._ended = self._ended or reason
        self._ahead.clear()
        try:
            _wait_for(self._under_way, self._pid)
        finally:
            self._source.end(reason)

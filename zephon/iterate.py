"""The one live iterator of a session: batches in the tail's order, counted as delivered when the user has them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zephon.batch import Batch
from zephon.drive import USER, Driver, Reader
from zephon.ends import Ends
from zephon.engine import Ready, TailItem
from zephon.errors import Closed, InternalError
from zephon.flow.batcher import End, Failed
from zephon.flow.progress import LaneState
from zephon.runners.base import Turns

if TYPE_CHECKING:
    from zephon.session import Session


def _close(driver: Driver, session: Session) -> None:
    """Ends an engine, also where its iterator was left behind or the interpreter exits."""
    session.last_metrics = driver.read_metrics()
    driver.close()


_NO_TARGET = sys.maxsize


class BatchIterator(Iterator[Batch]):
    """The batches of this group, from the session's start to the end of a pass (or the pipeline's `take` limit).

    The engine starts with the first `next`. Raises Closed once a newer iterator, a load or `close` ended it.
    """

    def __init__(self, session: Session, reader: Reader = USER) -> None:
        self._session, self._reader = session, reader
        self._places = session.current
        self._pass_index = session.pass_index
        self._left = session.definition.limit
        self._driver: Driver | None = None
        self._ends: Ends | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self._leave: weakref.finalize[..., Any] | None = None
        self._over = False
        self._ended: str | None = None
        self._moving = Turns()

    def _running(self) -> Driver:
        """The driver, started when first asked for."""
        if self._driver is None:
            self._ends = self._session.ends()
            if self._ends is not None:
                self._leave = weakref.finalize(self, self._ends.close)
                self._pass_index = self._ends.position.pass_index
            self._driver = self._session.drive(self._pass_index, self._reader)
            if self._ends is not None:
                self._ends.begin(self._driver)
            self._closer = weakref.finalize(self, _close, self._driver, self._session)
        return self._driver

    def __next__(self) -> Batch:
        with self._moving:
            if self._ended is not None:
                raise Closed(f"this iterator is over: {self._ended}")
            if self._over or not self.lacks(_NO_TARGET):
                self._finish()
                raise StopIteration
            try:
                lane, item = self._take(self._running())
                if isinstance(item, Failed):
                    self._stop()
                    raise item.error
                assert isinstance(item, Ready)
                return self._deliver(lane, item)
            except BaseException as error:
                self._stopped_by(error)
                raise

    def _take(self, driver: Driver) -> tuple[int, TailItem]:
        """The next turn of a lane, and what is there."""
        if self._ends is not None:
            return self._ends.take()
        lane, item = driver.tail.pop()
        return lane, driver.took(item)

    def _stopped_by(self, error: BaseException) -> None:
        """What stops a move in its middle (a Ctrl-C, a dead worker) ends the iterator: the next could lose data."""
        if not self._over and self._closer and not self._closer.alive and threading.current_thread().daemon:
            raise SystemExit from error  # the interpreter exits: whatever else were raised here, Python would print
        if not self._over:
            self.end(f"{type(error).__name__} stopped it; to go on, load the state")
        if isinstance(error, StopIteration):  # it would look like the end of the data
            raise InternalError("a StopIteration came out of the flow; please report this pipeline") from error

    def _deliver(self, lane: int, item: Ready) -> Batch:
        """Counts the batch as delivered, last of all."""
        session = self._session
        torch = session.definition.options.execution.output == "torch"
        batch = item.batch.to_torch() if torch else item.batch
        if self._left is not None:
            self._left -= 1
        session.current[lane] = item.state
        batch._progress = (session, tuple(session.current.values()))
        return batch

    def lacks(self, turns: int) -> bool:
        """Whether an unfinished lane has had fewer than `turns` turns. Passes over lanes that have ended."""
        with self._moving:
            if self._over or self._left == 0:
                return False
            try:
                driver = self._running()
                if self._ends is not None:
                    return self._ends.lacks(turns)
                tail = driver.tail
                while tail.turn is not None and tail.turn[0] < turns:
                    driver.wait()
                    item = tail.peek()
                    if not isinstance(item, End):
                        return True
                    self._session.current[tail.finish()] = item.state
            except BaseException as error:
                self._stopped_by(error)
                raise
            return False

    def ready(self) -> bool:
        """Whether `next` would give a batch, or an error, without waiting for it. False at the end."""
        with self._moving:
            if self._over or self._ended is not None or self._left == 0:
                return False
            try:
                driver = self._running()
                if self._ends is not None:
                    return self._ends.ready()
                tail = driver.tail
                while tail.turn is not None:
                    driver.poll()
                    item = tail.peek()
                    if not isinstance(item, End):
                        return item is not None
                    self._session.current[tail.finish()] = item.state
            except BaseException as error:
                self._stopped_by(error)
                raise
            return False

    def steps(self) -> Iterator[list[Batch]]:
        """The batches step by step; see `Pipeline.steps`."""
        cycles = self._session.definition.options.data.cycles_per_step
        target, short = self._session.first_target(self._pass_index)
        while True:
            self._mark((self._places, dict(self._places)))  # what stops it in its middle leaves the state before it
            batches = []
            while self.lacks(target):
                batches.append(next(self))
            if self._ended is not None:
                next(self)  # raises Closed: who ended it has the state before this step
            self._mark(None)
            if not batches and not short:
                next(self, None)  # the pass, or what `take` allows, is complete
                return
            yield batches  # a short step may be empty here, so that all groups count the same steps
            target, short = target + cycles, False

    def _mark(self, before: tuple[dict[int, LaneState], dict[int, LaneState]] | None) -> None:
        """Where a step begins, and (None) that its list is complete, unless a newer iterator has begun."""
        if self._session.current is self._places:
            self._session.before_step = before

    def _finish(self) -> None:
        """The end of the pass, or of what `take` allows."""
        if not self._over and self._left != 0:
            if self._ends is not None:
                self._session.current |= self._finished(self._ends)
            self._session.finish_pass()
        self._stop()

    def _finished(self, ends: Ends) -> dict[int, LaneState]:
        """The lanes behind the pass; what lies beyond its last step is read here."""
        try:
            return ends.finish()
        except BaseException as error:
            self._stopped_by(error)
            raise

    def _stop(self) -> None:
        """Ends the engine; the session keeps the place."""
        self._over = True
        for end in (self._closer, self._leave):
            if end is not None:
                end()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Where the time went so far."""
        return self._driver.read_metrics() if self._driver is not None else self._session.last_metrics

    def end(self, reason: str) -> None:
        """Closes the iterator; its next `next` raises Closed, unless it had come to its end."""
        if not self._over:
            self._ended = reason
        self._stop()

"""Who calls the engine: the consumer itself, or a thread that works ahead of it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from zephon.engine import STOP_TIMEOUT_S, Engine, Job, TailItem
from zephon.errors import Closed, InternalError
from zephon.flow.tail import Tail
from zephon.runners import inline, threads
from zephon.runners.base import MakePool, check_process
from zephon.runners.engine_watch import EngineThreadWatch

log = logging.getLogger("zephon")


class Pins(Protocol):
    """Registers the memory that batches lie in with a device, so that copies from it run by themselves."""

    def pin(self, memory: Any) -> None:
        """Called once for each mapping (an mmap), before a batch in it is handed out."""

    def unpin(self, memory: Any) -> None:
        """Called before the mapping goes. Returns once no copy reads it any more."""


class Reader(NamedTuple):
    """Who takes the batches, where that is not the user itself.

    `ahead`: how many it keeps, beside the one that the user has. `pins`: what is to be told of their memory.
    """

    ahead: int = 0
    pins: Pins | None = None


USER = Reader()


class Driver(Protocol):
    """What an iterator needs of a running engine: its tail, filled from elsewhere."""

    tail: Tail[TailItem]
    pins: Pins | None
    """What is told of slots, where there are any. To be set before the first batch."""

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """Where the time went so far."""

    def wait(self) -> None:
        """Returns once the next item of the tail is there. Raises what stopped the engine."""

    def poll(self) -> None:
        """Puts into the tail what is there without waiting for anyone. What stopped the engine is left to `wait`."""

    def took(self, item: TailItem) -> TailItem:
        """Notes that an item was taken from the tail, so there is room; returns what to hand to the user for it."""

    def close(self) -> None:
        """Ends the engine and its pools. May be called again, from any thread and at exit."""


class InlineDriver:
    """Runs the engine in the thread that asks for batches, as far as the next batch needs."""

    pins: Pins | None = None

    def __init__(self, job: Job) -> None:
        self._pid = os.getpid()
        self.engine = Engine(job, inline.InlinePool, inline.INTERRUPTS, _nothing)
        self.tail, self.read_metrics = self.engine.tail, self.engine.read_metrics

    def wait(self) -> None:
        check_process(self._pid)  # it could go on in a fork, but so would every other one: data would come twice
        while self.tail.peek() is None:
            if not self.engine.pump():
                raise InternalError("the flow stands still with nothing to wait for; please report this pipeline")

    def poll(self) -> None:
        self.wait()  # there is no one else to do the work, so it is the same now and later

    def took(self, item: TailItem) -> TailItem:
        return item

    def close(self) -> None:
        self.engine.close()


def _nothing() -> None:
    """An inline pool has no one to tell."""


class ThreadDriver:
    """Runs the engine in a thread of its own, ahead of the consumer by what the tail has room for."""

    pins: Pins | None = None

    def __init__(self, job: Job, make_pool: MakePool = threads.ThreadPool) -> None:
        self._wake = threading.Event()  # for the engine: a result is ready, or the tail has room
        self._ready = threading.Condition()  # for the consumer: the tail has something new
        self._error: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self.engine = Engine(job, make_pool, threads.INTERRUPTS, self._wake.set)
        self.tail, self.read_metrics = self.engine.tail, self.engine.read_metrics
        self.tail.on_first = self._announce
        self._watch = threads.ThreadWatch(self.engine.pools, job.stall_warn_s, log.warning)
        self._engine_watch = EngineThreadWatch(job.plan, self.engine.where, job.stall_warn_s, log.warning)
        self._thread = threading.Thread(target=self._serve, name="zephon-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.engine.close()
            raise

    def _serve(self) -> None:
        """The engine's loop. Clearing before pumping means that no wake-up is lost."""
        try:
            while not self._closed:
                self._wake.clear()
                if not self.engine.pump():
                    self.engine.where.leave()
                    self._wake.wait(self._watch.period_s)
                self._watch.look()
        except BaseException as error:
            with self._ready:
                self._error = error
                self._ready.notify_all()

    def _announce(self) -> None:
        with self._ready:
            self._ready.notify_all()

    def wait(self) -> None:
        check_process(self._pid)
        with self._ready:
            while self.tail.peek() is None:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise Closed("the pipeline was closed while a batch was awaited")
                self._ready.wait(self._engine_watch.period_s)
                self._engine_watch.look(self._thread)

    def poll(self) -> None:
        pass  # the engine's thread fills the tail

    def took(self, item: TailItem) -> TailItem:
        self._wake.set()
        return item

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child owns none of these threads
            return
        self._closed = True
        self._wake.set()
        with self._ready:
            self._ready.notify_all()
        try:
            if threading.current_thread() is not self._thread:
                self._thread.join(STOP_TIMEOUT_S)
        finally:  # also where a second Ctrl-C ends the wait
            self.engine.close()


def _process_driver(job: Job) -> Driver:
    """Its modules are imported only where they are used, and while the launcher starts: it needs as long as they."""
    from zephon.runners.spawn import Launcher

    launcher = Launcher("zephon.engine_process")
    try:
        from zephon.drive_process import ProcessDriver

        return ProcessDriver(job, launcher)
    except BaseException:
        launcher.close()
        raise


DRIVERS: dict[str, Callable[[Job], Driver]] = {
    "inline": InlineDriver,
    "threads": ThreadDriver,
    "process": _process_driver,
}

"""A worker process: takes tasks from its ring, in order, and puts results into its other ring, in the same order."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from zephon.errors import InternalError, ZephonError, describe, set_place
from zephon.flow.task import Task
from zephon.ipc import stray
from zephon.ipc.area import Area
from zephon.ipc.channel import Receiver, Sender
from zephon.ipc.codec import send_whole
from zephon.ipc.in_slots import SlotWriter
from zephon.limits import limit_error
from zephon.runners import interpreter, signals, stacks
from zephon.runners.ahead import Ahead
from zephon.runners.execute import StageWork
from zephon.runners.whereabouts import FETCH, RESULT, Whereabouts
from zephon.runners.wire import Notes, read_task, write_report, write_result

WAIT_S = 60.0  # how often an idle worker wakes to see whether its parent is still there


def serve(work: StageWork, tasks: Receiver, results: Sender, where: Whereabouts, stack_file: int) -> NoReturn:
    """Works until killed. What its own code raises is reported; what user code raises travels in the results.

    `where` always tells what it is on; its stack goes to `stack_file` when asked for.
    """
    parent = os.getppid()
    stacks.listen(stack_file)
    send_whole()
    set_place("a worker")
    signals.let_alarms_through()

    def alive() -> None:
        if os.getppid() != parent:
            os._exit(1)

    task: Task | None = None
    _seed()
    try:
        work.setup(where)
        where.leave()
        _check_wakes(tasks, results)
        results.send_waiting(write_report("ready"), alive)
        inbox, ahead, slots = _Inbox(tasks, results.area, alive), Ahead(work), SlotWriter()
        following: tuple[Task, Notes] | None = None
        while True:
            task, notes = following or inbox.wait()
            where.begin()
            where.enter(FETCH)
            loaded, fetch_s = ahead.rows(task, where.record)
            following = inbox.poll() if ahead.useful else None
            if following is not None and not following[1].alone:
                ahead.begin(following[0])
            outs, seconds = work.run(task, where, loaded)
            stray.leave()
            seconds["fetch"] += fetch_s
            where.enter(RESULT)
            blame = lambda number, index, problem, task=task: work.refuse(task, number, index, problem)  # noqa: E731
            put = partial(slots.put, places=notes.places)
            message_of_result = write_result(outs, seconds, blame, work.max_record_bytes, put)
            where.leave()
            results.send_waiting(message_of_result, alive)
            del loaded, outs, message_of_result  # the next arrays are made in this memory, which is in the caches
    except BaseException as error:
        stray.leave()
        _check_wakes(tasks, results)
        spot = where.spot()
        where.leave()
        on = f"a worker, where {work.describe(spot, task.slices if task else ())}" if spot else "a worker"
        known = error if isinstance(error, ZephonError) else limit_error(error, on)
        known = known or InternalError(f"in {on}: {describe(error)}")
        known.__cause__ = error if known is not error else error.__cause__
        results.send_waiting(write_report("failed", known), alive)
        os._exit(1)


class _Inbox:
    """The tasks of a worker, in order, each with what its message says beside it."""

    def __init__(self, tasks: Receiver, area: Area | None, alive: Callable[[], None]) -> None:
        self._tasks, self._area, self._alive = tasks, area, alive

    def poll(self) -> tuple[Task, Notes] | None:
        """The next task, where it is there."""
        message = self._tasks.receive()
        if message is None:
            return None
        task, notes = read_task(message)
        if self._area is not None:
            if notes.held:
                self._area.occupy(list(notes.held))
            self._area.give_back(list(notes.freed))
        return task, notes

    def wait(self) -> tuple[Task, Notes]:
        """The next task."""
        while (found := self.poll()) is None:
            self._tasks.data.wait(WAIT_S)
            self._alive()
        return found


def _check_wakes(tasks: Receiver, results: Sender) -> None:
    """Ends a worker that cannot wake anybody any more; a fresh one takes its place, as after any death."""
    if not all(wake.is_whole() for wake in (tasks.data, tasks.credit, results.data, results.credit)):
        interpreter.tell(
            f"zephon: user code closed descriptors of worker process {os.getpid()} that it did not open; the worker is "
            "replaced"
        )
        os._exit(1)


def _seed() -> None:
    """Gives this worker global random numbers of its own: forked from one parent, all would draw the same ones."""
    random.seed()
    if "numpy.random" in sys.modules:  # numpy loads it when first asked for, with a seed of its own
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()

"""A worker process: takes tasks from its ring, in order, and puts results into its other ring, in the same order."""

from __future__ import annotations

import os
import random
import sys
from typing import NoReturn

from zephon.errors import InternalError, ZephonError, describe
from zephon.ipc.channel import Receiver, Sender
from zephon.runners import stacks
from zephon.runners.execute import StageWork
from zephon.runners.whereabouts import RESULT, Whereabouts
from zephon.runners.wire import read_task, write_report, write_result

WAIT_S = 60.0  # how often an idle worker wakes to see whether its parent is still there


def serve(work: StageWork, tasks: Receiver, results: Sender, where: Whereabouts, stack_file: int) -> NoReturn:
    """Works until killed. What its own code raises is reported; what user code raises travels in the results.

    `where` always tells what it is on; its stack goes to `stack_file` when asked for.
    """
    parent = os.getppid()
    stacks.listen(stack_file)

    def alive() -> None:
        if os.getppid() != parent:
            os._exit(1)

    _seed()
    try:
        work.setup(where)
        where.leave()
        results.send_waiting(write_report("ready"), alive)
        while True:
            message = tasks.receive()
            if message is None:
                tasks.data.wait(WAIT_S)
                alive()
                continue
            task, (freed, held) = read_task(message)
            if results.area is not None:
                if held:
                    results.area.occupy(held)
                results.area.give_back(freed)
            where.begin()
            outs, seconds = work.run(task, where)
            where.enter(RESULT)
            blame = lambda number, index, problem, task=task: work.refuse(task, number, index, problem)  # noqa: E731
            message_of_result = write_result(outs, seconds, blame, work.max_record_bytes)
            where.leave()
            results.send_waiting(message_of_result, alive)
    except BaseException as error:
        where.leave()
        known = error if isinstance(error, ZephonError) else InternalError(f"in a worker: {describe(error)}")
        known.__cause__ = error if known is not error else error.__cause__
        results.send_waiting(write_report("failed", known), alive)
        os._exit(1)


def _seed() -> None:
    """Gives this worker global random numbers of its own: forked from one parent, all would draw the same ones."""
    random.seed()
    if "numpy.random" in sys.modules:  # numpy loads it when first asked for, with a seed of its own
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()

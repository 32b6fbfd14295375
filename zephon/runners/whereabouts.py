"""What a worker, or the engine, is on, for whoever watches it: three cells that it writes and the watchdog reads.

A worker writes one cell a record (an aligned store), and two more at each step of a task; the engine writes all three
at each call of an accumulator. The reader wants no order among them: it acts on cells that stood still for a long time.
"""

from __future__ import annotations

import msgspec

CELLS_BYTES = 64  # a cache line; three cells of 8 bytes are used
IDLE, FETCH, LENGTHS, RESULT, OPERATORS = range(5)  # steps; operator k of the stage is OPERATORS + k
FLOW, DEALING, BATCH, ACCUMULATORS = range(1, 5)  # steps of the engine; its accumulator k is ACCUMULATORS + k
STOPPED = -1  # no step of theirs: the process waits for its next one, and has been stopped (SIGSTOP) meanwhile
CONTINUED = -2
WHOLE = 2**32 - 1  # for the record: all records of the task at once

_TASK, _STEP, _RECORD = range(3)


def is_stopped(state: str) -> bool:
    """Whether a process in this state (see `state_of`) is stopped, by a signal or by a debugger."""
    return state in ("T", "t")


def state_of(pid: int) -> str:
    """The letter by which the kernel says what a process does (proc(5)); nothing where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Spot(msgspec.Struct, frozen=True):
    """Where a busy worker, or the engine, stands."""

    task: int
    """The number of the task since the worker began, from 1; 0 in `setup`. Of the engine: of the call."""
    step: int
    """FETCH, LENGTHS, RESULT, or OPERATORS + the number of an operator; STOPPED. Of the engine: see there."""
    record: int
    """The number of the record in the task, or WHOLE. Of the engine: the lane, or WHOLE."""


class Whereabouts:
    """The cells of one process. Only that one calls `begin`, `enter`, `call` and `leave`, and writes to `record`."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self._cells = (memory or memoryview(bytearray(CELLS_BYTES))).cast("Q")
        self.record = self._cells[_RECORD : _RECORD + 1]
        """One cell: which of the task's records is worked on. Written once a record, so it is bare."""

    def begin(self) -> None:
        """A further task."""
        self._cells[_TASK] += 1

    def enter(self, step: int) -> None:
        """A step of the task begins, with all records until one is named."""
        self._cells[_RECORD] = WHOLE
        self._cells[_STEP] = step

    def call(self, step: int, record: int = WHOLE) -> None:
        """The engine makes a further call: its step, and its lane."""
        cells = self._cells
        cells[_TASK] += 1
        cells[_RECORD] = record
        cells[_STEP] = step

    def leave(self) -> None:
        """Nothing is worked on: the worker waits for a task, or for room."""
        self._cells[_STEP] = IDLE

    def reset(self) -> None:
        """The cells as for a new worker. Only while there is none."""
        self._cells[_TASK] = self._cells[_STEP] = 0

    def spot(self) -> Spot | None:
        """Where the worker stands; None where it waits."""
        step = self._cells[_STEP]
        return Spot(self._cells[_TASK], step, self._cells[_RECORD]) if step else None

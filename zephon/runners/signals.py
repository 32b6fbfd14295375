"""The signals of the processes below the trainer: theirs, whatever the trainer or user code makes of them.

Signals that are blocked or ignored are inherited, and a module of the user's may set more when it is imported. What
would end the tree, or hide a death, is set again behind that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from zephon.ipc import stray

# A scheduler's warnings, which go to every process of a job, and a terminal's end. A trainer may still save its state.
HELD_OFF = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_forking = threading.local()  # `mask`: the signal mask before; `own`: whether the child is one of the tree


def take_over() -> None:
    """At the start of a process that was exec'ed, before user code runs. Those that it forks go on with it."""
    for number in HELD_OFF:
        _hold_off(number)
    take_back()
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_child)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is exec'ed meanwhile gets the signals of the tree once it has taken over: their default would end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *HELD_OFF))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_back() -> None:
    """Behind user code that may have set signals for its own ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _hold_off(signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, or someone reaps, a child's status is lost
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # which tells of a trainer that hangs up
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def let_alarms_through() -> None:
    """In a worker an alarm is user code's own affair: a time limit for a record, say, that ends the process."""
    if signal.getsignal(signal.SIGALRM) is _nothing:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def fork() -> int:
    """Forks a process of the tree, which holds off from its first moment what this one does."""
    _forking.own = True
    try:
        return os.fork()
    finally:
        _forking.own = False


def _hold_off(number: int) -> None:
    """It does nothing here.

    It is no SIG_IGN, which would go on to whatever processes user code starts: those could not be terminated.
    """
    signal.signal(number, _nothing)
    signal.siginterrupt(number, False)


def _nothing(number: int, frame: object) -> None:
    """Handles a signal that is held off."""


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_OFF)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    """What user code forks must not come back, and can be terminated like what it starts in any other way."""
    if not getattr(_forking, "own", False):
        stray.mark()
        for number in HELD_OFF:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
    _unblock()

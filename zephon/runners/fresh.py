"""A child of the launcher in a fresh interpreter, for where the launcher cannot be forked.

A fork copies one thread only: a lock that another one holds is then held for ever. So where importing the user's
modules started threads in the launcher, its children are exec'ed: they inherit the descriptors of rings, wake-ups and
orders, read the orders again, and serve as a forked child would.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from zephon.errors import describe
from zephon.ipc import stray
from zephon.ipc.segment import Segment
from zephon.runners import interpreter, signals
from zephon.runners.orders import unpack
from zephon.runners.rings import Layout, wire
from zephon.runners.worker import serve

PR_SET_PDEATHSIG = 1
ENGINE_STAGE = -1
FAULTS = "ZEPHON_FAULTS"  # set by the kit that breaks things on purpose, for its own processes alone
_CODE = """
from zephon.runners.fresh import main
main({role!r})
"""


class Role(msgspec.Struct, frozen=True):
    """What a fresh child is, and where it finds what it needs."""

    parent: int
    stage: int
    """Of a worker; `ENGINE_STAGE` for the engine."""
    index: int
    layout: Layout
    orders: tuple[int, int]
    """(descriptor, bytes) of the packed orders."""
    shared: list[int]
    """Descriptors of what the orders share."""
    engine: str
    """The module whose `serve` is the engine."""
    sockets: tuple[int, ...]
    """The engine's: to the trainer, to the launcher."""

    def descriptors(self) -> Iterator[int]:
        """All that the child inherits."""
        yield from (*self.layout.descriptors(), self.orders[0], *self.shared, *self.sockets)


def num_threads() -> int:
    """Threads of this process, those of libraries too."""
    return max(threading.active_count(), len(os.listdir("/proc/self/task")))


def start(role: Role) -> int:
    """Starts a fresh child; returns its pid."""
    path = interpreter.write_path(sys.path)
    descriptors = [path, *role.descriptors()]
    arguments = interpreter.arguments(path, _CODE.format(role=msgspec.json.encode(role)))
    try:
        for fd in descriptors:
            os.set_inheritable(fd, True)
        with signals.kept():
            return os.posix_spawn(sys.executable, arguments, os.environ)
    finally:
        os.close(path)
        for fd in role.descriptors():
            os.set_inheritable(fd, False)


def main(role: bytes) -> NoReturn:
    """The life of a fresh child."""
    signals.take_over()
    install_faults()
    own = msgspec.json.decode(role, type=Role)
    live(own.parent, lambda: _serve(own))


def live(parent: int, run: Callable[[], None]) -> NoReturn:
    """Runs a child of the launcher, forked or fresh, to its end. It never outlives its parent."""
    try:
        _die_with(parent)
        run()
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(Exception):
            interpreter.tell(f"zephon: a child process failed: {describe(error)}")
    finally:
        os._exit(1)


def flush_lines() -> None:
    """Children are killed in the end: what user code prints must not wait in a buffer then."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def install_faults() -> None:
    """Where the fault kit started this tree: its points (`zephon/testing/points.py`). Else nothing is there."""
    if FAULTS in os.environ:
        importlib.import_module("zephon.testing.points").install()


def _serve(own: Role) -> None:
    flush_lines()
    for fd in own.descriptors():
        os.set_inheritable(fd, False)
    packed = Segment(*own.orders)
    orders = unpack(packed.map[:], own.shared)  # this imports the user's modules
    stray.leave()
    signals.take_back()
    packed.close()
    wirings, station = wire(own.layout)
    if own.stage != ENGINE_STAGE:
        serve(orders.works[own.stage], *wirings[own.stage][own.index].worker_ends())
    to_trainer, to_launcher = (socket.socket(fileno=fd) for fd in own.sockets)
    importlib.import_module(own.engine).serve(orders.job, wirings, station, to_trainer, to_launcher)


def _die_with(parent: int) -> None:
    """The calling process is killed when its parent ends. Its parent's main thread made it, so that is its end."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

"""The launcher: a small process of its own session, exec'ed by the trainer, from which engine and workers are forked.

The trainer may hold CUDA, threads and NCCL, so it is never forked. The launcher imports what the plan needs, forks the
engine process and the workers, and forks again where a worker must be replaced. It has one thread; where importing the
user's modules started more, its children are exec'ed instead (`fresh.py`). It ends the whole tree when the trainer asks
for it (by closing the control socket), when the trainer is gone (its pidfd), or when the engine is gone; should the
launcher itself be killed, its children die with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from zephon.arena import engine_descriptors
from zephon.errors import WorkerError, ZephonError, describe
from zephon.ipc import stray
from zephon.ipc.segment import Segment
from zephon.limits import limit_error, raise_descriptors
from zephon.runners import interpreter, leftovers, signals
from zephon.runners.engine_watch import WatchedEngine
from zephon.runners.fresh import (
    ENGINE_STAGE,
    Role,
    flush_lines,
    install_faults,
    live,
    num_threads,
    start,
)
from zephon.runners.guard import Guard
from zephon.runners.heap import trim
from zephon.runners.orders import MOST_SHARED, unpack
from zephon.runners.rings import lay_out, wire
from zephon.runners.whereabouts import CONTINUED, STOPPED, is_stopped, state_of
from zephon.runners.worker import serve

MOST_ERROR_BYTES = 100_000
ENGINE_END_S = 1.0  # between the end of the engine's socket and its own
LOOK_S = 1.0  # between two looks at children that may have lost their main thread, or be stopped
STOPPED_LOOKS = 2  # in a row: where the whole tree was stopped, its processes go on one after the other


def main(control_fd: int, engine_fd: int, trainer_pid: int, engine: str) -> NoReturn:
    """The launcher's life. Called in a fresh interpreter by `runners/spawn.py`.

    `engine`: the module whose `serve` is the engine process. It is imported while the trainer still packs the orders.
    """
    interpreter.open_standard_files()
    trainer = _watch(trainer_pid)
    control, to_trainer = socket.socket(fileno=control_fd), socket.socket(fileno=engine_fd)
    signals.take_over()
    leftovers.adopt_orphans()
    flush_lines()
    if trainer is None:
        os._exit(0)
    failure: BaseException | None = None
    try:
        importlib.import_module(engine)
        gc.freeze()  # no collection touches these objects any more, so that children share their pages
        gc.enable()
        install_faults()
        tree = _Tree(engine, control, to_trainer)  # kept: what it holds is never let go of one by one
        tree.watch(trainer)
    except BaseException as error:
        failure = error
    with contextlib.suppress(Exception):
        leftovers.end_session(os.getpid())
    if failure is not None:
        _report(to_trainer, failure)
    os._exit(failure is not None)


def _watch(pid: int) -> int | None:
    """A pidfd of the trainer; None where it is gone already."""
    try:
        trainer = os.pidfd_open(pid)
    except OSError:
        return None
    return trainer if os.getppid() == pid else None


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """(the packed orders, their descriptors), from the control socket: 8 bytes with the length come first."""
    head, fds, *_ = socket.recv_fds(control, 8, MOST_SHARED)
    size = int.from_bytes(head, "little")
    packed = control.makefile("rb").read(size)
    if len(packed) < size or not size:
        os._exit(0)  # the trainer is gone
    return packed, fds


@contextlib.contextmanager
def _user_code(control: socket.socket) -> Iterator[None]:
    """It may take long while nobody polls: a hang-up of the trainer raises SIGIO then, which ends a process."""
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        yield
    finally:
        fcntl.fcntl(control, fcntl.F_SETFL, flags)
        stray.leave()
        signals.take_back()


def _report(to_trainer: socket.socket, error: BaseException) -> None:
    known = error if isinstance(error, ZephonError) else limit_error(error, "the launcher")
    known = known or WorkerError(f"the launcher failed: {describe(error)}")
    raw = pickle.dumps(known)
    if len(raw) > MOST_ERROR_BYTES:
        known.__cause__ = None  # the text says it too
        raw = pickle.dumps(known)
    with contextlib.suppress(OSError):
        to_trainer.send(b"X" + msgspec.msgpack.encode([raw]))


class _Tree:
    """The processes below the launcher: forked from it, or exec'ed where a fork would copy other threads' locks."""

    def __init__(self, engine: str, control: socket.socket, to_trainer: socket.socket) -> None:
        self._engine, self._control, self._to_trainer = engine, control, to_trainer
        self._packed, self._shared = _receive(control)
        with _user_code(control):  # this imports the user's modules
            self._orders = orders = unpack(self._packed, self._shared)
        raise_descriptors(engine_descriptors(sum(orders.workers), orders.job.most_slots))
        self._layout = lay_out(orders.workers, orders.ring_bytes)
        self._wirings, self._station = wire(self._layout)
        self._watched = WatchedEngine(orders.job.plan, self._station)
        warn_s, timeout_s = orders.job.stall_warn_s, orders.job.stall_timeout_s
        self._guard = Guard(self._watched, warn_s, timeout_s, self._signal_engine, self._say)
        self._kept: Segment | None = None
        self._engine_end, child_end = interpreter.socket_pair(socket.SOCK_SEQPACKET)
        self._children: dict[int, tuple[int, int, int]] = {}  # pidfd -> (pid, stage, index)
        self._stopped: dict[int, int] = {}  # pid -> looks in a row at which it was stopped
        self._poll = select.poll()
        self._next_guard_s = self._next_look_s = 0.0
        self._last_word: ZephonError | None = None
        gc.freeze()
        self._start(ENGINE_STAGE, 0, (to_trainer, child_end))
        child_end.close()
        self._share()
        for stage, count in enumerate(orders.workers):
            for index in range(count):
                self._start(stage, index)
        self._packed = b""  # from now on no user code runs here, so no thread starts either

    def _share(self) -> None:
        """Loads what workers can share, before they are forked. What fails here, `setup` meets again in a worker."""
        if self._kept is None:
            for work in self._orders.works:
                with _user_code(self._control), contextlib.suppress(BaseException):
                    work.share()
            trim()  # a hole that a worker fills is a page of its own
            gc.freeze()

    def _start(self, stage: int, index: int, sockets: tuple[socket.socket, ...] = ()) -> None:
        """Starts the engine or a worker."""
        if self._packed and self._kept is None and (others := num_threads() - 1):
            self._keep_orders(others)
        pid = self._exec(stage, index, sockets) if self._kept else self._fork(stage, index, sockets)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, stage, index)
        self._poll.register(pidfd, select.POLLIN)

    def _keep_orders(self, others: int) -> None:
        """From now on children are exec'ed, and read the orders themselves."""
        self._kept = Segment.create(len(self._packed))
        self._kept.map[: len(self._packed)] = self._packed
        interpreter.tell(
            f"zephon: importing the pipeline's modules started {others} threads, whose locks a fork would copy; so the "
            "engine and workers are started anew, which takes longer; start threads in an operator's setup() instead"
        )

    def _exec(self, stage: int, index: int, sockets: tuple[socket.socket, ...]) -> int:
        assert self._kept is not None
        numbers = tuple(end.fileno() for end in sockets)
        kept = (self._kept.fd, self._kept.size)
        return start(Role(os.getpid(), stage, index, self._layout, kept, self._shared, self._engine, numbers))

    def _fork(self, stage: int, index: int, sockets: tuple[socket.socket, ...]) -> int:
        """Forks a child, which never returns."""
        launcher = os.getpid()
        pid = signals.fork()
        if pid == 0:
            live(launcher, lambda: self._serve(stage, index, sockets))
        return pid

    def _serve(self, stage: int, index: int, sockets: tuple[socket.socket, ...]) -> None:
        """A forked child's life."""
        self._control.close()
        self._engine_end.close()
        for pidfd in self._children:
            os.close(pidfd)
        if stage != ENGINE_STAGE:
            self._to_trainer.close()
        if stage == ENGINE_STAGE:
            sys.modules[self._engine].serve(self._orders.job, self._wirings, self._station, *sockets)
        else:
            serve(self._orders.works[stage], *self._wirings[stage][index].worker_ends())

    def watch(self, trainer: int) -> None:
        """Serves until the tree must end."""
        self._poll.register(trainer, select.POLLIN)
        self._poll.register(self._control.fileno(), select.POLLIN | select.POLLHUP)
        self._poll.register(self._engine_end.fileno(), select.POLLIN)
        over = False
        while not over:
            found = self._poll.poll(min(LOOK_S, self._guard.period_s) * 1000)
            self._look(time.monotonic())
            for fd, _ in found:
                if fd in self._children:
                    over |= self._reap(fd)
                elif fd == self._engine_end.fileno():
                    over |= self._serve_engine()
                else:
                    over = True  # the trainer closed, or is gone
        if self._last_word is not None:
            self._speak(self._last_word, trainer)

    def _speak(self, error: ZephonError, trainer: int) -> None:
        """Reports an error as soon as there is room for it, unless the trainer closes, or is gone, before that."""
        poll = select.poll()
        poll.register(self._to_trainer, select.POLLOUT)
        for end in (self._control, trainer):
            poll.register(end, select.POLLIN)
        poll.poll()
        _report(self._to_trainer, error)

    def _reap(self, pidfd: int) -> bool:
        """Takes a dead child's status; returns whether it was the engine."""
        pid, stage, index = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._stopped.pop(pid, None)
        _, status = os.waitpid(pid, 0)
        if stage == ENGINE_STAGE:
            self._last_word = self._last_word or WorkerError(self._watched.post_mortem(status))
            return True
        self._tell_engine(stage, index, status)
        return False

    def _tell_engine(self, stage: int, index: int, status: int) -> None:
        """How a worker ended; STOPPED or CONTINUED where it did not."""
        with contextlib.suppress(OSError):
            self._engine_end.send(msgspec.msgpack.encode([stage, index, status]))

    def _await_engine(self) -> None:
        """Its socket closed, so it is about to end: how, is for whoever waits for a batch."""
        for pidfd, (_, stage, _) in list(self._children.items()):
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if stage == ENGINE_STAGE and poll.poll(ENGINE_END_S * 1000):
                self._reap(pidfd)

    def _look(self, now_s: float) -> None:
        """Looks at the children, where it is time to."""
        if now_s >= self._next_guard_s:
            self._next_guard_s = now_s + self._guard.period_s
            self._guard.look(now_s)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._look_at_states()
            leftovers.collect_orphans(pid for pid, *_ in self._children.values())

    def _signal_engine(self, _: int, number: int) -> None:
        self._signal(ENGINE_STAGE, 0, number)

    def _say(self, text: str) -> None:
        """Tells the user of a stall of the engine: a warning, or the error that is its end.

        A trainer that takes nothing leaves no room in the socket. It does not wait either, and hears of it later: of a
        warning when it is said again, of the error before the launcher ends.
        """
        if self._watched.condemned:
            self._last_word = WorkerError(text)
            return
        with contextlib.suppress(OSError):
            self._to_trainer.send(b"W" + msgspec.msgpack.encode(text), socket.MSG_DONTWAIT)

    def _look_at_states(self) -> None:
        """A child whose main thread ended while others run does nothing any more, and its pidfd does not tell.

        One that is stopped may be waited for; whoever counts its time is told.
        """
        for pid, stage, index in self._children.values():
            state = state_of(pid)
            if state == "Z":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            before = self._stopped.get(pid, 0)
            now = self._stopped[pid] = before + 1 if is_stopped(state) else 0
            if (now >= STOPPED_LOOKS) == (before >= STOPPED_LOOKS):
                continue
            if stage == ENGINE_STAGE:
                self._watched.stopped = now > 0
            else:
                self._tell_engine(stage, index, STOPPED if now else CONTINUED)

    def _serve_engine(self) -> bool:
        """A request of the engine, for a worker or for a signal to one; returns whether the engine is gone."""
        request = b""
        with contextlib.suppress(ConnectionResetError):  # it died with words of ours unread
            request = self._engine_end.recv(1 << 16)
        if not request:
            self._await_engine()
            return True
        stage, index, number = msgspec.msgpack.decode(request)
        if number:
            self._signal(stage, index, number)
        else:
            self._start(stage, index)
        return False

    def _signal(self, stage: int, index: int, number: int) -> None:
        """Sends a signal to a worker, unless it died: the engine hears of that, and orders a new one, behind this."""
        for pidfd, (_, *who) in self._children.items():
            if who == [stage, index]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)

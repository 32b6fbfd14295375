"""The launcher: a small process of its own session, exec'ed by the trainer, from which engine and workers are forked.

The trainer may hold CUDA, threads and NCCL, so it is never forked. The launcher imports what the plan needs, has one
thread, forks the engine process and the workers, and forks again where a worker must be replaced. It ends the whole
tree when the trainer asks for it (by closing the control socket), when the trainer is gone (its pidfd), or when the
engine is gone; should the launcher itself be killed, its children die with it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from zephon.errors import WorkerError, ZephonError, describe
from zephon.ipc.ring import LEAST_CAPACITY, ring_bytes
from zephon.ipc.segment import Segment
from zephon.ipc.wake import Wake
from zephon.runners.orders import Orders, unpack
from zephon.runners.process import Wiring
from zephon.runners.worker import serve

PR_SET_PDEATHSIG = 1
TASK_CAPACITY = 1 << 18
MOST_ERROR_BYTES = 100_000
MOST_RING_MEMORY = 128 << 20  # reserving pages costs 0.4 s a GiB
MOST_AREA_MEMORY = 64 << 20  # for large results, of all workers; reserved only as far as it is used
RINGS_IN_AREA = 4  # an area is at most this many times as large as a ring


def main(control_fd: int, engine_fd: int, trainer_pid: int, engine: str) -> NoReturn:
    """The launcher's life. Called in a fresh interpreter by `runners/spawn.py`.

    `engine`: the module whose `serve` is the engine process. It is imported while the trainer still packs the orders.
    """
    trainer = _watch(trainer_pid)
    control, to_trainer = socket.socket(fileno=control_fd), socket.socket(fileno=engine_fd)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a preempted trainer may still save its state
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # workers are killed in the end: what user code prints is not lost
    if trainer is None:
        os._exit(0)
    try:
        serve_engine = importlib.import_module(engine).serve
        gc.freeze()  # no collection touches these objects any more, so that children share their pages
        gc.enable()
        orders = read_orders(control)
        gc.freeze()
        tree = _Tree(orders, serve_engine, control, to_trainer)
    except BaseException as error:
        _report(to_trainer, error)
        os._exit(1)
    tree.watch(trainer)
    os._exit(0)


def _watch(pid: int) -> int | None:
    """A pidfd of the trainer; None where it is gone already."""
    try:
        trainer = os.pidfd_open(pid)
    except OSError:
        return None
    return trainer if os.getppid() == pid else None


def read_orders(control: socket.socket) -> Orders:
    """The orders, from the control socket: 8 bytes length, pickled orders, classes of the script."""
    stream = control.makefile("rb")
    size = int.from_bytes(stream.read(8), "little")
    raw = stream.read(size)
    if len(raw) < size:
        os._exit(0)  # the trainer is gone
    _die_with_trainer(control, True)
    try:
        return unpack(raw)
    finally:
        _die_with_trainer(control, False)


def _die_with_trainer(control: socket.socket, on: bool) -> None:
    """Imports may take long, and nobody polls meanwhile: a hang-up then raises SIGIO, which ends a process."""
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC if on else flags & ~os.O_ASYNC)


def _report(to_trainer: socket.socket, error: BaseException) -> None:
    known = error if isinstance(error, ZephonError) else WorkerError(f"the launcher failed: {describe(error)}")
    raw = pickle.dumps(known)
    if len(raw) > MOST_ERROR_BYTES:
        known.__cause__ = None  # the text says it too
        raw = pickle.dumps(known)
    with contextlib.suppress(OSError):
        to_trainer.send(b"X" + msgspec.msgpack.encode([raw]))


class _Tree:
    """The processes below the launcher."""

    def __init__(
        self, orders: Orders, serve_engine: Callable[..., None], control: socket.socket, to_trainer: socket.socket
    ) -> None:
        self._orders, self._control = orders, control
        self._wirings = make_wirings(orders.workers, orders.ring_bytes)
        self._engine_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._children: dict[int, tuple[int, int, int]] = {}  # pidfd -> (pid, stage, index); the engine is stage -1
        self._poll = select.poll()
        _check_threads()
        self._fork(-1, 0, lambda: serve_engine(orders.job, self._wirings, to_trainer, child_end))
        child_end.close()
        to_trainer.close()
        for stage, count in enumerate(orders.workers):
            for index in range(count):
                self._fork_worker(stage, index)

    def _fork_worker(self, stage: int, index: int) -> None:
        work, wiring = self._orders.works[stage], self._wirings[stage][index]
        self._fork(stage, index, lambda: serve(work, *wiring.worker_ends()))

    def _fork(self, stage: int, index: int, run: Callable[[], None]) -> None:
        """Forks a child that runs `run` and never returns."""
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _die_with(launcher)
                self._control.close()
                self._engine_end.close()
                for pidfd in self._children:
                    os.close(pidfd)
                run()
                os._exit(0)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"zephon: a child process failed: {describe(error)}\n")
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, stage, index)
        self._poll.register(pidfd, select.POLLIN)

    def watch(self, trainer: int) -> None:
        """Serves until the tree must end, and ends it."""
        self._poll.register(trainer, select.POLLIN)
        self._poll.register(self._control.fileno(), select.POLLIN | select.POLLHUP)
        self._poll.register(self._engine_end.fileno(), select.POLLIN)
        over = False
        while not over:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    over |= self._reap(fd)
                elif fd == self._engine_end.fileno():
                    over |= self._serve_engine()
                else:
                    over = True  # the trainer closed, or is gone
        self._end()

    def _reap(self, pidfd: int) -> bool:
        """Takes a dead child's status; returns whether it was the engine."""
        pid, stage, index = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if stage < 0:
            return True
        with contextlib.suppress(OSError):
            self._engine_end.send(msgspec.msgpack.encode([stage, index, status]))
        return False

    def _serve_engine(self) -> bool:
        """A request of the engine for a worker; returns whether the engine is gone."""
        request = self._engine_end.recv(1 << 16)
        if not request:
            return True
        stage, index = msgspec.msgpack.decode(request)
        self._fork_worker(stage, index)
        return False

    def _end(self) -> None:
        for pid, _, _ in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid, _, _ in self._children.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        _kill_session()


def make_wirings(workers: Sequence[int], wanted_ring_bytes: int) -> list[list[Wiring]]:
    """The rings of all stages, in one segment a stage. Rings shrink where many workers would need too much memory.

    Behind the rings lies an area for each worker, which takes no memory until large results need it.
    """
    most = MOST_RING_MEMORY // max(1, sum(workers)) - TASK_CAPACITY
    capacity = max(LEAST_CAPACITY, min(wanted_ring_bytes, most)) // 4096 * 4096
    area = min(RINGS_IN_AREA * capacity, MOST_AREA_MEMORY // max(1, sum(workers)) // 4096 * 4096)
    cut, size = ring_bytes(TASK_CAPACITY), Wiring.size(TASK_CAPACITY, capacity)
    wirings = []
    for count in workers:
        segment = Segment.create(size * count, unreserved=area * count)
        memory = memoryview(segment.map)
        stage = []
        for index in range(count):
            own, at = memory[index * size : (index + 1) * size], segment.size - area * (index + 1)
            rings = (own[:cut], own[cut:], TASK_CAPACITY, capacity)
            area_ = (memory[at : at + area], (segment.fd, at))
            stage.append(Wiring(*rings, Wake(), Wake(), Wake(), Wake(), *area_))
        wirings.append(stage)
    return wirings


def _die_with(parent: int) -> None:
    """The calling process is killed when its parent ends. Its parent has one thread, so that is the process's end."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _kill_session() -> None:
    """Kills what user code started and left behind in the launcher's session."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == os.getpid() != pid:
                os.kill(pid, signal.SIGKILL)


def _check_threads() -> None:
    """A fork copies one thread only; a lock that another one holds is then held for ever."""
    number = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    if number > 1:
        warnings.warn(
            f"importing the pipeline's modules started {number - 1} threads in the launcher; workers forked from it "
            "may hang where such a thread holds a lock; start threads in an operator's setup() instead",
            RuntimeWarning,
            stacklevel=2,
        )

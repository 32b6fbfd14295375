"""Starting and ending a launcher from the trainer. The trainer itself is never forked: it is exec'ed anew.

This module imports little, so that the launcher starts first and imports at the same time as the trainer.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from zephon.errors import WorkerError, ZephonError, describe
from zephon.limits import limit_error
from zephon.runners import interpreter, leftovers, signals

if TYPE_CHECKING:
    from zephon.runners.orders import Orders

# The collector would walk through all modules again and again while they are imported; it is on again for user code.
_CODE = """
import gc
gc.disable()
from zephon.runners.launcher import main
main({control}, {engine}, {pid}, {module!r})
"""
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STOP_TIMEOUT_S = 1.5


class Launcher:
    """A running launcher, which waits for `send`. `engine` is the trainer's end of the socket to the engine process.

    `module`: whose `serve` the engine process runs.
    """

    def __init__(self, module: str) -> None:
        try:
            self._control, control = interpreter.socket_pair(socket.SOCK_STREAM)
            self.engine, engine = interpreter.socket_pair(socket.SOCK_SEQPACKET)
            path = interpreter.write_path([*sys.path, _ROOT])
        except OSError as error:
            raise _not_started(error) from error
        code = _CODE.format(control=control.fileno(), engine=engine.fileno(), pid=os.getpid(), module=module)
        try:
            with signals.kept():
                self._process = subprocess.Popen(
                    interpreter.arguments(path, code),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(path, control.fileno(), engine.fileno()),
                    start_new_session=True,
                    env=interpreter.environment(),
                )
        except OSError as error:
            self._control.close()
            self.engine.close()
            raise _not_started(error) from error
        finally:
            os.close(path)
            control.close()
            engine.close()

    def send(self, orders: Orders) -> None:
        """Sends the orders. Once. Raises ConfigError that names what cannot be sent; closes where it fails."""
        from zephon.runners.heap import trim
        from zephon.runners.orders import pack

        try:
            raw, fds = pack(orders)
            socket.send_fds(self._control, [len(raw).to_bytes(8, "little")], fds)
            self._control.sendall(raw)
            del raw
            trim()  # in the time that the launcher needs anyway
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _not_started(error) from error
            raise

    def exit_status(self) -> int | None:
        """How the launcher ended; None while it runs."""
        return self._process.poll()

    def is_gone(self) -> bool:
        """Whether it ended, or its main thread alone: then its children died with that, and the kernel tells nobody."""
        return self._is_over() or self.state() == "Z"

    def state(self) -> str:
        """What the kernel says that it does; see `state_of`."""
        from zephon.runners.whereabouts import state_of

        return state_of(self._process.pid)

    def close(self) -> None:
        """Ends launcher, engine and workers."""
        with contextlib.suppress(OSError):  # a child that the trainer forked may hold a copy of it
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        with contextlib.suppress(OSError):
            self.engine.close()
        self._signal(signal.SIGCONT)  # a stopped one could not end its tree
        ended = False
        try:
            ended = self._ended(STOP_TIMEOUT_S)
        finally:  # also where a second Ctrl-C ends the wait
            if not ended:
                self._signal(signal.SIGKILL)
            if not self._cleared():
                with contextlib.suppress(OSError):
                    leftovers.end_session(self._process.pid)
            self._process.wait()

    def _is_over(self) -> bool:
        """Whether the launcher ended. Its status is left to be collected: until then its pid is no other process's."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _signal(self, number: int) -> None:
        """`Popen.send_signal` collects a status."""
        if not self._is_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _cleared(self) -> bool:
        """Waits for its end; whether it ended in its own way, which leaves nothing of what user code started."""
        try:
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # collected by another thread: its pid may be any process's
            return True
        return end is None or (end.si_code == os.CLD_EXITED and end.si_status in (0, 1))

    def _ended(self, timeout_s: float) -> bool:
        """Whether the launcher ends within a time. A pidfd wakes at once; `Popen.wait(timeout)` looks now and then."""
        if self._is_over():
            return True
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # another thread collected it
            return True
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(timeout_s * 1000))
        finally:
            os.close(pidfd)


def _not_started(error: OSError) -> ZephonError:
    known = limit_error(error, f"the start of the launcher ({sys.executable})")
    return known or WorkerError(f"the launcher ({sys.executable}) did not start: {describe(error)}")

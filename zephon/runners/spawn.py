"""Starting and ending a launcher from the trainer. The trainer itself is never forked: it is exec'ed anew."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zephon.errors import ConfigError, WorkerError, describe
from zephon.ipc.codec import dump_by_value
from zephon.runners.execute import StageWork
from zephon.runners.launcher import Orders

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
_CODE = """
import sys
sys.path[:] = {path!r}
from zephon.runners.launcher import main
main({control}, {engine}, {pid}, {module!r})
"""
STOP_TIMEOUT_S = 2.0


class Launcher:
    """A running launcher. `engine` is the trainer's end of the socket to the engine process.

    `module`: whose `serve` the engine process runs.
    """

    def __init__(self, module: str, orders: Orders) -> None:
        self._control, control = socket.socketpair()
        self.engine, engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [*(entry for entry in sys.path if isinstance(entry, str)), str(Path(__file__).parents[2])]
        code = _CODE.format(path=path, control=control.fileno(), engine=engine.fileno(), pid=os.getpid(), module=module)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(control.fileno(), engine.fileno()),
            start_new_session=True,
            env=_environment(),
        )
        control.close()
        engine.close()
        try:
            raw = _pickled(orders)  # while the launcher starts and imports
            self._control.sendall(len(raw).to_bytes(8, "little") + raw)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise WorkerError(f"the launcher ({sys.executable}) did not start: {describe(error)}") from error
            raise

    def exit_status(self) -> int | None:
        """How the launcher ended; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Ends launcher, engine and workers."""
        with contextlib.suppress(OSError):  # a child that the trainer forked may hold a copy of it
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        with contextlib.suppress(OSError):
            self.engine.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """The environment of the tree: one thread for each numeric library, one hash seed for all processes."""
    threads = dict.fromkeys(_ONE_THREAD, "1")
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}


def _pickled(orders: Orders) -> bytes:
    """The orders, functions of the user's script by value. Raises ConfigError that names what cannot be sent."""
    try:
        raw, script_classes = dump_by_value(orders)
    except Exception as error:
        culprit = _culprit(orders.works)
        raise ConfigError(
            f"{culprit} cannot be sent to another process: {describe(error)}; open files, locks and connections belong "
            "into an operator's setup(); or use runner='threads' or 'inline'"
        ) from error
    return pickle.dumps((raw, dump_by_value(script_classes)[0]))


def _culprit(works: Sequence[StageWork]) -> str:
    for work in works:
        for operator in work.operators:
            try:
                dump_by_value(operator)
            except Exception:
                return f"operator '{operator.name}'"
    return "the pipeline"

"""What the tests of the process runner share: small pipelines, who lives below a process, scripts under watch."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zephon as zp

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
MARK = "ZEPHON_TEST_MARK"


# For a script: its file system refuses unnamed files, so that memory has a name for a moment.
WITHOUT_TMPFILE = """
import errno, os
real = os.open
def without_tmpfile(path, flags, *rest, **settings):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no unnamed files here")
    return real(path, flags, *rest, **settings)
os.open = without_tmpfile
"""


def line(rows: int = 64, *functions: Any, batch: int = 4, **options: Any) -> zp.Pipeline:
    """ids 0, 1, 2, ... through `functions` on one lane (unless told otherwise) and two worker processes."""
    dataset = options.pop("dataset", None) or zp.Dataset.from_list("toy", [{"id": i} for i in range(rows)])
    pipeline = zp.Pipeline(
        zp.StaticMixture([dataset], seed=1, shuffle="none", chunk_size=options.pop("chunk_size", 16))
    )
    for function in functions:
        pipeline = pipeline.map(function)
    settings = {"runner": "process", "parallelism": 2, "canonical_replicas": 1, "task_records": 8, **options}
    return pipeline.batch(batch).options(**settings)


def slow(*values: Any) -> Any:
    """A parameter of a test that waits for `--long`, as others cover most of it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def ids(batches: Iterable[zp.Batch]) -> list[int]:
    """The ids of all samples, in order."""
    return [int(i) for batch in batches for i in batch["id"]]


def digests(batches: Iterable[zp.Batch]) -> list[str]:
    """What every batch holds."""
    return [batch.digest() for batch in batches]


def to_the_error(
    batches: Iterable[zp.Batch],
    found: list[Any],
    of: Callable[[Iterable[zp.Batch]], list[Any]] = ids,
    most_s: float = 5.0,
) -> zp.errors.ZephonError:
    """Adds the ids, or what `of` gives, of all batches before the error, which comes in time after the last one."""
    began = time.monotonic()
    try:
        for batch in batches:
            found += of([batch])
            began = time.monotonic()
    except zp.errors.ZephonError as error:
        assert time.monotonic() - began < most_s
        return error
    raise AssertionError("no error")


# -- processes -------------------------------------------------------------------------------------------------------


def wait_until(holds: Callable[[], Any], timeout_s: float = 10.0, what: str = "it") -> Any:
    """What `holds` returns, once that is true."""
    deadline, poll = time.monotonic() + timeout_s, select.poll()
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        poll.poll(2)
    return found


def children(pid: int) -> list[int]:
    """The live children of a process, in the order in which they were made."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return [child for child in found if lives(child)]


def lives(pid: int) -> bool:
    """Whether a process runs (one that only waits to be collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def launcher(pid: int | None = None) -> int:
    """The launcher of the one running pipeline of a process."""

    def found() -> list[int]:
        return [child for child in children(pid or os.getpid()) if "zephon.runners.launcher" in command(child)]

    return int(wait_until(found, what="a launcher")[0])


def command(pid: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def engine(pid: int | None = None) -> int:
    """The engine process of the one running pipeline of a process."""
    return int(wait_until(lambda: children(launcher(pid)), what="an engine")[0])


def workers(count: int = 2, pid: int | None = None) -> list[int]:
    """The workers of the one running pipeline of a process; waits for all of them."""
    boss = launcher(pid)
    return list(wait_until(lambda: len(found := children(boss)) > count and found, what=f"{count} workers")[1:])


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal; a process that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def rests(pid: int, timeout_s: float = 20.0) -> None:
    """Waits until a process uses no more time."""
    seen: list[str] = []

    def still() -> bool:
        seen.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
        return len(seen) > 100 and seen[-1] == seen[-100]

    wait_until(still, timeout_s, "rest")


def open_descriptors() -> int:
    """Descriptors of this process. An earlier test's pipeline may wait in a cycle (an error's frames hold it)."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- scripts ---------------------------------------------------------------------------------------------------------


class Script:
    """A Python script in a process group of its own, and everything that it starts.

    Every process below it carries a mark in its environment, so none is overlooked, whoever its parent is now.
    """

    def __init__(self, code: str, *args: Any, argv: list[str] | None = None, **settings: Any) -> None:
        self.mark = secrets.token_hex(8)
        self.names = set(os.listdir(SHM))
        self._read = b""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **settings.pop("env", {})}
        environment[MARK] = self.mark
        self.process = subprocess.Popen(
            [sys.executable, *(argv or ["-c", code]), *map(str, args)],
            stdin=settings.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            **settings,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def readline(self, timeout_s: float = 30.0) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        poll, deadline = select.poll(), time.monotonic() + timeout_s
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._read:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            assert poll.poll(left_ms), f"no line within {timeout_s} s"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, f"it ended: {self.end()}"
            self._read += more
        text, _, self._read = self._read.partition(b"\n")
        return text.decode()

    def end(self, timeout_s: float = 30.0) -> tuple[int, str, str]:
        """Waits for its end: (exit status, rest of its output, errors). Nothing of it may be left after 5 s."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate()
            raise AssertionError(f"the script did not end within {timeout_s} s\n{out}\n{err}") from None
        self.nothing_left()
        return self.process.returncode, self._read.decode() + out, err

    def nothing_left(self, timeout_s: float = 5.0) -> None:
        """No process of it lives, and there is no new name in /dev/shm."""
        try:
            wait_until(lambda: not self.processes(), timeout_s, "the end of " + str(self.processes()))
        finally:
            self.kill_all()
        wait_until(lambda: not self.new_names(), 5, "the end of names in /dev/shm")

    def new_names(self) -> set[str]:
        """Names of segments that were not there before it started. Those of a neighbour vanish at once."""
        return {name for name in set(os.listdir(SHM)) - self.names if name.startswith("zephon-")}

    def processes(self) -> dict[int, str]:
        """The live processes that carry the mark, with their command lines."""
        return {pid: command(pid) for pid in self._marked()}

    def _marked(self) -> Iterator[int]:
        wanted = f"{MARK}={self.mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes() and lives(int(path.parent.name)):
                    yield int(path.parent.name)

    def kill_all(self) -> None:
        """Ends what should have ended by itself."""
        for pid in list(self._marked()):
            kill(pid)


def run_script(code: str, *args: Any, timeout_s: float = 30.0, **settings: Any) -> tuple[int, str, str]:
    """Runs a script to its end: (exit status, output, errors), with nothing left behind."""
    return Script(code, *args, **settings).end(timeout_s)


def is_clean(errors: str) -> None:
    """Nothing on standard error that Python prints about things that went wrong while it ended."""
    for text in ("Exception ignored", "resource_tracker", "leaked", "ResourceWarning", "Traceback"):
        assert text not in errors, errors

"""Names in /dev/shm: those of dead owners are removed, those of live ones and of strangers never."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.helpers import WITHOUT_TMPFILE
from zephon.ipc import names

START = names._started(os.getpid()) or 0
SPACE = os.stat("/proc/self/ns/pid").st_ino
TAIL = "0123456789abcdef"


@pytest.fixture(scope="module")
def dead() -> int:
    """The pid of a process that is gone."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def left(folder: Path, *given: str) -> set[str]:
    """Which of these files are there after a reaping."""
    for name in given:
        (folder / name).write_text("")
    names.reap(str(folder))
    return set(os.listdir(folder))


def test_a_new_name_says_whose_it_is(tmp_path: Path) -> None:
    first, second = names.new(), names.new()
    assert first != second
    assert first.startswith(f"zephon-{os.getpid()}-{START}-{SPACE}-")
    assert left(tmp_path, first, second) == {first, second}


def test_names_of_dead_owners_go(dead: int, tmp_path: Path) -> None:
    """Also where the pid is in use again, by a process that started at another time."""
    again = f"zephon-{os.getpid()}-{START - 1}-{SPACE}-{TAIL}"
    assert left(tmp_path, f"zephon-{dead}-77-{SPACE}-{TAIL}", again) == set()


def test_a_live_process_keeps_its_names(tmp_path: Path) -> None:
    """A child, a process of the system, and this one."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        live = {f"zephon-{pid}-{names._started(pid)}-{SPACE}-{TAIL}" for pid in (other.pid, os.getpid(), os.getppid())}
        assert left(tmp_path, *live) == live
    finally:
        other.communicate()


def test_what_cannot_be_judged_stays(dead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pid of another namespace (containers that share /dev/shm), a name of someone else's making."""
    strange = {
        f"zephon-{dead}-77-{SPACE + 1}-{TAIL}",
        f"zephon-{dead}-77-0-{TAIL}",
        f"zephon-{dead}-77-{SPACE}-short",
        f"zephon-{dead}",
        f"other-{dead}-77-{SPACE}-{TAIL}",
        f"zephon-{os.getppid()}-0-{SPACE}-{TAIL}",  # when it started is not known
    }
    assert left(tmp_path, *strange) == strange
    monkeypatch.setattr(names, "_namespace", lambda: 0)  # /proc is not there
    mine = f"zephon-{dead}-77-{SPACE}-{TAIL}"
    assert left(tmp_path, mine) == {*strange, mine}


def test_another_users_process_counts_as_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be signalled, and where /proc is hidden its start cannot be read."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "kill", refused)
    monkeypatch.setattr(names, "_started", lambda pid: None)
    name = f"zephon-{os.getppid()}-5-{SPACE}-{TAIL}"
    assert left(tmp_path, name) == {name}


def test_a_missing_folder_is_fine(tmp_path: Path) -> None:
    names.reap(str(tmp_path / "missing"))


# A process that dies between making the name and removing it, as a SIGKILL can have it.
DIES = f"""{WITHOUT_TMPFILE}
import signal
import posix_ipc
from zephon.ipc.segment import Segment
class Dies(posix_ipc.SharedMemory):
    def unlink(self):
        os.kill(os.getpid(), signal.SIGKILL) if LAST else super().unlink()
posix_ipc.SharedMemory = Dies
Segment.create(4096)
"""


def test_a_later_start_removes_what_a_sigkill_left() -> None:
    """Between the two calls that make and unname POSIX shared memory, where unnamed files are refused."""
    shm = Path("/dev/shm")
    root = Path(__file__).parents[2]

    def run(last: bool) -> tuple[int, set[str]]:
        code = DIES.replace("LAST", str(last))
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)})
        process.wait(30)
        seen.append(process.pid)
        return process.returncode, {n for n in os.listdir(shm) if n.startswith(tuple(f"zephon-{p}-" for p in seen))}

    seen: list[int] = []
    status, found = run(True)
    assert (status, len(found)) == (-signal.SIGKILL, 1)
    assert run(False) == (0, set())

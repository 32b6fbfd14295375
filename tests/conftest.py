"""What every test runs under: the hypothesis profile, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

PATIENCE_S = 2.0  # how long a thread or process that was told to end may take (law L8 for close())
SHARED = Path("/dev/shm")

EXAMPLES = 80  # of a property in the short suite
_BASE = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _BASE, max_examples=EXAMPLES, derandomize=True)
settings.register_profile("fuzz", _BASE, max_examples=EXAMPLES, derandomize=True, phases=[Phase.generate])
settings.register_profile("long", _BASE, max_examples=10_000, derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help=f"10,000 new examples a property instead of {EXAMPLES} fixed ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    """`--long`, or HYPOTHESIS_PROFILE=long, chooses the profile; hypothesis's own option wins over both.

    A shell ignores Ctrl-C for what it runs in the background, and children inherit that: here it means what it says.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("long" if config.getoption("--long") else os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests wait for `--long`: some of them move gigabytes or take minutes."""
    if config.getoption("--long") or os.environ.get("HYPOTHESIS_PROFILE") == "long":
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --long"))


def pytest_collection_finish() -> None:
    """What is there now stays: a full collection, which many tests ask for, need not look at 4,000 tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level_comes_back() -> Iterator[None]:
    """Commands ask for quiet, for a process that is theirs; here the next test is in it too."""
    log = logging.getLogger("zephon")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails the test that leaves a non-daemon thread, a live child process or a name in /dev/shm behind."""
    threads, children, names = set(threading.enumerate()), _children(), _shared_names()
    yield
    left = [f"thread {thread.name!r}" for thread in set(threading.enumerate()) - threads if _still_runs(thread)]
    left += [f"process {pid}: {_command(pid)}" for pid in _children() - children if _still_lives(pid)]
    left += [f"/dev/shm/{name}" for name in sorted(_shared_names() - names) if not _is_of_another_job(name)]
    assert not left, f"left behind by this test: {', '.join(left)}"


def _still_runs(thread: threading.Thread) -> bool:
    if thread.daemon:
        return False
    thread.join(PATIENCE_S)
    return thread.is_alive()


def _children() -> set[int]:
    """The live child processes of this process, those that no Python object knows too."""
    multiprocessing.active_children()  # collects the dead ones
    pids: set[int] = set()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            pids.update(map(int, path.read_text().split()))
        except OSError:  # the thread ended meanwhile
            continue
    return {pid for pid in pids if _state(pid) not in ("", "Z", "X")}


def _state(pid: int) -> str:
    """The kernel's letter for what a process is doing; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _still_lives(pid: int) -> bool:
    """Waits a moment for a process that is ending."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        ended, _, _ = select.select([watch], [], [], PATIENCE_S)
        return not ended
    finally:
        os.close(watch)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "(ended)"


def _shared_names() -> set[str]:
    """Zephon's own names. Others, as a semaphore of multiprocessing, may be a neighbour's: they do not say whose."""
    return {name for name in os.listdir(SHARED) if name.startswith("zephon-")} if SHARED.is_dir() else set()


def _is_of_another_job(name: str) -> bool:
    """Whether a process that runs outside of this one's tree is named in the name: a neighbour's test run."""
    owner = re.match(r"zephon-(\d+)-", name)
    return owner is not None and bool(_state(int(owner[1]))) and not _is_below_us(int(owner[1]))


def _is_below_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            return False
    return False

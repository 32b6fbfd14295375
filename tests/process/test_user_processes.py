"""L1, L8: processes that user code starts end with the pipeline, and those that it forks do none of its work."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.helpers import SHM, Script, children, engine, kill, launcher, line, lives, wait_until

pytestmark = pytest.mark.law("L8")

ENDS = {
    "returns": "pass",
    "exits": "sys.exit(0)",
    "raises": "raise ValueError('child')",
}
FORK = """
def fork(mark):
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    pid = os.fork()
    if pid == 0:
        {end}
        return True
    os.waitpid(pid, 0)
    return False
"""
PLACES = {
    "a function": "def work(record):\n    return {{'id': -1}} if record['id'] == 50 and fork({mark!r}) else record",
    "the import": "fork({mark!r})\ndef work(record):\n    return record",
}
SCRIPT = """
import sys
import zephon as zp
sys.path.insert(0, sys.argv[1])
import forking
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(400)])
mixture = getattr(forking, "Mixture", zp.StaticMixture)
pipeline = zp.Pipeline(mixture([dataset], seed=3, shuffle="none")).map(forking.work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=4)
found = [i for batch in pipeline for i in batch["id"].tolist()]
pipeline.close()
assert found == list(range(400)), found
"""
ENGINE = """
import zephon as zp
class Mixture(zp.StaticMixture):
    def chunks(self, *args, **settings):
        if "launcher" in open("/proc/self/cmdline").read():
            fork({mark!r})
        return super().chunks(*args, **settings)
def work(record):
    return record
"""


@pytest.mark.law("L1")
@pytest.mark.parametrize("place", [*PLACES, "the engine"])
@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_that_comes_back_does_no_work(end: str, place: str, tmp_path: Path) -> None:
    module = "import os, sys\n" + FORK.format(end=ENDS[end])
    module += (PLACES | {"the engine": ENGINE})[place].format(mark=str(tmp_path / "mark"))
    if place == "the import":  # in the trainer, which imports it first, it is the user's own affair
        condition = "if 'launcher' in open('/proc/self/cmdline').read():\n"
        module = module.replace("fork('", condition + "    fork('")
    (tmp_path / "forking.py").write_text(module)
    status, _, errors = Script(SCRIPT, tmp_path).end()
    assert status == 0, errors
    assert (tmp_path / "mark").exists()
    assert errors.count("came back from that code; it is ended here") == 1
    assert len(errors.splitlines()) == 1, errors


class Start:
    """Starts programs at the first record of a worker: one in its session, one in a session of its own."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.pids:
            programs = [subprocess.Popen(["sleep", "100"], start_new_session=new) for new in (False, True)]
            twice = ["sh", "-c", "setsid sh -c 'echo $$; exec sleep 100 >/dev/null' & wait"]
            nested = subprocess.Popen(twice, stdout=subprocess.PIPE)
            assert nested.stdout is not None
            self.pids = [*(program.pid for program in programs), nested.pid, int(nested.stdout.readline())]
        return {**record, "pids": self.pids}


def test_programs_in_sessions_of_their_own_end_too() -> None:
    with line(64, Start()) as pipeline:
        iterator = iter(pipeline)
        found = [pid for batch in islice(iterator, 4) for pids in batch["pids"] for pid in pids]
        assert all(map(lives, found))
    wait_until(lambda: not any(map(lives, found)), 5, "the end of the programs")


@contextlib.contextmanager
def without(victim: Callable[[], int]) -> Iterator[list[int]]:
    """The programs that a pipeline has started; one of its processes was killed, and that was an error."""
    with line(4000, Start()) as pipeline:
        iterator = iter(pipeline)
        found = [pid for pids in next(iterator)["pids"] for pid in pids]
        kill(victim())
        with pytest.raises(zp.errors.WorkerError):
            list(iterator)
        yield found


def test_an_engine_that_is_killed_leaves_no_program() -> None:
    with without(engine) as found:
        wait_until(lambda: not any(map(lives, found)), 5, "the end of the programs")


def test_a_launcher_that_is_killed_leaves_no_program_of_its_session() -> None:
    with without(launcher) as found:
        wait_until(lambda: not any(map(lives, (found[0], found[2]))), 5, "the end of the programs")
        for pid in found:  # who left the session lost its parents too: nothing tells whose it was
            kill(pid)


IMPORTING = """
import subprocess, threading
if "launcher" in open("/proc/self/cmdline").read():
    print(subprocess.Popen(["sleep", "100"]).pid, flush=True)
    {then}
def work(record):
    return record
"""
CLOSING = SCRIPT[: SCRIPT.index("found =")] + textwrap.dedent(
    """
    import threading
    def stop():
        sys.stdin.readline()
        pipeline.close()
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        next(iter(pipeline))
    except (zp.errors.Closed, zp.errors.ConfigError) as error:
        print(type(error).__name__, flush=True)
    """
)


@pytest.mark.parametrize(
    ("then", "error"),
    [("threading.Event().wait()", "Closed"), ("raise ValueError('no')", "ConfigError")],
    ids=["long", "fails"],
)
def test_a_program_that_a_module_starts_ends_with_the_import(then: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(IMPORTING.format(then=then))
    script = Script(CLOSING, tmp_path, stdin=subprocess.PIPE)
    program = int(script.readline())
    told = []
    if error == "ConfigError":
        told.append(script.readline())  # else close() might come first
    else:
        assert lives(program)
    assert script.process.stdin is not None
    script.process.stdin.write("stop\n")
    script.process.stdin.flush()
    status, out, errors = script.end()  # nothing of it is left
    assert (status, [*told, *out.split()]) == (0, [error]), errors


class Shared(zp.Operator):
    """Memory with a name, which a resource tracker removes when its makers are gone."""

    def setup(self) -> None:
        self.memory = SharedMemory(create=True, size=1 << 12)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "name": self.memory.name}


@pytest.mark.parametrize("how", ["closed", "launcher killed"])
def test_a_resource_tracker_has_time_to_remove_the_names_of_user_code(how: str) -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(4000)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(Shared()).batch(4)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=4) as running:
        iterator = iter(running)
        names = {name.lstrip("/") for batch in islice(iterator, 8) for name in batch["name"]}
        assert all((SHM / name).exists() for name in names)
        below = children(launcher())
        if how == "launcher killed":
            kill(launcher())
            with pytest.raises(zp.errors.WorkerError):
                list(iterator)
    wait_until(lambda: not any((SHM / name).exists() for name in names), 5, "the end of the names")
    assert not any(map(lives, below))


def test_a_tracker_that_a_module_starts_at_import(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(
        "from multiprocessing.shared_memory import SharedMemory\nmemory = SharedMemory(create=True, size=4096)\n"
        "def work(record):\n    print(memory.name.lstrip('/'), flush=True)\n    return record\n"
    )
    script = Script(SCRIPT, tmp_path)
    status, out, errors = script.end()
    assert status == 0, errors
    assert not [name for name in set(out.split()) if (SHM / name).exists()]


class Stuck:
    """Starts what looks like a resource tracker and never ends."""

    def __init__(self) -> None:
        self.pid = 0

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.pid:
            code = "import time\ntime.sleep(100)\ndef main(): from multiprocessing.resource_tracker import main"
            self.pid = subprocess.Popen([sys.executable, "-c", code]).pid
        return {**record, "pid": self.pid}


def test_a_tracker_that_does_not_end_is_killed_in_the_end() -> None:
    with line(64, Stuck()) as pipeline:
        iterator = iter(pipeline)
        found = [int(pid) for batch in islice(iterator, 4) for pid in batch["pid"]]
        assert all(map(lives, found))
        began = time.monotonic()
    assert time.monotonic() - began < 2
    wait_until(lambda: not any(map(lives, found)), 5, "the end of the trackers")

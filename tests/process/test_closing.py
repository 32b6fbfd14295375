"""L8: every way of leaving ends the whole tree in under 2 s: no process, no descriptor, no name, no word on stderr."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Forks, Full, Stand, burn
from tests.process.helpers import (
    children,
    ids,
    is_clean,
    kill,
    launcher,
    line,
    lives,
    open_descriptors,
    run_script,
    slow,
    to_the_error,
    wait_until,
    workers,
)

pytestmark = pytest.mark.law("L8")


def by_close(pipeline: zp.Pipeline, iterator: Any) -> None:
    pipeline.close()
    pipeline.close()


def by_with(pipeline: zp.Pipeline, iterator: Any) -> None:
    with pipeline:
        next(iterator)


def by_an_exception(pipeline: zp.Pipeline, iterator: Any) -> None:
    with contextlib.suppress(RuntimeError), pipeline:
        next(iterator)
        raise RuntimeError("the loop failed")


def by_a_new_iterator(pipeline: zp.Pipeline, iterator: Any) -> None:
    iter(pipeline)


def by_loading_a_state(pipeline: zp.Pipeline, iterator: Any) -> None:
    pipeline.load_state_dict(pipeline.state_dict())


def by_the_end(pipeline: zp.Pipeline, iterator: Any) -> None:
    assert len(ids(iterator)) > 100


WAYS = [by_close, by_with, by_an_exception, by_a_new_iterator, by_loading_a_state, by_the_end]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_of_leaving(way: Callable[[zp.Pipeline, Any], None]) -> None:
    descriptors = open_descriptors()
    pipeline = line(400, burn)
    iterator = iter(pipeline)
    next(iterator)
    tree = [launcher(), *children(launcher())]
    assert len(tree) == 4
    began = time.monotonic()
    way(pipeline, iterator)
    assert time.monotonic() - began < 2
    assert not any(map(lives, tree))
    assert not children(os.getpid())
    del iterator
    gc.collect()
    assert open_descriptors() <= descriptors
    pipeline.close()


def test_a_forgotten_iterator() -> None:
    """break, and dropping the last reference."""
    descriptors = open_descriptors()
    for batch in line(400, burn):
        if batch["id"][0] == 12:
            tree = [launcher(), *children(launcher())]
            break
    del batch
    gc.collect()
    assert not any(map(lives, tree))
    assert open_descriptors() <= descriptors


def test_an_iterator_that_never_began_starts_nothing() -> None:
    pipeline = line(40)
    iter(pipeline)
    assert not children(os.getpid())
    pipeline.close()


def test_closing_while_a_function_never_ends(tmp_path: Path) -> None:
    pipeline = line(400, Stand(tmp_path, 40))
    iterator = iter(pipeline)
    found = ids(islice(iterator, 2))
    wait_until((tmp_path / "standing").exists)
    began = time.monotonic()
    pipeline.close()
    assert time.monotonic() - began < 2
    assert found == list(range(8))


def test_closing_from_another_thread_while_next_waits(tmp_path: Path) -> None:
    pipeline = line(400, Stand(tmp_path, 2))
    iterator = iter(pipeline)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until((tmp_path / "standing").exists)
    began = time.monotonic()
    pipeline.close()
    thread.join(5)
    assert time.monotonic() - began < 2
    assert [type(error) for error in errors] == [zp.errors.Closed]
    with pytest.raises(zp.errors.Closed):
        next(iterator)


@pytest.mark.parametrize("kind", [TimeoutError, BlockingIOError, ConnectionResetError, InterruptedError, RuntimeError])
def test_an_exception_of_the_trainers_own_signal_handler_is_its_own(kind: type[Exception], tmp_path: Path) -> None:
    """An alarm that guards `next`: it is raised as it is, once, and no batch is lost."""

    def ring(*_: object) -> None:
        raise kind("the trainer's alarm")

    pipeline = line(400, Stand(tmp_path, 10))
    before = signal.signal(signal.SIGALRM, ring)
    found: list[int] = []
    try:
        iterator = iter(pipeline)
        found += ids([next(iterator)])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(kind, match="the trainer's alarm"):
            found.extend(chain.from_iterable(map(ids, zip(iterator))))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        pipeline.close()
    assert found == list(range(len(found)))
    with pytest.raises(zp.errors.Closed, match="to go on, load the state"):
        next(iterator)


def test_an_interrupt_in_metrics_ends_the_iterator_rather_than_lose_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = line(4000, dict, prefetch_batches=8)
    iterator = iter(pipeline)
    found = ids(islice(iterator, 2))
    driver: Any = iterator._driver  # type: ignore[attr-defined]
    take = driver._next_message

    def struck() -> None:
        take()
        raise KeyboardInterrupt  # as it may come between the receipt of a message and its place in the tail

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_next_message", struck)
        with pytest.raises(KeyboardInterrupt):
            pipeline.metrics()
    error = to_the_error(iterator, found)
    assert isinstance(error, zp.errors.Closed)
    assert "to go on, load the state" in str(error)
    pipeline.load_state_dict(pipeline.state_dict())
    assert found + ids(pipeline) == list(range(4000))


def test_a_default_timeout_of_sockets_is_not_ours(tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    go_on = threading.Timer(0.5, (tmp_path / "go on").touch)
    try:
        pipeline = line(40, Stand(tmp_path, 20))
        go_on.start()
        assert ids(pipeline) == list(range(40))
    finally:
        socket.setdefaulttimeout(before)
        go_on.join()


def test_a_killed_launcher_is_noticed_whoever_holds_its_sockets(tmp_path: Path) -> None:
    pipeline = line(100_000, Forks(tmp_path))
    iterator = iter(pipeline)
    found = ids([next(iterator)])
    wait_until((tmp_path / "forked").exists)
    kill(launcher())
    try:
        assert isinstance(to_the_error(iterator, found), zp.errors.WorkerError)
    finally:
        (tmp_path / "go on").touch()
        pipeline.close()
    assert found == list(range(len(found)))


def all_dead(pids: list[int]) -> bool:
    return not any(map(lives, pids))


def test_closing_after_the_engine_was_killed() -> None:
    for victim in (0, 1):
        pipeline = line(4000, burn)
        iterator = iter(pipeline)
        next(iterator)
        tree = [launcher(), *children(launcher())]
        kill(tree[victim])
        wait_until(partial(all_dead, [tree[victim]]))
        pipeline.close()
        assert not children(os.getpid())
        wait_until(partial(all_dead, tree), 5)


def test_closing_with_more_than_a_thousand_open_descriptors() -> None:
    """select() fails from descriptor 1024 on."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with line(100) as pipeline:
            assert len(ids(islice(iter(pipeline), 3))) == 12
            assert pipeline.metrics()["totals"]["batches"] > 0
        assert not children(os.getpid())
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_kept_batches_outlive_the_pipeline() -> None:
    with line(64, Full(64)) as pipeline:
        kept = list(islice(iter(pipeline), 6))
    gc.collect()
    for number, batch in enumerate(kept):
        assert batch["x"].tolist() == [[i] * 64 for i in range(4 * number, 4 * number + 4)]
        batch["x"][:] = 0


START = """
import sys, threading
import zephon as zp
def work(record):
    return {**record, "pad": "x" * 1000}
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20_000)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3)).map(work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=2)
iterator = iter(pipeline)
kept = [next(iterator) for _ in range(3)]
"""
EXITS = {
    "with a live iterator": ("", 0),
    "sys.exit in the loop": ("for batch in iterator: sys.exit(5)", 5),
    "an exception in the loop": ("for batch in iterator: raise SystemExit(6)", 6),
    "os._exit": ("import os; os._exit(7)", 7),
    "a batch that waits to be collected": ("kept[0].me = kept; del kept", 0),
    "exec": ("import os; os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(8)'])", 8),
    "a daemon thread in next": (
        "def go():\n  try: list(iterator)\n  except zp.errors.Closed: pass\n"
        "threading.Thread(target=go, daemon=True).start(); threading.Event().wait(0.2)",
        0,
    ),
}


ALIKE = {"an exception in the loop", "a batch that waits to be collected", "exec"}


@pytest.mark.parametrize("way", [slow(way) if way in ALIKE else way for way in EXITS])
def test_the_interpreter_ends(way: str) -> None:
    code, wanted = EXITS[way]
    status, _, err = run_script(START + code)
    assert status == wanted, err
    is_clean(err)


def test_what_workers_print_is_not_lost() -> None:
    """They are killed in the end, so nothing may wait in a buffer; nothing comes twice, either."""
    code = START.replace("    return {", "    print('record', record['id'])\n    return {") + "pipeline.close()"
    status, out, err = run_script(code, env={"PYTHONUNBUFFERED": ""})
    assert (status, err) == (0, "")
    printed = out.split("\n")[:-1]
    assert len(printed) >= 12
    assert len(printed) == len(set(printed))


def test_a_trainer_that_ignores_the_ends_of_its_children() -> None:
    """What it ignores, it hands down: the launcher must hear of its own children's ends all the same."""
    code = (
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        + START.replace("    return {", "    die(record)\n    return {")
        + """
left = sum(batch.num_samples for batch in iterator)
assert left == 20_000 - 12, left
assert os.path.exists(sys.argv[1])
"""
    )
    code = code.replace(
        "def work",
        """
import os, signal
def die(record):
    if record["id"] == 9000 and not os.path.exists(PATH):
        open(PATH, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
def work""",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "died")
        status, _, err = run_script(code.replace("PATH", repr(path)), path)
    assert status == 0, err
    assert re.fullmatch(
        r"a worker died \(SIGKILL\): worker \d, where operator 'work' was on lane .*, row 9000\. .*\n", err
    )


def test_worker_programs_that_user_code_started_end_too(tmp_path: Path) -> None:
    with line(64, Spawn()) as pipeline:
        iterator = iter(pipeline)
        found = [int(pid) for batch in islice(iterator, 4) for pid in batch["pid"]]
        assert all(map(lives, found))
        assert len(workers()) == 2
    wait_until(lambda: not any(map(lives, found)), 5, "the end of the programs")


class Spawn:
    """Starts a program at the first record of a worker, and forgets it."""

    def __init__(self) -> None:
        self.pid = 0

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.pid:
            self.pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
        return {**record, "pid": self.pid}

"""The threads runner as a user meets it: nothing outlives its iterator, nothing hangs, a fork is harmless."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zephon as zp

from .cases.helpers import digests, ids, on, pipeline, resumed, saved

PATIENCE_S = 2.0  # law L8: what ends an iterator takes no longer


def line_of(workers: int = 2, num: int = 400, **settings: Any) -> zp.Pipeline:
    return on(pipeline(num, shuffle="global").map(dict).shuffle(5).map(dict).batch(4), workers, **settings)


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("zephon")}


@pytest.fixture
def started() -> Iterator[Callable[[], set[threading.Thread]]]:
    """Our threads that live now and did not before the test; at its end there must be none."""
    before = ours()
    yield lambda: ours() - before
    for thread in ours() - before:
        thread.join(PATIENCE_S)
    assert ours() <= before


Threads = Callable[[], set[threading.Thread]]


def test_an_iterator_that_nobody_asks_has_no_threads(started: Threads) -> None:
    iterator = iter(line_of())
    assert started() == set()
    next(iterator)
    assert started()


def test_a_dropped_iterator_ends_its_threads(started: Threads) -> None:
    line = line_of()
    iterator = iter(line)
    next(iterator)
    steps = line_of().steps()
    next(steps)
    assert started()
    del iterator, steps
    gc.collect()


def test_a_dropped_pipeline_whose_batch_is_kept_ends_its_threads(started: Threads) -> None:
    line = line_of()
    iterator = iter(line)
    batch = next(iterator)
    assert started()
    del line, iterator
    gc.collect()
    for thread in started():
        thread.join(PATIENCE_S)
    assert started() == set()
    assert len(ids([batch])) == 4


@pytest.mark.parametrize("how", ["end", "break", "close", "load", "newer", "error", "take"])
def test_every_way_to_end_an_iterator_ends_its_threads(started: Threads, how: str) -> None:
    def maybe(record: dict[str, Any]) -> dict[str, Any]:
        if how == "error" and record["id"] == 200:
            raise ValueError("bad")
        return record

    line = on(pipeline(400).map(maybe, version="1").batch(4), 3)
    line = line.take(3) if how == "take" else line
    iterator = iter(line)
    next(iterator)
    assert started()
    if how in ("end", "take"):
        assert len(list(iterator)) == (2 if how == "take" else 99)
    elif how == "close":
        line.close()
    elif how == "load":
        line.load_state_dict(saved(line))
    elif how == "newer":
        iter(line)
    elif how == "error":
        with pytest.raises(ValueError, match="row 200"):
            list(iterator)
    else:
        for _ in iterator:
            break
        del iterator


class Payload:
    """A value of a record that can be watched."""


def test_a_kept_batch_keeps_its_own_payload_alive_and_no_more() -> None:
    made: weakref.WeakSet[Payload] = weakref.WeakSet()

    def make(record: dict[str, Any]) -> dict[str, Any]:
        payload = Payload()
        made.add(payload)
        return {"id": record["id"], "payload": payload}

    line = on(pipeline(400).map(make, version="1").batch(4), 2, prefetch_batches=8)
    iterator = iter(line)
    kept = next(iterator)
    next(iterator)
    line.close()
    del iterator
    gc.collect()
    assert set(made) == set(kept["payload"])
    assert [origin[2] for [origin] in kept.origins] == [0, 1, 2, 3]


def test_kept_batches_never_change() -> None:
    line = line_of(3, prefetch_batches=1)
    kept = []
    found = []
    for batch in line:
        kept.append(batch)
        found.append(batch.digest())
    assert digests(kept) == found == digests(line_of(0))


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", range(5))
def test_a_start_that_fails_in_the_middle_leaves_nothing(
    started: Threads, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    """Two pools of two workers and the engine: the thread of this number cannot be started."""
    start = threading.Thread.start
    count = iter(range(100))

    def limited(self: threading.Thread) -> None:
        if self.name.startswith("zephon") and next(count) == number:
            raise error
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    line = line_of()
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else zp.errors.ConfigError):
        next(iter(line))
    monkeypatch.undo()
    error.__traceback__ = None
    for thread in started():
        thread.join(PATIENCE_S / 2)
    assert started() == set()
    assert len(list(line)) == 100


class FailsToOpen(zp.Accumulator):
    def open(self, lane: int, key: Any) -> None:
        raise ValueError("not today")


def test_an_accumulator_that_cannot_be_opened_leaves_nothing(started: Threads) -> None:
    line = on(pipeline(40).map(dict).apply(FailsToOpen()), 2)
    with pytest.raises(ValueError, match="not today") as caught:
        next(iter(line))
    caught.value.__traceback__ = None
    del caught
    for thread in started():
        thread.join(PATIENCE_S / 2)
    assert started() == set()


# -- fork -----------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> bool:
    """Runs `work` in a forked child, which is killed after 6 s; whether it gave True."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(6)
        code = 3
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


@forks
@pytest.mark.parametrize("finished", [False, True])
def test_a_fork_beside_an_iterator_is_harmless(started: Threads, finished: bool) -> None:
    line = line_of()
    expected = digests(line_of(0))
    iterator = iter(line)
    found = digests(iterator) if finished else digests([next(iterator)])

    def drop() -> bool:
        nonlocal line, iterator
        line.close()
        del line, iterator
        gc.collect()
        return True

    def anew() -> bool:
        return digests(line_of(2)) == expected

    def same_pipeline() -> bool:
        return len(digests(line)) == 100

    for work in (drop, anew, same_pipeline):
        assert in_child(work), work.__name__
    assert found + digests(iterator) == expected


@forks
def test_a_child_that_goes_on_with_the_parents_iterator_is_told(started: Threads) -> None:
    """Its threads are not there: an error, not a wait for ever."""
    line = on(pipeline(400).batch(4), 2)
    iterator = iter(line)
    next(iterator)

    def go_on() -> bool:
        try:
            return len(list(iterator)) == 99  # right as well
        except zp.errors.ZephonError:
            return True

    assert in_child(go_on)
    assert len(list(iterator)) == 99


# -- waiting --------------------------------------------------------------------------------------------------------


class Gate:
    """A map that holds every record from number `first` on until the gate is opened."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] >= self.first:
            self.reached.set()
            self.opened.wait(20)  # so that a failed test ends too
        return record


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    made = [Gate(12), Gate(8), Gate(4)]
    yield made
    for gate in made:
        gate.opened.set()


def test_close_is_quick_and_tells_who_waits(started: Threads, gates: list[Gate]) -> None:
    """Three stages, the workers of each inside a user's function that does not return."""
    line = pipeline(100)
    for number, gate in enumerate(gates):
        line = line.map(gate, name=f"gate_{number}", version="1")
    line = line.options(runner="threads", parallelism={f"gate_{n}": 1 + n % 2 for n in range(3)}, task_records=1)
    iterator = iter(line)
    assert ids([next(iterator) for _ in range(4)]) == [0, 1, 2, 3]
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            next(iterator)
        except BaseException as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    for gate in gates:
        assert gate.reached.wait(PATIENCE_S)
    began = time.monotonic()
    line.close()
    consumer.join(PATIENCE_S)
    took = time.monotonic() - began
    assert [type(error) for error in raised] == [zp.errors.Closed]
    assert took < PATIENCE_S
    assert len(line.state_dict()["lanes"]) == 1
    for gate in gates:
        gate.opened.set()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of SIGINT; a job in the background of a shell is started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c", "started")
@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_loses_nothing(gates: list[Gate], workers: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    gate = gates[1]
    begun, caught = threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait(PATIENCE_S)
        gate.reached.wait(PATIENCE_S)
        while not caught.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            caught.wait(1)  # again: a finalizer that the first one met has swallowed it

    line = on(pipeline(40).map(gate, name="gate", version="1").batch(2), workers, task_records=2)
    found: list[int] = []
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        for batch in line:
            found += ids([batch])
            begun.set()
    except KeyboardInterrupt:
        interrupted = True
    else:
        interrupted = False
    finally:
        caught.set()
    helper.join()
    assert interrupted
    assert found == list(range(8 if workers == 0 else len(found)))
    state = saved(line)
    gate.opened.set()
    line.close()
    assert found + ids(resumed(line, state)) == list(range(40))


@pytest.mark.usefixtures("started")
def test_a_second_ctrl_c_while_it_closes_leaves_nothing(gates: list[Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever wait it ends, every thread of every pool has been told to end."""
    line = pipeline(40).map(gates[0], name="first", version="1").shuffle(3).map(gates[1], name="second", version="1")
    line = on(line.batch(2), 2, task_records=2)
    for gate in gates:
        gate.opened.set()
    iterator = iter(line)
    next(iterator)

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            line.close()


SCRIPT = """
import threading
from tests.cases.helpers import on, pipeline
never = threading.Event()
def hold(record):
    if record["id"] > 50 and {stuck}:
        never.wait()
    return record
line = on(pipeline(400).map(hold).shuffle(9).map(hold).batch(2), 2, task_records=1)
iterator = iter(line)
print(next(iterator).num_samples)
"""


@pytest.mark.parametrize("stuck", [False, True])
def test_a_script_that_ends_in_the_middle_ends(stuck: bool) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(stuck=stuck)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd=root)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")

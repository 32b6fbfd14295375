"""L7: workers die, idle and busy, of a signal or by themselves, and the run goes on with the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.laws.harness import Run, examples, run, same_group, truths
from tests.process.functions import Die, DieOnce, Enrich, Stand, burn
from tests.process.helpers import (
    Script,
    children,
    command,
    digests,
    engine,
    ids,
    kill,
    launcher,
    line,
    lives,
    rests,
    slow,
    to_the_error,
    wait_until,
    workers,
)
from tests.process.test_stalls import Warned, warned
from zephon.engine_process import _Server
from zephon.errors import OperatorError, WorkerError
from zephon.runners.deaths import Survived
from zephon.testing.recipes import Recipe
from zephon.testing.strategies import executions, recipes

__all__ = ["warned"]  # a fixture

pytestmark = pytest.mark.law("L7")


def test_workers_killed_while_they_are_idle() -> None:
    reference = digests(line(200, Enrich(), runner="inline"))
    with line(200, Enrich(), prefetch_batches=1, parallelism=3) as pipeline:
        iterator = iter(pipeline)
        found = digests(islice(iterator, 2))
        for pid, number in zip(workers(3), [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], strict=True):
            kill(pid, number)
        found += digests(iterator)
    assert found == reference


def test_who_dies_idle_is_replaced_before_the_next_batch_is_asked_for() -> None:
    """Its `setup` may take long: that is over when there is work again."""
    with line(200, Enrich(), prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 1))
        for pid in children(launcher()):
            rests(pid)
        before = workers()
        for pid in before:
            kill(pid)
        wait_until(lambda: len(after := children(launcher())[1:]) == 2 and not set(after) & set(before), 5, "others")
        assert found + ids(iterator) == list(range(200))


@pytest.mark.parametrize(
    ("number", "task_records"),
    [(signal.SIGKILL, 1), (signal.SIGSEGV, 16), slow(signal.SIGKILL, 16), slow(signal.SIGABRT, 5)],
)
def test_workers_that_die_in_the_middle_of_a_task(number: int, task_records: int, tmp_path: Path) -> None:
    """Each time the task is halved around the record; what was done is not done twice in the output."""
    function = DieOnce(tmp_path, {3, 9, 10, 40}, number)
    with line(64, function, burn, task_records=task_records, canonical_replicas=2) as pipeline:
        found = digests(pipeline)
    assert len(list(tmp_path.iterdir())) == 4
    assert found == digests(line(64, function, burn, canonical_replicas=2, runner="inline"))


def test_a_worker_killed_inside_a_function(tmp_path: Path) -> None:
    with line(64, Stand(tmp_path, 20)) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 1))
        wait_until((tmp_path / "standing").exists)
        (tmp_path / "go on").touch()
        for pid in workers():
            kill(pid)
        assert found + ids(iterator) == list(range(64))


def test_a_worker_killed_while_its_ring_is_full() -> None:
    """It waits for room with a result half sent: the half is thrown away, and done again."""
    with line(300, Enrich(), ring_bytes=4096, prefetch_batches=1, parallelism=3) as pipeline:
        iterator = iter(pipeline)
        found = digests(islice(iterator, 1))
        for pid in workers(3):
            wait_until(partial(sleeps, pid))
            kill(pid)
        found += digests(iterator)
    assert found == digests(line(300, Enrich(), runner="inline"))


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_all_of_many_workers_killed_at_once() -> None:
    with line(400, burn, parallelism=12) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 1))
        for pid in workers(12):
            kill(pid)
        assert found + ids(iterator) == list(range(400))


def test_twenty_random_kills_during_a_run() -> None:
    """At least one worker each time, in the middle of whatever it does. A stall stays far from 5 s."""
    chosen, longest = random.Random(7), 0.0
    with line(4000, Enrich(), burn, batch=8, canonical_replicas=4, task_records=16) as pipeline:
        found, deaths = [], 0
        iterator = iter(pipeline)
        began = time.monotonic()
        for number, batch in enumerate(iterator):
            longest, began = max(longest, time.monotonic() - began if number else 0.0), time.monotonic()
            found.append(batch.digest())
            if number % 20 == 10 and deaths < 20 and (alive := children(launcher())[1:]):
                kill(chosen.choice(alive))
                deaths += 1
    assert deaths == 20
    assert found == digests(line(4000, Enrich(), burn, batch=8, canonical_replicas=4, runner="inline"))
    assert longest < 5


def killed_all_the_time(recipe: Recipe, seed: int, **options: Any) -> Run:
    """The recipe's batches while a worker is killed again and again, busy or not."""
    chosen, over = random.Random(seed), threading.Event()

    def kill_some() -> None:
        for _ in range(60):
            boss = [pid for pid in children(os.getpid()) if "zephon.runners.launcher" in command(pid)]
            alive = children(boss[0])[1:] if boss else []
            if alive:
                kill(chosen.choice(alive))
            if over.wait(chosen.uniform(0.002, 0.03)):
                return

    killer = threading.Thread(target=kill_some)
    with recipe.build(runner="process", max_worker_retries=1000, **options) as pipeline:
        killer.start()
        try:
            return run(pipeline)
        finally:
            over.set()
            killer.join()


def check_killed(recipe: Recipe, data: st.DataObject) -> None:
    options = data.draw(executions(recipe))
    found = killed_all_the_time(recipe, data.draw(st.integers(0, 99)), ring_bytes=4096, **options)
    lanes = {lane: wanted for (lane, _), wanted in truths(recipe).items()}
    same_group(found, lanes, recipe.options["cycles_per_step"], options)


@examples(0.01)
@given(recipe=recipes(max_lanes=4), data=st.data())
def test_any_pipeline_while_workers_die(recipe: Recipe, data: st.DataObject) -> None:
    """What was half done is cut into pieces and done again: drops, children, lengths and marks fall into place."""
    check_killed(recipe, data)


@pytest.mark.slow
@examples(0.5)
@given(recipe=recipes(failing="maybe"), data=st.data())
def test_many_pipelines_while_workers_die(recipe: Recipe, data: st.DataObject) -> None:
    check_killed(recipe, data)


def test_deaths_in_a_second_stage(tmp_path: Path) -> None:
    """The records of a later stage are sent again to the replacement."""
    second = DieOnce(tmp_path, {5, 31}, signal.SIGKILL)
    with line(48, Enrich(), second, parallelism={"map": 1, "map_2": 2}, ring_bytes=4096) as pipeline:
        assert digests(pipeline) == digests(line(48, Enrich(), second, runner="inline"))
    assert len(list(tmp_path.iterdir())) == 2


def test_deaths_that_were_survived_are_counted_and_one_line_tells_of_them(warned: Warned, tmp_path: Path) -> None:
    """By cause, in metrics(), also when all is over; the log does not speak up for each."""
    dying = DieOnce(tmp_path, {5, 20, 31}, signal.SIGSEGV)
    with line(48, dying) as pipeline:
        assert ids(pipeline) == list(range(48))
        metrics = pipeline.metrics()
    assert metrics["deaths"] == pipeline.metrics()["deaths"] == {"SIGSEGV": 3}
    [text] = warned.texts
    assert re.match(
        r"a worker died \(SIGSEGV\): worker \d, where operator 'map' was on lane 0, dataset 'toy', shard list, row "
        r"(5|20|31)\. It is replaced, and the batches stay the same\. Deaths so far: 1 x SIGSEGV ",
        text,
    ), text


def test_the_log_tells_of_one_death_a_minute_with_the_number_of_all() -> None:
    survived = Survived()
    told = [survived.tell(cause, "worker 0", at) for cause, at in (("SIGSEGV", 7), ("SIGKILL", 8), ("SIGSEGV", 66.9))]
    assert told[0] is not None
    assert told[1:] == [None, None]
    assert "so far: 3 x SIGSEGV, 1 x SIGKILL" in str(survived.tell("SIGSEGV", "worker 1", 67.1))


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_without_a_death_none_is_counted(runner: str) -> None:
    with line(16, runner=runner) as pipeline:
        assert pipeline.metrics()["deaths"] == {}
        list(pipeline)
    assert pipeline.metrics()["deaths"] == {}


@pytest.mark.parametrize("how", [0, slow(3), -signal.SIGKILL, slow(-signal.SIGSEGV)])
def test_a_record_that_kills_its_worker_is_named(how: int) -> None:
    began = time.monotonic()
    with (
        line(60, Die(37, how), canonical_replicas=2, task_records=16) as pipeline,
        pytest.raises(WorkerError) as raised,
    ):
        list(pipeline)
    assert time.monotonic() - began < 15  # start, halvings and three retries on a busy machine
    text = str(raised.value)
    assert re.search(r"lane \d, dataset 'toy', shard list, row 37 killed its worker 3 times, alone, in 'map'", text)
    assert (f"exit status {how}" if how >= 0 else signal.Signals(-how).name) in text
    assert ("out of memory?" in text) == (how == -signal.SIGKILL)
    assert "exclude=[('list', 37)]" in text
    assert text.endswith("; the state still loads, with allow=['datasets.toy.exclude']")
    assert not isinstance(raised.value, OperatorError)


def test_the_remedy_that_the_error_names_works() -> None:
    """The place behind the last delivered batch, with the row left out, goes on to the end."""
    function = Die(37, 0)
    with line(60, function) as pipeline:
        found: list[int] = []
        error = to_the_error(iter(pipeline), found)
        state = pipeline.state_dict()
    assert found == list(range(36))
    exclude = eval(re.search(r"exclude=(\[.*\])\)", str(error))[1])  # type: ignore[index]
    allow = eval(re.search(r"allow=(\[.*\])", str(error))[1])  # type: ignore[index]
    records = [{"id": i} for i in range(60)]
    with line(0, function, dataset=zp.Dataset.from_list("toy", records, exclude=exclude)) as mended:
        mended.load_state_dict(state, allow=allow)
        assert found + ids(mended) == [i for i in range(60) if i != 37]
        assert mended.counts()["dropped"] == {0: {"toy.excluded": 1}}


def windowed(exclude: list[tuple[str, int]], *functions: Any, shuffled: bool = True, **options: Any) -> zp.Pipeline:
    """400 ids on two lanes, in windows of 4 chunks, out of which a shuffle lets them go in another order."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(400)], exclude=exclude)
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=1, chunk_size=16))
    for function in functions:
        pipeline = pipeline.map(function)
    if shuffled:
        pipeline = pipeline.shuffle(20)
        options["flush_every_k_chunks"] = 4
    settings = {"runner": "process", "parallelism": 2, "canonical_replicas": 2, "task_records": 8, **options}
    return pipeline.batch(4).options(**settings)


@pytest.mark.parametrize("row", [37, slow(250), slow(399), 111])
def test_the_remedy_works_in_the_middle_of_a_window(row: int) -> None:
    """Samples of the killer's window were delivered before it: they come once, and all others too."""
    function, found = Die(row, 1), []
    with windowed([], function, prefetch_batches=1) as pipeline:
        to_the_error(iter(pipeline), found)
        state = pipeline.state_dict()
    with windowed([("list", row)], function) as mended:
        mended.load_state_dict(state, allow=["datasets.toy.exclude"])
        assert sorted(found + ids(mended)) == [i for i in range(400) if i != row]


def to_the_end(pipeline: zp.Pipeline) -> tuple[list[int], zp.errors.ZephonError | None]:
    """The ids of all batches, and the error behind them, if there is one."""
    found: list[int] = []
    try:
        for batch in pipeline:
            found += ids([batch])
    except zp.errors.ZephonError as error:
        return found, error
    return found, None


@pytest.mark.parametrize("runner", ["inline", "process"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_delivered_row_is_not_left_out_afterwards(runner: str, shuffled: bool) -> None:
    """What is made again from the state's place would be other samples: refused, or it makes no difference."""
    with windowed([], runner="inline", shuffled=shuffled) as pipeline:
        found = ids(islice(iter(pipeline), 21))
        state = pipeline.state_dict()
    refused = 0
    for row in (found[0], found[-1], found[-9]):
        with windowed([("list", row)], runner=runner, shuffled=shuffled) as pipeline:
            pipeline.load_state_dict(state, allow=["datasets.toy.exclude"])
            again, error = to_the_end(pipeline)
        if error is None:
            assert sorted(found + again) == list(range(400)), row
        else:
            assert isinstance(error, zp.errors.CheckpointError)
            assert "exclude= of dataset 'toy' changed" in str(error)
            refused += 1
    assert refused


def test_max_worker_retries_is_the_number_of_deaths_of_one_record() -> None:
    dying = line(8, Die(5, 1), max_worker_retries=5)
    with dying as pipeline, pytest.raises(WorkerError, match="killed its worker 5 times"):
        list(pipeline)


def test_a_death_is_never_skipped() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(16)])
    skipping = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(Die(3, 0), on_error="skip")
    with (
        skipping.options(runner="process", parallelism=1, canonical_replicas=1) as pipeline,
        pytest.raises(WorkerError),
    ):
        list(pipeline)


class DiesInSetup(zp.Operator):
    def __init__(self, path: Path, times: int) -> None:
        self.path, self.times = str(path), times

    def setup(self) -> None:
        with open(self.path, "a") as file:
            file.write("x")
        if Path(self.path).stat().st_size <= self.times:
            os._exit(4)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def applied(operator: zp.Operator, **options: Any) -> zp.Pipeline:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(40)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(operator).batch(4)
    return pipeline.options(**{"runner": "process", "parallelism": 2, "canonical_replicas": 1, **options})


def test_workers_that_always_die_in_setup(tmp_path: Path) -> None:
    with applied(DiesInSetup(tmp_path / "starts", 10**6)) as pipeline, pytest.raises(WorkerError) as raised:
        list(pipeline)
    assert "in the setup of 'apply': exit status 4" in str(raised.value)
    assert (tmp_path / "starts").stat().st_size < 40


def test_workers_that_die_in_setup_a_few_times(tmp_path: Path) -> None:
    with applied(DiesInSetup(tmp_path / "starts", 5)) as pipeline:
        assert ids(pipeline) == list(range(40))


class KilledInSetup(zp.Operator):
    def setup(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def test_workers_that_are_always_killed_in_setup() -> None:
    with applied(KilledInSetup()) as pipeline, pytest.raises(WorkerError, match=r"'apply': SIGKILL \(out of memory\?"):
        list(pipeline)


class RaisesInSetup(zp.Operator):
    def setup(self) -> None:
        raise FileNotFoundError(2, "no such model", "model.bin")

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def test_a_setup_that_raises() -> None:
    with applied(RaisesInSetup()) as pipeline, pytest.raises(OperatorError) as raised:
        list(pipeline)
    assert isinstance(raised.value, FileNotFoundError)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert "'apply'" in str(raised.value)
    assert "setup" in str(raised.value)


@pytest.mark.parametrize(
    ("who", "waiting"), [(engine, True), (launcher, False), slow(engine, False), slow(launcher, True)]
)
def test_the_engine_or_the_launcher_is_killed(who: Callable[[], int], waiting: bool, tmp_path: Path) -> None:
    """An error within 5 s, nothing left, and the last state is good: it resumes exactly."""
    with line(400, Stand(tmp_path, 40), prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = ids(islice(iterator, 3))
        wait_until((tmp_path / "standing").exists)
        tree = [launcher(), *children(launcher())]
        victim = who()
        killer = threading.Timer(0.3, kill, [victim]) if waiting else None
        if killer is not None:
            killer.start()
        else:
            kill(victim)
        error = to_the_error(iterator, found)
        assert isinstance(error, WorkerError)
        assert re.search(r"died .* load it to go on", str(error))
        state = pipeline.state_dict()
    assert wait_until(lambda: not any(map(lives, tree)), 5)
    (tmp_path / "go on").touch()
    with line(400, Stand(tmp_path, 40)) as again:
        again.load_state_dict(state)
        assert found + ids(again) == list(range(400))


def test_a_launcher_that_dies_with_an_order_unread_is_no_error_of_the_engine() -> None:
    """The engine's socket says "reset" then; the trainer is to hear that the launcher died, and nothing else."""
    own, launchers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.send(b"a worker, please")
    launchers.close()
    server = object.__new__(_Server)
    server._launcher, server._over = own, False
    server._from_launcher()
    assert server._over
    own.close()


THREAD = """
import os, signal, threading
def f(record):
    return record
if os.environ.get("PYTHONHASHSEED") == "0":  # in the launcher
    from zephon.testing.points import WAYS
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.signal(signal.SIGUSR1, lambda *_: WAYS["thread"]())
"""
LOSES_ITS_LAUNCHER = """
import mine
import zephon as zp
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(100_000)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(mine.f).batch(4)
iterator = iter(pipeline.options(runner="process", parallelism=2, canonical_replicas=1))
next(iterator)
print("ready", flush=True)
try:
    for batch in iterator:
        pass
except zp.errors.WorkerError as error:
    assert "the engine process or the launcher died" in str(error)
    print("told", flush=True)
"""


@pytest.mark.law("L8")
def test_a_launcher_whose_main_thread_alone_ends(tmp_path: Path) -> None:
    """Its children die with that thread; it holds the engine's socket, so that none of it is heard."""
    (tmp_path / "mine.py").write_text(THREAD)
    script = Script("", argv=["-c", LOSES_ITS_LAUNCHER], cwd=tmp_path, env={"PYTHONHASHSEED": "random"})
    assert script.readline() == "ready"
    boss, began = launcher(script.pid), time.monotonic()
    kill(boss, signal.SIGUSR1)
    wait_until(lambda: not children(boss), 5, "the end of its children")
    assert script.readline() == "told"
    assert time.monotonic() - began < 5
    assert script.end()[0] == 0


@pytest.mark.slow
def test_a_hundred_deaths_leave_no_trace_in_engine_and_launcher() -> None:
    """Descriptors and memory of both are after many replacements what they were after a few."""
    with line(100_000, burn, max_worker_retries=10**6, prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)

        def replaced() -> bool:
            next(iterator)
            return len(children(launcher())) == 3

        def die(times: int) -> None:
            for number in range(times):
                victim = workers()[number % 2]
                kill(victim)
                wait_until(lambda victim=victim: not lives(victim), what="a death")
                wait_until(replaced, what="a replacement")

        next(iterator)
        die(20)
        both = (launcher(), engine())
        few, sizes = [descriptors(pid) for pid in both], [rss_kib(pid) for pid in both]
        die(100)
        for pid, before, size in zip(both, few, sizes, strict=True):
            wait_until(lambda pid=pid, before=before: descriptors(pid) <= before, 5, "the end of descriptors")
            assert rss_kib(pid) < size + 4096


def descriptors(pid: int) -> int:
    """Open descriptors of a process, without those of its slots and rings, whose number has a bound of its own."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += not os.readlink(path).startswith("/dev/shm")
    return found


def rss_kib(pid: int) -> int:
    """Memory of a process that is no file's and not shared."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


def test_the_iterator_is_over_after_a_death_of_the_engine() -> None:
    with line(400) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        kill(engine())
        with pytest.raises(WorkerError):
            list(iterator)
        with pytest.raises(zp.errors.Closed, match="load the state"):
            next(iterator)
        assert ids(islice(iter(pipeline), 2)) == list(range(8))


class Closing:
    """Closes all descriptors of its process at some ids, and may open files of its own with their numbers."""

    def __init__(self, at: set[int], reopens: bool) -> None:
        self.at, self.reopens = at, reopens

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] in self.at:
            os.closerange(3, 4096)
            for _ in range(64 * self.reopens):
                os.open("/dev/null", os.O_RDWR)
        return record


@pytest.mark.parametrize("reopens", [False, True])
def test_a_worker_whose_descriptors_user_code_closes_is_replaced(
    reopens: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Daemonising libraries close what they do not know."""
    with line(200, Closing({20, 90}, reopens)) as pipeline:
        assert ids(pipeline) == list(range(200))
    assert capfd.readouterr().err.count("that it did not open; the worker is replaced") >= 2


class ClosingSetup(zp.Operator):
    """The same in its setup."""

    def setup(self) -> None:
        os.closerange(3, 4096)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


def test_a_setup_that_closes_all_descriptors_is_named() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(8)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset])).apply(ClosingSetup(), name="careless").batch(4)
    with (
        pipeline.options(runner="process", parallelism=1, canonical_replicas=1) as running,
        pytest.raises(
            zp.errors.WorkerError, match="died while they started, in the setup of 'careless': exit status 1"
        ),
    ):
        list(running)

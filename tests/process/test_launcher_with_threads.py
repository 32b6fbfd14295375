"""Law L7 where the launcher cannot be forked, as importing the user's modules started threads there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.process.functions import Enrich
from tests.process.helpers import children, command, digests, engine, ids, is_clean, launcher, line, run_script, workers
from tests.process.test_deaths import (  # noqa: F401 - run again here
    test_a_worker_killed_while_its_ring_is_full,
    test_the_engine_or_the_launcher_is_killed,
    test_the_remedy_that_the_error_names_works,
    test_workers_killed_while_they_are_idle,
)
from tests.process.test_points import faults  # noqa: F401 - a fixture
from zephon.runners import spawn
from zephon.testing.points import Faults

pytestmark = pytest.mark.law("L7")

THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
NOTICE = "zephon: importing the pipeline's modules started 1 threads"


@pytest.fixture(autouse=True)
def launcher_with_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_CODE", THREAD + spawn._CODE)


def test_engine_and_workers_are_fresh_processes(capfd: pytest.CaptureFixture[str]) -> None:
    with line(200, Enrich(), prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = digests(islice(iterator, 2))
        for pid in (engine(), *workers()):
            assert "zephon.runners.fresh" in command(pid)
        found += digests(iterator)
    assert found == digests(line(200, Enrich(), runner="inline"))
    assert capfd.readouterr().err.count(NOTICE) == 1


def test_points_are_in_fresh_workers_too(faults: Faults) -> None:  # noqa: F811
    with line(200, Enrich(), prefetch_batches=1) as pipeline:
        iterator = iter(pipeline)
        found = digests(islice(iterator, 2))
        faults.arm("write", "SEGV", times=2)
        found += digests(iterator)
    assert found == digests(line(200, Enrich(), runner="inline"))
    assert len(faults.hits()) == 2


MODULE = """
import threading
waiting = threading.Thread(target=threading.Event().wait, daemon=True)
waiting.start()
def double(record):
    return {**record, "y": 2 * record["id"]}
"""
SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import zephon as zp
from starts_a_thread import double
class Wrong(Exception):
    pass
class Check:
    def __call__(self, record):
        if record["id"] == 90:
            raise Wrong("ninety")
        return {**record, "z": record["y"] + 1}
rows = zp.Dataset.from_list("rows", [{"id": i} for i in range(100)])
pipeline = zp.Pipeline(zp.StaticMixture([rows], seed=1, shuffle="none")).map(double).map(Check()).batch(5)
found = []
with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as pipeline:
    try:
        for batch in pipeline:
            found += batch["z"].tolist()
            if sys.argv[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
    except Wrong as error:
        assert type(error.__cause__) is Wrong, error.__cause__
assert found == [2 * i + 1 for i in range(90)], found
"""


def test_a_module_that_starts_a_thread(tmp_path: Path) -> None:
    """What a script defines itself, its exceptions too, travels there and back as ever."""
    (tmp_path / "starts_a_thread.py").write_text(MODULE)
    status, _, errors = run_script(SCRIPT, tmp_path, "end")
    assert status == 0, errors
    is_clean(errors)
    assert errors.count(NOTICE) == 1


@pytest.mark.law("L8")
def test_nothing_is_left_of_fresh_processes_after_the_trainer_is_killed(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(MODULE)
    status, _, _ = run_script(SCRIPT, tmp_path, "kill")
    assert status == -9


def test_no_thread_no_notice(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spawn, "_CODE", spawn._CODE.removeprefix(THREAD))
    with line(64) as pipeline:
        iterator = iter(pipeline)
        next(iterator)
        assert all("zephon.runners.launcher" in command(pid) for pid in (engine(), *workers()))
        assert len(children(launcher())) == 3
        assert ids(iterator) == list(range(4, 64))
    assert NOTICE not in capfd.readouterr().err

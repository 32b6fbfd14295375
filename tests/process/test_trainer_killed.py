"""Case A19 (3) and (4), L8: the trainer is killed again and again, at once started again; two jobs side by side."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.helpers import ROOT, WITHOUT_TMPFILE, Script, kill, launcher, slow, wait_until

pytestmark = pytest.mark.law("L8")

ROWS = 400
# Goes on from the state in a file, if there is one; logs every batch, and saves the state behind it.
JOB = """
import json, os, signal, sys
import zephon as zp
path = sys.argv[1]
def work(record):
    return {**record, "sum": sum(range(20_000)), "pad": "x" * 500}
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(ROWS)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, chunk_size=16)).map(work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=2, task_records=4, prefetch_batches=2)
if os.path.exists(path + ".state"):
    pipeline.load_state_dict(json.load(open(path + ".state")))
log = open(path + ".log", "a", buffering=1)
for batch in pipeline:
    print(json.dumps(batch["id"].tolist()), file=log)
    with open(path + ".new", "w") as file:
        json.dump(pipeline.state_dict(), file)
    os.replace(path + ".new", path + ".state")
""".replace("ROWS", str(ROWS))


class Job:
    """A job with its files."""

    def __init__(self, path: Path, code: str = JOB, **settings: Any) -> None:
        self.path = path
        self.script = Script(code, path, **settings)

    def lines(self) -> list[list[int]]:
        """The batches that it logged."""
        try:
            return [json.loads(text) for text in Path(f"{self.path}.log").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def has_logged(self, batches: int) -> bool:
        return len(self.lines()) >= batches

    def saved(self) -> int:
        """The batches in its last state."""
        lanes = json.loads(Path(f"{self.path}.state").read_text())["lanes"]
        return sum(lane["turns"] for lane in lanes.values())


def reference(tmp_path: Path) -> list[list[int]]:
    job = Job(tmp_path / "reference", JOB.replace('runner="process", parallelism=2', 'runner="inline"'))
    status, _, err = job.script.end()
    assert status == 0, err
    return job.lines()


@pytest.fixture(params=["unnamed", slow("named")])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Of a job: which way to shared memory it takes."""
    if request.param == "unnamed":
        return {}
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TMPFILE)  # a SIGKILL may leave a name for a later start
    return {"env": {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}


@pytest.mark.parametrize("whom", ["the trainer", "everything"])
def test_killed_ten_times_and_each_time_started_again_at_once(
    whom: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The last state goes on exactly there; no process lives, /dev/shm has no new name."""
    wanted = reference(tmp_path)
    killed: list[Script] = []
    done = 0
    for number in range(10):
        job = Job(tmp_path / "job", **settings)
        wait_until(partial(job.has_logged, done + 3 + number % 3), 30, "three batches")
        if whom == "everything":
            job.script.kill_all()
        kill(job.script.pid)
        job.script.process.wait()
        killed.append(job.script)
        done = job.saved()
        kept = job.lines()[:done]  # it may have logged a batch without having saved the state
        Path(tmp_path / "job.log").write_text("".join(f"{json.dumps(batch)}\n" for batch in kept))
    last = Job(tmp_path / "job", **settings)
    status, _, err = last.script.end()
    assert status == 0, err
    assert last.lines() == wanted
    for script in killed:
        script.nothing_left()
        script.process.communicate()


@pytest.mark.parametrize("moment", ["at once", "while the launcher starts", "while workers are busy"])
def test_killed_at_other_moments(moment: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    if moment == "while the launcher starts":
        launcher(job.script.pid)
    elif moment == "while workers are busy":
        wait_until(job.lines, 30, "a batch")
    kill(job.script.pid)
    job.script.process.communicate()
    job.script.nothing_left()


FORKING = JOB.replace(
    "for batch in", "live = iter(pipeline)\nnext(live)\nif os.fork() == 0:\n    signal.pause()\nfor batch in"
)


def test_a_killed_trainer_whose_forked_child_lives_on(tmp_path: Path) -> None:
    """The child holds copies of the sockets, so no one sees a hang-up: the launcher watches the trainer itself."""
    script = Job(tmp_path / "job", FORKING).script
    wait_until(lambda: len(script.processes()) >= 6, 30, "trainer, its child, launcher, engine and workers")
    kill(script.pid)
    script.process.wait()
    wait_until(lambda: len(script.processes()) == 1, 5, "the end of all but the forked child")
    script.kill_all()
    script.process.communicate()


def test_two_jobs_side_by_side(settings: dict[str, Any], tmp_path: Path) -> None:
    """Same user, same configuration, at the same time: neither meets the other, also when a third one is killed."""
    wanted = reference(tmp_path)
    jobs = [Job(tmp_path / f"job-{number}", **settings) for number in range(3)]
    wait_until(jobs[0].lines, 30, "a batch")
    kill(jobs[0].script.pid)
    for job in jobs[1:]:
        status, _, err = job.script.end()
        assert status == 0, err
        assert job.lines() == wanted
    jobs[0].script.process.communicate()
    jobs[0].script.nothing_left()

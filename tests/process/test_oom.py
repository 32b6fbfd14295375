"""L7, L8: memory runs out. The kernel kills inside of a real memory cgroup, or an allocation fails in a process."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.helpers import Script, ids, wait_until
from zephon.errors import OperatorError

pytestmark = pytest.mark.law("L8")

ROWS, KILLER = 120, 77
LIMIT_BYTES = 400 << 20
ROOT = Path("/sys/fs/cgroup")


# -- a group with a limit --------------------------------------------------------------------------------------------


def parent_group() -> tuple[Path, str]:
    """(where a memory group can be made, the name of its limit): version 1 where it is mounted, else version 2."""
    if (ROOT / "memory").is_dir():
        return ROOT / "memory", "memory.limit_in_bytes"
    return ROOT, "memory.max"


def try_group(limit_bytes: int) -> Path | str:
    """A new group below the top one with so much memory and no swap; else the reason why there can be none."""
    parent, limit = parent_group()
    path = parent / f"zephon-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if limit == "memory.max" and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            return "groups below the top one have no memory controller here"
        path.mkdir()
        (path / limit).write_text(str(limit_bytes))
        for swap, value in (("memory.swap.max", "0"), ("memory.memsw.limit_in_bytes", str(limit_bytes))):
            if (path / swap).exists():
                (path / swap).write_text(value)
    except OSError as error:
        if path.is_dir():
            path.rmdir()
        return f"no memory cgroup can be made here: {error}"
    return path


def remove(group: Path) -> None:
    """Ends what is in a group, and the group."""
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), 9)
    wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), 5, "the end of all in the group")
    group.rmdir()


@pytest.fixture
def group() -> Iterator[Path]:
    made = try_group(LIMIT_BYTES)
    if isinstance(made, str):
        pytest.skip(made)
    try:
        yield made
    finally:
        remove(made)


def num_kills(group: Path) -> int:
    """How often the kernel has killed there."""
    name = "memory.oom_control" if (group / "memory.oom_control").exists() else "memory.events"
    return int(re.search(r"^oom_kill (\d+)", (group / name).read_text(), re.MULTILINE)[1])  # type: ignore[index]


# -- jobs inside of it -----------------------------------------------------------------------------------------------

# Arguments: the group, row to leave out or "", the state to load or "", the row that needs too much, who dies of it.
JOB = """
import json, os, sys, time
from pathlib import Path
import zephon as zp
group, exclude, state, greedy, victim = sys.argv[1:]
Path(group, "cgroup.procs").write_text(str(os.getpid()))
def engine():
    launcher = os.getppid()
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])
def grow(record):
    if record["id"] == int(greedy):
        if victim == "engine":
            Path(f"/proc/{engine()}/oom_score_adj").write_text("1000")
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 16)) * 64)
    return record
left_out = [("list", int(exclude))] if exclude else []
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(ROWS)], exclude=left_out)
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none", chunk_size=16)).map(grow).batch(4)
found, began = [], 0.0
with pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=8) as pipeline:
    if state:
        pipeline.load_state_dict(json.loads(state), allow=["datasets.toy.exclude", "grow.fn", "grow.code"])
    error = None
    try:
        for batch in pipeline:
            found += batch["id"].tolist()
            began = time.monotonic()
    except zp.errors.ZephonError as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([found, error, time.monotonic() - began, pipeline.state_dict()]))
""".replace("ROWS", str(ROWS))


def run(group: Path, *, exclude: Any = "", state: Any = "", greedy: int = -1, victim: str = "worker") -> list[Any]:
    """(ids, the error as text, seconds since the last batch, the state) of a job inside of the group."""
    packed = json.dumps(state) if state else ""
    status, out, err = Script(JOB, group, exclude, packed, greedy, victim).end(60)
    assert status == 0, err
    assert "Traceback" not in err, err
    return list(json.loads(out))


@pytest.mark.law("L7")
def test_a_record_for_which_the_kernel_kills_is_named_and_can_be_left_out(group: Path) -> None:
    """Three kills of the kernel, and then the error with the remedy, with which the run goes on."""
    found, error, _, state = run(group, greedy=KILLER)
    assert found == list(range(KILLER // 4 * 4))
    assert num_kills(group) >= 3
    assert re.match(
        r"WorkerError: the record at lane 0, dataset 'toy', shard list, row 77 killed its worker 3 times, alone, in "
        r"'grow': SIGKILL \(out of memory\? the kernel kills so\); .*exclude=\[\('list', 77\)\]\)",
        error,
    )
    kills = num_kills(group)
    more, error, _, _ = run(group, greedy=KILLER, exclude=KILLER, state=state)
    assert error is None
    assert found + more == [i for i in range(ROWS) if i != KILLER]
    assert num_kills(group) == kills


def test_the_kernel_kills_the_engine_instead(group: Path) -> None:
    """Whom it takes is its own choice: an error within 5 s, and the state of the last batch resumes exactly."""
    found, error, seconds, state = run(group, greedy=KILLER, victim="engine")
    assert num_kills(group) >= 1
    assert found == list(range(len(found)))
    assert len(found) <= KILLER
    assert re.match(r"WorkerError: the engine process or the launcher died .*out of memory\?.*load it to go on", error)
    assert seconds < 5
    more, error, _, _ = run(group, state=state)
    assert error is None
    assert found + more == list(range(ROWS))


# -- allocations that fail -------------------------------------------------------------------------------------------


class Narrow(zp.Operator):
    """Its worker may have so much more address space than it has when it starts, or than it has at one id."""

    def __init__(self, more_bytes: int, at: int | None = None) -> None:
        self.more_bytes, self.at = more_bytes, at

    def setup(self) -> None:
        if self.at is None:
            self.narrow()

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record

    def narrow(self) -> None:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + self.more_bytes, used + self.more_bytes))


class Grow(Narrow):
    """At one id, a record that is there, but cannot be sent."""

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] != self.at:
            return record
        made = {**record, "large": [letter * 10_000_000 for letter in "abcdefghijklmnopqrst"]}
        self.narrow()
        return made


def narrowed(dataset: zp.Dataset, operator: zp.Operator) -> zp.Pipeline:
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(operator).batch(4)
    return pipeline.options(runner="process", parallelism=1, canonical_replicas=1, task_records=8)


def test_a_row_that_is_too_much_to_read_is_named(tmp_path: Path) -> None:
    """Those read together with it are not lost, and the run goes on from there."""
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            file.write(json.dumps({"id": i, "text": "x" * (300_000_000 if i == 13 else 5)}) + "\n")

    def made(*exclude: tuple[str, int]) -> zp.Pipeline:
        files = zp.Dataset.from_path("big", tmp_path, exclude=exclude, index_dir=tmp_path / "index")
        return narrowed(files, Narrow(100 << 20))

    found: list[int] = []
    with made() as pipeline:
        with pytest.raises(zp.errors.DataError) as caught:
            found.extend(int(i) for batch in pipeline for i in batch["id"])
        state = pipeline.state_dict()
    assert found == list(range(12))
    assert str(caught.value).startswith("dataset 'big', shard rows.jsonl, row 13: no memory is left to read it; ")
    assert isinstance(caught.value.__cause__, MemoryError)
    with made(("rows.jsonl", 13)) as pipeline:
        pipeline.load_state_dict(state, allow=["datasets.big.exclude"])
        assert found + ids(pipeline) == [i for i in range(24) if i != 13]


def test_a_result_for_which_there_is_no_memory_is_an_error_of_its_record() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(24)])
    with narrowed(dataset, Grow(20 << 20, at=13)) as pipeline, pytest.raises(MemoryError) as caught:
        list(pipeline)
    assert isinstance(caught.value, OperatorError)
    assert re.match(
        r"operator 'apply' failed on lane 0, dataset 'toy', shard list, row 13: MemoryError.*: the address space of a "
        r"process is [\d,]+ bytes here; raise that \(ulimit -v\), or lower ",
        str(caught.value),
    )


class AllAtOnce(zp.Operator):
    """An operator that takes whole tasks, for one of which there is no memory."""

    def run(self, rows: Any) -> None:
        if {"id": 13} in rows.records:
            raise MemoryError


def test_a_task_for_which_there_is_no_memory_is_told_with_its_records() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(24)])
    with narrowed(dataset, AllAtOnce()) as pipeline, pytest.raises(zp.errors.ConfigError) as caught:
        list(pipeline)
    assert re.match(
        r"a worker, where operator 'apply' has been on 8 records at once, the first of them lane 0, dataset 'toy', "
        r"shard list, row 8, hit a limit of the system: MemoryError",
        str(caught.value),
    )

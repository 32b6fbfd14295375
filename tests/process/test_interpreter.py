"""L1, L8: processes below the trainer are set up as its interpreter is: flags, paths, standard files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.helpers import ROOT, Script, ids, line, run_script, slow

pytestmark = pytest.mark.law("L1")

MODULE = """
import sys, threading
def work(record):
    assert record["id"] < 5
    return {**record, "digits": sys.get_int_max_str_digits(), "utf8": sys.flags.utf8_mode, "seed": hash("x")}
if THREADS:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[1:]
import zephon as zp
import flagged
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(8)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, shuffle="none")).map(flagged.work)
if "warn" in sys.argv:
    import warnings
    pipeline = pipeline.map(lambda record: warnings.warn("no") or record)
found = {}
for runner in ("inline", "process"):
    found[runner] = []
    with pipeline.batch(1).options(runner=runner, parallelism=2, canonical_replicas=1, task_records=1) as running:
        try:
            for batch in running:
                found[runner].append([int(batch["id"][0]), int(batch["digits"][0]), int(batch["utf8"][0])])
        except zp.errors.OperatorError as error:
            found[runner].append(str(error).partition(" failed")[0] + type(error.__cause__).__name__)
    found["seeds"] = len({int(batch["seed"][0]) for batch in running}) if sys.flags.optimize else 1
print(json.dumps(found))
"""
FLAGS = [
    ["-OO", "-I"],
    slow(["-X", "int_max_str_digits=0", "-X", "utf8"]),
    slow(["-E", "-B", "-s"]),
    slow(["-W", "error"]),
    ["-I", "-X", "utf8"],
]


@pytest.mark.parametrize("threads", [False, True], ids=["forked", "anew"])
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_of_the_interpreter_reach_all(flags: list[str], threads: bool, tmp_path: Path) -> None:
    """With -I nothing that the environment names is run, either."""
    (tmp_path / "flagged.py").write_text(MODULE.replace("THREADS", str(threads)))
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "sitecustomize.py").write_text("import sys\nsys.stderr.write('customised\\n')\n")
    argv = [*flags, "-c", SCRIPT, str(ROOT), str(tmp_path), *(["warn"] if "-W" in flags else [])]
    status, out, errors = run_script("", argv=argv, env={"PYTHONPATH": str(shadow)})
    assert status == 0, errors
    found: dict[str, Any] = json.loads(out)
    assert found["process"] == found["inline"]
    assert found["seeds"] == 1
    assert len(found["process"]) == (8 if "O" in flags[0] else 1 if "-W" in flags else 6)
    assert ("customised" in errors) == ("-I" not in flags and "-E" not in flags)


CLOSED = """
import os, sys
for number in {closed}:
    os.close(number)
os.execv(sys.executable, [sys.executable, sys.argv[1], *sys.argv[2:]])
"""
QUIET = """
import os, sys
sys.path.insert(0, sys.argv[1])
import zephon as zp
import noisy
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, shuffle="none")).map(noisy.work)
pipeline = pipeline.apply(noisy.Setup()).batch(4)
told = ""
with pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=4) as running:
    try:
        told = str([i for batch in running for i in batch["id"].tolist()])
    except ValueError as error:
        told = str(error)
with open(sys.argv[2], "w") as file:
    file.write(told)
"""
NOISY = """
import os, sys, threading
import zephon as zp
if "a thread" in {what!r}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def work(record):
    os.system("echo noise; echo noise >&2")
    return record
class Setup(zp.Operator):
    def setup(self):
        if "raises" in {what!r}:
            raise ValueError("no setup")
    def process(self, record):
        return record
"""


@pytest.mark.law("L8")
@pytest.mark.parametrize("what", ["works", "raises", "raises, beside a thread"])
@pytest.mark.parametrize("closed", [[0], [0, 1], slow([1, 2]), slow([2]), [0, 1, 2]])
def test_closed_standard_files(closed: Any, what: str, tmp_path: Path) -> None:
    """Sockets and rings get their numbers else, and what programs of user code print would go there."""
    (tmp_path / "noisy.py").write_text(NOISY.format(what=what))
    (tmp_path / "script.py").write_text(QUIET)
    script = Script(CLOSED.format(closed=closed), tmp_path / "script.py", tmp_path, tmp_path / "told")
    script.end()
    told = (tmp_path / "told").read_text()
    assert (
        told == str(list(range(20)))
        if what == "works"
        else "failed on setup(), before any record: ValueError: no setup" in told
    )


def test_a_module_search_path_longer_than_an_argument_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """And odd entries, which imports pass over."""
    long = [f"/nowhere/{i:05}/{'p' * 80}" for i in range(2000)]
    monkeypatch.setattr("sys.path", [*sys.path, *long, Path("/nowhere"), "/no\udcffwhere"])
    with line(40) as pipeline:
        assert ids(pipeline) == list(range(40))


def test_a_module_that_starts_a_thread_and_adds_odd_entries(tmp_path: Path) -> None:
    odd = "import pathlib, sys\nsys.path.append(pathlib.Path('/nowhere'))\n"
    odd += "sys.path += [f'/nowhere/{i}' + 100 * 'p' for i in range(2000)]"
    (tmp_path / "flagged.py").write_text(f"{odd}\n{MODULE.replace('THREADS', 'True')}")
    status, out, errors = run_script(SCRIPT, ROOT, tmp_path)
    assert status == 0, errors
    assert len(json.loads(out)["process"]) == 6

"""`import zephon` is light: what a feature needs is loaded when it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# fmt: off
HEAVY = {
    "torch", "pyarrow", "tokenizers", "transformers", "typer", "click", "rich", "matplotlib", "ray", "pandas",
    "numpy.testing", "numpy.f2py", "hypothesis", "pytest",
}
# fmt: on
SCRIPT = """
import sys, time
began = time.perf_counter()
import zephon
took = time.perf_counter() - began
import json
print(json.dumps([took, sorted(sys.modules)]))
"""


# What only some programs use, and what the trainer leaves to the processes below it.
LATE = {"asyncio", "uvloop", "ssl", "numpy.ma", "numpy.random", "multiprocessing", "tempfile", "difflib", "email"}
FIRST_BATCH = """
import sys
import zephon as zp
rows = zp.Dataset.from_list("rows", [{"id": i, "modules": ""} for i in range(32)])
look = lambda record: {**record, "modules": " ".join(sys.modules)}
pipeline = zp.Pipeline(zp.StaticMixture([rows], seed=1)).map(look).batch(8)
with pipeline.options(runner="process", parallelism=2) as pipeline:
    batches = iter(pipeline)
    modules = next(batches)["modules"][0].split()
import json
print(json.dumps([sorted(sys.modules), modules]))
"""


def test_import_loads_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    took, modules = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nimport zephon: {took * 1e3:.0f} ms, {len(modules)} modules")
    assert "zephon" in modules
    assert not HEAVY & set(modules)


def loaded(script: str) -> list[list[str]]:
    """What a script prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
def test_a_first_batch_loads_no_more_than_it_needs() -> None:
    """Every module that trainer, launcher and worker import delays the first batch."""
    trainer, worker = loaded(FIRST_BATCH)
    assert not (HEAVY | LATE) & set(trainer)
    assert "zephon.engine_process" in worker  # forked from a launcher that imported it
    assert not (HEAVY | {"numpy.ma", "numpy.random", "tempfile", "difflib", "email"}) & set(worker)


def test_the_launcher_starts_before_the_rest_is_imported() -> None:
    [modules] = loaded("import sys, json, zephon.runners.spawn; print(json.dumps([sorted(sys.modules)]))")
    assert "zephon.runners.spawn" in modules
    assert not (HEAVY | LATE | {"numpy", "msgspec", "cloudpickle"}) & set(modules)

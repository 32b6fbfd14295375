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

"""bench/device.py where there is no device: what it says, and the parts that need none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "device.py"


def test_without_a_device_it_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip() == (
        "bench/device.py measures copies to a CUDA device, and torch finds none on this machine: there is nothing to "
        "measure. Run it on a machine with one."
    )


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_device", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overlap_and_picture(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pinned = script.Timeline("pinned", [(0, 4), (6, 10)], [(2, 7), (7, 9), (20, 30)], 40)
    assert pinned.overlapped == (2 + 1 + 2) / 8
    assert pinned.gb_per_s == pytest.approx(0.04 * 2 / 0.008)
    apart = script.Timeline("unpinned", [(0, 4)], [(4, 7)], 40)
    assert apart.overlapped == 0
    script.draw([pinned, apart], str(tmp_path / "device.png"))
    assert (tmp_path / "device.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

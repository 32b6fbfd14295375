"""`make soak` in short: it passes what is sound, and sees a batch that differs, memory that grows and what is left."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator

import msgspec
import pytest

from bench import soak_faults
from zephon.bench import proc
from zephon.testing.points import Faults
from zephon.testing.streams import Expected

pytestmark = pytest.mark.skipif(not proc.has_proc(), reason="the process runner needs Linux")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[soak_faults.Soak]:
    """One of few rows."""
    monkeypatch.setattr(soak_faults, "ROWS", (600, 300))
    monkeypatch.setattr(soak_faults, "DELAYS_S", (0.0, 0.004))
    figures = soak_faults.Figures()
    with Faults() as kit, soak_faults.Reaper(kit, "0", 0.3, figures) as reaper:
        yield soak_faults.Soak(argparse.Namespace(seed=0), kit, reaper, figures)


def test_a_sound_run_and_one_that_is_not(soak: soak_faults.Soak) -> None:
    assert soak.run(time.monotonic() + 30) == ""
    figures = soak._figures
    assert figures.legs >= 1
    assert figures.batches > 100
    known = soak._streams._known[0, 0]
    assert isinstance(known[2], Expected)
    known[2] = msgspec.structs.replace(known[2], digest="0")
    wrong = soak.run(time.monotonic() + 30)
    assert "lane 0" in wrong
    assert "differs" in wrong or "other fields" in wrong


def sizes(kind: str, *totals: float) -> list[tuple[float, dict[str, float]]]:
    """Six samples a minute; other kinds stay as they are."""
    steady = dict.fromkeys(soak_faults.MOST_GROWTH, 30.0)
    return [(minute * 60 + i * 10, steady | {kind: mb}) for minute, mb in enumerate(totals) for i in range(6)]


@pytest.mark.parametrize(
    ("kind", "totals", "failures"),
    [
        ("trainer", (50, *[100] * 9), []),
        ("trainer", (50, *[100] * 8, 107.1), ["memory of the trainer grew by 7.1%"]),
        ("engine", (50, *[100] * 8, 131), []),
        ("engine", (50, *[100] * 8, 133), ["memory of the engine grew by 33.0%"]),
    ],
)
def test_memory(kind: str, totals: tuple[float, ...], failures: list[str]) -> None:
    assert list(soak_faults.judge_memory(sizes(kind, *totals), 600.0)) == failures


def test_what_is_left() -> None:
    gc.collect()  # what an earlier test left in a cycle
    now = len(os.listdir("/proc/self/fd"))
    assert list(soak_faults.left(now, 99, proc.shared_names())) == []
    with open(os.devnull):
        assert list(soak_faults.left(now, 99, proc.shared_names())) == ["1 descriptors are left"]

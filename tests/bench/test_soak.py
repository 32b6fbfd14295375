"""`make soak-short` in short: it must see memory that grows and content that differs, and pass what is sound."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench import soak
from tests.bench.test_command import folder
from zephon.bench import proc

pytestmark = pytest.mark.skipif(not proc.has_proc(), reason="the process runner needs Linux")
__all__ = ["folder"]


def sizes(*totals: float) -> list[soak.Size]:
    """Ten samples a minute, of ten minutes, each with the same memory."""
    return [soak.Size(minute * 60 + i * 6, {"engine": total}) for minute, total in enumerate(totals) for i in range(10)]


@pytest.mark.parametrize(
    ("totals", "failure"),
    [
        ((50, *[100] * 9), None),
        ((50, 100, 130, *[104.9] * 7), None),
        ((50, *[100] * 8, 105.1), "memory grew by 5.1%, more than 5%"),
        ((100, 100), "too short"),
    ],
)
def test_memory(totals: tuple[float, ...], failure: str | None) -> None:
    found = list(soak.judge_memory(sizes(*totals), 600.0))
    assert len(found) == (failure is not None)
    assert (failure or "") in "".join(found)


def test_content(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of some seconds is sound; with one digest changed early or late, it is not."""
    wanted = argparse.Namespace(minutes=0.05, parallelism=1, lanes=2, folder=folder)
    sampled, notes = soak.watched(wanted)
    assert sampled[-1].total > 10
    assert list(soak.judge_chain(notes, wanted)) == []
    assert "batches are the oracle's" in capsys.readouterr().out
    number = next(i for i, note in enumerate(notes) if note.state is not None)
    assert 0 <= number < len(notes) - 1
    early: list[Any] = [notes[0]._replace(chain="0"), *notes[1:]]
    assert "is not the oracle's" in "".join(soak.judge_chain(early, wanted))
    late: list[Any] = [*notes[:-1], notes[-1]._replace(chain="0")]
    assert "another one with 2 workers" in "".join(soak.judge_chain(late, wanted))

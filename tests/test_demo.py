"""The examples: the demonstration's comparison on a small slice, and the pipeline that others are pointed to."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
rich_console = pytest.importorskip("rich.console")

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 8


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def run(demo: ModuleType, **settings: Any) -> tuple[bool, list[str]]:
    """(whether every step matched, the lines shown)."""
    shown = io.StringIO()
    matched = demo.main(STEPS, rich_console.Console(file=shown, width=100, color_system=None, **settings))
    return matched, shown.getvalue().splitlines()


@pytest.mark.law("L2")
@pytest.mark.law("L3")
def test_every_step_matches(demo: ModuleType) -> None:
    matched, lines = run(demo)
    assert matched
    assert lines[-1].startswith(f"All {STEPS} steps match")
    assert not any(control in line for line in lines for control in ("\x1b", "\r"))
    assert max(map(len, lines)) <= 100
    for lanes in ("[0] [1] [2] [3]", "[0 1] [2 3]", "[0 1] [2] [3]"):
        assert any(line.endswith(f"groups own the lanes {lanes}") for line in lines)


@pytest.mark.slow
def test_a_difference_is_shown(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo.run_together

    def tampered(groups: list[Any]) -> Iterator[Any]:
        for step in honest(groups):
            yield step._replace(digest="0" * 16) if step.number == 4 and len(groups) > 1 else step

    monkeypatch.setattr(demo, "run_together", tampered)
    matched, lines = run(demo, force_terminal=True)
    assert not matched
    assert lines[-1] == f"1 of {STEPS} steps do not match; the first is step 4."
    compared = [found for line in lines if (found := re.search(r"(\d+)  \w{16}  \w{16}  (equal|DIFFERENT)", line))]
    assert {int(found[1]) for found in compared} == set(range(STEPS))
    assert {int(found[1]) for found in compared if found[2] == "DIFFERENT"} == {4}


def test_pretrain_gives_batches() -> None:
    """Loaded by its path, as the command line does."""
    spec = importlib.util.spec_from_file_location("pretrain_by_path", EXAMPLES / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.pipeline() as pipeline:
        assert pipeline.lanes == [0, 1, 2, 3]
        batches = list(pipeline.take(4))
    assert [batch.lane_id for batch in batches] == [0, 1, 2, 3]
    for batch in batches:
        assert batch["input_ids"].shape == (8, 2048)
        assert batch["input_ids"].dtype == np.int64
        assert not batch["num_pad"].any()
        assert {name for sample in batch.origins for name, *_ in sample} == {"web", "code"}


def test_a_lane_has_many_windows(demo: ModuleType) -> None:
    """The demonstration is worth little if a lane ends after a window or two."""
    source = demo.pretrain.source()
    length = source.length(0)
    assert length is not None
    assert length // (4 * 4 * source.chunk_size) >= 20

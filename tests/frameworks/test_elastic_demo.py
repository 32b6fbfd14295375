"""examples/elastic_demo.py: a small version of it, and that it would say so if something differed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from ..process.helpers import Script
from .examples import ENVIRONMENT, EXAMPLES, example


@pytest.mark.law("L2")
@pytest.mark.law("L3")
def test_killed_on_two_ranks_and_resumed_on_three(tmp_path: Path) -> None:
    argv = [str(EXAMPLES / "elastic_demo.py"), "--whole", "1", "--legs", "2:2", "3:5", "--save-every", "2"]
    argv += ["--plot", str(tmp_path / "both.png")]
    status, out, err = Script("", argv=argv, env=ENVIRONMENT).end(180.0)
    assert status == 0, out + err
    assert out.splitlines()[-1] == "All 6 steps match: the same batches, and losses within 1e-05."
    assert [line.split()[0] for line in out.splitlines() if "SIGKILL" in line or "the end" in line] == ["2", "3"]
    assert (tmp_path / "both.png").stat().st_size > 10_000


@pytest.mark.parametrize("changed", [{"batch": "other"}, {"loss": 2.5001}, {"loss": float("nan")}])
def test_a_difference_is_said(changed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    made = example("elastic_demo")
    demo = made.Demo(Path(), 2)
    demo.whole = {number: made.Step(number, 2.5, f"batch {number}") for number in range(4)}
    steps = list(demo.whole.values())
    demo.legs = [made.Leg(2, steps[:3], True, 1.0), made.Leg(3, [steps[3]], False, 1.0)]
    assert demo.verdict()
    demo.legs = [made.Leg(2, [*steps[:2], steps[2]._replace(**changed)], True, 1.0), demo.legs[1]]
    assert not demo.verdict()
    demo.legs = [made.Leg(2, steps[:3], True, 1.0)]
    assert not demo.verdict()
    assert capsys.readouterr().out.endswith("1 of 4 steps do not match; the first is step 3.\n")


@pytest.mark.parametrize("legs", [["4"], ["4:x"], ["4:60", "2:60"], ["4:60", "2:50"], ["0:5"], ["25:5"], ["2:-1"]])
def test_legs_that_cannot_be(legs: list[str]) -> None:
    """Steps that do not rise would leave a leg that is never killed."""
    made = example("elastic_demo")
    assert made.legs_of(["1:0", "24:7"]) == [(1, 0), (24, 7)]
    with pytest.raises(ValueError, match=r"unpack|invalid literal|cannot be"):
        made.legs_of(legs)


def test_a_leg_that_begins_behind_its_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it was slow to be killed, and had saved so late a step."""
    made = example("elastic_demo")
    (tmp_path / "gpt.py").touch()
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    late = "import time\nfor n in range(90, 10**6): print(f'step {n} loss 2.5 batch abc', flush=True)\n"
    (tmp_path / "torch" / "distributed" / "run.py").write_text(late)
    for folder in ("torch", "torch/distributed"):
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps = list(made.train(tmp_path, 2, 75, 8, kill=True))
    assert steps[0].number == 90
    assert len(steps) < 10**5

"""examples/accelerate_gpt.py: the same training under Accelerate, and what its checkpoint holds of the data."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("accelerate")

from .examples import alone, check, run  # noqa: E402
from .jobs import example  # noqa: E402

ADAM = partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.slow
@pytest.mark.law("L2")
def test_two_processes(tmp_path: Path) -> None:
    """They train as one does, and what Accelerate saved of the data is the place of all lanes."""
    wanted, _ = alone(24, 2, ADAM)
    check(run("accelerate_gpt.py", "--steps", 2, "--folder", tmp_path / "saved", ranks=2), wanted)
    place = torch.load(tmp_path / "saved" / "custom_checkpoint_0.pkl", weights_only=True)
    with (
        example("gpt").pipeline().options(runner="inline") as again,
        example("gpt").pipeline().options(runner="inline") as whole,
    ):
        again.load_state_dict(place)
        wanted_step, found = next(islice(whole.steps(), 2, 3)), next(again.steps())
        assert [batch.digest() for batch in found] == [batch.digest() for batch in wanted_step]


@pytest.mark.slow
@pytest.mark.law("L3")
def test_other_numbers_of_processes(tmp_path: Path) -> None:
    wanted, _ = alone(24, 6, ADAM)
    found = run("accelerate_gpt.py", "--steps", 2, "--folder", tmp_path / "saved", ranks=2)
    found += run("accelerate_gpt.py", "--steps", 4, "--folder", tmp_path / "saved", ranks=5)
    found += run("accelerate_gpt.py", "--steps", 6, "--folder", tmp_path / "saved")
    check(found, wanted)

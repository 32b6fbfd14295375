"""examples/gpt.py: on any number of ranks, even or not, the same batches, loss and weights as on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from ..ranks.launch import launch  # noqa: E402
from .examples import TOLERANCE, alone, check, run  # noqa: E402

ADAM = partial(torch.optim.AdamW, lr=1e-3)


def test_uneven_ranks_weigh_every_token_alike(tmp_path: Path) -> None:
    """3 lanes on 2 ranks: the gradients are those of the mean over all tokens, with DDP and with FSDP."""
    [line], model = alone(3, 1, partial(torch.optim.SGD, lr=1.0))
    wanted = {name: weight for name, weight in model.named_parameters() if weight.ndim == 1}
    ranks = launch("weighted", 2, tmp_path, 3, module="tests.frameworks.jobs")
    for name in ("ddp", "fsdp"):
        assert [rank[name]["batches"] for rank in ranks] == [2, 1]
        assert abs(sum(rank[name]["part"] for rank in ranks) - line.loss) <= TOLERANCE
        found = ranks[0][name]["weights"]  # those of FSDP are gathered on the first rank
        assert found.keys() == wanted.keys()
        for each, weight in wanted.items():
            torch.testing.assert_close(torch.tensor(found[each]), weight.detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.law("L2")
@pytest.mark.law("L3")
def test_other_ranks_and_other_ways_to_shard(tmp_path: Path) -> None:
    """5 uneven ranks with FSDP, then 8 with DDP, then 3 with FSDP: one training."""
    wanted, _ = alone(24, 6, ADAM)
    found = run("gpt.py", "--steps", 2, "--folder", tmp_path, "--fsdp", ranks=5)
    found += run("gpt.py", "--steps", 4, "--folder", tmp_path, ranks=8)
    found += run("gpt.py", "--steps", 6, "--folder", tmp_path, "--fsdp", ranks=3)
    check(found, wanted)
    assert run("gpt.py", "--steps", 6, "--folder", tmp_path, ranks=1) == []

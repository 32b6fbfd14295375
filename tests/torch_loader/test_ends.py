"""A common last step inside a DataLoader: its workers know it by arithmetic or from the user, and from nobody else."""

from __future__ import annotations

import pytest

import zephon as zp
from tests.test_ends import line, odd

torch = pytest.importorskip("torch")


def loaded(pipeline: zp.Pipeline, num_workers: int) -> list[str]:
    loader = torch.utils.data.DataLoader(pipeline.to_torch(), batch_size=None, num_workers=num_workers)
    return [batch.digest() for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 3])
def test_workers_end_with_the_same_step(num_workers: int) -> None:
    for last_step in ("drop", "pad"):
        wanted = [batch.digest() for batch in line(25, last_step=last_step)]
        assert loaded(line(25, last_step=last_step), num_workers) == wanted
    given = line(25, keep=odd, last_step="pad", steps_per_pass=4)
    assert loaded(given, num_workers) == [batch.digest() for batch in given]

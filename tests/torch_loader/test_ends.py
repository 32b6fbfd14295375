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
        pipeline = line(25, last_step=last_step)
        loader = torch.utils.data.DataLoader(pipeline.to_torch(), batch_size=None, num_workers=num_workers)
        passes = [[(b.step, b.padding, b.digest()) for b in loader] for _ in range(3)]
        assert passes == [[(b.step, b.padding, b.digest()) for b in pipeline] for _ in range(3)]
        assert min(map(len, passes)) > 0
    given = line(25, keep=odd, last_step="pad", steps_per_pass=4)
    assert loaded(given, num_workers) == [batch.digest() for batch in given]


def test_a_length_that_is_known() -> None:
    pipeline = line(25, last_step="drop")
    assert len(torch.utils.data.DataLoader(pipeline.to_torch(), batch_size=None)) == len(pipeline) > 0
    with pytest.raises(TypeError, match="cannot be counted in advance"):
        len(line(25, keep=odd).to_torch())


def test_the_wrong_object_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = line(25)
    batch = next(iter(torch.utils.data.DataLoader(pipeline.to_torch(), batch_size=None)))
    with pytest.raises(zp.errors.CheckpointError, match="did not come from this pipeline object"):
        pipeline.state_dict(after=batch)
    pipeline.state_dict()
    assert "the dataset of to_torch() reads on its own: ask it for the state" in caplog.text
    with pytest.raises(zp.errors.CheckpointError, match=r"zephon\.torch_loader\.pipeline_state"):
        pipeline.load_state_dict({"_snapshot": {}, "_steps_since_snapshot": 0})
    for wrong, words in (
        (line(25), "a pipeline has no batch number"),
        (line(25, keep=odd), "there is pipeline.to_torch"),
    ):
        with pytest.raises(TypeError, match=words):
            next(iter(torch.utils.data.DataLoader(wrong, batch_size=None)))

"""The loader for TorchTitan: its shape, its checkpoints through torch on other ranks, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zephon as zp
from zephon.integrations.torchtitan import TitanDataLoader, dataloader_builder

from ..ranks.jobs import line
from ..ranks.launch import launch
from .jobs import titan, titan_takes

torch = pytest.importorskip("torch")


def tokens(tokenizer: Any, config: Any) -> zp.Pipeline:
    """Documents of the tokenizer's ids, packed: 4 lanes of batches of 2 sequences."""
    rows = [{"input_ids": np.arange(1, 2 + i % 7) + tokenizer} for i in range(200)]
    source = zp.StaticMixture(zp.Dataset.from_list("toy", rows), seed=1, end="repeat")
    training = config.training
    pipeline = zp.Pipeline(source).pack(training.seq_len).batch(training.local_batch_size).to_training()
    return pipeline.options(canonical_replicas=4, runner="inline")


def config(local: int = 2, whole: int = 8) -> Any:
    return SimpleNamespace(training=SimpleNamespace(local_batch_size=local, global_batch_size=whole, seq_len=8))


def built(fields: dict[str, Any] | None = None, make: Any = tokens, **settings: Any) -> TitanDataLoader:
    called = {"dp_world_size": 2, "dp_rank": 1, "tokenizer": 100, "job_config": config(), **settings}
    return dataloader_builder(make, **(fields or {}))(**called)


def test_it_has_the_shape_of_titans_loader() -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    loader = built({"inputs": {"input": "input_ids", "positions": "position_ids"}})
    assert isinstance(loader, Stateful)
    inputs, labels = next(iter(loader))
    assert set(inputs) == {"input", "positions"}
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 8)
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
    assert loader.pipeline.lanes == [2, 3]
    loader.load_state_dict({})
    assert len(loader.state_dict()["lanes"]) == 2


def test_it_goes_on_where_it_was_saved() -> None:
    loader = built()
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    state = loader.state_dict()
    again = built()
    again.load_state_dict(state)
    wanted, found = next(stream), next(iter(again))
    assert torch.equal(wanted[0]["input"], found[0]["input"])
    assert torch.equal(wanted[1], found[1])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"job_config": config(whole=16)}, "set training.global_batch_size to 8"),
        ({"job_config": config(whole=-1)}, "4 lanes x 1 batches x 2 samples = 8, but a step of TorchTitan takes 4"),
        ({"make": lambda *_: tokens(0, config(4))}, r"local_batch_size=2, but the pipeline has .batch\(4\)"),
    ],
)
def test_batch_sizes_that_differ(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=text):
        built(**settings)


def test_ranks_that_do_not_divide_the_lanes() -> None:
    with pytest.raises(zp.errors.ConfigError, match="4 lanes on 3 data-parallel ranks"):
        next(iter(built(dp_world_size=3)))


def test_a_field_that_is_not_there() -> None:
    loader = TitanDataLoader(line(2), dp_world_size=1, dp_rank=0)
    with pytest.raises(
        zp.errors.ConfigError, match=r"field 'input_ids' as a tensor, and the batch has id: .*to_training"
    ):
        next(iter(loader))
    loader.pipeline.close()


def test_a_field_that_is_a_list() -> None:
    """Rows of unequal length are one, and nothing could move it to a device."""
    dataset = zp.Dataset.from_list("toy", [{"input_ids": list(range(i)), "labels": i} for i in range(8)])
    pipeline = zp.Pipeline(zp.StaticMixture(dataset, seed=1)).batch(2).options(runner="inline")
    with pytest.raises(zp.errors.ConfigError, match=r"'input_ids' as a tensor, and the batch has a list there: .*"):
        next(iter(TitanDataLoader(pipeline, dp_world_size=1, dp_rank=0)))


@pytest.mark.law("L2")
@pytest.mark.law("L3")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks take three batches of six lanes each, a step; three ranks go on with the next step."""
    from torch.distributed import checkpoint

    with (alone := titan(0, 1)).pipeline:
        taken = titan_takes(alone, 12)
    saved = launch("titan_saves", 2, tmp_path, 3, module="tests.frameworks.jobs")
    assert [labels for rank in saved for labels in rank] == taken[:6]
    found = []
    for rank in range(3):
        with (loader := titan(rank, 3)).pipeline:
            checkpoint.load({"dataloader": loader}, checkpoint_id=tmp_path / "saved", no_dist=True)
            found += titan_takes(loader, 2)
    assert found == taken[6:]

"""Case A15: positions, labels, segments and bounds agree in padded and in flattened batches of more than one sample."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from .helpers import on, pipeline

# Sequences of 6 tokens: documents of 3 and 2, of 4, of 1, 1 and 1; tokens 1 to 12. `extra` has one value a token.
ROWS: list[dict[str, Any]] = [
    {
        "id": i,
        "input_ids": np.array(ids),
        "position_ids": np.array(positions),
        "segment_ids": np.array(segments),
        "num_pad": num_pad,
        "extra": np.array(ids, np.float32) / 2,
        "word": "abc"[i],
    }
    for i, (ids, positions, segments, num_pad) in enumerate(
        [
            ([1, 2, 3, 4, 5, 0], [0, 1, 2, 0, 1, 0], [1, 1, 1, 2, 2, 0], 1),
            ([6, 7, 8, 9, 0, 0], [0, 1, 2, 3, 0, 0], [1, 1, 1, 1, 0, 0], 2),
            ([10, 11, 12, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0], 3),
        ]
    )
]
OUTPUTS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="no torch")),
]


def batch_of(rows: list[dict[str, Any]], workers: int, output: str, **settings: Any) -> dict[str, Any]:
    """The one batch, arrays as numpy; under torch they must have been tensors."""
    line = on(pipeline(rows).batch(3).to_training(pad_to_multiple_of=8, fields=["extra"], **settings), workers)
    (batch,) = list(line.options(output=output))
    if output == "torch":
        import torch

        assert isinstance(batch["input_ids"], torch.Tensor)
    return {name: value if isinstance(value, list) else np.asarray(value) for name, value in batch.items()}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("output", OUTPUTS)
def test_padded(workers: int, output: str) -> None:
    batch = batch_of(ROWS, workers, output)
    per_token = ["input_ids", "labels", "position_ids", "segment_ids", "loss_mask", "extra"]
    assert {name: batch[name].shape for name in per_token} == dict.fromkeys(per_token, (3, 8))
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 0, 0, 0],
        [6, 7, 8, 9, 0, 0, 0, 0],
        [10, 11, 12, 0, 0, 0, 0, 0],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0], [0] * 8]
    assert batch["segment_ids"].tolist() == [
        [1, 1, 1, 2, 2, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 2, 3, 0, 0, 0, 0, 0],
    ]
    n = -100
    assert batch["labels"].tolist() == [[2, 3, 4, 5, n, n, n, n], [7, 8, 9, n, n, n, n, n], [11, 12, n, n, n, n, n, n]]
    assert (batch["loss_mask"] == (batch["labels"] != n)).all()
    assert batch["num_pad"].tolist() == [3, 4, 5]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8, 12, 16, 17, 18, 19, 24]
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == np.int32
    assert int(batch["max_seqlen"]) == 5  # the pads of the last row
    assert batch["word"] == ["a", "b", "c"]
    assert batch["id"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("output", OUTPUTS)
def test_flattened(workers: int, output: str) -> None:
    batch = batch_of(ROWS, workers, output, flatten=True)
    assert batch["input_ids"].tolist() == list(range(1, 13))
    assert batch["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0]
    assert batch["segment_ids"].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 5, 6]
    assert batch["labels"].tolist() == [2, 3, 4, 5, -100, 7, 8, 9, -100, 11, 12, -100]
    assert batch["extra"].tolist() == [i / 2 for i in range(1, 13)]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 9, 10, 11, 12]
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == np.int32
    assert int(batch["max_seqlen"]) == 4
    assert np.flatnonzero(batch["position_ids"] == 0).tolist() == batch["cu_seqlens"][:-1].tolist()
    assert batch["word"] == ["a", "b", "c"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("flatten", [False, True])
def test_boundaries_have_no_label(workers: int, flatten: bool) -> None:
    labels = batch_of(ROWS, workers, "numpy", flatten=flatten, mask_boundaries=True, ignore_index=-1)["labels"]
    assert labels[labels != -1].tolist() == [2, 3, 5, 7, 8, 9]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("flatten", [False, True])
def test_documents_that_are_not_packed(workers: int, flatten: bool) -> None:
    rows = [{"id": i, "input_ids": np.arange(1, n + 1), "extra": np.ones(n)} for i, n in enumerate([3, 9, 0])]
    batch = batch_of(rows, workers, "numpy", flatten=flatten)
    if flatten:
        assert batch["position_ids"].tolist() == [0, 1, 2, *range(9)]
        assert batch["cu_seqlens"].tolist() == [0, 3, 12]
        assert int(batch["max_seqlen"]) == 9
    else:
        assert batch["input_ids"].shape == batch["labels"].shape == batch["extra"].shape == (3, 16)
        assert batch["num_pad"].tolist() == [13, 7, 16]
        assert batch["cu_seqlens"].tolist() == [0, 3, 16, 25, 32, 48]
        assert (batch["segment_ids"] != 0).sum(axis=1).tolist() == [3, 9, 0]

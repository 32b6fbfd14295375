"""to_training: what it makes of odd batches, its settings in the definition, its place in a pipeline, its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zephon as zp
from zephon.testing.oracle import OracleLane

from ..cases.helpers import on, pipeline, saved


def tokens(*rows: list[int], **fields: list[Any]) -> list[dict[str, Any]]:
    """Records of these ids, and of further fields sample by sample."""
    return [
        {"input_ids": np.array(ids, np.int64), **{name: values[i] for name, values in fields.items()}}
        for i, ids in enumerate(rows)
    ]


def ragged(*ids: Any) -> list[dict[str, Any]]:
    """Records of these ids as they are."""
    return [{"input_ids": each} for each in ids]


def equal(ids: Any) -> list[dict[str, Any]]:
    """Records whose ids are one array in a batch."""
    return ragged(*ids)


def one(rows: list[dict[str, Any]], **settings: Any) -> zp.Batch:
    (batch,) = list(on(pipeline(rows).batch(len(rows)).to_training(**settings), 0))
    return batch


def test_a_mask_belongs_to_the_token_that_is_predicted() -> None:
    batch = one(tokens([5, 6, 7, 8], loss_mask=[np.array([0, 0, 1, 1], np.int8)]))
    assert batch["labels"].tolist() == [[-100, 7, 8, -100]]
    assert batch["loss_mask"].tolist() == [[False, True, True, False]]


def test_weights_stay_weights_and_move_with_their_labels() -> None:
    weights = [np.array([0.5, 0.25, 0.0, 1.0]), np.array([0.5, 2.0])]
    rows = tokens([5, 6, 7, 8], [5, 6], loss_mask=weights)
    batch = one(rows)
    assert batch["loss_mask"].dtype == np.float32
    assert batch["loss_mask"].tolist() == [[0.25, 0, 1, 0], [2, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, -100, 8, -100], [6, -100, -100, -100]]
    kept = one(rows, shift=False)
    assert kept["loss_mask"].tolist() == [[0, 0.25, 0, 1], [0, 2, 0, 0]]
    assert kept["labels"].tolist() == [[-100, 6, -100, 8], [-100, 6, -100, -100]]
    assert one(rows, flatten=True)["loss_mask"].tolist() == [0.25, 0, 1, 0, 2, 0]
    assert weights[0].tolist() == [0.5, 0.25, 0, 1]  # what was given is not written to


def test_weights_through_pack() -> None:
    rows = tokens([5, 6, 7], [8, 9], loss_mask=[[0.5, 0.25, 1.5], [1, 0]])
    line = pipeline(rows).pack(8, fields={"loss_mask": 0.0}).batch(1).to_training(mask_boundaries=True)
    for runner in ("inline", "threads"):
        (batch,) = list(on(line.options(runner=runner), 0))
        assert batch["loss_mask"].dtype == np.float32
        assert batch["loss_mask"].tolist() == [[0.25, 1.5, 0, 0, 0, 0, 0, 0]]
        assert batch["labels"].tolist() == [[6, 7, -100, -100, -100, -100, -100, -100]]


def test_a_sample_without_weights_counts_whole() -> None:
    batch = one([*tokens([1, 2, 3]), *tokens([4, 5, 6], loss_mask=[[0.5, 0.5, 0.25]])])
    assert batch["loss_mask"].tolist() == [[1, 1, 0], [0.5, 0.25, 0]]


def test_labels_that_the_model_shifts_itself() -> None:
    rows = tokens([5, 6, 7, 8], loss_mask=[np.array([0, 0, 1, 1], np.int8)])
    assert one(rows, shift=False)["labels"].tolist() == [[-100, -100, 7, 8]]
    packed = tokens([5, 6, 7, 8], segment_ids=[np.array([1, 1, 2, 2])])
    assert one(packed, shift=False, mask_boundaries=True)["labels"].tolist() == [[-100, 6, -100, 8]]
    assert one(packed, shift=False)["labels"].tolist() == [[-100, 6, 7, 8]]


def test_samples_without_a_mask_count_whole() -> None:
    batch = one([*tokens([1, 2, 3]), *tokens([4, 5, 6], loss_mask=[np.array([False, False, True])])])
    assert batch["loss_mask"].tolist() == [[True, True, False], [False, True, False]]


def test_no_label_of_one_sample_is_in_another() -> None:
    batch = one(tokens([1], [], [2, 3]), flatten=True)
    assert batch["labels"].tolist() == [-100, 3, -100]
    assert batch["cu_seqlens"].tolist() == [0, 1, 3]


@pytest.mark.parametrize("flatten", [False, True])
def test_samples_without_tokens(flatten: bool) -> None:
    batch = one(tokens([], []), flatten=flatten, pad_to_multiple_of=8)
    assert batch["input_ids"].size == 0
    assert batch["cu_seqlens"].tolist() == [0]
    assert int(batch["max_seqlen"]) == 0


def test_ids_of_any_whole_kind_and_plain_lists() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3]}, {"input_ids": np.array([4], np.uint16)}]
    batch = one(rows, pad_id=9)
    assert batch["input_ids"].dtype == np.int64
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]


def test_pads_that_only_their_number_tells() -> None:
    assert one(tokens([1, 2, 0], [3, 4, 5], num_pad=[1, 0]), flatten=True)["input_ids"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("flatten", [False, True])
def test_the_oracle_covers_it(workers: int, flatten: bool) -> None:
    rows = tokens(*[list(range(1, 2 + i * 5 % 7)) for i in range(40)])
    line = pipeline(rows).pack(8).batch(3).to_training(flatten=flatten, pad_to_multiple_of=5)
    expected = [batch.digest for batch in OracleLane(line, 0)]
    assert [batch.digest() for batch in on(line, workers)] == expected
    assert len(expected) > 3


def test_its_settings_are_in_the_definition() -> None:
    line = pipeline(tokens(*[[1, 2]] * 8)).batch(2)
    first = on(line.to_training(), 0)
    next(iter(first))
    state = saved(first)
    with pytest.raises(zp.errors.CheckpointError, match=r"to_training\.mask_boundaries"):
        on(line.to_training(mask_boundaries=True), 0).load_state_dict(state)
    resumed = on(line.to_training(), 0)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 3


def test_its_place() -> None:
    line = pipeline(tokens([1]))
    with pytest.raises(zp.errors.ConfigError, match=r"batch\(\.\.\.\) must come before it"):
        line.to_training()
    with pytest.raises(
        zp.errors.ConfigError, match=r"behind batch: batch must be the last step .* but for to_training"
    ):
        line.batch(1).to_training().map(dict)
    with pytest.raises(zp.errors.ConfigError, match="behind batch"):
        line.batch(1).to_training().batch(2)
    with pytest.raises(
        zp.errors.ConfigError, match="'to_training' behind 'to_training': labels would be shifted twice"
    ):
        line.batch(1).to_training().to_training(name="again")
    assert "'to_training'" in line.batch(1).to_training().explain()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
        ({"pad_to_multiple_of": 10**12}, "a whole number of 1 to 1,048,576 is wanted"),
        ({"fields": "extra"}, "a list of names"),
        ({"fields": ["labels"]}, "every batch has labels without being asked; name only further"),
        (
            {"fields": ["loss_mask"]},
            "has loss_mask without being asked; those of the batch are carried over, weights too",
        ),
        ({"ignore": 3}, r"to_training\(ignore=\.\.\.\): there is no such setting; did you mean 'ignore_index'\?"),
        ({"flaten": True}, "did you mean 'flatten'"),
        ({"zzz": True}, "no such setting; there are ignore_index, mask_boundaries, .*, name"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=words):
        pipeline(1).batch(1).to_training(**settings)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1}], "no field 'input_ids'; the batch has id"),
        ([{"input_ids": "text"}], "field 'input_ids' of sample 0"),
        ([*tokens([1, 2]), {"id": 2}], "sample 1 of the batch has no field 'input_ids'"),
        (tokens([1, 2], loss_mask=[np.array([1])]), "field 'loss_mask' of sample 0 .* are 2 tokens"),
        (tokens([1, 2], loss_mask=[np.array([0, 2])]), "whole numbers other than 0 and 1; weights must be floats"),
        (tokens([1, 2], loss_mask=[np.array([0.5, np.nan])]), "a weight that is no number of float32"),
        (tokens([1, 2], loss_mask=[np.array([1e300, 0.5])]), "a weight that is no number of float32"),
        (tokens([1, 2], segment_ids=[np.array([0, 1])]), "pads belong to its end"),
        (tokens([1, 2], [3], segment_ids=[np.array([1, 1, 1]), np.array([1])]), "field 'segment_ids' of sample 0"),
        (tokens([1, 2], [3, 4], num_pad=[3, 0]), "num_pad of sample 0"),
        (ragged(np.array([1.0, 2.0]), [3, 4]), "field 'input_ids' of sample 0 .*float64"),
        (equal(np.array([[1.5, 2.7], [3, 4]])), "field 'input_ids' of sample 0 .*float64"),
        (equal(np.array([[True, False]])), "field 'input_ids' of sample 0 .*bool"),
        (equal(np.array([[1], [2**63]], np.uint64)), r"field 'input_ids' of sample 1 .*larger than 2\^63 - 1"),
        (tokens([1, 2], num_pad=[1.5]), r"num_pad of sample 0 of the batch is 1\.5, .* among 0 \.\. 2"),
        (tokens([1, 2], [1, 2], num_pad=[0, 1.0]), "num_pad of sample 1"),
        (tokens([1, 2], num_pad=[True]), "num_pad of sample 0 of the batch is True"),
        (tokens([1, 2], num_pad=["1"]), "num_pad of sample 0 of the batch is '1'"),
        (tokens([1, 2], num_pad=[-1]), "num_pad of sample 0 of the batch is -1"),
        (tokens([1, 2], num_pad=[[0]]), r"num_pad of sample 0 of the batch is \[0\]"),
        (tokens([1, 2], num_pad=[2**70]), "num_pad of sample 0"),
        (tokens([1], [1, 2], position_ids=[[0], [0.5, 1]]), "'position_ids' of sample 1 .* float64.*one whole number"),
        (tokens([1, 2], position_ids=[np.array([0.0, 1.0])]), "'position_ids' of sample 0 .* float64"),
        (tokens([1, 2], position_ids=[np.array([True, False])]), "'position_ids' of sample 0 .* bool"),
        (tokens([1, 2], position_ids=[np.array([0, 2**63], np.uint64)]), "'position_ids' of sample 0 .*beyond int64"),
        (tokens([], [1], position_ids=[np.array([], str), [0]]), "'position_ids' of sample 0"),
        (tokens([1, 2], segment_ids=[np.array([1.0, np.nan])]), "'segment_ids' of sample 0 .* float64"),
    ],
)
def test_batches_that_are_wrong(rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(zp.errors.DataError, match=rf"(?s)operator 'batch', lane 0.*dataset 'toy'.*row 0.*{words}"):
        one(rows)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[0.5, 1.0], zp.MISSING], "sample 1 of the batch has no field 'w'"),
        ([zp.MISSING, np.array([1, 2], np.float32)], "sample 0 of the batch has no field 'w'"),
        ([[0.5, 1.0], [2**53 + 1, 0]], "'w' of sample 1 .* int64.*float64"),
        ([np.array([2**63 + 3, 1], np.uint64), [1, 2]], "'w' of sample 0 .* uint64.*float64"),
    ],
)
def test_further_fields_that_are_wrong(values: list[Any], words: str) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], **({} if v is zp.MISSING else {"w": v})} for v in values]
    with pytest.raises(zp.errors.DataError, match=rf"(?s)operator 'batch', lane 0.*row 0.*{words}"):
        one(rows, fields=["w"])


def test_further_fields_of_several_kinds_that_one_holds() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], "w": v} for v in ([0.5, 1.0], [2**53, 0], [True, False])]
    assert one(rows, fields=["w"])["w"].tolist() == [[0.5, 1.0], [2.0**53, 0.0], [1.0, 0.0]]


def test_ids_of_several_kinds_stay_as_they_are() -> None:
    rows = ragged(np.array([2**53 + 1], np.uint64), np.array([2**53 + 1, -1]))
    assert one(rows)["input_ids"].tolist() == [[2**53 + 1, 0], [2**53 + 1, -1]]


def test_positions_and_segments_of_a_sample_without_tokens() -> None:
    batch = one(tokens([], [1, 2], position_ids=[[], [5, 6]], segment_ids=[[], [1, 1]]), flatten=True)
    assert batch["position_ids"].tolist() == [5, 6]
    assert batch["position_ids"].dtype == np.int64


@pytest.mark.parametrize("pads", [[1, 0], [np.int8(1), np.uint64(0)], [1, zp.MISSING]])
def test_numbers_of_pads_of_any_whole_kind(pads: list[Any]) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], **({} if n is zp.MISSING else {"num_pad": n})} for n in pads]
    assert one(rows)["cu_seqlens"].tolist() == [0, 1, 2, 4]


def test_each_sample_tells_its_pads_in_its_own_way() -> None:
    rows = [*tokens([1, 2, 0], segment_ids=[[1, 1, 0]]), *tokens([1, 0, 0], num_pad=[2])]
    assert one(rows, flatten=True)["input_ids"].tolist() == [1, 2, 1]

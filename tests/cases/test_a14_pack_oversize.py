"""Case A14: packing documents longer than the sequence: an explicit policy, nothing lost that is not counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import zephon as zp

from .helpers import digests, lost, on, pipeline, resumed, saved

LENGTHS = [5, 2, 3, 1, 9, 4]
WORKERS = [0, 1, 2, 4]


def documents(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Documents whose tokens run through all of them, from 0."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [{"input_ids": list(range(at, at + n))} for at, n in zip(starts, lengths, strict=True)]


def line_of(
    oversize: str, workers: int, lengths: Sequence[int] = LENGTHS, size: int = 4, **settings: Any
) -> zp.Pipeline:
    return on(pipeline(documents(lengths), **settings).pack(size, oversize=oversize, pad_id=-1).batch(1), workers)


ALGORITHMS = ["wrap", "first_fit", "best_fit", "best_fit_wrap"]
POLICIES = ["split", "truncate", "drop"]


def tokens(batches: Sequence[zp.Batch]) -> list[int]:
    """What was delivered, without padding."""
    found: list[int] = []
    for batch in batches:
        for row, pads in zip(batch["input_ids"].tolist(), batch["num_pad"].tolist(), strict=True):
            assert row[len(row) - pads :] == [-1] * pads
            found += row[: len(row) - pads]
    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 24, 100])
def test_split_loses_nothing(workers: int, size: int) -> None:
    line = line_of("split", workers, size=size)
    batches = list(line)
    assert tokens(batches) == list(range(24))
    assert len(batches) == -(-24 // size)
    assert line.counts()["dropped"] == {0: {}}


@pytest.mark.parametrize("workers", WORKERS)
def test_truncate_counts_what_it_cuts(workers: int) -> None:
    line = line_of("truncate", workers)
    assert tokens(list(line)) == [i for i in range(24) if i != 4 and not 15 <= i < 20]
    assert line.counts()["dropped"] == {0: {"pack.truncated_documents": 2, "pack.truncated_tokens": 6}}


@pytest.mark.parametrize("workers", WORKERS)
def test_drop_counts_documents_and_tokens(workers: int) -> None:
    line = line_of("drop", workers)
    assert tokens(list(line)) == [5, 6, 7, 8, 9, 10, 20, 21, 22, 23]
    assert line.counts()["dropped"] == {0: {"pack.oversize_documents": 2, "pack.oversize_tokens": 14}}


@pytest.mark.parametrize("workers", WORKERS)
def test_error_names_the_document_and_both_lengths(workers: int) -> None:
    with pytest.raises(zp.errors.ZephonError, match=r"pack.*row 0\b.*\b5 tokens.*max_length=4"):
        list(line_of("error", workers))
    line = line_of("error", workers, [2, 3, 1, 4, 9, 2])
    iterator = iter(line)
    assert tokens([next(iterator), next(iterator)]) == list(range(8))
    with pytest.raises(zp.errors.ZephonError, match=r"pack.*row 4\b.*\b9 tokens.*max_length=4"):
        next(iterator)
    assert next(iterator, None) is None
    part = saved(line)
    with pytest.raises(zp.errors.ZephonError, match=r"row 4\b"):
        next(iter(resumed(line, part)))


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_the_last_sequence_is_padded_and_delivered(oversize: str) -> None:
    line = line_of(oversize, 0, [3, 3, 1])
    batches = list(line)
    assert tokens(batches) == list(range(7))
    assert batches[-1]["num_pad"].tolist() == [1]
    assert batches[-1]["segment_ids"].tolist() == [[1, 1, 2, 0]]
    assert batches[-1]["position_ids"].tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
@pytest.mark.parametrize("workers", WORKERS)
def test_the_same_packs_on_any_workers_and_after_a_resume_at_every_pack(oversize: str, workers: int) -> None:
    lengths = [*LENGTHS, 0, 17, 1, 4, 8, 3, 0, 2] * 3
    line = line_of(oversize, 0, lengths, chunk_size=4).options(flush_every_k_chunks=2)
    reference = digests(line)
    final = line.counts()
    line = on(line, workers)
    for cut in range(len(reference) + 1):
        part = line.take(cut)
        assert digests(part) == reference[:cut]
        rest = resumed(line, saved(part))
        assert digests(rest) == reference[cut:]
        assert rest.counts() == final


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 4, 0], [4, 0, 0], [0]])
def test_documents_without_tokens_are_counted(lengths: list[int]) -> None:
    line = line_of("split", 0, lengths)
    assert tokens(list(line)) == list(range(sum(lengths)))
    assert line.counts()["dropped"] == {0: {"pack.empty_documents": lengths.count(0)}}


def test_a_document_longer_than_many_sequences() -> None:
    line = line_of("split", 2, [1, 10_000, 1])
    batches = list(line)
    assert tokens(batches) == list(range(10_002))
    assert all(batch.origins[0][0][2] in (0, 1, 2) for batch in batches)
    assert batches[1]["position_ids"].tolist() == [[0, 1, 2, 3]]


LONG = [*LENGTHS, 0, 17, 1, 4, 8, 3, 0, 2] * 3


def kept(records: list[dict[str, Any]], size: int, oversize: str) -> list[int]:
    """The tokens that a policy keeps."""
    found: list[int] = []
    for record in records:
        ids = record["input_ids"]
        found += ids if len(ids) <= size or oversize == "split" else ids[:size] if oversize == "truncate" else []
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("oversize", POLICIES)
@pytest.mark.parametrize("size", [1, 3, 4, 9, 100])
def test_every_token_leaves_once_or_is_counted(algorithm: str, oversize: str, size: int) -> None:
    records = documents(LONG)
    line = pipeline(records).pack(size, algorithm, oversize=oversize, pad_id=-1, num_bins=3).batch(1)
    batches = list(on(line, 2))
    assert sorted(tokens(batches)) == kept(records, size, oversize)
    assert on_counts(line, batches) == lost([len(record["input_ids"]) for record in records], size, oversize)


def on_counts(line: zp.Pipeline, batches: Sequence[zp.Batch]) -> dict[str, int]:
    """What a run of its own, inline, counts in lane 0; it gives the same batches."""
    again = on(line, 0)
    assert digests(again) == [batch.digest() for batch in batches]
    counted: dict[str, int] = again.counts()["dropped"][0]
    return counted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("oversize", POLICIES)
@pytest.mark.parametrize("settings", [{}, {"max_sequences": 2, "min_length": 2}], ids=["plain", "bounded"])
def test_a_filter_in_front_and_a_resume_at_every_pack(algorithm: str, oversize: str, settings: dict[str, Any]) -> None:
    """The filter makes runs of refs odd, and the windows uneven; nothing is lost at any cut that is not counted."""
    records = documents(LONG)
    line = pipeline(records, chunk_size=4).filter(lambda record: len(record["input_ids"]) not in (1, 8))
    line = line.pack(4, algorithm, oversize=oversize, pad_id=-1, num_bins=2, **settings).batch(1)
    line = line.options(canonical_replicas=2, flush_every_k_chunks=2)
    whole = on(line, 0)
    batches = list(whole)
    reference, final = [batch.digest() for batch in batches], whole.counts()
    if not settings:
        assert sorted(tokens(batches)) == kept([r for r in records if len(r["input_ids"]) not in (1, 8)], 4, oversize)
    for cut in range(len(reference) + 1):
        part = on(line, 2).take(cut)
        assert digests(part) == reference[:cut]
        rest = resumed(line, saved(part))
        assert digests(rest) == reference[cut:]
        assert rest.counts() == final


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_too_short_is_counted_and_no_shorter_piece_is_cut(algorithm: str) -> None:
    records = documents([5, 2, 3, 1, 9, 4, 6, 2])
    line = on(pipeline(records).pack(4, algorithm, pad_id=-1, min_length=3).batch(1), 0)
    batches = list(line)
    dropped = line.counts()["dropped"][0]
    assert dropped["pack.short_documents"] == 3  # of 2, 1 and 2 tokens
    assert len(tokens(batches)) + dropped["pack.short_tokens"] == 32
    for batch in batches:
        segments = batch["segment_ids"][0].tolist()
        assert all(segments.count(segment) >= 3 for segment in set(segments) - {0})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("workers", WORKERS)
def test_error_names_the_document_with_every_algorithm(algorithm: str, workers: int) -> None:
    line = on(pipeline(documents([2, 9, 2])).pack(4, algorithm, oversize="error").batch(1), workers)
    with pytest.raises(zp.errors.ZephonError, match=r"pack.*row 1\b.*\b9 tokens.*max_length=4"):
        list(line)

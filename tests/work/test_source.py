"""Dealing a pass to lanes, and sources that users write."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zephon.errors import ConfigError
from zephon.record import MAX_CHUNK_SIZE, Pointers
from zephon.work import FlatSource, WorkSource
from zephon.work.source import lane_slice, no_pointers

from .brute import Rows


class Counting(FlatSource):
    """Rows 0, 1, 2 and so on of one dataset."""

    def __init__(self, num_rows: int | None, chunk_size: int = 4, surplus: int = 0) -> None:
        super().__init__([Rows("a", 10 if num_rows is None else num_rows)], seed=3, chunk_size=chunk_size)
        self.total = num_rows
        self.surplus = surplus

    def pointers(self, pass_index: int, start: int, count: int) -> Pointers:
        count += self.surplus
        return Pointers(np.zeros(count, np.int32), np.arange(start, start + count), np.zeros(count, np.int64))

    def length(self, pass_index: int) -> int | None:
        return self.total

    def fingerprint(self) -> dict[str, Any]:
        return {"type": "Counting", "chunk_size": self.chunk_size}


def lane_chunks(source: WorkSource, lane: int, num_lanes: int) -> list[list[int]]:
    """Chunks of a lane up to its end; asks three more, which must be empty."""
    chunks: list[list[int]] = []
    while len(found := source.chunk(lane, num_lanes, 0, len(chunks))):
        chunks.append(found.row.tolist())
    assert not any(len(source.chunk(lane, num_lanes, 0, len(chunks) + i)) for i in range(3))
    return chunks


@given(st.integers(0, 400), st.integers(1, 40), st.integers(1, 20))
@example(0, 4, 3)
@example(2, 4, 5)
@example(24, 4, 3)
@example(25, 4, 3)
def test_lanes_share_a_pass_exactly(total: int, chunk_size: int, num_lanes: int) -> None:
    source = Counting(total, chunk_size)
    lanes = [lane_chunks(source, lane, num_lanes) for lane in range(num_lanes)]
    rows = [row for chunks in lanes for chunk in chunks for row in chunk]
    assert sorted(rows) == list(range(total))
    sizes = [sum(map(len, chunks)) for chunks in lanes]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    full = total // (chunk_size * num_lanes)
    for lane, chunks in enumerate(lanes):
        assert all(len(chunk) == chunk_size for chunk in chunks[:full])
        for index, chunk in enumerate(chunks):
            assert chunk == list(range(chunk[0], chunk[0] + len(chunk)))
            if index < full:
                assert chunk[0] == (index * num_lanes + lane) * chunk_size
    # In chunk order the lanes read the sequence front to back, the last row too.
    depth = max(map(len, lanes))
    by_turn = [chunks[i] for i in range(depth) for chunks in lanes if i < len(chunks)]
    assert [row for chunk in by_turn for row in chunk] == list(range(total))


def test_an_endless_pass_has_a_chunk_at_any_index() -> None:
    assert Counting(None).chunk(5, 64, 0, 10**12).row.tolist() == [(10**12 * 64 + 5) * 4 + i for i in range(4)]
    assert lane_slice(5, 64, 10**15, 256, None) == ((10**15 * 64 + 5) * 256, 256)
    assert lane_slice(5, 64, 10**15, 256, 10**18 + 7)[1] == 0


def test_epoch_length_is_finite() -> None:
    assert Counting(7).epoch_length(0) == 7
    assert Counting(None).epoch_length(0) == 10


@pytest.mark.parametrize("where", [(-1, 4, 0, 0), (4, 4, 0, 0), (0, 0, 0, 0), (0, 1, -1, 0), (0, 1, 0, -1)])
def test_a_chunk_that_cannot_exist_is_refused(where: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="a lane lies in"):
        Counting(7).chunk(*where)


@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_source_that_breaks_its_promise_is_named(surplus: int) -> None:
    with pytest.raises(ConfigError, match=r"Counting.pointers.*exactly `count`"):
        Counting(40, surplus=surplus).chunk(0, 1, 0, 0)


def test_with_seed_gives_another_and_leaves_the_first() -> None:
    source = Counting(7)
    other = source.with_seed(9)
    assert (source.seed, other.seed, type(other)) == (3, 9, Counting)
    assert other.datasets is source.datasets
    assert pickle.loads(pickle.dumps(other)).chunk(0, 1, 0, 0).row.tolist() == [0, 1, 2, 3]


def test_no_pointers_has_the_right_types() -> None:
    nothing = no_pointers()
    assert len(nothing) == 0
    assert [a.dtype.name for a in (nothing.dataset, nothing.row, nothing.epoch)] == ["int32", "int64", "int64"]


@pytest.mark.parametrize("size", [0, -1, MAX_CHUNK_SIZE + 1, 2.0, "4", True, None])
def test_chunk_size_has_bounds(size: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        Counting(7, chunk_size=size)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "x", True, None])
def test_a_seed_fits_every_state(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        Counting(7).with_seed(seed)


@pytest.mark.parametrize(
    ("datasets", "text"),
    [
        ([], "at least one dataset"),
        ([Rows("a", 1), Rows("a", 2)], "two datasets are named 'a'"),
        ([Rows("a", 5, [2, 2])], "dataset 'a'.*4 rows.*5"),
        ([Rows("a", 1, [2, -1])], "dataset 'a'.*non-negative"),
        ([Rows("a", -1)], "num_rows of dataset 'a'"),
        ([[1, 2]], r"datasets\[0\] is a list"),
    ],
)
def test_datasets_that_cannot_be_told_apart_or_read_are_refused(datasets: list[Any], text: str) -> None:
    class Plain(Counting):
        def __init__(self) -> None:
            WorkSource.__init__(self, datasets)

    with pytest.raises(ConfigError, match=text):
        Plain()

"""Each shuffle reads every row once an epoch, in the order it promises, from any position."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from zephon.work.shuffle import SHUFFLE_MODES, Shuffle, Stretch, make_shuffle

from .brute import Rows

shard_tables = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
modes = st.sampled_from(SHUFFLE_MODES)


def shuffle_of(mode: str, *tables: list[int], size: int = 8, span: int = 3) -> Shuffle:
    datasets = [Rows(f"d{i}", sum(table), table) for i, table in enumerate(tables)]
    return make_shuffle(mode, datasets, size, span)


def epoch(shuffle: Shuffle, n: int, number: int = 0, seed: int = 1, pass_index: int = 0) -> NDArray[np.int64]:
    return shuffle.rows(seed, pass_index, [Stretch(0, number * n, n)])


@given(modes, shard_tables, st.integers(1, 70), st.integers(1, 6), st.integers(0, 10**12))
def test_an_epoch_holds_every_row_once(mode: str, table: list[int], size: int, span: int, number: int) -> None:
    n = sum(table)
    rows = epoch(shuffle_of(mode, table, size=size, span=span), n, number)
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(n))


@pytest.mark.parametrize("mode", SHUFFLE_MODES)
@pytest.mark.parametrize("n", [4096, 4097, 30_000])
def test_larger_epochs_too(mode: str, n: int) -> None:
    shuffle = shuffle_of(mode, [n // 3, 0, n - n // 3], size=700, span=7)
    for number in (0, 1):
        assert np.array_equal(np.sort(epoch(shuffle, n, number)), np.arange(n))


@given(modes, st.lists(shard_tables, min_size=1, max_size=4), st.data())
def test_any_stretch_is_the_slice_of_the_whole(mode: str, tables: list[list[int]], data: st.DataObject) -> None:
    shuffle = shuffle_of(mode, *tables)
    wholes = [shuffle.rows(5, 2, [Stretch(d, 0, 4 * sum(table))]) for d, table in enumerate(tables)]
    stretches = []
    for d, whole in enumerate(wholes):
        first = data.draw(st.integers(0, len(whole) - 1))
        stretches.append(Stretch(d, first, data.draw(st.integers(1, len(whole) - first))))
    expected = [wholes[s.dataset][s.first : s.first + s.size] for s in stretches]
    assert np.array_equal(shuffle.rows(5, 2, stretches), np.concatenate(expected))


@pytest.mark.parametrize("mode", ["shards", "blocks", "global"])
def test_seed_name_pass_and_epoch_each_change_the_order(mode: str) -> None:
    table = [10] * 60
    shuffle = shuffle_of(mode, table, table)
    orders = [
        shuffle.rows(1, 0, [Stretch(0, 0, 600)]),
        shuffle.rows(2, 0, [Stretch(0, 0, 600)]),
        shuffle.rows(1, 1, [Stretch(0, 0, 600)]),
        shuffle.rows(1, 0, [Stretch(0, 600, 600)]),
        shuffle.rows(1, 0, [Stretch(1, 0, 600)]),
    ]
    assert len({order.tobytes() for order in orders}) == len(orders)


def test_none_keeps_the_stored_order_in_every_epoch() -> None:
    shuffle = shuffle_of("none", [3, 0, 4])
    assert shuffle.rows(1, 0, [Stretch(0, 5, 12)]).tolist() == [5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_shards_stay_whole_and_in_order() -> None:
    table = [4, 0, 1, 7, 0, 3, 5, 0]
    starts = np.cumsum([0, *table[:-1]]).tolist()
    shards = {tuple(range(start, start + size)) for start, size in zip(starts, table, strict=True) if size}
    seen = set()
    for number in range(6):
        rows = epoch(shuffle_of("shards", table), 20, number).tolist()
        cuts = [i for i, row in enumerate(rows) if row in starts]
        pieces = [tuple(rows[a:b]) for a, b in zip(cuts, [*cuts[1:], len(rows)], strict=True)]
        assert set(pieces) == shards
        seen.add(tuple(rows))
    assert len(seen) > 1


@pytest.mark.parametrize("n", [240, 237, 7, 8, 24, 25])
def test_blocks_are_read_a_span_at_a_time(n: int) -> None:
    """Walking the epoch, the blocks met so far are whole spans of three, wherever the short block stands."""
    size, span = 8, 3
    sizes = [min(size, n - start) for start in range(0, n, size)]
    places = set()
    for number in range(8):
        blocks = (epoch(shuffle_of("blocks", [n], size=size, span=span), n, number) // size).tolist()
        position = 0
        met: list[int] = []
        while position < n:
            here = list(dict.fromkeys(blocks[position : position + size * span]))
            # A span is the shortest run of positions that is exactly some whole blocks, at most `span` of them.
            count = next(
                total
                for total in range(1, size * span + 1)
                if (s := set(blocks[position : position + total]))
                and (len(s) == span or position + total == n)
                and sum(sizes[b] for b in s) == total
            )
            here = sorted(set(blocks[position : position + count]))
            assert not set(here) & set(met)
            met += here
            position += count
        assert sorted(met) == list(range(len(sizes)))
        places.add(met.index(len(sizes) - 1) // span)
    if len(sizes) > 2 * span:
        assert len(places) > 1  # the last block does not stand in one place


def test_rows_of_a_span_are_mixed() -> None:
    rows = epoch(shuffle_of("blocks", [240]), 240)[:24]
    assert len(set((rows // 8).tolist())) == 3
    assert (np.diff(rows) == 1).sum() < 8


@pytest.mark.parametrize("mode", SHUFFLE_MODES)
def test_a_pickle_gives_the_same_rows_and_carries_no_tables(mode: str) -> None:
    shuffle = shuffle_of(mode, [2000, 1000])
    fresh = len(pickle.dumps(shuffle))
    expected = epoch(shuffle, 3000)
    again = pickle.loads(pickle.dumps(shuffle))
    assert len(pickle.dumps(shuffle)) == fresh
    assert np.array_equal(epoch(again, 3000), expected)


@pytest.mark.parametrize("mode", ["shards", "blocks", "global"])
def test_what_is_kept_of_old_epochs_is_bounded(mode: str) -> None:
    shuffle = shuffle_of(mode, [600])
    for number in range(300):
        shuffle.rows(1, 0, [Stretch(0, number * 600, 1)])
    memos = [value for name, value in vars(shuffle).items() if name in ("_memo", "_blocks", "_spans")]
    assert memos
    assert all(len(memo) <= memo.limit < 100 for memo in memos)

"""The order of rows within an epoch: four ways, each a bijection, each open at any position."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from zephon.work.memo import Memo
from zephon.work.permute import (
    Permutation,
    derive_key,
    draw_below,
    permutation,
    permute,
    sorted_permutations,
)
from zephon.work.source import DatasetLike

ShuffleMode = Literal["none", "shards", "blocks", "global"]
SHUFFLE_MODES: Final[tuple[ShuffleMode, ...]] = get_args(ShuffleMode)

_TABLE_ROWS: Final = 512  # a dataset with fewer rows has the tables of several epochs made at once

I64 = NDArray[np.int64]


class Stretch(NamedTuple):
    """Consecutive draws of one dataset: its `first`-th (from 0, over all epochs of the pass) and `size - 1` more."""

    dataset: int
    first: int
    size: int


class Shuffle(abc.ABC):
    """Rows of the draws of a pass. Draw k of a dataset of n rows is in epoch k // n, at position k % n of its order.

    The order is keyed by the seed, the dataset's name, the pass and the epoch. Objects are picklable, safe under
    threads, and hold nothing per row.
    """

    def __init__(self, datasets: Sequence[DatasetLike]) -> None:
        self.names = [dataset.name for dataset in datasets]
        self.num_rows = [dataset.num_rows for dataset in datasets]

    @abc.abstractmethod
    def rows(self, seed: int, pass_index: int, stretches: Sequence[Stretch]) -> I64:
        """The rows of all stretches, one after the other: int64 of shape (sum of sizes,)."""


class NoShuffle(Shuffle):
    """The stored order, in every epoch."""

    def rows(self, seed: int, pass_index: int, stretches: Sequence[Stretch]) -> I64:
        pieces = [piece for s in stretches for piece in _cut(s.first, s.size, self.num_rows[s.dataset])]
        return _ranges([offset for _, offset, _ in pieces], [count for _, _, count in pieces])


class GlobalShuffle(Shuffle):
    """All rows of a dataset in random order."""

    def __init__(self, datasets: Sequence[DatasetLike]) -> None:
        super().__init__(datasets)
        self.num_epochs = [max(1, _TABLE_ROWS // max(1, n)) for n in self.num_rows]
        self._memo: Memo[Permutation] = Memo(2 * len(datasets) + 64)

    def rows(self, seed: int, pass_index: int, stretches: Sequence[Stretch]) -> I64:
        permutations: list[Permutation] = []
        offsets, counts = [], []
        shares: list[int] = []
        for dataset, first, count in stretches:
            size = self.num_epochs[dataset] * self.num_rows[dataset]
            for turn, offset, part in _cut(first, count, size):
                one = self._permutation(seed, pass_index, dataset, turn)
                offsets.append(offset)
                counts.append(part)
                if permutations and permutations[-1] is one:  # several stretches of one epoch
                    shares[-1] += part
                else:
                    permutations.append(one)
                    shares.append(part)
        return permute(permutations, shares, _ranges(offsets, counts))

    def _permutation(self, seed: int, pass_index: int, dataset: int, turn: int) -> Permutation:
        """The order of one epoch, or of the `turn`-th few epochs of a small dataset."""

        def make() -> Permutation:
            n, epochs = self.num_rows[dataset], self.num_epochs[dataset]
            name = self.names[dataset]
            if epochs == 1:
                return permutation(n, derive_key("global", seed, name, pass_index, turn))
            keys = [derive_key("global", seed, name, pass_index, turn * epochs + e) for e in range(epochs)]
            return sorted_permutations(n, keys)

        return self._memo.get((seed, pass_index, dataset, turn), make)


class ShardShuffle(Shuffle):
    """Shards in random order, the rows of each in their stored order."""

    def __init__(self, datasets: Sequence[DatasetLike]) -> None:
        super().__init__(datasets)
        self._shard_rows = [np.asarray(dataset.shard_rows, np.int64) for dataset in datasets]
        self._memo: Memo[tuple[I64, I64]] = Memo(2 * len(datasets) + 8)

    def rows(self, seed: int, pass_index: int, stretches: Sequence[Stretch]) -> I64:
        parts = []
        for dataset, first, count in stretches:
            for epoch, offset, part in _cut(first, count, self.num_rows[dataset]):
                ends, shift = self._order(seed, pass_index, dataset, epoch)
                position = np.arange(offset, offset + part)
                # side="right" steps over empty shards: their end is the end of the shard before.
                parts.append(position + shift[np.searchsorted(ends, position, side="right")])
        return np.concatenate(parts)

    def _order(self, seed: int, pass_index: int, dataset: int, epoch: int) -> tuple[I64, I64]:
        """(ends, shift) of the shards in order: row = position + shift[i], i the first with ends[i] > position."""

        def make() -> tuple[I64, I64]:
            shard_rows = self._shard_rows[dataset]
            key = derive_key("shards", seed, self.names[dataset], pass_index, epoch)
            order = permute([permutation(len(shard_rows), key)], [len(shard_rows)], np.arange(len(shard_rows)))
            sizes = shard_rows[order]
            ends = np.cumsum(sizes)
            return ends, (np.cumsum(shard_rows) - shard_rows)[order] - (ends - sizes)

        return self._memo.get((seed, pass_index, dataset, epoch), make)


class _Blocks(NamedTuple):
    """The order of a dataset's blocks in one epoch: the last, shorter block stands at `place`, the full ones around it
    as `order` says."""

    order: Permutation
    place: int
    short_end: int  # first position behind the short block
    gap: int  # rows that it lacks

    def start(self, block: int, block_size: int) -> int:
        """Position at which the block that comes `block`-th starts."""
        return block * block_size - (self.gap if block > self.place else 0)


class BlockShuffle(Shuffle):
    """Blocks of `block_size` consecutive rows in random order, then rows at random within spans of `block_span` blocks.

    A reader that fetches by block has at most `block_span` blocks at hand. Blocks run over shard boundaries.
    """

    def __init__(self, datasets: Sequence[DatasetLike], block_size: int, block_span: int) -> None:
        super().__init__(datasets)
        self.block_size = block_size
        self.block_span = block_span
        self.num_blocks = [-(-n // block_size) for n in self.num_rows]
        self._blocks: Memo[_Blocks] = Memo(2 * len(datasets) + 64)
        self._spans: Memo[Permutation] = Memo(4 * len(datasets) + 64)

    def rows(self, seed: int, pass_index: int, stretches: Sequence[Stretch]) -> I64:
        found: list[tuple[_Blocks, int]] = []
        orders, counts = [], []
        spans, starts, offsets, span_counts = [], [], [], []
        for dataset, first, count in stretches:
            for epoch, offset, part in _cut(first, count, self.num_rows[dataset]):
                blocks = self._blocks_of(seed, pass_index, dataset, epoch)
                found.append((blocks, self.num_blocks[dataset] - 1))
                orders.append(blocks.order)
                counts.append(part)
                for span, start, size, within, some in self._cut_spans(blocks, dataset, offset, part):
                    spans.append(self._span(seed, pass_index, dataset, epoch, span, size))
                    starts.append(start)
                    offsets.append(within)
                    span_counts.append(some)
        position = permute(spans, span_counts, _ranges(offsets, span_counts)) + np.repeat(starts, span_counts)
        place, short_end, gap, last = np.repeat(
            np.array([(b.place, b.short_end, b.gap, last) for b, last in found], np.int64).T, counts, axis=1
        )
        block, within_block = np.divmod(position + gap * (position >= short_end), self.block_size)
        # The full blocks are numbered without the short one; its own entry asks for number 0 and is overruled.
        short = block == place
        full = permute(orders, counts, np.where(short, 0, block - (block > place)))
        rows: I64 = np.where(short, last, full) * self.block_size + within_block
        return rows

    def _cut_spans(
        self, blocks: _Blocks, dataset: int, offset: int, count: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(span, its start, its size, offset within it, count) of consecutive positions of an epoch."""
        stop = offset + count
        while offset < stop:
            span = (offset + (blocks.gap if offset >= blocks.short_end else 0)) // self.block_size // self.block_span
            start = blocks.start(span * self.block_span, self.block_size)
            end = min(blocks.start((span + 1) * self.block_span, self.block_size), self.num_rows[dataset])
            some = min(stop, end) - offset
            yield span, start, end - start, offset - start, some
            offset += some

    def _blocks_of(self, seed: int, pass_index: int, dataset: int, epoch: int) -> _Blocks:
        def make() -> _Blocks:
            n, name, num_blocks = self.num_rows[dataset], self.names[dataset], self.num_blocks[dataset]
            place = draw_below(num_blocks, derive_key("short block", seed, name, pass_index, epoch))
            gap = num_blocks * self.block_size - n
            key = derive_key("blocks", seed, name, pass_index, epoch)
            order = permutation(max(1, num_blocks - 1), key)
            return _Blocks(order, place, (place + 1) * self.block_size - gap, gap)

        return self._blocks.get((seed, pass_index, dataset, epoch), make)

    def _span(self, seed: int, pass_index: int, dataset: int, epoch: int, span: int, size: int) -> Permutation:
        def make() -> Permutation:
            return permutation(size, derive_key("span", seed, self.names[dataset], pass_index, epoch, span))

        return self._spans.get((seed, pass_index, dataset, epoch, span), make)


def _cut(first: int, count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(turn, offset, count) of the pieces of first .. first + count - 1 that lie in one turn of `size`."""
    while count:
        turn, offset = divmod(first, size)
        part = min(count, size - offset)
        yield turn, offset, part
        first += part
        count -= part


def _ranges(firsts: Sequence[int], counts: Sequence[int]) -> I64:
    """The ranges first .. first + count - 1, one after the other."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    sizes = np.array(counts, np.int64)
    return np.arange(int(sizes.sum())) + np.repeat(np.array(firsts, np.int64) - np.cumsum(sizes) + sizes, sizes)


def make_shuffle(mode: str, datasets: Sequence[DatasetLike], block_size: int, block_span: int) -> Shuffle:
    """The shuffle called `mode`, one of SHUFFLE_MODES, over datasets that have rows."""
    if mode == "blocks":
        return BlockShuffle(datasets, block_size, block_span)
    kinds: dict[str, type[Shuffle]] = {"none": NoShuffle, "shards": ShardShuffle, "global": GlobalShuffle}
    return kinds[mode](datasets)

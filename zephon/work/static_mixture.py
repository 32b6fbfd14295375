"""The source most pipelines use: datasets in fixed proportions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, repeat, takewhile
from typing import Any, Final, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.record import Pointers
from zephon.work.ends import ENDS, End, Merge, merge_for, never_complete, one_round, pass_length, slowest
from zephon.work.phased import Step
from zephon.work.schedule import MixtureSchedule
from zephon.work.shares import Shares, Unit
from zephon.work.shuffle import SHUFFLE_MODES, Shuffle, ShuffleMode, Stretch, make_shuffle
from zephon.work.source import MAX_POSITION, DatasetLike, FlatSource, check_int, lane_slice, no_pointers
from zephon.work.weights import PerDataset

MOST_MEASURED: Final = 512  # datasets whose mean tokens a state must carry
LONG_PASS: Final = 100  # a pass of more than this many times the rows it must cover is worth a warning


class StaticMixture(FlatSource):
    """Datasets mixed in given proportions, shuffled, dealt to the lanes in chunks.

    datasets: one or several, with distinct names.
    weights: shares of the stream, a dict by dataset name or a list in order; numbers, decimal strings or Fractions,
        taken as written, so [6, 3, 1] and [0.6, 0.3, 0.1] are one stream. 0: never drawn and never waited for.
        None: in proportion to the datasets' rows, so that one epoch reads everything once. A `MixtureSchedule`: they
        change at given positions; not with end="redistribute".
    seed: 0 .. 2^64 - 1, keys the shuffle.
    chunk_size: pointers in a chunk, the unit of dealing to lanes.
    shuffle: "global" (all rows of a dataset), "blocks" (blocks of `block_size` rows, and rows within spans of
        `block_span` blocks), "shards" (the order of shards), "none". Each epoch of each pass has its own order.
    end: when a pass is over.
        "epochs": right after the draw that completes the `epochs`-th epoch of the slowest dataset; faster ones
        repeat, reshuffled. "stop": right after the draw that completes the first epoch of any dataset.
        "redistribute": when all rows were read once; a dataset that ends leaves its share to the others.
        "repeat": never, or, with `max_epochs`, right after the draw that completes the `max_epochs`-th epoch of the
        fastest dataset, so that no row is read more often than that in a pass.
    weights_in: "samples", or "tokens": then dataset d's share of samples is weights[d] / mean_tokens[d].
    mean_tokens: mean tokens that a row of each dataset gives, a dict by dataset name or a list in order. None with
        weights_in="tokens": the pipeline measures them once, with its own operators up to the first that counts tokens,
        on 1,024 rows of each dataset that the seed names, so every rank finds the same. They are in the state, and a
        restore takes them from there.

    Raises ConfigError for any argument out of range, and for an empty dataset with a weight. Warns (UserWarning)
    where a pass under "epochs" is more than 100 times longer than `epochs` times the rows it draws from.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetLike] | DatasetLike,
        weights: PerDataset | MixtureSchedule | None = None,
        *,
        seed: int = 0,
        chunk_size: int = 256,
        shuffle: ShuffleMode = "global",
        end: End = "epochs",
        epochs: int = 1,
        max_epochs: int | None = None,
        weights_in: Unit = "samples",
        mean_tokens: PerDataset | None = None,
        block_size: int = 1024,
        block_span: int = 16,
    ) -> None:
        super().__init__(_as_sequence(datasets), seed=seed, chunk_size=chunk_size)
        self.shuffle = _check_choice("shuffle", shuffle, SHUFFLE_MODES)
        self.block_size = check_int("block_size", block_size, 1, MAX_POSITION)
        self.block_span = check_int("block_span", block_span, 1, MAX_POSITION)
        self._set_end(end, epochs, max_epochs)
        _check_choice("weights_in", weights_in, get_args(Unit))
        self.shares = Shares(self.datasets, weights, weights_in, mean_tokens)
        self._measured: tuple[Fraction, ...] | None = None
        self._layout: _Layout | None = None
        if weights_in == "tokens" and mean_tokens is None:
            self._check_measurable()
        else:
            self._layout = self._lay_out()
            self._warn_of_long_pass(self._layout)

    def _lay_out(self) -> _Layout:
        """Makes the merge of integer weights, once the proportions of samples are known."""
        steps = self.shares.steps()
        drawn = [c for c in range(len(self.datasets)) if any(weights[c] for _, weights in steps)]
        rows = [self.datasets[c].num_rows for c in drawn]
        merge = merge_for(self.end, [(at, tuple(weights[c] for c in drawn)) for at, weights in steps], rows)
        never = never_complete(merge, rows, self.epochs) if self.end == "epochs" else []
        if never:
            dataset, (at, _) = self.datasets[drawn[never[0]]], steps[-1]
            raise ConfigError(
                f"end='epochs' waits for every dataset, and {dataset.name!r} has weight 0 from position {at:,} on, "
                f"before its {dataset.num_rows:,} rows were read {_times(self.epochs)}: give it a weight in the last "
                f"point, or choose end='stop' or 'repeat'"
            )
        return _Layout(
            steps=tuple(steps),
            drawn=drawn,
            dataset=np.array(drawn, np.int32),
            rows=rows,
            row_counts=np.array(rows, np.int64),
            merge=merge,
            shuffle=make_shuffle(self.shuffle, [self.datasets[c] for c in drawn], self.block_size, self.block_span),
            length=pass_length(merge, rows, self.end, self.epochs, self.max_epochs),
        )

    @property
    def _laid(self) -> _Layout:
        if self._layout is None:
            raise ConfigError(
                "weights_in='tokens' without mean_tokens: a Pipeline measures them with its own operators when it is "
                "first used; to use the source by itself, give mean_tokens="
            )
        return self._layout

    @property
    def steps(self) -> tuple[Step, ...]:
        """The proportions of samples: (position in a pass, one integer weight a dataset from there on)."""
        return self._laid.steps

    @property
    def weights(self) -> tuple[int, ...]:
        """The integer weights of samples at the begin of a pass, one a dataset."""
        return self.steps[0][1]

    def unmeasured(self) -> tuple[str, ...]:
        if self._layout is not None:
            return ()
        return tuple(name for name, drawn in zip(self.shares.names, self.shares.drawn, strict=True) if drawn)

    def with_means(self, means: Mapping[str, Fraction]) -> Self:
        other = copy.copy(self)
        other.shares = copy.copy(self.shares)
        other.shares.means = other.shares.check_means(means)
        other._measured = tuple(other.shares.means)
        other._layout = other._lay_out()
        return other

    def _check_measurable(self) -> None:
        if len(self.datasets) > MOST_MEASURED:
            raise ConfigError(
                f"weights_in='tokens' without mean_tokens measures at most {MOST_MEASURED} datasets, and there are "
                f"{len(self.datasets):,}: give mean_tokens="
            )

    def pointers(self, pass_index: int, start: int, count: int) -> Pointers:
        """The pointers at positions start .. start + count - 1 of a pass; fewer where the pass ends before."""
        if self._laid.length is not None:
            count = min(count, self._laid.length - start)
        return self._spans(pass_index, [(start, count)]) if count > 0 else no_pointers()

    def chunks(self, lane: int, num_lanes: int, pass_index: int, index: int, most: int) -> list[Pointers]:
        """The chunks from `index` on, to the first empty one: several at once cost little more than one."""
        where = (lane_slice(lane, num_lanes, i, self.chunk_size, self._laid.length) for i in range(index, index + most))
        spans = list(takewhile(lambda span: span[1], where))
        if not spans:
            return [no_pointers()]
        whole = self._spans(pass_index, spans)
        return [
            whole.cut(stop - count, stop)
            for stop, (_, count) in zip(accumulate(count for _, count in spans), spans, strict=True)
        ]

    def _spans(self, pass_index: int, spans: Sequence[tuple[int, int]]) -> Pointers:
        """The pointers of spans (start, count >= 1) of the pass, one after the other."""
        drawn = [self._laid.merge.chunk(start, count) for start, count in spans]
        component, k = drawn[0] if len(drawn) == 1 else (np.concatenate(column) for column in zip(*drawn, strict=True))
        epoch = k // self._laid.row_counts[component]
        rows = self._rows_of(pass_index, component, k, [count for _, count in spans])
        return Pointers(self._laid.dataset[component], rows, epoch)

    def length(self, pass_index: int) -> int | None:
        return self._laid.length

    def epoch_length(self, pass_index: int) -> int:
        return one_round(self._laid.merge, self._laid.rows, self._laid.length)

    @property
    def unfinished(self) -> list[str]:
        """Datasets that an endless pass never reads to their end: those whose weight is 0 from some position on."""
        if self._laid.length is not None:
            return []
        return [self.shares.names[self._laid.drawn[c]] for c in never_complete(self._laid.merge, self._laid.rows, 1)]

    def fingerprint(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "type": type(self).__name__,
            "chunk_size": self.chunk_size,
            **self.shares.declared(),
            "shuffle": self.shuffle,
            "end": self.end,
        }
        if self.shuffle == "blocks":
            fields |= {"block_size": self.block_size, "block_span": self.block_span}
        if self.end == "epochs":
            fields["epochs"] = self.epochs
        if self.end == "repeat":
            fields["max_epochs"] = self.max_epochs
        if self._measured is not None:
            fields["mean_tokens"] = [str(mean) for mean in self._measured]
        return fields

    def _rows_of(
        self, pass_index: int, component: NDArray[np.intp], k: NDArray[np.int64], sizes: Sequence[int]
    ) -> NDArray[np.int64]:
        """Rows of the draws of spans of these sizes.

        Within a span the draws of a component are consecutive, so they are looked up component by component.
        """
        num_spans, num_components = len(sizes), len(self._laid.rows)
        if num_components == 1:
            firsts = k[np.cumsum(sizes) - sizes].tolist()
            return self._laid.shuffle.rows(self.seed, pass_index, list(map(Stretch, repeat(0), firsts, sizes)))
        # Sorting 16-bit integers is a radix sort, several times faster than the general one.
        narrow = component.astype(np.int16) if num_components < 1 << 15 else component
        order = np.argsort(narrow, kind="stable")  # by component, then by span
        span = np.repeat(np.arange(num_spans), sizes) if num_spans > 1 else 0
        counts = np.bincount(component * num_spans + span, minlength=num_components * num_spans)
        present = np.flatnonzero(counts)
        firsts = k[order[(np.cumsum(counts) - counts)[present]]]
        found = (present // num_spans).tolist()
        rows = np.empty(len(k), np.int64)
        stretches = list(map(Stretch, found, firsts.tolist(), counts[present].tolist()))
        rows[order] = self._laid.shuffle.rows(self.seed, pass_index, stretches)
        return rows

    def _set_end(self, end: str, epochs: int, max_epochs: int | None) -> None:
        self.end = _check_choice("end", end, ENDS)
        self.epochs = check_int("epochs", epochs, 1, MAX_POSITION)
        self.max_epochs = None if max_epochs is None else check_int("max_epochs", max_epochs, 1, MAX_POSITION)
        if self.epochs != 1 and self.end != "epochs":
            raise ConfigError(f"epochs={epochs} means nothing with end={end!r}: it goes with end='epochs'; drop one")
        if max_epochs is not None and self.end != "repeat":
            raise ConfigError(f"max_epochs={max_epochs} means nothing with end={end!r}: it goes with end='repeat'")

    def _warn_of_long_pass(self, laid: _Layout) -> None:
        total = sum(laid.rows) * self.epochs
        if self.end != "epochs" or laid.length is None or laid.length <= LONG_PASS * total:
            return
        c = laid.drawn[slowest(laid.merge, laid.rows, self.epochs)]
        weights = laid.steps[-1][1]
        warnings.warn(
            f"a pass is {laid.length:,} samples, for {total:,} rows to cover: dataset {self.datasets[c].name!r} has a "
            f"share of {weights[c] / sum(weights):.2g} and the pass waits for its {self.datasets[c].num_rows:,} rows. "
            f"Raise its weight, or use end='stop', 'redistribute' or 'repeat'",
            stacklevel=3,
        )


class _Layout(NamedTuple):
    """What a source computes with, once the proportions of samples are known."""

    steps: tuple[Step, ...]
    drawn: list[int]  # the datasets that are drawn at all: the merge's components
    dataset: NDArray[np.int32]  # the same
    rows: list[int]  # of each of them
    row_counts: NDArray[np.int64]  # the same
    merge: Merge
    shuffle: Shuffle
    length: int | None  # of a pass


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _as_sequence(datasets: Sequence[DatasetLike] | DatasetLike) -> Sequence[DatasetLike]:
    if isinstance(datasets, Sequence):
        return datasets
    if hasattr(datasets, "num_rows"):
        return (datasets,)
    raise ConfigError(f"datasets={datasets!r}: give one dataset or a list of them")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
    return value

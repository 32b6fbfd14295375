"""The source most pipelines use: datasets in fixed proportions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, repeat, takewhile
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.record import Pointers
from zephon.work.ends import ENDS, End, merge_for, one_round, pass_length, slowest
from zephon.work.shuffle import SHUFFLE_MODES, ShuffleMode, Stretch, make_shuffle
from zephon.work.source import MAX_POSITION, DatasetLike, FlatSource, check_int, lane_slice, no_pointers
from zephon.work.weights import PerDataset, by_dataset, exact_number, integer_weights

LONG_PASS: Final = 100  # a pass of more than this many times the rows it must cover is worth a warning


class StaticMixture(FlatSource):
    """Datasets mixed in fixed proportions, shuffled, dealt to the lanes in chunks.

    datasets: one or several, with distinct names.
    weights: shares of the stream, a dict by dataset name or a list in order; numbers, decimal strings or Fractions,
        taken as written, so [6, 3, 1] and [0.6, 0.3, 0.1] are one stream. 0: never drawn and never waited for.
        None: in proportion to the datasets' rows, so that one epoch reads everything once.
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
    mean_tokens: mean tokens of a sample, a dict by dataset name or a list in order.

    Raises ConfigError for any argument out of range, and for an empty dataset with a weight. Warns (UserWarning)
    where a pass under "epochs" is more than 100 times longer than `epochs` times the rows it draws from.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetLike] | DatasetLike,
        weights: PerDataset | None = None,
        *,
        seed: int = 0,
        chunk_size: int = 256,
        shuffle: ShuffleMode = "global",
        end: End = "epochs",
        epochs: int = 1,
        max_epochs: int | None = None,
        weights_in: Literal["samples", "tokens"] = "samples",
        mean_tokens: PerDataset | None = None,
        block_size: int = 1024,
        block_span: int = 16,
    ) -> None:
        super().__init__(_as_sequence(datasets), seed=seed, chunk_size=chunk_size)
        self.shuffle = _check_choice("shuffle", shuffle, SHUFFLE_MODES)
        self.block_size = check_int("block_size", block_size, 1, MAX_POSITION)
        self.block_span = check_int("block_span", block_span, 1, MAX_POSITION)
        self._set_end(end, epochs, max_epochs)
        self.weights = self._integer_weights(weights, weights_in, mean_tokens)
        self._drawn = [c for c, weight in enumerate(self.weights) if weight]
        self._index = np.array(self._drawn, np.int32)
        drawn = [self.datasets[c] for c in self._drawn]
        self._rows = [dataset.num_rows for dataset in drawn]
        self._row_counts = np.array(self._rows, np.int64)
        self._merge = merge_for(self.end, [self.weights[c] for c in self._drawn], self._rows)
        self._shuffle = make_shuffle(self.shuffle, drawn, self.block_size, self.block_span)
        self._length = pass_length(self._merge, self._rows, self.end, self.epochs, self.max_epochs)
        self._warn_of_long_pass()

    def pointers(self, pass_index: int, start: int, count: int) -> Pointers:
        """The pointers at positions start .. start + count - 1 of a pass; fewer where the pass ends before."""
        if self._length is not None:
            count = min(count, self._length - start)
        return self._spans(pass_index, [(start, count)]) if count > 0 else no_pointers()

    def chunks(self, lane: int, num_lanes: int, pass_index: int, index: int, most: int) -> list[Pointers]:
        """The chunks from `index` on, to the first empty one: several at once cost little more than one."""
        where = (lane_slice(lane, num_lanes, i, self.chunk_size, self._length) for i in range(index, index + most))
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
        drawn = [self._merge.chunk(start, count) for start, count in spans]
        component, k = drawn[0] if len(drawn) == 1 else (np.concatenate(column) for column in zip(*drawn, strict=True))
        epoch = k // self._row_counts[component]
        rows = self._rows_of(pass_index, component, k, [count for _, count in spans])
        return Pointers(self._index[component], rows, epoch)

    def length(self, pass_index: int) -> int | None:
        return self._length

    def epoch_length(self, pass_index: int) -> int:
        return one_round(self._merge, self._rows, self._length)

    def fingerprint(self) -> dict[str, Any]:
        names = [dataset.name for dataset in self.datasets]
        fields: dict[str, Any] = {
            "type": type(self).__name__,
            "chunk_size": self.chunk_size,
            "weights": dict(zip(names, self.weights, strict=True)),
            "shuffle": self.shuffle,
            "end": self.end,
        }
        if self.shuffle == "blocks":
            fields |= {"block_size": self.block_size, "block_span": self.block_span}
        if self.end == "epochs":
            fields["epochs"] = self.epochs
        if self.end == "repeat":
            fields["max_epochs"] = self.max_epochs
        return fields

    def _rows_of(
        self, pass_index: int, component: NDArray[np.intp], k: NDArray[np.int64], sizes: Sequence[int]
    ) -> NDArray[np.int64]:
        """Rows of the draws of spans of these sizes.

        Within a span the draws of a component are consecutive, so they are looked up component by component.
        """
        num_spans, num_components = len(sizes), len(self._rows)
        if num_components == 1:
            firsts = k[np.cumsum(sizes) - sizes].tolist()
            return self._shuffle.rows(self.seed, pass_index, list(map(Stretch, repeat(0), firsts, sizes)))
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
        rows[order] = self._shuffle.rows(self.seed, pass_index, stretches)
        return rows

    def _set_end(self, end: str, epochs: int, max_epochs: int | None) -> None:
        self.end = _check_choice("end", end, ENDS)
        self.epochs = check_int("epochs", epochs, 1, MAX_POSITION)
        self.max_epochs = None if max_epochs is None else check_int("max_epochs", max_epochs, 1, MAX_POSITION)
        if self.epochs != 1 and self.end != "epochs":
            raise ConfigError(f"epochs={epochs} means nothing with end={end!r}: it goes with end='epochs'; drop one")
        if max_epochs is not None and self.end != "repeat":
            raise ConfigError(f"max_epochs={max_epochs} means nothing with end={end!r}: it goes with end='repeat'")

    def _integer_weights(
        self, weights: PerDataset | None, weights_in: str, mean_tokens: PerDataset | None
    ) -> tuple[int, ...]:
        """One integer >= 0 a dataset, the positive ones coprime."""
        _check_choice("weights_in", weights_in, ("samples", "tokens"))
        exact = self._exact_weights(weights)
        if weights_in == "tokens":
            if weights is None or mean_tokens is None:
                lacking = "weights" if weights is None else "mean_tokens"
                raise ConfigError(
                    f"weights_in='tokens' needs {lacking}: give {lacking}= as a dict by dataset name or a list in order"
                )
            exact = self._per_sample(exact, mean_tokens)
        elif mean_tokens is not None:
            raise ConfigError(
                "mean_tokens means nothing with weights_in='samples': drop it, or say weights_in='tokens'"
            )
        integers = iter(integer_weights([weight for weight in exact if weight]))
        return tuple(next(integers) if weight else 0 for weight in exact)

    def _exact_weights(self, weights: PerDataset | None) -> list[Fraction]:
        if weights is None:
            if not any(dataset.num_rows for dataset in self.datasets):
                raise ConfigError(f"no dataset has a row ({self._names()}): there is nothing to read")
            return [Fraction(dataset.num_rows) for dataset in self.datasets]
        values = by_dataset(weights, [dataset.name for dataset in self.datasets], "weights")
        exact = []
        for dataset, value in zip(self.datasets, values, strict=True):
            weight = exact_number(value, f"the weight of dataset {dataset.name!r}")
            if weight and not dataset.num_rows:
                raise ConfigError(
                    f"dataset {dataset.name!r} has weight {value} but no rows: give it weight 0, or leave it out"
                )
            exact.append(weight)
        if not any(exact):
            raise ConfigError(f"all weights are 0 ({self._names()}): at least one must be positive")
        return exact

    def _per_sample(self, exact: Sequence[Fraction], mean_tokens: PerDataset) -> list[Fraction]:
        names = [dataset.name for dataset in self.datasets]
        if isinstance(mean_tokens, Mapping):  # a dataset that is never drawn needs no mean
            unused = {name: 1 for name, weight in zip(names, exact, strict=True) if not weight}
            mean_tokens = {**unused, **mean_tokens}
        shares = []
        for name, weight, value in zip(names, exact, by_dataset(mean_tokens, names, "mean_tokens"), strict=True):
            mean = exact_number(value, f"mean_tokens of dataset {name!r}")
            if weight and not mean:
                raise ConfigError(f"mean_tokens of dataset {name!r} is 0: it must be positive")
            shares.append(weight / mean if weight else weight)
        return shares

    def _warn_of_long_pass(self) -> None:
        total = sum(self._rows) * self.epochs
        if self.end != "epochs" or self._length is None or self._length <= LONG_PASS * total:
            return
        c = self._drawn[slowest(self._merge, self._rows, self.epochs)]
        name = self.datasets[c].name
        warnings.warn(
            f"a pass is {self._length:,} samples, for {total:,} rows to cover: dataset {name!r} has a share of "
            f"{self.weights[c] / sum(self.weights):.2g} and the pass waits for its {self.datasets[c].num_rows:,} rows. "
            f"Raise its weight, or use end='stop', 'redistribute' or 'repeat'",
            stacklevel=3,
        )

    def _names(self) -> str:
        return ", ".join(repr(dataset.name) for dataset in self.datasets)


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

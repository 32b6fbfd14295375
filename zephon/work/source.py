"""What a source of work is: which records a lane reads, chunk by chunk, as arithmetic without state."""

from __future__ import annotations

import abc
import copy
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.record import MAX_CHUNK_SIZE, Pointers

MAX_POSITION: Final = 1 << 62  # no pointer lies at or beyond it, so sums of a few positions stay within int64
MAX_SEED: Final = (1 << 64) - 1


class DatasetLike(Protocol):
    """What a source needs to know of a dataset. Nothing is read through it."""

    @property
    def name(self) -> str:
        """Unique within a source; it keys the shuffle."""

    @property
    def num_rows(self) -> int:
        """Rows of all shards together, the excluded ones too."""

    @property
    def shard_rows(self) -> NDArray[np.int64]:
        """Rows of each shard, in order: int64 of shape (shards,), summing to `num_rows`."""

    def fingerprint(self) -> dict[str, Any]:
        """Plain data that changes with the content."""


class WorkSource(abc.ABC):
    """Answers which pointers a lane reads, for any lane, pass and chunk, in time that does not grow with the index.

    A subclass gives `chunk`, `length` and `fingerprint`. The answers depend on the arguments, the datasets and the
    seed alone: never on earlier calls, and calls may come from several threads. A source must survive pickling.
    To write only `pointers` and leave the lanes to Zephon, subclass `FlatSource`.
    """

    datasets: tuple[DatasetLike, ...]
    seed: int

    def __init__(self, datasets: Sequence[DatasetLike], *, seed: int = 0) -> None:
        self.datasets = check_datasets(datasets)
        self.seed = check_seed(seed)

    @abc.abstractmethod
    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> Pointers:
        """Chunk `index` of `lane` in a pass. Empty: the lane has ended, and every later chunk is empty too."""

    def chunks(self, lane: int, num_lanes: int, pass_index: int, index: int, most: int) -> list[Pointers]:
        """The chunks from `index` on: at least one, at most `most`. For sources that make several at once for less."""
        return [self.chunk(lane, num_lanes, pass_index, index)]

    @abc.abstractmethod
    def length(self, pass_index: int) -> int | None:
        """Pointers in a pass, all lanes together. None: the pass is endless."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Every setting that shapes the stream, as small plain data; neither the seed nor the datasets."""

    def lane_length(self, lane: int, num_lanes: int, pass_index: int) -> int | None:
        """Pointers of one lane in a pass. None: not known without reading its chunks, or endless."""
        return None

    def epoch_length(self, pass_index: int) -> int:
        """A finite number of pointers after which every dataset that is drawn at all has come round once."""
        length = self.length(pass_index)
        return length if length is not None else sum(dataset.num_rows for dataset in self.datasets)

    def unmeasured(self) -> tuple[str, ...]:
        """Datasets whose mean tokens must be known, by `with_means`, before pointers can be asked for."""
        return ()

    def with_means(self, means: Mapping[str, Fraction]) -> Self:
        """The same source with the mean tokens of a row, by dataset name, of all that are `unmeasured`."""
        raise ConfigError(f"{type(self).__name__} takes no mean tokens")

    def with_seed(self, seed: int) -> Self:
        """The same source under another seed (a restore takes the seed from the state).

        Override it if the instance keeps anything that it derived from the old seed.
        """
        other = copy.copy(self)
        other.seed = check_seed(seed)
        return other


class FlatSource(WorkSource):
    """A source that is one sequence of pointers a pass, dealt to the lanes in chunks.

    Lane l's chunk i is chunk `i * num_lanes + l` of the sequence, so adjacent lanes read adjacent data. What is left
    for the last row of chunks is cut evenly: the lanes' totals differ by at most one pointer.
    """

    chunk_size: int

    def __init__(self, datasets: Sequence[DatasetLike], *, seed: int = 0, chunk_size: int = 256) -> None:
        super().__init__(datasets, seed=seed)
        self.chunk_size = check_int("chunk_size", chunk_size, 1, MAX_CHUNK_SIZE)

    @abc.abstractmethod
    def pointers(self, pass_index: int, start: int, count: int) -> Pointers:
        """The pointers at positions start .. start + count - 1 of a pass, never asked beyond its length."""

    def lane_length(self, lane: int, num_lanes: int, pass_index: int) -> int | None:
        length = self.length(pass_index)
        return None if length is None else lane_share(lane, num_lanes, self.chunk_size, length)

    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> Pointers:
        if not (0 <= lane < num_lanes and pass_index >= 0 and index >= 0):
            raise ConfigError(
                f"chunk(lane={lane}, num_lanes={num_lanes}, pass_index={pass_index}, index={index}): a lane lies in "
                f"[0, num_lanes), and neither the pass nor the index is negative"
            )
        start, count = lane_slice(lane, num_lanes, index, self.chunk_size, self.length(pass_index))
        if not count:
            return no_pointers()
        found = self.pointers(pass_index, start, count)
        if len(found) != count:
            raise ConfigError(
                f"{type(self).__name__}.pointers(pass_index={pass_index}, start={start}, count={count}) gave "
                f"{len(found)} pointers: it must give exactly `count`, as length({pass_index}) promises them"
            )
        return found


def lane_share(lane: int, num_lanes: int, chunk_size: int, length: int) -> int:
    """Pointers of a lane in a pass of `length`, as `lane_slice` deals them."""
    full_rows, left = divmod(length, num_lanes * chunk_size)
    share, longer = divmod(left, num_lanes)
    return full_rows * chunk_size + share + (lane < longer)


def lane_slice(lane: int, num_lanes: int, index: int, chunk_size: int, length: int | None) -> tuple[int, int]:
    """(start, count) in the pass's sequence of a lane's chunk `index`; count 0 once the lane has ended."""
    start = (index * num_lanes + lane) * chunk_size
    if length is None:
        return start, chunk_size
    full_rows, left = divmod(length, num_lanes * chunk_size)
    if index < full_rows:
        return start, chunk_size
    if index > full_rows:
        return length, 0
    share, longer = divmod(left, num_lanes)
    return length - left + lane * share + min(lane, longer), share + (lane < longer)


def no_pointers() -> Pointers:
    """Pointers of length 0."""
    return Pointers(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


def check_int(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int in [low, high]; else a ConfigError that names the argument."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # refuses floats and strings at run time
    except TypeError:
        raise ConfigError(f"{name}={value!r}: must be an integer from {low:,} to {high:,}") from None
    if not low <= number <= high:
        raise ConfigError(f"{name}={number}: must be an integer from {low:,} to {high:,}")
    return number


def check_seed(seed: int) -> int:
    """A seed that every format of a state can carry: an integer in [0, 2^64)."""
    return check_int("seed", seed, 0, MAX_SEED)


def check_datasets(datasets: Sequence[DatasetLike]) -> tuple[DatasetLike, ...]:
    """The datasets as a tuple; a ConfigError for none at all, a double name or a shard table that does not add up."""
    found = tuple(datasets)
    if not found:
        raise ConfigError("a source needs at least one dataset; none was given")
    seen: set[str] = set()
    for index, dataset in enumerate(found):
        if not all(hasattr(dataset, field) for field in ("name", "num_rows", "shard_rows")):
            raise ConfigError(
                f"datasets[{index}] is a {type(dataset).__name__}: give datasets, as zp.Dataset makes them"
            )
        if dataset.name in seen:
            raise ConfigError(
                f"two datasets are named {dataset.name!r}: a name keys weights, shuffle and state, so rename one"
            )
        seen.add(dataset.name)
        check_int(f"num_rows of dataset {dataset.name!r}", dataset.num_rows, 0, MAX_POSITION - 1)
        shard_rows = np.asarray(dataset.shard_rows)
        if (shard_rows.size and shard_rows.min() < 0) or int(shard_rows.sum()) != dataset.num_rows:
            raise ConfigError(
                f"dataset {dataset.name!r}: its shards hold {int(shard_rows.sum()):,} rows in all but num_rows is "
                f"{dataset.num_rows:,}; the table of shard rows must be non-negative and add up"
            )
    return found


def losses_of(source: WorkSource) -> list[str]:
    """The reasons for which rows of the datasets may be left out."""
    losses = []
    for dataset in source.datasets:
        if len(getattr(dataset, "excluded_rows", ())):
            losses.append(f"{dataset.name}.excluded")
        if getattr(dataset, "on_error", "raise") == "skip":
            losses.append(f"{dataset.name}.error")
    return losses

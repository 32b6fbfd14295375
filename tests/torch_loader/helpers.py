"""What the tests of `to_torch` share: small pipelines, and a DataLoader's rotation without its processes."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import zephon as zp
from zephon.errors import ZephonError

# Asks pytest to leave out the module that imports this one, where torch is missing.
import pytest  # isort: skip

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data._utils import worker as torch_worker  # noqa: E402

from zephon.ipc.codec import dump_by_value  # noqa: E402
from zephon.torch_loader.batch import DATASETS, TorchBatch  # noqa: E402
from zephon.torch_loader.dataset import TorchDataset  # noqa: E402

SEED = 77

Found = tuple[int, int, int, str]
"""(lane, step, pass, digest) of a batch."""


def line(lanes: int, rows: int = 60, **options: Any) -> zp.Pipeline:
    """Ids and texts, shuffled, two a batch; every lane has as many batches, if `rows` divides so."""
    dataset = zp.Dataset.from_list("toy", [{"id": i, "text": str(i)} for i in range(rows)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, chunk_size=4)).shuffle(6)
    return pipeline.batch(2).options(**{"canonical_replicas": lanes, "runner": "inline", **options})


def loader(dataset: TorchDataset, workers: int, **settings: Any) -> DataLoader[TorchBatch]:
    """A DataLoader as it is meant to be used; what hangs is an error."""
    timeout_s = 60 if workers else 0
    return DataLoader(dataset, batch_size=None, num_workers=workers, timeout=timeout_s, **settings)


def found(batches: Iterable[Any]) -> list[Found]:
    """What batches are, of the pipeline itself or of a DataLoader."""
    return [(b.lane_id, b.step, b.pass_index, b.digest()) for b in batches]


def passes(pipeline: zp.Pipeline, count: int) -> list[list[Found]]:
    """The pipeline's own stream, pass by pass."""
    return [found(pipeline) for _ in range(count)]


def by_lane(batches: Iterable[Found]) -> dict[tuple[int, int], list[str]]:
    """(lane, pass) -> digests."""
    lanes: dict[tuple[int, int], list[str]] = {}
    for lane, _, number, digest in batches:
        lanes.setdefault((lane, number), []).append(digest)
    return lanes


def error_of(batches: Iterable[Any]) -> tuple[type[BaseException], str, list[Any]]:
    """What comes of iterating: class and text of the error, and the batches before it.

    An exception keeps its frames, and these a DataLoader's iterator with its workers: so they are let go here.
    """
    got: list[Any] = []
    iterator = iter(batches)
    try:
        got.extend(iterator)
    except Exception as error:
        return type(error), str(error), got
    finally:
        getattr(iterator, "_shutdown_workers", int)()
    raise AssertionError("no error")


@contextlib.contextmanager
def as_worker(number: int, count: int, seed: int) -> Iterator[None]:
    """This process as torch's worker `number` of `count`."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed + number, dataset=None)
    try:
        yield
    finally:
        torch_worker._worker_info = before


class Workers:
    """A DataLoader with its workers in this process: each has a dataset of its own, and works ahead by chance.

    Everything that crosses between processes is pickled. No persistent workers: each epoch has new ones.
    """

    def __init__(self, dataset: TorchDataset, count: int, ahead: int = 2, chance: int = 0) -> None:
        self.dataset, self.count, self.ahead, self.random = dataset, count, ahead, random.Random(chance)

    def __iter__(self) -> Iterator[TorchBatch]:
        if not self.count:
            yield from self.dataset
            return
        seed = self.random.randrange(1 << 60)
        copies = [self._copy() for _ in range(self.count)]
        iterators: dict[int, Iterator[TorchBatch]] = {}
        for number in self.random.sample(range(self.count), self.count):
            with as_worker(number, self.count, seed):
                iterators[number] = iter(copies[number])
        ready: list[deque[TorchBatch | ZephonError | None]] = [deque() for _ in range(self.count)]
        left, turn = list(range(self.count)), 0
        while left:
            for number in left:
                most = self.random.randint(0, self.ahead)
                while len(ready[number]) < (most + 1 if number == left[turn % len(left)] else most):
                    with as_worker(number, self.count, seed):
                        ready[number].append(self._made(iterators[number]))
            number = left[turn % len(left)]
            batch = ready[number].popleft()
            if batch is None:
                turn %= len(left)
                left.remove(number)
            elif isinstance(batch, ZephonError):
                raise batch
            else:
                yield batch
                turn = (turn + 1) % len(left)

    def _copy(self) -> TorchDataset:
        """The dataset as it is in a worker."""
        origin = pickle.loads(dump_by_value(self.dataset._origin)[0])
        copy = TorchDataset(origin, self.dataset._token, self.dataset._passes.shared)
        DATASETS[self.dataset._token] = self.dataset._seen
        return copy

    @staticmethod
    def _made(iterator: Iterator[TorchBatch]) -> TorchBatch | ZephonError | None:
        """A worker's next batch as it arrives; the trainer's process takes note of it."""
        try:
            batch = next(iterator, None)
        except ZephonError as error:
            return error
        arrived: TorchBatch | None = pickle.loads(pickle.dumps(batch))
        return arrived

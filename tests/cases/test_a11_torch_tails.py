"""Case A11, the DataLoader's part: tiny sources, lanes and workers without data, and tails: with workers as without."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

import zephon as zp
from tests.torch_loader.helpers import Workers

from .helpers import ids, rows, source

RANKS = 3
Got = list[tuple[int, int, list[Any]]]

pytestmark = pytest.mark.torch


def line(mixture: zp.StaticMixture, rank: int, drop: bool = False) -> zp.Pipeline:
    """4 lanes a rank, two samples a batch."""
    options = {"canonical_replicas": 4 * RANKS, "dp_degree": RANKS, "dp_group_id": rank, "runner": "inline"}
    return zp.Pipeline(mixture).batch(2, drop_last=drop).options(**options)


def got(batches: Iterable[Any]) -> Got:
    return [(batch.step, batch.lane_id, ids([batch])) for batch in batches]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 10, 11, 12, 13, 50])
def test_three_epochs_with_and_without_workers(count: int, drop: bool) -> None:
    """The same batches in the same steps on every rank; together every sample once; and a state of the second epoch."""
    for workers in (0, 4):
        epochs: list[list[int]] = [[], [], []]
        for rank in range(RANKS):
            plain, dataset = line(source(count), rank, drop), line(source(count), rank, drop).to_torch()
            for number in range(3):
                batches = list(Workers(dataset, workers))
                wanted = got(plain)
                assert sorted(got(batches)) == sorted(wanted)
                epochs[number] += ids(batches)
                for cut in range(1, len(batches) + 1) if number == 1 else ():
                    again = line(source(count), rank, drop).to_torch()
                    again.load_state_dict(dataset.state_dict(after=batches[cut - 1]))
                    rest = got(Workers(again, 4 - workers))
                    assert sorted(got(batches[:cut]) + rest) == sorted(wanted)
        for samples in epochs:
            assert drop or sorted(samples) == list(range(count))
            assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("workers", [0, 4])
def test_a_mixture_with_a_source_of_one_record(workers: int) -> None:
    """It feeds one lane of twelve."""
    datasets = [zp.Dataset.from_list("many", rows(100)), zp.Dataset.from_list("one", rows(1, 1000))]
    mixture = zp.StaticMixture(datasets, [100, 1], seed=2, chunk_size=4)
    found = []
    for rank in range(RANKS):
        dataset = line(mixture, rank).to_torch()
        part = list(itertools.islice(Workers(dataset, workers), 5))
        again = line(mixture, rank).to_torch()
        again.load_state_dict(dataset.state_dict(after=part[-1]))
        found += ids(part) + ids(Workers(again, 4 - workers))
    assert sorted(found) == [*range(100), 1000]

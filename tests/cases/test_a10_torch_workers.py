"""Case A10 with a DataLoader: any number of its workers saves, any resumes, 0 included and no torch at all."""

from __future__ import annotations

import itertools

import pytest

import zephon as zp
from tests.torch_loader.helpers import Workers, loader

from .helpers import ids, resumed, shards, through_json

SAVING = [0, 1, 2, 5]
RESUMING = [0, 1, 3, 8, 12]
CUTS = [5, 11, 25]

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> zp.Dataset:
    return shards(tmp_path_factory.mktemp("shards"), 8, 13)


def line(data: zp.Dataset, lanes: int) -> zp.Pipeline:
    mixture = zp.StaticMixture([data], seed=3, chunk_size=8)
    return zp.Pipeline(mixture).batch(4).options(canonical_replicas=lanes, runner="inline")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("workers", SAVING)
def test_any_count_resumes_what_any_count_saved(data: zp.Dataset, workers: int, cut: int) -> None:
    """On 2 lanes, of 13 batches each, and on 10, whose last ones are short by the rule."""
    for lanes in (2, 10):
        reference = ids(line(data, lanes))
        assert sorted(reference) == list(range(104))
        dataset = line(data, lanes).to_torch()
        part = list(itertools.islice(Workers(dataset, workers, ahead=3, chance=cut), cut))
        state = through_json(dataset.state_dict(after=part[-1]))
        done = ids(part)
        assert done == reference[: len(done)]
        assert ids(resumed(line(data, lanes), state)) == reference[len(done) :]
        for others in RESUMING:
            new = line(data, lanes).to_torch()
            new.load_state_dict(state)
            assert ids(Workers(new, others, ahead=others % 3)) == reference[len(done) :]


def test_with_real_workers(data: zp.Dataset) -> None:
    """More of them than lanes or shards, and another depth of reading ahead."""
    reference = ids(line(data, 10))
    dataset = line(data, 10).to_torch()
    part = list(itertools.islice(loader(dataset, 5, prefetch_factor=1), 11))
    new = line(data, 10).to_torch()
    new.load_state_dict(dataset.state_dict(after=part[-1]))
    assert ids(part) + ids(loader(new, 12, prefetch_factor=4)) == reference

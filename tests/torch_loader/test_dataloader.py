"""to_torch() under torch's own DataLoader, with real workers."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.helpers import run_script, slow
from tests.torch_loader.helpers import (
    TorchBatch,
    Workers,
    as_worker,
    by_lane,
    error_of,
    found,
    line,
    loader,
    passes,
    torch,
)
from zephon.errors import CheckpointError, Closed, ConfigError, OperatorError
from zephon.testing.oracle import OracleLane

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


def oracle(pipeline: zp.Pipeline, number: int) -> dict[tuple[int, int], list[str]]:
    return {(lane, number): [batch.digest for batch in OracleLane(pipeline, lane, number)] for lane in pipeline.lanes}


@pytest.mark.law("L2")
@pytest.mark.parametrize(
    ("lanes", "workers"), [(6, 0), (6, 1), slow(6, 2), (6, 3), (6, 4), slow(1, 2), (5, 2), slow(3, 3), slow(4, 7)]
)
def test_every_number_of_workers_gives_the_oracles_lanes(lanes: int, workers: int) -> None:
    """For two epochs, whose workers are new ones each time; the order is the pipeline's own."""
    pipeline = line(lanes, runner="threads", parallelism=2)
    epochs, wanted = loader(line(lanes).to_torch(), workers), passes(pipeline, 2)
    for number in range(2):
        got = found(epochs)
        assert by_lane(got) == oracle(pipeline, number)
        assert got == wanted[number]


@pytest.mark.parametrize("workers", [2, slow(4)])
def test_workers_that_stay_go_on_with_the_next_pass(workers: int) -> None:
    """On threads, as no runner is asked for."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(48)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=4)).batch(3).options(canonical_replicas=4)
    epochs = loader(pipeline.to_torch(), workers, persistent_workers=True, prefetch_factor=5)
    assert [found(epochs) for _ in range(3)] == passes(pipeline.options(runner="inline"), 3)


@pytest.mark.law("L3")
@pytest.mark.law("L4")
def test_a_state_behind_every_batch() -> None:
    """What workers made ahead does not count; the plain pipeline goes on, and so do others."""
    [wanted] = passes(line(4, 40), 1)
    dataset = line(4, 40).to_torch()
    states = [dataset.state_dict(after=batch) for batch in loader(dataset, 2)]
    for number, state in enumerate(states, start=1):
        alone = line(4, 40)
        alone.load_state_dict(state)
        assert found(alone) == wanted[number:]
        again = line(4, 40).to_torch()
        again.load_state_dict(state)
        assert found(Workers(again, number % 5)) == wanted[number:]
    again.load_state_dict(states[6])
    assert found(loader(again, 4)) == wanted[7:]


SCRIPT = """
import sys
import zephon as zp
from torch.utils.data import DataLoader

def main(method):
    odd = lambda record: record["id"] % 2 == 1
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(48)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=4)).filter(odd).batch(3)
    pipeline = pipeline.options(canonical_replicas=2, runner="inline")
    wanted = [[b.digest() for b in pipeline] for _ in range(2)]
    torch_dataset = pipeline.options().to_torch()
    loader = DataLoader(torch_dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    found = [[b.digest() for b in loader] for _ in range(2)]
    assert found == wanted, (found, wanted)
    for count, batch in enumerate(loader, start=1):
        if count == 3:
            state = torch_dataset.state_dict(after=batch)
            break
    third = [b.digest() for b in pipeline]
    pipeline.load_state_dict(state)
    assert [b.digest() for b in pipeline] == third[3:]
    print("done")

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods(method: str, tmp_path: Any) -> None:
    """With a function that has no name in the workers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    status, out, err = run_script("", argv=[str(script), method], timeout_s=280)
    assert (status, out.strip()) == (0, "done"), err


# -- batches ---------------------------------------------------------------------------------------------------------


def mixed(record: dict[str, Any]) -> dict[str, Any]:
    i = record["id"]
    return {"id": i, "half": np.full(2, i, np.float16), "text": record["text"], "ragged": list(range(i % 3 + 1))}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_a_mapping_of_tensors_with_its_place(workers: int) -> None:
    dataset = mixed_line().to_torch()
    first, *_ = loader(dataset, workers)
    assert isinstance(first, TorchBatch)
    assert (first.lane_id, first.step, first.pass_index, first.num_samples) == (0, 0, 0, 2)
    assert {name: v.dtype for name, v in first.items() if isinstance(v, torch.Tensor)} == {
        "id": torch.int64,
        "half": torch.float16,
    }
    assert isinstance(first["text"], list)
    assert isinstance(first["ragged"], list)
    pinned = copy.copy(first)
    pinned.update(id=first["id"] + 1)
    for other in (first.copy(), copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first)), pinned):
        assert (other.lane_id, other.step, other.pass_index, other.num_samples) == (0, 0, 0, 2)
        assert dataset.state_dict(after=other) == dataset.state_dict(after=first)
    assert first.digest() == next(iter(mixed_line())).digest()


def mixed_line() -> zp.Pipeline:
    dataset = zp.Dataset.from_list("toy", [{"id": i, "text": str(i)} for i in range(4)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=1)).map(mixed).batch(2)
    return pipeline.options(canonical_replicas=1, runner="inline")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_size_of_the_dataloader_is_refused(workers: int) -> None:
    kind, text, _ = error_of(torch.utils.data.DataLoader(line(1).to_torch(), num_workers=workers))
    assert kind is ConfigError
    assert "batch_size=None" in text


# -- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_was_left_is_not_begun_again(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = passes(line(4), 3)
    epochs = loader(line(4).to_torch(), workers)
    assert found(itertools.islice(epochs, 3)) == first[:3]
    assert found(itertools.islice(epochs, 3)) == second[:3]
    assert found(epochs) == third
    assert ("left before its end" in caplog.text) == (not workers)


def test_passes_go_on_over_other_loaders_and_the_same_seed() -> None:
    """The workers of an epoch find the pass behind the last one, however many there were."""
    wanted, dataset = passes(line(6), 6), line(6).to_torch()
    for number, workers in enumerate([1, 3, 0, 2, 3]):
        torch.manual_seed(0)
        assert found(loader(dataset, workers)) == wanted[number]
    again = copy.deepcopy(dataset)
    assert found(again) == wanted[0]
    assert found(dataset) == wanted[5]


def test_take_is_shared_among_workers() -> None:
    [wanted] = passes(line(4), 1)
    assert found(loader(line(4).take(7).to_torch(), 2)) == wanted[:7]


def test_it_starts_where_the_pipeline_stands() -> None:
    pipeline = line(2)
    _, second, third = passes(line(2), 3)
    list(pipeline)
    assert found(Workers(pipeline.to_torch(), 2)) == second
    part = pipeline.take(4)
    list(part)
    pipeline.load_state_dict(pipeline.state_dict())
    dataset = pipeline.to_torch()
    assert [found(Workers(dataset, 1)), found(Workers(dataset, 2))] == [second, third]


# -- errors ----------------------------------------------------------------------------------------------------------


class Picky(Exception):
    """One that cannot be made of a text alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def fail(record: dict[str, Any]) -> dict[str, Any]:
    if record["id"] == 5:
        raise Picky(1, 2)
    return record


@pytest.mark.law("L8")
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_arrive_with_operator_and_record(workers: int) -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(12)])
    mixture = zp.StaticMixture([dataset], seed=1, shuffle="none", chunk_size=1)
    pipeline = zp.Pipeline(mixture).map(fail).batch(1).options(canonical_replicas=2, runner="inline")
    kind, text, got = error_of(loader(pipeline.to_torch(), workers))
    assert kind is OperatorError
    assert re.search(r"operator 'fail' failed on .*row 5.*Picky", text)
    assert [int(batch["id"]) for batch in got] == list(range(5))


class Started(torch.utils.data.IterableDataset[TorchBatch]):
    """What somebody may write who does not know better."""

    def __init__(self, batches: Iterator[TorchBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[TorchBatch]:
        return self.batches


def test_a_started_iterator_is_refused_in_a_worker() -> None:
    batches = iter(line(2).to_torch())
    next(batches)
    kind, text, _ = error_of(loader(Started(batches), 1))
    assert kind is Closed
    assert "the dataset itself" in text
    own = iter(line(2))
    next(own)
    assert error_of(loader(Started(own), 1))[0] is Closed
    with pytest.raises(ConfigError, match="the dataset itself"):
        pickle.dumps(batches)
    assert len(list(batches)) == 29


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_leaving_and_closing_end_the_engine(runner: str) -> None:
    """nothing_leaks looks for processes; here for threads."""
    before = set(threading.enumerate())
    dataset = line(2, runner=runner, parallelism=1).to_torch()
    batches = iter(dataset)
    next(batches)
    assert runner == "process" or set(threading.enumerate()) > before
    del batches
    assert set(threading.enumerate()) == before
    batches = iter(dataset)
    next(batches)
    dataset.close()
    with pytest.raises(Closed):
        next(batches)
    newer = iter(dataset)
    next(newer)
    next(iter(dataset))
    with pytest.raises(Closed, match="newer"):
        next(newer)
    dataset.close()
    assert set(threading.enumerate()) == before


def test_processes_are_threads_in_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    dataset = line(2, runner="process", parallelism=1).to_torch()
    with caplog.at_level(logging.WARNING, "zephon"):
        assert len(list(Workers(dataset, 2))) == 30
    assert [m for m in caplog.messages if "threads" in m] == [
        "runner='process' is 'threads' in a DataLoader's workers, which are the processes there"
    ]


# -- states ----------------------------------------------------------------------------------------------------------


def test_states_that_cannot_be_had() -> None:
    dataset = line(4, 400).to_torch()
    other = list(itertools.islice(Workers(line(4, 400).to_torch(), 2), 1))
    batches = list(Workers(dataset, 2))
    with pytest.raises(CheckpointError, match=r"state_dict\(after=batch\)"):
        dataset.state_dict()
    for wrong in (other[0], TorchBatch(dict(batches[0])), dict(batches[0])):
        with pytest.raises(CheckpointError, match="no place"):
            dataset.state_dict(after=wrong)
    with pytest.raises(CheckpointError, match="more than 64"):
        dataset.state_dict(after=batches[0])
    assert dataset.state_dict(after=batches[-128]) != dataset.state_dict(after=batches[-1])
    list(Workers(dataset, 2))
    list(Workers(dataset, 2))
    with pytest.raises(CheckpointError, match="long over"):
        dataset.state_dict(after=batches[-1])
    loose = line(2, deterministic=False).to_torch()
    batch, *_ = loose
    for call in (loose.state_dict, lambda: loose.state_dict(after=batch)):
        with pytest.raises(CheckpointError, match="deterministic"):
            call()


def test_states_that_do_not_fit() -> None:
    dataset = line(4).to_torch()
    with as_worker(0, 2, 1):
        iter(copy.deepcopy(dataset))
        part = copy.deepcopy(dataset)
        iter(part)
        state = part.state_dict()
        with pytest.raises(CheckpointError, match="load this one outside"):
            part.load_state_dict(line(4).state_dict())
    with pytest.raises(CheckpointError, match="pipeline_state"):
        dataset.load_state_dict(state)
    with pytest.raises(CheckpointError, match="canonical_replicas"):
        dataset.load_state_dict(line(3).state_dict())
    with pytest.raises(ConfigError, match="a list of field names"):
        dataset.load_state_dict(line(4).state_dict(), allow="seed")
    for worker, count in ((0, 4), (0, 1), (2, 2)):
        with as_worker(worker, count, 1):
            other = copy.deepcopy(dataset)
            other.load_state_dict(state)
            kind, text, _ = error_of(other)
            assert kind is CheckpointError
            assert "the same workers" in text


def test_the_state_says_how_many_lanes_there_are() -> None:
    first, second = passes(line(6), 2)
    dataset = line(6).to_torch()
    *_, last = itertools.islice(Workers(dataset, 2), 8)
    other = line(6, canonical_replicas=None, dp_degree=1).to_torch()
    other.load_state_dict(dataset.state_dict(after=last))
    assert [found(Workers(other, 3)), found(Workers(other, 2))] == [first[8:], second]
    assert other.checkpoint(next(iter(Workers(other, 6))))["canonical_replicas"] == 6


def test_a_state_for_workers_that_run_is_refused() -> None:
    dataset = line(4).to_torch()
    epochs = loader(dataset, 2, persistent_workers=True)
    *_, last = itertools.islice(epochs, 3)
    dataset.load_state_dict(dataset.state_dict(after=last))
    kind, text, _ = error_of(epochs)
    assert kind is ConfigError
    assert "make a new DataLoader" in text
    del epochs
    assert found(loader(dataset, 2)) == passes(line(4), 1)[0][3:]


# -- ranks -----------------------------------------------------------------------------------------------------------


def test_the_rank_is_that_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    dataset = line(6).to_torch()
    assert {lane for lane, *_ in found(loader(dataset, 1))} == {2, 3}
    monkeypatch.setenv("RANK", "2")
    for use in (lambda: iter(dataset), lambda: pickle.dumps(dataset)):
        with pytest.raises(ConfigError, match=r"rank 1 of 3, which has lanes \[2, 3\].*rank 2 of 3"):
            use()
    assert error_of(loader(dataset, 1))[0] is ConfigError


def test_checkpoint_of_one_rank_is_its_state() -> None:
    dataset = line(4).to_torch()
    *_, last = itertools.islice(Workers(dataset, 2), 5)
    assert dataset.checkpoint(last) == dataset.state_dict(after=last)
    alone = line(4).to_torch()
    batches = iter(alone)
    next(batches)
    assert alone.checkpoint() == {name: v for name, v in alone.state_dict().items() if name != "loader"}


def test_torch_is_wanted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install zephon\[torch\]"):
        line(1).to_torch()

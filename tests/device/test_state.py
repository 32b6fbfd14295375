"""The state of a loader is that of the plain pipeline behind the same batch, however far it has read ahead."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zephon as zp
from tests.process.helpers import line, to_the_error
from zephon.device.loader import DeviceLoader
from zephon.errors import CheckpointError, Closed, ConfigError

RUNNERS = ["inline", "threads", "process"]


def copies(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**record, "text": f"row {record['id']}, {n}"} for n in range(record["id"] % 3)]


def lanes(rows: int = 60, **options: Any) -> zp.Pipeline:
    """Three lanes of unequal length: texts and numbers, in batches of 2."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(rows)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=1, chunk_size=8)).flat_map(copies).batch(2)
    return pipeline.options(**{"runner": "inline", "canonical_replicas": 3, "dp_degree": 1, **options})


def digests(batches: Iterable[zp.Batch]) -> list[str]:
    return [batch.digest() for batch in batches]


@pytest.mark.parametrize("runner", RUNNERS)
def test_batches_and_states_are_those_of_the_pipeline(runner: str) -> None:
    plain = lanes()
    expected = [
        (batch.digest(), batch.lane_id, batch.step, batch.origins, plain.state_dict(), plain.counts())
        for batch in plain
    ]
    with lanes(runner=runner).to_device("cpu", depth=3) as loader:
        assert loader.lanes == [0, 1, 2]
        assert loader.batches_per_step == 3
        number, batches = 0, iter(loader)
        for number, batch in enumerate(batches):
            found = (batch.digest(), batch.lane_id, batch.step, batch.origins, loader.state_dict(), loader.counts())
            assert found == expected[number]
            assert loader.state_dict(after=batch) == loader.state_dict()
            assert not isinstance(batch["id"], list)
            assert batch["text"][0].startswith("row")
        assert number == len(expected) - 1
        assert loader.state_dict() == plain.state_dict()
        assert next(batches, None) is None
        assert json.loads(json.dumps(loader.checkpoint())) == plain.state_dict()
        assert digests(loader) == digests(plain)  # the second pass


@pytest.mark.law("L3")
@settings(max_examples=40)
@given(
    stops=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.sampled_from(["loader", "steps", "plain"]))),
)
def test_exactly_once_over_any_chain_of_loaders(stops: list[tuple[int, int, str]]) -> None:
    expected, got = digests(lanes()), []
    state = None
    for count, depth, kind in [*stops, (10**6, 2, "loader")]:
        pipeline = lanes()
        used: Any = pipeline if kind == "plain" else pipeline.to_device("cpu", depth=depth)
        if state is not None:
            used.load_state_dict(copy.deepcopy(state))
        stream: Iterator[list[zp.Batch]] = used.steps() if kind == "steps" else ([batch] for batch in used)
        units = [unit for _ in range(min(count, 200)) if (unit := next(stream, None)) is not None]
        got += [batch.digest() for unit in units for batch in unit]
        if len(units) < count:  # the pass is over, and the next one would begin
            break
        state = used.state_dict()
        used.close()
    assert got == expected


def test_before_the_first_batch_and_after_a_load() -> None:
    loader, plain = lanes().to_device("cpu"), lanes()
    assert loader.state_dict() == plain.state_dict()  # of all lanes: nothing has begun
    batches = iter(loader)
    start = loader.state_dict()
    first = next(batches)
    loader.load_state_dict(start)
    with pytest.raises(Closed, match="a state was loaded"):
        next(batches)
    assert next(iter(loader)).digest() == first.digest()
    with pytest.raises(CheckpointError, match="did not come from this pipeline object"):
        loader.state_dict(after=first)
    loader.close()


def test_a_break_begins_again_and_one_iterator_is_live() -> None:
    loader = lanes(rows=6).to_device("cpu", depth=9)
    whole = digests(loader)
    loader = lanes(rows=6).to_device("cpu", depth=9)
    first = iter(loader)
    assert digests(next(first) for _ in whole) == whole  # all of them, but not the end
    second = iter(loader)
    with pytest.raises(Closed, match="a newer iterator"):
        next(first)
    assert digests(second) == whole  # the same pass again
    assert digests(loader) != whole  # the next one
    loader.close()


def test_the_pipeline_itself_does_not_move() -> None:
    pipeline = lanes()
    state = pipeline.state_dict()
    with pipeline.to_device("cpu") as loader:
        next(iter(loader))
        assert pipeline.state_dict() == state
        with pytest.raises(CheckpointError, match="did not come from this pipeline object"):
            pipeline.state_dict(after=next(iter(loader)))
    pipeline.load_state_dict(zp.merge_states([loader.state_dict()]))
    assert next(iter(pipeline.to_device("cpu"))).digest() == digests(lanes())[1]


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_comes_behind_the_batches_before_it(runner: str, by_step: bool) -> None:
    def fail(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 21:
            raise ValueError("row 21")
        return record

    with line(40, fail, batch=2, runner=runner).to_device("cpu", depth=4) as loader:
        got: list[int] = []
        stream: Iterator[Any] = loader.steps() if by_step else iter(loader)
        units = stream if by_step else ([batch] for batch in stream)
        assert "row 21" in str(to_the_error(chain.from_iterable(units), got))
        assert got == list(range(20))
        assert next(stream, None) is None  # it is over
        assert loader.counts()["delivered"] == {0: 20}
        plain = line(40, fail, batch=2, runner="inline")
        to_the_error(plain, [])
        assert loader.state_dict() == plain.state_dict()


def test_what_stops_it_in_the_middle_ends_it() -> None:
    loader = lanes().to_device("cpu", depth=2)
    batches = iter(loader)
    whole, got = digests(lanes()), [next(batches).digest()]

    def interrupt(tensors: list[Any]) -> Any:
        raise KeyboardInterrupt

    start, loader._copies.start = loader._copies.start, interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    with pytest.raises(Closed, match="KeyboardInterrupt stopped it"):
        next(batches)
    loader._copies.start = start  # type: ignore[method-assign]
    loader.load_state_dict(loader.state_dict())
    assert got + digests(loader) == whole


def test_a_ctrl_c_behind_the_copies_ends_it_too() -> None:
    """It has a batch in its hands that the user does not get."""
    loader = lanes().to_device("cpu", depth=2)
    batches = iter(loader)
    whole, got = digests(lanes()), [next(batches).digest()]
    session: Any = loader._pipeline._session

    def interrupt(batch: zp.Batch) -> Any:
        raise KeyboardInterrupt

    session.places = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    del session.places
    with pytest.raises(Closed, match="KeyboardInterrupt stopped it"):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    assert got + digests(loader) == whole


@pytest.mark.parametrize("how", ["close", "load", "iter"])
def test_what_another_thread_ends_while_a_batch_is_read(how: str) -> None:
    """As its copy starts: the batch is not delivered, and the old iterator has no part in the state."""
    loader = lanes(runner="threads").to_device("cpu", depth=2)
    batches, start = iter(loader), loader._copies.start
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    expected = lanes().to_device("cpu").state_dict() if how == "iter" else state
    ends = {"close": loader.close, "load": lambda: loader.load_state_dict(state), "iter": lambda: iter(loader)}[how]

    def starts(tensors: list[Any]) -> Any:
        loader._copies.start = start  # type: ignore[method-assign]
        thread = threading.Thread(target=ends)
        thread.start()
        thread.join(20)
        return start(tensors)

    batches._ahead.clear()  # type: ignore[attr-defined]
    loader._copies.start = starts  # type: ignore[method-assign]
    with pytest.raises(Closed, match="is over"):
        next(batches)
    assert loader.state_dict()["lanes"] == expected["lanes"]
    loader.close()


def test_a_copy_that_fails_is_an_error_behind_the_batches_before_it() -> None:
    loader = lanes().to_device("cpu", depth=2)
    start, started = loader._copies.start, []

    def fail(tensors: list[Any]) -> Any:
        started.append(tensors)
        if len(started) == 5:
            raise RuntimeError("out of memory")
        return start(tensors)

    loader._copies.start = fail  # type: ignore[method-assign]
    batches = iter(loader)
    got = [next(batches).digest() for _ in range(4)]
    with pytest.raises(RuntimeError, match="out of memory"):
        next(batches)
    state = loader.state_dict()
    assert next(batches, None) is None  # the source had delivered the batch that could not be copied
    assert loader.state_dict() == state
    loader._copies.start = start  # type: ignore[method-assign]
    loader.load_state_dict(loader.state_dict())
    assert got + digests(loader) == digests(lanes())


def test_it_never_waits_for_a_batch_while_it_has_one() -> None:
    """The third batch is held back until the second was returned."""
    gate = threading.Event()

    def wait(record: dict[str, Any]) -> dict[str, Any]:
        assert record["id"] < 4 or gate.wait(20)
        return record

    with line(12, wait, batch=2, runner="threads", task_records=2).to_device("cpu", depth=4) as loader:
        batches = iter(loader)
        assert [next(batches)["id"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        gate.set()
        assert [batch["id"].tolist() for batch in batches] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_threads_take_turns() -> None:
    with lanes(rows=200, runner="threads").to_device("cpu") as loader:
        batches, got = iter(loader), []
        threads = [threading.Thread(target=lambda: got.extend(digests(batches))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(got) == sorted(digests(lanes(rows=200)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cpu", 0), r"to_device\(depth=0\): a whole number of at least 1"),
        (("cpu", True), "depth=True"),
        (("banana",), r"to_device\('banana'\): .*device"),
        ((None,), r"to_device\(None\)"),
        ((3.5,), r"to_device\(3.5\)"),
    ],
)
def test_wrong_use(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lanes().to_device(*arguments)


def test_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device here; to_device\\('cpu'\\) works anywhere"):
        lanes().to_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="there are 2 CUDA devices, counted from 0"):
        lanes().to_device("cuda:2")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ConfigError, match="needs torch: pip install"):
        lanes().to_device("cpu")


def test_a_loader_is_not_left_behind() -> None:
    """Dropped in the middle, it ends what works for it."""
    loader: DeviceLoader = line(200, batch=1).to_device("cpu")
    batches = iter(loader)
    driver = (next(batches), batches._source._driver)[1]  # type: ignore[attr-defined]
    del batches
    assert driver._closed

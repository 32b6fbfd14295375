"""L3 step by step: what stops a step in its middle leaves the state before it: its list was not returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zephon as zp
from tests.process.helpers import digests, wait_until
from zephon.errors import Closed, OperatorError

RUNNERS = ["inline", "threads", "process"]
BAD = 45


def lanes(function: Callable[[dict[str, Any]], Any], **options: Any) -> zp.Pipeline:
    """Three lanes; a step is two batches of two samples of each."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(90)])
    source = zp.StaticMixture([dataset], seed=1, shuffle="none", chunk_size=4)
    settings = {"canonical_replicas": 3, "dp_degree": 1, "cycles_per_step": 2, "parallelism": 2, **options}
    return zp.Pipeline(source).map(function, name="look", version="1").batch(2).options(**settings)


def passes(record: dict[str, Any]) -> dict[str, Any]:
    return record


def fails(record: dict[str, Any]) -> dict[str, Any]:
    if record["id"] == BAD:
        raise ValueError("the bad row")
    return record


def step_by_step(stream: Iterator[list[zp.Batch]], pipeline: zp.Pipeline, error: type[BaseException]) -> Any:
    """(digests by step, the states behind each and before the first) up to an error."""
    found, states = [], [pipeline.state_dict()]
    try:
        for step in stream:
            found.append(digests(step))
            states += [pipeline.state_dict()]
    except error:
        return found, states
    raise AssertionError("no error")


@pytest.mark.law("L3")
@pytest.mark.parametrize("runner", RUNNERS)
def test_an_error_in_the_middle_of_a_step(runner: str) -> None:
    whole = [digests(step) for step in lanes(passes, runner="inline").steps()]
    with lanes(fails, runner=runner) as pipeline:
        stream = pipeline.steps()
        found, states = step_by_step(stream, pipeline, OperatorError)
        assert found == whole[:3]  # the row is in the third batch of the fourth step
        assert pipeline.state_dict() == states[-1]
        assert pipeline.counts()["delivered"] == {0: 12, 1: 12, 2: 12}
        assert next(stream, None) is None
    with lanes(passes, runner=runner) as mended:
        mended.load_state_dict(pipeline.state_dict())
        assert [digests(step) for step in mended.steps()] == whole[3:]


@pytest.mark.law("L3")
def test_the_same_step_on_a_device() -> None:
    """A loader reads whole steps, and says the same."""
    pytest.importorskip("torch")
    plain = lanes(fails, runner="inline")
    step_by_step(plain.steps(), plain, OperatorError)
    with lanes(fails, runner="threads").to_device("cpu") as loader:
        stream: Any = loader.steps()
        with pytest.raises(OperatorError):
            list(stream)
        assert loader.state_dict() == plain.state_dict()
        assert next(stream, None) is None
        assert loader.state_dict() == plain.state_dict()


@pytest.mark.law("L3")
def test_a_ctrl_c_in_the_middle_of_a_step() -> None:
    def interrupts(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == BAD:
            raise KeyboardInterrupt
        return record

    pipeline = lanes(interrupts, runner="inline", task_records=2)
    _, states = step_by_step(pipeline.steps(), pipeline, KeyboardInterrupt)
    assert pipeline.state_dict() == states[-1]
    whole = [digests(step) for step in lanes(passes, runner="inline").steps()]
    mended = lanes(passes, runner="inline")
    mended.load_state_dict(states[-1])
    assert [digests(step) for step in mended.steps()] == whole[len(states) - 1 :]


@pytest.mark.law("L3")
def test_a_state_that_is_asked_for_in_the_middle_of_a_step() -> None:
    """As a signal handler may, that saves before the job is preempted."""
    within: list[dict[str, Any]] = []
    pipeline = lanes(lambda record: (within.append(pipeline.state_dict()), record)[1], runner="inline", task_records=2)
    between = [pipeline.state_dict()]
    between += [pipeline.state_dict() for _ in pipeline.steps()]
    assert len(within) == 90
    assert all(state in between for state in within[1:])  # the first one: nothing has begun, it has all lanes
    kept = pipeline.state_dict()
    again = iter(pipeline.steps())
    next(again)
    assert pipeline.state_dict() != kept


@pytest.mark.law("L3")
def test_who_closes_it_in_the_middle_of_a_step() -> None:
    """No list that is short without a word, and the state before it."""
    gate, waits = threading.Event(), threading.Event()

    def holds(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == BAD:
            waits.set()
            gate.wait(20)
        return record

    pipeline = lanes(holds, runner="threads", task_records=2)
    stream, found = pipeline.steps(), [pipeline.state_dict()]
    for _ in range(3):
        next(stream)
        found.append(pipeline.state_dict())

    def close() -> None:
        wait_until(waits.is_set)
        pipeline.close()
        gate.set()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(Closed):
        next(stream)
    closer.join(20)
    assert pipeline.state_dict() == found[-1]


@pytest.mark.law("L3")
def test_an_iterator_that_is_ended_between_two_batches_of_a_step() -> None:
    pipeline = lanes(passes, runner="inline")
    iterator = iter(pipeline)
    lacks, asked = iterator.lacks, []

    def ends(turns: int) -> bool:
        asked.append(turns)
        if len(asked) == 3:
            iterator.end("the pipeline was closed")
        return lacks(turns)

    iterator.lacks = ends  # type: ignore[method-assign]
    state = pipeline.state_dict()
    with pytest.raises(Closed, match="the pipeline was closed"):
        next(iterator.steps())
    assert pipeline.counts()["delivered"] == {0: 0, 1: 0, 2: 0}
    assert pipeline.state_dict() == state

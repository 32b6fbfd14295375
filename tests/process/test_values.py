"""Cases A6 and A16 under processes, and values of every kind: batches are those of the inline runner."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp
from tests.ipc.kinds import Color, Point
from tests.ipc.values import record_lists, same
from tests.laws.harness import examples
from tests.process.functions import Give, Lookup, draw, draw_torch, every_kind, times
from tests.process.helpers import engine, ids, line, rests, run_script, slow

A = np.arange(24).reshape(4, 6)
ARRAYS: list[Any] = [
    np.float32(3.5), np.array(7), np.empty((0,), "i4"), np.empty((0, 5)), np.empty((3, 0)), A[::-1], A.T, A[:, ::2],
    np.zeros((1, 3))[::-1], np.broadcast_to(np.arange(3), (4, 3)), np.asfortranarray(A), A.astype(">i8"),
    np.array([True, False]), np.array([1 + 2j]), np.array("text"), np.array(["2020-01-01"], "M8[D]"),
    np.zeros(3, [("a", "i4"), ("b", "f8", (2,))]), np.float16(0.1), np.array(2, ">u2"), np.array([b"ab"]),
]  # fmt: skip


def read_only() -> Any:
    array = A.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("options", [{}, {"parallelism": {"map": 1, "dict": 1}}])
def test_arrays_one_sample_at_a_time(options: dict[str, Any]) -> None:
    """Value, shape and dtype survive one crossing and two; what arrives is contiguous, native and the receiver's."""
    arrays = [*ARRAYS, read_only()]
    steps = [Give(arrays), dict] if options else [Give(arrays)]
    with line(2 * len(arrays), *steps, batch=1, task_records=1, **options) as pipeline:
        kept = []
        for number, batch in enumerate(pipeline):
            wanted = np.asarray(arrays[number % len(arrays)])
            got = batch["x"]
            assert got.shape == (1, *wanted.shape)
            assert got.dtype == wanted.dtype.newbyteorder("=")
            assert np.array_equal(got[0], wanted)
            assert min(got.strides, default=0) >= 0
            assert got.flags.c_contiguous
            assert got.flags.writeable
            kept.append((got, got.copy()))
    for got, copied in kept:
        assert np.array_equal(got, copied)
        got[...] = got.flat[0] if got.size else 0  # no one else's
    for i, (got, _) in enumerate(kept):
        assert not any(np.shares_memory(got, other) for other, _ in kept[:i] if got.size)


@pytest.mark.torch
def test_arrays_are_tensors_at_once() -> None:
    torch = pytest.importorskip("torch")
    plain = [x for x in ARRAYS if np.asarray(x).dtype.kind in "biufc" and np.asarray(x).dtype.name != "uint16"]
    with line(len(plain), Give(plain), batch=1, output="torch") as pipeline:
        for array, batch in zip(plain, pipeline, strict=True):
            native = np.asarray(array).dtype.newbyteorder("=")
            assert torch.equal(batch["x"][0], torch.from_numpy(np.array(array, native)))


def batches_of(records: list[dict[Any, Any]], **options: Any) -> list[dict[Any, Any]] | str:
    """The batches of a pipeline that gives these records, or the error."""
    with line(len(records) * 2, Lookup(records), batch=2, task_records=3, **options) as pipeline:
        try:
            return [dict(batch) for batch in pipeline]
        except zp.errors.OperatorError as error:
            return str(error)


def check(records: list[dict[Any, Any]], **options: Any) -> None:
    inline, processes = batches_of(records, runner="inline"), batches_of(records, **options)
    assert isinstance(inline, str) == isinstance(processes, str), (inline, processes)
    if isinstance(inline, str):
        assert inline == processes
    else:
        assert all(map(same, inline, processes)), (inline, processes)


SEVERAL: dict[str, list[dict[Any, Any]]] = {
    "objects": [{"x": Color.RED, "y": Point(1, None), "z": zp.MISSING}, {"x": None, "y": Point(2, ())}],
    "numbers": [{"x": 2**80}, {"x": -1}, {"x": True}, {"x": 1.0}],
    "text": [{"x": "\ud800", "\ud800": 1, "": 2}, {"x": "", "\ud800": 3, "": "\0"}],
    "nothing": [{}, {}],
    "different fields": [{"a": 1}, {"b": [1, (2,)]}, {"a": np.arange(3)}],
    "ordered dicts": [OrderedDict(b=1, a=2), OrderedDict(a=1, b=2)],
    "names that are no text": [{1: 2}],
    "numpy names": [{np.str_("n"): 1}],
    "many fields": [{f"a field with a long name, number {i:05}": i for i in range(4000)}],
}


ALIKE = {"nothing", "different fields", "ordered dicts", "numpy names"}


@pytest.mark.parametrize("kind", [slow(kind) if kind in ALIKE else kind for kind in SEVERAL])
def test_records_of_many_kinds(kind: str) -> None:
    check(SEVERAL[kind])


@examples(0.02)
@given(record_lists(), st.sampled_from([{}, {"ring_bytes": 4096, "parallelism": 1}]))
def test_any_records(records: list[dict[Any, Any]], options: dict[str, Any]) -> None:
    check(records, **options)


@pytest.mark.slow
@examples(0.5)
@given(record_lists(), st.sampled_from([{}, {"ring_bytes": 4096, "parallelism": 1}]))
def test_very_many_records(records: list[dict[Any, Any]], options: dict[str, Any]) -> None:
    check(records, **options)


def looks(value: Any) -> Any:
    """What a value is, beside its digest: types all the way down, dtypes, lengths."""
    if isinstance(value, np.ndarray):
        kept = (value.flags.writeable, value.flags.c_contiguous)
        inner = [looks(item) for item in value.ravel()] if value.dtype.hasobject else ()
        return (type(value), value.dtype, value.shape, kept, inner)
    if isinstance(value, np.generic):
        return (type(value), value.dtype, np.size(value))
    if isinstance(value, memoryview):
        return (type(value), value.format, value.shape)
    if isinstance(value, dict):
        return (type(value), [(looks(key), looks(item)) for key, item in value.items()])
    inside = [looks(item) for item in value] if isinstance(value, (list, tuple)) else len(getattr(value, "shape", ()))
    return (type(value), inside)


def looks_by_runner(runner: str) -> list[dict[str, Any]]:
    """Batches through two stages: a value crosses as a result, as a task and in a batch. Each field for itself."""
    steps = {"parallelism": {"every_kind": 2, "dict": 1}} if runner == "process" else {}
    with line(14, every_kind, dict, runner=runner, **steps) as pipeline:
        return [{k: (looks(x), zp.Batch({k: x}, 0, 0, 0, 4).digest()) for k, x in b.items()} for b in pipeline]


@pytest.mark.law("L1")
@pytest.mark.parametrize("runner", ["threads", "process"])
def test_a_value_of_any_kind_is_the_same_under_every_runner(runner: str) -> None:
    for inline, found in zip(looks_by_runner("inline"), looks_by_runner(runner), strict=True):
        assert found.keys() == inline.keys()
        for kind, look in inline.items():
            assert found[kind] == look, kind


def test_a_batch_of_many_samples_with_child_paths() -> None:
    """Its description is longer than a message between the processes may be."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(300)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).flat_map(times).batch(60_000)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1) as running:
        batch = next(iter(running))
        assert batch.num_samples == 60_000
        assert batch.origins[59_999] == [("toy", "list", 299, (199,))]
        assert batch["id"].tolist() == [i for i in range(300) for _ in range(200)]


def test_very_many_lanes_that_end_while_no_one_reads() -> None:
    """The ends of 2,400 lanes are more words than the socket holds, and the trainer is busy."""
    lanes = 2400
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(lanes)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], chunk_size=1))
    for _ in range(60):
        pipeline = pipeline.filter(bool)  # each has a count in the state that comes with an end
    pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=lanes, task_records=64)
    with pipeline.batch(1) as running:
        iterator = iter(running)
        found = ids(islice(iterator, lanes - 3))
        rests(engine())
        assert sorted(found + ids(iterator)) == list(range(lanes))


# -- case A16: random numbers ----------------------------------------------------------------------------------------


def test_global_random_numbers_differ_per_worker_and_leave_the_trainer_alone() -> None:
    state, python = np.random.get_state(), random.getstate()
    with line(200, draw, batch=1, task_records=1, parallelism=4) as pipeline:
        first: dict[int, tuple[float, float]] = {}
        for batch in pipeline:
            first.setdefault(int(batch["pid"][0]), (float(batch["numpy"][0]), float(batch["python"][0])))
    assert len(first) > 1
    for draws in zip(*first.values(), strict=True):
        assert len(set(draws)) == len(first)
    assert all(np.array_equal(a, b) for a, b in zip(state, np.random.get_state(), strict=True))
    assert python == random.getstate()


@pytest.mark.slow
@pytest.mark.torch
def test_torchs_random_numbers_differ_per_worker() -> None:
    pytest.importorskip("torch")
    code = """
import torch
import zephon as zp
from tests.process.functions import draw_torch
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(300)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset])).map(lambda r: draw_torch({**r, "t": torch.zeros(1)})).batch(1)
first = {}
for batch in pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=1):
    first.setdefault(int(batch["pid"][0]), float(batch["torch"][0]))
assert len(first) == len(set(first.values())) == 2, first
"""
    assert draw_torch({"id": 0})["torch"] != draw_torch({"id": 0})["torch"]
    status, _, err = run_script(code)
    assert status == 0, err


def test_an_rng_parameter_depends_on_the_record_alone() -> None:
    def jitter(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**record, "draws": rng.integers(2**31, size=3)}

    found = {}
    for options in ({"runner": "inline"}, {"parallelism": 1}, {"parallelism": 4, "task_records": 1}):
        with line(64, jitter, **options) as pipeline:
            found[str(options)] = [batch["draws"].tolist() for batch in pipeline]
    assert len({str(draws) for draws in found.values()}) == 1

"""Case A6: zero-size, 0-d and oddly strided arrays come out as they went in, contiguous and owned by the receiver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .helpers import ids, on, pipeline

A = np.arange(24).reshape(4, 6)
READ_ONLY = A.copy()
READ_ONLY.flags.writeable = False
ARRAYS: list[Any] = [
    np.float32(3.5),
    np.array(7),
    np.empty((0,), "i4"),
    np.empty((0, 5)),
    np.empty((3, 0)),
    A[::-1],
    A.T,
    A[:, ::2],
    np.zeros((1, 3))[::-1],
    np.broadcast_to(np.arange(3), (4, 3)),
    np.asfortranarray(A),
    A.astype(">i8"),
    np.array([True, False]),
    np.array([1 + 2j]),
    READ_ONLY,
    # near neighbours
    np.array(True),
    np.array(-0.0),
    np.array([1.5, np.nan, np.inf], np.float16),
    np.uint64(2**64 - 1),
    np.array([2**63], np.uint64),
    np.empty((0, 0, 2), ">f4"),
    np.arange(6, dtype=">u2").reshape(2, 3).T[::-1],
    np.array([[1]], "<i2")[:, ::-1],
    np.array("2024-01-31", "datetime64[D]"),
    np.array(["a", "bcd"]),
    np.array([b"x", b"yz"]),
    np.array(">", ">U1"),
    np.lib.stride_tricks.sliding_window_view(np.arange(5), 3),
    np.array([(1, 2.5)], dtype=[("a", ">i4"), ("b", "<f8")]),
]
ROWS = len(ARRAYS)


def with_array(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"], "x": ARRAYS[record["id"]]}


def check(x: Any, expected: Any) -> None:
    """One delivered array beside what was put in."""
    expected = np.asarray(expected)
    assert isinstance(x, np.ndarray)
    assert x.shape == expected.shape
    assert x.dtype == expected.dtype.newbyteorder("=")
    assert x.dtype.isnative
    assert x.tobytes() == np.ascontiguousarray(expected.astype(x.dtype)).tobytes()
    assert x.flags.c_contiguous
    assert min(x.strides, default=0) >= 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_every_array_survives(workers: int, batched: bool) -> None:
    line = on(pipeline(ROWS).map(with_array), workers)
    batches = list(line.batch(1) if batched else line)
    assert ids(batches) == list(range(ROWS))
    for batch, expected in zip(batches, ARRAYS, strict=True):
        assert batch["x"].shape[0] == 1
        assert batch["x"].flags.writeable
        check(batch["x"][0, ...], expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_array_survives_a_later_stage(workers: int) -> None:
    """Behind an accumulator a record crosses a second time."""
    line = pipeline(ROWS).map(with_array).map_batches(list, 4).map(dict)
    for batch, expected in zip(on(line, workers), ARRAYS, strict=True):
        check(batch["x"][0, ...], expected)


def test_every_array_survives_a_list_of_records() -> None:
    records = [{"id": i, "x": array} for i, array in enumerate(ARRAYS)]
    for batch, expected in zip(pipeline(records), ARRAYS, strict=True):
        check(batch["x"][0, ...], expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_writing_in_one_batch_changes_no_other(workers: int) -> None:
    shared = np.arange(6).reshape(2, 3)
    line = on(pipeline(12).map(lambda record: {**record, "x": shared}, version="1"), workers)
    for size in (1, 3):
        for batch in line.batch(size):
            assert (batch["x"] == np.arange(6).reshape(2, 3)).all()
            batch["x"][...] = -1
            batch["id"][...] = -1
    assert (shared == np.arange(6).reshape(2, 3)).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_of_several_shapes_are_owned_and_contiguous_too(workers: int) -> None:
    """Where shapes differ a field is a list; its arrays obey the same rules."""
    whole = np.arange(12, dtype=">i4")

    def ragged(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "x": whole[: record["id"] + 1][::-1]}

    for batch in on(pipeline(6).map(ragged, version="1").batch(3), workers):
        assert isinstance(batch["x"], list)
        for i, x in zip(batch["id"].tolist(), batch["x"], strict=True):
            check(x, np.arange(12)[: i + 1][::-1].astype(">i4"))
            x[...] = -1
    assert (whole == np.arange(12)).all()


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_takes_what_it_has_a_type_for(workers: int) -> None:
    torch = pytest.importorskip("torch")
    line = on(pipeline(ROWS).map(with_array), workers)
    for plain, tensor in zip(line, line.options(output="torch"), strict=True):
        x = plain["x"]
        if x.dtype.kind in "biufc":
            assert torch.equal(torch.from_numpy(x.copy()), tensor["x"]) or np.isnan(x).any()
            assert tensor["x"].is_contiguous()
        else:
            assert isinstance(tensor["x"], np.ndarray)
        assert tensor.digest() == plain.digest()

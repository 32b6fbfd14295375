"""zephon.Batch: a mapping with a digest that nothing but content changes, and the origins of every sample."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp

from .cases.helpers import ids, on, pipeline, rows


def batch_of(**fields: Any) -> zp.Batch:
    return zp.Batch(fields, lane_id=3, step=7, pass_index=1, num_samples=2)


def test_it_is_a_mapping() -> None:
    batch = batch_of(id=np.arange(2), text=["a", "b"])
    assert isinstance(batch, Mapping)
    assert list(batch) == ["id", "text"]
    assert len(batch) == 2
    assert "id" in batch
    assert "x" not in batch
    assert batch.get("x") is None
    assert dict(**batch)["text"] == ["a", "b"]
    assert (batch.lane_id, batch.step, batch.pass_index, batch.num_samples) == (3, 7, 1, 2)
    assert repr(batch) == "Batch(lane_id=3, step=7, pass_index=1, {id: int64[2], text: list[2]})"


def test_an_unknown_field_is_named_beside_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'labels'.*id, text"):
        batch_of(id=np.arange(2), text=["a", "b"])["labels"]


class Sub(np.ndarray[Any, Any]):
    """An array of a class of its own."""


GOLDEN_FIELDS: dict[str, Any] = {
    "bool": np.array([True, False]),
    "float": np.array([[0.5, -0.0], [np.inf, 1e-300]]),
    "int": np.array([-(2**63), 2**63 - 1]),
    "list": [None, zp.MISSING, "é", b"x", 2**70, -1, 0.5, True, [1, (2, 3)], {"b": 1, "a": {3, 1, 2}}],
    "none": np.empty((2, 0), np.float32),
    "text": ["", "日本"],
}
GOLDEN = "c1c65ee1a78e11d445f222e2e8131027bf4747df12d5b57dc300a755c91fada7"

HASHED = """
from tests.test_batch import GOLDEN_FIELDS, batch_of
print(batch_of(**GOLDEN_FIELDS).digest())
"""


def test_the_digest_is_this_one_for_ever() -> None:
    """A changed value here means that digests in people's logs no longer compare: say so in the changelog."""
    assert batch_of(**GOLDEN_FIELDS).digest() == GOLDEN
    found = [
        subprocess.run(
            [sys.executable, "-c", HASHED],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for seed in ("1", "77")
    ]
    assert found == [GOLDEN, GOLDEN]


DIFFERENT: list[dict[str, Any]] = [
    {"x": np.array([1, 2])},
    {"y": np.array([1, 2])},
    {"x": np.array([2, 1])},
    {"x": np.array([1, 2], np.int32)},
    {"x": np.array([1, 2], np.uint64)},
    {"x": np.array([1, 2]).view(np.float64)},
    {"x": np.array([[1, 2]])},
    {"x": np.array([[1], [2]])},
    {"x": np.array([1, 2, 0])},
    {"x": [1, 2]},
    {"x": (np.array([1, 2]),)[0], "y": np.array([])},
    {"x": [1, 2.0]},
    {"x": [1, True]},
    {"x": [True, 2]},
    {"x": ["1", "2"]},
    {"x": [b"1", b"2"]},
    {"x": [1, None]},
    {"x": [1, zp.MISSING]},
    {"x": [[1], 2]},
    {"x": [np.int64(1), np.int64(2)]},
    {"x": [np.array([1]), np.array([2])]},
    {"x": [np.array([1], np.int32), np.array([2], np.int32)]},
    {"x": np.array([0.0])},
    {"x": np.array([-0.0])},
    {"x": np.array([np.nan])},
    {"x": np.array(["1"])},
    {"x": np.array([b"1"])},
    {"x": np.empty((0, 3))},
    {"x": np.empty((3, 0))},
    {"x": np.array([(1, 2)], [("a", "<i4"), ("b", "<i4")])},
    {"x": np.array([(1, 2)], [("a", "<i4"), ("c", "<i4")])},
    {"x": np.array([(1, 2)], [("a", "<i4"), ("b", "<u4")])},
    {},
]


def test_different_content_has_a_different_digest() -> None:
    found: dict[str, int] = {}
    for number, fields in enumerate(DIFFERENT):
        digest = batch_of(**fields).digest()
        assert digest not in found, f"{fields} and {DIFFERENT[found[digest]]}"
        found[digest] = number


SAME: list[tuple[Any, Any]] = [
    (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
    (np.arange(3), np.arange(6)[::2] // 2),
    ([{"a": 1, "b": 2}], [{"b": 2, "a": 1}]),
    ([{1, 2, 3}], [{3, 2, 1}]),
    ([[1, 2]], [(1, 2)]),
    ([b"x"], [bytearray(b"x")]),
    (["ab"], ["".join(["a", "b"])]),
]


@pytest.mark.parametrize("number", range(len(SAME)))
def test_equal_content_has_an_equal_digest(number: int) -> None:
    one, other = SAME[number]
    assert batch_of(x=one).digest() == batch_of(x=other).digest()


INNER = np.dtype([("a", "i1"), ("b", "f8")], align=True)
PADDED: list[Any] = [
    np.dtype(np.longdouble),
    np.dtype(np.clongdouble),
    np.dtype(np.longdouble).newbyteorder(),
    INNER,
    INNER.newbyteorder(),
    np.dtype([("n", "i2"), ("inner", INNER, (2,)), ("x", np.longdouble)]),
    np.dtype({"names": ["b", "a"], "formats": ["i2", "u1"], "offsets": [5, 1], "itemsize": 11}),
    np.dtype((np.record, [("a", "i1"), ("b", "f8")])),
    np.dtype({"names": [], "formats": [], "offsets": [], "itemsize": 4}),
]


def put(target: Any, value: int) -> None:
    """Writes every value of an array, and nothing between them."""
    for name in target.dtype.names or ():
        put(target[name], value)
    if target.dtype.names is None:
        target[...] = value


@pytest.mark.law("L1")
@pytest.mark.parametrize("dtype", PADDED, ids=str)
def test_bytes_between_values_are_not_in_the_digest(dtype: np.dtype[Any]) -> None:
    found: dict[str, set[str]] = {"array": set(), "scalars": set(), "kept": set(), "subclass": set(), "nested": set()}
    for junk in (0, 0xFF, 0x5A):
        array = np.full(6 * dtype.itemsize, junk, np.uint8).view(dtype).reshape(2, 3)
        put(array, 1)
        if dtype.char in "gG" and np.finfo(dtype).nmant == 63:  # its bytes 10 to 15 were written as 0
            parts = array.view(np.uint8).reshape(-1, 16)
            parts[:, 10:] = junk
            array = array if dtype.isnative else parts[:, ::-1].copy().view(dtype).reshape(2, 3)
        before = array.tobytes()
        scalar = np.asarray(array[0, 0])[()]
        found["array"].add(batch_of(x=array).digest())
        found["scalars"].add(batch_of(x=[scalar, [scalar]]).digest())
        found["kept"].add(batch_of(x=[array[:, 1], array.T]).digest())
        found["nested"].add(batch_of(x=[{"x": (array[1:],)}]).digest())
        found["subclass"].add(batch_of(x=[array.view(np.recarray) if dtype.names else array.view(Sub)]).digest())
        assert array.tobytes() == before
    assert {kind: len(digests) for kind, digests in found.items()} == dict.fromkeys(found, 1)
    if dtype.names != ():
        put(array[1], 2)
        assert batch_of(x=array).digest() not in found["array"]
        assert batch_of(x=[{"x": (array[1:],)}]).digest() not in found["nested"]


def test_the_digest_of_text_arrays_is_over_text() -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this numpy has no variable-width text")
    words = ["a", "a word that is longer than what fits into a cell of sixteen bytes"]
    one = np.array(words, np.dtypes.StringDType())
    junk = np.array(["other text of some length, somewhere else"] * 9, np.dtypes.StringDType())
    other = np.array([*words, *junk], np.dtypes.StringDType())[:2]
    assert batch_of(x=one).digest() == batch_of(x=other).digest()


def test_lane_step_and_pass_are_not_in_the_digest() -> None:
    fields = {"x": np.arange(2)}
    assert zp.Batch(fields, 0, 0, 0, 2).digest() == zp.Batch(fields, 3, 9, 1, 2).digest()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_missing_is_one_object(copied: Callable[[Any], Any]) -> None:
    assert copied(zp.MISSING) is zp.MISSING
    assert repr(zp.MISSING) == "MISSING"


def double(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_origins_of_every_kind_of_sample(workers: int) -> None:
    a, b = zp.Dataset.from_list("a", rows(3)), zp.Dataset.from_list("b", rows(3, 10))
    mixture = zp.StaticMixture([a, b], {"a": 1, "b": 1}, shuffle="none", chunk_size=3)
    line = on(zp.Pipeline(mixture).options(canonical_replicas=1, flush_every_k_chunks=2), workers)
    pointers = [mixture.chunk(0, 1, 0, chunk) for chunk in range(2)]
    plain = [("ab"[d], "list", row, ()) for p in pointers for d, row in zip(p.dataset, p.row.tolist(), strict=True)]
    assert sorted(plain) == [(name, "list", row, ()) for name in "ab" for row in range(3)]
    assert [batch.origins for batch in line] == [[[origin]] for origin in plain]
    twice = line.flat_map(lambda record: [record, record]).batch(4)
    children = [(*origin[:3], (n,)) for origin in plain for n in range(2)]
    assert [origin for batch in twice for [origin] in batch.origins] == children
    grouped = line.map_batches(double, 3).batch(4)
    found = [origins for batch in grouped for origins in batch.origins]
    assert found == [[(*o[:3], (n,)) for o in plain[at : at + 3]] for at in (0, 3) for n in range(6)]
    packed = line.map(lambda record: {"input_ids": [record["id"]] * 3}).pack(4).batch(1)
    names = [o[0] + str(o[2]) for o in plain]
    assert [[o[0] + str(o[2]) for o in batch.origins[0]] for batch in packed] == [
        names[0:2], names[1:3], names[2:4], names[4:6], names[5:6],
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_origins_may_be_asked_long_after_the_run(workers: int) -> None:
    with on(pipeline(12).shuffle(5).batch(3), workers) as line:
        kept = list(line)
        more = next(iter(line))
    assert [[origin[2] for [origin] in batch.origins] for batch in kept] == [ids([batch]) for batch in kept]
    assert [origin[2] for [origin] in more.origins] == ids([more])


@pytest.mark.torch
def test_torch_shares_memory_and_keeps_the_rest() -> None:
    torch = pytest.importorskip("torch")
    fields: dict[str, Any] = {
        "ids": np.arange(4).reshape(2, 2),
        "f": np.array([0.5, 1.5], np.float32),
        "b": np.array([True, False]),
        "c": np.array([1j, 2]),
        "none": np.empty((2, 0)),
        "day": np.array(["2024-01-01"] * 2, "M8[D]"),
        "name": np.array(["a", "b"]),
        "text": ["a", "b"],
        "long": np.array([1, 2], np.longdouble),
    }
    plain = batch_of(**fields)
    batch = plain.to_torch()
    assert {name for name, value in batch.items() if isinstance(value, torch.Tensor)} == {"ids", "f", "b", "c", "none"}
    assert [batch["ids"].dtype, batch["f"].dtype, batch["b"].dtype] == [torch.int64, torch.float32, torch.bool]
    assert batch.digest() == plain.digest()
    batch["ids"][0, 0] = 9
    assert plain["ids"][0, 0] == 9
    assert (batch.lane_id, batch.step, batch.pass_index, batch.num_samples) == (3, 7, 1, 2)


@pytest.mark.torch
def test_what_torch_cannot_take_stays_and_copies_are_copies() -> None:
    pytest.importorskip("torch")
    batch = batch_of(big=np.arange(4).astype(">i4"), ids=np.arange(4), text=["a"] * 4).to_torch()
    assert isinstance(batch["big"], np.ndarray)
    copied = batch.copy()
    assert copied.digest() == batch.digest()
    copied["ids"].fill_(7)
    copied["big"][:] = 7
    assert batch["ids"].tolist() == batch["big"].tolist() == [0, 1, 2, 3]


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_output_and_torch_in_records(workers: int) -> None:
    torch = pytest.importorskip("torch")

    def tensors(record: dict[str, Any]) -> dict[str, Any]:
        i = record["id"]
        whole = torch.arange(12).reshape(3, 4)
        return {
            "id": i,
            "scalar": torch.tensor(i),
            "view": whole.T,
            "half": torch.full((2,), i, dtype=torch.float16),
            "grad": torch.zeros(2, requires_grad=True),
            "brain": torch.full((2,), i, dtype=torch.bfloat16),
            "ragged": torch.zeros(i),
        }

    line = on(pipeline(4).map(tensors).batch(4), workers)
    [batch] = line
    assert isinstance(batch["scalar"], np.ndarray)
    assert batch["scalar"].tolist() == [0, 1, 2, 3]
    assert batch["view"].shape == (4, 4, 3)
    assert batch["half"].dtype == np.float16
    assert isinstance(batch["ragged"], list)
    [tensor] = line.options(output="torch")
    assert torch.equal(tensor["view"], torch.arange(12).reshape(3, 4).T.expand(4, 4, 3))
    assert tensor["view"].is_contiguous()
    assert tensor.digest() == batch.digest()
    state = line.options(output="torch").take(1)
    [taken] = state
    assert state.state_dict(after=taken) == state.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_output_without_torch_is_an_error_before_any_batch_counts(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(zp.errors.ConfigError, match=r"torch.*pip install"):
        next(iter(on(pipeline(4), workers).options(output="torch")))

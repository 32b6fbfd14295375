"""Canonical bytes: equal for equal content, different for different content, the same in every process."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import os
import pathlib
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.canonical import canonical_bytes
from zephon.record import MISSING

ROOT = Path(__file__).parents[2]


class Color(enum.IntEnum):
    RED = 1


class Named(set[Any]):
    pass


class Point(msgspec.Struct):
    x: int


DIFFERENT: list[Any] = [
    *[None, True, False, 0, 1, 1.0, 0.0, -0.0, math.inf, math.nan, "1", b"1", [1], {1}, [[1]], [], {}, set(), "", b""],
    *[{"1": 1}, {1: 1}, {True: 1}, {1.0: 1.5}, {"a": 1, "b": 2}, [["a", 1], ["b", 2]], {(1, 2): 3}, {"\ud800": 1}],
    *[2**64 - 1, 2**64, 2**70, -(2**63) - 1, -(2**70), 10**5000, "\ud800", "\udc00", b"\xed\xa0\x80"],
    *[np.float64(1), np.float32(1), np.int64(1), np.bool_(True), np.str_("1"), np.array([1]), np.array([1], ">i8")],
    *[
        np.array([[1]]),
        np.array([1], object),
        np.array([True]),
        np.empty((0, 2)),
        np.empty((2, 0)),
        np.datetime64(1, "s"),
    ],
    *[np.datetime64(1, "ms"), np.zeros(2, [("a", "i4")]), np.zeros(2, [("b", "i4")]), np.array(["a", "b"])],
    *[datetime.datetime(2020, 1, 1), "2020-01-01T00:00:00", datetime.date(2020, 1, 1), datetime.timedelta(1)],
    *[
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        decimal.Decimal("1"),
        decimal.Decimal("1.0"),
        uuid.UUID(int=1),
    ],
    *[
        "00000000-0000-0000-0000-000000000001",
        Color.RED,
        1j,
        fractions.Fraction(1),
        pathlib.PurePosixPath("a"),
        range(3),
    ],
    *[
        collections.OrderedDict(a=1),
        collections.Counter("a"),
        {"a": 1},
        int,
        len,
        [].append,
        MISSING,
        Point(1),
        Point(2),
    ],
    *[msgspec.msgpack.Ext(2, b""), slice(1, 2)],
]


def test_different_values_have_different_bytes() -> None:
    made: dict[bytes, Any] = {}
    for value in DIFFERENT:
        content = canonical_bytes(value)
        assert content not in made, f"{value!r} and {made[content]!r}"
        made[content] = value
        assert canonical_bytes([value]) not in made


def test_equal_content_has_equal_bytes() -> None:
    array = np.arange(24).reshape(4, 6)
    for left, right in [
        ((1, [2, (3,)]), [1, (2, [3])]),
        ({"b": 1, "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": 1}),
        ({3: 1, "a": 2, None: 3}, {None: 3, "a": 2, 3: 1}),
        ({1, "a", (2, 3)}, frozenset([(2, 3), "a", 1])),
        (b"ab", bytearray(b"ab")),
        (b"ab", memoryview(b"ab")),
        (array[::-1].T, np.ascontiguousarray(array[::-1].T)),
        (np.float32(3.5), np.array(3.5, np.float32)),
        ([1, 2**70], (1, 2**70)),
        ({"x": [1, {"a"}]}, {"x": (1, frozenset("a"))}),
        (np.array([[1, 2], "a"], object), np.array([(1, 2), "a"], object)),
    ]:
        assert canonical_bytes(left) == canonical_bytes(right), f"{left!r} and {right!r}"


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(st.text(st.characters()), inner), st.dictionaries(st.integers(), inner)
    ),
    max_leaves=8,
)


@given(plain, plain)
def test_bytes_are_equal_where_the_values_are(left: Any, right: Any) -> None:
    assert (canonical_bytes(left) == canonical_bytes(right)) == (ordered(left) == ordered(right))


def ordered(value: Any) -> str:
    """A text that tells values apart as they should be."""
    if isinstance(value, dict):
        return f"{{{sorted((ordered(key), ordered(item)) for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(ordered, value))}]"
    return f"{type(value).__name__} {value!r}"


def test_a_value_that_holds_itself() -> None:
    def knot(last: int) -> list[Any]:
        ring: list[Any] = [1, {2}, last]
        ring.append(ring)
        return ring

    assert canonical_bytes(knot(3)) == canonical_bytes(knot(3)) != canonical_bytes(knot(4))


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, [{"f": lambda: 0}]])
def test_what_cannot_be_encoded_raises_as_pickle_does(value: Any) -> None:
    with pytest.raises(Exception, match="pickle"):
        canonical_bytes(value)


@pytest.mark.torch
def test_a_tensor_is_its_content() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(12.0).reshape(3, 4)
    assert canonical_bytes(whole[:, 1]) == canonical_bytes(whole[:, 1].clone())
    assert canonical_bytes(whole[:, 1]) != canonical_bytes(whole[:, 2])
    assert canonical_bytes(whole) != canonical_bytes(whole.numpy())


SCRIPT = """
import collections, dataclasses, datetime, decimal, enum, fractions, pathlib, sys, uuid
import numpy as np
from zephon.canonical import canonical_bytes
words = ["the", "a", "of", "and", "to", "in", "word"]
class Set(set): pass
@dataclasses.dataclass
class Data:
    words: set
value = [set(words), {frozenset(words): 1, 2: {"x": set(words)}}, Set(words), Data(set(words)),
    np.array([set(words), 1], object),
    datetime.datetime(2020, 1, 1), decimal.Decimal("1.0"), uuid.UUID(int=7), fractions.Fraction(1, 3), range(3), 1j,
    pathlib.PurePosixPath("a/b"), collections.Counter(words), int, len, 2**90, np.float32(2)]
print(canonical_bytes(value).hex())
"""


def test_bytes_are_the_same_in_every_process() -> None:
    outputs = set()
    for seed in ("0", "1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, capture_output=True, text=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_the_bytes_do_not_change_from_version_to_version() -> None:
    value = {"b": [True, 1, 1.5, "x", b"y", None], "a": np.array([1, 2], "<i2"), "c": {3, "z"}, "d": 2**65}
    assert (
        canonical_bytes(value).hex()
        == (
            "84"  # a map of four
            "a161c7130193a93c693220696e743136" + "9102c40401000200"  # a: extension 1, '<i2 int16', [2], the bytes
            "a16296c301cb3ff8000000000000a178c40179c0"  # b: six plain values
            "a163d70292c40103c402a17a"  # c: extension 2, the members' encodings
            "a164c70904020000000000000000"  # d: extension 4, big-endian two's complement
        )
    )

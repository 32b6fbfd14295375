"""Plain data: what is taken comes back as it was, what would not is refused with its place."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.ops.plain import MAX_DEPTH, encode_plain, has_nan

NAN = math.nan
ONE: list[int] = [1]
EMPTY: dict[str, int] = {}
CYCLE: list[Any] = [1]
CYCLE.append({"again": CYCLE})


@dataclasses.dataclass
class Point:
    x: int = 0


class Struct(msgspec.Struct):
    x: int = 0


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1}, r"state is of type set, which would come back as a list"),
        ((1, 2), r"state is of type tuple"),
        (Point(), r"state is of type Point"),
        (collections.Counter(a=1), r"state is of type Counter, which would come back as something else, or not at all"),
        (collections.defaultdict(int), r"state is of type defaultdict"),
        (collections.OrderedDict(a=1), r"state is of type OrderedDict"),
        ({"a": {"b": [0, {1}]}}, r"state\['a'\]\['b'\]\[1\] is of type set"),
        ({"a": {"b": {"c": frozenset()}}}, r"state\['a'\]\['b'\]\['c'\] is of type frozenset"),
        ({3: [[[(1, 2)]]]}, r"state\[3\]\[0\]\[0\]\[0\] is of type tuple"),
        ([{"a": [Point()]}], r"state\[0\]\['a'\]\[0\] is of type Point"),
        ([[Struct()]], r"state\[0\]\[0\] is of type Struct"),
        ([collections.deque([1])], r"state\[0\] is of type deque"),
        ({"t": datetime.datetime(2020, 1, 1)}, r"state\['t'\] is of type datetime"),
        ({"t": datetime.timedelta(1)}, r"state\['t'\] is of type timedelta"),
        ([Colour.RED], r"state\[0\] is of type Colour"),
        ([Text("a")], r"state\[0\] is of type Text"),
        ([bytearray(b"a")], r"state\[0\] is of type bytearray"),
        ([memoryview(b"a")], r"state\[0\] is of type memoryview"),
        ([np.float64(1)], r"state\[0\] is of type float64"),
        ([np.arange(2)], r"state\[0\] is of type ndarray"),
        ([1j], r"state\[0\] is of type complex"),
        ({"a": {frozenset({1}): 1}}, r"state\['a'\] has a key that is of type frozenset"),
        ({(1, (Colour.RED,)): 1}, r"state has a key that is of type Colour"),
        ({Text("a"): 1}, r"state has a key that is of type Text"),
        ([{NAN: 1}], r"state\[0\] has a key that is or holds NaN"),
        ({("x", (NAN,)): 1}, r"state has a key that is or holds NaN"),
        ({"a": ONE, "b": [ONE]}, r"state\['a'\] and state\['b'\]\[0\] are one list, which would come back as two"),
        ([EMPTY, EMPTY], r"state\[0\] and state\[1\] are one dict"),
        (CYCLE, r"state and state\[1\]\['again'\] are one list"),
        (deep(MAX_DEPTH + 1), r"state.* lies in 100 lists and dicts"),
        ({"a": [2**64]}, r"state\['a'\]\[0\] is a whole number beyond 64 bits"),
        ({"a": -(2**63) - 1}, r"state\['a'\] is a whole number beyond 64 bits"),
        ({2**70: 1}, r"state has a key that is a whole number beyond"),
        ({"a": ["é\ud800"]}, r"state\['a'\]\[0\] is text with half a surrogate pair"),
    ],
)
def test_what_would_not_come_back_is_told_with_its_place(value: Any, says: str) -> None:
    with pytest.raises(TypeError, match="^" + says):
        encode_plain(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [[], [], {}, {}],
        {"nan": NAN, "inf": [math.inf]},
        {(): 1, (1, ("a", b"b", None, True, 0.5)): [2**64 - 1, -(2**63)]},
        {2: "b", 1: "a"},
        deep(MAX_DEPTH),
        ["a"] * 3,
    ],
)
def test_what_is_plain_comes_back(value: Any) -> None:
    assert shape(msgspec.msgpack.decode(encode_plain(value))) == shape(value)


def shape(value: Any) -> Any:
    """A value with its types, the order of its dicts, and which of its lists and dicts are one, for comparison."""
    seen: list[int] = []

    def of(item: Any) -> Any:
        kind = type(item).__name__
        if isinstance(item, (list, tuple, dict, set, frozenset)):
            if isinstance(item, (list, dict)) and id(item) in seen:
                return "again", seen.index(id(item))
            seen.append(id(item))
        if isinstance(item, dict):
            return kind, [(of(key), of(inner)) for key, inner in item.items()]
        if isinstance(item, (list, tuple)):
            return kind, [of(inner) for inner in item]
        return kind, repr(item)

    return of(value)


KEYS = st.recursive(
    st.sampled_from([None, True, 1, -1, "a", "é", b"a", 0.5, Colour.RED, frozenset({1}), 2**64, "\ud800"]),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
SHARED: list[Any] = [0]
VALUES = st.recursive(
    st.one_of(KEYS, st.sampled_from([NAN, {1}, np.float64(1), collections.Counter("a"), SHARED, Point])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


@pytest.mark.law("L3")
@given(value=VALUES)
def test_any_value_comes_back_or_is_refused(value: Any) -> None:
    try:
        raw = encode_plain(value)
    except TypeError:
        return
    assert shape(msgspec.msgpack.decode(raw)) == shape(value)


def test_nan_is_found_in_tuples() -> None:
    assert has_nan(NAN)
    assert has_nan((1, ("a", (NAN,))))
    assert not has_nan((1, "nan", math.inf, None, (0.5,)))

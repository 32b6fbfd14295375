"""Values of records of every kind, for hypothesis, and what it means for two of them to be the same."""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import zephon as zp
from tests.ipc.kinds import Color, Number, Point, Text

Strategy = st.SearchStrategy[Any]


TEXT = st.text(st.characters(), max_size=6)  # with lone surrogates, nulls and what is outside of the first plane
SCALARS: Strategy = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**63 - 1, -(2**63), 2**63, 2**64]),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(max_size=6),
    st.sampled_from(
        [zp.MISSING, Color.RED, Text("t"), Number(3), ..., decimal.Decimal("1.50"), bytearray(b"b"), 1 << 200, b"", ""]
    ),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
)
SIMPLE_DTYPES = st.sampled_from(
    [
        "?",
        "i1",
        "u2",
        ">i4",
        "i8",
        "u8",
        "f2",
        "f4",
        ">f8",
        "c8",
        "U3",
        ">U2",
        "S3",
        "M8[s]",
        "M8[25s]",
        ">M8[ns]",
        "m8[D]",
    ]
)
NUMPY_SCALARS: Strategy = st.one_of(
    SIMPLE_DTYPES.flatmap(lambda name: hnp.arrays(name, ()).map(lambda array: array[()])),
    st.sampled_from(
        [np.str_("a"), np.str_("abcdef"), np.bytes_(b"x"), np.bytes_(b"long"), np.void(b"ab"), np.void(b"c")]
    ),
    st.sampled_from(
        [np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-01T00:00:01", "s"), np.datetime64("NaT")]
    ),
    st.sampled_from([np.timedelta64(1, "D"), np.timedelta64(1, "s"), np.longdouble("1.1"), np.bool_(True)]),
)
OBJECTS: Strategy = st.sampled_from(
    [
        np.array([1, None, "x"], object),
        np.array([[None]], object),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
        np.zeros((), [("a", ">i4"), ("b", "S2", (2,))]),
        np.zeros(2, [("a", "i4"), ("b", "f8")])[0],
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, "a")], dtype=[("n", "i4"), ("s", "U1")]),
        np.array(["a", "longer"], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.array(["a"]),
        np.zeros(2, np.dtype("i4", align=True)),
        np.zeros((2, 0), "U1"),
        np.zeros(3, "V2"),
    ]
)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Arrays of any simple dtype and shape, also 0-d and empty, in any order and stride."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = draw(hnp.arrays(draw(SIMPLE_DTYPES), shape))
    view = draw(
        st.sampled_from(["as is", "reversed", "transposed", "every second", "Fortran", "read-only", "broadcast"])
    )
    if view == "reversed":
        return array[tuple(slice(None, None, -1) for _ in shape)]
    if view == "transposed":
        return array.T
    if view == "every second":
        return array[..., ::2] if shape else array
    if view == "Fortran":
        return np.asfortranarray(array)
    if view == "broadcast":
        return np.broadcast_to(array, (2, *shape))
    if view == "read-only":
        array.flags.writeable = False
    return array


VALUES: Strategy = st.recursive(
    st.one_of(SCALARS, NUMPY_SCALARS, arrays(), OBJECTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, st.integers(), inner),
        st.dictionaries(st.one_of(TEXT, st.integers(), st.tuples(TEXT)), inner, max_size=3),
        st.builds(lambda value: OrderedDict(b=value, a=1), inner),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=4,
)


@st.composite
def uniform_columns(draw: st.DrawFn, rows: int) -> list[Any]:
    """One field of `rows` records, of one kind, so that it takes the short way."""
    kind = draw(st.sampled_from(["bool", "int", "float", "str", "bytes", "array", "ragged", "numpy scalar", "any"]))
    if kind == "array":
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
        one = hnp.arrays(draw(SIMPLE_DTYPES), shape)
    elif kind == "ragged":
        dtype, rest = draw(SIMPLE_DTYPES), draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
        one = st.integers(0, 4).flatmap(lambda length: hnp.arrays(dtype, (length, *rest)))
    elif kind == "numpy scalar":
        dtype = draw(SIMPLE_DTYPES)
        one = hnp.arrays(dtype, ()).map(lambda array: array[()])
    else:
        one = {
            "bool": st.booleans(),
            "int": st.one_of(st.integers(-9, 9), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**65), 2**65)),
            "float": st.floats(),
            "str": TEXT,
            "bytes": st.binary(max_size=5),
            "any": VALUES,
        }[kind]
    return [draw(one) for _ in range(rows)]


NAMES: Strategy = st.one_of(st.sampled_from(["id", "text", "x"]), st.text(st.characters(), max_size=3))


@st.composite
def record_lists(draw: st.DrawFn, string_names: bool = False) -> list[dict[Any, Any]]:
    """Up to 6 records: mostly of one kind, sometimes with different fields, other orders, odd names, subclasses."""
    rows = draw(st.integers(1, 6))
    names = NAMES if string_names else st.one_of(NAMES, st.sampled_from([1, None, (1, "a"), b"k", np.str_("n")]))
    fields = draw(st.lists(names, max_size=4, unique_by=repr))
    columns = {name: draw(uniform_columns(rows)) for name in fields}
    records = [{name: column[i] for name, column in columns.items()} for i in range(rows)]
    change = draw(st.sampled_from(["none", "none", "a field less", "a field more", "another order", "a subclass"]))
    at = draw(st.integers(0, rows - 1))
    if change == "a field less" and fields:
        del records[at][fields[0]]
    elif change == "a field more":
        records[at]["more"] = draw(VALUES)
    elif change == "another order":
        records[at] = dict(reversed(records[at].items()))
    elif change == "a subclass":
        records[at] = OrderedDict(records[at])
    return records


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same in all but strides, owners and byte order (which numpy's pickle gives up)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ma.MaskedArray):
        return same(a.data, b.data) and same(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
    if isinstance(a, (np.ndarray, np.generic)):
        return _native(a.dtype) == _native(b.dtype) and a.shape == b.shape and _same_items(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b) or a is b


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.kind in "OT" else dtype.newbyteorder("=")


def _same_items(a: Any, b: Any) -> bool:
    if a.dtype.kind == "O":
        return all(map(same, a.reshape(-1).tolist(), b.reshape(-1).tolist()))
    if a.dtype.kind in "TUgG":  # text in place, and numbers with padding in them
        return bool(np.array_equal(a, b)) or a.tolist() == b.tolist()
    native = _native(a.dtype)
    return bool(np.asarray(a).astype(native).tobytes() == np.asarray(b).astype(native).tobytes())

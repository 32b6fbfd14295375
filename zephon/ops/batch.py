"""batch: samples of one lane stacked along a new first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zephon.ops.base import Node, check_count
from zephon.record import MISSING, Group, Handles, Record, record_of

Segment = tuple[Handles, int, int]
"""(samples, start, stop): a run of samples, as handles."""


class Batch(Node):
    """`size` samples a batch. The rest of a lane is a shorter batch at its end, or is dropped and counted."""

    method = "batch"

    def __init__(self, size: int, drop_last: bool = False, name: str | None = None) -> None:
        self.size = check_count("size", size, self.method)
        self.drop_last = bool(drop_last)
        self.name = name
        self.reasons = ("drop_last",) if drop_last else ()

    def settings(self) -> dict[str, Any]:
        return {"type": self.method, "size": self.size, "drop_last": self.drop_last}


def collate(segments: list[Segment], empty: Callable[..., Any] = np.empty) -> dict[str, Any]:
    """The fields of a batch, sorted by name. `empty(shape, dtype)` gives the memory that arrays are written to."""
    handles = [samples[i] for samples, start, stop in segments for i in range(start, stop)]
    first = handles[0]
    if isinstance(first, Group) and hasattr(first.op, "collate"):
        groups = [cast(Group, handle).pieces() for handle in handles]  # one chain made them all
        columns: dict[str, Any] = first.op.collate(groups, empty)
        return {name: columns[name] for name in sorted(columns)}
    return stack_records([record_of(handle) for handle in handles], empty)


def stack_records(records: list[Record], empty: Callable[..., Any] = np.empty) -> dict[str, Any]:
    """Columns of records: an array where every record has the field with one dtype and shape, else a list.

    Python's bool, int and float count as bool, int64 and float64. An absent value in a list is `zephon.MISSING`.
    Arrays are C-contiguous, in native byte order, and share no memory with the records.
    """
    names = set(records[0])
    for record in records:
        names.update(record)
    return {name: _column([r.get(name, MISSING) for r in records], empty) for name in sorted(names, key=str)}


_SCALARS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64}


def _column(values: list[Any], empty: Callable[..., Any]) -> NDArray[Any] | list[Any]:
    kind = type(values[0])
    if kind in _SCALARS:
        if any(type(v) is not kind for v in values):
            return values
        try:
            column = empty(len(values), _SCALARS[kind])
            column[:] = values
        except OverflowError:  # a whole number beyond 64 bits
            return values
        return column  # type: ignore[no-any-return]
    arrays = [_as_array(v) for v in values]
    first = arrays[0]
    if first is None or any(a is None or a.dtype != first.dtype or a.shape != first.shape for a in arrays):
        return values
    column = empty((len(values), *first.shape), first.dtype.newbyteorder("="))
    for i, array in enumerate(arrays):
        column[i] = array
    return column  # type: ignore[no-any-return]


def _as_array(value: Any) -> NDArray[Any] | None:
    """A numpy array or scalar, or what can be seen as one without loss (a CPU tensor); None for anything else."""
    if not isinstance(value, (np.ndarray, np.generic)):
        if not (hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "shape")):
            return None
        try:
            value = np.asarray(value)
        except Exception:
            return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else array

"""batch: samples of one lane stacked along a new first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.ops.base import Node, check_count
from zephon.record import MISSING, Block, Group, Handles, Record, record_of

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


class Formatter(Node):
    """A step behind `batch`: makes other fields of those of a whole batch, where the batch is made."""

    def format(self, fields: dict[str, Any], empty: Callable[..., Any]) -> dict[str, Any]:
        """The new fields. `empty(shape, dtype)` gives the memory for arrays. It may be called again for one batch."""
        raise ConfigError(f"{type(self).__qualname__} must define format(self, fields, empty)")


def collate(
    segments: list[Segment], empty: Callable[..., Any] = np.empty, formatters: Sequence[Formatter] = ()
) -> dict[str, Any]:
    """The fields of a batch, sorted by name. `empty(shape, dtype)` gives the memory that arrays are written to."""
    # What a formatter is about to make anew is put together in memory of its own, so that a slot holds no leftovers.
    fields = _collate(segments, np.empty if formatters else empty)
    return apply_formatters(fields, formatters, empty)


def apply_formatters(
    fields: dict[str, Any], formatters: Sequence[Formatter], empty: Callable[..., Any] = np.empty
) -> dict[str, Any]:
    """The fields behind the formatters, sorted by name."""
    for formatter in formatters:
        made = formatter.format(fields, empty)
        fields = {name: made[name] for name in sorted(made)}
    return fields


def _collate(segments: list[Segment], empty: Callable[..., Any]) -> dict[str, Any]:
    fields = _collate_blocks(segments, empty)
    if fields is not None:
        return {name: fields[name] for name in sorted(fields)}
    handles = [samples[i] for samples, start, stop in segments for i in range(start, stop)]
    first = handles[0]
    if isinstance(first, Group) and hasattr(first.op, "collate"):  # one chain made them all
        columns: dict[str, Any] = first.op.collate([cast(Group, handle).parts for handle in handles], empty)
        return {name: columns[name] for name in sorted(columns)}
    return stack_records([record_of(handle) for handle in handles], empty)


def _collate_blocks(segments: list[Segment], empty: Callable[..., Any]) -> dict[str, Any] | None:
    """Where all samples are records that stand in columns, what their own `collate` makes of these; else None."""
    first = segments[0][0]
    collate_columns = getattr(first.records, "collate", None) if isinstance(first, Block) else None
    if collate_columns is None or not all(isinstance(samples, Block) for samples, _, _ in segments):
        return None
    pieces = [(cast(Block, samples).records, start, stop) for samples, start, stop in segments]
    return cast("dict[str, Any] | None", collate_columns(pieces, empty))


def stacking_of(segments: list[Segment]) -> Any:
    """What decides how the fields of a batch are made; None where that is more than copying. See `ipc.columns`.

    Batches of equal stacking, collated as one, are the same batches end to end.
    """
    kinds = {
        getattr(samples.records, "stacking", None) if isinstance(samples, Block) else None for samples, _, _ in segments
    }
    return kinds.pop() if len(kinds) == 1 else None


def stack_records(records: list[Record], empty: Callable[..., Any] = np.empty) -> dict[str, Any]:
    """Columns of records: an array where every record has the field with one dtype and shape, else a list.

    Python's bool, int and float count as bool, int64 and float64. An absent value in a list is `zephon.MISSING`.
    Arrays are C-contiguous, in native byte order, and share no memory with the records.
    """
    names = set(records[0])
    for record in records:
        names.update(record)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"field names must be strings; the records have {sorted(map(repr, names))}")
    return {name: stack_values([r.get(name, MISSING) for r in records], empty) for name in sorted(names)}


_SCALARS: dict[type, Any] = {bool: np.bool_, int: np.int64, float: np.float64}


def stack_values(values: list[Any], empty: Callable[..., Any]) -> NDArray[Any] | list[Any]:
    """One field of a batch: an array where the values agree in dtype and shape, else the list."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in _SCALARS:
        try:
            column = empty(len(values), _SCALARS[kind])
            column[:] = values
        except OverflowError:  # a whole number beyond 64 bits
            return values
        return cast("NDArray[Any]", column)
    arrays = [_as_array(v) for v in values]
    first = arrays[0]
    if first is None:
        return [_own(v) for v in values]
    dtype = first.dtype.newbyteorder("=")
    if any(a is None or a.dtype.newbyteorder("=") != dtype or a.shape != first.shape for a in arrays):
        return [_own(v) for v in values]
    column = empty((len(values), *first.shape), dtype)
    for i, array in enumerate(arrays):
        column[i] = array
    return cast("NDArray[Any]", column)


def _own(value: Any) -> Any:
    """A value of a list field; an array as one of its own, C-contiguous and in native byte order."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return value
    return np.array(value, value.dtype.newbyteorder("="), order="C", copy=True)


def _as_array(value: Any) -> NDArray[Any] | None:
    """A number or array, or what can be seen as one without loss (a CPU tensor); None for anything else."""
    if type(value) in _SCALARS:
        try:
            return np.asarray(value, _SCALARS[type(value)])
        except OverflowError:
            return None
    if not isinstance(value, (np.ndarray, np.generic)):
        if not (hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "shape")):
            return None
        try:
            value = np.asarray(value)
        except Exception:
            return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else array

"""What becomes of the documents of a sequence: laid end to end in arrays of one length, or kept whole in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.ops.accumulator import Part
from zephon.ops.base import fits, token_ids
from zephon.ops.batch import stack_records
from zephon.record import Group, Record, record_of

Columns = dict[str, Any]
Flat = tuple[NDArray[Any], Sequence[int]]
"""The values of records end to end, and where each begins."""

LOSS_MASK = "loss_mask"
TOKENS = "input_ids"
_INT64 = np.dtype(np.int64)
_MADE = (TOKENS, "position_ids", "segment_ids", "num_pad")

Values = Callable[[str, int], list[Any]]
"""(field of the documents, number of a sequence): what stands there in that sequence, as few arrays."""


def pads_of(fields: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The value of padding of each field that is packed along, as a numpy scalar: its dtype is the field's."""
    if isinstance(fields, str):
        raise ConfigError(f"pack(fields={fields!r}): a tuple of names is wanted, or a dict of names and pad values")
    wanted = dict(fields) if isinstance(fields, Mapping) else dict.fromkeys(fields, 0)
    pads = {}
    for name, value in wanted.items():
        if not isinstance(name, str) or name in _MADE:
            raise ConfigError(f"pack(fields=...): {name!r} cannot be packed along; pack makes {', '.join(_MADE)}")
        pad = value if isinstance(value, np.generic) else np.asarray(value)[()]
        if not isinstance(pad, np.generic) or pad.dtype.kind not in "biuf":
            raise ConfigError(f"pack(fields=...): the padding of {name!r} must be a number or a bool, not {value!r}")
        pads[name] = pad
    return {name: pads[name] for name in sorted(pads)}


class FlatSequences:
    """Arrays of `max_length`: the tokens, and the fields that have a value for each of them."""

    def __init__(self, max_length: int, field: str, pad_id: int, pads: dict[str, Any], loss_mask: bool | None) -> None:
        self.max_length, self.field, self.pad_id = max_length, field, pad_id
        self.pads, self.loss_mask = pads, loss_mask
        self.masks = LOSS_MASK not in pads and loss_mask is not False  # where documents have one
        self.reads: tuple[str, ...] | None = (field, *pads, *([LOSS_MASK] if self.masks else ()))

    def measure(self, record: Record) -> int:
        """The number of tokens. Raises where the record has not one value of each field for each of them."""
        ids = record.get(self.field)
        if not (type(ids) is np.ndarray and ids.dtype is _INT64 and ids.ndim == 1):  # as tokenize gives them
            if self.field not in record:
                raise KeyError(f"no field {self.field!r}; the record has {sorted(map(str, record))}; tokenize first")
            ids = token_ids(ids)
        length = len(ids)
        if self.pads:
            for name, pad in self.pads.items():
                self._check(record, name, pad.dtype, length)
        if self.masks and LOSS_MASK in record:
            self._check(record, LOSS_MASK, np.dtype(bool), length)
        return length

    def _check(self, record: Record, name: str, dtype: np.dtype[Any], length: int) -> None:
        if name not in record:
            raise KeyError(f"no field {name!r}, which is packed along; the record has {sorted(map(str, record))}")
        values = np.asarray(record[name])
        if values.ndim != 1 or len(values) != length:
            raise ValueError(
                f"{name!r} has the shape {values.shape} and {self.field!r} {length:,} tokens; a field that is packed "
                "along has one value for each token"
            )
        if length and not fits(values, dtype):
            raise TypeError(
                f"{name!r} holds {values.dtype} values that do not fit {dtype}; a field has the dtype of its pad "
                f"value, so give another one: pack(fields={{{name!r}: ...}})"
            )

    def length(self, parts: list[Part]) -> int:
        """The measured length of a sequence."""
        return self.max_length

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        """One sequence."""
        has_mask = [self.masks and LOSS_MASK in record for record, _, _ in parts]

        def values(name: str, _: int) -> list[Any]:
            if name == LOSS_MASK and self.masks:
                return [r[name][a:b] if has else _ones(b - a) for has, (r, a, b) in zip(has_mask, parts, strict=True)]
            return [record[name][a:b] for record, a, b in parts]

        columns = self._lay_out([parts], values, any(has_mask), np.empty)
        record: Record = {name: column[0] for name, column in columns.items()}
        return {**record, "num_pad": int(record["num_pad"])}

    def collate(self, groups: list[list[Part]], empty: Callable[..., Any]) -> Columns:
        """The batch of these sequences, parts being (handle, start, stop): payload is copied once, to its place."""
        reader = _Reader(groups)
        has_mask = reader.has(LOSS_MASK) if self.masks else False
        if has_mask is None:  # some documents have one: it is made sequence by sequence
            return stack_records([self.build([(record_of(h), a, b) for h, a, b in parts]) for parts in groups], empty)
        return self._lay_out(groups, reader.values, has_mask, empty)

    def _lay_out(self, groups: list[list[Any]], values: Values, has_mask: bool, empty: Callable[..., Any]) -> Columns:
        """The fields of sequences: their values, and the parts that these come from."""
        shape = (len(groups), self.max_length)
        columns = {name: empty(shape, np.int64) for name in (TOKENS, "position_ids", "segment_ids")}
        columns["num_pad"] = empty(len(groups), np.int64)
        lengths: list[int] = []
        segments: list[int] = []
        ends: list[int] = []
        for i, parts in enumerate(groups):
            lengths += [stop - start for _, start, stop in parts]
            segments += range(1, len(parts) + 1)
            filled = _join(values(self.field, i), columns[TOKENS][i])
            columns[TOKENS][i, filled:] = self.pad_id
            ends.append(filled)
            lengths.append(self.max_length - filled)
            segments.append(0)
        columns["num_pad"][:] = self.max_length - np.array(ends)
        sizes = np.array(lengths)
        starts = np.cumsum(sizes) - sizes
        columns["segment_ids"].reshape(-1)[:] = np.repeat(segments, sizes)
        positions = columns["position_ids"].reshape(-1)
        np.subtract(np.arange(len(positions)), np.repeat(starts, sizes), out=positions)
        for row, end in enumerate(ends):
            columns["position_ids"][row, end:] = 0
        pads = {**self.pads, LOSS_MASK: np.bool_(False)} if has_mask else self.pads
        for name, pad in pads.items():
            columns[name] = empty(shape, pad.dtype)
            for row, end in enumerate(ends):
                _join(values(name, row), columns[name][row])
                columns[name][row, end:] = pad
        if self.masks and self.loss_mask and not has_mask:  # asked for, and no document has one
            columns[LOSS_MASK] = empty(shape, np.bool_)
            np.not_equal(columns["segment_ids"], 0, out=columns[LOSS_MASK])
        return columns


class ListSequences:
    """The documents of a sequence as they are: {"records": [...], "num_pad": n}."""

    reads: tuple[str, ...] | None = None

    def __init__(self, max_length: int, measured: str | Callable[[Record], Any]) -> None:
        self.max_length, self.measured = max_length, measured

    def measure(self, record: Record) -> int:
        """What the function or the field says: a whole number, or something that has a length."""
        name = self.measured
        if callable(name):
            length = name(record)
        elif name not in record:
            raise KeyError(f"no field {name!r} to tell a length; the record has {sorted(map(str, record))}")
        else:
            length = record[name]
            length = len(length) if hasattr(length, "__len__") and not isinstance(length, (str, bytes)) else length
        if isinstance(length, (bool, np.bool_)) or not isinstance(length, (int, np.integer)) or length < 0:
            raise TypeError(f"the length of a record must be a whole number of at least 0, not {length!r}")
        return int(length)

    def length(self, parts: list[Part]) -> int:
        """The measured length of a sequence."""
        return sum(stop - start for _, start, stop in parts)

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        """One sequence."""
        units = sum(stop - start for _, start, stop in parts)
        return {"records": [record for record, _, _ in parts], "num_pad": self.max_length - units}

    def collate(self, groups: list[list[Part]], empty: Callable[..., Any]) -> Columns:
        """The batch of these sequences."""
        return stack_records([self.build([(record_of(h), a, b) for h, a, b in parts]) for parts in groups], empty)


class _Reader:
    """The values of sequences whose parts are (handle, start, stop), from the columns that they lie in."""

    def __init__(self, groups: list[list[Part]]) -> None:
        self._groups = groups
        self._flats: dict[tuple[int, str], Flat | None] = {}

    def has(self, name: str) -> bool | None:
        """Whether all documents have a field; None where only some do, or that cannot be told from their blocks."""
        found = set()
        blocks: dict[int, Any] = {}
        for parts in self._groups:
            for handle, _, _ in parts:
                if isinstance(handle, Group):
                    return None
                blocks[id(handle[0].records)] = handle[0].records
        for records in blocks.values():
            fields = getattr(records, "fields", None)
            found |= {name in record for record in records} if fields is None else {name in fields}
        return found.pop() if len(found) == 1 else None

    def values(self, name: str, i: int) -> list[Any]:
        """A field of the i-th sequence as few arrays: documents that lie end to end in one column make one."""
        values: list[Any] = []
        last: NDArray[Any] | None = None  # the column that the open run lies in, from `begin` to `end`
        begin = end = 0
        for handle, start, stop in self._groups[i]:
            flat, offset = self._find(handle, name)
            if flat is last and offset + start == end:
                end = offset + stop
                continue
            if last is not None:
                values.append(last[begin:end])
            last, begin, end = flat, offset + start, offset + stop
        values.append(last[begin:end])  # type: ignore[index]  # a sequence has a part
        return values

    def _find(self, handle: Any, name: str) -> tuple[Any, int]:
        """(values, where in them those of the record begin)."""
        if isinstance(handle, tuple):
            records, i = handle[0].records, handle[1]
            key = id(records), name
            if key not in self._flats:
                flat_of = getattr(records, "flat", None)
                self._flats[key] = flat_of(name) if flat_of else None
            flat = self._flats[key]
            if flat is not None:
                return flat[0], flat[1][i]
        return record_of(handle)[name], 0


def _join(values: list[Any], row: NDArray[Any]) -> int:
    """Writes arrays end to end; returns where they end."""
    at = 0
    for value in values:
        row[at : at + len(value)] = value
        at += len(value)
    return at


def _ones(length: int) -> NDArray[np.bool_]:
    return np.ones(length, np.bool_)

"""pack: documents of any length into sequences of one length.

`wrap` lays the documents of a lane end to end and cuts every `max_length` tokens; only a flush pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError, DataError
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Part, Ref
from zephon.ops.base import check_count, token_ids
from zephon.record import Record, record_of

Columns = dict[str, NDArray[np.int64]]
Flat = tuple[NDArray[Any], Sequence[int]]
"""The tokens of records end to end, and where each begins."""

_OVERSIZE = ("split", "truncate", "drop", "error")


class Pack(Accumulator):
    """Sequences of exactly `max_length` tokens, with the fields

    `input_ids` int64 [max_length], padded with `pad_id`; `position_ids` int64 [max_length], from 0 at the start of
    each piece of a document; `segment_ids` int64 [max_length], 1, 2, ... for the pieces, 0 on padding; `num_pad`, an
    int. Other fields are left behind; `batch.origins` says what a sequence was made of.

    `oversize` is what becomes of a document longer than `max_length`: "split" loses nothing; "truncate" counts
    `truncated_documents` and `truncated_tokens`; "drop" counts `oversize_documents` and `oversize_tokens`; "error".
    A document without tokens is counted as `empty_documents`.
    """

    method = "pack"
    measures = True
    batched = True

    def __init__(
        self,
        max_length: int,
        algorithm: str = "wrap",
        oversize: str = "split",
        pad_id: int = 0,
        field: str = "input_ids",
        name: str | None = None,
    ) -> None:
        self.max_length = check_count("max_length", max_length, self.method)
        if algorithm != "wrap":
            raise ConfigError(f"pack(algorithm={algorithm!r}): this version has 'wrap'")
        if oversize not in _OVERSIZE:
            raise ConfigError(f"pack(oversize={oversize!r}): it must be one of {', '.join(_OVERSIZE)}")
        self.algorithm, self.oversize, self.field, self.name = algorithm, oversize, field, name
        self.reads = (field,)
        self.pad_id = check_count("pad_id", pad_id, self.method, least=-(2**63), most=2**63 - 1)
        self.reasons = ("empty_documents", *_REASONS[oversize])
        self._held: dict[int, list[Part]] = {}
        self._filled: dict[int, int] = {}

    def settings(self) -> dict[str, Any]:
        fields = ("max_length", "algorithm", "oversize", "pad_id", "field")
        return {"type": self.method, **{f: getattr(self, f) for f in fields}}

    def measure(self, record: Record) -> int:
        if self.field not in record:
            raise KeyError(f"no field {self.field!r}; the record has {sorted(map(str, record))}; tokenize first")
        ids = record[self.field]
        if type(ids) is np.ndarray and ids.ndim == 1 and ids.dtype == np.int64:
            return len(ids)
        return len(token_ids(ids))

    def open(self, lane: int, key: Key) -> None:
        self._held[lane], self._filled[lane] = [], 0

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, (cursor, length, _) in enumerate(refs):
            if length > self.max_length and self.oversize != "split":
                length = self._oversize(emitted, trigger, length)
            elif length == 0:
                emitted.drop(trigger, "empty_documents")
            self._lay(lane, emitted, trigger, cursor, length)
        return emitted

    def _lay(self, lane: int, emitted: Emitted, trigger: int, cursor: Any, length: int) -> None:
        """Appends a document, and emits every sequence that it fills."""
        held, filled, start = self._held[lane], self._filled[lane], 0
        while start < length:
            stop = min(length, start + self.max_length - filled)
            held.append((cursor, start, stop))
            filled, start = filled + stop - start, stop
            if filled == self.max_length:
                emitted.add(trigger, held)
                held, filled = [], 0
        self._held[lane], self._filled[lane] = held, filled

    def _oversize(self, emitted: Emitted, trigger: int, length: int) -> int:
        """Applies the policy; returns the tokens that are kept."""
        most = self.max_length
        if self.oversize == "truncate":
            emitted.drop(trigger, "truncated_documents")
            emitted.drop(trigger, "truncated_tokens", length - most)
            return most
        if self.oversize == "drop":
            emitted.drop(trigger, "oversize_documents")
            emitted.drop(trigger, "oversize_tokens", length)
            return 0
        emitted.fail(
            trigger,
            DataError(
                f"a document of {length:,} tokens is longer than max_length={most:,}; "
                "choose oversize='split', 'truncate' or 'drop', or a larger max_length"
            ),
        )
        return 0

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        if self._held[lane]:
            emitted.add(0, self._held[lane])
        self._held[lane], self._filled[lane] = [], 0
        return emitted

    def state(self, lane: int) -> Held:
        return Held(self._held[lane].copy())

    def load(self, lane: int, key: Key, held: Held) -> None:
        self._held[lane] = list(held.items)
        self._filled[lane] = sum(stop - start for _, start, stop in held.items)
        if self._filled[lane] >= self.max_length:
            raise ValueError(f"{self._filled[lane]:,} tokens are held, and a sequence has {self.max_length:,}")

    def group_length(self, group: list[Part]) -> int:
        return self.max_length

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        columns = self._lay_out([[record[self.field][a:b] for record, a, b in parts]], [parts], np.empty)
        record: Record = {name: column[0] for name, column in columns.items()}
        return {**record, "num_pad": int(record["num_pad"])}

    def collate(self, groups: list[list[Part]], empty: Callable[..., Any]) -> Columns:
        """The batch of these sequences, parts being (handle, start, stop): payload is copied once, to its place."""
        flats: dict[int, Flat | None] = {}
        return self._lay_out([self._values(parts, flats) for parts in groups], groups, empty)

    def _values(self, parts: list[Part], flats: dict[int, Flat | None]) -> list[Any]:
        """The tokens of a sequence as few arrays: documents that lie end to end in one column make one.

        flats: of each set of records met so far, by id, its column.
        """
        values: list[Any] = []
        last: NDArray[Any] | None = None  # the column that the open run lies in, from `begin` to `end`
        begin = end = 0
        for handle, start, stop in parts:
            flat, offset = self._find(handle, flats)
            if flat is last and offset + start == end:
                end = offset + stop
                continue
            if last is not None:
                values.append(last[begin:end])
            last, begin, end = flat, offset + start, offset + stop
        values.append(last[begin:end])  # type: ignore[index]  # a sequence has a part
        return values

    def _find(self, handle: Any, flats: dict[int, Flat | None]) -> tuple[Any, int]:
        """(tokens, where in them the record begins)."""
        if isinstance(handle, tuple):
            records, i = handle[0].records, handle[1]
            if id(records) not in flats:
                flat_of = getattr(records, "flat", None)
                flats[id(records)] = flat_of(self.field) if flat_of else None
            flat = flats[id(records)]
            if flat is not None:
                return flat[0], flat[1][i]
        return record_of(handle)[self.field], 0

    def _lay_out(self, values: list[list[Any]], groups: list[list[Any]], empty: Callable[..., Any]) -> Columns:
        """The fields of sequences: their tokens, and the parts that these come from."""
        shape = (len(groups), self.max_length)
        columns = {name: empty(shape, np.int64) for name in ("input_ids", "position_ids", "segment_ids")}
        columns["num_pad"] = empty(len(groups), np.int64)
        lengths: list[int] = []
        segments: list[int] = []
        for i, parts in enumerate(groups):
            lengths += [stop - start for _, start, stop in parts]
            segments += range(1, len(parts) + 1)
            filled = _join(values[i], columns["input_ids"][i])
            columns["input_ids"][i, filled:] = self.pad_id
            columns["num_pad"][i] = self.max_length - filled
            lengths.append(self.max_length - filled)
            segments.append(0)
        sizes = np.array(lengths)
        starts = np.cumsum(sizes) - sizes
        columns["segment_ids"].reshape(-1)[:] = np.repeat(segments, sizes)
        positions = columns["position_ids"].reshape(-1)
        np.subtract(np.arange(len(positions)), np.repeat(starts, sizes), out=positions)
        for row, num_pad in enumerate(columns["num_pad"].tolist()):
            columns["position_ids"][row, self.max_length - num_pad :] = 0
        return columns


def _join(values: list[Any], row: NDArray[np.int64]) -> int:
    """Writes arrays end to end; returns where they end."""
    at = 0
    for value in values:
        row[at : at + len(value)] = value
        at += len(value)
    return at


_REASONS = {
    "split": (),
    "truncate": ("truncated_documents", "truncated_tokens"),
    "drop": ("oversize_documents", "oversize_tokens"),
    "error": (),
}

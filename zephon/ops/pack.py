"""pack: documents of any length into sequences of one length.

`wrap` lays the documents of a lane end to end and cuts every `max_length` tokens; only a flush pads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError, DataError
from zephon.ops.accumulator import Accumulator, Emitted, Key, Part, Ref
from zephon.ops.base import check_count, token_ids
from zephon.record import Record

Columns = dict[str, NDArray[np.int64]]

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
        return len(token_ids(record[self.field]))

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

    def group_length(self, group: list[Part]) -> int:
        return self.max_length

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        columns = self.collate([parts], np.empty)
        record: Record = {name: column[0] for name, column in columns.items()}
        return {**record, "num_pad": int(record["num_pad"])}

    def collate(self, groups: list[list[tuple[Record, int, int]]], empty: Callable[..., Any]) -> Columns:
        """The batch of these sequences: payload goes straight to its place, copied once."""
        shape = (len(groups), self.max_length)
        columns = {name: empty(shape, np.int64) for name in ("input_ids", "position_ids", "segment_ids")}
        columns["num_pad"] = empty(len(groups), np.int64)
        for i, parts in enumerate(groups):
            columns["num_pad"][i] = self._fill(parts, *(columns[n][i] for n in list(columns)[:3]))
        return columns

    def _fill(
        self,
        parts: list[tuple[Record, int, int]],
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        segments: NDArray[np.int64],
    ) -> int:
        """Writes one sequence; returns the number of pads."""
        at = 0
        for segment, (record, start, stop) in enumerate(parts, 1):
            end = at + stop - start
            ids[at:end] = record[self.field][start:stop]
            positions[at:end] = np.arange(stop - start)
            segments[at:end] = segment
            at = end
        ids[at:], positions[at:], segments[at:] = self.pad_id, 0, 0
        return self.max_length - at


_REASONS = {
    "split": (),
    "truncate": ("truncated_documents", "truncated_tokens"),
    "drop": ("oversize_documents", "oversize_tokens"),
    "error": (),
}

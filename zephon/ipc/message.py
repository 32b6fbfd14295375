"""Records and plain data as messages: a packed head, then the buffers of columns, each aligned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from zephon.ipc.columns import Array, Blob, Bytes, Column, Columns, Fixed, Ragged
from zephon.ipc.in_slots import rows_in_slots

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
ALIGNMENT: Final = 16


def describe_columns(columns: Columns) -> tuple[list[Any], list[Array | list[Array]]]:
    """(plain description, buffers) of columns."""
    start, stop = columns.start, columns.start + columns.num_records
    whole = all(len(column) == columns.num_records for column in columns.columns.values())
    own = columns.columns if whole else {name: c.cut(start, stop) for name, c in columns.columns.items()}
    described = [[name, c.form, *c.describe()] for name, c in own.items()]
    return [columns.num_records, described], [b for c in own.values() for b in c.buffers()]


def rebuild_columns(
    description: list[Any], buffers: Iterator[Bytes], slots: Mapping[int, Bytes] = MappingProxyType({})
) -> Columns:
    """The columns of a description over their buffers, and over slots that rows were written to, as views."""
    columns: dict[str, Column] = {}
    stacking: list[tuple[Any, ...]] = []
    for name, form, *what in description[1]:
        if form == "fixed":
            columns[name] = Fixed(what[0], next(buffers).view(what[1]).reshape(what[2]))
            stacking.append((name, *what[:2], *what[2][1:]))
        elif form == "slots":
            columns[name] = rows_in_slots(what, next(buffers), slots)
            stacking.append((name, "array", what[0], *what[1]))
        elif form == "ragged":
            offsets = next(buffers).view(np.int64)
            columns[name] = Ragged(next(buffers).view(what[0]).reshape(what[1]), offsets)
        else:
            offsets = next(buffers).view(np.int64)
            columns[name] = Blob(what[0], next(buffers), offsets)
            stacking.append((name, what[0]))
    copied = len(stacking) == len(columns) and not any(each[1] == "pickle" for each in stacking)
    return Columns(columns, description[0], stacking=tuple(sorted(stacking)) if copied else None)


def write_message(head: Any, buffers: Sequence[Array | list[Array]]) -> list[Any]:
    """A message as parts: its head (plain data), then the buffers (arrays, or arrays end to end), aligned to 16 bytes.

    Layout: 8 bytes length of the packed head; the head [head, [bytes of each buffer]]; padding; buffers with padding.
    """
    whole = [buffer if isinstance(buffer, list) else [buffer] for buffer in buffers]
    sizes = [sum(array.nbytes for array in arrays) for arrays in whole]
    packed = _encode([head, sizes])
    parts: list[Any] = [len(packed).to_bytes(8, "little"), packed, bytes(-(8 + len(packed)) % ALIGNMENT)]
    for arrays, size in zip(whole, sizes, strict=True):
        parts += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
        parts.append(bytes(-size % ALIGNMENT))
    return parts


def read_message(memory: Any) -> tuple[Any, Iterator[Bytes]]:
    """(head, buffers as views on `memory`)."""
    raw = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    size = int.from_bytes(memory[:8], "little")
    head, sizes = _decode(memory[8 : 8 + size])
    return head, _views(raw, 8 + size + -(8 + size) % ALIGNMENT, sizes)


def _views(raw: Bytes, at: int, sizes: list[int]) -> Iterator[Bytes]:
    for size in sizes:
        yield raw[at : at + size]
        at += size + -size % ALIGNMENT

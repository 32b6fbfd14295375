"""to_training: what a language model's training step takes, made of a batch of tokens where the batch is made.

All is computed on the batch's tokens end to end, pads left out ("flat"); then it is laid out in rows, or left flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError, DataError
from zephon.ops.base import check_count, fits, token_ids
from zephon.ops.batch import Formatter
from zephon.record import MISSING

Array = NDArray[Any]
Empty = Callable[..., Any]

MOST_MULTIPLE = 1 << 20  # of the width of a batch: more is a mistake, not a layout
_MADE = ("input_ids", "labels", "loss_mask", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen", "num_pad")
_NUMBERS = ("biuf", "number")
_KINDS = {"position_ids": ("iu", "whole number"), "segment_ids": ("biu", "whole number")}
_INT64 = np.dtype(np.int64)


class ToTraining(Formatter):
    """Adds to each batch, from `input_ids` and where they exist `segment_ids`, `position_ids`, `loss_mask`, `num_pad`:

    `input_ids`, `labels`, `position_ids`, `segment_ids` int64 and `loss_mask` bool (float32 of fractions, which are
    weights), all [samples, width], or [tokens] with `flatten`; `cu_seqlens` int32 [sequences + 1]; `max_seqlen`
    int32, a single number; `num_pad` int64 [samples].
    """

    method = "to_training"

    def __init__(
        self,
        ignore_index: int = -100,
        mask_boundaries: bool = False,
        flatten: bool = False,
        pad_to_multiple_of: int = 1,
        pad_id: int = 0,
        shift: bool = True,
        fields: Sequence[str] = (),
        name: str | None = None,
    ) -> None:
        self.ignore_index = check_count("ignore_index", ignore_index, self.method, least=-(2**63), most=2**63 - 1)
        self.pad_to_multiple_of = check_count("pad_to_multiple_of", pad_to_multiple_of, self.method, most=MOST_MULTIPLE)
        self.pad_id = check_count("pad_id", pad_id, self.method, least=-(2**63), most=2**63 - 1)
        self.mask_boundaries, self.flatten, self.shift = bool(mask_boundaries), bool(flatten), bool(shift)
        if isinstance(fields, str) or not all(isinstance(f, str) for f in fields):
            raise ConfigError(
                f"to_training(fields={fields!r}): a list of names of further fields with one value a token is wanted"
            )
        if own := [f for f in fields if f in _MADE]:
            carried = "; those of the batch are carried over, weights too" if "loss_mask" in own else ""
            raise ConfigError(
                f"to_training(fields={fields!r}): every batch has {', '.join(own)} without being asked{carried}; name "
                "only further fields, those that it does not make itself"
            )
        self.fields, self.name = tuple(fields), name

    def settings(self) -> dict[str, Any]:
        names = ("ignore_index", "mask_boundaries", "flatten", "pad_to_multiple_of", "pad_id", "shift", "fields")
        return {"type": self.method, **{n: getattr(self, n) for n in names}}

    def format(self, fields: dict[str, Any], empty: Empty) -> dict[str, Any]:
        rows = _Rows(fields)
        ids = rows.ids
        segments, positions = rows.find("segment_ids"), rows.find("position_ids")
        first = rows.first(segments)
        starts = np.flatnonzero(first)
        sizes = np.diff(starts, append=len(ids))
        if positions is None:
            positions = np.arange(len(ids)) - np.repeat(starts, sizes)
        counted = rows.counted()
        labels = self._label(rows, first, counted)
        layout = _Flat(empty) if self.flatten else _Padded(empty, rows, self.pad_to_multiple_of)
        made: dict[str, Any] = {
            "input_ids": layout.lay(ids, np.int64, self.pad_id),
            "labels": layout.lay(
                np.where(counted.astype(np.bool_, copy=False), labels, self.ignore_index), np.int64, self.ignore_index
            ),
            "loss_mask": layout.lay(counted, counted.dtype, 0),
            "position_ids": layout.lay(positions, np.int64, 0),
            "segment_ids": layout.lay(self._number(rows, starts, sizes), np.int64, 0),
        }
        for name in self.fields:
            values = rows.find(name)
            if values is None:
                raise DataError(f"to_training(fields=...): the batch has no field {name!r}; it has {_names(fields)}")
            made[name] = layout.lay(values, values.dtype, 0)
        if isinstance(layout, _Padded):
            made["num_pad"] = _put(layout.width - rows.sizes, np.int64, empty)
        bounds = layout.bounds(starts, len(ids))
        made["cu_seqlens"] = _put(bounds, np.int32, empty)
        made["max_seqlen"] = _put(np.diff(bounds).max(initial=0), np.int32, empty)
        kept = {name: value for name, value in fields.items() if name not in _MADE}
        return {**kept, **made}

    def _label(self, rows: _Rows, first: Array, counted: Array) -> Array:
        """The label of every token; clears `counted` where there is none, and moves it along with the labels."""
        ids = rows.ids
        ends = rows.starts[rows.sizes > 0]  # the first token of each sample has none before it
        cut = first if self.mask_boundaries else np.isin(np.arange(len(ids)), ends)
        np.putmask(counted, cut, 0)
        if not self.shift:
            return ids
        counted[:-1] = counted[1:]
        counted[-1:] = 0
        return np.append(ids[1:], ids[-1:])

    def _number(self, rows: _Rows, starts: Array, sizes: Array) -> Array:
        """1, 2, ... for the sequences of the batch, or of each row where rows are kept."""
        numbers = np.arange(1, len(starts) + 1)
        if not self.flatten:
            numbers -= np.searchsorted(starts, rows.starts)[rows.row_of(starts)]
        return np.repeat(numbers, sizes)


class _Rows:
    """The samples of a batch, tokens end to end. `starts`, `sizes`: where each begins, and its tokens without pads."""

    def __init__(self, fields: dict[str, Any]) -> None:
        if "input_ids" not in fields:
            raise DataError(f"to_training: no field 'input_ids'; the batch has {_names(fields)}; tokenize first")
        self._fields = fields
        given = fields["input_ids"]
        plain = isinstance(given, np.ndarray) and given.ndim == 2 and given.dtype.kind == "i"
        rows = list(given) if plain else [self._tokens(row, i) for i, row in enumerate(given)]
        self.widths = np.array([len(row) for row in rows], np.int64)
        self.sizes = self._sizes()
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.ids = self._join("input_ids", rows).astype(np.int64, copy=False)

    @staticmethod
    def _tokens(row: Any, i: int) -> Array:
        try:
            return token_ids(row).astype(np.int64, copy=False) if row is not MISSING else _absent(i)
        except (TypeError, OverflowError) as error:
            raise DataError(f"to_training: field 'input_ids' of sample {i} of the batch: {error}") from None

    def _sizes(self) -> Array:
        """Tokens of each sample that are no pads, by its `segment_ids`, else by its `num_pad`."""
        sizes = self.widths.copy()
        absent = [MISSING] * len(sizes)
        pads = self._fields.get("num_pad", absent)
        for i, row in enumerate(self._fields.get("segment_ids", absent)):
            if row is not MISSING:
                sizes[i] = np.count_nonzero(row)
            elif pads[i] is not MISSING:
                sizes[i] -= self._num_pad(i, pads[i])
        return sizes

    def _num_pad(self, i: int, value: Any) -> int:
        width = int(self.widths[i])
        value = value.item() if isinstance(value, np.generic) else value
        if type(value) is int and 0 <= value <= width:
            return value
        raise DataError(
            f"to_training: num_pad of sample {i} of the batch is {value!r:.80}, not a whole number among 0 .. {width:,}"
        )

    def find(self, name: str) -> Array | None:
        """A field of one number a token, end to end. None where no sample has it.

        Where one of several does not have it, it is 1 for those of `_MADE` (`position_ids`: 0, 1, ...), else an error.
        """
        if name not in self._fields:
            return None
        column = self._fields[name]
        return self._join(name, [self._row(name, i, row) for i, row in enumerate(column)])

    def counted(self) -> Array:
        """The loss mask as an array of its own: bool, or float32 where one of its rows holds fractional numbers."""
        mask = self.find("loss_mask")
        if mask is None:
            return np.ones(len(self.ids), np.bool_)
        if mask.dtype.kind == "f":
            if not (np.abs(mask) <= np.finfo(np.float32).max).all():  # a NaN is not
                raise DataError(
                    "to_training: the loss_mask of a sample of the batch holds a weight that is no number of float32 "
                    "(infinite, NaN, or too large); mend the operator that makes it"
                )
            return mask.astype(np.float32)
        if mask.dtype.kind != "b" and ((mask != 0) & (mask != 1)).any():
            raise DataError(
                "to_training: the loss_mask of a sample of the batch holds whole numbers other than 0 and 1; weights "
                "must be floats"
            )
        counted: Array = mask != 0
        return counted

    def _row(self, name: str, i: int, row: Any) -> Array:
        width = int(self.widths[i])
        if row is MISSING:
            if name not in _MADE:
                raise DataError(
                    f"to_training(fields=...): sample {i} of the batch has no field {name!r}; every one must have it"
                )
            return np.arange(width) if name == "position_ids" else np.ones(width, np.int64)
        values = np.asarray(row)
        kinds, wanted = _KINDS.get(name, _NUMBERS) if width else _NUMBERS  # an empty list is one of floats
        if values.ndim != 1 or len(values) != width or values.dtype.kind not in kinds:
            raise DataError(
                f"to_training: field {name!r} of sample {i} of the batch is {values.dtype}{list(values.shape)}, "
                f"but its input_ids are {width:,} tokens; one {wanted} a token is wanted"
            )
        if name == "position_ids" and values.dtype != _INT64:
            self._check(name, i, values, _INT64)
        return values

    @staticmethod
    def _check(name: str, i: int, values: Array, dtype: np.dtype[Any]) -> None:
        if not fits(values, dtype):
            raise DataError(
                f"to_training: field {name!r} of sample {i} of the batch holds {values.dtype} values beyond {dtype}, "
                "the dtype of the batch's field; give all samples one dtype that holds their values"
            )

    def _join(self, name: str, rows: list[Array]) -> Array:
        column = self._fields[name]
        if isinstance(column, np.ndarray) and (self.sizes == self.widths).all():
            return column.reshape(-1)
        parts = [row[:size] for row, size in zip(rows, self.sizes.tolist(), strict=True)]
        joined = np.concatenate(parts) if parts else np.empty(0, np.int64)
        for i, part in enumerate(parts):
            self._check(name, i, part, joined.dtype)
        return joined

    def first(self, segments: Array | None) -> Array:
        """Which tokens begin a sequence: those that begin a sample, and those whose segment is another than before."""
        first = np.zeros(len(self.ids), np.bool_)
        first[self.starts[self.sizes > 0]] = True
        if segments is not None:
            if not segments.all():
                raise DataError(
                    "to_training: segment_ids is 0 before the last token of a sample; pads belong to its end"
                )
            first[1:] |= segments[1:] != segments[:-1]
        return first

    def row_of(self, tokens: Array) -> Array:
        """The samples that tokens belong to."""
        return np.searchsorted(self.starts, tokens, side="right") - 1


def _absent(i: int) -> Array:
    raise DataError(f"to_training: sample {i} of the batch has no field 'input_ids'; tokenize every record")


class _Flat:
    """Tokens end to end, without pads."""

    def __init__(self, empty: Empty) -> None:
        self._empty = empty

    def lay(self, flat: Array, dtype: Any, pad: int) -> Array:
        return _put(flat, dtype, self._empty)

    def bounds(self, starts: Array, num_tokens: int) -> Array:
        """Where sequences begin, and where the last one ends."""
        return np.append(starts, num_tokens)


class _Padded:
    """Rows of one width. The pads at the end of a row are one more sequence, so that bounds cover every token."""

    def __init__(self, empty: Empty, rows: _Rows, multiple: int) -> None:
        self._empty, self._rows = empty, rows
        widest = int(rows.widths.max(initial=0))
        self.width = -(-widest // multiple) * multiple
        self.full = bool((rows.sizes == self.width).all())

    def lay(self, flat: Array, dtype: Any, pad: int) -> Array:
        rows = self._rows
        shape = (len(rows.sizes), self.width)
        if self.full:
            return _put(flat.reshape(shape), dtype, self._empty)
        laid: Array = self._empty(shape, dtype)
        for row, start, size in zip(laid, rows.starts.tolist(), rows.sizes.tolist(), strict=True):
            row[:size] = flat[start : start + size]
            row[size:] = pad
        return laid

    def bounds(self, starts: Array, num_tokens: int) -> Array:
        """As of `_Flat`, counted in the rows end to end with their pads."""
        rows = self._rows
        base = np.arange(len(rows.sizes)) * self.width
        owner = rows.row_of(starts)
        pads = (base + rows.sizes)[rows.sizes < self.width]
        return np.append(np.sort(np.append(starts - rows.starts[owner] + base[owner], pads)), len(base) * self.width)


def _put(values: Any, dtype: Any, empty: Empty) -> Array:
    """The values in memory of the batch."""
    made: Array = empty(np.shape(values), dtype)
    made[...] = values
    return made


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(sorted(fields)) or "none"

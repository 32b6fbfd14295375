"""What the trainer receives."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from zephon.canonical import array_bytes, canonical_bytes, fields_of
from zephon.record import Origin

Locate = Callable[[int, int], tuple[str, str, int]]
"""(dataset index, row) -> (dataset name, shard name, row in shard)."""


class LazyList:
    """A list field that is decoded when someone asks for it.

    Decoding is given, not inherited: an abstract class would cost every access to a field an `isinstance` in Python.
    """

    values: Callable[[], list[Any]]


class Batch(Mapping[str, Any]):
    """Samples of one lane: a mapping of field name to an array or a list, first dimension the samples.

    `lane_id`: the lane. `step`: the global step of the pass that this batch belongs to. `pass_index`: the pass.
    `num_samples`: the samples in it; 0 in a batch that pads the last step. The arrays belong to the receiver and may be
    written to.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        lane_id: int,
        step: int,
        pass_index: int,
        num_samples: int,
        origins: Callable[[], list[tuple[Origin, ...]]] = list,
        locate: Locate | None = None,
    ) -> None:
        self._fields = fields
        self.lane_id, self.step, self.pass_index, self.num_samples = lane_id, step, pass_index, num_samples
        self._find_origins, self._locate = origins, locate
        self._progress: Any = None  # the owner's state behind this batch, for state_dict(after=batch)

    def __getitem__(self, name: str) -> Any:
        try:
            value = self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; the batch has {', '.join(map(str, self._fields))}") from None
        if isinstance(value, LazyList):
            value = self._fields[name] = value.values()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_shape(value)}" for name, value in self.items())
        pad = "padding, " if self.padding else ""
        return f"Batch({pad}lane_id={self.lane_id}, step={self.step}, pass_index={self.pass_index}, {{{fields}}})"

    @property
    def origins(self) -> list[list[tuple[str, str, int, tuple[int, ...]]]]:
        """Per sample, what it was made of, in order: (dataset name, shard, row in shard, child path)."""
        locate = self._locate
        if locate is None:
            return []
        return [[(*locate(dataset, row), path) for dataset, row, _, path in made] for made in self._find_origins()]

    @property
    def padding(self) -> bool:
        """Whether it fills the place of a lane that has ended (`last_step="pad"`): a copy that counts no sample."""
        return self.num_samples == 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A batch can be sent to another process: with all its fields and origins, without its place."""
        shape = (self.lane_id, self.step, self.pass_index, self.num_samples)
        return _rebuild, (dict(self), shape, self.origins)

    def digest(self) -> str:
        """SHA-256 (hex) over field names, dtypes, shapes and values; of lists, over their canonical encoding."""
        total = hashlib.sha256()
        for name, value in self.items():
            if isinstance(value, list):
                total.update(canonical_bytes([name, "list", value]))
            else:
                array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
                total.update(canonical_bytes([name, _dtype_text(array.dtype), array.shape]))
                text = array.dtype.hasobject or array.dtype.kind == "T"  # its memory holds addresses
                total.update(canonical_bytes(array.tolist()) if text else array_bytes(array))
        return total.hexdigest()

    def to_torch(self) -> Batch:
        """The same batch with its numeric arrays as torch tensors that share their memory."""
        import torch

        return self._with({name: _tensor(torch, value) for name, value in self._fields.items()})

    def copy(self) -> Batch:
        """The same batch in memory of its own."""
        return self._with({n: _copied(v) for n, v in self.items()})

    def _with(self, fields: dict[str, Any]) -> Batch:
        shape = (self.lane_id, self.step, self.pass_index, self.num_samples)
        batch = Batch(fields, *shape, self._find_origins, self._locate)
        batch._progress = self._progress
        return batch


def _rebuild(fields: dict[str, Any], shape: tuple[int, int, int, int], origins: list[list[Any]]) -> Batch:
    """The batch of `Batch.__reduce__`; its origins are looked up already."""
    places = {(s, i): origin[:3] for s, sample in enumerate(origins) for i, origin in enumerate(sample)}

    def found() -> list[tuple[Origin, ...]]:
        return [tuple((s, i, 0, origin[3]) for i, origin in enumerate(sample)) for s, sample in enumerate(origins)]

    return Batch(fields, *shape, found, lambda s, i: places[s, i])


def _dtype_text(dtype: np.dtype[Any]) -> Any:
    return fields_of(dtype) if dtype.names else dtype.str


def _copied(value: Any) -> Any:
    """An array or a tensor in memory of its own. (`copy.copy` of a tensor is one more tensor on the same memory.)"""
    if isinstance(value, list):
        return value
    return value.clone() if hasattr(value, "clone") else copy.copy(value)


def _tensor(torch: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):  # a dtype that torch does not have, or another machine's order of bytes
        return value


def _shape(value: Any) -> str:
    return f"list[{len(value)}]" if isinstance(value, list) else f"{value.dtype}{list(value.shape)}"

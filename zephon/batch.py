"""What the trainer receives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zephon.canonical import canonical_bytes
from zephon.record import Block, Handles, Lineage, Origin, origins_of

Locate = Callable[[int, int], tuple[str, str, int]]
"""(dataset index, row) -> (dataset name, shard name, row in shard)."""


class Batch(Mapping[str, Any]):
    """Samples of one lane: a mapping of field name to an array or a list, first dimension the samples.

    `lane_id`: the lane. `step`: the global step of the pass that this batch belongs to. `pass_index`: the pass.
    `num_samples`: the samples in it. The arrays belong to the receiver and may be written to.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        lane_id: int,
        step: int,
        pass_index: int,
        num_samples: int,
        lineage: Sequence[Any] = (),
        locate: Locate | None = None,
    ) -> None:
        self._fields = fields
        self.lane_id, self.step, self.pass_index, self.num_samples = lane_id, step, pass_index, num_samples
        self._lineage, self._locate = lineage, locate
        self._progress: Any = None  # the owner's state behind this batch, for state_dict(after=batch)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; the batch has {', '.join(map(str, self._fields))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {_shape(value)}" for name, value in self._fields.items())
        return f"Batch(lane_id={self.lane_id}, step={self.step}, pass_index={self.pass_index}, {{{fields}}})"

    @property
    def origins(self) -> list[list[tuple[str, str, int, tuple[int, ...]]]]:
        """Per sample, what it was made of, in order: (dataset name, shard, row in shard, child path)."""
        locate = self._locate
        if locate is None:
            return []
        samples = (sample for piece in self._lineage for sample in _origins(piece))
        return [[(*locate(dataset, row), path) for dataset, row, _, path in sample] for sample in samples]

    def digest(self) -> str:
        """SHA-256 (hex) over field names, dtypes, shapes and bytes; of lists, over their canonical encoding."""
        total = hashlib.sha256()
        for name, value in self._fields.items():
            if isinstance(value, list):
                total.update(canonical_bytes([name, "list", value]))
            else:
                array = np.asarray(value)
                total.update(canonical_bytes([name, array.dtype.str, array.shape]))
                total.update(array.tobytes())
        return total.hexdigest()

    def to_torch(self) -> Batch:
        """The same batch with its numeric arrays as torch tensors that share their memory."""
        import torch

        fields = {name: _tensor(torch, value) for name, value in self._fields.items()}
        batch = Batch(fields, self.lane_id, self.step, self.pass_index, self.num_samples, self._lineage, self._locate)
        batch._progress = self._progress
        return batch


def lineage_of(samples: Handles, start: int, stop: int) -> Any:
    """What to keep of a run of samples to tell their origins later, without their payload."""
    if isinstance(samples, Block) and samples.lineage.is_pointers:
        return samples.lineage, start, stop
    return [origins_of(samples[i]) for i in range(start, stop)]


def _origins(piece: Any) -> list[tuple[Origin, ...]]:
    if isinstance(piece, tuple):
        lineage: Lineage = piece[0]
        return [lineage.origins(i) for i in range(piece[1], piece[2])]
    return piece  # type: ignore[no-any-return]


def _tensor(torch: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    try:
        return torch.from_numpy(value)
    except TypeError:  # a dtype that torch does not have
        return value


def _shape(value: Any) -> str:
    return f"list[{len(value)}]" if isinstance(value, list) else f"{value.dtype}{list(value.shape)}"

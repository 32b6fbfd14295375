"""A batch as torch's DataLoader hands it on: a dict of tensors that knows where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from zephon.batch import Batch
from zephon.errors import ConfigError
from zephon.torch_loader.seen import Place, Seen

DATASETS: WeakValueDictionary[str, Seen] = WeakValueDictionary()
"""What arrived in this process, by dataset."""


class TorchBatch(dict[str, Any]):
    """Samples of one lane: field name to a tensor, first dimension the samples, or to a list.

    `lane_id`: the lane. `step`: the global step of the pass that this batch belongs to. `pass_index`: the pass.
    `num_samples`: the samples in it. An array of a dtype that torch does not have stays an array.

    Copies, pickles and pins keep all of it. Another mapping made of its fields has -1 there, and no place: states are
    asked for with the batch that the DataLoader returned.
    """

    def __init__(
        self,
        fields: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        lane_id: int = -1,
        step: int = -1,
        pass_index: int = -1,
        num_samples: int = -1,
        place: Place | None = None,
    ) -> None:
        super().__init__(fields)
        self.lane_id, self.step, self.pass_index, self.num_samples = lane_id, step, pass_index, num_samples
        self._place = place

    @property
    def padding(self) -> bool:
        """Whether it fills a place of a lane that has ended: see `zephon.Batch.padding`."""
        return self.num_samples == 0

    @classmethod
    def of(cls, batch: Batch, place: Place) -> TorchBatch:
        """A pipeline's batch; its tensors share the memory."""
        return cls(batch.to_torch(), batch.lane_id, batch.step, batch.pass_index, batch.num_samples, place)

    def _parts(self) -> tuple[Any, ...]:
        return dict(self), self.lane_id, self.step, self.pass_index, self.num_samples, self._place

    def __copy__(self) -> TorchBatch:
        return TorchBatch(*self._parts())

    copy = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, self._parts()

    def __repr__(self) -> str:
        return (
            f"TorchBatch(lane_id={self.lane_id}, step={self.step}, pass_index={self.pass_index}, {super().__repr__()})"
        )

    def digest(self) -> str:
        """The digest of the pipeline's own batch: see `zephon.Batch.digest`."""
        fields = {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in self.items()}
        return Batch(fields, self.lane_id, self.step, self.pass_index, self.num_samples).digest()


def _arrive(*parts: Any) -> TorchBatch:
    """A batch that came from another process; it is noted where its dataset lives."""
    batch = TorchBatch(*parts)
    if batch._place is not None and (seen := DATASETS.get(batch._place.dataset)) is not None:
        seen.note(batch._place)
    return batch


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "a DataLoader over to_torch() stacks batches, which are whole already: give it batch_size=None "
        "(the pipeline's own .batch(n) says how many samples are in one)"
    )


default_collate_fn_map[TorchBatch] = _refuse

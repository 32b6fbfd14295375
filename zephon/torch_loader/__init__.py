"""A pipeline inside torch's DataLoader and torchdata's StatefulDataLoader. See docs/torch.md."""

from __future__ import annotations

from zephon.torch_loader.batch import TorchBatch
from zephon.torch_loader.dataset import TorchDataset
from zephon.torch_loader.states import pipeline_state

__all__ = ["TorchBatch", "TorchDataset", "pipeline_state"]

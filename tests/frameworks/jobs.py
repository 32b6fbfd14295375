"""What the ranks of these tests do; see tests/ranks/launch.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..ranks.jobs import line

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """A module of examples/."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _begin(rank: int, world: int, folder: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    return dist


def weighted(rank: int, world: int, folder: str, num_lanes: int) -> dict[str, Any]:
    """One step of the example with plain gradient descent, as DDP and as FSDP: the loss, and weights behind it."""
    dist = _begin(rank, world, folder)
    import torch

    gpt = example("gpt")
    torch.set_num_threads(1)
    gpt.LANES = num_lanes
    found: dict[str, Any] = {}
    for name in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = gpt.parallel(gpt.GPT(), name == "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with gpt.pipeline().options(runner="threads") as data:
            batches = next(data.steps())
            part = gpt.train_step(model, optimizer, batches)
        weights, _ = gpt.get_state_dict(model, optimizer, options=gpt.WHOLE)
        kept = {name: weight.tolist() for name, weight in weights.items() if weight.ndim == 1}
        found[name] = {"batches": len(batches), "part": part, "weights": kept}
    dist.destroy_process_group()
    return found


def titan(rank: int, world: int, lanes: int = 6) -> Any:
    """TorchTitan's loader of a rank, over batches of ids."""
    from zephon.integrations.torchtitan import TitanDataLoader

    fields = {"input": "id"}
    return TitanDataLoader(line(lanes), dp_world_size=world, dp_rank=rank, inputs=fields, labels="id")


def titan_takes(loader: Any, num_batches: int) -> list[list[int]]:
    """The labels of so many batches."""
    return [labels.tolist() for _, (_, labels) in zip(range(num_batches), loader, strict=False)]


def titan_saves(rank: int, world: int, folder: str, num_batches: int) -> list[list[int]]:
    """Takes batches and saves as TorchTitan does."""
    dist = _begin(rank, world, folder)
    import torch.distributed.checkpoint as dcp

    loader = titan(rank, world)
    found = titan_takes(loader, num_batches)
    dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/saved")
    dist.destroy_process_group()
    return found

"""Who this process is among the ranks of a job, and how many CPUs it may use."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from zephon.errors import ConfigError
from zephon.limits import cpu_limit
from zephon.plan.lanes import Identity


def find_identity() -> Identity | None:
    """torch.distributed where it is initialised, else torchrun's RANK and WORLD_SIZE, else None.

    torch is never imported for this: where it is not loaded, it cannot be initialised.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Identity(distributed.get_world_size(), distributed.get_rank(), "torch.distributed")
    size, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if size is None and rank is None:
        return None
    if size is None or rank is None:
        raise ConfigError(f"only one of RANK={rank} and WORLD_SIZE={size} is in the environment; set both or neither")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"RANK={rank!r} and WORLD_SIZE={size!r} in the environment: "
            "whole numbers, 0 <= rank < world_size, are wanted"
        )
    return Identity(int(size), int(rank), "the environment (RANK, WORLD_SIZE)")


def mesh_options(mesh: Any) -> dict[str, int]:
    """dp_degree and dp_group_id of this rank in a torch DeviceMesh of the data-parallel dimensions.

    Several dimensions (replicate and shard) count as one, row by row.
    """
    try:
        shape, coordinate = tuple(mesh.mesh.shape), mesh.get_coordinate()
    except AttributeError:
        raise ConfigError(
            f"mesh={mesh!r}: a torch DeviceMesh of the data-parallel dimensions is wanted, as device_mesh['dp']"
        ) from None
    if coordinate is None:
        raise ConfigError("this rank is not in the mesh; build the pipeline on the ranks of the mesh alone")
    group = 0
    for size, place in zip(shape, coordinate, strict=True):
        group = group * size + place
    return {"dp_degree": math.prod(shape), "dp_group_id": group}


def available_cpus() -> int:
    """CPUs that this process may run on, or the time of so many that its container may use if that is less."""
    cpus, limit = affinity_cpus(), cpu_limit()
    return cpus if limit is None else max(1, min(cpus, math.ceil(limit)))


def affinity_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1

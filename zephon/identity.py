"""Who this process is among the ranks of a job, and how many CPUs it may use."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from zephon.errors import ConfigError
from zephon.limits import cpu_limit
from zephon.plan.lanes import Identity


def torch_distributed() -> Any:
    """The module torch.distributed where it is initialised, here or in the process that this one is a fork of.

    None else. torch is never imported for this: where it is not loaded, it cannot be initialised.
    """
    found = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def find_identity() -> Identity | None:
    """torch.distributed where it is initialised, else torchrun's RANK and WORLD_SIZE, else None."""
    if (distributed := torch_distributed()) is not None:
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


_NOT_DATA = {"tp", "pp", "cp", "sp", "tensor", "pipeline", "context", "sequence"}  # usual names of dimensions


def mesh_options(mesh: Any) -> dict[str, Any]:
    """dp_degree, dp_group_id and agree_ranks of this rank in a torch DeviceMesh of the data-parallel dimensions.

    Several dimensions (replicate and shard) count as one, row by row.
    """
    try:
        shape, coordinate = tuple(mesh.mesh.shape), mesh.get_coordinate()
    except AttributeError:
        raise ConfigError(
            f"mesh={mesh!r}: a torch DeviceMesh of the data-parallel dimensions is wanted, as device_mesh['dp']"
        ) from None
    if wrong := sorted(_NOT_DATA & {*(getattr(mesh, "mesh_dim_names", None) or ())}):
        raise ConfigError(
            f"mesh={mesh!r} has the dimensions {wrong}, whose ranks are to get the same batches; give the part that is "
            "data-parallel alone, as device_mesh['dp']"
        )
    if coordinate is None:
        raise ConfigError("this rank is not in the mesh; build the pipeline on the ranks of the mesh alone")
    group = 0
    for size, place in zip(shape, coordinate, strict=True):
        group = group * size + place
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    return {"dp_degree": math.prod(shape), "dp_group_id": group, "agree_ranks": ranks}


def available_cpus() -> int:
    """CPUs that this process may run on, or the time of so many that its container may use if that is less.

    The ranks of a job on one machine have equal parts of them, unless the launcher has bound each to CPUs of its own.
    """
    cpus, limit = affinity_cpus(), cpu_limit()
    shared: float = cpus if limit is None else min(cpus, limit)
    return max(1, math.ceil(shared) // local_ranks())


def local_ranks() -> int:
    """Ranks of this job that share this process's CPUs, as torchrun and the like say (LOCAL_WORLD_SIZE); else 1."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not size.isdecimal() or not int(size) or _is_bound():
        return 1
    return int(size)


def _is_bound() -> bool:
    """Whether whoever started this process has bound it to some of its own CPUs."""
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        return os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())
    except OSError:  # the parent is gone
        return False


def affinity_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1

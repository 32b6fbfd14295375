"""What the ranks of the tests do. Each function runs in a process of its own and returns plain data."""

from __future__ import annotations

import os
import time
from itertools import islice
from typing import Any

import zephon as zp
from tests.ranks.ends import case_a11, forked, mesh_peers  # noqa: F401


def line(lanes: int, **options: Any) -> zp.Pipeline:
    """Shuffled, packed by pairs, without windows."""
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(480)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, end="repeat")).shuffle(20).batch(4)
    settings = {"runner": "threads", "parallelism": 1, "canonical_replicas": lanes, "flush_every_k_chunks": 0}
    return pipeline.options(**{**settings, **options})


def taken(pipeline: zp.Pipeline, steps: int) -> list[list[Any]]:
    """[lane, step, digest] of the batches of so many steps."""
    found = []
    for _, batches in zip(range(steps), pipeline.steps(), strict=False):
        found += [[batch.lane_id, batch.step, batch.digest()] for batch in batches]
    return found


def _begin(rank: int, world: int, folder: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    return dist


def error_of(call: Any) -> str | None:
    try:
        call()
    except zp.errors.ZephonError as error:
        return f"{type(error).__name__}: {error}"
    return None


def meshed(rank: int, world: int, folder: str, tensor: int) -> dict[str, Any]:
    """A mesh of (world / tensor, tensor): three steps, a checkpoint, ranks that disagree, and all is well again."""
    dist = _begin(rank, world, folder)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("dp", "tp"))
    pipeline = line(6, mesh=mesh["dp"])
    found: dict[str, Any] = {"lanes": pipeline.lanes, "batches": taken(pipeline, 3)}
    found["state"] = pipeline.checkpoint()
    began = time.perf_counter()
    assert pipeline.checkpoint() == found["state"]
    found["seconds"] = time.perf_counter() - began
    ahead = line(6, mesh=mesh["dp"])
    ahead.load_state_dict(found["state"])
    taken(ahead, 1 + (rank == 1))
    found["apart"] = error_of(ahead.checkpoint)
    idle = line(6, mesh=mesh["dp"])
    taken(idle, int(rank != 1))
    found["idle"] = error_of(idle.checkpoint)
    broken = line(6, mesh=mesh["dp"])
    if rank == 0:
        broken.state_dict = lambda: 1 / 0  # type: ignore[assignment, method-assign]
    found["broken"] = error_of(broken.checkpoint)
    again = line(6, mesh=mesh["dp"])
    again.load_state_dict(found["state"])
    found["more"] = taken(again, 2)
    found["later"] = again.checkpoint()
    for each in (pipeline, ahead, idle, again):
        each.close()
    dist.destroy_process_group()
    return found


def late(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The last rank stays away from one round, and comes to the next one."""
    dist = _begin(rank, world, folder)
    pipeline = line(4)
    found: dict[str, Any] = {"first": pipeline.checkpoint(timeout_s=3)}
    if rank != world - 1:
        began = time.monotonic()
        found["error"] = error_of(lambda: pipeline.checkpoint(timeout_s=3))
        found["seconds"] = time.monotonic() - began
    dist.barrier()
    found["next"] = pipeline.checkpoint(timeout_s=30)
    return found


def dies(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The last rank ends in the middle of a round."""
    _begin(rank, world, folder)
    pipeline = line(4)
    pipeline.checkpoint(timeout_s=60)
    if rank == world - 1:
        pipeline.state_dict = lambda: os._exit(3)  # type: ignore[assignment, method-assign]
    began = time.monotonic()
    error = error_of(lambda: pipeline.checkpoint(timeout_s=3))
    return {"error": error, "seconds": time.monotonic() - began}


def by_folder(rank: int, world: int, folder: str, steps: int, run_id: str, dies_in: int | None) -> dict[str, Any]:
    """Steps with a checkpoint behind each, through a folder; rank 1 ends in the middle of one of them."""
    own = {"world_size": world, "global_rank": rank, "aggregate_dir": folder, "run_id": run_id}
    pipeline = line(6, **own)
    states, stream = [], pipeline.steps()
    for step in range(steps):
        next(stream)
        if rank == 1 and step == dies_in:
            pipeline.state_dict = lambda: os._exit(3)  # type: ignore[assignment, method-assign]
        try:
            states.append(pipeline.checkpoint(timeout_s=2 if dies_in is not None else 60))
        except zp.errors.CheckpointError as error:
            return {"states": states, "error": str(error)}
    pipeline.close()
    return {"states": states, "error": None}


def saves(rank: int, world: int, folder: str, steps: int) -> list[list[Any]]:
    """Saves with torch's distributed checkpoint, the pipeline as it is, and takes two more steps meanwhile."""
    dist = _begin(rank, world, folder)
    import torch.distributed.checkpoint as dcp

    pipeline = line(6)
    stream = pipeline.steps()
    for _ in range(steps):
        next(stream)
    saving = dcp.async_save({"data": pipeline}, checkpoint_id=f"{folder}/saved")
    found = [
        [batch.lane_id, batch.step, batch.digest()] for _, step in zip(range(2), stream, strict=False) for batch in step
    ]
    saving.result()  # type: ignore[union-attr]
    dist.destroy_process_group()
    return found


def loads(rank: int, world: int, folder: str, lanes: int) -> Any:
    """Loads on this many ranks, with nothing but torch's call, and takes two steps."""
    dist = _begin(rank, world, folder)
    import torch.distributed.checkpoint as dcp

    pipeline = line(lanes)
    error = None
    try:
        dcp.load({"data": pipeline}, checkpoint_id=f"{folder}/../saved")
    except Exception as found:
        error = str(found)
    batches = taken(pipeline, 2) if error is None else []
    dist.destroy_process_group()
    return {"batches": batches, "error": error}


def hops(rank: int, world: int, folder: str, lanes: int, chain: list[list[int]]) -> list[Any]:
    """One run over a chain of topologies, each [ranks, peers of a group, steps, workers of a DataLoader] on some ranks.

    The others have no pipeline meanwhile. Every hop begins where the checkpoint of the one before it was.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found, state = [], None
    for size, peers, steps, workers in chain:
        group, hop, shared = dist.new_group(list(range(size))), None, [state]
        if rank < size:
            pipeline = line(lanes, dp_degree=size // peers, dp_group_id=rank // peers)
            if state is not None:
                pipeline.load_state_dict(state)
            hop = {"lanes": pipeline.lanes}
            if workers:
                hop["batches"], shared[0] = through_loader(pipeline, steps, workers, group)
            else:
                hop["batches"], shared[0] = taken(pipeline, steps), pipeline.checkpoint(group=group)
            pipeline.close()
        dist.broadcast_object_list(shared, src=0)
        state = shared[0]
        found.append(hop)
    dist.destroy_process_group()
    return found


def through_loader(pipeline: zp.Pipeline, steps: int, workers: int, group: Any) -> tuple[list[list[Any]], Any]:
    """As `taken`, from the workers of a DataLoader; and the state of all ranks behind it."""
    from torch.utils.data import DataLoader

    dataset = pipeline.to_torch()
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, timeout=60)
    batches = list(islice(loader, steps * pipeline.batches_per_step))
    return [[b.lane_id, b.step, b.digest()] for b in batches], dataset.checkpoint(batches[-1], group=group)


def dimensions(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Tensor and pipeline parallelism beside data parallelism, all of two."""
    dist = _begin(rank, world, folder)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world // 4, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    with line(6, mesh=mesh["dp"]) as pipeline:
        found = {"lanes": pipeline.lanes, "batches": taken(pipeline, 3), "state": pipeline.checkpoint()}
    dist.destroy_process_group()
    return found

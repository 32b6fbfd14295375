"""What the ranks of the tests of a common last step do."""

from __future__ import annotations

import os
import select
import time
from itertools import islice
from typing import Any

import zephon as zp

SIZES = (1, 2, 5, 6, 10, 11, 12, 13)
EPOCHS = 3


def odd(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 2)


def rows(name: str, number: int) -> zp.Dataset:
    return zp.Dataset.from_list(name, [{"id": i} for i in range(number)])


def ending(number: int, last_step: str, is_counted: bool, lanes: int = 3, **options: Any) -> zp.Pipeline:
    """Batches of 2. Where a filter drops every second of twice as many records, nobody can count them in advance."""
    pipeline = zp.Pipeline(zp.StaticMixture([rows("toy", number * (2 - is_counted))], seed=3, chunk_size=2))
    pipeline = pipeline.map(dict, name="same") if is_counted else pipeline.filter(odd)
    settings = {"runner": "inline", "canonical_replicas": lanes, "last_step": last_step}
    return pipeline.batch(2).options(**{**settings, **options})


def mixed(last_step: str, **options: Any) -> zp.Pipeline:
    """A dataset of 100 records and one of a single record."""
    source = zp.StaticMixture([rows("large", 100), rows("tiny", 1)], {"large": 0.9, "tiny": 0.1}, seed=3, end="stop")
    settings = {"runner": "threads", "parallelism": 4, "canonical_replicas": 3, "last_step": last_step}
    return zp.Pipeline(source).batch(2).options(**{**settings, **options})


def told(batches: Any) -> list[list[Any]]:
    """[pass, lane, step, samples, digest] of batches."""
    return [[b.pass_index, b.lane_id, b.step, b.num_samples, b.digest()] for b in batches]


def epochs(pipeline: zp.Pipeline, number: int = EPOCHS) -> list[list[Any]]:
    return [row for _ in range(number) for row in told(pipeline)]


def begin(rank: int, world: int, folder: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    return dist


def case_a11(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every size, three epochs each: nobody hangs in a barrier behind each step, which all ranks must reach."""
    dist = begin(rank, world, folder)
    found: dict[str, Any] = {}
    for workers in (0, 4):
        own: dict[str, Any] = {"runner": "threads", "parallelism": workers} if workers else {}
        for last_step in ("drop", "pad"):
            for is_counted in (True, False):
                for number in SIZES:
                    with ending(number, last_step, is_counted, **own) as pipeline:
                        found[f"{number} {last_step} {is_counted} {workers}"] = stepped(dist, pipeline)
    for last_step in ("drop", "pad"):
        with mixed(last_step) as pipeline:
            found[f"mixed {last_step}"] = stepped(dist, pipeline)
    return {"steps": found, "states": {last_step: resumed(last_step) for last_step in ("drop", "pad")}}


def stepped(dist: Any, pipeline: zp.Pipeline) -> list[list[Any]]:
    """Three epochs with a collective call for every step."""
    found = []
    for _ in range(EPOCHS):
        for step in pipeline.steps():
            found += told(step)
            dist.barrier()
    return found


def resumed(last_step: str) -> dict[str, Any]:
    """States of all ranks behind each batch of the second epoch, and what follows each of them."""
    pipeline = ending(13, last_step, False, lanes=6)
    epochs(pipeline, 1)
    found: dict[str, Any] = {"whole": [], "states": [], "rest": []}
    for batch in pipeline:
        found["whole"] += told([batch])
        found["states"].append(pipeline.checkpoint())
    for state in found["states"]:
        again = ending(13, last_step, False, lanes=6)
        again.load_state_dict(state)
        found["rest"].append(epochs(again, 1))
    own = ending(13, last_step, False, lanes=6)  # each rank with its own state, as some jobs keep them
    epochs(own, 1)
    list(islice(own, 1))
    state = own.state_dict()
    own.load_state_dict(state)
    found["own"] = epochs(own, 1)
    return found


def mesh_peers(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Two groups of two ranks each, that differ in a second dimension of the mesh; then ranks that are not there."""
    dist = begin(rank, world, folder)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    with ending(13, "pad", False, lanes=4, mesh=mesh["dp"]) as pipeline:
        assert pipeline._definition.options.topology.agree_ranks == (rank % 2, 2 + rank % 2)
        found = {"batches": epochs(pipeline), **one_is_gone(dist, rank, world)}
    return found


def one_is_gone(dist: Any, rank: int, world: int) -> dict[str, Any]:
    """The last rank does not iterate; then it does; then its process ends, which has told more than the others."""
    store = dist.distributed_c10d._get_default_store()
    found: dict[str, Any] = {}
    last = rank == world - 1
    if not last:
        found["missing"] = failure(ending(60, "drop", False, lanes=4, agree_timeout_s=1.0))
    dist.barrier()
    stream = iter(ending(60, "drop", False, lanes=4, agree_timeout_s=2.0))
    next(stream)
    if last:
        next(stream)  # now what it has of the third step is told
        store.set("pid", str(os.getpid()))
        return found
    watch = os.pidfd_open(int(store.get("pid")))
    assert select.select([watch], [], [], 10)[0], "the rank that left is still there"
    os.close(watch)
    began = time.monotonic()
    found["gone"] = failure(stream)
    return found | {"seconds": time.monotonic() - began}


def failure(batches: Any) -> str | None:
    try:
        list(batches)
    except zp.errors.ZephonError as error:
        return f"{type(error).__name__}: {error}"
    return None


def nothing_to_meet_at(rank: int, world: int, folder: str) -> list[str]:
    """Ranks without torch.distributed: arithmetic or a given number of steps is enough; else it is an error on all."""
    own = {"world_size": world, "global_rank": rank}
    counted = len(epochs(ending(13, "pad", True, **own), 1))
    given = len(epochs(ending(13, "pad", False, steps_per_pass=4, **own), 1))
    errors = []
    for pipeline in (ending(13, "pad", False, **own), ending(13, None, True, steps_per_pass=9, **own)):  # type: ignore[arg-type]
        try:
            iter(pipeline)
        except zp.errors.ConfigError as error:
            errors.append(str(error))
    return [f"{counted} {given}", *errors]


def forked(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Lanes that nobody can count, in forked workers of a DataLoader: the trainer's connections are not theirs."""
    dist = begin(rank, world, folder)
    from torch.utils.data import DataLoader

    pipeline = ending(12, "drop", is_counted=False, lanes=4)
    found: dict[str, Any] = {"error": None}
    try:
        list(DataLoader(pipeline.to_torch(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    except zp.errors.ConfigError as error:
        found["error"] = str(error)
    found["here"] = told(DataLoader(pipeline.to_torch(), batch_size=None))
    found["plain"] = told(pipeline)
    dist.destroy_process_group()
    return found

"""From what a StatefulDataLoader saves to the pipeline's own state, which knows no number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zephon.checkpoint.schema import read_state
from zephon.errors import CheckpointError

LOADER = "loader"
"""The field of a state that says which share of which pass it is: {"pass", "share", "shares", "batches"}."""


def pipeline_state(loader_state: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's state in a `StatefulDataLoader.state_dict()`: with the lanes of this rank, whoever fed them.

    `Pipeline.load_state_dict`, `TorchDataset.load_state_dict` and `zephon.merge_states` take it, so a run may go on
    with another `num_workers`, without torch, or on another number of ranks.

    Raises CheckpointError where it is not of a dataset of `to_torch`, or lies behind the last batch that was returned:
    a snapshot is taken every `snapshot_every_n_steps` batches only.
    """
    parts = _parts(loader_state)
    if behind := loader_state.get("_steps_since_snapshot", 0):
        raise CheckpointError(
            f"the StatefulDataLoader's snapshot is {behind} batches old; save at a multiple of snapshot_every_n_steps, "
            "set it to 1, or take dataset.state_dict(after=batch)"
        )
    header, *others = [_header(part) for part in parts if part["lanes"]]  # an idle worker has none
    if any(other != header for other in others):
        raise CheckpointError("the states of the workers are not of one run")
    lanes = {lane: place for part in parts for lane, place in part["lanes"].items()}
    state = {**header, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}
    read_state(state)
    return state


def _parts(loader_state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The state of each worker, or the one of the process that works without."""
    if not isinstance(loader_state, Mapping):
        raise CheckpointError(f"a StatefulDataLoader's state is a mapping, not {type(loader_state).__name__}")
    snapshot = loader_state.get("_snapshot")
    holders = list(snapshot["_worker_snapshots"].values()) if snapshot else [loader_state]
    found = [holder.get("dataset_state") for holder in holders]
    parts = [part for part in found if isinstance(part, Mapping) and LOADER in part]
    if not parts or len(parts) < len(found):
        raise CheckpointError(
            "this is not the state of a StatefulDataLoader over pipeline.to_torch(), taken with snapshots on "
            "(snapshot_every_n_steps)"
        )
    return parts


def _header(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in ("lanes", LOADER)}


def without_loader(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a pipeline gives it."""
    return {name: value for name, value in state.items() if name != LOADER}

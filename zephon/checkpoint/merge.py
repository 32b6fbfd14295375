"""States of several groups into one that any topology can load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from zephon.checkpoint.schema import State, read_state, write_state
from zephon.errors import CheckpointError
from zephon.flow.progress import LaneState


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with the lanes of all. Peers of one group may all be there: their lanes agree.

    Raises CheckpointError where the states are of different runs, where a lane has two places, or where lanes are
    missing.
    """
    return join_states(states, owned=False)


def join_states(states: Iterable[Mapping[str, Any]], owned: bool) -> dict[str, Any]:
    """See `merge_states`. owned: every state has the lanes alone that its group owns, also where it has not begun."""
    read = [read_state(state) for state in states]
    if not read:
        raise CheckpointError("merge_states got no state; pass the state of every group")
    first = read[0]
    lanes: dict[int, LaneState] = {}
    fresh: dict[int, LaneState] = {}
    for number, state in enumerate(read):
        _same_run(first, state, number)
        if not owned and not any(map(_has_begun, state.lanes.values())):  # it may have all lanes
            fresh |= state.lanes
            continue
        for lane, place in state.lanes.items():
            _same_place(lane, lanes.setdefault(lane, place), place)
    lanes = fresh | lanes
    missing = [lane for lane in range(first.canonical_replicas) if lane not in lanes]
    if missing:
        raise CheckpointError(
            f"lanes {_listed(missing)} of {first.canonical_replicas} are in none of the {len(read)} states; "
            "pass the state of every group"
        )
    return write_state(msgspec.structs.replace(first, lanes=lanes))


def _same_run(first: State, other: State, number: int) -> None:
    ours, theirs = first.header(), other.header()
    for field, value in ours.items():
        if theirs[field] != value:
            raise CheckpointError(
                f"state {number} is not of the same run as state 0: its field '{field}' differs; "
                "merge states that were taken together"
            )


def _has_begun(place: LaneState) -> bool:
    return bool(place.pass_index or place.samples or place.delivered)


def _same_place(lane: int, one: LaneState, other: LaneState) -> None:
    """Places are equal if as many samples were delivered: how they are written may differ."""
    if (one.pass_index, one.samples) != (other.pass_index, other.samples):
        raise CheckpointError(
            f"lane {lane} has two places: {one.samples} samples of pass {one.pass_index} in one state, {other.samples} "
            f"of pass {other.pass_index} in another; take the states of all ranks at the same step"
        )


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return shown if len(numbers) <= 16 else f"{shown}, ... ({len(numbers)} in all)"

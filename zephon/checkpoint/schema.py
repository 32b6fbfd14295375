"""A state as plain data, and back. Version 1.

{"format": "zephon", "schema": 1,
 "seed", "canonical_replicas", "cycles_per_step", "batch_size",       what a restore needs to know
 "fingerprint": {...},                                                what the pipeline is, field by field
 "reasons": ["keep.filtered", ...],                                   names of the positions in counts
 "lanes": {"0": {"pass", "chunk", "offset", "skip",                   the place: where to start again
                 "samples", "turns",                                  delivered in this pass
                 "delivered", "counts",                               of the whole run
                 "ahead"}}}                                           drops at the place, less counts
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from zephon.errors import CheckpointError
from zephon.flow.progress import LaneState

FORMAT = "zephon"
SCHEMA = 1

_LANE_FIELDS = {"pass": "pass_index"} | {
    name: name for name in ("chunk", "offset", "skip", "samples", "turns", "delivered")
}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A state, typed. `lanes` are those that it holds; a group's own state holds the group's."""

    seed: int
    canonical_replicas: int
    cycles_per_step: int
    batch_size: int
    fingerprint: dict[str, Any]
    reasons: list[str]
    lanes: dict[int, LaneState]

    def header(self) -> dict[str, Any]:
        """Everything but the lanes, as plain data."""
        fields = ("seed", "canonical_replicas", "cycles_per_step", "batch_size", "fingerprint", "reasons")
        return {"format": FORMAT, "schema": SCHEMA, **{name: getattr(self, name) for name in fields}}


def write_state(state: State) -> dict[str, Any]:
    """The state as a new tree of plain data: json, msgpack and pickle carry it, and nothing of it is shared."""
    header: dict[str, Any] = json.loads(json.dumps(state.header()))
    return {**header, "lanes": {str(lane): _write_lane(lane_state) for lane, lane_state in sorted(state.lanes.items())}}


def _write_lane(state: LaneState) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(state, attribute) for name, attribute in _LANE_FIELDS.items()}
    ahead = [place - count for place, count in zip(state.place_counts, state.counts, strict=True)]
    return {**fields, "counts": list(state.counts), "ahead": ahead}


class _Lane(msgspec.Struct, rename={"pass_index": "pass"}):
    pass_index: int
    chunk: int
    offset: int
    skip: int
    samples: int
    turns: int
    delivered: int
    counts: list[int]
    ahead: list[int]


class _Plain(msgspec.Struct):
    schema: int
    seed: int
    canonical_replicas: int
    cycles_per_step: int
    batch_size: int
    fingerprint: dict[str, Any]
    reasons: list[str]
    lanes: dict[str, _Lane]
    format: str


def read_state(plain: Mapping[str, Any]) -> State:
    """The typed state. Raises CheckpointError for anything that `write_state` did not make."""
    if not isinstance(plain, Mapping):
        raise CheckpointError(f"a state is a mapping made by state_dict(), not {type(plain).__name__}")
    if plain.get("format") != FORMAT:
        raise CheckpointError("this is not a state of Zephon: its field 'format' is missing or another")
    if plain.get("schema") != SCHEMA:
        raise CheckpointError(
            f"the state has schema {plain.get('schema')!r}, this version reads {SCHEMA}; use the version that wrote it"
        )
    try:
        read = msgspec.convert(dict(plain), _Plain, strict=True)
        lanes = {int(lane): _read_lane(fields, len(read.reasons)) for lane, fields in read.lanes.items()}
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"the state is damaged: {error}") from error
    fields = {name: getattr(read, name) for name in State.__struct_fields__ if name != "lanes"}
    for lane in lanes:
        if not 0 <= lane < read.canonical_replicas:
            raise CheckpointError(f"the state is damaged: lane {lane} of {read.canonical_replicas} lanes")
    return State(**fields, lanes=lanes)


def _read_lane(fields: _Lane, num_reasons: int) -> LaneState:
    if len(fields.counts) != num_reasons or len(fields.ahead) != num_reasons:
        raise ValueError(f"a lane has {len(fields.counts)} counts for {num_reasons} reasons")
    numbers = {attribute: getattr(fields, attribute) for attribute in _LANE_FIELDS.values()}
    if min(numbers.values()) < 0:
        raise ValueError("a lane's place has a negative number")
    place = tuple(count + ahead for count, ahead in zip(fields.counts, fields.ahead, strict=True))
    return LaneState(**numbers, counts=tuple(fields.counts), place_counts=place)

"""A state as plain data, and back. Version 1.

{"format": "zephon", "schema": 1,
 "seed", "canonical_replicas", "cycles_per_step", "batch_size",       what a restore needs to know
 "fingerprint": {...},                                                what the pipeline is, field by field
 "reasons": ["keep.filtered", ...],                                   names of the positions in counts
 "checksum",                                                          of all the above
 "loader": {...},                                                     only of `to_torch`: for the same worker, see there
 "lanes": {"0": {"pass", "chunk", "offset", "skip",                   the place: where to start again
                 "samples", "turns",                                  delivered in this pass
                 "delivered", "counts",                               of the whole run
                 "ahead",                                             drops at the place, less counts
                 "held": [...]}}}                                     what rows of accumulators hold at the place

Whoever saves it may shard it by lane, and field by field, as torch's distributed checkpoint does: no field is ever left
out, and the checksum finds a header of which parts are another one's.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from zephon.errors import CheckpointError
from zephon.flow.progress import Counts, LaneState

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
    header["checksum"] = _checksum(header)
    return {**header, "lanes": write_lanes(state.lanes)}


def write_lanes(lanes: Mapping[int, LaneState]) -> dict[str, Any]:
    """The field `lanes` of a state."""
    return {str(lane): _write_lane(place) for lane, place in sorted(lanes.items())}


def _write_lane(state: LaneState) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(state, attribute) for name, attribute in _LANE_FIELDS.items()}
    held = [base64.b64encode(raw).decode() for raw in state.held]
    return {**fields, "counts": write_counts(state.counts, state.place_counts), "held": held}


def _checksum(header: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in header.items() if name not in ("checksum", "lanes", "loader")}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=8).hexdigest()


def write_counts(counts: Counts, place_counts: Counts) -> str:
    """The counts of a lane as text."""
    numbers: list[int] = []
    for position, (count, place) in enumerate(zip(counts, place_counts, strict=True)):
        if count or place:
            ahead = place - count
            numbers += [position, count, 2 * ahead if ahead >= 0 else -2 * ahead - 1]
    return base64.b64encode(b"".join(map(_varint, numbers))).decode()


def read_counts(text: str, num_reasons: int) -> tuple[Counts, Counts]:
    """(counts, place_counts). Raises ValueError for anything that `write_counts` did not make."""
    numbers = _varints(base64.b64decode(text, validate=True))
    if len(numbers) % 3:
        raise ValueError("a lane's counts are cut short")
    counts, place_counts = [0] * num_reasons, [0] * num_reasons
    for position, count, zigzag in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if position >= num_reasons:
            raise ValueError(f"a lane counts reason {position} of {num_reasons}")
        counts[position] = count
        place_counts[position] = count + (zigzag >> 1 ^ -(zigzag & 1))
    return tuple(counts), tuple(place_counts)


def _varint(number: int) -> bytes:
    """7 bits a byte, lowest first; the high bit says that more follow."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(raw: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            numbers.append(number)
            number, shift = 0, 0
    if shift:
        raise ValueError("a lane's counts are cut short")
    return numbers


class _Lane(msgspec.Struct, rename={"pass_index": "pass"}):
    pass_index: int
    chunk: int
    offset: int
    skip: int
    samples: int
    turns: int
    delivered: int
    counts: str
    held: list[str]


class _Plain(msgspec.Struct):
    schema: int
    seed: int
    canonical_replicas: int
    cycles_per_step: int
    batch_size: int
    fingerprint: dict[str, Any]
    reasons: list[str]
    lanes: dict[str, _Lane]
    checksum: str
    format: str


def read_state(plain: Mapping[str, Any]) -> State:
    """The typed state. Raises CheckpointError for anything that `write_state` did not make."""
    if not isinstance(plain, Mapping):
        raise CheckpointError(f"a state is a mapping made by state_dict(), not {type(plain).__name__}")
    if "_snapshot" in plain or "_main_snapshot" in plain:
        raise CheckpointError(
            "this is a state of torchdata's StatefulDataLoader; load what zephon.torch_loader.pipeline_state(state) "
            "makes of it"
        )
    if plain.get("format") != FORMAT:
        raise CheckpointError("this is not a state of Zephon: its field 'format' is missing or another")
    if plain.get("schema") != SCHEMA:
        raise CheckpointError(
            f"the state has schema {plain.get('schema')!r}, this version reads {SCHEMA}; use the version that wrote it"
        )
    try:
        read = msgspec.convert(dict(plain), _Plain, strict=True)
        if read.checksum != _checksum(plain):
            raise ValueError(
                "its checksum does not fit its fields: it was edited, or loaded in part, as torch's distributed "
                "checkpoint does where the pipeline lacks operators or datasets that the saved one had"
            )
        lanes = {int(lane): _read_lane(fields, len(read.reasons)) for lane, fields in read.lanes.items()}
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"the state is damaged: {error}") from error
    fields = {name: getattr(read, name) for name in State.__struct_fields__ if name != "lanes"}
    for lane in lanes:
        if not 0 <= lane < read.canonical_replicas:
            raise CheckpointError(f"the state is damaged: lane {lane} of {read.canonical_replicas} lanes")
    return State(**fields, lanes=lanes)


def _read_lane(fields: _Lane, num_reasons: int) -> LaneState:
    numbers = {attribute: getattr(fields, attribute) for attribute in _LANE_FIELDS.values()}
    if min(numbers.values()) < 0:
        raise ValueError("a lane's place has a negative number")
    counts, place_counts = read_counts(fields.counts, num_reasons)
    held = tuple(base64.b64decode(text, validate=True) for text in fields.held)
    return LaneState(**numbers, counts=counts, place_counts=place_counts, held=held)

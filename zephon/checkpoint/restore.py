"""Whether a state fits a pipeline, and the lanes' places as that pipeline counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from zephon.checkpoint.schema import State
from zephon.errors import CheckpointError
from zephon.flow.held import read_held
from zephon.flow.progress import Counts, LaneState
from zephon.ops.accumulator import Accumulator
from zephon.plan.fingerprint import Difference, Fingerprint, Words, differences, group_of, is_code, short
from zephon.plan.graph import Plan
from zephon.plan.limits import save_every
from zephon.work.continued import check_continues
from zephon.work.past import in_tokens, state_means
from zephon.work.source import MAX_POSITION, WorkSource
from zephon.work.static_mixture import StaticMixture


class Allowed:
    """Fields of the definition that may differ, or groups of them (`datasets.web`); what was said of it is said once.

    A pipeline shares it with those that are made from it: each is checked, and says only what is new.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._said: set[str] = set()

    def __contains__(self, field: str) -> bool:
        return field in self.names or group_of(field) in self.names

    def unused(self, fields: Iterable[str]) -> list[str]:
        """Names that are neither one of these fields nor a group of them."""
        return sorted(self.names - {name for field in fields for name in (field, group_of(field))})

    def new(self, notices: Iterable[str]) -> list[str]:
        """Those that were not said yet."""
        found = [notice for notice in notices if notice not in self._said]
        self._said.update(found)
        return found


def check_definition(state: State, fingerprint: Fingerprint, source: WorkSource, allowed: Allowed) -> list[str]:
    """Refuses a definition that differs from the state's, field by field; returns notices of what was let pass.

    Raises CheckpointError. Hashes of code made by another minor version of Python cannot be compared: a notice.
    `fingerprint` is that of a pipeline with this source.
    """
    found = differences(state.fingerprint, fingerprint)
    if isinstance(source, StaticMixture):
        was = state.fingerprint.get("source")
        means = dict(zip(source.shares.names, source.shares.means, strict=True)) if source.shares.means else None
        for difference in found:
            field = difference.field
            difference.was = _as_given(field, difference.was, was, state_means(was) if isinstance(was, dict) else None)
            difference.now = _as_given(field, difference.now, fingerprint["source"], means)
    pythons = (state.fingerprint.get("python"), fingerprint.get("python"))
    refused: list[Difference] = []
    notices = []
    for difference in found:
        if difference.field in allowed:
            notices.append(f"allowed change of {difference}")
        elif pythons[0] != pythons[1] and is_code(difference):
            notices.append(f"{difference.field} cannot be compared between Python {pythons[0]} and {pythons[1]}")
        else:
            refused.append(difference)
    unused = allowed.unused(difference.field for difference in found)
    notices += [f"allow={name!r} names no field that differs" for name in unused]
    if refused:
        lines = "\n  ".join(map(str, refused))
        names = [difference.field for difference in refused]
        raise CheckpointError(
            f"this pipeline is not the one that wrote the state:\n  {lines}\nmake them equal, or accept a change with "
            f"load_state_dict(state, allow={names!r})"
        )
    return allowed.new(notices)


_HELD = (
    "records are held at the state's place (flush_every_k_chunks=0, or a long window), and some documents would come "
    "twice and others never, so allow= cannot pass it; go back to what the state has, or change it between two passes"
)


def check_holders(state: State, fingerprint: Fingerprint, plan: Plan) -> None:
    """Raises CheckpointError where accumulators that held records at the lanes' places are others, or set otherwise,
    or where what they held is damaged.

    What they let go since the place would be other samples, of which as many would be skipped as were delivered: some
    documents would come twice and others never. So `allow` cannot pass it. Changed code may decide the same: it can.
    """
    held: list[list[str]] = []
    for lane, place in state.lanes.items():
        try:
            held = [read_held(raw).names for raw in place.held] or held
        except ValueError as error:
            raise CheckpointError(f"the state is damaged: lane {lane}: {error}") from error
    if not held:
        return
    now = [[_name(a) for a in stage.accumulators] for stage in plan.stages if stage.accumulators]
    if held != now:
        raise CheckpointError(
            f"the state's steps that hold records are {_rows(held)}, this pipeline's {_rows(now)}; {_HELD}"
        )
    settings = {f"{_name(a)}.{setting}" for a in plan.accumulators for setting in a.settings()}
    changed = [d for d in differences(state.fingerprint, fingerprint) if d.field in settings and not is_code(d)]
    if changed:
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(d.field.rpartition(".")[0] for d in changed))
        lines = "\n  ".join(map(str, changed))
        raise CheckpointError(f"{names} cannot be set otherwise in the middle of a pass:\n  {lines}\n{_HELD}")


def _name(accumulator: Accumulator) -> str:
    return accumulator.name or accumulator.method


def _rows(names: list[list[str]]) -> str:
    return ", then behind operators ".join(", ".join(f"'{name}'" for name in row) for row in names) or "none"


def _as_given(field: str, value: Any, source: Any, means: Mapping[str, Fraction] | None) -> Any:
    """What differs of weights in tokens, with what the user gave: compared are weights of samples, and measured means.

    means: the mean tokens by which this side's weights were divided, as far as they are known.
    """
    if not means:
        return value
    if field == "source.mean_tokens":
        shown = {name: round(float(mean), 2) for name, mean in means.items()}
        return Words(f"{shown}, {'measured' if isinstance(source.get('mean_tokens'), list) else 'given'}")
    if field == "source.weights" and isinstance(value, dict) and source.get("change") != "linear":
        return Words(f"{short(value)} in samples, {short(in_tokens(value, means))} in tokens")
    return value


def check_source(state: State, source: WorkSource, plan: Plan) -> None:
    """Raises CheckpointError where weights or datasets differ over what was read, though `allow` names them."""
    was = state.fingerprint.get("source")
    if isinstance(source, StaticMixture) and isinstance(was, dict) and was.get("type") == type(source).__name__:
        window = int(state.fingerprint.get("flush_every_k_chunks") or 0) * source.chunk_size
        if not window and plan.regroups:  # then the next place is the next state of the accumulators
            window = save_every(plan, source.chunk_size)
        rows = _rows_read(state, window or 1, source.chunk_size)
        check_continues(source, was, _sizes(state), state.canonical_replicas, rows)


def _sizes(state: State) -> dict[str, int]:
    """Rows of the state's datasets by name, where it has them one by one."""
    table: dict[str, Any] = state.fingerprint.get("datasets") or {}
    return {name: int(fields["rows"]) for name, fields in table.items() if "rows" in fields and "number" not in fields}


def check_held(state: State, source: WorkSource, plan: Plan) -> None:
    """Raises CheckpointError where what the lanes held is missing, or would be taken for another dataset's."""
    never_cut = plan.regroups and state.fingerprint.get("flush_every_k_chunks") == 0
    for lane, place in state.lanes.items():
        if never_cut and not place.held and (place.chunk, place.offset) != (0, 0):
            raise CheckpointError(f"the state is damaged: lane {lane} lacks what its accumulators held")
    if not any(place.held for place in state.lanes.values()):
        return
    fields = state.fingerprint.get("source")
    was = fields.get("datasets") if isinstance(fields, dict) else None
    now = [dataset.name for dataset in source.datasets]
    if isinstance(was, list) and now[: len(was)] != was:
        raise CheckpointError(
            f"source.datasets: the state has {was}, this pipeline {now}. Accumulators hold records of them, known by "
            "the place of their dataset in that list: add datasets behind the others, or change them between two passes"
        )


def _rows_read(state: State, window: int, chunk_size: int) -> int:
    """Every lane's chunks that count as read of the current pass lie below it.

    window: pointers from a lane's place on that count as read where it has begun with them.
    """
    now = min((place.pass_index for place in state.lanes.values()), default=0)
    if any(place.pass_index > now for place in state.lanes.values()):  # such a lane has read all of it
        return MAX_POSITION
    ends = (
        place.chunk * chunk_size + place.offset + window * bool(place.offset or place.skip)
        for place in state.lanes.values()
    )
    return -(-max(ends, default=0) // chunk_size)


def fit_lanes(state: State, reasons: Mapping[str, int], batch_size: int, cycles_per_step: int) -> dict[int, LaneState]:
    """The lanes' places with this plan's order of reasons, and turns counted in its cycles.

    Raises CheckpointError where the batch shape changed in the middle of a global step.
    """
    lanes = {lane: _renumbered(place, state.reasons, reasons) for lane, place in state.lanes.items()}
    if (batch_size, cycles_per_step) == (state.batch_size, state.cycles_per_step):
        return lanes
    now = min(place.pass_index for place in lanes.values())
    turns = {place.turns for place in lanes.values() if place.pass_index == now}
    later = any(place.turns for place in lanes.values() if place.pass_index > now)
    if later or len(turns) > 1 or max(turns) % state.cycles_per_step:
        raise CheckpointError(
            f"batch size or cycles_per_step changed (from {state.batch_size} x {state.cycles_per_step} to "
            f"{batch_size} x {cycles_per_step}), but the state was taken in the middle of a global step: its lanes had "
            f"{min(turns)} to {max(turns)} turns; take the state between steps, or keep the batch shape until one ends"
        )
    return {
        lane: msgspec.structs.replace(place, turns=place.turns // state.cycles_per_step * cycles_per_step)
        for lane, place in lanes.items()
    }


def _renumbered(place: LaneState, names: list[str], reasons: Mapping[str, int]) -> LaneState:
    def moved(counts: Counts) -> Counts:
        new = [0] * len(reasons)
        for name, amount in zip(names, counts, strict=True):
            if name in reasons:
                new[reasons[name]] = amount
        return tuple(new)

    return msgspec.structs.replace(place, counts=moved(place.counts), place_counts=moved(place.place_counts))

"""How many batches the lanes of a pass have, and how many global steps that is, where it is arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from zephon.errors import ConfigError
from zephon.flow.progress import LaneState
from zephon.ops.base import in_words
from zephon.ops.batch import Batch
from zephon.options import DataOptions
from zephon.plan.graph import Plan
from zephon.work.source import WorkSource

MOST_WALKED = 1 << 20  # pointers of a pass; to find the excluded ones among more of them takes seconds


class Ending(msgspec.Struct, frozen=True):
    """How a pass ends for all groups. `steps`: the whole global steps that it has; None: not known, and `why`.

    `pad`: what a lane lacks of them is filled. `given`: the user said how many, so nothing beyond is looked at.
    """

    pad: bool
    given: bool
    steps: int | None
    why: str = ""


class Unknown(msgspec.Struct, frozen=True):
    """Why the batches of a pass cannot be counted without making them."""

    why: str


def ending(
    plan: Plan, source: WorkSource, num_lanes: int, pass_index: int, data: DataOptions, places: Mapping[int, LaneState]
) -> Ending | None:
    """How a pass ends; None where each group delivers all that it has.

    places: where lanes of the run stand, as far as a state says.
    """
    if data.last_step is None and data.steps_per_pass is None:
        return None
    pad = data.last_step == "pad"
    if data.steps_per_pass is not None:
        return Ending(pad, True, data.steps_per_pass)
    found = batches_of_lanes(plan, source, num_lanes, pass_index, places)
    if isinstance(found, Unknown):
        return Ending(pad, False, None, found.why)
    return Ending(pad, False, whole_steps(found, data.cycles_per_step, pad))


def whole_steps(batches: Sequence[int], cycles: int, pad: bool) -> int:
    """The global steps that every lane has whole; with `pad` those of which any lane has a batch."""
    return max(-(-n // cycles) for n in batches) if pad else min(n // cycles for n in batches)


def batches_of_lanes(
    plan: Plan, source: WorkSource, num_lanes: int, pass_index: int, places: Mapping[int, LaneState] | None = None
) -> list[int] | Unknown:
    """Batches of every lane in a pass, in the order of the lanes.

    With `places` (see `ending`) a batch size that changed in the middle of the pass is counted too.
    """
    samples = samples_of_lanes(plan, source, num_lanes, pass_index)
    if isinstance(samples, Unknown):
        return samples
    here = {lane: place for lane, place in (places or {}).items() if place.pass_index == pass_index}
    if all(_is_regular(place, samples[lane], plan.batch) for lane, place in here.items()):
        return [_batches(n, plan.batch) for n in samples]
    if len(here) < num_lanes:
        return Unknown(
            "the batch size or cycles_per_step changed in this pass, and the state does not say where all lanes are "
            "(load one of all lanes, as checkpoint() or zephon.merge_states makes it)"
        )
    return [here[lane].turns + _batches(max(0, n - here[lane].samples), plan.batch) for lane, n in enumerate(samples)]


def batches_of_group(
    plan: Plan, source: WorkSource, num_lanes: int, pass_index: int, data: DataOptions, lanes: Sequence[int]
) -> int | Unknown:
    """Batches of some lanes together in a whole pass, what pads it too."""
    found = ending(plan, source, num_lanes, pass_index, data, {})
    if found is not None and found.steps is not None:
        return found.steps * data.cycles_per_step * len(lanes)
    batches = batches_of_lanes(plan, source, num_lanes, pass_index)
    return batches if isinstance(batches, Unknown) else sum(batches[lane] for lane in lanes)


APART = (
    "ranks may end this pass some steps apart, and a collective call that waits for all of them would hang; say "
    "options(last_step='drop') or 'pad', so that all end with the same step, or steps_per_pass="
)


def may_end_apart(plan: Plan, source: WorkSource, num_lanes: int, pass_index: int) -> bool:
    """Whether lanes may have unequal numbers of batches."""
    if source.length(pass_index) is None:
        return False
    found = batches_of_lanes(plan, source, num_lanes, pass_index)
    return isinstance(found, Unknown) or len(set(found)) > 1


def no_way(why: str) -> str:
    """The message where groups must end together, and neither arithmetic nor another rank says where."""
    return (
        f"last_step wants all groups to end with the same step, but how long a pass is cannot be known in advance "
        f"({why}), and there is no torch.distributed here through which they could agree (the workers of a DataLoader "
        "have none); initialise it before you iterate, say how long a pass is (options(steps_per_pass=...)), or "
        "leave last_step out"
    )


def check_given(
    plan: Plan,
    source: WorkSource,
    num_lanes: int,
    pass_index: int,
    data: DataOptions,
    places: Mapping[int, LaneState],
) -> None:
    """Raises ConfigError where `steps_per_pass` is more than the lanes are known to have."""
    found = batches_of_lanes(plan, source, num_lanes, pass_index, places)
    wanted = (data.steps_per_pass or 0) * data.cycles_per_step
    if not isinstance(found, Unknown) and min(found) < wanted:
        lane = found.index(min(found))
        raise ConfigError(
            f"steps_per_pass={data.steps_per_pass} with cycles_per_step={data.cycles_per_step} wants {wanted:,} "
            f"batches of every lane, and lane {lane} has {found[lane]:,} in a pass; lower it, give the source more "
            "(end='repeat'), or say last_step='pad'"
        )


def _is_regular(place: LaneState, samples: int, batch: Batch) -> bool:
    """Whether a lane had batches of this size alone."""
    deliverable = samples - samples % batch.size if batch.drop_last else samples
    return place.samples == min(place.turns * batch.size, deliverable)


def _batches(samples: int, batch: Batch) -> int:
    return samples // batch.size if batch.drop_last else -(-samples // batch.size)


def samples_of_lanes(plan: Plan, source: WorkSource, num_lanes: int, pass_index: int) -> list[int] | Unknown:
    """Samples of every lane in a pass, in the order of the lanes."""
    if (why := _uncounted(plan, source, pass_index)) is not None:
        return Unknown(why)
    lengths = [source.lane_length(lane, num_lanes, pass_index) for lane in range(num_lanes)]
    if None in lengths:
        return Unknown(f"{type(source).__name__}.lane_length does not say how many pointers a lane has")
    pointers = cast("list[int]", lengths)
    if not any(map(_excluded_rows, source.datasets)):
        return pointers
    if sum(pointers) > MOST_WALKED:
        return Unknown(f"rows are excluded, and to find them among more than {MOST_WALKED:,} pointers would take long")
    return [n - _excluded(source, lane, num_lanes, pass_index) for lane, n in enumerate(pointers)]


def _uncounted(plan: Plan, source: WorkSource, pass_index: int) -> str | None:
    """What keeps the samples of a pass from being its pointers; None: nothing."""
    if source.length(pass_index) is None:
        return "the source is endless"
    for stage in plan.stages:
        for node in (*stage.operators, *stage.accumulators):
            if not node.one_to_one:
                return f"{in_words(node)} may give more or fewer records than it takes"
    for dataset in source.datasets:
        if getattr(dataset, "on_error", "raise") == "skip":
            return f"dataset '{dataset.name}' leaves out rows that cannot be read (on_error='skip')"
    return None


def _excluded_rows(dataset: Any) -> int:
    return len(getattr(dataset, "excluded_rows", ()))


def _excluded(source: WorkSource, lane: int, num_lanes: int, pass_index: int) -> int:
    """Excluded rows among the pointers of a lane, found by going through all of them."""
    number = index = 0
    while True:
        for pointers in source.chunks(lane, num_lanes, pass_index, index, 64):
            if not len(pointers):
                return number
            index += 1
            for dataset in np.unique(pointers.dataset).tolist():
                found: Any = source.datasets[dataset]
                if _excluded_rows(found):
                    number += int(found.is_excluded(pointers.row[pointers.dataset == dataset]).sum())


def in_words_of(ending: Ending | None, groups: int) -> str:
    """How a pass ends, for `explain`."""
    if ending is None:
        apart = "; groups may end some steps apart (last_step=)" if groups > 1 else ""
        return f"a pass ends with the last batch of this group's lanes{apart}"
    lacking = "what a lane lacks is filled with copies that count no sample" if ending.pad else ""
    if ending.given:
        return f"a pass ends after {ending.steps:,} global steps; {lacking or 'a lane that ends before is an error'}"
    lacking = lacking or "what lanes have beyond it is dropped and counted"
    if ending.steps is not None:
        return f"a pass ends with the same step on all groups, the first one after {ending.steps:,}; {lacking}"
    return f"a pass ends with the same step on all groups; they agree as they go, as {ending.why}; {lacking}"

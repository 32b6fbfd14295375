"""What the tests of the laws share: the truth of a recipe, what a run delivered, and how the two compare."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from hypothesis import settings

import zephon as zp
from zephon.errors import OperatorError, ZephonError
from zephon.testing.oracle import OracleBatch, OracleLane
from zephon.testing.recipes import Recipe


def examples(factor: float) -> settings:
    """`factor` times the examples of the profile that is loaded."""
    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, round(profile.max_examples * factor)))


class Lane(NamedTuple):
    """One lane of one pass as the oracle has it. `dropped` is complete only without an error."""

    batches: list[OracleBatch]
    dropped: dict[str, int]
    error: ZephonError | None


def truth(recipe: Recipe, lane: int, pass_index: int = 0, most: int | None = None) -> Lane:
    """The oracle's stream; at most `most` batches of it."""
    oracle = OracleLane(recipe.build(), lane, pass_index)
    batches: list[OracleBatch] = []
    try:
        batches.extend(islice(oracle, most))
    except ZephonError as error:
        return Lane(batches, {}, error)
    return Lane(batches, {name: n for name, n in oracle.dropped.items() if n}, None)


def truths(recipe: Recipe, passes: int = 1) -> dict[tuple[int, int], Lane]:
    """(lane, pass) -> the oracle's stream. Counts run on from pass to pass, as those of a pipeline do."""
    found: dict[tuple[int, int], Lane] = {}
    for lane in range(recipe.num_lanes):
        delivered, dropped = 0, Counter[str]()
        for number in range(passes):
            alone = truth(recipe, lane, number)
            batches = [_behind(batch, delivered, dropped) for batch in alone.batches]
            delivered += sum(len(batch.origins) for batch in batches)
            dropped += Counter(alone.dropped)
            found[lane, number] = Lane(batches, dict(dropped), alone.error)
    return found


def _behind(batch: OracleBatch, delivered: int, dropped: Counter[str]) -> OracleBatch:
    """A batch with what was delivered and dropped in earlier passes added to its counts."""
    return batch._replace(delivered=batch.delivered + delivered, dropped=dict(dropped + Counter(batch.dropped)))


def in_turn(lanes: Mapping[int, Lane]) -> tuple[list[tuple[int, OracleBatch]], ZephonError | None]:
    """What a group that owns `lanes` must deliver from the start of a pass: strict round-robin, up to an error."""
    order: list[tuple[int, OracleBatch]] = []
    left, turn = sorted(lanes), 0
    while left:
        for lane in list(left):
            if turn < len(lanes[lane].batches):
                order.append((lane, lanes[lane].batches[turn]))
            elif lanes[lane].error is not None:
                return order, lanes[lane].error
            else:
                left.remove(lane)
        turn += 1
    return order, None


class Seen(NamedTuple):
    """One batch as it was delivered, and its lane's counts behind it."""

    lane: int
    pass_index: int
    step: int
    digest: str
    origins: Any
    delivered: int
    dropped: dict[str, int]


def seen(pipeline: zp.Pipeline, batch: zp.Batch) -> Seen:
    """The batch that `pipeline` delivered last."""
    counts, lane = pipeline.counts(), batch.lane_id
    delivered, dropped = counts["delivered"][lane], counts["dropped"][lane]
    return Seen(lane, batch.pass_index, batch.step, batch.digest(), batch.origins, delivered, dropped)


class Run(NamedTuple):
    """What one iterator gave."""

    batches: list[Seen]
    error: ZephonError | None


def run(pipeline: zp.Pipeline, most: int | None = None, iterator: Iterator[zp.Batch] | None = None) -> Run:
    """Takes up to `most` batches, to the end of the pass or to an error."""
    found: list[Seen] = []
    try:
        found.extend(seen(pipeline, batch) for batch in islice(iterator or iter(pipeline), most))
    except ZephonError as error:
        return Run(found, error)
    return Run(found, None)


def same_batch(got: Seen, want: OracleBatch, at: str) -> None:
    """Origins, digest and counts."""
    assert got.origins == want.origins, (at, got.origins, want.origins)
    assert got.digest == want.digest, at
    assert got.delivered == want.delivered, at
    assert got.dropped == want.dropped, at


def same_lane(found: Iterable[Seen], wanted: list[OracleBatch], what: object = "") -> None:
    """One lane's stream, batch for batch."""
    found = list(found)
    for number, (got, want) in enumerate(zip(found, wanted, strict=False)):
        same_batch(got, want, f"lane {got.lane}, batch {number} of {len(wanted)}; {what}")
    assert len(found) == len(wanted), what


def same_group(found: Run, lanes: Mapping[int, Lane], cycles_per_step: int, what: object = "") -> None:
    """A group's whole pass: order of lanes, steps, batches, counts, and the error if there must be one."""
    wanted, error = in_turn(lanes)
    turns = Counter[int]()
    for got, (lane, want) in zip(found.batches, wanted, strict=False):
        at = f"lane {got.lane}, turn {turns[lane]}; {what}"
        assert got.lane == lane, at
        same_batch(got, want, at)
        assert got.step == turns[lane] // cycles_per_step, at
        turns[lane] += 1
    assert len(found.batches) == len(wanted), (what, found.error)
    same_error(found.error, error)


def same_error(found: ZephonError | None, wanted: ZephonError | None) -> None:
    """The same classes, operator and cause, and the same record named."""
    assert (found is None) == (wanted is None), (found, wanted)
    if found is None or wanted is None:
        return
    assert _described(found) == _described(wanted)
    for place in re.finditer(r"\('(\w+)', '(\w+)', (\d+)\)", str(wanted)):  # as the oracle writes it
        assert "dataset '{}', shard {}, row {}".format(*place.groups()) in str(found)


def _described(error: ZephonError) -> tuple[Any, ...]:
    operator = error.operator if isinstance(error, OperatorError) else None
    return [kind.__name__ for kind in type(error).__mro__], operator, repr(error.__cause__)


State = dict[str, Any]


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state through JSON."""
    carried: dict[str, Any] = json.loads(json.dumps(state))
    return carried


def first_pass(state: Mapping[str, Any]) -> int:
    """The pass that a group with this state is in: the least of its lanes'."""
    return min(int(lane["pass"]) for lane in state["lanes"].values())


class Recorder:
    """A dataset that notes which rows it was asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def read(self, rows: Any, on: Any = None) -> Any:
        self.rows += [int(row) for row in rows]
        return self._dataset.read(rows, on)

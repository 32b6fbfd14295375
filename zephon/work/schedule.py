"""Weights that change along a pass, as a user declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final, Literal, get_args

from zephon.errors import ConfigError
from zephon.work.source import MAX_POSITION, check_int
from zephon.work.weights import PerDataset

Change = Literal["steps", "linear"]
MAX_STEPS: Final = 4096  # of a whole schedule; each is a small merge of its own, made when the source is

Exact = list[Fraction]


class MixtureSchedule:
    """Mixture weights that change at given positions: a curriculum in one run. Give it as `weights=` of a source.

    points: weights by position, a dict or a list of pairs, the first at position 0. Positions count the samples
        (pointers) that a pass reads, all lanes together; each pass begins at 0. The weights are those of
        `StaticMixture`: a dict by dataset name or a list in order. A dataset that is not drawn from some position on
        has weight 0 there.
    change: "steps": each weights hold from their position to the next. "linear": shares go in a straight line from
        one point to the next; behind the last one they stay. To hold shares for a while, give them twice.
    ramp_steps: steps of equal length that stand for a line, each with the share of its middle, so the samples drawn
        over a line are exactly its own to within a few.

    The change is at the position itself. Across changes every dataset goes on where it was: none of its rows is left
    out, none is drawn twice in an epoch. At any position each dataset has had its share to within a few samples, as
    with weights that do not change; the time to find a position does not grow with it.

    Raises ConfigError for positions that are not ascending from 0.
    """

    def __init__(
        self,
        points: Mapping[int, PerDataset] | Sequence[tuple[int, PerDataset]],
        *,
        change: Change = "steps",
        ramp_steps: int = 64,
    ) -> None:
        if change not in get_args(Change):
            raise ConfigError(f"MixtureSchedule(change={change!r}): it must be 'steps' or 'linear'")
        self.change: Change = change
        self.ramp_steps = check_int("ramp_steps", ramp_steps, 1, MAX_STEPS)
        self.points = _checked(points)

    def __repr__(self) -> str:
        return f"MixtureSchedule({dict(self.points)}, change={self.change!r}, ramp_steps={self.ramp_steps})"


def _checked(points: Any) -> list[tuple[int, PerDataset]]:
    try:
        pairs = [(at, weights) for at, weights in (points.items() if isinstance(points, Mapping) else points)]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise ConfigError(f"MixtureSchedule({points!r}): give weights by position, {{0: {{...}}, 1_000_000: {{...}}}}")
    found = [(check_int("a position of MixtureSchedule", at, 0, MAX_POSITION - 1), weights) for at, weights in pairs]
    if found[0][0] != 0:
        raise ConfigError(f"MixtureSchedule: the first position is {found[0][0]:,}; it must be 0, where a pass begins")
    for (before, _), (at, _) in pairwise(found):
        if at <= before:
            raise ConfigError(f"MixtureSchedule: position {at:,} comes behind {before:,}; they must ascend")
    return found


def lay_out(points: Sequence[tuple[int, Exact]], change: Change, ramp_steps: int) -> list[tuple[int, Exact]]:
    """The points as steps: (position, shares from there on)."""
    if change == "steps":
        return list(points)
    steps: list[tuple[int, Exact]] = []
    for (start, one), (stop, other) in pairwise(points):
        steps += _line(start, _shares(one), stop, _shares(other), ramp_steps)
    found = [*steps, (points[-1][0], _shares(points[-1][1]))]
    if len(found) > MAX_STEPS:
        raise ConfigError(
            f"a MixtureSchedule of {len(points):,} points with ramp_steps={ramp_steps} makes {len(found):,} steps; at "
            f"most {MAX_STEPS:,} are allowed: lower ramp_steps, or give fewer points"
        )
    return found


def _shares(weights: Exact) -> Exact:
    total = sum(weights)
    return [weight / total for weight in weights]


def _line(start: int, one: Exact, stop: int, other: Exact, most: int) -> list[tuple[int, Exact]]:
    if one == other:
        return [(start, one)]
    length = stop - start
    number = min(most, length)
    bounds = [start + length * i // number for i in range(number + 1)]
    steps = []
    for low, high in pairwise(bounds):
        done = Fraction(low + high - 2 * start, 2 * length)
        steps.append((low, [a + (b - a) * done for a, b in zip(one, other, strict=True)]))
    return steps

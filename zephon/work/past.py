"""The mixture that a state was written with, and whether other steps of weights have the same past.

A place is a position in the pass. Other weights give other pointers at the same position, so they may differ only from
a position on that no lane has come to. That is what a `MixtureSchedule` says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple

from zephon.work.ends import Merge, merge_for, never_complete, pass_length
from zephon.work.schedule import lay_out
from zephon.work.shares import merged
from zephon.work.source import MAX_POSITION
from zephon.work.weights import integer_weights

Named = list[tuple[int, dict[str, int]]]
"""Positive weights by dataset name, in the datasets' order, from positions on."""


class Past(NamedTuple):
    """What the lanes of a state may have read of a pass: its mixture up to `until`."""

    names: list[str]  # the state's datasets
    points: list[tuple[int, dict[str, int]]]  # its weights, as its fingerprint has them
    is_linear: bool
    ramp_steps: int
    means: dict[str, Fraction] | None  # the tokens by which `points` are divided
    steps: Named
    length: int | None  # of its pass, where that is known and has an end
    rows: int  # every lane's chunks below this one may have been read
    row: int  # pointers in the chunks of all lanes with one index

    @property
    def until(self) -> int:
        """Positions below it may have been read."""
        return min(self.rows * self.row, self.length or MAX_POSITION)

    def problem(self, steps: Named, length: int | None) -> str | None:
        """Why a mixture of these steps, whose pass has this length, does not go on; None: it does."""
        differ = _first_difference(_before(self.steps, self.until), _before(steps, self.until))
        if differ is not None:
            return f"the new weights differ from position {differ:,} on"
        whole = min(_whole_rows(self.length, self.row), _whole_rows(length, self.row))
        if self.rows > whole and self.length != length:
            return "the pass would end elsewhere, and lanes are near its end"
        return None


def read_past(was: Mapping[str, Any], sizes: Mapping[str, int], row: int, rows: int) -> Past | None:
    """Out of the fingerprint of a state's source. None where it holds its weights as a hash.

    sizes: rows of the datasets by name, as far as they are known.
    """
    names, weights = was.get("datasets"), was.get("weights")
    if not isinstance(names, list) or not isinstance(weights, Mapping):
        return None
    by_position = {int(at): w for at, w in weights.items()} if _is_by_position(weights) else {0: weights}
    if not all(isinstance(w, Mapping) and set(w) == set(names) for w in by_position.values()):
        return None
    points = [(at, {name: int(w[name]) for name in names}) for at, w in sorted(by_position.items())]
    is_linear, ramp_steps = was.get("change") == "linear", int(was.get("ramp_steps", 1))
    means = state_means(was) if is_linear else None
    steps = lay_out_named(names, points, is_linear, ramp_steps, means)
    length = None
    if all(name in sizes for _, each in steps for name in each):
        epochs, most = int(was.get("epochs", 1)), was.get("max_epochs")
        length = length_of(names, steps, sizes, str(was.get("end")), epochs, most)
    return Past(names, points, is_linear, ramp_steps, means, steps, length, rows, row)


def state_means(was: Mapping[str, Any]) -> dict[str, Fraction] | None:
    """The mean tokens by dataset name that a state's source holds."""
    names, means = was.get("datasets"), was.get("mean_tokens")
    if isinstance(means, list) and isinstance(names, list) and len(means) == len(names):
        means = dict(zip(names, means, strict=True))
    return {name: Fraction(mean) for name, mean in means.items()} if isinstance(means, Mapping) else None


def in_tokens(weights: Any, means: Mapping[str, Fraction]) -> Any:
    """Weights of samples, of a fingerprint, in tokens."""
    if _is_by_position(weights):
        return {at: in_tokens(each, means) for at, each in weights.items()}
    exact = {name: weight * means[name] for name, weight in weights.items() if weight}
    integers = dict(zip(exact, integer_weights(list(exact.values())), strict=True))
    return {name: integers.get(name, 0) for name in weights}


def lay_out_named(
    names: Sequence[str],
    points: Sequence[tuple[int, Mapping[str, int]]],
    is_linear: bool,
    ramp_steps: int,
    means: Mapping[str, Fraction] | None,
) -> Named:
    """Points as steps of weights of samples."""
    exact = [(at, [Fraction(weights[name]) for name in names]) for at, weights in points]
    line = lay_out(exact, "linear" if is_linear else "steps", ramp_steps)
    steps = merged(line, [means[name] if means else Fraction(1) for name in names])
    return [(at, positive(names, weights)) for at, weights in steps]


def positive(names: Sequence[str], weights: Sequence[int]) -> dict[str, int]:
    """The datasets that are drawn."""
    return {name: weight for name, weight in zip(names, weights, strict=True) if weight}


def length_of(
    names: Sequence[str], steps: Named, sizes: Mapping[str, int], end: str, epochs: int, max_epochs: int | None
) -> int | None:
    """The length of a pass of such a mixture. ConfigError where `end` bears no such steps."""
    merge, rows = _merge_of(names, steps, sizes, end)
    return pass_length(merge, rows, end, epochs, max_epochs)


def all_complete(names: Sequence[str], steps: Named, sizes: Mapping[str, int], epochs: int) -> bool:
    """Whether every dataset that is drawn completes its epochs, as end="epochs" wants."""
    merge, rows = _merge_of(names, steps, sizes, "epochs")
    return not never_complete(merge, rows, epochs)


def _merge_of(names: Sequence[str], steps: Named, sizes: Mapping[str, int], end: str) -> tuple[Merge, list[int]]:
    drawn = [name for name in names if any(name in weights for _, weights in steps)]
    whole = [(at, tuple(weights.get(name, 0) for name in drawn)) for at, weights in steps]
    rows = [sizes[name] for name in drawn]
    return merge_for(end, whole, rows), rows


def _is_by_position(weights: Mapping[str, Any]) -> bool:
    return all(isinstance(each, Mapping) for each in weights.values())


def _before(steps: Named, position: int) -> Named:
    return [step for step in steps if step[0] < position]


def _first_difference(old: Named, new: Named) -> int | None:
    """The first position at which steps differ, in a weight or in the order of the datasets."""
    for one, other in zip_longest(old, new):
        if one != other or list(one[1]) != list(other[1]):
            return min(step[0] for step in (one, other) if step is not None)
    return None


def _whole_rows(length: int | None, row: int) -> int:
    """Chunks of full size of every lane: what lies behind depends on the length of the pass."""
    return sys.maxsize if length is None else length // row

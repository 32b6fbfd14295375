"""Whether a mixture with other weights goes on where a run stands: nothing read twice, nothing left out.

A place is a position in the pass. Other weights give other pointers at the same position, so they may differ only from
a position on that no lane has come to. That is what a `MixtureSchedule` says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from zephon.errors import CheckpointError
from zephon.work.ends import merge_for, pass_length
from zephon.work.schedule import lay_out
from zephon.work.shares import merged
from zephon.work.source import MAX_POSITION
from zephon.work.static_mixture import StaticMixture
from zephon.work.weights import integer_weights

FIELDS = ("weights", "datasets", "change", "ramp_steps", "mean_tokens")
"""Those of a source's fingerprint that say which dataset is drawn where."""

Named = list[tuple[int, dict[str, int]]]
"""Positive weights by dataset name, in the datasets' order, from positions on."""


def check_continues(source: StaticMixture, was: Mapping[str, Any], num_lanes: int, rows: int) -> None:
    """Raises CheckpointError unless `source` reads what the state's source did, as far as lanes have read.

    was: the fingerprint of the state's source. rows: every lane's chunks below this index may have been read.
    """
    if rows == 0 or all(was.get(field) == _now(source).get(field) for field in FIELDS):
        return
    old = _steps(source, was)
    if old is None:
        raise _refusal("the state holds only a hash of its weights, so they cannot be compared", None, None, source)
    gone = [name for _, weights in old for name in weights if name not in source.shares.names]
    lengths = (None if gone else _length(source, was, old), source.length(0))
    until = min(rows * num_lanes * source.chunk_size, lengths[0] or MAX_POSITION)
    if gone:
        raise _refusal(f"dataset {gone[0]!r} is gone: keep it, with weight 0 from there on", until, old, source)
    new = [(at, _positive(source.shares.names, weights)) for at, weights in source.steps]
    differ = _first_difference(_before(old, until), _before(new, until))
    if differ is not None:
        raise _refusal(f"the new weights differ from position {differ:,} on", until, old, source)
    whole = min(_whole_rows(length, num_lanes, source) for length in lengths)
    if rows > whole and lengths[0] != lengths[1]:
        raise _refusal("the pass would end elsewhere, and lanes are near its end", None, old, source)


def _first_difference(old: Named, new: Named) -> int | None:
    """The first position at which steps differ, in a weight or in the order of the datasets."""
    for one, other in zip_longest(old, new):
        if one != other or list(one[1]) != list(other[1]):
            return min(step[0] for step in (one, other) if step is not None)
    return None


def _now(source: StaticMixture) -> dict[str, Any]:
    return {**source.fingerprint(), "datasets": list(source.shares.names)}


def _positive(names: Sequence[str], weights: Sequence[int]) -> dict[str, int]:
    return {name: weight for name, weight in zip(names, weights, strict=True) if weight}


def _before(steps: Named, position: int) -> Named:
    return [step for step in steps if step[0] < position]


def _steps(source: StaticMixture, was: Mapping[str, Any]) -> Named | None:
    """The state's weights of samples; None where it holds them as a hash."""
    names, weights = was.get("datasets"), was.get("weights")
    if not isinstance(names, list) or not isinstance(weights, Mapping):
        return None
    points = {int(at): w for at, w in weights.items()} if _is_by_position(weights) else {0: weights}
    if not all(isinstance(w, Mapping) and set(w) == set(names) for w in points.values()):
        return None
    exact = [(at, [Fraction(w[name]) for name in names]) for at, w in points.items()]
    if was.get("change") != "linear":
        return [(at, _positive(names, [int(w) for w in each])) for at, each in exact]
    means = _means(names, was.get("mean_tokens"))
    line = lay_out(exact, "linear", int(was.get("ramp_steps", 1)))
    return [(at, _positive(names, each)) for at, each in merged(line, means)]


def _is_by_position(weights: Mapping[str, Any]) -> bool:
    return all(isinstance(each, Mapping) for each in weights.values())


def _means(names: Sequence[str], means: Any) -> list[Fraction]:
    if isinstance(means, Mapping):
        means = [means[name] for name in names]
    return [Fraction(mean) for mean in means] if means else [Fraction(1)] * len(names)


def _length(source: StaticMixture, was: Mapping[str, Any], old: Named) -> int | None:
    """The length of a pass of the state's source."""
    rows = {dataset.name: dataset.num_rows for dataset in source.datasets}
    drawn = [name for name in source.shares.names if any(name in weights for _, weights in old)]
    steps = [(at, tuple(weights.get(name, 0) for name in drawn)) for at, weights in old]
    sizes, end = [rows[name] for name in drawn], str(was.get("end"))
    return pass_length(merge_for(end, steps, sizes), sizes, end, int(was.get("epochs", 1)), was.get("max_epochs"))


def _whole_rows(length: int | None, num_lanes: int, source: StaticMixture) -> int:
    """Chunks of full size of every lane: what lies behind depends on the length of the pass."""
    return sys.maxsize if length is None else length // (num_lanes * source.chunk_size)


def _refusal(why: str, until: int | None, old: Named | None, source: StaticMixture) -> CheckpointError:
    remedy = "go on with the state's weights, or change them between two passes"
    if until is not None and until < MAX_POSITION:
        points = {at: _shown(weights, source) for at, weights in old or [] if at < until}
        points[until] = _shown(_positive(source.shares.names, source.steps[-1][1]), source)
        literal = f"zp.MixtureSchedule({points})" if old and len(old) <= 8 else "zp.MixtureSchedule(...)"
        unit = source.shares.unit
        remedy = (
            f"lanes have read up to position {until:,}, so change them from there on: weights={literal}, in {unit}; "
            f"every dataset then goes on where it is. Or change them between two passes"
        )
    return CheckpointError(
        f"source.weights: allowed to differ, but in the middle of a pass that would read some rows again and leave "
        f"others out: {why}. {remedy[0].upper()}{remedy[1:]}"
    )


def _shown(weights: Mapping[str, int], source: StaticMixture) -> dict[str, int]:
    """Weights as the user would write them, in the source's unit."""
    exact = {name: Fraction(weight) for name, weight in weights.items() if weight}
    if source.shares.means is not None:
        means = dict(zip(source.shares.names, source.shares.means, strict=True))
        exact = {name: weight * means.get(name, Fraction(1)) for name, weight in exact.items()}
    integers = dict(zip(exact, integer_weights(list(exact.values())), strict=True))
    return {name: integers.get(name, 0) for name in dict.fromkeys([*source.shares.names, *weights])}

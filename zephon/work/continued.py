"""Whether a mixture with other weights goes on where a run stands: nothing read twice, nothing left out.

Where it does not, the error writes down the schedule that does, and only one that is accepted as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from zephon.errors import CheckpointError, ConfigError
from zephon.work.past import Past, all_complete, lay_out_named, length_of, positive, read_past, state_means
from zephon.work.source import MAX_POSITION
from zephon.work.static_mixture import StaticMixture
from zephon.work.weights import integer_weights

FIELDS = ("weights", "datasets", "change", "ramp_steps", "mean_tokens")
"""Those of a source's fingerprint that say which dataset is drawn where."""

SHOWN_POINTS = 8


def check_continues(
    source: StaticMixture, was: Mapping[str, Any], sizes: Mapping[str, int], num_lanes: int, rows: int
) -> None:
    """Raises CheckpointError unless `source` reads what the state's source did, as far as lanes have read.

    was: the fingerprint of the state's source. sizes: rows of the state's datasets by name, where it has them. rows:
    every lane's chunks below this index may have been read.
    """
    now = {**source.fingerprint(), "datasets": list(source.shares.names)}
    if rows == 0 or all(was.get(field) == now.get(field) for field in FIELDS):
        return
    sizes = {**sizes, **{dataset.name: dataset.num_rows for dataset in source.datasets}}
    past = read_past(was, sizes, num_lanes * source.chunk_size, rows)
    if past is None:
        raise _refusal("the state holds only a hash of its weights, so they cannot be compared", None)
    names = source.shares.names
    gone = [name for _, weights in past.steps for name in weights if name not in names]
    if gone:
        why = f"dataset {gone[0]!r} is gone: keep it, with weight 0 from there on"
        raise _refusal(why, _remedy(past, source, was, sizes))
    why_not = past.problem([(at, positive(names, weights)) for at, weights in source.steps], source.length(0))
    if why_not is not None:
        raise _refusal(why_not, _remedy(past, source, was, sizes))


def _refusal(why: str, remedy: str | None) -> CheckpointError:
    remedy = remedy or "Go on with the state's weights, or change them between two passes"
    return CheckpointError(
        "source.weights: allowed to differ, but in the middle of a pass that would read some rows again and leave "
        f"others out: {why}. {remedy}"
    )


class _Schedule(NamedTuple):
    """One that is to have the state's past and the new weights behind it."""

    points: list[tuple[int, dict[str, int]]]
    means: dict[str, Fraction] | None  # weights are in tokens; None: in samples
    note: str  # what else must be declared with it


def _remedy(past: Past, source: StaticMixture, was: Mapping[str, Any], sizes: Mapping[str, int]) -> str | None:
    """A schedule that is accepted, in words; None where there is none."""
    if past.until >= MAX_POSITION - 1:
        return None
    names = _names(past, source)
    for schedule in _schedules(past, source, was, names):
        if _is_accepted(schedule, past, source, names, sizes):
            break
    else:
        return None
    where = f"Lanes have read up to position {past.until:,}, so change them from there on"
    if past.is_linear:
        where = (
            f"Lanes have read up to position {past.until:,}, and a line that has begun stays as it is to its end, so "
            f"change them behind position {schedule.points[-2][0]:,}"
        )
    order = "" if names == source.shares.names else f", with the datasets {', '.join(map(repr, names))} in this order"
    unit = "samples" if schedule.means is None else "tokens"
    return (
        f"{where}: weights={_literal(schedule, past)}, in {unit}{schedule.note}{order}; every dataset then goes on "
        "where it is. Or change them between two passes"
    )


def _names(past: Past, source: StaticMixture) -> list[str]:
    """The state's datasets where they were, since what is held is known by that place, and the new ones behind them."""
    return past.names + [name for name in source.shares.names if name not in past.names]


def _schedules(past: Past, source: StaticMixture, was: Mapping[str, Any], names: list[str]) -> Iterator[_Schedule]:
    """Candidates: those in the unit that the source has come first."""
    shares = source.shares
    means = dict(zip(shares.names, shares.means, strict=True)) if shares.means is not None else None
    new = positive(shares.names, source.steps[-1][1])
    if past.is_linear:
        yield _behind_the_line(past, means, new, names)
        return
    before = [point for point in past.steps if point[0] < past.until]
    if means is not None:
        means = {**(state_means(was) or {}), **means}
    if means is not None and set(names) <= set(means):
        points = [(at, _weights(weights, means, names)) for at, weights in [*before, (past.until, new)]]
        yield _Schedule(points, means, "")
    points = [(at, _weights(weights, None, names)) for at, weights in [*before, (past.until, new)]]
    yield _Schedule(points, None, " (weights_in='samples')" if shares.unit == "tokens" else "")


def _behind_the_line(
    past: Past, means: dict[str, Fraction] | None, new: Mapping[str, int], names: list[str]
) -> _Schedule:
    """The state's points to the end of the line that is under way, then a line of one sample to the new weights."""
    points = [(at, {name: weights.get(name, 0) for name in names}) for at, weights in past.points]
    last = next((number for number, (at, _) in enumerate(points) if at >= past.until), None)
    kept = points[: last + 1] if last is not None else [*points, (past.until, points[-1][1])]
    note, used = "", None
    if past.means is not None:
        used = {name: past.means.get(name) or (means or {}).get(name, Fraction(1)) for name in names}
        if means is None or any(means.get(name) != mean for name, mean in used.items()):
            exact = {name: str(mean) for name, mean in used.items()}
            note = f" (weights_in='tokens', mean_tokens={exact})"
    elif means is not None:
        note = " (weights_in='samples')"
    return _Schedule([*kept, (kept[-1][0] + 1, _weights(new, used, names))], used, note)


def _is_accepted(
    schedule: _Schedule, past: Past, source: StaticMixture, names: list[str], sizes: Mapping[str, int]
) -> bool:
    try:
        steps = lay_out_named(names, schedule.points, past.is_linear, past.ramp_steps, schedule.means)
        if source.end == "epochs" and not all_complete(names, steps, sizes, source.epochs):
            return False
        length = length_of(names, steps, sizes, source.end, source.epochs, source.max_epochs)
    except (ConfigError, KeyError):  # `end` bears no such steps; the rows of a dataset that is gone are not known
        return False
    return past.problem(steps, length) is None


def _literal(schedule: _Schedule, past: Past) -> str:
    line = f", change='linear', ramp_steps={past.ramp_steps}" if past.is_linear else ""
    new = 1 if not past.is_linear else 2
    if len(schedule.points) <= SHOWN_POINTS + new:
        return f"zp.MixtureSchedule({dict(schedule.points)}{line})"
    at = schedule.points[-new][0]
    return f"zp.MixtureSchedule({{...the state's points before {at}..., {str(dict(schedule.points[-new:]))[1:]}{line})"


def _weights(weights: Mapping[str, int], means: Mapping[str, Fraction] | None, names: list[str]) -> dict[str, int]:
    """Weights of samples as the user would write them, in the unit of the means."""
    exact = {name: weight * (means[name] if means else Fraction(1)) for name, weight in weights.items()}
    integers = dict(zip(exact, integer_weights(list(exact.values())), strict=True))
    return {name: integers.get(name, 0) for name in names}

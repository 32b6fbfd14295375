"""What a user declared of a mixture's proportions: checked, and made into steps of integer weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from zephon.errors import ConfigError
from zephon.work.phased import Step
from zephon.work.schedule import MAX_STEPS, Exact, MixtureSchedule, lay_out
from zephon.work.source import DatasetLike
from zephon.work.weights import PerDataset, by_dataset, exact_number, integer_weights

Unit = Literal["samples", "tokens"]


class Shares:
    """Weights at positions, exact, in samples or in tokens; and the mean tokens of a sample of each dataset.

    `means`: exact, in the order of the datasets; None where the weights are in samples, or the means not yet known.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetLike],
        weights: PerDataset | MixtureSchedule | None,
        unit: Unit,
        mean_tokens: PerDataset | None,
    ) -> None:
        self.names = [dataset.name for dataset in datasets]
        self.unit = unit
        if unit == "tokens" and weights is None:
            raise ConfigError(
                "weights_in='tokens' needs weights: give weights= as a dict by dataset name or a list in order"
            )
        self.schedule: MixtureSchedule | None = None
        points: list[tuple[int, PerDataset | None]]
        if isinstance(weights, MixtureSchedule):
            self.schedule, points = weights, list(weights.points)
        else:
            points = [(0, weights)]
        self.points = [(at, _exact(datasets, each, at)) for at, each in points]
        if len(self.points) > MAX_STEPS:
            raise ConfigError(f"a MixtureSchedule of {len(self.points):,} points: at most {MAX_STEPS:,} are allowed")
        self.means: Exact | None = None
        if mean_tokens is not None:
            if unit == "samples":
                raise ConfigError(
                    "mean_tokens means nothing with weights_in='samples': drop it, or say weights_in='tokens'"
                )
            self.means = self.check_means(mean_tokens)

    @property
    def drawn(self) -> list[bool]:
        """Of each dataset, whether it is drawn anywhere."""
        return [any(weights[c] for _, weights in self.points) for c in range(len(self.names))]

    def check_means(self, mean_tokens: PerDataset) -> Exact:
        """Mean tokens in order; 1 for a dataset that is never drawn and has none."""
        unused = {name: 1 for name, drawn in zip(self.names, self.drawn, strict=True) if not drawn}
        if isinstance(mean_tokens, Mapping):
            mean_tokens = {**unused, **mean_tokens}
        means = []
        for name, value in zip(self.names, by_dataset(mean_tokens, self.names, "mean_tokens"), strict=True):
            mean = exact_number(value, f"mean_tokens of dataset {name!r}")
            if not mean and name not in unused:
                raise ConfigError(f"mean_tokens of dataset {name!r} is 0: it must be positive")
            means.append(mean or Fraction(1))
        return means

    def steps(self) -> list[Step]:
        """The proportions of samples: (position, one integer >= 0 a dataset, the positive ones coprime)."""
        points = self.points
        if self.schedule is not None:
            points = lay_out(points, self.schedule.change, self.schedule.ramp_steps)
        return merged(points, self.means or [Fraction(1)] * len(self.names))

    def declared(self) -> dict[str, Any]:
        """The weights as fields of a fingerprint: plain data, equal where the stream is."""
        points = [(at, self._named(_integers(exact))) for at, exact in self.points]
        if self.schedule is not None and self.schedule.change == "linear" and len(points) > 1:
            fields: dict[str, Any] = {"weights": _by_position(points), "change": "linear"}
            fields["ramp_steps"] = self.schedule.ramp_steps
            if self.means is not None:
                fields["mean_tokens"] = self._named([str(mean) for mean in self.means])
            return fields
        steps = self.steps()
        if len(steps) == 1:
            return {"weights": self._named(steps[0][1])}
        return {"weights": _by_position([(at, self._named(weights)) for at, weights in steps])}

    def _named(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, values, strict=True))


def merged(points: Sequence[tuple[int, Exact]], means: Exact) -> list[Step]:
    """Exact weights as integers per sample; neighbours that are equal become one."""
    found: list[Step] = []
    for position, exact in points:
        integers = _integers([weight / mean for weight, mean in zip(exact, means, strict=True)])
        if not found or found[-1][1] != integers:
            found.append((position, integers))
    return found


def _by_position(points: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    return {str(at): weights for at, weights in points}


def _integers(exact: Sequence[Fraction]) -> tuple[int, ...]:
    integers = iter(integer_weights([weight for weight in exact if weight]))
    return tuple(next(integers) if weight else 0 for weight in exact)


def _exact(datasets: Sequence[DatasetLike], weights: PerDataset | None, position: int) -> Exact:
    names = [dataset.name for dataset in datasets]
    listed = ", ".join(map(repr, names))
    at = f" at position {position:,}" if position else ""
    if weights is None:
        if not any(dataset.num_rows for dataset in datasets):
            raise ConfigError(f"no dataset has a row ({listed}): there is nothing to read")
        return [Fraction(dataset.num_rows) for dataset in datasets]
    exact = []
    for dataset, value in zip(datasets, by_dataset(weights, names, f"weights{at}"), strict=True):
        weight = exact_number(value, f"the weight of dataset {dataset.name!r}{at}")
        if weight and not dataset.num_rows:
            raise ConfigError(
                f"dataset {dataset.name!r} has weight {value}{at} but no rows: give it weight 0, or leave it out"
            )
        exact.append(weight)
    if not any(exact):
        raise ConfigError(f"all weights are 0{at} ({listed}): at least one must be positive")
    return exact

"""Case A13, as a user of a pipeline meets it: weights that are zero, tiny, do not sum to 1, or are nonsense."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

import zephon as zp

from .helpers import ids, on, resumed, rows, saved

A, B = range(40), range(100, 140)


def mixture(weights: Any, **settings: Any) -> zp.StaticMixture:
    datasets = [zp.Dataset.from_list("a", rows(40)), zp.Dataset.from_list("b", rows(40, first=100))]
    return zp.StaticMixture(datasets, weights, **{"seed": 2, "chunk_size": 16, **settings})


def line_of(weights: Any, workers: int = 0, lanes: int = 1, **settings: Any) -> zp.Pipeline:
    return on(zp.Pipeline(mixture(weights, **settings)).batch(4).options(canonical_replicas=lanes), workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(("weights", "drawn"), [([1, 0], A), ([0, 1], B), ({"b": 0.0, "a": 3}, A)])
def test_a_dataset_without_weight_is_neither_drawn_nor_waited_for(
    weights: Any, drawn: range, lanes: int, workers: int
) -> None:
    for end in ("epochs", "stop", "redistribute"):
        assert sorted(ids(line_of(weights, workers, lanes, end=end))) == list(drawn)
    endless = Counter(ids(line_of(weights, workers, lanes, end="repeat").take(100)))
    assert set(endless) == set(drawn)
    assert sum(endless.values()) == 400


def test_an_empty_dataset_without_weight_is_allowed() -> None:
    datasets = [zp.Dataset.from_list("full", rows(8)), zp.Dataset.from_list("empty", [])]
    for weights in ([1, 0], {"full": 1, "empty": 0}, None):
        line = zp.Pipeline(zp.StaticMixture(datasets, weights)).options(canonical_replicas=1)
        assert sorted(ids(line)) == list(range(8))
    with pytest.raises(zp.errors.ConfigError, match="empty"):
        zp.StaticMixture(datasets, [1, 1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("end", ["epochs", "stop", "redistribute", "repeat"])
def test_proportional_weights_are_one_stream(end: str, workers: int) -> None:
    same: list[Any] = [[0.25, 0.75], [2, 6], {"b": 0.75, "a": 0.25}, [Fraction(1, 4), Fraction(3, 4)], ["0.1", "0.3"]]
    streams = [ids(line_of(weights, workers, end=end).take(100)) for weights in same]
    assert streams == [streams[0]] * len(same)
    states = []
    for weights in same:
        line = line_of(weights, workers, end=end).take(3)
        list(line)
        states.append(saved(line))
    assert states == [states[0]] * len(same)


def test_shares_hold_at_every_prefix() -> None:
    found = ids(line_of([2, 6], end="repeat").take(100))
    for length in range(1, len(found) + 1):
        assert abs(sum(i >= 100 for i in found[:length]) - 0.75 * length) <= 1


def test_ten_weights_that_miss_one_in_floats() -> None:
    datasets = [zp.Dataset.from_list(f"d{i}", rows(40, 100 * i)) for i in range(10)]
    line = zp.Pipeline(zp.StaticMixture(datasets, [0.1] * 10)).options(canonical_replicas=2)
    assert sorted(ids(line.batch(7))) == sorted(100 * i + row for i in range(10) for row in range(40))


@pytest.mark.parametrize("cut", [1, 10, 39])
@pytest.mark.parametrize("weights", [[2, 6], [1, 0], [1e-12, 1]])
def test_a_resume_keeps_the_shares(weights: Any, cut: int) -> None:
    line = line_of(weights, 2, lanes=2, end="repeat")
    reference = ids(line.take(60))
    part = line.take(cut)
    list(part)
    assert ids(resumed(line, saved(part)).take(60 - cut)) == reference[4 * cut :]


@pytest.mark.parametrize("other", [[6, 2], [1, 0], [2, 7]])
def test_other_weights_are_refused_by_name_and_may_be_allowed_from_what_is_not_read_on(other: Any) -> None:
    part = line_of([2, 6], end="repeat").take(5)
    list(part)
    new = line_of(other, end="repeat").take(20)
    with pytest.raises(zp.errors.CheckpointError, match=r"source\.weights"):
        new.load_state_dict(saved(part))
    with pytest.raises(zp.errors.CheckpointError, match="in the middle of a pass"):
        new.load_state_dict(saved(part), allow=["source.weights"])
    new = line_of(zp.MixtureSchedule({0: [2, 6], 32: other}), end="repeat").take(20)
    new.load_state_dict(saved(part), allow=["source.weights"])
    assert len(ids(new)) == 80


@pytest.mark.parametrize(
    "weights",
    [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], [1], [1, 1, 1], {"a": 1}, {"a": 1, "b": 1, "c": 1}, "ab"],
)
def test_nonsense_is_a_value_error_before_any_pipeline(weights: Any) -> None:
    with pytest.raises(ValueError, match="weight") as caught:
        mixture(weights)
    assert isinstance(caught.value, zp.errors.ConfigError)


def test_an_unknown_or_missing_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"'c'|\bc\b"):
        mixture({"a": 1, "c": 1})
    with pytest.raises(ValueError, match=r"'b'|\bb\b"):
        mixture({"a": 1})

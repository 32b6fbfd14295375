"""Case A13: weights that are zero, tiny, do not sum to 1, or are nonsense. Two sources of 40 records."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from zephon.work import StaticMixture

from .brute import Rows, triples


def pair() -> list[Rows]:
    return [Rows("a", 40), Rows("b", 40)]


def draws(datasets: list[Rows], weights: Any, count: int = 400, **arguments: Any) -> list[tuple[int, int, int]]:
    """The pass if it ends, else its first `count` pointers."""
    return triples(StaticMixture(datasets, weights, **arguments).pointers(0, 0, count))


@pytest.mark.parametrize(("weights", "drawn"), [([1, 0], 0), ([0, 1], 1), ([0.5, 0], 0)])
def test_a_weight_of_zero_is_never_drawn_and_never_waited_for(weights: list[float], drawn: int) -> None:
    everything = [(drawn, 0, row) for row in range(40)]
    for end in ("epochs", "stop", "redistribute"):
        assert sorted(draws(pair(), weights, end=end)) == everything
    endless = draws(pair(), weights, end="repeat")
    assert sorted(endless) == [(drawn, epoch, row) for epoch in range(10) for row in range(40)]


@pytest.mark.parametrize("end", ["epochs", "stop", "redistribute", "repeat"])
def test_weights_are_shares(end: str) -> None:
    by_two = draws(pair(), [2, 6], end=end)
    assert by_two == draws(pair(), [0.25, 0.75], end=end)
    assert by_two == draws(pair(), {"b": 0.75, "a": 0.25}, end=end)
    if end == "redistribute":
        return
    b = np.cumsum([dataset for dataset, _, _ in by_two])
    assert np.abs(b - 0.75 * np.arange(1, len(by_two) + 1)).max() <= 1


def test_each_end_of_two_to_six() -> None:
    stop = draws(pair(), [2, 6], end="stop")
    assert sum(d == 1 for d, _, _ in stop) == 40
    assert stop[-1][0] == 1
    assert abs(sum(d == 0 for d, _, _ in stop) - 40 / 3) <= 1
    epochs = draws(pair(), [2, 6], end="epochs")
    assert sum(d == 0 for d, _, _ in epochs) == 40
    assert epochs[-1][0] == 0
    assert abs(sum(d == 1 for d, _, _ in epochs) - 120) <= 3
    spread = draws(pair(), [2, 6], end="redistribute")
    assert sorted(spread) == [(d, 0, row) for d in (0, 1) for row in range(40)]
    assert spread[: len(stop)] == stop


def test_ten_weights_that_miss_one_in_floats() -> None:
    assert sum([0.1] * 10) != 1
    datasets = [Rows(f"d{i}", 40) for i in range(10)]
    found = draws(datasets, [0.1] * 10)
    assert found == draws(datasets, [1] * 10)
    assert sorted(found) == [(d, 0, row) for d in range(10) for row in range(40)]


def test_a_tiny_weight_is_drawn_when_its_turn_comes() -> None:
    assert all(d == 1 for d, _, _ in draws(pair(), [1e-12, 1], end="repeat"))
    assert sorted(draws(pair(), [1e-12, 1], end="stop")) == [(1, 0, row) for row in range(40)]
    assert sorted(draws(pair(), [1e-12, 1], end="redistribute")) == [(d, 0, r) for d in (0, 1) for r in range(40)]
    with pytest.warns(UserWarning, match="dataset 'a'"):
        source = StaticMixture(pair(), [1e-12, 1])
    length = source.length(0)
    assert length is not None
    assert abs(length - 40 * 10**12) <= 10**12
    last = triples(source.pointers(0, length - 3, 10))
    assert len(last) == 3
    assert [(d, e) for d, e, _ in last][-1] == (0, 0)


@pytest.mark.parametrize(
    "weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], [1], [1, 1, 1], [], ["x", 1], 0.5]
)
def test_nonsense_is_a_value_error_at_construction(weights: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        StaticMixture(pair(), weights)


def test_no_random_number_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draws(pair(), [0, 1])
    monkeypatch.setattr(random, "random", lambda: 0.0)
    monkeypatch.setattr(np.random, "random", lambda *size: 0.0)
    random.seed(0)
    np.random.seed(0)
    assert draws(pair(), [0, 1]) == expected

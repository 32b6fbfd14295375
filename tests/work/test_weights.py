"""Weights: exactly what was written, or a clear refusal."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ConfigError
from zephon.work.weights import MAX_PERIOD, by_dataset, exact_number, integer_weights


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, Fraction(3)),
        (0.1, Fraction(1, 10)),
        ("0.7", Fraction(7, 10)),
        ("1/3", Fraction(1, 3)),
        (Fraction(2, 7), Fraction(2, 7)),
        (Decimal("1e-12"), Fraction(1, 10**12)),
        (1e-300, Fraction(1, 10**300)),
        (np.float64(0.1), Fraction(1, 10)),
        (np.float32(0.1), Fraction(1, 10)),
        (np.int64(5), Fraction(5)),
        (0, Fraction(0)),
        (-0.0, Fraction(0)),
    ],
)
def test_a_number_is_taken_as_written(value: object, expected: Fraction) -> None:
    assert exact_number(value, "it") == expected


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-0.1",
        float("nan"),
        float("inf"),
        Decimal("NaN"),
        Decimal("Infinity"),
        True,
        np.True_,
        None,
        "x",
        "",
        "1/0",
        [1],
        1 + 0j,
        "1e999999999",
        "1e-999999999",
    ],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"the weight of 'web' is .*finite number"):
        exact_number(value, "the weight of 'web'")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (["6", "3", "1"], [6, 3, 1]),
        ([".6", ".3", ".1"], [6, 3, 1]),
        (["2", "6"], [1, 3]),
        (["0.25", "0.75"], [1, 3]),
        (["0.1"] * 10, [1] * 10),
        (["1e-12", "1"], [1, 10**12]),
        (["5"], [1]),
    ],
)
def test_decimals_become_coprime_integers(weights: list[str], expected: list[int]) -> None:
    assert integer_weights([Fraction(weight) for weight in weights]) == expected


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=20))
def test_integers_fit_and_stay_within_one_part_of_the_whole(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    integers = integer_weights(exact)
    assert min(integers) >= 1
    assert math.gcd(*integers) == 1
    assert sum(integers) <= MAX_PERIOD
    for weight, integer in zip(exact, integers, strict=True):
        off = abs(Fraction(integer, sum(integers)) - weight / sum(exact)) * MAX_PERIOD
        assert off <= len(weights)  # those raised to 1 are paid for by the largest
    scale = exact[0] / integers[0]
    if all(weight == integer * scale for weight, integer in zip(exact, integers, strict=True)):
        return
    # Rounded only where the exact integers do not fit.
    lcm = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * lcm) for weight in exact]
    assert sum(whole) // math.gcd(*whole) > MAX_PERIOD


def test_largest_remainders_get_what_is_left() -> None:
    big = 3 * MAX_PERIOD
    integers = integer_weights([Fraction(big + 1), Fraction(big + 2), Fraction(big)])
    assert sum(integers) == MAX_PERIOD
    assert integers[1] >= integers[0] >= integers[2]


def test_a_list_keeps_its_order_and_a_dict_is_by_name() -> None:
    assert by_dataset([1, 2], ["a", "b"], "weights") == [1, 2]
    assert by_dataset((1, 2), ["a", "b"], "weights") == [1, 2]
    assert by_dataset(np.array([1, 2]), ["a", "b"], "weights") == [1, 2]
    assert by_dataset({"b": 2, "a": 1}, ["a", "b"], "weights") == [1, 2]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1], "1 entries for 2 datasets"),
        ([1, 2, 3], "3 entries for 2 datasets"),
        ({"a": 1}, "dataset 'b' has none"),
        ({"a": 1, "b": 1, "c": 1}, "no dataset 'c'"),
        ("ab", "a dict by dataset name, or a list"),
        (iter([1, 2]), "a dict by dataset name, or a list"),
        (1.0, "a dict by dataset name, or a list"),
        ({1, 2}, "a dict by dataset name, or a list"),
    ],
)
def test_what_does_not_match_the_datasets_is_refused(values: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        by_dataset(values, ["a", "b"], "weights")

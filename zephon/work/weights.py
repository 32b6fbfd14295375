"""The weights a user wrote, as exact integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Final

import numpy as np

from zephon.errors import ConfigError

MAX_PERIOD: Final = 1 << 48  # largest sum of integer weights: keys of the merge then differ within a double's 53 bits
_MAX_EXPONENT: Final = 400

Number = int | float | str | Fraction | Decimal
PerDataset = Mapping[str, Number] | Sequence[Number]


def by_dataset(values: Any, names: Sequence[str], what: str) -> list[Any]:
    """The values in the order of `names`, from a dict by name or a list in order.

    Raises ConfigError for a name that is unknown or missing, and for a list of another length.
    """
    if isinstance(values, Mapping):
        unknown = [name for name in values if name not in names]
        missing = [name for name in names if name not in values]
        if unknown or missing:
            problem = f"there is no dataset {unknown[0]!r}" if unknown else f"dataset {missing[0]!r} has none"
            raise ConfigError(f"{what}: {problem}; give one for each of the datasets: {', '.join(map(repr, names))}")
        return [values[name] for name in names]
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise ConfigError(f"{what}={values!r}: give a dict by dataset name, or a list in the order of the datasets")
    if len(values) != len(names):
        raise ConfigError(
            f"{what} has {len(values)} entries for {len(names)} datasets ({', '.join(map(repr, names))}): one for each"
        )
    return list(values)


def exact_number(value: object, what: str) -> Fraction:
    """A finite number >= 0, exactly as written: 0.1 is one tenth. ConfigError, which starts with `what`, otherwise."""
    number = _as_written(value)
    if number is None or number < 0:
        raise ConfigError(f"{what} is {value!r}: it must be a finite number that is not negative")
    return number


def _as_written(value: object) -> Fraction | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    if not isinstance(value, (str, float, Decimal, np.number)):
        return None
    text = str(value)
    try:
        # A short text can name a number of a billion digits: look at its exponent before writing it out.
        if "/" not in text and abs(Decimal(text).adjusted()) > _MAX_EXPONENT:
            return None
        return Fraction(text)
    except (ValueError, InvalidOperation, ZeroDivisionError):
        return None


def integer_weights(weights: Sequence[Fraction]) -> list[int]:
    """Positive weights as coprime integers with the same ratios, where their sum is at most 2^48.

    Otherwise the largest-remainder apportionment of 2^48, each at least 1: an error of at most one part in 2^48
    (Hamilton's method, ties to the earlier dataset).
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    integers = _coprime([int(weight * scale) for weight in weights])
    if sum(integers) <= MAX_PERIOD:
        return integers
    total = sum(integers)
    quotas = [divmod(weight * MAX_PERIOD, total) for weight in integers]
    rounded = [max(1, whole) for whole, _ in quotas]
    missing = MAX_PERIOD - sum(rounded)
    by_remainder = sorted(range(len(weights)), key=lambda c: (-quotas[c][1], c))
    for c in by_remainder[: max(0, missing)]:
        rounded[c] += 1
    for _ in range(-missing):  # weights too small for a share were raised to 1: the largest pay
        rounded[rounded.index(max(rounded))] -= 1
    return _coprime(rounded)


def _coprime(integers: list[int]) -> list[int]:
    divisor = math.gcd(*integers)
    return [integer // divisor for integer in integers]

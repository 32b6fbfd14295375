"""The contract of operators: a function of the record alone, whatever came before it and in whichever process."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from zephon.errors import describe
from zephon.ops.base import Operator, Rows
from zephon.record import Record
from zephon.testing.contract_base import ContractBroken, broken, check_settings, content, travelled


class Result(NamedTuple):
    """What one record became: (child path, content) of each, the drops, the errors."""

    made: tuple[tuple[tuple[int, ...], bytes], ...]
    drops: tuple[tuple[str, int], ...]
    failures: tuple[str, ...]


class _Who:
    """Who the records of a task are (the contract `Items`): their numbers among those of the check."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def key(self, index: int) -> tuple[Any, ...]:
        return 0, "contract", 0, self._numbers[index], 0, ()

    def where(self, index: int, path: tuple[int, ...] = ()) -> str:
        return f"record {self._numbers[index]}"


def check_operator(operator: Operator, records: Sequence[Record], seed: int = 0) -> None:
    """Raises ContractBroken where `operator` does not keep the contract of operators on `records`.

    Checked: it survives cloudpickle; settings() are plain and stable; each record gives the same alone, twice, after
    others, in another order and in a copy; results share nothing that a later record changes; what is inside a record
    is not changed; only declared reasons are counted; process gives a dict, None or dicts, and raises nothing.
    """
    if not isinstance(operator, Operator):
        raise ContractBroken(f"{type(operator).__name__} is no zephon.Operator: make it a subclass")
    if not records:
        raise ContractBroken("check_operator needs records: an operator that saw none shows nothing")
    _setup(operator)
    check_settings(operator, lambda: _alone(operator, records))
    expected = _alone(operator, records)
    _declared(operator, expected)
    _repeats(operator, records, expected)
    _other_orders(operator, records, expected, random.Random(seed))
    _keeps_records(operator, records, expected)


def _setup(operator: Operator) -> None:
    try:
        operator.setup()
    except Exception as error:
        raise broken(operator, f"raised in setup(): {describe(error)}") from error


def _run(operator: Operator, records: Sequence[Record], numbers: Sequence[int]) -> list[Result]:
    """What a task of these records gives, by record. `numbers` are their numbers in the whole check."""
    rows = Rows(list(records), _Who(numbers), seed=17)
    operator.run(rows)
    index = list(rows.index)
    paths = rows.path or [()] * len(rows.records)
    if not len(index) == len(rows.records) == len(paths):
        raise broken(
            operator,
            f"left {len(rows.records)} records, {len(index)} indexes and {len(paths)} paths in run(): they must stay "
            "of one length; use rows.keep and Children",
        )
    if index != sorted(index):
        raise broken(operator, "reordered the records of a task in run(): rows.index must never fall")
    results = []
    for i in range(len(records)):
        made = [(path, content(r, operator)) for r, path, at in zip(rows.records, paths, index, strict=True) if at == i]
        drops = tuple((reason, amount) for at, reason, amount in rows.drops if at == i)
        results.append(Result(tuple(made), drops, tuple(str(error) for at, _, error in rows.failures if at == i)))
    return results


def _alone(operator: Operator, records: Sequence[Record]) -> list[Result]:
    """Each record in a task of its own."""
    return [_run(operator, [copy.deepcopy(record)], [i])[0] for i, record in enumerate(records)]


def _declared(operator: Operator, results: Sequence[Result]) -> None:
    """Nothing raised, and every loss under a declared reason."""
    name = operator.name or operator.method
    for i, result in enumerate(results):
        if result.failures:
            raise broken(
                operator,
                f"does not take record {i}: {result.failures[0]}; process gives a dict, None (the record is dropped) "
                "or an iterable of dicts",
            )
        for reason, _ in result.drops:
            short = reason.removeprefix(f"{name}.")
            if short not in operator.reasons:
                declared = (*operator.reasons, short)
                raise broken(
                    operator,
                    f"drops record {i} for the reason '{short}', which it does not declare: give the class "
                    f"reasons = {declared!r}",
                )
        if operator.one_to_one and len(result.made) != 1:
            raise broken(
                operator,
                f"says one_to_one, and makes {len(result.made)} records of record {i}: `len(pipeline)` and "
                "last_step would be wrong; leave one_to_one out, or give exactly one record for each",
            )


def _repeats(operator: Operator, records: Sequence[Record], expected: Sequence[Result]) -> None:
    """The same again; copies that travelled tell chance from state."""
    again = _alone(operator, records)
    copies = [travelled(operator) for _ in range(2)]
    for each in copies:
        _setup(each)
    one, other = (_alone(each, records) for each in copies)
    if one != other:
        raise broken(
            operator,
            f"is not deterministic: record {_first(one, other)} gives something else in each of two fresh copies; draw "
            "random numbers from a parameter named rng, and use neither the clock nor a global",
        )
    if again != expected:
        raise broken(
            operator,
            f"keeps state between calls: record {_first(again, expected)} gives something else the second time; a "
            "result may depend on nothing but the record",
        )
    if one != expected:
        raise broken(
            operator,
            f"gives something else for record {_first(one, expected)} in a copy that travelled by cloudpickle: what "
            "the copy lacks must be made again in setup(), and nothing may be counted since the first record",
        )


def _other_orders(
    operator: Operator, records: Sequence[Record], expected: Sequence[Result], rng: random.Random
) -> None:
    """All in one task, backwards, and shuffled into tasks of random sizes."""
    forward = list(range(len(records)))
    shuffled = rng.sample(forward, len(forward))
    cuts = sorted(rng.sample(forward[1:], min(len(forward) - 1, 3)))
    pieces = [shuffled[start:stop] for start, stop in pairwise([0, *cuts, len(forward)])]
    for numbers in (forward, forward[::-1], *pieces):
        results = _run(operator, [copy.deepcopy(records[i]) for i in numbers], numbers)
        for i, result in zip(numbers, results, strict=True):
            if result != expected[i]:
                raise broken(
                    operator,
                    f"gives something else for record {i} when other records come with it: it keeps state between "
                    "records, or its results share something that a later record changes",
                )


def _keeps_records(operator: Operator, records: Sequence[Record], expected: Sequence[Result]) -> None:
    """Siblings of a flat_map share what is inside their records, so that must not be changed in place."""
    for i, record in enumerate(records):
        shared = copy.deepcopy(record)
        first, second = (_run(operator, [dict(shared)], [i])[0] for _ in range(2))
        if first != expected[i] or second != expected[i]:
            raise broken(
                operator,
                f"changes a value inside record {i} in place (a list or an array that other records may share): make a "
                "new value instead, as in {**record, 'field': [*record['field'], item]}",
            )


def _first(one: Sequence[Result], other: Sequence[Result]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)

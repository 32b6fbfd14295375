"""Machines and keys of `stateful_map`, as values: what random pipelines draw."""

from __future__ import annotations

import dataclasses
from typing import Any

from zephon.ops.stateful_map import DROP, Machine
from zephon.record import Record
from zephon.testing.recipes import number


@dataclasses.dataclass(frozen=True)
class Residue:
    """A key: the residue of the record's number, as a number, as text or in a tuple. Fails on some ids."""

    modulus: int
    kind: str = "int"
    bad: frozenset[int] = frozenset()

    def __call__(self, record: Record) -> Any:
        if number(record) in self.bad:
            raise ValueError(f"no key for {number(record)}")
        residue = number(record) % self.modulus
        return {"int": residue, "str": f"r{residue}", "tuple": (residue, "r", None)}[self.kind]


@dataclasses.dataclass(frozen=True)
class Limit(Machine):
    """Keeps the first `most` records of each key."""

    most: int

    def init(self, lane: int) -> dict[Any, int]:
        return {}

    def push(self, state: dict[Any, int], key: Any) -> bool:
        state[key] = state.get(key, 0) + 1
        return state[key] <= self.most


@dataclasses.dataclass(frozen=True)
class Mean(Machine):
    """The mean of the keys so far, which are numbers; every `skip`-th record is dropped."""

    skip: int = 1_000_000

    def init(self, lane: int) -> list[int]:
        return [0, 0]

    def push(self, state: list[int], key: int) -> Any:
        state[0] += key
        state[1] += 1
        return DROP if state[1] % self.skip == 0 else state[0] / state[1]


@dataclasses.dataclass(frozen=True)
class Ranks(Machine):
    """Lets `size` records wait, then answers with each one's rank among them, and drops the last of these."""

    size: int

    def init(self, lane: int) -> list[Any]:
        return []

    def push(self, state: list[Any], key: Any) -> list[Any]:
        state.append(key)
        return self.flush(state) if len(state) == self.size else []

    def flush(self, state: list[Any]) -> list[Any]:
        order = sorted(range(len(state)), key=lambda i: (state[i], i))
        answers: list[Any] = [DROP] * len(state)
        for rank, i in enumerate(order[: self.size - 1]):
            answers[i] = rank
        state.clear()
        return answers

    def state(self, state: list[Any]) -> list[Any]:
        return [list(key) if isinstance(key, tuple) else key for key in state]

    def load(self, plain: list[Any]) -> list[Any]:
        return [tuple(key) if isinstance(key, list) else key for key in plain]


@dataclasses.dataclass(frozen=True)
class FailAt(Machine):
    """Keeps every record, and fails where it sees a key for the `count`-th time."""

    count: int

    def init(self, lane: int) -> dict[Any, int]:
        return {}

    def push(self, state: dict[Any, int], key: Any) -> bool:
        state[key] = state.get(key, 0) + 1
        if state[key] == self.count:
            raise ValueError(f"key {key} once too often")
        return True

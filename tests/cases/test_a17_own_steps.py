"""Case A17, for operators and accumulators of the user's own: every hook that may raise, on every runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zephon as zp

from .helpers import ids, on, pipeline

ROWS, BAD = 20, 7

Make = Callable[[], BaseException]


class Exploding(zp.Accumulator):
    """Pairs of records; the hook named raises, in `push` and `build` on the pair of rows 6 and 7."""

    method = "exploding"
    measures = True

    def __init__(self, hook: str, make: Make) -> None:
        self.hook, self.make = hook, make
        self.held: dict[int, list[Any]] = {}

    def maybe(self, hook: str) -> None:
        if hook == self.hook:
            raise self.make()

    def measure(self, record: dict[str, Any]) -> int:
        if record["id"] == BAD - 1:
            self.maybe("measure")
        return int(record["id"])

    def open(self, lane: int, key: Any) -> None:
        self.maybe("open")
        self.held[lane] = []

    def push(self, lane: int, refs: Any) -> zp.Emitted:
        emitted = zp.Emitted()
        for at, (cursor, length, _) in enumerate(refs):
            if length == BAD - 1:
                self.maybe("push")
            self.held[lane].append((cursor, 0, 1))
            if len(self.held[lane]) == 2:
                emitted.add(at, self.held[lane])
                self.held[lane] = []
        return emitted

    def flush(self, lane: int) -> zp.Emitted:
        self.maybe("flush")
        return zp.Emitted()

    def group_length(self, group: Any) -> int:
        self.maybe("group_length")
        return len(group)

    def build(self, parts: Any) -> dict[str, Any]:
        if parts[0][0]["id"] == BAD - 1:
            self.maybe("build")
        return {"id": parts[0][0]["id"]}


FIRST = {"measure": [0, 2, 4], "push": [0, 2, 4], "build": [0, 2, 4], "flush": list(range(0, ROWS, 2))}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: ValueError("bad"), lambda: SystemExit(0), StopIteration])
@pytest.mark.parametrize("behind", ["batch", "map", "pack"])
@pytest.mark.parametrize("hook", ["measure", "open", "push", "flush", "group_length", "build"])
def test_every_hook_of_an_own_accumulator(hook: str, behind: str, make: Make, workers: int) -> None:
    line = pipeline(ROWS, chunk_size=ROWS).apply(Exploding(hook, make))
    if behind == "map":
        line = line.map(lambda record: record)
    elif behind == "pack":
        line = line.map(lambda record: {"input_ids": [record["id"]]}).pack(1)
    line = on(line.batch(1), workers)
    found: list[int] = []
    with pytest.raises(zp.errors.OperatorError, match="'exploding'") as caught:  # noqa: PT012
        for batch in line:
            found += ids([batch]) if behind != "pack" else [int(batch["input_ids"][0, 0])]
    assert type(caught.value.__cause__) is type(make())
    assert found == FIRST.get(hook, [])
    assert caught.value.operator == "exploding"
    if hook in ("measure", "push", "build"):
        assert "row 6" in str(caught.value)


class ExplodingOperator(zp.Operator):
    method = "exploding"

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def setup(self) -> None:
        if self.hook == "setup":
            raise KeyError("no model")

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.hook == "process" and record["id"] == BAD:
            raise KeyError("seven")
        return record


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hook", ["setup", "process"])
def test_every_hook_of_an_own_operator(hook: str, workers: int) -> None:
    line = on(pipeline(ROWS).map(dict).shuffle(1).apply(ExplodingOperator(hook)), workers)
    found: list[int] = []
    with pytest.raises(zp.errors.OperatorError, match="'exploding'") as caught:  # noqa: PT012
        for batch in line:
            found += ids([batch])
    assert isinstance(caught.value, KeyError)
    assert found == (list(range(BAD)) if hook == "process" else [])

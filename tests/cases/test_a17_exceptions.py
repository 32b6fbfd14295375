"""Case A17: any exception of a user's function arrives as one clear error, however oddly its class is made."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from tests.process.raising import HoldsALock, KeywordOnly, NoText, ThreeArguments, caused, local_class

from .helpers import ids, on, pipeline, resumed, saved

ROWS, BAD = 20, 7


class ExitsOnText(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class TextIsANumber(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307


class NoSubclasses(Exception):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


class OwnOperator(Exception):
    """Uses the names that OperatorError uses, and cannot be written to."""

    @property
    def operator(self) -> str:
        return "mine"

    where = "mine"


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class ReadOnly(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class FromBase(BaseException):
    pass


class HoldsNothing(Exception):
    def __new__(cls, *args: Any) -> HoldsNothing:
        if len(args) != 2:
            raise TypeError("two arguments")
        return super().__new__(cls, *args)


class StopsQuietly(StopIteration):
    pass


Make = Callable[[], BaseException]
REBUILT: dict[str, Make] = {
    "three arguments": lambda: ThreeArguments("three", 1, 2),
    "keyword only": lambda: KeywordOnly(code=3),
    "holds a lock": HoldsALock,
    "local class": local_class,
    "has a cause": caused,
    "KeyError": lambda: KeyError("k"),
    "OSError": lambda: OSError(2, "missing", "a.txt"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "5 MB": lambda: ValueError("x" * 5_000_000),
    "no message": lambda: ValueError(),
    "MemoryError": lambda: MemoryError("full"),
    "RecursionError": lambda: RecursionError("deep"),
    "message is a dict": lambda: AssertionError({"a": [1]}),
    "__str__ raises": NoText,
    "__str__ gives a number": TextIsANumber,
    "slots": lambda: Slotted(4),
}
WRAPPED: dict[str, Make] = {
    "sys.exit(3)": lambda: SystemExit(3),
    "sys.exit(0)": lambda: SystemExit(0),
    "StopIteration": StopIteration,
    "StopIteration with a value": lambda: StopIteration({"id": 1}),
    "subclass of StopIteration": lambda: StopsQuietly("s"),
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "own BaseException": lambda: FromBase("base"),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("group", [GeneratorExit()]),
    "no subclasses": NoSubclasses,
    "own property 'operator'": OwnOperator,
    "cannot be written to": ReadOnly,
    "__str__ exits": ExitsOnText,
    "ExceptionGroup": lambda: ExceptionGroup("group", [ValueError("v")]),
    "__new__ wants arguments": lambda: HoldsNothing(1, 2),
    "our ConfigError": lambda: zp.errors.ConfigError("a user may raise ours"),
    "our OperatorError": lambda: zp.errors.OperatorError("operator 'x' failed", "x", "row 3"),
    "our Closed": lambda: zp.errors.Closed("an inner pipeline was closed"),
}


def line_of(make: Make, workers: int, size: int = 1) -> zp.Pipeline:
    def explode(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == BAD:
            raise make()
        return record

    return on(pipeline(ROWS).map(explode, version="1").batch(size), workers)


def failing(line: zp.Pipeline) -> tuple[list[int], BaseException]:
    """The ids that came first, and the error that ended it."""
    found: list[int] = []
    iterator = iter(line)
    try:
        for batch in iterator:
            found += ids([batch])
    except zp.errors.ZephonError as error:
        assert next(iterator, None) is None  # the iterator is over, and stays over
        assert next(iterator, None) is None
        return found, error
    raise AssertionError(f"no error came, only {found}")


def check(make: Make, workers: int, error: BaseException) -> None:
    original = make()
    assert isinstance(error, zp.errors.OperatorError)
    assert type(error.__cause__) is type(original) or type(original).__name__ == "Local"
    text = str(error)
    assert "'explode'" in text
    assert "row 7" in text
    assert "lane 0" in text
    assert "'toy'" in text
    assert type(original).__name__ in text
    assert len(text) < 6_000
    assert error.operator == "explode"
    assert "row 7" in error.where


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", REBUILT)
def test_an_exception_that_can_be_rebuilt_keeps_its_type(kind: str, workers: int) -> None:
    make = REBUILT[kind]
    found, error = failing(line_of(make, workers))
    assert found == list(range(BAD))
    check(make, workers, error)
    assert error.__cause__ is not None
    assert isinstance(error, type(error.__cause__))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", WRAPPED)
def test_any_other_arrives_as_an_operator_error_alone(kind: str, workers: int) -> None:
    make = WRAPPED[kind]
    found, error = failing(line_of(make, workers))
    assert found == list(range(BAD))
    check(make, workers, error)
    assert not isinstance(error, (StopIteration, SystemExit, GeneratorExit, KeyboardInterrupt))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_keyboard_interrupt_raised_by_user_code(workers: int) -> None:
    found, error = failing(line_of(KeyboardInterrupt, workers))
    assert found == list(range(BAD))
    check(KeyboardInterrupt, workers, error)


def test_a_keyboard_interrupt_inline_is_one() -> None:
    """Inline it cannot be told from Ctrl-C. The state still holds exactly what was delivered."""
    line = line_of(KeyboardInterrupt, 0)
    for task_records in (1, 3, 64):
        line = line.options(task_records=task_records)
        found: list[int] = []
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for batch in line:
                found += ids([batch])
        assert found == list(range(len(found)))
        assert saved(line)["lanes"]["0"]["samples"] == len(found)
        line.close()


@pytest.mark.parametrize("kind", REBUILT | WRAPPED)
def test_the_error_survives_pickling(kind: str) -> None:
    make = (REBUILT | WRAPPED)[kind]
    _, error = failing(line_of(make, 1))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, zp.errors.OperatorError)
    assert str(again) == str(error)
    assert again.operator == "explode"
    assert again.where == error.where  # type: ignore[attr-defined]
    assert again.__cause__ is not None
    assert type(make()).__name__ in str(again)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_traceback_shows_the_users_line_and_the_chain(workers: int) -> None:
    _, error = failing(line_of(caused, workers))
    text = "".join(traceback.format_exception(error))
    assert "in explode" in text
    assert "KeyError: 'inner'" in text
    assert "ValueError: outer" in text


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_full_batches_come_first_and_the_state_resumes_behind_them(size: int, workers: int) -> None:
    line = line_of(lambda: ValueError("bad"), workers, size)
    found, _ = failing(line)
    assert found == list(range(BAD // size * size))
    state = saved(line)

    def explode(record: dict[str, Any]) -> dict[str, Any]:
        return record

    mended = on(pipeline(ROWS).map(explode, version="1").batch(size), 2)
    assert found + ids(resumed(mended, state)) == list(range(ROWS))
    again, error = failing(resumed(line, state))
    assert again == []
    assert "row 7" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_other_lanes_go_on_until_the_failed_lanes_turn(workers: int) -> None:
    def explode(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 20:
            raise ValueError("bad")
        return record

    line = on(pipeline(48, chunk_size=4).map(explode).batch(2).options(canonical_replicas=3), workers)
    # Lane 2 has 8..11 and 20..23: its third turn fails.
    found, error = failing(line)
    assert found == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11, 12, 13, 16, 17]
    assert "lane 2" in str(error)
    assert {lane: place["samples"] for lane, place in saved(line)["lanes"].items()} == {"0": 6, "1": 6, "2": 4}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("make", [lambda: ValueError("v"), lambda: ThreeArguments("t", 1, 2), NoText])
def test_skip_drops_exactly_that_record(make: Make, workers: int) -> None:
    def explode(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] % 5 == 2:
            raise make()
        return record

    line = on(pipeline(ROWS).map(explode, on_error="skip").batch(4), workers)
    assert ids(line) == [i for i in range(ROWS) if i % 5 != 2]
    assert line.counts()["dropped"] == {0: {"explode.error": 4}}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: SystemExit(0), GeneratorExit, lambda: FromBase("b")])
def test_skip_is_for_exceptions_only(make: Make, workers: int) -> None:
    def explode(record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == BAD:
            raise make()
        return record

    found, error = failing(on(pipeline(ROWS).map(explode, on_error="skip"), workers))
    assert found == list(range(BAD))
    check(make, workers, error)


SCRIPT = """
import json, sys
from tests.cases.helpers import ids, on, pipeline
def explode(record):
    if record["id"] == 7:
        {statement}
    return record
for batch in on(pipeline(20).map(explode), {workers}):
    print(batch["id"][0], flush=True)
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise ValueError('bad')"])
def test_the_process_ends_with_a_failure(workers: int, statement: str) -> None:
    script = SCRIPT.format(statement=statement, workers=workers)
    command = [sys.executable, "-W", "error", "-c", script]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=root)
    assert done.returncode == 1
    assert json.loads(f"[{','.join(done.stdout.split())}]") == list(range(BAD))
    assert "row 7" in done.stderr.splitlines()[-1]
    assert "Exception ignored" not in done.stderr

"""Case A17 under processes: whatever user code raises in a worker arrives as one clear error, within 5 s."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import zephon as zp
from tests.process.functions import Raise
from tests.process.helpers import ids, line, run_script, slow
from tests.process.raising import HoldsALock, NoText, ThreeArguments, caused, local_class
from zephon.errors import OperatorError

ROWS, BAD = 20, 7


class Coded(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 42


class FromBase(BaseException):
    pass


def group() -> BaseException:
    return ExceptionGroup("several", [ValueError("a"), KeyError("b")])


Make = Callable[[], BaseException]
REBUILT: dict[str, Make] = {
    "KeyError": partial(KeyError, "k"),
    "OSError": partial(OSError, 2, "missing", "a.txt"),
    "UnicodeDecodeError": partial(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad"),
    "5 MB": lambda: ValueError("x" * 5_000_000),
    "no message": ValueError,
    "own attributes": partial(Coded, "coded"),
    "has a cause": caused,
    "message with a surrogate": partial(ValueError, "\ud800"),
    "__str__ raises": NoText,
    "three arguments": partial(ThreeArguments, "three", 1, 2),
    "holds a lock": HoldsALock,
}
WRAPPED: dict[str, Make] = {
    "local class": local_class,
    "group": group,
    "StopIteration": partial(StopIteration, 7),
    "StopAsyncIteration": StopAsyncIteration,
    "SystemExit": partial(SystemExit, 3),
    "SystemExit 0": partial(SystemExit, 0),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": partial(FromBase, "b"),
}


def failing(pipeline: zp.Pipeline) -> tuple[list[int], OperatorError]:
    """The ids before the error, and the error, which comes within 5 s."""
    found: list[int] = []
    began = time.monotonic()
    with pipeline:
        try:
            for batch in pipeline:
                found += ids([batch])
        except OperatorError as error:
            assert time.monotonic() - began < 5
            return found, error
    raise AssertionError("no error")


ALIKE = {"UnicodeDecodeError", "no message", "own attributes", "message with a surrogate"}
ALIKE |= {"SystemExit 0", "GeneratorExit", "StopAsyncIteration", "group", "BaseException"}
KINDS = [slow(kind) if kind in ALIKE else kind for kind in REBUILT | WRAPPED]


@pytest.mark.parametrize("kind", KINDS)
def test_type_cause_operator_record_and_traceback(kind: str) -> None:
    make = (REBUILT | WRAPPED)[kind]
    found, error = failing(line(ROWS, Raise(BAD, make), batch=1, parallelism=1 + len(kind) % 2))
    assert found == list(range(BAD))
    assert error.operator == "map"
    for text in ("'map'", "lane 0", "dataset 'toy'", "shard list", "row 7", type(make()).__name__):
        assert text in str(error)
    assert len(str(error)) < 6_000
    assert error.__cause__ is not None
    if kind in REBUILT:
        assert isinstance(error, type(make()))
        assert type(error.__cause__) is type(make())
        assert error.__cause__.args == make().args
    for kind_of_end in (StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt, GeneratorExit):
        assert not isinstance(error, kind_of_end)
    shown = "".join(traceback.format_exception(error)) if kind != "__str__ raises" else "".join(error.__notes__)
    assert "in __call__" in shown  # the line in the worker that raised
    assert "raised in a worker" in shown
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_attributes_of_the_original_are_there() -> None:
    _, error = failing(line(ROWS, Raise(BAD, partial(Coded, "coded"))))
    assert error.code == 42  # type: ignore[attr-defined]
    assert error.__cause__.code == 42  # type: ignore[union-attr]


def test_the_chain_of_the_original_arrives() -> None:
    _, error = failing(line(ROWS, Raise(BAD, caused)))
    text = "".join(traceback.format_exception(error))
    assert "KeyError: 'inner'" in text
    assert "ValueError: outer" in text
    outer = error.__cause__
    assert isinstance(outer, ValueError)
    assert isinstance(outer.__cause__, KeyError)
    innermost = outer.__cause__.__cause__
    assert isinstance(innermost, ThreeArguments)
    assert (str(innermost), innermost.b) == ("innermost 1 2", 2)


@pytest.mark.parametrize("size", [slow(1), 2, slow(5)])
def test_full_batches_come_first_and_the_state_goes_on_behind_them(size: int) -> None:
    pipeline = line(ROWS, Raise(BAD, partial(ValueError, "bad")), batch=size)
    found, _ = failing(pipeline)
    assert found == list(range(BAD // size * size))
    state = pipeline.state_dict()
    with line(ROWS, Raise(-1, partial(ValueError, "bad")), batch=size) as mended:
        mended.load_state_dict(state, allow=["map.code", "map.fn"])
        assert found + ids(mended) == list(range(ROWS))


def test_an_error_in_one_lane_waits_for_its_turn() -> None:
    pipeline = line(48, Raise(20, partial(ValueError, "bad")), batch=2, canonical_replicas=3)
    inline = line(48, Raise(20, partial(ValueError, "bad")), batch=2, canonical_replicas=3, runner="inline")
    found, error = failing(pipeline)
    wanted, same = failing(inline)
    assert found == wanted
    assert str(error) == str(same)


def test_an_error_in_a_second_stage() -> None:
    pipeline = line(ROWS, Raise(-1, ValueError), Raise(BAD, partial(KeyError, "k")), parallelism={"map": 1, "map_2": 2})
    found, error = failing(pipeline)
    assert found == list(range(4))
    assert error.operator == "map_2"
    assert isinstance(error, KeyError)
    assert "row 7" in str(error)


@dataclasses.dataclass
class Holding:
    what: Any

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "x": self.what() if record["id"] == BAD else None}


@pytest.mark.parametrize("what", [threading.Lock, lambda: (i for i in "ab"), partial(open, "/dev/null")])
def test_a_result_that_cannot_be_sent_is_an_error_of_its_record(what: Any) -> None:
    found, error = failing(line(ROWS, Holding(what), batch=1))
    assert found == list(range(BAD))
    assert isinstance(error, TypeError)
    for text in ("'map'", "row 7", "cannot be sent between processes", "cannot pickle"):
        assert text in str(error)


def test_an_error_that_a_field_causes_in_batch() -> None:
    """Field names that are no strings: found in the engine process, where batches are put together."""
    found, error = failing(line(ROWS, Renaming(), batch=1))
    assert found == list(range(BAD))
    assert error.operator == "batch"
    assert isinstance(error, TypeError)


class Renaming:
    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {3: 1} if record["id"] == BAD else record  # type: ignore[dict-item]


SCRIPT = """
import sys
import zephon as zp
class Mine(ValueError):
    pass
class Thing:
    def __init__(self, value):
        self.value = value
def explode(record):
    if record["id"] == 7:
        raise Mine("mine", 3)
    return {**record, "thing": Thing(record["id"])}
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(explode)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=1)
found = []
try:
    for batch in pipeline:
        assert type(batch["thing"][0]) is Thing and batch["thing"][0].value == batch["id"][0]
        found.append(int(batch["id"][0]))
except Mine as error:
    assert type(error.__cause__) is Mine and error.__cause__.args == ("mine", 3)
    print(found)
iterator = iter(pipeline.options(max_worker_retries=1))
for batch in iterator:
    pass
"""


def test_classes_of_the_script_itself(tmp_path: Any) -> None:
    """An exception of the script's own class is caught as such, its objects come back as such; status is not 0."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    status, out, err = run_script("", argv=[str(path)])
    assert out.strip() == str(list(range(7))), err
    assert status == 1
    assert "row 7" in err.splitlines()[-1] or "raised in a worker" in err
    assert "Exception ignored" not in err

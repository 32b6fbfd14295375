"""The exception tree: who must act, and texts that survive anything."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import zephon as zp
from zephon.errors import describe, operator_error

TREE: dict[str, tuple[type[BaseException], ...]] = {
    "ConfigError": (ValueError,),
    "CheckpointError": (ValueError,),
    "DataError": (),
    "WorkerError": (),
    "OperatorError": (),
    "Closed": (),
    "InternalError": (),
}


@pytest.mark.parametrize("name", TREE)
def test_every_class_is_a_zephon_error_and_no_more_than_it_says(name: str) -> None:
    kind = getattr(zp.errors, name)
    assert issubclass(kind, zp.errors.ZephonError)
    assert issubclass(kind, Exception)
    for other in (ValueError, StopIteration, OSError, RuntimeError):
        assert issubclass(kind, other) == (other in TREE[name])


@pytest.mark.parametrize("name", ["ZephonError", *TREE])
def test_every_class_survives_pickling_and_copying(name: str) -> None:
    error = getattr(zp.errors, name)("what; the rule; the remedy")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == "what; the rule; the remedy"


def test_an_operator_error_is_also_the_original() -> None:
    original = KeyError("text")
    error = operator_error(original, "clean", "lane 3, dataset 'web', shard a/2.jsonl, row 118")
    assert isinstance(error, zp.errors.OperatorError)
    assert isinstance(error, KeyError)
    assert str(error) == "operator 'clean' failed on lane 3, dataset 'web', shard a/2.jsonl, row 118: KeyError: 'text'"
    assert error.__cause__ is original
    assert (error.operator, error.where) == ("clean", "lane 3, dataset 'web', shard a/2.jsonl, row 118")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, KeyError)
    assert isinstance(again, zp.errors.OperatorError)
    assert str(again) == str(error)
    assert isinstance(again.__cause__, KeyError)


class WithFields(Exception):
    def __init__(self, code: int, detail: dict[str, int]) -> None:
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def test_attributes_of_the_original_are_on_the_error() -> None:
    error = operator_error(WithFields(3, {"a": 1}), "clean", "row 1")
    assert isinstance(error, WithFields)
    assert (error.code, error.detail) == (3, {"a": 1})
    assert str(error) == "operator 'clean' failed on row 1: WithFields: code 3"


def test_os_errors_keep_their_number() -> None:
    error = operator_error(FileNotFoundError(2, "No such file", "a.txt"), "read", "row 1")
    assert isinstance(error, FileNotFoundError)
    assert error.__cause__ is not None
    assert (error.errno, error.filename) == (2, "a.txt")


class Raising(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
        (Raising(ValueError("no")), "Raising: <message unavailable"),
        (Raising(SystemExit(0)), "Raising: <message unavailable"),
        (Raising(RecursionError()), "Raising: <message unavailable"),
        (ValueError("x" * 5_000_000), "ValueError: xxx"),
        (ValueError("\ud800"), "ValueError: "),
        (ValueError({"record": ["y"] * 10_000}), "ValueError: "),
    ],
)
def test_a_description_is_bounded_and_never_fails(error: BaseException, start: str) -> None:
    text = describe(error)
    assert text.startswith(start)
    assert len(text) < 5_000


def test_a_long_message_says_how_long_it_was() -> None:
    assert "5,000,000" in describe(ValueError("x" * 5_000_000))


def test_a_cause_that_cannot_travel_is_described(recwarn: Any) -> None:
    class Local(Exception):
        pass

    error = operator_error(Local("here"), "clean", "row 1")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is zp.errors.OperatorError
    assert str(again) == str(error)
    assert "Local: here" in str(again.__cause__)


@pytest.mark.parametrize("original", [StopIteration(1), StopAsyncIteration(), SystemExit(0), KeyboardInterrupt()])
def test_what_steers_python_is_wrapped_only(original: BaseException) -> None:
    error = operator_error(original, "clean", "row 1")
    assert type(error) is zp.errors.OperatorError
    assert error.__cause__ is original


def test_two_of_one_kind_are_caught_alike() -> None:
    errors = [operator_error(ValueError(str(i)), "clean", f"row {i}") for i in range(2)]
    assert [str(error.__cause__) for error in errors] == ["0", "1"]
    for error in errors:
        with pytest.raises(ValueError, match="row"):
            raise error
        with pytest.raises(zp.errors.OperatorError, match="row"):
            raise error

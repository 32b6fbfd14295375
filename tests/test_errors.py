"""The exception tree: who must act, and texts that survive anything."""

from __future__ import annotations

import copy
import pickle
import threading
from itertools import pairwise
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


def test_an_exception_without_a_message_is_its_class() -> None:
    assert describe(MemoryError()) == "MemoryError"
    assert str(operator_error(KeyError(), "clean", "row 1")) == "operator 'clean' failed on row 1: KeyError"
    found = operator_error(MemoryError(), "clean", "row 1", "give it more")
    assert str(found) == "operator 'clean' failed on row 1: MemoryError: give it more"


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


# -- what travels ------------------------------------------------------------------------------------------------------


class ManyArguments(Exception):
    """Its pickle cannot be loaded: the constructor wants three arguments, args has one."""

    def __init__(self, text: str, code: int, detail: dict[str, int]) -> None:
        super().__init__(f"{text} (code {code})")
        self.code, self.detail = code, detail


class Optional(Exception):
    """Its pickle can be loaded, and is another exception."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(f"{text} (code {code})")


class ManySystem(OSError):
    def __init__(self, number: int, path: str, detail: int) -> None:
        super().__init__(number, "gone", path)
        self.detail = detail


class Unsendable(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock, self.code = threading.Lock(), 7


class Mine(zp.errors.DataError):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}, line {line}")
        self.line = line


def sent(error: BaseException) -> BaseException:
    """The cause of an operator's error after it went to another process, and from there to one more."""
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(operator_error(error, "clean", "row 1")))))
    assert isinstance(again, type(error))
    assert str(again) == f"operator 'clean' failed on row 1: {describe(error)}"
    assert again.__cause__ is not None
    return again.__cause__


@pytest.mark.parametrize(
    "error",
    [
        ManyArguments("bad", 3, {"a": 1}),
        Optional("bad", 3),
        ManySystem(2, "a.txt", 5),
        Unsendable("locked"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        FileNotFoundError(2, "No such file", "a.txt"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cause_keeps_type_text_and_fields(error: Exception) -> None:
    error.add_note("a note of its own")
    again = sent(error)
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    fields, wanted = ({name: x for name, x in vars(e).items() if name != "lock"} for e in (again, error))
    assert fields == wanted
    for name in ("errno", "filename"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_the_chain_of_a_cause_travels() -> None:
    """`from`, and what was being handled: each link with type, text and fields, as Python shows them."""
    try:
        try:
            try:
                raise ManyArguments("first", 1, {})
            except ManyArguments:
                raise KeyError("second")  # noqa: B904
        except KeyError as error:
            raise Optional("third", 3) from error
    except Optional as error:
        third = sent(error)
    second = third.__cause__
    assert isinstance(second, KeyError)
    assert (second.args, second.__cause__) == (("second",), None)
    first = second.__context__
    assert isinstance(first, ManyArguments)
    assert (str(first), first.code, first.__cause__, first.__context__) == ("first (code 1)", 1, None, None)


def test_a_chain_that_was_cut_stays_cut() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("alone") from None
    except ValueError as error:
        again = sent(error)
    assert (again.__cause__, again.__context__) == (None, None)


@pytest.mark.parametrize(("length", "comes_round", "arrives"), [(2, True, 2), (3, False, 3), (100, False, 16)])
def test_a_chain_is_bounded(length: int, comes_round: bool, arrives: int) -> None:
    errors = [ValueError(i) for i in range(length)]
    for error, before in pairwise(errors):
        error.__cause__ = before
    if comes_round:
        errors[-1].__cause__ = errors[0]
    chain: list[BaseException] = [sent(errors[0])]
    while (before := chain[-1].__cause__) is not None and len(chain) <= length:
        chain.append(before)
    assert [error.args for error in chain] == [(i,) for i in range(arrives)]


def test_a_subclass_of_ours_with_arguments_of_its_own() -> None:
    error = Mine("a.jsonl", 7)
    error.add_note("a note")
    error.__cause__ = ManyArguments("inner", 1, {})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is Mine
    assert (str(again), again.line, again.__notes__) == ("a.jsonl, line 7", 7, ["a note"])
    assert type(again.__cause__) is ManyArguments
    assert str(copy.copy(error).__cause__) == str(copy.deepcopy(error).__cause__) == "inner (code 1)"


def raised_deep(depth: int, error: BaseException) -> None:
    if depth:
        raised_deep(depth - 1, error)
    raise error


@pytest.mark.parametrize("size", [10, 5_000_000])
def test_the_frames_are_in_the_note_however_long_the_message_is(size: int) -> None:
    original = ValueError("x" * size)
    original.add_note("many\nlines\n" * 5_000)
    try:
        try:
            raise KeyError("y" * size)
        except KeyError as inner:
            try:
                raised_deep(2, original)
            except ValueError as outer:
                raise outer from inner
    except ValueError as error:
        again = pickle.loads(pickle.dumps(operator_error(error, "clean", "row 1")))
    [note] = again.__notes__
    assert note.startswith("raised in a worker:")
    assert note.count("in raised_deep") == 3
    assert "KeyError: 'yyyy" in note
    assert "ValueError: xxxx" in note
    assert len(note) < 5_000

"""Exceptions of user code arrive alike under every runner: type, arguments, notes, chain, record, operator, place."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import zephon as zp
from tests.cases.test_a17_own_steps import Exploding
from tests.process.helpers import digests, line, slow, to_the_error
from tests.process.raising import (
    REBUILT,
    WRAPPED,
    Frozen,
    HoldsALock,
    LockArgument,
    Make,
    OwnData,
    OwnGroup,
    Raise,
    Raises,
    ThreeArguments,
    chained,
    group,
    ours,
)
from zephon.errors import DataError, OperatorError, ZephonError, describe

pytestmark = pytest.mark.law("L8")

ROWS, BAD = 24, 17
RUNNERS = ["inline", "threads", "process"]


class Told(NamedTuple):
    """All that a trainer can see of a failed run."""

    digests: list[str]
    """Of the batches before the error."""
    kinds: list[str]
    """The classes that catch it."""
    text: str
    operator: str
    where: str
    chain: list[Any]
    places: dict[str, Any]


def failing(pipeline: zp.Pipeline) -> tuple[list[str], ZephonError, dict[str, Any]]:
    """(digests of the batches before the error, the error, the state afterwards). It comes within 5 s."""
    found: list[str] = []
    with pipeline:
        error = to_the_error(pipeline, found, digests)
        return found, error, pipeline.state_dict()


def told(pipeline: zp.Pipeline) -> Told:
    found, error, state = failing(pipeline)
    kinds = [kind.__qualname__ for kind in type(error).__mro__]
    own = (getattr(error, "operator", ""), getattr(error, "where", ""))
    return Told(found, kinds, str(error), *own, chain_of(error.__cause__), state["lanes"])


def chain_of(error: BaseException | None) -> list[Any]:
    """Class, text, arguments, fields, notes and members of an exception and of what it came from, 16 at most."""
    found: list[Any] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(seen) < 16:
        seen.add(id(error))
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        args = [describe(arg) if isinstance(arg, BaseException) else repr(arg) for arg in error.args if not members]
        fields = {name: repr(value) for name, value in vars(error).items() if name not in ("lock", "__notes__")}
        notes = [note if isinstance(note, str) else repr(note) for note in getattr(error, "__notes__", ())]
        own = [getattr(error, name, None) for name in ("errno", "filename", "filename2", "code", "name", "lineno")]
        kind = type(error).__qualname__
        found.append([kind, describe(error), args, fields, notes, own, [chain_of(member) for member in members]])
        if error.__cause__ is None and error.__context__ is not None and not error.__suppress_context__:
            found.append("while handling")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def raising(make: Make, runner: str, **options: Any) -> zp.Pipeline:
    settings = {"batch": 2, "canonical_replicas": 3, "chunk_size": 2, "task_records": 5, **options}
    return line(ROWS, Raise(BAD, make), runner=runner, **settings)


SLOW = {
    "two arguments",
    "no arguments",
    "OSError with two names",
    "UnicodeDecodeError",
    "ImportError",
    "ring",
    "cut chain",
}
SLOW |= {
    "StopAsyncIteration",
    "sys.exit(0)",
    "CancelledError",
    "our Closed",
    "a surrogate",
    "slots",
    "own BaseException",
}
KINDS = [slow(kind) if kind in SLOW else kind for kind in REBUILT | WRAPPED]


@pytest.mark.parametrize("kind", KINDS)
def test_alike_under_every_runner(kind: str) -> None:
    make = (REBUILT | WRAPPED)[kind]
    wanted = told(raising(make, "inline"))
    for runner in RUNNERS[1:]:
        assert told(raising(make, runner)) == wanted, runner
    assert (len(wanted.digests), wanted.operator) == (8, "map")  # lane 2 has rows 4, 5, 10, 11, 16, 17, ...
    assert wanted.where == "lane 2, dataset 'toy', shard list, row 17"
    assert len(wanted.text) < 6_000
    assert (type(make()).__qualname__ in wanted.kinds) == (kind in REBUILT)
    assert "OperatorError" in wanted.kinds


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "__str__ interrupts"])
def test_an_interrupt_of_user_code(kind: str) -> None:
    """Inline it cannot be told from Ctrl-C, and is one. Elsewhere it is an error like others."""
    make = KeyboardInterrupt if kind == "KeyboardInterrupt" else lambda: Raises("str", KeyboardInterrupt)
    one, other = (failing(raising(make, runner)) for runner in RUNNERS[1:])
    assert (one[0], str(one[1]), one[2]) == (other[0], str(other[1]), other[2])
    assert len(one[0]) == 8
    for _, error, _ in (one, other):
        assert "row 17" in str(error)
        assert type(error.__cause__) is type(make())
    pipeline = raising(make, "inline")
    with pipeline, pytest.raises(KeyboardInterrupt):
        list(pipeline)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("make", [chained, group, lambda: Raises("reduce", SystemExit)])
def test_the_traceback_shows_the_users_line_and_all_that_came_before(make: Make, runner: str) -> None:
    _, error, _ = failing(raising(make, runner))
    for shown in (error, pickle.loads(pickle.dumps(error))):
        text = "".join(traceback.format_exception(shown))
        assert "in __call__" in text
        assert "raise self.make()" in text
        if make is chained:
            wanted = ("KeyError: 'inner'", "note of inner", "HoldsALock: locked", "note of middle", "outer 1 2")
            assert all(part in text for part in wanted)
            assert "During handling of the above exception" in text
        elif make is group:
            wanted = (
                "several (3 sub-exceptions)",
                "note of the group",
                "note of first",
                "a.txt",
                "nested",
                "Frozen: 3",
            )
            assert all(part in text for part in wanted)


def test_groups_nested_deeply_are_cut() -> None:
    """As long chains are: what lies deepest arrives as its description, and no pickling gives up on the way."""

    def nested() -> BaseException:
        error: Exception = ValueError("leaf")
        for level in range(400):
            error = ExceptionGroup(f"level {level}", [error])
        return error

    with raising(nested, "process") as pipeline, pytest.raises(ExceptionGroup, match="failed on lane") as caught:
        list(pipeline)
    assert isinstance(caught.value, zp.errors.OperatorError)
    found: BaseException = caught.value
    messages = []
    while isinstance(found, BaseExceptionGroup):
        messages.append(found.message)
        found = found.exceptions[0]
    assert messages[1:] == [f"level {level}" for level in range(398, 399 - len(messages), -1)]
    assert len(messages) > 60
    assert type(found) is zp.errors.ZephonError
    assert str(found).startswith("ExceptionGroup: level 33")


@pytest.mark.parametrize("runner", RUNNERS)
def test_except_star(runner: str) -> None:
    """A group is a group: its members can be caught by their kinds."""
    caught: list[BaseException] = []
    try:
        failing_group = raising(group, runner)
        with failing_group:
            list(failing_group)
    except* ThreeArguments as part:
        caught += part.exceptions
    except* (HoldsALock, KeyError, Frozen) as part:
        caught += part.exceptions
    assert [type(error).__name__ for error in caught] == ["ThreeArguments", "HoldsALock", "ExceptionGroup"]
    first = caught[0]
    assert isinstance(first, ThreeArguments)
    assert (first.a, first.b, first.__notes__) == (1, 2, ["note of first"])
    assert isinstance(first.__cause__, FileNotFoundError)
    assert first.__cause__.filename == "a.txt"


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_group_of_the_users_own_class(runner: str) -> None:
    _, error, _ = failing(raising(lambda: OwnGroup("own", [ValueError("v")], 7), runner))
    for found in (error, error.__cause__):
        assert isinstance(found, OwnGroup)
        assert found.code == 7
        assert [str(member) for member in found.exceptions] == ["v"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_argument_that_cannot_be_sent_goes_as_text(runner: str) -> None:
    _, error, _ = failing(raising(LockArgument, runner))
    assert isinstance(error, LockArgument)
    cause = error.__cause__
    assert isinstance(cause, LockArgument)
    assert cause.args[0] == "locked"
    assert "_thread.lock object" in str(cause.args[1])


@pytest.mark.parametrize("runner", RUNNERS)
def test_our_own_data_error_keeps_cause_and_notes(runner: str) -> None:
    _, error, _ = failing(raising(ours, runner))
    assert type(error) is DataError
    assert str(error) == "operator 'map', lane 2, dataset 'toy', shard list, row 17: a bad record"
    assert isinstance(error.__cause__, KeyError)
    assert "note of ours" in error.__notes__
    _, error, _ = failing(raising(lambda: OwnData("a.jsonl", 7), runner))
    assert type(error) is DataError
    assert isinstance(error.__cause__, OwnData)
    assert error.__cause__.line == 7
    assert "in __call__" in "".join(traceback.format_exception(error))


# -- where it is raised, and how it goes on --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ValueError, lambda: SystemExit(0), StopIteration, GeneratorExit])
@pytest.mark.parametrize("options", [slow({"batch": 1}), {"batch": 3, "task_records": 24}, slow({"parallelism": 3})])
def test_the_state_afterwards_goes_on_at_that_record(options: dict[str, Any], make: Make) -> None:
    """What came before the error is what comes without it, and what is left follows, each time under another runner."""
    settings: dict[str, Any] = {"batch": 2, "canonical_replicas": 3, "chunk_size": 2, "task_records": 5, **options}
    wanted = digests(line(ROWS, Raise(-1, make), runner="inline", **settings))
    for runner, next_runner in zip(RUNNERS, RUNNERS[1:] + RUNNERS[:1], strict=True):
        found, _, state = failing(raising(make, runner, **options))
        assert found == wanted[: len(found)]
        same = raising(make, next_runner, **options)
        same.load_state_dict(state)
        again, error, _ = failing(same)
        assert again == []
        assert "row 17" in str(error)
        with line(ROWS, Raise(-1, make), runner=next_runner, **settings) as mended:
            mended.load_state_dict(state, allow=["map.code", "map.fn"])
            assert found + digests(mended) == wanted


@pytest.mark.parametrize(
    "make", [lambda: ValueError("bad"), slow(lambda: SystemExit(0)), StopIteration, slow(KeyboardInterrupt)]
)
@pytest.mark.parametrize("hook", ["measure", "open", "push", "flush", "group_length", "build"])
def test_every_hook_of_an_own_accumulator(hook: str, make: Make) -> None:
    """Accumulators run in the engine, and what they build in the next stage or in the engine."""
    found = []
    for runner in RUNNERS[1:]:
        dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
        source = zp.StaticMixture([dataset], shuffle="none", chunk_size=20)
        chain = zp.Pipeline(source).apply(Exploding(hook, make)).map(dict).batch(1)
        found.append(told(chain.options(runner=runner, parallelism=1, canonical_replicas=1)))
    assert found[0] == found[1]
    assert found[0].operator == "exploding"
    assert found[0].chain[0][0] == type(make()).__qualname__


class Grouping(Exploding):
    """Pairs of records, of which one is what `what` makes."""

    def __init__(self, what: Any) -> None:
        super().__init__("", ValueError)
        self.what = what

    def build(self, parts: Any) -> Any:
        return self.what() if parts[0][0]["id"] == 6 else {"id": parts[0][0]["id"]}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (list, "TypeError: its build returned list, not a dict"),
        (lambda: None, "TypeError: its build returned NoneType, not a dict"),
        (lambda: {"id": 6, "lock": threading.Lock()}, "TypeError: its result cannot be sent between processes"),
    ],
)
def test_what_an_accumulator_may_not_build(what: Any, text: str) -> None:
    """Three groups before it are delivered. In threads a lock is no fault: it goes nowhere."""
    for runner in RUNNERS:
        dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
        source = zp.StaticMixture([dataset], shuffle="none", chunk_size=20)
        chain = zp.Pipeline(source).apply(Grouping(what)).map(only_id).batch(1)
        pipeline = chain.options(runner=runner, parallelism=1, canonical_replicas=1)
        if "sent" in text and runner != "process":
            with pipeline:
                assert len(list(pipeline)) == 10
            continue
        found, error, _ = failing(pipeline)
        assert len(found) == 3
        assert text in str(error)
        assert "operator 'exploding' failed on a group of 2 records: dataset 'toy', shard list, row 6, 7" in str(error)


def only_id(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"]}


class Elsewhere(zp.Operator):
    """Raises an exception of a module that only this worker can import."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def setup(self) -> None:
        sys.path.insert(0, self.folder)

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == 6:
            raise importlib.import_module("only_in_a_worker").Unknown("nobody knows me") from KeyError("known")
        return record


def test_a_class_that_only_the_worker_can_import(tmp_path: Path) -> None:
    """Neither the engine nor the trainer can load it: its text arrives, what it came from, and where."""
    (tmp_path / "only_in_a_worker.py").write_text("class Unknown(ValueError): pass")
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
    chain = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(Elsewhere(tmp_path))
    found, error, _ = failing(chain.options(runner="process", parallelism=2, canonical_replicas=1))
    assert len(found) == 6
    assert type(error) is OperatorError
    assert "row 6: Unknown: nobody knows me" in str(error)
    assert type(error.__cause__) is ZephonError
    assert str(error.__cause__) == "Unknown: nobody knows me"
    assert isinstance(error.__cause__.__cause__, KeyError)
    assert "in process" in "".join(traceback.format_exception(error))


class FailsInSetup(zp.Operator):
    def __init__(self, make: Make) -> None:
        self.make = make

    def setup(self) -> None:
        raise self.make()

    def process(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "make", [partial(Frozen, 3), group, lambda: SystemExit(0), partial(Raises, "reduce", SystemExit)]
)
def test_setup(make: Make, runner: str) -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(20)])
    chain = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).apply(FailsInSetup(make))
    with (
        chain.options(runner=runner, parallelism=2, canonical_replicas=1) as pipeline,
        pytest.raises(OperatorError) as e,
    ):
        list(pipeline)
    assert (e.value.operator, e.value.where) == ("apply", "setup(), before any record")
    assert type(e.value.__cause__) is type(make())
    assert isinstance(e.value, type(make())) == isinstance(make(), Exception)
    assert "in setup" in "".join(traceback.format_exception(e.value))

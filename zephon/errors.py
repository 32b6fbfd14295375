"""The exception tree. A class says who must act; the text says what, the rule, the remedy and where."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

_LONGEST_TEXT = 4_000  # characters of a user's message that travel with an error
_LONGEST_LINE = 500  # characters of one frame or message of a traceback that travels as a note
_LONGEST_CHAIN = 16  # exceptions that travel: one, what caused it, what caused that, ...

_Parts = tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]
"""Class, args and fields of an exception whose constructor must not be called again."""

_Links = Sequence[tuple[BaseException | _Parts, bool]]
"""An exception and what it came from, one after the other; whether the next one was named as the cause (`from`)."""


class ZephonError(Exception):
    """Base of everything that Zephon raises. Survives pickling with its cause and notes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, _fields(self), _links(self.__cause__))


class ConfigError(ZephonError, ValueError):
    """A definition or a setting is wrong: change the script. Raised before any work starts."""


class DataError(ZephonError):
    """A record or a file cannot be read, or breaks a bound: mend or exclude the data."""


class CheckpointError(ZephonError, ValueError):
    """A state does not fit this pipeline, or states do not fit each other."""


class WorkerError(ZephonError):
    """A process or thread of the pipeline died."""


class Closed(ZephonError):
    """You use an iterator or pipeline that was closed, or that a newer iterator replaced."""


class InternalError(ZephonError):
    """A rule inside Zephon is broken: please report it."""


class OperatorError(ZephonError):
    """A user's function raised.

    `operator` and `where` name the function and the record; the original exception is `__cause__`. Where a class
    that is both can be built, the error is also an instance of the original type, so `except KeyError` works.
    """

    def __init__(self, message: str, operator: str = "", where: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        self.where = where

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        notes = [*getattr(self, "__notes__", ()), *_where_raised(cause)]
        return _arrive, (self.args[0], self.operator, self.where, _links(cause), notes)


def describe(error: BaseException) -> str:
    """`Type: message`, bounded, also for exceptions whose `__str__` raises."""
    try:
        text = str(error)
    except BaseException as broken:
        if isinstance(broken, KeyboardInterrupt):
            raise
        text = f"<message unavailable: its __str__ raised {type(broken).__name__}>"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {text}"


def operator_error(original: BaseException, operator: str, where: str) -> OperatorError:
    """The error that reaches the consumer when `original` was raised by `operator` on the record at `where`."""
    return _rebuild(f"operator '{operator}' failed on {where}: {describe(original)}", operator, where, original)


def _arrive(message: str, operator: str, where: str, links: _Links, notes: Sequence[str]) -> OperatorError:
    """The operator error that another process sent."""
    return _rebuild(message, operator, where, _linked(links), notes)


def _rebuild(
    message: str, operator: str, where: str, cause: BaseException | None, notes: Sequence[str] = ()
) -> OperatorError:
    error = _both(cause, message, operator, where) or OperatorError(message, operator, where)
    error.__cause__ = cause
    for note in notes:
        error.add_note(note)
    return error


def _system_fields(cause: BaseException) -> list[tuple[str, Any]]:
    """What an OSError keeps outside its dictionary. None is left out: filename2 set to None is shown as a name."""
    names = ("errno", "filename", "filename2", "strerror")
    return [(name, value) for name in names if (value := getattr(cause, name, None)) is not None]


def _where_raised(cause: BaseException | None) -> list[str]:
    """The cause's traceback as a note, since frames do not survive pickling.

    Every message is cut to a line or so, as the error's text has more of it: the frames are what this note is for.
    """
    if cause is None or cause.__traceback__ is None:
        return []
    try:
        found = traceback.TracebackException.from_exception(cause)
        found.__notes__ = None  # they travel with the cause itself
        lines = list(found.format())
    except Exception:  # a __str__ that raises
        lines = traceback.format_tb(cause.__traceback__)
    text = "".join(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...\n" for line in lines)
    return ["raised in a worker:\n" + (text if len(text) <= _LONGEST_TEXT else "... " + text[-_LONGEST_TEXT:])]


def _both(cause: BaseException | None, message: str, operator: str, where: str) -> OperatorError | None:
    """An instance of OperatorError and of the cause's own class; None where no such class can be made.

    StopIteration is left out: the iterator protocol would take it for the end of the data.
    """
    if not isinstance(cause, Exception) or isinstance(cause, (ZephonError, StopIteration, StopAsyncIteration)):
        return None
    try:
        kind: Any = type("OperatorError", (OperatorError, type(cause)), {"__module__": __name__})
        error: OperatorError = kind.__new__(kind, message)
        error.args = (message,)  # the cause's own __init__ may want other arguments, so it is not called
        error.operator, error.where = operator, where
        for name, value in (*_system_fields(cause), *vars(cause).items()):
            if name not in vars(error) and name != "__notes__":  # which are shown with the cause
                setattr(error, name, value)
        if str(error) != message:
            return None
    except Exception:
        return None
    return error


def _restore(
    kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any], links: _Links = ()
) -> BaseException:
    """An exception of these parts. Its `__init__`, which may want other arguments, is not called."""
    error = kind.__new__(kind, *args)
    error.args = args
    for name, value in fields.items():
        setattr(error, name, value)
    if (cause := _linked(links)) is not None:  # to set None would hide the context too
        error.__cause__ = cause
    return error


def _links(error: BaseException | None) -> _Links:
    """An exception and what it came from, as Python would show them, in a form that survives pickling."""
    links: list[tuple[BaseException | _Parts, bool]] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(links) < _LONGEST_CHAIN:
        seen.add(id(error))
        links.append((_portable(error), error.__cause__ is not None))
        if isinstance(error, ZephonError):
            break  # its own pickle has the rest
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return links


def _linked(links: _Links) -> BaseException | None:
    """The exception of `_links`."""
    before: BaseException | None = None
    for found, by_name in reversed(links):
        error = _restore(*found) if isinstance(found, tuple) else found
        if before is not None and error.__cause__ is None:
            if by_name:
                error.__cause__ = before
            else:
                error.__context__ = before
        before = error
    return before


def _portable(error: BaseException) -> BaseException | _Parts:
    """The exception itself if it comes out of pickling as it was, else its parts, else a stand-in with its text.

    An exception is pickled as its class and args. A constructor that wants others than it hands on fails then, or
    makes another text.
    """
    text, pickled = describe(error), _round_trip(error)
    if pickled is not None and describe(pickled) == text:
        return error
    parts = (type(error), error.args, _fields(error))
    restored = _round_trip(parts)
    try:
        if restored is not None and describe(_restore(*restored)) == text:
            return parts
    except Exception:  # a __new__ that wants other arguments, a property that cannot be set
        pass
    return error if pickled is not None else ZephonError(text)  # a text with an address in it is never the same


def _fields(error: BaseException) -> dict[str, Any]:
    """What an exception holds beside its args, notes included; without what cannot be sent."""
    fields = dict(_system_fields(error)) if isinstance(error, OSError) else {}
    return {name: value for name, value in (fields | vars(error)).items() if _round_trip((value,)) is not None}


def _round_trip(value: Any) -> Any:
    """A value after pickling; None where that fails."""
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception:
        return None

"""The exception tree. A class says who must act; the text says what, the rule, the remedy and where."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

_LONGEST_TEXT = 4_000  # characters of a user's message that travel with an error


class ZephonError(Exception):
    """Base of everything that Zephon raises. Survives pickling with its cause and notes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, _portable(self.__cause__), list(getattr(self, "__notes__", ())))


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
        return _rebuild, (self.args[0], self.operator, self.where, _portable(cause), notes)


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


def _rebuild(
    message: str, operator: str, where: str, cause: BaseException | None, notes: Sequence[str] = ()
) -> OperatorError:
    error = _both(cause, message, operator, where) or OperatorError(message, operator, where)
    error.__cause__ = cause
    for note in notes:
        error.add_note(note)
    return error


def _system_fields(cause: Exception) -> list[tuple[str, Any]]:
    """What an OSError keeps outside its dictionary."""
    return [
        (name, getattr(cause, name)) for name in ("errno", "filename", "filename2", "strerror") if hasattr(cause, name)
    ]


def _where_raised(cause: BaseException | None) -> list[str]:
    """The cause's traceback as a note, since frames do not survive pickling."""
    if cause is None or cause.__traceback__ is None:
        return []
    try:
        lines = traceback.format_exception(cause)
    except Exception:  # a __str__ that raises
        lines = traceback.format_tb(cause.__traceback__)
    text = "".join(lines)
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
            if name not in vars(error):
                setattr(error, name, value)
        if str(error) != message:
            return None
    except Exception:
        return None
    return error


def _restore(
    kind: type[ZephonError], args: tuple[Any, ...], cause: BaseException | None, notes: Sequence[str]
) -> ZephonError:
    error = kind(*args)
    error.__cause__ = cause
    for note in notes:
        error.add_note(note)
    return error


def _portable(error: BaseException | None) -> BaseException | None:
    """The exception itself if it survives pickling, else a stand-in that keeps its description."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ZephonError(describe(error))
    return error

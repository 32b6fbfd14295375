"""The exception tree. A class says who must act; the text says what, the rule, the remedy and where."""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Place:
    """Where this process stands in the pipeline, as the title of the tracebacks that it sends."""

    title = "where it was raised"


def set_place(place: str) -> None:
    """Says what this process is, for the tracebacks that it sends: "a worker", "the engine"."""
    _Place.title = f"raised in {place}"


_LONGEST_TEXT = 4_000  # characters of a user's message that travel with an error
_LONGEST_LINE = 500  # characters of one frame or message of a traceback that travels as a note
_LONGEST_CHAIN = 16  # exceptions that travel: one, what caused it, what caused that, ...
_DEEPEST_GROUP = 64  # groups inside of each other that travel; what lies deeper is described

_HEAP_TYPE = 1 << 9  # CPython's flag of a class that is not built in

_Members = Sequence["_Links"]
"""The exceptions of a group, each with what it came from."""

_Parts = tuple[type[BaseException], tuple[Any, ...], dict[str, Any], "_Members | None"]
"""Class, args, fields and members of an exception whose constructor must not be called again."""

_Links = Sequence[tuple[bytes, str, bool]]
"""An exception and what it came from, one after the other: pickled (itself, or its parts), its description, and whether
the next one was named as the cause (`from`)."""


class ZephonError(Exception):
    """Base of everything that Zephon raises. Survives pickling with its cause and notes."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = _fields(self)
        if notes := [*_notes(self), *_where_raised(self.__cause__)]:
            fields["__notes__"] = notes
        return _restore, (type(self), self.args, fields, None, _links(self.__cause__))


class ConfigError(ZephonError, ValueError):
    """A definition or a setting is wrong: change the script. Raised before any work starts."""


class DataError(ZephonError):
    """A record or a file cannot be read, or breaks a bound: mend or exclude the data."""


class ShardError(DataError):
    """A whole shard cannot be read (gone, changed, not readable here), or a row for which this machine has no memory.

    `on_error="skip"` must not skip it: another rank may read that file, and a skip has to follow from the record alone.
    """


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
        notes = [*_notes(self), *_where_raised(cause)]
        return _arrive, (self.args[0], self.operator, self.where, _links(cause), notes)


def describe(error: BaseException) -> str:
    """`Type: message`, bounded, or `Type` without one; also for exceptions whose `__str__` raises."""
    text = _tried(
        lambda: str(error), lambda broken: f"<message unavailable: its __str__ raised {type(broken).__name__}>"
    )
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tried(make: Callable[[], _T], otherwise: Callable[[BaseException], _T]) -> _T:
    """What `make` gives, or, where code of an exception's own class raises on the way, what `otherwise` makes of that.

    A real Ctrl-C goes on.
    """
    try:
        return make()
    except BaseException as broken:
        if is_ctrl_c(broken):
            raise
        return otherwise(broken)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may be a real Ctrl-C: these come to main threads only, and our own processes ignore them."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    )


def reword(error: ZephonError, before: str, after: str) -> None:
    """Says `after` where an error of ours says `before`, in its text and its `where`."""
    if error.args and isinstance(error.args[0], str):
        _set(error, "args", (error.args[0].replace(before, after, 1), *error.args[1:]))
    if isinstance(error, OperatorError):
        _set(error, "where", error.where.replace(before, after, 1))


def operator_error(original: BaseException, operator: str, where: str, remedy: str = "") -> OperatorError:
    """The error that reaches the consumer when `original` was raised by `operator` on the record at `where`."""
    text = f"operator '{operator}' failed on {where}: {describe(original)}"
    return _rebuild(f"{text}: {remedy}" if remedy else text, operator, where, original)


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


def _set(error: BaseException, name: str, value: Any) -> None:
    """Sets a field, also of a class that lets nobody write."""
    object.__setattr__(error, name, value)


def _notes(error: BaseException) -> list[str]:
    """The notes of an exception as text, as Python would print them."""
    notes = getattr(error, "__notes__", ())
    return [n if isinstance(n, str) else _shown(n) for n in notes] if isinstance(notes, (list, tuple)) else []


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
    except BaseException as broken:  # a __str__ that raises
        if is_ctrl_c(broken):
            raise
        lines = traceback.format_tb(cause.__traceback__)
    text = "".join(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...\n" for line in lines)
    return [f"{_Place.title}:\n" + (text if len(text) <= _LONGEST_TEXT else "... " + text[-_LONGEST_TEXT:])]


def _both(cause: BaseException | None, message: str, operator: str, where: str) -> OperatorError | None:
    """An instance of OperatorError and of the cause's own class; None where no such class can be made.

    StopIteration is left out: the iterator protocol would take it for the end of the data.
    """
    if not isinstance(cause, Exception) or isinstance(cause, (ZephonError, StopIteration, StopAsyncIteration)):
        return None
    try:
        own = {"__module__": __name__, "__setattr__": object.__setattr__}  # Python itself writes to what is raised
        kind: Any = type("OperatorError", (OperatorError, type(cause)), own)
        members = cause.exceptions if isinstance(cause, BaseExceptionGroup) else None
        error: OperatorError = _bare(kind, (message,), members)
        error.operator, error.where = operator, where
        for name, value in (*_system_fields(cause), *vars(cause).items()):
            if name not in vars(error) and name != "__notes__":  # which are shown with the cause
                setattr(error, name, value)
        if str(error) != message:
            return None
    except BaseException as broken:
        if is_ctrl_c(broken):
            raise
        return None
    return error


def _bare(kind: Any, args: tuple[Any, ...], members: Sequence[BaseException] | None) -> Any:
    """An exception of a class and args. Only the constructor of the built-in class runs: others may want more."""
    built_in: Any = kind
    while built_in.__flags__ & _HEAP_TYPE:  # of several parents the one whose memory it shares, as Python demands
        built_in = built_in.__base__
    if members is None:
        error = built_in.__new__(kind, *args)
    else:
        error = built_in.__new__(kind, args[0], list(members))
        args = (args[0], list(members), *args[2:]) if len(args) > 1 else args
    _set(error, "args", args)
    return error


def _restore(
    kind: type[BaseException],
    args: tuple[Any, ...],
    fields: dict[str, Any],
    members: _Members | None = None,
    links: _Links = (),
) -> BaseException:
    """An exception of these parts."""
    found = [linked for one in members if (linked := _linked(one)) is not None] if members is not None else None
    error: BaseException = _bare(kind, args, found)
    for name, value in fields.items():
        _set(error, name, value)
    if (cause := _linked(links)) is not None:  # to set None would hide the context too
        _set(error, "__cause__", cause)
    return error


def _links(error: BaseException | None, depth: int = 0) -> _Links:
    """An exception and what it came from, as Python would show them, in a form that survives pickling.

    depth: the groups that it lies in.
    """
    links: list[tuple[bytes, str, bool]] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(links) < _LONGEST_CHAIN:
        seen.add(id(error))
        links.append((*_portable(error, depth), error.__cause__ is not None))
        if isinstance(error, ZephonError):
            break  # its own pickle has the rest
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return links


def _linked(links: _Links) -> BaseException | None:
    """The exception of `_links`."""
    before: BaseException | None = None
    for raw, text, by_name in reversed(links):
        error = _loaded(raw) or ZephonError(text)
        if before is not None and error.__cause__ is None:
            _set(error, "__cause__" if by_name else "__context__", before)
        before = error
    return before


def _portable(error: BaseException, depth: int) -> tuple[bytes, str]:
    """The exception pickled, as itself if it comes out as it was, else as its parts; and its description.

    An exception is pickled as its class and args. A constructor that wants others than it hands on fails then, or
    makes another text. What has no form that can be loaded, here or there, arrives as its description alone.
    """
    text = describe(error)
    if isinstance(error, BaseExceptionGroup) and depth > _DEEPEST_GROUP:
        return b"", text
    if not isinstance(error, BaseExceptionGroup):  # whose members would lose what they came from
        itself = _pickled(error)
        if (again := _loaded(itself)) is not None and describe(again) == text:
            return itself, text
    parts = _pickled(_parts(error, depth))
    return (parts if _loaded(parts) is not None else b""), text


def _parts(error: BaseException, depth: int) -> _Parts:
    """What an exception is made of. An argument that cannot be sent goes as its description."""
    if isinstance(error, BaseExceptionGroup):
        rest = [_sendable(arg) for arg in error.args[2:]]
        members = [_links(member, depth + 1) for member in error.exceptions]
        return type(error), (error.message, None, *rest), _fields(error), members
    return type(error), tuple(_sendable(arg) for arg in error.args), _fields(error), None


def _sendable(value: Any) -> Any:
    """The value if it comes out of pickling, else how it is shown."""
    return value if _pickles(value) else _shown(value)


def _shown(value: Any) -> str:
    """A value's repr, bounded."""
    return _tried(lambda: f"{value!r:.{_LONGEST_LINE}}", lambda _: f"<{type(value).__name__}>")


def _fields(error: BaseException) -> dict[str, Any]:
    """What an exception holds beside its args, notes included; without what cannot be sent."""
    fields = dict(_system_fields(error)) if isinstance(error, OSError) else {}
    if notes := _notes(error):
        fields["__notes__"] = notes
    return {name: value for name, value in (vars(error) | fields).items() if _pickles(value)}


def _pickled(value: Any) -> bytes:
    """A value pickled; nothing where that fails."""
    return _tried(lambda: pickle.dumps(value), lambda _: b"")


def _pickles(value: Any) -> bool:
    """Whether a value comes out of pickling."""
    return _tried(lambda: (pickle.loads(pickle.dumps(value)), True)[1], lambda _: False)


def _loaded(raw: bytes) -> BaseException | None:
    """The exception that was pickled, as itself or as its parts; None where it cannot be had in this process."""

    def load() -> Any:
        found = pickle.loads(raw)
        return _restore(*found) if isinstance(found, tuple) else found

    error = _tried(load, lambda _: None)
    return error if isinstance(error, BaseException) else None

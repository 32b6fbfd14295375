"""Exceptions of every kind, for the tests of how they arrive. Workers import this module, so it must be light."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zephon as zp

Make = Callable[[], BaseException]


class ThreeArguments(Exception):
    def __init__(self, msg: str, a: int, b: int) -> None:
        super().__init__(f"{msg} {a} {b}")
        self.a, self.b = a, b


class KeywordOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)
        self.code = code


class WantsNew(Exception):
    def __new__(cls, *args: Any) -> WantsNew:
        if len(args) != 2:
            raise TypeError("two arguments")
        return super().__new__(cls, *args)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a * b)


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock, self.code = threading.Lock(), 7


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def local_class() -> BaseException:
    class Local(Exception):
        pass

    return Local("here")


def caused() -> BaseException:
    error, inner = ValueError("outer"), KeyError("inner")
    error.__cause__, inner.__cause__ = inner, ThreeArguments("innermost", 1, 2)
    return error


class LockArgument(Exception):
    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class Raises(Exception):
    """Raises something else in the hook of that name, whoever calls it."""

    def __init__(self, hook: str, make: Make) -> None:
        super().__init__(hook)
        vars(self)["_hook"], vars(self)["_make"] = hook, make

    def _maybe(self, hook: str) -> None:
        if vars(self).get("_hook") == hook:
            raise vars(self)["_make"]()

    def __str__(self) -> str:
        self._maybe("str")
        return "raises"

    def __reduce__(self) -> Any:
        self._maybe("reduce")
        return super().__reduce__()

    def __setattr__(self, name: str, value: Any) -> None:
        self._maybe("setattr")
        super().__setattr__(name, value)


class ExitsWhenLoaded(Exception):
    def __init__(self, *args: Any) -> None:
        if not args:
            raise SystemExit(4)
        super().__init__()


class NoSubclasses(Exception):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise SystemExit("final")


class OwnGroup(ExceptionGroup[Exception]):
    """A group that is made of more than a message and its members."""

    code: int

    def __new__(cls, message: str, members: list[Exception], code: int) -> OwnGroup:
        made = super().__new__(cls, message, members)
        made.code = code
        return made

    def derive(self, excs: Any) -> OwnGroup:
        return OwnGroup(self.message, list(excs), self.code)


class OwnData(zp.errors.DataError):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}, line {line}")
        self.line = line


class OwnBase(BaseException):
    pass


def noted() -> BaseException:
    error = ValueError("noted")
    error.add_note("first note")
    error.add_note("second\nnote")
    return error


def odd_notes() -> BaseException:
    error = ValueError("odd notes")
    error.__notes__ = ["text", threading.Lock, 3]
    return error


def chained() -> BaseException:
    """Raised `from` one that was raised while another was handled, each with a note."""
    try:
        try:
            try:
                raise KeyError("inner")
            except KeyError as inner:
                inner.add_note("note of inner")
                raise HoldsALock  # noqa: B904
        except HoldsALock as middle:
            middle.add_note("note of middle")
            raise ThreeArguments("outer", 1, 2) from middle
    except ThreeArguments as outer:
        return outer


def cut() -> BaseException:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("cut") from None
    except ValueError as error:
        return error


def in_a_ring() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def long_chain() -> BaseException:
    error: BaseException | None = None
    for number in range(40):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    assert error is not None
    return error


def group() -> BaseException:
    """Members of every kind, one with a cause and a note of its own, and a group in the group."""
    first = ThreeArguments("first", 1, 2)
    first.add_note("note of first")
    first.__cause__ = FileNotFoundError(2, "missing", "a.txt")
    made = ExceptionGroup("several", [first, HoldsALock(), ExceptionGroup("nested", [KeyError("k"), Frozen(3)])])
    made.add_note("note of the group")
    return made


def from_group() -> BaseException:
    error = ValueError("from a group")
    error.__cause__ = group()
    return error


def from_exit() -> BaseException:
    error = ValueError("from an exit")
    error.__cause__ = SystemExit(3)
    return error


def ours() -> BaseException:
    error = zp.errors.DataError("a bad record")
    error.__cause__ = KeyError("q")
    error.add_note("note of ours")
    return error


def deep(level: int = 0) -> BaseException:
    try:
        return deep(level + 1)
    except RecursionError as error:
        return error


REBUILT: dict[str, Make] = {
    "KeyError": partial(KeyError, "k"),
    "two arguments": partial(ValueError, "v", 3),
    "no arguments": ValueError,
    "OSError": partial(OSError, 2, "missing", "a.txt"),
    "OSError with two names": partial(OSError, 18, "cross-device", "a.txt", None, "b.txt"),
    "UnicodeDecodeError": partial(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad"),
    "SyntaxError": partial(SyntaxError, "bad", ("f.py", 1, 2, "text")),
    "ImportError": partial(ImportError, "no", name="mod", path="p"),
    "5 MB": partial(ValueError, "x" * 5_000_000),
    "a surrogate": partial(ValueError, "\ud800"),
    "three arguments": partial(ThreeArguments, "three", 1, 2),
    "keyword only": partial(KeywordOnly, code=3),
    "__new__ wants arguments": partial(WantsNew, 3, 4),
    "holds a lock": HoldsALock,
    "frozen dataclass": partial(Frozen, 4),
    "slots": partial(Slotted, 4),
    "__str__ raises": partial(Raises, "str", partial(ValueError, "no text")),
    "__str__ exits": partial(Raises, "str", partial(SystemExit, 0)),
    "__reduce__ exits": partial(Raises, "reduce", partial(SystemExit, 0)),
    "__reduce__ interrupts": partial(Raises, "reduce", KeyboardInterrupt),
    "__setattr__ exits": partial(Raises, "setattr", partial(SystemExit, 0)),
    "exits when loaded": partial(ExitsWhenLoaded, 1),
    "notes": noted,
    "odd notes": odd_notes,
    "chain": chained,
    "cut chain": cut,
    "ring": in_a_ring,
    "long chain": long_chain,
    "from a group": from_group,
    "from an exit": from_exit,
    "ExceptionGroup": group,
    "own group": lambda: OwnGroup("own", [ValueError("v")], 7),
    "large group": lambda: ExceptionGroup("many", [ValueError("x" * 1000) for _ in range(1000)]),
    "deep": deep,
}
WRAPPED: dict[str, Make] = {
    "StopIteration": partial(StopIteration, {"id": 1}),
    "StopAsyncIteration": StopAsyncIteration,
    "sys.exit(0)": partial(SystemExit, 0),
    "sys.exit(3)": partial(SystemExit, 3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "own BaseException": partial(OwnBase, "b"),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("base", [GeneratorExit(), ValueError(1)]),
    "no subclasses": partial(NoSubclasses, "n"),
    "our WorkerError": partial(zp.errors.WorkerError, "w"),
    "our Closed": partial(zp.errors.Closed, "closed"),
}


class Raise:
    """Raises `make()` at one id; elsewhere tells the id twice."""

    def __init__(self, at: int, make: Make) -> None:
        self.at, self.make = at, make

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["id"] == self.at:
            raise self.make()
        return {**record, "again": record["id"]}

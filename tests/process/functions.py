"""What the tests give to pipelines. Workers import this module, so it must be light."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]


def wait_for(path: str | Path, timeout_s: float = 30.0) -> None:
    """Returns once the file is there; ends the process where it does not come."""
    event = threading.Event()
    for _ in range(int(timeout_s * 200)):
        if Path(path).exists():
            return
        event.wait(0.005)
    os._exit(9)


class Enrich:
    """Fields of every form: numbers, text, arrays of one shape and ragged ones, a nested value."""

    def __call__(self, record: Record) -> Record:
        n = record["id"]
        return {
            **record,
            "text": "t" * (n % 50),
            "x": np.full(8, n),
            "tokens": np.arange(n % 7),
            "meta": {"n": n, "even": n % 2 == 0},
            "score": n / 3,
        }


class Blow:
    """One field of `size` bytes at one id; `size` characters with `text`."""

    def __init__(self, at: int, size: int, text: bool = False) -> None:
        self.at, self.size, self.text = at, size, text

    def __call__(self, record: Record) -> Record:
        if record["id"] != self.at:
            return {**record, "big": "" if self.text else b""}
        return {**record, "big": "x" * self.size if self.text else bytes(self.size)}


class Full:
    """x = full(size, id)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, record: Record) -> Record:
        return {"id": record["id"], "x": np.full(self.size, record["id"])}


class Die:
    """Ends its own process at one id: by a signal, or (0 and above) with an exit status."""

    def __init__(self, at: int, how: int) -> None:
        self.at, self.how = at, how

    def __call__(self, record: Record) -> Record:
        if record["id"] == self.at:
            if self.how < 0:
                os.kill(os.getpid(), -self.how)
                signal.pause()
            os._exit(self.how)
        return record


class DieOnce:
    """Ends its own process at some ids, each time only once: a file remembers."""

    def __init__(self, folder: Path, at: set[int], number: int) -> None:
        self.folder, self.at, self.number = str(folder), at, number

    def __call__(self, record: Record) -> Record:
        path = Path(self.folder, f"died-at-{record['id']}")
        if record["id"] in self.at and not path.exists():
            path.touch()
            os.kill(os.getpid(), self.number)
            signal.pause()
        return record


class Stand:
    """Tells that it began with one id (a file), and goes on when another file is there."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = str(folder), at

    def __call__(self, record: Record) -> Record:
        if record["id"] == self.at:
            Path(self.folder, "standing").touch()
            wait_for(Path(self.folder, "go on"))
        return record


class Forks:
    """Leaves a process of its own where it is unpacked, until a file is there; it holds open whatever it inherited."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self, record: Record) -> Record:
        return record

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.fork() == 0:
            Path(self.folder, "forked").touch()
            wait_for(Path(self.folder, "go on"))
            os._exit(0)


class Raise:
    """Raises `make()` at one id."""

    def __init__(self, at: int, make: Any) -> None:
        self.at, self.make = at, make

    def __call__(self, record: Record) -> Record:
        if record["id"] == self.at:
            raise self.make()
        return record


def burn(record: Record) -> Record:
    """Some tenths of a millisecond of work."""
    return {**record, "sum": sum(range(record["id"] % 7 * 1000 + 3000))}


def draw(record: Record) -> Record:
    """The global random numbers of a worker, and who it is."""
    return {"pid": os.getpid(), "numpy": float(np.random.random()), "python": random.random()}


def draw_torch(record: Record) -> Record:
    """The same of torch."""
    import torch

    return {"pid": os.getpid(), "torch": float(torch.rand(1).item())}


class Give:
    """x = the array of that number."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "x": self.arrays[record["id"] % len(self.arrays)]}


class Lookup:
    """The records of a list, one by one."""

    def __init__(self, records: list[dict[Any, Any]]) -> None:
        self.records = records

    def __call__(self, record: dict[str, Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = self.records[record["id"] % len(self.records)]
        return found


def times(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [record] * 200


ALIGNED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
NESTED = np.dtype([("n", "i2"), ("inner", ALIGNED, (2,)), ("x", np.longdouble)], align=True)
Pair = collections.namedtuple("Pair", "a b")


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


class Word(str):
    """A text of a class of its own."""


class Tagged(np.ndarray[Any, Any]):
    """An array of a class of its own."""


@dataclasses.dataclass(slots=True, frozen=True)
class Shape:
    """A value of the user's."""

    width: int
    name: str = "q"


def made(dtype: np.dtype[Any], i: int) -> Any:
    """An array between whose values stands what happens to stand in memory."""
    array = np.frombuffer(os.urandom(2 * dtype.itemsize), np.uint8).view(dtype).copy()
    return _write(array, i)


def _write(array: Any, value: int) -> Any:
    for name in array.dtype.names or ():
        _write(array[name], value)
    if array.dtype.names is None:
        array[...] = value
    return array


KINDS: dict[str, Callable[[int], Any]] = {
    "strided": lambda i: np.arange(24).reshape(4, 6)[::2, ::-1] + i,
    "fortran": lambda i: np.asfortranarray(np.arange(6).reshape(2, 3)) + i,
    "no rows": lambda i: np.zeros((0, 3)),
    "no dimension": lambda i: np.array(i),
    "fields": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "aligned fields": lambda i: made(ALIGNED, i),
    "nested fields": lambda i: made(NESTED, i),
    "one of aligned fields": lambda i: made(ALIGNED, i)[0],
    "aligned fields of several lengths": lambda i: made(ALIGNED, i)[: i % 3],
    "aligned fields in a list": lambda i: [made(ALIGNED, i), made(NESTED, i)[0]],
    "fields of a class": lambda i: {"x": made(ALIGNED, i).view(np.recarray)},
    "fields out of order": lambda i: made(np.dtype({"names": "ab", "formats": ["i2", "u1"], "offsets": [5, 1]}), i),
    "other byte order": lambda i: np.array([i], ">i4"),
    "half": lambda i: np.float16(i),
    "long": lambda i: np.longdouble(i) / 3,
    "longs": lambda i: np.array([i, 1], np.longdouble) / 3,
    "complex longs": lambda i: np.array([i, 1], np.clongdouble) / 3,
    "longs of several lengths": lambda i: np.full(i % 3, i, np.longdouble) / 3,
    "complex": lambda i: complex(i, -0.0),
    "no number": lambda i: float("nan"),
    "negative zero": lambda i: -0.0,
    "large": lambda i: 2**63 + i,
    "small": lambda i: -(2**63),
    "huge": lambda i: 10**5000 + i,
    "bytes": lambda i: b"\0" * i,
    "bytearray": lambda i: bytearray(b"x"),
    "none": lambda i: None,
    "enum": lambda i: Level.LOW,
    "word": lambda i: Word("s"),
    "pair": lambda i: Pair(i, [1]),
    "dataclass": lambda i: Shape(i),
    "array of a class": lambda i: np.arange(3).view(Tagged),
    "masked": lambda i: np.ma.masked_array([1, i], [0, 1]),
    "objects": lambda i: np.array([{}, None, i], object),
    "date": lambda i: np.datetime64("2020-01-01", "D") + i,
    "no date": lambda i: np.datetime64("NaT"),
    "duration": lambda i: np.timedelta64(i, "s"),
    "text with nulls": lambda i: np.str_("a\0" + "\0" * i),
    "text with as many nulls": lambda i: np.str_("a\0"),
    "text with nulls inside": lambda i: {"x": [np.str_("a\0")]},
    "raw with nulls": lambda i: np.bytes_(b"a\0"),
    "raw with nulls inside": lambda i: (np.bytes_(b"a\0\0"),),
    "texts": lambda i: np.array(["ab", "c\0"]),
    "void": lambda i: np.void(b"ab\0"),
    "numpy bool": lambda i: np.bool_(i % 2),
    "int or float": lambda i: i if i % 2 else float(i),
    "bool or int": lambda i: True if i % 2 else 1,
    "several lengths": lambda i: np.arange(i % 4),
    "several lengths of rows": lambda i: np.zeros((i % 3, 2), np.int8),
    "several widths": lambda i: np.zeros((2, i % 3), np.int8),
    "nest": lambda i: {"a": {"b": [(i,), {i}]}},
    "set": lambda i: {1, 2},
    "frozenset": lambda i: frozenset([1]),
    "tuple": lambda i: (i,),
    "keys": lambda i: {1: 2, None: 3, (1,): 4},
    "ordered": lambda i: collections.OrderedDict(a=i),
    "counter": lambda i: collections.Counter("aab"),
    "range": lambda i: range(i),
    "array": lambda i: array.array("i", [i]),
    "decimal": lambda i: decimal.Decimal("1.10"),
    "time": lambda i: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "surrogate": lambda i: "\ud800",
    "emoji": lambda i: "😀" * i,
    "null": lambda i: "a\0",
    "type": lambda i: int,
    "function": lambda i: len,
    "wide": lambda i: np.broadcast_to(np.int8(i), (300, 300)),
    "read-only": lambda i: np.frombuffer(b"abc", np.uint8),
    "view": lambda i: memoryview(b"abc"),
    "view of shorts": lambda i: [memoryview(array.array("h", [i, 2]))],
    "view of nothing": lambda i: memoryview(b""),
}  # each gives a value of its kind for a number


def every_kind(record: Record) -> Record:
    """A field for every kind of value."""
    return {kind: make(record["id"]) for kind, make in KINDS.items()}

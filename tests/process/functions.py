"""What the tests give to pipelines. Workers import this module, so it must be light."""

from __future__ import annotations

import os
import random
import signal
import threading
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

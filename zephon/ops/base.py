"""What an operator is: the two contracts that every step of a pipeline fills, and the values that they exchange.

`Operator`: a stateless function over records; a pool of workers runs it. `Accumulator`: single-threaded and
lane-aware; it regroups or reorders records, and decides on (cursor, length, component), never on payload.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError, DataError, ZephonError, operator_error
from zephon.functions import wants_rng
from zephon.limits import memory_remedy
from zephon.record import Record

OnError = Literal["raise", "skip"]

MAX_CHILDREN = 1024


def check_count(name: str, value: Any, method: str, least: int = 1, most: int | None = None) -> int:
    """The value if it is a whole number of at least `least` (and at most `most`), else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
        raise ConfigError(f"{method}({name}={value!r}): a whole number of {bound} is wanted")
    return value


class Node:
    """A step of a pipeline.

    `name` keys the step's random numbers, its settings in a state and `parallelism={name: n}`; None lets the
    pipeline choose one. `reasons` are the ways in which the step may lose something on purpose; each is counted as
    `<name>.<reason>`. `notes` are those of them that are no loss, only worth counting.
    """

    method: ClassVar[str] = "apply"
    name: str | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def one_to_one(self) -> bool:
        """Whether each record that enters gives exactly one, or an error. Where all steps say so, `len()` is known."""
        return False

    def settings(self) -> dict[str, Any]:
        """The fields that decide what this step does, for the fingerprint: plain values and functions.

        By default every public attribute of the instance and the code of its class. What is no such value (an open
        file, a lock) belongs in a private attribute, `_file`, that `setup` fills.
        """
        fields = {k: v for k, v in vars(self).items() if not k.startswith("_") and k not in ("name", "reasons")}
        return {"type": type(self).__qualname__, **fields, "class": type(self)}

    def bind(self, datasets: Sequence[str]) -> None:
        """Called once, as the step is added to a pipeline: the names of the source's datasets, by index."""

    def expand(self) -> list[Node]:
        """The operators and accumulators that this step stands for."""
        return [self]


def in_words(node: Node) -> str:
    """A step by its name; one of the user's own by its class too: operator 'apply_2' (DropLong)."""
    own = not type(node).__module__.startswith("zephon.")
    return f"operator '{node.name or node.method}'{f' ({type(node).__name__})' if own else ''}"


class Items(Protocol):
    """Who the records of a task are: asked only for random numbers and for errors."""

    def key(self, index: int) -> tuple[Any, ...]:
        """(pass, dataset name, epoch, row, start, child path) of the index-th record handed in."""

    def where(self, index: int, path: tuple[int, ...] = ()) -> str:
        """That record, or a child of it, in words: lane, dataset, shard, row, child."""


At = memoryview | list[int]
"""One cell, [0]: the number of the handed-in record that is worked on. Someone else may read it at any time."""


class Rows:
    """The records of one task on their way through the operators of a stage.

    `records`, `index` and `path` run in parallel: the record, the number of the handed-in record that it came from
    (never falling), and its child path since then. `drops` holds (index, reason, amount); `failures` holds
    (index, path, error). What follows a failure in its lane is not delivered. An operator that works record by record
    writes the number of each to `at[0]`, so that a stall can be told with its record.
    """

    __slots__ = ("at", "drops", "failures", "index", "interrupts", "items", "path", "records", "seed")

    def __init__(
        self, records: list[Record], items: Items, seed: int, interrupts: bool = False, at: At | None = None
    ) -> None:
        self.records = records
        self.index: Sequence[int] = range(len(records))
        self.path: list[tuple[int, ...]] | None = None
        self.drops: list[tuple[int, str, int]] = []
        self.failures: list[tuple[int, tuple[int, ...], ZephonError]] = []
        self.items = items
        self.seed = seed
        self.interrupts = interrupts
        self.at: At = [0] if at is None else at

    def let_through(self, error: BaseException) -> None:
        """Raises what user code may not swallow."""
        let_through(error, self.interrupts)

    def rng(self, i: int, name: str) -> np.random.Generator:
        """The random numbers of operator `name` for the i-th record: the same on every run, worker and topology."""
        *origin, path = self.items.key(self.index[i])
        path += self.path[i] if self.path else ()
        return generator(canonical_bytes([self.seed, *origin, path, name]))

    def keep(self, chosen: Sequence[int]) -> None:
        """Keeps only the records at the positions `chosen`, in that order."""
        if len(chosen) == len(self.records):
            return
        self.records = [self.records[i] for i in chosen]
        self.index = [self.index[i] for i in chosen]
        if self.path:
            self.path = [self.path[i] for i in chosen]

    def fail(self, i: int, error: BaseException, operator: str, on_error: OnError) -> None:
        """Notes that `operator` raised on the i-th record: a counted drop, or an error mark in the lane.

        The caller removes the record.
        """
        index, path = self.index[i], self.path[i] if self.path else ()
        if on_error == "skip" and isinstance(error, Exception):
            self.drops.append((index, f"{operator}.error", 1))
            return
        self.failures.append((index, path, as_zephon_error(error, operator, self.items.where(index, path))))


def let_through(error: BaseException, interrupts: bool) -> None:
    """Raises `error` where it is a Ctrl-C.

    `interrupts`: user code runs on the main thread, where a KeyboardInterrupt that it raises cannot be told from a
    real one. Elsewhere it is the user's own, an error like any other.
    """
    if interrupts and isinstance(error, KeyboardInterrupt):
        raise error


def as_zephon_error(error: BaseException, operator: str, where: str) -> ZephonError:
    """An OperatorError for what a user's code raised; a DataError of ours gains the operator and the record."""
    if isinstance(error, DataError):
        found = DataError(f"operator '{operator}', {where}: {error}")
        found.__cause__ = error.__cause__ if type(error) is DataError else error
        for note in getattr(error, "__notes__", ()) if type(error) is DataError else ():
            found.add_note(note)
        return found
    return operator_error(error, operator, where, memory_remedy() if isinstance(error, MemoryError) else "")


def generator(key: bytes) -> np.random.Generator:
    """A numpy Generator (Philox 4x64, Salmon et al. 2011) keyed by a hash of `key`."""
    digest = hashlib.blake2b(key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))


class Operator(Node):
    """A stateless function over records; subclass it, and give `process`.

    The same record must give the same result in any process, in any order: no state between calls. `setup` runs
    once in every worker before its first record (open a tokenizer, build a table).
    """

    reasons: tuple[str, ...] = ("filtered", "error")
    on_error: OnError = "raise"
    max_children: int = MAX_CHILDREN

    def setup(self) -> None:
        """Prepares this worker. Called once, before the first record."""

    def share(self) -> None:
        """Loads what all workers can share, if they are forked: called once before that, where it can be.

        It must start no thread and open nothing that two processes may not both use. `setup` is called all the same.
        """

    def process(self, record: Record) -> Record | None | Iterable[Record]:
        """What becomes of one record: a record, None (dropped, counted as `filtered`) or an iterable of records.

        With a parameter named `rng` it also receives a numpy Generator that belongs to this record alone.
        """
        raise ConfigError(f"{type(self).__qualname__} must define process(self, record)")

    def run(self, rows: Rows) -> None:
        """Applies the operator to all records of a task, in place. The default calls `process` for each."""
        name = self.name or self.method
        keyed = wants_rng(self.process)
        children = Children(rows, name, self.max_children)
        for i, (number, record) in enumerate(zip(rows.index, rows.records, strict=True)):
            rows.at[0] = number
            try:
                made = self.process(record, rng=rows.rng(i, name)) if keyed else self.process(record)  # type: ignore[call-arg]
                children.add(i, made)
            except BaseException as error:
                rows.let_through(error)
                rows.fail(i, error, name, self.on_error)
        children.finish()


def own_dict(made: Record, record: Record) -> Record:
    """What a function returned, as a dict that nobody else holds: it may return one object for many records."""
    return made if made is record else dict(made)


_ATOMS = (int, float, bool, str, bytes, complex, type(None))


def _separate(siblings: list[Record]) -> None:
    """Gives every sibling values of its own: a later change in place of one must not show in another."""
    seen: set[int] = set()
    for sibling in siblings:
        for name, value in sibling.items():
            if type(value) in _ATOMS:
                continue
            if id(value) in seen:
                sibling[name] = copy.deepcopy(value)
            seen.add(id(value))


def token_ids(value: Any) -> NDArray[Any]:
    """A sequence of token ids as a one-dimensional array of whole numbers. Raises TypeError or OverflowError."""
    ids = np.asarray(value)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(
            f"token ids must be a flat sequence of whole numbers, not {type(value).__name__} ({ids.ndim}-d {ids.dtype})"
        )
    if ids.dtype == np.uint64 and ids.size and ids.max() > np.uint64(2**63 - 1):
        raise OverflowError("a token id is larger than 2^63 - 1")
    return ids


def fits(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether numbers keep their values in `dtype`, but for the rounding of floats in a smaller one."""
    kind = values.dtype.kind
    if kind not in "biuf":
        return False
    if values.dtype == dtype or not values.size:
        return True
    if dtype.kind == "b":
        return bool(((values == 0) | (values == 1)).all())
    if kind == "b":
        return True
    if dtype.kind == "f":
        return _fits_float(values, dtype)
    if kind == "f":
        return False
    info = np.iinfo(dtype)
    return np.can_cast(values.dtype, dtype) or (int(values.min()) >= info.min and int(values.max()) <= info.max)


def _fits_float(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Floats, if none becomes infinite; whole numbers, if all are exact."""
    if values.dtype.kind == "f":
        if np.can_cast(values.dtype, dtype):
            return True
        with np.errstate(over="ignore"):
            return bool((np.isinf(values.astype(dtype)) == np.isinf(values)).all())
    exact = 2 ** (np.finfo(dtype).nmant + 1)  # all whole numbers up to here are
    if int(values.min()) >= -exact and int(values.max()) <= exact:
        return True
    with np.errstate(over="ignore"):
        return bool(values.astype(dtype).tolist() == values.tolist())  # Python compares int and float exactly


class Children:
    """Collects what each record of a task became, with the child paths that follow from it."""

    def __init__(self, rows: Rows, name: str, most: int) -> None:
        self.rows, self.name, self.most = rows, name, most
        self.records: list[Record] = []
        self.index: list[int] = []
        self.path: list[tuple[int, ...]] = []

    def add(self, i: int, made: Record | None | Iterable[Record]) -> None:
        """Takes what the i-th record became. Raises TypeError for anything but dicts, DataError beyond the bound."""
        if made is None:
            self.rows.drops.append((self.rows.index[i], f"{self.name}.filtered", 1))
        elif isinstance(made, dict):
            self._append(i, own_dict(made, self.rows.records[i]), ())
        else:
            self.extend(i, made)

    def extend(self, i: int, made: Iterable[Record]) -> int:
        """Takes the children of the i-th record and returns their number; a child's path says which it is."""
        if isinstance(made, (dict, str, bytes)) or not isinstance(made, Iterable):
            raise TypeError(f"it returned {type(made).__name__}; an iterable of dicts is wanted")
        children: list[Record] = []
        for child in made:
            if len(children) == self.most:
                raise DataError(
                    f"it became more than {self.most:,} records; raise max_children of this operator, "
                    "or cut the record earlier"
                )
            if not isinstance(child, dict):
                raise TypeError(f"a child is of type {type(child).__name__}; each must be a dict")
            children.append(dict(child))  # siblings never share one dict: a later in-place change stays with its own
        if len(children) > 1:
            _separate(children)
        for number, child in enumerate(children):
            self._append(i, child, (number,))
        return len(children)

    def _append(self, i: int, record: Record, step: tuple[int, ...]) -> None:
        self.records.append(record)
        self.index.append(self.rows.index[i])
        self.path.append((self.rows.path[i] if self.rows.path else ()) + step)

    def finish(self) -> None:
        """Puts the collected records into the task."""
        self.rows.records, self.rows.index = self.records, self.index
        self.rows.path = self.path if any(self.path) else None

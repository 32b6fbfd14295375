"""stateful_map: a user's state machine a lane, over what a `key=` function makes of each record in the workers.

It sees keys, never records: which records go on, what is written on them, and how long they wait is decided by one
thread, lane by lane, in order; payload does not pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import msgspec
import numpy as np

from zephon.errors import ConfigError, DataError
from zephon.functions import code_hash
from zephon.ops.accumulator import Accumulator, Emitted, Held, Key, Ref
from zephon.ops.base import check_count
from zephon.ops.plain import encode_plain, has_nan
from zephon.record import Attached, Record

MOST_VALUE_BYTES: Final = 1024  # of a key or an answer: it travels beside every record, and may be kept for long
MAX_HELD: Final = 1024
MAX_STATE_BYTES: Final = 1 << 20


@final
class Drop:
    """The answer "this record goes no further". One instance: `zephon.DROP`."""

    def __repr__(self) -> str:
        return "DROP"

    def __reduce__(self) -> str:
        return "DROP"


DROP: Final = Drop()


class Machine:
    """A state machine over the keys of one lane. Subclass it, and give `init` and `push`.

    What it answers may depend on the state and the keys alone: not on time, random numbers, or attributes that change.
    One instance serves all lanes.
    """

    def init(self, lane: int) -> Any:
        """The state at the start of a window of a lane: something that `push` can change, as a dict or a list."""
        raise ConfigError(f"{type(self).__qualname__} must define init(self, lane)")

    def push(self, state: Any, key: Any) -> Any:
        """Takes the key of the lane's next record, changes the state, and answers for the record.

        Without `into=`: True (it goes on) or False (it is dropped and counted). With `into=`: the value of that field,
        or `zephon.DROP`. A list answers for several, or none: see `stateful_map`.
        """
        raise ConfigError(f"{type(self).__qualname__} must define push(self, state, key)")

    def flush(self, state: Any) -> Sequence[Any]:
        """The window ends: the answers for all records that still wait, oldest first."""
        return ()

    def state(self, state: Any) -> Any:
        """The state as plain data (None, bools, numbers, text, bytes, lists and dicts), if it is anything else.

        Types are exact, at any depth: a Counter, a dataclass, a set, or a tuple that is no key of a dict is none. A
        list or dict stands in one place only. Dicts come back in their order.
        """
        return state

    def load(self, plain: Any) -> Any:
        """The state that `state` made `plain` of."""
        return plain


class StatefulMap(Accumulator):
    """Runs a Machine over the lane's keys.

    A record may wait: where `push` answers with a list, its items are the answers for the records that wait, oldest
    first, the new one being the last of them; [] lets it wait. At most `max_held` wait in a lane, and `flush` answers
    for the rest.
    """

    method = "stateful_map"
    reasons = ("dropped",)
    preserves = True
    measures = True
    keyed = True
    batched = True

    def __init__(
        self,
        machine: Any,
        key: Callable[[Record], Any],
        into: str | None = None,
        max_held: int = MAX_HELD,
        max_state_bytes: int = MAX_STATE_BYTES,
        name: str | None = None,
        version: str | None = None,
    ) -> None:
        if isinstance(machine, type) and issubclass(machine, Machine):
            machine = machine()
        if not isinstance(machine, Machine):
            what = machine.__name__ if isinstance(machine, type) else type(machine).__name__
            raise ConfigError(
                f"{self.method}(machine): a subclass of zephon.Machine, or an instance of one, is wanted, not {what}"
            )
        if not callable(key):
            raise ConfigError(f"{self.method}(key={key!r}): a function of a record is wanted")
        if into is not None and (not isinstance(into, str) or not into):
            raise ConfigError(f"{self.method}(into={into!r}): the name of a field is wanted, or None")
        self.machine, self.key, self.into, self.version = machine, key, into, version
        self.max_held = check_count("max_held", max_held, self.method)
        self.max_state_bytes = check_count("max_state_bytes", max_state_bytes, self.method)
        self.name = name
        self._states: dict[int, Any] = {}
        self._waiting: dict[int, list[Ref]] = {}

    def settings(self) -> dict[str, Any]:
        """`max_state_bytes` is not among them: it decides nothing but when to give up."""
        if self.version is not None:
            codes = {"machine": f"version {self.version}", "key": f"version {self.version}"}
        else:
            codes = {"machine": f"code {code_hash(self.machine)}", "key": f"code {code_hash(self.key)}"}  # type: ignore[arg-type]
        return {"type": self.method, **codes, "into": self.into, "max_held": self.max_held}

    def measure(self, record: Record) -> Any:
        key = plain_value(self.key(record), "the key")
        if has_nan(key):
            raise DataError(
                "the key is or holds NaN, which equals nothing, not even itself; give None, say, in its place"
            )
        return key

    def open(self, lane: int, key: Key) -> None:
        self._states[lane], self._waiting[lane] = self._changeable(self.machine.init(lane)), []

    def _changeable(self, state: Any) -> Any:
        if state is None or isinstance(state, (*_ATOMS, tuple, frozenset)):
            raise TypeError(
                f"{type(self.machine).__qualname__}.init gave {type(state).__name__}, which push cannot change; "
                "give a dict, a list or an object"
            )
        return state

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted, state, waiting = Emitted(), self._states[lane], self._waiting[lane]
        push = self.machine.push
        for trigger, (cursor, key, component) in enumerate(refs):
            try:
                answer = push(state, key)
                if type(answer) is list or waiting:
                    waiting.append((cursor, 1, component))
                    self._answer(emitted, trigger, waiting, answer)
                else:
                    self._settle(emitted, trigger, (cursor, 1, component), answer)
            except BaseException as error:  # the ref's own: the engine lets a Ctrl-C through
                emitted.fail(trigger, error)
                break
        return emitted

    def _answer(self, emitted: Emitted, trigger: int, waiting: list[Ref], answers: Any) -> None:
        """Takes answers for the records that wait, oldest first."""
        if type(answers) is not list:
            raise TypeError(
                f"push answered {answers!r} while {len(waiting) - 1} records wait before this one; answer with a "
                "list, oldest first"
            )
        if len(answers) > len(waiting):
            raise ValueError(f"{len(answers)} answers came for {len(waiting)} records that wait")
        for answer in answers:
            self._settle(emitted, trigger, waiting[0], answer)
            del waiting[0]
        if len(waiting) > self.max_held:
            raise DataError(
                f"{len(waiting):,} records wait for an answer, and max_held is {self.max_held:,}; answer earlier, or "
                "raise it"
            )

    def _settle(self, emitted: Emitted, trigger: int, ref: Ref, answer: Any) -> None:
        """Does with a record what was answered."""
        if answer is DROP:
            emitted.drop(trigger, "dropped")
        elif self.into is not None:
            emitted.add(trigger, (Attached(self, ref[0], self._value(answer)), 1, ref[2]))
        elif answer is True or (isinstance(answer, np.bool_) and answer):
            emitted.add(trigger, ref)
        elif answer is False or isinstance(answer, np.bool_):
            emitted.drop(trigger, "dropped")
        else:
            raise TypeError(f"the answer was {answer!r}: True or False is wanted; into='field' takes other values")

    @staticmethod
    def _value(answer: Any) -> Any:
        """An answer for a field. A tuple is none: a state would give it back as a list."""
        if type(answer) is tuple:
            raise TypeError("the answer is a tuple: None, bool, int, float, str or bytes is wanted")
        return plain_value(answer, "the answer")

    def flush(self, lane: int) -> Emitted:
        emitted, waiting = Emitted(), self._waiting[lane]
        answers = list(self.machine.flush(self._states[lane]))
        if len(answers) != len(waiting):
            raise ValueError(f"flush gave {len(answers)} answers, and {len(waiting)} records wait")
        self._answer(emitted, 0, waiting, answers)
        return emitted

    @property
    def holds(self) -> int:
        return self.max_held

    def state(self, lane: int) -> Held:
        plain = self.machine.state(self._states[lane])
        try:
            raw = encode_plain(plain)
        except TypeError as error:
            raise DataError(
                f"the machine's state cannot be kept: {error}; give {type(self.machine).__qualname__} `state` and "
                "`load`, which make plain data of it (None, bools, numbers, text, bytes, lists and dicts) and back"
            ) from error
        if len(raw) > self.max_state_bytes:
            raise DataError(
                f"the machine's state has {len(raw):,} bytes, and max_state_bytes is {self.max_state_bytes:,}; let it "
                "forget (the oldest keys, say), keep hashes instead of text, or raise it"
            )
        return Held(self._waiting[lane].copy(), raw)

    def load(self, lane: int, key: Key, held: Held) -> None:
        if not isinstance(held.plain, bytes) or len(held.items) > self.max_held:
            raise ValueError("this is no state of a stateful_map with this max_held")
        try:
            plain = msgspec.msgpack.decode(held.plain)
        except msgspec.DecodeError as error:
            raise ValueError(f"this is no state of a stateful_map: {error}") from error
        self._states[lane] = self.machine.load(plain)
        self._waiting[lane] = list(held.items)


_ATOMS: Final = (bool, int, float, str, bytes)


def plain_value(value: Any, what: str) -> Any:
    """A key or an answer as what may travel beside a record: None, bool, int, float, str, bytes, or a tuple of these.

    numpy's scalars become Python's. Raises TypeError for anything else, DataError beyond `MOST_VALUE_BYTES`.
    """
    kind = type(value)
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        raise DataError(f"{what} is a whole number beyond 64 bits; a hash, or its text, would do")
    if kind is str or kind is bytes:
        size = len(value) if kind is bytes or value.isascii() else _utf8_bytes(value, what)
    elif kind is tuple:
        value = tuple(plain_value(item, f"a part of {what}") for item in value)
        size = sum(len(item) if isinstance(item, (str, bytes)) else 8 for item in value)
    elif kind in _ATOMS or value is None:
        return value
    elif isinstance(value, np.generic) and type(value.item()) in _ATOMS:
        return plain_value(value.item(), what)
    else:
        raise TypeError(
            f"{what} is of type {kind.__name__}: None, bool, int, float, str, bytes or a tuple of these is wanted"
        )
    if size > MOST_VALUE_BYTES:
        raise DataError(
            f"{what} has {size:,} bytes, and at most {MOST_VALUE_BYTES:,} may travel beside a record; use a hash of it"
        )
    return value


def _utf8_bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise DataError(f"{what} is text with half a surrogate pair in it, which no state can carry") from None

"""Plain data: what a state carries and gives back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import msgspec

_ATOMS: Final = frozenset((type(None), bool, int, float, str, bytes))
_NESTED: Final = frozenset((list, dict))
MAX_DEPTH: Final = 100

Path = tuple[Any, ...]
"""The name of the whole, and the keys and indices that lead to a value in it."""


def encode_plain(value: Any, name: str = "state") -> bytes:
    """A value as msgpack. Raises TypeError, with the place in it, where something else would come back.

    Plain are None, bool, int, float, str, bytes, list and dict, and tuples as keys of a dict. Types are exact: a
    Counter would come back as a dict. A list or dict may stand in one place only: it would come back as two.
    """
    if _is_plain(value):
        try:
            return msgspec.msgpack.encode(value)
        except (OverflowError, UnicodeEncodeError):
            pass
    raise TypeError(next(_reasons(value, (name,), {})))


def has_nan(key: Any) -> bool:
    """Whether a float, or one in a tuple, is NaN: it equals nothing, so as a key it is found again by luck alone."""
    return key != key if type(key) is float else type(key) is tuple and any(map(has_nan, key))


def _is_plain(value: Any) -> bool:
    """As `_reasons` has none, but for what msgpack refuses. Level by level: a large state is walked in C."""
    seen: set[int] = set()
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        kinds = set(map(type, level))
        if kinds <= _ATOMS:
            return True
        if not kinds <= _ATOMS | _NESTED:
            return False
        if kinds & _ATOMS:
            level = [item for item in level if type(item) in _NESTED]
        met = len(seen)
        seen.update(map(id, level))
        dicts = [item for item in level if type(item) is dict]
        if len(seen) != met + len(level) or not _are_keys(dicts):
            return False
        lists = (item for item in level if type(item) is list)
        level = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
    return False


def _are_keys(dicts: list[dict[Any, Any]]) -> bool:
    if set(map(type, chain.from_iterable(dicts))) <= _ATOMS - {float}:
        return True
    keys = list(chain.from_iterable(dicts))
    while tuple in (kinds := set(map(type, keys))):
        keys = [*chain.from_iterable(key if type(key) is tuple else (key,) for key in keys)]
    return kinds <= _ATOMS and (float not in kinds or not any(key != key for key in keys))


def _reasons(value: Any, path: Path, seen: dict[int, Path]) -> Iterator[str]:
    """Why a value is not plain, in the order of the state. After a list or dict that is met again none is certain."""
    kind = type(value)
    if kind not in _NESTED:
        yield from (f"{_place(path)} {reason}" for reason in _atom(value))
    elif id(value) in seen:
        yield f"{_place(seen[id(value)])} and {_place(path)} are one {kind.__name__}, which would come back as two"
    elif len(path) > MAX_DEPTH:
        yield f"{_place(path)} lies in {MAX_DEPTH} lists and dicts, the most that come back"
    else:
        seen[id(value)] = path
        if kind is dict:
            yield from (f"{_place(path)} has a key that {reason}" for key in value for reason in _key(key))
        for key, item in value.items() if kind is dict else enumerate(value):
            yield from _reasons(item, (*path, key), seen)


def _key(key: Any) -> Iterator[str]:
    if type(key) is not tuple:
        yield from _atom(key)
    for part in key if type(key) is tuple else ():
        yield from _key(part)
    if has_nan(key):
        yield "is or holds NaN, which is not found again"


def _atom(value: Any) -> Iterator[str]:
    kind = type(value)
    if kind not in _ATOMS:
        back = "a list" if kind in (tuple, set, frozenset) else "something else, or not at all"
        yield f"is of type {kind.__qualname__}, which would come back as {back}"
    elif kind is int and not -(2**63) <= value < 2**64:
        yield "is a whole number beyond 64 bits"
    elif kind is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        yield "is text with half a surrogate pair in it"


def _place(path: Path) -> str:
    return str(path[0]) + "".join(f"[{key!r:.80}]" for key in path[1:])

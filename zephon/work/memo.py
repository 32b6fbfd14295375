"""A small bounded memory of derived values, safe under threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """At most `limit` values by key. Values must be pure functions of their key.

    There is no lock: single dictionary operations are atomic, and two threads that miss at once compute the same
    value twice. A full memory is emptied, which costs less than keeping an order of use. Copies share the memory;
    a pickle carries none of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made now if it is not at hand."""
        value = self._values.get(key)
        if value is None:
            value = make()
            if len(self._values) >= self.limit:
                self._values.clear()
            self._values[key] = value
        return value

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[Memo[T]], tuple[int]]:
        return type(self), (self.limit,)

    def __copy__(self) -> Memo[T]:
        return self

"""What a process keeps open or decoded: least recently used goes first, bounded by weight, never shared over a fork."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Shelf(Generic[V]):
    """The content as one process sees it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.items: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.weight = 0


class Lru(Generic[V]):
    """A thread-safe mapping whose total weight stays within `capacity()`; a heavier single value is kept alone.

    An evicted value is not closed, only let go: a thread that still reads from it keeps it alive, so that a file
    descriptor can never be reused under a reader. In a forked child the content is empty, and the parent's lock,
    which another thread may have held at the fork, is not used again.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity  # asked at the first use, because an import should read no limits of the system
        self._limit: int | None = None
        self._shelf: _Shelf[V] = _Shelf()

    def get(self, key: Hashable) -> V | None:
        """The value under `key`, now the most recently used; None if it is not here."""
        shelf = self._own_shelf()
        with shelf.lock:
            found = shelf.items.get(key)
            if found is None:
                return None
            shelf.items.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, weight: int = 1) -> None:
        """Keep `value`, and let go of the least recently used ones beyond the capacity."""
        if self._limit is None:
            self._limit = self._capacity()
        shelf = self._own_shelf()
        let_go = []  # destructors run after the lock is free
        with shelf.lock:
            let_go.append(shelf.items.pop(key, None))
            shelf.weight += weight - (let_go[0][1] if let_go[0] else 0)
            shelf.items[key] = (value, weight)
            while shelf.weight > self._limit and len(shelf.items) > 1:
                _, oldest = shelf.items.popitem(last=False)
                shelf.weight -= oldest[1]
                let_go.append(oldest)

    def discard(self, key: Hashable) -> None:
        """Forget `key`, if it is here."""
        shelf = self._own_shelf()
        with shelf.lock:
            found = shelf.items.pop(key, None)
            shelf.weight -= found[1] if found else 0

    def clear(self) -> None:
        """Forget everything."""
        self._shelf = _Shelf()

    def __len__(self) -> int:
        return len(self._own_shelf().items)

    def _own_shelf(self) -> _Shelf[V]:
        # Two threads of a new child may both get here; one of the two empty shelves is then simply lost.
        if self._shelf.pid != os.getpid():
            self._shelf = _Shelf()
        return self._shelf

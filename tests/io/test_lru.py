"""What a process keeps open: bounded by weight, empty after a fork even if a lock was held."""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.io.lru import Lru


@given(
    st.lists(st.tuples(st.sampled_from("gpd"), st.integers(0, 5), st.integers(1, 6)), max_size=60), st.integers(1, 12)
)
def test_against_a_list(steps: list[tuple[str, int, int]], capacity: int) -> None:
    lru: Lru[tuple[int, int]] = Lru(lambda: capacity)
    model: list[tuple[Hashable, int]] = []  # (key, weight), the most recent last
    for step, key, weight in steps:
        known = [entry for entry in model if entry[0] == key]
        model = [entry for entry in model if entry[0] != key]
        if step == "p":
            lru.put(key, (key, weight), weight)
            model.append((key, weight))
            while sum(entry[1] for entry in model) > capacity and len(model) > 1:
                model.pop(0)
        elif step == "d":
            lru.discard(key)
        else:
            assert lru.get(key) == (known[0] if known else None)
            model += known
    assert len(lru) == len(model)
    assert all(lru.get(key) == (key, weight) for key, weight in model)


def test_clear_forgets() -> None:
    lru: Lru[int] = Lru(lambda: 3)
    lru.put("a", 1)
    lru.clear()
    assert lru.get("a") is None
    assert len(lru) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_starts_empty_whatever_the_parent_was_doing() -> None:
    lru: Lru[int] = Lru(lambda: 3)
    lru.put("a", 1)
    with lru._shelf.lock:  # as if another thread of the parent were inside
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # a deadlock ends here
            empty = lru.get("a") is None
            lru.put("b", 2)
            os._exit(0 if empty and lru.get("b") == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lru.get("a") == 1
    assert lru.get("b") is None

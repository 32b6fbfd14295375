"""Where a pass ends, against counting what each component has given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from zephon.work.ends import merge_for, one_round, pass_length, slowest

from . import brute

LONGEST = 4000  # pointers that the loop walks in one example

components = st.lists(
    st.tuples(st.one_of(st.integers(1, 6), st.integers(1, 300)), st.integers(1, 30)), min_size=1, max_size=8
)


def length(weights: list[int], rows: list[int], end: str, epochs: int = 1, max_epochs: int | None = None) -> int | None:
    return pass_length(merge_for(end, [(0, tuple(weights))], rows), rows, end, epochs, max_epochs)


@given(components, st.sampled_from(["epochs", "stop", "redistribute", "repeat"]), st.integers(1, 4))
@example([(12, 8), (1, 1)], "epochs", 3)  # another component is first, and last, at one epoch than at three
@example([(12, 8), (1, 1)], "repeat", 3)
def test_a_pass_ends_where_the_loop_ends(parts: list[tuple[int, int]], end: str, times: int) -> None:
    weights, rows = [w for w, _ in parts], [n for _, n in parts]
    settings_: dict[str, Any] = {"epochs": {"epochs": times}, "repeat": {"max_epochs": times}}.get(end, {})
    walked = brute.first(brute.one_pass(weights, rows, end, **settings_), LONGEST)
    assume(len(walked) < LONGEST)
    assert length(weights, rows, end, **settings_) == len(walked)
    component, k = merge_for(end, [(0, tuple(weights))], rows).chunk(0, len(walked))
    assert list(zip(component.tolist(), k.tolist(), strict=True)) == walked


def test_repeat_is_endless_unless_bounded() -> None:
    assert length([1, 2], [3, 4], "repeat") is None
    assert length([1, 2], [3, 4], "repeat", max_epochs=1) == length([1, 2], [3, 4], "stop")


@given(components)
def test_one_round_meets_every_row(parts: list[tuple[int, int]]) -> None:
    weights, rows = [w for w, _ in parts], [n for _, n in parts]
    walked = brute.first(brute.one_pass(weights, rows, "epochs"), LONGEST)
    assume(len(walked) < LONGEST)
    merge = merge_for("repeat", [(0, tuple(weights))], rows)
    assert one_round(merge, rows, None) == len(walked)
    assert one_round(merge, rows, 5) == min(5, len(walked))
    assert slowest(merge, rows, 1) == walked[-1][0]


@pytest.mark.parametrize(
    ("weights", "rows", "end", "expected"),
    [
        # One row in 10^12 of a million rows: about 10^18 pointers, far from any loop.
        ([1, 10**12], [10**6, 40], "epochs", 10**18),
        ([1, 10**12], [10**6, 40], "stop", 40),
        ([2**47, 2**47], [10**17, 10**17], "redistribute", 2 * 10**17),
    ],
)
def test_lengths_beyond_counting(weights: list[int], rows: list[int], end: str, expected: int) -> None:
    found = length(weights, rows, end)
    assert found is not None
    assert abs(found - expected) <= 2 * sum(weights)

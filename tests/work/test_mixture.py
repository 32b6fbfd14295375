"""The merge at any position equals the merge done one element at a time."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ConfigError
from zephon.work.mixture import Mixture
from zephon.work.weights import MAX_PERIOD

from . import brute

small = st.integers(1, 9)
weight = st.one_of(small, st.integers(1, 1000), st.integers(1, 2**40), st.just(1))


def got(mixture: Mixture, start: int, count: int) -> list[tuple[int, int]]:
    component, k = mixture.chunk(start, count)
    return list(zip(component.tolist(), k.tolist(), strict=True))


@given(st.lists(weight, min_size=1, max_size=14), st.integers(0, 300), st.integers(1, 150))
def test_any_chunk_equals_the_full_merge(weights: list[int], start: int, count: int) -> None:
    full = brute.first(brute.merge(weights), start + count)
    assert got(Mixture(weights), start, count) == full[start:]


@given(st.lists(st.tuples(weight, st.integers(1, 40)), min_size=1, max_size=14), st.data())
def test_with_limits_the_others_go_on_at_every_prefix(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    weights, limits = [w for w, _ in parts], [n for _, n in parts]
    full = list(brute.merge(weights, limits))
    assert len(full) == sum(limits)
    start = data.draw(st.integers(0, len(full) - 1))
    count = data.draw(st.integers(1, len(full) - start))
    mixture = Mixture(weights, limits)
    assert got(mixture, start, count) == full[start : start + count]
    assert got(mixture, 0, len(full)) == full


def test_many_components_that_end_together() -> None:
    limits = list(range(1, 81))
    full = list(brute.merge(limits, limits))
    mixture = Mixture(limits, limits)
    size = 97
    tiles = [t for s in range(0, len(full), size) for t in got(mixture, s, min(size, len(full) - s))]
    assert tiles == full


@pytest.mark.parametrize("start", [10**15, 10**18, 4 * 10**18])
@pytest.mark.parametrize("weights", [[7, 2, 1], [1] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
def test_a_far_position_is_the_near_one_some_periods_later(weights: list[int], start: int) -> None:
    periods, near = divmod(start, sum(weights))
    full = brute.first(brute.merge(weights), near + 500)[near:]
    expected = [(c, k + periods * weights[c]) for c, k in full]
    assert got(Mixture(weights), start, 500) == expected


@pytest.mark.parametrize("start", [10**15, 10**18])
def test_tiles_far_out_join_without_a_gap(start: int) -> None:
    rng = random.Random(start)
    for trial in range(12):
        weights = [rng.randint(1, MAX_PERIOD // 64) for _ in range(rng.randint(2, 40))]
        if trial % 3 == 0:  # the period at its limit
            weights[0] = MAX_PERIOD - sum(weights[1:])
        mixture = Mixture(weights)
        whole = got(mixture, start, 600)
        tiles = [t for s in range(start, start + 600, 150) for t in got(mixture, s, 150)]
        assert tiles == whole
        keys = [mixture.key(c, k) for c, k in whole]
        assert all(a < b for a, b in pairwise(keys))
        expected = list(range(start, start + 600, 37))
        assert [mixture.place(c, k) for c, k in whole[::37]] == expected
        assert [brute.position(weights, c, k) for c, k in whole[::37]] == expected


def test_a_limit_far_out_leaves_one_component_its_own_order() -> None:
    far = 10**15
    mixture = Mixture([2**40, 1], [1000, 10**17])
    assert got(mixture, far, 3) == [(1, far - 1000 + i) for i in range(3)]
    # Component 0 ends within the first period of 1; the boundary lies where the loop finds it too.
    assert got(mixture, 0, 2000) == brute.first(brute.merge([2**40, 1], [1000, 10**17]), 2000)


def test_ties_go_to_the_earlier_component() -> None:
    """Keys that are equal as doubles: two heavy components whose phases are lost in rounding."""
    off = 10**12 + 39
    weights = [MAX_PERIOD // 2 - off, MAX_PERIOD // 2 + off]
    mixture = Mixture(weights)
    tied = 0
    for start in (MAX_PERIOD // 2, MAX_PERIOD // 4 * 3, MAX_PERIOD - 400):
        found = got(mixture, start, 300)
        keys = [mixture.key(c, k) for c, k in found]
        tied += sum(a[:2] == b[:2] for a, b in pairwise(keys))
        assert all(a < b for a, b in pairwise(keys))
        assert [brute.position(weights, c, k) for c, k in found] == list(range(start, start + 300))
        for count in range(1, 40):  # chunks that begin and end between two equal keys
            assert got(mixture, start + count, count) == found[count : 2 * count]
    assert tied


def test_a_key_that_rounds_up_to_a_whole_period_counts_no_element_of_the_next() -> None:
    """The last key of the heaviest component is 1.0 as a double, and so would be a medium one's first of the next
    period: 2,889 ranks give that one a phase near 0, and 55 more give the heaviest one a phase near 1."""
    weights = [1] * 2889 + [2**41] * 55
    weights.append(MAX_PERIOD - sum(weights))
    mixture = Mixture(weights)
    last = len(weights) - 1
    assert mixture.key(last, weights[last] - 1)[:2] == (0, 1.0)
    assert mixture.place(last, weights[last] - 1) == brute.position(weights, last, weights[last] - 1)


def test_components_far_beyond_their_end_do_not_overflow() -> None:
    start = 10**15
    found = got(Mixture([2**47, 1, 1], [5, 10**15, 10**15]), start, 60)
    # Two are left, one element each a period; the third component's phase is the smaller.
    assert found == [(1 + (t + 1) % 2, t // 2) for t in range(start - 5, start + 55)]


@pytest.mark.parametrize(("components", "bound"), [(2, 1.8), (5, 1.8), (30, 1.8), (1000, 5.3)])
def test_every_prefix_is_close_to_its_shares(components: int, bound: float) -> None:
    rng = random.Random(components)
    for weights in ([rng.randint(1, 100) for _ in range(components)], [1] * components):
        component, _ = Mixture(weights).chunk(0, 3000)
        given_so_far = np.cumsum(component[:, None] == np.arange(components), axis=0)
        due = np.arange(1, 3001)[:, None] * (np.array(weights) / sum(weights))
        assert np.abs(given_so_far - due).max() <= bound


def test_equal_weights_do_not_come_in_bursts() -> None:
    component, _ = Mixture([100] * 2 + [1] * 10).chunk(0, 210)
    rare = np.flatnonzero(component >= 2)
    assert np.diff(rare).min() >= 5  # ten in 210: due every 21, never side by side


def test_positions_have_an_end() -> None:
    with pytest.raises(ConfigError, match=r"2\*\*62"):
        Mixture([1, 2]).chunk(2**62 - 1, 2)

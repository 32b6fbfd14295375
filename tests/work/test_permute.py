"""Permutations: bijections, random access, many at once, and the same numbers for ever."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zephon.work.permute import (
    MAX_SORTED,
    derive_key,
    draw_below,
    permutation,
    permute,
    radices,
    sorted_permutations,
)


def key(number: int) -> bytes:
    return derive_key("test", number, "name", 0, 0)


def image(n: int, number: int) -> np.ndarray:
    return permute([permutation(n, key(number))], [n], np.arange(n))


@given(st.one_of(st.integers(1, 300), st.integers(MAX_SORTED - 40, MAX_SORTED + 400)), st.integers(0, 99))
@example(MAX_SORTED, 0)
@example(MAX_SORTED + 1, 0)
@example(100_003, 1)
@example(65_536, 2)
def test_every_size_gives_a_bijection(n: int, number: int) -> None:
    assert np.array_equal(np.sort(image(n, number)), np.arange(n))


@pytest.mark.parametrize("n", [5_000, 10**10, 2**32 + 1, 2**52 - 1, 2**62])
def test_large_sizes_stay_in_range_and_apart(n: int) -> None:
    index = np.concatenate([np.arange(1500), np.arange(n - 1500, n), np.arange(n // 2, n // 2 + 1500)])
    images = permute([permutation(n, key(3))], [len(index)], index)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(np.unique(index))
    some = np.array([7, 1400, 3])
    assert np.array_equal(permute([permutation(n, key(3))], [3], index[some]), images[some])


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 77, 4096, 4097, 5000, 10**6, 10**12]), st.integers(0, 5), st.integers(0, 30)),
        min_size=1,
        max_size=8,
    )
)
def test_many_at_once_equal_one_at_a_time(parts: list[tuple[int, int, int]]) -> None:
    permutations = [permutation(n, key(number)) for n, number, _ in parts]
    counts = [count for _, _, count in parts]
    indices = [np.arange(count) * 7 % n for n, _, count in parts]
    together = permute(permutations, counts, np.concatenate(indices))
    apart = [permute([p], [len(i)], i) for p, i in zip(permutations, indices, strict=True)]
    assert np.array_equal(together, np.concatenate(apart))


def test_a_table_of_several_epochs_holds_each_of_them() -> None:
    keys = [key(number) for number in range(5)]
    table = permute([sorted_permutations(40, keys)], [200], np.arange(200))
    assert np.array_equal(table.reshape(5, 40), [image(40, number) for number in range(5)])


@pytest.mark.parametrize("n", [1000, 5000])
def test_images_look_uniform(n: int) -> None:
    """Chi-square over 50 bins: of one index under many keys, and of the steps between neighbours under one key."""
    keys = 2000
    of_one = permute([permutation(n, key(number)) for number in range(keys)], [1] * keys, np.full(keys, 17))
    steps = np.diff(image(n, 5)) % n
    for sample in (of_one, steps):
        seen = np.bincount(sample * 50 // n, minlength=50)
        expected = len(sample) / 50
        assert ((seen - expected) ** 2 / expected).sum() < 100  # 49 degrees of freedom: 1 in 10^5 beyond 100


def test_different_keys_give_different_orders() -> None:
    fields = [("a", 0, "n", 0, 0), ("b", 0, "n", 0, 0), ("a", 1, "n", 0, 0), ("a", 0, "m", 0, 0), ("a", 0, "n", 1, 0)]
    keys = [derive_key(use, seed, name, p, e) for use, seed, name, p, e in fields]
    keys += [derive_key("a", 0, "n", 0, 1), derive_key("a", 0, "n", 0, 1, 0), derive_key("a", 0, "\n0\nn", 0)]
    assert len(set(keys)) == len(keys)
    for n in (1000, 5000):
        orders = {permute([permutation(n, k)], [n], np.arange(n)).tobytes() for k in keys}
        assert len(orders) == len(keys)


def test_a_name_may_hold_any_character() -> None:
    assert derive_key("a", 0, "web\udcff\n漢", 0, 0) != derive_key("a", 0, "web\n漢", 0, 0)


@given(st.integers(MAX_SORTED + 1, 2**62))
def test_radices_cover_n_and_waste_little(n: int) -> None:
    a, b = radices(n)
    assert n <= a * b < 2**63
    assert a * b - n < a
    assert 0.85 < a / b < 1.3
    assert max(a, b) < 2**32


def test_draws_cover_their_range() -> None:
    assert {draw_below(7, key(number)) for number in range(200)} == set(range(7))


def test_the_numbers_never_change() -> None:
    """They are part of every stream and every state: a change here breaks all resumes."""
    digest = hashlib.sha256()
    for n in (1, 2, 40, 4096, 4097, 10**6, 10**10, 2**62):
        digest.update(permute([permutation(n, key(1))], [64], np.arange(64) % n).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "6abedb146160ce75"

"""Keyed permutations of [0, n) in constant memory, many at once.

Up to 4,096 values: the order of a keyed hash (SplitMix64; Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014). Above: a generalised Feistel network on mixed-radix digits with cycle walking (Black, Rogaway,
"Ciphers with arbitrary finite domains", 2002), 8 rounds. Neither is meant to keep a secret. All arithmetic is on
64-bit integers, so the values are the same on every platform. They are part of every stream: changing a constant
here changes all of them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_SORTED: Final = 4096
ROUNDS: Final = 8

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_27, _30, _31, _32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


class Permutation:
    """One permutation of [0, n): either `table` (uint16 of shape (n,)), or `column`, the parameters of a network.

    `column` is uint64 of shape (3 + ROUNDS,): n, the two radices, the round keys.
    """

    __slots__ = ("column", "table")

    def __init__(self, table: NDArray[np.uint16] | None = None, column: U64 | None = None) -> None:
        self.table = table
        self.column = column


def derive_key(use: str, seed: int, name: str, pass_index: int, *numbers: int) -> bytes:
    """64 bytes by BLAKE2b from the purpose, the seed, a dataset's name, the pass, and (say) the epoch."""
    fields = "\n".join(map(str, ("zephon permutation 1", use, seed, pass_index, *numbers)))
    # The name comes last, so no name can be mistaken for other fields.
    return hashlib.blake2b(f"{fields}\n\n{name}".encode("utf-8", "surrogatepass")).digest()


def draw_below(n: int, key: bytes) -> int:
    """A number in [0, n) from a key; n far below 2^128, so the bias of the remainder does not show."""
    return int.from_bytes(key[:16], "little") % n


def permutation(n: int, key: bytes) -> Permutation:
    """The permutation of [0, n) that belongs to `key`; n from 1 to 2^62."""
    if n <= MAX_SORTED:
        return sorted_permutations(n, [key])
    a, b = radices(n)
    head = np.array([n, a, b], np.uint64)
    return Permutation(column=np.concatenate([head, np.frombuffer(key, "<u8", ROUNDS).astype(np.uint64)]))


def sorted_permutations(n: int, keys: Sequence[bytes]) -> Permutation:
    """One table of shape (len(keys) * n,): the permutations of [0, n) under each key, one after the other."""
    first = np.frombuffer(b"".join(key[:8] for key in keys), "<u8").astype(np.uint64)
    hashes = first[:, None] + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN
    hashes = (hashes ^ (hashes >> _30)) * _MIX_1
    hashes = (hashes ^ (hashes >> _27)) * _MIX_2
    hashes ^= hashes >> _31
    return Permutation(table=np.argsort(hashes, axis=1, kind="stable").astype(np.uint16).ravel())


@functools.lru_cache(maxsize=1024)
def radices(n: int) -> tuple[int, int]:
    """(a, b), both near sqrt(n), with a * b >= n and as little above n as a short search finds.

    The share of values that must walk the cycle is (a * b - n) / n: with a = ceil(sqrt(n)) one in sqrt(n), and
    about a hundredth of that after the search. A walk costs as much as the whole chunk, so this is worth 5 us.
    """
    root = math.isqrt(n - 1) + 1
    a = min(range(root, root + max(1, min(128, root // 8))), key=lambda radix: (-n % radix, radix))
    return a, -(-n // a)


def permute(permutations: Sequence[Permutation], counts: Sequence[int], index: I64) -> I64:
    """The images of `index` (int64 of shape (sum(counts),)): the first counts[0] under permutations[0], and so on."""
    if len(permutations) == 1:
        return _permute_one(permutations[0], index)
    sizes = np.array(counts, np.intp)
    columns = [(i, p.column) for i, p in enumerate(permutations) if p.column is not None]
    if len(columns) == len(permutations):
        return _walk(index, _spread([column for _, column in columns], sizes))
    out = np.empty(len(index), np.int64)
    start = 0
    for permutation_, count in zip(permutations, counts, strict=True):
        if permutation_.table is not None:
            out[start : start + count] = permutation_.table[index[start : start + count]]
        start += count
    if columns:
        chosen = np.zeros(len(permutations), bool)
        chosen[[i for i, _ in columns]] = True
        where = np.repeat(chosen, sizes)
        out[where] = _walk(index[where], _spread([column for _, column in columns], sizes[chosen]))
    return out


def _permute_one(one: Permutation, index: I64) -> I64:
    if one.table is not None:
        return one.table[index].astype(np.int64)
    assert one.column is not None
    return _walk(index, one.column[:, None])


def _spread(columns: Sequence[U64], sizes: NDArray[np.intp]) -> U64:
    """Parameters for every index: shape (3 + ROUNDS, sum(sizes)), or (3 + ROUNDS, 1) where all share one column."""
    if len(columns) == 1:
        return columns[0][:, None]
    return np.repeat(np.stack(columns, axis=1), sizes, axis=1)


def _walk(index: I64, parameters: U64) -> I64:
    """The network, applied again to each value until it falls below n: a bijection of [0, n)."""
    value = _network(index.view(np.uint64), parameters)
    outside = np.flatnonzero(value >= parameters[0])
    while outside.size:
        some = parameters if parameters.shape[1] == 1 else parameters[:, outside]
        again = _network(value[outside], some)
        value[outside] = again
        outside = outside[again >= some[0]]
    return value.view(np.int64)


def _network(value: U64, parameters: U64) -> U64:
    """ROUNDS rounds on the digits (left, right) = divmod(value, b): one digit plus a keyed hash of the other.

    Digits stay below 2^32, so `(32 bits of hash * radix) >> 32` is a number below the radix without a division.
    Unsigned arrays wrap silently; `minimum(x, x - radix)` is x modulo the radix for x below twice the radix.
    """
    a, b = parameters[1], parameters[2]
    left = value // b
    right = value - left * b
    changed, other, radix = left, right, a
    for key in parameters[3:]:
        mixed = other ^ key
        mixed *= _MIX_1
        mixed ^= mixed >> _32
        mixed *= _MIX_2
        mixed >>= _32
        mixed *= radix
        mixed >>= _32
        changed += mixed
        np.minimum(changed, changed - radix, out=changed)
        changed, other = other, changed
        radix = b if radix is a else a
    value = left * b + right
    return value

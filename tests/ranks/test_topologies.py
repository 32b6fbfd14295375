"""One run that moves from topology to topology on real ranks under torchrun: laws L2, L3 and L4."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.process.helpers import slow

from .jobs import line, taken
from .launch import torchrun


def chain_of(seed: int, world: int, lanes: int) -> list[list[int]]:
    """Topologies [ranks, peers of a group, steps, workers of a DataLoader], random ones."""
    chosen, feeding = random.Random(seed), random.Random(-seed)
    chain = []
    for _ in range(8):
        size = chosen.randint(1, world)
        peers = chosen.choice([n for n in (1, 2, 4) if size % n == 0 and size // n <= lanes])
        chain.append([size, peers, chosen.randint(1, 3), feeding.randint(0, 3)])
    return chain


@pytest.mark.law("L2")
@pytest.mark.law("L3")
@pytest.mark.law("L4")
@pytest.mark.parametrize(("seed", "world", "lanes"), [(1, 4, 7), slow(2, 8, 8), slow(3, 8, 5), slow(4, 3, 12)])
def test_one_run_over_random_topologies(seed: int, world: int, lanes: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chain = chain_of(seed, world, lanes)
    ranks = torchrun("hops", world, tmp_path, lanes, chain)
    with line(lanes) as alone:
        wanted = taken(alone, sum(steps for _, _, steps, _ in chain))
    begun = 0
    for number, (size, peers, steps, _) in enumerate(chain):
        hop: list[Any] = [rank[number] for rank in ranks]
        assert all(own is None for own in hop[size:])
        groups = [hop[first : first + peers] for first in range(0, size, peers)]
        assert all(peer == group[0] for group in groups for peer in group)
        assert sorted(lane for group in groups for lane in group[0]["lanes"]) == list(range(lanes))
        delivered = sorted(batch for group in groups for batch in group[0]["batches"])
        assert delivered == sorted(batch for batch in wanted if begun <= batch[1] < begun + steps)
        begun += steps

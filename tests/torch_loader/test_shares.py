"""The arithmetic of shares: the DataLoader's turns, worker by worker, must be the tail's turns, lane by lane."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.flow.progress import LaneState
from zephon.flow.tail import Tail
from zephon.options import Options
from zephon.plan.lanes import Topology
from zephon.torch_loader.shares import active_workers, first_share, share_of_limit, worker_options

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("lanes", "workers", "active"),
    [(6, 0, 1), (6, 1, 1), (6, 3, 3), (6, 4, 3), (6, 5, 3), (6, 9, 6), (7, 6, 1), (7, 7, 7), (1, 5, 1), (24, 10, 8)],
)
def test_active_workers(lanes: int, workers: int, active: int) -> None:
    assert active_workers(lanes, workers) == active


def turns_of(lanes: dict[int, int], count: int) -> list[int]:
    """The lanes of a tail's next turns, with the turns that each has had."""
    tail: Tail[None] = Tail(lanes)
    taken = []
    for _ in range(count):
        assert tail.turn is not None
        tail.put(tail.turn[1], None)
        taken.append(tail.pop()[0])
    return taken


@given(data=st.data(), groups=st.integers(1, 3), strategy=st.sampled_from(["contiguous", "interleaved"]))
def test_the_workers_turns_are_the_lanes_turns(data: st.DataObject, groups: int, strategy: str) -> None:
    """From any place in a cycle, on any number of workers."""
    num_lanes = data.draw(st.integers(groups, 24))
    topology = Topology(num_lanes, groups, data.draw(st.integers(0, groups - 1)), strategy, groups, 0)
    lanes, workers = topology.lanes, data.draw(st.integers(1, 12))
    had = data.draw(st.integers(0, 3 * len(lanes)))
    turns = {lane: had // len(lanes) + (j < had % len(lanes)) for j, lane in enumerate(lanes)}
    active = active_workers(len(lanes), workers)
    first = first_share(lanes, {lane: LaneState(turns=n) for lane, n in turns.items()}, 0, active)
    shares = [
        Topology(num_lanes, groups, topology.group, strategy, groups, 0, (worker + first) % active, active).lanes
        for worker in range(active)
    ]
    assert sorted(lane for share in shares for lane in share) == lanes
    count = 3 * len(lanes) // active
    each = [turns_of({lane: turns[lane] for lane in share}, count) for share in shares]
    rotated = [each[worker][number] for number in range(count) for worker in range(active)]
    assert rotated == turns_of(turns, count * active)


def test_a_lane_that_has_ended_has_no_turn() -> None:
    places = {lane: LaneState(pass_index=lane < 2, turns=0 if lane < 2 else 9 - lane) for lane in range(4)}
    assert first_share([0, 1, 2, 3], places, 0, 4) == 3
    assert first_share([0, 1], {0: LaneState(), 1: LaneState()}, 1, 2) == 0


@pytest.mark.parametrize("active", [1, 2, 3])
def test_what_take_allows_is_shared_in_turns(active: int) -> None:
    for limit in range(9):
        parts = [share_of_limit(limit, worker, active) for worker in range(active)]
        assert parts == [len(range(worker, limit, active)) for worker in range(active)]
    assert share_of_limit(None, 0, active) is None


def test_a_worker_runs_on_threads_with_its_part_of_the_cpus() -> None:
    execution = worker_options(Options(), 3, 8).execution
    assert (execution.runner, execution.parallelism) == ("threads", 2)
    execution = worker_options(Options().replace({"runner": "process", "parallelism": 5}), 3, 2).execution
    assert (execution.runner, execution.parallelism) == ("threads", 5)
    execution = worker_options(Options().replace({"runner": "inline"}), 3, 2).execution
    assert (execution.runner, execution.parallelism) == ("inline", 1)

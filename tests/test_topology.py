"""Who owns which lane: from explicit settings, from the environment, from torch; contradictions; warnings."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon as zp

from .cases.helpers import ids, pipeline


@pytest.fixture(autouse=True)
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody launched."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def line_of(num: int = 64, lanes: int | None = None, **options: Any) -> zp.Pipeline:
    line = pipeline(num, chunk_size=2).batch(2).options(canonical_replicas=lanes)
    return line.options(runner="inline", **options)


def lanes_of(lanes: int, groups: int, strategy: str) -> list[list[int]]:
    options: dict[str, Any] = {"dp_degree": groups, "mapping_strategy": strategy}
    return [line_of(lanes=lanes, dp_group_id=group, **options).lanes for group in range(groups)]


def test_the_two_strategies() -> None:
    assert lanes_of(8, 3, "contiguous") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert lanes_of(8, 3, "interleaved") == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert lanes_of(4, 4, "contiguous") == lanes_of(4, 4, "interleaved") == [[0], [1], [2], [3]]


@given(lanes=st.integers(1, 16), groups=st.integers(1, 17), strategy=st.sampled_from(["contiguous", "interleaved"]))
def test_every_lane_has_one_owner_and_shares_differ_by_one(lanes: int, groups: int, strategy: str) -> None:
    if groups > lanes:
        with pytest.raises(zp.errors.ConfigError, match=rf"dp_degree={groups}.*canonical_replicas={lanes}"):
            line_of(lanes=lanes, dp_degree=groups, dp_group_id=0).lanes
        return
    owned = lanes_of(lanes, groups, strategy)
    assert sorted(lane for group in owned for lane in group) == list(range(lanes))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert all(group == sorted(group) for group in owned)


@pytest.mark.parametrize("strategy", ["contiguous", "interleaved"])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_the_groups_together_are_the_run(groups: int, strategy: str) -> None:
    """Lane by lane the same samples, whoever owns it; steps agree."""
    whole = {(b.lane_id, b.step): b["id"].tolist() for b in line_of(lanes=5)}
    found: dict[tuple[int, int], list[int]] = {}
    for group in range(groups):
        line = line_of(lanes=5, dp_degree=groups, dp_group_id=group, mapping_strategy=strategy)
        for batch in line:
            assert batch.lane_id in line.lanes
            found[batch.lane_id, batch.step] = batch["id"].tolist()
    assert found == whole


def test_peers_of_a_group_see_the_same() -> None:
    ranks = [line_of(lanes=4, world_size=4, global_rank=r, dp_degree=2, dp_group_id=r // 2) for r in range(4)]
    found = [[(batch.lane_id, batch.digest()) for batch in rank] for rank in ranks]
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def test_defaults() -> None:
    assert line_of().lanes == [0]
    assert line_of(dp_degree=3, dp_group_id=1).lanes == [1]  # as many lanes as groups
    assert line_of(world_size=4, global_rank=2).lanes == [2]  # as many groups as ranks
    assert line_of(lanes=8, world_size=4, global_rank=3).lanes == [6, 7]
    assert line_of(lanes=4).lanes == [0, 1, 2, 3]


def test_degree_and_group_alone_set_the_others() -> None:
    topology = line_of(dp_degree=3, dp_group_id=1)._session.resolved.topology
    assert (topology.num_groups, topology.group) == (3, 1)
    assert (topology.world_size, topology.rank) == (3, 1)


def test_batches_per_step() -> None:
    per_group = [line_of(lanes=8, dp_degree=3, dp_group_id=group).batches_per_step for group in range(3)]
    assert per_group == [3, 3, 2]
    line = line_of(lanes=8, dp_degree=3, dp_group_id=2, cycles_per_step=4)
    assert line.batches_per_step == 8
    assert [len(step) for step in line.steps()] == [8]


def test_cycles_per_step_number_the_steps() -> None:
    steps = list(line_of(num=48, lanes=2, cycles_per_step=3).steps())
    assert [[(b.lane_id, b.step) for b in step] for step in steps] == [
        [(lane, number) for _ in range(3) for lane in (0, 1)] for number in range(4)
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_rank": 1}, "global_rank=1"),
        ({"world_size": 2, "global_rank": 2}, "global_rank=2"),
        ({"dp_degree": 2, "dp_group_id": 2}, "dp_group_id=2"),
        ({"dp_group_id": 1}, "dp_degree"),
        ({"world_size": 4, "global_rank": 0, "dp_degree": 2}, "dp_group_id"),
        ({"world_size": 2, "global_rank": 0, "dp_degree": 4, "dp_group_id": 0}, "dp_degree=4"),
        ({"dp_degree": 9, "dp_group_id": 0, "canonical_replicas": 8}, "dp_degree=9"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=words):
        line_of().options(**options).lanes


@pytest.mark.parametrize(("rank", "lanes"), [(0, [0, 1]), (3, [6, 7])])
def test_a_launchers_environment(
    rank: int, lanes: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with caplog.at_level(logging.INFO, "zephon"):
        line = line_of(lanes=8)
        assert line.lanes == lanes
        list(line)
    assert [record.message for record in caplog.records if "rank" in record.message] == [
        f"rank {rank} of 4, from the environment (RANK, WORLD_SIZE)"
    ]


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        ("0", None, "WORLD_SIZE"),
        (None, "2", "RANK"),
        ("two", "4", "whole numbers"),
        ("0", "", "WORLD_SIZE"),
        ("-1", "2", "RANK|rank"),
        ("0", "0", "WORLD_SIZE|world_size"),
        ("2", "2", "rank"),
    ],
)
def test_an_environment_that_makes_no_sense(
    rank: str | None, size: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(zp.errors.ConfigError, match=words):
        line_of().lanes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 2}, "world_size=2.*4"),
        ({"global_rank": 0}, "global_rank=0.*1"),
        ({"dp_degree": 8, "dp_group_id": 1}, "dp_degree=8"),
    ],
)
def test_explicit_settings_must_not_contradict_the_environment(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(zp.errors.ConfigError, match=words):
        line_of(lanes=8, **options).lanes
    assert line_of(lanes=8, world_size=4, global_rank=1, dp_degree=2, dp_group_id=0).lanes == [0, 1, 2, 3]


def test_torch_distributed_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ready = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 4, get_rank=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", ready)
    with caplog.at_level(logging.INFO, "zephon"):
        assert line_of(lanes=8).lanes == [4, 5]
    assert "rank 2 of 4, from torch.distributed" in caplog.messages
    ready.is_initialized = lambda: False
    assert line_of(lanes=8).lanes == [0, 1, 2, 3]
    ready.is_available = lambda: False
    ready.is_initialized = lambda: 1 / 0
    assert line_of(lanes=8).lanes == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", ["contiguous", "interleaved"])
def test_uneven_lanes_warn_who_does_more(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zephon"):
        line = line_of(lanes=8, dp_degree=3, dp_group_id=2, mapping_strategy=strategy)
        assert len(ids(line)) == 16
    [message] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "8 lanes" in message
    assert "3 groups" in message
    assert "groups 0 to 1" in message


def test_even_lanes_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zephon"):
        list(line_of(lanes=8, dp_degree=4, dp_group_id=1))
        list(line_of())
    assert caplog.messages == []


def test_lanes_without_data_are_no_error() -> None:
    line = line_of(num=3, lanes=8)
    assert sorted(ids(line)) == [0, 1, 2]
    for group in range(8):
        line = line_of(num=3, lanes=8, dp_degree=8, dp_group_id=group)
        assert [len(step) for step in line.steps()] == ([1] if group < 3 else [])
        assert ids(line) == ([group] if group < 3 else [])


def test_the_state_says_the_number_of_lanes() -> None:
    line = line_of(lanes=4).take(2)
    list(line)
    state = line.state_dict()
    new = line_of(dp_degree=2, dp_group_id=1)
    new.load_state_dict(state)
    assert new.lanes == [2, 3]
    with pytest.raises(zp.errors.ConfigError, match="dp_degree=5"):
        line_of(dp_degree=5, dp_group_id=0).load_state_dict(state)

"""checkpoint() on real ranks: one state of all of them, errors on all of them, and rounds that crashed do no harm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.object_store import BUCKET, object_store
from tests.process.helpers import slow

from .jobs import line, taken
from .launch import launch


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """What one process delivers in six steps."""
    with line(6) as pipeline:
        return taken(pipeline, 6)


def of_steps(batches: list[list[Any]], start: int, stop: int) -> list[list[Any]]:
    return sorted(batch for batch in batches if start <= batch[1] < stop)


def test_a_mesh_of_peers(tmp_path: Path, alone: list[list[Any]]) -> None:
    pytest.importorskip("torch")
    ranks = launch("meshed", 4, tmp_path, 2)
    assert [rank["lanes"] for rank in ranks] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    for peers in (ranks[:2], ranks[2:]):
        assert peers[0]["batches"] == peers[1]["batches"]
        assert peers[0]["more"] == peers[1]["more"]
    assert sorted(ranks[0]["batches"] + ranks[2]["batches"]) == of_steps(alone, 0, 3)
    assert sorted(ranks[0]["more"] + ranks[2]["more"]) == of_steps(alone, 3, 5)
    assert all(rank["state"] == ranks[0]["state"] for rank in ranks)
    assert all(rank["later"] == ranks[0]["later"] for rank in ranks)
    for rank in ranks:
        assert "has two places" in rank["apart"]
        assert "has two places" in rank["idle"]
        assert rank["broken"].startswith("CheckpointError: rank 0 has no state for checkpoint(): ZeroDivisionError")
    with line(6) as pipeline:
        pipeline.load_state_dict(ranks[3]["later"])
        assert taken(pipeline, 1) == of_steps(alone, 5, 6)


@pytest.mark.slow
def test_eight_processes_as_two_by_two_by_two(tmp_path: Path, alone: list[list[Any]]) -> None:
    pytest.importorskip("torch")
    ranks = launch("dimensions", 8, tmp_path)
    for group in (ranks[:4], ranks[4:]):
        assert all(peer == group[0] for peer in group)
    assert sorted(ranks[0]["batches"] + ranks[4]["batches"]) == of_steps(alone, 0, 3)
    assert ranks[0]["state"] == ranks[4]["state"]


def test_a_rank_that_stays_away(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = launch("late", 3, tmp_path)
    for rank in ranks[:2]:
        assert "checkpoint() of 3 ranks did not hear of ranks [2] (lanes [3]) within 3 s" in rank["error"]
        assert rank["seconds"] < 20
    assert all(rank["next"] == rank["first"] for rank in ranks)


def test_a_rank_that_dies_in_a_round(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = launch("dies", 3, tmp_path, may_die=True)
    assert ranks[2] is None
    for rank in ranks[:2]:
        assert rank["error"].startswith("CheckpointError")
        assert rank["seconds"] < 20


def test_through_a_folder_and_after_a_crash_there(tmp_path: Path) -> None:
    """The second attempt has the crashed one's files before it, of other steps; the third one has another size."""
    with line(6) as pipeline:
        stream = pipeline.steps()
        wanted = []
        for _ in range(3):
            next(stream)
            wanted.append(pipeline.state_dict())
    first = launch("by_folder", 3, tmp_path, 3, "job", 1, may_die=True)
    assert first[1] is None
    for rank in (first[0], first[2]):
        assert rank["states"] == wanted[:1]
        assert "did not hear of ranks [1] (lanes [2, 3]) within 2 s" in rank["error"]
    for world in (3, 2):
        for rank in launch("by_folder", world, tmp_path, 3, "job", None):
            assert rank["states"] == wanted
    assert len(list((tmp_path / "job").iterdir())) < 12  # a message a rank, and the last results


def test_through_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[list[Any]]) -> None:
    """The ranks share nothing but an object store; a round before this one has left its objects there."""
    with object_store(monkeypatch):
        before, after = (launch("by_folder", 2, f"s3://{BUCKET}/meet", 2, "job", None) for _ in range(2))
    assert before == after
    assert before[0] == before[1]
    with line(6) as pipeline:
        pipeline.load_state_dict(before[0]["states"][-1])
        assert taken(pipeline, 1) == of_steps(alone, 2, 3)


@pytest.mark.parametrize("worlds", [[3, 2], slow([2, 3, 1, 4])], ids=str)
def test_torchs_distributed_checkpoint_on_another_number_of_ranks(
    worlds: list[int], tmp_path: Path, alone: list[list[Any]]
) -> None:
    pytest.importorskip("torch")
    went_on = launch("saves", worlds[0], tmp_path, 2)  # in the background, meanwhile
    assert sorted(batch for rank in went_on for batch in rank) == of_steps(alone, 2, 4)
    for world in worlds[1:]:
        (tmp_path / str(world)).mkdir()
        ranks = launch("loads", world, tmp_path / str(world), 6)
        assert [rank["error"] for rank in ranks] == [None] * world
        assert sorted(batch for rank in ranks for batch in rank["batches"]) == of_steps(alone, 2, 4)


def test_what_cannot_be() -> None:
    pipeline = line(2, world_size=2, global_rank=0)
    with pytest.raises(zp.errors.ConfigError, match="needs a way between them"):
        pipeline.checkpoint()
    with pytest.raises(zp.errors.ConfigError, match=r"without torch\.distributed"):
        line(2).checkpoint(group=object())
    with pytest.raises(zp.errors.ConfigError, match="a torch DeviceMesh"):
        line(2, mesh="dp")
    whole = SimpleNamespace(mesh=np.zeros((2, 2)), get_coordinate=lambda: [0, 1], mesh_dim_names=("dp", "tp"))
    with pytest.raises(zp.errors.ConfigError, match=r"has the dimensions \['tp'\]"):
        line(2, mesh=whole)
    alone = line(2, dp_degree=1)
    assert alone.checkpoint() == alone.state_dict()

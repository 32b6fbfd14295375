"""Case A11 on real ranks: all end with the same step, whatever the data; a rank that is lost is an error, no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from zephon.testing.oracle import OraclePass

from . import ends
from .launch import launch


def wanted(pipeline: zp.Pipeline, number: int = ends.EPOCHS) -> tuple[list[int], list[list[Any]]]:
    """The steps of each epoch, and every batch as `told` tells it, sorted."""
    passes = [OraclePass(pipeline, epoch) for epoch in range(number)]
    cycles = pipeline._definition.options.data.cycles_per_step
    rows = [
        [epoch, lane, turn // cycles, len(batch.origins), batch.digest]
        for epoch, found in enumerate(passes)
        for lane, batches in enumerate(found.lanes)
        for turn, batch in enumerate(batches)
    ]
    return [found.steps for found in passes], sorted(rows)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What three ranks gave in all of case A11, and behind every state of the second epoch."""
    pytest.importorskip("torch")
    return list(launch("case_a11", 3, tmp_path_factory.mktemp("a11")))


def test_case_a11(found: list[Any]) -> None:
    ranks = [rank["steps"] for rank in found]
    for key in ranks[0]:
        kind, last_step, *rest = key.split()
        alone = ends.mixed(last_step) if kind == "mixed" else ends.ending(int(kind), last_step, rest[0] == "True")
        steps, batches = wanted(alone.options(dp_degree=1))
        assert [len(rank[key]) for rank in ranks] == [sum(steps)] * 3, key
        assert sorted(row for rank in ranks for row in rank[key]) == batches, key
        pads = [row for row in batches if row[3] == 0]
        assert not pads or last_step == "pad"
    for kind in ("pad True", "pad False"):
        assert any(row[3] == 0 for key in ranks[0] if kind in key for rank in ranks for row in rank[key])


@pytest.mark.parametrize("last_step", ["drop", "pad"])
def test_states_of_the_second_epoch(found: list[Any], last_step: str) -> None:
    """On the same ranks, and on one."""
    ranks = [rank["states"][last_step] for rank in found]
    _, batches = wanted(ends.ending(13, last_step, False, lanes=6, dp_degree=1), 2)
    second = [row for row in batches if row[0] == 1]
    assert sorted(row for rank in ranks for row in rank["whole"]) == second
    for number in range(len(ranks[0]["whole"])):
        before = [row for rank in ranks for row in rank["whole"][: number + 1]]
        assert sorted(before + [row for rank in ranks for row in rank["rest"][number]]) == second
        alone = ends.ending(13, last_step, False, lanes=6, dp_degree=1)
        alone.load_state_dict(ranks[0]["states"][number])
        assert sorted(before + ends.epochs(alone, 1)) == second
    for rank in ranks:
        assert rank["own"] == rank["whole"][1:]


def test_peers_of_a_mesh_agree_among_their_like(tmp_path: Path) -> None:
    """Then of all four ranks one is not there: an error on the others, and the next attempt is none the worse."""
    pytest.importorskip("torch")
    ranks = launch("mesh_peers", 4, tmp_path)
    batches = [rank["batches"] for rank in ranks]
    assert batches[0] == batches[1]
    assert batches[2] == batches[3]
    assert sorted(batches[0] + batches[2]) == wanted(ends.ending(13, "pad", False, lanes=4, dp_degree=1))[1]
    for rank in ranks[:3]:
        assert "last_step= of 4 ranks did not hear of ranks [3] within 1 s; ranks agree" in rank["missing"]
        assert rank["gone"].startswith("WorkerError: only 3 of 4 ranks ([0, 1, 2, 3]) came to step 3 within")
        assert rank["seconds"] < 10


def test_without_a_way_between_ranks(tmp_path: Path) -> None:
    """Fewer samples than ranks too: the same on every rank, before the first batch."""
    for rank in range(3):
        found = ends.nothing_to_meet_at(rank, 3, str(tmp_path))
        assert found[0] == "3 4"
        assert "initialise it before you iterate" in found[1]
        assert "lane 1 has 2 in a pass" in found[2]
    with pytest.raises(zp.errors.ConfigError, match="there is nothing to read"):
        ends.ending(0, "pad", True)


def test_forked_workers_do_not_agree_on_the_trainers_connections(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for rank in launch("forked", 2, tmp_path):
        assert "there is no torch.distributed here" in rank["error"]
        assert "steps_per_pass" in rank["error"]
        assert rank["here"] == rank["plain"] != []

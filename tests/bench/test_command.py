"""`zephon bench` from outside: JSON, table, picture, exit status. Short, and without a word on speed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zephon.bench import corpus, proc, resume
from zephon.bench.rounds import measure
from zephon.bench.spec import Spec
from zephon.cli import main

pytestmark = pytest.mark.skipif(not proc.has_proc(), reason="zephon bench needs Linux")

KEYS = [
    "workload",
    "system",
    "runner",
    "parallelism",
    "lanes",
    "rate",
    "unit",
    "share_of_bare",
    "share_min",
    "share_max",
    "first_batch_s",
    "engine_us_per_record",
    "trainer_us_per_batch",
    "peak_pss_mb",
    "details",
]
SHORT = ["--rounds", "1", "--seconds", "0.05"]


def json_rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_on_standard_output_and_the_table_beside_it(capfd: pytest.CaptureFixture[str]) -> None:
    wanted = ["bench", "w1", "--runner", "process,inline", "--lanes", "2", "--json", "-", *SHORT]
    assert main(wanted) == 0
    out, err = capfd.readouterr()
    rows = json_rows(out)
    assert [list(row) for row in rows] == [KEYS] * 4
    assert [row["system"] for row in rows] == ["bare-pipe", "bare-2proc", "zephon", "zephon"]
    for row in rows:
        assert row["workload"] == "w1"
        assert row["unit"] == "records/s"
        assert row["rate"] > 0
        assert math.isfinite(row["share_of_bare"])
        assert row["share_min"] <= row["share_of_bare"] <= row["share_max"]
        assert row["peak_pss_mb"] > 10
    process, inline = rows[2:]
    assert (process["runner"], process["parallelism"], process["lanes"]) == ("process", 2, 2)
    assert (inline["runner"], inline["parallelism"], inline["lanes"]) == ("inline", 1, 2)
    assert process["engine_us_per_record"] is not None
    assert set(process["details"]["cpu_us_per_record"]) == {"trainer", "launcher", "engine", "worker"}
    assert process["first_batch_s"] > 0
    assert "bare-pipe" in err
    assert "records/s" in err


def test_a_pipeline_of_ones_own_with_json_and_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import zephon as zp\n"
        "print('this is not JSON')\n"
        "def pipeline():\n"
        "    rows = zp.Dataset.from_list('rows', [{'id': i} for i in range(100)])\n"
        "    source = zp.StaticMixture([rows], seed=1)\n"
        "    return zp.Pipeline(source).map(lambda r: r).batch(8).options(canonical_replicas=3)\n"
    )
    target, file, picture = f"{tmp_path}/mine.py:pipeline", tmp_path / "rows.json", tmp_path / "rows.png"
    assert main(["bench", target, "--runner", "inline", "--json", str(file), "--plot", str(picture), *SHORT]) == 0
    (row,) = json_rows(file.read_text())
    assert (row["workload"], row["system"], row["unit"], row["lanes"]) == (target, "zephon", "samples/s", 3)
    assert row["share_of_bare"] is None
    assert row["rate"] > 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "samples/s" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["w11"], "did you mean 'w1'"),
        (["w3", "--lanes", "2"], "--lanes does not apply"),
        (["engine:shuffle+wrp+batch"], "wrp"),
        (["engine:batch+shuffle"], "last step"),
        (["engine:shuffle"], "the last operator must be batch"),
        (["w1", "--runner", "thread"], "runner"),
        (["w1", "--parallelism", "two"], "whole numbers"),
        (["w1", "--peers", "nobody"], "the peers are torch"),
        (["consumer:2KB"], "its variants are consumer:1KB"),
        (["consumer", "--peers", "torch"], "--peers does not apply"),
        (["w5:torhc"], "its variants are w5:torch"),
        (["nowhere.py:pipeline"], "no file nowhere.py"),
        (["w1", "--json", "no/such/folder/rows.json"], "--json"),
    ],
)
def test_wrong_use_ends_with_2(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, *SHORT]) == 2
    assert says in capfd.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small corpus."""
    pytest.importorskip("tokenizers")
    patch = pytest.MonkeyPatch()
    patch.setattr(corpus, "NUM_DOCUMENTS", 256)
    patch.setattr(corpus, "VOCABULARY", 300)
    place = str(tmp_path_factory.mktemp("bench") / "corpus")
    made = corpus.make(place)
    patch.undo()
    assert len(made.shards) == corpus.NUM_SHARDS
    assert made.tokens_per_document > 1
    return place


@pytest.mark.parametrize("system", ["zephon", "bare-2proc"])
@pytest.mark.parametrize("workload", ["w2:slow1pct", "w3"])
def test_work_is_measured(workload: str, system: str, folder: str) -> None:
    runner = "inline" if system == "zephon" else None
    fields = {"seconds": 0.05, "warm_s": 0.02, "loops_per_us": 2.0, "folder": folder}
    sample = measure(Spec(workload=workload, system=system, runner=runner, **fields))
    assert sample.rate > 0
    assert max(sample.cpu_us.values()) > 0


def test_large_arrays_are_measured() -> None:
    sample = measure(Spec(workload="w4", runner="threads", seconds=0.05, warm_s=0.02))
    assert 0 < sample.rate < 1000  # GB/s
    assert measure(Spec(workload="w4", system="bare", seconds=0.05, warm_s=0.02)).rate > 0


@pytest.mark.parametrize("what", ["", ":torch", ":device"])
def test_the_trainers_own_cost_is_measured(what: str) -> None:
    if what:
        pytest.importorskip("torch")
    sample = measure(Spec(workload=f"consumer:1MB{what}", runner="process", seconds=0.05, warm_s=0.02))
    assert sample.rate == sample.trainer_us_per_batch
    assert 0 < sample.details["median_us"] <= sample.details["p99_us"] < 100_000


@pytest.mark.slow
def test_a_start_with_torch_is_measured() -> None:
    pytest.importorskip("torch")
    bare = measure(Spec(workload="w5:torch", system="bare"))
    assert bare.rate > measure(Spec(workload="w5", system="bare")).rate
    assert measure(Spec(workload="w5:torch", runner="process")).rate > 0


def test_a_start_is_measured_from_outside() -> None:
    bare = measure(Spec(workload="w5", system="bare"))
    inline = measure(Spec(workload="w5", runner="inline"))
    assert 0 < bare.rate < 60
    assert inline.rate == inline.first_batch_s
    assert inline.rate > 0


def test_a_restore_is_measured(folder: str) -> None:
    sample = measure(Spec(workload="w6:10k:other", runner="inline", folder=folder))
    assert sample.rate > 0
    assert 1000 < sample.details["state_bytes"] < 10_000
    assert sample.details["owned_lanes"] == 2


def test_a_restore_of_what_is_held_is_measured(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "HELD_BUFFER", 512)
    sample = resume.measure(Spec(workload="w6:100k:held", runner="inline", folder=folder))
    assert sample.rate > 0
    held, read = sample.details["records_held"], sample.details["records_read"]
    assert 4 * 500 < held < read < 2 * held
    assert sample.details["lane_bytes"] < 300 + 24 * held / 4
    assert (
        resume.measure(Spec(workload="w6:100k:held", system="bare", runner="inline", folder=folder)).details[
            "records_read"
        ]
        < 4 * 1024
    )


def test_memory_is_watched_from_outside(folder: str) -> None:
    sample = measure(Spec(workload="w7", runner="threads", seconds=0.6, warm_s=0.1, folder=folder))
    assert sample.rate == sample.pss_mb
    assert sample.rate > 10
    assert sample.details["trainer_mb"] > 10


def test_deaths_are_measured() -> None:
    fields = {"runner": "process", "seconds": 0.01, "loops_per_us": 20.0}
    busy = measure(Spec(workload="w8:busy", **fields))
    assert busy.details["same_records"]
    assert busy.details["kills"] == 1
    gone = measure(Spec(workload="w8:trainer", **fields))
    assert gone.details["processes_left"] == gone.details["names_left"] == 0


def test_scale_is_measured() -> None:
    sample = measure(Spec(workload="w9:1e10", runner="inline", lanes=64, seconds=0.05))
    assert sample.rate > 0
    assert sample.first_batch_s is not None


def test_the_serial_part_is_measured_part_by_part() -> None:
    sample = measure(Spec(workload="engine:shuffle+wrap+batch", runner="inline", lanes=2, seconds=0.05, warm_s=0.02))
    assert sample.rate > 0
    parts = {"pump", "feed", "stage", "chain", "shuffle", "pack", "batcher", "tail", "origins"}
    assert {f"{part}_us" for part in parts} <= sample.details.keys()
    named = sum(sample.details.values())
    assert named == pytest.approx(sample.cpu_us["engine"], rel=0.2)


@pytest.mark.torch
def test_torch_takes_part() -> None:
    pytest.importorskip("torch")
    assert measure(Spec(workload="w1", system="torch", seconds=0.05, warm_s=0.02)).rate > 0

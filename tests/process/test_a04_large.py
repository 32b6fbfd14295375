"""Case A4 under processes: records far larger than a ring, a task or a slot arrive whole, and nothing stalls."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process import recipes
from tests.process.functions import Blow, Enrich
from tests.process.helpers import children, ids, launcher, line, slow
from zephon.ipc.channel import LARGE_BYTES

MIB = 1 << 20
AT = 100


@pytest.mark.parametrize("ring_bytes", [4096, 4 * MIB])
def test_one_record_of_any_size_among_short_ones(ring_bytes: int) -> None:
    """Sizes around what a ring holds, in turn; the default ring and the smallest one."""
    sizes = [ring_bytes - 1, ring_bytes, ring_bytes + 1, 4 * ring_bytes]
    records = [{"id": i, "size": sizes[i // 50] if i % 50 == 7 else i % 9} for i in range(200)]
    dataset = zp.Dataset.from_list("toy", records)
    with line(0, fill, dataset=dataset, ring_bytes=ring_bytes, batch=1) as pipeline:
        found = 0
        for record, batch in zip(records, pipeline, strict=True):
            size = record["size"]
            assert batch["id"].tolist() == [record["id"]]
            assert batch["blob"] == [bytes([size % 251]) * size]
            assert batch["text"] == ["ж" * (size // 2)]
            assert batch["x"].tolist() == [[size] * (size // 8)] if size < 1000 else batch["x"].shape == (1, size // 8)
            assert batch["x"].size == 0 or batch["x"].min() == batch["x"].max() == size
            found += 1
    assert found == 200


def fill(record: dict[str, Any]) -> dict[str, Any]:
    size = record["size"]
    return {**record, "blob": bytes([size % 251]) * size, "text": "ж" * (size // 2), "x": np.full(size // 8, size)}


def test_fields_that_are_small_each_but_large_together() -> None:
    size = MIB

    def widen(record: dict[str, Any]) -> dict[str, Any]:
        length = size if record["id"] == AT else 1
        return {"id": record["id"], **{f"f{n}": bytes([n]) * length for n in range(13)}}

    with line(120, widen, batch=3) as pipeline:
        for batch in pipeline:
            for place, number in enumerate(batch["id"].tolist()):
                length = size if number == AT else 1
                assert all(batch[f"f{n}"][place] == bytes([n]) * length for n in range(13))


def test_a_large_record_between_two_stages_and_on_the_way_in() -> None:
    """It crosses to a worker of the second stage, through a task ring of 256 KiB."""
    records = [{"id": i, "text": "y" * (3 * MIB if i == 40 else 3)} for i in range(60)]
    dataset = zp.Dataset.from_list("toy", records)
    two = line(0, Enrich(), upper, dataset=dataset, parallelism={"map": 1, "upper": 2}, ring_bytes=65_536)
    with two as pipeline:
        lengths = {int(i): len(text) for batch in pipeline for i, text in zip(batch["id"], batch["text"], strict=True)}
    assert lengths == {i: (40 % 50 if i == 40 else i % 50) for i in range(60)}


def upper(record: dict[str, Any]) -> dict[str, Any]:
    assert len(record["text"]) == record["id"] % 50
    return {**record, "text": record["text"].upper(), "big": "z" * (2 * MIB if record["id"] == 41 else 1)}


def test_a_record_that_a_map_batches_carries_back_and_forth() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(24)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], shuffle="none")).map(Blow(9, MIB)).map_batches(list, 4).batch(2)
    with pipeline.options(runner="process", parallelism=2, canonical_replicas=1, ring_bytes=4096) as running:
        sizes = {int(i): len(big) for batch in running for i, big in zip(batch["id"], batch["big"], strict=True)}
    assert sizes == {i: MIB if i == 9 else 0 for i in range(24)}


def test_batches_that_grow_and_shrink_again() -> None:
    """Slots are replaced by larger ones; those that are too small, or too many, go."""
    before = len(os.listdir("/proc/self/fd"))

    def sized(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "x": np.full(20 << (record["id"] // 20 % 12), record["id"] % 100, np.int64)}

    with line(480, sized, batch=1, prefetch_batches=4) as pipeline:
        most = 0
        for number, batch in enumerate(pipeline):
            assert batch["x"].shape == (1, 20 << (number // 20 % 12))
            assert batch["x"].min() == batch["x"].max() == number % 100
            most = max(most, len(os.listdir("/proc/self/fd")))
    assert most - before <= 2 * 64 + 8  # two a slot, 64 slots at most


def test_many_small_slots_do_not_all_become_large() -> None:
    """First 64 slots of 64 KiB, then batches of 4 MiB: shared memory stays far below 64 of these."""

    def sized(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "x": np.zeros(MIB // 2 if record["id"] >= 300 else 8)}

    with line(400, sized, batch=1, canonical_replicas=8, prefetch_batches=8) as pipeline:
        most = 0
        for batch in pipeline:
            assert batch["x"].any() == 0
            most = max(most, shared_bytes())
    assert most < 14 * 6 * MIB


def shared_bytes() -> int:
    """Shared memory that the engine maps."""
    engine = children(launcher())[0]
    text = Path(f"/proc/{engine}/status").read_text()
    return int(next(row.split()[1] for row in text.splitlines() if row.startswith("RssShmem"))) * 1024


def test_a_large_record_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i in range(60):
            file.write(json.dumps({"id": i, "text": "t" * (9 * MIB if i == 30 else i)}) + "\n")
    with line(0, dataset=zp.Dataset.from_path("toy", path), batch=1) as pipeline:
        sizes = {int(batch["id"][0]): len(batch["text"][0]) for batch in pipeline}
    assert sizes == {i: 9 * MIB if i == 30 else i for i in range(60)}


@pytest.mark.parametrize(
    ("unit", "suffix", "runner"),
    [
        slow(4096, ".jsonl", "inline"),
        (4096, ".jsonl", "process"),
        slow(4096, ".parquet", "process"),
        slow(MIB, ".jsonl", "inline"),
        slow(MIB, ".jsonl", "process"),  # also under every start method
        slow(MIB, ".parquet", "inline"),
        (MIB, ".parquet", "process"),
    ],
)
def test_one_file_a_size(unit: int, suffix: str, runner: str, tmp_path: Path) -> None:
    """The recipe of the case: a row of each size, a row of several fields, and one that a stage blows up."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    recipes.a04(tmp_path, unit, suffix, runner)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_line_of_120_megabytes(suffix: str, tmp_path: Path) -> None:
    """In Parquet it is the value of one cell."""
    size, path = 120_000_000, tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow = pytest.importorskip("pyarrow")
        texts = ["x" * (size if i == AT else 5) for i in range(200)]
        parquet.write_table(pyarrow.table({"id": range(200), "text": texts}), path)
        del texts
    else:
        with path.open("w") as file:
            for i in range(200):
                file.write(json.dumps({"id": i, "text": "x" * (size if i == AT else 5)}) + "\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with line(0, dataset=zp.Dataset.from_path("toy", path), batch=4) as pipeline:
        found = []
        for batch in pipeline:
            found += ids([batch])
            for number, text in zip(batch["id"], batch["text"], strict=True):
                assert len(text) == (size if number == AT else 5)
                assert text.count("x") == len(text)
    assert found == list(range(200))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 6 * size


@pytest.mark.parametrize(("ring_bytes", "around"), [(4096, 2048), (4 * MIB, LARGE_BYTES)])
def test_every_size_around_the_limits_of_a_ring(ring_bytes: int, around: int) -> None:
    """One record a message, byte by byte: what just fits one frame of the ring, and what first takes another way."""
    sizes = range(around - 330, around + 10)

    def sized(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "blob": bytes([record["id"] % 251]) * sizes[record["id"]]}

    with line(len(sizes), sized, batch=1, task_records=1, ring_bytes=ring_bytes) as pipeline:
        for number, batch in enumerate(pipeline):
            assert batch["blob"] == [bytes([number % 251]) * sizes[number]]
    assert number == len(sizes) - 1


def huge(record: dict[str, Any], size: int) -> dict[str, Any]:
    return {"id": record["id"], "blob": bytes([record["id"] + 1]) * size if record["id"] % 4 else b""}


@pytest.mark.parametrize(("size", "ring_bytes"), [(24_000_000, 4096), slow(120_000_000, 4 * MIB)])
def test_several_at_once(size: int, ring_bytes: int) -> None:
    """Both workers have some, in one task and in several; each arrives whole, and they do not stop each other."""

    def make(record: dict[str, Any]) -> dict[str, Any]:
        return huge(record, size)

    with line(8, make, batch=1, task_records=2, ring_bytes=ring_bytes, prefetch_batches=1) as pipeline:
        for number, batch in enumerate(pipeline):
            blob = batch["blob"][0]
            assert len(blob) == (size if number % 4 else 0)
            assert blob.count(bytes([number + 1])) == len(blob)
    assert number == 7


# -- the setting that bounds them ------------------------------------------------------------------------------------


def blobs(**options: Any) -> zp.Pipeline:
    """Record 9 has 5,000 bytes, the others 100."""

    def blob(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "blob": b"x" * (5000 if record["id"] == 9 else 100)}

    return line(16, blob, batch=2, **options)


def test_a_record_beyond_the_bound_is_an_error_with_sizes() -> None:
    """It names operator and record; what comes before it is delivered, and the state resumes at it."""
    found = []
    with blobs(max_record_bytes=1000) as pipeline:
        with pytest.raises(zp.errors.DataError) as caught:
            found += list(pipeline)
        state = pipeline.state_dict()
    text = str(caught.value)
    encoded = re.fullmatch(
        r"operator 'blob' made a record of (5,0\d\d) bytes on lane 0, dataset 'toy', shard list, row 9; "
        r"max_record_bytes=1,000 is the most that may cross between processes: raise it with "
        r"options\(max_record_bytes=\.\.\.\), make smaller records, or leave the row out with "
        r"Dataset\(\.\.\., exclude=\[\('list', 9\)\]\)",
        text,
    )
    assert encoded, text
    size = int(encoded[1].replace(",", ""))
    with blobs(max_record_bytes=size) as pipeline:  # the bound itself is allowed
        pipeline.load_state_dict(state)
        assert ids(pipeline) == list(range(8, 16))
    with blobs(max_record_bytes=size - 1) as pipeline, pytest.raises(zp.errors.DataError, match=r"row 9; max_record"):
        list(pipeline)


def test_the_bound_is_on_one_record_and_not_on_a_task() -> None:
    with blobs(max_record_bytes=5200, task_records=16) as pipeline:
        assert ids(pipeline) == list(range(16))


def test_a_row_beyond_the_bound_without_operators() -> None:
    dataset = zp.Dataset.from_list("toy", [{"id": i, "text": "y" * (3 * MIB if i == 5 else 3)} for i in range(8)])
    wanted = r"operator 'fetch' made a record of 3,145,\d+ bytes on lane 0, dataset 'toy', shard list, row 5; "
    with (
        line(0, dataset=dataset, max_record_bytes=MIB) as pipeline,
        pytest.raises(zp.errors.DataError, match=wanted + "max_record_bytes=1,048,576 is"),
    ):
        list(pipeline)


def test_other_runners_have_no_such_bound() -> None:
    """Nothing is encoded there."""
    for runner in ("inline", "threads"):
        with blobs(max_record_bytes=1000, runner=runner) as pipeline:
            assert ids(pipeline) == list(range(16))

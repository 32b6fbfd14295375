"""`explain`: every figure that it prints is checked against what the pipeline then does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

import zephon as zp
from zephon.drive import InlineDriver
from zephon.ops.accumulator import Accumulator, Emitted, Key, Part, Ref
from zephon.options import DataOptions, ExecutionOptions, TopologyOptions
from zephon.plan.limits import TASKS_PER_WORKER, lane_batches, lane_limit, most_children, pending_limit, task_records
from zephon.record import Record
from zephon.work.source import FlatSource, WorkSource


def dataset(name: str, rows: int) -> zp.Dataset:
    return zp.Dataset.from_list(name, [{"id": i} for i in range(rows)])


def source(**settings: Any) -> zp.StaticMixture:
    mixture = {"weights": {"web": 0.7, "code": 0.3}, "seed": 17, "chunk_size": 16, "end": "redistribute"}
    return zp.StaticMixture([dataset("web", 700), dataset("code", 300)], **{**mixture, **settings})


def ids(text: str) -> list[int]:
    return [1] * len(text)


def keep(record: Record) -> bool:
    return True


def pipeline(**options: Any) -> zp.Pipeline:
    """A chain with a stage for every reason that there is."""
    chain = zp.Pipeline(source()).filter(keep).map(dict, name="clean").map(dict, name="slow").tokenize(ids)
    chain = chain.map_batches(list, 10).shuffle(40).pack(64).batch(8)
    workers = {"keep": 2, "clean": 2, "slow": 3, "tokenize": 2, "map_batches": 2}
    return chain.options(**{"canonical_replicas": 8, "parallelism": workers, "task_records": 32, **options})


def section(text: str, title: str) -> list[str]:
    """The lines of a section, without their indent."""
    [found] = [part for part in text.split("\n\n") if part.split("\n")[0].startswith(title)]
    return [line[2:] for line in found.split("\n")[1:]]


def fields(line: str) -> list[str]:
    """The columns of a line."""
    return re.split(r" {3,}", line.strip())


def test_source() -> None:
    lines = section(pipeline().explain(), "source")
    assert lines[0] == "StaticMixture: seed 17, chunk_size 16, shuffle global, end redistribute"
    assert fields(lines[1]) == ["'web'", "700 rows", "1 shard", "70 % of the samples"]
    assert fields(lines[2]) == ["'code'", "300 rows", "1 shard", "30 % of the samples"]
    assert lines[3] == "a pass is 1,000 samples (pointers): 8 chunks of at most 16 for each of 8 lanes"


@pytest.mark.parametrize("rows", [0, 1, 7, 127, 128, 129, 135, 136, 1000])
def test_chunks_of_a_lane(rows: int) -> None:
    """As many as the source gives: counted."""
    mixture = zp.StaticMixture([dataset("d", rows), dataset("e", 1)], weights=[1 if rows else 0, 1], chunk_size=16)
    counts = set()
    for lane in range(8):
        chunks = 0
        while len(mixture.chunk(lane, 8, 0, chunks)):
            chunks += 1
        counts.add(chunks)
    line = section(zp.Pipeline(mixture).options(canonical_replicas=8).explain(), "source")[-1]
    assert f": {' or '.join(map(str, sorted(counts)))} chunks" in line
    assert f"a pass is {mixture.length(0):,} samples" in line


def test_endless_and_many_datasets() -> None:
    many = zp.StaticMixture([dataset(f"d{i}", 2) for i in range(40)], end="repeat")
    lines = section(zp.Pipeline(many).explain(), "source")
    assert lines[-1] == f"a pass is endless; every dataset has come round once after {many.epoch_length(0):,} samples"
    assert lines[-2] == "... and 16 more datasets"


def test_a_dataset_that_never_comes_round_is_named() -> None:
    datasets = [dataset(name, 300) for name in "abc"]
    leaving = zp.MixtureSchedule({0: [1, 0, 1], 100: [0, 1, 1]})
    source = zp.StaticMixture(datasets, leaving, end="repeat")
    line = section(zp.Pipeline(source).explain(), "source")[-1]
    assert line == (
        "a pass is endless; every dataset has come round once after 700 samples, "
        "but for 'a': weight 0 before all rows are read"
    )
    given = source.pointers(0, 0, 10_000)
    assert {d: int((given.dataset == d).sum()) >= 300 for d in range(3)} == {0: False, 1: True, 2: True}
    first = source.pointers(0, 0, 700)
    assert min(int((first.dataset == d).sum()) for d in (1, 2)) == 300


def test_stages() -> None:
    lines = section(pipeline().explain(), "stages")
    stages = [line for line in lines if line.startswith("stage")]
    assert stages[1:] == [
        "stage 1, 3 workers: 'slow' has a parallelism of its own (3, not 2)",
        "stage 2, 2 workers: 'tokenize' has a parallelism of its own (2, not 3)",
        "stage 3, 2 workers: 'map_batches' comes behind 'map_batches', which regroups records",
    ]
    assert stages[0] == "stage 0, 2 workers: reads the records"
    first = lines[: lines.index(stages[1])]
    assert first[1:] == [
        "  fused, a record stays in one worker through all of:",
        "    'keep' (filter) on_error=raise",
        "    'clean' (map) on_error=raise",
    ]
    assert "  then, lane by lane: 'map_batches' size=10" in lines
    assert "  then, lane by lane: 'shuffle' buffer_size=40 mode=reservoir" in lines
    assert lines[-1] == "'batch': 8 samples of one lane; what is left at a lane's end is a shorter batch"


def test_no_operators() -> None:
    lines = section(zp.Pipeline(source()).batch(3, drop_last=True).explain(), "stages")
    assert re.fullmatch(r"stage 0, \d+ workers?: reads the records", lines[0])
    assert lines[1:] == [
        "  no operators: records go on as they are read",
        "'batch': 3 samples of one lane; what is left at a lane's end is dropped and counted",
    ]


@pytest.mark.parametrize("strategy", ["contiguous", "interleaved"])
def test_lanes_of_every_group(strategy: str) -> None:
    """What each group of the run says of itself."""
    settings = {"dp_degree": 3, "mapping_strategy": strategy, "cycles_per_step": 2}
    groups = [pipeline(**settings, dp_group_id=group) for group in range(3)]
    for number, group in enumerate(groups):
        lines = section(group.explain(), "lanes")
        assert lines[0] == (
            f"8 lanes over 3 groups, {strategy}; a global step is cycles_per_step = 2 x a batch of each lane, "
            "128 samples in all"
        )
        for other, line in zip(groups, lines[1:], strict=True):
            name, lanes, batches, *own = fields(line)
            assert batches == f"batches_per_step {other.batches_per_step}"
            assert lanes == f"lanes {_span(other.lanes)}"
            assert bool(own) == (name == f"group {number}")


def _span(lanes: list[int]) -> str:
    contiguous = len(lanes) > 2 and lanes == list(range(lanes[0], lanes[-1] + 1))
    return f"{lanes[0]}-{lanes[-1]}" if contiguous else ", ".join(map(str, lanes))


def test_many_groups_are_told_in_few_lines() -> None:
    lines = section(pipeline(canonical_replicas=1000, dp_degree=300, dp_group_id=150).explain(), "lanes")
    assert lines[1:] == [
        "groups 0-99: 4 lanes each, batches_per_step 4",
        "groups 100-299: 3 lanes each, batches_per_step 3",
        "this process is group 150: lanes 550-552",
    ]


def test_restart() -> None:
    by_window = section(pipeline(flush_every_k_chunks=3).explain(), "restart")
    assert by_window[0] == (
        "by window, because 'map_batches', 'shuffle', 'pack' regroup records: a window is 3 chunks, 48 pointers"
    )
    assert by_window[1:] == ["a restart reads the open window of each lane again, and drops what was delivered of it"]
    held = (
        "by what is held: the records that the accumulators held are made again, each lane's own, and at most 1,024 "
        "pointers that came since are read again"
    )
    long = section(pipeline(flush_every_k_chunks=129).explain(), "restart")  # 129 x 16 pointers
    assert long[1:] == [f"inside a window {held}"]
    assert section(pipeline(flush_every_k_chunks=0).explain(), "restart") == [held]
    by_pointer = section(zp.Pipeline(source()).map(dict, name="m").batch(2).explain(), "restart")
    assert [line[:10] for line in by_pointer] == ["by pointer"]


class Sequence3(FlatSource):
    """A user's own source, without weights."""

    def pointers(self, pass_index: int, start: int, count: int) -> zp.Pointers:
        raise AssertionError("explain reads nothing")

    def length(self, pass_index: int) -> int:
        return 3

    def fingerprint(self) -> dict[str, Any]:
        return {}


class Unchunked(WorkSource):
    """A user's own source, which has no chunk size."""

    def chunk(self, lane: int, num_lanes: int, pass_index: int, index: int) -> zp.Pointers:
        raise AssertionError("explain reads nothing")

    def length(self, pass_index: int) -> int:
        return 3

    def fingerprint(self) -> dict[str, Any]:
        return {"rule": "mine"}


def test_own_sources() -> None:
    text = zp.Pipeline(Sequence3([dataset("d", 3)], chunk_size=2)).shuffle(99).explain()
    assert section(text, "source") == [
        "Sequence3: seed 0",
        "'d'   3 rows   1 shard",
        "a pass is 3 samples (pointers): 2 chunks of at most 2 for each of 1 lane",
    ]
    text = zp.Pipeline(Unchunked([dataset("d", 3)])).shuffle(99).explain()
    assert section(text, "source")[0] == "Unchunked: seed 0, rule mine"
    assert section(text, "source")[-1] == "a pass is 3 samples (pointers)"
    assert section(text, "restart")[0].endswith("a window is 8 chunks")
    assert "warnings" not in text, "how large a window is cannot be known"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory() -> None:
    lines = section(pipeline(parallelism=2, prefetch_batches=5, task_records=32).explain(), "memory")
    rows = {tuple(fields(line)) for line in lines if "   " in line}
    assert ("ready", "T = 5 batches", "prefetch_batches") in rows
    tasks = TASKS_PER_WORKER * 4 + 1  # of two stages
    way = ("on the way", f"Q = {32 * tasks:,} pointers", f"({TASKS_PER_WORKER} x workers 4 + 1) tasks of 32 records")
    assert way in rows
    assert ("held", "9 records", "'map_batches'") in rows
    assert ("held", "40 records", "'shuffle'") in rows
    assert ("held", "63 tokens", "'pack'") in rows
    assert any(row[:2] == ("between stages", "128 records") for row in rows)


def test_memory_in_batches() -> None:
    chain = zp.Pipeline(source()).map(dict, name="m").shuffle(40).batch(8)
    chain = chain.options(parallelism=1, task_records=10, prefetch_batches=3)
    pointers = 10 * (TASKS_PER_WORKER + 1)
    line = section(chain.explain(), "memory")[-1]
    bound = 3 - 1 + -(-(pointers * 1 + 40 + 7) // 8)
    assert line == f"at most {bound} batches = T - 1 + ceil((Q e + held + B - 1) / B), with e = 1, B = 8"
    assert lane_batches(3, pointers, 1, 40, 8) == bound
    lines = section(chain._derive(nodes=()).flat_map(list, max_children=5).batch(8).explain(), "memory")
    assert lines[-2].startswith(f"at most {lane_batches(3, pointers, 5, 0, 8)} batches")
    usual = lane_batches(3, pointers, 1, 0, 8)
    assert lines[-1] == f"with one sample a pointer, {usual} batches; max_children of an operator sets e"


class Own(Accumulator):
    """A user's accumulator: nobody knows what it holds."""

    method = "own"
    preserves = True

    def open(self, lane: int, key: Key) -> None: ...

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        return Emitted()

    def flush(self, lane: int) -> Emitted:
        return Emitted()

    def build(self, parts: list[tuple[Record, int, int]]) -> Record:
        return {}

    def group_length(self, group: list[Part]) -> int:
        return 1


def test_memory_of_an_accumulator_of_ones_own() -> None:
    lines = section(zp.Pipeline(source()).apply(Own()).batch(8).explain(), "memory")
    assert ["held", "at most a window, 128 pointers", "'own'"] in [fields(line) for line in lines]
    assert lines[-1].startswith("no bound in batches")


def test_most_children() -> None:
    chain = (
        zp.Pipeline(source())
        .map(dict, name="m")
        .filter(keep)
        .flat_map(list, max_children=7)
        .tokenize(ids)
        .tokenize(ids, max_length=5, overflow="truncate")
        .tokenize(ids, max_length=5, max_children=9)
    )
    assert [most_children(node) for node in chain._definition.nodes] == [1, 1, 7, 1, 1, 9]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"task_records": 7}, {"parallelism": 3}, {"dp_degree": 4, "dp_group_id": 1}], ids=str
)
@pytest.mark.parametrize("regroups", [True, False])
def test_the_engine_keeps_to_these_limits(options: dict[str, Any], regroups: bool) -> None:
    """The formulas are the engine's own."""
    chain = zp.Pipeline(source()).map(dict, name="m", version="1")
    chain = (chain.shuffle(3).map(dict, name="n", version="1") if regroups else chain).batch(5)
    chain = chain.options(**{"canonical_replicas": 8, "runner": "inline", "dp_degree": 1, **options})
    session = chain._session
    plan, driver = session.resolved.plan, session.drive(0)
    assert isinstance(driver, InlineDriver)
    engine = driver.engine
    driver.close()
    records = task_records(options.get("task_records"))
    assert engine.job.task_records == records
    assert engine.feed._limit == lane_limit(plan, records)
    assert [pending._most for pending in engine.pendings] == [
        pending_limit(stage.parallelism, records) for stage in plan.stages[:-1]
    ]


# -- settings and warnings ---------------------------------------------------------------------------------------------


def test_three_groups_of_settings() -> None:
    """Every field of every group once, in its own group, defaults marked."""
    text = pipeline(dp_degree=2, prefetch_batches=2).explain()
    groups = {"data": DataOptions, "topology": TopologyOptions, "execution": ExecutionOptions}
    for name, kind in groups.items():
        lines = [fields(line) for line in section(text, f"settings: {name}")]
        found = {line[0]: line[1:] for line in lines if len(line) > 1}
        assert list(found) == list(kind.__struct_fields__)
        changed = {"canonical_replicas", "parallelism", "task_records", "dp_degree"}
        assert {field for field, rest in found.items() if "default" not in rest} == changed & set(found)
        if name == "data":
            assert found["canonical_replicas"] == ["8", "= 8 lanes"]
            assert found["flush_every_k_chunks"] == ["unset", "default", "= 8 chunks"]
            assert lines[-1][0].startswith("and, shown above, of the source: seed, chunk_size, weights, shuffle, end;")
        if name == "topology":
            assert found["dp_degree"] == ["2"]
            assert found["world_size"] == [
                "unset",
                "default",
                f"= {pipeline(dp_degree=2)._session.resolved.topology.world_size}",
            ]
            assert found["dp_group_id"] == ["unset", "default", "= 0"]
        if name == "execution":
            assert found["prefetch_batches"] == ["2", "default"]


def test_warnings() -> None:
    small = zp.Pipeline(source()).shuffle(129)
    assert section(small.explain(), "warnings") == [
        "'shuffle': buffer_size=129 exceeds a window of 128 pointers: the buffer never fills;",
        "  a window is flush_every_k_chunks x chunk_size: raise one of them, or lower buffer_size",
    ]
    assert "warnings" not in zp.Pipeline(source()).shuffle(128).explain()
    children = zp.Pipeline(source()).flat_map(list).shuffle(129).explain()
    assert "fills only where records become several before it" in section(children, "warnings")[0]
    uneven = section(pipeline(dp_degree=3).explain(), "warnings")
    assert uneven == ["8 lanes do not divide among 3 groups: some do more work a step"]


def test_lines_are_short() -> None:
    text = pipeline(dp_degree=3).explain()
    assert max(map(len, text.split("\n"))) <= 125
    assert text == text.strip()


def test_weights_that_change() -> None:
    schedule = zp.MixtureSchedule({0: [9, 1], 5_000: [1, 1], 20_000: [1, 3]})
    line = zp.Pipeline(source(weights=schedule, end="repeat")).options(canonical_replicas=2)
    lines = section(line.explain(), "source")
    assert fields(lines[1])[-1] == "90 % -> 25 % of the samples"
    assert lines[3] == "weights change at 2 positions of a pass: 5,000, 20,000"
    ramp = zp.MixtureSchedule({0: [9, 1], 64_000: [1, 1]}, change="linear")
    lines = section(zp.Pipeline(source(weights=ramp, end="repeat")).options(canonical_replicas=2).explain(), "source")
    assert lines[3].startswith("weights change at 64 positions of a pass: 1,000, 2,000, ")
    assert lines[3].endswith(", 8,000, ... 64,000")


def test_memory_says_what_held_records_keep() -> None:
    line = pipeline(task_records=64)
    told = "a held record keeps all of its task in memory: of a shuffle, up to ln 64 + 0.6 = 4.7 times what it holds"
    assert any(told in found for found in line.explain().splitlines())
    assert "a held record" not in zp.Pipeline(source()).batch(8).explain()

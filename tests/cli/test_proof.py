"""The proof behind `zephon verify`: sound pipelines pass every check, and every other one is caught and explained."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import pipelines
from tests.process.helpers import slow
from zephon.errors import ConfigError
from zephon.pipeline import Pipeline
from zephon.runners import execute
from zephon.testing.streams import Gave, Stopped, Streams, fault_of, sample_digests
from zephon.testing.verify import DEATHS, Check, Verification
from zephon.testing.walk import At, Walk

TARGET = "tests.cli.pipelines"


def verify(pipeline: Pipeline, **settings: Any) -> list[Check]:
    settings = {"batches": 60, "runners": ["inline", "threads"], "apart_s": 0, **settings}
    return list(Verification(pipeline, **settings))


@pytest.mark.parametrize("make", [pipelines.packed, pipelines.plain, pipelines.endless])
def test_sound_pipelines(make: Callable[[], Pipeline]) -> None:
    checks = verify(make(), topologies=[1, 3, 4], seed=5)
    assert [str(check.difference) for check in checks if not check.ok] == []
    assert {check.check for check in checks} == {"stream", "order", "restart", "again"}
    assert {check.runner for check in checks if not check.restarts} == {"inline", "threads"}
    assert {check.topology for check in checks if not check.restarts} == {1, 3, 4}
    assert max(check.restarts for check in checks) >= 2
    assert min(check.batches for check in checks) > 50


def test_short_pipelines_are_followed_into_the_second_pass() -> None:
    checks = verify(pipelines.plain(), batches=10_000, topologies=[2], runners=["inline"])
    whole = pipelines.plain().options(canonical_replicas=2, dp_degree=1)
    two_passes = len(list(whole)) + len(list(whole))
    assert {check.batches for check in checks if not check.restarts} == {two_passes}
    assert all(check.ok for check in checks)


@pytest.mark.parametrize("seed", [0, 1, *map(slow, range(2, 6))])
def test_restarts(seed: int) -> None:
    """Several seeds: cuts anywhere, across the end of a pass too."""
    settings = {"batches": 200, "topologies": [1, 2, 5], "seed": seed, "runners": ["inline"]}
    checks = verify(pipelines.packed(), **settings)
    assert [str(check.difference) for check in checks if not check.ok] == []


def test_lanes() -> None:
    lanes = [Verification(pipelines.plain(), topologies=topologies).num_lanes for topologies in ([1], [1, 6, 2])]
    assert lanes == [1, 6], "unset lanes: the largest topology asked for"
    given = Verification(pipelines.plain().options(canonical_replicas=3))
    assert (given.num_lanes, given.topologies) == (3, (1, 2))
    assert Verification(pipelines.plain()).num_lanes == 4


NOT_DETERMINISTIC = "is not deterministic"
ANY_STATE = "is not deterministic|depends on the order"


@pytest.mark.parametrize("topologies", [[1], [1, 2, 4], [3, 2]])
@pytest.mark.parametrize(
    ("make", "named", "cause"),
    [
        (pipelines.with_jitter, "jitter", NOT_DETERMINISTIC),
        (pipelines.with_stamp, "stamp", NOT_DETERMINISTIC),
        (pipelines.with_rarely, "rarely", NOT_DETERMINISTIC),
        (pipelines.with_numbered, "numbered", ANY_STATE),
        (pipelines.with_previous, "previous", ANY_STATE),
        (pipelines.with_collects, "collects", ANY_STATE),
        (pipelines.with_every_second, "every_second", ANY_STATE),
    ],
)
def test_functions_that_are_not_pure(
    make: Callable[[], Pipeline], named: str, cause: str, topologies: list[int]
) -> None:
    found = first_difference(verify(make(), topologies=topologies))
    assert found.cause is not None
    assert named in found.cause
    assert any(word in found.cause for word in cause.split("|"))


def first_difference(checks: list[Check]) -> Any:
    differences = [check.difference for check in checks if check.difference is not None]
    assert differences, "it was not caught"
    assert all(check.ok == (check.difference is None) for check in checks)
    return differences[0]


def test_the_place_is_named() -> None:
    """The first step, lane, sample, field and origin that differ."""
    found = first_difference(verify(pipelines.with_rarely(), topologies=[1, 2]))
    streams = Streams(pipelines.with_rarely().options(canonical_replicas=2, dp_degree=1), 1)
    batch = next(
        (lane, turn, batch)
        for turn in range(99)
        for lane in range(2)
        if b"\x85" in (batch := streams.at(lane, (0, turn))).origins  # type: ignore[union-attr]  # msgpack of 133
    )
    assert (found.what, found.field, found.at) == ("digest", "x", At(0, batch[1], batch[0]))
    assert found.origin[:1] + found.origin[2:] == ("web", 133, ())
    assert f"sample {found.sample} differs in field 'x'; it is made of dataset 'web', shard list, row 133" in str(found)


def test_an_accumulator_that_mixes_lanes() -> None:
    checks = verify(pipelines.with_mixer(), topologies=[1, 4], runners=["inline"])  # where two runs surely agree
    found = first_difference(checks)
    assert "accumulator 'mixer'" in found.cause
    assert "by lane" in found.cause
    assert {check.ok for check in checks if check.topology == 4} == {True}, "one lane a group: nothing to mix"
    assert {check.ok for check in checks if check.topology == 1} == {False}


def test_what_depends_on_the_process() -> None:
    """hash() of a string: the same all through one process, another one after a restart."""
    checks = verify(pipelines.with_half(), topologies=[1], runners=["inline"], target=f"{TARGET}:with_half")
    assert [check.check for check in checks if not check.ok] == ["fresh process"]
    assert "PYTHONHASHSEED" in first_difference(checks).cause


def test_a_fresh_process_gives_the_same() -> None:
    checks = verify(pipelines.packed(), topologies=[1, 2], runners=["threads"], target=f"{TARGET}:packed")
    assert all(check.ok for check in checks), [str(check.difference) for check in checks]
    assert [check.topology for check in checks if check.check == "fresh process"] == ["1>2"]


def test_a_fresh_process_that_builds_another_pipeline() -> None:
    """The state of one pipeline does not fit the other: refused, and said so."""
    checks = verify(pipelines.plain(), topologies=[1], runners=["inline"], target=f"{TARGET}:endless")
    [broken] = [check for check in checks if not check.ok]
    assert broken.check == "fresh process"
    assert broken.difference is not None
    assert "CheckpointError" in broken.difference.text
    assert "source.end" in broken.difference.text
    assert "another pipeline in a new process" in str(broken.difference.cause)


def test_a_time_of_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configuration is run again some time later; here the clock is moved instead."""
    now = [1000]

    def second(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "second": now[0]}

    verification = Verification(
        pipelines.finish(pipelines.start().map(second)), batches=20, topologies=[2], runners=["inline"], apart_s=0
    )
    found = []
    for check in verification:
        found.append(check)
        now[0] += check.check == verification.setups[-2].check and len(found) == len(verification.setups) - 1
    assert [check.check for check in found if not check.ok] == ["again"]


def test_an_error_of_the_pipeline() -> None:
    """Raised at the same record by every configuration and by the oracle: an outcome of its own."""
    checks = verify(pipelines.with_fails(), topologies=[1, 2], batches=200)
    assert {check.difference.what for check in checks if check.difference} == {"raises"}
    assert not any(check.ok for check in checks)
    text = first_difference(checks).text
    where = "dataset 'web', shard list, row 133, child 0"
    assert text == f"the pipeline raises KeyError: 'no such field' in operator 'fails' at {where}"


def test_an_error_that_comes_only_sometimes() -> None:
    seen = [0]

    def fail_later(record: dict[str, Any]) -> dict[str, Any]:
        seen[0] += 1
        if seen[0] == 700:
            raise ValueError("enough")
        return record

    found = first_difference(verify(pipelines.start().map(fail_later).batch(4), topologies=[1]))
    assert found.what == "error"
    assert "the run raised" in found.text
    assert "ValueError: enough" in found.text


def test_an_endless_pass_that_gives_nothing() -> None:
    check = next(iter(Verification(pipelines.dry(), topologies=[1], runners=["inline"])))
    assert check.difference is not None
    assert check.difference.what == "raises"
    assert "came out of an endless source" in check.difference.text


class _SplitOff:
    """Breaks the engine on purpose: what verify must find even if no user is to blame.

    The same records in every run: how many a task has follows the clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._split = execute._split
        monkeypatch.setattr(execute, "_split", self)

    def __call__(self, task: Any, rows: Any, lengths: Any) -> Any:
        outs = self._split(task, rows, lengths)
        for out in outs:
            out.records[:] = [{**record, "id": -1} if record["id"] % 5 == 0 else record for record in out.records]
        return outs


def test_a_fault_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    _SplitOff(monkeypatch)
    found = first_difference(verify(pipelines.plain(), topologies=[1]))
    assert found.what == "digest"
    assert "two runs of the same configuration agree" in found.cause


@pytest.mark.parametrize(
    ("pipeline", "settings", "message"),
    [
        (pipelines.plain(), {"batches": 0}, "batches=0"),
        (pipelines.plain(), {"runners": ["inline", "greenlets"]}, "runner 'greenlets' is not there; the runners"),
        (pipelines.plain(), {"topologies": [0, 1]}, r"topologies=\[0, 1\]"),
        (pipelines.plain(), {"topologies": []}, r"topologies=\[\]"),
        (pipelines.packed(), {"topologies": [1, 6]}, "6 groups is more than canonical_replicas=5"),
        (pipelines.loose(), {}, "deterministic=False"),
        (pipelines.plain(), {"deaths": True}, "under runner 'process' only, and the runners here are inline, threads"),
        (pipelines.nothing(), {}, "none of the 4 lanes gives a batch"),
    ],
)
def test_wrong_use(pipeline: Pipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(pipeline, **settings)


def test_a_loaded_state_is_set_aside() -> None:
    pipeline = pipelines.plain().options(canonical_replicas=2, dp_degree=1)
    for _ in pipeline.take(3):
        pass
    part = pipeline.take(3)
    list(part)
    pipeline.load_state_dict(part.state_dict())
    assert all(check.ok for check in verify(pipeline, topologies=[1], runners=["inline"], batches=20))


# -- the comparison itself ---------------------------------------------------------------------------------------------


def events() -> tuple[Streams, list[Gave]]:
    """The oracle's streams of two lanes, and what a pipeline gives."""
    pipeline = pipelines.plain().options(canonical_replicas=2, dp_degree=1, runner="inline")
    given = []
    for batch in pipeline:
        counts = pipeline.counts()
        lane = batch.lane_id
        digests = sample_digests(batch)
        counted = (counts["dropped"][lane], counts["delivered"][lane])
        given.append(Gave(lane, 0, batch.step, batch.digest(), batch.origins, *counted, tuple(batch), digests))
    return Streams(pipeline, 2), given


def changed(gave: Gave, **fields: Any) -> Gave:
    return Gave(**{name: getattr(gave, name) for name in Gave.__struct_fields__} | fields)


def test_walk() -> None:
    streams, given = events()
    walk = Walk(streams, {0: (0, 0), 1: (0, 0)})
    assert all(walk.check(gave, bytes) is None for gave in given)
    turns = Counter(gave.lane for gave in given)
    ends = {lane: streams.at(lane, (0, turns[lane])).dropped for lane in (0, 1)}  # type: ignore[union-attr]
    assert walk.check(Stopped(ends), bytes) is None
    assert (walk.pass_index, walk.places, walk.delivered) == (1, {0: (1, 0), 1: (1, 0)}, len(given))


def wrong_events() -> list[tuple[str, Callable[[list[Gave]], Any], str, str]]:
    first = events()[1][0]
    other = [[("web", "list", 7, ())], *first.origins[1:]]
    half = bytearray(first.samples)
    half[9] ^= 1  # a bit of the second field of the first sample
    return [
        ("lane", lambda g: g[1], "order", "a batch of step 0, lane 1 came, where one of step 0, lane 0 is due"),
        ("step", lambda g: changed(g[0], step=1), "order", "a batch of step 1, lane 0 came"),
        ("pass", lambda g: changed(g[0], pass_index=1), "order", "lane 0, pass 1 came"),
        (
            "origin",
            lambda g: changed(g[0], origins=other),
            "origins",
            "sample 0 is made of dataset 'web', shard list, row 7;",
        ),
        ("fewer", lambda g: changed(g[0], origins=g[0].origins[:1]), "origins", "has 1 samples; the oracle's has 3"),
        (
            "digest",
            lambda g: changed(g[0], digest="x", samples=bytes(half)),
            "digest",
            "sample 0 differs in field 'text'",
        ),
        (
            "shape",
            lambda g: changed(g[0], digest="x"),
            "digest",
            "other fields, dtypes or shapes than the oracle's, which has id",
        ),
        (
            "dropped",
            lambda g: changed(g[0], dropped={"keep.filtered": 99}),
            "counts",
            r"keep.filtered 99 (the oracle: ",
        ),
        ("delivered", lambda g: changed(g[0], delivered=99), "counts", "samples delivered 99 (the oracle: 3)"),
        ("stop", lambda g: Stopped({0: {}, 1: {}}), "length", "the run ended; the oracle has more"),
        ("end", lambda g: None, "length", "the run ended; the oracle has more"),
        ("error", lambda g: fault_of(OSError("gone")), "failure", "the run raised OSError: gone; the oracle goes on"),
    ]


@pytest.mark.parametrize(
    ("name", "change", "what", "text"), wrong_events(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_walk_finds(name: str, change: Callable[[list[Gave]], Any], what: str, text: str) -> None:
    streams, given = events()
    found = Walk(streams, {0: (0, 0), 1: (0, 0)}).check(change(given), bytes)
    assert found is not None
    assert (found.what, found.at) == (what, At(0, 0, 0))
    assert text in found.text


def test_walk_finds_what_comes_behind_the_end() -> None:
    streams, given = events()
    walk = Walk(streams, {0: (0, 0), 1: (0, 0)})
    for gave in given:
        walk.check(gave, bytes)
    more = walk.check(given[-1], bytes)
    assert more is not None
    assert (more.what, more.text, more.at.lane) == ("length", "the run gave a batch more than the oracle", -1)
    counts = walk.check(Stopped({0: {}, 1: {}}), bytes)
    assert counts is not None
    assert counts.what == "counts"


def test_the_ranks_of_a_launcher_are_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    checks = verify(pipelines.packed(), topologies=[1, 2], runners=["inline"], batches=20)
    assert all(check.ok for check in checks), [str(check.difference) for check in checks]


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
def test_the_process_runner() -> None:
    """State in a function is lost with its process; the proof covers that runner as any other."""
    checks = verify(pipelines.packed(), topologies=[1], runners=["process"], batches=20)
    assert all(check.ok for check in checks), [str(check.difference) for check in checks]
    assert {check.runner for check in checks if check.check == "stream"} == {"process"}


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
@pytest.mark.slow
def test_what_a_death_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound in every other check: only a worker too many shows itself."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    checks = verify(pipelines.with_crowded(), topologies=[1], runners=["process"], deaths=True, batches=160)
    assert {check.check for check in checks if not check.ok} == {DEATHS}
    found = first_difference(checks)
    assert (found.what, found.field) == ("digest", "many")
    assert found.cause.startswith("everything agrees while no worker dies")


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
@pytest.mark.slow  # tests/cli/test_cli.py has a short one
def test_sound_pipelines_while_workers_die() -> None:
    """Every configuration of the process runner, and a restart onto other groups; several deaths in each."""
    checks = verify(pipelines.packed(), topologies=[2], runners=["process"], deaths=True, batches=24)
    assert [str(check.difference) for check in checks if not check.ok] == []
    plain = [(check.parallelism, check.task_records, check.topology) for check in checks if check.check == "stream"]
    killed = [check for check in checks if check.check == DEATHS]
    assert [(check.parallelism, check.task_records, check.topology) for check in killed if not check.restarts] == plain
    assert [(check.runner, check.topology) for check in killed if check.restarts] == [("process>process", "2>2")]
    assert min(check.kills for check in killed) > 1
    assert sum(check.kills for check in checks) == sum(check.kills for check in killed)

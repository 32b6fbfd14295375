"""Settings: three groups, checked by name and value before anything starts; a change makes a new pipeline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import zephon as zp
from zephon.options import Options

from .cases.helpers import ids, pipeline, saved


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("paralellism", "parallelism"),
        ("canonical_replica", "canonical_replicas"),
        ("dp_group", "dp_group_id"),
        ("flush_every_k_chunk", "flush_every_k_chunks"),
        ("Runner", "runner"),
        ("prefetch", "prefetch_batches"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=rf"'{wrong}'.*'{near}'"):
        pipeline(3).options(**{wrong: 1})


@pytest.mark.parametrize(
    ("wrong", "words"), [("batch_size", r"\.batch\(size\)"), ("timeout_s", r"checkpoint\(timeout_s")]
)
def test_what_is_no_option_is_said_to_be_elsewhere(wrong: str, words: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=words):
        pipeline(3).options(**{wrong: 1})


def test_a_name_near_nothing_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'zzz'.*canonical_replicas.*runner"):
        pipeline(3).options(zzz=1)


WRONG: list[tuple[str, Any]] = [
    *[("canonical_replicas", value) for value in (0, -1, True, 1.0, "8", [8])],
    *[("cycles_per_step", value) for value in (0, True, None, 1.5)],
    *[("flush_every_k_chunks", value) for value in (-1, False, "8", 2.0)],
    *[("deterministic", value) for value in (0, 1, "yes", None)],
    *[("last_step", value) for value in ("wrap", True, 1)],
    *[("steps_per_pass", value) for value in (0, -1, True, 1.5)],
    *[("agree_ranks", value) for value in (3, "all", [-1], [0.5])],
    *[("agree_timeout_s", value) for value in (0, None, True)],
    *[("world_size", value) for value in (0, True, "2")],
    *[("global_rank", value) for value in (-1, True, 0.0)],
    *[("dp_degree", value) for value in (0, True)],
    *[("dp_group_id", value) for value in (-1, False)],
    *[("mapping_strategy", value) for value in ("blocked", None, 0)],
    *[("runner", value) for value in ("fork", 3, "Threads", "")],
    *[("parallelism", value) for value in (0, -2, True, 1.5, "many", None, [1], {"map": 0}, {"map": True}, {1: 2})],
    *[("task_records", value) for value in (0, True, 1.5)],
    *[("prefetch_batches", value) for value in (0, True, None)],
    *[("output", value) for value in ("jax", None, True)],
    *[("stall_warn_s", value) for value in (0, -1.0, True, "60", float("nan"))],
    *[("stall_timeout_s", value) for value in (0, 0.01, False, float("nan"), [1])],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_impossible_value_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match=name):
        pipeline(3).options(**{name: value})


RIGHT: dict[str, list[Any]] = {
    "canonical_replicas": [1, 1024, None],
    "cycles_per_step": [1, 7],
    "flush_every_k_chunks": [0, 1, None],
    "deterministic": [True, False],
    "last_step": ["drop", "pad", None],
    "steps_per_pass": [1, None],
    "agree_ranks": [(0, 2), None],
    "agree_timeout_s": [0.1, 60],
    "world_size": [1, None],
    "global_rank": [0, None],
    "dp_degree": [1, None],
    "dp_group_id": [0, None],
    "mapping_strategy": ["contiguous", "interleaved"],
    "runner": ["inline", "threads", None],
    "parallelism": [1, 64, "auto", {"map": 2}, {}],
    "task_records": [1, 10_000, None],
    "prefetch_batches": [1, 100],
    "output": ["numpy", "torch"],
    "stall_warn_s": [0.1, 60, 1e9, None],
    "stall_timeout_s": [0.1, 600, None],
}


def test_every_option_has_its_allowed_values() -> None:
    for name, values in RIGHT.items():
        for value in values:
            options = Options().replace({name: value})
            assert value in [getattr(getattr(options, group), name, ()) for group in ("data", "topology", "execution")]


def test_options_add_up_and_the_last_one_wins() -> None:
    options = Options().replace({"parallelism": 2}).replace({"dp_degree": 3, "parallelism": 4}).replace({})
    assert (options.execution.parallelism, options.topology.dp_degree) == (4, 3)
    assert Options().execution.parallelism == "auto"


def test_options_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        Options().data.canonical_replicas = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Options().data = Options().data  # type: ignore[misc]
    assert Options() == Options()
    assert msgspec.structs.asdict(Options().data)["deterministic"] is True


def test_a_callers_dict_is_not_kept() -> None:
    wanted = {"dict": 2}
    line = pipeline(6).map(dict).options(parallelism=wanted)
    wanted["nowhere"] = 3
    assert ids(line) == list(range(6))


def test_parallelism_of_an_operator_that_is_not_there() -> None:
    line = pipeline(3).map(dict).options(parallelism={"dcit": 2})
    with pytest.raises(zp.errors.ConfigError, match=r"'dcit'.*'dict'"):
        iter(line)


@pytest.mark.parametrize(
    "change",
    [
        {"runner": "inline"},
        {"parallelism": 3},
        {"task_records": 2},
        {"prefetch_batches": 7},
        {"output": "torch"},
        {"mapping_strategy": "interleaved"},
        {"dp_degree": 1, "dp_group_id": 0},
    ],
)
def test_topology_and_execution_are_in_no_state(change: dict[str, Any]) -> None:
    if change.get("output") == "torch":
        pytest.importorskip("torch")
    line = pipeline(20).batch(2).options(canonical_replicas=2)
    states = []
    for other in (line, line.options(**change)):
        part = other.take(3)
        list(part)
        states.append(saved(part))
    assert states[0] == states[1]


@pytest.mark.parametrize(("change", "field"), [({"flush_every_k_chunks": 3}, "flush_every_k_chunks")])
def test_data_options_are_in_the_state(change: dict[str, Any], field: str) -> None:
    part = pipeline(20).shuffle(4).batch(2).take(3)
    list(part)
    state = saved(part)
    with pytest.raises(zp.errors.CheckpointError, match=field):
        part.options(**change).load_state_dict(state)
    part.options(**change).load_state_dict(state, allow=[field])
    with pytest.raises(zp.errors.CheckpointError, match="canonical_replicas=3"):
        part.options(canonical_replicas=3).load_state_dict(state)


def test_nondeterministic_gives_up_the_state_and_says_so() -> None:
    line = pipeline(20).batch(2).options(deterministic=False)
    assert sorted(ids(line)) == list(range(20))
    with pytest.raises(zp.errors.CheckpointError, match="deterministic"):
        line.state_dict()


def test_nondeterministic_with_several_ranks_in_a_group_is_an_error() -> None:
    line = pipeline(20).options(deterministic=False, world_size=4, global_rank=1, dp_degree=2, dp_group_id=0)
    line = line.options(canonical_replicas=2)
    with pytest.raises(zp.errors.ConfigError, match="deterministic"):
        iter(line)

"""Case A7: any chain of resumes is the uninterrupted stream; a state is a snapshot."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zephon as zp
from zephon.plan import limits

from .helpers import digests, ids, on, pipeline, resumed, saved, shards, stream

LEGS = [3, 0, 1, 5, 2, 0, 7]

SCRIPT = """
import itertools, json, sys
import zephon as zp
from tests.cases.helpers import ids, saved, stream
folder, count = sys.argv[1], int(sys.argv[2])
data = zp.Dataset.from_path("files", folder + "/data", index_dir=folder + "/index")
line = zp.Pipeline(zp.StaticMixture([data], seed=11, chunk_size=8)).batch(4)
line = line.options(runner="threads", parallelism=2, canonical_replicas=2)
text = sys.stdin.read()
if text:
    line.load_state_dict(json.loads(text))
batches = list(itertools.islice(stream(line, passes=2), count if count >= 0 else None))
json.dump([ids(batches), saved(line)], sys.stdout)
"""


def files_pipeline(data: zp.Dataset, epochs: int) -> zp.Pipeline:
    mixture = zp.StaticMixture([data], seed=11, chunk_size=8, epochs=epochs)
    return zp.Pipeline(mixture).batch(4).options(canonical_replicas=2)


def leg(folder: Path, state: str, count: int) -> tuple[list[int], str]:
    """(ids, state) of a new process that begins at `state` and takes `count` batches, all of them if negative."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(folder), str(count)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=state, capture_output=True, text=True, timeout=30, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found, after = json.loads(done.stdout)
    return found, json.dumps(after)


def test_a_chain_of_processes(tmp_path: Path) -> None:
    line = files_pipeline(shards(tmp_path, 5, 20), epochs=1)
    reference = ids(stream(on(line, 0), passes=2))
    assert sorted(reference) == sorted([*range(100), *range(100)])
    found: list[int] = []
    state = ""
    for count in [*LEGS, -1]:
        more, after = leg(tmp_path, state, count)
        assert after == state or count
        found, state = found + more, after
    assert found == reference


@pytest.mark.parametrize("workers", [0, 2])
def test_two_epochs_in_one_pass(tmp_path: Path, workers: int) -> None:
    line = on(files_pipeline(shards(tmp_path, 5, 20), epochs=2), workers)
    reference = ids(line.options())
    found: list[int] = []
    state = saved(line.options())
    for count in LEGS:
        here = resumed(line, state).take(count)
        found += ids(here)
        assert count or saved(here) == state
        state = saved(here)
    assert found + ids(resumed(line, state)) == reference


def add_one(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "plus": record["id"] + 1}


def odd(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 2)


def copies(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**record, "copy": copy} for copy in range(record["id"] % 4)]


def pairs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": record["id"], "group": records[0]["id"]} for record in records]


CHAINS: dict[str, Callable[[zp.Pipeline], zp.Pipeline]] = {
    "plain": lambda line: line,
    "filter": lambda line: line.filter(odd).map(add_one),
    "flat_map": lambda line: line.flat_map(copies),
    "map_batches": lambda line: line.map_batches(pairs, 5),
    "shuffle": lambda line: line.shuffle(10),
    "all": lambda line: line.flat_map(copies).shuffle(7).map_batches(pairs, 3).filter(odd).shuffle(4),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [2, 0])
def test_a_chain_in_one_process(
    chain: str, lanes: int, workers: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 6)
    line = CHAINS[chain](pipeline(100, shuffle="global")).batch(4).options(canonical_replicas=lanes)
    line = on(line, workers, flush_every_k_chunks=window)
    reference = digests(stream(line, passes=2))
    found: list[str] = []
    state = saved(line.options())
    for count in itertools.cycle([*LEGS, 4]):
        here = resumed(line, state)
        more = digests(itertools.islice(stream(here, passes=2), count))
        after = saved(here)
        if count == 0:
            assert json.dumps(after) == json.dumps(state)
        found, state = found + more, after
        if count and not more:
            break
    assert found == reference


def test_a_state_is_a_snapshot() -> None:
    line = on(pipeline(100).batch(4), 2)
    reference = ids(line.options())
    iterator = iter(line)
    found = ids([next(iterator) for _ in range(3)])
    s1 = line.state_dict()
    text = json.dumps(s1)
    found += ids([next(iterator), next(iterator)])
    s2 = line.state_dict()
    assert json.dumps(s1) == text
    assert json.dumps(s2) != text
    for part in (s2["lanes"]["0"], s2["lanes"], s2["fingerprint"], s2["reasons"], s2):
        part.clear()
    later = line.state_dict()
    assert later["lanes"]
    assert later["fingerprint"]
    assert found + ids(iterator) == reference
    assert ids(resumed(line, s1)) == reference[12:]
    assert ids(resumed(line, later)) == reference[20:]


def test_loading_neither_keeps_nor_changes_the_state_it_was_given() -> None:
    line = pipeline(100).batch(4)
    first_three = line.take(3)
    list(first_three)
    state = first_three.state_dict()
    text = json.dumps(state)
    new = line.options()
    new.load_state_dict(state)
    assert json.dumps(state) == text
    for part in (state["lanes"]["0"], state["lanes"], state["fingerprint"], state):
        part.clear()
    assert ids(new) == list(range(12, 100))
    assert json.dumps(state) == "{}"


def test_json_and_pickle_carry_the_same_state() -> None:
    line = pipeline(40).filter(odd).batch(4)
    list(line.take(2))
    for step in range(2):
        part = line.take(step)
        list(part)
        state = part.state_dict()
        assert json.loads(json.dumps(state)) == state == pickle.loads(pickle.dumps(state))


def test_the_same_state_may_be_loaded_again_and_again() -> None:
    line = pipeline(40, shuffle="global").batch(4)
    part = line.take(3)
    list(part)
    state = saved(part)
    expected = ids(line.options())[12:]
    for _ in range(3):
        line.load_state_dict(state)
        assert ids(itertools.islice(line, 2)) == expected[:8]
    line.load_state_dict(state)
    assert ids(line) == expected

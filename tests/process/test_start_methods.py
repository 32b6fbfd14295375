"""Cases A4, A17, A19, A20, A23 under fork, forkserver and spawn, as the user's own start method.

Each recipe runs in the script, and inside of a child process of that method. A part of all combinations runs always, so
that every recipe, every method and both places are met; `--long` runs all.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.helpers import Script, is_clean, kill, slow, wait_until

pytestmark = pytest.mark.law("L8")

METHODS = ("fork", "forkserver", "spawn")
PLACES = ("script", "child")
RUN = str(Path(__file__).with_name("run_recipe.py"))


def start(method: str, place: str, name: str, *arguments: Any) -> Script:
    return Script("", method, place, name, *arguments, argv=[RUN])


def slow_only(values: Any) -> Any:
    """The same combination, for `--long` alone."""
    return values if hasattr(values, "marks") else slow(*values)


def all_of(*kinds: Any, chosen: int = 1) -> list[Any]:
    """(method, place, one of the kinds): `chosen` combinations of each kind, another one each time; others are slow."""
    pairs = list(itertools.product(METHODS, PLACES))
    found = []
    for number, kind in enumerate(kinds):
        own = {(number * 5 + i) % len(pairs) for i in range(chosen)}
        found += [(*pair, kind) if at in own else slow(*pair, kind) for at, pair in enumerate(pairs)]
    return found


@pytest.mark.parametrize(("method", "place", "recipe"), all_of("a19_killed", "a19_initialiser"))
def test_a19_workers_die(method: str, place: str, recipe: str, tmp_path: Path) -> None:
    status, _, err = start(method, place, recipe, tmp_path).end(60)
    assert status == 0, err
    is_clean(err)


@pytest.mark.parametrize(("method", "place", "unit"), all_of(1 << 20))
def test_a04_large_rows(method: str, place: str, unit: int) -> None:
    status, _, err = start(method, place, "a04", unit).end(60)
    assert (status, err) == (0, "")


@pytest.mark.parametrize(("method", "place", "kind"), all_of(*"abcdefg"))
def test_a17_exceptions(method: str, place: str, kind: str) -> None:
    """At 0, 1 and 2 workers; the script ends with a status that is not 0, and nothing of it is left."""
    jobs = [start(method, place, "a17", kind, num_workers) for num_workers in (0, 1, 2)]
    for job in jobs:
        status, out, err = job.end(60)
        assert (status, out) == (1, "told\n"), err
        assert "row 7" in err
        assert "Exception ignored" not in err


@pytest.mark.parametrize(("method", "place", "batches"), all_of(2000))
def test_a20_kept_batches(method: str, place: str, batches: int) -> None:
    status, _, err = start(method, place, "a20", batches).end(100)
    assert (status, err) == (0, "")


def lines(path: Path) -> list[list[int]]:
    """The batches that a job logged."""
    log = path.with_suffix(".log")
    return [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize(("method", "place", "rounds"), [("fork", "script", 4), *map(slow_only, all_of(10))])
def test_a19_killed_and_started_again_at_once(method: str, place: str, rounds: int, tmp_path: Path) -> None:
    """The trainer is killed at its third batch, again and again; two jobs at once both equal the reference then."""
    wanted_by = [tmp_path / "one", tmp_path / "two"]
    jobs = [start(method, place, "a19_job", path) for path in wanted_by]
    for job in jobs:
        status, _, err = job.end(60)
        assert status == 0, err
    wanted = lines(wanted_by[0])
    assert sorted(i for batch in wanted for i in batch) == list(range(400))
    assert lines(wanted_by[1]) == wanted
    path, done = tmp_path / "job", 0
    for _ in range(rounds):
        path.with_suffix(".pid").unlink(missing_ok=True)
        job = start(method, place, "a19_job", path)
        wait_until(lambda done=done: len(lines(path)) >= done + 3, 30, "three batches")
        kill(int(path.with_suffix(".pid").read_text()))
        job.end(10)
        lanes = json.loads(path.with_suffix(".state").read_text())["lanes"]
        done = sum(lane["turns"] for lane in lanes.values())
        kept = lines(path)[:done]  # it may have logged a batch without having saved the state
        path.with_suffix(".log").write_text("".join(f"{json.dumps(batch)}\n" for batch in kept))
    status, _, err = start(method, place, "a19_job", path).end(60)
    assert status == 0, err
    assert lines(path) == wanted


@pytest.mark.parametrize(("method", "place", "inner"), all_of(*METHODS))
def test_a23_a_stage_with_pools(method: str, place: str, inner: str, tmp_path: Path) -> None:
    """Pools of each method inside of the workers."""
    status, _, err = start(method, place, "a23_stage", inner, tmp_path).end(60)
    assert status == 0, err


@pytest.mark.parametrize("method", ["fork", slow("forkserver"), slow("spawn")])
def test_a23_loaders_in_a_pool(method: str) -> None:
    status, _, err = start(method, "script", "a23_loader", method).end(60)
    assert (status, err) == (0, "")


@pytest.mark.parametrize("method", ["fork", slow("forkserver"), "spawn"])
def test_a23_the_outer_pool_is_terminated(method: str, tmp_path: Path) -> None:
    status, _, err = start(method, "script", "a23_outer", method, tmp_path).end(60)
    assert status == 0, err
    is_clean(err)

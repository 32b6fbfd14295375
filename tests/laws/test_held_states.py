"""What accumulators hold, in a state: when it is written down, what a restart refuses, and what it may never hide."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.laws.harness import plain
from zephon.errors import CheckpointError, DataError
from zephon.flow.feed import LaneFeed
from zephon.plan import limits
from zephon.record import Pointers, event_place
from zephon.testing.recipes import Pairs

pytestmark = pytest.mark.law("L4")


def source_of(*names: str, rows: int = 60, **settings: Any) -> zp.StaticMixture:
    datasets = [
        zp.Dataset.from_list(name, [{"id": 1000 * ord(name) + i, "input_ids": [i] * (1 + i % 5)} for i in range(rows)])
        for name in names
    ]
    return zp.StaticMixture(datasets, **{"seed": 1, "chunk_size": 8, "end": "repeat", **settings})


def line_of(source: zp.StaticMixture, **options: Any) -> zp.Pipeline:
    line = zp.Pipeline(source).shuffle(20).pack(16, "best_fit", homogeneous="dataset").batch(2)
    return line.options(**{"runner": "inline", "canonical_replicas": 2, "flush_every_k_chunks": 0, **options})


def state_after(line: zp.Pipeline, batches: int) -> dict[str, Any]:
    list(islice(line, batches))
    state = plain(line.state_dict())
    line.close()
    return state


def never(record: dict[str, Any]) -> bool:
    return False


class Swallow(zp.Machine):
    """Answers five records at a time, and lets none of them go on."""

    def init(self, lane: int) -> list[int]:
        return []

    def push(self, state: list[int], key: Any) -> list[Any]:
        state.append(key)
        if len(state) < 5:
            return []
        state.clear()
        return [zp.DROP] * 5

    def flush(self, state: list[int]) -> list[Any]:
        return [zp.DROP] * len(state)


@pytest.mark.parametrize("algorithm", ["wrap", "best_fit", "machine"])
@pytest.mark.parametrize("window", [0, 8])
def test_an_endless_pass_that_gives_nothing_is_an_error(algorithm: str, window: int) -> None:
    """Also where what is held comes and goes, so that it is seldom as much as before."""
    line = zp.Pipeline(source_of("a"))
    if algorithm == "machine":
        line = line.stateful_map(Swallow, key=lambda record: 1)
    else:
        line = line.pack(32, algorithm).filter(never)
    with pytest.raises(DataError, match="not one sample came out"):
        next(iter(line.batch(4).options(runner="inline", flush_every_k_chunks=window)))


class Chunks:
    """A source of chunks of odd sizes."""

    datasets = (None,)

    def chunks(self, lane: int, lanes: int, pass_index: int, index: int, count: int) -> list[Pointers]:
        return [self.chunk(lane, lanes, pass_index, index + i) for i in range(count)]

    def chunk(self, lane: int, lanes: int, pass_index: int, index: int) -> Pointers:
        size = (1, 30, 7, 64, 2)[index % 5] if index < 40 else 0
        return Pointers(np.zeros(size, np.int32), np.arange(size), np.zeros(size, np.int64))


@pytest.mark.parametrize("most", [1, 5, 100])
def test_states_are_so_many_pointers_apart_whatever_the_chunks_are(most: int) -> None:
    def saves(chunk: int, offset: int) -> Iterator[int]:
        feed = LaneFeed(Chunks(), 0, 1, 0, chunk, offset, 0, 20)  # type: ignore[arg-type]
        since = 0
        while not feed.ended:
            piece = feed.take(most)
            since += len(piece)
            if piece.mark is not None and piece.mark.kind == "save":
                assert since == 20
                since = 0
                yield piece.mark.event

    found = list(saves(0, 0))
    assert len(found) == 8 * (1 + 30 + 7 + 64 + 2) // 20
    for number, event in enumerate(found):
        assert list(saves(*event_place(event + 1))) == found[number + 1 :]


def test_damaged_or_missing_held_states_are_refused() -> None:
    line = line_of(source_of("a"))
    for damage in ("flip", "cut", "gone"):
        state = state_after(line_of(source_of("a")), 20)
        lane = state["lanes"]["0"]
        raw = bytearray(base64.b64decode(lane["held"][0]))
        raw[len(raw) // 2] ^= 1
        text = base64.b64encode(raw if damage == "flip" else raw[:-9]).decode()
        lane["held"] = [] if damage == "gone" else [text, *lane["held"][1:]]
        with pytest.raises(CheckpointError, match="damaged: lane 0"):
            line.load_state_dict(state)


def test_datasets_may_not_change_places_under_held_records() -> None:
    state = state_after(line_of(source_of("a", "b")), 20)
    allow = ["source.datasets", "source.weights", "datasets.c.rows", "datasets.c.format", "datasets.c.shards"]
    allow += ["datasets.c.hash"]
    weights = {"c": 0, "a": 1, "b": 1}
    with pytest.raises(CheckpointError, match="add datasets behind the others"):
        line_of(source_of("c", "a", "b", weights=weights)).load_state_dict(state, allow=allow)


def keep(least: int) -> Any:
    return lambda record: record["id"] % 10 >= least


def test_what_a_changed_operator_does_not_give_is_not_taken_from_later_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """188 of the first window's 200 were delivered, and the new filter lets a tenth of them pass."""
    monkeypatch.setattr(limits, "LEAST_SAVE_POINTERS", 1024)  # a restart reads the window again

    def line(least: int) -> zp.Pipeline:
        source = source_of("a", rows=600, shuffle="none", chunk_size=100, end="stop")
        made = zp.Pipeline(source).filter(keep(least), name="keep").shuffle(10).batch(4)
        return made.options(runner="inline", canonical_replicas=1, flush_every_k_chunks=2)

    state = state_after(line(0), 47)
    changed = line(9)
    changed.load_state_dict(state, allow=["keep.code"])
    found = [i for batch in changed for i in batch["id"].tolist()]
    assert sorted(found) == [97_000 + i for i in range(209, 600, 10)]


class Measured(Pairs):
    """Its lengths are numpy's."""

    measures = True

    def measure(self, record: dict[str, Any]) -> Any:
        return np.int64(len(record["input_ids"]))


def test_lengths_may_be_numpys() -> None:
    def line() -> zp.Pipeline:
        made = zp.Pipeline(source_of("a", end="stop")).apply(Measured()).batch(1)
        return made.options(runner="inline", canonical_replicas=1, flush_every_k_chunks=0)

    whole = [batch.digest() for batch in line()]
    for batches in range(1, len(whole), 3):
        rest = line()
        rest.load_state_dict(state_after(line(), batches))
        assert [batch.digest() for batch in rest] == whole[batches:]

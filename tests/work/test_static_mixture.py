"""StaticMixture as its users see it."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import tracemalloc
import warnings
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.work.calls import count_calls
from zephon.errors import ConfigError
from zephon.work import StaticMixture
from zephon.work.shuffle import SHUFFLE_MODES

from . import brute
from .brute import Rows, triples

LONGEST = 3000
Triple = tuple[int, int, int]


def read(source: StaticMixture, num_lanes: int = 1, pass_index: int = 0, limit: int = 10**6) -> list[list[Triple]]:
    """Each lane's stream, up to its end or `limit` pointers."""
    lanes: list[list[Triple]] = []
    for lane in range(num_lanes):
        stream: list[Triple] = []
        index = 0
        while len(stream) < limit and len(found := source.chunk(lane, num_lanes, pass_index, index)):
            stream += triples(found)
            index += 1
        lanes.append(stream)
    return lanes


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from(["epochs", "stop", "redistribute", "repeat"]),
    st.sampled_from(SHUFFLE_MODES),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 70),
)
def test_l10_a_pass_reads_its_schedule_once(
    parts: list[tuple[int, int]], end: Any, shuffle: Any, times: int, num_lanes: int, chunk_size: int
) -> None:
    """Law L10: exactly the schedule's pointers, each (dataset, epoch, row) once, whole epochs but for the last."""
    assume(any(weight for weight, _ in parts))
    weights, rows = zip(*((w, n) for w, n in parts if w), strict=True)
    more: dict[str, Any] = {"epochs": {"epochs": times}, "repeat": {"max_epochs": times}}.get(end, {})
    schedule = brute.first(brute.one_pass(weights, rows, end, **more), LONGEST)
    assume(len(schedule) < LONGEST)
    datasets = [Rows(f"d{i}", n, [n // 2, 0, n - n // 2]) for i, (_, n) in enumerate(parts)]
    source = StaticMixture(
        datasets, [w for w, _ in parts], seed=4, chunk_size=chunk_size, shuffle=shuffle, end=end, block_size=5, **more
    )
    seen = [t for stream in read(source, num_lanes, pass_index=2) for t in stream]
    assert len(seen) == len(set(seen)) == len(schedule) == source.length(2)
    drawn = [i for i, (w, _) in enumerate(parts) if w]
    assert Counter(d for d, _, _ in seen) == Counter(drawn[c] for c, _ in schedule)
    for d, total in Counter(d for d, _, _ in seen).items():
        n = parts[d][1]
        by_epoch = Counter(e for dataset, e, _ in seen if dataset == d)
        assert by_epoch == Counter(k // n for k in range(total))
        assert all(0 <= row < n for dataset, _, row in seen if dataset == d)
    one = read(source, 1, pass_index=2)[0]
    assert [(d, e) for d, e, _ in one] == [(drawn[c], k // rows[c]) for c, k in schedule]
    assert sorted(one) == sorted(seen)


@given(st.sampled_from(SHUFFLE_MODES), st.integers(0, 900), st.integers(1, 300), st.integers(1, 300))
def test_a_position_holds_the_same_pointer_in_any_chunk(shuffle: Any, start: int, count: int, cut: int) -> None:
    datasets = [Rows("a", 7), Rows("b", 130, [100, 0, 30]), Rows("c", 5000, [2500, 2500])]
    source = StaticMixture(datasets, [3, 5, 8], seed=2, shuffle=shuffle, end="repeat", block_size=16)
    whole = triples(source.pointers(1, start, count))
    first, then = min(cut, count), count - min(cut, count)
    assert triples(source.pointers(1, start, first)) + triples(source.pointers(1, start + first, then)) == whole


def test_pointers_stop_at_the_end_of_the_pass() -> None:
    source = StaticMixture([Rows("a", 10)])
    assert len(source.pointers(0, 8, 5)) == 2
    assert len(source.pointers(0, 10, 5)) == 0
    found = source.pointers(0, 0, 4)
    assert [a.dtype.name for a in (found.dataset, found.row, found.epoch)] == ["int32", "int64", "int64"]


def test_without_weights_one_epoch_reads_everything_once() -> None:
    source = StaticMixture([Rows("a", 30), Rows("none", 0), Rows("b", 70)])
    assert source.length(0) == 100
    assert sorted(read(source)[0]) == [(0, 0, r) for r in range(30)] + [(2, 0, r) for r in range(70)]
    assert source.weights == (3, 0, 7)


def test_passes_and_epochs_are_shuffled_apart() -> None:
    source = StaticMixture([Rows("a", 50)], epochs=2, seed=1)
    first, second = read(source)[0], read(source, pass_index=1)[0]
    orders = [[r for _, e, r in stream if e == epoch] for stream in (first, second) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("start", [10**15, 10**18])
@pytest.mark.parametrize("shuffle", SHUFFLE_MODES)
def test_far_positions_tile(start: int, shuffle: Any) -> None:
    datasets = [Rows("a", 10**10, [10**9] * 10), Rows("b", 10), Rows("c", 10**6)]
    source = StaticMixture(datasets, [0.7, 0.2, 0.1], shuffle=shuffle, end="repeat")
    whole = triples(source.pointers(0, start, 1000))
    assert whole == [t for s in range(start, start + 1000, 250) for t in triples(source.pointers(0, s, 250))]
    assert len(set(whole)) == 1000
    assert all(0 <= row < datasets[d].num_rows for d, _, row in whole)


@pytest.mark.parametrize("shuffle", SHUFFLE_MODES)
def test_ten_billion_rows_cost_no_memory_and_no_more_work_far_out(shuffle: Any) -> None:
    datasets = [Rows("a", 10**10, [10**8] * 100), Rows("b", 3 * 10**9)]
    tracemalloc.start()
    source = StaticMixture(datasets, [2, 1], shuffle=shuffle, end="repeat")
    for index in (0, 10**6, 10**13):
        source.chunk(3, 8, 0, index)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    near, far = (count_calls(lambda at=at: source.chunk(3, 8, 0, at)) for at in (20, 10**13))
    assert far <= 1.5 * near  # a chunk may meet one more epoch, block or walk than another


def test_threads_share_a_source() -> None:
    datasets = [Rows("a", 600), Rows("b", 50), Rows("c", 9000)]
    source = StaticMixture(datasets, [1, 2, 3], end="repeat", chunk_size=64)
    expected = [triples(source.chunk(lane, 4, 0, i)) for lane in range(4) for i in range(60)]
    shared = StaticMixture(datasets, [1, 2, 3], end="repeat", chunk_size=64)
    barrier = threading.Barrier(4)
    found: dict[int, list[Any]] = {}

    def work(lane: int) -> None:
        barrier.wait(10)
        found[lane] = [triples(shared.chunk(lane, 4, 0, i)) for i in range(60)]

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [chunk for lane in range(4) for chunk in found[lane]] == expected


def test_a_seed_from_a_state_replaces_the_first() -> None:
    datasets = [Rows("a", 700), Rows("b", 5000)]
    source = StaticMixture(datasets, [1, 1], seed=1, end="repeat")
    before = triples(source.chunk(0, 1, 0, 0))
    other = source.with_seed(2)
    fresh = StaticMixture(datasets, [1, 1], seed=2, end="repeat")
    assert triples(other.chunk(0, 1, 0, 0)) == triples(fresh.chunk(0, 1, 0, 0)) != before
    assert triples(source.chunk(0, 1, 0, 0)) == before
    again = pickle.loads(pickle.dumps(other))
    assert triples(again.chunk(0, 1, 0, 3)) == triples(fresh.chunk(0, 1, 0, 3))


def test_the_stream_never_changes() -> None:
    """States of old runs name positions in it."""
    datasets = [Rows("web", 10**10, [10**9] * 10), Rows("toy", 100), Rows("wiki", 6000, [1000] * 6)]
    digest = hashlib.sha256()
    for shuffle in ("none", "shards", "blocks", "global"):
        source = StaticMixture(datasets, {"web": 0.7, "toy": 0.2, "wiki": 0.1}, seed=17, shuffle=shuffle, end="repeat")
        for index in (0, 5, 10**12):
            found = source.chunk(1, 4, 0, index)
            for array in (found.dataset, found.row, found.epoch):
                digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "092eae38f5478ca2"


def test_fingerprints_compare_by_what_shapes_the_stream() -> None:
    datasets = [Rows("a", 10), Rows("b", 20), Rows("c", 30)]
    one = StaticMixture(datasets, [6, 3, 1]).fingerprint()
    assert json.loads(json.dumps(one)) == one
    assert one == {
        "type": "StaticMixture",
        "chunk_size": 256,
        "weights": {"a": 6, "b": 3, "c": 1},
        "shuffle": "global",
        "end": "epochs",
        "epochs": 1,
    }
    assert StaticMixture(datasets, {"c": ".1", "a": 0.6, "b": Fraction(3, 10)}, seed=9).fingerprint() == one
    others: list[dict[str, Any]] = [
        {"weights": [6, 3, 2]},
        {"chunk_size": 64},
        {"shuffle": "none"},
        {"shuffle": "blocks"},
        {"shuffle": "blocks", "block_size": 10},
        {"shuffle": "blocks", "block_span": 10},
        {"epochs": 2},
        {"end": "stop"},
        {"end": "repeat"},
        {"end": "repeat", "max_epochs": 2},
    ]
    prints = [json.dumps(StaticMixture(datasets, **{"weights": [6, 3, 1], **other}).fingerprint()) for other in others]
    assert len({json.dumps(one), *prints}) == len(others) + 1
    assert StaticMixture(datasets, [6, 3, 1], block_size=7).fingerprint() == one


def test_weights_in_tokens_are_divided_by_the_mean_length() -> None:
    datasets = [Rows("long", 1000), Rows("short", 1000), Rows("off", 5)]
    source = StaticMixture(
        datasets, [1, 1, 0], weights_in="tokens", mean_tokens={"long": 1500, "short": 0.5}, end="repeat"
    )
    assert source.weights == (1, 3000, 0)
    assert source.fingerprint() == StaticMixture(datasets, [1, 3000, 0], end="repeat").fingerprint()
    listed = StaticMixture(datasets, [1, 1, 0], weights_in="tokens", mean_tokens=[1500, "0.5", 0], end="repeat")
    assert listed.weights == source.weights


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"weights": [1]}, "1 entries for 2 datasets"),
        ({"weights": {"a": 1}}, "dataset 'b' has none"),
        ({"weights": {"a": 1, "b": 1, "x": 1}}, "no dataset 'x'"),
        ({"weights": [0, 0]}, "all weights are 0"),
        ({"weights": [-1, 2]}, "weight of dataset 'a' is -1"),
        ({"weights": [1, float("nan")]}, "weight of dataset 'b' is nan"),
        ({"weights": [1, float("inf")]}, "weight of dataset 'b' is inf"),
        ({"weights": [True, 1]}, "weight of dataset 'a' is True"),
        ({"shuffle": "rows"}, "shuffle='rows': must be one of 'none'"),
        ({"end": "never"}, "end='never': must be one of 'epochs'"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"epochs": 2, "end": "stop"}, "epochs=2 means nothing with end='stop'"),
        ({"max_epochs": 2}, "max_epochs=2 means nothing with end='epochs'"),
        ({"max_epochs": 0, "end": "repeat"}, "max_epochs=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_span": 0}, "block_span=0"),
        ({"weights_in": "bytes"}, "weights_in='bytes'"),
        ({"weights_in": "tokens", "mean_tokens": [1, 1]}, "needs weights"),
        ({"weights": [1, 1], "mean_tokens": [1, 1]}, "mean_tokens means nothing"),
        ({"weights": [1, 1], "weights_in": "tokens", "mean_tokens": {"a": 1}}, "dataset 'b' has none"),
        ({"weights": [1, 1], "weights_in": "tokens", "mean_tokens": [1, 0]}, "mean_tokens of dataset 'b' is 0"),
        ({"weights": [1, 1], "weights_in": "tokens", "mean_tokens": [-1, 1]}, "mean_tokens of dataset 'a' is -1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        StaticMixture([Rows("a", 40), Rows("b", 40)], **arguments)
    assert isinstance(caught.value, ConfigError)


def test_an_empty_dataset_may_stand_by_but_not_be_drawn() -> None:
    empty, full = Rows("empty", 0, []), Rows("full", 40)
    with pytest.raises(ConfigError, match="dataset 'empty' has weight 1 but no rows"):
        StaticMixture([empty, full], [1, 1])
    with pytest.raises(ConfigError, match="no dataset has a row"):
        StaticMixture([empty])
    for shuffle in SHUFFLE_MODES:
        source = StaticMixture([empty, full], [0, 1], shuffle=shuffle)
        assert sorted(read(source)[0]) == [(1, 0, row) for row in range(40)]


def test_one_dataset_needs_no_list() -> None:
    assert StaticMixture(Rows("a", 5)).length(0) == 5
    with pytest.raises(ConfigError, match="give one dataset or a list"):
        StaticMixture(iter([Rows("a", 5)]))  # type: ignore[arg-type]


def test_an_all_but_endless_pass_is_warned_of() -> None:
    datasets = [Rows("rare", 10**6), Rows("web", 10**6)]
    with pytest.warns(UserWarning, match=r"a pass is 9,\d\d\d,\d\d\d,\d\d\d samples.*'rare'") as caught:
        source = StaticMixture(datasets, ["0.0001", "0.9999"])
    assert caught[0].filename == __file__
    assert f"{source.length(0):,}" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for end in ("stop", "redistribute", "repeat"):
            StaticMixture(datasets, ["0.0001", "0.9999"], end=end)
        StaticMixture(datasets, [1, 99])  # 50 times the rows: long, but what was asked for

"""Weights in tokens: measured once with the pipeline's own operators, kept in the state, equal on every rank."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

import zephon as zp
from zephon.means import MEASURED_ROWS, measure_means
from zephon.record import Record

from .helpers import digests, on, resumed, saved

LENGTHS = {"long": 90, "short": 10, "odd": 33}


def dataset(name: str, rows: int, length: int, **settings: Any) -> zp.Dataset:
    """Texts of `length` words, give or take a third."""
    records = [{"id": i, "text": "w " * (length + (i * 7) % (length // 3 + 1) - length // 6)} for i in range(rows)]
    return zp.Dataset.from_list(name, records, **settings)


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def even(record: Record) -> bool:
    return record["id"] % 2 == 0


def source(weights: Any = (1, 1, 2), **settings: Any) -> zp.StaticMixture:
    found = [dataset(name, 3000, length) for name, length in LENGTHS.items()]
    return zp.StaticMixture(found, list(weights), **{"weights_in": "tokens", "seed": 3, "end": "repeat", **settings})


def line_of(source: zp.StaticMixture, **options: Any) -> zp.Pipeline:
    line = zp.Pipeline(source).tokenize(words).shuffle(20).pack(64).batch(4)
    return line.options(**{"canonical_replicas": 2, "dp_degree": 1, "runner": "inline", **options})


def tokens_by_dataset(batches: list[zp.Batch], lengths: dict[tuple[str, int], int]) -> Counter[str]:
    """Tokens of whole documents delivered, each once."""
    documents = {(d, row, n) for n, batch in enumerate(batches) for each in batch.origins for d, _, row, _ in each}
    found: Counter[str] = Counter()
    for name, row in {(d, row) for d, row, _ in documents}:
        found[name] += lengths[name, row]
    return found


def test_shares_of_tokens_hold() -> None:
    line = line_of(source())
    lengths = {
        (d.name, i): len(words(r["text"]))
        for d in line._session.resolved.source.datasets
        for i, r in enumerate(d.read(range(3000)))  # type: ignore[attr-defined]
    }
    found = tokens_by_dataset(list(line.take(300)), lengths)
    total = sum(found.values())
    for name, share in (("long", 0.25), ("short", 0.25), ("odd", 0.5)):
        assert abs(found[name] / total - share) < 0.02, found


def test_what_a_filter_drops_counts_as_a_row_without_tokens() -> None:
    half = zp.Pipeline(source()).filter(even, name="even").tokenize(words).pack(64)
    nodes, plain = half._definition.nodes, zp.Pipeline(source()).tokenize(words).pack(64)._definition.nodes
    with_filter = measure_means(source(), nodes, ["long"])["long"]
    without = measure_means(source(), plain, ["long"])["long"]
    assert abs(float(with_filter / without) - 0.5) < 0.05
    assert without.denominator in {d for d in range(1, MEASURED_ROWS + 1) if MEASURED_ROWS % d == 0}


def test_every_rank_and_seed_measures_on_its_own_and_alike() -> None:
    one, other = (line_of(source(), dp_degree=2, dp_group_id=group)._session.resolved for group in (0, 1))
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint["source"]["mean_tokens"] == one.source.fingerprint()["mean_tokens"]
    assert line_of(source(seed=4))._session.resolved.fingerprint != one.fingerprint


def test_given_means_make_the_same_stream() -> None:
    line = line_of(source())
    means = [Fraction(mean) for mean in line._session.resolved.fingerprint["source"]["mean_tokens"]]
    given = line_of(source(mean_tokens=means))
    assert digests(given.take(20)) == digests(line.take(20))


def test_a_restore_takes_the_means_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_of(source())
    reference = digests(line.take(30))
    part = line_of(source()).take(11)
    assert digests(part) == reference[:11]
    state = saved(part)
    calls: list[Any] = []
    monkeypatch.setattr("zephon.means.measure_means", lambda *args: calls.append(args) or {})
    fresh = zp.StaticMixture(
        [dataset(name, 3000, length) for name, length in LENGTHS.items()],
        [1, 1, 2],
        weights_in="tokens",
        seed=99,  # the seed is the state's, and so are the means
        end="repeat",
    )
    assert digests(resumed(line_of(fresh), state).take(19)) == reference[11:]
    assert calls == []


@pytest.mark.parametrize("workers", [0, 2])
def test_any_runner_and_schedule(workers: int) -> None:
    schedule = zp.MixtureSchedule({0: [1, 0, 1], 400: [1, 1, 1]}, change="linear", ramp_steps=4)
    line = line_of(source(weights=[1, 1, 1]))
    line = on(
        line_of(zp.StaticMixture(line._definition.source.datasets, schedule, weights_in="tokens", end="repeat")),
        workers,
    )
    fields = line._session.resolved.fingerprint["source"]
    assert fields["weights"]["0"] == {"long": 1, "short": 0, "odd": 1}
    assert len(fields["mean_tokens"]) == 3
    assert len(list(line.take(10))) == 10


def test_it_is_measured_once_for_all_pipelines_of_a_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(*args: Any) -> dict[str, Fraction]:
        calls.append(args)
        return measure_means(*args)

    monkeypatch.setattr("zephon.means.measure_means", counted)
    line = line_of(source())
    assert len(list(line.take(3))) == 3
    line.options(prefetch_batches=3).explain()
    assert len(list(line.take(2))) == 2
    assert len(calls) == 1
    zp.Pipeline(line._definition.source).filter(even).tokenize(words).pack(9).explain()
    assert len(calls) == 2  # other operators


def test_five_hundred_datasets_keep_their_means_in_the_state() -> None:
    many = [dataset(f"a dataset with a name, {i}", 3, 9 + i % 5) for i in range(400)]
    line = line_of(zp.StaticMixture(many, [1] * 400, weights_in="tokens", end="repeat"))
    list(line.take(2))
    state = saved(line.take(2))
    assert len(state["fingerprint"]["source"]["mean_tokens"]) == 400


def test_explain_shows_what_was_measured() -> None:
    text = line_of(source()).explain()
    assert "mean tokens of a row, measured: 'long' 8" in text
    assert "of the samples" in text


def test_where_it_cannot_be_measured() -> None:
    with pytest.raises(zp.errors.ConfigError, match="nothing in the pipeline counts tokens"):
        list(zp.Pipeline(source()).take(1))
    with pytest.raises(zp.errors.ConfigError, match="'map_batches' regroups records before"):
        list(zp.Pipeline(source()).map_batches(list, 2).tokenize(words).pack(8).take(1))
    rows = [dataset("a", 9, 9), zp.Dataset.from_list("empty", [{"id": 1, "text": ""}])]
    with pytest.raises(zp.errors.ConfigError, match="rows of dataset 'empty' that were measured gave a token"):
        list(line_of(zp.StaticMixture(rows, [1, 1], weights_in="tokens")).take(1))
    with pytest.raises(zp.errors.ConfigError, match="give mean_tokens="):
        source().chunk(0, 1, 0, 0)
    with pytest.raises(zp.errors.ConfigError, match="at most 512 datasets"):
        zp.StaticMixture([dataset(f"d{i}", 2, 9) for i in range(513)], [1] * 513, weights_in="tokens")


def test_a_refusal_shows_the_weights_that_were_given_and_where_means_are_from() -> None:
    """Compared are weights of samples, which nobody wrote."""
    measured = line_of(source())
    state = saved(measured)
    given = line_of(source(mean_tokens={"short": 4, "long": "40.5", "odd": 9}))
    with pytest.raises(zp.errors.CheckpointError) as caught:
        given.load_state_dict(state)
    lines = str(caught.value).splitlines()
    weights, means = lines[1], lines[2]
    assert re.search(r"the state has \{.*?\} in samples, \{'long': 1, 'short': 1, 'odd': 2\} in tokens, this", weights)
    assert weights.endswith(
        "this pipeline {'long': 8, 'short': 81, 'odd': 72} in samples, {'long': 1, 'short': 1, 'odd': 2} in tokens"
    )
    assert re.search(
        r"mean_tokens: the state has \{'long': .*\}, measured, this pipeline \{'long': 40.5, .*\}, given$", means
    )
    with pytest.raises(zp.errors.CheckpointError) as caught:
        measured.load_state_dict(saved(given))
    assert "source.mean_tokens: the state has (absent), this pipeline {" in str(caught.value)
    assert ", measured" in str(caught.value)

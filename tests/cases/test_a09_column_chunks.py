"""Case A9: a resume inside a row group goes on at the exact next item, behind any operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zephon as zp

from .helpers import ids, on, resumed, saved

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 5000
STOPS = [1, 137, 999, 1000, 1001]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("columns")
    table = pa.table({"id": range(ROWS)})
    paths = {}
    for name, group in (("c", 1000), ("c7", 7), ("whole", ROWS)):
        paths[name] = folder / f"{name}.parquet"
        pq.write_table(table, paths[name], row_group_size=group)
    return paths


def same(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"]}


def third(record: dict[str, Any]) -> bool:
    return bool(record["id"] % 3 == 0)


def copies(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": record["id"], "copy": copy} for copy in range(record["id"] % 4)]


def copies_late(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from copies(record)


def batched(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": record["id"], "of": len(records)} for record in records]


def uneven(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of 64 give 0 to 64 records."""
    return records[: records[0]["id"] % 65]


Chain = tuple[Callable[[zp.Pipeline], zp.Pipeline], list[int]]

CHAINS: dict[str, Chain] = {
    "none": (lambda line: line, list(range(ROWS))),
    "map": (lambda line: line.map(same), list(range(ROWS))),
    "filter": (lambda line: line.filter(third), list(range(0, ROWS, 3))),
    "flat_map": (lambda line: line.flat_map(copies), [i for i in range(ROWS) for _ in range(i % 4)]),
    "generator": (lambda line: line.flat_map(copies_late), [i for i in range(ROWS) for _ in range(i % 4)]),
    "map_batches": (lambda line: line.map_batches(batched, 64), list(range(ROWS))),
    "uneven": (
        lambda line: line.map_batches(uneven, 64),
        [i for at in range(0, ROWS, 64) for i in range(at, min(at + at % 65, at + 64, ROWS))],
    ),
    "two stages": (
        lambda line: line.filter(third).map_batches(batched, 64).flat_map(copies).map(same),
        [i for i in range(0, ROWS, 3) for _ in range(i % 4)],
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(("file", "workers"), [("c", 0), ("c7", 0), ("whole", 0), ("c7", 2)])
def test_the_next_items_are_the_next_items(files: dict[str, Path], file: str, chain: str, workers: int) -> None:
    build, expected = CHAINS[chain]
    line = on(build(line_over(files[file])), workers)
    here = line.options()
    iterator = iter(here)
    taken = 0
    for stop in STOPS:
        assert ids(itertools.islice(iterator, stop - taken)) == expected[taken:stop]
        taken = stop
        assert ids(itertools.islice(resumed(line, saved(here)), 10)) == expected[stop : stop + 10]


def line_over(path: Path) -> zp.Pipeline:
    mixture = zp.StaticMixture([zp.Dataset.from_path("columns", path)], shuffle="none")
    return zp.Pipeline(mixture).options(canonical_replicas=1)


def test_between_two_copies_of_one_row(files: dict[str, Path]) -> None:
    """Every cut of the first sixty items, so also every one between siblings; the copies say which they are."""
    line = on(line_over(files["c7"]).flat_map(copies), 0)
    reference = [(int(b["id"][0]), int(b["copy"][0])) for b in itertools.islice(line, 80)]
    here = line.options()
    iterator = iter(here)
    for cut in range(1, 61):
        next(iterator)
        rest = itertools.islice(resumed(line, saved(here)), 20)
        assert [(int(b["id"][0]), int(b["copy"][0])) for b in rest] == reference[cut : cut + 20]


@pytest.mark.parametrize("shuffle", ["none", "shards", "blocks", "global"])
def test_every_shuffle(files: dict[str, Path], shuffle: Any) -> None:
    """Resuming reads other row groups than the first run did, so nothing may hang on what was read before."""
    mixture = zp.StaticMixture([zp.Dataset.from_path("columns", files["c"])], shuffle=shuffle, block_size=100)
    line = on(zp.Pipeline(mixture).filter(third).batch(7).options(canonical_replicas=2), 2)
    reference = ids(itertools.islice(line, 60))
    for count in (1, 20, 39):
        part = line.take(count)
        list(part)
        assert ids(resumed(line, saved(part)).take(60 - count)) == reference[7 * count :]


@pytest.mark.parametrize("flush", [1, 3, 8])
def test_groups_end_at_the_flush_and_not_at_the_row_group(files: dict[str, Path], flush: int) -> None:
    """A window is `flush` chunks of 256; the group in front of a flush is short, and so it is after a resume."""
    line = on(line_over(files["c"]).map_batches(batched, 100), 0, flush_every_k_chunks=flush)
    window = flush * 256
    expected = []
    for at in range(0, ROWS, window):
        size = min(window, ROWS - at)
        expected += [min(100, size - start // 100 * 100) for start in range(size)]
    part = line.take(1000)
    assert ids(part, "of") == expected[:1000]
    assert ids(resumed(line, saved(part)).take(1000), "of") == expected[1000:2000]

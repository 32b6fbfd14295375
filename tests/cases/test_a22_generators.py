"""Case A22: what can be read only once is refused at construction, with the way out; a list begins again each pass."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zephon as zp

from .helpers import ids, on, pipeline, rows, stream, write_jsonl


def generate() -> Iterator[dict[str, Any]]:
    yield from rows(8)


async def generate_async() -> AsyncIterator[dict[str, Any]]:
    for record in rows(8):
        yield record


class OneShot:
    """An iterator that has a length too."""

    def __iter__(self) -> OneShot:
        return self

    def __next__(self) -> dict[str, Any]:
        raise StopIteration

    def __len__(self) -> int:
        return 8


ONE_SHOT: dict[str, Callable[[], Any]] = {
    "generator": generate,
    "generator function": lambda: generate,
    "generator expression": lambda: (record for record in rows(8)),
    "async generator": generate_async,
    "async generator function": lambda: generate_async,
    "cycle": lambda: itertools.cycle(rows(8)),
    "list iterator": lambda: iter(rows(8)),
    "map": lambda: map(dict, rows(8)),
    "zip": lambda: zip(rows(8), rows(8), strict=True),
    "reversed": lambda: reversed(rows(8)),
    "islice": lambda: itertools.islice(generate(), 4),
    "with a length": OneShot,
    "dict view": lambda: dict(enumerate(rows(8))).values(),
    "one record": lambda: {"id": 0},
    "set": lambda: {1, 2},
    "text": lambda: "a.jsonl",
    "function": lambda: rows,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_refused_at_construction_with_a_remedy(kind: str) -> None:
    with pytest.raises(zp.errors.ConfigError) as caught:
        zp.Dataset.from_list("shop", ONE_SHOT[kind]())
    assert isinstance(caught.value, ValueError)
    assert "shop" in str(caught.value)
    assert "list" in str(caught.value)


def test_a_generator_is_not_consumed_by_the_refusal() -> None:
    records = generate()
    with pytest.raises(zp.errors.ConfigError):
        zp.Dataset.from_list("shop", records)
    assert len(list(records)) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_remedy_names_works_for_every_pass(workers: int, tmp_path: Path) -> None:
    written = zp.Dataset.from_path("toy", write_jsonl(tmp_path / "a.jsonl", generate()), index_dir=tmp_path / "index")
    for records in (list(generate()), tuple(generate()), written):
        line = on(pipeline(records, shuffle="global").batch(3), workers)
        found = ids(stream(line, passes=3))
        assert [sorted(found[at : at + 8]) for at in (0, 8, 16)] == [list(range(8))] * 3


def test_a_list_that_is_changed_later_is_the_list_that_it_was() -> None:
    records = rows(4)
    line = pipeline(records)
    records[0]["id"] = 99
    records.append({"id": 100})
    assert ids(line) == [0, 1, 2, 3]
    for batch in stream(line, passes=2):
        batch["id"][...] = -1
    assert ids(pipeline(rows(4))) == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [generate(), rows(3), [{"id": 1}], "x", None])
def test_only_sources_make_a_pipeline(bad: Any) -> None:
    with pytest.raises(zp.errors.ConfigError, match="StaticMixture"):
        zp.Pipeline(bad)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_an_operator_returns_is_read_once_and_whole(workers: int) -> None:
    def cut(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for copy in range(record["id"] % 3):
            yield {**record, "copy": copy}

    line = on(pipeline(9).flat_map(cut), workers)
    expected = [i for i in range(9) for _ in range(i % 3)]
    assert ids(stream(line, passes=2)) == expected * 2

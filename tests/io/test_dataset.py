"""Exclusions, fingerprints, names and places of a dataset."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.errors import ConfigError
from zephon.io import Dataset, ShardError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("a", 3), ("b", 0), ("c", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"id": "{name}{i}"}}\n' for i in range(rows)))
    return tmp_path


def test_excluded_rows_by_name_and_by_index(folder: Path) -> None:
    made = Dataset.from_path(
        "web", folder, exclude=[("c.jsonl", 3), (0, 1), ("a.jsonl", np.int64(1)), (np.int32(2), 0)]
    )
    assert made.exclude == (("a.jsonl", 1), ("c.jsonl", 0), ("c.jsonl", 3))
    assert made.excluded_rows.tolist() == [1, 3, 6]
    assert made.is_excluded([6, 5, 1, 1, 0]).tolist() == [True, False, True, True, False]
    assert made.is_excluded(np.array([[3], [4]])).tolist() == [[True], [False]]
    assert made.num_rows == 7
    assert made.read([6, 0]) == [{"id": "c3"}, {"id": "a0"}]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (("d.jsonl", 0), r"exclude names shard 'd\.jsonl'; its shards are 'a\.jsonl', 'b\.jsonl', 'c\.jsonl'"),
        ((3, 0), "exclude names shard 3"),
        ((-1, 0), "exclude names shard -1"),
        (("a.jsonl", 3), r"exclude names row 3 of shard 'a\.jsonl', which has 3 rows"),
        (("b.jsonl", 0), r"exclude names row 0 of shard 'b\.jsonl', which has 0 rows"),
        (("a.jsonl", -1), r"exclude names row -1 of shard 'a\.jsonl'"),
        (
            ("a.jsonl", "1"),
            r"exclude holds \('a\.jsonl', '1'\); an entry is \(shard name or index, row in that shard\)",
        ),
        (("a.jsonl", True), "an entry is"),
        (("a.jsonl", 1.0), "an entry is"),
        ((None, 1), "an entry is"),
        (7, "exclude holds 7"),
    ],
)
def test_exclusions_that_name_no_row(folder: Path, entry: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Dataset.from_path("web", folder, exclude=[entry])
    assert "dataset 'web'" in str(caught.value)


@pytest.mark.parametrize("exclude", [None, 5])
def test_what_is_no_list_of_exclusions(exclude: Any) -> None:
    with pytest.raises(ConfigError, match=f"dataset 'toy': exclude is {exclude}; it is an iterable of"):
        Dataset.from_list("toy", [{"id": 1}], exclude=exclude)


@given(st.sets(st.integers(0, 19)), st.lists(st.integers(0, 19), max_size=30))
def test_is_excluded_is_membership(excluded: set[int], rows: list[int]) -> None:
    made = Dataset.from_list("toy", [{"id": i} for i in range(20)], exclude=[("list", row) for row in excluded])
    assert made.is_excluded(rows).tolist() == [row in excluded for row in rows]
    assert made.exclude == tuple(("list", row) for row in sorted(excluded))


def test_fingerprint_holds_what_changes_the_rows(folder: Path) -> None:
    plain = Dataset.from_path("web", folder).fingerprint()
    assert set(plain) == {"format", "rows", "shards", "hash"}
    assert (plain["format"], plain["rows"], plain["shards"]) == ("jsonl", 7, 3)
    assert Dataset.from_path("other", folder).fingerprint() == plain
    settings = Dataset.from_path("web", folder, exclude=[("c.jsonl", 1), (0, 0), (2, 1)], on_error="skip").fingerprint()
    assert settings == {**plain, "exclude": [["a.jsonl", 0], ["c.jsonl", 1]], "on_error": "skip"}
    assert json.loads(json.dumps(settings)) == settings


def test_fingerprint_tells_rows_that_moved_between_shards(folder: Path) -> None:
    before = Dataset.from_path("web", folder).fingerprint()
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    (folder / "a.jsonl").touch()
    after = Dataset.from_path("web", folder).fingerprint()
    assert before["hash"] != after["hash"]
    assert before["rows"] == after["rows"]


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_needed(folder: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="name is a non-empty string"):
        Dataset.from_path(name, folder)


def test_on_error_is_one_of_two(folder: Path) -> None:
    assert Dataset.from_path("web", folder).on_error == "raise"
    with pytest.raises(ConfigError, match="on_error='ignore'; it is 'raise' or 'skip'"):
        Dataset.from_path("web", folder, on_error="ignore")  # type: ignore[arg-type]


def test_it_cannot_be_changed_by_its_arrays(folder: Path) -> None:
    made = Dataset.from_path("web", folder, exclude=[(0, 0)])
    for array in (made.shard_rows, made.excluded_rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_repr_says_what_it_is(folder: Path) -> None:
    assert repr(Dataset.from_path("web", folder)) == "Dataset('web', jsonl, 7 rows in 3 shards)"


def test_import_is_light() -> None:
    script = "import sys, zephon.io; print([name for name in ('pyarrow', 'torch') if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"


class Starved:
    """A shard of ten rows, no three of which fit into memory together, and row 5 not even alone."""

    name, rows, size_bytes, block_rows = "a.bin", 10, 100, None

    def read(self, rows: Any) -> list[Any]:
        if len(rows) > 2 or 5 in rows:
            raise MemoryError
        return [{"id": int(row)} for row in rows]


def test_a_row_for_which_there_is_no_memory_is_named() -> None:
    """The others are read one by one. It is never skipped: on another machine there may be memory."""
    made = Dataset("big", [Starved()], "bin", on_error="skip")
    found = made.read([9, 3, 5, 4])
    assert [found[0], found[1], found[3]] == [{"id": 9}, {"id": 3}, {"id": 4}]
    assert type(found[2]) is ShardError
    assert str(found[2]).startswith("dataset 'big', shard a.bin, row 5: no memory is left to read it; ")
    assert "exclude=[('a.bin', 5)]" in str(found[2])
    assert isinstance(found[2].__cause__, MemoryError)

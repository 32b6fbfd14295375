"""The contract of test_formats for every format there is; and a format of a user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from format_contract import FormatContract
from numpy.typing import NDArray

from zephon.errors import ConfigError, DataError
from zephon.io import Dataset, Shard, ShardError, Unreadable


class TestJsonl(FormatContract):
    def dataset(self, folder: Path, shards: list[list[dict[str, Any]]]) -> Dataset:
        for i, shard in enumerate(shards):
            (folder / f"{i}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in shard))
        return Dataset.from_path("data", folder)


class TestParquet(FormatContract):
    def dataset(self, folder: Path, shards: list[list[dict[str, Any]]]) -> Dataset:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("score", pa.float64())])
        for i, shard in enumerate(shards):
            parquet.write_table(pa.Table.from_pylist(shard, schema), folder / f"{i}.parquet", row_group_size=7)
        return Dataset.from_path("data", folder)


class TestList(FormatContract):
    def dataset(self, folder: Path, shards: list[list[dict[str, Any]]]) -> Dataset:
        return Dataset.from_list("data", [record for shard in shards for record in shard])


class NumbersShard(msgspec.Struct, frozen=True):
    """A shard of a user's own format: a file that holds one number, how many rows it stands for."""

    name: str
    rows: int
    size_bytes: int
    block_rows: int | None = None

    def read(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | Unreadable]:
        if self.name.startswith("broken"):
            raise RuntimeError("out of numbers")
        return [Unreadable("thirteen", line=14) if row == 13 else {"number": row} for row in rows.tolist()]


class NumbersFormat:
    name = "numbers"
    suffixes = (".num",)
    other_suffixes = ()

    def open(self, path: str, name: str, index_dir: str | None) -> Shard:
        text = Path(path).read_text()
        if not text.isdecimal():
            raise Unreadable("not a number")
        return NumbersShard(name, int(text), len(text))


def test_a_format_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "a.num").write_text("20")
    (tmp_path / "broken.num").write_text("2")
    made = Dataset.from_path("counted", tmp_path, fmt=NumbersFormat())
    assert made.fingerprint()["format"] == "numbers"
    twelve, thirteen, broken = made.read([12, 13, 21])
    assert twelve == {"number": 12}
    assert type(thirteen) is DataError
    assert str(thirteen) == (
        "dataset 'counted', shard a.num, line 14 (row 13): thirteen; mend the line, list it in "
        "exclude=[('a.num', 13)], or skip such rows with Dataset.from_path(..., on_error='skip')"
    )
    assert type(broken) is ShardError
    assert "shard broken.num, row 1: its format failed with RuntimeError: out of numbers" in str(broken)
    assert isinstance(broken.__cause__, RuntimeError)


def test_a_file_that_a_format_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.num").write_text("many")
    with pytest.raises(DataError, match=r"dataset 'counted', shard a\.num: not a number"):
        Dataset.from_path("counted", tmp_path, fmt=NumbersFormat())


def test_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'jsonl'"):
        Dataset.from_path("data", tmp_path, fmt="json")
    with pytest.raises(ConfigError, match="the formats are jsonl, parquet"):
        Dataset.from_path("data", tmp_path, fmt=3)  # type: ignore[arg-type]

"""Parquet: case A9's files, what to_pylist gives, broken and changing files, bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from zephon.errors import ConfigError, DataError  # noqa: E402
from zephon.io import Dataset, ShardError, parquet  # noqa: E402
from zephon.io.lru import Lru  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture
def a9(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": range(5000)}), tmp_path / "c.parquet", row_group_size=1000)
    pq.write_table(pa.table({"id": range(5000)}), tmp_path / "c7.parquet", row_group_size=7)
    return tmp_path


@pytest.mark.parametrize(("name", "group"), [("c", 1000), ("c7", 7)])
def test_a9_rows_across_row_groups(a9: Path, name: str, group: int) -> None:
    made = Dataset.from_path("c", a9 / f"{name}.parquet")
    assert (made.num_rows, made.block_rows) == (5000, group)
    assert made.read(range(137, 2137)) == [{"id": i} for i in range(137, 2137)]
    for seed in range(3):
        rows = np.random.default_rng(seed).integers(0, 5000, 300)
        assert [record["id"] for record in made.read(rows)] == rows.tolist()
    for row in (0, 999, 1000, 1001, 4999):
        assert made.read([row]) == [{"id": row}]


def test_records_are_what_to_pylist_gives(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"tokens": [1, 2], "meta": {"a": None, "b": "x"}, "raw": b"\x00\xff", "n": None, "list": []},
        {"tokens": [], "meta": {"a": 1.5, "b": None}, "raw": b"", "n": 3, "list": [{"k": True}]},
        {"tokens": None, "meta": None, "raw": None, "n": -(2**63), "list": None},
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    made = Dataset.from_path("c", tmp_path / "x.parquet")
    assert made.read([2, 0, 1, 0]) == [table.to_pylist()[i] for i in (2, 0, 1, 0)]


def test_files_with_no_rows_and_no_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [7]}), tmp_path / "b.parquet")
    made = Dataset.from_path("c", tmp_path)
    assert made.shard_rows.tolist() == [0, 1]
    assert made.read([0]) == [{"id": 7}]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 nothing here PAR1", b'{"id": 1}\n' * 10])
def test_a_file_that_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"shard bad\.parquet: not a Parquet file.*\('.*bad\.parquet'\)") as caught:
        Dataset.from_path("c", tmp_path)
    assert caught.value.__cause__ is not None


def test_a_broken_row_group_concerns_its_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": range(100)}), path, row_group_size=10, compression="none", use_dictionary=False)
    column = pq.read_metadata(path).row_group(3).column(0)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 20)  # the page's header
    made = Dataset.from_path("c", path)
    got = made.read(range(100))
    for row in range(100):
        if 30 <= row < 40:
            assert type(got[row]) is DataError
            assert f"dataset 'c', shard x.parquet, row {row}: row group 3 cannot be decoded" in str(got[row])
            assert f"mend the row, list it in exclude=[('x.parquet', {row})]" in str(got[row])
        else:
            assert got[row] == {"id": row}


def test_a_value_without_a_python_form_concerns_its_row_only(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    made = Dataset.from_path("c", tmp_path / "x.parquet")
    first, broken, last = made.read([0, 1, 2])
    assert [first, last] == [{"text": "a"}, {"text": "c"}]
    assert isinstance(broken, DataError)
    assert isinstance(broken.__cause__, UnicodeDecodeError)
    assert made.read([0, 2]) == [{"text": "a"}, {"text": "c"}]


def test_a_file_that_changed_or_is_gone(a9: Path) -> None:
    made = Dataset.from_path("c", a9 / "c.parquet")
    made.read([0])
    pq.write_table(pa.table({"id": range(4000)}), a9 / "c.parquet")
    (error,) = made.read([1])
    assert type(error) is ShardError
    assert "the file changed after the dataset was made" in str(error)
    (a9 / "c.parquet").unlink()
    (error,) = made.read([1])
    assert type(error) is ShardError
    assert "the file is gone" in str(error)


def test_a_file_replaced_by_its_like_is_read_anew(a9: Path) -> None:
    made = Dataset.from_path("c", a9 / "c.parquet")
    assert made.read([1]) == [{"id": 1}]
    pq.write_table(pa.table({"id": range(4999, -1, -1)}), a9 / "new.parquet", row_group_size=1000)
    size = (a9 / "c.parquet").stat().st_size
    (a9 / "new.parquet").rename(a9 / "c.parquet")
    (got,) = made.read([1])
    assert got == {"id": 4998} if (a9 / "c.parquet").stat().st_size == size else type(got) is ShardError


def test_decoded_groups_are_kept_and_bounded(a9: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dataset.from_path("c", a9 / "c.parquet")
    tables: Lru[Any] = Lru(lambda: 20_000)
    monkeypatch.setattr(parquet, "_tables", tables)
    monkeypatch.setattr(parquet, "_open_files", Lru(lambda: 4))
    decoded: list[int] = []
    group = parquet._OpenFile.group

    def counting(opened: Any, number: int) -> Any:
        before = len(tables)
        key = (opened.path, opened.stamp, number)
        if tables.get(key) is None:
            decoded.append(number)
        assert before <= 2
        return group(opened, number)

    monkeypatch.setattr(parquet._OpenFile, "group", counting)
    for row in (0, 1, 1500, 1501, 2, 2500, 3500, 3):
        made.read([row])
    assert decoded == [0, 1, 2, 3, 0]
    assert len(tables) == 2


def test_threads_decode_a_group_once(a9: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dataset.from_path("c", a9 / "c.parquet")
    monkeypatch.setattr(parquet, "_tables", Lru(lambda: 1 << 30))
    opened = parquet._OpenFile(str(a9 / "c.parquet"))
    shelf = Lru(lambda: 4)
    shelf.put(str(a9 / "c.parquet"), opened)
    monkeypatch.setattr(parquet, "_open_files", shelf)
    reads: list[int] = []
    file = opened.file

    class Counting:
        def read_row_group(self, group: int, use_threads: bool) -> Any:
            reads.append(group)
            assert not use_threads
            return file.read_row_group(group, use_threads=use_threads)

    opened.file = Counting()
    together = threading.Barrier(8)

    def reader() -> None:
        together.wait()
        made.read(range(5000))

    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reads) == [0, 1, 2, 3, 4]


def test_without_pyarrow_the_remedy_is_named(a9: Path) -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from zephon.io import Dataset\n"
        f"Dataset.from_path('c', {str(a9 / 'c.parquet')!r})"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert "ConfigError: reading Parquet needs pyarrow, which is not installed: pip install" in run.stderr
    assert "pip install 'zephon[parquet]'" in run.stderr


def test_a_package_that_is_missing_later_is_no_data_error(a9: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dataset.from_path("c", a9 / "c.parquet")
    monkeypatch.setattr(parquet, "_open_files", Lru(lambda: 4))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'zephon\[parquet\]'"):
        made.read([0])

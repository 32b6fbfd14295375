"""JSONL as it is found: cases A1 and A3, files that change, errors that say where."""

from __future__ import annotations

import gc
import json
import os
import pickle
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zephon.errors import DataError
from zephon.io import Dataset, ShardError, jsonl

GOOD = [b'{"id":%d,"text":"row %d"}' % (i, i) for i in range(10)]


def everything(dataset: Dataset) -> list[Any]:
    return dataset.read(np.arange(dataset.num_rows))


def one(path: Any, **settings: Any) -> Dataset:
    return Dataset.from_path("web", path, **settings)


# Case A1: JSONL made on Windows, with one bad row in the middle.


@pytest.fixture
def a1(tmp_path: Path) -> Path:
    bad = [*GOOD[:5], b"", b'{"id":5,"text":', *GOOD[6:]]
    (tmp_path / "win.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(bad) + b"\r\n\r\n  \r\n")
    (tmp_path / "array_row.jsonl").write_bytes(b"\n".join([*GOOD[:3], b"[1, 2]", *GOOD[4:]]))
    (tmp_path / "bom_ok.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(GOOD))
    return tmp_path


def test_a1_one_bad_row_is_named_and_the_others_are_read(a1: Path) -> None:
    got = everything(one(a1 / "win.jsonl"))
    assert [record["id"] for i, record in enumerate(got) if i != 5] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert type(got[5]) is DataError
    assert str(got[5]) == (
        "dataset 'web', shard win.jsonl, line 7 (row 5): invalid JSON: Expecting value at column 16; "
        "mend the line, list it in exclude=[('win.jsonl', 5)], or skip such rows with "
        "Dataset.from_path(..., on_error='skip')"
    )
    assert isinstance(got[5].__cause__, json.JSONDecodeError)


def test_a1_a_row_that_is_no_object(a1: Path) -> None:
    got = everything(one(a1 / "array_row.jsonl"))
    assert "shard array_row.jsonl, line 4 (row 3): not an object: the line holds an array" in str(got[3])
    assert [record["id"] for i, record in enumerate(got) if i != 3] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a1_marks_crlf_and_a_missing_final_newline(a1: Path) -> None:
    assert everything(one(a1 / "bom_ok.jsonl")) == [json.loads(row) for row in GOOD]


def test_a1_the_bad_row_can_be_excluded_and_the_others_keep_their_numbers(a1: Path) -> None:
    made = one(a1 / "win.jsonl", exclude=[("win.jsonl", 5)])
    assert made.num_rows == 10
    assert made.is_excluded(np.arange(10)).tolist() == [row == 5 for row in range(10)]
    assert made.read([9]) == [json.loads(GOOD[9])]


# Case A3: fields that are null for long, then a string; rows with extra fields.


def drifting(i: int) -> dict[str, Any]:
    row: dict[str, Any] = {"id": i, "pad": "p" * 600, "url": None if i < 2000 else f"u{i}"}
    row |= {"n": i if i < 2500 else i + 0.5, "m": {"a": None} if i < 2600 else {"a": [1]}}
    if i == 2700:
        row["extra"] = "only here"
    return row


def test_a3_rows_may_differ_in_fields_and_types(tmp_path: Path) -> None:
    lines = [json.dumps(drifting(i)) + "\n" for i in range(3000)]
    (tmp_path / "drift.jsonl").write_text("".join(lines))
    got = everything(one(tmp_path / "drift.jsonl"))
    assert list(map(repr, got)) == [repr(json.loads(line)) for line in lines]


@pytest.mark.parametrize("seed", range(5))
def test_a3_two_shards_in_both_orders(tmp_path: Path, seed: int) -> None:
    lines = [json.dumps(drifting(i)) + "\n" for i in range(3000)]
    (tmp_path / "nulls.jsonl").write_text("".join(lines[:1500]))
    (tmp_path / "urls.jsonl").write_text("".join(lines[1500:]))
    there = one([tmp_path / "nulls.jsonl", tmp_path / "urls.jsonl"])
    back = one([tmp_path / "urls.jsonl", tmp_path / "nulls.jsonl"])
    rows = np.random.default_rng(seed).permutation(3000)
    expected = [repr(json.loads(lines[row])) for row in rows]
    assert list(map(repr, there.read(rows))) == expected
    assert list(map(repr, back.read((rows + 1500) % 3000))) == expected


# Errors.


def test_errors_do_not_hold_the_record(tmp_path: Path) -> None:
    text = b"word " * 1_000_000
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + text + b'" oops}\n{"text": "' + text + b'\xff"}\n')
    for error in everything(one(tmp_path / "x.jsonl")):
        assert len(str(error)) < 300
        assert len(pickle.dumps(error.__cause__)) < 1000
        assert error.__cause__.__traceback__ is None


def test_line_numbers_of_many_bad_rows_read_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"".join(b'{"id": %d}\n\n' % i if i % 50 else b"{\n\r\n" for i in range(20_000)))
    os.utime(tmp_path / "x.jsonl", (1, 1))  # old, so that the index is not made again
    made = one(tmp_path / "x.jsonl")
    lengths: list[int] = []
    exactly = jsonl.read_exactly

    def counting(fd: int, length: int, offset: int) -> bytes:
        lengths.append(length)
        return exactly(fd, length, offset)

    monkeypatch.setattr(jsonl, "read_exactly", counting)
    got = everything(made)
    assert all(f"line {2 * row + 1} (row {row})" in str(got[row]) for row in range(0, 20_000, 50))
    assert max(lengths[1:]) < 20_000  # not everything before the row


def test_an_error_survives_pickling(a1: Path) -> None:
    error = one(a1 / "win.jsonl").read([5])[0]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DataError
    assert str(again) == str(error)


# Files that change after the dataset was made.


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    path = tmp_path / "ten.jsonl"
    path.write_bytes(b"\n".join(GOOD) + b"\n")
    return path


def assert_shard_error(made: Dataset, says: str) -> None:
    for row, error in zip([2, 7], made.read([2, 7]), strict=True):
        assert type(error) is ShardError
        assert f"dataset 'web', shard ten.jsonl, row {row}: " in str(error)
        assert says in str(error)
        assert "make the dataset again" in str(error)


@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_that_grew(ten: Path, read_before: bool) -> None:
    made = one(ten)
    if read_before:
        made.read([0])
    with ten.open("ab") as file:
        file.write(GOOD[0])
    assert_shard_error(made, f"the file changed after the dataset was made ({10 * 24} bytes then, {11 * 24 - 1} now)")


@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_that_was_cut(ten: Path, read_before: bool) -> None:
    made = one(ten)
    if read_before:
        made.read([0])
    os.truncate(ten, 100)
    assert_shard_error(made, "100 now")


@pytest.mark.parametrize("read_before", [False, True])
def test_a_file_that_is_gone(ten: Path, read_before: bool) -> None:
    made = one(ten)
    if read_before:
        made.read([0])
    ten.unlink()
    assert_shard_error(made, "the file is gone")
    assert isinstance(made.read([0])[0].__cause__, FileNotFoundError)


def test_a_file_of_the_same_size_and_other_rows(ten: Path) -> None:
    made = one(ten)
    made.read([0])
    content = ten.read_bytes()
    ten.write_bytes(content[:-30].replace(b"\n", b" ", 1) + content[-30:])
    os.utime(ten, ns=(1, 1))
    assert_shard_error(made, "same size, other rows")


def test_a_file_replaced_by_one_with_as_many_rows_is_read_by_its_own_lines(ten: Path) -> None:
    made = one(ten)
    made.read([0])
    other = ten.with_suffix(".new")
    other.write_bytes(b"\n".join([*GOOD[5:], *GOOD[:5]]) + b"\n")
    other.rename(ten)
    assert [record["id"] for record in everything(made)] == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]


def test_a_file_that_shrinks_under_a_read(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = one(ten)
    made.read([0])
    monkeypatch.setattr(
        jsonl, "_pread", lambda fd, length, offset: os.pread(fd, length, offset)[:3] if offset < 6 else b""
    )
    assert "the file ends at byte 6, 18 bytes too early" in str(made.read([0])[0])


def test_a_file_that_changes_while_it_is_indexed(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = jsonl.read_exactly

    def growing(fd: int, length: int, offset: int) -> bytes:
        with ten.open("ab") as file:
            file.write(b"{}\n")
        return exactly(fd, length, offset)

    monkeypatch.setattr(jsonl, "read_exactly", growing)
    with pytest.raises(DataError, match=r"shard ten\.jsonl: the file changes while it is being indexed"):
        one(ten)


def test_a_file_that_may_not_be_read(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(jsonl.os, "open", forbidden)
    with pytest.raises(DataError, match=r"shard ten\.jsonl: the file cannot be read \(PermissionError") as caught:
        one(ten)
    assert isinstance(caught.value.__cause__, PermissionError)


# Reading.


def test_neighbours_come_from_one_read(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = one(ten)
    made.read([0])
    spans: list[tuple[int, int]] = []
    pread = os.pread

    def counting(fd: int, length: int, offset: int) -> bytes:
        spans.append((offset, length))
        return pread(fd, length, offset)

    monkeypatch.setattr(jsonl, "_pread", counting)
    assert [record["id"] for record in made.read([9, 0, 4, 4])] == [9, 0, 4, 4]
    assert spans == [(0, ten.stat().st_size)]
    monkeypatch.setattr(jsonl, "_GAP_BYTES", 0)
    spans.clear()
    assert [record["id"] for record in made.read([9, 0, 4, 4, 5])] == [9, 0, 4, 4, 5]
    assert [length for _, length in spans] == [24, 48, 24]
    monkeypatch.setattr(jsonl, "_SPAN_BYTES", 60)
    spans.clear()
    assert [record["id"] for record in everything(made)] == list(range(10))
    assert [length for _, length in spans] == [48] * 5


def test_a_read_in_parts_and_without_pread(ten: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [json.loads(row) for row in GOOD]
    pread = os.pread
    monkeypatch.setattr(jsonl, "_pread", lambda fd, length, offset: pread(fd, min(length, 7), offset))
    assert everything(one(ten)) == expected
    monkeypatch.setattr(jsonl, "_pread", jsonl._seek_and_read)
    assert everything(one(ten)) == expected


def test_one_row_far_larger_than_a_block(tmp_path: Path) -> None:
    rows = [{"id": i, "text": "x" * (9_000_000 if i == 100 else 5)} for i in range(200)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert everything(one(tmp_path / "x.jsonl")) == rows


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "c.jsonl").write_bytes(b"\r\n \n")
    (tmp_path / "d.jsonl").write_bytes(b'{"id": 0}')
    made = one(tmp_path)
    assert made.shard_rows.tolist() == [0, 0, 0, 1]
    assert everything(made) == [{"id": 0}]
    assert made.locate(0) == ("d.jsonl", 0)
    empty = one(tmp_path / "a.jsonl")
    assert (empty.num_rows, everything(empty)) == (0, [])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors by /proc")
def test_open_files_are_bounded_and_right_under_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_text("".join(f'{{"id": {i * 10 + j}}}\n' for j in range(10)))
    made = one(tmp_path)
    gc.collect()
    before = open_descriptors()
    monkeypatch.setattr(jsonl, "_open_files", jsonl.Lru(lambda: 3))
    wrong: list[Any] = []

    def reader(seed: int) -> None:
        for rows in np.random.default_rng(seed).integers(0, 400, (30, 16)):
            wrong.extend(row for row, record in zip(rows, made.read(rows), strict=True) if record != {"id": row})

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert open_descriptors() <= before + 3


def test_reading_holds_no_more_than_it_returns(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 2000)  # 20 MB
    made = one(tmp_path / "x.jsonl")
    made.read([0])
    tracemalloc.start()
    try:
        for start in range(0, 2000, 100):
            made.read(np.arange(start, start + 100))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 100 * len(line)

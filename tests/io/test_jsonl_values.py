"""What a line means: exactly what json.loads makes of it, whichever parser reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.io import Dataset, jsonl
from zephon.io.formats import Unreadable


def lines_of(path: Path) -> list[Any]:
    made = Dataset.from_path("web", path)
    return made.read(np.arange(made.num_rows))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", None),
        (b"\x0b", "invalid JSON: Expecting value at column 1"),  # no white space to JSON, so a row, and a broken one
        (b'{"a": "\xff"}', "invalid UTF-8: byte 0xff at byte 8 of the line"),
        (b'{"a": "\xed\xa0\x80"}', "invalid UTF-8: byte 0xed"),
        (b'\xef\xbb\xbf{"a": 1}', "invalid JSON: Unexpected UTF-8 BOM"),
        (b'{"a": 1} {"b": 2}', "invalid JSON: Extra data at column 10"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON: Exceeds the limit"),
        (b'{"a": ' + b"[" * 100_000, "invalid JSON: nested too deeply"),
        (b'{"a": "\t"}', "invalid JSON: Invalid control character at"),
        (b"null", "not an object: the line holds null"),
        (b'"text"', "not an object: the line holds a string"),
        (b"true", "not an object: the line holds a boolean"),
        (b"NaN", "not an object: the line holds a number"),
        (b"17", "not an object: the line holds a number"),
    ],
)
def test_lines_that_are_no_record(tmp_path: Path, line: bytes, says: str | None) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"id": 0}\n' + line + b'\n{"id": 1}\n')
    got = lines_of(tmp_path / "x.jsonl")
    assert [got[0], got[-1]] == [{"id": 0}, {"id": 1}]
    assert len(got) == (2 if says is None else 3)
    if says is not None:
        assert f"line 2 (row 1): {says}" in str(got[1])


@pytest.mark.parametrize(
    "line",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a": -0, "b": -0.0}',
        f'{{"a": {10**300}}}',
    ],
)
def test_lines_that_json_loads_accepts(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    assert repr(lines_of(tmp_path / "x.jsonl")) == repr([json.loads(line)])


numbers = st.one_of(st.integers(), st.integers(2**62, 2**70), st.floats(), st.sampled_from([-0.0, 5e-324, 1e308]))
texts = st.text(st.characters(), max_size=6)  # lone surrogates too
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4), st.booleans())
def test_any_object_reads_as_json_loads_reads_it(record: dict[str, Any], ascii_only: bool) -> None:
    try:
        line = json.dumps(record, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form
        return
    assert repr(read_line(line)) == repr(json.loads(line))


# fmt: off
TOKENS = [
    "{", "}", "[", "]", ":", ",", '"a"', '"b"', '"', "\\u", "d83d", "\\ud800", "\\udc00", "\\n", "0", "1", "-", "+",
    ".", "e", "true", "false", "null", "nul", "NaN", "Infinity", "\x7f", "é",
]
# fmt: on
tokens = st.sampled_from([*TOKENS, "9" * 19, "1" * 40, " ", "\t", "\x00", "\x1f"])


@given(st.lists(tokens, max_size=6).map(lambda parts: '{"a":' + "".join(parts) + "}"))
def test_msgspec_accepts_nothing_that_json_loads_does_not(text: str) -> None:
    try:
        fast = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except Exception:
        return  # then json.loads decides anyway
    assert repr(fast) == repr(json.loads(text))


@given(st.lists(st.tuples(st.sampled_from("abc"), numbers), max_size=6), st.sampled_from(["", " ", "\t"]))
def test_repeated_keys_and_spaces(pairs: list[tuple[str, Any]], space: str) -> None:
    inside = f",{space}".join(f'"{key}"{space}:{json.dumps(value)}' for key, value in pairs)
    line = f"{space}{{{inside}}}{space}\r".encode()
    assert repr(read_line(line)) == repr(json.loads(line))


def read_line(line: bytes) -> Any:
    """As JsonlShard.read does it for one line."""
    try:
        return jsonl._decode(line)
    except Exception:
        record = jsonl.parse(line)
        assert not isinstance(record, Unreadable), record.what
        return record

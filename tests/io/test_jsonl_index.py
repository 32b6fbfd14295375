"""The indexer against a plain split at newlines, with blocks so small that every cut happens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from zephon.io.jsonl_index import LINE_EVERY, JsonlIndex, index_blocks, index_file, physical_line

BOM = b"\xef\xbb\xbf"
pieces = st.sampled_from(
    [b"\n", b"\n\n", b"\r\n", b" ", b"\t", b"\r", b"\x0b", b"\x0c", b"\x85", b"\xe2\x80\xa8", b"{}", b"x"]
)
contents = st.lists(pieces, max_size=40).map(b"".join)


def expected(data: bytes) -> list[tuple[bytes, int]]:
    """(content without white space at its ends, physical line) of every row."""
    lines = data.removeprefix(BOM).split(b"\n")
    return [(line.strip(b" \t\r"), i) for i, line in enumerate(lines, 1) if line.strip(b" \t\r")]


def blocks_of(data: bytes, start: int, block: int) -> Iterator[np.ndarray]:
    for offset in range(start, len(data), block):
        yield np.frombuffer(data[offset : offset + block], np.uint8)


def read_from(data: bytes) -> object:
    def read_at(fd: int, length: int, offset: int) -> bytes:
        assert offset + length <= len(data)
        return data[offset : offset + length]

    return read_at


def rows_of(data: bytes, index: JsonlIndex) -> list[tuple[bytes, int]]:
    offsets = index.offsets.tolist()
    assert offsets[-1] == len(data)
    read_at = read_from(data)
    return [
        (data[start:stop].strip(b" \t\r\n"), physical_line(index, row, 0, read_at))
        for row, (start, stop) in enumerate(pairwise(offsets))
    ]


@given(contents, st.booleans(), st.integers(1, 9))
@example(b"", True, 1)
@example(b"   \n\r\n", False, 2)
@example(b"a\n" + b" " * 50 + b"\n" + b"b", False, 3)
def test_equals_a_plain_split(content: bytes, bom: bool, block: int) -> None:
    data = BOM * bom + content
    start = len(BOM) if bom else 0
    index = index_blocks(blocks_of(data, start, block), len(data), start)
    assert rows_of(data, index) == expected(data)
    assert index.offsets.dtype == index.lines.dtype == np.int64
    assert index.rows == len(expected(data))


@given(contents, st.integers(1, 9))
def test_survives_the_cache_form(content: bytes, block: int) -> None:
    index = index_blocks(blocks_of(content, 0, block), len(content))
    again = JsonlIndex.from_cells(index.to_cells())
    assert again.offsets.tolist() == index.offsets.tolist()
    assert again.lines.tolist() == index.lines.tolist()


def test_lines_far_beyond_the_first_sample() -> None:
    data = b"".join(b"%d\n" % i + b"\r\n" * (i % 3) for i in range(3 * LINE_EVERY + 5))
    for block in (1000, 4096, len(data)):
        index = index_blocks(blocks_of(data, 0, block), len(data))
        assert len(index.lines) == 4
        assert rows_of(data, index) == expected(data)


def test_a_file_of_many_blocks() -> None:
    data = BOM + b"".join(b'{"id": %d}\n' % i for i in range(300_000))  # more than three blocks of 1 MiB
    index = index_file(0, len(data), read_from(data))
    assert index.rows == 300_000
    assert data[index.offsets[123_456] : index.offsets[123_457]] == b'{"id": 123456}\n'
    assert physical_line(index, 299_999, 0, read_from(data)) == 300_000


def test_a_byte_order_mark_counts_only_at_byte_0() -> None:
    data = b"\n" + BOM + b"{}\n"
    index = index_file(0, len(data), read_from(data))
    assert rows_of(data, index) == [(BOM + b"{}", 2)]

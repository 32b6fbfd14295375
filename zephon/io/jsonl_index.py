"""Where the rows of a JSONL file start: one pass over its bytes, vectorised, a block at a time.

A line ends at b"\\n" and nowhere else. A line that holds only JSON's own white space (space, tab, carriage return) is
no row; any other line is one, also if it does not parse. A UTF-8 byte order mark at byte 0 belongs to no line.

Row i is bytes offsets[i] .. offsets[i + 1] - 1: the line and, behind it, blank lines, which a JSON parser passes over.
So one int64 a row is enough. Beside it stands the number of the physical line of every 1,024th row, so that an error
finds its line by counting the newlines of at most 1,023 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Cells = NDArray[np.int64]
ReadAt = Callable[[int, int, int], bytes]  # (descriptor, length, offset) -> exactly that many bytes, or it raises

LINE_EVERY: Final = 1024
_BLOCK_BYTES: Final = 1 << 20  # stays in the processor's cache between the two passes over it
_BOM: Final = b"\xef\xbb\xbf"
_SPACE: Final = b" \t\r"
_NEWLINE: Final = 10
_MAY_BE_BLANK: Final = np.zeros(256, bool)  # by the first byte of a line
_MAY_BE_BLANK[list(_SPACE + b"\n")] = True


class JsonlIndex(NamedTuple):
    """The rows of a file. `offsets` int64 [rows + 1], bytes; `lines` int64 [ceil(rows / 1024)], counted from 1."""

    offsets: Cells
    lines: Cells

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def to_cells(self) -> Cells:
        """One int64 array, for the cache."""
        return np.concatenate([np.array([self.rows], np.int64), self.offsets, self.lines])

    @classmethod
    def from_cells(cls, cells: Cells) -> JsonlIndex:
        """The index that `to_cells` wrote, as views."""
        rows = int(cells[0])
        return cls(cells[1 : rows + 2], cells[rows + 2 :])


def index_blocks(blocks: Iterator[Bytes], size_bytes: int, start: int = 0) -> JsonlIndex:
    """The index of a file of `size_bytes` whose bytes from `start` on come in `blocks`, cut anywhere.

    `start` is the length of the byte order mark. Memory: 16 bytes a row while it runs, and one block.
    """
    scanner = _Scanner(start)
    for block in blocks:
        scanner.feed(block)
    return scanner.finish(size_bytes)


def index_file(fd: int, size_bytes: int, read_at: ReadAt) -> JsonlIndex:
    """The index of the open file `fd`. Raises what `read_at` raises."""
    start = len(_BOM) if size_bytes >= len(_BOM) and read_at(fd, len(_BOM), 0) == _BOM else 0
    blocks = (
        np.frombuffer(read_at(fd, min(_BLOCK_BYTES, size_bytes - offset), offset), np.uint8)
        for offset in range(start, size_bytes, _BLOCK_BYTES)
    )
    return index_blocks(blocks, size_bytes, start)


class _Scanner:
    """What is known at the end of a block: the rows so far, and the line that the block's end cuts."""

    def __init__(self, start: int) -> None:
        self._offset = start  # of the next block in the file
        self._line_start = start  # of the line that is not finished yet
        self._line_blank = True  # whether that line holds only white space so far
        self._num_lines = 0  # finished physical lines
        self._num_rows = 0
        self._starts: list[Cells] = []
        self._lines: list[Cells] = []

    def feed(self, block: Bytes) -> None:
        ends = np.flatnonzero(block == _NEWLINE)
        if not len(ends):
            self._line_blank = self._line_blank and _is_blank(block)
            self._offset += len(block)
            return
        first_blank = self._line_blank and _is_blank(block[: ends[0]])
        starts = ends[:-1] + 1  # of the lines that lie wholly in this block
        is_row = ~_blank_lines(block, starts, ends[1:])
        starts += self._offset
        is_row = np.concatenate([[not first_blank], is_row])
        self._add(np.concatenate([[self._line_start], starts]), is_row)
        tail = int(ends[-1]) + 1
        self._line_start = self._offset + tail
        self._line_blank = _is_blank(block[tail:])
        self._offset += len(block)

    def finish(self, size_bytes: int) -> JsonlIndex:
        if not self._line_blank:
            self._add(np.array([self._line_start]), np.array([True]))
        offsets = np.concatenate([*self._starts, np.array([size_bytes], np.int64)])
        return JsonlIndex(offsets, np.concatenate([*self._lines, np.empty(0, np.int64)]))

    def _add(self, starts: Cells, is_row: NDArray[np.bool_]) -> None:
        """Take the next physical lines."""
        rows = np.flatnonzero(is_row)
        self._starts.append(starts if len(rows) == len(starts) else starts[rows])
        self._lines.append(rows[-self._num_rows % LINE_EVERY :: LINE_EVERY] + (self._num_lines + 1))
        self._num_lines += len(starts)
        self._num_rows += len(rows)


def _blank_lines(block: Bytes, starts: Cells, ends: Cells) -> NDArray[np.bool_]:
    """Which of the lines [start, end) of the block are blank. The first byte settles nearly all of them."""
    blank: NDArray[np.bool_] = _MAY_BE_BLANK[block[starts]]
    for i in np.flatnonzero(blank & (starts < ends)).tolist():
        blank[i] = _is_blank(block[starts[i] : ends[i]])
    return blank


def _is_blank(line: Bytes) -> bool:
    if len(line) and not _MAY_BE_BLANK[line[0]]:
        return False
    return not line.tobytes().strip(_SPACE)


def physical_line(index: JsonlIndex, row: int, fd: int, read_at: ReadAt) -> int:
    """The physical line of `row`, counted from 1, blank lines counted."""
    known = row - row % LINE_EVERY
    line = int(index.lines[known // LINE_EVERY])
    offset, stop = int(index.offsets[known]), int(index.offsets[row])
    while offset < stop:
        block = read_at(fd, min(_BLOCK_BYTES, stop - offset), offset)
        line += block.count(b"\n")
        offset += len(block)
    return line

"""The contract of a storage format: how a file is opened, and how its rows are read.

To add a format: one file with a Shard and a Format, its Format in `dataset.FORMATS`, and one subclass of
`tests/io/format_contract.py`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zephon.record import Record


class Unreadable(Exception):
    """Why rows cannot be read, before anyone knows the names of dataset and shard.

    Returned in the place of a record: this row is at fault. Raised: the shard is, and no row of it can be read.
    `what` states the fault; `line` is the physical line, counted from 1, where the format has lines.
    """

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.line = line

    def __reduce__(self) -> tuple[type[Unreadable], tuple[str, int | None]]:
        return type(self), (self.what, self.line)


class Shard(Protocol):
    """One file of a dataset. Picklable, immutable, without open handles: those live in caches of the process."""

    @property
    def name(self) -> str:
        """The name relative to the dataset's folder, with forward slashes."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""

    @property
    def block_rows(self) -> int | None:
        """Rows that are read together at the cost of one; None where single rows are cheap."""

    def read(self, rows: NDArray[np.int64]) -> list[Record | Unreadable]:
        """The records of `rows` (ascending, int64, within range, repeats allowed), each a fresh object.

        Called by Dataset.read, from several threads at once. An Unreadable in the list concerns that row only.
        Raises Unreadable or OSError where the whole shard cannot be read.
        """


class Format(Protocol):
    """How one kind of file becomes shards."""

    @property
    def name(self) -> str:
        """What `fmt=` and the fingerprint call it."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Lower-case suffixes that are taken wherever they are found, for example `(".jsonl",)`."""

    @property
    def other_suffixes(self) -> tuple[str, ...]:
        """Suffixes that are taken where the user names the file or a glob finds it, but not in a folder."""

    def open(self, path: str, name: str, index_dir: str | None) -> Shard:
        """Count the rows of the file at `path` (absolute); called once a file, when the dataset is made.

        `index_dir` is where an index may be kept (None: the default). Raises Unreadable where the file is not of this
        format, OSError where it cannot be read, ConfigError where a package is missing.
        """

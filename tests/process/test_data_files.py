"""Data files that are truncated, deleted or changed while a job reads them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import zephon as zp

from .helpers import ids, line, slow, to_the_error

ROWS = 3000


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"id": 3000}\n')


HARM: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, 100),
    "deleted": Path.unlink,
    "grown": grow,
}
CHANGED = r"the file changed after the dataset was made \([\d,]+ bytes then, [\d,]+ now\)"
SAYS = {
    ("truncated", ".jsonl"): rf"({CHANGED}|the file ends at byte [\d,]+)",
    ("grown", ".jsonl"): CHANGED,
    ("truncated", ".parquet"): "not a Parquet file that can be read: ",
    ("grown", ".parquet"): "not a Parquet file that can be read: ",
    ("deleted", ".jsonl"): "the file is gone",
    ("deleted", ".parquet"): "the file is gone",
}


HOW = [("raise", "rows.jsonl"), ("skip", "rows.parquet"), slow("raise", "rows.parquet"), slow("skip", "rows.jsonl")]


def write(path: Path) -> None:
    records: list[dict[str, Any]] = [{"id": i} for i in range(ROWS)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), path, row_group_size=64)


@pytest.mark.parametrize(("on_error", "name"), HOW)
@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_harmed_while_it_is_read(
    harm: str, name: str, on_error: Literal["raise", "skip"], tmp_path: Path
) -> None:
    """A ShardError that is never skipped; once the file is back the state goes on exactly."""
    path = tmp_path / name
    write(path)

    def made() -> zp.Pipeline:
        return line(dataset=zp.Dataset.from_path("files", path, on_error=on_error, index_dir=tmp_path / "index"))

    with made() as pipeline:
        batches = iter(pipeline)
        found = ids(next(batches) for _ in range(3))
        HARM[harm](path)
        error = to_the_error(batches, found)
        state = pipeline.state_dict()
    assert type(error) is zp.errors.ShardError
    assert re.match(rf"dataset 'files', shard {name}, row \d+: {SAYS[harm, path.suffix]}", str(error)), error
    assert str(error).endswith("; restore the file, or make the dataset again")
    assert found == list(range(len(found)))
    write(path)
    with made() as pipeline:
        pipeline.load_state_dict(state)
        assert found + ids(pipeline) == list(range(ROWS))

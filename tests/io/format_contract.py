"""What every format has to do. A new format subclasses FormatContract and writes its files; see test_formats.py."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zephon.errors import ConfigError, ZephonError
from zephon.io import Dataset

SHARDS = [
    [{"id": i, "text": f"row {i} " * (i % 5), "score": i / 3} for i in range(37)],
    [],
    [{"id": 37, "text": "ünï \U0001f600 " + "long " * 30_000, "score": 0.5}],
    [{"id": i, "text": f"row {i}\n\u2028\x85", "score": -0.0} for i in range(38, 100)],
]


class FormatContract:
    """Subclass it, and say how `dataset` is made of shards. The tests compare with the lists themselves."""

    def dataset(self, folder: Path, shards: list[list[dict[str, Any]]]) -> Dataset:
        """A dataset of these shards, stored below `folder` (empty, exists)."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path: Path) -> Dataset:
        return self.dataset(tmp_path, SHARDS)

    @pytest.fixture
    def records(self) -> list[dict[str, Any]]:
        return [record for shard in SHARDS for record in shard]

    def test_counts_rows(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        assert made.num_rows == len(records)
        assert made.shard_rows.dtype == np.int64
        assert made.shard_rows.sum() == len(records)
        assert len(made.shard_names) == len(made.shard_rows) == len(set(made.shard_names))

    def test_reads_all_rows_in_order(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        assert made.read(np.arange(made.num_rows)) == records

    def test_reads_any_rows_in_the_order_asked(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        draw = random.Random(7)
        for count in (1, 2, 5, 64, 300):
            rows = [draw.randrange(len(records)) for _ in range(count)]  # with repeats
            assert made.read(np.array(rows)) == [records[row] for row in rows]

    def test_reads_nothing(self, made: Dataset) -> None:
        assert made.read(np.empty(0, np.int64)) == []

    @pytest.mark.parametrize("row", [-1, 100, 1 << 60])
    def test_refuses_rows_that_do_not_exist(self, made: Dataset, row: int) -> None:
        with pytest.raises(ConfigError, match=f"no row {row}"):
            made.read([3, row, 5])
        with pytest.raises(ConfigError, match=f"no row {row}"):
            made.locate(row)

    def test_every_read_gives_fresh_objects(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        first, again = made.read([3, 3])
        assert not isinstance(first, ZephonError)
        first.clear()
        assert again == records[3]
        assert made.read([3]) == [records[3]]

    def test_locates_rows(self, made: Dataset) -> None:
        names = [name for name, rows in zip(made.shard_names, made.shard_rows, strict=True) for _ in range(rows)]
        inside = [row for rows in made.shard_rows for row in range(rows)]
        assert [made.locate(row) for row in range(made.num_rows)] == list(zip(names, inside, strict=True))

    def test_can_be_pickled_after_use(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        made.read([5, 99])
        copy = pickle.loads(pickle.dumps(made))
        assert copy.read(np.arange(100)) == records
        assert copy.fingerprint() == made.fingerprint()
        assert copy.shard_names == made.shard_names

    def test_fingerprint_follows_the_data(self, made: Dataset, tmp_path_factory: pytest.TempPathFactory) -> None:
        same = self.dataset(tmp_path_factory.mktemp("same"), SHARDS)
        shorter = self.dataset(tmp_path_factory.mktemp("shorter"), [*SHARDS[:3], SHARDS[3][:-1]])
        assert made.fingerprint() == same.fingerprint()
        assert made.fingerprint()["rows"] == 100
        assert made.fingerprint()["hash"] != shorter.fingerprint()["hash"]

    def test_threads_read_at_once(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        wrong: list[Any] = []
        together = threading.Barrier(8)

        def reader(seed: int) -> None:
            draw = random.Random(seed)
            together.wait()
            for _ in range(20):
                rows = [draw.randrange(100) for _ in range(16)]
                got = made.read(rows)
                if got != [records[row] for row in rows]:
                    wrong.append((rows, got))

        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_parent_and_forked_child_read_at_once(self, made: Dataset, records: list[dict[str, Any]]) -> None:
        made.read([0, 50, 99])  # so that there is something open to inherit
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a deadlock ends here
            os._exit(0 if all(made.read(np.arange(100)) == records for _ in range(5)) else 1)
        assert all(made.read(np.arange(100)) == records for _ in range(5))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

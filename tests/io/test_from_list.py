"""Records in memory: what is refused, what is kept, and what the hash of the content says."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, UserList, defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zephon.errors import ConfigError, DataError
from zephon.io import Dataset
from zephon.io.memory import Encoded
from zephon.ipc.segment import Segment

ROOT = Path(__file__).parents[2]
RECORDS: list[dict[str, Any]] = [
    {"id": i, "tokens": list(range(i)), "x": np.arange(i, dtype=np.float32)} for i in range(4)
]


def rows_of(records: Any) -> list[int]:
    made = Dataset.from_list("toy", records)
    return [record["id"] for record in made.read(range(made.num_rows))]


def numbers() -> Iterator[dict[str, int]]:
    yield {"id": 0}


async def later() -> AsyncIterator[dict[str, int]]:
    yield {"id": 0}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        (numbers(), "a one-shot generator: it can be read once.*pass a list"),
        (numbers, r"a generator function \('numbers'\).*pass a list, `list\(numbers\(\)\)`"),
        (later, r"a generator function \('later'\)"),
        (iter([{"id": 0}]), "a one-shot list_iterator"),
        (itertools.cycle([{"id": 0}]), "a one-shot cycle"),
        (map(dict, []), "a one-shot map"),
        ({"id": 0}, r"one dict, not a list of dicts.*pass `\[record, ...\]`"),
        ({1, 2}, "a set: it has no fixed order"),
        (frozenset(), "a frozenset: it has no fixed order"),
        ({"a": {"id": 0}}.values(), "a dict_values; it takes a sequence"),
        ("data.jsonl", "str, not records.*use Dataset.from_path"),
        (b"{}", "bytes, not records"),
        (np.arange(3), "a ndarray"),
        (None, "a NoneType"),
        (range(2), "record 0 is a int; a record is a dict"),
        ([{"id": 0}, [1]], "record 1 is a list"),
        ([{"id": 0}, {"id": 1}, None], "record 2 is a NoneType"),
        ([{"id": 0}, {3: 4}], "record 1 has the field name 3; field names are strings"),
        ([{"id": 0}, {"f": lambda: 0}], "record 1 cannot be pickled"),
        ([{"lock": threading.Lock()}], "record 0 cannot be pickled: TypeError"),
        ([{"loop": asyncio.sleep}, {"file": sys.stderr}], "record 1 cannot be pickled"),
    ],
)
def test_what_is_no_list_of_records(records: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Dataset.from_list("toy", records)
    assert "dataset 'toy'" in str(caught.value)


def test_sequences_of_every_kind() -> None:
    class MyList(list[Any]):
        pass

    plain = [{"id": 1}, {"id": 2}]
    objects = np.empty(2, object)
    objects[:] = plain
    for records in (plain, tuple(plain), MyList(plain), UserList(plain), deque(plain), objects):
        assert rows_of(records) == [1, 2]


def test_an_empty_list() -> None:
    made = Dataset.from_list("toy", [])
    assert (made.num_rows, made.shard_names, made.shard_rows.tolist()) == (0, ("list",), [0])
    assert made.read([]) == []
    assert made.fingerprint()["rows"] == 0


def test_later_changes_do_not_reach_it() -> None:
    records = [{"id": 0, "tokens": [1, 2]}]
    made = Dataset.from_list("toy", records)
    records[0]["tokens"].append(3)  # type: ignore[attr-defined]
    records.append({"id": 1})
    (read,) = made.read([0])
    read["tokens"].clear()  # type: ignore[index]
    assert made.num_rows == 1
    assert made.read([0]) == [{"id": 0, "tokens": [1, 2]}]


def test_values_come_back_as_they_were() -> None:
    value = {"a": (1, [2.5, None]), "b": {1, 2}, "c": np.array([[1, 2]], ">i2"), "d": b"\x00", "e": "\ud800", 7: 2**80}
    (read,) = Dataset.from_list("toy", [{"value": value}]).read([0])
    assert not isinstance(read, DataError)
    assert read["value"]["c"].dtype == np.dtype(">i2")
    assert repr(read["value"]) == repr(value)


def test_dicts_of_other_kinds_become_plain_ones() -> None:
    made = Dataset.from_list("toy", [OrderedDict(id=1), defaultdict(lambda: 0, id=2)])
    assert [(type(record), record) for record in made.read([0, 1])] == [(dict, {"id": 1}), (dict, {"id": 2})]


class Fragile:
    """Can be pickled, but not unpickled while `broken`."""

    broken = False

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, Any]) -> None:
        if Fragile.broken:
            raise ValueError("no such number")
        self.__dict__.update(state)


def test_a_record_that_cannot_be_unpickled_is_an_error_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dataset.from_list("toy", [{"id": 0}, {"id": 1, "value": Fragile(3)}, {"id": 2}])
    monkeypatch.setattr(Fragile, "broken", True)
    first, error, last = made.read([0, 1, 2])
    assert [first, last] == [{"id": 0}, {"id": 2}]
    assert isinstance(error, DataError)
    assert "dataset 'toy', shard list, row 1: the record cannot be unpickled: ValueError: no such number" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_the_hash_is_over_the_content() -> None:
    def hash_of(records: Any) -> str:
        return str(Dataset.from_list("toy", records).fingerprint()["hash"])

    same = [{"x": r["x"].copy(), "tokens": tuple(r["tokens"]), "id": r["id"]} for r in RECORDS]
    assert hash_of(RECORDS) == hash_of(same)
    assert Dataset.from_list("toy", RECORDS).fingerprint() == Dataset.from_list("other", same).fingerprint()
    different = [
        RECORDS[::-1],
        RECORDS[:3],
        [*RECORDS, {}],
        [{**RECORDS[0], "id": 0.0}, *RECORDS[1:]],
        [{**RECORDS[0], "id": False}, *RECORDS[1:]],
        [{**RECORDS[0], "x": RECORDS[0]["x"].astype("f8")}, *RECORDS[1:]],
        [{"a": 1, "b": 2}],
        [{"a": 1}, {"b": 2}],
        [],
    ]
    assert len({hash_of(records) for records in (RECORDS, *different)}) == len(different) + 1


SCRIPT = """
import datetime, decimal, json
import numpy as np
from zephon.io import Dataset
words = {"the", "a", "of", "and", "to", "in", "word"}
records = [
    {"words": words, "frozen": frozenset(words), "nested": [{word: {word} for word in words}], "x": np.arange(3)},
    {"when": datetime.datetime(2020, 1, 2), "what": decimal.Decimal("1.0"), "who": {(1, "a"): words}, "big": 2**90},
]
print(json.dumps(Dataset.from_list("toy", records).fingerprint()))
"""


def test_the_hash_is_the_same_in_every_process() -> None:
    outputs = set()
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, capture_output=True, text=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["rows"] == 2


# -- shared between processes ----------------------------------------------------------------------------------------


def large() -> Dataset:
    return Dataset.from_list("large", [{"id": i, "text": "x" * 1000, "n": np.arange(3)} for i in range(1500)])


def block(dataset: Dataset) -> Any:
    return dataset._shards[0].blob  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory by descriptor")
def test_a_large_block_moves_into_a_segment_and_reads_as_before() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    dataset = large()
    records = dataset.read(np.arange(1500))
    assert len(os.listdir("/proc/self/fd")) == before
    fd = block(dataset).share()
    assert fd is not None
    assert block(dataset).share() == fd  # once
    other = os.dup(fd)
    attached = Encoded.attach(other, len(block(dataset)))
    os.close(other)  # the mapping stays
    assert attached.view == block(dataset).view
    for view in (attached.view, block(dataset).view):
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
    assert digest(dataset.read(np.arange(1500))) == digest(records)
    copied = pickle.loads(pickle.dumps(dataset))  # by value, for whoever is no child of the launcher
    assert block(copied).view == block(dataset).view
    del dataset, copied, view
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def digest(records: list[Any]) -> list[Any]:
    return [(r["id"], type(r["id"]), r["text"], r["n"].tolist(), r["n"].dtype) for r in records]


def test_a_small_block_and_one_without_room_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block(Dataset.from_list("small", [{"id": 1}])).share() is None

    def no_room(size: int) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(Segment, "create", no_room)
    dataset = large()
    assert block(dataset).share() is None
    assert len(dataset.read(np.arange(1500))) == 1500

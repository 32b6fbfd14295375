"""Case A20 under processes: a consumer may keep batches, slices and views of them; nothing stalls, nothing changes."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import Full
from tests.process.helpers import line, slow

KEPT: dict[str, Callable[[int, Any], Any]] = {
    "all": lambda number, x: x,
    "every third": lambda number, x: x if number % 3 == 0 else None,
    "slices": lambda number, x: x[:, ::2],
    "one element's view": lambda number, x: x[0, 5:6],
    "reshaped and cast views": lambda number, x: x.reshape(-1).view(np.uint8)[8:16].view(np.int64),
    "memoryviews": lambda number, x: memoryview(x),
    "broadcasts": lambda number, x: np.broadcast_to(x, (3, *x.shape)),
    "structures": lambda number, x: {"deep": [x.T]},
}


@contextmanager
def few_descriptors(most: int) -> Iterator[None]:
    """At most so many more than what earlier tests keep open (files of datasets): the limit is on the number itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_already = 1 + max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_already + most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def constant(kept: Any, number: int) -> None:
    array = kept["deep"][0] if isinstance(kept, dict) else np.asarray(kept)
    assert (array == number).all()


ALIKE = {"one element's view", "reshaped and cast views", "broadcasts", "structures"}


@pytest.mark.parametrize("how", [slow(how) if how in ALIKE else how for how in KEPT])
def test_keeping(how: str) -> None:
    keep, kept, longest = KEPT[how], [], 0.0
    before = len(os.listdir("/proc/self/fd"))
    with few_descriptors(256), line(300, Full(64), batch=1, prefetch_batches=1, parallelism=2) as pipeline:
        began = time.monotonic()
        for number, batch in enumerate(pipeline):
            longest = max(longest, time.monotonic() - began)
            if (found := keep(number, batch["x"])) is not None:
                kept.append((number, found))
            began = time.monotonic()
            assert len(os.listdir("/proc/self/fd")) < before + 240
        del batch
    assert len(kept) >= 100
    assert longest < 5
    for number, found in kept:
        constant(found, number)


@pytest.mark.slow
@pytest.mark.parametrize("how", KEPT)
def test_keeping_two_thousand(how: str) -> None:
    kept = []
    with few_descriptors(256), line(2000, Full(64), batch=1, prefetch_batches=2, parallelism=4) as pipeline:
        for number, batch in enumerate(pipeline):
            if (found := KEPT[how](number, batch["x"])) is not None:
                kept.append((number, found))
    for number, found in kept:
        constant(found, number)


@pytest.mark.parametrize("size", [1000, 300_000])
def test_keeping_large_batches_is_keeping_copies(size: int) -> None:
    """There are five slots at least; whoever holds half of them gets memory of its own from there on."""
    with line(24, Full(size), batch=1, prefetch_batches=1) as pipeline:
        kept = [batch["x"] for batch in pipeline]
    for number, x in enumerate(kept):
        constant(x, number)
        x += 1  # writable, and no one else's
        if number:
            constant(kept[number - 1], number)


@pytest.mark.torch
def test_keeping_tensors() -> None:
    torch = pytest.importorskip("torch")
    with line(200, Full(64), batch=2, output="torch", prefetch_batches=1) as pipeline:
        kept = [batch["x"][:, 3:5] for batch in pipeline]
    for number, x in enumerate(kept):
        assert torch.equal(x, torch.tensor([[2 * number] * 2, [2 * number + 1] * 2]))
    with line(40, Full(64), batch=1) as pipeline:
        tensors = [torch.from_numpy(batch["x"]) for batch in pipeline]
    assert all((x == number).all() for number, x in enumerate(tensors))


def test_lists_that_are_asked_for_late() -> None:
    """Text is decoded when someone asks; until then it holds its slot."""

    def tell(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "text": f"row {record['id']}", "meta": (record["id"], None)}

    with line(300, tell, batch=1, prefetch_batches=1) as pipeline:
        kept = list(pipeline)
    assert [batch["text"] for batch in kept] == [[f"row {i}"] for i in range(300)]
    assert [batch["meta"] for batch in kept] == [[(i, None)] for i in range(300)]


def test_a_thread_that_keeps_and_lets_go_while_another_one_takes() -> None:
    """More batches in the hands of the second thread than there are slots."""
    handed: list[tuple[int, Any]] = []
    changed, ready = threading.Condition(), [True]

    def use() -> None:
        held: list[tuple[int, Any]] = []
        while ready[0] or handed:
            with changed:
                changed.wait_for(lambda: handed or not ready[0], 10)
                held += handed
                handed.clear()
            if len(held) > 7:
                for number, x in held:
                    constant(x, number)
                held.clear()

    thread = threading.Thread(target=use)
    thread.start()
    with line(600, Full(9000), batch=1, prefetch_batches=1) as pipeline:
        for number, batch in enumerate(pipeline):
            with changed:
                handed.append((number, batch["x"]))
                changed.notify()
    ready[0] = False
    with changed:
        changed.notify()
    thread.join(20)
    assert not thread.is_alive()
    assert number == 599


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_threads_that_take_from_one_iterator_get_every_batch_once(runner: str) -> None:
    found: list[list[Any]] = [[], [], []]
    errors: list[BaseException] = []
    with line(1200, dict, batch=2).options(runner=runner) as pipeline:
        wanted = [batch.digest() for batch in pipeline]
        iterator = iter(pipeline)

        def take(number: int) -> None:
            try:
                found[number].extend(iterator)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=take, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert errors == []
    taken = sorted(chain(*found), key=lambda batch: int(batch["id"][0]))
    assert [batch.digest() for batch in taken] == wanted


def test_metrics_from_another_thread_take_no_batch_away() -> None:
    found: list[int] = []
    over = threading.Event()
    with line(2000, Full(8), batch=1) as pipeline:

        def watch() -> None:
            while not over.is_set():
                pipeline.metrics()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            found += [int(batch["id"][0]) for batch in pipeline]
        finally:
            over.set()
            thread.join(10)
    assert found == list(range(2000))


def test_a_kept_batch_can_be_copied_pickled_and_asked_again() -> None:
    import copy
    import pickle

    with line(40, Full(64), batch=2) as pipeline:
        iterator = iter(pipeline)
        first: zp.Batch = next(iterator)
        digest = first.digest()
        others = [first.copy(), copy.copy(first)]
        arrays = pickle.loads(pickle.dumps(dict(first)))
        list(iterator)
        assert [batch.digest() for batch in others] == [digest, digest] == [first.digest()] * 2
        assert (arrays["x"] == first["x"]).all()


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("every", [1, 5])
def test_small_batches_that_share_a_slot_are_kept_apart(lanes: int, every: int) -> None:
    """What one holds of a batch is its own, however many lie in the same slot: fields, text and origins."""

    def tell(record: dict[str, Any]) -> dict[str, Any]:
        return {"id": record["id"], "text": "ü" * (record["id"] % 7), "raw": bytes(record["id"] % 3), "f": 0.5}

    options: dict[str, Any] = {"canonical_replicas": lanes, "task_records": 64, "chunk_size": 40}
    kept = []
    with line(3000, tell, batch=3, **options) as pipeline:
        for number, batch in enumerate(pipeline):
            if number % every == 0:
                kept.append(batch)
            else:
                batch["id"][:] = -1  # the receiver may write to it
    with line(3000, tell, batch=3, **(options | {"runner": "inline"})) as pipeline:
        wanted = list(pipeline)[::every]
    assert len(kept) == len(wanted)
    for batch, other in zip(kept, wanted, strict=True):
        assert batch.digest() == other.digest()
        assert batch.origins == other.origins
        assert (batch.lane_id, batch.step, batch.num_samples) == (other.lane_id, other.step, other.num_samples)


def test_keeping_all_where_many_batches_are_prepared() -> None:
    """More than there are slots by default: both sides count the same number, so keeping them stops nothing."""
    with line(120, Full(20_000), batch=1, prefetch_batches=40) as pipeline:
        kept = [batch["x"] for batch in pipeline]
    assert len(kept) == 120
    for number, x in enumerate(kept):
        constant(x, number)

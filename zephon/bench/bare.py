"""The bare limits: the same work in two forked processes, or one copy, with no loader around it."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec
import numpy as np

from zephon.bench import corpus, data, operators, proc
from zephon.bench.pipelines import PACK_LENGTH, W1_BATCH, W3_BATCH, W4_BATCH
from zephon.bench.spec import BARE_PIPE, Sample, Spec
from zephon.bench.stream import timed

NUM_PROCESSES = 2
_CELL_BYTES = 64  # a cache line a counter
_SIZE = struct.Struct("<q")

Loop = Callable[[int, Callable[[float], None]], None]
"""(index of the process, add units done): works for ever."""


def measure(spec: Spec) -> Sample:
    """The bare limit that a spec names."""
    if spec.system == BARE_PIPE:
        return _through_pipes(spec)
    make = {"w1": _records, "w2": _spins, "w3": _packs, "w4": _copies}[spec.base]
    return in_two_processes(spec, *make(spec))


def in_two_processes(spec: Spec, loop: Loop, units_per_record: float) -> Sample:
    """The rate of two forked processes that run `loop`, each counting in a cell of shared memory."""
    shared = mmap.mmap(-1, NUM_PROCESSES * _CELL_BYTES)
    cells = memoryview(shared).cast("d")

    def run(index: int) -> None:
        own, total = index * _CELL_BYTES // 8, 0.0

        def add(units: float) -> None:
            nonlocal total
            total += units
            cells[own] = total

        loop(index, add)

    def done() -> float:
        return sum(cells[i * _CELL_BYTES // 8] for i in range(NUM_PROCESSES))

    with _forked(run):
        while not all(cells[i * _CELL_BYTES // 8] for i in range(NUM_PROCESSES)):
            time.sleep(0.01)
        time.sleep(spec.warm_s)
        machine, cpu = proc.machine_cpu_s(), proc.cpu_by_kind(os.getpid(), spec.system)
        before, begun = done(), time.perf_counter()
        time.sleep(spec.seconds)
        units, took = done() - before, time.perf_counter() - begun
        machine = proc.machine_cpu_s() - machine
        used = {kind: s - cpu.get(kind, 0.0) for kind, s in proc.cpu_by_kind(os.getpid(), spec.system).items()}
        return Sample(
            rate=units / took,
            cpu_us={kind: s / units * units_per_record * 1e6 for kind, s in used.items()},
            pss_mb=proc.tree_pss_mb(os.getpid()),
            other_cores=max(0.0, (machine - sum(used.values())) / took),
        )


@contextlib.contextmanager
def _forked(run: Callable[[int], None]) -> Iterator[None]:
    """Two processes that run `run(index)` until the block is left."""
    pids = []
    try:
        for index in range(NUM_PROCESSES):
            pid = os.fork()
            if pid == 0:
                _child(run, index)
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(run: Callable[[int], None], index: int) -> NoReturn:
    """A forked process's life. Its end is an error: the loops are endless."""
    try:
        run(index)
    except BrokenPipeError:
        pass  # the reader is done
    finally:
        os._exit(1)


def _records(spec: Spec) -> tuple[Loop, float]:
    """W1: records made and passed through the operator; delivered to no one."""

    def loop(index: int, add: Callable[[float], None]) -> None:
        row = index
        while True:
            for _ in range(W1_BATCH):
                operators.identity(data.text_record(row))
                row += NUM_PROCESSES
            add(W1_BATCH)

    return loop, 1.0


def _through_pipes(spec: Spec) -> Sample:
    """W1: batches pickled by two processes, each into its pipe, and unpickled in turn."""
    pipes = [os.pipe() for _ in range(NUM_PROCESSES)]

    def run(index: int) -> None:
        row, out = index * W1_BATCH, pipes[index][1]
        for reader, _ in pipes:
            os.close(reader)
        with open(out, "wb", buffering=1 << 16) as file:
            while True:
                records = [operators.identity(data.text_record(row + i)) for i in range(W1_BATCH)]
                row += NUM_PROCESSES * W1_BATCH
                ids = np.array([record["id"] for record in records], np.int64)
                raw = pickle.dumps({"id": ids, "text": [record["text"] for record in records]}, 5)
                file.write(_SIZE.pack(len(raw)))
                file.write(raw)
                file.flush()

    with _forked(run):
        for _, writer in pipes:
            os.close(writer)
        files = [os.fdopen(reader, "rb", buffering=1 << 16) for reader, _ in pipes]

        def stream() -> Iterator[Any]:
            while True:
                for file in files:
                    (size,) = _SIZE.unpack(file.read(_SIZE.size))
                    yield pickle.loads(file.read(size))

        try:
            return timed(spec, stream, lambda batch: len(batch["text"]))
        finally:
            for file in files:
                file.close()


def _spins(spec: Spec) -> tuple[Loop, float]:
    """W2: the same costs, each process through the whole table, so both are always busy: the ideal spread."""
    records = data.CostRecords(spec.variant, spec.loops_per_us)

    def loop(index: int, add: Callable[[float], None]) -> None:
        row = index * data.NUM_COSTS // NUM_PROCESSES
        while True:
            record = operators.spin_record(records(row))
            add(record["loops"] / records.mean_loops)
            row += 1

    return loop, 1.0


def _packs(spec: Spec) -> tuple[Loop, float]:
    """W3: lines to tokens to sequences to batches, each process over half of the shards."""
    found = corpus.make(spec.folder)

    def loop(index: int, add: Callable[[float], None]) -> None:
        for batch in packed_batches(found, index, NUM_PROCESSES):
            add(batch["input_ids"].size)

    return loop, found.tokens_per_document


def packed_batches(found: corpus.Corpus, index: int, count: int) -> Iterator[dict[str, Any]]:
    """Endless batches of W3 from every `count`-th shard, by plain loops: int64 [8, 2048] each."""
    rows: list[dict[str, Any]] = []
    for row in packed_rows(found, index, count):
        rows.append(row)
        if len(rows) == W3_BATCH:
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            rows = []


def packed_rows(found: corpus.Corpus, index: int, count: int) -> Iterator[dict[str, Any]]:
    """Endless sequences of W3, wrapped: input_ids, position_ids, segment_ids, int64 [2048] each."""
    names = ("input_ids", "position_ids", "segment_ids")
    row, filled, segment = {name: np.empty(PACK_LENGTH, np.int64) for name in names}, 0, 0
    for ids in _token_ids(found, index, count):
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + PACK_LENGTH - filled)
            end, segment = filled + stop - start, segment + 1
            row["input_ids"][filled:end] = ids[start:stop]
            row["position_ids"][filled:end] = np.arange(stop - start)
            row["segment_ids"][filled:end] = segment
            filled, start = end, stop
            if filled == PACK_LENGTH:
                yield row
                row, filled, segment = {name: np.empty(PACK_LENGTH, np.int64) for name in names}, 0, 0


_LINES_AT_ONCE = 128  # as many as a task of the pipeline holds


def _token_ids(found: corpus.Corpus, index: int, count: int) -> Iterator[Any]:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(found.tokenizer).encode_batch_fast
    decode = msgspec.json.Decoder().decode
    while True:
        for shard in found.shards[index::count]:
            with open(shard, "rb") as file:
                texts = [decode(line)["text"] for line in file]
            for at in range(0, len(texts), _LINES_AT_ONCE):
                for encoding in encode(texts[at : at + _LINES_AT_ONCE], add_special_tokens=False):
                    yield np.array(encoding.ids, np.int64)


def _copies(spec: Spec) -> tuple[Loop, float]:
    """W4: a batch of ready arrays copied into one reused slot of shared memory, again and again."""
    arrays = [np.full(operators.ARRAY_SHAPE, i, np.uint8) for i in range(W4_BATCH)]
    size = arrays[0].nbytes * W4_BATCH
    slots = [mmap.mmap(-1, size) for _ in range(NUM_PROCESSES)]

    def loop(index: int, add: Callable[[float], None]) -> None:
        slot = np.frombuffer(slots[index], np.uint8).reshape(W4_BATCH, *operators.ARRAY_SHAPE)
        while True:
            for i, array in enumerate(arrays):
                slot[i] = array
            add(size / 1e9)

    return loop, arrays[0].nbytes / 1e9

"""Pipelines for the tests of the command line: sound ones, and one for each way to break the promise."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zephon as zp
from zephon.ops.accumulator import Accumulator, Emitted, Key, Ref

Record = dict[str, Any]


def start(num_rows: int = 220, **settings: Any) -> zp.Pipeline:
    """Two datasets, mixed, with a filter; a pass is `num_rows` pointers."""
    rows = [{"id": i, "text": "word " * (i % 7 + 1)} for i in range(num_rows)]
    middle = num_rows * 2 // 3
    datasets = [zp.Dataset.from_list("web", rows[:middle]), zp.Dataset.from_list("code", rows[middle:])]
    settings = {"seed": 3, "chunk_size": 8, "end": "redistribute", **settings}
    return zp.Pipeline(zp.StaticMixture(datasets, weights=[2, 1], **settings)).filter(keep)


def keep(record: Record) -> bool:
    return bool(record["id"] % 11)


def finish(pipeline: zp.Pipeline) -> zp.Pipeline:
    return pipeline.shuffle(5).batch(4).options(flush_every_k_chunks=2)


# -- sound -------------------------------------------------------------------------------------------------------------


def count(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def noise(record: Record, rng: Any) -> Record:
    return {**record, "noise": float(rng.random())}


def packed() -> zp.Pipeline:
    """The usual one; its own topology and execution settings must not be in the way."""
    pipeline = start().map(noise).tokenize(count).shuffle(7).pack(16).batch(2)
    options = {"dp_degree": 2, "dp_group_id": 1, "world_size": 4, "global_rank": 3, "parallelism": {"noise": 2}}
    return pipeline.options(canonical_replicas=5, cycles_per_step=2, flush_every_k_chunks=3, **options).take(3)


def plain() -> zp.Pipeline:
    """Nothing regroups, so places are pointers; the filter drops behind the last sample of a lane."""
    return start(end="epochs").flat_map(lambda record: [record] * (record["id"] % 3), name="repeat").batch(3)


def endless() -> zp.Pipeline:
    return start(end="repeat").map(noise).batch(3)


ready = plain()


# -- not sound ---------------------------------------------------------------------------------------------------------


def jitter(record: Record) -> Record:
    return {**record, "x": random.random()}


def stamp(record: Record) -> Record:
    return {**record, "at": time.perf_counter_ns()}


calls = [0]


def numbered(record: Record) -> Record:
    calls[0] += 1
    return {**record, "number": calls[0]}


last = [0]


def previous(record: Record) -> Record:
    before, last[0] = last[0], record["id"]
    return {**record, "before": before}


shared: list[int] = []


def collects(record: Record) -> Record:
    shared.append(record["id"] % 3)
    return {**record, "sum": sum(shared[-4:])}


def every_second(record: Record) -> bool:
    calls[0] += 1
    return bool(calls[0] % 2)


def half(record: Record) -> bool:
    return bool(hash(f"{record['text']}{record['id']}") % 2)


def with_jitter() -> zp.Pipeline:
    return finish(start().map(jitter))


def with_stamp() -> zp.Pipeline:
    return finish(start().map(stamp))


def with_numbered() -> zp.Pipeline:
    return finish(start().map(numbered))


def with_previous() -> zp.Pipeline:
    return finish(start().map(previous))


def with_collects() -> zp.Pipeline:
    return finish(start().map(collects))


def with_every_second() -> zp.Pipeline:
    return finish(start().filter(every_second))


def with_half() -> zp.Pipeline:
    return finish(start().filter(half))


def rarely(record: Record) -> Record:
    return {**record, "x": random.random() if record["id"] == 133 else 0.0}


def with_rarely() -> zp.Pipeline:
    return finish(start().map(rarely))


def crowded(record: Record) -> Record:
    """Tells how many processes of one launcher were there, once they are more than there ever are by themselves."""
    folder = Path(tempfile.gettempdir(), f"zephon-test-crowd-{os.getppid()}")
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    return {**record, "many": len(list(folder.iterdir())) > 4, "weight": bytes(100_000)}  # so nothing runs far ahead


def with_crowded() -> zp.Pipeline:
    return start(end="repeat").map(crowded).batch(3)


class Mixer(Accumulator):
    """Holds three records back, of whichever lane."""

    method = "mixer"
    preserves = True
    batched = True

    def __init__(self) -> None:
        self._held: list[Ref] = []

    def open(self, lane: int, key: Key) -> None:
        pass

    def push(self, lane: int, refs: Sequence[Ref]) -> Emitted:
        emitted = Emitted()
        for trigger, ref in enumerate(refs):
            self._held.append(ref)
            if len(self._held) > 3:
                emitted.add(trigger, self._held.pop(0))
        return emitted

    def flush(self, lane: int) -> Emitted:
        emitted = Emitted()
        for ref in self._held:
            emitted.add(0, ref)
        self._held = []
        return emitted


def with_mixer() -> zp.Pipeline:
    return finish(start().apply(Mixer()))


def fails(record: Record) -> Record:
    if record["id"] == 133:
        raise KeyError("no such field")
    return record


def with_fails() -> zp.Pipeline:
    return start().flat_map(lambda record: [record, record], name="twice").map(fails).batch(4)


def nothing() -> zp.Pipeline:
    return start().filter(lambda record: False, name="none").batch(4)


def dry() -> zp.Pipeline:
    return start(end="repeat").filter(lambda record: False, name="none").batch(4)


def loose() -> zp.Pipeline:
    return plain().options(deterministic=False)


# -- no pipelines ------------------------------------------------------------------------------------------------------


def needs(path: str, limit: int = 3) -> zp.Pipeline:
    return plain().take(limit)


def gives_list() -> list[zp.Pipeline]:
    return [plain()]


def fails_to_build() -> zp.Pipeline:
    raise OSError("the corpus is gone")


def wrong_setting() -> zp.Pipeline:
    return plain().options(canonical_replicas=0)


def prints() -> zp.Pipeline:
    print("building")
    return plain()

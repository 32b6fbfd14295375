"""What the cases share: small sources and files, workers as the cases count them, states that went through JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zephon as zp


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Records {"id": first}, {"id": first + 1}, ..."""
    return [{"id": i} for i in range(first, first + count)]


def source(records: Any, **settings: Any) -> zp.StaticMixture:
    """One dataset named "toy": of a number of rows, a list of records, or a Dataset. Unshuffled, in chunks of 8."""
    records = rows(records) if isinstance(records, int) else records
    dataset = records if isinstance(records, zp.Dataset) else zp.Dataset.from_list("toy", records)
    return zp.StaticMixture([dataset], **{"seed": 5, "chunk_size": 8, "shuffle": "none", **settings})


def pipeline(records: Any, **settings: Any) -> zp.Pipeline:
    """A pipeline over `source(records, ...)` with no operators and one lane."""
    return zp.Pipeline(source(records, **settings)).options(canonical_replicas=1)


def on(line: zp.Pipeline, workers: int, **settings: Any) -> zp.Pipeline:
    """The pipeline with `workers` threads a stage; 0 is inline."""
    if workers == 0:
        return line.options(runner="inline", **settings)
    return line.options(runner="threads", parallelism=workers, **settings)


def ids(batches: Iterable[zp.Batch], field: str = "id") -> list[Any]:
    """The values of a field over all samples, in order."""
    return [value for batch in batches for value in list_of(batch[field])]


def list_of(field: Any) -> list[Any]:
    """A field of a batch, array or list, as a list of Python values."""
    return field if isinstance(field, list) else list(field.tolist())


def digests(batches: Iterable[zp.Batch]) -> list[str]:
    """The digest of every batch."""
    return [batch.digest() for batch in batches]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back from a file."""
    read: dict[str, Any] = json.loads(json.dumps(state))
    return read


def saved(line: zp.Pipeline) -> dict[str, Any]:
    """The pipeline's state now, through JSON."""
    return through_json(line.state_dict())


def resumed(line: zp.Pipeline, state: dict[str, Any], **settings: Any) -> zp.Pipeline:
    """A new pipeline of the same definition that starts at the state; on threads, which start at once, if unset."""
    if line._definition.options.execution.runner is None:
        settings = {"runner": "threads", **settings}
    new = line.options(**settings)
    new.load_state_dict(through_json(state))
    return new


def current_pass(line: zp.Pipeline) -> int:
    """The pass that the pipeline is in: the least of its lanes."""
    return min(int(lane["pass"]) for lane in line.state_dict()["lanes"].values())


def stream(line: zp.Pipeline, passes: int = 1) -> Iterator[zp.Batch]:
    """The batches from the pipeline's start to the end of pass number `passes` (counted from 1)."""
    while current_pass(line) < passes:
        yield from line


def first(line: zp.Pipeline, count: int) -> list[zp.Batch]:
    """The next `count` batches; the iterator is then given up."""
    iterator = iter(line)
    return [next(iterator) for _ in range(count)]


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Writes records as JSONL, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def shards(folder: Path, count: int, each: int) -> zp.Dataset:
    """A dataset of JSONL shards with running ids."""
    for shard in range(count):
        write_jsonl(folder / "data" / f"{shard:03d}.jsonl", rows(each, shard * each))
    return zp.Dataset.from_path("files", folder / "data", index_dir=folder / "index")


def lost(lengths: Sequence[int], size: int, oversize: str) -> dict[str, int]:
    """What `pack` counts of documents of these lengths."""
    long = [n for n in lengths if n > size]
    counted = {"pack.empty_documents": list(lengths).count(0)}
    if oversize == "truncate":
        counted |= {"pack.truncated_documents": len(long), "pack.truncated_tokens": sum(long) - size * len(long)}
    if oversize == "drop":
        counted |= {"pack.oversize_documents": len(long), "pack.oversize_tokens": sum(long)}
    return {reason: amount for reason, amount in counted.items() if amount}

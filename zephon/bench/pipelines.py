"""The workloads as pipelines of Zephon, and what is counted in their batches."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from zephon.batch import Batch
from zephon.bench import corpus, data, operators
from zephon.bench.spec import Spec
from zephon.bench.stream import Count
from zephon.io.dataset import Dataset
from zephon.pipeline import Pipeline
from zephon.work.static_mixture import StaticMixture

MADE_ROWS = 1 << 40  # more than any run reads, so nothing repeats
LISTED_ROWS = 65_536
W1_BATCH, W2_BATCH, W3_BATCH, W4_BATCH = 32, 32, 8, 16
PACK_LENGTH = 2048


class Work(NamedTuple):
    """A pipeline, what counts the units in a batch, and how many units are one record."""

    pipeline: Pipeline
    count_units: Count
    units_per_record: float = 1.0


def touch(batch: Batch) -> int:
    """Samples of a batch, after every field was asked for (lists are decoded then)."""
    for name in batch:
        batch[name]
    return batch.num_samples


def work(spec: Spec) -> Work:
    """The workload of a spec, under its runner, parallelism and lanes."""
    make = {"w1": _w1, "w2": _w2, "w3": _w3, "w4": _w4}[spec.base]
    made = make(spec)
    settings = {"runner": spec.runner, "parallelism": spec.parallelism, "canonical_replicas": spec.lanes or 1}
    return made._replace(pipeline=made.pipeline.options(**settings))


def endless(dataset: Dataset) -> Pipeline:
    """One dataset again and again."""
    return Pipeline(StaticMixture([dataset], seed=1, end="repeat"))


def _w1(spec: Spec) -> Work:
    if spec.variant == "list":
        dataset = Dataset.from_list("w1", [data.text_record(row) for row in range(LISTED_ROWS)])
    else:
        dataset = data.made_dataset("w1", data.text_record, MADE_ROWS)
    return Work(endless(dataset).map(operators.identity).batch(W1_BATCH), touch)


def _w2(spec: Spec) -> Work:
    records = data.CostRecords(spec.variant, spec.loops_per_us)
    pipeline = endless(data.made_dataset("w2", records, MADE_ROWS)).map(operators.spin_record).batch(W2_BATCH)
    return Work(pipeline, partial(count_cost, records.mean_loops))


def count_cost(mean_loops: float, batch: Batch) -> float:
    """Records of average cost in a batch: where costs differ, a second must not count more for cheap records."""
    touch(batch)
    return float(batch["loops"].sum()) / mean_loops


def _w3(spec: Spec) -> Work:
    found = corpus.make(spec.folder)
    dataset = Dataset.from_path("w3", found.shards, index_dir=found.index_dir)
    pipeline = endless(dataset).tokenize(found.tokenizer).pack(PACK_LENGTH).batch(W3_BATCH)
    return Work(pipeline, count_tokens, found.tokens_per_document)


def count_tokens(batch: Batch) -> float:
    """Tokens of a packed batch, padding apart."""
    touch(batch)
    return float(batch["input_ids"].size - int(batch["num_pad"].sum()))


def _w4(spec: Spec) -> Work:
    pipeline = endless(data.made_dataset("w4", data.id_record, MADE_ROWS)).map(operators.make_array).batch(W4_BATCH)
    return Work(pipeline, count_bytes, operators.ARRAY_BYTES / 1e9)


def count_bytes(batch: Batch) -> float:
    """GB (10^9 bytes) of arrays in a batch."""
    touch(batch)
    return float(batch["image"].nbytes) / 1e9


def of_target(pipeline: Pipeline, spec: Spec) -> Work:
    """A user's pipeline under the runner and parallelism of a spec. Counts samples."""
    return Work(pipeline.options(runner=spec.runner, parallelism=spec.parallelism), touch)

"""Torch's DataLoader on the same rows and functions: the way its users would write them.

Workers are forked, persistent and prefetch two batches each, as its defaults say. `torch` stacks with its own
`default_collate`, which gives tensors in shared memory; `torch-numpy` with a function that leaves numpy arrays, which
travel through the pipe: faster where records are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from zephon.bench import corpus, data, operators
from zephon.bench.bare import packed_rows
from zephon.bench.pipelines import MADE_ROWS, W1_BATCH, W2_BATCH, W3_BATCH, W4_BATCH
from zephon.bench.spec import Sample, Spec
from zephon.bench.stream import timed
from zephon.errors import ConfigError

PEERS: Final = ("torch", "torch-numpy")


class Rows:
    """A map-style dataset: row by number, through the operator."""

    def __init__(self, make: Callable[[int], operators.Record], run: Callable[[operators.Record], operators.Record]):
        self._make, self._run = make, run

    def __len__(self) -> int:
        return MADE_ROWS

    def __getitem__(self, row: int) -> operators.Record:
        return self._run(self._make(row))


def measure(spec: Spec) -> Sample:
    """Torch's DataLoader on the workload of a spec."""
    make = {"w1": _w1, "w2": _w2, "w3": _w3, "w4": _w4}[spec.base]
    loader, count, units_per_record = make(spec)
    return timed(spec, lambda: iter(loader), count, units_per_record)


def check(peers: tuple[str, ...]) -> None:
    """Raises ConfigError where a peer is unknown or not installed."""
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(f"--peers {peer}: the peers are {', '.join(PEERS)}")
        _torch()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError("--peers torch: torch is not installed: pip install zephon[torch]") from error
    return torch


def _loader(spec: Spec, dataset: Any, size: int) -> Any:
    torch = _torch()
    collate = stack_in_numpy if spec.system == "torch-numpy" else None
    return torch.utils.data.DataLoader(
        dataset, size, num_workers=spec.parallelism, persistent_workers=True, collate_fn=collate
    )


def stack_in_numpy(records: list[operators.Record]) -> dict[str, Any]:
    """Numbers and arrays as one numpy array, strings as a list."""
    columns = {name: [record[name] for record in records] for name in records[0]}
    return {name: values if isinstance(values[0], str) else np.stack(values) for name, values in columns.items()}


Peer = tuple[Any, Callable[[Any], float], float]


def _w1(spec: Spec) -> Peer:
    data.texts()  # before the fork
    return _loader(spec, Rows(data.text_record, operators.identity), W1_BATCH), lambda batch: len(batch["text"]), 1.0


def _w2(spec: Spec) -> Peer:
    records = data.CostRecords(spec.variant, spec.loops_per_us)
    loader = _loader(spec, Rows(records, operators.spin_record), W2_BATCH)
    return loader, lambda batch: float(batch["loops"].sum()) / records.mean_loops, 1.0


def _w4(spec: Spec) -> Peer:
    loader = _loader(spec, Rows(data.id_record, operators.make_array), W4_BATCH)
    return loader, lambda batch: float(batch["image"].nbytes) / 1e9, operators.ARRAY_BYTES / 1e9


def _w3(spec: Spec) -> Peer:
    torch, found = _torch(), corpus.make(spec.folder)

    class Packed(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            return packed_rows(found, info.id if info else 0, info.num_workers if info else 1)

    return (
        _loader(spec, Packed(), W3_BATCH),
        lambda batch: float(np.prod(batch["input_ids"].shape)),
        found.tokens_per_document,
    )

"""A pipeline for pretraining on text: two datasets, mixed, filtered, tokenised, shuffled, packed and batched.

The demonstration and `zephon verify examples/pretrain.py:pipeline` use it. It is a good start for your own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import zephon as zp


def keep(record: dict[str, Any]) -> bool:
    """Whether there is enough text to learn from."""
    return len(record["text"].strip()) >= 40


def source() -> zp.StaticMixture:
    """Which documents are read, and in what order. The corpus is made the first time, which takes some seconds."""
    corpus = _corpus()
    web = zp.Dataset.from_path("web", corpus.web)  # JSONL
    code = zp.Dataset.from_path("code", corpus.code)  # Parquet
    return zp.StaticMixture([web, code], weights={"web": 0.7, "code": 0.3}, seed=17, chunk_size=64)


def pipeline() -> zp.Pipeline:
    """Batches of 8 sequences of 2,048 tokens, on four lanes."""
    return (
        zp.Pipeline(source())
        .filter(keep)
        .tokenize(_corpus().tokenizer, field="text", add_eos=True)
        .shuffle(buffer_size=128)
        .pack(max_length=2048, pad_id=1)
        .batch(8)
        # At every fourth chunk of a lane, that is every 256 documents, shuffle and pack let go of what they hold.
        .options(canonical_replicas=4, flush_every_k_chunks=4)
    )


def _corpus() -> Any:
    """What make_corpus.py, beside this file, makes."""
    folder = str(Path(__file__).resolve().parent)
    if folder not in sys.path:  # this file may have been loaded by its path
        sys.path.insert(0, folder)
    from make_corpus import make_corpus

    return make_corpus()

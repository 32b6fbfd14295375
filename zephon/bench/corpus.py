"""The text of W3: documents cut from Python's own standard library, as JSONL shards, and a tokenizer trained on them.

Made once into a folder; the same for one version of Python. Lengths are log-normal (median 660 characters).
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

from zephon.errors import ConfigError

NUM_DOCUMENTS = 16_384
NUM_SHARDS = 8
VOCABULARY = 8_192
SAMPLED = 8  # the tokenizer is trained on every 8th document
LENGTH = (6.5, 0.85, 50, 6_000)  # characters of a document: mean and deviation of the logarithm, least, most
_MOST_TEXT = 12_000_000  # characters of the library that are used
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
_VERSION = 1  # raise it when a change here changes a document


class Corpus(NamedTuple):
    """Where the parts lie, and the mean number of tokens a document."""

    shards: list[str]
    tokenizer: str
    index_dir: str
    tokens_per_document: float


def default_folder() -> str:
    """The user's cache folder, under the versions of this module and of Python."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "zephon", f"bench-{_VERSION}-{platform.python_version()}-{NUM_DOCUMENTS}")


def make(folder: str) -> Corpus:
    """The corpus in `folder`, made there where it is missing: into a sibling folder that is renamed at the end."""
    place = Path(folder)
    if not (place / "manifest.json").exists():
        part = place.with_name(f"{place.name}.part-{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            _write(part)
            part.rename(place)
        except OSError as error:
            if not (place / "manifest.json").exists():  # else another process was faster
                raise ConfigError(f"no corpus can be made in {place}: {error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    manifest = json.loads((place / "manifest.json").read_text())
    shards = sorted(str(path) for path in place.glob("part-*.jsonl"))
    return Corpus(shards, str(place / "tokenizer.json"), str(place / "index"), manifest["tokens_per_document"])


def _write(folder: Path) -> None:
    text = _library()
    documents = [_document(text, i) for i in range(NUM_DOCUMENTS)]
    share = -(-NUM_DOCUMENTS // NUM_SHARDS)
    for shard in range(NUM_SHARDS):
        rows = enumerate(documents[shard * share : (shard + 1) * share], shard * share)
        lines = [json.dumps({"id": i, "text": document}, ensure_ascii=False) + "\n" for i, document in rows]
        (folder / f"part-{shard}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokens = _train(documents, folder / "tokenizer.json")
    (folder / "index").mkdir()
    (folder / "manifest.json").write_text(json.dumps({"tokens_per_document": tokens / NUM_DOCUMENTS}))


def _library() -> str:
    """The text of the standard library's modules, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if size < _MOST_TEXT and not _SKIPPED.intersection(path.relative_to(root).parts):
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
    return "\n".join(parts)


def _document(text: str, i: int) -> str:
    rng = random.Random(f"document {i}")
    mean, deviation, least, most = LENGTH
    length = max(least, min(most, int(rng.lognormvariate(mean, deviation))))
    start = int(rng.random() * (len(text) - length))
    return text[start : start + length]


def _train(documents: list[str], path: Path) -> int:
    """Trains a byte-level BPE, saves it, and returns how many tokens all documents have."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError("w3, w6 and w7 need a tokenizer: pip install zephon[text]") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[::SAMPLED], trainer)
    tokenizer.save(str(path))
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False))

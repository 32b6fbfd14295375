"""Makes a corpus for the examples, without network, from text that ships with Python itself.

Two datasets and a tokenizer, the same for one version of Python whenever and wherever they are made:

- `web/`: JSONL shards of prose: docstrings, comments, help pages and the licence of the standard library;
- `code/`: Parquet shards of functions and classes of the standard library (JSONL where pyarrow is absent);
- `tokenizer.json`: a byte-level BPE of 8,192 tokens, trained on a sample of both. `<|endoftext|>` is 0, `<|pad|>` is 1.

Documents have log-normal lengths. There is less text than documents ask for, so a document is a run of paragraphs
chosen by its number; some documents are nearly empty, so that a filter has something to drop.

Use: `python examples/make_corpus.py [FOLDER]`, or `make_corpus(folder)`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import os
import platform
import random
import re
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_FOLDER = Path(__file__).parent / "corpus"
NUM_WEB = 28_000
NUM_CODE = 12_000
NUM_WEB_SHARDS = 8
NUM_CODE_SHARDS = 4
SHORT_SHARE = 0.03  # of documents that a sensible filter drops
LENGTH = (6.5, 0.85, 50, 6_000)  # characters of a document: mean and deviation of the logarithm, least, most
VOCABULARY = 8_192
SAMPLED = 12  # the tokenizer is trained on every 12th document

_VERSION = 1  # of what this script makes: raise it when a change here changes a document
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
_NEARLY_EMPTY = ("", " ", "...", "See also:", "Deprecated.", "n/a", "\n\n", "Internal use only.", "pass", "return None")

Document = dict[str, Any]
Passage = tuple[str, str]  # (text, source)
Step = Callable[[str], None]


class Corpus(NamedTuple):
    """Where the parts of a corpus lie: two folders of shards and a tokenizer's file."""

    folder: Path
    web: Path
    code: Path
    tokenizer: Path


def make_corpus(folder: str | os.PathLike[str] = DEFAULT_FOLDER, progress: bool = True) -> Corpus:
    """The corpus in `folder`, made there unless a complete one of this version is there already.

    Written into a sibling folder that is renamed at the end, so that a reader never meets half a corpus. A folder
    that holds anything but an older corpus is left alone: FileExistsError. Needs the extra `text` (tokenizers).
    """
    folder = Path(folder).resolve()
    corpus = Corpus(folder, folder / "web", folder / "code", folder / "tokenizer.json")
    if _is_complete(folder):
        return corpus
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    try:
        with _steps(5, progress) as step:
            _write(part, step)
        _move(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return corpus


def _write(folder: Path, step: Step) -> None:
    step("reading the standard library")
    prose, code = read_library()
    step("web/: writing documents")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    web_documents = [web_document(prose, i) for i in range(NUM_WEB)]
    _write_shards(folder / "web", web_documents, NUM_WEB_SHARDS, "jsonl")
    step("code/: writing documents")
    code_documents = [code_document(code, i) for i in range(NUM_CODE)]
    _write_shards(folder / "code", code_documents, NUM_CODE_SHARDS, _code_format())
    step("training the tokenizer")
    texts = itertools.chain(web_documents[::SAMPLED], code_documents[::SAMPLED])
    train_tokenizer((document["text"] for document in texts), folder / "tokenizer.json")
    step("done")
    (folder / "manifest.json").write_text(json.dumps(_manifest(), indent=1), encoding="utf-8")


# Text: what the standard library holds.


def read_library() -> tuple[list[Passage], list[Passage]]:
    """(paragraphs of prose, functions and classes), each with the module it stands in; in the order of module names."""
    prose: list[Passage] = []
    code: list[Passage] = []
    for name, text in _modules():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # a template, or a file for another version
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                prose.extend((paragraph, name) for paragraph in _paragraphs(ast.get_docstring(node) or ""))
                if not isinstance(node, ast.Module):
                    code.extend(_definition(node, lines, name))
        prose.extend((paragraph, name) for paragraph in _comments(lines))
    prose.extend(_help_pages())
    return prose, code


def _modules() -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every file of the standard library, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix == ".py":
                dotted = ".".join(path.relative_to(root).with_suffix("").parts)
                yield dotted, path.read_text(encoding="utf-8", errors="replace")


def _help_pages() -> Iterator[Passage]:
    """The pages of `help()`, and Python's licence; where a distribution leaves them out, nothing."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        topics = {}
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    if licence.is_file():
        topics = {**topics, "license": licence.read_text(encoding="utf-8", errors="replace")}
    for name in sorted(topics):
        yield from ((paragraph, f"help.{name}") for paragraph in _paragraphs(topics[name]))


def _paragraphs(text: str) -> list[str]:
    """Blocks between blank lines that hold more than a few characters."""
    return [block.strip() for block in re.split(r"\n\s*\n", text) if len(block.strip()) >= 30]


def _comments(lines: list[str]) -> Iterator[str]:
    """Runs of two or more lines of comment, without their marks."""
    for is_comment, run in itertools.groupby(lines, key=lambda line: line.lstrip().startswith("# ")):
        block = [line.strip().removeprefix("# ") for line in run] if is_comment else []
        if len(block) >= 2:
            yield "\n".join(block)


def _definition(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], name: str
) -> list[Passage]:
    """The source text of a function or class of three lines or more."""
    stop = node.end_lineno or node.lineno
    if stop - node.lineno < 2:
        return []
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return [(textwrap.dedent("\n".join(lines[start - 1 : stop])), f"{name}.{node.name}")]


# Documents: each decided by its number alone.


def web_document(prose: list[Passage], i: int) -> Document:
    """The i-th document of `web`: one run of neighbouring paragraphs, or two from different places."""
    rng = random.Random(f"web {i}")
    if rng.random() < SHORT_SHARE:
        return {"id": i, "text": rng.choice(_NEARLY_EMPTY), "source": "web"}
    length = _length(rng)
    parts = (length // 2, length - length // 2) if rng.random() < 0.25 else (length,)
    blocks: list[str] = []
    source = ""
    for part in parts:
        start = int(rng.random() * len(prose))
        source = source or prose[start][1]
        blocks.append(_run(prose, start, part))
    return {"id": i, "text": "\n\n".join(blocks), "source": source}


def code_document(code: list[Passage], i: int) -> Document:
    """The i-th document of `code`: one definition, and where that is small its neighbours too.

    Its `id` continues the numbers of `web`.
    """
    rng = random.Random(f"code {i}")
    if rng.random() < SHORT_SHARE:
        return {"id": NUM_WEB + i, "text": rng.choice(_NEARLY_EMPTY), "source": "code"}
    # A stride that shares no factor with most counts visits every definition before any comes again.
    start = i * 7_919 % len(code)
    text, source = code[start]
    longest = LENGTH[3]
    if len(text) < 200:
        text = _run(code, start, _length(rng))
    return {"id": NUM_WEB + i, "text": text[:longest], "source": source}


def _length(rng: random.Random) -> int:
    mean, deviation, least, most = LENGTH
    return max(least, min(most, int(rng.lognormvariate(mean, deviation))))


def _run(passages: list[Passage], start: int, length: int) -> str:
    """Neighbouring passages from `start` on, cut at the last word within `length` characters."""
    blocks: list[str] = []
    missing = length
    while missing > 0:
        block = passages[start % len(passages)][0]
        blocks.append(block)
        missing -= len(block) + 2
        start += 1
    text = "\n\n".join(blocks)
    return text if len(text) <= length else text[:length].rsplit(None, 1)[0]


# Files.


def _write_shards(folder: Path, documents: list[Document], num_shards: int, form: str) -> None:
    """Cuts the documents into `num_shards` runs of one length and writes each as `part-N.form`."""
    folder.mkdir()
    size = -(-len(documents) // num_shards)
    for shard in range(num_shards):
        rows = documents[shard * size : (shard + 1) * size]
        path = folder / f"part-{shard}.{form}"
        if form == "parquet":
            _write_parquet(path, rows)
        else:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(path: Path, rows: list[Document]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("source", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=500)


def _code_format() -> str:
    return "jsonl" if importlib.util.find_spec("pyarrow") is None else "parquet"


def train_tokenizer(texts: Iterable[str], path: Path, vocabulary: int = VOCABULARY) -> None:
    """Trains a byte-level BPE and saves it. The same texts give the same file.

    Raises ModuleNotFoundError, with the remedy, where tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the corpus needs a tokenizer: pip install 'zephon[text]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _single_thread():
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


@contextmanager
def _single_thread() -> Iterator[None]:
    """Keeps the trainer from starting threads of its own, which would outlive it and make a later fork unsafe."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _manifest() -> dict[str, Any]:
    return {
        "made_by": "examples/make_corpus.py",
        "version": _VERSION,
        "python": platform.python_version(),
        "code_format": _code_format(),
        "documents": {"web": NUM_WEB, "code": NUM_CODE},
    }


def _read_manifest(folder: Path) -> Any:
    try:
        return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _is_complete(folder: Path) -> bool:
    return bool(_read_manifest(folder) == _manifest())


def _check_replaceable(folder: Path) -> None:
    """FileExistsError unless nothing is there, or an empty folder, or a corpus that this script made."""
    manifest = _read_manifest(folder)
    ours = isinstance(manifest, dict) and manifest.get("made_by") == _manifest()["made_by"]
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not a corpus of this script: name another folder, or remove it")


def _move(part: Path, folder: Path) -> None:
    """Puts the finished corpus in its place. Where another process was faster, its corpus stays: it is the same."""
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    if folder.exists() and not _is_complete(folder):
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise
    shutil.rmtree(old, ignore_errors=True)


def _steps(total: int, progress: bool) -> AbstractContextManager[Step]:
    """Shows the steps with a bar on stderr where rich is installed and somebody watches."""
    if not progress or importlib.util.find_spec("rich") is None:
        return nullcontext(lambda _: None)
    return _bar(total)


@contextmanager
def _bar(total: int) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("making the corpus"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def step(text: str) -> None:
            bar.update(task, advance=1, description=text)

        yield step


def main() -> None:
    corpus = make_corpus(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FOLDER)
    num_bytes = sum(path.stat().st_size for path in corpus.folder.rglob("*") if path.is_file())
    print(f"{NUM_WEB + NUM_CODE:,} documents, {num_bytes / 1e6:.0f} MB, in {corpus.folder}")


if __name__ == "__main__":
    main()

"""tokenize: a real BPE, a Hugging Face folder, callables; special tokens, lengths, and what is no text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp

from ..cases.helpers import digests, on, pipeline, resumed, saved

tokenizers = pytest.importorskip("tokenizers")

WORKERS = [0, 2]
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "",
    "pack my box with five dozen liquor jugs",
    "naïve café, 日本語, emoji 🙂, tabs\tand\nlines",
    "  spaces   in   rows  ",
    "a",
    "the " * 200,
]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A byte-level BPE of 400 tokens, <s> and </s> among them, with a template that adds both."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>", "<doc>", "</doc>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    return tokenizer


@pytest.fixture(scope="module")
def file(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return path


def expected(trained: Any, text: str) -> list[int]:
    ids: list[int] = trained.encode(text, add_special_tokens=False).ids
    return ids


def texts(*more: Any) -> zp.Pipeline:
    return pipeline([{"id": i, "text": text} for i, text in enumerate([*TEXTS, *more])])


def tokens(line: zp.Pipeline) -> list[list[int]]:
    """The ids of every record, in order."""
    found = []
    for batch in line:
        [ids] = batch["input_ids"]
        assert ids.dtype == np.int64
        assert ids.ndim == 1
        found.append(ids.tolist())
    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Path, str])
def test_the_ids_are_the_librarys_without_special_tokens(
    trained: Any, file: Path, kind: type[Any], workers: int
) -> None:
    line = on(texts().tokenize(kind(file)), workers)
    assert tokens(line) == [expected(trained, text) for text in TEXTS]
    assert [batch["text"] for batch in line.options()] == [[text] for text in TEXTS]
    assert trained.decode(tokens(line.options())[3]) == TEXTS[3]


@pytest.mark.parametrize("workers", WORKERS)
def test_truncation_and_padding_of_the_file_have_no_effect(
    trained: Any, file: Path, tmp_path: Path, workers: int
) -> None:
    definition = json.loads(file.read_text())
    definition["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).padding is not None
    assert tokens(on(texts().tokenize(tmp_path), workers)) == [expected(trained, text) for text in TEXTS]


@pytest.mark.parametrize("workers", WORKERS)
def test_special_tokens_by_their_usual_names(trained: Any, file: Path, workers: int) -> None:
    begin, end = trained.token_to_id("<s>"), trained.token_to_id("</s>")
    whole = [expected(trained, text) for text in TEXTS]
    line = on(texts(), workers)
    assert tokens(line.tokenize(file, add_bos=True)) == [[begin, *ids] for ids in whole]
    assert tokens(line.tokenize(file, add_eos=True)) == [[*ids, end] for ids in whole]
    assert tokens(line.tokenize(file, add_bos=True, add_eos=True)) == [[begin, *ids, end] for ids in whole]
    given = line.tokenize(file, add_bos=True, bos_token="<doc>", add_eos=True, eos_token=7)
    assert tokens(given) == [[trained.token_to_id("<doc>"), *ids, 7] for ids in whole]


@pytest.mark.parametrize("shape", [str, lambda token: {"content": token, "lstrip": False, "special": True}])
def test_a_folder_names_its_special_tokens(
    trained: Any, file: Path, tmp_path: Path, shape: Callable[[str], Any]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    names = {"bos_token": shape("<doc>"), "eos_token": shape("</doc>"), "model_max_length": 4, "padding_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    begin, end = trained.token_to_id("<doc>"), trained.token_to_id("</doc>")
    whole = [expected(trained, text) for text in TEXTS]
    line = on(texts(), 0)
    assert tokens(line.tokenize(tmp_path)) == whole
    assert tokens(line.tokenize(str(tmp_path), add_bos=True, add_eos=True)) == [[begin, *ids, end] for ids in whole]
    other = line.tokenize(tmp_path, add_bos=True, bos_token="<s>")
    assert tokens(other) == [[trained.token_to_id("<s>"), *ids] for ids in whole]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("max_length", [3, 4, 10, 1000])
def test_split_loses_nothing(trained: Any, file: Path, max_length: int, workers: int) -> None:
    line = texts().tokenize(file, max_length=max_length, add_bos=True, add_eos=True)
    begin, end = trained.token_to_id("<s>"), trained.token_to_id("</s>")
    wanted = []
    for i, text in enumerate(TEXTS):
        whole = [begin, *expected(trained, text), end]
        pieces = [whole[at : at + max_length] for at in range(0, len(whole), max_length)]
        wanted += [(i, piece, (n,) if len(pieces) > 1 else ()) for n, piece in enumerate(pieces)]
    found = []
    for batch in on(line, workers):
        [[origin]] = batch.origins
        found.append((origin[2], batch["input_ids"][0].tolist(), origin[3]))
        assert batch["id"][0] == origin[2]
    assert found == wanted


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("specials", [{}, {"add_eos": True}, {"add_bos": True, "add_eos": True}])
def test_truncate_keeps_special_tokens_and_counts(
    trained: Any, file: Path, specials: dict[str, Any], workers: int
) -> None:
    line = on(texts().tokenize(file, max_length=5, overflow="truncate", **specials), workers)
    room = 5 - len(specials)
    begin = [trained.token_to_id("<s>")] if "add_bos" in specials else []
    end = [trained.token_to_id("</s>")] if specials else []
    whole = [expected(trained, text) for text in TEXTS]
    assert tokens(line) == [[*begin, *ids[:room], *end] for ids in whole]
    lost = [len(ids) - room for ids in whole if len(ids) > room]
    counts = {"tokenize.truncated_documents": len(lost), "tokenize.truncated_tokens": sum(lost)}
    assert line.counts()["dropped"] == {0: counts}


@pytest.mark.parametrize("workers", WORKERS)
def test_the_bound_on_the_pieces_of_a_split(file: Path, workers: int) -> None:
    line = texts("the lazy dog " * 3000).tokenize(file, max_length=1)
    with pytest.raises(zp.errors.DataError, match=rf"'tokenize'.*row {len(TEXTS)}.*1,024.*max_children"):
        list(on(line.filter(lambda record: record["id"] == len(TEXTS)), workers))
    wider = texts("the lazy dog " * 300).tokenize(file, max_length=1, max_children=10_000)
    assert all(len(ids) == 1 for ids in tokens(on(wider, workers)) if ids)


NO_TEXT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"other": "x"}, KeyError, "'text'.*other"),
    ({"text": None}, TypeError, "NoneType"),
    ({"text": 3}, TypeError, "int"),
    ({"text": b"bytes"}, TypeError, "bytes"),
    ({"text": ["a", "b"]}, TypeError, "list"),
    ({"text": np.array("a")}, TypeError, "ndarray"),
    ({"text": "lone surrogate \ud800"}, Exception, ""),
]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(NO_TEXT)))
@pytest.mark.parametrize("kind", ["file", "callable"])
def test_what_is_no_text(file: Path, kind: str, number: int, workers: int) -> None:
    bad, error, words = NO_TEXT[number]
    tokenizer = file if kind == "file" else encode_utf8
    records = [{"text": "good"}, {"text": "too"}, bad, {"text": "again"}]
    line = on(pipeline(records).tokenize(tokenizer), workers)
    iterator = iter(line)
    next(iterator)
    next(iterator)
    with pytest.raises(zp.errors.OperatorError, match=rf"'tokenize'.*row 2.*{words}") as caught:
        next(iterator)
    assert isinstance(caught.value, error)
    skipping = on(pipeline(records).tokenize(tokenizer, on_error="skip"), workers)
    assert len(tokens(skipping)) == 3
    assert skipping.counts()["dropped"] == {0: {"tokenize.error": 1}}
    part = resumed(on(pipeline(records).tokenize(tokenizer), 0), saved(line))
    with pytest.raises(zp.errors.OperatorError, match="row 2"):
        next(iter(part))


def encode_utf8(text: str) -> list[int]:
    return list(text.encode())


class Words:
    def __call__(self, text: str) -> Any:
        return np.array([len(word) for word in text.split()], np.uint8)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text)))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("fn", "plain"),
    [
        (encode_utf8, lambda text: list(text.encode())),
        (Words(), lambda text: [len(word) for word in text.split()]),
        (Words().encode, lambda text: list(range(len(text)))),
        (functools.partial(lambda shift, text: [ord(c) + shift for c in text], 5), lambda t: [ord(c) + 5 for c in t]),
        (lambda text: range(len(text)), lambda text: list(range(len(text)))),
    ],
)
def test_callables(fn: Callable[[str], Any], plain: Callable[[str], list[int]], workers: int) -> None:
    assert tokens(on(texts().tokenize(fn), workers)) == [plain(text) for text in TEXTS]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "made", [None, 3, "text", [1.5], [None], ["a"], [[1, 2]], {"input_ids": [1]}, [2**63], [2**70], [True], iter([1])]
)
def test_what_a_callable_may_not_return(made: Any, workers: int) -> None:
    with pytest.raises(zp.errors.OperatorError, match=r"'tokenize'.*row 0"):
        list(on(texts().tokenize(lambda text: made, name="tokenize"), workers))


def test_a_callable_needs_the_ids_of_special_tokens() -> None:
    line = texts().tokenize(encode_utf8, add_bos=True, bos_token=1, add_eos=True, eos_token=2)
    assert tokens(line) == [[1, *text.encode(), 2] for text in TEXTS]
    for wrong in ({"add_bos": True}, {"add_eos": True}, {"add_bos": True, "bos_token": "<s>"}):
        with pytest.raises(zp.errors.ConfigError, match="id"):
            texts().tokenize(encode_utf8, **wrong)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"overflow": "drop"}, "overflow"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"max_length": 2, "add_bos": True, "add_eos": True}, "max_length"),
        ({"max_children": 0}, "max_children"),
        ({"on_error": "ignore"}, "on_error"),
        ({"add_bos": True, "bos_token": "<nowhere>"}, "<nowhere>"),
        ({"truncation": True}, "truncation"),
    ],
)
def test_settings_are_checked(file: Path, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(zp.errors.ConfigError, match=word):
        texts().tokenize(file, **settings)


def test_what_is_no_tokenizer(trained: Any, file: Path, tmp_path: Path) -> None:
    empty, broken, config = tmp_path / "empty", tmp_path / "broken.json", tmp_path / "config"
    empty.mkdir()
    broken.write_text('{"model": ')
    for bad in (empty, tmp_path / "nowhere.json", 3, None, trained):
        with pytest.raises(zp.errors.ConfigError, match="tokenize"):
            texts().tokenize(bad)
    with pytest.raises(zp.errors.ConfigError, match="tokenize"):
        next(iter(texts().tokenize(broken)))
    config.mkdir()
    (config / "tokenizer.json").write_bytes(file.read_bytes())
    for text in ("{", "[]", "3", "null", '"<s>"'):
        (config / "tokenizer_config.json").write_text(text)
        with pytest.raises(zp.errors.ConfigError, match="tokenizer_config"):
            texts().tokenize(config)


def test_the_file_is_read_once_and_its_content_is_in_the_state(trained: Any, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(file.read_bytes())
    line = on(texts().tokenize(copy), 0)
    part = line.take(3)
    list(part)
    definition = json.loads(copy.read_text())
    definition["added_tokens"] = []
    copy.write_text(json.dumps(definition))
    assert tokens(line) == [expected(trained, text) for text in TEXTS]
    assert digests(resumed(on(texts().tokenize(file), 2), saved(part))) == digests(line.options())[3:]
    with pytest.raises(zp.errors.CheckpointError, match=r"tokenize\.tokenizer"):
        resumed(on(texts().tokenize(copy), 0), saved(part))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_own_field_replaces_what_was_there(trained: Any, file: Path, workers: int) -> None:
    records = [{"body": text, "input_ids": "old", "text": 3} for text in TEXTS]
    line = on(pipeline(records).tokenize(file, "body", name="tok"), workers)
    assert tokens(line) == [expected(trained, text) for text in TEXTS]
    assert "tokenize[tok]" in repr(line)

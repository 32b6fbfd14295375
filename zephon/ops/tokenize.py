"""tokenize: text to token ids, by a definition that the `tokenizers` library reads or by any callable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError
from zephon.limits import import_error
from zephon.ops.base import MAX_CHILDREN, Children, Operator, Rows, check_count, token_ids
from zephon.ops.function import check_on_error
from zephon.record import Record

_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]", "<|endoftext|>")
_EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[SEP]")

Ids = NDArray[np.int64]


class TokenizerText(msgspec.Struct, frozen=True):
    """A tokenizer's definition: the text of its `tokenizer.json`, and the special tokens that its folder names."""

    text: str
    bos_token: str | None = None
    eos_token: str | None = None


AT_ONCE = 16  # documents in a call of the library: its encodings take many times the memory of the ids


class Tokenize(Operator):
    """Adds `input_ids` (int64, one dimension) made of the string in `field`.

    `max_length` bounds the ids of a record, special tokens included. Beyond it, `overflow="split"` makes several
    records, the begin token on the first and the end token on the last; `"truncate"` cuts, keeps both, and counts
    `truncated_tokens` and `truncated_documents`.
    """

    method = "tokenize"

    def __init__(
        self,
        tokenizer: TokenizerText | Callable[[str], Sequence[int]],
        field: str = "text",
        max_length: int | None = None,
        overflow: str = "split",
        add_bos: bool = False,
        add_eos: bool = False,
        bos_token: str | int | None = None,
        eos_token: str | int | None = None,
        name: str | None = None,
        on_error: str = "raise",
        max_children: int = MAX_CHILDREN,
    ) -> None:
        if overflow not in ("split", "truncate"):
            raise ConfigError(f"tokenize(overflow={overflow!r}): it must be 'split' or 'truncate'")
        self.tokenizer, self.field, self.overflow = tokenizer, field, overflow
        self.max_children = check_count("max_children", max_children, self.method)
        self.name, self.on_error = name, check_on_error(on_error, self.method)
        self._encoder: Any = None
        self.setup()  # a definition that cannot be read is an error now, not in a worker
        self.bos = self._special(bos_token, "bos", _BOS_NAMES) if add_bos else None
        self.eos = self._special(eos_token, "eos", _EOS_NAMES) if add_eos else None
        specials = (self.bos is not None) + (self.eos is not None)
        self.max_length = max_length
        if max_length is not None:
            check_count("max_length", max_length, self.method, least=specials + 1)
        self._plain = self.bos is None and self.eos is None and max_length is None
        self._encoder = None  # this process may never encode: `setup` builds it again where it does
        self.reasons = (
            *(("truncated_documents", "truncated_tokens") if overflow == "truncate" else ()),
            *(("error",) if on_error == "skip" else ()),
        )

    @property
    def one_to_one(self) -> bool:
        return self.on_error == "raise" and (self.max_length is None or self.overflow == "truncate")

    def settings(self) -> dict[str, Any]:
        known = isinstance(self.tokenizer, TokenizerText)
        definition = hashlib.sha256(self.tokenizer.text.encode()).hexdigest()[:32] if known else self.tokenizer  # type: ignore[union-attr]
        fields = ("field", "max_length", "overflow", "bos", "eos", "on_error", "max_children")
        return {"type": self.method, "tokenizer": definition, **{f: getattr(self, f) for f in fields}}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_encoder": None}

    def share(self) -> None:
        """Workers share the tokenizer's tables."""
        self.setup()

    def setup(self) -> None:
        """Builds the tokenizer in this worker."""
        if self._encoder is None and isinstance(self.tokenizer, TokenizerText):
            self._encoder = make_encoder(self.tokenizer.text)

    def _special(self, given: str | int | None, kind: str, usual: tuple[str, ...]) -> int:
        """The id of a special token: as given, as the tokenizer's folder says, or under a usual name."""
        if isinstance(given, int):
            return given
        if not isinstance(self.tokenizer, TokenizerText):
            raise ConfigError(f"tokenize(add_{kind}=True) with a callable: give {kind}_token as an id")
        named = given or getattr(self.tokenizer, f"{kind}_token")
        for token in (named,) if named else usual:
            number = self._encoder.token_to_id(token)
            if number is not None:
                return int(number)
        raise ConfigError(
            f"tokenize(add_{kind}=True): the tokenizer has no token {named or ' or '.join(usual)}; give {kind}_token="
        )

    def run(self, rows: Rows) -> None:
        encoded = self._encode_all(rows)
        if self._plain and not any(isinstance(ids, BaseException) for ids in encoded):
            rows.records = [{**record, "input_ids": ids} for record, ids in zip(rows.records, encoded, strict=True)]
            return
        name = self.name or self.method
        children = Children(rows, name, self.max_children)
        for i, ids in enumerate(encoded):
            record = rows.records[i]
            try:
                if isinstance(ids, BaseException):
                    raise ids
                pieces = self._pieces(rows, i, name, ids)
                if len(pieces) == 1:
                    children.add(i, {**record, "input_ids": pieces[0]})
                else:
                    children.extend(i, ({**record, "input_ids": piece} for piece in pieces))
            except BaseException as error:
                rows.let_through(error)
                rows.fail(i, error, name, self.on_error)
        children.finish()

    def _encode_all(self, rows: Rows) -> list[Ids | BaseException]:
        """The ids of every record, or the exception it gave. The library's batch call works outside the GIL."""
        texts: list[str | BaseException] = [self._text(record) for record in rows.records]
        good = [text for text in texts if isinstance(text, str)]
        encoded: dict[int, Any] = {}
        if self._encoder is not None and len(good) == len(texts):
            try:
                return [
                    ids for at in range(0, len(good), AT_ONCE) for ids in self._encode_batch(good[at : at + AT_ONCE])
                ]
            except Exception:  # one of the texts is refused: below it is found
                encoded.clear()
        for i, (number, text) in enumerate(zip(rows.index, texts, strict=True)):
            rows.at[0] = number
            try:
                encoded[i] = text if isinstance(text, BaseException) else self._encode(text)
            except BaseException as error:
                rows.let_through(error)
                encoded[i] = error
        return [encoded[i] for i in range(len(texts))]

    def _encode_batch(self, texts: list[str]) -> list[Ids]:
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.fromiter(encoding.ids, np.int64, len(encoding)) for encoding in encodings]

    def _encode(self, text: str) -> Ids:
        if self._encoder is not None:
            return np.array(self._encoder.encode(text, add_special_tokens=False).ids, np.int64)
        return token_ids(self.tokenizer(text)).astype(np.int64)  # type: ignore[operator]

    def _text(self, record: Record) -> str | BaseException:
        text = record.get(self.field)
        if isinstance(text, str):
            return text
        if self.field not in record:
            return KeyError(f"no field {self.field!r}; the record has {sorted(map(str, record))}")
        return TypeError(f"field {self.field!r} is {type(text).__name__}, not a string")

    def _pieces(self, rows: Rows, i: int, name: str, ids: Ids) -> list[Ids]:
        """The ids with special tokens, cut as `overflow` says."""
        begin = [self.bos] if self.bos is not None else []
        end = [self.eos] if self.eos is not None else []
        most = self.max_length
        if most is not None and self.overflow == "truncate":
            lost = len(ids) + len(begin) + len(end) - most
            if lost > 0:
                ids = ids[:-lost]
                rows.drops.append((rows.index[i], f"{name}.truncated_documents", 1))
                rows.drops.append((rows.index[i], f"{name}.truncated_tokens", lost))
        whole = np.concatenate([begin, ids, end]).astype(np.int64) if begin or end else ids
        if most is None or len(whole) <= most:
            return [whole]
        return [whole[at : at + most] for at in range(0, len(whole), most)]


def make_encoder(text: str, method: str = Tokenize.method) -> Any:
    """A tokenizer of the `tokenizers` library, without the truncation and padding that its file may ask for."""
    try:
        import tokenizers
    except Exception as error:
        raise import_error(error, "tokenizers", method, "zephon[text]") from error
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise ConfigError(f"{method}: not a definition that the library reads: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder

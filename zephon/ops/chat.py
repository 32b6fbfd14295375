"""tokenize_chat: conversations to token ids and a mask of the tokens that a model is to learn."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zephon.errors import ConfigError, DataError
from zephon.ops.base import Children, Operator, Rows, check_count
from zephon.ops.chat_template import ChatTemplate, Rendered
from zephon.ops.function import check_on_error
from zephon.ops.tokenize import TokenizerText, make_encoder
from zephon.record import Record

_REASONS: dict[str, tuple[str, ...]] = {
    "drop_first_turns": ("truncated_documents", "truncated_messages", "too_long"),
    "drop_last_turns": ("truncated_documents", "truncated_messages", "too_long"),
    "truncate": ("truncated_documents", "truncated_tokens"),
    "drop": ("too_long",),
}
ROLES = ("assistant", "developer", "function", "ipython", "model", "system", "tool", "user")
"""The usual ones; a conversation may have others."""
_LEADING = ("system", "developer")

Tokens = tuple[NDArray[np.int64], NDArray[np.bool_]]


class TokenizeChat(Operator):
    """Adds `input_ids` (int64) and `loss_mask` (bool), both [tokens], made of the messages in `field`.

    `loss_mask[i]` says whether token i itself is to be learned. A conversation of which no token is to be learned is
    dropped as `no_loss_tokens`. See `Pipeline.tokenize_chat` for the settings.
    """

    method = "tokenize_chat"

    def __init__(
        self,
        tokenizer: TokenizerText,
        template: str,
        field: str = "messages",
        tools_field: str = "tools",
        loss_on: Sequence[str] = ("assistant",),
        last_turn_only: bool = False,
        max_length: int | None = None,
        overflow: str = "drop_first_turns",
        allow_special: bool = False,
        variables: Mapping[str, Any] | None = None,
        name: str | None = None,
        on_error: str = "raise",
    ) -> None:
        if overflow not in _REASONS:
            raise ConfigError(f"tokenize_chat(overflow={overflow!r}): it must be one of {', '.join(_REASONS)}")
        if isinstance(loss_on, str) or not loss_on or not all(isinstance(role, str) for role in loss_on):
            raise ConfigError(
                f"tokenize_chat(loss_on={loss_on!r}): a list of at least one role is wanted, as ('assistant',)"
            )
        if max_length is not None:
            check_count("max_length", max_length, self.method)
        self.tokenizer, self.template, self.field, self.tools_field = tokenizer, template, field, tools_field
        self.loss_on, self.last_turn_only = tuple(sorted(set(loss_on))), bool(last_turn_only)
        self.max_length, self.overflow, self.allow_special = max_length, overflow, bool(allow_special)
        self.variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, **(variables or {})}
        for token in ("bos_token", "eos_token"):
            if self.variables[token] is None and re.search(rf"\b{token}\b", template):
                raise ConfigError(
                    f"tokenize_chat: the chat template uses {token}, which is not known; "
                    f"give variables={{{token!r}: ...}}"
                )
        self.name, self.on_error = name, check_on_error(on_error, self.method)
        self.reasons = ("no_loss_tokens", *(_REASONS[overflow] if max_length is not None else ()))
        self.reasons += ("error",) if on_error == "skip" else ()
        self._tools: tuple[Any, ChatTemplate] | None = None
        self.setup()  # what cannot be read is an error now, not in a worker
        self._tools = None

    def settings(self) -> dict[str, Any]:
        names = ("field", "tools_field", "loss_on", "last_turn_only", "max_length", "overflow", "allow_special")
        definition = hashlib.sha256(self.tokenizer.text.encode()).hexdigest()[:32]
        fields = {name: getattr(self, name) for name in (*names, "template", "variables", "on_error")}
        return {"type": self.method, "tokenizer": definition, **fields}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tools": None}

    def share(self) -> None:
        """Workers share the tokenizer's tables."""
        self.setup()

    def setup(self) -> None:
        """Builds the tokenizer and the template in this worker."""
        if self._tools is None:
            encoder = make_encoder(self.tokenizer.text, self.method)
            added = encoder.get_added_tokens_decoder().values()
            special = [] if self.allow_special else [token.content for token in added if token.special]
            self._tools = encoder, ChatTemplate(self.template, self.variables, special)

    def run(self, rows: Rows) -> None:
        name = self.name or self.method
        children = Children(rows, name, 1)
        for i, record in enumerate(rows.records):
            rows.at[0] = rows.index[i]
            drops: dict[str, int] = {}
            try:
                made = self._convert(record, drops)
                if made is not None:
                    children.add(i, {**record, "input_ids": made[0], "loss_mask": made[1]})
                rows.drops += [(rows.index[i], f"{name}.{reason}", amount) for reason, amount in drops.items()]
            except BaseException as error:
                rows.let_through(error)
                rows.fail(i, error, name, self.on_error)
        children.finish()

    def _convert(self, record: Record, drops: dict[str, int]) -> Tokens | None:
        """The tokens of a record, or None where it is dropped; `drops` says by reason what is lost."""
        messages, tools = self._messages(record), self._tools_of(record)
        ids, mask = self._tokens(messages, tools)
        most = self.max_length
        if most is not None and len(ids) > most:
            if self.overflow == "truncate":
                drops |= {"truncated_documents": 1, "truncated_tokens": len(ids) - most}
                ids, mask = ids[:most].copy(), mask[:most].copy()
            else:
                found = self._shorten(messages, tools, most) if self.overflow != "drop" else None
                if found is None:
                    drops["too_long"] = 1
                    return None
                lost, ids, mask = found
                drops |= {"truncated_documents": 1, "truncated_messages": lost}
        if not mask.any():
            drops.clear()
            drops["no_loss_tokens"] = 1
            return None
        return ids, mask

    def _shorten(self, messages: list[Any], tools: Any, most: int) -> tuple[int, Any, Any] | None:
        """(messages lost, ids, mask) of as many turns as have room; None where not even one has."""
        lead, turns = _turns(messages)
        while len(turns) > 1:
            turns = turns[1:] if self.overflow == "drop_first_turns" else turns[:-1]
            kept = [*lead, *(message for turn in turns for message in turn)]
            ids, mask = self._tokens(kept, tools)
            if len(ids) <= most:
                return len(messages) - len(kept), ids, mask
        return None

    def _tokens(self, messages: list[Any], tools: Any) -> Tokens:
        encoder, template = self._tools  # type: ignore[misc]
        return _encode(encoder, template.render(messages, tools, frozenset(self.loss_on), self.last_turn_only))

    def _messages(self, record: Record) -> list[Any]:
        """The messages, checked, without the fields that are None (a table has them in every row)."""
        if self.field not in record:
            raise KeyError(f"no field {self.field!r}; the record has {sorted(map(str, record))}")
        messages = record[self.field]
        if not isinstance(messages, (list, tuple)) or not messages:
            raise DataError(f"field {self.field!r} is {_kind(messages)}; a list of messages is wanted")
        return [_message(i, message) for i, message in enumerate(messages)]

    def _tools_of(self, record: Record) -> Any:
        tools = record.get(self.tools_field)
        if isinstance(tools, str):
            try:
                tools = json.loads(tools) if tools else None
            except ValueError as error:
                raise DataError(f"field {self.tools_field!r} is a string but no JSON: {error}") from None
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise DataError(f"field {self.tools_field!r} is {_kind(tools)}; a list of tools is wanted")
        return list(tools) if tools else None


def _message(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"message {i} is {_kind(message)}; a dict with 'role' and 'content' is wanted")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(f"message {i} has no role; its 'role' is {role!r}, a string is wanted")
    if content is None and not message.get("tool_calls"):
        raise DataError(f"message {i} (role {role!r}) has neither 'content' nor 'tool_calls'")
    if not (content is None or isinstance(content, (str, list, tuple))):
        raise DataError(f"message {i} (role {role!r}): its 'content' is {_kind(content)}; a string or a list is wanted")
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _kind(value: Any) -> str:
    return "empty" if isinstance(value, (list, tuple)) and not value else f"of type {type(value).__name__}"


def _turns(messages: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """(system messages at the start, turns): a turn is a user's message and all that answers it, tools included."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in _LEADING), len(messages))
    turns: list[list[Any]] = []
    for message in messages[first:]:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return messages[:first], turns


def _encode(encoder: Any, rendered: Rendered) -> Tokens:
    """The ids of a text, and which of them overlap a span that counts."""
    borders = [0, *rendered.cuts, len(rendered.text)]
    pieces = [rendered.text[a:b] for a, b in pairwise(borders)]
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for base, encoding in zip(borders, encoder.encode_batch(pieces, add_special_tokens=False), strict=False):
        ids += encoding.ids
        offsets += [(base + a, base + b) for a, b in encoding.offsets] if base else encoding.offsets
    places = np.array(offsets, np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), np.bool_)
    for start, stop in rendered.counted:
        mask |= (places[:, 1] > start) & (places[:, 0] < stop)
    return np.array(ids, np.int64), mask

"""Conversations for random pipelines: a map that makes them, and a tokenize_chat with all its settings."""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import cache

from hypothesis import strategies as st

from zephon.ops.chat import TokenizeChat
from zephon.ops.tokenize import TokenizerText
from zephon.record import Record
from zephon.testing.recipes import Step, number

HAS_CHATS = all(importlib.util.find_spec(name) is not None for name in ("tokenizers", "jinja2"))
_WORDS = ("[user]", "[assistant]", "[system]", "[end]", "[unknown]", *map(str, range(10)))
_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end] {% endfor %}"


@dataclasses.dataclass(frozen=True)
class Talk:
    """A map: a conversation of up to `most` turns, none at all for some records, with a word a digit of the number."""

    most: int

    def __call__(self, record: Record) -> Record:
        words = " ".join(str(number(record)))
        turn = [{"role": role, "content": words} for role in ("user", "assistant")]
        turns = turn * (number(record) % (self.most + 1))
        lead = [{"role": "system", "content": words[:1]}] if number(record) % 2 or not turns else []
        return {**record, "messages": [*lead, *turns]}


@cache
def _tokenizer() -> TokenizerText:
    """A token a word."""
    import tokenizers

    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="[unknown]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return TokenizerText(made.to_str())


@st.composite
def chats(draw: st.DrawFn) -> list[Step]:
    """Steps that end with `input_ids` and `loss_mask`."""
    operator = TokenizeChat(
        _tokenizer(),
        _TEMPLATE,
        loss_on=draw(st.sampled_from([["assistant"], ["user", "assistant"], ["system"]])),
        last_turn_only=draw(st.booleans()),
        max_length=draw(st.sampled_from([None, 8, 13])),
        overflow=draw(st.sampled_from(["drop_first_turns", "drop_last_turns", "truncate", "drop"])),
    )
    return [Step("map", (Talk(draw(st.integers(0, 4))),)), Step("apply", (operator,))]

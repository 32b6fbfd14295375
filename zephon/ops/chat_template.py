"""Chat templates: conversations to text, and which of its letters the model is to learn.

Templates run in jinja2's sandbox, with what tokenizers' own libraries give them: `messages`, `tools`,
`add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`, a `tojson` that keeps letters as they are, loop
controls and `{% generation %}`. There is no `strftime_now` and no `random`: a sample may not depend on the day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from zephon.errors import ConfigError, DataError
from zephon.limits import import_error

Span = tuple[int, int]
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # never letters of a text: Unicode keeps them for programs
_REMEDY = "mark what counts with {% generation %} ... {% endgeneration %} in the template"


class Rendered(msgspec.Struct, frozen=True):
    """A conversation as text. `cuts`: offsets across which no token may reach. `counted`: the spans to learn."""

    text: str
    cuts: list[int]
    counted: list[Span]


class ChatTemplate:
    """A compiled template. `special`: the tokenizer's control tokens, which messages may not contain as such."""

    def __init__(self, source: str, variables: Mapping[str, Any], special: Iterable[str]) -> None:
        self._template = _compile(source)
        self._variables = dict(variables)
        self.has_generation = re.search(r"\{%-?\+?\s*generation\b", source) is not None
        words = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words))) if words else None

    def render(self, messages: list[Any], tools: Any, loss_on: frozenset[str], last_only: bool) -> Rendered:
        """The text, and the spans of the turns that count. Raises DataError."""
        begin, end, cut = self._choose_marks((messages, tools))
        if self._special is not None:
            messages, tools = self._guard(messages, cut), self._guard(tools, cut)

        def text_of(count: int, prompt: bool = False) -> str:
            try:
                return str(
                    self._template.render(
                        **{**self._variables, "messages": messages[:count], "tools": tools},
                        add_generation_prompt=prompt,
                        zephon_begin=begin,
                        zephon_end=end,
                    )
                )
            except Exception as error:
                part = "the conversation" if count == len(messages) else f"its first {count} messages alone"
                raise DataError(f"the chat template refuses {part}: {type(error).__name__}: {error}") from None

        whole = text_of(len(messages))
        if self.has_generation and loss_on == {"assistant"}:
            return _stripped(whole, begin, end, cut, None, last_only)
        roles = [message["role"] for message in messages]
        turns = [i for i, role in enumerate(roles) if role in loss_on]
        plain = whole.replace(begin, "").replace(end, "")
        spans = [_turn(plain, text_of, i, roles, (begin, end)) for i in (turns[-1:] if last_only else turns)]
        return _stripped(plain, begin, end, cut, spans, False)

    def _choose_marks(self, said: Any) -> list[str]:
        """Three letters that nothing of the record holds."""
        used = set(json.dumps(said, ensure_ascii=False, default=str))
        free = [mark for mark in _MARKS if mark not in used]
        if len(free) < 3:
            raise DataError("the conversation holds almost all of Unicode's 32 noncharacters U+FDD0 to U+FDEF")
        return free[:3]

    def _guard(self, value: Any, cut: str) -> Any:
        """The value with a cut inside every control token that its strings spell out."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][0]}{cut}{found[0][1:]}", value)  # type: ignore[union-attr]
        if isinstance(value, Mapping):
            return {self._guard(key, cut): self._guard(item, cut) for key, item in value.items()}
        return [self._guard(item, cut) for item in value] if isinstance(value, (list, tuple)) else value


def _turn(whole: str, text_of: Callable[..., str], i: int, roles: list[str], marks: tuple[str, str]) -> Span:
    """Where the turn of message `i` lies in the whole text: the difference of two beginnings of it."""

    def unmarked(count: int, prompt: bool) -> str:
        text = text_of(count, prompt)
        for mark in marks:
            text = text.replace(mark, "")
        return text

    def beginning(count: int, prompt: bool) -> int:
        text = unmarked(count, prompt)
        if not whole.startswith(text):
            asked = " with the prompt for an answer" if prompt else ""
            raise DataError(
                f"the chat template's text of the first {count} messages{asked} is no beginning of its text of all "
                f"{len(roles)}, so message {i} (role {roles[i]!r}) cannot be told from the rest; {_REMEDY}"
            )
        return len(text)

    stop = len(whole) if i + 1 == len(roles) else beginning(i + 1, False)
    if i:
        return beginning(i, roles[i] == "assistant"), stop
    if roles[0] != "assistant":
        return 0, stop
    # Many templates refuse no messages at all, so the prompt is what it adds to the first one.
    alone, prompt = unmarked(1, False), unmarked(1, True)
    at = whole.find(prompt[len(alone) :]) if prompt.startswith(alone) else -1
    if at < 0:
        raise DataError(
            "the chat template's prompt for an answer is not in its text of the conversation, so the header of message "
            f"0 (role 'assistant') cannot be told from the rest; {_REMEDY}"
        )
    return at + len(prompt) - len(alone), stop


def _stripped(text: str, begin: str, end: str, cut: str, spans: list[Span] | None, last_only: bool) -> Rendered:
    """The text without marks; spans, counted with cuts, or those between marks, count without."""
    pieces: list[str] = []
    cuts: list[int] = []
    found: list[Span] = []
    moved = {}  # offset with cuts -> without
    at = started = old = 0
    for piece in re.split(f"([{begin}{end}{cut}])", text):
        if piece == cut:
            cuts.append(at)
        elif piece == begin:
            started = at
        elif piece == end:
            found.append((started, at))
        else:
            for offset in [o for span in spans or () for o in span if old <= o <= old + len(piece)]:
                moved[offset] = at + offset - old
            pieces.append(piece)
            at += len(piece)
        old += len(piece)
    counted = found if spans is None else [(moved[a], moved[b]) for a, b in spans]
    return Rendered("".join(pieces), cuts, counted[-1:] if last_only else counted)


def _compile(source: str) -> Any:
    """The template, ready to render."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except Exception as error:
        raise import_error(error, "jinja2", "tokenize_chat", "zephon[text]") from error

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: puts marks around what is inside."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Callable[[], str]) -> str:
            return f"{context['zephon_begin']}{caller()}{context['zephon_end']}"

    def to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **settings)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    del environment.filters["random"]
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"tokenize_chat: the chat template cannot be read: {error}") from error

"""Reading a tokenizer's definition: a `tokenizer.json`, or the Hugging Face folder that holds one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from zephon.errors import ConfigError
from zephon.ops.tokenize import TokenizerText


def load_tokenizer(path: str | os.PathLike[str]) -> TokenizerText:
    """The definition, with the special tokens that the folder's `tokenizer_config.json` names."""
    try:
        at = Path(path)
    except TypeError:
        raise ConfigError(
            f"tokenize({type(path).__name__}): a path of a tokenizer.json or its folder, or a callable, is wanted"
        ) from None
    file = at / "tokenizer.json" if at.is_dir() else at
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenize: cannot read the tokenizer {os.fspath(path)!r}: {error}") from error
    names = _special_tokens(at / "tokenizer_config.json") if at.is_dir() else {}
    return TokenizerText(text, names.get("bos_token"), names.get("eos_token"))


def load_chat_template(path: str | os.PathLike[str]) -> str:
    """The chat template of a tokenizer's folder: its `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    folder = Path(path)
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        found = _config(folder / "tokenizer_config.json").get("chat_template") if folder.is_dir() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenize_chat: cannot read the chat template of {os.fspath(path)!r}: {error}") from error
    if isinstance(found, list):  # several, by name
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ConfigError(
            f"tokenize_chat: {os.fspath(path)!r} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); give template="
        )
    return found


def _config(config: Path) -> dict[str, Any]:
    if not config.exists():
        return {}
    try:
        fields: Any = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenize: {config.name} of the tokenizer's folder is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"tokenize: {config.name} of the tokenizer's folder holds {type(fields).__name__}, no object")
    return fields


def _special_tokens(config: Path) -> dict[str, str]:
    fields = _config(config)
    found = {}
    for name in ("bos_token", "eos_token"):
        token = fields.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found

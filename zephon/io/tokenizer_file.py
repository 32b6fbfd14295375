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


def _special_tokens(config: Path) -> dict[str, str]:
    if not config.exists():
        return {}
    try:
        fields: Any = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenize: {config.name} of the tokenizer's folder is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"tokenize: {config.name} of the tokenizer's folder holds {type(fields).__name__}, no object")
    found = {}
    for name in ("bos_token", "eos_token"):
        token = fields.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found

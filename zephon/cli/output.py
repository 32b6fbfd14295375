"""Where the commands put their JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import IO

from zephon.errors import ConfigError


@contextlib.contextmanager
def json_lines(path: str | None) -> Iterator[IO[str] | None]:
    """Where JSON goes: a new file, standard output, or nowhere. Opened before anything is done."""
    if path is None or path == "-":
        yield sys.stdout if path else None
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from error
    with file:
        yield file

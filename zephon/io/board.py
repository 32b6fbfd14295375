"""Boards: where processes that share nothing else leave small messages for each other, in a folder or a bucket.

A message is there whole or not at all, and is never taken away. A bucket is reached with obstore, which takes
credentials, region and endpoint from the environment and tries again where the network fails.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from zephon.errors import CheckpointError, ConfigError, describe


class Board(Protocol):
    """What ranks need of the place where they meet. Raises CheckpointError where it cannot be reached."""

    most_poll_s: float
    """How long who waits for a message may sleep between two looks."""

    def read(self, name: str) -> bytes | None:
        """The message of that name, or None."""

    def write(self, name: str, message: bytes) -> None:
        """Leaves a message, in place of an earlier one of that name."""


def open_board(where: str, name: str) -> Board:
    """The board `name`, a job's, in a folder, or under a URL such as s3://bucket/prefix. Raises ConfigError."""
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise ConfigError(f"run_id={name!r}: a name is wanted, which is a folder below aggregate_dir")
    url = urlsplit(where)
    if len(url.scheme) < 2 or "://" not in where:
        return FolderBoard(Path(where) / name)
    if url.scheme == "file":
        return FolderBoard(Path(unquote(url.path)) / name)
    return ObjectBoard(f"{where.rstrip('/')}/{name}")


class FolderBoard:
    """Files in a folder that all ranks see."""

    most_poll_s = 0.05

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"aggregate_dir: {folder} cannot be used: {describe(error)}") from error

    def read(self, name: str) -> bytes | None:
        with _reached(str(self._folder)):
            try:
                return (self._folder / name).read_bytes()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):  # NFS: another message has just taken its place
                    return None
                raise

    def write(self, name: str, message: bytes) -> None:
        with _reached(str(self._folder)):
            part = self._folder / f".{name}.{secrets.token_hex(8)}"
            try:
                part.write_bytes(message)
                os.replace(part, self._folder / name)
            except BaseException:
                part.unlink(missing_ok=True)
                raise


class ObjectBoard:
    """Objects under a prefix of a bucket. The store replaces an object at once, and shows that to the next reader."""

    most_poll_s = 0.5  # every look is a request

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(
                f"aggregate_dir: {url} needs obstore: pip install zephon[cloud], or name a folder"
            ) from None
        self._obstore: Any = obstore
        self._url = url
        try:
            self._store = from_url(url)
        except Exception as error:
            raise ConfigError(f"aggregate_dir: {url} cannot be used: {_first_line(error)}") from error

    def read(self, name: str) -> bytes | None:
        with _reached(self._url):
            try:
                return bytes(self._obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def write(self, name: str, message: bytes) -> None:
        with _reached(self._url):
            self._obstore.put(self._store, name, message)


@contextmanager
def _reached(where: str) -> Iterator[None]:
    """What goes wrong with the place itself, as an error that names it."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"aggregate_dir: {where} cannot be reached: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """obstore's errors have a page of details behind the first line."""
    return describe(error).partition("\n")[0]

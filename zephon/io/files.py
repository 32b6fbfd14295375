"""Which files a path means, in which order, and what they are called.

Order: by relative path, byte by byte as the system stores it, "/" between folders. It depends on no locale, no order of
creation and no order in which the system lists a folder. A list keeps its order, each folder or glob in it in order.

Names are relative to the folder, to the part of a glob before its first wildcard, or to the file's folder; for a list,
to what these have in common. So they are the same wherever the data lies and however its path is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from zephon.errors import ConfigError
from zephon.io.formats import Format

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_COMPRESSED: Final = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".lz4": "unlz4"}
_WILDCARD: Final = re.compile(r"[*?\[]")


class Found(NamedTuple):
    """A file of a dataset: its absolute path and its name relative to the dataset."""

    path: str
    name: str


def find(dataset: str, path: Any, fmt: Format | None, formats: Sequence[Format]) -> tuple[Format, list[Found]]:
    """The format and the files, in order, that `path` means: a folder, a file, a glob, or a list of those.

    In folders, names that start with "." or "_" are left out, folders too, and so are files without a known suffix;
    in globs names that start with "_", unless the pattern says so. Linked folders are followed. `fmt` None: by suffix.
    Raises ConfigError, which names the path: nothing there, no file, unknown or compressed or mixed formats, a file
    twice.
    """
    entries = path if isinstance(path, (list, tuple)) else [path]
    taken = [fmt] if fmt else list(formats)
    parts = [_expand(dataset, entry, taken) for entry in entries]
    paths = [file for _, files in parts for file in files]
    if not paths:
        raise ConfigError(f"dataset '{dataset}': no path was given; pass a folder, a file, a glob or a list of those")
    _refuse_repeats(dataset, paths)
    base = _common_folder(dataset, [folder for folder, _ in parts])
    chosen = fmt or _one_format(dataset, paths, formats)
    return chosen, [Found(file, _display(os.path.relpath(file, base))) for file in paths]


def chosen_format(dataset: str, fmt: str | Format | None, formats: Sequence[Format]) -> Format | None:
    """The format that `fmt=` means, None where it says nothing. Raises ConfigError with the nearest name."""
    if fmt is None or (not isinstance(fmt, str) and hasattr(fmt, "open")):
        return fmt
    names = [candidate.name for candidate in formats]
    if fmt in names:
        return formats[names.index(fmt)]
    import difflib

    near = difflib.get_close_matches(str(fmt), names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise ConfigError(f"dataset '{dataset}': unknown format fmt={fmt!r}; the formats are {', '.join(names)}{hint}")


def _expand(dataset: str, entry: Any, formats: Sequence[Format]) -> tuple[str, list[str]]:
    """(the folder that names are relative to, absolute paths of the files in order) of one path."""
    if not isinstance(entry, (str, bytes, os.PathLike)):
        raise ConfigError(
            f"dataset '{dataset}': {entry!r} is a {type(entry).__name__}, not a path; "
            "pass a folder, a file, a glob or a list of those"
        )
    text = os.path.expanduser(os.fsdecode(entry))
    full = os.path.abspath(text)
    if os.path.isdir(full):
        return full, _from_folder(dataset, full, formats)
    if os.path.isfile(full) and not text.endswith(("/", os.sep)):
        return os.path.dirname(full), [_accepted(dataset, full, formats)]
    if _WILDCARD.search(text):
        return _from_glob(dataset, full, formats)
    raise _missing(dataset, text, full)


def _missing(dataset: str, text: str, full: str) -> ConfigError:
    if "://" in text:
        return ConfigError(f"dataset '{dataset}': '{text}' is a URL; this version reads local files: copy them first")
    if os.path.lexists(full):
        return ConfigError(f"dataset '{dataset}': '{text}' is neither a folder nor a readable regular file")
    return ConfigError(f"dataset '{dataset}': there is no file or folder '{text}' (looked at {full})")


def _from_folder(dataset: str, folder: str, formats: Sequence[Format]) -> list[str]:
    suffixes = tuple(suffix for candidate in formats for suffix in candidate.suffixes)
    files, others = [], set()
    for file in _walk(dataset, folder, ()):
        lower = file.lower()
        stem, last = os.path.splitext(lower)
        if lower.endswith(suffixes):
            files.append(_regular(dataset, file))
        elif last in _COMPRESSED and stem.endswith(suffixes):
            raise _compressed(dataset, file)
        else:
            others.add(last or os.path.basename(file))
    if not files:
        seen = f"; it holds files that end in {', '.join(sorted(others)[:8])}" if others else ""
        raise ConfigError(
            f"dataset '{dataset}': no file that ends in {' or '.join(suffixes)} in folder '{folder}'{seen}; "
            "name files with another suffix by a glob, with fmt="
        )
    return sorted(files, key=lambda file: _order(folder, file))


def _walk(dataset: str, folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Every file below `folder` that is not hidden, in no particular order."""
    real = os.path.realpath(folder)
    if real in above:
        raise ConfigError(f"dataset '{dataset}': folder '{folder}' is a link to one that holds it; remove the link")
    for name in os.listdir(folder):
        if name.startswith((".", "_")):
            continue
        full = os.path.join(folder, name)
        if os.path.isdir(full):
            yield from _walk(dataset, full, (*above, real))
        else:
            yield full


def _from_glob(dataset: str, pattern: str, formats: Sequence[Format]) -> tuple[str, list[str]]:
    folder = pattern[: _WILDCARD.search(pattern).start()]  # type: ignore[union-attr]
    folder = os.path.dirname(folder) or os.sep
    keep_underscore = os.path.basename(pattern).startswith("_")
    import glob

    matched = set(glob.glob(pattern, recursive=True))
    files = [
        _accepted(dataset, file, formats)
        for file in matched
        if not os.path.isdir(file) and (keep_underscore or not os.path.basename(file).startswith("_"))
    ]
    if not files:
        folders = f"; it matches {len(matched)} folders: add '/**/*.jsonl' to look inside" if matched else ""
        raise ConfigError(f"dataset '{dataset}': no file matches '{pattern}'{folders}")
    return folder, sorted(files, key=lambda file: _order(folder, file))


def _accepted(dataset: str, file: str, formats: Sequence[Format]) -> str:
    """A file that was named, or that a glob found: taken, or an error."""
    if os.path.splitext(file)[1].lower() in _COMPRESSED:
        raise _compressed(dataset, file)
    # With fmt= any suffix will do; without it the suffix has to say what the file is.
    if len(formats) > 1 and _format_of(file, formats) is None:
        known = ", ".join(suffix for one in formats for suffix in (*one.suffixes, *one.other_suffixes))
        names = " or ".join(f"fmt='{one.name}'" for one in formats)
        raise ConfigError(
            f"dataset '{dataset}': the suffix of '{file}' says nothing about its format; "
            f"known are {known}: pass {names}, or a narrower path"
        )
    return _regular(dataset, file)


def _regular(dataset: str, file: str) -> str:
    if not os.path.isfile(file):
        raise ConfigError(f"dataset '{dataset}': '{file}' is a broken link or not a regular file; mend or remove it")
    return file


def _compressed(dataset: str, file: str) -> ConfigError:
    tool = _COMPRESSED[os.path.splitext(file)[1].lower()]
    return ConfigError(
        f"dataset '{dataset}': '{file}' is compressed; this version reads plain files, whose rows can be reached "
        f"at any place: unpack it first (`{tool} '{file}'`), or convert it to Parquet, which compresses inside"
    )


def _format_of(file: str, formats: Sequence[Format]) -> Format | None:
    lower = file.lower()
    for candidate in formats:
        if lower.endswith((*candidate.suffixes, *candidate.other_suffixes)):
            return candidate
    return None


def _one_format(dataset: str, paths: list[str], formats: Sequence[Format]) -> Format:
    firsts: dict[str, tuple[Format, str]] = {}
    for file in paths:
        found = _format_of(file, formats)
        if found is not None:
            firsts.setdefault(found.name, (found, file))
    if len(firsts) > 1:
        seen = ", ".join(f"{name} ('{file}')" for name, (_, file) in firsts.items())
        raise ConfigError(
            f"dataset '{dataset}': files of several formats: {seen}; a dataset has one: make two datasets, "
            "or narrow the path by a glob"
        )
    return next(iter(firsts.values()))[0]


def _refuse_repeats(dataset: str, paths: list[str]) -> None:
    seen: set[str] = set()
    for file in paths:
        if file in seen:
            raise ConfigError(
                f"dataset '{dataset}': file '{file}' is listed twice; name it once (to weigh it more, give it to a "
                "dataset of its own)"
            )
        seen.add(file)


def _common_folder(dataset: str, folders: list[str]) -> str:
    try:
        return os.path.commonpath(folders)
    except ValueError:
        raise ConfigError(
            f"dataset '{dataset}': the paths have no folder in common ({', '.join(sorted(set(folders))[:4])}); "
            "make a dataset of each"
        ) from None


def _slashed(path: str) -> bytes:
    raw = os.fsencode(path)
    return raw if os.sep == "/" else raw.replace(os.fsencode(os.sep), b"/")


def _order(folder: str, file: str) -> bytes:
    return _slashed(os.path.relpath(file, folder))


def _display(relative: str) -> str:
    """A name that any encoding carries: bytes that are no UTF-8 are written as \\xff, whatever the locale."""
    return _slashed(relative).decode("utf-8", "backslashreplace")

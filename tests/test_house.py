"""Rules of the house that no linter has: sizes, leftovers, sleeping tests, paths of one machine."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "zephon").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

LONGEST_FILE = 400  # lines
P99_FUNCTION = 60  # lines, docstring included
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX)\b|\bNotImplementedError\b")
MACHINE_PATH = re.compile(r"(?<![\w.~:*})\]-])/(home|root|work)/\w+")
EXAMPLE_PATHS = {"/home/you", "/home/user"}  # allowed in documentation


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(lines, name) of every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, node.name


def test_files_are_short() -> None:
    long = {shown(path): n for path in PACKAGE if (n := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert not long, f"over {LONGEST_FILE} lines: {long}"


def test_functions_are_short() -> None:
    found = sorted(
        (lines, f"{shown(path)}: {name}") for path in PACKAGE for lines, name in functions(ast.parse(path.read_text()))
    )
    p99 = found[int(0.99 * (len(found) - 1))][0]
    assert p99 <= P99_FUNCTION, f"99 % of functions have at most {p99} lines; the longest: {found[-10:]}"


def test_nothing_is_left_undone() -> None:
    found = [
        f"{shown(path)}, line {number}: {line.strip()}"
        for path in PACKAGE
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if LEFTOVERS.search(line)
    ]
    assert not found, "\n".join(found)


def test_tests_do_not_sleep() -> None:
    """A test that waits for time passes or fails by luck: wait for an event, a join, a descriptor."""
    found = [
        f"{shown(path)}, line {node.lineno}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) == "sleep"
    ]
    assert not found, f"sleep in {found}"


def files_of_repository() -> list[Path]:
    """What is or would be committed."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def machine_paths(text: str) -> list[str]:
    return [found[0] for found in MACHINE_PATH.finditer(text) if found[0] not in EXAMPLE_PATHS]


def test_no_paths_of_one_machine() -> None:
    found: list[str] = []
    for path in files_of_repository():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            text = data.decode("utf-8", "replace")
            found += [f"{shown(path)}: {name}" for name in machine_paths(text)]
            found += [f"{shown(path)}: this checkout"] if str(ROOT) in text else []
    assert not found, "\n".join(found)


def test_the_rule_on_paths() -> None:
    home, work = "/home" + "/ann/data", "/work" + "/main"
    assert machine_paths(f"read {home} and '{work}/x'") == [home[:9], work]
    assert machine_paths("/home/you/data https://host/work/x ~/work/x ./work/x {root}/work/x") == []

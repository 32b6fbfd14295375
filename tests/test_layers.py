"""The layers of docs/design.md, checked by reading every import of every module, those inside functions too.

A layer imports only from layers below it in `LAYERS`. Members of one layer may lean on one another as long as no
circle comes of it. Imports under `if TYPE_CHECKING` do not count: they have no effect.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "zephon"

# From the top to the bottom: names of modules and packages directly inside zephon/.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "integrations", "bench", "__main__"),
    ("__init__",),  # the public names
    (
        "pipeline",
        "device",
        "torch_loader",
        "declare",
        "session",
        "iterate",
        "ends",
        "agree",
        "collective",
        "identity",
        "means",
    ),
    ("engine", "engine_process", "exchange", "drive", "drive_process"),
    ("places",),
    ("runners", "arena"),
    ("ipc", "io"),
    ("ops", "plan", "flow", "checkpoint", "work"),
    ("record", "lineage", "batch", "options", "metrics", "functions", "canonical", "limits", "errors"),
)

# Decides only: no clock, process, thread, file, socket, logging or torch.
PURE = {"ops", "plan", "flow", "checkpoint", "work", "record", "functions", "canonical"}
# fmt: off
IMPURE = {
    "time", "datetime", "sched", "signal", "select", "selectors", "queue", "random", "secrets", "uuid",
    "threading", "multiprocessing", "subprocess", "concurrent", "asyncio", "uvloop", "_thread", "ctypes",
    "os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "fcntl", "posix_ipc", "socket", "logging", "torch",
}
# fmt: on
IMPURE_CALLS = {"open", "print", "input"}

# Effects that have one place each.
PLACES: dict[str, set[str]] = {
    "multiprocessing": {"runners", "ipc"},
    "subprocess": {"runners", "bench"},
    "posix_ipc": {"ipc", "arena"},
    "asyncio": {"io", "engine_process"},
    "uvloop": {"engine_process"},
}

# `testing` may import anything; nobody but the tests and these modules may import it.
TESTING = "testing"
USERS_OF_TESTING = {"zephon.testing", "zephon.cli.verify", "zephon.runners.fresh"}  # the last one: if it is asked to


class Import(NamedTuple):
    """One import of an absolute dotted name, e.g. `zephon.flow.feed`, by the module `importer`."""

    importer: str
    line: int
    name: str


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def member(name: str) -> str:
    """What directly inside zephon/ a dotted name belongs to: `zephon.flow.feed` is `flow`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(tree: ast.AST, importer: str, is_package: bool) -> Iterator[Import]:
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, importer, is_package)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "zephon" else [base]
            for name in names:
                yield Import(importer, node.lineno, name)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield Import(importer, node.lineno, str(argument.value))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from walk(other)
        else:
            yield from walk(child)


def absolute(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    """The dotted name that `from X import` names, with the dots of a relative import resolved."""
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def called(node: ast.Call) -> str:
    """The last name of what is called: `open` for `open(...)`, `import_module` for `importlib.import_module(...)`."""
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def resolve(found: Import) -> Import:
    """`from zephon import X`: the member X where there is one, else one of the public names."""
    parts = found.name.split(".")
    if parts[0] != "zephon" or len(parts) == 1:
        return found
    exists = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
    return found if exists else found._replace(name="zephon")


FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in FILES}
IMPORTS = [
    resolve(found)
    for path, tree in TREES.items()
    for found in imports_of(tree, module_name(path), path.name == "__init__.py")
]
INSIDE = [found for found in IMPORTS if found.name.split(".")[0] == "zephon"]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def show(found: Import) -> str:
    return f"{found.importer}, line {found.line}: imports {found.name}"


def test_every_member_has_a_layer() -> None:
    members = {member(module_name(path)) for path in FILES}
    unknown = sorted(members - set(LEVELS) - {TESTING})
    assert not unknown, f"add {unknown} to a layer in LAYERS of {__file__}, and to the layers of docs/design.md"


def upward(found: Import) -> bool:
    source, target = member(found.importer), member(found.name)
    if source == "__init__":  # loads the public names on first use
        return False
    return source in LEVELS and target in LEVELS and LEVELS[target] < LEVELS[source]


def test_imports_point_down() -> None:
    wrong = [show(found) for found in INSIDE if upward(found)]
    assert not wrong, "a layer imports only from layers below it:\n" + "\n".join(wrong)


def test_no_circles() -> None:
    graph: dict[str, set[str]] = {}
    for found in INSIDE:
        source, target = member(found.importer), member(found.name)
        if source != target and TESTING not in (source, target) and source != "__init__":
            graph.setdefault(source, set()).add(target)
    assert list(graphlib.TopologicalSorter(graph).static_order()), "nothing was read"


def test_testing_is_for_tests() -> None:
    wrong = [
        show(found)
        for found in INSIDE
        if member(found.name) == TESTING and not any(is_below(found.importer, user) for user in USERS_OF_TESTING)
    ]
    assert not wrong, "zephon.testing is for the tests and `zephon verify`:\n" + "\n".join(wrong)


def is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def test_pure_layers_only_decide() -> None:
    wrong = [show(found) for found in IMPORTS if member(found.importer) in PURE and found.name.split(".")[0] in IMPURE]
    wrong += [
        f"{module_name(path)}, line {node.lineno}: calls {node.func.id}()"
        for path, tree in TREES.items()
        if member(module_name(path)) in PURE
        for node in walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert not wrong, "the pure layers have no effects; move this to a shell around them:\n" + "\n".join(wrong)


def test_effects_have_their_place() -> None:
    wrong = [
        f"{show(found)}, which belongs in {sorted(places)}"
        for found in IMPORTS
        if (places := PLACES.get(found.name.split(".")[0])) and member(found.importer) not in {*places, TESTING}
    ]
    assert not wrong, "\n".join(wrong)


# The reader itself.


@pytest.mark.parametrize(
    ("text", "importer", "is_package", "names"),
    [
        ("import zephon.flow.feed as f, time", "zephon.a", False, ["zephon.flow.feed", "time"]),
        ("from zephon import io, Pipeline", "zephon.a", False, ["zephon.io", "zephon.Pipeline"]),
        ("from . import io", "zephon.a", False, ["zephon.io"]),
        ("from . import feed", "zephon.flow", True, ["zephon.flow"]),
        ("from .. import io", "zephon.flow.feed", False, ["zephon.io"]),
        ("from ..io.jsonl import x", "zephon.flow.feed", False, ["zephon.io.jsonl"]),
        ("def f():\n    import torch", "zephon.a", False, ["torch"]),
        ("importlib.import_module('zephon.engine')", "zephon.a", False, ["zephon.engine"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import time", "zephon.a", False, ["time"]),
        ("if typing.TYPE_CHECKING:\n    import torch", "zephon.a", False, []),
    ],
)
def test_reader_finds_imports(text: str, importer: str, is_package: bool, names: list[str]) -> None:
    assert [found.name for found in imports_of(ast.parse(text), importer, is_package)] == names


@pytest.mark.parametrize(
    ("importer", "name", "is_wrong"),
    [
        ("zephon.flow.feed", "zephon.engine", True),
        ("zephon.flow.feed", "zephon", True),
        ("zephon.errors", "zephon.work.source", True),
        ("zephon.engine", "zephon.flow.feed", False),
        ("zephon.flow.feed", "zephon.work.source", False),
        ("zephon.cli.explain", "zephon", False),
        ("zephon", "zephon.pipeline", False),
        ("zephon.testing.oracle", "zephon.pipeline", False),
    ],
)
def test_rule(importer: str, name: str, is_wrong: bool) -> None:
    assert upward(Import(importer, 1, name)) is is_wrong

"""The pages keep their word: their Python blocks run, their links and make targets exist.

A block that begins with "```python run" is executed; with "```python run torch" only where torch is installed. The
blocks of a page run in order, in one namespace, in an empty folder. Their assertions are tests like any other.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import re
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pytest

from zephon import options
from zephon.io import Dataset
from zephon.work.static_mixture import StaticMixture

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MUST_RUN = (
    "README.md",
    "elastic-determinism.md",
    "design.md",
    "packing.md",
    "shuffling.md",
    "mixing.md",
    "stateful_map.md",
    "training-batches.md",
    "frameworks.md",
    "torch.md",
    "ends.md",
)
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


class Block(NamedTuple):
    """A Python block: the line before its text, what follows the word "python", and the text."""

    line: int
    marks: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        return "run" in self.marks and ("torch" not in self.marks or importlib.util.find_spec("torch") is not None)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, f.start(2)), tuple(f[1].split()), f[2]) for f in BLOCK.finditer(text)]


def name(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in MUST_RUN], ids=name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    found = [block for block in blocks(page) if block.runs]
    if not found and any("run" in block.marks for block in blocks(page)):
        pytest.skip("its blocks need torch")
    assert found, f"{page.name} has no block that runs"
    namespace: dict[str, object] = {"__name__": page.stem.replace("-", "_").lower()}
    for block in found:
        # The empty lines in front make a traceback name the page's own line.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
    namespace.clear()  # the pipelines that the page left open
    gc.collect()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_compile(page: Path) -> None:
    for block in blocks(page):
        compile("\n" * block.line + block.text, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make (?:[A-Z]+=\S+ )?([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"\.\[([a-z,]+)\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    assert {extra for group in named for extra in group.split(",")} <= set(project["optional-dependencies"])


TEST_LINK = re.compile(r"\[`(test_\w+)`\]\((\.\./tests/[\w/]+\.py)\)")
RELIABILITY = ROOT / "docs" / "reliability.md"


def rows_of(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, without heads, as cells."""
    return rows_in(page.read_text(encoding="utf-8"))


def rows_in(text: str) -> list[list[str]]:
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if set(line) == set("|-")]
    heads = {number for rule in rules for number in (rule - 1, rule)}
    rows = [line for number, line in enumerate(lines) if line.startswith("|") and number not in heads]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_every_promise_of_reliability_names_its_tests() -> None:
    """The file is there and holds a test of that name; whoever renames one is told here."""
    wrong, named = [], set()
    for row in rows_of(RELIABILITY):
        links = TEST_LINK.findall(row[-1])
        assert links, f"no test is named in the row {row[0]!r}"
        assert len(row) in (3, 4), f"another number of cells in the row {row[0]!r}: {row}"
        for test, file in links:
            path = RELIABILITY.parent / file
            named.add((file, test))
            if not path.exists() or f"def {test}(" not in path.read_text(encoding="utf-8"):
                wrong.append(f"{file}: {test}")
    assert not wrong, f"no such tests: {wrong}"
    assert len(named) > 50


def test_what_was_seen_to_fail_is_there_row_by_row() -> None:
    text = RELIABILITY.read_text(encoding="utf-8").partition("## Seen to fail elsewhere")[2]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) - 1 == 19


SETTINGS = ROOT / "docs" / "settings.md"
REQUIRED = inspect.Parameter.empty


def settings_of(title: str) -> dict[str, list[str]]:
    """The rows of one section of the page of settings by name: [default, allowed, on restore, meaning]."""
    section = SETTINGS.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [cells for cells in rows_in(section) if len(cells) == 5]
    return {name.strip("`"): rest for name, *rest in rows}


def arguments(*functions: Callable[..., object]) -> dict[str, tuple[object, object]]:
    """The arguments of functions by name: (default, type)."""
    found = {}
    for function in functions:
        hints = typing.get_type_hints(function)
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "self":
                found[name] = (parameter.default, hints.get(name))
    return found


def fields(kind: type[msgspec.Struct]) -> dict[str, tuple[object, object]]:
    return {field.name: (field.default, field.type) for field in msgspec.structs.fields(kind)}


def words(kind: object) -> set[str]:
    """The words that a type allows."""
    if typing.get_origin(kind) is Literal:
        return {word for word in typing.get_args(kind) if isinstance(word, str)}
    return set().union(*(words(part) for part in typing.get_args(kind)))


SECTIONS: dict[str, dict[str, tuple[object, object]]] = {
    "options(...): data": fields(options.DataOptions),
    "options(...): topology": fields(options.TopologyOptions),
    "options(...): execution": fields(options.ExecutionOptions),
    "Dataset.from_path, Dataset.from_list": arguments(Dataset.from_path, Dataset.from_list),
    "StaticMixture": arguments(StaticMixture.__init__),
}


@pytest.mark.parametrize("title", SECTIONS)
def test_settings_are_those_of_the_code(title: str) -> None:
    """Every setting has its row, with its default, bound and words; there is no row of a setting that is gone."""
    wanted, rows = SECTIONS[title], settings_of(title)
    assert set(rows) == set(wanted)
    for name, (default, kind) in wanted.items():
        shown, allowed, _, meaning = rows[name]
        if default is REQUIRED:
            assert shown == "required", name
        else:
            assert repr(ast.literal_eval(shown.strip("`"))) == repr(default), name
        assert all(f'`"{word}"`' in allowed for word in words(kind)), name
        if title.startswith("options") and (least := options._LEAST.get(name)) is not None:
            assert re.search(rf"\bat least {least:,g}(?!\d|[,.]\d)", allowed), name
        assert len(meaning) > 20, name


def test_settings_say_what_a_restore_bears() -> None:
    """Execution and topology at any time; what the fingerprint of a source holds only if it is allowed."""
    for title in ("options(...): topology", "options(...): execution"):
        assert {row[2] for row in settings_of(title).values()} == {"any time"}
    rows = settings_of("StaticMixture")
    dataset = Dataset.from_list("d", [{"id": 1}])
    held: set[str] = set()
    for settings in ({}, {"end": "repeat", "max_epochs": 2}, {"shuffle": "blocks"}):
        held |= set(StaticMixture(dataset, **settings).fingerprint())  # type: ignore[arg-type]
    assert held - {"type"} <= set(rows)
    assert {rows[name][2] for name in held - {"type"}} == {"if allowed"}
    assert rows["seed"][2] == settings_of("options(...): data")["canonical_replicas"][2] == "no"


def test_quick_start_is_short() -> None:
    """The first block that runs is the quick start."""
    lines = [line for line in blocks(ROOT / "README.md")[0].text.splitlines() if line.strip()]
    assert len(lines) <= 25

"""The identity of functions: stable where nothing of what they do changed, different where anything did."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from zephon.functions import code_hash, function_name, python_version, wants_rng

ROOT = Path(__file__).parent.parent

# A module with every kind of thing that a function may lean on. `TARGETS` are hashed one by one.
SAMPLE = '''
import abc, collections, dataclasses, enum, functools, operator, re, threading

import numpy as np

STOP = {"the", "a", "of", "and", "to", "in"}
LIMIT = 100
TABLE = {"b": [1, 2.5], "a": {"x": (None, True)}}
WORDS = re.compile(r"[a-z]+", re.I)
GRID = np.arange(6, dtype=np.int32).reshape(2, 3)
LOCK = threading.Lock()
calls = 0


class Kind(enum.Enum):
    PLAIN = "plain"
    CODE = "code"


class Base(abc.ABC):
    threshold = 3

    @abc.abstractmethod
    def keep(self, record): ...

    @staticmethod
    def fold(text):
        return text.casefold()


@dataclasses.dataclass
class Rule(Base):
    """A rule."""

    low: int = 2
    names: frozenset = frozenset({"x", "y", "z"})

    def keep(self, record):
        return super().threshold < len(record["text"]) and self.low < LIMIT

    def __call__(self, record):
        return self.keep(record)

    @property
    def size(self):
        return self.low + 1


def strip(text):
    """Helps."""
    return text.strip()


def clean(record, bound=5, *, marks=(".", "!")):
    """Cleans."""
    text = strip(record["text"])
    if text in {"one", "two", "three"}:
        text = " ".join(w for w in WORDS.findall(text) if w not in STOP)
    return {**record, "text": text[:LIMIT], "kind": Kind.PLAIN.value, "table": TABLE, "grid": GRID.sum()}


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def counted(record):
    global calls
    calls += 1
    with LOCK:
        return record


def make(words, depth):
    def inner(record):
        return [w for w in words if len(w) > depth] and inner is not None

    return inner


def doubled(fn):
    @functools.wraps(fn)
    def call(record):
        return fn(fn(record))

    return call


@doubled
def decorated(record):
    return record


@functools.lru_cache(maxsize=10)
def cached(text):
    return strip(text)


def attempt(record):
    try:
        return int(record["n"])
    except (KeyError, ValueError):
        return -1


async def later(record):
    return record


rule = Rule(7)
TARGETS = {
    "clean": clean, "even": even, "counted": counted, "inner": make({"p", "q", "r", "s"}, 2), "decorated": decorated,
    "cached": cached, "attempt": attempt, "later": later, "rule": rule, "bound": rule.keep, "class": Rule,
    "lambda": lambda r: rule(r) and cached(r["text"]), "partial": functools.partial(clean, bound=3, marks={"u", "v"}),
    "static": Base.fold, "builtin": len, "method": str.upper, "bound_builtin": "x".join, "ufunc": np.log,
    "getter": operator.itemgetter("text"), "enum": lambda r: Kind.CODE, "counter": collections.Counter,
}
'''

REPORT = """
import json
from zephon.functions import code_hash
print(json.dumps({name: code_hash(fn) for name, fn in TARGETS.items()}))
"""


def run(file: Path, how: str, seed: str) -> str:
    """What `file` prints, run as a script or imported, under one hash seed."""
    command = [str(file)] if how == "script" else ["-c", f"import {file.stem}"]
    path = os.pathsep.join([str(file.parent), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=file.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The hashes of one program: as a script, imported from source and from its cache file, moved, under four seeds."""
    folder = tmp_path_factory.mktemp("functions")
    plain = folder / "sample.py"
    plain.write_text(SAMPLE + REPORT)
    moved = folder / "elsewhere" / "sample_moved.py"
    moved.parent.mkdir()
    moved.write_text("# moved\n\n\n\n" + SAMPLE.replace("\n\n\n", "\n\n\n\n# another comment\n\n") + REPORT)
    legs = [(plain, "script", "0"), (plain, "import", "1"), (plain, "import", "2"), (moved, "script", "random")]
    return [run(file, how, seed) for file, how, seed in legs]


def test_same_in_every_process(reports: list[str]) -> None:
    first = json.loads(reports[0])
    for report in reports[1:]:
        assert json.loads(report) == first


def test_every_target_differs(reports: list[str]) -> None:
    hashes = list(json.loads(reports[0]).values())
    assert len(set(hashes)) == len(hashes) > 15
    assert all(len(h) == 64 for h in hashes)


@contextmanager
def loaded(text: str, name: str = "sample") -> Iterator[dict[str, Any]]:
    """The targets of a module with this text, made in this process."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(text, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
        yield module.TARGETS
    finally:
        del sys.modules[name]


def hashes(text: str, name: str = "sample") -> dict[str, str]:
    with loaded(text, name) as targets:
        return {target: code_hash(fn) for target, fn in targets.items()}


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    return hashes(SAMPLE)


# (what is replaced, by what, the targets that must change: all others must not)
CHANGES = {
    "code": ("text[:LIMIT]", "text[1:LIMIT]", "clean partial"),
    "constant": ('"one", "two"', '"one", "four"', "clean partial"),
    "constant type": ("return -1", "return -1.0", "attempt"),
    "default": ("bound=5", "bound=6", "clean partial"),
    "keyword default": ('marks=(".", "!")', 'marks=(".", "?")', "clean partial"),
    "global": ("LIMIT = 100", "LIMIT = 101", "clean partial bound rule class lambda"),
    "global type": ("LIMIT = 100", "LIMIT = 100.0", "clean partial bound rule class lambda"),
    "global set": ('"of", "and"', '"or", "and"', "clean partial"),
    "global dict": ("2.5", "2.25", "clean partial"),
    "global pattern": ("[a-z]+", "[a-y]+", "clean partial"),
    "global array": ("np.int32", "np.int64", "clean partial"),
    "enum member": ('"code"', '"kode"', "clean partial enum"),
    "helper": ("text.strip()", "text.lstrip()", "clean partial cached lambda"),
    "mutual recursion": ("n != 0 and even(n - 1)", "n != 0 and even(n - 2)", "even"),
    "closure value": ("}, 2)", "}, 3)", "inner"),
    "closure set": ('"p", "q"', '"p", "k"', "inner"),
    "decorated": ("decorated(record):\n    return record", "decorated(record):\n    return [record]", "decorated"),
    "decorator": ("fn(fn(record))", "fn(record)", "decorated"),
    "handler": ("except (KeyError, ValueError)", "except (KeyError, TypeError)", "attempt"),
    "partial": ("bound=3", "bound=4", "partial"),
    "instance state": ("Rule(7)", "Rule(8)", "rule bound lambda"),
    "method": ("self.low < LIMIT", "self.low <= LIMIT", "rule bound class lambda"),
    "property": ("self.low + 1", "self.low + 2", "rule bound class lambda"),
    "class attribute": ("threshold = 3", "threshold = 4", "rule bound class lambda"),
    "field default": ("low: int = 2", "low: int = 1", "rule bound class lambda"),
    "static method": ("text.casefold()", "text.lower()", "rule bound class lambda static"),
    "async": ("async def later", "def later", "later"),
    "another method": ("str.upper", "str.lower", "method"),
    "another bound": ('"x".join', '"y".join', "bound_builtin"),
    "another ufunc": ("np.log", "np.exp", "ufunc"),
    "another getter": ('itemgetter("text")', 'itemgetter("id")', "getter"),
}  # fmt: skip

UNCHANGED = {
    "docstring": ('"""Cleans."""', '"""Cleans differently."""'),
    "no docstring": ('    """Cleans."""\n', ""),
    "class docstring": ('"""A rule."""', '"""Another rule."""'),
    "comment": ("    try:\n", "    # may fail\n    try:\n"),
    "annotations": ("def clean(record,", "def clean(record: dict,"),
    "counter": ("calls = 0", "calls = 5"),
    "order of a set": ('{"the", "a", "of"', '{"of", "a", "the"'),
    "order of a dict": ('"b": [1, 2.5], "a": {"x": (None, True)}', '"a": {"x": (None, True)}, "b": [1, 2.5]'),
    "unused global": ("\nLIMIT", "\nUNUSED = 1\nLIMIT"),
    "blank lines": ("\n\n\ndef", "\n\n\n\n\n\ndef"),
    "unused helper": ("\ndef even", "\ndef unused():\n    return 1\n\n\ndef even"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes(case: str, before: dict[str, str]) -> None:
    old, new, targets = CHANGES[case]
    assert old in SAMPLE
    after = hashes(SAMPLE.replace(old, new))
    assert sorted(name for name in before if before[name] != after[name]) == sorted(targets.split())


@pytest.mark.parametrize("case", UNCHANGED)
def test_unchanged(case: str, before: dict[str, str]) -> None:
    old, new = UNCHANGED[case]
    assert old in SAMPLE
    assert hashes(SAMPLE.replace(old, new)) == before


def test_module_name_does_not_enter(before: dict[str, str]) -> None:
    assert hashes(SAMPLE, "another") == before


def test_calls_do_not_change_it(before: dict[str, str]) -> None:
    record = {"text": "The one", "n": "3"}
    with loaded(SAMPLE) as targets:
        for name in ("clean", "counted", "inner", "decorated", "attempt", "rule", "bound", "lambda", "partial"):
            for _ in range(100):  # past the count at which Python specialises bytecode in place
                targets[name](record)
        assert {name: code_hash(fn) for name, fn in targets.items()} == before


def test_travels_by_value() -> None:
    """A function of a script reaches another process by value, and is still the same function."""

    def fn(record: dict[str, Any], words: tuple[str, ...] = ("a", "b")) -> bool:
        return record["text"] in words and helper(record)

    def helper(record: dict[str, Any]) -> bool:
        return len(record) > len({"x", "y"})

    assert code_hash(cloudpickle.loads(cloudpickle.dumps(fn))) == code_hash(fn)


def test_values_that_cannot_be_pickled_or_that_hold_themselves() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    stream = (n for n in range(3))

    def over(value: Any) -> Callable[[], Any]:
        return lambda: value

    assert code_hash(over(loop)) == code_hash(over(loop))
    assert code_hash(over(stream)) == code_hash(over(n for n in range(9)))
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert code_hash(over(deep)) != code_hash(over(deep[0]))


def test_long_chain_of_helpers() -> None:
    """The walk is a queue: thousands of functions that call one another do not exhaust the stack."""
    text = "\n".join(f"def f{i}(x): return f{i + 1}(x) + 1" for i in range(2_000)) + "\ndef f2000(x): return x"
    first, last = types.ModuleType("chain"), types.ModuleType("chain")
    exec(text, first.__dict__)
    exec(
        text.replace("return x", "return -x", 0).replace("def f2000(x): return x", "def f2000(x): return -x"),
        last.__dict__,
    )
    assert code_hash(first.f0) != code_hash(last.f0)


def test_unbound_closure_variable() -> None:
    def fn() -> Any:
        return late

    unbound = code_hash(fn)
    late = 3
    assert code_hash(fn) != unbound


def test_foreign_function_is_its_name() -> None:
    """A function of another module that is read by name stands for itself; one that is held by value is followed."""
    other, user = types.ModuleType("other"), types.ModuleType("user")

    def read(body: str) -> tuple[str, str]:
        exec(f"def helper(x): return {body}", other.__dict__)
        user.__dict__["helper"] = other.helper
        exec(
            "def by_name(x): return helper(x)\ndef make(f): return lambda x: f(x)\nby_value = make(helper)",
            user.__dict__,
        )
        return code_hash(user.by_name), code_hash(user.by_value)

    first, second = read("x"), read("-x")
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_function_name() -> None:
    class Callme:
        def __call__(self, record: Any) -> Any:
            return record

        def clean(self, record: Any) -> Any:
            return record

    assert function_name(test_function_name) == "test_function_name"
    assert function_name(Callme().clean) == "clean"
    assert function_name(len) == "len"
    assert function_name(lambda r: r) is None
    assert function_name(functools.partial(len)) is None
    assert function_name(Callme()) is None


def test_wants_rng() -> None:
    def named(record: Any, rng: np.random.Generator) -> Any: ...

    def keyword(record: Any, *, rng: Any = None) -> Any: ...

    def positional(rng: Any, /) -> Any: ...

    def collected(*rng: Any) -> Any: ...

    class Callme:
        def __call__(self, record: Any, rng: Any) -> Any: ...

    assert wants_rng(named)
    assert wants_rng(keyword)
    assert wants_rng(Callme())
    assert wants_rng(functools.partial(named, {}))
    assert not wants_rng(functools.partial(keyword, rng=1))
    assert not wants_rng(positional)
    assert not wants_rng(collected)
    assert not wants_rng(lambda r: r)
    assert not wants_rng(dict.fromkeys)
    assert not wants_rng(max)


def test_python_version() -> None:
    assert python_version() == ".".join(map(str, sys.version_info[:2]))

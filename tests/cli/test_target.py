"""TARGET: every form of it, and a message with a remedy for every way to get it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli import pipelines
from zephon.cli.target import load_target
from zephon.errors import ConfigError
from zephon.pipeline import Pipeline

MODULE = "tests.cli.pipelines"
FILE = str(Path(__file__).with_name("pipelines.py"))


def test_module_and_name() -> None:
    assert load_target(f"{MODULE}:ready") is pipelines.ready
    assert repr(load_target(f"{MODULE}:plain")) == repr(pipelines.plain())


def test_file_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    first, second = load_target(f"{FILE}:ready"), load_target(f"{FILE}:ready")
    assert isinstance(first, Pipeline)
    assert first is second, "a file is imported once"


def test_a_file_with_the_name_of_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("json.py", "my-pipeline.py"):
        (tmp_path / name).write_text(f"from {MODULE} import ready as mine\n")
        assert load_target(f"{tmp_path / name}:mine") is pipelines.ready
    assert "dumps" in vars(sys.modules["json"])


def test_a_file_sees_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_target.py").write_text(f"from {MODULE} import ready\n")
    (tmp_path / "with_neighbour.py").write_text(
        "import neighbour_of_target\nclass A:\n    b = neighbour_of_target.ready"
    )
    assert load_target(f"{tmp_path / 'with_neighbour.py'}:A.b") is pipelines.ready


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("examples/pretrain.py", r"names no pipeline: TARGET is module\.py:name"),
        (":ready", "names no pipeline"),
        ("no/such/file.py:pipeline", r"no file no/such/file\.py"),
        ("tests.cli.no_such:pipeline", r"no module 'tests\.cli\.no_such'"),
        ("no_such_package.sub:pipeline", r"no module 'no_such_package\.sub' \(no 'no_such_package'\)"),
        (f"{MODULE}:redy", "did you mean 'ready'"),
        (f"{MODULE}:zzz", "its pipelines: ready"),
        (f"{MODULE}:calls", "is of type list: a Pipeline, or a function"),
        (f"{MODULE}:needs", r"needs arguments \(path\): give them defaults"),
        (f"{MODULE}:gives_list", r"returned list: a Pipeline is wanted"),
        (
            f"{MODULE}:fails_to_build",
            r"calling .*:fails_to_build failed at .*pipelines\.py, line \d+: OSError: the corpus",
        ),
        (f"{MODULE}:wrong_setting", "option canonical_replicas=0"),
    ],
)
def test_wrong_targets(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)", r"ended the program \(SystemExit: 3\); .*`if __name__ == '__main__':"),
        ("x = (", r"failed at .*broken_target\.py, line 1: SyntaxError"),
        ("x = 1\n1 / 0", r"failed at .*broken_target\.py, line 2: ZeroDivisionError"),
        ("import no_such_helper", r"no module named 'no_such_helper' at .*broken_target\.py, line 1"),
        ("from . import helper", r"relative import.*; a file of a package is named as package\.module:name"),
    ],
)
def test_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_target.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_target(f"{tmp_path / 'broken_target.py'}:pipeline")
    assert "broken_target" not in sys.modules

"""What pickle cannot name travels by value, and comes back as what it was."""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.ipc.kinds import Color, Point
from zephon.ipc.codec import dump, dump_by_value

ROOT = Path(__file__).parents[2]


def back(value: Any) -> Any:
    return pickle.loads(dump(value))


def test_plain_values_are_plain_pickles() -> None:
    value = [1, "a", (2.0, None), {"k": b"v"}, Color.RED, Point(1, 2)]
    assert dump(value) == pickle.dumps(value, 5)
    assert back(value) == value


def test_classes_and_functions_from_inside_a_function() -> None:
    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

    two = 2
    made = back([Local(3), lambda n: n * two, functools.partial(lambda a, b: a - b, b=1)])
    assert type(made[0]) is Local
    assert made[0].n == 3
    assert made[1](5) == 10
    assert made[2](5) == 4


@pytest.mark.parametrize("make", [threading.Lock, lambda: (i for i in "ab"), lambda: sys._getframe()])
def test_what_nobody_can_send(make: Any) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        dump({"x": [make()]})


@pytest.mark.parametrize("mode", ["r", "rb", "w"])
def test_open_files_are_refused_also_for_reading(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with (tmp_path / "file").open(mode) as file, pytest.raises(TypeError, match="cannot pickle"):
        dump([file])
    assert back(io.StringIO("kept")).read() == "kept"  # memory, not a file


SCRIPT = """
import pickle, sys
from zephon.ipc.codec import dump_by_value
class Mine(Exception):
    class Inner:
        pass
def work():
    return Mine("m")
raw, classes = dump_by_value([work, Mine.Inner()])
assert classes == {"Mine": Mine}, classes
sys.stdout.buffer.write(pickle.dumps((raw, dump_by_value(classes)[0])))
"""


def test_the_classes_of_a_script_are_told() -> None:
    """Another process can put them where pickle will look for them."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, check=True, timeout=30)
    raw, classes = map(pickle.loads, pickle.loads(done.stdout))
    assert list(classes) == ["Mine"]
    made = raw[0]()
    assert type(made) is classes["Mine"]
    assert made.args == ("m",)


def test_classes_of_modules_are_not_among_them() -> None:
    assert dump_by_value([Color.RED, ValueError("v"), Path("x")])[1] == {}


class Stream(io.StringIO):
    """What stands for a standard stream in a notebook: nothing that can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle a stream")


def test_a_standard_stream_is_that_of_whoever_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands for it: in a notebook, and under tools that catch what is printed, that is no plain file."""
    here, there = (Stream(), Stream()), (Stream(), Stream())
    for name, stream in zip(("stdout", "stderr"), here, strict=True):
        monkeypatch.setattr(sys, name, stream)
    raw, _ = dump_by_value([*here, {"deep": here[0]}])
    for name, stream in zip(("stdout", "stderr"), there, strict=True):
        monkeypatch.setattr(sys, name, stream)
    out, err, deep = pickle.loads(raw)
    monkeypatch.undo()
    assert (out, err, deep["deep"]) == (there[0], there[1], there[0])

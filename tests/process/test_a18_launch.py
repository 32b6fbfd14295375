"""Case A18: every kind of function and every way to start a script, without a main guard too."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zephon as zp
from tests.process.functions import burn
from tests.process.helpers import ROOT, Script, children, ids, is_clean, launcher, line, run_script, slow, wait_until

# Functions as one types them into a script.
KINDS = """
import copy, functools, logging, multiprocessing, os, sys, threading
import zephon as zp
table = [10, 20, 30]
def top(record):
    return {**record, "y": record["id"] + table[0]}
def bound_to(amount):
    def inner(record):
        return {**record, "y": record["id"] + amount + table[1] - 20}
    return inner
def plus(record, amount, *, extra):
    return {**record, "y": record["id"] + amount + extra}
class Adder:
    step = 4
    def __init__(self, amount):
        self.amount = amount
    def __call__(self, record):
        return {**record, "y": record["id"] + self.amount + self.step - 4}
    def method(self, record):
        return {**record, "y": record["id"] + self.amount}
    @classmethod
    def made(cls, record):
        return {**record, "y": record["id"] + cls.step + 6}
    @staticmethod
    def static(record):
        return {**record, "y": record["id"] + 10}
def local():
    class Local(zp.Operator):
        def setup(self):
            self.amount = 10
        def process(self, record):
            return {**record, "y": record["id"] + self.amount}
    return Local()
class Speaks:
    def __init__(self):
        self.streams, self.log = [sys.stdout, sys.stderr], logging.getLogger("mine")
    def __call__(self, record):
        assert self.streams[1] is sys.stderr
        return {**record, "y": record["id"] + 10}
def listed(amounts):
    return lambda record: {**record, "y": record["id"] + amounts[0]}
kinds = {
    "closure over a list": listed(table),
    "module attribute": copy.copy,
    "holds the standard streams": Speaks(),
    "top level": top,
    "lambda": lambda record: {**record, "y": record["id"] + 10},
    "closure": bound_to(10),
    "partial": functools.partial(plus, amount=4, extra=6),
    "instance": Adder(10),
    "bound method": Adder(10).method,
    "class method": Adder.made,
    "static method": Adder.static,
}
def ids(pipeline):
    return [int(y) - 10 for batch in pipeline for y in batch["y"]]
def pipeline_of(source, function):
    return zp.Pipeline(source).map(function).options(runner="process", parallelism=2)
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(40)])
source = zp.StaticMixture([dataset], shuffle="none")
pipeline = zp.Pipeline(source)
for kind, function in kinds.items():
    pipeline = pipeline.map(function)
pipeline = pipeline.apply(local()).batch(4).options(runner="process", parallelism=2, canonical_replicas=1)
"""
RUN = """
before = multiprocessing.get_start_method(allow_none=True)
def below(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
most = 0
with pipeline:
    found = []
    for batch in pipeline:
        found += [int(y) - 10 for y in batch["y"]]
        most = max(most, sum(len(below(pid)) for pid in below(os.getpid())))
assert found == list(range(40))
assert most == 3, most  # an engine and two workers below the launcher; with it and this process W + 3
class HoldsAFile:
    def __init__(self):
        self.file = open(os.devnull)
    def __call__(self, record):
        return record
holder = HoldsAFile()
broken = pipeline_of(source, holder)
try:
    next(iter(broken))
except zp.errors.ConfigError as error:
    assert "operator 'map' cannot be sent to another process" in str(error), error
    assert not below(os.getpid())
else:
    raise AssertionError("no error")
assert len(list(broken.options(runner="inline"))) == 40
holder.file.close()
assert multiprocessing.get_start_method(allow_none=True) == before
print("done", os.getpid())
"""
GUARDED = KINDS + 'if __name__ == "__main__":\n' + "".join(f"    {row}\n" for row in RUN.splitlines())


# The script as a cell of a notebook, whose kernel is a process of its own.
IN_A_NOTEBOOK = """
import pathlib, sys
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(pathlib.Path(sys.argv[1]).read_text())])
nbclient.NotebookClient(notebook, timeout=60).execute()
for output in notebook.cells[0].outputs:
    print(output.text)
"""


def started(code: str, way: str, tmp_path: Path) -> tuple[int, str, str]:
    path = tmp_path / "job.py"
    path.write_text(code)
    if way == "python -c":
        return run_script(code)
    if way == "IPython":
        pytest.importorskip("IPython")
        return run_script("", argv=["-m", "IPython", "--no-banner", "--quick", str(path)])
    if way == "a notebook":
        for name in ("nbclient", "nbformat", "ipykernel"):
            pytest.importorskip(name)
        status, out, err = run_script(IN_A_NOTEBOOK, path, timeout_s=60)
        return status, out, "".join(row for row in err.splitlines(keepends=True) if "IPKernelApp" not in row)
    if way == "python - < file":
        with path.open() as file:
            return run_script("", argv=["-"], stdin=file)
    if way == "python -m":
        return run_script("", argv=["-m", "job"], cwd=tmp_path)
    if way == "exec":  # as notebooks do: no file, and the names live in a dictionary
        return run_script(f"exec(compile({code!r}, 'cell', 'exec'), {{'__name__': '__main__'}})")
    return run_script("", argv=[str(path)])


METHODS = ("none", "fork", "forkserver", "spawn")  # of the user's own
WAYS = ("script with a guard", "script", "python -c", "python - < file", "python -m", "exec", "IPython", "a notebook")
CHOSEN = {
    ("script with a guard", "none"),
    ("script", "spawn"),
    ("python - < file", "forkserver"),
    ("exec", "fork"),
    ("IPython", "spawn"),
    ("a notebook", "none"),
}


@pytest.mark.parametrize(("way", "method"), [(w, m) if (w, m) in CHOSEN else slow(w, m) for w in WAYS for m in METHODS])
def test_every_kind_of_function_in_every_kind_of_script(way: str, method: str, tmp_path: Path) -> None:
    """It runs once: a script without a guard does not start itself again. The start method stays what it was."""
    code = GUARDED if way == "script with a guard" else KINDS + RUN
    if method != "none":
        code = f"import multiprocessing\nmultiprocessing.set_start_method({method!r})\n{code}"
    status, out, err = started(code, way, tmp_path)
    assert status == 0, err
    assert out.count("done") == 1
    assert not err


def test_module_level_effects_happen_once(tmp_path: Path) -> None:
    """The script is not run again in any process below, so its prints and files are there once."""
    code = f"print('effect', flush=True)\nopen({str(tmp_path / 'log')!r}, 'a').write('x')\n{KINDS}{RUN}"
    status, out, err = started(code, "script", tmp_path)
    assert status == 0, err
    assert out.count("effect") == 1
    assert (tmp_path / "log").read_text() == "x"


def test_functions_of_a_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom helper import two\ndef f(r):\n    return {**r, 'y': r['id'] * two}\n"
    )
    (tmp_path / "helper.py").write_text("two = 2\n")
    code = (
        KINDS.partition("pipeline = ")[0]
        + """
import mine
pipeline = zp.Pipeline(source).map(mine.f).options(runner="process", parallelism=1, canonical_replicas=1)
assert [int(batch["y"][0]) for batch in pipeline] == list(range(0, 80, 2))
"""
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job.py").write_text(code)
    status, _, err = run_script("", argv=[str(tmp_path / "job.py")], cwd=tmp_path / "elsewhere")
    assert status == 0, err


def test_files_in_the_working_directory_do_not_get_in_the_way(tmp_path: Path) -> None:
    """`python folder/script.py` does not import from the working directory; nor may the processes below it."""
    (tmp_path / "work").mkdir()
    for name in ("socket", "pickle", "zephon", "numpy", "msgspec", "select"):
        (tmp_path / "work" / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "job.py").write_text(KINDS + RUN)
    status, _, err = run_script("", argv=[str(tmp_path / "job.py")], cwd=tmp_path / "work")
    assert status == 0, err


def test_a_path_that_the_script_added(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "far.py").write_text("def f(r):\n    return {**r, 'y': r['id'] + 10}\n")
    code = f"import sys, pathlib\nsys.path += [{str(tmp_path / 'lib')!r}, pathlib.Path('x')]\nimport far\n{KINDS}"
    code += "pipeline = zp.Pipeline(source).map(far.f).options(runner='process', canonical_replicas=1)\n" + RUN
    status, _, err = started(code, "script", tmp_path)
    assert status == 0, err


def test_the_number_of_processes_is_bounded() -> None:
    """The launcher, the engine, and the workers; with the trainer W + 3."""
    with line(400, burn, parallelism=3) as pipeline:
        for batch in pipeline:
            if batch["id"][0] % 40 == 0:
                assert len(children(launcher())) <= 4
                assert children(os.getpid()) == [launcher()]


def test_the_start_method_is_left_alone() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    with line(16) as pipeline:
        list(pipeline)
    assert multiprocessing.get_start_method(allow_none=True) == before


class Holder:
    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


@pytest.mark.parametrize("what", ["file", "binary file", "lock", "generator", "socket"])
def test_an_object_that_cannot_be_sent_is_named_before_anything_starts(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    makers: dict[str, Callable[[], Any]] = {
        "file": (tmp_path / "file").open,
        "binary file": partial((tmp_path / "file").open, "rb"),
        "lock": threading.Lock,
        "generator": lambda: (i for i in "ab"),
        "socket": socket.socket,
    }
    made = makers[what]()
    pipeline = line(4, burn, Holder(made))
    with pytest.raises(zp.errors.ConfigError) as raised:
        next(iter(pipeline))
    text = str(raised.value)
    assert "operator 'map' cannot be sent to another process" in text
    assert "setup()" in text
    assert "runner='threads'" in text
    assert not children(os.getpid())
    if hasattr(made, "close"):
        made.close()
    assert ids(pipeline.options(runner="threads")) == list(range(4))


def test_a_module_that_cannot_be_imported_there(tmp_path: Path) -> None:
    """Made in memory: the trainer has it, no other process can have it. The error says so, and nothing is left."""
    code = (
        KINDS
        + """
import types
module = types.ModuleType("nowhere")
exec("def f(record): return record", module.__dict__)
sys.modules["nowhere"] = module
broken = zp.Pipeline(source).map(module.f).options(runner="process")
try:
    next(iter(broken))
except zp.errors.ConfigError as error:
    assert "cannot be loaded in another process" in str(error) and "nowhere" in str(error), error
    assert type(error.__cause__) is ModuleNotFoundError
    print("refused")
"""
    )
    status, out, err = started(code, "script", tmp_path)
    assert (status, out.strip()) == (0, "refused"), err
    is_clean(err)


def test_a_module_whose_import_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\nif os.environ.get('PYTHONHASHSEED') == '0': os._exit(5)\ndef f(r): return r\n"
    )
    code = (
        KINDS
        + """
import deadly
try:
    next(iter(zp.Pipeline(source).map(deadly.f).options(runner="process")))
except zp.errors.WorkerError as error:
    assert "5" in str(error)
    print("refused")
"""
    )
    status, out, err = run_script("", argv=["-c", code], cwd=tmp_path, env={"PYTHONHASHSEED": "random"})
    assert (status, out.strip()) == (0, "refused"), err
    is_clean(err)


@pytest.mark.parametrize("moment", ["kill", slow("close")])
def test_a_slow_import_does_not_outlive_the_trainer(moment: str, tmp_path: Path) -> None:
    """torch takes seconds to import; the launcher is not there to poll then."""
    (tmp_path / "slow.py").write_text(
        "import os, threading\nif os.environ.get('PYTHONHASHSEED') == '0':\n"
        f"    open({str(tmp_path / 'importing')!r}, 'w')\n    threading.Event().wait(60)\ndef f(r): return r\n"
    )
    code = (
        KINDS
        + """
import slow
pipeline = zp.Pipeline(source).map(slow.f).options(runner="process")
threading.Thread(target=lambda: (sys.stdin.readline(), pipeline.close())).start()
try:
    next(iter(pipeline))
except zp.errors.Closed:
    print("closed")
"""
    )
    script = Script("", argv=["-c", code], cwd=tmp_path, env={"PYTHONHASHSEED": "random"}, stdin=subprocess.PIPE)
    wait_until((tmp_path / "importing").exists, 30)
    if moment == "kill":
        script.process.kill()
        script.process.communicate()
        script.nothing_left()
    else:
        assert script.process.stdin is not None
        script.process.stdin.write("\\n")
        script.process.stdin.close()
        script.process.stdin = None
        status, out, err = script.end(10)
        assert (status, out.strip(), err) == (0, "closed", "")


def test_the_environment_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000")
    names = ["MY_VARIABLE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GLIBC_TUNABLES"]
    with line(4, partial(look, names=names)) as pipeline:
        seen = next(iter(pipeline))
    assert seen["MY_VARIABLE"] == ["mine"] * 4
    assert seen["OMP_NUM_THREADS"] == ["1"] * 4
    assert seen["TOKENIZERS_PARALLELISM"] == ["false"] * 4
    assert os.environ["OMP_NUM_THREADS"] == "7"
    tunables = seen["GLIBC_TUNABLES"][0].split(":")
    assert "glibc.malloc.mmap_threshold=0x2000000" in tunables
    assert tunables[-1] == "glibc.malloc.trim_threshold=1000"  # the last one counts


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="other C libraries have their own ways")
def test_the_heap_of_a_worker_keeps_its_pages() -> None:
    with line(8, count_faults, parallelism=1) as pipeline:
        assert next(iter(pipeline))["faults"][-1] < 200


def count_faults(record: dict[str, Any]) -> dict[str, Any]:
    """Page faults of making 8 arrays of 600 KB at once: given back and mapped again they would have 1,168 pages."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.full(598_016, i, np.uint8) for i in range(8)]
    return {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "sum": sum(map(len, arrays))}


def look(record: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: os.environ[name] for name in names}


def test_torch_is_not_imported_where_no_operator_does() -> None:
    with line(4, partial(loaded, name="torch")) as pipeline:
        assert not next(iter(pipeline))["loaded"].any()
    assert (ROOT / "zephon").is_dir()


def loaded(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {"loaded": name in sys.modules}

"""`zephon doctor` as a user calls it: its table, JSON and exit status, on machines that lack this or that."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from zephon import limits
from zephon.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="most of what it looks at is Linux's")

from zephon.cli import machine  # noqa: E402  # needs what is asked for above

ROWS = [
    "Python",
    "platform",
    "default runner",
    "CPUs",
    "memory",
    "/dev/shm",
    "unnamed files (O_TMPFILE)",
    "named and unlinked (posix_ipc)",
    "memfd",
    "shared memory",
    "open files (NOFILE)",
    "processes (NPROC)",
    "address space (AS)",
    "pidfd_open",
    "eventfd",
    "zephon",
    "numpy",
    "msgspec",
    "cloudpickle",
    "posix_ipc",
    "uvloop",
    "torch",
    "tokenizers",
    "pyarrow",
    "a real start",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    status = main(["doctor", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the real start."""
    monkeypatch.setattr(machine, "_start", lambda: machine.Check(machine.START, "ok", "left out"))


def test_the_table_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real start, also where the environment says that this is one rank of several."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["check", "status", "found"]
    left = iter(lines)
    for row in ROWS:
        assert any(line.startswith(f"{row}  ") for line in left), f"{row} is not there, or not in its place"
    assert f"CPython {sys.version.split()[0]}" in out
    assert "process, as on every Linux" in out
    assert f"numpy{' ' * (len('named and unlinked (posix_ipc)') - 5)}  ok" in out
    start = next(line for line in lines if line.startswith("a real start"))
    assert "2 workers, first batch after" in start
    assert "16 batches and the end after" in start
    assert lines[-1].startswith(("all is well: 25 checks", "it works, with "))
    assert max(map(len, lines[:-1])) <= 118


def test_json(quick: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A line a check; with '-' nothing else goes to standard output."""
    status, out, err = run(capsys, "--json", "-")
    checks = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [check["name"] for check in checks] == ROWS
    assert all(list(check) == ["name", "status", "found", "remedy"] for check in checks)
    assert all((check["remedy"] is None) == (check["status"] == "ok") for check in checks)
    assert "eventfd" in err
    file = tmp_path / "out.json"
    assert run(capsys, "--json", str(file))[0] == 0
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ROWS


def test_wrong_use(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--json", "no/such/folder/x.json")
    assert status == 2
    assert "--json no/such/folder/x.json: No such file" in err


def cells(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]], str]:
    """(exit status, checks by name, last line)."""
    status, out, err = run(capsys, "--json", "-")
    return status, {check["name"]: check for check in map(json.loads, out.splitlines())}, err.splitlines()[-1]


def test_a_kernel_without_pidfd_is_a_failure(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refused)
    status, checks, last = cells(capsys)
    assert status == 1
    assert checks["pidfd_open"]["status"] == "failure"
    assert "Function not implemented" in checks["pidfd_open"]["found"]
    assert "runner='threads'" in checks["pidfd_open"]["remedy"]
    assert last == "1 of 25 checks failed: pidfd_open"


def test_a_missing_package(quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A required one is a failure, uvloop a warning, and torch is only told."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("cloudpickle", "uvloop", "torch"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, checks, last = cells(capsys)
    assert status == 1
    assert checks["cloudpickle"] == {
        "name": "cloudpickle",
        "status": "failure",
        "found": "missing",
        "remedy": "pip install cloudpickle",
    }
    assert checks["uvloop"]["status"] == "warning"
    assert checks["torch"]["status"] == "ok"
    assert checks["torch"]["found"].startswith("not installed; for output='torch'")
    assert last == "1 of 25 checks failed: cloudpickle"


def test_narrow_limits_are_warnings(
    quick: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited = {resource.RLIMIT_NOFILE: (30, 60), resource.RLIMIT_NPROC: (5, 5), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    monkeypatch.setattr(resource, "getrlimit", limited.get)
    monkeypatch.setattr(limits, "_CGROUP", str(tmp_path))
    monkeypatch.setattr(machine, "SHM", str(tmp_path / "missing"))
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {200 << 20}\nshmem 0\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "pids.max").write_text("40\n")
    (tmp_path / "pids.current").write_text("39\n")
    status, checks, last = cells(capsys)
    assert status == 0
    warned = [name for name, check in checks.items() if check["status"] == "warning"]
    limits_of = ["open files (NOFILE)", "processes (NPROC)", "address space (AS)"]
    assert warned == ["CPUs", "memory", "/dev/shm", *limits_of]
    assert "the cgroup allows the time of 0.5; parallelism='auto' means 1 workers" in checks["CPUs"]["found"]
    assert "100 MiB of the cgroup's 300 MiB left" in checks["memory"]["found"]
    assert checks["/dev/shm"]["found"] == "No such file or directory"
    assert checks["open files (NOFILE)"]["found"].startswith("30, and up to 60 if asked for; ")
    assert "the user may have 5 with threads, the cgroup has 39 of 40" in checks["processes (NPROC)"]["found"]
    assert checks["address space (AS)"]["found"] == "1.0 GiB"
    assert last == f"it works, with 6 warnings: {', '.join(warned)}"


def test_no_memory_at_all_is_a_failure_of_the_start_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the real start is shown as the user would see it."""

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_start(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it does not start")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr("zephon.runners.spawn.Launcher", no_start)
    status, checks, last = cells(capsys)
    assert status == 1
    assert "no room for" in checks["shared memory"]["found"]
    assert checks["memfd"]["status"] == "warning"
    assert checks["a real start"]["found"] == "RuntimeError: it does not start"
    assert last == "2 of 25 checks failed: shared memory, a real start"

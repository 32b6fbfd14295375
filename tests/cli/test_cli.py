"""`zephon verify` and `zephon explain` as a user calls them: output, JSON, exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import pipelines
from zephon import cli
from zephon.cli import main

pytest.importorskip("typer")
pytest.importorskip("rich")

ROOT = Path(__file__).parent.parent.parent
TARGET = "tests.cli.pipelines"
QUICK = ("--batches", "24", "--runners", "inline", "--topologies", "1,2")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repetition of the first check comes at once."""
    from zephon.testing.verify import Verification

    whole = Verification.__init__
    monkeypatch.setattr(Verification, "__init__", lambda self, *a, **k: whole(self, *a, **{**k, "apart_s": 0.0}))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_sound_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "verify", f"{TARGET}:packed", *QUICK, "--seed", "7")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].strip() == f"{TARGET}:packed: 5 lanes"
    assert lines[1].split() == ["check", "runner", "workers", "task", "groups", "restarts", "batches", "outcome"]
    rows = [line for line in lines if line.rstrip().endswith("equal")]
    assert {row.split()[0] for row in rows} == {"stream", "order", "restart", "fresh", "again"}
    assert lines[-1] == f"verified: 24 batches x {len(rows)} configurations equal the oracle's"


def test_a_random_map(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", f"{TARGET}:with_jitter", *QUICK)
    assert status == 1
    cause, last = out.splitlines()[-2:]
    assert cause.startswith("likely cause: two runs of the same configuration differ: 'jitter' (map)")
    assert last.startswith("DIFFERS: ")
    assert "first at step 0, lane 0: sample 0 differs in field 'x'; it is made of dataset '" in last
    assert last.endswith("(stream, runner inline, 1 groups)")


def test_a_map_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", f"{TARGET}:with_fails", *QUICK, "--batches", "200")
    assert status == 1
    last = out.splitlines()[-1]
    assert last.startswith(
        "RAISES: the pipeline raises KeyError: 'no such field' in operator 'fails' at dataset 'web',"
    )
    assert "DIFFERS" not in out


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
def test_workers_are_killed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    settings = ("--batches", "12", "--runners", "process", "--topologies", "1", "--kill", "--json", str(file))
    status, out, _ = run(capsys, "verify", f"{TARGET}:endless", *settings)
    assert status == 0
    lines, checks = out.splitlines(), read(file.read_text())
    assert "killed" in lines[1].split()
    killed = [check["kills"] for check in checks if check["check"] == "deaths"]
    assert len(killed) == 3
    assert min(killed) > 1
    assert {check["kills"] for check in checks if check["check"] != "deaths"} == {0}
    rows = [line.split() for line in lines if line.startswith("deaths")]
    assert [row[-2:] for row in rows] == [[str(number), "equal"] for number in killed]
    at_work = sum(check["kills_at_work"] for check in checks)
    wanted = f"verified: 12 batches x {len(checks)} configurations equal the oracle's"
    assert lines[-1] == f"{wanted}; {sum(killed)} workers were killed, {at_work} of them at work"


@pytest.mark.skipif(sys.platform != "linux", reason="the process runner needs Linux")
@pytest.mark.slow
def test_where_nobody_dies_nothing_is_proven(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zephon.testing.faults.workers", list)
    settings = ("--batches", "8", "--runners", "process", "--topologies", "1", "--kill")
    status, out, _ = run(capsys, "verify", f"{TARGET}:endless", *settings)
    assert status == 1
    last = out.splitlines()[-1]
    assert last.startswith("NOT PROVEN: in 3 of ")
    assert last.endswith("no worker was killed; compare more, with --batches")


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else goes there: neither the table nor what the pipeline prints."""
    status, out, err = run(capsys, "verify", f"{TARGET}:prints", *QUICK, "--json", "-")
    assert status == 0
    checks = read(out)
    fields = ["check", "runner", "parallelism", "task_records", "topology", "restarts", "batches", "ok"]
    fields += ["kills", "kills_at_work", "difference"]
    assert all(list(check) == fields for check in checks)
    assert all(check["ok"] and check["difference"] is None and check["batches"] >= 24 for check in checks)
    assert {"check": "stream", "runner": "inline", "topology": 2} in [
        {name: check[name] for name in ("check", "runner", "topology")} for check in checks
    ]
    assert "building" in err
    assert f"verified: 24 batches x {len(checks)} configurations" in err


def test_json_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    status, out, _ = run(capsys, "verify", f"{TARGET}:with_rarely", *QUICK, "--batches", "120", "--json", str(file))
    assert status == 1
    assert "DIFFERS" in out
    difference = next(check["difference"] for check in read(file.read_text()) if not check["ok"])
    assert difference["what"] == "digest"
    assert difference["field"] == "x"
    assert difference["origin"] == ["web", "list", 133, []]
    assert {"pass", "step", "lane", "sample", "text", "cause"} <= set(difference)
    assert "at" not in difference


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nothing"], "'nothing' names no pipeline"),
        (["verify", f"{TARGET}:wrong_setting"], "option canonical_replicas=0"),
        (["verify", f"{TARGET}:nothing"], "there is nothing to verify"),
        (["verify", f"{TARGET}:plain", "--runners", "inline,fibers"], "runner 'fibers' is not there"),
        (["verify", f"{TARGET}:plain", "--topologies", "1,two"], "--topologies 1,two: whole numbers"),
        (["verify", f"{TARGET}:packed", "--topologies", "8"], "8 groups is more than canonical_replicas=5"),
        (["verify", f"{TARGET}:plain", "--batches", "0"], "--batches"),
        (
            ["verify", f"{TARGET}:plain", "--json", "no/such/folder/x.json"],
            "--json no/such/folder/x.json: No such file",
        ),
        (["verify", f"{TARGET}:plain", "--depth", "3"], "--depth"),
        (["verify", f"{TARGET}:plain", "--kill", "--runners", "inline"], "under runner 'process' only"),
        (["verify"], "Missing argument"),
        (["explain", f"{TARGET}:redy"], "did you mean 'ready'"),
        (["prove"], "prove"),
    ],
)
def test_wrong_use(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in out + err


def test_a_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipelines, "ready", interrupted)
    assert run(capsys, "explain", f"{TARGET}:ready")[0] in (1, 130)
    monkeypatch.setattr("zephon.testing.chain.Chain.run", lambda self: interrupted())
    assert run(capsys, "verify", f"{TARGET}:plain", *QUICK)[0] == 130


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", f"{TARGET}:ready")
    assert (status, err) == (0, "")
    assert out == pipelines.ready.explain() + "\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [
        n for n in sys.modules if n.split(".")[0] == package or n in ("zephon.cli.verify", "zephon.cli.explain")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run(capsys, "verify", f"{TARGET}:plain")
    assert status == 2
    assert err == f"zephon: zephon's command line needs {package}, which is not installed: pip install zephon[cli]\n"
    for name in ("verify", "explain"):
        monkeypatch.delattr(cli, name, raising=False)


def test_as_a_program_on_a_terminal(tmp_path: Path) -> None:
    """A progress bar where standard error is a terminal; the JSON is whole all the same."""
    bar, terminal = pty.openpty()
    script = "import sys; from zephon.cli import main; sys.exit(main())"
    arguments = ["verify", f"{TARGET}:plain", *QUICK, "--json", str(tmp_path / "out.json")]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    ) as done:
        os.close(terminal)
        seen = b""
        try:
            while piece := os.read(bar, 4096):
                seen += piece
        except OSError:  # the other side is closed
            pass
        out = done.communicate(timeout=60)[0]
    os.close(bar)
    assert done.returncode == 0, out
    assert b"batches" in seen
    assert out.splitlines()[-1].startswith("verified: 24 batches")
    assert all(check["ok"] for check in read((tmp_path / "out.json").read_text()))

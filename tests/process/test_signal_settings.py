"""L7, L8: what the trainer makes of signals, or a user's module when it is imported, changes nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.process.helpers import Script, children, ids, is_clean, launcher, line, run_script, wait_until
from zephon.runners import signals, spawn

pytestmark = pytest.mark.law("L8")

MODULE = """
import os, signal, sys, threading
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
def leave(*_):
    sys.exit(143)
{setting}
if {threads}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def work(record):
    return record
"""
SETTINGS = {
    "the ends of children are ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "any child is collected": "signal.signal(signal.SIGCHLD, reap)",
    "SIGTERM and SIGINT end it": "[signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGINT)]",
    "all is blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
}
SCRIPT = """
import signal, sys
import zephon as zp
sys.path.insert(0, sys.argv[1])
import setting
signal.pthread_sigmask(signal.SIG_SETMASK, ())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
    signal.signal(number, lambda *_: None)
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(4_000)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, shuffle="none")).map(setting.work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=1, task_records=4)
found = []
with pipeline:
    for batch in pipeline:
        found += batch["id"].tolist()
        if len(found) == 40:
            print("running", flush=True)
            sys.stdin.readline()
assert found == list(range(4_000)), len(found)
"""


def told(script: Script, numbers: tuple[int, ...]) -> None:
    """Sends signals to the whole job in the middle of it; kills a worker as well. All batches come."""
    assert script.readline() == "running"
    pids = sorted(script.processes())
    for number in numbers:
        for pid in pids:
            os.kill(pid, number)
    os.kill(pids[-1], signal.SIGKILL)
    assert script.process.stdin is not None
    script.process.stdin.write("go on\n")
    script.process.stdin.flush()
    status, _, errors = script.end()
    assert status == 0, errors
    is_clean(errors)


@pytest.mark.parametrize("threads", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "anew"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_module_sets_at_import(setting: str, threads: bool, tmp_path: Path) -> None:
    (tmp_path / "setting.py").write_text(MODULE.format(setting=SETTINGS[setting], threads=threads))
    told(Script(SCRIPT, tmp_path, stdin=-1), (signal.SIGTERM, signal.SIGINT))


def test_warnings_of_a_scheduler_to_the_whole_job(tmp_path: Path) -> None:
    """Whichever signal it warns by: a trainer that handles it goes on."""
    (tmp_path / "setting.py").write_text(MODULE.format(setting="", threads=False))
    numbers = set(signals.HELD_OFF) - {signal.SIGALRM}  # which is user code's own affair in a worker
    told(Script(SCRIPT, tmp_path, stdin=-1), tuple(numbers))


@pytest.mark.parametrize("started", ["the launcher", "the launcher's children"])
def test_a_warning_that_comes_before_a_process_has_taken_over(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moments in which a new interpreter starts, the default of most signals would be its end."""
    here, go = tmp_path / "here", tmp_path / "go"
    wait = f"import os\nopen({str(here)!r}, 'w').close()\nwhile not os.path.exists({str(go)!r}): pass\n"
    if started == "the launcher":
        monkeypatch.setattr(spawn, "_CODE", wait + spawn._CODE)
    else:
        change = f"import zephon.runners.fresh as fresh\nfresh._CODE = {wait!r} + fresh._CODE\n"
        threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        monkeypatch.setattr(spawn, "_CODE", spawn._CODE.replace("main(", f"{threads}{change}main("))

    def warn() -> None:
        wait_until(here.exists, 30)
        for pid in (launcher(), *children(launcher())):
            for number in (signal.SIGINT, *signals.HELD_OFF):
                os.kill(pid, number)
        go.touch()

    thread = threading.Thread(target=warn)
    thread.start()
    with line(64) as pipeline:
        assert ids(pipeline) == list(range(64))
    thread.join()


def test_an_alarm_in_a_worker_ends_it_as_user_code_wants(tmp_path: Path) -> None:
    code = SCRIPT.replace("            print", "            break\n            print").replace("4_000)), l", "40)), l")
    (tmp_path / "setting.py").write_text(
        "import pathlib, signal\ndef work(record):\n    mark = pathlib.Path(" + repr(str(tmp_path / "mark")) + ")\n"
        "    if record['id'] == 20 and not mark.exists():\n        mark.touch()\n        signal.alarm(1)\n"
        "        signal.sigwait([])\n    return record\n"
    )
    status, _, errors = run_script(code, tmp_path)
    assert status == 0, errors


SLOW = """
import threading
def work(record):
    return record
if "launcher" in open("/proc/self/cmdline").read():
    print("importing", flush=True)
    threading.Event().wait()
"""
STARTING = """
import os, signal, sys, threading, time
import zephon as zp
sys.path.insert(0, sys.argv[1])
import setting
{inherited}
dataset = zp.Dataset.from_list("toy", [{{"id": i}} for i in range(8)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3)).map(setting.work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=1, canonical_replicas=1)
def stop():
    sys.stdin.readline()
    began = time.monotonic()
    {how}
    print(time.monotonic() - began, flush=True)
threading.Thread(target=stop).start()
try:
    next(iter(pipeline))
except zp.errors.Closed:
    pass
"""
INHERITED = {
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGINT})",
    "ignored": "signal.signal(signal.SIGIO, signal.SIG_IGN)",
}


@pytest.mark.parametrize("how", ["pipeline.close()", "os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.parametrize("inherited", INHERITED)
def test_what_the_trainer_blocks_or_ignores_does_not_keep_an_importing_launcher(
    inherited: str, how: str, tmp_path: Path
) -> None:
    (tmp_path / "setting.py").write_text(SLOW)
    script = Script(STARTING.format(inherited=INHERITED[inherited], how=how), tmp_path, stdin=-1)
    assert script.readline() == "importing"
    assert script.process.stdin is not None
    script.process.stdin.write("stop\n")
    script.process.stdin.flush()
    if "close" in how:
        assert float(script.readline()) < 1
        assert script.end()[0] == 0
    else:
        wait_until(lambda: script.process.poll() is not None)
        script.end()

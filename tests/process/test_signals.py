"""L8: Ctrl-C is one KeyboardInterrupt and a quick clean end; a trainer that is told to stop may save its state."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.process.helpers import Script, is_clean, wait_until

pytestmark = pytest.mark.law("L8")

START = """
import json, os, signal, sys, threading, time
import zephon as zp
def work(record):
    SLOW
    return {**record, "pad": "x" * 1000}
dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(100_000)])
pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=3, shuffle="none")).map(work).batch(4)
pipeline = pipeline.options(runner="process", parallelism=2, canonical_replicas=2, task_records=4)
"""
QUICK, STUCK = START.replace("SLOW", "pass"), START.replace("SLOW", "threading.Event().wait(60)")
LOOP = """
print("start", flush=True)
for number, batch in enumerate(pipeline):
    if number == 5:
        print("running", flush=True)
"""


def interrupted(script: Script, until: str) -> tuple[float, int, str, str]:
    """Sends SIGINT to the whole process group, as a terminal does: (seconds to the end, status, output, errors)."""
    while script.readline() != until:
        pass
    began = time.monotonic()
    os.killpg(script.pid, signal.SIGINT)
    status, out, err = script.end()
    return time.monotonic() - began, status, out, err


@pytest.mark.parametrize("code", [QUICK + LOOP, STUCK + LOOP])
def test_ctrl_c_in_the_loop(code: str) -> None:
    until = "running" if code.startswith(QUICK) else "start"
    took, status, _, err = interrupted(Script(code), until)
    assert took < 2
    assert status == -signal.SIGINT  # as Python ends by default
    assert err.count("KeyboardInterrupt") == 1
    assert err.count("Traceback") == 1
    is_clean(err.replace("Traceback", ""))


def test_a_caught_ctrl_c_can_save_and_go_on() -> None:
    code = (
        QUICK
        + """
found = []
try:
    for number, batch in enumerate(pipeline):
        found += batch["id"].tolist()
        if number == 5:
            print("running", flush=True)
except KeyboardInterrupt:
    state = pipeline.state_dict()
with pipeline.take(3) as again:
    again.load_state_dict(state)
    for batch in again:
        found += batch["id"].tolist()
print(json.dumps([len(found), len(set(found)), sum(l["samples"] for l in state["lanes"].values())]))
"""
    )
    took, status, out, err = interrupted(Script(code), "running")
    assert status == 0, err
    assert not err
    total, different, saved = json.loads(out)
    assert total == different
    assert saved + 12 - total in (0, 4)  # Ctrl-C may fall behind `next`, before the script keeps its batch
    assert took < 6  # with a second start in it


def test_ctrl_c_while_it_starts() -> None:
    """Between the first `next` and the first batch: the launcher may not even read its orders yet."""
    code = STUCK + "print('start', flush=True)\nnext(iter(pipeline))"
    for _ in range(3):
        took, status, _, err = interrupted(Script(code), "start")
        assert took < 2
        assert status == -signal.SIGINT
        assert err.count("KeyboardInterrupt") == 1
        is_clean(err.replace("Traceback", ""))


def test_ctrl_c_twice() -> None:
    script = Script(QUICK + LOOP)
    while script.readline() != "running":
        pass
    for _ in range(2):
        os.killpg(script.pid, signal.SIGINT)
    status, _, err = script.end()
    assert status == -signal.SIGINT
    assert "Exception ignored" not in err


def test_sigterm_saves_a_state() -> None:
    """A scheduler's warning goes to every process of the job; the workers ignore it, so batches still come."""
    code = (
        QUICK
        + """
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
behind = 0
for number, batch in enumerate(pipeline):
    if number == 5:
        print("running", flush=True)
    behind += bool(told)
    if behind == 100:
        break
state = pipeline.state_dict()
pipeline.close()
print(json.dumps([number + 1, sum(lane["turns"] for lane in state["lanes"].values())]))
"""
    )
    script = Script(code)
    while script.readline() != "running":
        pass
    for pid in script.processes():
        os.kill(pid, signal.SIGTERM)
    status, out, err = script.end()
    assert (status, err) == (0, "")
    batches, saved = json.loads(out)
    assert batches == saved > 100


def test_sigterm_without_a_handler_ends_everything() -> None:
    script = Script(QUICK + LOOP)
    while script.readline() != "running":
        pass
    os.killpg(script.pid, signal.SIGTERM)
    status, _, err = script.end()
    assert status == -signal.SIGTERM
    is_clean(err)


def test_a_stopped_and_continued_job_goes_on() -> None:
    """Ctrl-Z and fg."""
    script = Script(QUICK + LOOP.replace("== 5", "in (5, 500)"))
    assert [script.readline(), script.readline()] == ["start", "running"]
    os.killpg(script.pid, signal.SIGSTOP)
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{script.pid}/status").read_text())
    os.killpg(script.pid, signal.SIGCONT)
    assert script.readline() == "running"
    script.process.kill()
    script.process.communicate()
    script.nothing_left()

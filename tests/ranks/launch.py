"""Real ranks: processes that run one function of a module of jobs each, as a launcher starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TORCHRUN = """
import json, os, pathlib, sys
from tests.ranks import jobs
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
found = getattr(jobs, sys.argv[1])(rank, world, *map(json.loads, sys.argv[2:]))
pathlib.Path(json.loads(sys.argv[2]), f"rank-{rank}").write_text(json.dumps(found))
"""
CODE = """
import importlib, json, sys
jobs = importlib.import_module(sys.argv[1])
json.dump(getattr(jobs, sys.argv[2])(*map(json.loads, sys.argv[3:])), sys.stdout)
"""
JOBS = "tests.ranks.jobs"


def launch(
    job: str,
    world: int,
    folder: Path | str,
    *arguments: Any,
    timeout_s: float = 100.0,
    may_die: bool = False,
    module: str = JOBS,
) -> Any:
    """What `job(rank, world, folder, *arguments)` of `module` returned on every rank; None of one that died."""
    running = []
    for rank in range(world):
        own = [json.dumps(value) for value in (rank, world, str(folder), *arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", CODE, module, job, *own]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    found = []
    try:
        for process in running:
            out, err = process.communicate(timeout=timeout_s)
            assert may_die or process.returncode == 0, err
            found.append(json.loads(out) if process.returncode == 0 else None)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


def torchrun(job: str, world: int, folder: Path, *arguments: Any, timeout_s: float = 240.0) -> list[Any]:
    """What `job(rank, world, folder, *arguments)` returned on every rank, started by torchrun itself."""
    script = folder / "ranks.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(script)]
    own = [json.dumps(value) for value in (str(folder), *arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, job, *own], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(world)]

"""Runs `zephon bench` and keeps what it says in bench/results/, with machine, date and command.

    python bench/record.py w1 --peers torch          -> results/w1.json, results/w1.png
    python bench/record.py w6 --rounds 3 --name w6-quick

Everything but --name goes to `zephon bench` as it is. `python bench/tables.py` then puts the tables into the README.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import zephon

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    name = arguments[0].replace(":", "-").replace("/", "-")
    if "--name" in arguments:
        at = arguments.index("--name")
        name = arguments[at + 1]
        del arguments[at : at + 2]
    RESULTS.mkdir(exist_ok=True)
    found: dict[str, Any] = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "zephon": zephon.__version__,
    }
    found["command"] = " ".join(["zephon", "bench", *arguments])
    found["load_before"] = round(os.getloadavg()[0], 2)
    command = [sys.executable, "-c", "import sys; from zephon.cli import main; sys.exit(main())", "bench", *arguments]
    command += ["--json", "-", "--plot", str(RESULTS / f"{name}.png")]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    found["rows"] = [json.loads(line) for line in done.stdout.splitlines()]
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def told(result: dict[str, Any]) -> str:
    """Command, date and machine of a result."""
    found = result["machine"]
    return (
        f"`{result['command']}`, {result['date']}, {found['cores']} cores {found['cpu']}, "
        f"{found['memory_gib']:.0f} GiB, Linux {found['kernel']}, Python {found['python']}"
    )


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())

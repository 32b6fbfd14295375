"""W7: the memory of a whole tree of processes on W3, watched from outside while it runs.

What torch itself takes is counted on neither side: the trainer of W3 does not import it for Zephon, and for torch's
loader the size of a process that has imported torch, less that of one that has imported numpy, is taken off.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import msgspec

from zephon.bench import proc
from zephon.bench.rounds import start_child
from zephon.bench.spec import ZEPHON, Sample, Spec
from zephon.errors import WorkerError

INTERVAL_S = 0.5
_OWN_PSS = """
import {what}
from zephon.bench.proc import pss_bytes
import os
print(pss_bytes(os.getpid()))
"""


def measure(spec: Spec) -> Sample:
    """MB at the peak, and how it grew from the first third of the time to the last."""
    child = start_child(msgspec.structs.replace(spec, workload="w3"))
    sizes: list[tuple[float, dict[str, float]]] = []
    while child.poll() is None:
        kinds = proc.tree_pss_by_kind(child.pid, spec.system)
        sizes.append((sum(kinds.values()), kinds))
        time.sleep(INTERVAL_S)
    assert child.stdout is not None
    answer = child.stdout.read()
    if child.returncode:
        raise WorkerError(f"the watched process failed with exit status {child.returncode}; the reason stands above")
    apart = 0.0 if spec.system == ZEPHON else _torch_itself()
    peak, kinds = max(sizes, key=lambda size: size[0])
    details = {"growth": _growth([total for total, _ in sizes]), "torch_itself_mb": apart, **_named(kinds)}
    watched = msgspec.json.decode(answer, type=Sample)
    details["tokens_per_s"] = watched.rate
    return Sample(rate=peak - apart, first_batch_s=watched.first_batch_s, pss_mb=peak - apart, details=details)


def _named(kinds: dict[str, float]) -> dict[str, float]:
    return {f"{kind}_mb": size for kind, size in kinds.items()}


def _growth(totals: list[float]) -> float:
    """Last third over the second one, as a ratio less 1: the first third holds the start."""
    third = max(1, len(totals) // 3)
    middle = statistics.mean(totals[third : 2 * third] or totals)
    return statistics.mean(totals[-third:]) / middle - 1


def _torch_itself() -> float:
    """MB of torch in a process that does nothing with it."""
    with_torch, without = (_own_pss_mb(what) for what in ("numpy, torch, torch.utils.data", "numpy"))
    return with_torch - without


def _own_pss_mb(what: str) -> float:
    script = _OWN_PSS.format(what=what)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True)
    return int(done.stdout) / 1e6

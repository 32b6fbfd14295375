"""W5: how long a fresh Python takes from its start to the first batch, seen from outside.

The bytecode of this package is compiled before, as pip does for every package that it installs (numpy too): in a
source tree under PYTHONDONTWRITEBYTECODE each process would compile all of it again, and that would be measured.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from pathlib import Path

from zephon.bench.spec import BARE, Sample, Spec
from zephon.errors import WorkerError

BARE_SCRIPT = "import numpy, msgspec"
BARE_TORCH_SCRIPT = "import torch, time; print(time.monotonic(), flush=True)"
ZEPHON_SCRIPT = """
import time
{imports}
import zephon as zp
def same(record):
    return record
if __name__ == "__main__":
    rows = zp.Dataset.from_list("rows", [{{"id": i, "text": "x" * 184}} for i in range(1000)])
    pipeline = zp.Pipeline(zp.StaticMixture([rows], seed=1)).map(same).batch(32)
    with pipeline.options(runner={runner!r}, parallelism={workers}, output={output!r}) as pipeline:
        batches = iter(pipeline)  # dropped at once, it would be closed before the time is taken
        batch = next(batches)
        batch["id"]
        print(time.monotonic(), flush=True)
"""
TORCH_SCRIPT = """
import time
from torch.utils.data import DataLoader
rows = [{{"id": i, "text": "x" * 184}} for i in range(1000)]
print_time = lambda: print(time.monotonic(), flush=True)
loader = iter(DataLoader(rows, 32, num_workers={workers}))
next(loader)
print_time()
"""


def measure(spec: Spec) -> Sample:
    """Seconds from the start of a script to its first batch; of the bare script, to its end.

    `w5:torch`: a script that imports torch, as one that trains does, and gets tensors; the bare one has only done that.
    """
    torch = spec.variant == "torch"
    if spec.system == BARE:
        seconds = _timed(BARE_TORCH_SCRIPT if torch else BARE_SCRIPT, prints=torch)
    else:
        compileall.compile_dir(Path(__file__).parents[1], quiet=2)
        script = ZEPHON_SCRIPT if spec.system == "zephon" else TORCH_SCRIPT
        tells = {"imports": "import torch", "output": "torch"} if torch else {"imports": "", "output": "numpy"}
        seconds = _timed(script.format(runner=spec.runner, workers=spec.parallelism, **tells), prints=True)
    return Sample(rate=seconds, first_batch_s=None if spec.system == BARE else seconds)


def _timed(script: str, prints: bool) -> float:
    """`time.monotonic` is one clock for all processes of a machine."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    ended = time.monotonic()
    if done.returncode:
        raise WorkerError(f"the script failed with exit status {done.returncode}; the reason stands above")
    return (float(done.stdout) if prints else ended) - begun

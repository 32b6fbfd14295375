"""How long `checkpoint()` takes on real ranks, without storage, and how large the state is.

    python bench/checkpoint.py [--ranks 8] [--lanes 64] [--rounds 20]

Every rank is a process of torch.distributed (gloo) that owns its share of the lanes. A round is timed on every rank,
from a barrier on; the slowest one counts. Prints one line of JSON: milliseconds (median, most) and bytes of the state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import zephon as zp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(args.ranks)]
        told = [json.loads(rank.communicate()[0]) for rank in ranks]
    slowest = [max(times) * 1e3 for times in zip(*(rank["seconds"] for rank in told), strict=True)]
    found = {"ms": round(statistics.median(slowest), 1), "most_ms": round(max(slowest), 1), "bytes": told[0]["bytes"]}
    print(json.dumps({"ranks": args.ranks, "lanes": args.lanes, **found}))


def measure(args: Any) -> None:
    """What one rank does."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(100_000)])
    pipeline = zp.Pipeline(zp.StaticMixture([dataset], seed=1)).map(dict, name="work").batch(8)
    pipeline = pipeline.options(runner="inline", canonical_replicas=args.lanes)
    next(pipeline.steps())
    seconds, state = [], pipeline.checkpoint()
    for _ in range(args.rounds):
        dist.barrier()
        began = time.perf_counter()
        state = pipeline.checkpoint()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "bytes": len(json.dumps(state))}))


if __name__ == "__main__":
    main()

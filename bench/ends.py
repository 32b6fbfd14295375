"""What it costs that ranks agree on the last step as they go: microseconds a step that the trainer waits for it.

    python bench/ends.py [--ranks 4] [--steps 300] [--work-ms 2]

Every rank is a process of torch.distributed (gloo, a TCP store) that takes a batch a step, works, and meets the others
in an all_reduce, as data-parallel training does. The same pipeline runs without an end in common, with one that is
arithmetic, and with one that ranks agree on. Timed is `next`. Prints one line of JSON: for each of them the median and
the 99th percentile over all ranks.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import zephon as zp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--work-ms", type=float, default=2.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        measure(args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(args.ranks)]
    told = [json.loads(rank.communicate()[0]) for rank in ranks]
    figures: dict[str, Any] = {"ranks": args.ranks, "steps": args.steps}
    for name in told[0]:
        seconds = sorted(second for rank in told for second in rank[name])
        figures[f"{name}_us"] = round(statistics.median(seconds) * 1e6, 1)
        figures[f"{name}_p99_us"] = round(seconds[len(seconds) * 99 // 100] * 1e6, 1)
    print(json.dumps(figures))


def measure(args: Any) -> None:
    """What one rank does."""
    import torch
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", init_method=address, rank=args.rank, world_size=args.ranks)
    dataset = zp.Dataset.from_list("toy", [{"id": i} for i in range(8 * args.ranks * args.steps)])
    plain = zp.Pipeline(zp.StaticMixture([dataset], seed=1))
    counted, uncounted = plain.map(dict, name="same").batch(8), plain.filter(bool, name="all").batch(8)
    found = {}
    for name, pipeline in (
        ("apart", uncounted),
        ("arithmetic", counted.options(last_step="drop")),
        ("agreed", uncounted.options(last_step="drop")),
    ):
        with pipeline.options(runner="threads", parallelism=1) as running:
            found[name] = timed(torch, dist, iter(running), args)
    print(json.dumps(found))


def timed(torch: Any, dist: Any, stream: Any, args: Any) -> list[float]:
    """Seconds of every `next` but the first few, which wait for the engine."""
    seconds, gradient = [], torch.ones(1000)
    for step in range(args.steps - 10):
        began = time.perf_counter()
        next(stream)
        if step > 10:
            seconds.append(time.perf_counter() - began)
        time.sleep(args.work_ms / 1e3)
        dist.all_reduce(gradient)
    return seconds


if __name__ == "__main__":
    main()

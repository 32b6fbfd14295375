"""How the lanes of a group are divided among the workers of a DataLoader. Arithmetic.

A DataLoader takes one batch of each worker in turn, from worker 0 on. Where the j-th lane is worker j's, modulo the
number of active workers, and that number divides the lanes, its turns give the lanes in their own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zephon.flow.progress import LaneState
from zephon.options import Options


def active_workers(num_lanes: int, num_workers: int) -> int:
    """The largest divisor of the number of lanes that is at most `num_workers`; without workers the process itself."""
    return next(n for n in range(max(1, min(num_workers, num_lanes)), 0, -1) if num_lanes % n == 0)


def first_share(lanes: Sequence[int], places: Mapping[int, LaneState], pass_index: int, num_shares: int) -> int:
    """The share that worker 0 takes: the one of the lane whose turn is next.

    lanes: those of the group, ascending. In the middle of a cycle the DataLoader begins at worker 0 all the same.
    """
    left = [(places[lane].turns, j) for j, lane in enumerate(lanes) if places[lane].pass_index == pass_index]
    return min(left)[1] % num_shares if left else 0


def share_of_limit(limit: int | None, worker: int, active: int) -> int | None:
    """How many of the first `limit` batches of the DataLoader come from a worker."""
    return limit if limit is None else limit // active + (worker < limit % active)


def worker_options(options: Options, num_workers: int, cpus: int) -> Options:
    """The options inside of a worker: threads, with the CPUs divided among the workers, unless inline is asked for."""
    execution = options.execution
    runner = "inline" if execution.runner == "inline" else "threads"
    parallelism = max(1, cpus // num_workers) if execution.parallelism == "auto" else execution.parallelism
    changed = msgspec.structs.replace(execution, runner=runner, parallelism=parallelism)
    return msgspec.structs.replace(options, execution=changed)

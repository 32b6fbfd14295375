"""The bounds of memory, as arithmetic on a plan and its settings: what the engine keeps to, and `explain` prints."""

from __future__ import annotations

from zephon.ops.base import Operator
from zephon.ops.filter import Filter
from zephon.ops.flat_map import FlatMap
from zephon.ops.map import Map
from zephon.ops.tokenize import Tokenize
from zephon.plan.graph import Plan

TASKS_PER_WORKER = 8  # that a worker may have unfinished: a slow task then stops the others only after 8 of theirs


MOST_TASK_RECORDS = 2048


def task_records(wanted: int | None = None) -> int:
    """Records handed to a worker at a time, at most: as wanted, else as many as are some milliseconds of work."""
    return MOST_TASK_RECORDS if wanted is None else wanted


def aligned(most: int, size: int) -> int:
    """Records of a task so that ends of tasks are often ends of batches of `size`: more than half of `most`."""
    if most >= size:
        return most // size * size
    return next((records for records in range(most, most // 2, -1) if size % records == 0), most)


def lane_limit(plan: Plan, records: int) -> int:
    """Pointers of one lane on their way: enough for a lane that the others wait for to use every worker.

    records: those of a task.
    """
    return (TASKS_PER_WORKER * sum(stage.parallelism for stage in plan.stages) + 1) * records


LEAST_SAVE_POINTERS = 1024


def save_every(plan: Plan, chunk_size: int) -> int:
    """Pointers of a lane between two states of its accumulators; 0 where a restart reads the open window again.

    A state costs the engine what is held, a restart reads what is held and what came since: half of that at most. A
    window that is not much longer needs no such states.
    """
    accumulators = [a for stage in plan.stages for a in stage.accumulators]
    if not accumulators or not all(a.has_state for a in accumulators):
        return 0
    every = max(LEAST_SAVE_POINTERS, sum(a.holds for a in accumulators) // 2)
    return every if plan.flush_every * chunk_size > 2 * every or not plan.flush_every else 0


def pending_limit(parallelism: int, records: int) -> int:
    """Records between two stages, all lanes together, from which on the earlier one is not taken from.

    parallelism: of the earlier stage. records: those of a task.
    """
    return 2 * records * parallelism


def lane_batches(prefetch: int, pointers: int, children: int, held: int, size: int) -> int:
    """Batches of one lane that can exist at once: T - 1 + ceil((Q e + held + B - 1) / B).

    prefetch: T, batches kept ready. pointers: Q, see `lane_limit`. children: e, the most samples that one pointer can
    give. held: samples that a flush can let go. size: B, samples in a batch.
    """
    return prefetch - 1 + -(-(pointers * children + held + size - 1) // size)


def most_children(operator: Operator) -> int:
    """The most records that one record can become."""
    if isinstance(operator, FlatMap):
        return operator.max_children
    if isinstance(operator, (Map, Filter)):
        return 1
    if isinstance(operator, Tokenize) and (operator.max_length is None or operator.overflow == "truncate"):
        return 1
    return operator.max_children

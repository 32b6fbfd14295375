"""Why a pipeline is not the oracle's: a guess that a person can act on, from a few more runs."""

from __future__ import annotations

import contextlib

import msgspec

from zephon.ops.accumulator import Accumulator
from zephon.ops.base import Node
from zephon.ops.batch import Batch as BatchNode
from zephon.ops.batch import Formatter
from zephon.pipeline import Pipeline
from zephon.testing.chain import Chain, Setup
from zephon.testing.legs import configure, play
from zephon.testing.scheduler import forced_order
from zephon.testing.streams import Fault, Gave, Streams
from zephon.testing.walk import Difference

_SAMPLES = 16  # a batch of the shortened pipelines
_MOST_BATCHES = 64  # of a shortened pipeline: enough to show what differs everywhere, and soon done

_OTHER_PROCESS = (
    "everything agrees within one process, and {} gives something else in another: hash() of a string and the order of "
    "a set change with every process (PYTHONHASHSEED), as do process ids, addresses, globals and the time"
)


_OTHER_DEFINITION = (
    "the definition does not stay the same: the target builds another pipeline in a new process, or a function's "
    "closure, a global or the settings() of an operator change while it runs"
)

_A_DEATH = (
    "everything agrees while no worker dies: a function keeps state that is lost with its process, or uses its number, "
    "or leaves something half done outside of it (a file, a lock); if none does, please report this"
)


def likely_cause(prepared: Pipeline, setup: Setup, difference: Difference, num_batches: int) -> str:
    """The likely cause of a difference that `setup` showed, and no check before it."""
    if difference.what == "state":
        return _OTHER_DEFINITION
    if difference.what == "failure" and not setup.deaths:
        return "the error comes from reading or from Zephon itself; if the data are in order, please report this"
    if setup.deaths:
        return _A_DEATH
    if setup.fresh:
        return _OTHER_PROCESS.format("the pipeline")
    plain = Setup(setup.check, setup.legs[:1], setup.forced)
    try:
        repeats = _stream(prepared, plain, num_batches) == _stream(prepared, plain, num_batches)
        node = culprit(prepared, plain)
        in_process = repeats and plain.legs[0].runner == "process" and _agrees_inline(prepared, plain, num_batches)
    except Exception as error:  # a guess must not hide what was found
        return f"unknown; looking for it failed: {type(error).__name__}: {error}"
    named = f"'{node.name or node.method}' ({node.method})" if node is not None else "a function of the pipeline"
    if in_process:
        return _OTHER_PROCESS.format(named)
    if not repeats and isinstance(node, Accumulator):  # how many records a task has follows the clock
        return (
            f"two runs of the same configuration differ: accumulator {named} depends on which lanes it sees together, "
            "or is not deterministic; keep all its state by lane, and begin afresh in open(lane, key)"
        )
    if not repeats:
        return (
            f"two runs of the same configuration differ: {named} is not deterministic; random numbers belong to a "
            "parameter named rng, and nothing may depend on the clock, or on state that outlives a record"
        )
    if isinstance(node, Accumulator):
        return (
            f"two runs of the same configuration agree: accumulator {named} depends on which lanes it sees together; "
            "keep all its state by lane, and begin afresh in open(lane, key)"
        )
    text = f"two runs of the same configuration agree: {named} depends on the order of the records, or on their lanes"
    if node is None:
        return f"{text}, or keeps state that a restart loses; if your functions keep none, please report this"
    return f"{text}; keep no state between records"


def _agrees_inline(prepared: Pipeline, setup: Setup, num_batches: int) -> bool:
    """Whether the same leg is the oracle's when all runs in this process."""
    here = Setup(setup.check, (msgspec.structs.replace(setup.legs[0], runner="inline"),))
    return Chain(prepared, Streams(prepared, 1), here, num_batches).run() is None


def _stream(prepared: Pipeline, setup: Setup, num_batches: int) -> list[tuple[object, ...]]:
    """What all groups of a setup's first leg give, as values that compare."""
    leg = setup.legs[0]
    found: list[tuple[object, ...]] = []
    with contextlib.ExitStack() as stack:
        if setup.forced:
            stack.enter_context(forced_order(0))
        for group in range(leg.topology):
            with configure(prepared, leg, group) as pipeline:
                left = -(-num_batches * len(pipeline.lanes) // prepared._session.resolved.topology.num_lanes)
                for event, _ in play(pipeline.take(left)):
                    if not isinstance(event, Gave):
                        found.append((event.kind, event.what) if isinstance(event, Fault) else ())
                        break
                    found.append((event.lane, event.step, event.digest, event.origins, event.dropped))
    return found


def culprit(prepared: Pipeline, setup: Setup) -> Node | None:
    """The first step of the chain behind which the stream is not the oracle's, under `setup` or a forced order."""
    steps = [node for node in prepared._definition.nodes if not isinstance(node, (BatchNode, Formatter))]
    forced = Setup("order", (msgspec.structs.replace(setup.legs[0], runner="inline", task_records=3),), forced=True)
    for number, node in enumerate(steps, start=1):
        shortened = prepared._derive(nodes=(*steps[:number], BatchNode(_SAMPLES)))
        streams = Streams(shortened, 1)
        for way in (setup, forced):
            found = Chain(shortened, streams, way, _MOST_BATCHES).run()
            if found is not None and found.what != "raises":
                return node
    return None

"""A chain of operators into stages: which operators one pool runs fused, and which accumulators follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zephon.errors import ConfigError
from zephon.ops.accumulator import Accumulator
from zephon.ops.base import Node, Operator
from zephon.ops.batch import Batch, Formatter
from zephon.options import Options

DEFAULT_FLUSH_EVERY = 8
LAST_STEP_DROPPED = "last_step.dropped"


class StagePlan(msgspec.Struct, frozen=True):
    """A pool's operators, fused, and the accumulators behind them. `measure`: whose lengths the workers take."""

    operators: list[Operator]
    accumulators: list[Accumulator]
    measure: Accumulator | None
    parallelism: int
    why: str
    """Why this stage is one of its own, in words."""

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The fields that matter behind this stage's accumulators; None: all."""
        return next((a.reads for a in self.accumulators if not a.preserves), None)


class Plan(msgspec.Struct, frozen=True):
    """What runs: the stages in order, how samples become batches, and what may be lost on the way."""

    stages: list[StagePlan]
    batch: Batch
    formatters: list[Formatter]
    regroups: bool
    flush_every: int
    """Chunks between two sentinels of a lane; 0: none."""
    reasons: dict[str, int]
    """Every reason of a loss, with its position in a lane's counts."""
    notes: frozenset[str]
    """Those that are no loss."""

    @property
    def accumulators(self) -> list[Accumulator]:
        """Those of all stages, in order."""
        return [accumulator for stage in self.stages for accumulator in stage.accumulators]


def unique_name(node: Node, taken: Sequence[str]) -> str:
    """The node's name, else its method's; repeats get _2, _3."""
    wanted = node.name or node.method
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def make_plan(nodes: Sequence[Node], options: Options, losses: Sequence[str], workers: int) -> Plan:
    """The plan of a chain. Raises ConfigError.

    losses: the reasons for which datasets lose rows. workers: what parallelism="auto" means here.
    """
    nodes = list(nodes)
    formatters = [node for node in nodes if isinstance(node, Formatter)]
    nodes = [node for node in nodes if not isinstance(node, Formatter)]
    batch = next((node for node in nodes[-1:] if isinstance(node, Batch)), None)
    if batch is not None:
        nodes.pop()
    _check_order(nodes)
    if isinstance(options.execution.parallelism, int):
        workers = options.execution.parallelism
    parallelism = _parallelism(nodes, options.execution.parallelism, workers)
    stages = _stages(nodes, parallelism, workers)
    regroups = any(stage.accumulators for stage in stages)
    every = options.data.flush_every_k_chunks
    stateless = next((a for stage in stages for a in stage.accumulators if not a.has_state), None)
    if every == 0 and stateless is not None:
        raise ConfigError(
            f"flush_every_k_chunks=0 (never flush) with '{stateless.name}', which has no state() and load(): a restart "
            "would have to read the whole pass again; give it both, or give a number of chunks, at least 1"
        )
    if every is None:
        every = DEFAULT_FLUSH_EVERY if regroups else 0
    for accumulator in (a for stage in stages for a in stage.accumulators):
        accumulator.check_windows(every)
    reasons = _reasons(stages, batch, losses)
    if options.data.last_step == "drop":
        reasons.setdefault(LAST_STEP_DROPPED, len(reasons))
    return Plan(stages, batch or Batch(1), formatters, regroups, every, reasons, _notes(stages))


def _check_order(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if isinstance(node, Batch):
            raise ConfigError("batch must be the last step of a pipeline, once; move it to the end")


def _parallelism(nodes: Sequence[Node], wanted: int | Mapping[str, int] | str, workers: int) -> dict[str, int]:
    """Workers by operator name."""
    names = [node.name or node.method for node in nodes]
    if isinstance(wanted, Mapping):
        for name in wanted:
            if name not in names:
                import difflib

                near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                remedy = f"did you mean {near[0]!r}?" if near else f"the operators are {', '.join(names) or 'none'}"
                raise ConfigError(f"parallelism names {name!r}, which is no operator of this pipeline; {remedy}")
        return {name: wanted.get(name, workers) for name in names}
    return dict.fromkeys(names, wanted if isinstance(wanted, int) else workers)


class _Open:
    """A stage that is still growing."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.operators: list[Operator] = []
        self.accumulators: list[Accumulator] = []
        self.workers: int | None = None

    def plan(self, workers: int) -> StagePlan:
        measure = next((a for a in self.accumulators if a.measures), None)
        return StagePlan(self.operators, self.accumulators, measure, self.workers or workers, self.why)


def _stages(nodes: Sequence[Node], parallelism: dict[str, int], workers: int) -> list[StagePlan]:
    stages = [_Open("reads the records")]
    for node in nodes:
        number = parallelism[node.name or node.method]
        for part in node.expand():
            if isinstance(part, Operator):
                _add_operator(stages, part, number)
            elif isinstance(part, Accumulator):
                _add_accumulator(stages, part)
            else:
                raise ConfigError(f"{type(part).__name__} is neither an Operator nor an Accumulator")
    return [stage.plan(workers) for stage in stages]


def _add_operator(stages: list[_Open], operator: Operator, number: int) -> None:
    last = stages[-1]
    if last.accumulators:
        stages.append(_Open(f"'{operator.name}' comes behind '{last.accumulators[-1].name}', which regroups records"))
    elif last.workers not in (None, number):
        stages.append(_Open(f"'{operator.name}' has a parallelism of its own ({number}, not {last.workers})"))
    stages[-1].operators.append(operator)
    stages[-1].workers = number


def _add_accumulator(stages: list[_Open], accumulator: Accumulator) -> None:
    """Accumulators share a stage, unless one wants lengths that only a built record has.

    One that is keyed comes first in its stage, so that no other one ever holds a key in place of a length.
    """
    before = stages[-1].accumulators
    others = before if accumulator.keyed else [a for a in before if a.measures or not a.preserves]
    if accumulator.measures and others:
        last = others[-1]
        why = f"measures what '{last.name}' {'lets go' if last.preserves else 'builds'}"
        if last.preserves and last.measures:
            why = f"measures records, as '{last.name}' does"
        stages.append(_Open(f"'{accumulator.name}' {why}"))
        stages[-1].workers = stages[-2].workers
    stages[-1].accumulators.append(accumulator)


def _notes(stages: Sequence[StagePlan]) -> frozenset[str]:
    nodes: list[Node] = [node for stage in stages for node in (*stage.operators, *stage.accumulators)]
    return frozenset(f"{node.name or node.method}.{note}" for node in nodes for note in node.notes)


def _reasons(stages: Sequence[StagePlan], batch: Batch | None, losses: Sequence[str]) -> dict[str, int]:
    names = list(losses)
    nodes: list[Node] = [node for stage in stages for node in (*stage.operators, *stage.accumulators)]
    for node in nodes + ([batch] if batch else []):
        usual = Operator.reasons if isinstance(node, Operator) and type(node).run is Operator.run else ()
        names += [f"{node.name or node.method}.{reason}" for reason in (*node.reasons, *usual)]
    return {name: position for position, name in enumerate(dict.fromkeys(names))}

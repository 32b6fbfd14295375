"""Mean tokens of the rows of each dataset, measured with a pipeline's own operators.

On rows that the seed names, so that every rank measures the same; what is dropped counts as a row of no tokens. The
weights of a source that are declared in tokens then hold for what comes out of those operators.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import numpy as np

from zephon.canonical import canonical_bytes
from zephon.errors import ConfigError
from zephon.flow.task import Slice, Task
from zephon.io.dataset import Dataset
from zephon.ops.accumulator import Accumulator
from zephon.ops.base import Node, Operator
from zephon.plan.graph import StagePlan
from zephon.record import Pointers
from zephon.runners.execute import StageWork
from zephon.runners.whereabouts import Whereabouts
from zephon.work.shuffle import GlobalShuffle, Stretch
from zephon.work.source import WorkSource

MEASURED_ROWS: Final = 1024
_TASK: Final = 128

log = logging.getLogger("zephon")
_measured: WeakKeyDictionary[WorkSource, dict[bytes, dict[str, Fraction]]] = WeakKeyDictionary()


def with_known_means(
    source: WorkSource, nodes: Sequence[Node], steps: Mapping[str, Any], was: Mapping[str, Any] | None
) -> WorkSource:
    """The source with the means that it lacks: those of a state's source (`was`), else measured. Same, if none lack.

    steps: the fields of the nodes, for the memory of what was measured. Pipelines that differ in options share it.
    """
    names = source.unmeasured()
    if not names:
        return source
    known = _kept(was or {})
    lacking = [name for name in names if name not in known]
    if lacking:
        memory = _measured.setdefault(source, {})
        key = canonical_bytes([source.seed, lacking, dict(steps)])
        if key not in memory:
            memory[key] = measure_means(source, nodes, lacking)
        known |= memory[key]
    return source.with_means({name: known[name] for name in names})


def _kept(was: Mapping[str, Any]) -> dict[str, Fraction]:
    """The means that a state holds, by dataset name."""
    names, means = was.get("datasets"), was.get("mean_tokens")
    if not isinstance(names, list) or not isinstance(means, list) or len(names) != len(means):
        return {}
    return {name: Fraction(mean) for name, mean in zip(names, means, strict=True)}


def measure_means(source: WorkSource, nodes: Sequence[Node], names: Sequence[str]) -> dict[str, Fraction]:
    """Mean tokens of a row by dataset name. ConfigError where nothing counts them, and where a mean would be 0."""
    stage = _measuring(nodes)
    work = StageWork(stage, cast("Sequence[Dataset]", source.datasets), source.seed, interrupts=True)
    where = Whereabouts()
    work.setup(where)
    means = {}
    for number, dataset in enumerate(source.datasets):
        if dataset.name not in names:
            continue
        size = min(MEASURED_ROWS, dataset.num_rows)
        rows = GlobalShuffle([dataset]).rows(source.seed, 0, [Stretch(0, 0, size)])
        tokens = sum(
            _tokens(work, where, Pointers(np.full(len(part), number, np.int32), part, np.zeros(len(part), np.int64)))
            for part in (rows[at : at + _TASK] for at in range(0, size, _TASK))
        )
        if not tokens:
            raise ConfigError(
                f"weights_in='tokens': none of the {size:,} rows of dataset {dataset.name!r} that were measured gave a "
                f"token that '{_name(stage)}' counts: give mean_tokens=, or weight 0"
            )
        means[dataset.name] = Fraction(tokens, size)
        log.info("dataset '%s': %.1f tokens a row, measured on %d", dataset.name, tokens / size, size)
    return means


def _tokens(work: StageWork, where: Whereabouts, pointers: Pointers) -> int:
    """What the rows give together."""
    [out], _ = work.run(Task(0, [Slice(0, 0, pointers, range(len(pointers)), len(pointers) - 1)]), where)
    if out.failure is not None:
        raise out.failure[1]
    return sum(out.lengths or ())


def _measuring(nodes: Sequence[Node]) -> StagePlan:
    """The operators up to the first accumulator that counts tokens, as one stage; what only reorders is left out."""
    operators: list[Operator] = []
    for part in (part for node in nodes for part in node.expand()):
        if isinstance(part, Operator):
            operators.append(copy.deepcopy(part))  # setup() is for the workers' own
        elif isinstance(part, Accumulator) and part.measures:
            return StagePlan(operators, [part], part, 1, "measures")
        elif isinstance(part, Accumulator) and not part.preserves:
            raise ConfigError(
                f"weights_in='tokens' without mean_tokens: '{part.name or part.method}' regroups records before tokens "
                "are counted, so a dataset's own cannot be measured: give mean_tokens="
            )
    raise ConfigError(
        "weights_in='tokens' without mean_tokens: nothing in the pipeline counts tokens; add pack(...) or "
        "ensure_mixture(unit='tokens'), or give mean_tokens="
    )


def _name(stage: StagePlan) -> str:
    [accumulator] = stage.accumulators
    return accumulator.name or accumulator.method

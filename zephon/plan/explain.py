"""A plan in words: what will run, who gets what, what it costs in memory, and which settings decide what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

import msgspec

from zephon.ops.accumulator import Accumulator
from zephon.ops.base import Node
from zephon.ops.ensure_mixture import EnsureMixture
from zephon.ops.map_batches import GroupBy
from zephon.ops.pack import Pack
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful_map import StatefulMap
from zephon.options import Options
from zephon.plan.ends import ending, in_words_of
from zephon.plan.graph import Plan, StagePlan
from zephon.plan.lanes import Topology
from zephon.plan.limits import (
    TASKS_PER_WORKER,
    lane_batches,
    lane_limit,
    most_children,
    pending_limit,
    save_every,
    task_records,
)
from zephon.work.source import WorkSource

_SHOWN_GROUPS = 16  # lines for groups; beyond it, groups with as many lanes share a line
_SHOWN_DATASETS = 24
_SHOWN_CHANGES = 8


def explain(plan: Plan, topology: Topology, source: WorkSource, options: Options) -> str:
    """The text that `Pipeline.explain` returns: sections with a title each, lines of at most about 120 characters.

    Reads no record and starts nothing. `plan`, `topology` and `source` are resolved in this process, so
    `parallelism="auto"` and what the environment says of ranks are shown as numbers.
    """
    sections = {
        "source": _source(source, topology),
        "stages": _stages(plan, source),
        "lanes": _lanes(plan, topology, options),
        "end": [in_words_of(ending(plan, source, topology.num_lanes, 0, options.data, {}), topology.num_groups)],
        "restart": _restart(plan, source),
        "memory, for each lane of this group": _memory(plan, topology, source, options),
        "settings: data (decide the stream; a state refuses others)": _data(plan, topology, source, options),
        "settings: topology (who owns which lane; may change on every restart)": _topology(topology, options),
        "settings: execution (never change the stream)": _execution(plan, topology, options),
        "warnings": _warnings(plan, topology, source),
    }
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items() if lines
    )


def _many(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _rows(cells: Sequence[Sequence[str]]) -> list[str]:
    """Cells in columns; the last one may be of any width."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)] if cells else []
    return ["   ".join([c.ljust(w) for c, w in zip(row, widths, strict=False)] + [row[-1]]).rstrip() for row in cells]


def _source(source: WorkSource, topology: Topology) -> list[str]:
    settings = ", ".join(f"{name} {value}" for name, value in source.fingerprint().items() if _is_plain(value, name))
    shares = _shares(source)
    cells = [
        (f"'{d.name}'", _many(d.num_rows, "row"), _many(len(d.shard_rows), "shard"), share)
        for d, share in list(zip(source.datasets, shares, strict=True))[:_SHOWN_DATASETS]
    ]
    more = len(source.datasets) - len(cells)
    lines = [f"{type(source).__name__}: seed {source.seed}{', ' if settings else ''}{settings}", *_rows(cells)]
    lines += [f"... and {more} more datasets"] if more else []
    return lines + _means(source) + _changes(source) + _length(source, topology.num_lanes)


def _is_plain(value: Any, name: str) -> bool:
    return name != "type" and isinstance(value, (int, float, str))


def _shares(source: WorkSource) -> list[str]:
    """Each dataset's share of the pointers, where the source has weights."""
    weights = getattr(source, "weights", None)
    if not isinstance(weights, (list, tuple)) or len(weights) != len(source.datasets) or not sum(weights):
        return [""] * len(source.datasets)
    shares = [_share(weights, c) for c in range(len(weights))]
    if len(steps := _steps(source)) > 1:
        shares = [f"{share} -> {_share(steps[-1][1], c)}" for c, share in enumerate(shares)]
    return [f"{share} of the samples" for share in shares]


def _steps(source: WorkSource) -> Sequence[tuple[int, Sequence[int]]]:
    """A source's weights by position, where it has them."""
    found: Sequence[tuple[int, Sequence[int]]] = getattr(source, "steps", None) or []
    return found


def _share(weights: Sequence[int], number: int) -> str:
    return f"{100 * weights[number] / sum(weights):.4g} %"


def _means(source: WorkSource) -> list[str]:
    """The mean tokens that were measured, where the weights are in tokens."""
    means = source.fingerprint().get("mean_tokens")
    if not isinstance(means, list):
        return []
    shown = list(zip(source.datasets, means, strict=True))[:_SHOWN_DATASETS]
    return ["mean tokens of a row, measured: " + ", ".join(f"'{d.name}' {float(Fraction(m)):.4g}" for d, m in shown)]


def _changes(source: WorkSource) -> list[str]:
    """Where a source's weights change."""
    positions = [position for position, _ in _steps(source)][1:]
    if not positions:
        return []
    shown = ", ".join(f"{position:,}" for position in positions[:_SHOWN_CHANGES])
    more = f", ... {positions[-1]:,}" if len(positions) > _SHOWN_CHANGES else ""
    return [f"weights change at {_many(len(positions), 'position')} of a pass: {shown}{more}"]


def _length(source: WorkSource, num_lanes: int) -> list[str]:
    """How long a pass is, in samples and in chunks a lane."""
    length = source.length(0)
    if length is None:
        never: list[str] = getattr(source, "unfinished", [])
        line = f"a pass is endless; every dataset has come round once after {source.epoch_length(0):,} samples"
        if not never:
            return [line]
        shown = ", ".join(map(repr, never[:_SHOWN_CHANGES])) + (", ..." if len(never) > _SHOWN_CHANGES else "")
        return [f"{line}, but for {shown}: weight 0 before all rows are read"]
    line = f"a pass is {length:,} samples (pointers)"
    size = getattr(source, "chunk_size", None)
    if size is None:
        return [line]
    rows, left = divmod(length, num_lanes * size)
    fewest, most = rows + (left >= num_lanes), rows + (left > 0)
    chunks = f"{fewest:,}" if fewest == most else f"{fewest:,} or {most:,}"
    return [f"{line}: {chunks} chunks of at most {size:,} for each of {_many(num_lanes, 'lane')}"]


def _stages(plan: Plan, source: WorkSource) -> list[str]:
    lines = []
    for number, stage in enumerate(plan.stages):
        lines.append(f"stage {number}, {_many(stage.parallelism, 'worker')}: {stage.why}")
        lines += [f"  {line}" for line in _pool(stage, number)]
        for accumulator in stage.accumulators:
            lines.append(f"  then, lane by lane: {_named(accumulator)}")
            lines += [f"    {line}" for line in _held_shares(accumulator, plan, source)]
    size, name = plan.batch.size, plan.batch.name or "batch"
    rest = "is dropped and counted" if plan.batch.drop_last else "is a shorter batch"
    lines.append(f"'{name}': {_many(size, 'sample')} of one lane; what is left at a lane's end {rest}")
    lines += [f"  then, batch by batch: {_named(formatter)}" for formatter in plan.formatters]
    return lines


def _held_shares(accumulator: Accumulator, plan: Plan, source: WorkSource) -> list[str]:
    """What a window does to shares that are held."""
    if not isinstance(accumulator, EnsureMixture):
        return []
    rest = f"up to {accumulator.buffer_size:,} held records go, in turn or not (noted)"
    if not plan.flush_every:
        return [f"shares are held along the whole lane; only at its end {rest}"]
    window = _window(plan, source)
    size = f"{window:,} pointers" if window is not None else f"{plan.flush_every} chunks"
    return [
        f"shares are held within a window of {size}: at its end {rest};",
        "flush_every_k_chunks=0 holds them along the whole lane",
    ]


def _pool(stage: StagePlan, number: int) -> Iterator[str]:
    if not stage.operators:
        yield "no operators" if number else "no operators: records go on as they are read"
        return
    if len(stage.operators) > 1:
        yield "fused, a record stays in one worker through all of:"
    yield from (
        f"  {_named(operator)}" if len(stage.operators) > 1 else _named(operator) for operator in stage.operators
    )


def _named(node: Node) -> str:
    """A step with its plain settings: 'pack' max_length=2048 algorithm=wrap."""
    plain = {k: v for k, v in node.settings().items() if k != "type" and isinstance(v, (bool, int, float, str))}
    if isinstance(node, EnsureMixture):
        plain["weights"] = ":".join(map(str, node.weights.values()))
    name, method = node.name or node.method, "" if (node.name or node.method) == node.method else f" ({node.method})"
    settings = " ".join(f"{k}={_short(v)}" for k, v in plain.items())
    return f"'{name}'{method} {settings}".rstrip()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def _lanes(plan: Plan, topology: Topology, options: Options) -> list[str]:
    cycles = options.data.cycles_per_step
    step = cycles * topology.num_lanes * plan.batch.size
    owned = [topology.lanes_of(group) for group in range(topology.num_groups)]
    lines = [
        f"{_many(topology.num_lanes, 'lane')} over {_many(topology.num_groups, 'group')}, {topology.strategy}; "
        f"a global step is cycles_per_step = {cycles} x a batch of each lane, {_many(step, 'sample')} in all",
    ]
    if topology.num_groups <= _SHOWN_GROUPS:
        cells = [
            (f"group {g}", f"lanes {_span(lanes)}", f"batches_per_step {cycles * len(lanes)}", "<- this process")
            for g, lanes in enumerate(owned)
        ]
        return lines + _rows([cell if g == topology.group else (*cell[:3], "") for g, cell in enumerate(cells)])
    for size, groups in groupby(range(topology.num_groups), lambda group: len(owned[group])):
        members = list(groups)
        lines.append(f"groups {_span(members)}: {_many(size, 'lane')} each, batches_per_step {cycles * size}")
    return [*lines, f"this process is group {topology.group}: lanes {_span(owned[topology.group])}"]


def _span(numbers: list[int]) -> str:
    """0-3 for consecutive numbers, else 0, 4, 8, ..."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... {numbers[-1]}"


def _window(plan: Plan, source: WorkSource) -> int | None:
    """Pointers of a lane between two sentinels; None where the source has no chunks of one size."""
    size = getattr(source, "chunk_size", None)
    return None if size is None or not plan.flush_every else plan.flush_every * int(size)


def _restart(plan: Plan, source: WorkSource) -> list[str]:
    if not plan.regroups:
        return ["by pointer: nothing regroups records, so a restart begins at the pointer of the last delivered sample"]
    every = save_every(plan, getattr(source, "chunk_size", 0))
    held = (
        "by what is held: the records that the accumulators held are made again, each lane's own, and at most "
        f"{every:,} pointers that came since are read again"
    )
    if not plan.flush_every:
        return [held]
    window = _window(plan, source)
    pointers = f", {window:,} pointers" if window is not None else ""
    names = ", ".join(f"'{a.name or a.method}'" for a in plan.accumulators)
    return [
        f"by window, because {names} regroup{'s' if ',' not in names else ''} records: a window is {plan.flush_every} "
        f"chunks{pointers}",
        f"inside a window {held}"
        if every
        else "a restart reads the open window of each lane again, and drops what was delivered of it",
    ]


def _memory(plan: Plan, topology: Topology, source: WorkSource, options: Options) -> list[str]:
    prefetch = options.execution.prefetch_batches
    records = task_records(options.execution.task_records)
    pointers, size = lane_limit(plan, records), plan.batch.size
    workers = sum(stage.parallelism for stage in plan.stages)
    children = math.prod(most_children(operator) for stage in plan.stages for operator in stage.operators)
    cells = [
        ("ready", f"T = {prefetch} batches", "prefetch_batches"),
        (
            "on the way",
            f"Q = {pointers:,} pointers",
            f"({TASKS_PER_WORKER} x workers {workers} + 1) tasks of {_many(records, 'record')}",
        ),
    ]
    held, is_bound = 0, True
    for accumulator in plan.accumulators:
        text, samples = _held(accumulator, _window(plan, source))
        cells.append(("held", text, f"'{accumulator.name or accumulator.method}'"))
        held, is_bound = held + (samples or 0), is_bound and samples is not None
    if len(plan.stages) > 1:
        waiting = ", ".join(f"{pending_limit(stage.parallelism, records):,}" for stage in plan.stages[:-1])
        cells.append(
            (
                "between stages",
                f"{waiting} records",
                "of all lanes together, besides what the later stages work on",
            )
        )
    lines = _rows(cells)
    if plan.accumulators and records > 1:
        lines.append(
            f"a held record keeps all of its task in memory: of a shuffle, up to ln {records:,} + 0.6 = "
            f"{math.log(records) + 0.58:.1f} times what it holds"
        )
    bound = lane_batches(prefetch, pointers, children, held, size)
    if not is_bound:
        return [*lines, "no bound in batches: an accumulator of your own holds what it holds, at most a window"]
    lines.append(
        f"at most {bound:,} batches = T - 1 + ceil((Q e + held + B - 1) / B), with e = {children:,}, B = {size:,}"
    )
    if children > 1:
        usual = lane_batches(prefetch, pointers, 1, held, size)
        lines.append(f"with one sample a pointer, {usual:,} batches; max_children of an operator sets e")
    if any(isinstance(a, Pack) for a in plan.accumulators):
        lines.append("a document longer than max_length counts as the sequences that it fills")
    return lines


def _held(accumulator: Accumulator, window: int | None) -> tuple[str, int | None]:
    """What an accumulator can hold, and how many samples a flush makes of it (None: not known)."""
    if isinstance(accumulator, (Shuffle, EnsureMixture)):
        return f"{accumulator.buffer_size:,} records", accumulator.buffer_size
    if isinstance(accumulator, Pack):
        most = accumulator.most_flushed
        return f"{accumulator.max_length - 1:,} tokens" if most == 1 else _many(most, "sequence"), most
    if isinstance(accumulator, StatefulMap):
        state = (
            f"the machine's state (max_state_bytes={accumulator.max_state_bytes:,}, where a state of the run holds it)"
        )
        return f"{accumulator.max_held:,} records that wait, and {state}", accumulator.max_held
    if isinstance(accumulator, GroupBy):
        return f"{accumulator.size - 1:,} records", accumulator.size - 1
    return f"at most a window{f', {window:,} pointers' if window is not None else ''}", None


def _marked(settings: msgspec.Struct, resolved: Mapping[str, str]) -> list[str]:
    """One line a field: its value, whether it is the default, and what it comes to in this process."""
    cells = []
    for field in msgspec.structs.fields(type(settings)):
        value = getattr(settings, field.name)
        cells.append(
            (
                field.name,
                "unset" if value is None else "by operator" if isinstance(value, dict) else str(value),
                "default" if value == field.default else "",
                resolved.get(field.name, ""),
            )
        )
    return _rows(cells)


def _data(plan: Plan, topology: Topology, source: WorkSource, options: Options) -> list[str]:
    every = f"{plan.flush_every} chunks" if plan.flush_every else "never: nothing regroups records"
    resolved = {
        "canonical_replicas": f"= {_many(topology.num_lanes, 'lane')}",
        "flush_every_k_chunks": f"= {every}" if options.data.flush_every_k_chunks is None else "",
    }
    lines = _marked(options.data, resolved)
    fixed = ", ".join(["seed", *(name for name in source.fingerprint() if name != "type")])
    return [*lines, f"and, shown above, of the source: {fixed}; of every operator: all its arguments"]


def _topology(topology: Topology, options: Options) -> list[str]:
    values = {
        "world_size": topology.world_size,
        "global_rank": topology.rank,
        "dp_degree": topology.num_groups,
        "dp_group_id": topology.group,
    }
    unset = {name: f"= {value}" for name, value in values.items() if getattr(options.topology, name) is None}
    return _marked(options.topology, unset)


def _execution(plan: Plan, topology: Topology, options: Options) -> list[str]:
    wanted = options.execution
    workers = ", ".join(str(stage.parallelism) for stage in plan.stages)
    records = task_records(wanted.task_records)
    resolved = {"parallelism": "" if isinstance(wanted.parallelism, int) else f"= {workers} workers by stage"}
    if wanted.task_records is None:
        resolved["task_records"] = f"= some milliseconds of work, at most {records} records"
    return _marked(wanted, resolved)


def _warnings(plan: Plan, topology: Topology, source: WorkSource) -> list[str]:
    lines = [*_shuffles_too_large(plan, source)]
    if topology.num_lanes % topology.num_groups:
        lines.append(
            f"{topology.num_lanes} lanes do not divide among {topology.num_groups} groups: some do more work a step"
        )
    return lines


def _shuffles_too_large(plan: Plan, source: WorkSource) -> Iterator[str]:
    """A buffer that a window cannot fill shuffles the window and no more, whatever its size."""
    window, children = _window(plan, source), 1
    if window is None:
        return
    for stage in plan.stages:
        children *= math.prod(most_children(operator) for operator in stage.operators)
        for shuffle in stage.accumulators:
            if isinstance(shuffle, (Shuffle, EnsureMixture)) and shuffle.buffer_size > window:
                fills = "fills only where records become several before it" if children > 1 else "never fills"
                name, size = shuffle.name or shuffle.method, shuffle.buffer_size
                yield f"'{name}': buffer_size={size:,} exceeds a window of {window:,} pointers: the buffer {fills};"
                yield "  a window is flush_every_k_chunks x chunk_size: raise one of them, or lower buffer_size"

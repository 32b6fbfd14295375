"""Settings, in three groups: data (decide the stream), topology (who owns which lane), execution (how it runs).

Only the first group is part of a pipeline's fingerprint. Unknown names and impossible values are errors before
anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from zephon.errors import ConfigError

Runner = Literal["process", "threads", "inline"]
Strategy = Literal["contiguous", "interleaved"]
LastStep = Literal["drop", "pad"]


class DataOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decide the stream. Fix them when a run begins; a state refuses others."""

    canonical_replicas: int | None = None
    """Number of lanes of the whole run. Unset: dp_degree for a new run, the state's value on restore."""
    cycles_per_step: int = 1
    """Batches of every lane in one global step (gradient accumulation)."""
    flush_every_k_chunks: int | None = None
    """Chunks between two flush sentinels of a lane. Unset: 8 where an operator regroups records, else none.

    0: nothing is ever cut. A state then also says which records shuffle, pack and the like hold, some 5 bytes a record
    and at most 24, and a restart makes those again. An accumulator without `state` and `load` is a ConfigError then."""
    last_step: LastStep | None = None
    """How a pass ends where lanes do not have equally many batches. None: each group delivers all that it has.

    "drop": with the last global step that every lane has; the rest is read, and its samples are dropped and counted.
    "pad": with the last step that any lane has; the others give copies of the pass's first batch, with num_samples 0.
    Every group then has the same number of whole steps, on any topology."""
    steps_per_pass: int | None = None
    """A pass is so many global steps, of endless sources too. Unset: what the data has.

    A lane that ends before is an error that names it, or padded with last_step="pad"."""
    deterministic: bool = True
    """False gives up the order across tasks, and with it elastic resume."""


class TopologyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that say which lanes this process owns. They may change on every restart."""

    world_size: int | None = None
    """Number of ranks. Unset: torch.distributed, else WORLD_SIZE, else 1."""
    global_rank: int | None = None
    """This rank. Unset: torch.distributed, else RANK, else 0."""
    dp_degree: int | None = None
    """Number of data-parallel groups. Unset: world_size."""
    dp_group_id: int | None = None
    """This rank's group, 0 .. dp_degree - 1. Ranks of one group get identical batches. Unset: global_rank."""
    mapping_strategy: Strategy = "contiguous"
    """"contiguous": blocks of adjacent lanes a group; "interleaved": lane i to group i mod dp_degree."""
    agree_ranks: tuple[int, ...] | None = None
    """Global ranks of torch.distributed that iterate, and agree on the last step. Unset: of the mesh, else all."""
    aggregate_dir: str | None = None
    """A folder, or s3://bucket/prefix and the like, that all ranks see: where torch.distributed does not run,
    `checkpoint()` joins their states there."""
    run_id: str | None = None
    """The name of this job in `aggregate_dir`. Unset: "run"; jobs that share a folder need one each."""


class ExecutionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that say how the pipeline runs. They never change what it produces."""

    runner: Runner | None = None
    """What executes the operators. Unset: "process" on Linux, elsewhere "threads"."""
    parallelism: int | dict[str, int] | Literal["auto"] = "auto"
    """Workers of each stage; a dict gives operators their own number, which starts a stage of its own."""
    task_records: int | None = None
    """Records handed to a worker at a time. Unset: as many as are some milliseconds of work, at most 2,048."""
    prefetch_batches: int = 2
    """Finished batches kept ready per lane."""
    ring_bytes: int = 4 << 20
    """Bytes of each worker's ring of results (runner "process"). A larger result goes through in parts."""
    max_record_bytes: int = 1 << 30
    """The largest record, encoded, that may cross between processes (runner "process"); beyond it: an error."""
    max_worker_retries: int = 3
    """How often one record, alone, may kill its worker before it is an error that names it."""
    stall_warn_s: float | None = 60.0
    """Seconds on one record, or in one read, after which a warning says which operator and record, with the stack.

    In the engine, where accumulators run: on one call, with operator and lane.
    Also seconds for which a process has been stopped (SIGSTOP), idle as it may be, while somebody waits for it.
    Said again each time that it took twice as long. None: never. Not for runner "inline", where nobody is left to look.
    """
    stall_timeout_s: float | None = None
    """Seconds on one record, or in one read, after which its worker is killed and replaced (runner "process").

    None: never. It must be more than the slowest good record takes: one that is over it, alone, `max_worker_retries`
    times is an error that names it. A call of an accumulator that is over it ends the iteration with an error.
    """
    agree_timeout_s: float = 600.0
    """Seconds that a rank waits for the others where ranks agree on the last step; beyond it: an error."""
    output: Literal["numpy", "torch"] = "numpy"
    """What the array fields of a batch are."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a pipeline."""

    data: DataOptions = DataOptions()
    topology: TopologyOptions = TopologyOptions()
    execution: ExecutionOptions = ExecutionOptions()

    def replace(self, settings: Mapping[str, Any]) -> Options:
        """A copy with `settings` changed. Raises ConfigError for an unknown name or an impossible value."""
        groups: dict[str, Any] = {}
        for name, value in settings.items():
            group = _GROUP_OF.get(name)
            if group is None:
                raise _unknown(name)
            groups.setdefault(group, {})[name] = _checked(group, name, value)
        changed = {g: msgspec.structs.replace(getattr(self, g), **values) for g, values in groups.items()}
        return msgspec.structs.replace(self, **changed)


_GROUPS: dict[str, type[msgspec.Struct]] = {
    "data": DataOptions,
    "topology": TopologyOptions,
    "execution": ExecutionOptions,
}
_GROUP_OF = {field: group for group, kind in _GROUPS.items() for field in kind.__struct_fields__}
_LEAST: dict[str, float] = {
    "canonical_replicas": 1,
    "cycles_per_step": 1,
    "flush_every_k_chunks": 0,
    "steps_per_pass": 1,
    "world_size": 1,
    "global_rank": 0,
    "dp_degree": 1,
    "dp_group_id": 0,
    "task_records": 1,
    "prefetch_batches": 1,
    "parallelism": 1,
    "ring_bytes": 4096,
    "max_record_bytes": 1,
    "max_worker_retries": 1,
    "stall_warn_s": 0.1,
    "stall_timeout_s": 0.1,
    "agree_ranks": 0,
    "agree_timeout_s": 0.1,
}


# What other loaders call these.
_KNOWN_ELSEWHERE = {
    "workers": "parallelism",
    "num_workers": "parallelism",
    "num_threads": "parallelism",
    "prefetch": "prefetch_batches",
    "prefetch_factor": "prefetch_batches",
    "num_canonical_nodes": "canonical_replicas",
    "rank": "global_rank",
}


# What is said elsewhere than in options.
_NO_OPTIONS = {
    "timeout_s": "it is an argument: checkpoint(timeout_s=...)",
    "batch_size": "it is a step of the pipeline: .batch(size)",
    "drop_last": "it is .batch(size, drop_last=True) of samples, and last_step='drop' of steps that not all lanes have",
    "seed": "it belongs to the source: StaticMixture(..., seed=...)",
    "shuffle": "it is .shuffle(buffer_size), and StaticMixture(..., shuffle=...)",
}


def _unknown(name: str) -> ConfigError:
    remedy = f"did you mean {_KNOWN_ELSEWHERE[name]!r}?" if name in _KNOWN_ELSEWHERE else _NO_OPTIONS.get(name, "")
    return ConfigError(f"unknown option {name!r}; {remedy or nearest(name, sorted(_GROUP_OF), 'the options are')}")


def nearest(name: str, known: Sequence[str], among: str = "there are") -> str:
    """What to say of a misspelt name: the one that is near it, else all of them."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{among} {', '.join(known)}"


def _names(kind: Any) -> list[str]:
    """The words that a type allows."""
    if get_origin(kind) is Literal:
        return [word for word in get_args(kind) if isinstance(word, str)]
    return [word for part in get_args(kind) if get_origin(kind) is not dict for word in _names(part)]


def _checked(group: str, name: str, value: Any) -> Any:
    """The value, or ConfigError. Booleans are not taken for numbers."""
    kind = next(f.type for f in msgspec.structs.fields(_GROUPS[group]) if f.name == name)
    if isinstance(value, bool) and kind is not bool:
        raise ConfigError(f"option {name}={value!r}: a number or a name is wanted, not a boolean")
    try:
        value = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        allowed = f"; allowed: {', '.join(map(repr, _names(kind)))}" if _names(kind) else ""
        raise ConfigError(f"option {name}={value!r}: {error}{allowed}") from None
    least = _LEAST.get(name)
    numbers = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    for number in numbers:
        if least is not None and isinstance(number, (int, float)) and not number >= least:  # a nan is not
            raise ConfigError(f"option {name}={value!r}: it must be at least {least}")
    return value

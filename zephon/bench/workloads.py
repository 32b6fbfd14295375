"""The workloads by name: their variants, units, bare limits, and which settings apply to them."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from zephon.bench.spec import BARE, BARE_PIPE, BARE_TWO, Spec
from zephon.errors import ConfigError


class Workload(NamedTuple):
    """A workload as the command line knows it.

    `variants` are measured where the name has none; `options` only when asked for. `bares`: the bare systems; the first
    is what `share_of_bare` is of. `lanes`: the default where `--lanes` applies; `own_lanes`: the number where it does
    not. `less_is_better`: the figure is a time or a size, and a share above 1 is the worse. `fixed`: the runner, where
    it is the workload's own choice.
    """

    what: str
    unit: str
    variants: tuple[str, ...] = ()
    bares: tuple[str, ...] = ()
    lanes: tuple[int, ...] = ()
    own_lanes: int | None = 1
    has_peers: bool = True
    less_is_better: bool = False
    fixed: str | None = None
    options: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None


def _check_operators(operators: str) -> None:
    from zephon.bench import serial

    serial.check(operators)


_TORCH = importlib.util.find_spec("torch") is not None
_SIZES = ("1KB", "1MB", "16MB")


WORKLOADS: dict[str, Workload] = {
    "w1": Workload(
        "200-byte records, identity, batch 32",
        "records/s",
        bares=(BARE_PIPE, BARE_TWO),
        lanes=(1, 8, 64),
        options=("list",),
    ),
    "w2": Workload(
        "work of the interpreter on every record, batch 32",
        "records/s",
        ("100us", "1ms", "lognormal", "slow1pct"),
        (BARE_TWO,),
    ),
    "w3": Workload("JSONL to tokens to sequences of 2048, batch 8", "tokens/s", bares=(BARE_TWO,)),
    "w4": Workload("arrays of 600 KB made in the worker, batch 16", "GB/s", bares=(BARE,)),
    "w5": Workload(
        "a fresh script to its first batch",
        "s",
        ("", "torch") if _TORCH else (),
        bares=(BARE,),
        less_is_better=True,
        options=("torch",),
    ),
    "w6": Workload(
        "restore to the first batch",
        "s",
        tuple(f"{n}:{where}" for n in ("1k", "10k", "100k") for where in ("same", "other", "held")),
        (BARE,),
        own_lanes=4,
        has_peers=False,
        less_is_better=True,
    ),
    "w7": Workload("memory of the whole tree on W3", "MB", less_is_better=True),
    "w8": Workload(
        "a death: how long the stream stalls, how long until nothing is left",
        "s",
        ("idle", "busy", "trainer"),
        has_peers=False,
        less_is_better=True,
        fixed="process",
    ),
    "w9": Workload(
        "time of a chunk; time to the first batch (first_batch_s)",
        "us/chunk",
        tuple(f"1e{exponent}" for exponent in range(3, 11)),
        lanes=(1, 8, 64, 256, 1024),
        has_peers=False,
        less_is_better=True,
        fixed="inline",
    ),
    "consumer": Workload(
        "CPU of the trainer's thread, from asking for a batch that is ready to having it",
        "us/batch",
        (*_SIZES, *(f"{size}:torch" for size in _SIZES if _TORCH)),
        has_peers=False,
        less_is_better=True,
        fixed="process",
        options=tuple(f"{size}:{what}" for size in _SIZES for what in ("torch", "device")),
    ),
    "engine": Workload(
        "the serial part of the engine on one core, no payload",
        "records/s",
        ("batch", "shuffle+wrap+batch", "shuffle+best_fit+batch"),
        lanes=(1, 8),
        has_peers=False,
        fixed="inline",
        check=_check_operators,
    ),
}
TARGET = Workload("your pipeline", "samples/s", own_lanes=None, has_peers=False)


def find(name: str) -> Workload:
    """The workload of a name with or without a variant; TARGET's for a target. Raises ConfigError."""
    base, _, variant = name.partition(":")
    workload = WORKLOADS.get(base.lower())
    if workload is not None:
        allowed = tuple(filter(None, dict.fromkeys((*workload.variants, *workload.options))))
        if variant and workload.check is not None:
            workload.check(variant)
        elif variant and variant not in allowed:
            listed = ", ".join(f"{base}:{v}" for v in allowed) or "none"
            raise ConfigError(f"{name!r} is no variant of {base}; its variants are {listed}")
        return workload
    if not variant:
        near = difflib.get_close_matches(base, WORKLOADS, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the workloads are {', '.join(WORKLOADS)}"
        raise ConfigError(f"{name!r} is neither a workload nor a TARGET (module.py:name); {remedy}")
    return TARGET


class Wanted(NamedTuple):
    """What the command line asks for."""

    name: str
    runners: tuple[str, ...]
    parallelism: tuple[int, ...]
    lanes: tuple[int, ...]
    peers: tuple[str, ...]
    seconds: float
    loops_per_us: float
    folder: str


def contestants(wanted: Wanted) -> list[Spec]:
    """Every system that takes part in a round, the bare limits first. Raises ConfigError for what does not apply."""
    workload = find(wanted.name)
    base, _, variant = wanted.name.partition(":")
    known = workload is not TARGET
    if wanted.lanes and not workload.lanes:
        raise ConfigError(f"--lanes does not apply to {wanted.name}: it applies to w1, w9 and engine")
    if wanted.peers and not workload.has_peers:
        raise ConfigError(f"--peers does not apply to {wanted.name}: no peer does what it measures")
    variants = (variant,) if variant or not workload.variants else workload.variants
    names = [f"{base.lower()}:{v}" if v else base.lower() for v in variants] if known else [wanted.name]
    return [spec for name in names for spec in _of_variant(wanted, workload, name)]


def _of_variant(wanted: Wanted, workload: Workload, name: str) -> list[Spec]:
    seconds, warm_s = wanted.seconds, min(1.0, wanted.seconds / 3)
    fields = {"seconds": seconds, "warm_s": warm_s, "loops_per_us": wanted.loops_per_us, "folder": wanted.folder}

    def spec(system: str, runner: str | None, parallelism: int, lanes: int | None = None) -> Spec:
        return Spec(workload=name, system=system, runner=runner, parallelism=parallelism, lanes=lanes, **fields)  # type: ignore[arg-type]

    specs = [spec(system, None, _bare_processes(name, system)) for system in workload.bares]
    specs += [spec(peer, None, count) for peer in wanted.peers for count in wanted.parallelism]
    for runner in (workload.fixed,) if workload.fixed else wanted.runners:
        for count in wanted.parallelism[:1] if runner == "inline" else wanted.parallelism:
            for lanes in wanted.lanes or workload.lanes or (workload.own_lanes,):
                specs.append(spec("zephon", runner, 1 if runner == "inline" else count, lanes))
    return specs


def _bare_processes(name: str, system: str) -> int:
    """Processes of a bare system: that of W5 is one script."""
    return 1 if name.startswith("w5") else 2

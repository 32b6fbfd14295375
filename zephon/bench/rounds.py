"""Measures every system in every round, each in a fresh process, and makes rows of what came out."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import zephon
from zephon.bench.spec import BARE, BARE_PIPE, BARE_TWO, ZEPHON, Row, Sample, Spec
from zephon.bench.workloads import find
from zephon.errors import WorkerError

GRACE_S = 120.0  # for a measurement beyond its own time: imports, a corpus, the end of its processes
CHILD = "zephon.bench.child"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")

Samples = dict[Spec, list[Sample]]


def environment() -> dict[str, str]:
    """That of every measurement: one thread for each numeric library, and the Zephon that this process runs."""
    root = str(Path(zephon.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def start_child(spec: Spec, module: str = CHILD) -> subprocess.Popen[bytes]:
    """A process that measures what `spec` says, and writes its Sample to its standard output."""
    command = [sys.executable, "-m", module]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its exit status says more
        child.stdin.write(msgspec.json.encode(spec))
        child.stdin.close()
    child.stdin = None  # for `communicate`
    return child


def measure(spec: Spec, module: str = CHILD) -> Sample:
    """One measurement in a process of its own. Raises WorkerError where it fails; its own words are on stderr."""
    child = start_child(spec, module)
    try:
        answer, _ = child.communicate(timeout=spec.seconds * 3 + spec.warm_s + GRACE_S)
    except BaseException as error:
        child.kill()
        child.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise WorkerError(f"{name_of(spec)} did not end within {error.timeout:.0f} s and was stopped") from None
        raise
    if child.returncode:
        raise WorkerError(f"{name_of(spec)} failed with exit status {child.returncode}; the reason stands above")
    return msgspec.json.decode(answer, type=Sample)


def name_of(spec: Spec) -> str:
    """A measurement in words."""
    runner = f" {spec.runner}, {spec.parallelism} workers" if spec.runner else ""
    return f"{spec.workload}: {spec.system}{runner}" + (f", {spec.lanes} lanes" if spec.lanes else "")


def run_rounds(
    specs: Sequence[Spec], rounds: int, on_start: Callable[[str], None], run: Callable[[Spec], Sample] = measure
) -> list[Row]:
    """The rows of `specs` after `rounds` rounds. Each round begins with another system."""
    samples: Samples = defaultdict(list)
    for number in range(rounds):
        shift = number % len(specs)
        for spec in [*specs[shift:], *specs[:shift]]:
            on_start(f"round {number + 1}: {name_of(spec)}")
            samples[spec].append(run(spec))
    return [_row(spec, samples) for spec in specs]


def _row(spec: Spec, samples: Samples) -> Row:
    """Medians of a system's samples, and its shares of the bare limit round by round."""
    own, workload = samples[spec], find(spec.workload)
    bare = next((s for s in samples if s.workload == spec.workload and s.system in workload.bares[:1]), None)
    shares = _ratios(own, samples[bare]) if bare is not None else []
    kinds = {kind for sample in own for kind in sample.cpu_us}
    cpu = {kind: statistics.median(sample.cpu_us.get(kind, 0.0) for sample in own) for kind in sorted(kinds)}
    return Row(
        workload=spec.workload,
        system=spec.system,
        runner=spec.runner,
        parallelism=spec.parallelism,
        lanes=spec.lanes or own[-1].lanes,
        rate=statistics.median(sample.rate for sample in own),
        unit=workload.unit,
        share_of_bare=statistics.median(shares) if shares else None,
        share_min=min(shares, default=None),
        share_max=max(shares, default=None),
        first_batch_s=_median([sample.first_batch_s for sample in own]),
        engine_us_per_record=cpu.get("engine"),
        trainer_us_per_batch=_median([sample.trainer_us_per_batch for sample in own]),
        peak_pss_mb=max((sample.pss_mb for sample in own if sample.pss_mb is not None), default=None),
        details=_details(own, cpu)
        | _above_import(spec, own, samples[bare] if bare else [])
        | _against_peers(spec, samples),
    )


def _above_import(spec: Spec, own: list[Sample], bare: list[Sample]) -> dict[str, Any]:
    """W5 with torch: seconds above those of `import torch` alone in the same rounds: median, least, most."""
    if spec.workload != "w5:torch" or spec.system != ZEPHON:
        return {}
    above = [a.rate - b.rate for a, b in zip(own, bare, strict=True)]
    return {"above_import_torch_s": [statistics.median(above), min(above), max(above)]}


def _ratios(own: list[Sample], others: list[Sample]) -> list[float]:
    return [a.rate / b.rate for a, b in zip(own, others, strict=True)]


def _against_peers(spec: Spec, samples: Samples) -> dict[str, Any]:
    """Zephon's figures over those of each peer in the same rounds: median, least, most."""
    if spec.system != ZEPHON:
        return {}
    found = {}
    for peer in samples:
        is_peer = peer.system != ZEPHON and peer.system not in (BARE, BARE_TWO, BARE_PIPE)
        if is_peer and (peer.workload, peer.parallelism) == (spec.workload, spec.parallelism):
            ratios = _ratios(samples[spec], samples[peer])
            found[f"times_{peer.system}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return found


def _details(own: list[Sample], cpu: dict[str, float]) -> dict[str, Any]:
    """What else is worth keeping: every round's rate, CPU by kind of process, the load of others."""
    details: dict[str, Any] = {"rates": [sample.rate for sample in own]}
    if cpu:
        details["cpu_us_per_record"] = cpu
    if (others := _median([sample.other_cores for sample in own])) is not None:
        details["other_cores"] = others
    for name in own[-1].details:
        values = [sample.details[name] for sample in own]
        is_number = all(isinstance(value, (int, float)) for value in values)
        details[name] = statistics.median(values) if is_number else values
    return details


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

"""One measurement in a process of its own: a Spec as JSON on standard input, the Sample as JSON on standard output.

python -m zephon.bench.child < spec.json
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from zephon.bench.spec import BARE, BARE_PIPE, BARE_TWO, ZEPHON, Sample, Spec
from zephon.errors import InternalError

LoadTarget = Callable[[str], Any]
"""TARGET -> its Pipeline; see `zephon/cli/target.py`."""


def measure(spec: Spec, load_target: LoadTarget | None = None) -> Sample:
    """Runs what the spec says. Modules are imported here, so that none pays for another's."""
    if spec.base in ("w5", "w6", "w7", "w8", "w9", "engine", "consumer"):
        return _special(spec)
    if spec.system in (BARE, BARE_TWO, BARE_PIPE):
        from zephon.bench import bare

        return bare.measure(spec)
    if spec.system != ZEPHON:
        from zephon.bench import peers

        return peers.measure(spec)
    return _zephon(spec, load_target)


def _special(spec: Spec) -> Sample:
    """The workloads that do not time a stream of batches."""
    if spec.base == "w5":
        from zephon.bench import start

        return start.measure(spec)
    if spec.base == "w6":
        from zephon.bench import resume

        return resume.measure(spec)
    if spec.base == "w7":
        from zephon.bench import memory

        return memory.measure(spec)
    if spec.base == "w8":
        from zephon.bench import faults

        return faults.measure(spec)
    if spec.base == "engine":
        from zephon.bench import serial

        return serial.measure(spec)
    if spec.base == "consumer":
        from zephon.bench import consumer

        return consumer.measure(spec)
    from zephon.bench import scale

    return scale.measure(spec)


def _zephon(spec: Spec, load_target: LoadTarget | None) -> Sample:
    from zephon.bench import pipelines
    from zephon.bench.stream import timed

    if spec.base in ("w1", "w2", "w3", "w4"):
        pipeline, count, units_per_record = pipelines.work(spec)
    elif load_target is None:
        raise InternalError(f"{spec.workload}: this process cannot load a TARGET")
    else:
        pipeline, count, units_per_record = pipelines.of_target(load_target(spec.workload), spec)
    with pipeline:
        sample = timed(spec, lambda: iter(pipeline), count, units_per_record)
        sample.lanes = len(pipeline.lanes)
        return sample


def main(load_target: LoadTarget | None = None) -> None:
    """Reads, measures, writes. What a pipeline prints goes to standard error."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)
    with contextlib.redirect_stdout(sys.stderr):
        sample = measure(spec, load_target)
    sys.stdout.buffer.write(msgspec.json.encode(sample))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

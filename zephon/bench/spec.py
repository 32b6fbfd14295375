"""What one measurement is asked for, and what it answers. Both travel between processes as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

ZEPHON = "zephon"
BARE = "bare"
BARE_TWO = "bare-2proc"
BARE_PIPE = "bare-pipe"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One system on one workload.

    `workload` carries its variant ("w2:1ms"), or is a TARGET. `loops_per_us`: turns of `operators.spin` that take one
    microsecond, measured once for all systems. `folder`: where the corpus lies.
    """

    workload: str
    system: str = ZEPHON
    runner: str | None = None
    parallelism: int = 2
    lanes: int | None = None
    seconds: float = 3.0
    warm_s: float = 1.0
    loops_per_us: float = 0.0
    folder: str = ""

    @property
    def base(self) -> str:
        """The workload without its variant."""
        return self.workload.partition(":")[0]

    @property
    def variant(self) -> str:
        """What follows the colon; empty where there is none."""
        return self.workload.partition(":")[2]


class Sample(msgspec.Struct, kw_only=True):
    """What one measurement gave.

    `rate` in the unit of the workload. `lanes`: those owned, where the spec does not say. `cpu_us`: CPU microseconds a
    record by kind of process (trainer, engine, worker, launcher). `pss_mb`: proportional set size of all its processes
    in MB (10^6 bytes). `other_cores`: how many cores everything else on the machine used meanwhile.
    `trainer_us_per_batch`: CPU microseconds of the trainer's thread a batch.
    """

    rate: float
    first_batch_s: float | None = None
    lanes: int | None = None
    cpu_us: dict[str, float] = msgspec.field(default_factory=dict)
    pss_mb: float | None = None
    other_cores: float | None = None
    trainer_us_per_batch: float | None = None
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class Row(msgspec.Struct, kw_only=True):
    """One line of the result: medians over the rounds, and the ratios to the bare limit within them."""

    workload: str
    system: str
    runner: str | None
    parallelism: int
    lanes: int | None
    rate: float
    unit: str
    share_of_bare: float | None = None
    share_min: float | None = None
    share_max: float | None = None
    first_batch_s: float | None = None
    engine_us_per_record: float | None = None
    trainer_us_per_batch: float | None = None
    peak_pss_mb: float | None = None
    details: dict[str, Any] = msgspec.field(default_factory=dict)

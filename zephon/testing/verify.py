"""The proof behind `zephon verify`: a user's own pipeline gives the oracle's stream, however and wherever it runs.

    stream         every runner, several numbers of workers and task sizes, every topology
    order          tasks complete in a random order, so operators see the records in another order
    restart        chains of restarts at random batches: states through JSON, merged, on other topologies and runners
    fresh process  a restart in a new process with another hash seed, where the target is built again
    deaths         (asked for) the process runner's configurations, and a restart, while workers are killed at random
    again          the first configuration once more, some time later

Each check compares order, content, origins and counts of every batch with `zephon.testing.oracle`, and stops at the
first difference. No output here: `zephon/cli/verify.py` prints.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from zephon.drive import DRIVERS
from zephon.errors import ConfigError
from zephon.pipeline import Pipeline
from zephon.testing.causes import likely_cause
from zephon.testing.chain import Chain, Setup
from zephon.testing.faults import UNREACHED_RETRIES
from zephon.testing.legs import SPLIT, Leg, prepare
from zephon.testing.streams import Expected, Fault, Streams
from zephon.testing.walk import Difference

DEFAULT_TOPOLOGIES = (1, 2, 4)
PROCESS = "process"
DEATHS = "deaths"  # the check in which workers are killed
NUM_PASSES = 2  # a short pipeline is followed into its second pass, which has a shuffle of its own
APART_S = 1.1  # between the first run and its repetition: a function that looks at whole seconds shows itself

# (parallelism, task_records, prefetch_batches, mapping_strategy): ways to run that must not matter.
_WAYS: tuple[tuple[Any, int | None, int, str], ...] = (
    (1, None, 2, "contiguous"),
    (4, 13, 3, "interleaved"),
    (2, 1, 1, "contiguous"),
    (SPLIT, 100, 2, "interleaved"),
)
_RESTART_CHAINS = 3  # at least


class Check(msgspec.Struct, frozen=True):
    """What one check found. Of a chain of restarts, `runner` and `topology` name each leg: "inline>threads", "1>4".

    `batches`: compared with the oracle's, of all groups. `parallelism`: workers of each stage in the first leg;
    "split": 1 and 2 in turn, so that each operator is a stage of its own. `kills`: workers that were killed meanwhile;
    `kills_at_work`: those of them that were not asleep. Of a check of deaths without any, `ok` is False.
    """

    check: str
    runner: str
    parallelism: int | str
    task_records: int | None
    topology: int | str
    restarts: int
    batches: int
    ok: bool
    kills: int = 0
    kills_at_work: int = 0
    difference: Difference | None = None


class Verification:
    """A pipeline's checks; iterating runs them one after the other.

    pipeline: its own topology, execution settings, `take` and loaded state are set aside.
    batches: compared in each check, of all groups together; a short pipeline gives fewer (two passes).
    runners, topologies: default: all there are; 1, 2 and 4 groups, as far as the lanes reach.
    target: what `zephon.cli.target` builds the pipeline from again in a fresh process; None: without that check.
    deaths: also while workers of the process runner are killed.
    Raises ConfigError where nothing can be compared: a setting that does not fit, or no batch at all.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        batches: int = 200,
        runners: Sequence[str] | None = None,
        topologies: Sequence[int] | None = None,
        seed: int = 0,
        target: str | None = None,
        deaths: bool = False,
        apart_s: float = APART_S,
    ) -> None:
        if batches < 1:
            raise ConfigError(f"batches={batches}: at least 1 is wanted")
        self.batches, self.seed, self.deaths = batches, seed, deaths
        self._target, self._apart_s = target, apart_s
        self.runners = _known_runners(runners)
        if deaths and PROCESS not in self.runners:
            raise ConfigError(
                f"workers can be killed under runner 'process' only, and the runners here are "
                f"{', '.join(self.runners)}; name it too (it needs Linux)"
            )
        self.num_lanes, self.topologies = _lanes(pipeline, topologies)
        self._prepared = prepare(pipeline, self.num_lanes)
        self._streams = Streams(self._prepared, NUM_PASSES)
        self.setups = _setups(self.runners, self.topologies, random.Random(seed), target is not None, deaths)
        self._agreed = True
        self._most = 0  # batches that a check compared so far
        self.on_batch: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Check]:
        self._require_batches()
        began = time.monotonic()
        for number, setup in enumerate(self.setups):
            if setup.check == "again":  # a wait that is not interrupted by anything but Ctrl-C
                threading.Event().wait(max(0.0, self._apart_s - (time.monotonic() - began)))
            yield self._run(number, setup)

    def _require_batches(self) -> None:
        """A comparison of nothing proves nothing."""
        first = (self._streams.at(lane, (0, 0)) for lane in range(self.num_lanes))
        if not any(isinstance(item, (Expected, Fault)) for item in first):
            raise ConfigError(
                f"none of the {self.num_lanes} lanes gives a batch in the first pass: there is nothing to verify; "
                "look at the source's length, the filters, and drop_last"
            )

    def _run(self, number: int, setup: Setup) -> Check:
        seed = f"{self.seed}/{number}"
        chain = Chain(
            self._prepared,
            self._streams,
            setup,
            self.batches,
            self._most or None,  # short passes are cut where there is something
            seed,
            self._target,
            self.on_batch,
        )
        difference = chain.run()
        self._most = max(self._most, chain.batches)
        if difference is not None and difference.what != "raises":
            if self._agreed:  # looking for the cause takes some runs, and later differences mostly have the same one
                cause = likely_cause(self._prepared, setup, difference, self.batches)
                difference = msgspec.structs.replace(difference, cause=cause)
            self._agreed = False
        legs, killer = setup.legs, chain.killer
        single = len(legs) == 1
        return Check(
            check=setup.check,
            runner=legs[0].runner if single else ">".join(leg.runner for leg in legs),
            parallelism=legs[0].parallelism,
            task_records=legs[0].task_records,
            topology=legs[0].topology if single else ">".join(str(leg.topology) for leg in legs),
            restarts=len(legs) - 1,
            batches=chain.batches,
            ok=difference is None and (killer is None or killer.kills > 0),
            kills=killer.kills if killer else 0,
            kills_at_work=killer.kills_at_work if killer else 0,
            difference=difference,
        )


def _known_runners(wanted: Sequence[str] | None) -> tuple[str, ...]:
    known = tuple(runner for runner in DRIVERS if runner != PROCESS or sys.platform == "linux")
    for runner in wanted or ():
        if runner not in known:
            raise ConfigError(
                f"runner {runner!r} is not there; the runners of this version and platform: {', '.join(known)}"
            )
    return tuple(dict.fromkeys(wanted)) if wanted else known


def _lanes(pipeline: Pipeline, wanted: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """(number of lanes, topologies). Unset lanes: as many as the largest topology has groups."""
    given = pipeline._definition.options.data.canonical_replicas
    if wanted is None:
        lanes = given or max(DEFAULT_TOPOLOGIES)
        return lanes, tuple(groups for groups in DEFAULT_TOPOLOGIES if groups <= lanes)
    if not wanted or min(wanted) < 1:
        raise ConfigError(f"topologies={list(wanted)}: numbers of groups, each at least 1, are wanted")
    lanes = given or max(wanted)
    if max(wanted) > lanes:
        raise ConfigError(
            f"a topology of {max(wanted)} groups is more than canonical_replicas={lanes}: a group would own no lane; "
            f"ask for at most {lanes}"
        )
    return lanes, tuple(dict.fromkeys(wanted))


def _setups(
    runners: Sequence[str], topologies: Sequence[int], rng: random.Random, fresh: bool, deaths: bool
) -> list[Setup]:
    ways = itertools.cycle(_WAYS)
    setups = []
    for number, groups in enumerate(topologies):
        for runner in runners:
            chosen = itertools.islice(ways, 1 if number else 2)
            setups += [Setup("stream", (_leg(runner, groups, way),)) for way in chosen]
    setups.append(Setup("order", (Leg("inline", topologies[0], 3, 2),), forced=True))
    any_runner = itertools.cycle(runners)
    for number in range(max(_RESTART_CHAINS, len(topologies))):
        own = topologies[number % len(topologies)]
        # The first chain stays where it is, which must give each group exactly what it would have had.
        others = [own if number == 0 else rng.choice(topologies) for _ in range(rng.randint(1, 3))]
        legs = [_leg(next(any_runner), groups, rng.choice(_WAYS)) for groups in (own, *others)]
        setups.append(Setup("restart", tuple(legs)))
    if fresh:
        legs = [_leg(runners[0], topologies[0], _WAYS[0]), _leg(runners[-1], topologies[-1], _WAYS[1])]
        setups.append(Setup("fresh process", tuple(legs), fresh=True))
    if deaths:
        plain = [setup.legs for setup in setups if setup.check == "stream" and setup.legs[0].runner == PROCESS]
        restart = tuple(legs[0] for legs in (plain[0], plain[-1]))
        setups += [Setup(DEATHS, tuple(map(_survives, legs)), deaths=True) for legs in (*plain, restart)]
    return [*setups, Setup("again", setups[0].legs)]


def _survives(leg: Leg) -> Leg:
    """A leg in which a record may be hit any number of times."""
    return msgspec.structs.replace(leg, max_worker_retries=UNREACHED_RETRIES)


def _leg(runner: str, groups: int, way: tuple[Any, int | None, int, str]) -> Leg:
    parallelism, task_records, prefetch_batches, strategy = way
    return Leg(runner, groups, parallelism, task_records, prefetch_batches, strategy)

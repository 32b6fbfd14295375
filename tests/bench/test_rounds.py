"""How samples become rows: shares within rounds, medians, the order of systems. And who takes part."""

from __future__ import annotations

import pytest

from zephon.bench import workloads
from zephon.bench.rounds import run_rounds
from zephon.bench.spec import BARE_PIPE, BARE_TWO, Sample, Spec
from zephon.bench.workloads import Wanted, contestants
from zephon.errors import ConfigError

BARE = Spec(workload="w1", system=BARE_PIPE)
TORCH = Spec(workload="w1", system="torch")
ZEPHON = Spec(workload="w1", runner="process", lanes=8)


def wanted(name: str, **fields: object) -> Wanted:
    default = Wanted(name, ("process",), (2,), (), (), 3.0, 1.0, "")
    return default._replace(**fields)


def rows_of(rates: dict[Spec, list[float]]) -> tuple[list[object], list[Spec]]:
    """The rows of three rounds with these rates, and the order in which the systems were asked."""
    left, asked = {spec: list(values) for spec, values in rates.items()}, []

    def run(spec: Spec) -> Sample:
        asked.append(spec)
        return Sample(rate=left[spec].pop(0), first_batch_s=0.5, cpu_us={"engine": 2.0}, pss_mb=len(asked))

    return run_rounds(list(rates), 3, lambda what: None, run), asked


def test_shares_are_ratios_within_rounds() -> None:
    # The machine is three times as fast in the second round; the shares do not care.
    rows, _ = rows_of({BARE: [100, 300, 110], TORCH: [10, 30, 10], ZEPHON: [50, 180, 44]})
    bare, _, zephon = rows
    assert bare.share_of_bare == bare.share_min == bare.share_max == 1
    assert zephon.rate == 50
    assert (zephon.share_min, zephon.share_of_bare, zephon.share_max) == pytest.approx((0.4, 0.5, 0.6))
    assert zephon.details["times_torch"] == pytest.approx([5, 4.4, 6])
    assert "times_torch" not in bare.details
    assert zephon.details["rates"] == [50, 180, 44]


def test_every_system_is_measured_in_every_round_and_none_is_always_first() -> None:
    _, asked = rows_of({BARE: [1, 1, 1], TORCH: [1, 1, 1], ZEPHON: [1, 1, 1]})
    rounds = [asked[:3], asked[3:6], asked[6:]]
    assert all(set(one) == {BARE, TORCH, ZEPHON} for one in rounds)
    assert {one[0] for one in rounds} == {BARE, TORCH, ZEPHON}


def test_rows_keep_what_belongs_to_them() -> None:
    rows, _ = rows_of({BARE: [1, 1, 1], ZEPHON: [1, 2, 4]})
    zephon = rows[1]
    assert (zephon.workload, zephon.system, zephon.runner, zephon.parallelism) == ("w1", "zephon", "process", 2)
    assert (zephon.lanes, zephon.unit, zephon.engine_us_per_record) == (8, "records/s", 2.0)
    assert zephon.peak_pss_mb == 6  # the most of all rounds


def test_a_start_with_torch_is_told_in_seconds_above_the_import() -> None:
    bare, zephon = Spec(workload="w5:torch", system="bare"), Spec(workload="w5:torch", runner="process")
    rows, _ = rows_of({bare: [2.0, 4.0, 2.5], zephon: [2.2, 4.1, 2.8]})
    assert rows[1].details["above_import_torch_s"] == pytest.approx([0.2, 0.1, 0.3])
    assert "above_import_torch_s" not in rows[0].details


def test_w5_is_measured_with_torch_where_there_is_torch() -> None:
    pytest.importorskip("torch")
    assert {spec.workload for spec in contestants(wanted("w5"))} == {"w5", "w5:torch"}
    sizes = [f"consumer:{size}" for size in ("1KB", "1MB", "16MB")]
    assert [spec.workload for spec in contestants(wanted("consumer"))] == [*sizes, *(f"{size}:torch" for size in sizes)]


def test_a_workload_runs_all_its_variants_and_its_bare_limits() -> None:
    specs = contestants(wanted("w2", runners=("process", "inline"), parallelism=(1, 4)))
    names = ["w2:100us", "w2:1ms", "w2:lognormal", "w2:slow1pct"]
    assert list(dict.fromkeys(spec.workload for spec in specs)) == names
    of_first = [(s.system, s.runner, s.parallelism) for s in specs if s.workload == "w2:100us"]
    assert of_first == [
        (BARE_TWO, None, 2),
        ("zephon", "process", 1),
        ("zephon", "process", 4),
        ("zephon", "inline", 1),
    ]
    assert {spec.workload for spec in contestants(wanted("w2:1ms"))} == {"w2:1ms"}


def test_lanes_apply_to_w1_and_w9() -> None:
    assert [s.lanes for s in contestants(wanted("w1")) if s.system == "zephon"] == [1, 8, 64]
    assert [s.lanes for s in contestants(wanted("w1", lanes=(3,))) if s.system == "zephon"] == [3]
    assert {s.lanes for s in contestants(wanted("w9:1e3", lanes=(1, 5)))} == {1, 5}
    with pytest.raises(ConfigError, match="--lanes does not apply to w3"):
        contestants(wanted("w3", lanes=(3,)))


def test_peers() -> None:
    assert [s.system for s in contestants(wanted("w4", peers=("torch",)))] == ["bare", "torch", "zephon"]
    with pytest.raises(ConfigError, match="--peers does not apply to w8"):
        contestants(wanted("w8", peers=("torch",)))


@pytest.mark.parametrize(("name", "says"), [("w2:2ms", "w2:1ms"), ("w11", "did you mean 'w1'"), ("speed", "TARGET")])
def test_wrong_names(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        workloads.find(name)


def test_a_target_has_neither_lanes_nor_limit() -> None:
    (spec,) = contestants(wanted("script.py:pipeline"))
    assert (spec.workload, spec.system, spec.lanes) == ("script.py:pipeline", "zephon", None)

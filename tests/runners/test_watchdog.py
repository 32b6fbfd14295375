"""The watchdog's decisions, without processes or clocks: who has stalled, and when that is said."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon.runners.watchdog import Stall, Watchdog
from zephon.runners.whereabouts import CELLS_BYTES, FETCH, OPERATORS, WHOLE, Spot, Whereabouts

HERE, THERE = Spot(1, OPERATORS, 5), Spot(1, OPERATORS, 6)


def looked(watchdog: Watchdog, spots: list[Spot | None], seconds: float) -> list[tuple[float, Stall]]:
    """What comes of looking at these spots once a period for some time."""
    found, start = [], 1000.0
    for number in range(int(seconds / watchdog.period_s) + 1):
        now = start + number * watchdog.period_s
        found += [(now - start, stall) for stall in watchdog.look(spots, now)]
    return found


def test_intervals_grow() -> None:
    found = looked(Watchdog(60.0, None), [None, HERE], 1000)
    times = [at for at, _ in found]
    assert times[0] == pytest.approx(60, abs=2)
    assert len(times) == 5  # 60, 120, 240, 480, 960
    assert all(later >= 2 * earlier - 2 for earlier, later in pairwise(times))
    assert all((stall.index, stall.spot, stall.deadly) == (1, HERE, False) for _, stall in found)
    assert all(stall.seconds == pytest.approx(at, abs=2) for at, stall in found)


def test_who_moves_is_not_stalled() -> None:
    watchdog = Watchdog(60.0, 60.0)
    for number in range(300):
        spot = HERE if number // 50 % 2 else THERE
        assert not watchdog.look([spot, None], float(number))


def test_the_same_place_in_another_task_is_another_place() -> None:
    watchdog = Watchdog(1.0, 1.0)
    for number in range(300):
        assert not watchdog.look([Spot(number // 5, FETCH, WHOLE)], number * watchdog.period_s)


def test_who_waited_in_between_is_not_stalled() -> None:
    watchdog = Watchdog(10.0, None)
    for number in range(100):
        assert not watchdog.look([None if number % 5 == 4 else HERE], float(number))


def test_a_job_that_was_stopped_and_goes_on_has_not_stalled() -> None:
    watchdog = Watchdog(60.0, 120.0)
    assert not watchdog.look([HERE], 0.0)
    assert not watchdog.look([HERE], 10_000.0)  # Ctrl-Z, and fg three hours later
    assert not watchdog.look([HERE], 20_000.0)


def test_the_time_out_is_deadly_and_comes_again_where_it_did_not_kill() -> None:
    found = looked(Watchdog(None, 5.0), [HERE], 12)
    assert [stall.deadly for _, stall in found] == [True, True]
    assert [at for at, _ in found] == pytest.approx([5, 10.5], abs=0.6)


def test_without_limits_nothing_is_said() -> None:
    assert not looked(Watchdog(None, None), [HERE], 1e5)


@given(
    moves=st.lists(st.tuples(st.sampled_from([None, HERE, THERE]), st.floats(0, 50)), max_size=60),
    warn_s=st.floats(0.1, 100),
    timeout_s=st.none() | st.floats(0.1, 100),
)
def test_a_stall_was_seen_to_stand_for_as_long_as_it_says(
    moves: list[tuple[Spot | None, float]], warn_s: float, timeout_s: float | None
) -> None:
    watchdog, now, since, before = Watchdog(warn_s, timeout_s), 0.0, 0.0, None
    for spot, passed in moves:
        now += passed
        if spot != before:
            since, before = now, spot
        for stall in watchdog.look([spot], now):
            assert stall.spot == spot
            assert stall.seconds <= now - since + 1e-6
            assert stall.seconds >= (timeout_s if stall.deadly and timeout_s else warn_s) - 1e-6


def test_the_cells() -> None:
    where = Whereabouts(memoryview(bytearray(CELLS_BYTES)))
    assert where.spot() is None
    where.enter(OPERATORS)
    assert where.spot() == Spot(0, OPERATORS, WHOLE)
    where.leave()
    assert where.spot() is None
    where.begin()
    where.enter(FETCH)
    where.record[0] = 7
    assert where.spot() == Spot(1, FETCH, 7)
    where.enter(OPERATORS + 1)
    assert where.spot() == Spot(1, OPERATORS + 1, WHOLE)
    where.reset()
    assert where.spot() is None

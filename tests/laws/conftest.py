"""The laws run with states of accumulators taken every few pointers, so that short streams hold many of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zephon.plan import limits


@pytest.fixture(autouse=True, scope="package")
def states_are_taken_often() -> Iterator[None]:
    before, limits.LEAST_SAVE_POINTERS = limits.LEAST_SAVE_POINTERS, 7
    yield
    limits.LEAST_SAVE_POINTERS = before

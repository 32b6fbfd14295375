"""A batch slot for tests of what lies in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from zephon.arena import Slot


@pytest.fixture
def slot() -> Iterator[Slot]:
    """Of 64 KiB, closed at the end."""
    made = Slot(1, 1 << 16)
    yield made
    made.bytes = np.empty(0, np.uint8)
    made.segment.close()

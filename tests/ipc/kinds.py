"""Classes whose objects the tests put into records. Other processes import this module, so it must be light."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: Any


class Text(str):
    pass


class Number(int):
    pass

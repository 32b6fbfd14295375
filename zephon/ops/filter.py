"""filter: keeps the records that a function says yes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon.ops.base import Rows
from zephon.ops.function import FunctionOperator


class Filter(FunctionOperator):
    """Keeps a record where `fn(record)` is true. What it drops is counted as `<name>.filtered`."""

    method = "filter"

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, version: str | None = None, on_error: str = "raise"
    ) -> None:
        super().__init__(fn, name, version, on_error)
        self.reasons = ("filtered", *self.reasons)

    def run(self, rows: Rows) -> None:
        kept: list[int] = []
        reason = f"{self.name or self.method}.filtered"
        for i, verdict in self.results(rows):
            try:
                if verdict:
                    kept.append(i)
                else:
                    rows.drops.append((rows.index[i], reason, 1))
            except BaseException as error:  # an array has no truth value
                rows.let_through(error)
                self.fail(rows, i, error)
        rows.keep(kept)

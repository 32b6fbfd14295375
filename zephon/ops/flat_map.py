"""flat_map: one record in, any number out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon.ops.base import MAX_CHILDREN, Children, Rows, check_count
from zephon.ops.function import FunctionOperator


class FlatMap(FunctionOperator):
    """Replaces each record by the dicts in `fn(record)`, at most `max_children` of them.

    No child at all drops the record, counted as `<name>.empty`.
    """

    method = "flat_map"

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        version: str | None = None,
        on_error: str = "raise",
        max_children: int = MAX_CHILDREN,
    ) -> None:
        super().__init__(fn, name, version, on_error)
        self.max_children = check_count("max_children", max_children, self.method)
        self.reasons = ("empty", *self.reasons)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "max_children": self.max_children}

    def run(self, rows: Rows) -> None:
        name = self.name or self.method
        children = Children(rows, name, self.max_children)
        for i, made in self.results(rows):
            try:
                if not children.extend(i, made):
                    rows.drops.append((rows.index[i], f"{name}.empty", 1))
            except BaseException as error:
                rows.let_through(error)
                self.fail(rows, i, error)
        children.finish()

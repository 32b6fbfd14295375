"""map: one record in, one record out."""

from __future__ import annotations

from zephon.ops.base import Rows, own_dict
from zephon.ops.function import FunctionOperator
from zephon.record import Record


class Map(FunctionOperator):
    """Replaces each record by `fn(record)`, a dict."""

    method = "map"

    @property
    def one_to_one(self) -> bool:
        return self.on_error == "raise"

    def run(self, rows: Rows) -> None:
        outputs: list[Record] = []
        kept: list[int] = []
        for i, made in self.results(rows):
            if isinstance(made, dict):
                outputs.append(own_dict(made, rows.records[i]))
                kept.append(i)
            else:
                problem = f"the function of map returned {type(made).__name__}, not a dict"
                self.fail(rows, i, TypeError(f"{problem}; use filter to drop records, flat_map to make several"))
        rows.keep(kept)
        rows.records = outputs

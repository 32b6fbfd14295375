'''The test kit for an operator or an accumulator of your own: what Zephon relies on, checked on records of yours.

    check_operator(Lower(), records)         an instance, and a few records that it takes
    check_accumulator(Pairs, records)        a function that makes a fresh instance, and records

Both return nothing, or raise ContractBroken (an AssertionError) that says what is wrong and what to do. They draw
orders and cuts from `seed`, so a failure repeats. Give twenty records or more, of different lengths.

An operator is a function of one record. It may drop it (under a reason that it declares) or make several:

    import zephon as zp
    from zephon.testing.contracts import check_operator

    class Lower(zp.Operator):
        """The text in lower case; records without text are dropped and counted as `lower.filtered`."""

        method = "lower"
        reasons = ("filtered",)

        def process(self, record):
            return {**record, "text": record["text"].lower()} if record["text"] else None

    check_operator(Lower(), [{"text": "Some Text"}, {"text": ""}, {"text": "MORE"}])

An accumulator decides, lane by lane, on (cursor, length, component) and never sees a record until `build`:

    import zephon as zp
    from zephon.testing.contracts import check_accumulator

    class Pairs(zp.Accumulator):
        """Two neighbours into one record; the last one of a window may stay alone."""

        method = "pairs"

        def __init__(self):
            self._held = {}  # by lane

        def open(self, lane, key):
            self._held[lane] = []

        def push(self, lane, refs):
            emitted = zp.Emitted()
            for trigger, (cursor, length, component) in enumerate(refs):
                self._held[lane].append((cursor, 0, length))
                if len(self._held[lane]) == 2:
                    emitted.add(trigger, self._held[lane])
                    self._held[lane] = []
            return emitted

        def flush(self, lane):
            emitted = zp.Emitted()
            if self._held[lane]:
                emitted.add(0, self._held[lane])
            self._held[lane] = []
            return emitted

        def build(self, parts):
            return {"text": " ".join(record["text"] for record, start, stop in parts)}

    check_accumulator(Pairs, [{"text": f"document {i}"} for i in range(20)])

check_machine(Machine, key, records) does the same for the machine of a `stateful_map`: it is lane-aware, decides by its
keys alone, and goes on where its state was taken.

In a pipeline both are added by `pipeline.apply(Lower()).apply(Pairs())`.
'''

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zephon.ops.stateful_map import StatefulMap
from zephon.record import Record
from zephon.testing.contract_accumulator import check_accumulator
from zephon.testing.contract_base import ContractBroken
from zephon.testing.contract_operator import check_operator

__all__ = ["ContractBroken", "check_accumulator", "check_machine", "check_operator"]


def check_machine(
    make: Callable[[], Any],
    key: Callable[[Record], Any],
    records: Sequence[Record],
    into: str | None = None,
    lanes: int = 3,
    seed: int = 0,
    **settings: Any,
) -> None:
    """Raises ContractBroken where the `zephon.Machine` that `make` gives does not keep what `stateful_map` relies on.

    key, into, settings: as of `stateful_map`. records: what the pipeline would push. Checked is what
    `check_accumulator` checks of an accumulator.
    """
    check_accumulator(lambda: StatefulMap(make(), key, into, **settings), records, lanes, seed)

"""Where a pass ends: the length of the merge under each `end=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from zephon.work.mixture import Mixture

End = Literal["epochs", "stop", "redistribute", "repeat"]
ENDS: Final[tuple[End, ...]] = get_args(End)


def merge_for(end: str, weights: Sequence[int], rows: Sequence[int]) -> Mixture:
    """The merge that a pass reads: under "redistribute" a component ends with its rows, else all repeat."""
    return Mixture(weights, limits=rows if end == "redistribute" else None)


def pass_length(merge: Mixture, rows: Sequence[int], end: str, epochs: int, max_epochs: int | None) -> int | None:
    """Pointers in a pass; None: endless.

    "epochs": up to and with the pointer that completes the `epochs`-th epoch of the last component to get there.
    "stop": with the one that completes the first epoch of any component.
    "redistribute": every row once.
    "repeat": endless, or with the one that completes the `max_epochs`-th epoch of the first component to get there.
    """
    if end == "redistribute":
        return sum(rows)
    if end == "epochs":
        return _last_to_complete(merge, rows, epochs)[1]
    if end == "repeat" and max_epochs is None:
        return None
    times = max_epochs if end == "repeat" and max_epochs is not None else 1
    key = min(merge.key(c, times * n - 1) for c, n in enumerate(rows))
    return merge.place(key[2], times * rows[key[2]] - 1) + 1


def one_round(merge: Mixture, rows: Sequence[int], length: int | None) -> int:
    """Pointers until every component has been through all its rows once, or the pass has ended."""
    complete = _last_to_complete(merge, rows, 1)[1]
    return complete if length is None else min(complete, length)


def slowest(merge: Mixture, rows: Sequence[int], epochs: int) -> int:
    """The component that completes its `epochs`-th epoch last."""
    return _last_to_complete(merge, rows, epochs)[0]


def _last_to_complete(merge: Mixture, rows: Sequence[int], epochs: int) -> tuple[int, int]:
    """(component, length): positions grow with keys, so the largest key ends the pass and one place is computed."""
    component = max(merge.key(c, epochs * n - 1) for c, n in enumerate(rows))[2]
    return component, merge.place(component, epochs * rows[component] - 1) + 1

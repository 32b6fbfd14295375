"""Where a pass ends: the length of the merge under each `end=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, get_args

from zephon.errors import ConfigError
from zephon.work.mixture import Mixture
from zephon.work.phased import PhasedMixture, Step

End = Literal["epochs", "stop", "redistribute", "repeat"]
ENDS: Final[tuple[End, ...]] = get_args(End)

Merge = Mixture | PhasedMixture


def merge_for(end: str, steps: Sequence[Step], rows: Sequence[int]) -> Merge:
    """The merge that a pass reads: under "redistribute" a component ends with its rows, else all repeat."""
    if len(steps) == 1:
        return Mixture(steps[0][1], limits=rows if end == "redistribute" else None)
    if end == "redistribute":
        raise ConfigError(
            "end='redistribute' gives the share of a dataset that ended to the others, and a MixtureSchedule says what "
            "the shares are: choose end='stop', 'epochs' or 'repeat'"
        )
    return PhasedMixture(steps)


def pass_length(merge: Merge, rows: Sequence[int], end: str, epochs: int, max_epochs: int | None) -> int | None:
    """Pointers in a pass; None: endless.

    "epochs": up to and with the pointer that completes the `epochs`-th epoch of the last component to get there.
    "stop": with the one that completes the first epoch of any component.
    "redistribute": every row once.
    "repeat": endless, or with the one that completes the `max_epochs`-th epoch of the first component to get there.
    Where weights change, a component whose weight becomes 0 may never get there: "epochs" must not meet one.
    """
    if end == "redistribute":
        return sum(rows)
    if end == "epochs":
        return _last_to_complete(merge, rows, epochs)[1]
    if end == "repeat" and max_epochs is None:
        return None
    times = max_epochs if end == "repeat" and max_epochs is not None else 1
    lasts = [(c, times * n - 1) for c, n in enumerate(rows)]
    component = min(merge.key(c, k) for c, k in lasts if merge.reaches(c, k))[-1]
    return merge.place(component, times * rows[component] - 1) + 1


def never_complete(merge: Merge, rows: Sequence[int], epochs: int) -> list[int]:
    """The components that never complete `epochs` epochs."""
    return [c for c, n in enumerate(rows) if not merge.reaches(c, epochs * n - 1)]


def one_round(merge: Merge, rows: Sequence[int], length: int | None) -> int:
    """Pointers until every component that ever will has been through all its rows once, or the pass has ended."""
    complete = _last_to_complete(merge, rows, 1)[1]
    return complete if length is None else min(complete, length)


def slowest(merge: Merge, rows: Sequence[int], epochs: int) -> int:
    """The component that completes its `epochs`-th epoch last."""
    return _last_to_complete(merge, rows, epochs)[0]


def _last_to_complete(merge: Merge, rows: Sequence[int], epochs: int) -> tuple[int, int]:
    """(component, length): positions grow with keys, so the largest key ends the pass and one place is computed."""
    lasts = [(c, epochs * n - 1) for c, n in enumerate(rows)]
    component = max(merge.key(c, k) for c, k in lasts if merge.reaches(c, k))[-1]
    return component, merge.place(component, epochs * rows[component] - 1) + 1

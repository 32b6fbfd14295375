"""What the processes that iterate over one dataset tell each other of its passes, in shared memory.

A DataLoader may start new workers for every epoch, and none of its processes calls anything of ours when an epoch
begins, but the workers. So each worker notes the pass that it begins, in a cell of its own, and the next one is the one
behind the highest that is noted. Cells of the same iteration do not count: a worker that is ahead must change nothing.

A cell has one writer, and is written whole: there are no locks. All is kept twice, since a slow worker may still read
where its pass begins while a fast one notes its own: a worker's cells of this iteration and the one before, and the
ends of a lane in even and odd passes.
"""

from __future__ import annotations

from typing import Final

import torch

from zephon.errors import ConfigError

MAX_WORKERS: Final = 1024
_PASS_BITS: Final = 23
_PASS_MASK: Final = (1 << _PASS_BITS) - 1
_IDENTITIES: Final = 1 << 40

Counted = tuple[int, tuple[int, ...]]
"""(samples delivered, drops by reason), of the whole run."""


class Passes:
    """The table. `shared`: int64, in memory that all processes of the dataset share."""

    def __init__(self, num_lanes: int, num_reasons: int, shared: torch.Tensor | None = None) -> None:
        self._row = 2 + num_reasons
        if shared is None:
            shared = torch.zeros(1 + 2 * MAX_WORKERS + 2 * num_lanes * self._row, dtype=torch.int64)
            shared.share_memory_()  # type: ignore[no-untyped-call]
        self.shared = shared
        cells = shared.numpy()
        self._version, self._begun = cells[:1], cells[1 : 1 + 2 * MAX_WORKERS].reshape(-1, 2)
        self._ends = cells[1 + 2 * MAX_WORKERS :].reshape(num_lanes, 2, self._row)

    @property
    def version(self) -> int:
        """How often the dataset was given a state."""
        return int(self._version[0])

    def renew(self) -> None:
        """Forgets all passes, as the dataset was given a state."""
        self._version += 1
        self._begun[:] = 0
        self._ends[:] = 0

    def next_pass(self, worker: int, num_workers: int, seed: int) -> int | None:
        """The pass that an iteration begins; None where it is the first one. seed: the DataLoader's for the epoch."""
        if worker >= MAX_WORKERS:
            raise ConfigError(f"num_workers={num_workers}: at most {MAX_WORKERS} workers can share a dataset")
        cells = self._begun.copy()  # each is read once: others write meanwhile
        counts = cells >> _PASS_BITS != _identity(num_workers, seed)
        counts[worker] = True
        highest = int((cells[counts] & _PASS_MASK).max(initial=0))
        return highest or None  # kept with 1 added

    def begin(self, worker: int, num_workers: int, seed: int, pass_index: int) -> None:
        """Notes the pass that a worker begins."""
        own, cells = _identity(num_workers, seed), self._begun[worker].tolist()
        same = [i for i in (0, 1) if cells[i] >> _PASS_BITS == own]
        index = same[0] if same else int(_pass_of(cells[0]) > _pass_of(cells[1]))
        self._begun[worker, index] = own << _PASS_BITS | pass_index + 1

    def forget(self, worker: int, num_workers: int) -> None:
        """Forgets what this worker began, and those beyond the ones that there are, as each of these got a state."""
        self._begun[worker] = 0
        self._begun[num_workers:] = 0

    def end(self, number: int, pass_index: int, counted: Counted) -> None:
        """Notes that a lane, the group's `number`-th, stands at the beginning of a pass."""
        delivered, counts = counted
        self._ends[number, pass_index % 2] = (pass_index + 1, delivered, *counts)

    def counted(self, number: int, pass_index: int) -> Counted | None:
        """What was counted of a lane where a pass begins; None where no pass before it came to its end here."""
        known = [row for row in self._ends[number].tolist() if 0 < row[0] <= pass_index + 1]
        if not known:
            return None
        _, delivered, *counts = max(known)
        return delivered, tuple(counts)


def _pass_of(cell: int) -> int:
    """The pass of a cell, with 1 added; 0 of an empty one."""
    return cell & _PASS_MASK


def _identity(num_workers: int, seed: int) -> int:
    """A number of an iteration, the same in all its workers."""
    return hash((num_workers, seed)) % _IDENTITIES

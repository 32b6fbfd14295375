"""How ranks agree on the last step of a pass through torch.distributed: in the store that its processes met at.

It needs no device, no process group and no collective call that could mix with those of the training, and nothing is
left on the way when a rank goes: a gloo group with a reduction in flight makes its process wait, or abort, at its end.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zephon.collective import Rounds, StoreBoard, initialised, pauses
from zephon.ends import Agreement, Alone, Found, Position
from zephon.errors import Closed, ConfigError, WorkerError, describe
from zephon.options import Options
from zephon.plan.lanes import Topology

_BITS = 20  # of each of three numbers in a sum: ranks, those that lack a batch, those that have any
_ONES = (1 << _BITS) - 1

_REMEDY = (
    "ranks agree on the last step as they go, so all must iterate over the same pipeline; or name those that do, with "
    "options(mesh=...) or agree_ranks=...; agree_timeout_s= is how long they wait"
)

_rounds: dict[str, tuple[Any, Rounds]] = {}
"""By who meets over which pipeline: the store, and the rounds there. What an earlier attempt left does no harm."""


def find_agreement(topology: Topology, options: Options, fingerprint: Any) -> Agreement | None:
    """How this group agrees with the others; None where there is no way between them."""
    if len(topology.lanes) == topology.num_lanes:
        return Alone()
    distributed = initialised()
    if distributed is None:
        return None
    ranks = sorted(options.topology.agree_ranks or range(distributed.get_world_size()))
    if distributed.get_rank() not in ranks:
        raise ConfigError(
            f"rank {distributed.get_rank()} iterates, but is not in agree_ranks={ranks} (or in the mesh); name all "
            "ranks that iterate, the same on each"
        )
    return StoreAgreement(distributed, ranks, topology, fingerprint, options.execution.agree_timeout_s)


class StoreAgreement:
    """The agreement of some ranks of torch.distributed on one pass.

    Each adds what it has of a step to one number of the store, and looks until all have. A thread does so meanwhile.
    """

    def __init__(
        self, distributed: Any, ranks: Sequence[int], topology: Topology, fingerprint: Any, timeout_s: float
    ) -> None:
        self._torch, self._ranks, self._topology, self._timeout_s = distributed, ranks, topology, timeout_s
        who = json.dumps([ranks, topology.num_lanes, fingerprint], sort_keys=True)
        self._name = f"zephon-ends-{hashlib.blake2b(who.encode(), digest_size=8).hexdigest()}"
        self._store: Any = None
        self._told: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._step, self._sum = 0, 0
        self._error: Exception | None = None
        self._answered = threading.Event()
        self._closed = False

    def meet(self, own: Position) -> list[Position]:
        store = self._torch.distributed_c10d._get_default_store()
        known, rounds = _rounds.get(self._name, (None, None))
        if rounds is None or known is not store:
            board = StoreBoard(self._torch.PrefixStore(self._name, store))
            rounds = Rounds(board, self._ranks, self._torch.get_rank(), _positions, "last_step=", _REMEDY)
            _rounds[self._name] = store, rounds
        found = rounds.meet(lambda: [self._topology.group, *own], self._timeout_s)
        if "error" in found:
            raise WorkerError(found["error"])
        if lacking := set(range(self._topology.num_groups)) - {group for group, *_ in found["state"]}:
            raise ConfigError(
                f"ranks {self._ranks} agree on the last step, but groups {sorted(lacking)} are none of theirs; "
                "agree_ranks= must name a rank of every group"
            )
        self._store = self._torch.PrefixStore(f"{self._name}-{found['number']}", store)
        threading.Thread(target=self._serve, name="zephon-ends", daemon=True).start()
        return [Position(*position) for _, *position in found["state"]]

    def tell(self, step: int, own: Found) -> None:
        self._step = step
        self._answered.clear()
        self._told.put((step, 1 | own.lacking << _BITS | own.any << 2 * _BITS))

    def _serve(self) -> None:
        """The thread: joins one step after the other."""
        try:
            while not self._closed and (told := self._told.get()) is not None:
                self._join(*told)
                self._answered.set()
        except Exception as error:  # the store is gone; whoever waits for the answer hears of it
            self._error = error
            self._answered.set()

    def _join(self, step: int, number: int) -> None:
        self._sum = self._store.add(f"step-{step}", number)
        if step and self._is_complete():  # then all have the answer before
            self._store.delete_key(f"step-{step - 1}")
        for pause_s in pauses(StoreBoard.most_poll_s):
            if self._closed or self._is_complete():
                return
            time.sleep(pause_s)
            self._sum = self._store.add(f"step-{step}", 0)

    def answered(self) -> bool:
        return self._answered.is_set()

    def answer(self) -> Found:
        if not self._answered.wait(self._timeout_s):
            raise self._lost(f"only {self._sum & _ONES} of", f"within agree_timeout_s={self._timeout_s:g}")
        if self._closed:
            raise Closed("the pipeline was closed while other ranks were awaited")
        if self._error is not None:
            raise self._lost("not all of", f"({describe(self._error)})") from self._error
        return Found(any=bool(self._sum >> 2 * _BITS), lacking=bool(self._sum >> _BITS & _ONES))

    def _lost(self, how_many: str, why: str) -> WorkerError:
        return WorkerError(
            f"{how_many} {len(self._ranks)} ranks ({self._ranks}) came to step {self._step} {why}: another one is "
            "gone, stands still, or ended before; all must go to the same step. The state of the last batch is good: "
            "load it to go on"
        )

    def _is_complete(self) -> bool:
        return self._sum & _ONES == len(self._ranks)

    def close(self) -> None:
        self._closed = True
        self._told.put(None)
        self._answered.set()


def _positions(heard: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What all ranks brought to a round: [group, position] of each."""
    errors = [f"rank {rank}: {message['error']}" for rank, message in heard.items() if "error" in message]
    return {"error": "; ".join(errors)} if errors else {"state": [heard[rank]["state"] for rank in sorted(heard)]}

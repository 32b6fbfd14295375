"""One state of all ranks, joined by the first of them: through torch.distributed's store, a folder or a bucket.

What an earlier attempt left in the store or the folder is never taken for new. In every call each rank draws a number
that no one can know. The first rank publishes its own, and takes only messages that repeat it; the others take only a
result that repeats theirs. So a round that crashed, or timed out for some, does no harm to the next one.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from zephon.checkpoint.merge import join_states
from zephon.errors import CheckpointError, ConfigError, describe
from zephon.identity import torch_distributed
from zephon.io.board import Board, open_board
from zephon.options import TopologyOptions
from zephon.plan.lanes import Topology

LEAST_POLL_S = 0.001
PART_BYTES = 4 << 20  # of a message in torch's store
WHOLE, IN_PARTS = b"w", b"p"
GRACE_S = 3.0  # longer than who leads: it knows who is missing, and says so at its own deadline


class StoreBoard:
    """The store that torch.distributed's processes met at: no device and no collective call is needed for it.

    TCPStore breaks the connection where a value has more than 8 MiB, so a longer message lies there in parts. Each has
    the mark that the entry of its name has, which is written last: who reads a message while another takes its place
    sees that, and finds none.
    """

    most_poll_s = 0.05

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, name: str) -> bytes | None:
        with self._reached():
            head = self._get(name)
            if head is None or head[:1] == WHOLE:
                return None if head is None else head[1:]
            mark, num_parts = head[1:-4], int.from_bytes(head[-4:])
            parts = [self._get(f"{name}/{i}") or b"" for i in range(num_parts)]
        return b"".join(part[len(mark) :] for part in parts) if all(part.startswith(mark) for part in parts) else None

    def write(self, name: str, message: bytes) -> None:
        with self._reached():
            if len(message) <= PART_BYTES:
                self._store.set(name, WHOLE + message)
                return
            mark, starts = secrets.token_bytes(8), range(0, len(message), PART_BYTES)
            for i, start in enumerate(starts):
                self._store.set(f"{name}/{i}", mark + message[start : start + PART_BYTES])
            self._store.set(name, IN_PARTS + mark + len(starts).to_bytes(4))

    def _get(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """What goes wrong with the store, above all that the process which holds it is gone."""
        try:
            yield
        except RuntimeError as error:
            text = describe(error).partition("\n")[0]
            raise CheckpointError(
                f"the store of torch.distributed cannot be reached: {text}; did its rank die?"
            ) from error


class Exchange:
    """How the ranks of one pipeline come together; kept from one checkpoint to the next."""

    def __init__(self, topology: Topology, options: TopologyOptions) -> None:
        self._topology, self._options = topology, options
        self._rounds: tuple[Any, Rounds] | None = None
        self._busy = threading.Lock()

    def checkpoint(self, own: Callable[[], dict[str, Any]], group: Any, timeout_s: float) -> dict[str, Any]:
        """The state of all ranks, the same on each. Collective: where one rank fails, all of them do."""
        if not timeout_s > 0:
            raise ConfigError(f"checkpoint(timeout_s={timeout_s!r}): seconds, more than 0, are wanted")
        if not self._busy.acquire(blocking=False):  # by another thread, or by what a signal handler interrupted
            raise CheckpointError("checkpoint() is under way in this process already; call it behind that one")
        try:
            rounds = self._meet(group)
            return own() if rounds is None else rounds.join(partial(_owned, own, self._topology.lanes), timeout_s)
        finally:
            self._busy.release()

    def _meet(self, group: Any) -> Rounds | None:
        """Where the ranks meet; None for one that is alone."""
        distributed, options, topology = initialised(), self._options, self._topology
        if distributed is not None:
            group = group if group is not None else distributed.group.WORLD
            if self._rounds is None or self._rounds[0] is not group:
                self._rounds = group, _torch_rounds(distributed, group)
            return self._rounds[1]
        if group is not None:
            raise ConfigError("checkpoint(group=...) without torch.distributed; initialise it, or leave the group out")
        if self._rounds is not None and self._rounds[0] is not None:  # of a process group that is no more
            self._rounds = None
        if options.aggregate_dir is not None and self._rounds is None:
            board = open_board(options.aggregate_dir, options.run_id or "run")
            self._rounds = None, Rounds(board, range(topology.world_size), topology.rank)
        if self._rounds is None and topology.world_size > 1:
            raise ConfigError(
                f"checkpoint() of {topology.world_size} ranks needs a way between them: initialise torch.distributed, "
                "or give options(aggregate_dir=...), a folder or a bucket that all ranks see"
            )
        return self._rounds[1] if self._rounds is not None else None


def _owned(own: Callable[[], dict[str, Any]], lanes: list[int]) -> dict[str, Any]:
    """The own lanes of a state: one that was taken before the first batch has all of them."""
    state = own()
    return {**state, "lanes": {lane: state["lanes"][lane] for lane in map(str, lanes)}}


def initialised() -> Any:
    """The module torch.distributed where it is initialised in this process, else None.

    A fork, as a DataLoader's worker is one, has its parent's connections: what it sent there would mix with theirs.
    """
    found = torch_distributed()
    return found if found is not None and _store_of(found) not in _FORKED else None


_FORKED: list[Any] = []
"""The stores of torch.distributed that this process inherited by a fork."""


def _store_of(distributed: Any) -> Any:
    return distributed.distributed_c10d._get_default_store()


def _note_fork() -> None:
    if (found := initialised()) is not None:
        _FORKED.append(_store_of(found))


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_note_fork)


def _torch_rounds(distributed: Any, group: Any) -> Rounds:
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"rank {distributed.get_rank()} is not in the group of checkpoint(group=...)")
    ranks = distributed.get_process_group_ranks(group)
    if distributed.get_rank() not in ranks:
        raise ConfigError(f"rank {distributed.get_rank()} is not in the group of checkpoint(group=...): {ranks}")
    store = distributed.distributed_c10d._get_default_store()
    name = f"zephon-{ranks[0]}-{len(ranks)}-{hash(tuple(ranks)):x}"
    return Rounds(StoreBoard(distributed.PrefixStore(name, store)), ranks, distributed.get_rank())


class Rounds:
    """Rounds in which all of `ranks` bring plain data, and all get what the first of them makes of all: one state."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[int],
        rank: int,
        joined: Callable[[Mapping[int, dict[str, Any]]], dict[str, Any]] | None = None,
        what: str = "checkpoint()",
        remedy: str = "call it on all of them at the same step",
    ) -> None:
        """joined: makes {"state": ...} or {"error": ...} of the messages by rank. what, remedy: said in errors."""
        self._board, self._ranks, self._rank = board, ranks, rank
        self._joined, self._what, self._remedy = joined or _joined, what, remedy
        self._used: dict[int, str] = {}
        """By rank, the number that its last message to be taken had: it may not have left that round yet."""
        self._led = 0
        self._done: dict[str, int] = {}
        """The last two calls that this rank has led, and where the result of each is: a rank may be slow."""

    def join(self, own: Callable[[], dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """One round. Raises CheckpointError: the same on all ranks, but where one is not heard of."""
        result = self.meet(own, timeout_s)
        if "error" in result:
            raise CheckpointError(result["error"])
        state: dict[str, Any] = result["state"]
        return state

    def meet(self, own: Callable[[], Any], timeout_s: float) -> dict[str, Any]:
        """One round: {"state": ...} or {"error": ...}, and under "number" one that no other round has."""
        number, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
        if self._rank == self._ranks[0]:
            self._board.write("call", number.encode())
            return self._lead(number, own, deadline, timeout_s)
        return self._follow(number, _message(own), deadline, timeout_s)

    def _lead(self, number: str, own: Callable[[], Any], deadline: float, timeout_s: float) -> dict[str, Any]:
        heard: dict[int, dict[str, Any]] = {self._rank: {"number": number, **json.loads(_message(own))}}
        for pause_s in pauses(self._board.most_poll_s):
            for rank in self._ranks:
                if rank in heard or self._board.read(f"answer-{rank}") != number.encode():
                    continue
                message = self._read(f"rank-{rank}")  # where all see all at once, it was there before the answer
                if message.get("call") == number and message["number"] != self._used.get(rank):
                    heard[rank] = message
            if len(heard) == len(self._ranks) or time.monotonic() > deadline:
                break
            time.sleep(pause_s)
        missing = [rank for rank in self._ranks if rank not in heard]
        result = {"error": self._unheard(missing, timeout_s, _lacking(heard))} if missing else self._joined(heard)
        seen = {rank: message["number"] for rank, message in heard.items()}
        place = self._led % 2
        self._board.write(f"result-{place}", json.dumps({"seen": seen, "number": number, **result}).encode())
        self._led, self._done = self._led + 1, dict([*[*self._done.items()][-1:], (number, place)])
        self._board.write("done", json.dumps(self._done).encode())
        self._used |= seen
        return {"number": number, **result}

    def _follow(self, number: str, message: str, deadline: float, timeout_s: float) -> dict[str, Any]:
        calls: list[str] = []
        for pause_s in pauses(self._board.most_poll_s):
            raw = self._board.read("call")  # before the results: who leads writes its result before the next call
            done = self._read("done")
            for call in (call for call in calls if call in done):
                result = self._read(f"result-{done[call]}")
                if result.get("seen", {}).get(str(self._rank)) == number:
                    return result
            if raw is not None and (call := raw.decode(errors="replace")) not in calls:
                calls.append(call)
                own = {"call": call, "number": number, **json.loads(message)}
                self._board.write(f"rank-{self._rank}", json.dumps(own).encode())
                self._board.write(f"answer-{self._rank}", raw)
                continue
            if time.monotonic() > deadline + GRACE_S * bool(calls):
                break
            time.sleep(pause_s)
        return {"error": self._unheard([self._ranks[0]], timeout_s)}

    def _read(self, name: str) -> dict[str, Any]:
        """A message, or an empty one: it may not be there, and what a crash of the machine left may be torn."""
        try:
            found = json.loads(self._board.read(name) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _unheard(self, missing: list[int], timeout_s: float, lanes: str = "") -> str:
        return (
            f"{self._what} of {len(self._ranks)} ranks did not hear of ranks {missing}{lanes} within {timeout_s:g} s; "
            f"{self._remedy}"
        )


def pauses(most_s: float) -> Iterator[float]:
    """Seconds, longer and longer."""
    pause_s = LEAST_POLL_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, most_s)


def _message(own: Callable[[], dict[str, Any]]) -> str:
    """The own state, or why there is none: the others must not wait for it."""
    try:
        return json.dumps({"state": own()})
    except Exception as error:
        return json.dumps({"error": describe(error)})


def _lacking(heard: Mapping[int, dict[str, Any]]) -> str:
    """The lanes that no rank has brought, in words."""
    states = [message["state"] for message in heard.values() if "lanes" in message.get("state", ())]
    if not states:
        return ""
    brought = {int(lane) for state in states for lane in state["lanes"]}
    return f" (lanes {[lane for lane in range(states[0]['canonical_replicas']) if lane not in brought]})"


def _joined(heard: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The state of all, or what keeps them from being one."""
    for rank, message in sorted(heard.items()):
        if "error" in message:
            return {"error": f"rank {rank} has no state for checkpoint(): {message['error']}"}
    ranks = sorted(heard)
    try:
        return {"state": join_states((heard[rank]["state"] for rank in ranks), owned=True)}
    except CheckpointError as error:
        return {"error": f"the states of ranks {ranks}, counted from 0, do not make one: {error}"}

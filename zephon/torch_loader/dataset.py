"""A pipeline as an IterableDataset of torch, in the trainer's process and in the workers of a DataLoader.

Each iteration, there and here, is a session of its own over the share of the lanes that the process feeds.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch.utils.data import IterableDataset, get_worker_info

from zephon.batch import Batch
from zephon.checkpoint.restore import Allowed
from zephon.checkpoint.schema import read_state, write_state
from zephon.collective import Exchange
from zephon.errors import CheckpointError, ConfigError
from zephon.flow.progress import LaneState
from zephon.identity import available_cpus, find_identity
from zephon.ipc.codec import dump_by_value
from zephon.plan.lanes import Topology, resolve_topology
from zephon.session import Definition, Session
from zephon.torch_loader.batch import DATASETS, TorchBatch
from zephon.torch_loader.iterate import Home, Part, Progress, ShareIterator, Worker, counted
from zephon.torch_loader.passes import Passes
from zephon.torch_loader.seen import Seen
from zephon.torch_loader.shares import active_workers, first_share, share_of_limit, worker_options
from zephon.torch_loader.states import LOADER, without_loader

log = logging.getLogger("zephon")


class Origin(msgspec.Struct, frozen=True):
    """What a dataset is made of, as the trainer's process found it out."""

    written: Definition
    """As the user wrote it."""
    definition: Definition
    """With the number of lanes, the seed and the mean tokens that hold."""
    topology: Topology
    num_reasons: int
    allow: Allowed
    start: dict[int, LaneState]
    pass_index: int

    @classmethod
    def of(cls, written: Definition, session: Session, pass_index: int | None = None) -> Origin:
        """Of a session in the trainer's process, which says who this rank is, and where to start."""
        resolved, options = session.resolved, written.options
        data = msgspec.structs.replace(options.data, canonical_replicas=resolved.topology.num_lanes)
        options = msgspec.structs.replace(options, data=data)
        definition = msgspec.structs.replace(written, source=resolved.source, options=options)
        first = min(place.pass_index for place in session.start.values()) if pass_index is None else pass_index
        reasons = len(resolved.plan.reasons)
        return cls(written, definition, resolved.topology, reasons, session.allow, dict(session.start), first)


class TorchDataset(IterableDataset[TorchBatch]):
    """Made by `Pipeline.to_torch`. For `DataLoader(dataset, batch_size=None, num_workers=n)` and StatefulDataLoader.

    Each item is a whole batch of one lane, a TorchBatch. Each iteration is a pass, and the next one the next pass, also
    where one was left early. docs/torch.md says how lanes are divided among workers, and how to save and resume.
    """

    def __init__(self, origin: Origin, token: str | None = None, shared: torch.Tensor | None = None) -> None:
        """token, shared: of the dataset that this one is in another process."""
        self._token = token or secrets.token_hex(8)
        self._passes = Passes(len(origin.topology.lanes), origin.num_reasons, shared)
        self._live: weakref.ref[ShareIterator] | None = None
        self._adopt(origin)

    def _adopt(self, origin: Origin) -> None:
        """Makes `origin` the start of the next iteration."""
        self._origin, self._lanes = origin, origin.topology.lanes
        self._exchange = Exchange(origin.topology, origin.written.options.topology)
        self._version = self._passes.version
        self._pending: tuple[Mapping[str, Any], Part] | None = None
        self._progress: Progress | None = None
        self._whole: Session | None = None  # of all lanes, where a state is asked for
        self._seen = DATASETS[self._token] = Seen(self._lanes)

    def __reduce__(self) -> tuple[Any, ...]:
        """To a worker, or a copy. The table of passes goes apart: torch keeps it shared."""
        self._check_rank()
        return _arrive, (dump_by_value(self._origin)[0], self._token, self._passes.shared)

    # -- iterating -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TorchBatch]:
        worker = _this_worker()
        try:
            iterator = self._iterate(worker)
        except Exception as error:
            if not worker.num_workers:
                raise
            # A worker that stays dies of what is raised here, and tells nobody why: the first `next` raises it.
            iterator = self._begin(worker, Progress(None, Part(0, -1, 0)), _raising(error), {})
        self._live = weakref.ref(iterator)
        return iterator

    def _iterate(self, worker: Worker) -> ShareIterator:
        """The iterator over what is this process's of the next pass, or of the loaded state's."""
        self._check_rank()
        if self._passes.version != self._version:
            raise ConfigError(
                "the dataset was given a state while the workers of an older DataLoader ran (persistent_workers=True); "
                "make a new DataLoader over it"
            )
        self._end_iterator("a newer iterator of the same dataset took its place", not worker.num_workers)
        pending, self._pending = self._pending, None
        noted = self._passes.next_pass(worker.number, worker.num_workers, worker.seed)
        pass_index = pending[1].pass_index if pending else self._origin.pass_index if noted is None else noted
        if pending is not None:
            self._passes.forget(worker.number, worker.num_workers)
        self._passes.begin(worker.number, worker.num_workers, worker.seed, pass_index)
        if pending is not None:
            return self._go_on(worker, *pending)
        places = self._origin.start if noted is None else self._starts_of(pass_index)
        return self._share(worker, pass_index, places)

    def _starts_of(self, pass_index: int) -> dict[int, LaneState]:
        """The lanes at the beginning of a pass, with what was counted before it."""
        places = {}
        for number, lane in enumerate(self._lanes):
            start = self._origin.start[lane]
            delivered, counts = self._passes.counted(number, pass_index) or counted(start)
            places[lane] = LaneState(pass_index=pass_index, delivered=delivered, counts=counts, place_counts=counts)
        return places

    def _share(self, worker: Worker, pass_index: int, places: dict[int, LaneState]) -> ShareIterator:
        """The iterator over a worker's lanes, divided anew."""
        active = active_workers(len(self._lanes), worker.num_workers)
        if worker.number >= active:
            return self._idle(worker, pass_index)
        share = (worker.number + first_share(self._lanes, places, pass_index, active)) % active
        session = Session(self._definition_of(worker, active), topology=self._topology_of(share, active))
        session.begin_at(places, pass_index)
        return self._iterator(worker, Part(pass_index, share, active), session, places)

    def _go_on(self, worker: Worker, state: Mapping[str, Any], part: Part) -> ShareIterator:
        """The iterator over the lanes of a worker whose state a StatefulDataLoader brought back."""
        active = active_workers(len(self._lanes), worker.num_workers)
        if worker.number >= active and not state["lanes"]:
            return self._idle(worker, part.pass_index)
        topology = self._topology_of(part.share, part.shares)
        if worker.number >= active or part.shares != active or {*map(str, topology.lanes)} != {*state["lanes"]}:
            raise CheckpointError(
                f"the StatefulDataLoader's state has lanes {', '.join(state['lanes']) or 'none'} for worker "
                f"{worker.number} of {worker.num_workers}, and this rank lanes {self._lanes}: it fits the same workers "
                "and lanes only; what zephon.torch_loader.pipeline_state(state) makes of it fits any"
            )
        read = read_state(state)
        session = Session(self._definition_of(worker, active), read, self._origin.allow, topology)
        seed, now = self._origin.definition.source.seed, session.state_of({})
        for field, was, is_now in (
            ("seed", read.seed, seed),
            ("batch_size", read.batch_size, now.batch_size),
            ("cycles_per_step", read.cycles_per_step, now.cycles_per_step),
        ):
            if was != is_now:
                raise CheckpointError(
                    f"the StatefulDataLoader's state has {field} {was}, the pipeline {is_now}, which each worker alone "
                    "cannot follow; load what zephon.torch_loader.pipeline_state(state) makes of it"
                )
        for lane, place in session.start.items():
            if place.pass_index > part.pass_index:
                self._passes.end(self._lanes.index(lane), place.pass_index, counted(place))
        return self._iterator(worker, part, session, session.start)

    def _topology_of(self, share: int, shares: int) -> Topology:
        return msgspec.structs.replace(self._origin.topology, share=share, num_shares=shares)

    def _definition_of(self, worker: Worker, active: int) -> Definition:
        """What this process runs: in a worker on threads, and its part of what `take` allows."""
        definition = self._origin.definition
        if not worker.num_workers:
            return definition
        if definition.options.execution.runner == "process" and not worker.number:
            log.warning("runner='process' is 'threads' in a DataLoader's workers, which are the processes there")
        options = worker_options(definition.options, worker.num_workers, available_cpus())
        limit = share_of_limit(definition.limit, worker.number, active)
        return msgspec.structs.replace(definition, options=options, limit=limit)

    def _iterator(self, worker: Worker, part: Part, session: Session, places: dict[int, LaneState]) -> ShareIterator:
        session.current = dict(session.start)
        unfinished = any(place.pass_index == part.pass_index for place in session.start.values())
        batches: Iterator[Batch] = session.iterate() if unfinished else iter(())
        return self._begin(worker, Progress(session, part), batches, places)

    def _idle(self, worker: Worker, pass_index: int) -> ShareIterator:
        """The iterator of a worker that has no lanes."""
        return self._begin(worker, Progress(None, Part(pass_index, -1, 0)), iter(()), {})

    def _begin(
        self, worker: Worker, progress: Progress, batches: Iterator[Batch], places: dict[int, LaneState]
    ) -> ShareIterator:
        self._progress = progress
        seen = None if worker.num_workers else self._seen
        home = Home(self._token, self._lanes, self._passes, self._version, seen)
        return ShareIterator(home, worker, progress, batches, places)

    def _check_rank(self) -> None:
        """Raises ConfigError where this process turned out to be another rank than it was for `to_torch`."""
        if (identity := find_identity()) is None:
            return
        options, topology = self._origin.written.options.topology, self._origin.topology
        found, _ = resolve_topology(options, topology.num_lanes, identity)
        if found.lanes != self._lanes:
            raise ConfigError(
                f"to_torch() was called as rank {topology.rank} of {topology.world_size}, which has lanes "
                f"{self._lanes}, but {identity.origin} says rank {identity.rank} of {identity.world_size}; call it "
                "after torch.distributed.init_process_group, on the rank that uses it"
            )

    def __len__(self) -> int:
        """Batches of this rank in a whole pass: see `Pipeline.__len__`. Raises TypeError where that is not known."""
        return self._of_all_lanes().num_batches()

    def _end_iterator(self, reason: str, tell: bool = False) -> None:
        iterator = self._live() if self._live is not None else None
        if iterator is not None:
            iterator.end(reason)
        if tell and self._progress is not None and self._progress.left_early:
            log.warning("the pass was left before its end, and the next one begins; to go on in it, load its state")
        self._live = None

    def close(self) -> None:
        """Ends the live iterator of this process, and what works for it. A DataLoader ends its own workers."""
        self._end_iterator("the dataset was closed")

    # -- states --------------------------------------------------------------------------------------------------

    def state_dict(self, after: TorchBatch | None = None) -> dict[str, Any]:
        """The state of this rank's lanes behind `after`, a batch that a DataLoader over this dataset returned.

        Any pipeline of the definition can load it, on any topology and number of workers. Without `after`: behind the
        last batch of the iterator in this process. Inside a worker that is its share, for a StatefulDataLoader.

        Raises CheckpointError where workers gave the batches and `after` is missing, or is too old.
        """
        if after is not None:
            return self._state_behind(after)
        if get_worker_info() is None and self._seen.from_workers:
            raise CheckpointError(
                "batches came from a DataLoader's workers, which are ahead: give the last one that you used, as "
                "state_dict(after=batch)"
            )
        if self._progress is not None:
            return self._progress.state()
        state = self._written(self._origin.start)
        return {**state, LOADER: msgspec.to_builtins(Part(self._origin.pass_index, 0, 1))}

    def _state_behind(self, batch: TorchBatch) -> dict[str, Any]:
        place = getattr(batch, "_place", None)
        if place is None or place.dataset != self._token:
            raise CheckpointError(
                "state_dict(after=batch): the batch has no place in this dataset; give what the DataLoader over it "
                "returned, not a mapping that was made of its fields"
            )
        return self._written(self._seen.behind(place))

    def _written(self, lanes: dict[int, LaneState]) -> dict[str, Any]:
        """The pipeline's state with these lanes."""
        session = self._of_all_lanes()
        session.check_state()
        return write_state(session.state_of(lanes))

    def _of_all_lanes(self) -> Session:
        """A session that is only asked, and does not run."""
        if self._whole is None:
            self._whole = Session(self._origin.definition, topology=self._origin.topology)
        return self._whole

    def load_state_dict(self, state: Mapping[str, Any], allow: Iterable[str] = ()) -> None:
        """Makes a pipeline's state, or one of this dataset, the start of the next iteration, for all workers.

        Inside a worker, where a StatefulDataLoader calls it: of that worker's share. See `Pipeline.load_state_dict`.
        """
        part = msgspec.convert(state[LOADER], Part) if LOADER in state else None
        if get_worker_info() is not None:
            if part is None:
                raise CheckpointError(
                    "in a worker: a state is its part of a StatefulDataLoader's; load this one outside"
                )
            self._pending = state, part
            return
        if part is not None and part.shares != 1:
            raise CheckpointError(
                "this is the part of one worker; load zephon.torch_loader.pipeline_state(state) of the whole "
                "StatefulDataLoader's state"
            )
        if isinstance(allow, str):
            raise ConfigError(f"allow={allow!r}: a list of field names is wanted")
        written = self._origin.written
        session = Session(written, read_state(state), Allowed(allow))
        self._end_iterator("a state was loaded")
        self._passes.renew()
        origin = Origin.of(written, session, part.pass_index if part is not None else None)
        if len(origin.topology.lanes) != len(self._lanes):  # the state says how many lanes there are, if nobody else
            self._passes = Passes(len(origin.topology.lanes), origin.num_reasons)
        self._adopt(origin)

    def checkpoint(
        self, after: TorchBatch | None = None, *, group: Any = None, timeout_s: float = 300.0
    ) -> dict[str, Any]:
        """The state of all ranks behind `after`, which is at the same step on each. See `Pipeline.checkpoint`."""
        return self._exchange.checkpoint(lambda: without_loader(self.state_dict(after)), group, timeout_s)


def _raising(error: Exception) -> Iterator[Batch]:
    """No batch, but an error."""
    raise error
    yield  # a generator


def _this_worker() -> Worker:
    info = get_worker_info()
    return Worker() if info is None else Worker(info.id, info.num_workers, info.seed - info.id)


def _arrive(origin: bytes, token: str, shared: torch.Tensor) -> TorchDataset:
    """The dataset in a worker. A copy in the process of the first one goes its own way."""
    made = pickle.loads(origin)
    return TorchDataset(made) if token in DATASETS else TorchDataset(made, token, shared)

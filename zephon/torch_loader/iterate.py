"""One iteration over the lanes that a process feeds, and the state behind the last batch that it gave."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from zephon.batch import Batch
from zephon.checkpoint.schema import write_lanes, write_state
from zephon.errors import Closed, ConfigError, OperatorError
from zephon.flow.progress import LaneState
from zephon.session import Session
from zephon.torch_loader.batch import TorchBatch
from zephon.torch_loader.passes import Counted, Passes
from zephon.torch_loader.seen import Iteration, Place, Seen
from zephon.torch_loader.states import LOADER


class Worker(msgspec.Struct, frozen=True):
    """Who iterates: a worker of a DataLoader, or the trainer's process, which stands for the only one."""

    number: int = 0
    num_workers: int = 0
    seed: int = 0
    """The DataLoader's for the epoch, the same in all its workers."""


class Part(msgspec.Struct, frozen=True, rename={"pass_index": "pass"}):
    """Which share of which pass a process feeds. `batches`: those that it gave in this pass before. share -1: none."""

    pass_index: int
    share: int
    shares: int
    batches: int = 0


class Home(msgspec.Struct, frozen=True):
    """What an iteration needs of its dataset."""

    token: str
    lanes: Sequence[int]
    passes: Passes
    version: int
    seen: Seen | None
    """In the trainer's process: where to note batches. A worker's are noted when they arrive there."""


def counted(place: LaneState) -> Counted:
    """What was counted of a lane that stands at the beginning of a pass."""
    return place.delivered, place.counts


class Progress:
    """How far a process is: its session and the batches that it gave."""

    def __init__(self, session: Session | None, part: Part) -> None:
        self.session, self.part, self.batches = session, part, part.batches
        self._header: str | None = None
        self.over = False

    @property
    def left_early(self) -> bool:
        """Whether batches were given, but not all."""
        return self.batches > self.part.batches and not self.over

    def state(self) -> dict[str, Any]:
        """A state of the lanes of this process, for a StatefulDataLoader to bring back to the same worker."""
        loader = msgspec.to_builtins(msgspec.structs.replace(self.part, batches=self.batches))
        if self.session is None:
            return {"lanes": {}, LOADER: loader}
        if self._header is None:  # of the fingerprint's size, and always the same
            self.session.check_state()
            self._header = json.dumps(write_state(self.session.state_of({})))
        return {**json.loads(self._header), "lanes": write_lanes(self.session.current), LOADER: loader}


class ShareIterator(Iterator[TorchBatch]):
    """The batches of the lanes that this process feeds, up to the end of the pass."""

    def __init__(
        self, home: Home, worker: Worker, progress: Progress, batches: Iterator[Batch], start: dict[int, LaneState]
    ) -> None:
        """batches: of the progress's session. start: where lanes begin, of the whole group if that is known."""
        self._home, self._worker, self._progress, self._batches = home, worker, progress, batches
        self._iteration: Iteration = (home.version, worker.num_workers, worker.seed, progress.part.pass_index)
        self._start = start
        self._known = dict(progress.session.current) if progress.session is not None else {}
        self._pid = os.getpid()

    def __next__(self) -> TorchBatch:
        if os.getpid() != self._pid:
            raise Closed(
                "this iterator over to_torch() began in the process that forked this one; give the DataLoader the "
                "dataset itself, and let each worker call iter(dataset)"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.over = True
            self._moved()
            raise
        except OperatorError as error:
            raise _plain(error) from error
        place = self._place()
        if self._home.seen is not None:
            self._home.seen.note(place)
        return TorchBatch.of(batch, place)

    def _place(self) -> Place:
        """What is told of the batch that was just given."""
        start, self._start = self._start, {}
        progress = self._progress
        place = Place(self._home.token, self._iteration, self._worker.number, progress.batches, self._moved(), start)
        progress.batches += 1
        return place

    def _moved(self) -> dict[int, LaneState]:
        """The lanes that moved since it was asked for last. Those that ended are noted for the next pass."""
        session = self._progress.session
        if session is None:
            return {}
        moved = {lane: place for lane, place in session.current.items() if place is not self._known[lane]}
        self._known.update(moved)
        for lane, place in moved.items():
            if place.pass_index > self._progress.part.pass_index:
                self._home.passes.end(self._home.lanes.index(lane), place.pass_index, counted(place))
        return moved

    def end(self, reason: str) -> None:
        """Ends the engine behind it; a later `next` raises Closed."""
        if self._progress.session is not None and os.getpid() == self._pid:
            self._progress.session.end_iterator(reason)

    def close(self) -> None:
        """Ends the engine behind it."""
        self.end("the iterator was closed")

    def __reduce__(self) -> NoReturn:
        raise ConfigError("an iterator over to_torch() stays in its process; give the DataLoader the dataset itself")


def _plain(error: OperatorError) -> OperatorError:
    """The error as a class that every process can name: a DataLoader sends the class and the text of what a worker
    raised, and waits for ever where that cannot be pickled."""
    return OperatorError(str(error), error.operator, error.where)

"""Where a pass ends for all groups: after the same global step, whichever lanes have more and whichever have less.

Either the number of steps is known (`plan.ends`), or the groups agree step by step, and each is one step ahead of what
it delivers: with the first batch of a step it reads all that it has of the next one, and tells the others. All of it is
a function of the lanes' batches, so it is the same on any topology, and after a restore.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from zephon.batch import Batch
from zephon.drive import Driver, InlineDriver
from zephon.engine import Job, Ready
from zephon.errors import DataError, ZephonError
from zephon.flow.batcher import End, Failed
from zephon.flow.progress import LaneState
from zephon.plan.ends import Ending


class Position(NamedTuple):
    """Where lanes are: the pass, the fewest and the most turns of those in it, and whether some are in a later one."""

    pass_index: int
    fewest: int
    most: int
    later: bool


def position_of(places: Iterable[LaneState]) -> Position:
    """The position of some lanes, at least one."""
    found = [Position(place.pass_index, place.turns, place.turns, False) for place in places]
    return together(found)


def together(positions: Sequence[Position]) -> Position:
    """The position of the lanes of all."""
    now = min(position.pass_index for position in positions)
    here = [position for position in positions if position.pass_index == now]
    later = any(position.later or position.pass_index > now for position in positions)
    return Position(now, min(p.fewest for p in here), max(p.most for p in here), later)


class Found(NamedTuple):
    """What there is of a step: any batch at all; and whether a batch is lacking."""

    any: bool
    lacking: bool


class Agreement(Protocol):
    """How groups tell each other what they have. All of them make the same calls in the same order."""

    def meet(self, own: Position) -> list[Position]:
        """The positions of all groups, before the first step."""

    def tell(self, step: int, own: Found) -> None:
        """Begins to join what all have of a step. Does not wait."""

    def answered(self) -> bool:
        """Whether `answer` would not wait."""

    def answer(self) -> Found:
        """What all together have of the step that was told last. Waits for the others."""

    def close(self) -> None:
        """Ends it, also where others still wait."""


class Alone:
    """A group that has all lanes agrees with itself."""

    def meet(self, own: Position) -> list[Position]:
        return [own]

    def tell(self, step: int, own: Found) -> None:
        self._own = own

    def answered(self) -> bool:
        return True

    def answer(self) -> Found:
        return self._own

    def close(self) -> None:
        pass


class Slot(NamedTuple):
    """A lane's turn, and what is there: None where the lane has ended."""

    lane: int
    turn: int
    item: Ready | Failed | None


class Ends:
    """What a group delivers of a pass. Every lane has `limit` turns before the next decision, which may be the last.

    current: the lanes' states behind what was delivered, the caller's; read here.
    """

    def __init__(
        self,
        ending: Ending,
        cycles: int,
        agreement: Agreement,
        position: Position,
        current: dict[int, LaneState],
        pad: Callable[[int, int], Batch],
        reason: int = -1,
    ) -> None:
        """position: of all lanes of the run. pad: a batch for a lane and turn that has none.

        reason: the place in the lanes' counts of samples beyond the last step.
        """
        self._reason = reason
        self._ending, self._cycles, self._agreement = ending, cycles, agreement
        self.position, self._current, self._pad = position, current, pad
        self._limit, self._final, self._told = 0, True, False
        if ending.steps is not None:
            self._limit = ending.steps * cycles
        elif position.later:  # who is in the next pass has had all steps of this one, and the others began the last
            self._limit = -(-position.most // cycles) * cycles
        else:
            self._limit, self._final = position.fewest // cycles * cycles, False
        self._ahead: deque[Slot] = deque()
        self._ended: dict[int, LaneState] = {}
        self._driver: Driver | None = None

    def begin(self, driver: Driver) -> None:
        """Takes the engine of the pass's lanes."""
        self._driver = driver

    @property
    def _running(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def lacks(self, turns: int) -> bool:
        """Whether a batch is still to come for a lane that has had fewer than `turns` turns."""
        while True:
            due = self._due()
            if due is not None and due < min(turns, self._limit):
                return True
            if self._final or self._limit >= turns:
                return False
            self._decide()

    def ready(self) -> bool:
        """Whether there is a batch that can be had without waiting, as far as is known. False at the end."""
        due = self._due()
        if due is not None and due >= self._limit and not self._final and self._told and self._agreement.answered():
            self._decide()
        if due is None or due >= self._limit:
            return False
        tail = self._running.tail
        self._running.poll()
        if self._final or self._told:
            return bool(self._ahead) or tail.peek() is not None
        return all(map(tail.waiting, tail.buffers))  # the first batch of a step comes when the next step was read

    def _due(self) -> int | None:
        """The turn that is next; None where no lane is in this pass."""
        if self._ahead:
            return self._ahead[0].turn
        turn = self._running.tail.turn
        return turn[0] if turn is not None else None

    def take(self) -> tuple[int, Ready | Failed]:
        """(lane, item) that is next, where one is still to come."""
        slot = self._ahead.popleft() if self._ahead else self._read()
        if not self._final and not self._told:
            self._tell()
        if slot.item is not None:
            return slot.lane, slot.item
        if not self._ending.pad:
            raise self._too_short(slot)
        state = self._current[slot.lane]  # the place stays: no sample of the lane was delivered
        return slot.lane, Ready(self._pad(slot.lane, slot.turn), msgspec.structs.replace(state, turns=slot.turn + 1))

    def _read(self) -> Slot:
        """The next turn of the tail. A lane that has ended, or failed, keeps its turns."""
        driver = self._running
        driver.wait()
        turn, lane = driver.tail.turn or (0, 0)
        item = driver.tail.peek()
        if isinstance(item, Ready):
            driver.tail.pop()
            taken = driver.took(item)
            assert isinstance(taken, Ready)
            return Slot(lane, turn, taken)
        driver.tail.pass_by()
        if isinstance(item, End):
            self._ended[lane] = item.state
            return Slot(lane, turn, None)
        assert isinstance(item, Failed)
        return Slot(lane, turn, item)

    def _tell(self) -> None:
        """Reads all that this group has of the step behind the limit, and tells the others."""
        stop, tail = self._limit + self._cycles, self._running.tail
        while tail.turn is not None and tail.turn[0] < stop:
            self._ahead.append(self._read())
        there = [slot.item is not None for slot in self._ahead if slot.turn >= self._limit]
        begun = self.position.most > self._limit  # before a restart: so there was a batch
        self._agreement.tell(self._limit // self._cycles, Found(any(there) or begun, not all(there)))
        self._told = True

    def _decide(self) -> None:
        """Whether all groups go on for one more step."""
        if not self._told:
            self._tell()
        found, self._told = self._agreement.answer(), False
        if found.any if self._ending.pad else not found.lacking:
            self._limit += self._cycles
        else:
            self._final = True

    def finish(self) -> dict[int, LaneState]:
        """The states of the pass's lanes behind its end. Reads what lanes have beyond it, where that is part of it."""
        lanes = list(self._running.tail.buffers)
        if self._ending.given:
            if self._ending.pad:
                self._look_behind()
            current = self._current
            return {lane: self._ended.get(lane) or current[lane].next_pass(current[lane].counts) for lane in lanes}
        beyond = dict.fromkeys(lanes, 0)
        for slot in [*self._ahead, *self._rest()]:
            if isinstance(slot.item, Failed):
                raise slot.item.error
            if slot.item is not None:
                beyond[slot.lane] += slot.item.batch.num_samples
        return {lane: self._behind(lane, number) for lane, number in beyond.items()}

    def _look_behind(self) -> None:
        """Finds the lanes that have no batch behind the last step: all that they dropped counts."""
        driver = self._running
        for _ in driver.tail.buffers:
            driver.wait()
            item = driver.tail.peek()
            if isinstance(item, End):
                self._ended[driver.tail.pass_by()] = item.state
            else:
                driver.tail.pass_by()

    def _rest(self) -> Iterable[Slot]:
        driver = self._running
        while driver.tail.turn is not None:
            driver.wait()
            item = driver.tail.peek()
            if isinstance(item, End):
                self._ended[driver.tail.finish()] = item.state
            else:
                yield self._read()

    def _behind(self, lane: int, dropped: int) -> LaneState:
        """A lane's state behind the pass, of which `dropped` samples lay beyond the last step."""
        state = self._ended[lane]
        if not dropped:
            return state
        if self._ending.pad:
            raise self._wrong_length(lane, "more")
        counts = list(state.counts)
        counts[self._reason] += dropped
        whole, delivered = tuple(counts), self._current[lane].delivered
        return LaneState(pass_index=state.pass_index, delivered=delivered, counts=whole, place_counts=whole)

    def _too_short(self, slot: Slot) -> ZephonError:
        """The error for a lane that has ended before the last step."""
        if not self._ending.given:
            return self._wrong_length(slot.lane, "less")
        return DataError(
            f"lane {slot.lane} ended after {slot.turn:,} batches of pass {self.position.pass_index}, but "
            f"steps_per_pass={self._ending.steps} with cycles_per_step={self._cycles} wants {self._limit:,} of every "
            "lane; lower it, give the source more (end='repeat'), or say last_step='pad'"
        )

    def _wrong_length(self, lane: int, what: str) -> ZephonError:
        return DataError(
            f"lane {lane} has {what} than the {self._limit:,} batches that follow from the lengths of its datasets; an "
            "operator of yours says one_to_one and is not, or a WorkSource of yours has a wrong lane_length"
        )

    def close(self) -> None:
        """Leaves the agreement."""
        self._agreement.close()


def first_batch(job: Job) -> Batch | None:
    """The first batch of a job's one lane, made here and now. None: it has none. Raises what its data raises."""
    driver = InlineDriver(job)
    try:
        driver.wait()
        item = driver.tail.peek()
    finally:
        driver.close()
    if isinstance(item, Failed):
        raise item.error
    return item.batch if isinstance(item, Ready) else None


class Pads:
    """The batches that fill the places of lanes that have ended: copies of the pass's first one, made once."""

    def __init__(self, first: Callable[[], Batch | None], cycles: int) -> None:
        self._find, self._cycles = first, cycles
        self._first: Batch | None = None

    def make(self, lane: int, turn: int) -> Batch:
        """The pad of a lane's turn, in memory of its own."""
        if self._first is None:
            self._first = self._find()
        if self._first is None:
            raise DataError("not one lane has a batch in this pass, so there is none to fill it with; see the filters")
        fields = {n: list(v) if isinstance(v, list) else v for n, v in self._first.copy().items()}
        return Batch(fields, lane, turn // self._cycles, self._first.pass_index, 0)

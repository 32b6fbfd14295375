"""The rounds of checkpoint() in virtual time: every order of what ranks read and write, late, stopped and dead ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process.helpers import slow
from zephon import collective
from zephon.collective import Rounds, StoreBoard
from zephon.errors import CheckpointError, ConfigError

from .jobs import line


class Dies(BaseException):
    """An actor ends where it stands."""


class World:
    """Actors, one of which moves at a time; which one is drawn at each look at the board. Seconds pass when all sleep.

    stale_s: how long a reader may go on seeing what lay on the board before, as on a network's file system.
    stops: how likely an actor stands still for some seconds before it moves on. dies: the moves before one ends.
    """

    def __init__(self, seed: int, stale_s: float = 0.0, stops: float = 0.0) -> None:
        self.random, self.stale_s, self.stops = random.Random(seed), stale_s, stops
        self.now = 0.0
        self.written: dict[str, list[tuple[float, bytes]]] = {}
        self._wake: dict[str, float] = {}
        self._go: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self.errors: list[BaseException] = []
        self.deaths: dict[str, int] = {}

    def run(self, **actors: Callable[[], None]) -> None:
        """Runs all of them to their ends."""

        def act(name: str, what: Callable[[], None]) -> None:
            self._go[name].acquire()
            try:
                what()
            except Dies:
                pass
            except BaseException as error:
                self.errors.append(error)
            del self._wake[name]
            self._back.release()

        for name, what in actors.items():
            self._wake[name], self._go[name] = self.now, threading.Semaphore(0)
            threading.Thread(target=act, args=(name, what), name=name, daemon=True).start()
        while self._wake:
            self.now = max(self.now, min(self._wake.values()))
            self._go[self.random.choice([name for name, at in self._wake.items() if at <= self.now])].release()
            assert self._back.acquire(timeout=20)
        assert not self.errors, self.errors

    def pause(self, seconds: float = 0.0) -> None:
        """Lets others move."""
        name = threading.current_thread().name
        if name in self.deaths:
            self.deaths[name] -= 1
            if not self.deaths[name]:
                raise Dies
        stop = self.random.uniform(0, 6) if self.random.random() < self.stops else 0.0
        self._wake[name] = self.now + seconds + stop
        self._back.release()
        self._go[name].acquire()

    def alive(self, name: str) -> bool:
        return name in self._wake


class SimBoard:
    """What one actor sees of the board."""

    most_poll_s = 0.5

    def __init__(self, world: World) -> None:
        self._world, self._seen = world, dict[str, int]()

    def read(self, name: str) -> bytes | None:
        world = self._world
        world.pause()
        there = world.written.get(name, [])
        least = sum(at <= world.now - world.stale_s for at, _ in there)
        chosen = max(self._seen.get(name, 0), world.random.randint(least, len(there)))
        self._seen[name] = chosen
        return there[chosen - 1][1] if chosen else None

    def write(self, name: str, message: bytes) -> None:
        self._world.pause()
        self._world.written.setdefault(name, []).append((self._world.now, message))
        self._seen[name] = len(self._world.written[name])
        self._world.pause()


class Job:
    """Ranks that call again and again; what each call gave, and when it ran."""

    def __init__(self, world: World, size: int, patch: pytest.MonkeyPatch) -> None:
        self.world, self.size = world, size
        self.arrived = dict.fromkeys(range(size), 0)
        self.calls: list[tuple[int, int, float, float, Any]] = []
        """(rank, step, begin, end, {rank: [rank, step]} or the error)."""
        patch.setattr(collective, "time", SimpleNamespace(monotonic=lambda: world.now, sleep=world.pause))

    def run(self, steps: int, timeout_s: float, late_s: float = 0.0, together: bool = False, calm: int = 0) -> None:
        """The last `calm` steps have nobody late or stopped, and all the time that they need."""

        def rank_of(rank: int) -> Callable[[], None]:
            def act() -> None:
                rounds = Rounds(SimBoard(self.world), range(self.size), rank, joined=joined)
                for step in range(steps):
                    is_calm = step >= steps - calm
                    if together or is_calm:
                        self.meet(rank, step)
                    if is_calm:
                        self.world.stops = 0
                    elif late_s:
                        self.world.pause(self.world.random.uniform(0, late_s))
                    self.call(rounds, rank, step, 1000.0 if is_calm else timeout_s)

            return act

        self.world.run(**{f"rank {rank}": rank_of(rank) for rank in range(self.size)})

    def call(self, rounds: Rounds, rank: int, step: int, timeout_s: float) -> None:
        began = self.world.now
        try:
            found: Any = rounds.join(lambda: [rank, step], timeout_s)  # type: ignore[arg-type, return-value]
        except CheckpointError as error:
            found = str(error)
        self.calls.append((rank, step, began, self.world.now, found))

    def meet(self, rank: int, step: int) -> None:
        """A barrier of the living."""
        self.arrived[rank] = step + 1
        while any(n <= step for other, n in self.arrived.items() if self.world.alive(f"rank {other}")):
            self.world.pause(0.1)

    def check(self) -> None:
        """A state has the own part of that very call, and of others what was not over when the leader's call began."""
        spans = {(rank, step): (began, end) for rank, step, began, end, _ in self.calls}
        for rank, step, *_, found in self.calls:
            if isinstance(found, str):
                continue
            assert found[str(rank)] == [rank, step]
            led = spans.get(tuple(found["0"]), (0.0, float("inf")))  # it may have died behind its words
            for part in found.values():
                began, end = spans.get(tuple(part), led)
                assert began <= led[1]
                assert end >= led[0]


def joined(heard: Any) -> dict[str, Any]:
    return {"state": {str(rank): message["state"] for rank, message in heard.items()}}


SEEDS = [*range(6), *map(slow, range(6, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_orders_without_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks come late, and stand still now and then; the board may be slow to show what is new."""
    world = World(seed, stale_s=2.0 * (seed % 2), stops=0.01)
    job = Job(world, size=2 + seed % 4, patch=monkeypatch)
    job.run(steps=6, timeout_s=10_000, late_s=5.0)
    assert len(job.calls) == 6 * job.size
    for _, step, _, _, found in job.calls:
        assert found == {str(rank): [rank, step] for rank in range(job.size)}


@pytest.mark.parametrize("seed", SEEDS)
def test_time_outs_and_no_part_of_a_round_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds fail for some; none ever takes what belongs to an earlier call; a calm round works again."""
    world = World(seed, stale_s=4.0 * (seed % 2), stops=0.03)
    job = Job(world, size=2 + seed % 3, patch=monkeypatch)
    job.run(steps=12, timeout_s=4.0, late_s=5.0, together=seed % 3 == 0, calm=2)
    job.check()
    for _, step, _, _, found in job.calls:
        if step >= 10:
            assert found == {str(rank): [rank, step] for rank in range(job.size)}


@pytest.mark.parametrize("seed", SEEDS)
def test_deaths_and_a_job_behind_them_on_the_same_board(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ends at any look at the board. The others hear of it in time; the job is started again at once."""
    world = World(seed, stale_s=3.0 * (seed % 2))
    for size in (4, 3, 4):
        world.deaths = {f"rank {world.random.randrange(size)}": world.random.randint(1, 120)}
        job = Job(world, size, monkeypatch)
        began = world.now
        job.run(steps=3, timeout_s=20.0)
        job.check()
        assert world.now - began < 3 * (20 + collective.GRACE_S + 8)
    world.deaths = {}
    job = Job(world, 4, monkeypatch)
    job.run(steps=2, timeout_s=1000.0)
    assert [call[4] for call in job.calls] == [{str(rank): [rank, call[1]] for rank in range(4)} for call in job.calls]


@pytest.mark.parametrize("left", [b"", b"\x00" * 40, b"{", b"[]", b'["a", 0]', b"7", b'{"x": 7}', "é".encode("latin1")])
def test_what_lies_on_the_board_may_be_torn(left: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1)
    names = ["call", "done", "result-0", "result-1", "rank-0", "rank-1", "answer-1"]
    world.written = {name: [(0.0, left)] for name in names}
    job = Job(world, 2, monkeypatch)
    job.run(steps=3, timeout_s=100.0)
    assert all(found == {"0": [0, step], "1": [1, step]} for _, step, _, _, found in job.calls)


class Store:
    """As TCPStore: refuses long values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: bytes) -> None:
        assert len(value) < 8 << 20
        self.values[key] = value


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_messages_of_any_size_in_torchs_store(size: int) -> None:
    store = Store()
    board, message = StoreBoard(store), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert board.read("state") is None
    board.write("state", b"before")
    board.write("state", message)
    assert board.read("state") == message
    if size > 4 << 20:
        before = dict(store.values)
        board.write("state", b"y" * size)
        store.values["state"] = before["state"]  # who reads now has the entry of before, and the parts of later
        assert board.read("state") is None


def test_a_store_that_is_gone_is_an_error_of_the_checkpoint() -> None:
    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nException raised from ...")

    with pytest.raises(CheckpointError, match=r"store of torch\.distributed cannot be reached: .*reset by peer; did"):
        StoreBoard(Gone()).read("call")


def test_a_call_within_a_call_and_odd_times(tmp_path: Any) -> None:
    pipeline = line(2, world_size=1, global_rank=0, aggregate_dir=str(tmp_path))
    within = []

    def own() -> Any:
        with pytest.raises(CheckpointError, match="under way in this process already"):
            pipeline.checkpoint()
        within.append(1)
        return type(pipeline).state_dict(pipeline)

    pipeline.state_dict = own  # type: ignore[assignment, method-assign]
    assert pipeline.checkpoint() == pipeline.checkpoint()
    assert len(within) == 2
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="seconds, more than 0"):
            pipeline.checkpoint(timeout_s=seconds)

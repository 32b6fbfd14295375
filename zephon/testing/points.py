"""Named points in the processes of a pipeline at which the fault kit ends them, slows them down or makes them fail.

    with Faults() as faults, pipeline:       # around the start of the pipeline: its processes look for the kit then
        iterator = iter(pipeline)
        faults.arm("write", "KILL")          # the next worker that writes a result dies in the middle of it
        for batch in iterator: ...
        assert faults.hits()

The points are put in where a launcher or a worker starts, and only if the environment names a board: a small file that
all of them map. Without a kit nothing of this is imported, and no code is in anyone's way. A point that is not armed
costs a look at the board. What happens at a point is written down before it happens, so a test knows that it did.

Linux only, as the process runner is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import mmap
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn

from zephon.errors import ConfigError
from zephon.runners.fresh import FAULTS as VARIABLE

WORKER_POINTS: Final = (
    "starting",  # forked, and nothing else
    "setup",
    "idle",  # no task is there
    "task",  # a task was read
    "reading",  # rows of a shard
    "operator",  # half of a task's records are through an operator
    "result",  # before a result is written
    "write",  # in the middle of a frame
    "published",  # a frame is in the ring, and not announced
    "block",  # in the middle of a block of the area for large results
    "named",  # the block is complete, and its frame not yet in the ring
    "row",  # in the middle of a row of a slot
    "written",  # behind a result
)
ENGINE_POINTS: Final = ("engine gives", "engine takes", "engine writes", "engine sends")
LAUNCHER_POINTS: Final = ("launcher starts", "launcher forks", "launcher reaps")
POINTS: Final = WORKER_POINTS + ENGINE_POINTS + LAUNCHER_POINTS

SLOW_S = 0.2
_SHORT: Final = len(POINTS) * 4  # the cell behind all points: bytes that can be reserved at once, 0: all
_WAY, _SKIP, _LEFT, _SERIAL = range(4)  # the cells of a point
_EXIT_OF_A_THREAD: Final = {"x86_64": 60, "aarch64": 93}  # the number of that system call


def _by_signal(number: int) -> Callable[[], None]:
    def die() -> NoReturn:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no one wants the core of who dies on purpose
        os.kill(os.getpid(), number)
        while True:
            signal.pause()

    return die


def _end_thread() -> None:
    """The main thread is gone without a word, as where a library calls pthread_exit; it was the only one."""
    ctypes.CDLL(None).syscall(_EXIT_OF_A_THREAD[platform.machine()], 3)


def _kill_sibling() -> None:
    """Another worker of the same launcher dies, and this one goes on."""
    path = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    others = [pid for pid in map(int, path.read_text().split()[1:]) if pid != os.getpid()]  # the first is the engine
    if others:
        os.kill(random.choice(others), signal.SIGKILL)


def _fail() -> NoReturn:
    raise OSError(errno.EIO, "a fault on purpose")


def _memory() -> NoReturn:
    raise MemoryError("a fault on purpose")


WAYS: Final[dict[str, Callable[[], None]]] = {
    "KILL": _by_signal(signal.SIGKILL),
    "SEGV": _by_signal(signal.SIGSEGV),
    "BUS": _by_signal(signal.SIGBUS),
    "ABRT": _by_signal(signal.SIGABRT),
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    "exit 3": lambda: os._exit(3),
    "thread": _end_thread,
    "sibling": _kill_sibling,
    "slow": lambda: time.sleep(SLOW_S),
    "fail": _fail,
    "memory": _memory,
    "sys.exit": lambda: sys.exit(3),
    "note": lambda: None,  # only written down, with the time
}
DEATHS: Final = ("KILL", "SEGV", "BUS", "ABRT", "exit 0", "exit 1", "exit 3", "thread")


class Hit(NamedTuple):
    """Something that was done: where, how, in which process, when (`time.monotonic`, which all processes share)."""

    point: str
    way: str
    pid: int
    at_s: float


class _Board:
    """What is armed, in a file of `folder`; and what was done, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with open(folder / "board", "r+b") as file:
                self.cells = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")
        except FileNotFoundError as error:
            problem = f"{VARIABLE}={folder}: no board of the fault kit is there; unset that variable"
            raise ConfigError(problem) from error

    def hit(self, number: int) -> None:
        """A process is at a point. One process only does what is armed there."""
        at = number * 4
        way, left = self.cells[at + _WAY], self.cells[at + _LEFT]
        if not way or not left:
            return
        if skip := self.cells[at + _SKIP]:
            self.cells[at + _SKIP] = skip - 1
            return
        name = list(WAYS)[way - 1]
        text = f"{POINTS[number]}\n{name}\n{os.getpid()}\n{time.monotonic()!r}"
        try:  # whoever makes the file, has it
            with open(self.folder / f"{number}-{self.cells[at + _SERIAL]}-{left}", "x") as file:
                file.write(text)
        except FileExistsError:
            return
        self.cells[at + _LEFT] = left - 1
        if left == 1:
            self.cells[at + _WAY] = 0
        WAYS[name]()


# -- the trainer's side ------------------------------------------------------------------------------------------------


class Faults:
    """A board for the pipelines that start inside of this context."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="zephon-faults-"))
        (folder / "board").write_bytes(bytes(mmap.PAGESIZE))
        self._board = _Board(folder)

    def __enter__(self) -> Faults:
        os.environ[VARIABLE] = str(self._board.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.environ.pop(VARIABLE, None)
        self._board.cells.release()
        shutil.rmtree(self._board.folder, ignore_errors=True)

    def arm(self, point: str, way: str, times: int = 1, skip: int = 0) -> None:
        """The next `times` processes at the point, once it was passed `skip` times, do this."""
        at, cells = POINTS.index(point) * 4, self._board.cells
        cells[at + _WAY] = 0
        cells[at + _SERIAL] += 1
        cells[at + _SKIP], cells[at + _LEFT] = skip, times
        cells[at + _WAY] = 1 + list(WAYS).index(way)

    def disarm(self) -> None:
        """Nothing happens any more."""
        for number in range(len(POINTS)):
            self._board.cells[number * 4 + _WAY] = 0

    def armed(self) -> list[str]:
        """The points at which something is still to happen."""
        return [point for number, point in enumerate(POINTS) if self._board.cells[number * 4 + _WAY]]

    def hits(self) -> list[Hit]:
        """What was done so far, in the order of time."""
        found = []
        for path in self._board.folder.glob("*-*-*"):
            fields = path.read_text().split("\n")
            if len(fields) == 4 and fields[3]:  # else it is being written
                found.append(Hit(fields[0], fields[1], int(fields[2]), float(fields[3])))
        return sorted(found, key=lambda hit: hit.at_s)

    def short_shm(self, most_bytes: int) -> None:
        """From now on no reservation of more shared memory than this succeeds, of any kind, below the trainer."""
        self._board.cells[_SHORT] = most_bytes


# -- the side of launcher, engine and workers --------------------------------------------------------------------------


def install() -> None:
    """Puts the points into this process and those that it forks. Called once, where it starts."""
    board = _Board(Path(os.environ[VARIABLE]))
    _limit_memory(board.cells)

    def hit(point: str) -> None:
        board.hit(POINTS.index(point))

    launcher, process, worker = _modules("runners.launcher", "runners.process", "runners.worker")
    (engine,) = _modules("engine_process")
    server = engine._Server
    _before(launcher._Tree, "__init__", hit, "launcher starts")
    _before(launcher._Tree, "_start", hit, "launcher forks")
    _after(launcher._Tree, "_reap", hit, "launcher reaps")
    _before(process.ProcessPool, "submit", hit, "engine gives")
    _before(process, "read_report", hit, "engine takes")
    _after(server, "_write", hit, "engine writes")
    _before(server, "_send_items", hit, "engine sends")
    seed = worker._seed

    def started() -> None:  # what follows is in this worker only
        hit("starting")
        _in_worker(hit)
        seed()

    worker._seed = started


def _modules(*names: str) -> list[Any]:
    """Their private parts are what the points are about."""
    return [importlib.import_module(f"zephon.{name}") for name in names]


def _in_worker(hit: Callable[[str], None]) -> None:
    execute, worker, channel, ring = _modules("runners.execute", "runners.worker", "ipc.channel", "ipc.ring")
    (in_slots,) = _modules("ipc.in_slots")
    memory, jsonl, parquet = _modules("io.memory", "io.jsonl", "io.parquet")
    for shard in (memory.ListShard, jsonl.JsonlShard, parquet.ParquetShard):
        _before(shard, "read", hit, "reading")
    _after(worker, "read_task", hit, "task")
    _before(worker, "write_result", hit, "result")
    _after(channel.Sender, "send_waiting", hit, "written")
    setup, receive, put, fill = execute.StageWork.setup, channel.Receiver.receive, ring.Ring.put, channel._fill

    def set_up(work: Any, *more: Any) -> None:
        hit("setup")
        setup(work, *more)
        for operator in work.operators:
            _midway(operator, hit)

    def received(receiver: Any) -> Any:
        message = receive(receiver)
        if message is None:
            hit("idle")
        return message

    def put_torn(ring: Any, parts: Sequence[Any]) -> bool:
        done: bool = put(ring, _Torn(parts, lambda: hit("write")))
        if done:
            hit("published")
        return done

    def fill_torn(memory: memoryview, start: int, views: list[Any]) -> None:
        fill(memory, start, _Torn(views, lambda: hit("block"), passes=0))
        hit("named")

    def put_torn_row(place: Any, row: Any) -> None:
        place[: len(row) // 2] = row[: len(row) // 2]
        hit("row")
        place[...] = row

    in_slots._put = put_torn_row
    execute.StageWork.setup, channel.Receiver.receive = set_up, received
    ring.Ring.put, channel._fill = put_torn, fill_torn


def _before(owner: Any, name: str, hit: Callable[[str], None], point: str) -> None:
    real = getattr(owner, name)

    def reached(*args: Any, **settings: Any) -> Any:
        hit(point)
        return real(*args, **settings)

    setattr(owner, name, reached)


def _after(owner: Any, name: str, hit: Callable[[str], None], point: str) -> None:
    real = getattr(owner, name)

    def reached(*args: Any, **settings: Any) -> Any:
        made = real(*args, **settings)
        hit(point)
        return made

    setattr(owner, name, reached)


class _Torn(list[Any]):
    """Parts of a message; behind half of the bytes of the middle one, something may happen to who copies them."""

    def __init__(self, parts: Sequence[Any], reached: Callable[[], None], passes: int = 1) -> None:
        super().__init__(parts)
        self._reached, self._passes = reached, passes  # whole passes come first: a ring counts the bytes

    def __iter__(self) -> Iterator[Any]:
        self._passes -= 1
        if self._passes >= 0:
            yield from super().__iter__()
            return
        for number, part in enumerate(super().__iter__()):
            view = memoryview(part).cast("B")
            if number == len(self) // 2:
                yield view[: len(view) // 2]
                self._reached()
                yield view[len(view) // 2 :]
            else:
                yield view


class _Midway(list[Any]):
    """Records of a task; in front of the middle one, something may happen to who goes through them."""

    reached: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for number, record in enumerate(super().__iter__()):
            if number == len(self) // 2:
                self.reached()
            yield record


def _midway(operator: Any, hit: Callable[[str], None]) -> None:
    run = operator.run

    def reached(rows: Any, *more: Any) -> None:
        rows.records = records = _Midway(rows.records)
        records.reached = lambda: hit("operator")
        run(rows, *more)
        if rows.records is records:
            records.reached = lambda: None

    operator.run = reached


def _limit_memory(cells: memoryview) -> None:
    """Little shared memory of any kind: larger reservations fail as they do on a full file system."""
    reserve = os.posix_fallocate

    def limited(fd: int, start: int, size: int) -> None:
        most = cells[_SHORT]
        if most and size > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, start, size)

    with contextlib.suppress(AttributeError):
        os.posix_fallocate = limited

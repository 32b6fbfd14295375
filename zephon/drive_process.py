"""The process runner, from the trainer's side: batches arrive in slots, in the tail's order."""

from __future__ import annotations

import array
import errno
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from zephon.arena import SlotView, affordable_slots, most_slots
from zephon.batch import Batch
from zephon.engine import Job, Ready, TailItem
from zephon.errors import Closed, WorkerError
from zephon.exchange import MOST_DESCRIPTORS, read_error
from zephon.flow.batcher import End, Failed
from zephon.flow.progress import LaneState
from zephon.flow.tail import Tail
from zephon.ipc.area import Lease
from zephon.ipc.columns import Blob
from zephon.ipc.segment import Segment
from zephon.limits import limit_error
from zephon.lineage import Origins
from zephon.record import Origin
from zephon.runners import threads
from zephon.runners.base import check_process
from zephon.runners.engine_watch import LauncherWatch
from zephon.runners.execute import StageWork
from zephon.runners.orders import Orders
from zephon.runners.spawn import Launcher

if TYPE_CHECKING:
    from zephon.drive import Pins

log = logging.getLogger("zephon")

SPARE_SLOTS = 3  # one that the trainer works on, one on the way, one that is being written
METRICS_TIMEOUT_S = 0.3
LOOK_S = 1  # between two looks at a launcher of which nothing is heard
MOST_MESSAGE_BYTES = 1 << 20
# As plain numbers: operators of the flags that `socket` has are Python code.
_RECEIVE_FLAGS, _TRUNCATED = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)), int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES = socket.CMSG_LEN(MOST_DESCRIPTORS * array.array("i").itemsize)
_decode = msgspec.msgpack.Decoder().decode
_read_state = msgspec.msgpack.Decoder(LaneState).decode
_read_states = msgspec.msgpack.Decoder(list[LaneState]).decode
_encode = msgspec.msgpack.Encoder().encode


class ProcessDriver:
    """Owns the launcher and the trainer's view of the slots."""

    pins: Pins | None = None

    def __init__(self, job: Job, launcher: Launcher) -> None:
        self._job = job
        self.tail: Tail[TailItem] = Tail({lane: state.turns for lane, state in job.lanes.items()})
        self._pid = os.getpid()
        self._held = {lane: state.held for lane, state in job.lanes.items()}
        self._slots: dict[int, Segment] = {}
        self._slot_bytes = 1  # of the largest slot
        self._leases: dict[int, Lease] = {}
        self._freed: deque[Lease] = deque()
        self._untaken: dict[int, int] = {}  # by slot, batches in the tail, which the user does not hold yet
        self._least_slots = SPARE_SLOTS + job.prefetch_batches + job.read_ahead
        self._closed = False
        self._receiving = threading.Lock()
        self._buffer = memoryview(bytearray(MOST_MESSAGE_BYTES))  # one for all: to get so much afresh takes a while
        self._error: Exception | None = None
        self._metrics: dict[str, dict[str, float]] = {"seconds": {}, "totals": {}, "deaths": {}}
        works = [
            StageWork(stage, job.datasets, job.source.seed, threads.INTERRUPTS, job.max_record_bytes)
            for stage in job.plan.stages
        ]
        workers = [stage.parallelism for stage in job.plan.stages]
        self._slot_limit = affordable_slots(self._least_slots, sum(workers))
        self._most_slots = most_slots(self._least_slots, self._slot_bytes, self._slot_limit)
        job = msgspec.structs.replace(job, slots=self._least_slots, most_slots=self._slot_limit)
        self._launcher = launcher
        launcher.send(Orders(works, workers, job.ring_bytes, job))
        self._socket = self._launcher.engine
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LOOK_S, 0))

    def wait(self) -> None:
        check_process(self._pid)
        if self.tail.peek() is not None:
            return
        with self._receiving:
            while self.tail.peek() is None:
                if self._closed:
                    raise Closed("the pipeline was closed while a batch was awaited")
                if self._error is not None:
                    raise self._error
                self._receive()

    def poll(self) -> None:
        check_process(self._pid)
        if self.tail.peek() is not None:
            return
        poll = select.poll()
        with self._receiving:
            if self._closed or self._error is not None:
                return
            poll.register(self._socket, select.POLLIN)
            self._send_freed()  # the engine may have no slot left
            try:
                while self.tail.peek() is None and poll.poll(0):
                    self._receive()
            except Exception as error:  # for whoever waits for a batch
                self._error = error

    def took(self, item: TailItem) -> TailItem:
        """A slot that comes back is what makes room. A trainer that keeps many batches gets copies of further ones."""
        if isinstance(item, Ready):
            self._untaken[item.slot] -= 1
            if not self._untaken[item.slot]:
                del self._untaken[item.slot]
            if len(self._freed) * 4 >= self._most_slots:
                self._send_freed()
            ahead = self._job.read_ahead
            if len(self._leases) - len(self._freed) - len(self._untaken) > ahead + (self._most_slots - ahead) // 2:
                return Ready(item.batch.copy(), item.state)
        return item

    def _receive(self) -> None:
        """Takes one message of the engine."""
        if len(self._leases) * 2 >= self._most_slots:  # else it has slots enough, and need not wake up for these
            self._send_freed()
        message, fds = self._next_message()
        kind, what = message[:1], message[1:]
        if kind == b"I":
            for item in _decode(what):
                self._receive_item(item, fds)
        elif kind == b"M":
            self._metrics = _decode(what)
        elif kind == b"W":
            log.warning("%s", _decode(what))
        elif kind == b"X":
            raise read_error(_decode(what)[0], fds)
        elif self._closed:
            raise Closed("the pipeline was closed while a batch was awaited")
        else:
            raise WorkerError(self._post_mortem())

    def _next_message(self) -> tuple[bytes, list[int]]:
        """(message, descriptors); an empty one when the connection is over."""
        left = 2  # it died with our words unread: that is said once, and its own words come next
        watch: LauncherWatch | None = None
        while left:
            try:
                size, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], _ANCILLARY_BYTES, _RECEIVE_FLAGS)
            except OSError as error:
                if _is_of_a_handler(error):
                    raise
                if isinstance(error, ConnectionResetError):
                    left -= 1
                elif isinstance(error, BlockingIOError):  # nothing came for a while
                    left -= self._launcher.is_gone()  # a child of user code may hold the other end open
                    watch = watch or LauncherWatch(self._job.stall_warn_s, self._job.stall_timeout_s, LOOK_S)
                    watch.look(self._launcher.state(), log.warning)
                else:  # closed by another thread
                    break
            else:
                fds = _descriptors(ancillary) if ancillary else []
                if flags & _TRUNCATED:
                    raise _no_descriptor_left(fds)
                return bytes(self._buffer[:size]), fds
        return b"", []

    def _post_mortem(self) -> str:
        """What to say when the engine is gone without a word."""
        self._launcher.close()
        status = self._launcher.exit_status()
        how = f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
        return (
            f"the engine process or the launcher died (launcher: {how}); was it killed, or out of memory? "
            "The state of the last batch is good: load it to go on"
        )

    def _receive_item(self, item: list[Any], fds: list[int]) -> None:
        kind, lane, *what = item
        if kind == "B":
            self._receive_batches(lane, what, fds)
        elif kind == "E":
            self.tail.put(lane, End(_read_state(what[0])))
        else:
            self.tail.put(lane, Failed(read_error(what[0], fds)))

    def _receive_batches(self, lanes: list[int], what: list[Any], fds: list[int]) -> None:
        """Batches that lie in one slot, end to end. It is free when nobody holds anything of any of them."""
        number, new_size, retired, place, size, turns, samples, states = what
        for old in retired:
            self._close_slot(self._slots.pop(old))
        if new_size:
            self._slots[number] = Segment(fds.pop(0), new_size)
            if self.pins is not None:
                self.pins.pin(self._slots[number].map)
            self._slot_bytes = max(self._slot_bytes, new_size)
            self._most_slots = most_slots(self._least_slots, self._slot_bytes, self._slot_limit)
        view = SlotView(self._slots[number].map, size)
        self._leases[number] = view.lease(number, self._freed)
        self._untaken[number] = len(lanes)
        described, origins, held = view.description(*place)
        new_held = {i: tuple(raws) for i, raws in held}
        fields, found, job = view.fields(described), view.origins(origins), self._job
        at = 0
        rows = zip(lanes, turns, samples, _read_states(states), strict=True)
        for i, (lane, turn, count, state) in enumerate(rows):
            self._held[lane] = new_held.get(i, self._held[lane])
            if self._held[lane]:
                state = msgspec.structs.replace(state, held=self._held[lane])
            own = fields if len(lanes) == 1 else {name: _rows(v, at, at + count) for name, v in fields.items()}
            find = partial(_samples, found, at, at + count)
            batch = Batch(own, lane, turn // job.cycles_per_step, job.pass_index, count, find, job.locate)
            self.tail.put(lane, Ready(batch, state, number))
            at += count

    def _close_slot(self, slot: Segment) -> None:
        if self.pins is not None:
            self.pins.unpin(slot.map)
        slot.close()

    def _send_freed(self) -> None:
        """Gives slots back, several at a time."""
        freed: list[int] = []
        while self._freed:
            freed.append(self._freed.popleft().number)
            del self._leases[freed[-1]]
        if freed:
            try:
                self._socket.send(b"f" + _encode(freed))
            except OSError as error:  # else the engine is gone; its last words say why
                if _is_of_a_handler(error):
                    raise

    def read_metrics(self) -> dict[str, dict[str, float]]:
        """Asked of the engine, while it runs."""
        if self._closed or self._error or os.getpid() != self._pid or self._receiving.locked():
            return self._metrics
        before, poll = self._metrics, select.poll()
        with self._receiving:  # a signal cannot come between this lock and its release
            try:
                poll.register(self._socket, select.POLLIN)
                self._socket.send(b"m")
                while self._metrics is before and poll.poll(METRICS_TIMEOUT_S * 1000):
                    self._receive()
            except Exception as error:  # what ends the engine is for whoever waits for a batch
                self._error = error
            except BaseException as error:
                name = type(error).__name__
                self._error = Closed(f"{name} stopped metrics(), and a batch may be lost; to go on, load the state")
                raise
        return self._metrics

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self._launcher.close()
        finally:  # also where a second Ctrl-C ends the wait
            for buffer in self.tail.buffers.values():  # what was not delivered holds slots
                buffer.clear()
            for slot in self._slots.values():
                self._close_slot(slot)
            self._slots.clear()  # a mapping of which the user holds a batch goes with that batch


def _is_of_a_handler(error: OSError) -> bool:
    """Whether a signal handler of the user's raised it, and not the system call that the caller made itself.

    A TimeoutError of an alarm is an OSError too, and may come at any moment.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Those that came with a message."""
    found = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(raw[: len(raw) - len(raw) % found.itemsize])
    return found.tolist()


def _no_descriptor_left(received: list[int]) -> Exception:
    """The error where a slot's descriptor could not come along. What came of others is closed."""
    for fd in received:
        os.close(fd)
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return limit_error(error, "the trainer") or error


def _rows(field: Any, start: int, stop: int) -> Any:
    """Some rows of a field that several batches share."""
    return field.view(start, stop) if isinstance(field, Blob) else field[start:stop]


def _samples(found: Callable[[], Origins], start: int, stop: int) -> list[tuple[Origin, ...]]:
    return found().cut(start, stop).samples()

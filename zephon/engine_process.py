"""The engine in a process of its own: the flow on an event loop, batches into slots, in the tail's order.

Messages to the trainer (a socket that keeps their bounds): `I` the next items of the tail, each one or more batches in
a slot ("B"; the descriptor of a new slot comes along), a lane's end ("E") or the error that ends a lane ("F"); `X` the
error that ends everything; `M` metrics; `W` a warning for the user. From the trainer: `f` slots are free, `m` metrics
are wanted. A slot and a wake-up cost more than copying a small batch, so small batches that are ready together share a
slot, and all that is ready travels in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from zephon.arena import Arena, Slot, write_description, write_fields, write_origins
from zephon.engine import Engine, Job, TailItem
from zephon.errors import InternalError, ZephonError, describe, set_place
from zephon.exchange import MOST_DESCRIPTORS, write_error
from zephon.flow.batcher import Cut, End, Failed
from zephon.ipc import stray
from zephon.ipc.codec import send_whole
from zephon.limits import limit_error
from zephon.lineage import origins_in
from zephon.ops.batch import collate, stacking_of
from zephon.places import SlotPlaces
from zephon.runners import stacks, threads
from zephon.runners.deaths import Survived
from zephon.runners.execute import StageWork
from zephon.runners.guard import Guard
from zephon.runners.heap import collect_rarely
from zephon.runners.process import ProcessPool, Wiring
from zephon.runners.rings import Station
from zephon.runners.whereabouts import BATCH, FLOW, STOPPED, Whereabouts

try:  # here, and not in `serve`: the launcher imports this module while it waits
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

MOST_MESSAGE_BYTES = 32_768  # of small items in one message; the socket takes about 200 KB
SHARED_BYTES = 1 << 17  # of several batches in one slot
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def serve(
    job: Job, wirings: list[list[Wiring]], station: Station, trainer: socket.socket, launcher: socket.socket
) -> None:
    """The engine process's life, after the fork. `station` always tells what it is on; its stack goes there too."""
    stacks.listen(station.stack_file)
    send_whole()
    set_place("the engine")
    where = Whereabouts(station.cells)
    collect_rarely()
    launcher.settimeout(None)  # socket.setdefaulttimeout is the user's
    try:
        server = _Server(job, wirings, where, trainer, launcher)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(server.run())
    except BaseException as error:
        stray.leave()
        known = error if isinstance(error, ZephonError) else limit_error(error, "the engine")
        known = known or InternalError(f"in the engine: {describe(error)}")
        known.__cause__ = error if known is not error else error.__cause__
        with contextlib.suppress(OSError):  # the trainer may be gone
            trainer.setblocking(True)
            fds: list[int] = []
            message = b"X" + _encode(write_error(known, fds))
            socket.send_fds(trainer, [message], fds)


class _Server:
    def __init__(
        self,
        job: Job,
        wirings: list[list[Wiring]],
        where: Whereabouts,
        trainer: socket.socket,
        launcher: socket.socket,
    ) -> None:
        self._trainer, self._launcher = trainer, launcher
        self._arena = Arena(job.slots, job.most_slots)
        self._formatters = job.plan.formatters
        self._pools: list[ProcessPool] = []
        self._guards: list[Guard] = []
        self._survived = Survived()
        self._woken = asyncio.Event()
        self._over = False
        self._error: BaseException | None = None
        self._credits: set[int] = set()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._sent_held = {lane: state.held for lane, state in job.lanes.items()}
        self._sample_bytes = float(SHARED_BYTES)  # of the batch before; at first nothing is known to be small
        stages = iter(wirings)
        plan = job.plan
        direct = not plan.formatters and not plan.accumulators
        self._places = SlotPlaces(self._arena, plan.batch.size, job.lanes) if direct else None

        def make_pool(work: StageWork, workers: int, notify: Callable[[], None]) -> ProcessPool:
            stage = len(self._pools)

            def ask(index: int, number: int = 0) -> None:
                with contextlib.suppress(ConnectionError):  # it is dead, as its end of the socket is about to tell
                    launcher.send(_encode([stage, index, number]))

            placer = self._places if stage == len(wirings) - 1 else None
            self._pools.append(ProcessPool(work, next(stages), ask, job.max_worker_retries, placer))
            self._guards.append(Guard(self._pools[-1], job.stall_warn_s, job.stall_timeout_s, ask, self._warn))
            return self._pools[-1]

        self._engine = Engine(job, make_pool, threads.INTERRUPTS, self._woken.set, build=False, where=where)
        self._where = where

    async def run(self) -> None:
        """Pumps, sends what is ready, and sleeps until something comes."""
        loop = asyncio.get_running_loop()
        self._trainer.setblocking(False)
        loop.add_reader(self._trainer.fileno(), self._called, self._from_trainer)
        loop.add_reader(self._launcher.fileno(), self._called, self._from_launcher)
        for pool in self._pools:
            for fd, note in pool.wakes().items():
                loop.add_reader(fd, self._called, note)
        self._watch()
        while not self._over:
            if self._error is not None:
                raise self._error
            self._woken.clear()
            try:
                moved = self._engine.pump()
                sent = self._send_ready()
            finally:
                stray.leave()  # before the loop is used, or closed: a forked child has the same one
            if moved or sent:
                await asyncio.sleep(0)  # lets the readers run
            else:
                self._watch_credits(loop)
                self._where.leave()
                await self._woken.wait()

    def _watch_credits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before a sleep: wakes up for room in a task ring, where one is full."""
        wanted = {fd: note for pool in self._pools for fd, note in pool.credits().items()}
        for fd in self._credits - wanted.keys():
            loop.remove_reader(fd)
        for fd in wanted.keys() - self._credits:
            loop.add_reader(fd, self._called, wanted[fd])
        self._credits = set(wanted)

    def _called(self, handle: Callable[[], Any]) -> None:
        """A descriptor is readable. What goes wrong here ends the engine: a loop would only log it."""
        try:
            handle()
        except BaseException as error:
            self._error = error
        self._woken.set()

    def _watch(self) -> None:
        """Looks at the workers, now and then."""
        loop = asyncio.get_running_loop()
        for guard in self._guards:
            guard.look(loop.time())
        loop.call_later(min(guard.period_s for guard in self._guards), self._called, self._watch)

    def _warn(self, text: str) -> None:
        self._send(b"W" + _encode(text), [])

    def _from_trainer(self) -> None:
        """Slots that came back; the end of everything when the trainer closed."""
        try:
            while message := self._trainer.recv(1 << 12):
                if message[:1] == b"f":
                    for number in _decode(message[1:]):
                        self._arena.release(number)
                else:
                    self._send(b"M" + _encode(self._engine.read_metrics()), [])
            self._end()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._end()

    def _end(self) -> None:
        """The trainer is gone. The launcher ends the tree, which it cannot do while it is stopped."""
        self._over = True
        os.kill(os.getppid(), signal.SIGCONT)

    def _from_launcher(self) -> None:
        """Deaths of workers; and who is stopped, or goes on."""
        message = b""
        with contextlib.suppress(ConnectionError):  # it died with our words unread
            message = self._launcher.recv(1 << 16)
        if not message:
            self._over = True  # the trainer finds out why
            return
        stage, index, status = msgspec.msgpack.decode(message)
        if status < 0:
            self._pools[stage].set_stopped(index, status == STOPPED)
            return
        cause, who = self._pools[stage].died(index, status)
        if (line := self._survived.tell(cause, who, time.monotonic())) is not None:
            self._warn(line)

    def _send_ready(self) -> bool:
        """Sends the next items of the tail, while there are slots for them."""
        tail, sent = self._engine.tail, False
        items: list[bytes] = []
        fds: list[int] = []
        while not self._unsent and tail.turn is not None and (item := tail.peek()) is not None:
            if isinstance(item, Cut) and not self._arena.has_slot and self._home([item]) is None:
                break
            items.append(self._encoded(item, fds))
            sent = True
            if len(fds) == MOST_DESCRIPTORS or sum(map(len, items)) > MOST_MESSAGE_BYTES:
                self._send_items(items, fds)
        if items:
            self._send_items(items, fds)
        return sent

    def _encoded(self, item: TailItem, fds: list[int]) -> bytes:
        """Takes the next item or batches from the tail; returns the message. A new slot's descriptor goes to `fds`."""
        tail = self._engine.tail
        if isinstance(item, End):
            return _encode(["E", tail.finish(), _encode(item.state)])
        if isinstance(item, Cut):
            taken = self._take_batches()
            lane, first = taken[0]
            try:
                return self._encoded_batches(taken, fds)
            except Exception as error:  # the iteration ends at this batch, so those behind it are not missed
                problem = error
            # here, so that it is not the context of what is raised on the search for its cause
            item = Failed(self._engine.batch_error(problem, lane, first))
            self._engine.stages[-1].stop(lane)
        else:
            lane, _ = tail.pop()
        assert isinstance(item, Failed)
        return _encode(["F", lane, *write_error(item.error, fds)])

    def _take_batches(self) -> list[tuple[int, Cut]]:
        """The next batch, and those behind it that can share its slot: made by the same copying, and small."""
        tail = self._engine.tail
        lane, first = tail.pop()
        assert isinstance(first, Cut)
        taken, num_samples = [(lane, first)], first.num_samples
        # What a formatter makes of several batches at once is not what it makes of each: theirs are never shared.
        stacking = None if self._formatters else stacking_of(first.segments)
        while stacking is not None and isinstance(item := tail.peek(), Cut):
            num_samples += item.num_samples
            if num_samples * self._sample_bytes > SHARED_BYTES or stacking_of(item.segments) != stacking:
                break
            taken.append((tail.pop()[0], item))
        return taken

    def _encoded_batches(self, taken: list[tuple[int, Cut]], fds: list[int]) -> bytes:
        began, cuts = time.perf_counter(), [cut for _, cut in taken]
        self._where.call(BATCH, taken[0][0])
        held = self._new_held(taken)
        slot, place = self._arena.write(lambda slot: self._write(slot, cuts, held), self._home(cuts))
        self._sent_held.update({taken[i][0]: cuts[i].state.held for i, _ in held})
        samples = [cut.num_samples for cut in cuts]
        self._sample_bytes = slot.used / sum(samples)
        for num_samples in samples:
            self._engine.count_batch(num_samples)
        new_size = 0
        if not slot.announced:
            slot.announced, new_size = True, slot.segment.size
            fds.append(slot.segment.fd)
        what = [slot.number, new_size, self._arena.take_retired(), place, slot.used]
        turns = [cut.turn for cut in cuts]
        states = _encode([msgspec.structs.replace(cut.state, held=()) if cut.state.held else cut.state for cut in cuts])
        self._engine.metrics.seconds["collate"] += time.perf_counter() - began
        self._where.call(FLOW)
        return _encode(["B", [lane for lane, _ in taken], *what, turns, samples, states])

    def _home(self, cuts: list[Cut]) -> Slot | None:
        """The slot in which a batch lies already, where its workers wrote it there."""
        return self._places.home(cuts[0]) if self._places is not None and len(cuts) == 1 else None

    def _new_held(self, taken: list[tuple[int, Cut]]) -> list[tuple[int, tuple[bytes, ...]]]:
        """(number of the batch, what its state holds) where that is not what the trainer has of the lane."""
        last, found = dict[int, Any](), []
        for i, (lane, cut) in enumerate(taken):
            if cut.state.held is not last.get(lane, self._sent_held.get(lane, ())):
                found.append((i, cut.state.held))
            last[lane] = cut.state.held
        return found

    def _send_items(self, items: list[bytes], fds: list[int]) -> None:
        """One message of several items, which are then forgotten."""
        self._send(b"I" + _encode([msgspec.Raw(item) for item in items]), list(fds))
        items.clear()
        fds.clear()

    def _send(self, message: bytes, fds: list[int]) -> None:
        stray.leave()
        self._unsent.append((message, fds))
        self._flush()

    def _flush(self) -> None:
        """Sends what the socket takes now. A trainer that does not read fills it; the rest goes when it has room."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                message, fds = self._unsent[0]
                if fds:
                    socket.send_fds(self._trainer, [message], fds)
                else:
                    self._trainer.send(message)
                self._unsent.popleft()
            loop.remove_writer(self._trainer.fileno())
        except BlockingIOError:
            loop.add_writer(self._trainer.fileno(), self._called, self._flush)

    def _write(self, slot: Slot, cuts: list[Cut], held: list[Any]) -> list[int]:
        """Puts batches into a slot, end to end; returns where in it their fields and origins are described.

        held: what accumulators held at the places of some, which may be too much for a message.
        """
        segments = [segment for cut in cuts for segment in cut.segments]
        fields = collate(segments, slot.empty, self._formatters)
        described = write_fields(slot, fields)
        origins = write_origins(slot, origins_in(segments, slot.empty))
        place = write_description(slot, [described, origins, held])
        if self._places is not None and len(cuts) == 1:
            self._places.learn(fields, cuts[0].num_samples, slot.used)
        return place

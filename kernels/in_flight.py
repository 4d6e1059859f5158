"""Transfers in flight on a device engine, and the buffers and streams that they use.

An `InFlight` does not refer to its engine. Transfers refer to it, so it outlives a dropped engine
until the last copy has finished. Staging memory, index buffers and the pages themselves must not be
reused before that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightcache.shm.errors import ConfigError, Detached, TransferFailed, WaitTimeout
from lightcache.shm.waiting import Condition

# ---- Staging ring, index buffers, events

_FIRST_WORDS = 1 << 13  # 64 KiB: 1 GiB in pages of 8 MiB needs half of it


class Ring:
    """Slots of device memory that pages pass through, in order."""

    def __init__(self, device: Any, slots: int, slot_bytes: int) -> None:
        """Allocates immediately."""
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory: torch.Tensor = device.empty(slots * slot_bytes)
        self.address = int(self.memory.data_ptr())
        self.ready = [device.event() for _ in range(slots)]
        """Recorded when a slot has been filled."""
        self.free = [device.event() for _ in range(slots)]
        """Recorded when a slot has been emptied. Waiting before the first time waits for nothing:
        that is what an event means that was never recorded."""
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next slots, in turn. Wait for `free` before filling one."""
        slots = (self._next + np.arange(count)) % self.slots
        self._next = (self._next + count) % self.slots
        return slots


class IndexBlock:
    """Buffers for the jobs and slots of one transfer: one in pinned memory, one on the device."""

    def __init__(self, device: Any, words: int) -> None:
        """Allocates immediately."""
        self.words = words
        self.host, self.device = device.words(words)
        self.view: npt.NDArray[np.int64] = self.host.numpy()
        self.slots = self.view.view(np.int32)
        self.host_address = int(self.host.data_ptr())
        self.device_address = int(self.device.data_ptr())


class IndexBlocks:
    """Free index blocks, by size. Steady state allocates nothing."""

    def __init__(self, device: Any, copier: Any) -> None:
        """Nothing is allocated yet."""
        self._device = device
        self._copier = copier
        self._spare: dict[int, list[IndexBlock]] = {}
        self.made = 0
        """Blocks there are in all."""

    def take(self, words: int) -> IndexBlock:
        """A block of at least `words` words."""
        size = max(_FIRST_WORDS, 1 << (words - 1).bit_length())
        spare = self._spare.setdefault(size, [])
        if spare:
            return spare.pop()
        block = IndexBlock(self._device, size)
        self._copier.add(block.host, block.device)
        self.made += 1
        return block

    def give(self, block: IndexBlock) -> None:
        """Give a block back. No kernel may read it any more."""
        self._spare.setdefault(block.words, []).append(block)

    def clear(self) -> None:
        """Drop the free blocks."""
        self._spare.clear()


class Events:
    """Free events."""

    def __init__(self, device: Any) -> None:
        """No events yet."""
        self._device = device
        self._spare: list[Any] = []
        self.made = 0
        """Events there are in all."""

    def recorded(self, stream: Any) -> Any:
        """An event, recorded on a stream."""
        if not self._spare:
            self._spare.append(self._device.event())
            self.made += 1
        event = self._spare[-1]
        event.record(stream)  # stays spare if this fails
        return self._spare.pop()

    def give(self, events: list[Any]) -> None:
        """Give back events that are not waited for any more."""
        self._spare += events


# ---- The streams of one direction


class Lane:
    """One direction: its streams, and its ring once something is staged."""

    def __init__(self, device: Any, to_page: bool) -> None:
        """Nothing is allocated yet.

        Args:
            to_page: whether it offloads.
        """
        self.to_page = to_page
        self.kernel, self.copy = device.stream(), device.stream()
        # The index of a load travels with its first pages: on another stream it would wait for the
        # pages of earlier transfers.
        self.upload = device.stream() if to_page else self.copy
        self.kernel_handle = int(self.kernel.cuda_stream)
        self.directs = deque((device.stream(), device.stream()))
        """Two: while the last programs of one kernel wait for the bus, the next one begins."""
        self.ring: Ring | None = None
        self.transfers: deque[DeviceTransfer] = deque()
        """Transfers that may be in flight, oldest first."""

    def next_direct(self) -> Any:
        """The stream for the next direct transfer."""
        self.directs.rotate()
        return self.directs[0]

    @property
    def last(self) -> Any:
        """The stream that ends a staged transfer."""
        return self.copy if self.to_page else self.kernel


# ---- The transfer of a device engine

_SPIN = 300e-6  # seconds of polling before sleeping: small transfers have finished by then
_NAP = 100e-6


class DeviceTransfer:
    """See `lightcache.kernels.moves.Transfer`. Made by `TransferEngine`."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_complete",
        "_enqueuing",
        "_error",
        "_finished",
        "_in_flight",
        "_marks",
        "_paced",
        "_uses",
        "_windows",
        "nbytes",
    )

    def __init__(
        self, in_flight: InFlight, nbytes: int, when_done: Callable[[bool], None] | None = None
    ) -> None:
        """Nothing is enqueued yet: a transfer that ends now has failed."""
        self.nbytes = nbytes
        self._in_flight = in_flight
        self._enqueuing = False
        self._marks: list[Any] = []
        self._windows: list[tuple[frozenset[int], list[Any]]] = []
        self._paced: Condition | None = None
        self._error: BaseException | None = None
        self._finished = False
        self._uses: tuple[IndexBlock | None, object] = (None, None)
        self._complete = False
        self._calls = [] if when_done is None else [when_done]

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None: it has not failed."""
        return self._error

    # ---- for the engine, which holds its lock

    def uses(self, block: IndexBlock | None, other: object) -> None:
        """Keep these until the transfer has finished."""
        self._uses = block, other

    def mark(self, event: Any) -> None:
        """Add an event recorded after copies of this transfer."""
        self._marks.append(event)

    def mark_layers(self, events: list[Any], layers: Sequence[int]) -> None:
        """Note the events that follow all copies of some layers."""
        self._windows.append((frozenset(layers), events))
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Mark it failed: it finishes once all that was enqueued has finished."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._paced is not None:
            with self._paced:
                self._paced.notify_all()

    def begin(self, *, later: bool = False) -> None:
        """From now on copies may be enqueued that no event covers yet.

        Args:
            later: another thread enqueues them, and callers wait for it.
        """
        if later:
            self._paced = Condition()
        self._enqueuing = True

    def enqueued(self) -> None:
        """Enqueuing has ended, and events cover all that was enqueued."""
        self._complete = True
        self._enqueuing = False
        self._wake()

    def settle(self) -> bool:
        """Whether it has finished; gives its buffers back. Raises nothing and makes no calls."""
        if self._finished:
            return True
        if self._enqueuing:
            return False
        try:
            if not all(mark.query() for mark in self._marks):
                return False
        except Exception as error:
            if not self._in_flight.device.lost(error):
                return False
            self.fail(error)  # and the copies are lost as well
        self._finished = True
        marks, self._marks, self._windows = self._marks, [], []
        uses, self._uses = self._uses, (None, None)
        self._in_flight.settled(marks, uses[0])
        return True

    def tells(self, call: Callable[[bool], None]) -> bool:
        """Whether this call is pending."""
        return call in self._calls

    @property
    def waited_for(self) -> bool:
        """Whether any call is pending."""
        return bool(self._calls)

    def run_call(self) -> None:
        """Make the `when_done` call if it is pending. One thread makes it, once."""
        try:
            call = self._calls.pop()
        except IndexError:  # there is none, or another thread was faster
            return
        call(self._error is None and self._complete)

    # ---- for callers

    def done(self) -> bool:
        """See `Transfer.done`."""
        with self._in_flight.lock:
            finished = self.settle()
        if finished:
            self.run_call()
            self._raise()
        return finished

    def _raise(self) -> None:
        if self._error is not None:
            raise TransferFailed(
                f"a transfer of {self.nbytes} bytes failed: {self._error!r}; what it should have "
                "written does not count: abandon those pages, or compute those tokens"
            ) from self._error

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`. Polls for 0.3 ms, then sleeps."""
        start = time.monotonic()
        while not self.done():
            passed = time.monotonic() - start
            if timeout is not None and passed >= timeout:
                raise WaitTimeout(
                    f"a transfer of {self.nbytes} bytes is in flight after {timeout} s; wait "
                    "again: its pages and slots are in use until it has finished"
                )
            if passed < _SPIN:
                continue
            if timeout is None:
                self.sleep()
            else:
                time.sleep(min(_NAP, max(0.0, timeout - passed)))

    def sleep(self) -> None:
        """Block until it has finished; only `settle` is certain.

        If another thread settles it meanwhile and its events are reused, this waits longer than
        needed, once.
        """
        self._wait_enqueued(lambda: not self._enqueuing, None)
        with self._in_flight.lock:
            marks = list(self._marks)
        try:
            for mark in marks:
                mark.synchronize()
        except Exception:  # `settle` finds out whether the device is lost
            time.sleep(_NAP)

    def wait_on(self, stream: Any = None) -> None:
        """See `Transfer.wait_on`. Blocks this thread only while a rate limit holds copies back."""
        self._wait_enqueued(self._all_or_none, None)
        self._wait_events(lambda: self._marks, stream)

    def wait_layer(self, layer: int, stream: Any = None, *, timeout: float | None = None) -> None:
        """See `Transfer.wait_layer`. Blocks this thread only while a rate limit holds copies of the
        layer back.

        Raises:
            ConfigError: a layer in none of its windows, while it is in flight.
            WaitTimeout: its copies are held back after `timeout` seconds.
            TransferFailed: see `Transfer.wait_layer`.
        """

        def marked() -> bool:
            return self._all_or_none() or any(layer in layers for layers, _ in self._windows)

        self._wait_enqueued(marked, timeout)
        self._wait_events(lambda: self._window(layer), stream)

    def _all_or_none(self) -> bool:
        """Whether all is enqueued, or no more of it will be."""
        return self._error is not None or not self._enqueuing

    def _wait_enqueued(self, far_enough: Callable[[], bool], timeout: float | None) -> None:
        """Block while a rate limit holds copies back."""
        if self._paced is None or far_enough():
            return
        with self._paced:
            if not self._paced.wait_for(far_enough, timeout):
                raise WaitTimeout(
                    f"a rate limit holds copies back after {timeout} s; wait again, or allow more "
                    "bytes a second"
                )

    def _window(self, layer: int) -> list[Any]:
        if self._finished or not self._windows:
            return self._marks
        for layers, events in self._windows:
            if layer in layers:
                return events
        known = sorted(set().union(*(layers for layers, _ in self._windows)))
        raise ConfigError(f"layer {layer!r} is not part of this transfer, its layers are {known}")

    def _wait_events(self, events: Callable[[], list[Any]], stream: Any) -> None:
        with self._in_flight.lock:
            if self._error is not None:
                self._raise()
            waited_for = events()
            if waited_for:
                stream = self._in_flight.device.current() if stream is None else stream
                for event in waited_for:
                    stream.wait_event(event)

    def __repr__(self) -> str:
        state = "failed" if self._error else "finished" if self._finished else "in flight"
        return f"<Transfer {self.nbytes} bytes, {state}>"


# ---- The rate limit


class Pacer:
    """Runs what it is given in order, so that the bytes keep to a rate."""

    def __init__(self, rate: float) -> None:
        """Starts its thread.

        Args:
            rate: bytes a second.
        """
        self._rate = rate
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lightcache-pacer", daemon=True)
        self._thread.start()

    def put(self, run: Callable[[], None], nbytes: int) -> None:
        """Queue a call: it runs once the time for the bytes put before has passed. `run` must not
        raise."""
        self._queue.put((run, nbytes))

    def _work(self) -> None:
        due = time.monotonic()
        while (item := self._queue.get()) is not None:
            run, nbytes = item
            now = time.monotonic()
            if due > now and nbytes:
                time.sleep(due - now)
            run()
            due = max(due, now) + nbytes / self._rate
            del item, run  # they refer to an engine, which must not be kept while this waits

    def close(self) -> None:
        """Run what is left, at its rate, and end. From its own thread: end after the current
        item."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


# ---- All state of one engine


class InFlight:
    """Transfers of both directions, the buffers that they share, and the pages' memory."""

    def __init__(self, device: Any, copier: Any, memory: Any, rate: float | None) -> None:
        """Acquires the memory, last of all but the pacer.

        Raises:
            Detached: the memory is closed.
        """
        self.device = device
        self.lock = threading.RLock()
        """Held while anything is enqueued, asked about or given back; never while calls are made
        or anything is waited for."""
        self.events, self.blocks = Events(device), IndexBlocks(device, copier)
        self.offload, self.load = Lane(device, True), Lane(device, False)
        self.finished: deque[DeviceTransfer] = deque()
        """Finished, but not all callbacks were called."""
        self.closed = False
        self.pacer: Pacer | None = None
        self._pid = os.getpid()
        self._memory: Any = None
        acquire = getattr(memory, "acquire", None)
        if acquire is not None:
            acquire()
            self._memory = memory
        if rate:
            try:
                self.pacer = Pacer(rate)
            except BaseException:
                self._release()
                raise

    def check_open(self) -> None:
        """Raise Detached: closed, or in a forked child, which cannot use the device."""
        if self.closed:
            raise Detached("this transfer engine is closed; make another one")
        if os.getpid() != self._pid:
            raise Detached("this transfer engine belongs to the parent process; make one here")

    # ---- with the lock held

    def recycle(self, lane: Lane) -> None:
        """Take buffers back from finished transfers, without making calls yet."""
        while lane.transfers and lane.transfers[0].settle():
            self._finish(lane.transfers.popleft())

    def _finish(self, transfer: DeviceTransfer) -> None:
        while self.finished and not self.finished[0].waited_for:  # `done` or `wait` made its calls
            self.finished.popleft()
        if transfer.waited_for:
            self.finished.append(transfer)

    def failed(self, transfer: DeviceTransfer, error: BaseException, streams: list[Any]) -> None:
        """A transfer was enqueued in part only. That part must still be waited for, on these
        streams."""
        transfer.fail(error)
        for stream in streams:
            try:
                transfer.mark(self.events.recorded(stream))
            except Exception:
                with contextlib.suppress(Exception):  # the device is lost, and nothing is in flight
                    stream.synchronize()

    def settled(self, marks: list[Any], block: IndexBlock | None) -> None:
        """Take back events and a block that are not in use any more."""
        self.events.give(marks)
        if block is not None:
            self.blocks.give(block)

    # ---- without the lock

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """See `Engine.will_tell`."""
        with self.lock:
            every = [*self.offload.transfers, *self.load.transfers, *self.finished]
            return any(transfer.tells(call) for transfer in every)

    def poll(self) -> int:
        """See `Engine.poll`."""
        if os.getpid() != self._pid:
            self.check_open()
        with self.lock:
            going = 0
            for lane in (self.offload, self.load):
                self.recycle(lane)
                for transfer in [transfer for transfer in lane.transfers if transfer.settle()]:
                    lane.transfers.remove(transfer)
                    self._finish(transfer)
                going += len(lane.transfers)
        self._tell()
        return going

    def _tell(self) -> None:
        """Make the calls of finished transfers. If one raises, the others are still made; after an
        interrupt the next poll makes them."""
        first: Exception | None = None
        while self.finished:
            try:
                transfer = self.finished.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                transfer.run_call()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait for transfers in flight, make their calls, release the memory. After an interrupt a
        second call does the rest. Otherwise a second call does nothing, nor does one in a forked
        child."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            self.closed = True
        try:
            self._drain()
        finally:
            with self.lock:
                idle = not (self.offload.transfers or self.load.transfers)
            if idle:
                self._end()

    def _drain(self) -> None:
        first: Exception | None = None
        going = 1
        while going:
            try:
                going = self.poll()
            except Exception as error:  # from a call, which is not made again
                first = first or error
                continue
            with self.lock:
                left = [*self.offload.transfers, *self.load.transfers]
            for transfer in left:
                transfer.sleep()
        if first is not None:
            raise first

    def _end(self) -> None:
        pacer, self.pacer = self.pacer, None
        if pacer is not None:
            pacer.close()
        self.offload.ring = self.load.ring = None
        self.blocks.clear()
        self._release()

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release()


__all__ = [
    "DeviceTransfer",
    "Events",
    "InFlight",
    "IndexBlock",
    "IndexBlocks",
    "Lane",
    "Pacer",
    "Ring",
]

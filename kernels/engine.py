"""TransferEngine: pages between a GPU and registered host memory, asynchronously.

Three ways, chosen for each transfer ("auto") or named:

- staged: a kernel gathers scattered rows into a slot of a ring on the device, the copy engine moves
  whole pages from there; loading the other way round. Full speed beside a busy model.
- direct: the kernel reads or writes host memory itself. Lowest latency, and the fastest for small
  pages, but its programs stay on the multiprocessors as long as the bus takes.
- copies: where device bytes lie as page bytes do, the copy engine alone.

Each direction has streams of its own. Staged transfers of one direction run one after the other,
direct ones may overlap; otherwise order is the caller's: `streams` and `after` say what must be
over before a transfer reads or writes anything.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lightcache.kernels.calibration import DEFAULTS, Thresholds
from lightcache.kernels.device import CudaDevice
from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.moves import Move, check_sides, check_slots, flatten
from lightcache.kernels.options import (
    MODES,
    check_mode,
    check_planes,
    check_rate,
    events_of,
    size_of,
    streams_of,
)
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.rows import MOST_SLOTS, Plan
from lightcache.kernels.submission import (
    Events,
    IndexBlock,
    IndexBlocks,
    Joined,
    Lane,
    Ring,
    Submission,
    store_slots,
)
from lightcache.shm.errors import ConfigError, Detached, TransferFailed, WaitTimeout, leave
from lightcache.shm.waiting import Event

# ---- The `Transfer` of a device engine: events that say when its copies are over.

_SPIN = 300e-6  # seconds of asking before sleeping: small transfers are over by then
_NAP = 100e-6


class DeviceTransfer:
    """See `lightcache.kernels.moves.Transfer`. Made by `TransferEngine`."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_complete",
        "_enqueued",
        "_error",
        "_going_out",
        "_marks",
        "_over",
        "_traffic",
        "_uses",
        "_windows",
        "nbytes",
    )

    def __init__(
        self, traffic: Traffic, nbytes: int, when_done: Callable[[bool], None] | None = None
    ) -> None:
        """Nothing is enqueued yet: were it over now, it would have failed."""
        self.nbytes = nbytes
        self._traffic = traffic
        self._going_out = False
        self._marks: list[Any] = []
        self._windows: list[tuple[frozenset[int], list[Any]]] = []
        self._enqueued: Event | None = None
        self._error: BaseException | None = None
        self._over = False
        self._uses: tuple[IndexBlock | None, object] = (None, None)
        self._complete = False
        self._calls: deque[Callable[[bool], None]] = deque()
        if when_done is not None:
            self._calls.append(when_done)

    # ---- for the engine, which holds its lock

    def uses(self, block: IndexBlock | None, other: object) -> None:
        """What must stay until it is over."""
        self._uses = block, other

    def mark(self, event: Any) -> None:
        """An event behind copies of this transfer."""
        self._marks.append(event)

    def mark_layers(self, events: list[Any], layers: Sequence[int]) -> None:
        """Which of its events are behind all copies of some layers."""
        self._windows.append((frozenset(layers), events))

    def fail(self, error: BaseException) -> None:
        """It did not all go; over when what has been enqueued is."""
        self._error = self._error or error

    def begin(self, *, later: bool = False) -> None:
        """From now on something may have been enqueued that no event tells of yet.

        Args:
            later: by another thread, that others will wait for.
        """
        if later:
            self._enqueued = Event()
        self._going_out = True

    def enqueued(self) -> None:
        """Nothing more will be enqueued, and events tell of all that was."""
        self._complete = True
        self._going_out = False
        if self._enqueued is not None:
            self._enqueued.set()

    def settle(self) -> bool:
        """Whether it is over, without raising or calling anybody; gives its buffers back."""
        if self._over:
            return True
        if self._going_out:
            return False
        try:
            if not all(mark.query() for mark in self._marks):
                return False
        except Exception as error:
            if not self._traffic.device.lost(error):
                return False
            self.fail(error)  # and whatever it was copying is lost as well
        self._over = True
        marks, self._marks, self._windows = self._marks, [], []
        uses, self._uses = self._uses, (None, None)
        self._traffic.settled(marks, uses[0])
        return True

    def tells(self, call: Callable[[bool], None]) -> bool:
        """Whether this call is still to be made."""
        return call in self._calls

    @property
    def waited_for(self) -> bool:
        """Whether somebody is still to be told."""
        return bool(self._calls)

    def run_calls(self) -> None:
        """Tell those who asked to be told. Each call is made once, by one thread; those behind one
        that raises are made all the same, then its error is raised."""
        first: Exception | None = None
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                call(self._error is None and self._complete)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    # ---- for everybody

    def done(self) -> bool:
        """See `Transfer.done`."""
        with self._traffic.lock:
            over = self.settle()
        if over:
            self.run_calls()
            self._raise()
        return over

    def _raise(self) -> None:
        if self._error is not None:
            raise TransferFailed(
                f"a transfer of {self.nbytes} bytes failed: {self._error!r}; what it should have "
                "written does not count: abandon those pages, or compute those tokens"
            ) from self._error

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`. Asks for 0.3 ms, then sleeps."""
        start = time.monotonic()
        while not self.done():
            passed = time.monotonic() - start
            if timeout is not None and passed >= timeout:
                raise WaitTimeout(
                    f"a transfer of {self.nbytes} bytes goes on after {timeout} s; wait again: "
                    "its pages and slots are in use until it is over"
                )
            if passed < _SPIN:
                continue
            if timeout is None:
                self.sleep()
            else:
                time.sleep(min(_NAP, max(0.0, timeout - passed)))

    def sleep(self) -> None:
        """Block until it is over, as far as can be told; `settle` tells for sure.

        Another thread may see it over meanwhile and use its events again: then this waits for
        more than it must, once.
        """
        if self._enqueued is not None:
            self._enqueued.wait()
        with self._traffic.lock:
            marks = list(self._marks)
        try:
            for mark in marks:
                mark.synchronize()
        except Exception:  # whether the device is lost, `settle` finds out
            time.sleep(_NAP)

    def wait_on(self, stream: Any = None) -> None:
        """See `Transfer.wait_on`. Blocks this thread only while a rate limit holds copies back."""
        self._wait_events(lambda: self._marks, stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See `Transfer.wait_layer`.

        Raises:
            ConfigError: a layer that is in none of its windows, while it goes on.
            TransferFailed: see `Transfer.wait_layer`.
        """
        self._wait_events(lambda: self._window(layer), stream)

    def _window(self, layer: int) -> list[Any]:
        if self._over or not self._windows:
            return self._marks
        for layers, events in self._windows:
            if layer in layers:
                return events
        known = sorted(set().union(*(layers for layers, _ in self._windows)))
        raise ConfigError(f"layer {layer!r} is not part of this transfer, its layers are {known}")

    def _wait_events(self, events: Callable[[], list[Any]], stream: Any) -> None:
        if self._enqueued is not None:
            self._enqueued.wait()
        with self._traffic.lock:
            if self._error is not None:
                self._raise()
            found = events()
            if found:
                stream = self._traffic.device.current() if stream is None else stream
                for event in found:
                    stream.wait_event(event)

    def when_done(self, call: Callable[[bool], None]) -> None:
        """See `Transfer.when_done`."""
        with self._traffic.lock:
            self._calls.append(call)
            over = self.settle()
        if over:
            self.run_calls()

    def __repr__(self) -> str:
        state = "failed" if self._error else "over" if self._over else "going on"
        return f"<Transfer {self.nbytes} bytes, {state}>"


# ---- A request of one small page, by the shortest way: what most requests of a decoding model
# are.

_SLOT_TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def submit_page(
    engine: TransferEngine,
    lane: Lane,
    move: Move,
    streams: list[Any],
    after: list[Any],
    when_done: Callable[[bool], None] | None,
) -> DeviceTransfer | None:
    """What a `Submission` does, in a third of the time: the page is read or written directly.
    None: it is more than a page, or something is wrong with it, which the long way tells."""
    page = _page_of(move, engine)
    if page is None:
        return None
    traffic, slots, first, memory = engine._traffic, move.slots, move.first, engine.memory
    assert isinstance(slots, np.ndarray)
    traffic.recycle(lane)
    block = traffic.blocks.take(JOB_WORDS + len(slots))
    view, stream = block.view, lane.next_direct()
    view[0] = memory.address + page * memory.page_bytes
    view[1], view[2], view[3] = -first, first, first + len(slots)
    store_slots(slots, block.slots[2 * JOB_WORDS : 2 * JOB_WORDS + len(slots)])
    nbytes = engine._joined.plan.nbytes * len(slots) // engine.geometry.page_tokens
    transfer = DeviceTransfer(traffic, nbytes, when_done)
    transfer.uses(block, None)
    sources: list[Any] = []
    try:
        lane.going.append(transfer)
        transfer.begin()
        for source in streams:
            sources.append(traffic.events.recorded(source))
            stream.wait_event(sources[-1])
        for event in after:
            stream.wait_event(event)
        _launch(engine, lane, block.host_address, stream)
        transfer.mark(traffic.events.recorded(stream))
        transfer.enqueued()
    except BaseException as error:
        traffic.failed(transfer, error, [stream])
        transfer.enqueued()
        if not isinstance(error, Exception):
            raise
    traffic.events.give(sources)
    return transfer


def _page_of(move: Move, engine: TransferEngine) -> int | None:
    pages, slots, first, memory = move.pages, move.slots, move.first, engine.memory
    if type(pages) is not np.ndarray or type(slots) is not np.ndarray or move.skip is not None:
        return None
    if pages.shape != (1,) or slots.ndim != 1 or pages.dtype.kind not in "iu":
        return None
    page, count = int(pages[0]), len(slots)
    if not 0 <= page < getattr(memory, "ready", memory.pages) or type(first) is not int:
        return None
    if not (count and 0 <= first <= engine.geometry.page_tokens - count):
        return None
    if slots.dtype not in _SLOT_TYPES or slots.max() >= engine._joined.plan.slots:
        return None
    return page


def _launch(engine: TransferEngine, lane: Lane, at: int, stream: Any) -> None:
    programs, slots, handle = engine.programs, at + JOB_WORDS * 8, stream.cuda_stream
    for each, launch in engine._joined.launches(False, lane.to_page):
        launch(0, len(each.cells), at, 1, slots, programs, handle)


# ---- A rate limit: a thread that enqueues pieces of transfers when they are due.


class Pacer:
    """Runs what it is given in order, so that the bytes of it keep to a rate."""

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
        """Run this when what was put before has had its time. `run` must not raise."""
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
            del item, run  # they hold an engine: not until there is more to do

    def close(self) -> None:
        """Run what is left, at its rate, and end. From its own thread: end after this."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


# ---- What is on its way through a device engine, and what it uses meanwhile.
#
# It knows nothing of the engine: transfers refer to it, and an engine that is dropped leaves it
# behind until the last copy is over. Staging memory, index buffers and the pages themselves must
# not be given to anybody else before.


class Traffic:
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
        """Over, but somebody is still to be told."""
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
        """Raise Detached: closed, or a forked child, which has nothing of the device."""
        if self.closed:
            raise Detached("this transfer engine is closed; make another one")
        if os.getpid() != self._pid:
            raise Detached("this transfer engine belongs to the parent process; make one here")

    # ---- with the lock held

    def recycle(self, lane: Lane) -> None:
        """Take buffers back from what is over, without telling anybody yet."""
        while lane.going and lane.going[0].settle():
            self._finish(lane.going.popleft())

    def _finish(self, transfer: DeviceTransfer) -> None:
        while self.finished and not self.finished[0].waited_for:  # told by `done` or `wait`
            self.finished.popleft()
        if transfer.waited_for:
            self.finished.append(transfer)

    def failed(self, transfer: DeviceTransfer, error: BaseException, streams: list[Any]) -> None:
        """Not all of it went. What did must still be waited for: on these streams."""
        transfer.fail(error)
        for stream in streams:
            try:
                transfer.mark(self.events.recorded(stream))
            except Exception:
                with contextlib.suppress(Exception):  # the device is lost, and nothing in flight
                    stream.synchronize()

    def settled(self, marks: list[Any], block: IndexBlock | None) -> None:
        """Nobody uses these any more."""
        self.events.give(marks)
        if block is not None:
            self.blocks.give(block)

    # ---- without it

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """See `Engine.will_tell`."""
        with self.lock:
            every = [*self.offload.going, *self.load.going, *self.finished]
            return any(each.tells(call) for each in every)

    def poll(self) -> int:
        """See `Engine.poll`."""
        if os.getpid() != self._pid:
            self.check_open()
        with self.lock:
            going = 0
            for lane in (self.offload, self.load):
                self.recycle(lane)
                for each in [each for each in lane.going if each.settle()]:
                    lane.going.remove(each)
                    self._finish(each)
                going += len(lane.going)
        self._tell()
        return going

    def _tell(self) -> None:
        """Make the calls of what is over. One that raises holds back none of the others; an
        interrupt leaves those to the next poll."""
        first: Exception | None = None
        while self.finished:
            try:
                transfer = self.finished.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                transfer.run_calls()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait for what goes on, tell those who wait, let the memory go. After an interrupt a
        second call does the rest; then nothing, and nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            self.closed = True
        try:
            self._drain()
        finally:
            with self.lock:
                idle = not (self.offload.going or self.load.going)
            if idle:
                self._end()

    def _drain(self) -> None:
        first: Exception | None = None
        going = 1
        while going:
            try:
                going = self.poll()
            except Exception as error:  # of a call, which is not made again
                first = first or error
                continue
            with self.lock:
                left = [*self.offload.going, *self.load.going]
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


# ---- TransferEngine: pages between a GPU and registered host memory, asynchronously.
#
# Three ways, chosen for each transfer ("auto") or named:
#
# - staged: a kernel gathers scattered rows into a slot of a ring on the device, the copy engine
#   moves whole pages from there; loading the other way round. Full speed beside a busy model.
# - direct: the kernel reads or writes host memory itself. Lowest latency, and the fastest for
#   small pages, but its programs stay on the multiprocessors as long as the bus takes.
# - copies: where device bytes lie as page bytes do, the copy engine alone.
#
# Each direction has streams of its own. Staged transfers of one direction run one after the
# other, direct ones may overlap; otherwise order is the caller's: `streams` and `after` say what
# must be over before a transfer reads or writes anything.

STAGING_BYTES = 128 << 20
"""Of one direction: the copy engine is busy for 2.4 ms with it, longer than a kernel of the model
holds all multiprocessors, so that it never waits for a gather (measured: docs/benchmarks.md)."""
RING_SLOTS = 4
PACKED_PROGRAMS = 2  # for each multiprocessor, of a kernel that only moves bytes on the device
SLOT_ALIGN = 256  # what the copy engine likes, and a multiple of every word


class TransferEngine:
    """Moves pages between registered host memory and the planes of one rank on a GPU.

    Thread-safe. Calls enqueue work and return; nothing is allocated and nothing waits for the
    device once the sizes in use have been seen (`warm` sees to that beforehand).
    """

    def __init__(
        self,
        geometry: PageGeometry,
        planes: DevicePlanes,
        memory: HostPages,
        *,
        share: Share | None = None,
        mode: str = "auto",
        staging_bytes: int | None = None,
        rate: float | None = None,
        programs: int | None = None,
        calibration: Thresholds | None = None,
        device: Any = None,
    ) -> None:
        """Join pages and planes.

        Args:
            geometry: of the pages.
            planes: where the engine keeps its KV.
            memory: registered pages, `lightcache.kernels.pinned.PinnedPages`.
            share: what this rank moves; None: everything. See `PageGeometry.share`.
            mode: "auto", or always "staged", "direct" or "copies".
            staging_bytes: of device memory, for each direction that is used.
            rate: bytes a second that transfers take together at most; None: no limit.
            programs: of a kernel that accesses host memory directly, at most.
            calibration: thresholds of "auto"; None: those of `calibration.DEFAULTS`.
            device: for tests; None: the GPU that the planes are on.

        Raises:
            ConfigError: sizes or geometries that do not fit, planes that are missing or not on a
                GPU, memory that is not registered, no such mode, numbers out of range.
            Detached: the memory is closed.
        """
        check_mode(mode)
        check_rate(rate)
        check_planes(planes)
        self.thresholds = DEFAULTS if calibration is None else calibration
        self.programs = size_of(programs, "programs", self.thresholds.programs)
        self._staging_bytes = size_of(staging_bytes, "staging_bytes", STAGING_BYTES)
        self.device = CudaDevice(planes.device) if device is None else device
        if self.device.registered and not hasattr(memory, "ready"):
            raise ConfigError(
                f"the page memory is a {type(memory).__name__} that is not registered with the "
                "driver; make PinnedPages of it"
            )
        self.geometry, self.memory, self.mode = geometry, memory, mode
        self.share = geometry.share() if share is None else share
        check_sides(geometry, memory, self.share)
        self.packed_programs = PACKED_PROGRAMS * self.device.processors
        self._windows: dict[int, list[Joined]] = {}
        self._keep = planes
        with self.device.guard():
            self._launcher = self.device.launcher()
            self._joined = self._join(self.share, planes)
            self.slots = self._joined.plan.slots
            self._copier = self.device.copier([])
            if not self._copier.anywhere:
                self._show_memory()
            traffic = Traffic(self.device, self._copier, memory, rate)
        try:
            self._use(traffic)
        except BaseException:
            traffic.close()
            raise

    def _use(self, traffic: Traffic) -> None:
        self._traffic = traffic
        # Also when this engine is dropped or Python ends: what is enqueued goes on regardless, in
        # buffers that only the traffic keeps.
        self._ending = weakref.finalize(self, _end, traffic)
        self._lock, self._pacer = traffic.lock, traffic.pacer
        self._blocks, self._events = traffic.blocks, traffic.events
        self._offload, self._load = traffic.offload, traffic.load
        self._quick = self._may_be_quick()

    def _join(self, share: Share, planes: DevicePlanes) -> Joined:
        plan = Plan(share, planes, self.memory.address, self.memory.page_bytes)
        if plan.slots > MOST_SLOTS:
            raise ConfigError(f"planes: {plan.slots} slots, more than can be numbered (2**31 - 1)")
        return Joined(plan, self.device, self._launcher)

    def _show_memory(self) -> None:
        import torch

        self._copier.add(torch.from_numpy(self.memory.array))

    def _may_be_quick(self) -> bool:
        """Whether a request of one page always goes directly, token by token."""
        plan = self._joined.plan
        small = self.mode == "auto" and plan.nbytes < self.thresholds.direct_total
        units = {each.shape.unit_tokens for each in plan.classes}
        return (small or self.mode == "direct") and self._pacer is None and units == {1}

    # ---- the two verbs

    def offload(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Iterable[Any] | None = None,
        after: Iterable[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> DeviceTransfer:
        """Copy device slots to pages. Does not block.

        Args:
            moves: pages and slots; several requests share launches.
            streams: whose work so far must be over first, because it produces the source; None:
                the current stream.
            after: events (as torch.cuda.Event) to wait for as well.
            window: layers that are told of apart, see `Transfer.wait_layer`; None: all at once.
            planes: where the tensors are now, if they move. Their tables go to the device first,
                which blocks for a moment.
            when_done: see `Engine.offload`.

        Raises:
            ConfigError: bad pages or slots, a current stream that is being captured, streams of
                another device, a window or planes that do not fit.
            NotReady: a page that is not registered yet.
            Detached: the engine is closed, or this is a forked child.
        """
        return self._submit(self._offload, moves, streams, after, window, planes, when_done)

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Iterable[Any] | None = None,
        after: Iterable[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> DeviceTransfer:
        """Copy pages to device slots. Does not block. Arguments and errors as `offload`; `streams`
        and `after` are those that may still touch the slots."""
        return self._submit(self._load, moves, streams, after, window, planes, when_done)

    def _submit(
        self,
        lane: Lane,
        moves: Move | Sequence[Move],
        streams: Iterable[Any] | None,
        after: Iterable[Any],
        window: int | None,
        planes: DevicePlanes | None,
        when_done: Callable[[bool], None] | None,
    ) -> DeviceTransfer:
        traffic = self._traffic
        traffic.check_open()
        with self._lock, self.device.guard():
            if traffic.closed:  # by another thread, meanwhile
                traffic.check_open()
            waits, events = streams_of(streams, self.device), events_of(after)
            if self._quick and window is None and planes is None and isinstance(moves, Move):
                quick = submit_page(self, lane, moves, waits, events, when_done)
                if quick is not None:
                    return quick
            batch = flatten(moves, self.geometry, self.memory)
            parts = self._parts(window, planes)
            check_slots(batch, min((part.plan.slots for part in parts), default=MOST_SLOTS))
            each = sum(part.plan.nbytes for part in parts)
            nbytes = each * batch.tokens // batch.page_tokens
            transfer = DeviceTransfer(traffic, nbytes, when_done)
            traffic.recycle(lane)
            job = Submission(self, lane, transfer, batch, waits, events)
            try:
                job.prepare(parts, windowed=window is not None)
            except BaseException:
                job.drop()
                raise
            transfer.uses(job.block, (planes, parts))
            lane.going.append(transfer)
            job.start(self._pacer)
        return transfer

    def _parts(self, window: int | None, planes: DevicePlanes | None) -> list[Joined]:
        if planes is not None:
            check_planes(planes, self._keep.device)
        if window is None:
            return [self._joined] if planes is None else [self._join(self.share, planes)]
        if planes is None and type(window) is int and window in self._windows:
            return self._windows[window]
        parts = [self._join(share, planes or self._keep) for share in self.share.windows(window)]
        if planes is None:
            self._windows[window] = parts
        return parts

    def _ring(self, lane: Lane) -> Ring:
        """The lane's ring, whose slots have room for every cell of the share: it stays as it is,
        since steps that wait for the pacer use it as well as what is enqueued."""
        if lane.ring is None:
            largest = max((cell.nbytes for cell in self._joined.plan.cells), default=1)
            each = -(-max(self._staging_bytes // RING_SLOTS, largest) // SLOT_ALIGN) * SLOT_ALIGN
            slots = max(2, min(RING_SLOTS, self._staging_bytes // each))
            ring = Ring(self.device, slots, each)
            self._copier.add(ring.memory)
            lane.ring = ring
        return lane.ring

    # ---- bookkeeping

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """See `Engine.will_tell`."""
        return self._traffic.will_tell(call)

    def poll(self) -> int:
        """See `Engine.poll`.

        Raises:
            Detached: in a forked child.
            Otherwise what a `when_done` call raised; all others were made.
        """
        return self._traffic.poll()

    def warm(self) -> None:
        """Compile every kernel and allocate the rings and index buffers now, so that no transfer
        has to. Blocks for seconds the first time on a machine.

        Raises:
            Detached: the engine is closed.
        """
        self._traffic.check_open()
        plan = self._joined.plan
        with self._lock, self.device.guard():
            self._traffic.check_open()
            for lane in (self._offload, self._load):
                if self.mode in ("auto", "staged") and plan.contiguous and plan.nbytes:
                    self._ring(lane)
                for packed in (False, True):
                    self._joined.launches(packed, lane.to_page)
            for block in [self._blocks.take(1) for _ in range(2)]:
                self._blocks.give(block)

    def close(self) -> None:
        """Wait for what goes on, tell those who wait, let the memory go. Again: nothing, but what
        an interrupt left undone. In a forked child: nothing. An engine that is dropped is closed,
        and so is one that is left when Python ends.

        Raises:
            What a `when_done` call raised; it is closed all the same.
        """
        self._traffic.close()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


def _end(traffic: Traffic) -> None:
    with contextlib.suppress(Exception):  # nobody is left to be told
        traffic.close()


__all__ = ["MODES", "TransferEngine"]

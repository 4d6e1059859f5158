"""TransferEngine: pages between a GPU and registered host memory, asynchronously.

Three ways, chosen for each transfer ("auto") or named:

- staged: a kernel gathers scattered rows into a slot of a ring on the device, the copy engine moves
  whole pages from there; loading the other way round. Full speed beside a busy model.
- direct: the kernel reads or writes host memory itself. Lowest latency, and the fastest for small
  pages, but its programs stay on the multiprocessors as long as the bus takes.
- copies: where device bytes lie as page bytes do, the copy engine alone.

Each direction has streams of its own. Transfers of one direction and way run one after the other;
otherwise order is the caller's: `streams` and `after` say what a transfer waits for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightcache.kernels.calibration import DEFAULTS, Thresholds
from lightcache.kernels.device import CudaDevice
from lightcache.kernels.device_transfer import DeviceTransfer
from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.launch import JOB_WORDS
from lightcache.kernels.memory import HostPages
from lightcache.kernels.moves import check_sides, check_slots, flatten
from lightcache.kernels.pacing import Pacer
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.rows import Plan
from lightcache.kernels.staging import Events, IndexBlock, IndexBlocks, Ring
from lightcache.kernels.submission import Submission
from lightcache.kernels.transfer import Move
from lightcache.shm.errors import ConfigError, Detached

MODES = ("auto", "staged", "direct", "copies")
STAGING_BYTES = 128 << 20
"""Of one direction: the copy engine is busy for 2.4 ms with it, longer than a kernel of the model
holds all multiprocessors, so that it never waits for a gather (measured: docs/benchmarks.md)."""
RING_SLOTS = 4
PACKED_PROGRAMS = 2  # for each multiprocessor, of a kernel that only moves bytes on the device
_SLOT_TYPES = (np.dtype(np.int32), np.dtype(np.int64))
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
                GPU, memory that is not registered, no such mode.
        """
        self.device = CudaDevice(planes.device) if device is None else device
        if self.device.registered and not hasattr(memory, "ready"):
            raise ConfigError(
                f"the page memory is a {type(memory).__name__} that is not registered with the "
                "driver; make PinnedPages of it"
            )
        if mode not in MODES:
            raise ConfigError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
        if rate is not None and not rate > 0:
            raise ConfigError(f"rate: expected bytes a second, found {rate!r}")
        self.geometry, self.memory, self.mode = geometry, memory, mode
        self.share = geometry.share() if share is None else share
        check_sides(geometry, memory, self.share)
        self.thresholds = DEFAULTS if calibration is None else calibration
        self.programs = programs or self.thresholds.programs
        self.packed_programs = PACKED_PROGRAMS * self.device.processors
        self._staging_bytes = staging_bytes or STAGING_BYTES
        self._windows: dict[int, list[Joined]] = {}
        self._lock = threading.RLock()
        self._finished: list[DeviceTransfer] = []
        self._closed = False
        with self.device.guard():
            self._launcher = self.device.launcher()
            self._joined = self._join(self.share, planes)
            self._copier = self.device.copier([])
            self._offload, self._load = Lane(self.device, True), Lane(self.device, False)
        if not self._copier.anywhere:
            self._show_memory()
        self._blocks = IndexBlocks(self.device, self._copier)
        self._events = Events(self.device)
        self._pacer = Pacer(rate) if rate else None
        self._keep = planes
        self._quick = self._may_be_quick()
        acquire = getattr(memory, "acquire", None)
        if acquire is not None:
            acquire()

    def _join(self, share: Share, planes: DevicePlanes) -> Joined:
        plan = Plan(share, planes, self.memory.address, self.memory.page_bytes)
        if plan.slots >= 1 << 31:
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
    ) -> DeviceTransfer:
        """Copy device slots to pages. Does not block.

        Args:
            moves: pages and slots; several requests go in one launch.
            streams: whose work so far must be over first, because it produces the source; None:
                the current stream.
            after: events (as torch.cuda.Event) to wait for as well.
            window: layers that are told of apart, see `Transfer.wait_layer`; None: all at once.
            planes: where the tensors are now, if they move.

        Raises:
            ConfigError: bad pages or slots, or a stream that is being captured.
            NotReady: a page that is not registered yet.
            Detached: the engine is closed.
        """
        return self._submit(self._offload, moves, streams, after, window, planes)

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Iterable[Any] | None = None,
        after: Iterable[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
    ) -> DeviceTransfer:
        """Copy pages to device slots. Does not block. Arguments and errors as `offload`; `streams`
        and `after` are those that may still touch the slots."""
        return self._submit(self._load, moves, streams, after, window, planes)

    def _submit(
        self,
        lane: Lane,
        moves: Move | Sequence[Move],
        streams: Iterable[Any] | None,
        after: Iterable[Any],
        window: int | None,
        planes: DevicePlanes | None,
    ) -> DeviceTransfer:
        with self._lock, self.device.guard():
            if self._closed:
                raise Detached("this transfer engine is closed; make another one")
            if self._quick and window is None and planes is None and isinstance(moves, Move):
                quick = self._submit_page(lane, moves, streams, after)
                if quick is not None:
                    return quick
            batch = flatten(moves, self.geometry, self.memory)
            parts = self._parts(window, planes)
            check_slots(batch, min(part.plan.slots for part in parts))
            waits = [self.device.current()] if streams is None else list(streams)
            nbytes = sum(part.plan.nbytes for part in parts) * len(batch.pages)
            transfer = DeviceTransfer(self, nbytes)
            self._recycle(lane)
            job = Submission(self, lane, transfer, batch, waits, list(after))
            job.prepare(parts, windowed=window is not None)
            transfer.uses(job.block, (planes, parts))
            lane.going.append(transfer)
            job.start(self._pacer)
        return transfer

    def _submit_page(
        self, lane: Lane, move: Move, streams: Iterable[Any] | None, after: Iterable[Any]
    ) -> DeviceTransfer | None:
        """One page, by the shortest way: what a `Submission` does, in a third of the time. None:
        it is more than that, or something is wrong with it, which the long way tells."""
        pages, slots, first, memory = move.pages, move.slots, move.first, self.memory
        if type(pages) is not np.ndarray or type(slots) is not np.ndarray or move.skip is not None:
            return None
        if pages.shape != (1,) or slots.ndim != 1 or pages.dtype.kind not in "iu":
            return None
        page, count, plan = int(pages[0]), len(slots), self._joined.plan
        if not 0 <= page < getattr(memory, "ready", memory.pages) or type(first) is not int:
            return None
        if not (count and 0 <= first <= self.geometry.page_tokens - count):
            return None
        if slots.dtype not in _SLOT_TYPES or slots.max() >= plan.slots:
            return None
        self._recycle(lane)
        block = self._blocks.take(JOB_WORDS + count)
        view, stream = block.view, lane.next_direct()
        view[0] = memory.address + page * memory.page_bytes
        view[1], view[2], view[3] = -first, first, first + count
        block.slots[2 * JOB_WORDS : 2 * JOB_WORDS + count] = slots
        transfer = DeviceTransfer(self, plan.nbytes)
        transfer.uses(block, None)
        lane.going.append(transfer)
        sources = []
        try:
            for source in [self.device.current()] if streams is None else streams:
                sources.append(self._events.recorded(source))
                stream.wait_event(sources[-1])
            for event in after:
                stream.wait_event(event)
            at, words = block.host_address, JOB_WORDS * 8
            for each, launch in self._joined.launches(False, lane.to_page):
                launch(0, len(each.cells), at, 1, at + words, self.programs, stream.cuda_stream)
            transfer.mark_all([self._events.recorded(stream)], None)
        except Exception as error:
            self._failed(transfer, error, [stream])
        self._events.give(sources)
        return transfer

    def _parts(self, window: int | None, planes: DevicePlanes | None) -> list[Joined]:
        if planes is not None and str(planes.device) != str(self._keep.device):
            raise ConfigError(
                f"planes: expected some on {self._keep.device}, found {planes.device}"
            )
        if window is None:
            return [self._joined] if planes is None else [self._join(self.share, planes)]
        shares = self.share.windows(window)
        if planes is not None:
            return [self._join(share, planes) for share in shares]
        if window not in self._windows:
            self._windows[window] = [self._join(share, self._keep) for share in shares]
        return self._windows[window]

    def _ring(self, lane: Lane, plan: Plan) -> Ring:
        """The lane's ring; a new one if a cell is larger than a slot."""
        largest = plan.largest
        if lane.ring is None or lane.ring.slot_bytes < largest:
            each = -(-max(self._staging_bytes // RING_SLOTS, largest) // SLOT_ALIGN) * SLOT_ALIGN
            slots = max(2, min(RING_SLOTS, self._staging_bytes // each))
            if lane.ring is not None:  # what is enqueued still uses the old one
                lane.copy.synchronize()
                lane.kernel.synchronize()
            lane.ring = Ring(self.device, slots, each)
            self._copier.add(lane.ring.memory)
        return lane.ring

    # ---- bookkeeping

    def _recycle(self, lane: Lane) -> None:
        """Take buffers back from what is over, without telling anybody yet."""
        while lane.going and lane.going[0].settle():
            self._finish(lane.going.popleft())

    def _finish(self, transfer: DeviceTransfer) -> None:
        if transfer.waited_for:
            self._finished.append(transfer)

    def _failed(self, transfer: DeviceTransfer, error: BaseException, streams: list[Any]) -> None:
        """Not all of it went. What did must still be waited for."""
        transfer.fail(error)
        with contextlib.suppress(Exception):  # then the device is lost, and nothing is in flight
            transfer.mark_all([self._events.recorded(stream) for stream in streams], None)

    def _settled(self, marks: list[Any], block: IndexBlock | None) -> None:
        self._events.give(marks)
        if block is not None:
            self._blocks.give(block)

    def poll(self) -> int:
        """See `Engine.poll`."""
        with self._lock:
            going = 0
            for lane in (self._offload, self._load):
                self._recycle(lane)
                over = [each for each in lane.going if each.settle()]
                for each in over:
                    lane.going.remove(each)
                    self._finish(each)
                going += len(lane.going)
            finished, self._finished = self._finished, []
        for transfer in finished:
            transfer.run_calls()
        return going

    def warm(self) -> None:
        """Compile every kernel and allocate the rings now, so that no transfer has to. Blocks for
        seconds the first time on a machine."""
        with self._lock, self.device.guard():
            for lane in (self._offload, self._load):
                if self.mode in ("auto", "staged") and self._joined.plan.contiguous:
                    self._ring(lane, self._joined.plan)
                for packed in (False, True):
                    self._joined.launches(packed, lane.to_page)

    def close(self) -> None:
        """Wait for what goes on, tell those who wait, let the memory go. Again: nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            going = [*self._offload.going, *self._load.going]
        for transfer in going:
            transfer._sleep()
        self.poll()
        if self._pacer:
            self._pacer.close()
        release = getattr(self.memory, "release", None)
        if release is not None:
            release()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

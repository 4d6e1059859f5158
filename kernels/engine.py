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
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from lightcache.kernels.calibration import DEFAULTS, Thresholds
from lightcache.kernels.device import CudaDevice
from lightcache.kernels.device_transfer import DeviceTransfer
from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.lanes import Joined, Lane
from lightcache.kernels.memory import HostPages
from lightcache.kernels.moves import check_sides, check_slots, flatten
from lightcache.kernels.one_page import submit_page
from lightcache.kernels.options import (
    MODES,
    check_mode,
    check_planes,
    check_rate,
    events_of,
    size_of,
    streams_of,
)
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.rows import MOST_SLOTS, Plan
from lightcache.kernels.staging import Ring
from lightcache.kernels.submission import Submission
from lightcache.kernels.traffic import Traffic
from lightcache.kernels.transfer import Move
from lightcache.shm.errors import ConfigError

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

        Raises:
            ConfigError: bad pages or slots, a current stream that is being captured, streams of
                another device, a window or planes that do not fit.
            NotReady: a page that is not registered yet.
            Detached: the engine is closed, or this is a forked child.
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
        traffic = self._traffic
        traffic.check_open()
        with self._lock, self.device.guard():
            if traffic.closed:  # by another thread, meanwhile
                traffic.check_open()
            waits, events = streams_of(streams, self.device), events_of(after)
            if self._quick and window is None and planes is None and isinstance(moves, Move):
                quick = submit_page(self, lane, moves, waits, events)
                if quick is not None:
                    return quick
            batch = flatten(moves, self.geometry, self.memory)
            parts = self._parts(window, planes)
            check_slots(batch, min((part.plan.slots for part in parts), default=MOST_SLOTS))
            each = sum(part.plan.nbytes for part in parts)
            nbytes = each * batch.tokens // batch.page_tokens
            transfer = DeviceTransfer(traffic, nbytes)
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

    def __exit__(self, *error: object) -> None:
        self.close()


def _end(traffic: Traffic) -> None:
    with contextlib.suppress(Exception):  # nobody is left to be told
        traffic.close()


__all__ = ["MODES", "TransferEngine"]

"""TransferEngine: pages between a GPU and registered host memory, asynchronously.

Three modes, chosen for each transfer ("auto") or by name:

- staged: a kernel gathers scattered rows into a slot of a ring on the device, the copy engine moves
  whole pages from there; loading reverses this. Full speed beside a busy model.
- direct: the kernel reads or writes host memory itself. Lowest latency, and the fastest for small
    pages, but its programs occupy multiprocessors until the bus is done.
- copies: the copy engine alone, if bytes have the same order on the device as in the page.

Each direction has its own streams. Staged transfers of one direction run one after another; direct
ones may overlap. The caller orders everything else: `streams` and `after` say what must finish
before a transfer reads or writes anything.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightcache.kernels.device import CudaDevice
from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.in_flight import DeviceTransfer, InFlight, Lane
from lightcache.kernels.moves import Move, check_sides, check_slots, check_whole, flatten
from lightcache.kernels.options import (
    DEFAULTS,
    MODES,
    Thresholds,
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
from lightcache.kernels.submission import EngineParts, Joined, Submission, submit_page
from lightcache.shm.errors import ConfigError, leave

STAGING_BYTES = 128 << 20
"""Of one direction: the copy engine is busy for 2.4 ms with it, longer than a kernel of the model
holds all multiprocessors, so that it never waits for a gather (measured: docs/benchmarks.md)."""


class TransferEngine:
    """Moves pages between registered host memory and the planes of one rank on a GPU.

    Thread-safe. Calls enqueue work and return. Once a size has been used, or after `warm`, they
    neither allocate nor wait for the device.
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
            geometry: of the pages; `page_bytes` at most the memory's, or `part_bytes` equal to it.
            planes: where the engine keeps its KV.
            memory: registered pages, `lightcache.kernels.pinned.PinnedPages`.
            share: what this rank moves; None: everything. See `PageGeometry.share`.
            mode: "auto", or always "staged", "direct" or "copies".
            staging_bytes: device memory, for each direction in use.
            rate: most bytes a second of all transfers together; None: no limit.
            programs: most programs of a kernel that accesses host memory directly.
            calibration: thresholds of "auto"; None: `options.DEFAULTS`.
            device: for tests; None: the GPU that the planes are on.

        Raises:
            ConfigError: sizes or geometries that do not fit, planes that are missing or not on a
                GPU, memory that is not registered, an unknown mode, numbers out of range.
            Detached: the memory is closed.
        """
        check_mode(mode)
        check_rate(rate)
        check_planes(planes)
        thresholds = DEFAULTS if calibration is None else calibration
        programs = size_of(programs, "programs", thresholds.programs)
        staging_bytes = size_of(staging_bytes, "staging_bytes", STAGING_BYTES)
        self.device = CudaDevice(planes.device) if device is None else device
        if self.device.registered and not hasattr(memory, "ready"):
            raise ConfigError(
                f"the page memory is a {type(memory).__name__} that is not registered with the "
                "driver; make PinnedPages of it"
            )
        self.geometry, self.memory, self.mode = geometry, memory, mode
        self.share = geometry.share() if share is None else share
        check_sides(geometry, memory, self.share)
        self._windows: dict[int, list[Joined]] = {}
        self._keep = planes
        with self.device.guard():
            self._launcher = self.device.launcher()
            joined = self._join(self.share, planes)
            copier = self.device.copier([])
            if not copier.anywhere:
                _show_memory(copier, memory)
            in_flight = InFlight(self.device, copier, memory, rate)
        try:
            self._in_flight = in_flight
            # Also when this engine is dropped or Python ends: enqueued copies continue, in buffers
            # that only `in_flight` keeps.
            self._ending = weakref.finalize(self, _end, in_flight)
            self._parts = EngineParts(
                in_flight,
                memory,
                copier,
                joined,
                mode=mode,
                thresholds=thresholds,
                programs=programs,
                staging_bytes=staging_bytes,
            )
        except BaseException:
            in_flight.close()
            raise

    @property
    def slots(self) -> int:
        """Tokens that every plane has room for."""
        return self._parts.joined.plan.slots

    def _join(self, share: Share, planes: DevicePlanes) -> Joined:
        plan = Plan(share, planes, self.memory.address, self.memory.page_bytes)
        if plan.slots > MOST_SLOTS:
            raise ConfigError(f"planes: {plan.slots} slots, more than can be numbered (2**31 - 1)")
        return Joined(plan, self.device, self._launcher)

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
            streams: that produce the source: their work so far must finish first; None: the current
                stream.
            after: events (as torch.cuda.Event) to wait for as well.
            window: layers of a window, see `Transfer.wait_layer`; None: all layers.
            planes: where the tensors are now, if they moved. Their tables are copied to the device
                first, which blocks for a moment.
            when_done: see `Engine.offload`.

        Raises:
            ConfigError: bad pages or slots, a current stream that is being captured, streams of
                another device, a window or planes that do not fit.
            NotReady: a page that is not registered yet.
            Detached: the engine is closed, or this is a forked child.
        """
        return self._submit(
            self._in_flight.offload, moves, streams, after, window, planes, when_done
        )

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
        and `after` name work that may still touch the slots."""
        lane = self._in_flight.load
        return self._submit(lane, moves, streams, after, window, planes, when_done)

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
        in_flight = self._in_flight
        in_flight.check_open()
        with in_flight.lock, self.device.guard():
            if in_flight.closed:  # by another thread, meanwhile
                in_flight.check_open()
            waits, events = streams_of(streams, self.device), events_of(after)
            if self._parts.quick and window is None and planes is None and isinstance(moves, Move):
                quick = submit_page(self._parts, lane, moves, waits, events, when_done)
                if quick is not None:
                    return quick
            batch = flatten(moves, self.geometry, self.memory)
            if not lane.to_page:
                check_whole(batch)
            parts = self._joined_for(window, planes)
            check_slots(batch, min((part.plan.slots for part in parts), default=MOST_SLOTS))
            page_bytes = sum(part.plan.nbytes for part in parts)
            nbytes = page_bytes * batch.tokens // batch.page_tokens
            transfer = DeviceTransfer(in_flight, nbytes, when_done)
            in_flight.recycle(lane)
            job = Submission(self._parts, lane, transfer, batch, waits, events)
            try:
                job.prepare(parts, windowed=window is not None)
            except BaseException:
                job.drop()
                raise
            transfer.uses(job.block, (planes, parts))
            lane.transfers.append(transfer)
            job.start()
        return transfer

    def _joined_for(self, window: int | None, planes: DevicePlanes | None) -> list[Joined]:
        if planes is not None:
            check_planes(planes, self._keep.device)
        if window is None:
            return [self._parts.joined] if planes is None else [self._join(self.share, planes)]
        if planes is None and type(window) is int and window in self._windows:
            return self._windows[window]
        parts = [self._join(share, planes or self._keep) for share in self.share.windows(window)]
        if planes is None:
            self._windows[window] = parts
        return parts

    # ---- bookkeeping

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """See `Engine.will_tell`."""
        return self._in_flight.will_tell(call)

    def poll(self) -> int:
        """See `Engine.poll`.

        Raises:
            Detached: in a forked child.
            Otherwise what a `when_done` call raised; all other calls were made.
        """
        return self._in_flight.poll()

    def warm(self) -> None:
        """Compile every kernel and allocate the rings and index buffers now, so that no transfer
        does. Blocks for seconds the first time on a machine.

        Raises:
            Detached: the engine is closed.
        """
        self._in_flight.check_open()
        parts, blocks = self._parts, self._in_flight.blocks
        plan = parts.joined.plan
        with self._in_flight.lock, self.device.guard():
            self._in_flight.check_open()
            for lane in (self._in_flight.offload, self._in_flight.load):
                if self.mode in ("auto", "staged") and plan.contiguous and plan.nbytes:
                    parts.ring(lane)
                for packed in (False, True):
                    parts.joined.launches(packed, lane.to_page)
            for block in [blocks.take(1) for _ in range(2)]:
                blocks.give(block)

    def close(self) -> None:
        """Wait for transfers in flight, make their calls, release the memory. A second call does
        only what an interrupt left undone. Does nothing in a forked child. An engine that is
        dropped, or still open when Python ends, is closed.

        Raises:
            What a `when_done` call raised; the engine is closed all the same.
        """
        self._in_flight.close()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


def _show_memory(copier: Any, memory: HostPages) -> None:
    import torch

    copier.add(torch.from_numpy(memory.array))


def _end(in_flight: InFlight) -> None:
    with contextlib.suppress(Exception):  # the engine is gone: no caller is left to tell
        in_flight.close()


__all__ = ["MODES", "TransferEngine"]

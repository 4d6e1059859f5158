"""The transfer engine for machines without an accelerator, and the oracle for the device engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightcache.kernels.geometry import Cell, PageGeometry, Share
from lightcache.kernels.moves import (
    Batch,
    Ints,
    Move,
    check_sides,
    check_slots,
    check_whole,
    flatten,
    token_limit,
)
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.shm.errors import ConfigError, Detached, TransferFailed, WaitTimeout, leave
from lightcache.shm.waiting import Event

if TYPE_CHECKING:
    from concurrent.futures import Future


# ---- Host memory and device planes as numpy views

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[], None]

# An indexed copy costs about 0.1 us a row beside its bytes, a slice about 2 us.
_RUN_BYTES = 8 << 10

# Of one piece of work. numpy releases the GIL only for indexed copies of 500 items or more.
_PIECE_BYTES = 512 << 10
_PIECE_ROWS = 512
_ALL = 1 << 62


@dataclass(frozen=True)
class RowSeries:
    """A series of rows of one width that are evenly addressable on both sides: a cell of the page
    and its plane, or one head of the cell if the device keeps heads apart. Rows are numpy void
    items of the row's width, so an indexed copy moves each with memcpy and releases the GIL; runs
    of rows that are contiguous on both sides move as slices. Besides its bytes an indexed copy
    costs about 0.1 us a row, a slice about 2 us."""

    layer: int
    unit_tokens: int
    host: Bytes
    """uint8 of shape (pages, units, row_bytes)."""
    device: Bytes
    """uint8 of shape (slots, row_bytes), or (blocks, block_units, row_bytes)."""
    block_units: int
    """0 where slots are evenly spaced."""
    part: int = 0
    """Of the page, that `host` is in."""
    units: tuple[int, int] | None = None
    """First unit and end of those in this part; None: all of a page. `host` begins at the first."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.host.shape[-1])

    @cached_property
    def host_rows(self) -> npt.NDArray[np.void]:
        """(pages, units), each item a row."""
        return _items(self.host)

    @cached_property
    def device_rows(self) -> npt.NDArray[np.void]:
        """(slots,) or (blocks, block_units), each item a row."""
        return _items(self.device)


def _items(rows: Bytes) -> npt.NDArray[np.void]:
    items: npt.NDArray[np.void] = rows.view(f"V{rows.shape[-1]}")[..., 0]
    return items


class _Foreign:
    """Memory at an address, for numpy; keeps the owner of the memory alive."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def row_series(share: Share, memory: HostPages, planes: DevicePlanes) -> list[RowSeries]:
    """All rows of a share, in the order of the page.

    Raises:
        ConfigError: a plane was not described.
    """
    found: list[RowSeries] = []
    for cell in share.cells:
        device = planes.find(share.geometry, cell)
        together = cell.heads == 1 or device.head_stride == cell.plane.row_bytes
        for head in range(1 if together else cell.heads):
            row = cell.plane.row_bytes * (cell.heads if together else 1)
            offset = cell.offset + head * cell.plane.row_bytes
            address = (
                device.address
                + (cell.own_head + head) * device.head_stride
                + cell.row * device.row_stride
            )
            for piece in _pieces(offset, cell, row, memory.page_bytes):
                host = _host_view(memory, cell, piece)
                view, block_units = _device_view(device, address + piece.byte, piece.nbytes, planes)
                units = None if piece.units == cell.units else (piece.first, piece.end)
                found.append(
                    RowSeries(
                        cell.layer,
                        cell.plane.unit_tokens,
                        host,
                        view,
                        block_units,
                        piece.part,
                        units,
                    )
                )
    return found


class _Piece(NamedTuple):
    """Rows of a cell, or bytes of one row, that are in one part of the page."""

    part: int
    offset: int
    """Of the first byte, in the part."""
    first: int
    """Unit."""
    units: int
    byte: int
    """The first one of each row."""
    nbytes: int
    """Of each row."""

    @property
    def end(self) -> int:
        return self.first + self.units


def _pieces(offset: int, cell: Cell, row: int, part_bytes: int) -> Iterator[_Piece]:
    """Cut rows of a cell, which begin at `offset` in the page, at the borders of parts: rows that
    are whole stay together."""
    unit = 0
    while unit < cell.units:
        part, inside = divmod(offset + unit * cell.unit_stride, part_bytes)
        whole = (part_bytes - inside - row) // cell.unit_stride + 1
        if whole > 0:
            units = min(whole, cell.units - unit)
            yield _Piece(part, inside, unit, units, 0, row)
            unit += units
            continue
        byte = 0
        while byte < row:
            nbytes = min(row - byte, part_bytes - inside)
            yield _Piece(part, inside, unit, 1, byte, nbytes)
            byte, part, inside = byte + nbytes, part + 1, 0
        unit += 1


def _host_view(memory: HostPages, cell: Cell, piece: _Piece) -> Bytes:
    view: Bytes = np.ndarray(
        (memory.pages, piece.units, piece.nbytes),
        np.uint8,
        memory.array,
        piece.offset,
        (memory.page_bytes, cell.unit_stride, 1),
    )
    return view


def _device_view(
    device: DevicePlane, address: int, row: int, owner: DevicePlanes
) -> tuple[Bytes, int]:
    block_units, block_stride, unit_stride = device.spacing
    if block_units == 1:
        shape: tuple[int, ...] = (device.slots, row)
        strides: tuple[int, ...] = (block_stride, 1)
        block_units = 0
    else:
        shape = (-(-device.slots // block_units), block_units, row)
        strides = (block_stride, unit_stride, 1)
    view: Bytes = np.asarray(_Foreign(address, shape, strides, owner))
    return view, block_units


class Index:
    """Row numbers of a batch, for the series of one unit size and block size in the same units of
    one part."""

    def __init__(
        self,
        batch: Batch,
        unit_tokens: int,
        block_units: int,
        part: int = 0,
        units: tuple[int, int] | None = None,
    ) -> None:
        """Computed once for a transfer and shared by its series; O(rows). `part` and `units` are as
        in `RowSeries`."""
        self.page, self.unit, slot = batch.rows(unit_tokens, part)
        if batch.pages.shape[1] > 1:
            low, high = units or (0, _ALL)
            kept = (self.unit >= low) & (self.unit < high) & (self.page >= 0)
            self.page, self.unit, slot = self.page[kept], self.unit[kept] - low, slot[kept]
        self.rows = len(self.page)
        self.place: tuple[Ints, ...] = (slot,)
        if block_units:
            self.place = tuple(np.divmod(slot, block_units))

    @cached_property
    def runs(self) -> Ints:
        """The start of each run of neighbours, then the number of rows."""
        if not self.rows:
            return np.zeros(1, np.int64)
        breaks = (np.diff(self.page) != 0) | (np.diff(self.unit) != 1)
        breaks |= np.diff(self.place[-1]) != 1
        for block in self.place[:-1]:
            breaks |= np.diff(block) != 0
        return np.concatenate(([0], np.flatnonzero(breaks) + 1, [self.rows]))

    def pieces(self, series: RowSeries, to_host: bool) -> Iterator[tuple[int, Copy]]:
        """(bytes, call) of each piece of work of a series; they may run in any order."""
        bounds, row = self.runs, series.row_bytes
        if self.rows * row >= (len(bounds) - 1) * _RUN_BYTES:
            step = max(1, _PIECE_BYTES * (len(bounds) - 1) // max(1, self.rows * row))
            for low in range(0, len(bounds) - 1, step):
                part = bounds[low : low + step + 1]
                yield int(part[-1] - part[0]) * row, partial(self._slices, series, part, to_host)
        else:
            step = max(_PIECE_ROWS, _PIECE_BYTES // row)
            for low in range(0, self.rows, step):
                rows = slice(low, min(low + step, self.rows))
                yield (rows.stop - low) * row, partial(self._indexed, series, rows, to_host)

    def _indexed(self, series: RowSeries, rows: slice, to_host: bool) -> None:
        host = self.page[rows], self.unit[rows]
        device: Any = tuple(part[rows] for part in self.place)
        if to_host:
            series.host_rows[host] = series.device_rows[device]
        else:
            series.device_rows[device] = series.host_rows[host]

    def _slices(self, series: RowSeries, bounds: Ints, to_host: bool) -> None:
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            unit, slot = int(self.unit[low]), int(self.place[-1][low])
            host = series.host[int(self.page[low]), unit : unit + high - low]
            device = series.device
            if series.block_units:
                device = device[int(self.place[0][low])]
            device = device[slot : slot + high - low]
            if to_host:
                host[...] = device
            else:
                device[...] = host


# ---- One transfer

HELP_BYTES = 256 << 10  # waking another thread takes about as long as copying this much


class Pace:
    """A rate limit in bytes a second: decides when each piece may begin."""

    def __init__(self, rate: float) -> None:
        """In bytes a second."""
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Sleep until `nbytes` bytes may move."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + nbytes / self._rate
        if begin > now:
            time.sleep(begin - now)


class Window:
    """Layers that `wait_layer` waits for together."""

    def __init__(self, layers: Sequence[int], pieces: list[tuple[int, Copy]]) -> None:
        """Pieces as `Index.pieces` gives them."""
        self.layers = frozenset(layers)
        self.pieces = pieces
        self.left = len(pieces)
        self.finished = Event()
        if not pieces:
            self.finished.set()


class HostTransfer:
    """See `Transfer`. The thread that runs it refers to it, and so to all that its `when_done`
    calls hold."""

    def __init__(
        self,
        to_host: bool,
        windows: list[Window],
        befores: Sequence[Any],
        pace: Pace | None,
        when_done: Callable[[bool], None] | None = None,
    ) -> None:
        """For HostEngine; `run` does the work.

        Args:
            to_host: whether it offloads.
            befores: waited for before the first byte, with `synchronize()` or `wait()`.
        """
        self.to_host = to_host
        work = [(window, size, copy) for window in windows for size, copy in window.pieces]
        self.nbytes = sum([size for _, size, _ in work])
        self.claimed = False
        """Whether a thread has begun with it; see `TransferQueue`."""
        self._windows = windows
        self._befores: Sequence[Any] = befores
        self._pace = pace
        self._work: deque[tuple[Window, int, Copy]] = deque(work)
        self._pieces = len(self._work)
        self._cause: BaseException | None = None
        self._finished = Event()
        self._lock = threading.Lock()
        self._calls = [] if when_done is None else [when_done]

    # ---- for callers that wait

    @property
    def finished(self) -> bool:
        """Whether it has finished, failed or not. Does not block, calls nothing, raises nothing."""
        return self._finished.is_set()

    def done(self) -> bool:
        """See `Transfer.done`."""
        if not self._finished.is_set():
            return False
        self.notice()
        self._check()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See `Transfer.wait`."""
        if not self._finished.wait(timeout):
            raise WaitTimeout(
                f"a transfer of {self.nbytes} bytes has not finished after {timeout} s; wait again"
            )
        self.notice()
        self._check()

    def synchronize(self) -> None:
        """Block until it has finished, without making `when_done` calls: for another transfer's
        `after=`.

        Raises:
            TransferFailed: it failed.
        """
        self._finished.wait()
        self._check()

    def wait_on(self, stream: Any = None) -> None:
        """Block until it has finished: a CPU has no streams.

        Raises:
            TransferFailed: it failed.
        """
        self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None, *, timeout: float | None = None) -> None:
        """Block until the window that holds a layer is done.

        Raises:
            ConfigError: a layer that does not move.
            WaitTimeout: it is not done after `timeout` seconds.
            TransferFailed: it failed.
        """
        for window in self._windows:
            if layer in window.layers:
                if not window.finished.wait(timeout):
                    raise WaitTimeout(f"layer {layer} is not there after {timeout} s; wait again")
                self._check()
                return
        moved = sorted(layer for window in self._windows for layer in window.layers)
        raise ConfigError(f"layer: expected one of those that move ({moved}), found {layer!r}")

    def notice(self) -> None:
        """Make the `when_done` call if it is pending. One thread makes it, once."""
        try:
            call = self._calls.pop()
        except IndexError:  # there is none, or another thread was faster
            return
        call(self._cause is None)

    def tells(self, call: Callable[[bool], None]) -> bool:
        """Whether this call is pending."""
        return call in self._calls

    @property
    def waited_for(self) -> bool:
        """Whether any call is pending."""
        return bool(self._calls)

    def _check(self) -> None:
        if self._cause is not None:
            raise TransferFailed(
                f"a transfer of {self.nbytes} bytes failed ({self._cause}); its destination is "
                "undefined, treat it as missing"
            ) from self._cause

    # ---- for the threads that run it

    def run(self, submit: Callable[[Copy], Future[None]], threads: int) -> None:
        """Run the transfer in this thread and up to `threads` - 1 others; return when it has
        finished. Never raises: `done` raises the error."""
        helpers = []
        try:
            for before in self._befores:
                _await(before)
            self._befores = ()  # streams and events are not kept longer than they are needed
            with contextlib.suppress(RuntimeError):  # Python is ending: no helpers any more
                for _ in range(min(threads, self._pieces, 1 + self.nbytes // HELP_BYTES) - 1):
                    helpers.append(submit(self._copy))
            self._copy()
        except BaseException as error:
            self._cause = self._cause or error
        for helper in helpers:  # one that has not begun may be queued after another transfer's
            if not helper.cancel():
                helper.result()
        self._finish()

    def _copy(self) -> None:
        """Copy pieces until none is left."""
        while self._cause is None:
            try:
                window, size, copy = self._work.popleft()
            except IndexError:
                return
            try:
                if self._pace is not None:
                    self._pace.wait(size)
                copy()
            except BaseException as error:
                self._cause = error
                return
            with self._lock:
                window.left -= 1
                last = window.left == 0
            if last and self._cause is None:
                window.finished.set()

    def _finish(self) -> None:
        self._work.clear()
        for window in self._windows:
            window.pieces = []
            window.finished.set()
        self._finished.set()


def _await(before: Any) -> None:
    wait = getattr(before, "synchronize", None) or before.wait
    wait()


# ---- The queue of transfers


class TransferQueue:
    """Runs transfers of one direction one after another, and keeps each until its end is noticed.

    A transfer has begun once it is in `open`: if an interrupt follows at once, the next `begin`,
    `poll` or `close` starts it. The threads refer to this queue and not to the engine, so an engine
    that is dropped still finishes its transfers.
    """

    def __init__(self, threads: int) -> None:
        """Both directions share `threads` helpers; each has a thread of its own as well."""
        from concurrent.futures import (
            ThreadPoolExecutor,  # 20 ms, which most programs can do without
        )

        name = "lightcache-copy"
        self.open: list[HostTransfer] = []
        self._threads = threads
        self._lock = threading.Lock()
        self._helpers = ThreadPoolExecutor(threads, f"{name}-helper")
        self._lines = [ThreadPoolExecutor(1, f"{name}-{way}") for way in ("load", "offload")]
        self._last: list[Future[None] | None] = [None, None]

    def begin(self, transfer: HostTransfer) -> None:
        """Queue a transfer after those before it. Does not block.

        Raises:
            Detached: closed meanwhile; the transfer does not run.
        """
        with self._lock:
            self.open[:] = [each for each in self.open if not each.finished or each.waited_for]
        self.open.append(transfer)
        try:
            self._schedule(transfer.to_host)
        except RuntimeError as error:  # closed by another thread, or Python is ending
            with self._lock:
                if transfer.claimed:  # all the same
                    return
                transfer.claimed = True
                self.open.remove(transfer)
            raise Detached(f"the engine takes no transfers any more: {error}") from None

    def _schedule(self, to_host: bool) -> None:
        self._last[to_host] = self._lines[to_host].submit(self._drain, to_host)

    def _drain(self, to_host: bool) -> None:
        while (transfer := self._claim(to_host)) is not None:
            transfer.run(self._helpers.submit, self._threads)

    def _claim(self, to_host: bool) -> HostTransfer | None:
        with self._lock:
            for transfer in self.open:
                if transfer.to_host == to_host and not transfer.claimed:
                    transfer.claimed = True
                    return transfer
        return None

    def poll(self) -> int:
        """Make the pending calls of finished transfers; returns the number in flight."""
        for transfer in list(self.open):
            if transfer.finished:
                transfer.notice()
                with self._lock:
                    self.open[:] = [other for other in self.open if other is not transfer]
            elif not transfer.claimed:
                last = self._last[transfer.to_host]
                if last is None or last.done():
                    self._schedule(transfer.to_host)
        return len(self.open)

    def close(self) -> None:
        """Wait for all transfers, and end the threads. May be called again."""
        for transfer in list(self.open):
            if not transfer.claimed:
                self._schedule(transfer.to_host)
        for line in self._lines:
            line.shutdown()
        self._helpers.shutdown()
        self.poll()


# ---- The engine

MAX_THREADS = 64


class HostEngine:
    """Moves pages between host memory and one rank's planes in CPU memory, by threads.

        engine = HostEngine(geometry, planes, HostPages(cache.pool.array))
        transfer = engine.offload(Move(pages, slots))
        ...
        transfer.wait()

    Transfers of one direction run one after another, in the order of their calls, each by all
    threads: two that touch the same page or slot have the same result as if run one by one. Loads
    and offloads are not ordered, so that loads do not queue behind offloads: to order two of them,
    pass the first transfer as `after=`.

    Calls return at once. The caller's thread makes `when_done` calls, within `done`, `wait` or
    `poll`; the engine's threads never do. The engine keeps the memory and the planes alive; close
    it before the cache.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        planes: DevicePlanes,
        memory: HostPages,
        *,
        share: Share | None = None,
        threads: int = 4,
        rate: float | None = None,
    ) -> None:
        """Describe both sides, once.

        Args:
            geometry: of the pages; `page_bytes` at most the memory's, or `part_bytes` equal to it.
            planes: in CPU memory.
            share: what this rank moves; None: everything.
            threads: that copy one transfer in parallel. With transfers of both directions in
                flight, at most two more.
            rate: most bytes a second in each direction; None: no limit.

        Raises:
            ConfigError: sides that do not fit, planes of a device, a layer without planes, or
                numbers out of range.
        """
        self.geometry = geometry
        self.share = geometry.share() if share is None else share
        check_sides(geometry, memory, self.share)
        if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"threads: expected 1 to {MAX_THREADS}, found {threads!r}")
        if rate is not None and not rate > 0:
            raise ConfigError(f"rate: expected bytes a second or None, found {rate!r}")
        self._planned: _Plan | None = _Plan(geometry, self.share, memory, planes)
        self.slots = self._planned.limit
        self._paces = [Pace(rate) if rate else None for _ in range(2)]
        self._pid = os.getpid()
        self._queue = TransferQueue(threads)

    def offload(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Sequence[Any] | None = None,
        after: Sequence[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> HostTransfer:
        """Copy device planes to pages.

        Args:
            moves: pages and slots; the arrays may be changed once this returns.
            streams: that produce the source: each is waited for with `synchronize()`. None: the
                source is ready.
            after: events of work that may still touch the destination: objects with `synchronize()`
                or `wait()`, waited for before the first byte moves.
            window: layers that `wait_layer` waits for together; None: all.
            planes: other planes of the same shape, for this call.
            when_done: see `Engine.offload`.

        Raises:
            ConfigError: see `flatten`, `check_slots`; nothing was copied.
            Detached: closed, or a forked child.
        """
        return self._begin(True, moves, _all(streams or (), after), window, planes, when_done)

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Sequence[Any] | None = None,
        after: Sequence[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
        when_done: Callable[[bool], None] | None = None,
    ) -> HostTransfer:
        """Copy pages to device planes; arguments and errors as `offload`."""
        return self._begin(False, moves, _all(streams or (), after), window, planes, when_done)

    def _begin(
        self,
        to_host: bool,
        moves: Move | Sequence[Move],
        befores: Sequence[Any],
        window: int | None,
        planes: DevicePlanes | None,
        when_done: Callable[[bool], None] | None,
    ) -> HostTransfer:
        plan = self._usable()
        if to_host and not plan.memory.array.flags.writeable:
            raise ConfigError("offload: this memory is read-only; attach to the cache for writing")
        if planes is not None:
            plan = _Plan(self.geometry, self.share, plan.memory, planes)
        batch = flatten(moves, self.geometry, plan.memory)
        if not to_host:
            check_whole(batch)
        check_slots(batch, plan.limit)
        windows = plan.windows(batch, self.share, window, to_host)
        transfer = HostTransfer(to_host, windows, befores, self._paces[to_host], when_done)
        self._queue.begin(transfer)
        return transfer

    def _usable(self) -> _Plan:
        if self._planned is None:
            raise Detached("this engine was closed; make another one")
        if os.getpid() != self._pid:
            raise Detached("this engine's threads are in the parent process; make one here")
        return self._planned

    def will_tell(self, call: Callable[[bool], None]) -> bool:
        """See `Engine.will_tell`."""
        return any(transfer.tells(call) for transfer in list(self._queue.open))

    def poll(self) -> int:
        """See `Engine.poll`. Does not block, but for what the calls do."""
        return self._queue.poll()

    def close(self) -> None:
        """Wait for all transfers, make their `when_done` calls, drop the views of both sides. A
        second call does nothing.

        Raises:
            Detached: in a forked child.
        """
        if self._planned is not None:
            self._usable()
            self._queue.close()
            self._planned = None

    def __enter__(self) -> HostEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


class _Plan:
    """Both sides as views, and the number of tokens on the device."""

    def __init__(
        self, geometry: PageGeometry, share: Share, memory: HostPages, planes: Any
    ) -> None:
        if not isinstance(planes, DevicePlanes) or planes.device != "cpu":
            device_found = getattr(planes, "device", repr(planes))
            raise ConfigError(
                f"planes: expected DevicePlanes of the cpu, found {device_found}; a device needs "
                "lightcache.kernels.engine.TransferEngine"
            )
        self.memory = memory
        self.limit = token_limit(geometry, planes, share)
        self._by_layer: dict[int, list[RowSeries]] = {}
        for series in row_series(share, memory, planes):
            self._by_layer.setdefault(series.layer, []).append(series)

    def windows(self, batch: Batch, share: Share, size: int | None, to_host: bool) -> list[Window]:
        """The pieces of work of a batch, window by window."""
        parts = [share] if size is None else share.windows(size)
        indexes: dict[Any, Index] = {}

        def index(series: RowSeries) -> Index:
            kind = series.unit_tokens, series.block_units, series.part, series.units
            if kind not in indexes:
                indexes[kind] = Index(batch, *kind)
            return indexes[kind]

        return [
            Window(
                part.layers,
                [
                    piece
                    for layer in part.layers
                    for series in self._by_layer[layer]
                    for piece in index(series).pieces(series, to_host)
                ],
            )
            for part in parts
        ]


def _all(streams: Sequence[Any], after: Sequence[Any]) -> tuple[Any, ...]:
    """Events to wait for before the first byte moves."""
    try:
        events = (*streams, *after)
    except TypeError:
        raise ConfigError(f"after: expected a sequence of events, found {after!r}") from None
    for event in events:
        if not hasattr(event, "synchronize") and not hasattr(event, "wait"):
            raise ConfigError(
                f"after: expected events, with synchronize() or wait(), found {event!r}"
            )
    return events


__all__ = [
    "Copy",
    "HostEngine",
    "HostTransfer",
    "Index",
    "Pace",
    "RowSeries",
    "Window",
    "row_series",
]

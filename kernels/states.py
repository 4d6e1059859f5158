"""StateCopier: recurrent states from slot to slot of one device, all requests of a step at once.

    copier = StateCopier(geometry, planes)
    copy = copier.copy(sources, targets)    # a source of -1 sets to zero
    ...
    if copy.done(): ...                     # now the sources may change

A checkpoint never changes: a request that continues from one gets a copy in its own slot, on the
stream of the step that reads it and before that step, so that nothing waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache.kernels.device import CudaDevice
from lightcache.kernels.geometry import Cell, PageGeometry, Rule, Share
from lightcache.kernels.options import check_planes, size_of
from lightcache.kernels.planes import DevicePlane, DevicePlanes
from lightcache.kernels.rows import WIDEST
from lightcache.shm.errors import ConfigError, TransferFailed, require

# ---- Runs: contiguous bytes of a state, evenly spaced from slot to slot

Table = npt.NDArray[np.int64]


def state_runs(share: Share, planes: DevicePlanes) -> Table:
    """Runs of one state of a rank, int64 of shape (n, 3): address in slot 0, bytes between slots,
    bytes. Runs that are contiguous in every slot are merged.

    Raises:
        ConfigError: pages that are not states, missing planes, or slots in blocks.
    """
    rule = share.geometry.rule
    if rule != Rule.point():
        raise ConfigError(
            f"states: expected a geometry of KVGroup.state, found one of rule {rule.name!r}"
        )
    runs: list[tuple[int, int, int]] = []
    for cell in share.cells:
        plane = planes.find(share.geometry, cell)
        runs += _runs(cell, plane, _distance(cell, plane))
    joined: list[tuple[int, int, int]] = []
    for stride, address, nbytes in sorted(runs):
        if joined and joined[-1][0] == stride and sum(joined[-1][1:]) == address:
            nbytes += joined[-1][2]
            address = joined.pop()[1]
        joined.append((stride, address, nbytes))
    table = [(address, stride, nbytes) for stride, address, nbytes in joined]
    return np.array(table, np.int64).reshape(-1, 3)


def _distance(cell: Cell, plane: DevicePlane) -> int:
    block_units, _, distance = plane.spacing
    if block_units != 1:
        raise ConfigError(
            f"plane {cell.plane.name!r} of layer {cell.layer}: expected states evenly spaced, "
            f"found blocks of {block_units}; describe a plane whose slots are one stride apart"
        )
    return distance


def _runs(cell: Cell, plane: DevicePlane, distance: int) -> list[tuple[int, int, int]]:
    row, head = cell.plane.row_bytes, plane.head_stride
    start = plane.address + cell.row * plane.row_stride + cell.own_head * head
    if cell.heads == 1 or head == row:
        return [(distance, start, cell.heads * row)]
    return [(distance, start + number * head, row) for number in range(cell.heads)]


def tiles_of(runs: Table, most: int) -> Table:
    """The same runs in tiles of at most `most` bytes each."""
    counts = -(-runs[:, 2] // most)
    rows = np.repeat(runs, counts, axis=0)
    firsts = np.cumsum(counts) - counts
    offset = (np.arange(len(rows)) - np.repeat(firsts, counts)) * most
    rows[:, 0] += offset
    rows[:, 2] = np.minimum(rows[:, 2] - offset, most)
    return rows


def word_of(runs: Table) -> int:
    """Bytes of the widest access that every address, distance and length is a multiple of."""
    return math.gcd(WIDEST, *(int(value) for value in runs.ravel()))


# ---- The copier

Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
Pairs = npt.NDArray[np.int64]
ZERO = -1
"""As a source: the target is set to zero."""
TILE = 1024  # 16 KiB of 16-byte accesses for 256 threads: four in flight for each
WARPS = 8
_ROOM = 256  # initial pairs of a buffer
_MOST_ITEMS = (1 << 31) - 1  # tiles of a launch, counted in 32 bits


class StateCopy:
    """Enqueued copies. Their sources must not change until they have finished."""

    def __init__(self, device: Any = None, event: Any = None) -> None:
        """For `StateCopier`: a device event recorded after them; None: they have finished."""
        self._device, self._event = device, event

    def done(self) -> bool:
        """Whether they have finished; False while a thread captures a graph, since the device
        cannot be asked then. Does not block.

        Raises:
            TransferFailed: the device has failed.
        """
        try:
            if self._event is not None and self._event.query():
                self._event = None
        except Exception as error:
            if self._device.lost(error):
                raise self._failed(error) from error
        return self._event is None

    def wait(self) -> None:
        """Block until they have finished.

        Raises:
            TransferFailed: the device has failed.
        """
        if self._event is None:
            return
        try:
            self._event.synchronize()
        except Exception as error:
            raise self._failed(error) from error
        self._event = None

    def _failed(self, error: Exception) -> TransferFailed:
        return TransferFailed(
            f"states were not copied: {error!r}; what is in the slots that were to be written does "
            "not count"
        )


class StateCopier:
    """Copies states of one rank between slots. Thread-safe; calls enqueue and return."""

    def __init__(
        self,
        geometry: PageGeometry,
        planes: DevicePlanes,
        *,
        share: Share | None = None,
        programs: int | None = None,
        device: Any = None,
    ) -> None:
        """Find the bytes of a state.

        Args:
            geometry: of `KVGroup.state` groups.
            planes: where the engine keeps its states: on a GPU, or on the CPU, where copies have
                finished when `copy` returns.
            share: this rank's part; None: everything. See `PageGeometry.share`.
            programs: most programs of the kernel. None: one for each 16 KiB, which is fastest;
                fewer leave multiprocessors to other kernels.
            device: for tests; None: the GPU that the planes are on.

        Raises:
            ConfigError: no states, missing planes, or an unknown device.
        """
        check_planes(planes)
        share = geometry.share() if share is None else share
        self._keep = planes
        self._runs = state_runs(share, planes)
        self.nbytes = int(self._runs[:, 2].sum())
        """Bytes of one state of this rank."""
        plane_slots = [planes.find(geometry, cell).slots for cell in share.cells]
        self.slots = min(plane_slots, default=0)
        """Slots that every plane has: 0 to slots - 1."""
        self._side: _Kernel | _Host = _Host(self._runs)
        if planes.device != "cpu" or device is not None:
            used = CudaDevice(planes.device) if device is None else device
            self._side = _Kernel(self._runs, used, size_of(programs, "programs", _MOST_ITEMS))

    def copy(self, sources: Slots, targets: Slots, stream: Any = None) -> StateCopy:
        """Copy state `sources[i]` to slot `targets[i]`, for all i in one launch. Reads the sources
        when the stream reaches the launch. Without any pair the result tells when the stream has
        reached this point.

        Args:
            sources: slots; `ZERO` (-1): zeros. A slot may occur several times.
            targets: distinct slots, none of which is a source of the same call.
            stream: of the device; None: the current one.

        Raises:
            ConfigError: slots out of range, different numbers of sources and targets, a target
                twice or also a source; or a stream that is being captured.
        """
        return self._side.copy(self._checked(sources, targets), stream)

    def zero(self, slots: Slots, stream: Any = None) -> StateCopy:
        """Set slots to zero: the state before the first token. As `copy` otherwise."""
        return self.copy(np.full(len(slots), ZERO), slots, stream)

    def _checked(self, sources: Slots, targets: Slots) -> Pairs:
        read, written = _numbers(sources, "sources"), _numbers(targets, "targets")
        if len(read) != len(written):
            raise ConfigError(
                f"expected as many sources as targets, found {len(read)} and {len(written)}"
            )
        for name, slots, least in (("sources", read, ZERO), ("targets", written, 0)):
            wrong = (slots < least) | (slots >= self.slots)
            if wrong.any():
                raise ConfigError(
                    f"{name}: expected slots {least} to {self.slots - 1}, found {slots[wrong][0]}"
                )
        if len(set(written.tolist())) != len(written):
            raise ConfigError("targets: a slot is written twice; name each once")
        both = set(written.tolist()) & set(read.tolist())
        if both:
            raise ConfigError(
                f"slot {min(both)} is read and written in one call, in no order; copy in two calls"
            )
        return np.stack([read, written], axis=1)


def _numbers(slots: Slots, name: str) -> npt.NDArray[np.int64]:
    numbers = np.asarray(slots)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name}: expected slots as integers of shape (n,), found {numbers.dtype} "
            f"{numbers.shape}"
        )
    return numbers.astype(np.int64)


class _Buffer:
    """Pairs on their way to the device."""

    def __init__(self, device: Any, room: int) -> None:
        self.host, self.there = device.words(2 * room)
        self.room = room
        self.event: Any = None

    def free(self) -> bool:
        return self.event is None or bool(self.event.query())


class _Kernel:
    """On a GPU."""

    def __init__(self, runs: Table, device: Any, programs: int) -> None:
        self._device, self._programs = device, programs
        self._word = word_of(runs) if len(runs) else 1
        table = tiles_of(runs, TILE * self._word)
        self._count = len(table)
        with device.guard():
            host, self._tiles = device.words(max(1, table.size))
            host[: table.size] = _tensor(table.reshape(-1))
            self._tiles.copy_(host)
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []

    def copy(self, pairs: Pairs, stream: Any) -> StateCopy:
        items = len(pairs) * self._count
        if items > _MOST_ITEMS:
            most = _MOST_ITEMS // self._count
            raise ConfigError(f"copy: expected at most {most} states, found {len(pairs)}")
        device = self._device
        chosen = contextlib.nullcontext() if stream is None else device.on(stream)
        with self._lock, device.guard(), chosen:
            stream, event = device.current(), device.event()
            if not items:
                event.record(stream)
                return StateCopy(device, event)
            buffer = self._buffer(len(pairs))
            buffer.event = event
            try:
                self._launch(buffer, pairs, items)
            finally:  # also if the launch was refused: the buffer's copy may be in flight
                event.record(stream)
            return StateCopy(device, event)

    def _launch(self, buffer: _Buffer, pairs: Pairs, items: int) -> None:
        require("triton", "kernels", "copying states on a GPU")
        from lightcache.kernels.state_copy import copy_states

        buffer.host[: pairs.size] = _tensor(pairs.reshape(-1))
        part = buffer.there[: pairs.size]
        part.copy_(buffer.host[: pairs.size], non_blocking=True)
        copy_states[(min(self._programs, items),)](
            self._tiles,
            part,
            self._count,
            len(pairs),
            WORD=self._word,
            TILE=TILE,
            num_warps=WARPS,
        )

    def _buffer(self, pairs: int) -> _Buffer:
        """A buffer that no copy reads any more, or a new one rather than waiting."""
        for buffer in self._buffers:
            if buffer.room >= pairs and buffer.free():
                return buffer
        new_buffer = _Buffer(self._device, max(_ROOM, pairs))
        self._buffers.append(new_buffer)
        return new_buffer


class _Host:
    """In host memory, at once."""

    def __init__(self, runs: Table) -> None:
        self._runs = [tuple(run) for run in runs.tolist()]

    def copy(self, pairs: Pairs, stream: Any) -> StateCopy:
        del stream
        for source, target in pairs.tolist():
            for address, distance, nbytes in self._runs:
                slot_address = address + target * distance
                if source == ZERO:
                    ctypes.memset(slot_address, 0, nbytes)
                else:
                    ctypes.memmove(slot_address, address + source * distance, nbytes)
        return StateCopy()


def _tensor(array: npt.NDArray[np.int64]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


__all__ = [
    "ZERO",
    "Slots",
    "StateCopier",
    "StateCopy",
    "Table",
    "state_runs",
    "tiles_of",
    "word_of",
]

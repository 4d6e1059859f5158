"""The transfer engine of machines without an accelerator, and the oracle of the one for devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightcache.kernels.geometry import PageGeometry, Share
from lightcache.kernels.host_lanes import Index, Lane, lanes
from lightcache.kernels.host_transfer import HostTransfer, Pace, Window
from lightcache.kernels.memory import HostPages
from lightcache.kernels.moves import Batch, check_sides, check_slots, flatten, token_limit
from lightcache.kernels.planes import DevicePlanes
from lightcache.kernels.transfer import Move
from lightcache.shm.errors import ConfigError, Detached

MAX_THREADS = 64


class HostEngine:
    """Moves pages between host memory and one rank's planes in CPU memory, by threads.

        engine = HostEngine(geometry, planes, HostPages(cache.pool.array))
        transfer = engine.offload(Move(pages, slots))
        ...
        transfer.wait()

    Transfers of one direction run one after another, in the order of their calls, each by all
    threads: two that touch the same page or slot leave what they would have left one by one.
    Between offloading and loading there is no order, so that loads do not queue behind offloads:
    where one needs the other, give its transfer as `after=`.

    Calls return at once; `when_done` calls are made by whoever asks (`done`, `wait`, `poll`), never
    by the engine's threads. The memory and the planes are kept alive; close the engine before the
    cache.
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
            geometry: of the pages; `page_bytes` at most the memory's.
            planes: in CPU memory.
            share: what this rank moves; None: everything.
            threads: that copy a transfer side by side. With transfers of both directions under way
                two more than these at most.
            rate: bytes a second, at most, in each direction; None: no limit.

        Raises:
            ConfigError: sides that do not fit, planes of a device or a layer without one, or
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
        self._paces = [Pace(rate) if rate else None for _ in range(2)]
        self._pid = os.getpid()
        from lightcache.kernels.host_queue import TransferQueue  # its imports cost 20 ms

        self._queue = TransferQueue(threads)

    def offload(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Sequence[Any] | None = None,
        after: Sequence[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
    ) -> HostTransfer:
        """Copy device planes to pages.

        Args:
            moves: what goes where; arrays may be changed when this returns.
            streams: that produce the source: each is waited for with `synchronize()`. None: the
                source is there.
            after: whoever may still touch the destination: anything with `synchronize()` or
                `wait()`, waited for before the first byte moves.
            window: layers that `wait_layer` waits for together; None: all.
            planes: other planes of the same shape, for this call.

        Raises:
            ConfigError: see `flatten`, `check_slots`; nothing was copied.
            Detached: closed, or a forked child.
        """
        return self._begin(True, moves, _all(streams or (), after), window, planes)

    def load(
        self,
        moves: Move | Sequence[Move],
        *,
        streams: Sequence[Any] | None = None,
        after: Sequence[Any] = (),
        window: int | None = None,
        planes: DevicePlanes | None = None,
    ) -> HostTransfer:
        """Copy pages to device planes; arguments and errors as `offload`."""
        return self._begin(False, moves, _all(streams or (), after), window, planes)

    def _begin(
        self,
        to_host: bool,
        moves: Move | Sequence[Move],
        befores: Sequence[Any],
        window: int | None,
        planes: DevicePlanes | None,
    ) -> HostTransfer:
        plan = self._usable()
        if to_host and not plan.memory.array.flags.writeable:
            raise ConfigError("offload: this memory is read-only; attach to the cache for writing")
        if planes is not None:
            plan = _Plan(self.geometry, self.share, plan.memory, planes)
        batch = flatten(moves, self.geometry, plan.memory)
        check_slots(batch, plan.limit)
        windows = plan.windows(batch, self.share, window, to_host)
        transfer = HostTransfer(to_host, windows, befores, self._paces[to_host])
        self._queue.begin(transfer)
        return transfer

    def _usable(self) -> _Plan:
        if self._planned is None:
            raise Detached("this engine was closed; make another one")
        if os.getpid() != self._pid:
            raise Detached("this engine's threads are in the parent process; make one here")
        return self._planned

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

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Plan:
    """Both sides as views, and how many tokens there are on the device."""

    def __init__(
        self, geometry: PageGeometry, share: Share, memory: HostPages, planes: Any
    ) -> None:
        if not isinstance(planes, DevicePlanes) or planes.device != "cpu":
            found = getattr(planes, "device", repr(planes))
            raise ConfigError(
                f"planes: expected DevicePlanes of the cpu, found {found}; a device needs "
                "lightcache.kernels.engine.TransferEngine"
            )
        self.memory = memory
        self.limit = token_limit(geometry, planes, share)
        self._by_layer: dict[int, list[Lane]] = {}
        for lane in lanes(share, memory, planes):
            self._by_layer.setdefault(lane.layer, []).append(lane)

    def windows(self, batch: Batch, share: Share, size: int | None, to_host: bool) -> list[Window]:
        """The pieces of work of a batch, window by window."""
        parts = [share] if size is None else share.windows(size)
        made: dict[tuple[int, int], Index] = {}

        def index(lane: Lane) -> Index:
            kind = lane.unit_tokens, lane.block_units
            if kind not in made:
                made[kind] = Index(batch, *kind)
            return made[kind]

        return [
            Window(
                part.layers,
                [
                    piece
                    for layer in part.layers
                    for lane in self._by_layer[layer]
                    for piece in index(lane).pieces(lane, to_host)
                ],
            )
            for part in parts
        ]


def _all(streams: Sequence[Any], after: Sequence[Any]) -> tuple[Any, ...]:
    """What must be over before the first byte moves."""
    try:
        found = (*streams, *after)
    except TypeError:
        raise ConfigError(f"after: expected a sequence of events, found {after!r}") from None
    for each in found:
        if not hasattr(each, "synchronize") and not hasattr(each, "wait"):
            raise ConfigError(
                f"after: expected events, with synchronize() or wait(), found {each!r}"
            )
    return found


__all__ = ["HostEngine"]

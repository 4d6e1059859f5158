"""ReservationBatch: reservations of several requests, made by one call of the core."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache.errors import Abandoned, ConfigError, LeaseLost, LightcacheError
from lightcache.layout import KeyStatus
from lightcache.reservations import Reservation
from lightcache.shm.codes import Code, check, error

if TYPE_CHECKING:
    from lightcache._arguments import Keys, Offsets, Pages
    from lightcache.page_index import PageIndex

_PROGRESS = np.dtype(layout.ReserveProgress)
_NEW = int(KeyStatus.NEW)


class ReservationBatch:
    """The reservations of several requests, made in one call. Published and released together, or
    split. Each is one of its own: others may see some of them and not the rest."""

    def __init__(
        self, index: PageIndex, bounds: Offsets, starts: Offsets, shards: int, namespace: int
    ) -> None:
        """For PageIndex: nothing is reserved yet. The arguments are sound."""
        self._done = True  # an interrupt before the last line: nothing to give back
        self._index, self._bounds, self._starts = index, bounds, starts
        self._sizes = bounds[1:] - bounds[:-1] - starts
        total = int(self._sizes.sum())
        self._page = np.full(total, -1, np.int32)
        self._status = np.zeros(total, np.uint8)
        self._records = bytearray(len(starts) * _PROGRESS.itemsize)
        self._progress = np.frombuffer(self._records, _PROGRESS)
        self._progress["shards"] = shards
        self._progress["ns"] = namespace
        self._published: list[LightcacheError | None] = []
        self._done = False

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._starts)

    @property
    def all_new(self) -> bool:
        """Whether every key that was asked for has a new page."""
        return int(self._progress["made"].sum()) == len(self._page)

    @property
    def pages(self) -> Pages:
        """The pages to write, int32, one request's behind the other's; pinned until the end."""
        if self.all_new:
            every: Pages = self._page.copy()
            return every
        found: Pages = self._page[self._status == _NEW]
        return found

    def publish(self) -> list[LightcacheError | None]:
        """Say that all shards of all new pages are written. No lock. One that fails holds up no
        other: for each request None, or what `Reservation.publish` would have raised.

        Raises:
            Abandoned: released or split before.
            LeaseLost: published before.
            Detached: closed, or a forked child.
        """
        if self._done:
            raise Abandoned("publish: this batch has ended; reserve again and write again")
        if self._published:
            raise LeaseLost("publish: this batch was published before; do it once")
        self._index._segment.check_usable()
        pages, codes = self.pages, np.zeros(len(self), np.int32)
        code = self._index._quick.lci_publish_many(
            self._index._handle,
            _arguments.address(self._progress),
            len(self),
            _arguments.address(pages),
            _arguments.address(codes),
        )
        check(code, "publish")
        self._published = [None if code >= 0 else _refused(code) for code in codes.tolist()]
        return self._published

    def split(self) -> list[Reservation]:
        """A reservation for each request, each to be published and released on its own; this batch
        is empty then.

        Raises:
            LeaseLost: released, split or published before.
        """
        if self._done or self._published:
            raise LeaseLost("split: this batch was released, split or published before")
        parts, at = [], 0
        for i, size in enumerate(self._sizes.tolist()):
            progress = layout.ReserveProgress.from_buffer(self._records, i * _PROGRESS.itemsize)
            page, status = self._page[at : at + size], self._status[at : at + size]
            parts.append(Reservation(self._index, int(self._starts[i]), page, status, progress))
            at += size
        self._done = True  # an interrupt before: both give back, and the core does it once
        return parts

    def release(self) -> None:
        """Abandon what is not published, unpin everything. Takes the lock if anything is not.

        Raises:
            LeaseLost: released or split before.
        """
        if self._done:
            raise LeaseLost("release: this batch was released or split before; release it once")
        self._end()

    def _end(self) -> None:
        """As `Reservation._end`, for each."""
        for i, failed in enumerate(self._published or [_NEVER] * len(self)):
            if failed is not None and (gen := int(self._progress["gen"][i])):
                with contextlib.suppress(LeaseLost):  # it has ended in another way
                    self._index._abandon(int(self._progress["rid"][i]), gen)
        code = self._index._quick.lci_unreserve_many(
            self._index._handle,
            _arguments.address(self._progress),
            _arguments.address(self._bounds),
            _arguments.address(self._starts),
            len(self),
            _arguments.address(self._page),
            _arguments.address(self._status),
        )
        self._done = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "unpin a batch of reservations")

    def __enter__(self) -> ReservationBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done and not self._index._unusable():
            self._end()

    def __del__(self) -> None:
        if not getattr(self, "_done", True) and not self._index._unusable():
            self._end()

    def _wanted(self) -> int:
        """Pages without memory that the first request that is not through wants."""
        at = self._progress
        through = (at["pinned"] != 0) & ((at["stopped"] != 0) | (at["cursor"] >= self._sizes))
        return int(at["wanted"][int(np.argmin(through))])


_NEVER = LightcacheError("not published")


def _refused(code: int) -> LightcacheError:
    if code == Code.STALE:
        return Abandoned("publish: this reservation was abandoned or its writer declared dead")
    return error(code, "publish")


def reserve_batch(
    index: PageIndex,
    keys: Keys,
    offsets: Offsets,
    starts: object,
    shards: int,
    namespace: int,
    timeout: float | None,
) -> ReservationBatch:
    """See `PageIndex.reserve_batch`."""
    where, n = _arguments.keys(keys)
    bounds = _arguments.offsets(offsets, n)
    begins = _starts(starts, bounds)
    _arguments.count(shards, "shards", 1, layout.SHARDS)
    batch = ReservationBatch(index, bounds, begins, shards, namespace)
    arguments = (
        _arguments.address(batch._progress),
        where,
        _arguments.address(bounds),
        _arguments.address(begins),
        len(batch),
        _arguments.address(batch._page),
        _arguments.address(batch._status),
    )
    try:
        code = index._locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        while code == Code.GROW:
            index._need_memory(batch._wanted())
            code = index._locked("lci_reserve_many", *arguments, what="reserve", timeout=timeout)
        check(code, "reserve")
    except BaseException:
        batch.__exit__(None, None, None)
        raise
    return batch


def _starts(starts: object, bounds: Offsets) -> npt.NDArray[np.int64]:
    """The first key to reserve of each request, checked."""
    requests = len(bounds) - 1
    if starts is None:
        return np.zeros(requests, np.int64)
    found = np.asarray(starts)
    if found.shape != (requests,) or (requests and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"starts: expected {requests} integers, found {found.dtype} {found.shape}"
        )
    begins = np.ascontiguousarray(found, np.int64)
    if requests and (begins.min() < 0 or (begins > bounds[1:] - bounds[:-1]).any()):
        raise ConfigError(
            "starts: expected each to lie within the keys of its request, found "
            f"{begins.tolist()[:8]} for {np.diff(bounds).tolist()[:8]} keys"
        )
    return begins


__all__ = ["ReservationBatch", "reserve_batch"]

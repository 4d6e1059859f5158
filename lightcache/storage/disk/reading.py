"""Moves pages between slots and the caller's buffers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightcache._arguments import Keys
from lightcache.breaker import CircuitBreaker
from lightcache.errors import Abandoned, ConfigError, Detached, LightcacheError, WaitTimeout
from lightcache.reservations import Reservation
from lightcache.storage.arguments import Deadline, check_parent, checksum
from lightcache.storage.disk.folder import Folder
from lightcache.storage.disk.slots import NO_PARENT, Footer, unpack
from lightcache.storage.executor import READ, WRITE, Executor
from lightcache.storage.protocol import ReadResult, ReadStatus, WriteResult, WriteStatus

# ---- Writing pages to slots

STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
FAILED, REFUSED = WriteStatus.FAILED, WriteStatus.REFUSED


class _PageWrite:
    """The write of one page."""

    def __init__(
        self, folder: Folder, slot: int, name: bytes, parent: bytes, view: memoryview, written: int
    ) -> None:
        self._folder, self._slot, self._view = folder, slot, view
        self._name, self._parent, self._written = name, parent, written
        self.done = False
        self.error = ""  # as text: an exception would keep the caller's memory alive

    def __call__(self) -> None:
        header = self._folder.header
        footer = Footer(
            spec=self._folder.spec_name,
            epoch=header.epoch,
            slot=self._slot,
            key=self._name,
            parent=self._parent,
            written=self._written,
            length=len(self._view),
            checksum=checksum(self._name, self._view),
        )
        try:
            self._folder.slots.write(self._slot, self._view, footer.pack())
            self.done = True
        except OSError as error:
            self.error = str(error)


class _Batch:
    """The keys of a call, and their statuses."""

    def __init__(
        self, keys: Keys, names: list[bytes], views: list[memoryview], parent: Keys | None
    ) -> None:
        self.keys, self.names, self.views = keys, names, views
        self.statuses: list[WriteStatus | None] = [None] * len(names)
        self.reason = ""
        self.late = False
        self.before = check_parent(parent) or NO_PARENT
        self.chain, self.start = keys, 0
        if parent is not None:
            self.chain, self.start = np.concatenate([parent, keys]), 1

    def say(self, status: WriteStatus, positions: Sequence[int], reason: str = "") -> None:
        """Set the status of these positions, where there is none yet."""
        for position in positions:
            if self.statuses[position] is None:
                self.statuses[position] = status
                self.reason = self.reason or reason

    @property
    def rest(self) -> list[int]:
        """Positions without a status."""
        return [position for position, status in enumerate(self.statuses) if status is None]

    @property
    def done(self) -> bool:
        """True if any page is stored."""
        return STORED in self.statuses or PRESENT in self.statuses

    def result(self) -> WriteResult:
        """The result, once every page has a status."""
        assert None not in self.statuses
        return WriteResult(
            tuple(status for status in self.statuses if status is not None), self.reason
        )


class Writer:
    """Reserves slots, fills and publishes them: all new pages of a turn or none."""

    def __init__(self, folder: Folder, lanes: Executor, health: CircuitBreaker) -> None:
        """Writes nothing yet.

        Args:
            health: opens at the first error, since a full or read-only disk stays so for a while.
                Reads continue. A write is its probe.
        """
        self._folder, self._lanes, self.health = folder, lanes, health

    def write(
        self,
        keys: Keys,
        names: list[bytes],
        views: list[memoryview],
        parent: Keys | None,
        deadline: Deadline,
    ) -> tuple[WriteResult, bool]:
        """See `Storage.write`. Also returns whether the time was up."""
        batch = _Batch(keys, names, views, parent)
        try:
            return self._write(batch, deadline)
        finally:
            self.health.leave()  # a probe with nothing to write has no outcome

    def _write(self, batch: _Batch, deadline: Deadline) -> tuple[WriteResult, bool]:
        probing = False
        while batch.rest:
            tried = probing and self.health.state == "half-open"
            probing = tried or self.health.probe()
            if deadline.passed:
                batch.say(FAILED, batch.rest, deadline.reason)
                batch.late = True
            elif self.health.shut and not probing:
                batch.say(REFUSED, batch.rest, self.health.reason)
            elif wrong := self._folder.refresh():
                batch.say(REFUSED, batch.rest, self._ill(wrong))
            else:
                try:
                    self._turn(batch, deadline)
                except Abandoned:  # cleared by another process: repeat in the new epoch
                    continue
                except (ConfigError, Detached):
                    raise
                except LightcacheError as error:  # pages of earlier turns stay stored
                    if not batch.done:
                        raise
                    batch.say(FAILED, batch.rest, f"disk: {error}")
        return batch.result(), batch.late

    def _ill(self, why: str) -> str:
        """Report a failed write to the breaker; returns the reason."""
        self.health.failure(why)
        return self.health.reason

    def _turn(self, batch: _Batch, deadline: Deadline) -> None:
        """Write the new pages, and wait for those that others are writing."""
        start = batch.start
        index = self._folder.index
        with index.reserve(batch.chain, start, timeout=deadline.left) as reservation:
            batch.say(PRESENT, (reservation.present - start).tolist())
            missing = (reservation.missing - start).tolist()
            if missing and not index.reap():  # dead processes may hold slots: then try again
                batch.say(REFUSED, missing, f"refused: no slot could be had: {reservation.why}")
            busy = reservation.busy
            ours = (reservation.new - start).tolist()
            if ours:
                self._fill(batch, ours, reservation, deadline)
        if len(busy):
            with contextlib.suppress(WaitTimeout):  # the next turn reports that the time is up
                index.wait(np.ascontiguousarray(batch.chain[busy]), timeout=deadline.left)

    def _fill(
        self, batch: _Batch, ours: list[int], reservation: Reservation, deadline: Deadline
    ) -> None:
        now, work = time.time_ns(), []
        for at, slot in zip(ours, reservation.pages.tolist(), strict=True):
            parent = batch.names[at - 1] if at else batch.before
            name, view = batch.names[at], batch.views[at]
            work.append(_PageWrite(self._folder, slot, name, parent, view, now + at))
        self._lanes.run(work, WRITE, deadline)
        error = next((page.error for page in work if page.error), "")
        if error:
            batch.say(FAILED, ours, self._ill(error))
        elif not all(page.done for page in work):
            batch.say(FAILED, ours, deadline.reason)
            batch.late = True
        else:
            reservation.publish()
            self.health.success()
            batch.say(STORED, ours)


# ---- Reading pages from slots


@dataclass(frozen=True)
class Read:
    """The outcome of a read."""

    result: ReadResult
    bad: list[int]
    """Positions of pages that are corrupt or cannot be read: they must be dropped, or they could
    never be stored again."""
    late: bool


class _PageRead:
    """The read of one page."""

    def __init__(self, folder: Folder, name: bytes, slot: int, view: memoryview) -> None:
        self._folder, self._name, self._slot, self._view = folder, name, slot, view
        self.status: ReadStatus | None = None  # None: not begun in time
        self.why = ""
        self.unreadable = False

    def __call__(self) -> None:
        try:
            self.status, self.why = self._read()
        except OSError as error:
            self.status, self.why = ReadStatus.FAILED, f"disk: slot {self._slot}: {error}"
            self.unreadable = True

    def _read(self) -> tuple[ReadStatus, str]:
        footer = unpack(self._folder.slots.read(self._slot, self._view))
        if footer is None:
            return ReadStatus.CORRUPT, f"corrupt: slot {self._slot} does not say what it holds"
        if footer.key != self._name or footer.checksum != checksum(self._name, self._view):
            return ReadStatus.CORRUPT, f"corrupt: the checksum of page {self._name.hex()} is wrong"
        return ReadStatus.OK, ""


def read_pages(
    folder: Folder,
    lanes: Executor,
    keys: Keys,
    names: Sequence[bytes],
    slots: Sequence[int],
    views: Sequence[memoryview],
    deadline: Deadline,
) -> Read:
    """Read pages that are pinned; slot -1: the page is absent."""
    every = zip(names, slots, views, strict=True)
    work = [None if slot < 0 else _PageRead(folder, name, slot, view) for name, slot, view in every]
    lanes.run([page for page in work if page is not None], READ, deadline)
    statuses, bad, reason, late = [], [], "", False
    for position, page in enumerate(work):
        status = ReadStatus.ABSENT if page is None else page.status
        why = "" if page is None else page.why
        if status is None:
            status, why, late = ReadStatus.FAILED, deadline.reason, True
        if status is ReadStatus.CORRUPT and not folder.index.peek(keys[position : position + 1]):
            status, why = ReadStatus.ABSENT, ""  # another thread deleted it while we read it
        if status is ReadStatus.CORRUPT or (page is not None and page.unreadable):
            bad.append(position)
        statuses.append(status)
        reason = reason or why
    return Read(ReadResult(tuple(statuses), reason), bad, late)


__all__ = ["Read", "Writer", "read_pages"]

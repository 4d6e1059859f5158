"""Copies of an index: totals, `check`, and recovery of a copy.

A copy is consistent if the lock was free from its beginning to its end. If the cache is never quiet
for that long, an attached client holds the lock while it copies. A tool has no slot; if the lock's
holder is stopped or dead, the tool undoes the log in its copy, as the next holder would.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout, runs
from lightcache._core import Core
from lightcache.errors import CacheCorrupted, LockTimeout
from lightcache.namespaces import NamespaceState
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import check

Bytes = npt.NDArray[np.uint8]
TRIES = 3
_PAUSES = (0, 0.001, 0.01, 0.1)  # seconds; only after an invariant seems broken
PIN_INVARIANTS = frozenset(
    {26, 27, 28, 43, 44, 50, 62}
)  # of check.c: about data that is changed without the lock


@dataclass(frozen=True)
class IndexStats:
    """Totals of an index, in pages unless stated otherwise."""

    pages: int
    grown: int
    """Pages that have memory."""
    free: int
    """Pages that can be handed out without evicting. Includes pages never used, and unlinked pages
    without pins (if among the 4,096 that are looked at)."""
    writing: int
    """Reserved pages with a shard that is not published yet."""
    ready: int
    doomed: int
    """Unlinked pages that wait for their last pin. Pins of tickets count until their deadline."""
    held: int
    """Pages without a key that a client holds: `PageIndex.allocate`."""
    evictable: int
    """Pages in the eviction queue: ready pages that are not protected, and without children unless
    they are independent; including pinned ones."""
    reservations: int
    tickets: int
    kept: int
    """Ready pages that are never evicted; see `PageIndex.protect`."""
    clock: int
    """Ticks: the number of matches and reserves so far; with eviction "hz" time, in 4,096 ns."""
    no_memory_s: float = 0.0
    """For this many seconds no process asks for memory for the pages that have none, because there
    was none; calls evict instead. 0: memory is requested when needed."""
    eviction: str = "lru"
    """The order in which pages go, "lru" or "hz": see `PageIndex.create`."""


@dataclass(frozen=True)
class GroupPages:
    """Pages of one KV group of an index."""

    number: int
    name: str
    """As its creator has named it; its number if it has no name."""
    pages: int
    """With a key, ready or being written, in all namespaces."""
    minimum_pages: int
    """Of these, that making room for other groups leaves it; 0: none."""


@dataclass(frozen=True)
class NamespacePages:
    """Pages of one namespace of an index, and its limits."""

    number: int
    """Entry in the segment's table, 0 to 255."""
    state: str
    """As `NamespaceState`, in small letters."""
    weights: str
    tenant: str
    pages: int
    """With a key, ready or being written."""
    quota_pages: int | None
    """None: no limit."""
    minimum_pages: int | None
    """None: no page is safe from other namespaces."""


@dataclass(frozen=True)
class CheckReport:
    """Result of `check`."""

    clean: bool
    message: str
    """The first broken invariant, or what was checked."""
    invariant: int
    """Its number in lightcache/native/check.c; 0: none."""
    page: int
    free: int
    writing: int
    ready: int
    doomed: int
    held: int
    pins: int
    """Pins that keep pages."""
    late_pins: int
    """Pins of tickets that were not adopted in time. They keep nothing: the next call that evicts
    releases them."""
    quiet: bool
    """True if pins were also checked, because no client was pinning at that moment."""
    recovered: int
    """Words that were undone in the copy, from a critical section left by a dead or stopped
    client."""

    def raise_if_broken(self) -> None:
        """Raise CacheCorrupted with the message unless clean."""
        if not self.clean:
            raise CacheCorrupted(
                f"invariant {self.invariant}: {self.message}; stop the writers and run "
                "`lightcache repair`"
            )


def stats_of(counts: layout.IndexCounts, eviction: str) -> IndexStats:
    """Totals in the form that callers get."""
    return IndexStats(
        pages=counts.pages,
        grown=counts.grown,
        free=counts.free + max(0, counts.grown - counts.fresh) + counts.idle,
        writing=counts.writing,
        ready=counts.named - counts.writing,
        doomed=max(0, counts.doomed - counts.idle),
        held=counts.held,
        evictable=counts.queued,
        reservations=counts.reservations,
        tickets=counts.tickets,
        kept=counts.kept,
        clock=counts.clock,
        no_memory_s=counts.no_memory_ns / 1e9,
        eviction=eviction,
    )


def groups_of(
    pages: Sequence[int], minimums: Sequence[int], config: Mapping[str, Any]
) -> tuple[GroupPages, ...]:
    """The groups that have a name, a page or a minimum; counts are by number."""
    names = dict(enumerate(runs.names_of(config)))
    return tuple(
        GroupPages(number, names.get(number, str(number)), count, minimum)
        for number, (count, minimum) in enumerate(zip(pages, minimums, strict=True))
        if count or minimum or number in names
    )


NAMESPACE_TABLE_BYTES = layout.NAMESPACES * ctypes.sizeof(layout.NamespaceRecord)


def namespaces_of(table: bytes) -> tuple[NamespacePages, ...]:
    """The entries of a copy of the table of namespaces that are not free. A short copy ends with
    free entries."""
    records = (layout.NamespaceRecord * layout.NAMESPACES).from_buffer_copy(
        table.ljust(NAMESPACE_TABLE_BYTES, b"\0")
    )
    return tuple(
        NamespacePages(
            number,
            _NAMESPACE_STATES.get(record.state, f"unknown ({record.state})"),
            record.weights.decode(errors="replace"),
            record.tenant.decode(errors="replace"),
            record.pages,
            record.quota or None,
            record.minimum or None,
        )
        for number, record in enumerate(records)
        if record.state
    )


_NAMESPACE_STATES = {state.value: state.name.lower() for state in NamespaceState}


def lock_of(copy: Bytes) -> shm_layout.LockRecord:
    """The lock record of a copy."""
    end = shm_layout.LOCK_OFFSET + ctypes.sizeof(shm_layout.LockRecord)
    return shm_layout.LockRecord.from_buffer_copy(copy[shm_layout.LOCK_OFFSET : end].tobytes())


def check_copy(copy: Bytes, pages: int, *, quiet: bool) -> CheckReport:
    """Check a copy, after undoing an unfinished critical section in it.

    Args:
        copy: uint8 array of the whole segment; the undoing changes it.
        pages: of the index.
        quiet: True: no client was pinning meanwhile.

    Raises:
        ConfigError: the copy is too short for an index of that size.
    """
    quick = layout.load().quick
    where = _arguments.address_of_any(copy)
    undone = quick.lci_recover_copy(where, len(copy), pages)
    record = layout.CheckRecord()
    if undone < 0:
        record.broken = -1
        record.message = (
            b"the undo log names words outside of the index, or has entries though no client holds "
            b"the lock"
        )
        undone = 0
    else:
        check(quick.lci_check(where, len(copy), pages, quiet, ctypes.byref(record)), "check")
    message = record.message.decode(errors="replace")
    if not record.broken:
        message = f"{pages} pages: every invariant holds"
    return CheckReport(
        clean=record.broken == 0,
        message=message,
        invariant=record.broken,
        page=record.page,
        free=record.free,
        writing=record.writing,
        ready=record.ready,
        doomed=record.doomed,
        held=record.held,
        pins=max(0, record.pins - record.late),
        late_pins=record.late,
        quiet=quiet,
        recovered=undone,
    )


def _stamp(core: Core) -> tuple[int, int, int]:
    size = ctypes.sizeof(shm_layout.LockRecord)
    address = core.segment.address + shm_layout.LOCK_OFFSET
    lock = shm_layout.LockRecord.from_buffer_copy(ctypes.string_at(address, size))
    return lock.word & ~shm_layout.LOCK_OTHERS, lock.acquisitions, lock.log_count


def _copy(core: Core) -> Bytes:
    """Copies without a view of the segment: an error's traceback would keep the view alive, and
    block `close`."""
    copy = np.empty(core.segment.nbytes, np.uint8)
    ctypes.memmove(copy.ctypes.data, core.segment.address, len(copy))
    return copy


def _copy_when_quiet(core: Core) -> Bytes:
    """Copy the segment while the lock is free; if it never is, while holding it."""
    for _ in range(TRIES):
        before = _stamp(core)
        copy = _copy(core)
        if before == _stamp(core) and before[0] == 0 and before[2] == 0:
            return copy
    if core.segment.readonly:
        raise LockTimeout(
            f"check {core.segment.name!r}: it was never quiet for the time of a copy, and a reader "
            "cannot hold the lock; try again, or check from an attach for writing"
        )
    return _copy_holding(core)


def _moves(core: Core) -> list[tuple[int, ...]]:
    """Changes if a client looks up, reserves, joins or leaves. Always changes if a client is
    dead."""
    return [
        (c.slot, c.epoch, c.lookups, c.reserved_pages, 0 if c.alive else time.monotonic_ns())
        for c in core.segment.clients()
    ]


def check_attached(core: Core, pages: int) -> CheckReport:
    """`check` for an attached client; see `PageIndex.check`.

    Pinning and publishing take no lock. So a copy may catch a client between a count and its bit,
    or between the last shard and its mark, and a busy machine may leave it there for a while.
    Broken counts are reported only if later copies repeat them and no client moved in between;
    otherwise the copy is checked without these counts.
    """
    with core.segment.busy():
        moves = _moves(core)
        report = check_copy(_copy_when_quiet(core), pages, quiet=True)
        if report.clean or report.invariant not in PIN_INVARIANTS:
            return report
        for pause in _PAUSES:
            time.sleep(pause)
            copy = _copy_when_quiet(core)
            again = check_copy(copy, pages, quiet=True)
            same = (again.invariant, again.page) == (report.invariant, report.page)
            if not same or moves != _moves(core):
                return check_copy(copy, pages, quiet=False)
        return again


def _copy_holding(core: Core) -> Bytes:
    copy = np.empty(core.segment.nbytes, np.uint8)
    where = _arguments.address(copy)
    check(core.locked("lci_copy", where, len(copy), what="check"), "check")
    # This client's own hold of the lock is not an error.
    ctypes.memset(copy.ctypes.data + shm_layout.LOCK_OFFSET, 0, 4)
    return copy

"""Copies of an index, and what can be said of them: totals, `check`, recovery on paper.

A copy is consistent when nobody held the lock from its beginning to its end. On a cache that is
never quiet for so long, an attached client holds the lock while copying; a tool, which has no
slot, finishes the copy of a stopped or dead holder as the next one would: it undoes its log.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache._core import Core
from lightcache.errors import CacheCorrupted, LockTimeout
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import check

Bytes = npt.NDArray[np.uint8]
TRIES = 3
_PAUSES = (0, 0.001, 0.01, 0.1)  # seconds; only where something seems to be broken
PIN_INVARIANTS = frozenset(
    {26, 27, 28, 43, 44, 50, 62}
)  # of check.c: about what is changed without the lock


@dataclass(frozen=True)
class IndexStats:
    """Totals of an index, in pages unless said otherwise."""

    pages: int
    grown: int
    """Have memory behind them."""
    free: int
    """Can be handed out without evicting: never used ones included, and those that are unlinked and
    that nobody pins any more (as far as they are among the 4,096 that are looked at)."""
    writing: int
    """Reserved, and not all shards of them published."""
    ready: int
    doomed: int
    """Unlinked; waiting for their last pin. Pins of tickets count until their deadline."""
    held: int
    """Without a key, in the hands of a client: `PageIndex.allocate`."""
    evictable: int
    """In the eviction queue: ready pages on which nothing hangs (of an independent index all that
    are not kept); pinned ones included."""
    reservations: int
    tickets: int
    kept: int
    """Ready pages that are never evicted; see `PageIndex.keep`."""
    clock: int
    """Ticks: matches and reserves so far."""
    no_memory_s: float = 0.0
    """For so many seconds nobody asks for memory for the pages that have none, because there was
    none: calls evict instead. 0: it is asked for when it is needed."""


@dataclass(frozen=True)
class CheckReport:
    """What `check` found."""

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
    quiet: bool
    """Pins were checked as well: nobody was pinning just then."""
    recovered: int
    """Words of a critical section left by a dead or stopped client, undone in the copy."""

    def raise_if_broken(self) -> None:
        """Raise CacheCorrupted with the message unless clean."""
        if not self.clean:
            raise CacheCorrupted(
                f"invariant {self.invariant}: {self.message}; stop the writers and run "
                "`lightcache repair`"
            )


def stats_of(counts: layout.IndexCounts) -> IndexStats:
    """Totals as people want them."""
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
    )


def lock_of(copy: Bytes) -> shm_layout.LockRecord:
    """The lock record of a copy."""
    end = shm_layout.LOCK_OFFSET + ctypes.sizeof(shm_layout.LockRecord)
    return shm_layout.LockRecord.from_buffer_copy(copy[shm_layout.LOCK_OFFSET : end].tobytes())


def check_copy(copy: Bytes, pages: int, *, quiet: bool) -> CheckReport:
    """Check a copy, after undoing in it what an unfinished critical section had done.

    Args:
        copy: uint8 array of the whole segment; it is changed by the undoing.
        pages: of the index.
        quiet: nobody was pinning meanwhile.

    Raises:
        ConfigError: the copy is too short for an index of that size.
    """
    quick = layout.load().quick
    where = _arguments.address(copy)
    undone = quick.lci_recover_copy(where, len(copy), pages)
    found = layout.CheckRecord()
    if undone < 0:
        found.broken = -1
        found.message = (
            b"the undo log names words outside of the index, or has entries though nobody holds "
            b"the lock"
        )
        undone = 0
    else:
        check(quick.lci_check(where, len(copy), pages, quiet, ctypes.byref(found)), "check")
    message = found.message.decode(errors="replace")
    if not found.broken:
        message = f"{pages} pages: every invariant holds"
    return CheckReport(
        clean=found.broken == 0,
        message=message,
        invariant=found.broken,
        page=found.page,
        free=found.free,
        writing=found.writing,
        ready=found.ready,
        doomed=found.doomed,
        held=found.held,
        pins=found.pins,
        quiet=quiet,
        recovered=undone,
    )


def _stamp(core: Core) -> tuple[int, int, int]:
    size = ctypes.sizeof(shm_layout.LockRecord)
    at = core.segment.address + shm_layout.LOCK_OFFSET
    lock = shm_layout.LockRecord.from_buffer_copy(ctypes.string_at(at, size))
    return lock.word & ~shm_layout.LOCK_WAITERS, lock.acquisitions, lock.log_count


def _copy(core: Core) -> Bytes:
    """Not through a view of the segment: an error's traceback would keep that, and `close` wait."""
    copy = np.empty(core.segment.nbytes, np.uint8)
    ctypes.memmove(copy.ctypes.data, core.segment.address, len(copy))
    return copy


def _copy_when_quiet(core: Core) -> Bytes:
    """Copy the segment while nobody holds the lock: by luck, else by holding it."""
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
    """Changes when somebody looks up, reserves, comes or goes; dead clients never settle."""
    return [
        (c.slot, c.epoch, c.lookups, c.reserved_pages, 0 if c.alive else time.monotonic_ns())
        for c in core.segment.clients()
    ]


def check_attached(core: Core, pages: int) -> CheckReport:
    """`check` for an attached client; see `PageIndex.check`.

    Pinning and publishing take no lock, so a copy may catch a client between a count and its bit,
    or between the last shard and its mark, and a busy machine may leave it there for a while. A
    finding about these counts only when later copies repeat it and nobody moved in between; else
    the copy is checked without them.
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
    # Our own hold is no finding.
    ctypes.memset(copy.ctypes.data + shm_layout.LOCK_OFFSET, 0, 4)
    return copy

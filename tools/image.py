"""A copy of a segment, read with pread: nothing is mapped, locked or joined, no slot is taken.

A stopped or dead holder of the lock does not matter, and neither does damage: reading can find a
short file, but no signal comes of it. What the copy says is checked before use, because anybody
who may write the segment may have written anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache.errors import CacheCorrupted, LightcacheError, NotReady
from lightcache.page_index import MAX_PAGES, geometry
from lightcache.shm import ClientInfo, SegmentInfo, SegmentKind, clients, ofd, read_segment, wanted
from lightcache.shm import layout as shm_layout
from lightcache.shm.objects import OpenObject

# ---- Attaching for a moment, to do something and leave things as they were.


group_option_help = "The segment's group, when somebody else of that group owns it."


@contextlib.contextmanager
def guest(name: str) -> Iterator[SegmentInfo]:
    """Keep a segment in being while a tool attaches to it and leaves.

    The last client to leave takes a cache of lifetime "attached" with it. That must not be a tool
    that came to a cache whose clients were all killed: the next `open` would go on warm. So the
    tool also lives in it as a reader does, and that life ends like a killed process's, unnoticed.

    Raises:
        NotReady: there is none of that name.
    """
    info = require(name)
    opened = OpenObject.open(name, writable=False)
    if opened is None:
        raise unknown(name)
    with contextlib.closing(opened):
        ofd.try_lock(opened.fd, shm_layout.BYTE_READERS, exclusive=False)
        yield info


# ---- A copy of a segment, read with pread: nothing is mapped, locked or joined, no slot is taken.


Bytes = npt.NDArray[np.uint8]
TRIES = 3
_HEAD_BYTES = shm_layout.PAYLOAD_OFFSET


@dataclass
class Copy:
    """A copy of a segment and what was known of its clients when it was taken."""

    info: SegmentInfo
    config: Mapping[str, Any]
    data: Bytes
    lock: shm_layout.LockRecord
    """As it was copied: the holder, and how much of a critical section is undone in `data`."""
    clients: list[ClientInfo]
    steady: bool
    """Nobody went through the lock while it was copied: `data`, once undone, is one instant."""
    taken_ns: int
    """CLOCK_MONOTONIC."""

    @property
    def held(self) -> bool:
        """Whether a client, alive or dead, holds the lock."""
        return bool(self.lock.word & shm_layout.LOCK_SLOT_MASK or self.lock.log_count)


@dataclass
class Image(Copy):
    """That of an index."""

    pages: int
    place: layout.Geometry

    @property
    def root(self) -> layout.RootRecord:
        """Totals, as the counters say them."""
        return layout.RootRecord.from_buffer_copy(self.data.data, self.place.root)


def unknown(name: str) -> NotReady:
    """The error for a name that leads nowhere."""
    return NotReady(f"there is no cache {name!r}; `lightcache ls` shows what there is")


def require(name: str) -> SegmentInfo:
    """What is known of a segment.

    Raises:
        NotReady: there is none of that name.
        ConfigError: the name is not allowed.
    """
    info = read_segment(name)
    if info is None:
        raise unknown(name)
    return info


@contextlib.contextmanager
def opened(name: str, layout_facts: str | None = None) -> Iterator[tuple[OpenObject, SegmentInfo]]:
    """An object that can be read, and what is known of it. `layout_facts`: what it must hold.

    Raises:
        NotReady: there is none, or it is not (yet) a segment.
        LayoutMismatch: another release made it.
        CacheCorrupted: truncated, or its header is damaged.
        PermissionDenied: not for us to read.
    """
    info = require(name)
    segment = OpenObject.open(name, writable=False)
    if segment is None:
        raise unknown(name)
    with contextlib.closing(segment):
        if not stat.S_ISREG(os.fstat(segment.fd).st_mode):
            raise CacheCorrupted(f"{name!r} is no shared memory object but something else")
        header = segment.header()
        if not header.ready and not wanted.is_foreign(header):
            problem = info.problem or "not ready"
            raise NotReady(f"{name!r}: {problem}; `lightcache sweep` removes what the dead left")
        expected = wanted.want(
            name,
            kind=None,
            payload_bytes=None,
            config=None,
            layout_facts=layout_facts,
            lifetime=None,
            group=None,
        )
        wanted.verify_header(header, segment.size(), expected)
        yield segment, info


def read(name: str, tries: int = TRIES) -> Image:
    """Copy an index. Tries a few times to catch it at an instant when nobody works on it; a copy
    that was never steady is returned all the same, and says so.

    Raises:
        As `opened`; CacheCorrupted also for an index that is not what its header says.
        LightcacheError: not an index, or there is no memory for the copy.
    """
    with opened(name) as (segment, info):
        config, place = _verify_index(segment)
        copied = _copied(segment, info, config, place.end, tries)
        return Image(**vars(copied), pages=place.pages, place=place)


def read_any(name: str, tries: int = TRIES, *, layout_facts: str | None = None) -> Copy:
    """The same of a segment of any kind, whole. `layout_facts`: what it must hold.

    Raises:
        As `opened`; LightcacheError: there is no memory for the copy.
    """
    with opened(name, layout_facts) as (segment, info):
        return _copied(segment, info, wanted.config_of(segment.header()), segment.size(), tries)


def _copied(
    segment: OpenObject, info: SegmentInfo, config: Mapping[str, Any], length: int, tries: int
) -> Copy:
    _check_memory(length)
    data, steady = _copy(segment, length, tries)
    return Copy(
        info=info,
        config=config,
        data=data,
        lock=shm_layout.LockRecord.from_buffer_copy(data.data, shm_layout.LOCK_OFFSET),
        clients=_clients(data, segment),
        steady=steady,
        taken_ns=time.monotonic_ns(),
    )


def _verify_index(segment: OpenObject) -> tuple[dict[str, Any], layout.Geometry]:
    """The configuration of an index, and where it must then have what."""
    name, header = segment.name, segment.header()
    if header.kind != SegmentKind.INDEX:
        raise LightcacheError(f"{name!r} does not hold an index; see `lightcache ls`")
    expected = wanted.want(
        name,
        kind=SegmentKind.INDEX,
        payload_bytes=None,
        config=None,
        layout_facts=layout.load().quick.lci_layout().decode(),
        lifetime=None,
        group=None,
    )
    wanted.verify_header(header, segment.size(), expected)
    config = wanted.config_of(header)
    pages = config.get("pages")
    if not isinstance(pages, int) or not 1 <= pages <= MAX_PAGES:
        raise CacheCorrupted(f"{name!r}: its configuration says {pages!r} pages; remove it")
    place = geometry(pages)
    if place.end > segment.size():
        raise CacheCorrupted(
            f"{name!r}: an index of {pages} pages takes {place.end} bytes, found "
            f"{segment.size()}; remove it"
        )
    return config, place


def _clients(data: Bytes, segment: OpenObject) -> list[ClientInfo]:
    table = data[shm_layout.CLIENTS_OFFSET : shm_layout.LOCK_OFFSET].tobytes()
    return clients.read_table(table, segment.fd)


def _check_memory(needed: int) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and int(line.split()[1]) * 1024 < needed:
                raise LightcacheError(
                    f"a copy of the segment takes {needed} bytes, and only {line.split()[1]} KiB "
                    "of memory are available; free some, or run this on a quieter machine"
                )


def _copy(segment: OpenObject, length: int, tries: int) -> tuple[Bytes, bool]:
    data = np.empty(length, np.uint8)
    for _ in range(tries):
        before = _stamp(segment)
        _read_into(segment.fd, data)
        if before == _stamp(segment):
            return data, True
    return data, False


def _read_into(fd: int, data: Bytes) -> None:
    view = data.data
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + (1 << 30)]], done)
        if got == 0:
            raise CacheCorrupted(
                f"the segment ended after {done} of {len(view)} bytes: it was truncated; remove it"
            )
        done += got


def _stamp(segment: OpenObject) -> tuple[int, int, bytes]:
    """Changes whenever the lock changes hands or its holder stores anything: who holds it, how
    often it was taken, and the undo log, which grows before each store."""
    head = os.pread(segment.fd, _HEAD_BYTES, 0).ljust(_HEAD_BYTES, b"\0")
    lock = shm_layout.LockRecord.from_buffer_copy(head, shm_layout.LOCK_OFFSET)
    entries = min(lock.log_count, shm_layout.LOG_ENTRIES)
    log = head[shm_layout.LOG_OFFSET : shm_layout.LOG_OFFSET + 8 * entries]
    return lock.word & ~shm_layout.LOCK_WAITERS, lock.acquisitions, log


def undo(image: Image) -> int:
    """Undo in the copy what an unfinished critical section had stored. Returns the log entries
    undone, or -1: the log names words outside of the index."""
    where = ctypes.c_void_p(image.data.ctypes.data)
    code: int = layout.load().quick.lci_recover_copy(where, len(image.data), image.pages)
    return max(code, -1)

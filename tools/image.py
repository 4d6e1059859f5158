"""A copy of a segment, read with pread: nothing is mapped, locked or joined, no slot is taken.

A stopped or dead holder of the lock does not matter, nor does damage: a read may find a short file,
but raises no signal. Values of the copy are checked before use, because any process with write
access may have written them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache.errors import CacheCorrupted, ConfigError, LightcacheError, NotReady
from lightcache.page_index import MAX_PAGES, geometry
from lightcache.shm import clients, names, ofd, wanted
from lightcache.shm import layout as shm_layout
from lightcache.shm.clients import ClientInfo
from lightcache.shm.layout import SegmentKind
from lightcache.shm.listing import SegmentInfo, list_segments, read_segment
from lightcache.shm.objects import OpenObject
from lightcache.snapshot import NAMESPACE_TABLE_BYTES

# ---- Short attaches of tools


F = TypeVar("F", bound=Callable[..., Any])


def name_argument(required: bool = True) -> Callable[[F], F]:
    """NAME: of a segment, or the model whose only default cache it is."""

    def found(ctx: object, param: object, given: str | None) -> str | None:
        return None if given is None else _named(given)

    return click.argument("name", required=required, callback=found)


def _named(given: str) -> str:
    found = caches_of(given)
    if len(found) > 1:
        raise click.UsageError(
            f"the model {given!r} has several caches: {', '.join(found)}; give one of the names"
        )
    return found[0] if found else given


def caches_of(given: str) -> list[str]:
    """The segment of this name; else all default caches of this model, which may be none."""
    with contextlib.suppress(ConfigError):  # a model may have a slash
        if os.path.lexists(names.FOLDER / names.object_name(given).removeprefix("/")):
            return [given]
    return [
        info.name
        for info in list_segments()
        if info.family is not None and given in (info.family, info.name[:-_DIGEST])
    ]


_DIGEST = len("-12345678")
group_option_help = "The segment's group, if another user of that group owns it."


@contextlib.contextmanager
def guest(name: str) -> Iterator[SegmentInfo]:
    """Keep a segment while a tool attaches to it and leaves.

    The last client that leaves removes a cache of lifetime "attached". A tool must not do that to a
    cache whose clients were all killed: the next `open` would find it warm. So the tool also holds
    a reader's lock, which ends like that of a killed process.

    Raises:
        NotReady: there is no such segment.
    """
    info = require(name)
    opened = OpenObject.open(name, writable=False)
    if opened is None:
        raise unknown(name)
    with contextlib.closing(opened):
        ofd.try_lock(opened.fd, shm_layout.BYTE_READERS, exclusive=False)
        yield info


# ---- Copies


Bytes = npt.NDArray[np.uint8]
TRIES = 3
_HEAD_BYTES = shm_layout.PAYLOAD_OFFSET


@dataclass
class Copy:
    """A copy of a segment, and its clients at that time."""

    info: SegmentInfo
    config: Mapping[str, Any]
    data: Bytes
    lock: shm_layout.LockRecord
    """As copied: the holder, and the size of the undo log."""
    clients: list[ClientInfo]
    steady: bool
    """The lock was not used during the copy: `data`, after `undo`, is of one instant."""
    taken_ns: int
    """CLOCK_MONOTONIC."""

    @property
    def held(self) -> bool:
        """Whether a client, alive or dead, holds the lock."""
        return bool(self.lock.word & shm_layout.LOCK_SLOT_MASK or self.lock.log_count)


@dataclass
class Image(Copy):
    """A copy of an index."""

    pages: int
    place: layout.Geometry

    @property
    def root(self) -> layout.RootRecord:
        """The root record, with the totals."""
        return layout.RootRecord.from_buffer_copy(self.data.data, self.place.root)


def unknown(name: str) -> NotReady:
    """The error for a name without a segment, or whose segment is not ready yet or any more."""
    info = read_segment(name)
    if info is not None and info.kind and not info.ready:
        return _unready(name, info)
    return NotReady(f"there is no cache {name!r}; `lightcache ls` lists all")


def _unready(name: str, info: SegmentInfo) -> NotReady:
    problem = info.problem or "not ready"
    return NotReady(f"{name!r}: {problem}; `lightcache sweep` removes what the dead left")


def require(name: str) -> SegmentInfo:
    """The information about a segment.

    Raises:
        NotReady: there is no such segment.
        ConfigError: the name is not allowed.
    """
    info = read_segment(name)
    if info is None:
        raise unknown(name)
    return info


@contextlib.contextmanager
def opened(name: str, layout_facts: str | None = None) -> Iterator[tuple[OpenObject, SegmentInfo]]:
    """Open a segment's object for reading. `layout_facts`: the layout it must have.

    Raises:
        NotReady: there is no such object, or it is not (yet) a segment.
        LayoutMismatch: another release created it.
        CacheCorrupted: truncated, or its header is damaged.
        PermissionDenied: this user may not read it.
    """
    info = require(name)
    segment = OpenObject.open(name, writable=False)
    if segment is None:
        raise unknown(name)
    with contextlib.closing(segment):
        if not stat.S_ISREG(os.fstat(segment.fd).st_mode):
            raise CacheCorrupted(f"{name!r} is no shared memory object but something else")
        header = segment.header()
        if not header.ready and not header.is_foreign:
            raise _unready(name, info)
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
    """Copy an index. Tries a few times to copy it while the lock is free; otherwise the copy is
    returned with `steady` False.

    Raises:
        As `opened`; CacheCorrupted also for an index that is not what its header says.
        LightcacheError: not an index, or there is no memory for the copy.
    """
    with opened(name) as (segment, info):
        config, place = verify_index(segment)
        copied = _copied(segment, info, config, place.end, tries)
        return Image(**vars(copied), pages=place.pages, place=place)


def read_any(name: str, tries: int = TRIES, *, layout_facts: str | None = None) -> Copy:
    """Copy a segment of any kind. `layout_facts`: the layout it must have.

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


def verify_index(segment: OpenObject) -> tuple[dict[str, Any], layout.Geometry]:
    """The configuration of an index, and the places of its parts."""
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
    eviction = config.get("eviction", "lru")
    if eviction not in layout.EVICTIONS:
        raise CacheCorrupted(f"{name!r}: its configuration says eviction {eviction!r}; remove it")
    place = geometry(pages, eviction)
    if place.end > segment.size():
        raise CacheCorrupted(
            f"{name!r}: an index of {pages} pages takes {place.end} bytes, found "
            f"{segment.size()}; remove it"
        )
    return config, place


def read_namespaces(segment: OpenObject) -> tuple[dict[str, Any], bytes]:
    """The configuration of an index, and a copy of its table of namespaces.

    Raises:
        LightcacheError: not an index of this release, or damaged.
    """
    config, place = verify_index(segment)
    return config, os.pread(segment.fd, NAMESPACE_TABLE_BYTES, place.namespaces)


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
    """Changes if the lock changes hands or its holder stores anything: the holder, the number of
    acquisitions, and the undo log, which grows before each store."""
    head = os.pread(segment.fd, _HEAD_BYTES, 0).ljust(_HEAD_BYTES, b"\0")
    lock = shm_layout.LockRecord.from_buffer_copy(head, shm_layout.LOCK_OFFSET)
    entries = min(lock.log_count, shm_layout.LOG_ENTRIES)
    log = head[shm_layout.LOG_OFFSET : shm_layout.LOG_OFFSET + 8 * entries]
    return lock.word & ~shm_layout.LOCK_OTHERS, lock.acquisitions, log


def undo(image: Image) -> int:
    """Undo an unfinished critical section in the copy. Returns the number of log entries undone, or
    -1: the log names words outside of the index."""
    where = ctypes.c_void_p(image.data.ctypes.data)
    code: int = layout.load().quick.lci_recover_copy(where, len(image.data), image.pages)
    return max(code, -1)

"""Readings of all caches of a machine, taken again and again: what `lightcache top` shows, and what
happened between two readings.

A reading maps nothing, takes no lock and no slot, and keeps one descriptor of each segment open
until its name is gone. Counts of one reading may be of slightly different instants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightcache import layout
from lightcache.errors import LightcacheError
from lightcache.layout import PageState
from lightcache.shm import clients, names, wanted
from lightcache.shm import layout as shm_layout
from lightcache.shm.clients import ClientInfo
from lightcache.shm.counters import bytes_of, rows_in
from lightcache.shm.layout import SegmentHeader, SegmentKind
from lightcache.shm.listing import SegmentInfo, read_segment
from lightcache.shm.objects import OpenObject
from lightcache.snapshot import GroupPages, groups_of
from lightcache.storage.service.board import LAYOUT, ServiceStats, board_name, stats_in, words_in
from lightcache.tools import facts, hints
from lightcache.tools.image import Copy, Image, read, undo, verify_index
from lightcache.tools.ls import state_of

Process = tuple[int, int, int]
"""pid, its PID namespace, and when it began: the same in each segment it is a client of."""
NEXT = 16
"""Pages that are listed as the next to be evicted."""
_HEAD_BYTES = shm_layout.LOCK_OFFSET + ctypes.sizeof(shm_layout.LockRecord)
_OWN = ("lookups", "hit_pages", "missed_pages", "reserved_pages", "evicted_pages")
PAGES = (*_OWN, "published_pages")
"""Counts in a client's slot. They begin at 0 when a client attaches, and go with its slot."""


def process_of(client: ClientInfo) -> Process:
    """What identifies a client's process."""
    return client.pid, client.pidns, client.start_ticks


# ---- A reading


@dataclass(frozen=True)
class Counts:
    """The counts of the managers of a cache that were made with `NodeCounters`."""

    uuid: str
    total: Mapping[str, int]
    """By the names of `ManagerStats`; counts of dead processes included."""
    rows: Mapping[Process, Mapping[str, int]]
    """By living process: what was counted in its row, also by those that had the row before."""


@dataclass(frozen=True)
class Reading:
    """A cache, or an index of device blocks, at one moment."""

    name: str
    uuid: str
    state: str
    """As in `lightcache ls`; all other fields are empty unless it is "ready" or "disabled"."""
    problem: str | None = None
    page_bytes: int | None = None
    """None: an index of device blocks, which has no memory of its own."""
    page_tokens: int | None = None
    lifetime: str | None = None
    age_s: float | None = None
    pages: int = 0
    free: int = 0
    """Without content, those that have no memory yet included."""
    writing: int = 0
    ready: int = 0
    held: int = 0
    doomed: int = 0
    evictable: int = 0
    kept: int = 0
    reservations: int = 0
    tickets: int = 0
    clock: int = 0
    """Matches and reservations so far: what a page's last use is counted in."""
    clients: tuple[ClientInfo, ...] = ()
    counts: Counts | None = None
    storage: ServiceStats | None = None
    copy: Copy | None = None
    """Its head, for hints that need no more."""

    @property
    def readable(self) -> bool:
        """Whether its content was read."""
        return self.copy is not None


class _Followed:
    """One segment: open as long as its name refers to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.info: SegmentInfo | None = None
        self.config: Mapping[str, Any] = {}
        self.place: layout.Geometry | None = None
        self.kind = 0
        self.problem = ""
        self.object: OpenObject | None = None
        with contextlib.suppress(LightcacheError, OSError):
            self.object = OpenObject.open(name, writable=False)
        self._look()

    def _look(self) -> None:
        """Fill in what never changes in a good segment; what is not good is looked at again."""
        self.info = read_segment(self.name)
        try:
            if self.object is None or self.info is None or self.info.problem:
                return
            header = self.object.header()
            if header.kind == SegmentKind.INDEX:
                self.config, self.place = verify_index(self.object)
            else:
                self.config = wanted.config_of(header)
            self.kind = header.kind
        except (LightcacheError, OSError, ValueError) as error:
            self.problem = str(error)

    @property
    def good(self) -> bool:
        return bool(self.kind)

    def still_there(self) -> bool:
        """False: the name is gone, or another segment has it."""
        try:
            return self.object is not None and self.object.is_named()
        except OSError:
            return False

    def part(self, nbytes: int, offset: int) -> bytes:
        """Bytes of it; short where it was truncated."""
        assert self.object is not None
        return os.pread(self.object.fd, nbytes, offset)

    def head(self) -> tuple[SegmentHeader, bytes] | None:
        """Header, client table and lock; None: truncated."""
        data = self.part(_HEAD_BYTES, 0)
        if len(data) < _HEAD_BYTES:
            return None
        return SegmentHeader.from_buffer_copy(data), data

    def again(self) -> bool:
        """Whether it can be read; looks again at one that could not."""
        if not self.good:
            self._look()
        return self.good

    def close(self) -> None:
        if self.object is not None:
            self.object.close()


class Watch:
    """Reads all caches. Use it in a with statement, from one thread."""

    def __init__(self) -> None:
        """Reads nothing yet."""
        self._followed: dict[str, _Followed] = {}

    def read(self) -> dict[str, Reading]:
        """A reading of each cache, by name; without those that are gone. Some 50 us for each
        segment."""
        self._follow()
        followed = self._followed.values()
        found = (self._reading(each) for each in followed)
        return {reading.name: reading for reading in found if reading is not None}

    def _follow(self) -> None:
        present = set(names.segment_names())
        for name in [*self._followed]:
            if name not in present or not self._followed[name].still_there():
                self._followed.pop(name).close()
        for name in sorted(present - self._followed.keys()):
            self._followed[name] = _Followed(name)

    def _reading(self, each: _Followed) -> Reading | None:
        """None: it holds something else."""
        try:
            if not each.again():
                return _unread(each)
            if each.kind != SegmentKind.INDEX or (head := each.head()) is None:
                return _unread(each) if each.kind == SegmentKind.INDEX else None
            return self._index(each, *head)
        except (LightcacheError, OSError, ValueError) as error:
            return Reading(each.name, "", "unreadable", str(error))

    def _index(self, each: _Followed, header: SegmentHeader, head: bytes) -> Reading | None:
        assert each.place is not None
        assert each.object is not None
        assert each.info is not None
        size = ctypes.sizeof(layout.RootRecord)
        data = each.part(size, each.place.root)
        if len(data) < size:
            return _unread(each)
        root = layout.RootRecord.from_buffer_copy(data)
        uuid = bytes(header.uuid).hex()
        members = tuple(clients.read_table(_table(head), each.object.fd))
        tokens = each.config.get("page_tokens", each.config.get("block_tokens"))
        page_bytes = each.config.get("page_bytes")
        return Reading(
            name=each.name,
            uuid=uuid,
            state="retired" if header.retired else "disabled" if header.disabled else "ready",
            page_bytes=page_bytes if isinstance(page_bytes, int) else None,
            page_tokens=tokens if isinstance(tokens, int) else None,
            lifetime=each.info.lifetime,
            age_s=max(0, time.time_ns() - header.created_ns) / 1e9,
            pages=each.place.pages,
            free=max(0, root.free_count + each.place.pages - min(root.fresh, each.place.pages)),
            writing=root.writing,
            ready=max(0, root.named - root.writing),
            held=root.held,
            doomed=root.doomed,
            evictable=root.queued,
            kept=root.kept,
            reservations=root.res_used,
            tickets=root.ticket_used,
            clock=root.clock,
            clients=members,
            counts=_counts(self._followed.get(names.counters_name(each.name, uuid))),
            storage=self._storage(each.name, uuid),
            copy=_head_copy(each, header, head, members),
        )

    def _storage(self, name: str, uuid: str) -> ServiceStats | None:
        board = self._followed.get(board_name(name, uuid))
        if board is None or not board.again() or board.object is None:
            return None
        with contextlib.suppress(LightcacheError, ValueError):
            wanted.verify_header(board.object.header(), board.object.size(), _of_board(board.name))
            head = board.head()
            words = words_in(memoryview(board.part(1 << 16, shm_layout.PAYLOAD_OFFSET)))
            slot, epoch = words["service"] & 0xFF, words["service"] >> 8
            members = clients.read_table(_table(head[1]), board.object.fd) if head else ()
            alive = any(c.alive and (c.slot, c.epoch) == (slot, epoch) for c in members)
            return stats_in(words, alive)
        return None

    def close(self) -> None:
        """Close all descriptors."""
        while self._followed:
            self._followed.popitem()[1].close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _of_board(name: str) -> wanted.SegmentSpec:
    return wanted.want(
        name,
        kind=None,
        payload_bytes=None,
        config=None,
        layout_facts=LAYOUT,
        lifetime=None,
        group=None,
    )


def _table(head: bytes) -> bytes:
    return head[shm_layout.CLIENTS_OFFSET : shm_layout.LOCK_OFFSET]


def _unread(each: _Followed) -> Reading | None:
    """A segment that cannot be read as an index; None: it is none of ours to show."""
    each.info = info = read_segment(each.name)
    if info is None or (info.seen and info.kind not in ("", "index")):
        return None
    unknown = "its index is not what its header says; `lightcache dump` tells more"
    state, problem = state_of(info), info.problem or each.problem or unknown
    return Reading(each.name, info.uuid, "unreadable" if state == "ready" else state, problem)


def _head_copy(
    each: _Followed, header: SegmentHeader, head: bytes, members: tuple[ClientInfo, ...]
) -> Copy:
    """The head alone as a copy of the segment."""
    assert each.info is not None
    info = each.info
    if (info.retired, info.disabled) != (bool(header.retired), bool(header.disabled)):
        each.info = info = read_segment(each.name) or info
    data = np.frombuffer(head, np.uint8)
    return Copy(
        info=info,
        config=each.config,
        data=data,
        lock=shm_layout.LockRecord.from_buffer_copy(head, shm_layout.LOCK_OFFSET),
        clients=list(members),
        steady=True,
        taken_ns=time.monotonic_ns(),
    )


def _counts(each: _Followed | None) -> Counts | None:
    if each is None or not each.again() or each.kind != SegmentKind.COUNTERS:
        return None
    head, listed = each.head(), each.config.get("names")
    if head is None or not isinstance(listed, list):
        return None
    assert each.object is not None
    data = each.part(bytes_of(listed), shm_layout.PAYLOAD_OFFSET)
    fields, table = rows_in(data, listed)
    if len(table) < shm_layout.SLOTS:
        return None
    members = clients.read_table(_table(head[1]), each.object.fd)
    return Counts(
        uuid=bytes(head[0].uuid).hex(),
        total=dict(zip(fields, table.sum(axis=0, dtype=np.uint64).tolist(), strict=True)),
        rows={
            process_of(client): dict(zip(fields, table[client.slot].tolist(), strict=True))
            for client in members
            if client.alive
        },
    )


# ---- What happened between two readings


@dataclass(frozen=True)
class Change:
    """What happened between two readings of a cache, or of one client."""

    seconds: float
    """0: since the clients attached and the counters began, so there are no rates."""
    pages: Mapping[str, int]
    """Counts of the clients' slots, see `PAGES`. What a client counted after the first reading is
    missing if it left before the second."""
    counted: Mapping[str, int]
    """Counts of managers, by the names of `ManagerStats`; empty: none counts for the node."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """Counts of the storage service: `read_bytes`, `written_bytes`, ..."""

    def per_second(self, count: int) -> float | None:
        """None: there is no time between the readings."""
        return count / self.seconds if self.seconds > 0 else None

    def hit_ratio(self) -> float | None:
        """Of the pages that were looked up in this index, 0 to 1; None: none were."""
        asked = self.pages["hit_pages"] + self.pages["missed_pages"]
        return self.pages["hit_pages"] / asked if asked else None

    def tier_ratios(self) -> dict[str, float] | None:
        """Of all prompt tokens the share that each tier had; None: no manager counted any."""
        asked = self.counted.get("prompt_tokens", 0)
        if not asked:
            return None
        return {tier: self.counted.get(f"{tier}_tokens", 0) / asked for tier in TIERS}

    def saved_tokens(self, page_tokens: int | None) -> int | None:
        """Tokens that need not be computed: as managers counted them, otherwise those of the pages
        that lookups found here. None: neither is known."""
        if self.counted.get("prompt_tokens", 0):
            return sum(self.counted.get(f"{tier}_tokens", 0) for tier in TIERS)
        return None if page_tokens is None else self.pages["hit_pages"] * page_tokens


TIERS = ("device", "host", "storage")


def change(before: Reading | None, after: Reading, seconds: float) -> Change:
    """All that happened to a cache. `before` None, or of a cache that was replaced: since its
    clients attached."""
    if before is not None and before.uuid != after.uuid:
        before, seconds = None, 0.0
    earlier = {} if before is None else {(c.slot, c.epoch): c for c in before.clients}
    pages: Counter[str] = Counter(dict.fromkeys(PAGES, 0))
    for client in after.clients:
        pages.update(_pages(earlier.get((client.slot, client.epoch)), client))
    old = before.counts if before is not None else None
    return Change(
        seconds,
        pages,
        {} if after.counts is None else _more(_same(old, after.counts), after.counts.total),
        _stored(before, after),
    )


def client_change(
    before: Reading | None, after: Reading, client: ClientInfo, seconds: float
) -> Change:
    """The same for one client of `after`."""
    if before is not None and before.uuid != after.uuid:
        before, seconds = None, 0.0
    earlier = None
    for each in before.clients if before is not None else ():
        if (each.slot, each.epoch) == (client.slot, client.epoch):
            earlier = each
    counted: Mapping[str, int] = {}
    process = process_of(client)
    if after.counts is not None and process in after.counts.rows:
        old = before.counts if before is not None else None
        same = old is not None and old.uuid == after.counts.uuid
        base = old.rows.get(process, {}) if old is not None and same else {}
        counted = _more(base, after.counts.rows[process])
    return Change(seconds, _pages(earlier, client), counted)


def _pages(before: ClientInfo | None, after: ClientInfo) -> dict[str, int]:
    return {
        name: max(0, getattr(after, name) - (0 if before is None else getattr(before, name)))
        for name in PAGES
    }


def _same(old: Counts | None, new: Counts) -> Mapping[str, int]:
    return old.total if old is not None and old.uuid == new.uuid else {}


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, count - before.get(name, 0)) for name, count in after.items()}


_STORED = ("read_bytes", "written_bytes", "loaded", "stored", "evicted", "failed")


def _stored(before: Reading | None, after: Reading) -> dict[str, int]:
    if after.storage is None:
        return {}
    old = before.storage if before is not None else None
    counts = {name: getattr(after.storage.tier, name) for name in _STORED}
    base = {} if old is None else {name: getattr(old.tier, name) for name in _STORED}
    return _more(base, counts)


# ---- What a copy of the whole index tells


@dataclass(frozen=True)
class Details:
    """What only a copy of the whole index tells; it costs some ms for each 10,000 pages."""

    taken_s: float
    """time.monotonic()."""
    cost_s: float
    """Of a processor."""
    held: Mapping[int, tuple[int, int]]
    """By slot: pins, and pinned pages."""
    reservations: tuple[facts.Facts, ...]
    tickets: tuple[facts.Facts, ...]
    namespaces: tuple[facts.Facts, ...]
    next_evicted: tuple[facts.Facts, ...]
    not_working: tuple[str, ...]
    notes: tuple[str, ...]


def details(name: str) -> Details:
    """Copy a cache's index and examine it. Takes no lock.

    Raises:
        As `lightcache.tools.image.read`.
    """
    began = time.process_time()
    image = read(name)
    lock = facts.lock(image)
    undone = undo(image)
    notes = hints.sections(hints.of_records(image, lock, undone))
    pins = facts.rows(image)
    held = {
        client.slot: (
            int(pins[client.slot].sum(dtype=np.int64)),
            int(np.count_nonzero(pins[client.slot])),
        )
        for client in image.clients
    }
    return Details(
        taken_s=time.monotonic(),
        held=held,
        reservations=tuple(facts.reservations(image)),
        tickets=tuple(facts.tickets(image)),
        namespaces=tuple(facts.namespaces(image)),
        next_evicted=tuple(next_evicted(image, NEXT)),
        not_working=tuple(notes["not_working"]),
        notes=tuple(notes["hints"]),
        cost_s=time.process_time() - began,
    )


def next_evicted(image: Image, most: int) -> Iterator[facts.Facts]:
    """Pages that a call which needs room would evict next: ready ends of prefixes, and independent
    pages, that no client pins and no call protects; the one unused for longest first, or as lists
    are ranked. Namespaces' and groups' minimums are not considered."""
    table = facts.records(image)[: min(image.root.fresh, image.pages)]
    word = table["word"]
    kind = word & (layout.STATE_MASK | layout.KEPT)
    in_no_reservation = word >> layout.RESERVATION_SHIFT & layout.RESERVATION_MASK == 0
    alone = (table["children"] == 0) | (word & layout.INDEPENDENT != 0)
    may_go = (kind == PageState.READY) & in_no_reservation & alone
    used, pins = table["used"], facts.rows(image)
    ranked = bool(image.root.eviction)
    pages = np.flatnonzero(may_go)
    by_use = pages[np.argsort(used[pages] >> np.uint64(16), kind="stable")]
    order = _as_ranked(image) if ranked else by_use
    spaces = {space["namespace"]: space for space in facts.namespaces(image)}
    groups = {group.number: group.name for group in _groups(image)}
    for page in map(int, order):
        if page >= len(table) or not may_go[page] or pins[:, page].any():
            continue
        if most == 0:
            return
        most -= 1
        space = spaces.get(int(word[page]) >> layout.NAMESPACE_SHIFT & 0xFF, {})
        group = int(word[page]) >> layout.GROUP_SHIFT
        yield {
            "page": page,
            "key": f"{int(table['hi'][page]) >> 32:08x}",
            "weights": space.get("weights", ""),
            "tenant": space.get("tenant", ""),
            "group": groups.get(group, str(group)),
            **facts.unused_of(image, int(used[page])),
            "hits": facts.hits_of(image, int(used[page])),
        }


def _as_ranked(image: Image) -> Iterator[int]:
    """The queued pages in the order of the ranked lists in which they lie, those that were told to
    go first before all, and parked ones last. A page may belong to another list by now."""
    ranks = layout.RanksRecord.from_buffer_copy(image.data.data, image.place.ranks)
    queue = facts.records(image)["queue"]["next"]
    for number in (layout.FIRST_LIST, *ranks.order[ranks.chosen & 1].list, layout.PARKED_LIST):
        if number >= layout.LISTS:
            return
        where = image.place.heads + number * ctypes.sizeof(layout.Link)
        page = layout.Link.from_buffer_copy(image.data.data, where).next
        for _ in range(image.pages):  # damage may close a circle
            if page >= image.pages:
                break
            yield page
            page = int(queue[page])


def _groups(image: Image) -> Iterable[GroupPages]:
    pages, minimums = zip(*((each.pages, each.minimum) for each in image.root.group), strict=True)
    return groups_of(pages, minimums, image.config)


def engine_of(client: ClientInfo, readings: Mapping[str, Reading], own: str) -> str:
    """What to call a client: its role; without one, the other index its process is a client of,
    such as that of its device blocks."""
    if client.role:
        return client.role
    process = process_of(client)
    others = (
        name
        for name, reading in readings.items()
        if name != own and any(process_of(each) == process for each in reading.clients)
    )
    return next(others, "")

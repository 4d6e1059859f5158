"""The values of `dump`, for JSON. Tables are made of the same values.

They do not reveal the content of pages: they have only the first digits of a key, tickets without
the words needed to adopt them, and no secret.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import evictions as index_evictions
from lightcache import layout, snapshot, token_records
from lightcache import pool as pool_file
from lightcache.evictions import BOUNDS, SIZES, TICK_MAX, TICK_NS, Sample
from lightcache.layout import PageState
from lightcache.pool import PoolObject
from lightcache.shm import layout as shm_layout
from lightcache.shm.clients import ClientInfo
from lightcache.shm.counters import rows_in
from lightcache.snapshot import NAMESPACE_TABLE_BYTES, GroupPages, groups_of
from lightcache.tools.image import Copy, Image

# ---- Pages, for `dump --pages`


def pages(image: Image, limit: int) -> Facts:
    """Pages that are not free, in order; at most `limit` of them (0: all)."""
    table, pins = records(image), rows(image)
    used = np.flatnonzero(table["word"] & layout.STATE_MASK)
    shown = used[:limit] if limit else used
    return {
        "in_use": len(used),
        "shown": len(shown),
        "pages": [_page(image, table, pins, int(page)) for page in shown],
    }


def hits_of(image: Image, used: int) -> int:
    """How often a page was hit, as its word says: 127 at most with "hz", which keeps more there."""
    return (used & 0xFFFF) >> (9 if image.root.eviction else 0)


def now_of(image: Image) -> int:
    """When it was copied, in the index's ticks: with "hz" a time, otherwise a count of calls."""
    clock = int(image.root.clock)
    return max(clock, image.taken_ns // TICK_NS) & TICK_MAX if image.root.eviction else clock


def unused_of(image: Image, used: int) -> Facts:
    """How long a page was not used, as its word says: seconds with "hz", otherwise calls. Neither
    is known with "hz" of a page that was told to go first."""
    tick, ranked = used >> 16, bool(image.root.eviction)
    age = (now_of(image) - tick) & TICK_MAX
    age = age if age <= TICK_MAX // 2 else 0  # of a call after the copy began
    return {
        "unused_s": age * TICK_NS / 1e9 if ranked and tick else None,
        "unused_calls": None if ranked else age,
    }


def _page(image: Image, found: npt.NDArray[Any], pins: npt.NDArray[np.uint16], page: int) -> Facts:
    record = found[page]
    word, used, parent = int(record["word"]), int(record["used"]), int(record["parent"])
    valid = parent < len(found) and found[parent]["gen"] == record["parent_gen"]
    reservation = word >> layout.RESERVATION_SHIFT & layout.RESERVATION_MASK
    held = word & layout.STATE_MASK == PageState.HELD  # then these bits are its client
    return {
        "page": page,
        "state": name_of(PageState, word & layout.STATE_MASK),
        "key": f"{int(record['hi']) >> 32:08x}",
        "namespace": None if held else word >> layout.NAMESPACE_SHIFT & 0xFF,
        "held_by": word >> layout.NAMESPACE_SHIFT & 0xFF if held else None,
        "generation": int(record["gen"]),
        "pins": {str(slot): int(pins[slot, page]) for slot in np.flatnonzero(pins[:, page])},
        "tick": used >> 16,
        "hits": hits_of(image, used),
        "parent": parent if valid else None,
        "children": int(record["children"]),
        "reservation": reservation - 1 if reservation else None,
        "kept": bool(word & layout.KEPT),
        "independent": bool(word & layout.INDEPENDENT),
        "group": 0 if held else word >> layout.GROUP_SHIFT,
    }


# ---- Clients in /proc, if this process can see them


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "I": "idle",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "X": "dead",
}


@functools.cache
def own_pid_namespace() -> int:
    """The inode of our PID namespace; 0 where /proc is not mounted."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def state_of(client: ClientInfo, tid: int = 0) -> str:
    """What a client's process (or one thread of it) is doing: "running", "stopped", "gone", or
    "out of sight" when it lives in another PID namespace."""
    if not client.pidns or client.pidns != own_pid_namespace():
        return "out of sight"
    main = _stat(Path(f"/proc/{client.pid}/stat"))
    if main is None or int(main[19]) != client.start_ticks:
        return "gone"
    stat = _stat(Path(f"/proc/{client.pid}/task/{tid}/stat")) if tid else main
    return _STATES.get(stat[0], stat[0]) if stat else "gone"


def has_ended(client: ClientInfo) -> bool:
    """Whether a client's process has certainly ended: it is of our PID namespace, and no process
    has its number, not even one that /proc hides."""
    if not client.pidns or client.pidns != own_pid_namespace():
        return False
    try:
        os.kill(client.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _stat(path: Path) -> list[str] | None:
    """The fields from the third on: the second, the name, may hold blanks and parentheses."""
    try:
        fields = path.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return [field.decode("ascii", "replace") for field in fields] if len(fields) > 19 else None


# ---- All other sections of `dump`


Facts = dict[str, Any]
_RESERVATION = {1: "active", 2: "doomed"}
_TICKET = {1: "building", 2: "open", 3: "dropped"}
_NAMED = (PageState.READY, PageState.WRITING)
_OPERATIONS = {each.value: each.name.lower() for each in layout.Operation}
_SHARD = {0: "pending", 1: "done", 2: "dead", 3: "open"}


def records(image: Image) -> npt.NDArray[Any]:
    """The page records of a copy, as a structured array."""
    return np.frombuffer(
        image.data, np.dtype(layout.PageRecord), count=image.pages, offset=image.place.page
    )


def rows(image: Image) -> npt.NDArray[np.uint16]:
    """Pins: row s, column p counts those of slot s on page p."""
    stride = image.place.row_stride
    independent = np.frombuffer(
        image.data, np.uint16, count=shm_layout.SLOTS * stride, offset=image.place.rows
    )
    return independent.reshape(shm_layout.SLOTS, stride)[:, : image.pages]


def _alive(image: Copy, slot: int, epoch: int | None = None) -> bool:
    """Whether a slot's client lives; with an epoch (its low 24 bits count) that very client."""
    return any(
        client.slot == slot
        and client.alive
        and (epoch is None or (client.epoch ^ epoch) & shm_layout.LOCK_EPOCH_MASK == 0)
        for client in image.clients
    )


def segment(image: Image) -> Facts:
    """Name, state and sizes."""
    info, config = image.info, image.config
    return {
        "name": info.name,
        "state": "retired" if info.retired else "disabled" if info.disabled else "ready",
        "lifetime": info.lifetime,
        "idle_limit_s": info.idle_limit_s or None,
        "unused_s": round(info.unused_s, 3),
        "age_s": info.age_s,
        "uuid": info.uuid,
        "uid": info.uid,
        "index_bytes": image.place.end,
        "independent": config.get("independent", False) is True,
        "eviction": config.get("eviction", "lru"),
        "page_bytes": config.get("page_bytes"),
        "page_tokens": config.get("page_tokens"),
        "fingerprint": config.get("fingerprint"),
        "algorithm": config.get("algorithm"),
        **_pool_facts(image),
        "clients": sum(client.alive for client in image.clients),
        "dead_clients": sum(not client.alive for client in image.clients),
        "quarantined_clients": sum(c.quarantine_s is not None for c in image.clients),
        "slots": shm_layout.SLOTS - 1,
        "occupied": info.occupied,
        "copy_is_steady": image.steady,
    }


def pool(image: Image) -> PoolObject | None:
    """The object with the pages; None: an index without a pool."""
    info, grown = image.info, min(image.root.grown, image.pages)
    return pool_file.look(info.name, info.uuid, info.uid, image.config, image.pages, grown)


def _pool_facts(image: Image) -> Facts:
    host_pool = pool(image)
    present = host_pool is not None and host_pool.length > 0
    return {
        "pool": host_pool.path if host_pool else None,
        "pool_bytes": {"length": host_pool.length, "allocated": host_pool.allocated}
        if host_pool and present
        else None,
        "pool_problem": host_pool.problem if host_pool else None,
        "token_ids_bytes": token_records.memory(image.info.name, image.info.uuid, image.config),
    }


def totals(image: Image) -> Facts:
    """Pages by state, counted from the records, and whether the counters agree."""
    root = image.root
    used, grown = min(root.fresh, image.pages), min(root.grown, image.pages)
    found = records(image)["word"][:used]
    words = found & layout.STATE_MASK
    count = np.bincount(words, minlength=16)
    of_groups, minimums = zip(*((each.pages, each.minimum) for each in root.group), strict=True)
    groups = found[np.isin(words, _NAMED)] >> layout.GROUP_SHIFT
    state = {member.name.lower(): int(count[member]) for member in PageState}
    named = state["writing"] + state["ready"] + state["evicting"]
    counted = (state["free"], named, state["doomed"], state["held"])
    equal = (root.free_count, root.named, root.doomed, root.held) == counted
    equal &= list(of_groups) == np.bincount(groups, minlength=layout.NUMBERS).tolist()
    late, pinned = _ticket_pins(image), rows(image)
    doomed = np.flatnonzero(records(image)["word"][:used] & layout.STATE_MASK == PageState.DOOMED)
    counts = pinned[:, doomed].sum(axis=0, dtype=np.int64) - late[doomed]
    hits, missed = _looked_up(image)
    return {
        "pages": image.pages,
        "grown": root.grown,
        "no_memory_s": _no_memory(image),
        "free": state["free"] + max(0, grown - used),
        "never_used": max(0, grown - used),
        **{name: number for name, number in state.items() if name != "free"},
        "available": state["free"] + max(0, grown - used) + int((counts <= 0).sum()),
        "evictable": root.queued,
        "kept": root.kept,
        "groups": [_group(image, each) for each in groups_of(of_groups, minimums, image.config)],
        "accounting_holds": bool(equal and used == root.fresh and grown == root.grown),
        "ticket_pins": int(pinned[0].sum(dtype=np.int64)) - int(late.sum()),
        "late_ticket_pins": int(late.sum()),
        "reservations": root.res_used,
        "tickets": root.ticket_used,
        "clock": root.clock,
        "hit_pages": hits,
        "missed_pages": missed,
        "repairing": bool(root.repairing),
    }


def evictions(image: Image) -> Facts:
    """Which pages went, and why; `sample` is None where the order is "lru"."""
    found = index_evictions.read(image.data.ctypes.data, image.place)
    return {
        "pages": {cause.name.lower(): pages for cause, pages in found.pages.items()},
        "sample": None if found.sample is None else _sample(found.sample, _hit_ratio(image)),
    }


def _sample(sample: Sample, now: float | None) -> Facts:
    return {
        "hit_ratio": now,
        "named": sample.named,
        "hits": [{"turns": t, "gap": gap, "hits": n} for (t, gap), n in sample.hits.items()],
        "returned": [
            {
                "size": size,
                "pages": sample.returned[size],
                "hit_ratio": None if now is None else sample.hit_ratio(now, size),
            }
            for size in SIZES
        ],
        "bounds_s": list(BOUNDS),
        "idle_at_hit_s": list(sample.idle_at_hit_s),
        "idle_at_eviction_s": list(sample.idle_at_eviction_s),
        "age_at_eviction_s": list(sample.age_at_eviction_s),
    }


def _looked_up(image: Image) -> tuple[int, int]:
    """Pages that the clients with a slot found, and that they did not."""
    hits = sum(client.hit_pages for client in image.clients)
    return hits, sum(client.missed_pages for client in image.clients)


def _hit_ratio(image: Image) -> float | None:
    hits, missed = _looked_up(image)
    return hits / (hits + missed) if hits + missed else None


def _group(image: Image, group: GroupPages) -> Facts:
    return {
        **dataclasses.asdict(group),
        "bytes": _bytes(image.config, group.pages),
        "minimum_bytes": _bytes(image.config, group.minimum_pages),
    }


def _bytes(config: Mapping[str, Any], pages: int | None) -> int | None:
    """None: no pages are meant, or the index has no pool and does not know how large they are."""
    size = config.get("page_bytes")
    return pages * size if isinstance(size, int) and pages is not None else None


def _no_memory(image: Image) -> float:
    """Seconds for which calls evict instead of requesting memory; 0: they request it."""
    left = (image.root.no_memory_ns - image.taken_ns) / 1e9
    return left if image.root.grown < image.pages and 0 < left <= 60 else 0.0


def _ticket_pins(image: Image) -> npt.NDArray[np.int64]:
    """Pins of each page by tickets whose deadline has passed: these hold nothing, and the next call
    that evicts releases them."""
    place, pins = image.place, np.zeros(image.pages, np.int64)
    records = _table(image, layout.TicketRecord, place.ticket, place.tickets)
    for record in records:
        if record.state and record.deadline_ns <= image.taken_ns:
            pages = _listed(image, record.pages)
            np.add.at(pins, pages[pages < image.pages], 1)
    return pins


def _listed(image: Image, head: layout.PageList) -> npt.NDArray[np.int64]:
    """Pages of a reservation's or ticket's list, as far as it makes sense."""
    numbers: list[int] = []
    chunk, place, size = head.first, image.place, ctypes.sizeof(layout.ChunkRecord)
    while len(numbers) < min(head.count, image.pages) and chunk < place.chunks:
        record = layout.ChunkRecord.from_buffer_copy(image.data.data, place.chunk + chunk * size)
        count = min(record.count, len(record.page))
        if not count:
            break
        numbers += record.page[:count]
        chunk = record.next
    return np.array(numbers, np.int64)


def lock(image: Copy, operations: Mapping[int, str] = _OPERATIONS) -> Facts:
    """The holder of the lock, and its counters. `operations` names the holder's current
    operation."""
    record = image.lock
    return {
        "holder": _holder(image, operations),
        "waiters": bool(record.word & shm_layout.LOCK_WAITERS),
        "log_entries": record.log_count,
        "acquisitions": record.acquisitions,
        "contended": record.contended,
        "wait_s": record.wait_ns / 1e9,
        "hold_s": record.hold_ns / 1e9,
        "hold_max_s": record.hold_max_ns / 1e9,
        "recoveries": record.recoveries,
        "undone_words": record.undone_words,
    }


def _holder(image: Copy, operations: Mapping[int, str]) -> Facts | None:
    record = image.lock
    slot = record.word & shm_layout.LOCK_SLOT_MASK
    if slot == 0:
        return None
    epoch = record.word >> shm_layout.LOCK_EPOCH_SHIFT
    claim = record.said_by_holder
    tid = record.holder & 0xFFFFFFFF if claim else 0
    alive = _alive(image, slot, epoch)
    client = next((c for c in image.clients if c.slot == slot), None)
    return {
        "slot": slot,
        "alive": alive,
        "role": client.role if client else None,
        "pid": client.pid if client else None,
        "tid": tid,
        "process": state_of(client, tid) if client and alive else "gone",
        "operation": operations.get(record.operation, f"unknown ({record.operation})")
        if claim
        else None,
        "held_s": max(0, image.taken_ns - record.since_ns) / 1e9 if claim else None,
    }


def counted(copy: Copy) -> dict[str, int]:
    """The sums of a copy of `SharedCounters`."""
    names = copy.config.get("names")
    if not isinstance(names, list):
        return {}
    fields, rows = rows_in(copy.data.data[shm_layout.PAYLOAD_OFFSET :], names)
    return dict(zip(fields, rows.sum(axis=0, dtype=np.uint64).tolist(), strict=True))


def name_of(enum: Callable[[int], Any], value: int) -> str:
    """A member's name in small letters; damage by its number."""
    try:
        return str(enum(value).name).lower()
    except ValueError:
        return f"unknown ({value})"


def clients(image: Image) -> list[Facts]:
    """All clients with a slot."""
    sums = rows(image).sum(axis=1, dtype=np.int64)
    distinct = np.count_nonzero(rows(image), axis=1)
    return [_client(c, int(sums[c.slot]), int(distinct[c.slot])) for c in image.clients]


def member(client: ClientInfo) -> Facts:
    """A client of a segment of any kind."""
    return {
        "slot": client.slot,
        "state": client.state.name.lower(),
        "quarantine_s": client.quarantine_s,
        "alive": client.alive,
        "process": state_of(client) if client.alive else "gone",
        "role": client.role,
        "pid": client.pid,
        "pid_namespace": client.pidns,
        "attached_s": client.attached_s,
    }


def _client(client: ClientInfo, pins: int, pages: int) -> Facts:
    looked = client.hit_pages + client.missed_pages
    return {
        **member(client),
        "device": client.device,
        "pins": pins,
        "pinned_pages": pages,
        "lookups": client.lookups,
        "hit_rate": client.hit_pages / looked if looked else None,
        "hit_pages": client.hit_pages,
        "missed_pages": client.missed_pages,
        "reserved_pages": client.reserved_pages,
        "evicted_pages": client.evicted_pages,
        "published_pages": client.published_pages,
    }


def _table(image: Image, record: Any, offset: int, count: int) -> list[Any]:
    size = ctypes.sizeof(record)
    return [record.from_buffer_copy(image.data.data, offset + i * size) for i in range(count)]


def reservations(image: Image) -> list[Facts]:
    """Reservations whose pages have not been collected."""
    place = image.place
    records = _table(image, layout.ReservationRecord, place.reservation, place.reservations)
    return [_reservation(image, i, record) for i, record in enumerate(records) if record.state]


def _reservation(image: Image, number: int, record: layout.ReservationRecord) -> Facts:
    words = [int(word) for word in record.shard[: min(record.shards, layout.SHARDS)]]
    states = [_SHARD.get(word >> 6 & 3, "unknown") for word in words]
    pending = [word & 0x3F for word, state in zip(words, states, strict=True) if state == "pending"]
    state = _RESERVATION.get(record.state, f"unknown ({record.state})")
    if state == "active" and states.count("done") == len(states):
        state = "published"  # the next holder of the lock collects it
    return {
        "reservation": number,
        "state": state,
        "owner": record.owner,
        "owner_alive": _alive(image, record.owner, record.owner_epoch),
        "pages": record.pages.count,
        "shards": record.shards,
        "shards_left": len(pending) + states.count("open"),
        "shards_dead": states.count("dead"),
        "pending_slots": sorted(set(pending)),
        "namespace": record.ns & 0xFF,
    }


def tickets(image: Image) -> list[Facts]:
    """Tickets that have not ended: their owners, and the clients that have yet to adopt."""
    place = image.place
    records = _table(image, layout.TicketRecord, place.ticket, place.tickets)
    return [_ticket(image, i, record) for i, record in enumerate(records) if record.state]


def _ticket(image: Image, number: int, record: layout.TicketRecord) -> Facts:
    left = record.deadline_ns - image.taken_ns
    return {
        "ticket": number,
        "state": _TICKET.get(record.state, f"unknown ({record.state})"),
        "owner": record.giver,
        "owner_alive": _alive(image, record.giver, record.giver_epoch),
        "pages": record.total,
        "pages_held": record.pages.count,
        "deadline_in_s": left / 1e9,
        "reservation": record.reservation - 1 if record.reservation else None,
        **{
            name: _slots(getattr(record, name))
            for name in ("adopters", "adopted", "done", "failed")
        },
    }


def _slots(words: Any) -> list[int]:
    mask = int(words[0]) | int(words[1]) << 32
    return [slot for slot in range(shm_layout.SLOTS) if mask >> slot & 1]


def namespaces(image: Image) -> list[Facts]:
    """Namespaces that are in use."""
    begin = image.place.namespaces
    return namespaces_of(image.config, image.data[begin : begin + NAMESPACE_TABLE_BYTES].tobytes())


def namespaces_of(config: Mapping[str, Any], table: bytes) -> list[Facts]:
    """Namespaces of a copy of their table that are in use."""
    return [
        {
            "namespace": each.number,
            "state": each.state,
            "weights": each.weights,
            "tenant": each.tenant,
            "pages": each.pages,
            "bytes": _bytes(config, each.pages),
            "quota_pages": each.quota_pages,
            "quota_bytes": _bytes(config, each.quota_pages),
            "minimum_pages": each.minimum_pages,
            "minimum_bytes": _bytes(config, each.minimum_pages),
        }
        for each in snapshot.namespaces_of(table)
    ]

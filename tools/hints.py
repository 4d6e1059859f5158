"""Hints: functions of a cache that do not work now, and other anomalies, one line each with the
cause and the remedy. `dump` prints them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

from lightcache.errors import LightcacheError
from lightcache.shm import clients, names
from lightcache.shm import layout as shm_layout
from lightcache.storage.service.board import (
    LAYOUT,
    ServiceStats,
    board_name,
    stats_in,
    words_in,
)
from lightcache.tools import facts
from lightcache.tools.image import Copy, Image, read_any


@dataclass(frozen=True)
class Hint:
    """One line."""

    text: str
    stops: bool = False
    """True if a function of the cache does not work until this is repaired."""


@dataclass(frozen=True)
class Seen:
    """The input of all sources of hints."""

    copy: Copy
    lock: facts.Facts
    """As it was before `undo` changed the copy."""

    @property
    def name(self) -> str:
        """Name of the segment."""
        return self.copy.info.name

    @property
    def waits(self) -> str:
        """The calls that wait while the lock is held."""
        return "changes wait"

    @property
    def unaffected(self) -> str:
        """The calls that do not wait."""
        return ""


@dataclass(frozen=True)
class SeenHead(Seen):
    """The same for a cache of which only the head was copied: header, clients, lock."""

    @property
    def waits(self) -> str:
        """See `Seen`."""
        return "reservations wait"

    @property
    def unaffected(self) -> str:
        """See `Seen`."""
        return "; lookups continue"


@dataclass(frozen=True)
class SeenCache(SeenHead):
    """The same for a cache."""

    image: Image
    """The copy, after `undo`."""
    undone: int
    """What `undo` returned."""


def of(image: Image, lock: facts.Facts, undone: int) -> list[Hint]:
    """Hints of a cache. Arguments: see `SeenCache`."""
    seen = SeenCache(copy=image, lock=lock, image=image, undone=undone)
    return [
        *_segment(seen),
        *_lock(seen),
        *of_records(image, lock, undone),
        *_clients(seen),
    ]


def of_head(copy: Copy, lock: facts.Facts) -> list[Hint]:
    """Those of `of` that need only the head of a cache."""
    seen = SeenHead(copy, lock)
    return [*_segment(seen), *_lock(seen), *_clients(seen)]


def of_records(image: Image, lock: facts.Facts, undone: int) -> list[Hint]:
    """The others: those of its pool, records, managers and storage."""
    seen = SeenCache(copy=image, lock=lock, image=image, undone=undone)
    return [hint for source in _OF_A_CACHE for hint in source(seen)]


def of_structure(copy: Copy, lock: facts.Facts, content: facts.Facts) -> list[Hint]:
    """Hints of a list, dict, ring, log, or any other segment without an index."""
    seen = Seen(copy, lock)
    return [*_segment(seen), *_lock(seen), *_full(content), *_clients(seen)]


def sections(hints: list[Hint]) -> facts.Facts:
    """The sections of `dump`."""
    return {
        "not_working": [hint.text for hint in hints if hint.stops],
        "hints": [hint.text for hint in hints if not hint.stops],
    }


def _full(content: facts.Facts) -> Iterator[Hint]:
    """The client that a ring or a log waits for."""
    capacity = content.get("capacity")
    for reader in content.get("readers", ()):
        if reader["behind"] >= (capacity or 1):
            yield Hint(
                f"the writer waits: reader {reader['slot']} has {reader['behind']:,} unread "
                "entries, as many as the log holds; continue it or kill it",
                stops=True,
            )
    if content.get("writer", {}).get("state") == "dead":
        yield Hint("its writer was killed: readers read the rest, and then wait for another writer")
    if "pushed" in content and content["entries"] >= (capacity or 1):
        yield Hint(
            "producers wait: it is full, and no consumer takes entries out of it",
            stops=True,
        )


def _segment(seen: Seen) -> Iterator[Hint]:
    info = seen.copy.info
    if info.retired:
        yield Hint("it was retired: it was replaced or removed, and nothing can attach", stops=True)
    if info.disabled:
        again = f"`lightcache enable {seen.name}`"
        yield Hint(f"it is disabled: lookups and reservations fail; {again}", stops=True)
    if not seen.copy.steady:
        yield Hint("it was never quiet while it was copied: values of different instants are mixed")


def _pool(seen: SeenCache) -> Iterator[Hint]:
    pool = facts.pool(seen.image)
    if pool and pool.problem:
        yield Hint(pool.problem, stops=True)


def _lock(seen: Seen) -> Iterator[Hint]:
    holder = seen.lock["holder"]
    if holder is None:
        return
    client = f"client {holder['slot']} (pid {holder['pid']})"
    if not holder["alive"] or holder["process"] in ("gone", "zombie", "dead"):
        yield Hint(
            f"the lock's holder, {client}, is dead: the next process that needs the lock undoes "
            f"its unfinished step, or `lightcache reap {seen.name}` now{seen.unaffected}"
        )
    elif holder["process"] in ("stopped", "traced"):
        yield Hint(
            f"{seen.waits}: the lock's holder, {client}, is {holder['process']}; continue it "
            f"(kill -CONT {holder['pid']}) or kill it{seen.unaffected}",
            stops=True,
        )
    elif (holder["held_s"] or 0) > 1:
        yield Hint(
            f"{seen.waits}: {client} has held the lock for {holder['held_s']:.1f} s in "
            f"{holder['operation']}; it may be starved of processor time",
            stops=True,
        )


def _records(seen: SeenCache) -> Iterator[Hint]:
    again = f"run `lightcache check {seen.name}`, then `repair`"
    totals = facts.totals(seen.image)
    if seen.undone < 0:
        yield Hint(f"reservations fail: the undo log is damaged; {again}", stops=True)
    if totals["repairing"]:
        yield Hint(
            "a repair is running, or its process died: the next holder of the lock does it again"
        )
    if seen.image.steady and not totals["accounting_holds"]:
        yield Hint(f"the counters disagree with the records: {again}")
    if totals["late_ticket_pins"]:
        yield Hint(
            f"{totals['late_ticket_pins']:,} pins belong to tickets that were not adopted in time; "
            "the next call that evicts releases them"
        )
    bare = seen.image.pages - totals["grown"]
    if bare > 0 and totals["no_memory_s"]:
        yield Hint(
            f"{bare:,} of {seen.image.pages:,} pages have no memory because there was none, and "
            "calls evict instead; make room for the pool (`lightcache ls`, `lightcache rm`): its "
            f"clients try again, in {totals['no_memory_s']:.0f} s at the latest",
            stops=True,
        )
    elif bare > 0:
        yield Hint(f"{bare:,} pages have no memory yet; clients attached for writing add it")


def _clients(seen: Seen) -> Iterator[Hint]:
    for client in seen.copy.clients:
        if client.alive and facts.has_ended(client):
            yield Hint(
                f"client {client.slot} ({client.role or 'no role'}, pid {client.pid}) has ended, "
                "but a process that was forked from it without its fork handlers (clone, _Fork) "
                "still holds the descriptor that proves its life: its pins, and the lock if it "
                "had it, stay until that process ends or calls lightcache; find it with "
                "`lsof /dev/shm/lightcache.*` and end it",
                stops=True,
            )
    table = seen.copy.clients
    if len(table) == shm_layout.SLOTS - 1:
        living = all(client.alive for client in table)
        yield Hint(
            f"no slot is free: {clients.slot_use(table)}; "
            + ("end a client" if living else "the next client waits for those of the dead"),
            stops=living,
        )
    held = [client for client in table if client.quarantine_s is not None]
    dead = sum(not client.alive for client in table) - len(held)
    if dead:
        yield Hint(
            f"{dead} dead clients have not been reaped; a process that needs their pages or slots "
            f"does it, or `lightcache reap {seen.name}` now"
        )
    for client in held:
        yield Hint(
            f"client {client.slot} ({client.role or 'no role'}, pid {client.pid}) is dead and in "
            "quarantine, as its device may still copy into the pages that it was writing: "
            f"{clients.quarantine_end(client.quarantine_s or 0.0)}; `lightcache reap {seen.name}` "
            "frees the slot then"
        )


# Counters of `ManagerStats`, summed over all managers of the node, that show failures.
_WITHOUT = {
    "no_room_pages": "were not kept on the host, which had no room",
    "unwritten_failed_pages": "were not kept on the host: the copy failed; the log has the reason",
    "unwritten_refused_pages": "were not kept on the host: its index failed, or its lock was busy",
    "unwritten_disabled_pages": "were not kept on the host: copies were disabled after failures",
    "storage_refused_pages": "were not stored: no room in the storage, or in the queue before it",
    "storage_failed_pages": "were not stored: the storage failed",
    "storage_skipped_pages": "were not stored: skipped, or evicted before their turn",
    "failed_loads": "loads failed",
    "failed_offloads": "offloads failed",
    "errors": "calls of managers continued without the cache after an error",
}


def _managers(seen: SeenCache) -> Iterator[Hint]:
    """The counters of all managers of this node, also of ended ones."""
    with contextlib.suppress(LightcacheError, OSError, ValueError):
        name = names.counters_name(seen.name, seen.image.info.uuid)
        sums = facts.counted(read_any(name))
        for name, text in _WITHOUT.items():
            if sums.get(name):
                pages = "pages " if name.endswith("_pages") else ""
                yield Hint(f"so far {sums[name]:,} {pages}{text}")


@dataclass(frozen=True)
class SeenBoard:
    """The board of a cache's storage service and its clients, as copied."""

    copy: Copy
    words: Mapping[str, int]
    stats: ServiceStats


def board_of(name: str, uuid: str) -> SeenBoard:
    """Copy the board of a cache.

    Raises:
        As `read_any`; NotReady: it has neither a service nor a client of one.
    """
    copy = read_any(board_name(name, uuid), layout_facts=LAYOUT)
    words = words_in(copy.data.data[shm_layout.PAYLOAD_OFFSET :])
    service = words["service"]
    alive = any(one.alive and one.slot | one.epoch << 8 == service for one in copy.clients)
    return SeenBoard(copy, words, stats_in(words, alive))


def _storage(seen: SeenCache) -> Iterator[Hint]:
    """The storage service of this cache: its own report, and whether it exists."""
    with contextlib.suppress(LightcacheError, OSError, ValueError):
        seen_board = board_of(seen.name, seen.image.info.uuid)
        found, board = seen_board.copy, seen_board.stats
        service, pid = seen_board.words["service"], seen_board.words["pid"]
        start = f"`lightcache storage {seen.name} --url ...` starts one"
        if not board.serving and service:  # it did not end in order
            yield Hint(f"storage is not used: its service (pid {pid}) is gone; {start}", stops=True)
        elif not board.serving and (found.clients or found.info.occupied):
            yield Hint(
                f"storage is not used: clients wait for a service, and none runs; {start}",
                stops=True,
            )
        elif board.serving and board.tier.state != "closed":
            yield Hint(
                f"storage is not used: it failed; its service (pid {pid}) retries it, and its log "
                "has the reason",
                stops=True,
            )
        if board.serving and board.tier.stuck:
            yield Hint(f"{board.tier.stuck} calls of the storage hang (service pid {pid})")
        tier = asdict(board.tier)
        causes = {name: number for name, number in tier.items() if name.startswith("unstored_")}
        if any(causes.values()):
            lines = [f"{n:,} {name.removeprefix('unstored_')}" for name, n in causes.items() if n]
            yield Hint(f"so far the storage service has not stored pages: {', '.join(lines)}")


_OF_A_CACHE: tuple[Callable[[SeenCache], Iterator[Hint]], ...] = (
    _pool,
    _storage,
    _records,
    _managers,
)

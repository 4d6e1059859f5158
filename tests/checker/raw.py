"""A second opinion on the bytes of an index: every invariant of lightcache/native/index.h and of
docs/design/index.md, derived in numpy from a copy of the segment, without calling the core.

`check` returns all that is wrong, in words; an empty list means sound. A million pages take a few
seconds.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache.layout import NIL, PageState
from lightcache.page_index import geometry
from lightcache.shm import layout as shm_layout

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[Any]

_LOG_SOFT = 0x80000000
_RES_ACTIVE, _RES_DOOMED = 1, 2
_SHARD_PENDING, _SHARD_DONE, _SHARD_DEAD, _SHARD_OPEN = 0, 1, 2, 3
_NS_NORMAL, _NS_CLEARING, _NS_CLEARED = 1, 2, 3


def copy_of(name: str) -> Bytes:
    """The bytes of a cache's index, as they are at the moment."""
    path = Path("/dev/shm") / f"lightcache.{name}"
    return np.fromfile(path, np.uint8)


class Copy:
    """A segment's bytes with names for the parts. Everything is a view: a test may damage it."""

    def __init__(self, whole: Bytes, pages: int = 0) -> None:
        """Of a whole segment of an index; `pages` 0: as its header says."""
        self.whole = whole
        if not pages:
            size = ctypes.sizeof(shm_layout.SegmentHeader)
            header = shm_layout.SegmentHeader.from_buffer_copy(whole[:size])
            pages = int(json.loads(bytes(header.config)[: header.config_bytes])["pages"])
        self.place = place = geometry(pages)
        self.header = self._records(shm_layout.SegmentHeader, 0, 1)
        self.clients = self._records(
            shm_layout.ClientRecord, shm_layout.CLIENTS_OFFSET, shm_layout.SLOTS
        )
        self.lock = self._records(shm_layout.LockRecord, shm_layout.LOCK_OFFSET, 1)
        self.log = self._words(shm_layout.LOG_OFFSET, shm_layout.LOG_ENTRIES, np.uint64)
        self.root = self._records(layout.RootRecord, place.root, 1)[0]
        self.ranks = self.order = None
        if self.root["eviction"] == 1:
            self.place = place = geometry(pages, "hz")
            self.ranks = self._records(layout.RanksRecord, place.ranks, 1)[0]
            self.order = self.ranks["order"][int(self.ranks["chosen"]) & 1]
        self.heads = self._records(layout.Link, place.heads, layout.LISTS)
        self.spaces = self._records(layout.NamespaceRecord, place.namespaces, layout.NAMESPACES)
        self.reservations = self._records(
            layout.ReservationRecord, place.reservation, place.reservations
        )
        self.tickets = self._records(layout.TicketRecord, place.ticket, place.tickets)
        self.chunks = self._records(layout.ChunkRecord, place.chunk, place.chunks)
        self.buckets = self._words(place.bucket, place.buckets, np.uint32)
        self.pages = self._records(layout.PageRecord, place.page, place.pages)
        self.rows = self._words(place.rows, shm_layout.SLOTS * place.row_stride, np.uint16).reshape(
            shm_layout.SLOTS, place.row_stride
        )[:, : place.pages]

    def _records(self, kind: type[ctypes.Structure], offset: int, count: int) -> Ints:
        return self._words(offset, count, np.dtype(kind))

    def _words(self, offset: int, count: int, dtype: Any) -> Ints:
        size = np.dtype(dtype).itemsize * count
        return self.whole[offset : offset + size].view(dtype)

    def log_entries(self) -> list[tuple[int, int, int]] | None:
        """(tag, old value, new value of a soft one), oldest first; None: the log is damaged."""
        count = int(self.lock["log_count"][0])
        if count > shm_layout.LOG_ENTRIES or (count and not self.lock["word"][0]):
            return None
        begin = self.place.root + layout.RootRecord.free_head.offset
        entries: list[tuple[int, int, int]] = []
        at = 0
        while at < count:
            entry = int(self.log[at])
            soft = bool(entry & _LOG_SOFT)
            byte = (entry & (_LOG_SOFT - 1)) * 4
            if not begin <= byte < self.place.end or (soft and at + 1 == count):
                return None
            entries.append((entry & 0xFFFFFFFF, entry >> 32, int(self.log[at + 1]) if soft else 0))
            at += 2 if soft else 1
        return entries

    def undo(self) -> int:
        """Take back what the log of an unfinished critical section says; entries undone."""
        words = self.whole.view(np.uint32)
        count = int(self.lock["log_count"][0])
        for tag, old, new in reversed(self.log_entries() or []):
            word = tag & ~_LOG_SOFT
            if not tag & _LOG_SOFT or words[word] == new & 0xFFFFFFFF:
                words[word] = old
        self.lock["log_count"] = 0
        return count


def check(whole: Bytes, *, quiet: bool = True, pages: int = 0) -> list[str]:
    """Everything that is wrong with a copy.

    Args:
        whole: the segment; what an unfinished critical section did is undone in it.
        quiet: no client was inside any call, and the dead have been taken back: then pins must
            agree exactly as well.
        pages: of the index; 0: as its header says.
    """
    copy = Copy(whole, pages)
    if copy.log_entries() is None:
        return ["the undo log is damaged, or has entries and nobody holds the lock"]
    copy.undo()
    return list(_Findings(copy, quiet).all())


class _Findings:
    def __init__(self, copy: Copy, quiet: bool) -> None:
        self.c = copy
        self.quiet = quiet
        self.n = int(copy.place.pages)
        self.fresh = int(copy.root["fresh"])
        word = copy.pages["word"]
        self.state = word & layout.STATE_MASK
        self.space = word >> layout.NAMESPACE_SHIFT & 0xFF
        rid = word >> layout.RESERVATION_SHIFT & layout.RESERVATION_MASK
        self.reservation = rid.astype(np.int64) - 1
        self.group = word >> layout.GROUP_SHIFT
        self.named = (self.state == PageState.WRITING) | (self.state == PageState.READY)
        self.kept = word & layout.KEPT != 0
        self.independent = word & layout.INDEPENDENT != 0
        self.used = np.arange(self.n) < self.fresh

    def all(self) -> Iterator[str]:
        root, place = self.c.root, self.c.place
        for field in ("pages", "buckets", "reservations", "tickets", "chunks"):
            if root[field] != getattr(place, field):
                yield f"root.{field} is {root[field]}, expected {getattr(place, field)}"
        if not self.fresh <= root["grown"] <= self.n:
            yield f"fresh {self.fresh} <= grown {root['grown']} <= pages {self.n} does not hold"
            return
        if root["repairing"]:
            yield "a repair has begun and not ended"
        yield from self.states()
        yield from self.chains()
        yield from self.free_stack()
        yield from self.queue()
        yield from self.parents()
        yield from self.records()
        yield from self.namespaces()

    def count(self, field: str, found: int) -> Iterator[str]:
        if int(self.c.root[field]) != found:
            yield f"root.{field} is {self.c.root[field]}, counted {found}"

    def same(self, what: str, found: Ints, expected: Ints) -> Iterator[str]:
        """`found`: pages met in a structure; `expected`: a mask of those that belong into it."""
        met = (
            np.bincount(found, minlength=self.n)[: self.n] if len(found) else np.zeros(self.n, int)
        )
        for page in np.flatnonzero(met > 1)[:3]:
            yield f"{what}: page {page} is there {met[page]} times"
        for page in np.flatnonzero((met > 0) & ~expected)[:3]:
            yield f"{what}: page {page} is there, its word is {int(self.c.pages['word'][page]):#x}"
        for page in np.flatnonzero((met == 0) & expected)[:3]:
            yield f"{what}: page {page} is missing, word {int(self.c.pages['word'][page]):#x}"

    def states(self) -> Iterator[str]:
        word = self.c.pages["word"]
        for page in np.flatnonzero(~self.used & (word != 0))[:3]:
            yield f"page {page} was never used, its word is {int(word[page]):#x}"
        odd = self.used & ((self.state > PageState.HELD) | (self.state == PageState.EVICTING))
        for page in np.flatnonzero(odd)[:3]:
            yield f"page {page} has state {self.state[page]} outside of a critical section"
        for page in np.flatnonzero(self.used & (self.state == PageState.FREE) & (word != 0))[:3]:
            yield f"free page {page} has the word {int(word[page]):#x}"
        for page in np.flatnonzero((self.state == PageState.WRITING) & (self.reservation < 0))[:3]:
            yield f"page {page} is being written under no reservation"
        for page in np.flatnonzero(self.kept & (self.state != PageState.READY))[:3]:
            yield f"page {page} is kept, its word is {int(word[page]):#x}"
        for page in np.flatnonzero(self.independent & ~self.named)[:3]:
            yield f"page {page} is independent, its word is {int(word[page]):#x}"
        for page in np.flatnonzero((self.group != 0) & ~self.named)[:3]:
            yield f"page {page} is of a group, its word is {int(word[page]):#x}"
        tick = self.c.pages["used"] >> np.uint64(16)
        clock = np.uint64(self.c.root["clock"])
        ahead = tick > clock
        if self.c.order is not None:  # hazard's ticks wrap
            ahead = (clock - tick) << np.uint64(16) >> np.uint64(63) != 0
        for page in np.flatnonzero(self.named & ahead)[:3]:
            yield f"page {page} was used at {tick[page]}, the clock says {self.c.root['clock']}"
        doomed = int((self.state == PageState.DOOMED).sum())
        yield from self.count("named", int(self.named.sum()))
        yield from self.count("writing", int((self.named & (self.reservation >= 0)).sum()))
        yield from self.count("doomed", doomed)
        yield from self.count("kept", int(self.kept.sum()))
        yield from self.held()

    def held(self) -> Iterator[str]:
        """Pages without a key: each says whose it is, and nothing else, and that one pins it."""
        held = self.state == PageState.HELD
        owner = self.space
        word = owner << layout.NAMESPACE_SHIFT | PageState.HELD
        nobodys = (owner == 0) | (owner >= shm_layout.SLOTS) | (self.c.pages["word"] != word)
        for page in np.flatnonzero(held & nobodys)[:3]:
            yield f"page {page} is held by nobody, its word is {int(self.c.pages['word'][page]):#x}"
        for page in np.flatnonzero(held & ~nobodys) if self.quiet else ():
            if not self.c.rows[owner[page], page]:
                yield f"page {page} is held by slot {owner[page]}, which does not pin it"
        yield from self.count("held", int(held.sum()))

    def chains(self) -> Iterator[str]:
        pages = self.c.pages
        bucket = np.arange(len(self.c.buckets))
        at = self.c.buckets.astype(np.int64)
        met = []
        for _ in range(layout.CHAIN_MAX + 1):
            bucket, at = bucket[at != NIL], at[at != NIL]
            if not len(at):
                break
            for wrong in np.flatnonzero(at >= self.n)[:3]:
                yield f"chain {bucket[wrong]} leads to page {at[wrong]}"
            bucket, at = bucket[at < self.n], at[at < self.n]
            met.append(at)
            home = pages["lo"][at] & np.uint64(len(self.c.buckets) - 1)
            for wrong in np.flatnonzero(home != bucket)[:3]:
                yield f"page {at[wrong]} is in chain {bucket[wrong]}, its key says {home[wrong]}"
            at = pages["next"][at].astype(np.int64)
        else:
            yield f"chain {bucket[0]} is longer than {layout.CHAIN_MAX}, or goes round"
            return
        found = np.concatenate(met) if met else np.empty(0, np.int64)
        yield from self.same("chains", found, self.named)
        for page in found[pages["gen"][found] & 1 == 1][:3]:
            yield f"page {page} can be reached with the odd generation {pages['gen'][page]}"
        order = found[np.lexsort((pages["lo"][found], pages["hi"][found]))]
        left, right = order[:-1], order[1:]
        twins = (pages["lo"][left] == pages["lo"][right]) & (
            pages["hi"][left] == pages["hi"][right]
        )
        for i in np.flatnonzero(twins & (left != right))[:3]:
            yield f"pages {left[i]} and {right[i]} have the same key"

    def walk(self, what: str, at: int, links: Ints, end: int, limit: int) -> tuple[list[int], str]:
        """Follow indices in `links` until `end`; nothing is believed."""
        found: list[int] = []
        while at != end:
            if at >= limit or len(found) >= limit:
                return found, f"{what}: entry {len(found)} is {at}, of {limit}"
            found.append(at)
            at = links[at]
        return found, ""

    def free_stack(self) -> Iterator[str]:
        links = self.c.pages["queue"]["next"].tolist()
        found, wrong = self.walk("free stack", int(self.c.root["free_head"]), links, NIL, self.n)
        if wrong:
            yield wrong
            return
        yield from self.same(
            "free stack", np.array(found, np.int64), self.used & (self.state == PageState.FREE)
        )
        yield from self.count("free_count", len(found))

    def order(self) -> Iterator[str]:
        """Each list has one rank, and the two tables agree."""
        order = self.c.order
        if order is None:
            return
        if self.c.ranks["chosen"] > 1:
            yield f"order {self.c.ranks['chosen']} of eviction is chosen"
        ranks = np.arange(layout.RANKED)
        if not np.array_equal(np.sort(order["list"]), ranks):
            yield "the order of eviction does not name each list once"
        elif not np.array_equal(order["rank"][order["list"]], ranks):
            yield "the ranks are not those of the order of eviction"

    def occupied(self, number: int, found: bool) -> bool:
        """Whether its bit says that a list of the queue holds pages."""
        words, order = self.c.root["occupied"], self.c.order
        if order is not None:
            if number >= layout.RANKED:
                return found
            number, words = int(order["rank"][number]), order["occupied"]
        elif number >= layout.LEVELS * layout.DIGITS:
            return False
        return bool(int(words[number // 32 % len(words)]) >> number % 32 & 1)

    def queue(self) -> Iterator[str]:
        links = self.c.pages["queue"]
        following, previous = links["next"].tolist(), links["prev"].tolist()
        queued: list[int] = []
        now = int(self.c.root["now"][0]) | int(self.c.root["now"][1]) << 32
        for number in range(layout.LISTS):
            head, what = self.n + number, f"list {number}"
            first, last = int(self.c.heads["next"][number]), int(self.c.heads["prev"][number])
            found, wrong = self.walk(what, first, following, head, self.n)
            if wrong:
                yield wrong
                return
            before = head
            for page in found:
                if previous[page] != before:
                    yield f"{what}: page {page} points back to {previous[page]}, not {before}"
                before = page
            if last != before:
                yield f"{what} ends at {last}, not at {before}"
            if number == layout.DOOMED_LIST:
                yield from self.same(
                    "doomed list", np.array(found, np.int64), self.state == PageState.DOOMED
                )
                continue
            bit = self.occupied(number, bool(found))
            if bit != bool(found):
                yield f"{what} has {len(found)} pages, its bit is {bit}"
            level, digit = divmod(number, layout.DIGITS)
            if self.c.order is None and found and digit < now >> 6 * level & 63:
                yield f"{what} holds page {found[0]}, and the queue's present {now} has passed it"
            queued += found
        belong = (
            (self.state == PageState.READY)
            & ~self.kept
            & (self.reservation < 0)
            & ((self.c.pages["children"] == 0) | self.independent)
        )
        yield from self.same("queue", np.array(queued, np.int64), belong)
        yield from self.count("queued", len(queued))

    def parents(self) -> Iterator[str]:
        pages = self.c.pages
        parent = pages["parent"].astype(np.int64)
        inside = np.where(parent < self.n, parent, 0)
        valid = self.named & (parent < self.n) & self.named[inside]
        valid &= pages["gen"][inside] == pages["parent_gen"]
        children = np.bincount(parent[valid], minlength=self.n)
        for page in np.flatnonzero(self.named & (children != pages["children"]))[:3]:
            yield f"page {page} has {children[page]} children, it says {pages['children'][page]}"
        for page in np.flatnonzero(valid & (self.space != self.space[inside]))[:3]:
            yield f"page {page} hangs on page {parent[page]} of another namespace"
        for page in np.flatnonzero(valid & (self.group != self.group[inside]))[:3]:
            yield f"page {page} hangs on page {parent[page]} of another group"
        mixed = valid & (self.group == 0) & (self.independent != self.independent[inside])
        for page in np.flatnonzero(mixed)[:3]:
            yield f"page {page} hangs on page {parent[page]}, and one of them is independent"
        up = np.append(np.where(valid, parent, self.n), self.n)  # the last entry: above all roots
        for _ in range(max(1, int(self.n).bit_length())):
            up = up[up]
        for page in np.flatnonzero(up[:-1] != self.n)[:3]:
            yield f"page {page} is its own ancestor"

    # ---- reservations, tickets, pins

    def page_list(self, record: Any, what: str, owned: Ints) -> tuple[Ints, list[str]]:
        """Pages of a list; `owned` counts how often each chunk belongs to somebody."""
        found: list[Ints] = []
        at, left, last = int(record["first"]), int(record["count"]), NIL
        while left > 0:
            if at >= len(self.c.chunks) or not 0 < self.c.chunks["count"][at] <= layout.CHUNK_PAGES:
                return np.empty(0, np.int64), [f"{what}: chunk {at} is none, or its count is wrong"]
            owned[at] += 1
            part = self.c.chunks["page"][at][: self.c.chunks["count"][at]].astype(np.int64)
            found.append(part)
            left -= len(part)
            last, at = at, int(self.c.chunks["next"][at])
        pages = np.concatenate(found) if found else np.empty(0, np.int64)
        wrong = []
        if left < 0:
            wrong.append(f"{what} lists {len(pages)} pages, counts {record['count']}")
        if last != int(record["last"]):
            wrong.append(f"{what} ends with chunk {last}, says {record['last']}")
        if (pages >= self.n).any():
            wrong.append(f"{what} lists page {pages.max()}")
        return pages[pages < self.n], wrong

    def records(self) -> Iterator[str]:
        chunks = np.zeros(len(self.c.chunks), np.int64)
        yield from self.reservation_records(chunks)
        held = np.zeros(self.n, np.int64)
        used = 0
        for i in np.flatnonzero(self.c.tickets["state"]):
            yield from self.ticket(i)
            pages, wrong = self.page_list(self.c.tickets["pages"][i], f"ticket {i}", chunks)
            yield from wrong
            held += np.bincount(pages, minlength=self.n)
            used += 1
        yield from self.count("ticket_used", used)
        for page in np.flatnonzero(self.c.rows[0] != held)[:3]:
            yield f"page {page}: row 0 counts {self.c.rows[0, page]}, tickets hold {held[page]}"
        links = self.c.chunks["next"].tolist()
        head = int(self.c.root["chunk_head"])
        free, wrong_text = self.walk("free chunks", head, links, NIL, len(links))
        if wrong_text:
            yield wrong_text
        yield from self.count("chunk_used", int((chunks > 0).sum()))
        chunks[free] += 1
        if (chunks[: int(self.c.root["chunk_fresh"])] != 1).any():
            yield f"chunk {np.flatnonzero(chunks != 1)[0]} has no owner, or more than one"
        yield from self.pins()

    def ticket(self, i: Any) -> Iterator[str]:
        record = self.c.tickets[i]
        if record["state"] > 3 or record["giver"] >= shm_layout.SLOTS:
            yield f"ticket {i} has state {record['state']}, giver {record['giver']}"
        most = len(self.c.chunks) * layout.CHUNK_PAGES
        whole = record["state"] == 1 or record["pages"]["count"] <= record["total"]
        if record["total"] > most or not whole:
            yield f"ticket {i} has {record['pages']['count']} of {record['total']} pages"
        if record["reservation"] > len(self.c.reservations):
            yield f"ticket {i} is of reservation {record['reservation'] - 1}"
        for part, all_ in (("adopted", "adopters"), ("done", "adopted"), ("failed", "adopters")):
            if (record[part] & ~record[all_]).any():
                yield f"ticket {i}: {part} {record[part]} is more than {all_} {record[all_]}"

    def reservation_records(self, chunks: Ints) -> Iterator[str]:
        records = self.c.reservations
        fresh, gen = int(self.c.root["res_fresh"]), records["gen"] & 0xFFFFFF
        listed = np.full(self.n, -1, np.int64)
        for i in np.flatnonzero(records["state"]):
            what, shards = f"reservation {i}", int(records["shards"][i])
            if i >= fresh or records["state"][i] > _RES_DOOMED or not 0 < shards <= layout.SHARDS:
                yield f"{what}: state {records['state'][i]}, {shards} shards, {fresh} ever used"
                continue
            if records["owner"][i] >= shm_layout.SLOTS:
                yield f"{what} has owner {records['owner'][i]}"
                continue
            words = records["shard"][i][:shards]
            status = words >> 6 & 3
            if (words >> 8 != gen[i]).any():
                yield f"{what}: a shard's word is of another generation"
            strangers = words & 63 != records["owner"][i]
            joins = records["team"][i] != 0 and records["state"][i] != _RES_DOOMED
            if ((status == _SHARD_OPEN) & (strangers | (not joins))).any():
                yield f"{what} has a shard for ranks to join that is not its owner's, or no team"
            ended = records["state"][i] == _RES_DOOMED or (status == _SHARD_DONE).all()
            if (status == _SHARD_DEAD).any() and records["state"][i] != _RES_DOOMED:
                yield f"{what} has a dead shard and is not doomed"
            # One that ended with a dead client is unlinked in portions by its reaper alone.
            owner = self.c.clients["state"][records["owner"][i]]
            reaped = records["owner_epoch"][i] == 0 and owner == shm_layout.ClientState.TAKEN
            if (
                ended
                and self.quiet
                and not reaped
                and not self.c.root["completed"][i // 64] >> np.uint64(i % 64) & np.uint64(1)
            ):
                yield f"{what} has ended and nobody will collect it"
            pages, wrong = self.page_list(records["pages"][i], what, chunks)
            yield from wrong
            pages = pages[self.reservation[pages] == i]
            strange = self.named[pages] & (self.space[pages] != records["ns"][i] & 0xFF)
            for page in pages[strange][:3]:
                yield f"page {page} is not of the namespace of its {what}"
            if (listed[pages] == i).any() or len(np.unique(pages)) != len(pages):
                yield f"{what} lists a page twice"
            listed[pages] = i
            if not ended:
                for page in pages[self.state[pages] == PageState.READY][:3]:
                    yield f"page {page} is ready, and {what} has shards to be written"
            if self.quiet and not ended:
                pinned = self.c.rows[:, pages].any(axis=0)
                for page in pages[~pinned & (self.state[pages] == PageState.WRITING)][:3]:
                    yield f"page {page} is being written under {what}, and nobody pins it"
        lost = self.named & (self.reservation >= 0) & (listed != self.reservation)
        for page in np.flatnonzero(lost)[:3]:
            yield f"page {page} is of reservation {self.reservation[page]}, which does not list it"
        bits = np.unpackbits(self.c.root["completed"].view(np.uint8), bitorder="little")
        if bits[len(records) :].any():
            yield f"of {len(records)} reservations one more is said to have ended"
        yield from self.count("res_used", int((records["state"] != 0).sum()))
        links = records["next_free"].tolist()
        head = int(self.c.root["res_head"])
        if head == NIL:
            free: list[int] = []
        else:
            free, wrong_text = self.walk("free reservations", head, links, NIL, len(links))
            if wrong_text:
                yield wrong_text
        vacant = np.flatnonzero(records["state"][:fresh] == 0)
        if sorted(free) != vacant.tolist():
            yield f"free reservations: {len(free)} on the stack, {len(vacant)} vacant"

    def pins(self) -> Iterator[str]:
        taken = self.c.clients["state"] != 0
        taken[0] = True
        if not self.quiet:
            return
        for slot in range(shm_layout.SLOTS):
            pinned = np.flatnonzero(self.c.rows[slot])
            if not len(pinned):
                continue
            if not taken[slot]:
                yield f"the free slot {slot} pins page {pinned[0]}"
            if slot and self.c.clients["state"][slot] == shm_layout.ClientState.QUARANTINE:
                continue  # it died between its count and its bit: it never used the page
            bits = self.c.pages["pins"][pinned] >> np.uint64(slot) & np.uint64(1)
            for page in pinned[bits == 0][:3]:
                yield f"slot {slot} pins page {page}, its bit is not set"
            for page in pinned[(self.state[pinned] == PageState.FREE)][:3]:
                yield f"slot {slot} pins the free page {page}"

    def namespaces(self) -> Iterator[str]:
        spaces = self.c.spaces
        pages = np.bincount(self.space[self.named], minlength=layout.NAMESPACES)
        for i in np.flatnonzero(pages != spaces["pages"])[:3]:
            yield f"namespace {i} has {pages[i]} pages, says {spaces['pages'][i]}"
        for i in np.flatnonzero(spaces["state"] > _NS_CLEARED)[:3]:
            yield f"namespace {i} has state {spaces['state'][i]}"
        open_ = (spaces["state"] == _NS_NORMAL) | (spaces["state"] == _NS_CLEARING)
        for i in np.flatnonzero((pages > 0) & ~open_)[:3]:
            yield f"namespace {i} was cleared and has {pages[i]} pages"
        yield from self.count("clearing", int((spaces["state"] == _NS_CLEARING).sum()))
        normal = spaces["state"] == _NS_NORMAL
        promised = int(spaces["minimum"][normal].sum(dtype=np.uint64))
        if promised > self.n:
            yield f"namespaces were promised {promised} pages of {self.n}"
        groups = self.c.root["group"]
        counted = np.bincount(self.group[self.named], minlength=layout.NUMBERS)
        for i in np.flatnonzero(counted != groups["pages"])[:3]:
            yield f"group {i} has {counted[i]} pages, says {groups['pages'][i]}"
        if promised + int(groups["minimum"].sum(dtype=np.uint64)) > self.n:
            yield f"groups were promised {groups['minimum']} pages of {self.n}"
        above = normal & (spaces["quota"] > 0) & (spaces["minimum"] > spaces["quota"])
        for i in np.flatnonzero(above)[:3]:
            yield f"namespace {i} was promised {spaces['minimum'][i]}, of {spaces['quota'][i]}"


__all__ = ["Copy", "check", "copy_of"]

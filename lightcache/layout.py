"""The records of a page index, declared for Python and compared with the C core at load time.

`lightcache/native/index.h` has the C declarations, the meaning of each field, and who may write it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from lightcache.shm import _native as shm_native
from lightcache.shm import layout as shm_layout

NIL = 0xFFFFFFFF
CHUNK_PAGES = 62
SHARDS = 64
NAMESPACES = 256
LEVELS = 8
DIGITS = 64
EVICTIONS = ("lru", "hz")  # orders of eviction, by their numbers in the segment

AGES = 14  # of pages, classes of each of which a list of the ranked queue holds one
TURNS = 6  # classes: uses of the page, and of the prefix before it,
GAPS = 9  # by the time between the last two, or what the caller expects
RANKED = TURNS * GAPS * AGES  # lists that an order of eviction ranks
SPANS = 20  # of time, in `ToldRecord`
SIZES = 6  # of caches, in `ToldRecord`
FIRST_LIST = RANKED
PARKED_LIST = RANKED + 1
DOOMED_LIST = RANKED + 2
LISTS = DOOMED_LIST + 1
GROUPS = 16
NUMBERS = 32
PARTS = 4096
UNCOUNTED = NIL  # capacity of a lease before a match that does not count
CHAIN_MAX = 32
MAX_PAGES = 40_000_000
"""Limit of the undo log's addresses: an index of 8 GiB."""


def default_eviction(*, independent: bool, groups: int = 0) -> str:
    """The order of a new index whose creator names none. "hz" learns what comes back; it tears
    apart what is of use together alone, such as KV and the state behind it: that has "lru"."""
    return "lru" if independent or groups > 1 else "hz"


class PageState(IntEnum):
    """State of a page. FREE -> WRITING -> READY -> EVICTING -> FREE; FREE -> HELD -> READY -> HELD
    -> FREE; WRITING, READY, HELD -> DOOMED -> FREE."""

    FREE = 0
    WRITING = 1
    READY = 2
    EVICTING = 3
    DOOMED = 4
    HELD = 5


STATE_MASK = 0xF
UNWRITTEN = 0x10
KEPT = 0x20
INDEPENDENT = 0x40
NAMESPACE_SHIFT = 8
RESERVATION_SHIFT = 16
RESERVATION_MASK = 0x7FF
GROUP_SHIFT = 27


class KeyStatus(IntEnum):
    """Outcome for one key of a reserve or name call."""

    UNKNOWN = 0
    PRESENT = 1
    BUSY = 2
    NEW = 3
    NO_ROOM = 4


class WhyMissing(IntEnum):
    """Why a reserve made fewer pages than it was asked for."""

    NONE = 0
    PINNED = 1
    QUOTA = 2
    RESERVATIONS = 3
    CHAIN = 4
    MEMORY = 5
    HEAD = 6
    TEAM = 7
    WORTH = 8
    """With `admission`: not worth the pages that would have to go."""


class Hint(IntEnum):
    """What a caller expects of pages that it writes. How soon pages of each hint are used is
    learned, so a hint needs no number, and a wrong one costs little."""

    NONE = 0
    CONTINUES = 1
    """The request is followed by another that begins with it."""
    TOOL_CALL = 2
    """As CONTINUES, and soon: it waits for a tool."""
    ENDS = 3
    """The last turn, or one of a batch: nothing is known to follow."""


class Cause(IntEnum):
    """Why pages were evicted."""

    ASKED = 0
    ROOM = 1
    QUOTA = 2
    DROPPED = 3
    DISCARDED = 4
    CLEARED = 5


class MayGrow(IntEnum):
    """Whether pages without memory count as available, for `lci_may_allocate`."""

    ASK = 0
    NONE = 1
    ALL = 2


class Operation(IntEnum):
    """The operation of the lock's holder, for operators."""

    NONE = 0
    RESERVE = 1
    ABANDON = 2
    EVICT = 3
    CLEAR = 4
    REAP = 5
    TICKET = 6
    ADOPT = 7
    CHECK = 8
    REPAIR = 9
    GROW = 10
    NAMESPACE = 11
    COLLECT = 12
    KEEP = 13
    ALLOCATE = 14
    NAME = 15
    UNNAME = 16
    FREE = 17
    GROUP = 18


class Link(ctypes.Structure):
    """Neighbours on a list."""

    _fields_ = [("prev", ctypes.c_uint32), ("next", ctypes.c_uint32)]


class PageList(ctypes.Structure):
    """The head of a list."""

    _fields_ = [
        ("count", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("last", ctypes.c_uint32),
    ]


class PageRecord(ctypes.Structure):
    """A page: 64 bytes. `word` holds state, flags, namespace and reservation."""

    _fields_ = [
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("pins", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("gen", ctypes.c_uint32),
        ("word", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("queue", Link),
        ("parent", ctypes.c_uint32),
        ("parent_gen", ctypes.c_uint32),
        ("children", ctypes.c_uint32),
    ]


class ChunkRecord(ctypes.Structure):
    """62 pages of a reservation's or ticket's list."""

    _fields_ = [
        ("next", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("page", ctypes.c_uint32 * CHUNK_PAGES),
    ]


class ReservationRecord(ctypes.Structure):
    """Pages being written, and the owner of each shard."""

    _fields_ = [
        ("gen", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("owner", ctypes.c_uint32),
        ("owner_epoch", ctypes.c_uint32),
        ("shards", ctypes.c_uint32),
        ("next_free", ctypes.c_uint32),
        ("pages", PageList),
        ("ns", ctypes.c_uint32),
        ("team", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("listed", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("shard", ctypes.c_uint32 * SHARDS),
    ]


class TicketRecord(ctypes.Structure):
    """Pins being handed from one client to others."""

    _fields_ = [
        ("gen", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("giver", ctypes.c_uint32),
        ("giver_epoch", ctypes.c_uint32),
        ("deadline_ns", ctypes.c_uint64),
        ("pages", PageList),
        ("total", ctypes.c_uint32),
        ("reservation", ctypes.c_uint32),
        ("reservation_gen", ctypes.c_uint32),
        ("adopters", ctypes.c_uint32 * 2),
        ("adopted", ctypes.c_uint32 * 2),
        ("done", ctypes.c_uint32 * 2),
        ("failed", ctypes.c_uint32 * 2),
        ("pad", ctypes.c_uint32 * 12),
    ]


class NamespaceRecord(ctypes.Structure):
    """Weights version and tenant; keys are seeded with both."""

    _fields_ = [
        ("epoch", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("pages", ctypes.c_uint32),
        ("quota", ctypes.c_uint32),
        ("cursor", ctypes.c_uint32),
        ("hand", ctypes.c_uint32),
        ("minimum", ctypes.c_uint32),
        ("pad", ctypes.c_uint32 * 1),
        ("weights", ctypes.c_char * 48),
        ("tenant", ctypes.c_char * 48),
    ]


class GroupCountRecord(ctypes.Structure):
    """Pages of a KV group in all namespaces, and how many it is left at least."""

    _fields_ = [
        ("pages", ctypes.c_uint32),
        ("minimum", ctypes.c_uint32),
    ]


class RootRecord(ctypes.Structure):
    """Totals, queue and clock of an index."""

    _fields_ = [
        ("pages", ctypes.c_uint64),
        ("buckets", ctypes.c_uint64),
        ("reservations", ctypes.c_uint64),
        ("tickets", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
        ("index_bytes", ctypes.c_uint64),
        ("eviction", ctypes.c_uint64),
        ("pad0", ctypes.c_uint8 * 8),
        ("free_head", ctypes.c_uint32),
        ("free_count", ctypes.c_uint32),
        ("fresh", ctypes.c_uint32),
        ("grown", ctypes.c_uint32),
        ("named", ctypes.c_uint32),
        ("writing", ctypes.c_uint32),
        ("doomed", ctypes.c_uint32),
        ("chunk_head", ctypes.c_uint32),
        ("chunk_fresh", ctypes.c_uint32),
        ("chunk_used", ctypes.c_uint32),
        ("res_head", ctypes.c_uint32),
        ("res_fresh", ctypes.c_uint32),
        ("res_used", ctypes.c_uint32),
        ("ticket_used", ctypes.c_uint32),
        ("clearing", ctypes.c_uint32),
        ("queued", ctypes.c_uint32),
        ("now", ctypes.c_uint32 * 2),
        ("occupied", ctypes.c_uint32 * (LEVELS * 2)),
        ("repairing", ctypes.c_uint32),
        ("kept", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("reaped", ctypes.c_uint32),
        ("looking_ns", ctypes.c_uint64),
        ("looked_ns", ctypes.c_uint64),
        ("no_memory_ns", ctypes.c_uint64),
        ("joining_ns", ctypes.c_uint64),
        ("ticket_end", ctypes.c_uint32),
        ("pad4", ctypes.c_uint32),
        ("clock", ctypes.c_uint64),
        ("pad2", ctypes.c_uint8 * 56),
        ("event", ctypes.c_uint32),
        ("pad3", ctypes.c_uint8 * 60),
        ("completed", ctypes.c_uint64 * 16),
        ("group", GroupCountRecord * NUMBERS),
        ("evicted", ctypes.c_uint64 * len(Cause)),
        ("pad5", ctypes.c_uint8 * 16),
    ]


class ToldRecord(ctypes.Structure):
    """What was counted of the keys in the sample, for operators."""

    _fields_ = [
        ("named", ctypes.c_uint64),
        ("returned", ctypes.c_uint64 * (SIZES + 1)),
        ("hits", ctypes.c_uint64 * (TURNS * GAPS)),
        ("idle_at_hit", ctypes.c_uint64 * SPANS),
        ("idle_at_eviction", ctypes.c_uint64 * SPANS),
        ("age_at_eviction", ctypes.c_uint64 * SPANS),
    ]


class LearntRecord(ctypes.Structure):
    """The advice of an index with eviction "hz", up to its ghosts."""

    _fields_ = [
        ("unit", ctypes.c_uint32),
        ("computed", ctypes.c_uint32),
        ("pad0", ctypes.c_uint8 * 56),
        ("named", ctypes.c_uint64),
        ("computed_named", ctypes.c_uint64),
        ("computed_tick", ctypes.c_uint64),
        ("claimed", ctypes.c_uint64),
        ("paced_named", ctypes.c_uint64),
        ("paced_ticks", ctypes.c_uint64),
        ("pad1", ctypes.c_uint8 * 16),
        ("hits", ctypes.c_uint32 * RANKED),
        ("losses", ctypes.c_uint32 * RANKED),
        ("pad2", ctypes.c_uint8 * (64 - RANKED * 8 % 64)),
        ("told", ToldRecord),
        ("size", ctypes.c_uint8 * RANKED),
        ("pad3", ctypes.c_uint8 * (64 - (ctypes.sizeof(ToldRecord) + RANKED) % 64)),
    ]


class OrderRecord(ctypes.Structure):
    """An order of the ranked lists."""

    _fields_ = [
        ("list", ctypes.c_uint16 * RANKED),
        ("rank", ctypes.c_uint16 * RANKED),
        ("occupied", ctypes.c_uint32 * ((RANKED + 31) // 32)),
    ]


class RanksRecord(ctypes.Structure):
    """The two orders, one of which holds."""

    _fields_ = [
        ("chosen", ctypes.c_uint32),
        ("pad", ctypes.c_uint32 * 15),
        ("order", OrderRecord * 2),
    ]


class Geometry(ctypes.Structure):
    """The byte offset of each part of the segment."""

    _fields_ = [
        ("pages", ctypes.c_uint64),
        ("buckets", ctypes.c_uint64),
        ("reservations", ctypes.c_uint64),
        ("tickets", ctypes.c_uint64),
        ("chunks", ctypes.c_uint64),
        ("root", ctypes.c_uint64),
        ("heads", ctypes.c_uint64),
        ("namespaces", ctypes.c_uint64),
        ("reservation", ctypes.c_uint64),
        ("ticket", ctypes.c_uint64),
        ("chunk", ctypes.c_uint64),
        ("bucket", ctypes.c_uint64),
        ("page", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("row_stride", ctypes.c_uint64),
        ("ranks", ctypes.c_uint64),
        ("advice", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    ]


class LeaseHeader(ctypes.Structure):
    """Header of a lease's buffer, in the process's own memory."""

    _fields_ = [
        ("held", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
    ]


class GroupRecord(ctypes.Structure):
    """A KV group of one lookup, in the process's own memory."""

    _fields_ = [
        ("h", ctypes.c_void_p),
        ("lease", ctypes.c_void_p),
        ("align", ctypes.c_uint64),
        ("back", ctypes.c_uint64),
        ("ns", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
    ]


class LookProgress(ctypes.Structure):
    """Progress of one call with reaping dead clients."""

    _fields_ = [
        ("begun_ns", ctypes.c_uint64),
        ("reaped", ctypes.c_uint32),
        ("due", ctypes.c_uint32),
        ("waited", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
    ]


class ReserveProgress(ctypes.Structure):
    """Progress of one reserve; in the process's own memory."""

    _fields_ = [
        ("rid", ctypes.c_uint32),
        ("gen", ctypes.c_uint32),
        ("cursor", ctypes.c_uint32),
        ("pinned", ctypes.c_uint32),
        ("made", ctypes.c_uint32),
        ("shards", ctypes.c_uint32),
        ("ns", ctypes.c_uint32),
        ("stopped", ctypes.c_uint32),
        ("wanted", ctypes.c_uint32),
        ("reason", ctypes.c_uint32),
        ("tick", ctypes.c_uint64),
        ("unpinned", ctypes.c_uint32),
        ("kept", ctypes.c_uint32),
        ("no_memory", ctypes.c_uint32),
        ("doomed", ctypes.c_uint32),
        ("run", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("whole", ctypes.c_uint32),
        ("linked", ctypes.c_uint32),
        ("team", ctypes.c_uint64),
        ("join_until", ctypes.c_uint64),
        ("later", ctypes.c_uint64),
        ("shard", ctypes.c_uint32),
        ("joined", ctypes.c_uint32),
        ("admission", ctypes.c_uint32),
        ("hint", ctypes.c_uint32),
        ("parked", ctypes.c_uint32),
        ("look", LookProgress),
    ]


class NamespaceLimits(ctypes.Structure):
    """Limits of a namespace, and the minimums of groups and all other namespaces."""

    _fields_ = [
        ("quota", ctypes.c_uint32),
        ("minimum", ctypes.c_uint32),
        ("others", ctypes.c_uint64),
    ]


class WalkProgress(ctypes.Structure):
    """Progress of a protect, unprotect, evict_first or drop."""

    _fields_ = [
        ("cursor", ctypes.c_uint32),
        ("pages", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
        ("tick", ctypes.c_uint64),
    ]


class OldestProgress(ctypes.Structure):
    """Progress of listing the pages that are evicted next."""

    _fields_ = [
        ("since", ctypes.c_uint64),
        ("want", ctypes.c_uint32),
        ("keep_order", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
        ("climb", ctypes.c_uint32),
        ("returned", ctypes.c_uint32),
        ("parked", ctypes.c_uint32),
        ("going", ctypes.c_uint32 * NAMESPACES),
        ("going_group", ctypes.c_uint32 * NUMBERS),
    ]


class DiscardProgress(ctypes.Structure):
    """Progress of a discard."""

    _fields_ = [
        ("taken", ctypes.c_uint32),
        ("cursor", ctypes.c_uint32),
        ("climb", ctypes.c_uint32),
        ("freed", ctypes.c_uint32),
    ]


class HeldProgress(ctypes.Structure):
    """Progress of a call on pages without a key."""

    _fields_ = [
        ("done", ctypes.c_uint32),
        ("giving", ctypes.c_uint32),
        ("wanted", ctypes.c_uint32),
        ("reason", ctypes.c_uint32),
        ("refused", ctypes.c_uint32),
        ("ns", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("tick", ctypes.c_uint64),
        ("no_memory", ctypes.c_uint32),
        ("doomed", ctypes.c_uint32),
        ("parked", ctypes.c_uint32),
        ("look", LookProgress),
    ]


class TicketRef(ctypes.Structure):
    """The 16 bytes of a ticket that are sent to adopters."""

    _fields_ = [
        ("index", ctypes.c_uint32),
        ("gen", ctypes.c_uint32),
        ("cache", ctypes.c_uint64),
    ]


class TicketStatusRecord(ctypes.Structure):
    """State of a ticket: sets of client slots, one bit each."""

    _fields_ = [
        ("adopters", ctypes.c_uint64),
        ("adopted", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("late", ctypes.c_uint32),
        ("open", ctypes.c_uint32),
    ]


class IndexCounts(ctypes.Structure):
    """Totals, each read once."""

    _fields_ = [
        ("pages", ctypes.c_uint32),
        ("grown", ctypes.c_uint32),
        ("fresh", ctypes.c_uint32),
        ("free", ctypes.c_uint32),
        ("named", ctypes.c_uint32),
        ("writing", ctypes.c_uint32),
        ("doomed", ctypes.c_uint32),
        ("queued", ctypes.c_uint32),
        ("reservations", ctypes.c_uint32),
        ("tickets", ctypes.c_uint32),
        ("chunks", ctypes.c_uint32),
        ("namespaces_clearing", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("kept", ctypes.c_uint32),
        ("idle", ctypes.c_uint32),
        ("pad0", ctypes.c_uint32),
        ("clock", ctypes.c_uint64),
        ("no_memory_ns", ctypes.c_uint64),
    ]


class CheckRecord(ctypes.Structure):
    """Result of `check`."""

    _fields_ = [
        ("broken", ctypes.c_int32),
        ("page", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("free", ctypes.c_uint32),
        ("named", ctypes.c_uint32),
        ("writing", ctypes.c_uint32),
        ("ready", ctypes.c_uint32),
        ("doomed", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("queued", ctypes.c_uint32),
        ("pins", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
        ("message", ctypes.c_char * 200),
    ]


assert ctypes.sizeof(PageRecord) == 64
assert ctypes.sizeof(ChunkRecord) == 256
assert ctypes.sizeof(ReservationRecord) == 320
assert ctypes.sizeof(TicketRecord) == 128
assert ctypes.sizeof(NamespaceRecord) == 128
STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "lc_link": Link,
    "lci_list": PageList,
    "lci_page": PageRecord,
    "lci_chunk": ChunkRecord,
    "lci_reservation": ReservationRecord,
    "lci_ticket": TicketRecord,
    "lci_namespace": NamespaceRecord,
    "lci_group_count": GroupCountRecord,
    "lci_root": RootRecord,
    "lch_told": ToldRecord,
    "lch_root": LearntRecord,
    "lci_order": OrderRecord,
    "lci_ranks": RanksRecord,
    "lci_geometry": Geometry,
    "lci_lease": LeaseHeader,
    "lci_group": GroupRecord,
    "lci_look_op": LookProgress,
    "lci_reserve_op": ReserveProgress,
    "lci_ns_limits": NamespaceLimits,
    "lci_walk_op": WalkProgress,
    "lci_oldest_op": OldestProgress,
    "lci_discard_op": DiscardProgress,
    "lci_held_op": HeldProgress,
    "lci_ticket_ref": TicketRef,
    "lci_ticket_status": TicketStatusRecord,
    "lci_counts": IndexCounts,
    "lci_report": CheckRecord,
}
CONSTANTS: Mapping[str, int] = {
    "LCI_CHUNK_PAGES": CHUNK_PAGES,
    "LCI_SHARDS": SHARDS,
    "LCI_NAMESPACES": NAMESPACES,
    "LCI_LEVELS": LEVELS,
    "LCI_DIGITS": DIGITS,
    "LCI_LISTS": LISTS,
    "LCI_PARKED_LIST": PARKED_LIST,
    "LCH_LISTS": RANKED,
    "LCH_AGES": AGES,
    "LCH_TURNS": TURNS,
    "LCH_GAPS": GAPS,
    "LCH_SPANS": SPANS,
    "LCH_SIZES": SIZES,
    "LCI_CAUSES": len(Cause),
    "LCI_GROUPS": GROUPS,
    "LCI_NUMBERS": NUMBERS,
    "LCI_PARTS": PARTS,
    "LCI_UNCOUNTED": UNCOUNTED,
    "LC_CHAIN_MAX": CHAIN_MAX,
    "LC_NIL": NIL,
}


# ---- The C core of the page index, loaded through ctypes.
#
# Every call takes the handle first. Calls that may block end in (wait, deadline): `Core.locked`
# tries them first on the library that keeps the GIL, then on the one that releases it.

U32 = ctypes.c_uint32
U64 = ctypes.c_uint64
INT = ctypes.c_int
ADDRESS = ctypes.c_void_p  # integers, byref results and ctypes arrays pass as they are
TEXT = ctypes.c_char_p
LOCKED = (INT, U64)  # wait, deadline
SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "lci_layout": (TEXT, ()),
    "lci_geometry_of": (INT, (U64, U32, ADDRESS)),
    "lci_format": (INT, (ADDRESS, U64, U64, U64, U32)),
    "lci_set_clock": (INT, (ADDRESS, U64)),
    "lci_open": (ADDRESS, (ADDRESS, U64)),
    "lci_close": (None, (ADDRESS,)),
    "lci_count": (INT, (ADDRESS, ADDRESS)),
    "lci_count_groups": (INT, (ADDRESS, ADDRESS)),
    "lci_touch_key": (INT, (ADDRESS, ADDRESS, U32)),
    "lci_peek1": (INT, (ADDRESS, ADDRESS, U32, U32)),
    "lci_peek": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_deepest1": (INT, (ADDRESS, ADDRESS, U32, U32)),
    "lci_deepest": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_children": (INT, (ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_match1": (INT, (ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_match": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS, ADDRESS)),
    "lci_chain_keys": (INT, (ADDRESS, U64, ADDRESS, U64, U32, U64, ADDRESS)),
    "lci_part_keys": (INT, (ADDRESS, U32, U32, U32, U32, ADDRESS)),
    "lci_match_groups": (INT, (ADDRESS, U32, ADDRESS, U32, U32, U32, ADDRESS)),
    "lci_match_groups_many": (INT, (ADDRESS, U32, ADDRESS, ADDRESS, U32, U32, U32, ADDRESS)),
    "lci_peek_groups": (INT, (ADDRESS, U32, ADDRESS, U32, U32, U32, ADDRESS)),
    "lci_release": (INT, (ADDRESS, ADDRESS)),
    "lci_pin_pages": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS)),
    "lci_shorten": (INT, (ADDRESS, ADDRESS, U32)),
    "lci_release_pages": (INT, (ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_count_pages": (INT, (ADDRESS, U32, U32)),
    "lci_use": (INT, (ADDRESS, ADDRESS)),
    "lci_split": (INT, (ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_settle": (INT, (ADDRESS, *LOCKED)),
    "lci_remembers": (INT, (ADDRESS, ADDRESS)),
    "lci_worth": (INT, (ADDRESS, ADDRESS, U32, U32, U32, U32, U32)),
    "lci_unreserve": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_publish": (INT, (ADDRESS, U32, U32, U32, ADDRESS, U32)),
    "lci_peek_ahead": (INT, (ADDRESS, ADDRESS, U32, U32)),
    "lci_wait": (INT, (ADDRESS, ADDRESS, U32, U64)),
    "lci_reserve": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS, ADDRESS, *LOCKED)),
    "lci_reserve_many": (
        INT,
        (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS, *LOCKED),
    ),
    "lci_publish_many": (INT, (ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS)),
    "lci_unreserve_many": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS)),
    "lci_abandon": (INT, (ADDRESS, U32, U32, *LOCKED)),
    "lci_evict_pages": (INT, (ADDRESS, U32, ADDRESS, *LOCKED)),
    "lci_evict_group": (INT, (ADDRESS, U32, U32, ADDRESS, *LOCKED)),
    "lci_take_evicted": (INT, (ADDRESS, ADDRESS)),
    "lci_clear": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_grow": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_namespace_good": (INT, (ADDRESS, U32)),
    "lci_namespace_find": (INT, (ADDRESS, TEXT, TEXT, ADDRESS)),
    "lci_namespace_open": (INT, (ADDRESS, TEXT, TEXT, U32, ADDRESS, *LOCKED)),
    "lci_group_minimum": (INT, (ADDRESS, U32, U32, ADDRESS, *LOCKED)),
    "lci_namespace_limits": (INT, (ADDRESS, TEXT, TEXT, ADDRESS, ADDRESS, *LOCKED)),
    "lci_keep": (INT, (ADDRESS, ADDRESS, U32, U32, INT, ADDRESS, *LOCKED)),
    "lci_evict_first": (INT, (ADDRESS, ADDRESS, U32, U32, ADDRESS, *LOCKED)),
    "lci_drop": (INT, (ADDRESS, ADDRESS, U32, U32, U32, ADDRESS, *LOCKED)),
    "lci_oldest": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, *LOCKED)),
    "lci_discard": (
        INT,
        (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, *LOCKED),
    ),
    "lci_discard_end": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_keys_of": (INT, (ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS, ADDRESS)),
    "lci_ticket_give": (INT, (ADDRESS, ADDRESS, U32, U32, U32, U64, U64, ADDRESS, *LOCKED)),
    "lci_ticket_size": (INT, (ADDRESS, ADDRESS)),
    "lci_ticket_done": (INT, (ADDRESS, ADDRESS, INT)),
    "lci_ticket_poll": (INT, (ADDRESS, ADDRESS, ADDRESS)),
    "lci_ticket_drop": (INT, (ADDRESS, ADDRESS, *LOCKED)),
    "lci_ticket_refuse_orphans": (INT, (ADDRESS, U32, U32, *LOCKED)),
    "lci_ticket_revoke": (INT, (ADDRESS, ADDRESS, *LOCKED)),
    "lci_adopt": (
        INT,
        (ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS, *LOCKED),
    ),
    "lci_allocate": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, *LOCKED)),
    "lci_free_held": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, *LOCKED)),
    "lci_name": (
        INT,
        (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, ADDRESS, U32, ADDRESS, ADDRESS, *LOCKED),
    ),
    "lci_unname": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, *LOCKED)),
    "lci_unpin": (INT, (ADDRESS, ADDRESS, U32, ADDRESS)),
    "lci_may_allocate": (INT, (ADDRESS, U32, U32)),
    "lci_look_for_dead": (INT, (ADDRESS, ADDRESS, *LOCKED)),
    "lci_no_memory": (INT, (ADDRESS, U64)),
    "lci_reap_slot": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_reap_unjoined": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_leave": (INT, (ADDRESS, *LOCKED)),
    "lci_check": (INT, (ADDRESS, U64, U64, INT, ADDRESS)),
    "lci_recover_copy": (INT, (ADDRESS, U64, U64)),
    "lci_repair": (INT, (ADDRESS, *LOCKED)),
    "lci_hold": (INT, (ADDRESS, *LOCKED)),
    "lci_let_go": (INT, (ADDRESS,)),
    "lci_copy": (INT, (ADDRESS, ADDRESS, U64, *LOCKED)),
}


@functools.cache
def load(path: Path | None = None) -> shm_native.Library:
    """Return the library, checked; loaded once for each path (tests pass one with pause points).

    Raises:
        LayoutMismatch: compiled from another layout or version.
        LightcacheError: missing or not loadable.
    """
    library = shm_native.open_library(path or shm_native.find(Path(__file__).parent, "_index"))
    library.declare(SIGNATURES)
    shm_layout.verify(
        library.quick.lci_layout().decode(),
        STRUCTURES,
        CONSTANTS,
        library=str(library.path),
    )
    return library

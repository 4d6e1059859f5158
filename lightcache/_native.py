"""The C core of the page index: loaded through ctypes, checked against `layout`, declared.

Every call takes the handle first. Those that may block end in (wait, deadline): they are tried
on the handle that keeps the GIL, and only then called on the one that lets it go; `Core.locked`
does that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightcache import layout
from lightcache.shm import _native as shm_native
from lightcache.shm import layout as shm_layout

U32 = ctypes.c_uint32
U64 = ctypes.c_uint64
INT = ctypes.c_int
ADDRESS = ctypes.c_void_p  # integers, byref results and ctypes arrays pass as they are
TEXT = ctypes.c_char_p
LOCKED = (INT, U64)  # wait, deadline

SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "lci_layout": (TEXT, ()),
    "lci_geometry_of": (INT, (U64, ADDRESS)),
    "lci_format": (INT, (ADDRESS, U64, U64, U64, INT)),
    "lci_open": (ADDRESS, (ADDRESS, U64)),
    "lci_close": (None, (ADDRESS,)),
    "lci_is_flat": (INT, (ADDRESS,)),
    "lci_count": (INT, (ADDRESS, ADDRESS)),
    "lci_peek1": (INT, (ADDRESS, ADDRESS, U32, U32)),
    "lci_peek": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_deepest1": (INT, (ADDRESS, ADDRESS, U32, U32)),
    "lci_deepest": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_children": (INT, (ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_match1": (INT, (ADDRESS, ADDRESS, U32, U32, ADDRESS)),
    "lci_match": (INT, (ADDRESS, ADDRESS, ADDRESS, U32, U32, ADDRESS, ADDRESS)),
    "lci_release": (INT, (ADDRESS, ADDRESS)),
    "lci_split": (INT, (ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_unreserve": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_publish": (INT, (ADDRESS, U32, U32, U32, ADDRESS, U32)),
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
    "lci_take_evicted": (INT, (ADDRESS, ADDRESS)),
    "lci_clear": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_grow": (INT, (ADDRESS, U32, *LOCKED)),
    "lci_namespace_good": (INT, (ADDRESS, U32)),
    "lci_namespace_find": (INT, (ADDRESS, TEXT, TEXT, ADDRESS)),
    "lci_namespace_open": (INT, (ADDRESS, TEXT, TEXT, U32, ADDRESS, *LOCKED)),
    "lci_namespace_limits": (INT, (ADDRESS, TEXT, TEXT, ADDRESS, ADDRESS, *LOCKED)),
    "lci_keep": (INT, (ADDRESS, ADDRESS, U32, U32, INT, ADDRESS, *LOCKED)),
    "lci_drop": (INT, (ADDRESS, ADDRESS, U32, U32, U32, ADDRESS, *LOCKED)),
    "lci_oldest": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, *LOCKED)),
    "lci_discard": (
        INT,
        (ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32, *LOCKED),
    ),
    "lci_discard_end": (INT, (ADDRESS, ADDRESS, ADDRESS, ADDRESS, U32)),
    "lci_keys_of": (INT, (ADDRESS, ADDRESS, U32, ADDRESS, ADDRESS)),
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
    "lci_may_allocate": (INT, (ADDRESS, U32)),
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
    """The library, checked; loaded once for each path (tests give one with pause points).

    Raises:
        LayoutMismatch: compiled from another layout or version.
        LightcacheError: missing or not loadable.
    """
    library = shm_native.open_library(path or shm_native.find(Path(__file__).parent, "_index"))
    library.declare(SIGNATURES)
    shm_layout.verify(
        library.quick.lci_layout().decode(),
        layout.STRUCTURES,
        layout.CONSTANTS,
        library=str(library.path),
    )
    return library

"""The part of the core used by the standalone structures."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightcache.shm import _native, layout
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import CacheCorrupted, ConfigError
from lightcache.shm.layout import SegmentKind
from lightcache.shm.locking import LockedCalls
from lightcache.shm.segment import Segment

_INT, _U32, _U64, _AT = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_LOCKED = (_INT, _U64)

_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "lcs_atomic32": (_INT, (_AT, _U64, _INT, _U32, _AT)),
    "lcs_atomic64": (_INT, (_AT, _U64, _INT, _U64, _AT)),
    "lcs_compare_exchange32": (_INT, (_AT, _U64, _AT, _U32)),
    "lcs_compare_exchange64": (_INT, (_AT, _U64, _AT, _U64)),
    "lcs_add_many": (_INT, (_AT, _U64, _AT, _U32)),
    "lcs_event_read": (_INT, (_AT, _U64, _AT)),
    "lcs_event_notify": (_INT, (_AT, _U64)),
    "lcs_event_wait": (_INT, (_AT, _U64, _U32, _U64)),
    "lcs_robust_take": (_INT, (_AT, _U32, *_LOCKED)),
    "lcs_robust_drop": (_INT, (_AT,)),
    "lcs_recover_copy": (_INT, (_AT, _U64)),
    "lcx_list_bytes": (_U64, (_U32, _U32)),
    "lcx_list_format": (None, (_AT, _U32, _U32)),
    "lcx_list_open": (_AT, (_AT, _U32, _U32)),
    "lcx_list_close": (None, (_AT,)),
    "lcx_list_put": (_INT, (_AT, _U32, _U32, _INT, _INT, *_LOCKED)),
    "lcx_list_remove": (_INT, (_AT, _U32, *_LOCKED)),
    "lcx_list_pop": (_INT, (_AT, _U32, _INT, _AT, *_LOCKED)),
    "lcx_list_copy": (_INT, (_AT, _U32, _AT, _U32, *_LOCKED)),
    "lcx_list_length": (_INT, (_AT, _U32)),
    "lcx_list_where": (_INT, (_AT, _U32)),
    "lcx_list_check": (_INT, (_AT, _AT, _U32, *_LOCKED)),
    "lcx_list_check_copy": (_INT, (_AT, _U64, _U32, _U32, _AT, _U32)),
    "lcx_dict_bytes": (_U64, (_U32,)),
    "lcx_dict_format": (None, (_AT, _U32)),
    "lcx_dict_open": (_AT, (_AT, _U32)),
    "lcx_dict_close": (None, (_AT,)),
    "lcx_dict_get": (_INT, (_AT, _U64, _U64, _AT)),
    "lcx_dict_get_many": (_INT, (_AT, _AT, _U32, _AT, _AT)),
    "lcx_dict_put": (_INT, (_AT, _U64, _U64, ctypes.c_int32, _INT, *_LOCKED)),
    "lcx_dict_pop": (_INT, (_AT, _U64, _U64, _AT, *_LOCKED)),
    "lcx_dict_length": (_INT, (_AT,)),
    "lcx_dict_copy": (_INT, (_AT, _AT, _AT, _U32, *_LOCKED)),
    "lcx_dict_check": (_INT, (_AT, _AT, _U32, *_LOCKED)),
    "lcx_dict_check_copy": (_INT, (_AT, _U64, _U32, _AT, _U32)),
    "lcx_ring_bytes": (_U64, (_U32, _U32)),
    "lcx_ring_open": (_AT, (_AT, _U32, _U32)),
    "lcx_ring_close": (None, (_AT,)),
    "lcx_ring_push": (_INT, (_AT, ctypes.c_char_p, _AT, _U32, *_LOCKED)),
    "lcx_ring_pop": (_INT, (_AT, _AT, _U64, _AT, _U32, *_LOCKED)),
    "lcx_ring_length": (_INT, (_AT,)),
    "lcx_ring_check": (_INT, (_AT, _AT, _U32, *_LOCKED)),
    "lcx_ring_check_copy": (_INT, (_AT, _U64, _U32, _U32, _AT, _U32)),
    "lcx_log_bytes": (_U64, (_U32, _U32)),
    "lcx_log_open": (_AT, (_AT, _U32, _U32)),
    "lcx_log_close": (None, (_AT,)),
    "lcx_log_lead": (_INT, (_AT, *_LOCKED)),
    "lcx_log_join": (_INT, (_AT,)),
    "lcx_log_leave": (_INT, (_AT, *_LOCKED)),
    "lcx_log_append": (_INT, (_AT, ctypes.c_char_p, _U32)),
    "lcx_log_read": (_INT, (_AT, _AT, _U64, _AT, _U32)),
    "lcx_log_writer": (_INT, (_AT,)),
    "lcx_log_ended": (_INT, (_AT,)),
    "lcx_log_behind": (ctypes.c_int64, (_AT, _AT)),
    "lcx_log_position": (ctypes.c_int64, (_AT,)),
    "lcx_log_check": (_INT, (_AT, _AT, _U32, *_LOCKED)),
    "lcx_log_free_dead": (_INT, (_AT, _U32)),
}


@functools.cache
def library() -> _native.Library:
    """The library of this layer with these functions declared."""
    loaded = _native.load()
    loaded.declare(_SIGNATURES)
    return loaded


def item_of(segment: Segment, item: str) -> int:
    """A number in the configuration of a segment. Any process that may write the segment may have
    changed it.

    Raises:
        CacheCorrupted: it is missing, or not a number of at least 1.
    """
    value = segment.config.get(item)
    if type(value) is not int or value < 1:
        raise CacheCorrupted(
            f"the {segment.kind.name.lower()} {segment.name!r} has {item} {value!r} in its header; "
            f"remove it with `lightcache rm {segment.name}` and make it anew"
        )
    return value


def size_of(value: Any, what: str, high: int) -> int:
    """Check a capacity.

    Raises:
        ConfigError: not an integer from 1 to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"{what}: expected an integer from 1 to {high}, found {value!r}")
    return value


# For each kind that changes only under the lock: its configuration items in the core's order, and
# their bounds.
_COPIED: Mapping[SegmentKind, tuple[str, Mapping[str, int]]] = {
    SegmentKind.LIST: ("lcx_list_check_copy", {"nodes": 1 << 28, "lists": 1 << 16}),
    SegmentKind.DICT: ("lcx_dict_check_copy", {"capacity": 1 << 25}),
    SegmentKind.RING: (
        "lcx_ring_check_copy",
        {"capacity": layout.RING_CAPACITY, "message_bytes": layout.RING_MESSAGE},
    ),
}


@dataclass(frozen=True)
class CopyReport:
    """Result of `check_copy`."""

    problem: str
    """The first broken invariant; empty: none."""
    recovered: int
    """Undo log entries of an unfinished step that were undone in the copy."""


def check_copy(kind: SegmentKind, config: Mapping[str, Any], where: int, nbytes: int) -> CopyReport:
    """Check a copy of a list, dict or ring, after undoing an unfinished step in it. For tools,
    which take no lock and no slot.

    Args:
        config: as in the header; not trusted.
        where, nbytes: the copy of the whole segment. The undoing changes it.

    Raises:
        ConfigError: another kind: readers check logs and counters in place.
    """
    if kind not in _COPIED:
        raise ConfigError(f"a copy of a {kind.name.lower()} cannot be checked")
    name, bounds = _COPIED[kind]
    quick = library().quick
    undone = quick.lcs_recover_copy(where, nbytes)
    if undone < 0:
        return CopyReport("its undo log names words outside of it, or has entries and no holder", 0)
    sizes = [config.get(item) for item in bounds]
    record = dict(zip(bounds, sizes, strict=True))
    if not all(type(size) is int and 1 <= size <= bounds[item] for item, size in record.items()):
        return CopyReport(f"its header says {record}", undone)
    text = ctypes.create_string_buffer(256)
    code = getattr(quick, name)(where, nbytes, *sizes, text, len(text))
    if code == Code.RANGE:
        return CopyReport(f"{nbytes} bytes are too few for {record}", undone)
    return CopyReport(text.value.decode(errors="replace") if check(code, "check") else "", undone)


def run_check(calls: LockedCalls, name: str, what: str) -> None:
    """Run a structure's own check.

    Raises:
        CacheCorrupted: names the first invariant that is broken.
    """
    text = ctypes.create_string_buffer(256)
    code = calls.locked(name, text, len(text), what=f"check {what}")
    if check(code, f"check {what}"):
        raise CacheCorrupted(f"{what}: {text.value.decode(errors='replace')}; make it anew")

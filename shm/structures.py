"""The part of the core that the standalone structures call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from lightcache.shm import _native
from lightcache.shm.codes import check
from lightcache.shm.errors import CacheCorrupted, ConfigError
from lightcache.shm.locking import LockedCalls

_INT, _U32, _U64, _AT = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_LOCKED = (_INT, _U64)

_SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "lcs_atomic32": (_INT, (_AT, _U64, _INT, _U32, _AT)),
    "lcs_atomic64": (_INT, (_AT, _U64, _INT, _U64, _AT)),
    "lcs_compare_exchange32": (_INT, (_AT, _U64, _AT, _U32)),
    "lcs_compare_exchange64": (_INT, (_AT, _U64, _AT, _U64)),
    "lcs_event_read": (_INT, (_AT, _U64, _AT)),
    "lcs_event_notify": (_INT, (_AT, _U64)),
    "lcs_event_wait": (_INT, (_AT, _U64, _U32, _U64)),
    "lcs_robust_take": (_INT, (_AT, _U32, *_LOCKED)),
    "lcs_robust_drop": (_INT, (_AT,)),
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
    "lcx_ring_bytes": (_U64, (_U32, _U32)),
    "lcx_ring_open": (_AT, (_AT, _U32, _U32)),
    "lcx_ring_close": (None, (_AT,)),
    "lcx_ring_push": (_INT, (_AT, ctypes.c_char_p, _AT, _U32, *_LOCKED)),
    "lcx_ring_pop": (_INT, (_AT, _AT, _U64, _AT, _U32, *_LOCKED)),
    "lcx_ring_length": (_INT, (_AT,)),
    "lcx_ring_check": (_INT, (_AT, _AT, _U32, *_LOCKED)),
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
    found = _native.load()
    found.declare(_SIGNATURES)
    return found


def size_of(value: Any, what: str, high: int) -> int:
    """A capacity, checked.

    Raises:
        ConfigError: not an integer from 1 to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"{what}: expected an integer from 1 to {high}, found {value!r}")
    return value


def run_check(calls: LockedCalls, name: str, what: str) -> None:
    """Let a structure check itself.

    Raises:
        CacheCorrupted: names the first invariant that is broken.
    """
    text = ctypes.create_string_buffer(256)
    code = calls.locked(name, text, len(text), what=f"check {what}")
    if check(code, f"check {what}"):
        raise CacheCorrupted(f"{what}: {text.value.decode(errors='replace')}; make it anew")

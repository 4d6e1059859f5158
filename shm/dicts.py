"""SharedDict: 128-bit keys to 32-bit values, of fixed capacity, for many processes."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from lightcache.shm import structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, NoSpace
from lightcache.shm.layout import SegmentKind
from lightcache.shm.locking import LockedCalls
from lightcache.shm.segment import Segment, free_dead_slots

_MAX_CAPACITY = 1 << 25
_WORD = (1 << 64) - 1


class SharedDict:
    """A lookup takes no lock and always finds a key that stays, in spite of changes and killed
    processes. A change takes the segment's lock and is atomic.

    Keys are 128-bit Python integers, evenly distributed (digests): their low bits choose the chain.
    Values are signed 32-bit integers. The page index uses this dict (`shm/native/dict.h`, with the
    proof).
    """

    def __init__(self, segment: Segment, *, lock_timeout: float = 10.0) -> None:
        """For `create`, `attach` and `open`."""
        self.segment = segment
        self.capacity = structures.item_of(segment, "capacity")
        quick = structures.library().quick
        if segment.payload_bytes < quick.lcx_dict_bytes(self.capacity):
            raise ConfigError(
                f"the segment {segment.name!r} is too short for its capacity of {self.capacity}"
            )
        if not segment.readonly:
            segment.join("dict")
            segment.free_slot_on_close()  # a client holds nothing else
        self._calls = LockedCalls(structures.library(), segment, lock_timeout)
        self._calls.handle = quick.lcx_dict_open(segment.attachment, self.capacity)
        weakref.finalize(self, quick.lcx_dict_close, self._calls.handle)

    @classmethod
    def create(cls, name: str, *, capacity: int, lifetime: str = "attached") -> SharedDict:
        """Create a dict that does not exist; see `Segment.create` for name, lifetime and errors.

        Raises:
            ConfigError: capacity not 1 to 2^25.
        """
        return cls(Segment.create(**_arranged(name, capacity), lifetime=lifetime))

    @classmethod
    def open(cls, name: str, *, capacity: int, lifetime: str = "attached") -> SharedDict:
        """Attach to an equal dict, or create it; see `Segment.open`."""
        return cls(Segment.open(**_arranged(name, capacity), lifetime=lifetime))

    @classmethod
    def attach(cls, name: str, *, readonly: bool = False) -> SharedDict:
        """Attach to an existing dict; see `Segment.attach`."""
        return cls(
            Segment.attach(name, readonly=readonly, kind=SegmentKind.DICT, reaper=free_dead_slots)
        )

    def get(self, key: int) -> int | None:
        """The value of a key, or None. Takes no lock."""
        value = ctypes.c_int32()
        lo, hi = _split(key)
        code = self._calls.quick.lcx_dict_get(self._calls.handle, lo, hi, ctypes.byref(value))
        if code == Code.MISSING:
            return None
        check(code, "get")
        return value.value

    def __contains__(self, key: int) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: int) -> int:
        """The value of a key; KeyError if it is missing."""
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def put(self, key: int, value: int) -> bool:
        """Set a key. Returns True if it existed before. Takes the lock.

        Raises:
            NoSpace: no record is left, or 32 keys share these low bits.
            ConfigError: key or value out of range.
        """
        return self._put(key, value, only_new=False)

    def put_new(self, key: int, value: int) -> bool:
        """Set a key unless it exists. Returns True if it was set."""
        return not self._put(key, value, only_new=True)

    def _put(self, key: int, value: int, *, only_new: bool) -> bool:
        if not -(1 << 31) <= value < 1 << 31:
            raise ConfigError(f"value: expected 32 bits with sign, found {value}")
        code = self._calls.locked("lcx_dict_put", *_split(key), value, only_new, what="put")
        if code == Code.FULL:
            raise NoSpace(
                f"the dict {self.segment.name!r} holds {len(self)} of {self.capacity} keys and has "
                "no room for this one; make it larger, or spread keys evenly"
            )
        return bool(check(code, "put"))

    __setitem__ = put

    def pop(self, key: int) -> int | None:
        """Remove a key and return its value; None if it was missing. Takes the lock."""
        value = ctypes.c_int32()
        code = self._calls.locked("lcx_dict_pop", *_split(key), ctypes.byref(value), what="pop")
        if code == Code.MISSING:
            return None
        check(code, "pop")
        return value.value

    def __len__(self) -> int:
        """Number of keys. Takes no lock."""
        return check(self._calls.quick.lcx_dict_length(self._calls.handle), "len")

    def items(self) -> list[tuple[int, int]]:
        """All keys and values at one instant, in no order. Takes the lock."""
        keys = (ctypes.c_uint64 * (2 * self.capacity))()
        values = (ctypes.c_int32 * self.capacity)()
        code = self._calls.locked("lcx_dict_copy", keys, values, self.capacity, what="items")
        n = check(code, "items")
        return [(keys[2 * i] | keys[2 * i + 1] << 64, values[i]) for i in range(n)]

    def check(self) -> None:
        """Derive every invariant again.

        Raises:
            CacheCorrupted: names the first that is broken.
        """
        structures.run_check(self._calls, "lcx_dict_check", f"the dict {self.segment.name!r}")

    def close(self) -> None:
        """Leave; see `Segment.close`."""
        self.segment.close()

    def __enter__(self) -> SharedDict:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.segment.__exit__(None, error, None)


def _split(key: object) -> tuple[int, int]:
    if not isinstance(key, int) or not 0 <= key < 1 << 128:
        raise ConfigError(f"key: expected an integer of 128 bits, found {key!r}")
    return key & _WORD, key >> 64


def _arranged(name: str, capacity: int) -> dict[str, Any]:
    structures.size_of(capacity, "capacity", _MAX_CAPACITY)
    quick = structures.library().quick
    return {
        "name": name,
        "payload_bytes": quick.lcx_dict_bytes(capacity),
        "kind": SegmentKind.DICT,
        "config": {"capacity": capacity},
        "initialise": lambda made: quick.lcx_dict_format(made.address, capacity),
        "reaper": free_dead_slots,
    }

"""Parts of `SharedLog`: its segment's arguments, its entries, its readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightcache.shm import layout, structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError
from lightcache.shm.layout import SegmentKind
from lightcache.shm.segment import Segment


@dataclass(frozen=True)
class LogReader:
    """A reader of a log, as it was a moment ago."""

    slot: int
    pid: int  # in its own PID namespace; 0: it has left meanwhile
    role: str
    alive: bool  # False: killed; the writer removes it once it is in the way
    behind: int  # entries that it has still to read

    def __str__(self) -> str:
        life = "living" if self.alive else "dead"
        who = f"slot {self.slot}: {self.role or 'no role'}, pid {self.pid}, {life}"
        return f"{who}, {self.behind} behind"


def free_dead_readers(segment: Segment) -> None:
    """The reaper of a log: a dead client leaves its slot, and a cursor if it was a reader."""
    free = structures.library().quick.lcx_log_free_dead
    for slot in range(1, layout.SLOTS):
        code = free(segment.attachment, slot)
        if code not in (Code.BUSY, Code.MISSING, Code.RANGE):
            check(code, f"free the slot {slot} of {segment.name!r}")


def check_sizes(capacity: int, message_bytes: int) -> None:
    """Raises ConfigError: capacity not 1 to 2^24, message_bytes not 1 to 65,536."""
    structures.size_of(capacity, "capacity", layout.LOG_CAPACITY)
    structures.size_of(message_bytes, "message_bytes", layout.LOG_MESSAGE)


def arranged(name: str, capacity: int, message_bytes: int) -> dict[str, Any]:
    """Arguments of `Segment.create` and `open` for a log; raises as `check_sizes`."""
    check_sizes(capacity, message_bytes)
    return {
        "name": name,
        "payload_bytes": structures.library().quick.lcx_log_bytes(capacity, message_bytes),
        "kind": SegmentKind.LOG,
        "config": {"capacity": capacity, "message_bytes": message_bytes},
        "reaper": free_dead_readers,
    }


def entry_bytes(data: object, most: int) -> bytes:
    """A copy of an entry, checked.

    Raises:
        ConfigError: not bytes, or more than `most`.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ConfigError(
            f"entry: expected bytes, bytearray or memoryview, found {type(data).__name__}"
        )
    entry = bytes(data)
    if len(entry) > most:
        raise ConfigError(
            f"entry: expected at most {most} bytes, found {len(entry)}; make the log with larger "
            "ones, or append where the bytes are"
        )
    return entry

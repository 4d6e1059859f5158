"""The records of a segment, declared for Python and compared with the C core at load time.

Offsets are natural; nothing is packed. The C side is `shm/native/lc_base.h`; `verify` refuses a
library that was compiled with another layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum

from lightcache.shm.errors import LayoutMismatch

MAGIC = int.from_bytes(b"LCLACHE1", "little")
ABI = 1
SLOTS = 64
LOG_ENTRIES = 4096
CLIENTS_OFFSET = 4096
LOCK_OFFSET = CLIENTS_OFFSET + SLOTS * 128
LOG_OFFSET = LOCK_OFFSET + 4096
PAYLOAD_OFFSET = LOG_OFFSET + LOG_ENTRIES * 8
CONFIG_BYTES = 2048

# Bytes of the object that are locked, far beyond its end; see docs/design/shm.md, section 2.
BYTE_LIFE = 1 << 46
BYTE_READERS = BYTE_LIFE + 1
BYTE_GROW = BYTE_LIFE + 2
BYTE_SLOTS = BYTE_LIFE + 16
BYTE_MEND = BYTE_SLOTS + SLOTS
USED_BYTES = (1 << 16) - 1
"""Of every release: a process that uses a segment holds one of so many bytes from BYTE_READERS on,
and a process that creates, joins, replaces or removes it BYTE_LIFE."""

# A ring's bounds, and how much of it one hold of the lock moves; see native/ring.h.
RING_BATCH = 256
RING_HOLD = 1 << 18
RING_CAPACITY = 1 << 24
RING_MESSAGE = 1 << 16

# A log's bounds, and how much one read moves; see native/log.h.
LOG_BATCH = 256
LOG_HOLD = 1 << 18
LOG_CAPACITY = 1 << 24
LOG_MESSAGE = 1 << 16
LOG_LEFT = 0x80  # in LogRoot.writer: the last writer has left


class SegmentKind(IntEnum):
    """The structure in a segment."""

    PLAIN = 1
    LIST = 2
    DICT = 3
    INDEX = 4
    RING = 5
    LOG = 6
    COUNTERS = 7


class Lifetime(IntEnum):
    """ATTACHED: unlinked when the last client leaves. PERSISTENT: kept until it is unlinked."""

    ATTACHED = 0
    PERSISTENT = 1


class ClientState(IntEnum):
    """State of a slot. QUARANTINE: its client died and its device may still be copying."""

    FREE = 0
    TAKEN = 1
    QUARANTINE = 2


FLAG_DEVICE = 1

LOCK_SLOT_MASK = 0x3F
LOCK_STARVED = 0x40
LOCK_WAITERS = 0x80
LOCK_OTHERS = LOCK_STARVED | LOCK_WAITERS
LOCK_EPOCH_SHIFT = 8
LOCK_EPOCH_MASK = 0xFFFFFF


class SegmentHeader(ctypes.Structure):
    """The first page. Only the creator writes it, except `used_ns`, `retired`, `disabled`.

    Any release may remove what another has left, so these keep their place and meaning whatever
    `abi` is: magic, abi, uuid, lifetime, config_bytes, config (of which the items "family" and
    "pool_path"), idle_ns, used_ns, retired, ready. See docs/design/upgrade.md.
    """

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("abi", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("layout_hash", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("uuid", ctypes.c_uint8 * 16),
        ("created_ns", ctypes.c_uint64),
        ("creator_pid", ctypes.c_uint32),
        ("lifetime", ctypes.c_uint32),
        ("boot_id", ctypes.c_char * 40),
        ("config_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("config", ctypes.c_char * CONFIG_BYTES),
        ("time_namespace", ctypes.c_uint64),
        ("pad0", ctypes.c_uint8 * 1896),
        ("idle_ns", ctypes.c_uint64),
        ("used_ns", ctypes.c_uint64),
        ("retired", ctypes.c_uint32),
        ("disabled", ctypes.c_uint32),
        ("ready", ctypes.c_uint32),
        ("pad1", ctypes.c_uint32),
    ]

    @property
    def is_of_another_release(self) -> bool:
        """True if its ABI number is another one: then only what keeps its place can be read."""
        return bool(self.magic == MAGIC and self.abi != ABI)

    @property
    def is_foreign(self) -> bool:
        """True if another program or release made it. We do not use it."""
        return bool(self.magic) and (self.magic != MAGIC or self.abi != ABI)


class ClientRecord(ctypes.Structure):
    """One slot of the client table."""

    _fields_ = [
        ("state", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pidns", ctypes.c_uint64),
        ("start_ticks", ctypes.c_uint64),
        ("attached_ns", ctypes.c_uint64),
        ("quarantine_until_ns", ctypes.c_uint64),
        ("role", ctypes.c_char * 32),
        ("lookups", ctypes.c_uint64),
        ("hit_pages", ctypes.c_uint64),
        ("missed_pages", ctypes.c_uint64),
        ("reserved_pages", ctypes.c_uint64),
        ("evicted_pages", ctypes.c_uint64),
        ("published_pages", ctypes.c_uint64),
    ]


class LockRecord(ctypes.Structure):
    """The futex word and the lock's counters."""

    _fields_ = [
        ("word", ctypes.c_uint32),
        ("sequence", ctypes.c_uint32),
        ("holder", ctypes.c_uint64),
        ("pad0", ctypes.c_uint8 * 112),
        ("log_count", ctypes.c_uint32),
        ("operation", ctypes.c_uint32),
        ("since_ns", ctypes.c_uint64),
        ("acquisitions", ctypes.c_uint64),
        ("contended", ctypes.c_uint64),
        ("wait_ns", ctypes.c_uint64),
        ("hold_ns", ctypes.c_uint64),
        ("hold_max_ns", ctypes.c_uint64),
        ("recoveries", ctypes.c_uint64),
        ("undone_words", ctypes.c_uint64),
        ("pad", ctypes.c_uint8 * 56),
    ]

    @property
    def said_by_holder(self) -> bool:
        """True if `operation`, `since_ns` and the thread in `holder` belong to the current
        acquisition. A holder that was stopped or killed at once may have left those of an earlier
        one."""
        return bool(self.holder >> 32 == self.sequence)


class RingRoot(ctypes.Structure):
    """Start of a ring's payload; the slots follow. Each event has its own cache line."""

    _fields_ = [
        ("first", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("pushed", ctypes.c_uint32),
        ("pad0", ctypes.c_uint32 * 13),
        ("filled", ctypes.c_uint32),
        ("pad1", ctypes.c_uint32 * 15),
        ("drained", ctypes.c_uint32),
        ("pad2", ctypes.c_uint32 * 15),
    ]


class RingSlot(ctypes.Structure):
    """Precedes a message's bytes."""

    _fields_ = [("stamp", ctypes.c_uint32), ("length", ctypes.c_uint32)]


class LogCursor(ctypes.Structure):
    """Position of a reader of a log. 0: no reader; else 1 + the entry it reads next. The highest
    bit is set while it joins."""

    _fields_ = [("next", ctypes.c_uint64), ("pad", ctypes.c_uint64 * 7)]


class LogRoot(ctypes.Structure):
    """Start of a log's payload; the slots follow. Each event has its own cache line."""

    _fields_ = [
        ("appended", ctypes.c_uint64),
        ("writer", ctypes.c_uint32),
        ("pad0", ctypes.c_uint32 * 13),
        ("news", ctypes.c_uint32),
        ("pad1", ctypes.c_uint32 * 15),
        ("room", ctypes.c_uint32),
        ("pad2", ctypes.c_uint32 * 15),
        ("cursors", LogCursor * SLOTS),
    ]


class LogSlot(ctypes.Structure):
    """Precedes an entry's bytes."""

    _fields_ = [("stamp", ctypes.c_uint32), ("length", ctypes.c_uint32)]


assert ctypes.sizeof(SegmentHeader) == 4096
assert ctypes.sizeof(ClientRecord) == 128
assert ctypes.sizeof(LockRecord) == 256
assert ctypes.sizeof(RingRoot) == 192
assert ctypes.sizeof(RingSlot) == 8
assert ctypes.sizeof(LogCursor) == 64
assert ctypes.sizeof(LogRoot) == 192 + 64 * SLOTS
assert ctypes.sizeof(LogSlot) == 8

STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "lcs_header": SegmentHeader,
    "lcs_client": ClientRecord,
    "lcs_lock": LockRecord,
    "lcx_ring_root": RingRoot,
    "lcx_ring_slot": RingSlot,
    "lcx_log_root": LogRoot,
    "lcx_log_cursor": LogCursor,
    "lcx_log_slot": LogSlot,
}

CONSTANTS: Mapping[str, int] = {
    "LCS_MAGIC": MAGIC,
    "LCS_ABI": ABI,
    "LCS_SLOTS": SLOTS,
    "LCS_LOG_ENTRIES": LOG_ENTRIES,
    "LCS_CLIENTS_OFFSET": CLIENTS_OFFSET,
    "LCS_LOCK_OFFSET": LOCK_OFFSET,
    "LCS_LOG_OFFSET": LOG_OFFSET,
    "LCS_PAYLOAD_OFFSET": PAYLOAD_OFFSET,
    "LCS_BYTE_LIFE": BYTE_LIFE,
    "LCS_BYTE_READERS": BYTE_READERS,
    "LCS_BYTE_GROW": BYTE_GROW,
    "LCS_BYTE_SLOTS": BYTE_SLOTS,
    "LCS_BYTE_MEND": BYTE_MEND,
    **{f"LCS_KIND_{kind.name}": kind.value for kind in SegmentKind},
    **{f"LCS_LIFETIME_{lifetime.name}": lifetime.value for lifetime in Lifetime},
    **{f"LCS_CLIENT_{state.name}": state.value for state in ClientState},
    "LCS_FLAG_DEVICE": FLAG_DEVICE,
    "LCS_LOCK_SLOT": LOCK_SLOT_MASK,
    "LCS_LOCK_STARVED": LOCK_STARVED,
    "LCS_LOCK_WAITERS": LOCK_WAITERS,
    "LCS_LOCK_EPOCH_SHIFT": LOCK_EPOCH_SHIFT,
    "LCX_RING_BATCH": RING_BATCH,
    "LCX_RING_HOLD": RING_HOLD,
    "LCX_RING_CAPACITY": RING_CAPACITY,
    "LCX_RING_MESSAGE": RING_MESSAGE,
    "LCX_LOG_BATCH": LOG_BATCH,
    "LCX_LOG_HOLD": LOG_HOLD,
    "LCX_LOG_CAPACITY": LOG_CAPACITY,
    "LCX_LOG_MESSAGE": LOG_MESSAGE,
    "LCX_LOG_LEFT": LOG_LEFT,
}


def facts(
    structures: Mapping[str, type[ctypes.Structure]], constants: Mapping[str, int]
) -> dict[str, str]:
    """The facts of the ctypes declarations, in the form of the C side (`native/facts.h`)."""
    values = {name: str(value) for name, value in constants.items()}
    for name, structure in structures.items():
        values[name] = str(ctypes.sizeof(structure))
        for field in structure._fields_:
            if field[0] != "reserved" and not field[0].startswith("pad"):  # unused bytes
                descriptor = getattr(structure, field[0])
                values[f"{name}.{field[0]}"] = f"{descriptor.offset}+{descriptor.size}"
    return values


def verify(
    text: str,
    structures: Mapping[str, type[ctypes.Structure]],
    constants: Mapping[str, int],
    *,
    library: str,
) -> None:
    """Compare a library's facts with ours.

    Raises:
        LayoutMismatch: names every fact that differs or that only one side has.
    """
    compiled = dict(line.split("=", 1) for line in text.splitlines())
    declared = facts(structures, constants)
    wrong = [
        f"{name}: expected {declared.get(name, 'nothing')}, found {compiled.get(name, 'nothing')}"
        for name in sorted(declared.keys() | compiled.keys())
        if declared.get(name) != compiled.get(name)
    ]
    if wrong:
        raise LayoutMismatch(
            f"{library} was compiled with another layout than this package declares "
            f"({'; '.join(wrong)}); reinstall lightcache so that both come from one version"
        )

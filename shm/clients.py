"""The clients of a segment."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightcache.shm import layout, ofd
from lightcache.shm.layout import ClientRecord, ClientState
from lightcache.shm.objects import OpenObject, duration

_RECORD = ctypes.sizeof(ClientRecord)
ROLE_BYTES = 31


@dataclass(frozen=True)
class ClientSlot:
    """This client's slot. It lasts until the segment is closed."""

    slot: int
    epoch: int
    role: str


@dataclass(frozen=True)
class ClientInfo:
    """A slot that is not free, as it was a moment ago."""

    slot: int
    state: ClientState
    alive: bool  # its byte lock is held; false for a dead client that has not been reaped
    epoch: int
    role: str
    pid: int  # in its own PID namespace
    pidns: int  # that namespace's inode; 0: unknown
    start_ticks: int
    device: bool  # it declared a device that copies
    attached_s: float  # seconds since it attached, by the wall clock
    lookups: int
    hit_pages: int
    missed_pages: int
    reserved_pages: int
    evicted_pages: int
    published_pages: int
    quarantine_s: float | None = None
    """Seconds of quarantine that are left where the end of its process cannot be seen; 0: the next
    reaper frees it. Otherwise quarantine ends with the process. None: not in quarantine."""

    @property
    def life(self) -> str:
        """ "living", "dead" (and not yet reaped), or "in quarantine"."""
        if self.state is ClientState.QUARANTINE:
            return "in quarantine"
        return "living" if self.alive else "dead"

    def __str__(self) -> str:
        text = f"slot {self.slot}: {self.role or 'no role'}, pid {self.pid}, {self.life}"
        if self.quarantine_s is not None:
            return f"{text} ({quarantine_end(self.quarantine_s)})"
        return f"{text}, attached {duration(self.attached_s)} ago"


def role_bytes(role: str) -> bytes:
    """A role as stored in the record: UTF-8, at most 31 bytes, no incomplete character at the
    end."""
    encoded = role.replace("\0", "").encode("utf-8", "replace")
    return encoded[:ROLE_BYTES].decode("utf-8", "ignore").encode()


def read_table(table: bytes, fd: int, own_slot: int = 0) -> list[ClientInfo]:
    """All slots of a copied table that are not free.

    Args:
        table: 64 records.
        fd: a descriptor of the object, to test which bytes are locked.
        own_slot: the slot whose byte `fd` itself holds; the kernel does not report own locks.
    """
    now = time.time_ns()
    clients = []
    for slot in range(1, layout.SLOTS):
        record = ClientRecord.from_buffer_copy(table, slot * _RECORD)
        if record.state == ClientState.FREE:
            continue
        alive = slot == own_slot or ofd.held(fd, layout.BYTE_SLOTS + slot)
        clients.append(_info(slot, record, alive, now))
    return clients


def _info(slot: int, record: ClientRecord, alive: bool, now_ns: int) -> ClientInfo:
    quarantined = record.state == ClientState.QUARANTINE
    left_ns = max(0, record.quarantine_until_ns - time.monotonic_ns())
    return ClientInfo(
        slot=slot,
        state=ClientState.QUARANTINE if quarantined else ClientState.TAKEN,
        alive=alive,
        epoch=record.epoch,
        role=record.role.decode("utf-8", "replace"),
        pid=record.pid,
        pidns=record.pidns,
        start_ticks=record.start_ticks,
        device=bool(record.flags & layout.FLAG_DEVICE),
        attached_s=max(0, now_ns - record.attached_ns) / 1e9,
        lookups=record.lookups,
        hit_pages=record.hit_pages,
        missed_pages=record.missed_pages,
        reserved_pages=record.reserved_pages,
        evicted_pages=record.evicted_pages,
        published_pages=record.published_pages,
        quarantine_s=left_ns / 1e9 if quarantined else None,
    )


def quarantine_end(seconds: float) -> str:
    """When a quarantine ends of which so much is left, as text."""
    if not seconds:
        return "over: the next process that needs the slot takes it"
    return f"until its process has ended, or for {seconds:.1f} s more where that cannot be seen"


def slot_use(clients: Sequence[ClientInfo]) -> str:
    """One line: how many slots there are, and whose they are."""
    counts = Counter(client.life for client in clients)
    parts = [f"{counts['living']} living"]
    parts += [f"{counts[life]} {life}" for life in ("dead", "in quarantine") if counts[life]]
    free = layout.SLOTS - 1 - len(clients)
    return f"{', '.join(parts)}, {free} of {layout.SLOTS - 1} slots free"


def living(opened: OpenObject) -> str:
    """One line that names the living clients of a segment."""
    if opened.header().is_of_another_release:
        return "processes of another release"
    table = read_table(opened.client_table(), opened.fd)
    return describe([client for client in table if client.alive])


def describe(clients: Sequence[ClientInfo], most: int = 8) -> str:
    """One line that names the clients, for messages."""
    shown = "; ".join(str(client) for client in clients[:most])
    more = f"; and {len(clients) - most} more" if len(clients) > most else ""
    return f"{shown}{more}" if clients else "readers only"

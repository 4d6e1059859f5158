"""The clients of a segment."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightcache.shm import layout, ofd
from lightcache.shm.layout import ClientRecord, ClientState

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

    def __str__(self) -> str:
        life = "living" if self.alive else "dead"
        return f"slot {self.slot}: {self.role or 'no role'}, pid {self.pid}, {life}"


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
    )


def describe(clients: Sequence[ClientInfo], most: int = 8) -> str:
    """One line that names the clients, for messages."""
    shown = "; ".join(str(client) for client in clients[:most])
    more = f"; and {len(clients) - most} more" if len(clients) > most else ""
    return f"{shown}{more}" if clients else "readers only"

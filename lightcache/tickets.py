"""Tickets: pins handed from one client to others, through 16 bytes in the engine's own message."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lightcache import layout
from lightcache.errors import LeaseLost
from lightcache.shm.codes import Code, check

if TYPE_CHECKING:
    from lightcache.page_index import PageIndex

TICKET_BYTES = ctypes.sizeof(layout.TicketRef)


class ClientId(NamedTuple):
    """Names one attach of one process: a slot and the epoch it was taken in. Sent as two ints."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class TicketStatus:
    """Where a ticket stands. Sets of client slots."""

    adopters: frozenset[int]
    adopted: frozenset[int]
    done: frozenset[int]
    failed: frozenset[int]
    """Said so, died, or (once the deadline has passed) never adopted."""
    late: bool
    """The deadline has passed: nobody adopts any more."""

    @property
    def verdict(self) -> bool | None:
        """One for all: True when all are done, False when one has failed, None while open."""
        if self.failed:
            return False
        return True if self.done == self.adopters else None


def slots(mask: int) -> frozenset[int]:
    """The set bits of a 64-bit mask."""
    return frozenset(slot for slot in range(64) if mask >> slot & 1)


class Ticket:
    """Held by its giver. Its pages stay pinned until every adopter has adopted or died or the
    deadline has passed, whether the giver lives or not. Drop it when its verdict is known."""

    def __init__(self, index: PageIndex, ref: layout.TicketRef) -> None:
        """For `Lease.ticket` and `Reservation.ticket`."""
        self._dropped = True  # as in Reservation
        self._index = index
        self._ref = ref
        self._dropped = False

    def __bytes__(self) -> bytes:
        """The 16 bytes that travel."""
        return bytes(self._ref)

    def poll(self) -> TicketStatus:
        """Where it stands. No lock, does not block.

        Raises:
            LeaseLost: dropped before.
            Detached: closed, or a forked child.
        """
        if self._dropped:
            raise LeaseLost("poll: this ticket was dropped")
        found = layout.TicketStatusRecord()
        code = self._index._quick.lci_ticket_poll(
            self._index._handle, ctypes.byref(self._ref), ctypes.byref(found)
        )
        check(code, "poll a ticket")
        failed = found.failed
        if found.late:
            failed |= found.adopters & ~found.adopted
        return TicketStatus(
            adopters=slots(found.adopters),
            adopted=slots(found.adopted),
            done=slots(found.done),
            failed=slots(failed),
            late=bool(found.late),
        )

    def drop(self) -> None:
        """The giver needs it no more; who has adopted goes on. Takes the lock; once.

        Raises:
            LeaseLost: dropped before.
        """
        self._drop("lci_ticket_drop")

    def revoke(self) -> None:
        """Drop it, and let nobody adopt it from this instant on: what it pins is free as soon as
        those have let go who did. For a ticket that was never sent, or whose purpose has failed.
        Takes the lock; once.

        Raises:
            LeaseLost: dropped or revoked before.
        """
        self._drop("lci_ticket_revoke")

    def _drop(self, call: str) -> None:
        if self._dropped:
            raise LeaseLost("drop: this ticket was dropped before")
        code = self._index._locked(call, ctypes.byref(self._ref), what="drop a ticket")
        if code not in (Code.OWNER, Code.STALE):  # an interrupt came after the drop: it is done
            check(code, "drop a ticket")
        self._dropped = True

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._dropped and not self._index._unusable():
            self.drop()

    def __del__(self) -> None:
        """Nobody can ask for its verdict any more. Adopters go on, and pins last as promised."""
        if not getattr(self, "_dropped", True) and self._ref.gen and not self._index._unusable():
            self.drop()


def parse(ticket: bytes) -> layout.TicketRef:
    """The 16 bytes of a ticket, checked for their length only."""
    if len(ticket) != TICKET_BYTES:
        raise LeaseLost(f"a ticket has {TICKET_BYTES} bytes, found {len(ticket)}")
    return layout.TicketRef.from_buffer_copy(ticket)


REFUSALS = {
    Code.MISSING: "it is a ticket of another cache; attach to that one, or check the message",
    Code.STALE: "it has ended: dropped, or all its adopters are done",
    Code.OWNER: "this client is not among its adopters, or its shard was adopted by another",
    Code.TWICE: "it was adopted by this client before, or the shard was",
    Code.TIMEOUT: "its deadline has passed, or the giver's side declared this client failed",
}

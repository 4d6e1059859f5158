"""The tickets of an index: giving, adopting, and who may."""

from __future__ import annotations

import ctypes

from lightcache import _arguments, layout, tickets
from lightcache._arguments import Pages
from lightcache.attached import Attached
from lightcache.errors import ConfigError, LeaseLost, OutOfPages
from lightcache.leases import HEADER_BYTES, Lease
from lightcache.reservations import Shard
from lightcache.shm import Client
from lightcache.shm.codes import Code, check
from lightcache.shm.locking import deadline_ns
from lightcache.tickets import ClientId, Ticket


class Ticketing(Attached):
    """Part of `PageIndex`: see there."""

    @property
    def client_id(self) -> ClientId:
        """Who we are, to be named as an adopter.

        Raises:
            PermissionDenied: attached read-only.
        """
        client = self._segment.client
        if client is None:
            check(Code.READONLY, "client_id")
        assert isinstance(client, Client)
        return ClientId(client.slot, client.epoch)

    def adopt(
        self, ticket: bytes, *, shard: int | None = None, timeout: float | None = None
    ) -> Lease | Shard:
        """Pin a ticket's pages in our own name. A lease's ticket gives a `Lease` (then tell its
        giver with `done`), a reservation's a `Shard` to write; say which.

        Raises:
            LeaseLost: of another cache, ended, past its deadline, not for us, adopted before.
            ConfigError: no such shard.
            LockTimeout, PermissionDenied, Detached.
        """
        ref = tickets.parse(ticket)
        number = layout.SHARDS if shard is None else shard
        _arguments.count(number, "shard", 0, layout.SHARDS)
        size = self._quick.lci_ticket_size(self._handle, ctypes.byref(ref))
        if size < 0:
            self._refuse(size)
        lease = Lease(self._whole, size)
        adopted = Shard(self._whole, lease, number, bytes(ticket))
        at = ctypes.addressof(lease._buffer)
        code = self._locked(
            "lci_adopt",
            ctypes.byref(ref),
            number,
            ctypes.c_void_p(at),
            ctypes.c_void_p(at + HEADER_BYTES),
            size,
            ctypes.byref(adopted._rid),
            ctypes.byref(adopted._gen),
            what="adopt a ticket",
            timeout=timeout,
        )
        if code == Code.RANGE and shard is None:
            raise ConfigError("adopt: this is a reservation's ticket; say which shard you write")
        if code < 0:
            self._refuse(code)
        if adopted._rid.value != layout.NIL:
            return adopted
        adopted._done = True  # the lease alone is held
        return lease

    def done(self, ticket: bytes, ok: bool = True) -> None:
        """Our verdict on a lease's ticket that we adopted: its giver sees it in `poll`. No lock.

        Raises:
            LeaseLost: told before, or not ours to tell.
        """
        self._ticket_done(ticket, ok)

    def refuse_orphans(self) -> int:
        """Adopt nothing any more of what dead clients have given: for whoever has read all that
        they had to tell. Pins of tickets that nobody else is to adopt go at once, and not at their
        deadline. The dead are not reaped by it: others may go on with what they adopted, or will.
        Takes the lock. Returns how many tickets we refused.

        Raises:
            LockTimeout, PermissionDenied, Detached.
        """
        refused = 0
        dead = [(one.slot, one.epoch) for one in self._segment.clients() if not one.alive]
        for slot, epoch in dead or [(0, 0)]:  # with each also what of the reaped is left
            code = self._locked(
                "lci_ticket_refuse_orphans", slot, epoch, what="refuse orphaned tickets"
            )
            check(code, "refuse orphaned tickets")
            refused += code
        return refused

    def _refuse(self, code: int) -> None:
        if code in tickets.REFUSALS:
            raise LeaseLost(f"adopt: {tickets.REFUSALS[Code(code)]}")
        check(code, "adopt a ticket")

    def _ticket_done(self, ticket: bytes, ok: bool) -> None:
        code = self._ticket_done_code(ticket, ok)
        if code == Code.TWICE:
            raise LeaseLost("done: this client gave its verdict before")
        if code in tickets.REFUSALS:
            raise LeaseLost(f"done: {tickets.REFUSALS[Code(code)]}")
        check(code, "done")

    def _ticket_done_code(self, ticket: bytes, ok: bool) -> int:
        ref = tickets.parse(ticket)
        code: int = self._quick.lci_ticket_done(self._handle, ctypes.byref(ref), ok)
        return code

    def _give_ticket(
        self,
        pages: Pages,
        progress: layout.ReserveProgress | None,
        adopters: list[ClientId],
        timeout: float,
    ) -> Ticket:
        ref = layout.TicketRef()
        ticket = Ticket(self._whole, ref)  # before the call: an interrupt after it drops the ticket
        code = self._locked(
            "lci_ticket_give",
            _arguments.address(pages),
            len(pages),
            progress.rid if progress else layout.NIL,
            progress.gen if progress else 0,
            self._adopters(adopters),
            deadline_ns(timeout),
            ctypes.byref(ref),
            what="give a ticket",
        )
        if code < 0:
            ticket._dropped = True
        if code == Code.OWNER:
            raise LeaseLost("ticket: this client does not pin all of these pages; pin them first")
        if code == Code.FULL:
            raise OutOfPages("ticket: too many tickets are outstanding; drop some")
        check(code, "give a ticket")
        return ticket

    def _adopters(self, adopters: list[ClientId]) -> int:
        living = {(c.slot, c.epoch) for c in self._segment.clients() if c.alive}
        mask = 0
        for slot, epoch in adopters:
            if (slot, epoch) not in living:
                raise ConfigError(
                    f"adopters: client {slot} in epoch {epoch} is not attached; see `clients()`"
                )
            if mask >> slot & 1:
                raise ConfigError(f"adopters: client {slot} is named twice")
            mask |= 1 << slot
        if not mask:
            raise ConfigError("adopters: name at least one client")
        return mask


__all__ = ["Ticketing"]

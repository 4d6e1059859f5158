"""Tickets, in the machine of the index."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import (
    Given,
    Held,
    MachineBase,
    pick,
)
from model.index_model import (
    TICKETS,
    Handoff,
)

from lightcache import ClientId, ConfigError, Lease, LeaseLost, Reservation
from lightcache.leases import Ticket
from lightcache.reservations import ReservationShard


class TicketRules(MachineBase):
    """Clients hand pages to one another."""

    # ---- tickets

    @precondition(lambda self: self.of(Lease) and len(self.given) < 12)
    @rule(
        number=pick,
        mask=st.integers(1, 7),
        late=st.sampled_from([False, False, True]),
        start=st.sampled_from([0, 0, 1, 2]),
        stop=st.sampled_from([None, None, 2, 3]),
    )
    def give_lease(self, number: int, mask: int, late: bool, start: int, stop: int | None) -> None:
        """All of a lease, or a slice."""
        held = self.choose(self.of(Lease), number)
        end = len(held.pages) if stop is None else stop
        if start > end or end > len(held.pages):
            adopters = [held.client.index.client_id]
            self.expect_lost(
                lambda: held.real.ticket(adopters, start=start, stop=stop), ConfigError
            )
            return
        whole = start == 0 and stop is None

        def ticket(adopters: list[ClientId], timeout: float) -> Ticket:
            piece = {} if whole else {"start": start, "stop": stop}
            return held.real.ticket(adopters, timeout=timeout, **piece)

        part = Held(held.client, SimpleNamespace(ticket=ticket), held.pages[start:end])
        self.give(part, mask, late)

    @precondition(lambda self: self.of(Reservation) and len(self.given) < 12)
    @rule(number=pick, mask=st.integers(1, 7), late=st.sampled_from([False, False, False, True]))
    def give_reservation(self, number: int, mask: int, late: bool) -> None:
        held = self.choose(self.of(Reservation), number)
        if held.writing is None:
            self.expect_lost(lambda: held.real.ticket([held.client.index.client_id]), ConfigError)
        else:
            self.give(held, mask, late)

    def give(self, held: Held, mask: int, late: bool) -> None:
        chosen = [c for i, c in enumerate(self.clients) if mask >> i & 1] or [self.clients[0]]
        real = held.real.ticket(
            [c.index.client_id for c in chosen], timeout=-1.0 if late else 3600.0
        )
        self.model.settle()
        pages = [p.number for p in held.writing.pages] if held.writing else held.pages
        model = Handoff(
            giver=held.client.slot,
            adopters={c.slot for c in chosen},
            pages=list(pages),
            late=late,
            writing=held.writing,
        )
        self.model.handoffs.append(model)
        self.model.pin(TICKETS, model.pages)
        self.given.append(Given(held.client, real, model, bytes(real)))

    @precondition(lambda self: self.given)
    @rule(number=pick, who=pick, shard=st.one_of(st.none(), st.integers(0, 3)))
    def adopt(self, number: int, who: int, shard: int | None) -> None:
        given = self.choose(self.given, number)
        client = self.client(who)
        ticket, writing = given.model, given.model.writing
        may = (
            not ticket.freed
            and client.slot in ticket.adopters
            and client.slot not in ticket.adopted | ticket.failed
            and not ticket.late
        )
        if not may or (writing and writing.doomed):
            kinds: tuple[type[BaseException], ...] = (LeaseLost,)
        elif writing and writing.complete:  # it may still wait to be collected
            kinds = (LeaseLost, ConfigError)
        elif writing and (shard is None or shard >= len(writing.shards)):
            kinds = (ConfigError,)
        elif writing and (
            shard in writing.published
            or writing.owner is None
            or writing.shards[shard or 0] != writing.owner
        ):
            kinds = (LeaseLost,)
        else:
            kinds = ()
        if kinds:
            self.expect_lost(lambda: client.index.adopt(given.data, shard=shard), *kinds)
            return
        got = client.index.adopt(given.data, shard=shard)
        assert isinstance(got, ReservationShard if writing else Lease)
        assert got.pages.tolist() == ticket.pages
        self.model.pin(client.slot, ticket.pages)
        ticket.adopted.add(client.slot)
        if writing:
            assert shard is not None
            writing.shards[shard] = client.slot
        self.model.settle()
        self.held.append(
            Held(client, got, list(ticket.pages), writing, shard, ticket if writing else None)
        )

    @precondition(lambda self: [g for g in self.given if g.model.writing is None])
    @rule(number=pick, who=pick, ok=st.booleans())
    def done(self, number: int, who: int, ok: bool) -> None:
        given = self.choose([g for g in self.given if g.model.writing is None], number)
        slot, index = self.client(who).slot, self.client(who).index
        ticket = given.model
        if ticket.freed or slot not in ticket.adopted or slot in ticket.done | ticket.failed:
            self.expect_lost(lambda: index.done(given.data, ok), LeaseLost)
            return
        index.done(given.data, ok)
        (ticket.done if ok else ticket.failed).add(slot)

    @precondition(lambda self: [g for g in self.given if not g.dropped])
    @rule(number=pick)
    def drop(self, number: int) -> None:
        given = self.choose([g for g in self.given if not g.dropped], number)
        given.real.drop()
        given.dropped = given.model.dropped = True
        self.model.settle()
        self.expect_lost(given.real.drop, LeaseLost)
        self.expect_lost(given.real.poll, LeaseLost)

    @precondition(lambda self: [g for g in self.given if not g.dropped])
    @rule(number=pick)
    def poll(self, number: int) -> None:
        given = self.choose([g for g in self.given if not g.dropped], number)
        ticket, found = given.model, given.real.poll()
        failed = set(ticket.failed)
        if ticket.late:
            failed |= ticket.adopters - ticket.adopted
        assert found.adopters == ticket.adopters
        assert found.adopted == ticket.adopted
        assert found.done == ticket.done
        assert found.failed == failed
        assert found.late == ticket.late
        verdict = False if failed else True if ticket.done == ticket.adopters else None
        assert found.verdict is verdict

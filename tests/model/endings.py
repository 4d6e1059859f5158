"""How what is held ends, in the machine of the index."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import (
    Held,
    MachineBase,
    pick,
)

from lightcache import Abandoned, ConfigError, Lease, LeaseLost, Reservation
from lightcache.reservations import ReservationShard


class EndingRules(MachineBase):
    """Leases, reservations and shards are let go of."""

    # ---- letting go

    @precondition(lambda self: self.of(Lease))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget"]))
    def release(self, number: int, how: str) -> None:
        held = self.choose(self.of(Lease), number)
        self.held.remove(held)
        self.let_go(held, how)
        self.model.unpin(held.client.slot, held.pages)

    @precondition(lambda self: self.of(Lease))
    @rule(number=pick, pages=pick)
    def shorten(self, number: int, pages: int) -> None:
        held = self.choose(self.of(Lease), number)
        pages %= len(held.pages) + 2
        if pages > len(held.pages):
            self.expect_lost(lambda: held.real.shorten(pages), ConfigError)
            return
        held.real.shorten(pages)
        self.model.unpin(held.client.slot, held.pages[pages:])
        held.pages = held.pages[:pages]
        assert held.real.pages.tolist() == held.pages

    def let_go(self, held: Held, how: str) -> None:
        if how == "forget":
            held.real = None
        else:
            if how == "release":
                held.real.release()
            else:
                with held.real:
                    pass
            self.expect_lost(held.real.release, LeaseLost)

    @precondition(lambda self: self.of(Reservation))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget", "abandon"]))
    def end(self, number: int, how: str) -> None:
        held = self.choose(self.of(Reservation), number)
        self.held.remove(held)
        if how == "abandon":
            held.real.abandon()
            self.expect_lost(held.real.abandon, LeaseLost)
        else:
            self.let_go(held, how)
        if held.real is not None:
            self.expect_lost(held.real.publish, Abandoned)
        if held.writing:
            self.model.end_writing(held.writing)
        self.model.unpin(held.client.slot, held.pages)

    @precondition(lambda self: self.of(ReservationShard))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget"]))
    def end_shard(self, number: int, how: str) -> None:
        held = self.choose(self.of(ReservationShard), number)
        assert held.writing is not None
        assert held.ticket is not None
        self.held.remove(held)
        self.let_go(held, how)
        slot = held.client.slot
        if slot not in held.ticket.done:
            held.ticket.failed.add(slot)
        if held.shard not in held.writing.published:
            self.model.end_writing(held.writing)
        self.model.unpin(slot, held.pages)

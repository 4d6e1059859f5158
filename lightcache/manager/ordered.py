"""Ordered: one copy that all ranks of an engine make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightcache import layout
from lightcache._keeper import Keeper
from lightcache.errors import LeaseLost, LightcacheError, LockTimeout, TransferFailed, WaitTimeout
from lightcache.page_index import PageIndex
from lightcache.reservations import Reservation
from lightcache.shm import Event
from lightcache.tickets import ClientId, Ticket, TicketStatus

if TYPE_CHECKING:
    from lightcache.manager.leading import Leader


class Ordered:
    """One copy that all ranks make, each of its share: a `Moving`. It is over when every rank has
    given its verdict or is dead; until then any of them may read or write its blocks."""

    def __init__(self, leader: Leader, number: int, index: PageIndex, ticket: Ticket) -> None:
        """For `Leader`."""
        self._leader, self._index, self._ticket = leader, index, ticket
        self._ranks = leader.ranks
        self._keeper: Keeper | None = None
        self._given_up = False
        self._over = False
        self._why = ""
        self.number = number
        """As ranks and `Decisions` call it."""

    def done(self) -> bool:
        """Whether it is over, and what it held given back. Does not block; takes the lock when it
        ends.

        Raises:
            TransferFailed: it is over, and failed; names the rank.
        """
        over = self._look()
        if self._why:
            raise TransferFailed(f"copy {self.number}: {self._why}; compute these tokens instead")
        return over

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is over.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            WaitTimeout: it goes on; says which ranks have not finished. Wait again.
            TransferFailed: as `done`.
        """
        if not self._look():
            # Every verdict notifies the index's event; a death does not, hence its looking again.
            event = Event(self._index.segment, layout.RootRecord.event.offset)
            try:
                event.wait_for(self._look, timeout)
            except WaitTimeout:
                raise WaitTimeout(
                    f"copy {self.number}: ranks {self.unfinished()} have not finished after "
                    f"{timeout} s; wait again, or kill the one that hangs"
                ) from None
        self.done()

    def unfinished(self) -> list[int]:
        """Ranks that have given no verdict, as far as was looked. No lock."""
        try:
            status = self._ticket.poll()
        except LeaseLost:
            return []  # it is over
        left = status.adopters - status.done - status.failed
        return [rank for rank, client in enumerate(self._ranks) if client.slot in left]

    def _look(self) -> bool:
        with self._leader._lock:
            if self._over:
                return True
            try:
                status = self._settled()
                if status is None:
                    self._leader._look_for_the_dead(self._index)
                    return False
                return self._end(self._judged(status))
            except LockTimeout:
                return False  # somebody is slow: what it holds is given back at the next look
            except LightcacheError as error:
                return self._end(f"its ticket is lost ({error})")

    def _settled(self) -> TicketStatus | None:
        """What became of it; None: some rank may still copy.

        A rank that failed has abandoned the reservation, and one that comes too late can no more
        adopt it, nor say so. So once we have abandoned it too, only those that have adopted are
        waited for: nobody joins them.
        """
        status = self._ticket.poll()
        if status.failed and self._keeper is not None and not self._given_up:
            self._keeper.abort()
            self._given_up = self._writes
            status = self._ticket.poll()
        left = status.adopters - status.done - status.failed
        if self._given_up:
            left &= status.adopted
        return None if left else status

    @property
    def _writes(self) -> bool:
        return self._keeper is not None and isinstance(self._keeper._held, Reservation)

    def _judged(self, status: TicketStatus) -> str:
        """Why it failed; empty: it went well."""
        bad = [rank for rank, one in enumerate(self._ranks) if one.slot in status.failed]
        if not bad:
            return ""
        alive = living(self._index)
        said = [
            f"rank {rank} (client slot {self._ranks[rank].slot}) "
            + self._what_it_did(self._ranks[rank], status, alive)
            for rank in bad
        ]
        return ", ".join(said)

    @staticmethod
    def _what_it_did(client: ClientId, status: TicketStatus, alive: set[ClientId]) -> str:
        if client not in alive:
            return "died"
        return "failed" if client.slot in status.adopted else "did not begin in time"

    def _end(self, why: str) -> bool:
        """Give everything back. LockTimeout: call again."""
        if not self._ticket._dropped and not self._index._unusable():
            self._ticket.revoke()  # of those who have not adopted, nobody comes any more
        keeper = self._keeper
        if keeper is not None:
            if not why and isinstance(keeper._held, Reservation):
                keeper._held._ready = True  # the last rank's publishing made it so
            keeper.over(False)  # we publish nothing ourselves
        self._why, self._over = why, True
        self._leader._ended(self)
        return True


def living(index: PageIndex) -> set[ClientId]:
    """Who is attached and lives. About 60 us, no lock."""
    return {ClientId(one.slot, one.epoch) for one in index.clients() if one.alive}


__all__ = ["Ordered", "living"]

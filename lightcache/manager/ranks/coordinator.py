"""RankCoordinator: a transfer backend of a scheduler, whose copies its engine's ranks make."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightcache import layout
from lightcache._arguments import count
from lightcache._core import Core
from lightcache.errors import (
    ConfigError,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    TransferFailed,
    WaitTimeout,
)
from lightcache.leases import Allocation, ClientId, Lease, Releasable, Ticket, TicketStatus
from lightcache.manager.backend import RanksLost, Slots
from lightcache.manager.ranks.messages import Decisions, Kind, Order, append, check_entries
from lightcache.page_transfers import Keeper
from lightcache.reservations import Reservation
from lightcache.runs import PLAIN, Run
from lightcache.shm import Event, SharedLog

# ---- RankTransfer


class RankTransfer:
    """One copy that all ranks make, each of its share: a `TransferHandle`. It has finished when
    every rank has given its verdict or is dead; until then any of them may touch its blocks."""

    def __init__(
        self,
        coordinator: RankCoordinator,
        number: int,
        held: Lease | Reservation | Allocation,
        ticket: Ticket,
    ) -> None:
        """For `RankCoordinator`."""
        self._coordinator, self._core, self._ticket = coordinator, held.hold().core, ticket
        self.held = held
        """The pages that it moves."""
        self._ranks = coordinator.ranks
        self._keeper: Keeper | None = None
        self._given_up = False
        self._finished = False
        self._why = ""
        self._lost = False
        self.number = number
        """Its number in `Decisions` and in the rank messages."""

    def done(self) -> bool:
        """Whether it has finished and its pages are given back. Does not block; takes the lock when
        it finishes.

        Raises:
            TransferFailed: it has finished, and failed; names the rank.
            RanksLost: that rank has died.
        """
        finished = self._look()
        if self._why:
            failed = RanksLost if self._lost else TransferFailed
            raise failed(f"copy {self.number}: {self._why}; compute these tokens instead")
        return finished

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has finished.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeout: it is in flight; says which ranks have not finished. Wait again.
            TransferFailed: as `done`.
        """
        if not self._look():
            # A verdict notifies the index's event; a death does not, so `wait_for` looks again.
            event = Event(self._core.segment, layout.RootRecord.event.offset)
            try:
                event.wait_for(self._look, timeout)
            except WaitTimeout:
                raise WaitTimeout(
                    f"copy {self.number}: ranks {self.unfinished()} have not finished after "
                    f"{timeout} s; wait again, or kill the one that hangs"
                ) from None
        self.done()

    def unfinished(self) -> list[int]:
        """Ranks without a verdict, as of now. Takes no lock."""
        try:
            status = self._ticket.poll()
        except LeaseLost:
            return []  # it has finished
        left = status.adopters - status.done - status.failed
        return [rank for rank, client in enumerate(self._ranks) if client.slot in left]

    def _look(self) -> bool:
        with self._coordinator._lock:
            if self._finished:
                return True
            try:
                status = self._settled()
                if status is None:
                    self._coordinator._look_for_the_dead(self._core)
                    return False
                return self._end(self._judged(status))
            except LockTimeout:
                return False  # the lock is held: the next look gives the pages back
            except LightcacheError as error:
                return self._end(f"its ticket is lost ({error})")

    def _settled(self) -> TicketStatus | None:
        """The final status of its ticket; None: some rank may still copy.

        A rank that failed has abandoned the reservation, and a late rank can neither adopt it nor
        give a verdict. So once we have abandoned it too, only ranks that have adopted it are waited
        for; no other rank can join.
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
        return self._keeper is not None and self._keeper.writes

    def _judged(self, status: TicketStatus) -> str:
        """Why it failed; empty: it succeeded."""
        bad = [rank for rank, client in enumerate(self._ranks) if client.slot in status.failed]
        if not bad:
            return ""
        alive = living(self._core)
        self._lost = any(self._ranks[rank] not in alive for rank in bad)
        reasons = [
            f"rank {rank} (client slot {self._ranks[rank].slot}) "
            + self._outcome(self._ranks[rank], status, alive)
            for rank in bad
        ]
        return ", ".join(reasons)

    @staticmethod
    def _outcome(client: ClientId, status: TicketStatus, alive: set[ClientId]) -> str:
        if client not in alive:
            return "died"
        return "failed" if client.slot in status.adopted else "did not begin in time"

    def _end(self, why: str) -> bool:
        """Give everything back. LockTimeout: call again."""
        if not self._ticket.ended and not self._core.unusable():
            self._ticket.revoke()  # ranks that have not adopted it no longer can
        keeper = self._keeper
        if keeper is not None:
            # We publish nothing: the last rank to publish has made the pages ready.
            keeper.finish(False, published=not why)
        self._why, self._finished = why, True
        self._coordinator._ended(self)
        return True


def living(core: Core) -> set[ClientId]:
    """Live clients of the segment. Costs about 60 us, takes no lock."""
    return {
        ClientId(client.slot, client.epoch) for client in core.segment.clients() if client.alive
    }


# ---- RankCoordinator

_LOOK_FOR_THE_DEAD = 0.05  # seconds between two looks for dead ranks, while copies are in flight


class RankCoordinator:
    """A `TransferBackend` whose copies are made by the ranks of this engine. Each rank is a process
    and copies its own share of every page: rank i writes shard i. The coordinator writes orders to
    a log that the ranks read (`RankWorker`), and hands them pages by tickets. There is no
    collective operation, and the only reply is the ticket's verdict.

    It copies pages of KV; `group` makes the transfer backend of windows, or of states that share
    the cache. Threads may share it.
    """

    run = PLAIN
    """Of the pages that it copies."""

    def __init__(
        self,
        log: SharedLog,
        ranks: Sequence[ClientId],
        *,
        append_timeout: float = 10.0,
        adopt_timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Orders nothing yet. The caller closes the log.

        Args:
            log: attached as its writer.
            ranks: the ranks' clients of the host cache, in order; see `wait_for_ranks`.
            append_timeout: seconds that an order waits for a rank that does not read.
            adopt_timeout: seconds in which a rank must begin an order; after them it has failed.
            clock: in seconds.

        Raises:
            ConfigError: no ranks, more than 63, one named twice, or a log without write access.
        """
        if not log.is_writer:
            raise ConfigError("log: expected one that was attached with writer=True")
        check_entries(log)
        self.log = log
        self._lock = threading.RLock()
        self._append_timeout, self._adopt_timeout = append_timeout, adopt_timeout
        self._clock = clock
        self._looked = clock()
        self._number = 0
        self._running: dict[int, RankTransfer] = {}
        self._completed: list[int] = []
        self._failed: list[int] = []
        self.ranks: tuple[ClientId, ...] = ()
        """The clients that adopt new orders."""
        self._set_ranks(ranks)
        self._kv = self.group(self.run)

    def _set_ranks(self, ranks: Sequence[ClientId]) -> None:
        found = tuple(ClientId(*client) for client in ranks)
        slots = {client.slot for client in found}
        if not 1 <= len(found) < layout.SHARDS or len(slots) != len(found):
            raise ConfigError(
                f"ranks: expected 1 to {layout.SHARDS - 1} clients, each once, found {list(found)}"
            )
        self.ranks = found

    @property
    def shards(self) -> int:
        """Parts of every page, one for each rank."""
        return len(self.ranks)

    def replace(self, rank: int, client: ClientId) -> None:
        """Make another process this rank from now on; see `wait_for_ranks`. Unfinished orders of
        its predecessor fail.

        Raises:
            ConfigError: no such rank, or this client is another rank already.
        """
        with self._lock:
            if not 0 <= rank < len(self.ranks):
                raise ConfigError(f"rank: expected 0 to {len(self.ranks) - 1}, found {rank!r}")
            self._set_ranks([*self.ranks[:rank], client, *self.ranks[rank + 1 :]])

    # ---- Copies

    def group(self, run: Run, *, page_tokens: int | None = None) -> RankGroup:
        """The transfer backend of another group of the host cache, for `WindowBlocks` or
        `Checkpoints`. The ranks copy its pages with what `RankWorker` has for that group.

        Args:
            run: how its pages lie in the cache.
            page_tokens: slots of a page: 1 for states. None: the cache's, as windows have.

        Raises:
            ConfigError: no number of slots.
        """
        return RankGroup(self, run, page_tokens, self._order)

    def load(self, lease: Lease, slots: Slots, first: int) -> RankTransfer:
        """See `TransferBackend`: every rank loads its share.

        Raises:
            TransferFailed: a rank is gone, or does not read the log.
            OutOfPages: too many tickets are outstanding.
            LockTimeout, Detached.
            After each of these the lease is still the caller's.
        """
        return self._kv.load(lease, slots, first)

    def offload(self, new: Reservation, slots: Slots) -> RankTransfer:
        """See `TransferBackend`: every rank writes its shard; the last one makes the pages ready.

        Raises:
            ConfigError: the reservation's shards are not as many as the ranks.
            Otherwise as `load`.
        """
        return self._kv.offload(new, slots)

    def save(self, held: Allocation, slots: Slots) -> RankTransfer:
        """See `TransferBackend`: every rank writes its share of pages without a key, which stay the
        caller's. Raises as `load`."""
        return self._kv.save(held, slots)

    def begun(self, held: Releasable) -> RankTransfer | None:
        """See `TransferBackend`."""
        with self._lock:
            return next(
                (transfer for transfer in self._running.values() if transfer.held is held), None
            )

    def _order(
        self,
        held: Lease | Reservation | Allocation,
        keeper: Keeper | None,
        order: Callable[[int, bytes], Order],
    ) -> RankTransfer:
        """Order a copy of these pages.

        Args:
            order: makes the message from the copy's number and its ticket.
        """
        with self._lock:
            ticket = self._ticket(held)
            self._number += 1
            transfer = RankTransfer(self, self._number, held, ticket)
            message = order(transfer.number, bytes(ticket))
            # From here on ranks may copy: after an interrupt it stays in flight, with its pages,
            # and `poll` finishes it.
            self._running[transfer.number] = transfer
            if keeper is not None:
                keeper.take()
                transfer._keeper = keeper
            try:
                append(self.log, message, self._append_timeout)
            except LightcacheError as error:  # no rank has read the whole order, or will
                del self._running[transfer.number]
                if keeper is not None:
                    transfer._keeper = None
                    keeper.hand_back()
                ticket.revoke()
                raise TransferFailed(f"copy {transfer.number}: not ordered: {error}") from error
            return transfer

    def _ticket(self, held: Lease | Reservation | Allocation) -> Ticket:
        try:
            return held.ticket(list(self.ranks), timeout=self._adopt_timeout)
        except (ConfigError, LeaseLost) as error:
            alive = living(held.hold().core)
            dead = [rank for rank, client in enumerate(self.ranks) if client not in alive]
            if not dead:
                raise
            raise RanksLost(
                f"ranks {dead} have died or left; start others, and `replace` them"
            ) from error

    # ---- Steps

    def step(self, decisions: Decisions) -> Decisions:
        """Send the decisions of this step to the ranks. They begin earlier orders first. Blocks
        while a rank is a whole log behind.

        Args:
            decisions: the numbers of copies that ended since the last step are added here.

        Returns:
            The decisions as sent; every rank's `RankWorker.step` returns the same.

        Raises:
            WaitTimeout: a live rank did not read for `append_timeout` seconds; names it. Nothing
                was decided; the same step may be sent again.
        """
        with self._lock:
            self.poll()
            sent = replace(
                decisions,
                completed=(*decisions.completed, *self._completed),
                failed=(*decisions.failed, *self._failed),
            )
            append(self.log, sent, self._append_timeout)
            self._completed, self._failed = [], []
            return sent

    def poll(self) -> int:
        """Notice finished copies and dead ranks. Returns the number of copies in flight. Does not
        block."""
        with self._lock:
            for transfer in list(self._running.values()):
                transfer._look()
            return len(self._running)

    def in_flight(self) -> tuple[int, ...]:
        """For each rank, the number of copies that were ordered and have no verdict of it. Takes no
        lock of the cache."""
        counts = [0] * len(self.ranks)
        with self._lock:
            for transfer in self._running.values():
                with contextlib.suppress(LightcacheError):
                    for rank in transfer.unfinished():
                        counts[rank] += transfer._ranks[rank] == self.ranks[rank]
        return tuple(counts)

    def _ended(self, transfer: RankTransfer) -> None:
        self._running.pop(transfer.number, None)
        (self._failed if transfer._why else self._completed).append(transfer.number)

    def _look_for_the_dead(self, core: Core) -> None:
        """Reap if a rank that is waited for has died: no other process may do it. Costs about 60
        us, so not at every poll."""
        now = self._clock()
        if now - self._looked < _LOOK_FOR_THE_DEAD:
            return
        self._looked = now
        waited_for = {client for transfer in self._running.values() for client in transfer._ranks}
        if not waited_for <= living(core):
            core.reap()


# ---- The copies of one group


class RankGroup:
    """A `TransferBackend` for one group of a host cache, whose copies the ranks of a
    `RankCoordinator` make, each of its share. `RankCoordinator.group` makes it."""

    def __init__(
        self,
        coordinator: RankCoordinator,
        run: Run,
        page_tokens: int | None,
        begin: Callable[..., RankTransfer],
    ) -> None:
        """For `RankCoordinator.group`."""
        if page_tokens is not None:
            page_tokens = count(page_tokens, "page_tokens", 1, 1 << 20)
        self._coordinator, self.run, self._page_tokens = coordinator, run, page_tokens
        self._begin = begin

    @property
    def shards(self) -> int:
        """Parts of every page, one for each rank."""
        return self._coordinator.shards

    def load(self, lease: Lease, slots: Slots, first: int) -> RankTransfer:
        """See `RankCoordinator.load`."""
        order = partial(self._order, Kind.LOAD, slots, first=first)
        return self._begin(lease, Keeper(lease), order)

    def offload(self, new: Reservation, slots: Slots) -> RankTransfer:
        """See `RankCoordinator.offload`."""
        if new.shards != self.shards:
            raise ConfigError(
                f"offload: expected a reservation of {self.shards} shards, one for each rank, "
                f"found {new.shards}"
            )
        tokens, parts = self._page_tokens or new.hold().core.page_tokens, self.run.parts
        # Pages of which any part is new, and where the new parts lie among theirs.
        pages, row = np.unique(new.new // parts, return_inverse=True)
        where = row * parts + new.new % parts
        positions = None if len(where) == len(pages) * parts else tuple(where.tolist())
        rows = np.ascontiguousarray(slots, np.int64)
        own = rows[: len(rows) // tokens * tokens].reshape(-1, tokens)[pages].reshape(-1)
        order = partial(self._order, Kind.OFFLOAD, own, positions=positions)
        return self._begin(new, Keeper(new), order)

    def save(self, held: Allocation, slots: Slots) -> RankTransfer:
        """See `RankCoordinator.save`."""
        return self._begin(held, None, partial(self._order, Kind.SAVE, slots))

    def begun(self, held: Releasable) -> RankTransfer | None:
        """See `TransferBackend`."""
        return self._coordinator.begun(held)

    def _order(self, kind: Kind, slots: Slots, number: int, ticket: bytes, **how: Any) -> Order:
        return Order(kind, number, ticket, slots, group=self.run.group, **how)


__all__ = ["RankCoordinator", "RankGroup", "RankTransfer", "living"]

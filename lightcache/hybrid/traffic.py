"""Copies of states: from slot to slot, to the host and back, and what they hold until they are
over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Pages
from lightcache.errors import LightcacheError
from lightcache.hybrid.spaces import Path, Tier
from lightcache.leases import Lease
from lightcache.manager.matches import WritePolicy
from lightcache.manager.movers import Mover
from lightcache.manager.traffic import Movement, Traffic, goes_on, stuck, unless_taken
from lightcache.reservations import Reservation

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Checkpoints
    from lightcache.hybrid.copiers import Copying


@dataclass(frozen=True, eq=False)
class _Origin:
    """Of which checkpoint a slot is."""

    path: Path
    count: int


@dataclass(eq=False)
class _Group:
    """Slots on their way out, pinned until their copies are over."""

    lease: Lease
    movements: list[Movement]
    origins: dict[int, _Origin]
    """Of those that are to be on the host, by their slots."""


@dataclass(eq=False)
class Copied:
    """A launch from slot to slot: which slots it writes, and what it reads from."""

    copying: Copying
    slots: Pages
    leases: list[Lease]
    over: bool = False


class StateTraffic:
    """All copies of some `Checkpoints`, whose lock is around every call. What begins a copy, and
    `close`, take it themselves."""

    def __init__(self, owner: Checkpoints, mover: Mover | None, time_limit: float) -> None:
        """Nothing moves yet."""
        self._owner, self._mover, self._time_limit = owner, mover, time_limit
        self.moves = Traffic(owner.lock)
        """Between slots and host pages."""
        self._copies: list[Copied] = []
        self._origins: dict[int, _Origin] = {}
        self._groups: list[_Group] = []

    # ---- from slot to slot

    def copied(self, copying: Copying, slots: Pages, leases: list[Lease]) -> Copied:
        """A launch writes these slots. The leases are released when it has been executed."""
        made = Copied(copying, slots, leases)
        with self._owner.lock:
            self._copies.append(made)
            self._look_at_copies()
        return made

    def _look_at_copies(self) -> None:
        for one in list(self._copies):
            try:
                if not one.copying.done():
                    continue
            except Exception as error:  # a device that failed copies nothing more
                if goes_on(one.copying):
                    raise  # it was not the copy's: as in `Movement.block`
                self.moves.foreign.note(error)
            self._copies.remove(one)
            one.over = True
            for lease in one.leases:
                lease.release()
            one.leases.clear()

    # ---- to the host

    def note(self, slot: int, path: Path, count: int) -> None:
        """A slot holds a checkpoint that the host is to have when its room is needed."""
        if self._owner.host is not None:
            self._origins[slot] = _Origin(path, count)

    def offload(
        self,
        slot: int,
        path: Path,
        count: int,
        *,
        unpin: bool = False,
        of: list[Movement] | None = None,
    ) -> Movement | None:
        """Write a slot's state to the host, under the key at the last of the first `count`
        positions. None: the host has it, or no room for it.

        Args:
            unpin: the slot is pinned once for this, until it is over.
            of: as for `Traffic.begin`.
        """

        def let_go() -> None:
            if unpin and self._owner.slots is not None:
                self._owner.slots.unpin(np.array([slot], np.int32))

        with self._owner.lock:
            new = None
            try:
                new = self._reserved(path, count)
            finally:
                if new is None:
                    let_go()
            if new is None:
                return None
            return self._launch(slot, new, path, count, let_go, of)

    def _reserved(self, path: Path, count: int) -> Reservation | None:
        owner = self._owner
        assert owner.host is not None
        assert self._mover is not None
        try:
            chain = owner.chain(Tier.HOST, path, count)
            new = owner.host.index.reserve(
                chain,
                len(chain) - 1,
                shards=self._mover.shards,
                namespace=path.space.host,
                timeout=self._time_limit,
            )
        except LightcacheError:
            owner.counts.add(failed_offloads=1)
            return None
        if len(new.pages):
            return new
        owner.counts.add(no_room=len(new.missing))
        new.release()
        return None

    def _launch(
        self,
        slot: int,
        new: Reservation,
        path: Path,
        count: int,
        let_go: Callable[[], None],
        of: list[Movement] | None,
    ) -> Movement:
        owner, mover = self._owner, self._mover
        assert mover is not None
        slots = np.full(int(new.new[0]) + 1, -1, np.int64)
        slots[-1] = slot

        def over(ok: bool, _: int | None) -> None:
            let_go()
            owner.counts.add(**{"offloads" if ok else "failed_offloads": 1})
            if ok:
                owner.reached_host(path, count)

        touched = np.array([slot], np.int32)
        return self.moves.begin(
            touched, lambda: mover.offload(new, slots), over, unless_taken(new), of
        )

    # ---- from the host

    def load(self, lease: Lease, slot: int, of: list[Movement] | None = None) -> Movement:
        """Bring a host page's state to a slot. The lease is the movement's from then on.

        Args:
            of: as for `Traffic.begin`.
        """
        owner, mover = self._owner, self._mover
        assert mover is not None

        def over(ok: bool, _: int | None) -> None:
            owner.counts.add(**{"loads" if ok else "failed_loads": 1})

        where, touched = np.array([slot], np.int64), np.array([slot], np.int32)
        with owner.lock:
            return self.moves.begin(
                touched, lambda: mover.load(lease, where, 0), over, unless_taken(lease), of
            )

    # ---- making room

    def demote(self, n: int) -> int:
        """Begin to write back up to n checkpoints, those that eviction would take next. Their slots
        are free when that is over, but for those that somebody came for, and those that should be
        on the host and are not. Returns how many are on their way."""
        slots = self._owner.slots
        if slots is None or n < 1:
            return 0
        oldest = slots.oldest(min(n, 4096))
        group = _Group(oldest.lease, [], {})
        self._groups.append(group)
        count = len(oldest)
        for slot, key in zip(oldest.pages.tolist(), oldest.keys, strict=True):
            origin = self._origins.get(slot)
            if origin is None or (origin.path.key(origin.count)[0] != key).any():
                continue  # evicted and written anew
            group.origins[slot] = origin
            self.offload(slot, origin.path, origin.count, of=group.movements)
        self._look_at_groups()
        return count

    def overwritten(self, slots: Pages) -> None:
        """These were evicted if they held anything."""
        lost = 0
        for slot in slots.tolist():
            origin = self._origins.pop(slot, None)
            if origin is not None and self._owner.write is WritePolicy.BACK:
                known = self._owner.spaces.live(origin.path.space)
                lost += known and not self._there(origin, Tier.HOST)
        self._owner.counts.add(demotions_lost=lost)

    @property
    def going(self) -> int:
        """Slots on their way out. Not those that wait for a copy of which nobody knows: they never
        get there."""
        return sum(len(group.lease) for group in self._groups if not stuck(group.movements))

    def _look_at_groups(self) -> None:
        over = [group for group in self._groups if all(each.over for each in group.movements)]
        self._groups = [group for group in self._groups if group not in over]
        for group in over:
            try:
                with contextlib.suppress(LightcacheError):  # who does not answer keeps what it has
                    self._give_up(group)
            finally:
                group.lease._let_go()

    def _give_up(self, group: _Group) -> None:
        """The slots of a group, but for those that should be on the host and are not: these are
        pinned once more meanwhile, which counts as a use, so that others are tried next."""
        slots = self._owner.slots
        assert slots is not None
        written = {at: one for at, one in group.origins.items() if self._there(one, Tier.HOST)}
        with contextlib.ExitStack() as pins:
            for at in group.origins.keys() - written.keys():
                origin = group.origins[at]
                key = np.ascontiguousarray(origin.path.key(origin.count))
                pins.enter_context(slots.match(key, namespace=origin.path.space.device))
            gone = slots.discard(group.lease)
        left = [at for at, origin in written.items() if not self._there(origin, Tier.DEVICE)]
        for at in left:
            self._origins.pop(at, None)
        self._owner.counts.add(
            demotions=len(left),
            demotions_lost=max(0, gone - len(left)),
            kept_unwritten=len(group.origins) - len(written),
        )

    def _there(self, origin: _Origin, tier: Tier) -> bool:
        """Whether a tier has that checkpoint, and says so."""
        index = self._owner.slots if tier is Tier.DEVICE else self._owner.host
        path, key = origin.path, np.ascontiguousarray(origin.path.key(origin.count))
        with contextlib.suppress(LightcacheError):
            return index is not None and bool(index.peek(key, namespace=path.space.of(tier)))
        return False

    # ---- upkeep

    def busy(self, slots: Pages) -> npt.NDArray[np.bool_]:
        """See `Checkpoints.in_flight`."""
        written = [one.slots for one in self._copies]
        found = self.moves.busy(slots)
        return found | np.isin(slots, np.concatenate(written)) if written else found

    def poll(self) -> int:
        """See `Checkpoints.poll`."""
        going = self.moves.poll()
        self._look_at_copies()
        self._look_at_groups()
        return going + len(self._copies)

    def close(self, timeout: float | None) -> None:
        """See `Checkpoints.close`."""
        with self._owner.lock:
            self.moves.paused = False
            self.moves.poll()
        self.moves.wait(None, timeout)
        with self._owner.lock:
            self.poll()
            for group in self._groups:
                group.lease.release()
            self._groups.clear()
            self._origins.clear()


__all__ = ["Copied", "StateTraffic"]

"""Checkpoints: saved states of recurrent layers, found by the keys of KV, in tiers of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache._arguments import Keys, Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages
from lightcache.held import Named
from lightcache.hybrid.bounding import PathBound
from lightcache.hybrid.spaces import Path, StateSpace, StateSpaces, Tier
from lightcache.hybrid.statistics import CheckpointStats, Counts
from lightcache.hybrid.traffic import StateTraffic
from lightcache.layout import KeyStatus
from lightcache.leases import Lease
from lightcache.manager.device import room_of
from lightcache.manager.lookups import joined
from lightcache.manager.matches import WritePolicy
from lightcache.manager.statistics import Room
from lightcache.page_index import PageIndex

if TYPE_CHECKING:
    from lightcache.hybrid.copiers import StateCopier
    from lightcache.manager.movers import Mover
    from lightcache.manager.traffic import Movement
    from lightcache.storage.tiers import BaseTier

_NEW, _PRESENT = int(KeyStatus.NEW), int(KeyStatus.PRESENT)


Found = tuple[Tier, int]
"""A tier, and how many positions of a path end with the checkpoint there: 1 or more."""


class Checkpoints:
    """Device slots and host pages of states, each with an index of its own, its own order of
    eviction and its own capacity; either may be missing. Nothing of KV's indexes refers to them,
    nor the reverse.

    A slot is HELD by this process while a request writes it. `donate` gives it a key: a checkpoint,
    which never changes again, and is evicted when nobody uses it and room is needed, the one unused
    for longest first. No call but `close` waits for bytes.
    """

    def __init__(
        self,
        slots: PageIndex | None,
        host: Cache | None,
        mover: Mover | None = None,
        copier: StateCopier | None = None,
        *,
        write: WritePolicy = WritePolicy.THROUGH,
        most: int | None = 2,
        low_water: int | None = None,
        storage: BaseTier | None = None,
        time_limit: float = 0.25,
    ) -> None:
        """Everything stays the caller's to close, behind this.

        Args:
            slots: a flat index whose pages are the device's slots, for checkpoints and for what
                running requests write; None: the engine has slots for running requests and no
                others, and numbers them itself.
            host: a flat cache whose pages are states; None: none.
            mover: who moves bytes between slots and host pages: a page holds one token, the slot.
            copier: who copies from slot to slot.
            write: THROUGH: a checkpoint goes to the host at once; BACK: when the device needs its
                room. Without a device always at once.
            most: checkpoints on one path of either tier; with more the shallowest go, but no forks.
                A conversation goes on from its last one, and others make more of the room of those
                before it (docs/benchmarks.md). None: no bound.
            low_water: slots that are kept free by writing back ahead of need. None: with BACK a
                fiftieth of them, 1 at least; else none.
            storage: a `StorageTier` or `StorageClient` of the host cache; None: none.
            time_limit: seconds that a call may wait for a lock.

        Raises:
            ConfigError: what does not go together, or an index that is not flat.
        """
        for index in (slots, None if host is None else host.index):
            if index is not None and not index.flat:
                raise ConfigError(
                    f"checkpoints: expected indexes made with flat=True, found {index}; else the "
                    "deepest checkpoints would go first"
                )
        if slots is None and host is None:
            raise ConfigError("checkpoints: expected slots, a host cache or both, found neither")
        if host is not None and mover is None:
            raise ConfigError("checkpoints: a host cache needs a mover; give mover=")
        if write not in (WritePolicy.THROUGH, WritePolicy.BACK):
            raise ConfigError(f"write: expected THROUGH or BACK, found {write!r}")
        if storage is not None and host is None:
            raise ConfigError("checkpoints: storage is read and written through a host cache")
        self.slots, self.host, self.copier, self.storage = slots, host, copier, storage
        both = ((tier, self._index(tier)) for tier in Tier)
        self._tiers = [(tier, index) for tier, index in both if index is not None]
        self.write = write if slots is not None else WritePolicy.THROUGH
        if low_water is None:
            low_water = _low_water(slots) if self.write is WritePolicy.BACK else 0
        self.low_water = _arguments.count(low_water, "low_water", 0, 1 << 20)
        self.lock = threading.RLock()
        self.counts = Counts()
        self.spaces = StateSpaces(slots, host)
        self.traffic = StateTraffic(self, mover, time_limit)
        self._planned: dict[Hashable, Tier] = {}
        self.most = most
        self._bound = PathBound(most, self.counts)
        self._later: list[int] = []
        """Slots that could not be given back yet."""

    def _index(self, tier: Tier) -> PageIndex | None:
        if tier is Tier.DEVICE:
            return self.slots
        return None if self.host is None else self.host.index

    def tiers(self) -> list[tuple[Tier, PageIndex]]:
        """Those that there are, with their indexes; the device first."""
        return self._tiers

    # ---- finding

    def deepest(
        self, path: Path, most: int | None = None, *, tiers: frozenset[str] | None = None
    ) -> Found | None:
        """The deepest checkpoint among the first `most` positions of a path, on the device, or on
        the host if that is deeper; None: there is none. Pins nothing, counts as no use. No lock;
        some 5 ns a position.

        Args:
            tiers: "device", "host": where to look; None: in both.
        """
        best: Found | None = None
        keys, first = path.keys[:most], 0
        for tier, index in self._tiers:
            if first == len(keys) or (tiers is not None and tier.value not in tiers):
                continue
            found = index.deepest(keys[first:] if first else keys, namespace=path.space.of(tier))
            if found:
                first += found
                best = tier, first
        return best

    def deepest_many(self, parts: list[Keys], space: StateSpace, tier: Tier) -> list[int]:
        """For many prompts in one call, in one tier: how many keys of each part there are up to the
        last that is a checkpoint, as `PageIndex.deepest_many`."""
        index = self._index(tier)
        assert index is not None
        if len(parts) == 1:
            return [index.deepest(parts[0], namespace=space.of(tier))]
        keys, offsets = joined(parts)
        found: list[int] = index.deepest_many(keys, offsets, namespace=space.of(tier)).tolist()
        return found

    def plan(self, request: Hashable, path: Path, found: Found, ttl: float) -> bool:
        """Pin this checkpoint tentatively, and let go of what was planned for the request before:
        False where it has gone meanwhile. `take` gives it as a lease; the plan ends `ttl` seconds
        behind the last call for it."""
        tier, count = found
        if self._planned.get(request, tier) is not tier:
            self.cancel(request)
        index = self._index(tier)
        assert index is not None
        self._planned[request] = tier
        key, space = path.key(count), path.space.of(tier)
        return bool(index.plan(request, key, namespace=space, timeout=ttl, frozen=True))

    def take(self, request: Hashable) -> tuple[Tier, Lease] | None:
        """What was planned, as a lease; None: nothing was, or it was cleared meanwhile.

        Raises:
            LeaseLost: the plan's time is over.
        """
        tier = self._planned.pop(request, None)
        if tier is None:
            return None
        index = self._index(tier)
        assert index is not None
        lease = index.take(request)
        if len(lease):
            return tier, lease
        lease.release()
        return None

    def cancel(self, request: Hashable) -> None:
        """Nothing is wanted of a plan any more. Harmless if there is none."""
        tier = self._planned.pop(request, None)
        index = None if tier is None else self._index(tier)
        if index is not None:
            index.cancel(request)

    # ---- slots

    def acquire(self, n: int) -> Pages:
        """n slots for a running request to write, int32; evicts checkpoints if need be. With
        write-back those that eviction would take next are written to the host first, where that
        takes no time; if it does, others go without, and are counted as `demotions_lost`.

        Raises:
            OutOfPages: so many cannot be had; nothing was taken.
            ConfigError: the engine has its own slots.
        """
        if self.slots is None:
            raise ConfigError("acquire: there are no device slots here; give the engine's own")
        if n > self.slots.pages:
            raise OutOfPages(f"acquire: {n} slots were asked for, there are {self.slots.pages}")
        with self.lock:
            if self.write is WritePolicy.BACK and self.host is not None:
                self._make_room(n, self.slots)
            found = self.slots.allocate(n).detach()
            self.traffic.overwritten(found)
            return found

    def _make_room(self, n: int, slots: PageIndex) -> None:
        """What is on its way out is pinned: so only where there is as much beside it."""
        missing = n - slots.stats().free
        if missing > 0 and slots.can_allocate(n + missing):
            with contextlib.suppress(LightcacheError):  # then they go without
                self.traffic.demote(missing)

    def free(self, slots: Pages) -> None:
        """Give back slots that were acquired and not donated. No copy may touch them.

        Raises:
            LeaseLost: some are not ours, or were given back before; none was given back.
        """
        if len(slots) and self.slots is not None:
            self.slots.free(slots)

    # ---- making them

    def donate(
        self,
        slot: int,
        path: Path,
        count: int,
        *,
        host: bool = True,
        fork: bool = False,
        of: list[Movement] | None = None,
    ) -> Movement | None:
        """A slot's state becomes the checkpoint at the last of the first `count` positions; nothing
        is copied. The slot is the cache's from then on: not to be written, read or freed by whom
        had it. If another slot holds that state already, this one is free.

        Its content must be complete for whoever reads it behind this call on the computing stream.

        Without device slots it goes to the host, and the slot stays the caller's, not to be written
        until the movement is over.

        Args:
            host: whether it may go to the host.
            fork: prompts part there, though nothing hangs on it yet: the bound spares it.
            of: without device slots: of whoever has the slot; the copy is appended before it
                begins, so that no interrupt hides it.

        Returns:
            The copy to the host that reads the slot, if one was begun.
        """
        with self.lock:
            if fork:
                self._bound.parts(path.key(count))
            if self.slots is None:
                return self.traffic.offload(slot, path, count, of=of) if host else None
            pinned = self._name(slot, path, count)
            if pinned is None:
                self.counts.add(refused=1)
                self.give_back([slot])
                return None
            self.counts.add(donated=int(pinned == slot), merged=int(pinned != slot))
            movement = None
            if host:
                self.traffic.note(pinned, path, count)
            if host and self.write is WritePolicy.THROUGH and self.host is not None:
                movement = self.traffic.offload(pinned, path, count, unpin=True)
            else:
                self.slots.unpin(np.array([pinned], np.int32))
            self._bound.enforce(self.slots, path, Tier.DEVICE, count)
            return movement

    def _name(self, slot: int, path: Path, count: int) -> int | None:
        """The slot that stands under the key, pinned once; None: ours could not, and is held."""
        assert self.slots is not None
        space, named = path.space.device, Named(1)
        try:
            chain = self.chain(Tier.DEVICE, path, count)
            if len(chain) > 1:  # what it hangs on counts as used, and before it
                self.slots.reserve(chain[:1], 1, namespace=space).release()
            self.slots.name_pages(
                np.array([slot], np.int32), chain, len(chain) - 1, namespace=space, into=named
            )
        except LightcacheError:  # the weights have gone, the lock did not come, or it is disabled
            pass
        return int(named.pages[0]) if named.status[0] in (_NEW, _PRESENT) else None

    def give_back(self, slots: Sequence[int]) -> None:
        """As `free`, at once or as soon as the lock comes."""
        if self.slots is None or not len(slots):
            return
        try:
            self.slots.free(np.array(slots, np.int32))
        except LeaseLost:
            raise
        except LightcacheError:
            self._later += slots

    def chain(self, tier: Tier, path: Path, count: int) -> Keys:
        """The key of a new checkpoint, behind that of the deepest one before it."""
        index = self._index(tier)
        assert index is not None
        before = index.deepest(path.keys[: count - 1], namespace=path.space.of(tier))
        if not before:
            return path.key(count)
        return np.concatenate([path.key(before), path.key(count)])

    def demote(self, n: int) -> int:
        """Begin to write back up to n checkpoints of the device, those unused for longest, and free
        their slots. Those that were to be written and are not on the host then stay, and count as
        just used. Returns how many are on their way."""
        with self.lock:
            return self.traffic.demote(n)

    # ---- upkeep

    def in_flight(self, slots: Pages | Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which of these slots a copy reads or writes, or will when transfers are resumed."""
        with self.lock:
            self.traffic.poll()
            return self.traffic.busy(np.ascontiguousarray(slots, np.int32))

    def pause(self, timeout: float | None = None) -> None:
        """No copy between slots and host pages begins until `resume`; those that go on are waited
        for.

        Raises:
            WaitTimeout: some go on still; all is paused.
        """
        with self.lock:
            self.traffic.moves.paused = True
        self.traffic.moves.wait(None, timeout)

    def resume(self) -> None:
        """They begin again, those first that were asked for meanwhile."""
        with self.lock:
            self.traffic.moves.paused = False
            self.traffic.poll()

    def clear_weights(self, weights: str, *, everywhere: bool) -> None:
        """Forget a version on the device and, if `everywhere`, whatever of it is on the host; else
        only what was opened here."""
        with self.lock:
            if everywhere:
                self.spaces.clear_everywhere(weights)
            else:
                self.spaces.clear(weights)

    def clear_tenant(self, weights: str, tenant: str) -> None:
        """Forget one tenant of a version, here and on the host, whoever opened it."""
        with self.lock:
            self.spaces.clear_everywhere(weights, tenant)

    def poll(self) -> int:
        """Each step: notice what is over, begin what waits. Returns copies that go on. Raises what
        is none of our errors, of a mover, a copier or a storage, as `KVCacheManager.poll` does."""
        with self.lock:
            later, self._later = self._later, []
            self.give_back(later)
            if self.slots is not None and self.low_water and self.host is not None:
                missing = self.low_water - self.slots.stats().free - self.traffic.going
                with contextlib.suppress(LightcacheError):  # later, when they answer
                    self.traffic.demote(missing)
            going = self.traffic.poll()
            self.traffic.moves.foreign.tell()
            return going

    def reached_host(self, path: Path, count: int) -> None:
        """A checkpoint is on the host. What a storage raises that is none of our errors is for
        `poll`: this is asked in the middle of any call that looks for copies that are over."""
        if self.storage is not None:
            key = np.ascontiguousarray(path.key(count))
            try:
                with contextlib.suppress(LightcacheError):
                    self.storage.write(key, namespace=path.space.host)
            except Exception as error:
                self.traffic.moves.foreign.note(error)
        if self.host is not None:
            self._bound.enforce(self.host.index, path, Tier.HOST, count)

    def stats(self) -> CheckpointStats:
        """Figures of this process."""
        with self.lock:
            return self.counts.snapshot()

    def room(self) -> dict[str, Room]:
        """Slots and host pages that there are, that are free, and that could be had."""
        return {"device": room_of(self.slots), "host": room_of(self._index(Tier.HOST))}

    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for the copies, give back everything.

        Raises:
            WaitTimeout: a copy goes on; call again.
            As `poll`, when all of this is done.
        """
        with self.lock:
            for request in list(self._planned):
                self.cancel(request)
        self.traffic.close(timeout)
        with self.lock:
            self.traffic.moves.foreign.tell()


def _low_water(slots: PageIndex | None) -> int:
    return 0 if slots is None else max(1, slots.pages // 50)


__all__ = ["Checkpoints", "Found"]

"""Checkpoints: saved states of recurrent layers, found by the keys of KV, in tiers of their own."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightcache import _arguments
from lightcache._arguments import Keys, Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages
from lightcache.layout import KeyStatus
from lightcache.leases import Lease, NamingResult, Positions
from lightcache.manager.backend import TransferBackend
from lightcache.manager.blocks import capacity_of, joined
from lightcache.manager.request import WritePolicy
from lightcache.manager.stats import TierCapacity
from lightcache.manager.transfers import BlockTransfer, Ends, TransferTracker, goes_on
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.page_index import PageIndex
from lightcache.reservations import Reservation

if TYPE_CHECKING:
    from lightcache.hybrid.copiers import Copying, StateCopier
    from lightcache.storage.tier import BaseTier


# ---- Where states are: tiers, namespaces by weights version and tenant, and the keys of a
# prompt.


class Tier(Enum):
    """Where a checkpoint is."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A weights version and a tenant, on the device and the host; None: there is no such tier."""

    kv: Namespace
    """Of the host's KV, beside which it was opened: says whose states these are."""
    device: Namespace | None
    host: Namespace | None

    def of(self, tier: Tier) -> Namespace:
        """In a tier that there is."""
        found = self.device if tier is Tier.DEVICE else self.host
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class Path:
    """The positions of a prompt at which checkpoints may be, as keys. The first `count` of them end
    with a position; so 0 is none."""

    keys: Keys
    """uint64 of shape (n, 2)."""
    space: StateSpace
    kv: Namespace | None = None
    """Where KV has these keys; None: in its default namespace."""

    def key(self, count: int) -> Keys:
        """Of the position that `count` of them end with, alone."""
        return self.keys[count - 1 : count]


class StateSpaces:
    """Those that were opened here, one for each weights version and tenant."""

    def __init__(self, slots: PageIndex | None, host: Cache | None) -> None:
        """None yet."""
        self._slots, self._host = slots, host
        self._known: dict[tuple[str, str], StateSpace] = {}

    def beside(self, kv: Namespace, good: Callable[[], bool]) -> StateSpace | None:
        """Of the weights and the tenant of a namespace of KV, made if need be. None: that was
        cleared, and its states with it.

        Who clears KV alone, by whatever call, clears its states as well: the first request behind
        that brings another namespace of the same name, and what was beside the former one goes.

        Who forgets a namespace clears KV's first, and then those of states that it sees. Who opens
        one of these looks at KV's behind that: so one of the two sees the other.

        Args:
            good: whether KV's is in use still.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        found = self._usable(kv)
        if found is None and good():  # a request of before the clear must not clear what came after
            self.clear(kv.weights, kv.tenant)
            found = self._open(kv)
            if not good():
                self.clear(kv.weights, kv.tenant)
                return None
        return found

    def _usable(self, kv: Namespace) -> StateSpace | None:
        """One that was opened here beside this very namespace, and that nobody has cleared."""
        found = self._known.get((kv.weights, kv.tenant))
        if found is None or found.kv != kv:
            return None
        if found.host is None or self._host is None:
            return found
        if self._host.index.namespace_state(found.host) is NamespaceState.NORMAL:
            return found
        self.clear(kv.weights, kv.tenant)  # of the device, too
        return None

    def _open(self, kv: Namespace) -> StateSpace:
        names = kv.weights, kv.tenant
        made = self._known[names] = StateSpace(
            kv,
            None if self._slots is None else self._slots.namespace(*names),
            None if self._host is None else self._host.namespace(*names),
        )
        return made

    def live(self, space: StateSpace) -> bool:
        """Whether nobody has forgotten it here."""
        return self._known.get((space.kv.weights, space.kv.tenant)) is space

    def clear(self, weights: str, tenant: str | None = None) -> None:
        """Forget what was opened here of a version, or of one of its tenants: nothing of it is
        found or accepted any more, in no process."""
        for key, space in list(self._known.items()):
            if not _is_of(space.kv, weights, tenant):
                continue
            if self._host is not None and space.host is not None:
                self._host.clear(space.host)
            if self._slots is not None and space.device is not None:
                self._slots.clear(space.device)
            del self._known[key]  # behind it: what failed is cleared again

    def clear_everywhere(self, weights: str, tenant: str | None = None) -> None:
        """The same, whoever has opened it."""
        if self._host is not None:
            clear_states(self._host, weights, tenant)
        self.clear(weights, tenant)


def clear_states(states: Cache, weights: str, tenant: str | None = None) -> None:
    """Forget what a host cache has of a version, or of one of its tenants, whoever opened it. KV's
    is cleared before: see `StateSpaces.beside`."""
    for space in states.index.namespaces():
        if _is_of(space, weights, tenant):
            states.clear(space)


def _is_of(space: Namespace, weights: str, tenant: str | None) -> bool:
    return space.weights == weights and tenant in (None, space.tenant)


# ---- Copies of states: from slot to slot, to the host and back, and what they hold until they
# are over.


@dataclass(frozen=True, eq=False)
class _Origin:
    """Of which checkpoint a slot is."""

    path: Path
    count: int


@dataclass(eq=False)
class _Group:
    """Slots on their way out, pinned until their copies are over."""

    lease: Lease
    transfers: list[BlockTransfer]
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

    def __init__(
        self, owner: Checkpoints, backend: TransferBackend | None, time_limit: float
    ) -> None:
        """Nothing moves yet."""
        self._owner, self._backend, self._time_limit = owner, backend, time_limit
        self.moves = TransferTracker(owner.lock, time_limit)
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
                    raise  # it was not the copy's: as in `BlockTransfer.block`
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
        pins: Lease | None = None,
        of: list[BlockTransfer] | None = None,
        ends: Ends | None = None,
    ) -> BlockTransfer | None:
        """Write a slot's state to the host, under the key at the last of the first `count`
        positions. None: the host has it, or no room for it.

        Args:
            pins: the slot's, for this: released when it is over, or not begun.
            of, ends: as for `TransferTracker.begin`.
        """

        def let_go(ok: bool) -> None:
            if pins is not None:
                pins.close()
            if ends is not None:
                ends(ok)

        with self._owner.lock:
            new = None
            try:
                new = self._reserved(path, count)
            finally:
                if new is None:
                    let_go(False)
            if new is None:
                return None
            return self._launch(slot, new, path, count, let_go, of)

    def _reserved(self, path: Path, count: int) -> Reservation | None:
        owner = self._owner
        assert owner.host is not None
        assert self._backend is not None
        try:
            chain = owner.chain(Tier.HOST, path, count)
            new = owner.host.index.reserve(
                chain,
                len(chain) - 1,
                shards=self._backend.shards,
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
        let_go: Ends,
        of: list[BlockTransfer] | None,
    ) -> BlockTransfer:
        owner, backend = self._owner, self._backend
        assert backend is not None
        slots = np.full(int(new.new[0]) + 1, -1, np.int64)
        slots[-1] = slot

        def over(ok: bool, _: int | None) -> None:
            owner.counts.add(**{"offloads" if ok else "failed_offloads": 1})
            if ok:
                owner.reached_host(path, count)

        touched = np.array([slot], np.int32)
        return self.moves.begin(touched, backend, "offload", new, slots, over, of=of, ends=let_go)

    # ---- from the host

    def load(self, lease: Lease, slot: int, of: list[BlockTransfer] | None = None) -> BlockTransfer:
        """Bring a host page's state to a slot. The lease is the movement's from then on.

        Args:
            of: as for `TransferTracker.begin`.
        """
        owner, backend = self._owner, self._backend
        assert backend is not None

        def over(ok: bool, _: int | None) -> None:
            owner.counts.add(**{"loads" if ok else "failed_loads": 1})

        where, touched = np.array([slot], np.int64), np.array([slot], np.int32)
        with owner.lock:
            return self.moves.begin(touched, backend, "load", lease, where, over, of=of)

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
            self.offload(slot, origin.path, origin.count, of=group.transfers)
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
        """Slots on their way out."""
        return sum(len(group.lease) for group in self._groups)

    def _look_at_groups(self) -> None:
        over = [group for group in self._groups if all(each.over for each in group.transfers)]
        self._groups = [group for group in self._groups if group not in over]
        for group in over:
            try:
                with contextlib.suppress(LightcacheError):  # who does not answer keeps what it has
                    self._give_up(group)
            finally:
                group.lease.close()

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


# ---- What checkpoints count.


@dataclass(frozen=True)
class CheckpointStats:
    """Since the checkpoints began, in this process. Checkpoints unless said otherwise."""

    requests: int = 0
    """Taken."""
    device_hits: int = 0
    """Requests that went on from a checkpoint of the device."""
    host_hits: int = 0
    storage_hits: int = 0
    """Of these of the host, from one that storage was read for."""
    usable_tokens: int = 0
    """Of prompts, that need not be computed."""
    unusable_tokens: int = 0
    """Whose KV was there, behind the checkpoint."""
    donated: int = 0
    """Saved states that became checkpoints."""
    merged: int = 0
    """Saved states that were there already."""
    refused: int = 0
    """Saved states that could not become checkpoints: no room under the key, or weights that have
    gone."""
    bounded: int = 0
    """Evicted because their path had too many."""
    copies: int = 0
    """From a checkpoint to a working slot."""
    loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    failed_offloads: int = 0
    no_room: int = 0
    """That were to be written to the host and found no room."""
    demotions: int = 0
    """That left the device ahead of need, and that the host had then."""
    demotions_lost: int = 0
    """That left the device and that the host had not: not to be written there; or, with write-back,
    evicted because a slot was needed at once."""
    kept_unwritten: int = 0
    """Demotions that were given up, for the host had no room or the write failed: they stayed."""
    dropped_tokens: int = 0
    """KV behind the deepest checkpoint of requests that ended, by policy."""

    @property
    def request_ratio(self) -> float:
        """Requests that went on from a checkpoint, of all, 0 to 1."""
        hits = self.device_hits + self.host_hits
        return hits / self.requests if self.requests else 0.0


_NAMES = frozenset(each.name for each in fields(CheckpointStats))


class Counts(Counter[str]):
    """Counts by the names of `CheckpointStats`."""

    def add(self, **counts: int) -> None:
        """Raise some of them."""
        for name, count in counts.items():
            assert name in _NAMES, name
            self[name] += count

    def snapshot(self) -> CheckpointStats:
        """As they are now."""
        return CheckpointStats(**self)


# ---- The bound on checkpoints of one path: the shallowest go, but no forks.

PATH_LIMIT = 2
"""Checkpoints on one path, where nothing else is said: a conversation goes on from its last one,
and others make more of the room of those before it (docs/benchmarks.md)."""
_PARTED = 1 << 12  # forks that are remembered


class PathBound:
    """With more than so many on a path the shallowest go, but no forks, not the deepest, and none
    in use; the one that was added goes last. Whoever adds one enforces it, as far as it knows the
    path: what hangs on the new one by other keys is seen by whoever adds one there."""

    def __init__(
        self, most: int | None, counts: Counts, parting: Callable[[Path], Pages] | None = None
    ) -> None:
        """No fork is known.

        Args:
            most: on one path of either tier; None: no bound.
            parting: see `Checkpoints`.

        Raises:
            ConfigError: `most` is below 1.
        """
        self._most = None if most is None else _arguments.count(most, "most", 1, 1 << 20)
        self._counts = counts
        self._parting = parting
        self._parted: OrderedDict[bytes, None] = OrderedDict()
        """Keys at which prompts part."""

    def parts(self, key: Keys) -> None:
        """Prompts part there, though nothing hangs on it yet."""
        self._parted[key.tobytes()] = None
        if len(self._parted) > _PARTED:
            self._parted.popitem(last=False)

    def enforce(self, index: PageIndex, path: Path, tier: Tier, count: int) -> None:
        """One was added at the last of the first `count` positions of a path, which may go on."""
        if self._most is not None:
            with contextlib.suppress(LightcacheError):  # then whoever adds the next one looks
                self._enforce(index, path, tier, count, self._most)

    def _enforce(self, index: PageIndex, path: Path, tier: Tier, count: int, most: int) -> None:
        space, keys = path.space.of(tier), path.keys
        there = _standing(index, keys, space)
        excess = len(there) - most
        if excess <= 0:
            return
        children = index.children(keys[there], namespace=space)
        children = np.maximum(children, self._parting_behind(path, there))
        forks = self._forks(children, keys[there])
        others = zip(there[:-1].tolist(), forks, strict=False)
        for i, fork in sorted(others, key=lambda one: one[0] == count - 1):
            if excess and not fork and index.drop(keys[i : i + 1], namespace=space):
                self._counts.add(bounded=1)
                excess -= 1

    def _parting_behind(self, path: Path, there: Positions) -> Pages:
        """How many ways KV goes on, at most, between each checkpoint and the next one: whichever
        process saved it, and though the checkpoints of the other way may have gone."""
        if self._parting is None:
            return np.zeros(len(there), np.int32)
        return np.maximum.reduceat(self._parting(path), there)

    def _forks(self, children: Pages, keys: Keys) -> list[bool]:
        """Which of these are forks, or were: if what hangs on one has gone by the bound, prompts
        still part there, and nothing but this tells."""
        found = []
        for count, key in zip(children.tolist(), keys, strict=True):
            if count > 1:
                self.parts(key)
            found.append(key.tobytes() in self._parted)
        return found


def _standing(index: PageIndex, keys: Keys, space: Namespace | None) -> Positions:
    """Where checkpoints stand on a path, the shallowest first: few among thousands of keys, so
    `last_ready` goes from one to the next, 5 ns a key in all."""
    found, behind = [], len(keys)
    while behind := index.last_ready(keys[:behind], namespace=space):
        behind -= 1
        found.append(behind)
    return np.array(found[::-1], np.int64)


# ---- Checkpoints: saved states of recurrent layers, found by the keys of KV, in tiers of their
# own.

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
        backend: TransferBackend | None = None,
        copier: StateCopier | None = None,
        *,
        write: WritePolicy = WritePolicy.THROUGH,
        most: int | None = PATH_LIMIT,
        low_water: int | None = None,
        storage: BaseTier | None = None,
        time_limit: float = 0.02,
        parting: Callable[[Path], Pages] | None = None,
    ) -> None:
        """Everything stays the caller's to close, behind this.

        Args:
            slots: an independent index whose pages are the device's slots, for checkpoints and for
                what running requests write; None: the engine has slots for running requests and no
                others, and numbers them itself.
            host: an independent cache whose pages are states; None: none.
            backend: who moves bytes between slots and host pages: a page holds one token, the slot.
            copier: who copies from slot to slot.
            write: THROUGH: a checkpoint goes to the host at once; BACK: when the device needs its
                room. Without a device, and with a storage, which is written from there, always at
                once.
            most: checkpoints on one path of either tier; with more the shallowest go, but no forks.
                A conversation goes on from its last one, and others make more of the room of those
                before it (docs/benchmarks.md). None: no bound.
            low_water: slots that are kept free by writing back ahead of need. None: with BACK a
                fiftieth of them, 1 at least; else none.
            storage: a `StorageTier` or `StorageClient` of the host cache; None: none.
            time_limit: seconds that a call may wait for a lock.
            parting: how many pages of KV hang on that of each position of a path, as
                `PageIndex.children` of KV's index says: where two do, prompts part, also those that
                other processes saved. None: only what hangs on checkpoints tells.

        Raises:
            ConfigError: what does not go together, or an index that is not independent.
        """
        for index in (slots, None if host is None else host.index):
            if index is not None and not index.independent:
                raise ConfigError(
                    f"checkpoints: expected indexes made with independent=True, found {index}; "
                    "else "
                    "the deepest checkpoints would go first"
                )
        if slots is None and host is None:
            raise ConfigError("checkpoints: expected slots, a host cache or both, found neither")
        if host is not None and backend is None:
            raise ConfigError("checkpoints: a host cache needs a transfer backend; give backend=")
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
        self.traffic = StateTraffic(self, backend, time_limit)
        self._planned: dict[Hashable, Tier] = {}
        self.most = most
        self._bound = PathBound(most, self.counts, parting)
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

    def last_ready(
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
            found = index.last_ready(keys[first:] if first else keys, namespace=path.space.of(tier))
            if found:
                first += found
                best = tier, first
        return best

    def last_ready_many(self, parts: list[Keys], space: StateSpace, tier: Tier) -> list[int]:
        """For many prompts in one call, in one tier: how many keys of each part there are up to the
        last that is a checkpoint, as `PageIndex.last_ready_many`."""
        index = self._index(tier)
        assert index is not None
        if len(parts) == 1:
            return [index.last_ready(parts[0], namespace=space.of(tier))]
        keys, offsets = joined(parts)
        found: list[int] = index.last_ready_many(keys, offsets, namespace=space.of(tier)).tolist()
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
        of: list[BlockTransfer] | None = None,
        ends: Ends | None = None,
    ) -> BlockTransfer | None:
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
            ends: called when that is over, perhaps twice.

        Returns:
            The copy to the host that reads the slot, if one was begun.
        """
        with self.lock:
            if fork:
                self._bound.parts(path.key(count))
            if self.slots is None:
                return self.traffic.offload(slot, path, count, of=of, ends=ends) if host else None
            pinned = self._name(slot, path, count)
            if pinned is None:
                self.counts.add(refused=1)
                self.give_back([slot])
                return None
            self.counts.add(donated=int(pinned == slot), merged=int(pinned != slot))
            transfer = None
            if host:
                self.traffic.note(pinned, path, count)
            pins, take = Lease.attached_to(self.slots.core, np.array([pinned], np.int32))
            take()
            at_once = self.write is WritePolicy.THROUGH or self.storage is not None
            if host and at_once and self.host is not None:
                transfer = self.traffic.offload(pinned, path, count, pins=pins)
            else:
                pins.release()
            self._bound.enforce(self.slots, path, Tier.DEVICE, count)
            return transfer

    def _name(self, slot: int, path: Path, count: int) -> int | None:
        """The slot that stands under the key, pinned once; None: ours could not, and is held."""
        assert self.slots is not None
        space, named = path.space.device, NamingResult(1)
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
        before = index.last_ready(path.keys[: count - 1], namespace=path.space.of(tier))
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
        is none of our errors, of a transfer backend, a copier or a storage, as
        `KVCacheManager.poll` does."""
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

    def room(self) -> dict[str, TierCapacity]:
        """Slots and host pages that there are, that are free, and that could be had."""
        return {"device": capacity_of(self.slots), "host": capacity_of(self._index(Tier.HOST))}

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


__all__ = [
    "PATH_LIMIT",
    "CheckpointStats",
    "Checkpoints",
    "Copied",
    "Counts",
    "Found",
    "Path",
    "PathBound",
    "StateSpace",
    "StateSpaces",
    "StateTraffic",
    "Tier",
    "clear_states",
]

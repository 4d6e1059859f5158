"""Checkpoints: saved states of recurrent layers, found by the keys of KV, in separate tiers."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, field, fields
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Pages
from lightcache._together import together
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, OutOfPages
from lightcache.group_index import GroupIndex
from lightcache.kernels.groups import Rule
from lightcache.layout import KeyStatus
from lightcache.leases import Allocation, Lease, NamingResult, Positions
from lightcache.manager.backend import TransferBackend
from lightcache.manager.blocks import capacity_of
from lightcache.manager.lookup import joined
from lightcache.manager.request import WritePolicy
from lightcache.manager.state import check_run
from lightcache.manager.stats import TierCapacity
from lightcache.manager.transfers import BlockTransfer, OnEnd, TransferTracker
from lightcache.manager.write_back import WriteBack, WrittenBack
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.page_index import PageIndex
from lightcache.reservations import Reservation
from lightcache.runs import PLAIN, Run

if TYPE_CHECKING:
    from lightcache.hybrid.copiers import StateCopier
    from lightcache.storage.tier import BaseTier


# ---- Tiers, namespaces by weights version and tenant, and keys of a prompt

StateIndex = PageIndex | GroupIndex
"""An index of states alone, or the states in the index of KV: calls of the same names."""


class Tier(Enum):
    """The tier of a checkpoint."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The namespaces of one weights version and tenant, on the device and the host; None: no such
    tier."""

    kv: Namespace
    """The namespace of the host's KV for which it was opened."""
    device: Namespace | None
    host: Namespace | None

    def of(self, tier: Tier) -> Namespace:
        """The namespace in an existing tier."""
        namespace = self.device if tier is Tier.DEVICE else self.host
        assert namespace is not None
        return namespace


@dataclass(frozen=True, eq=False)
class Path:
    """The positions of a prompt at which checkpoints may be, as keys. A position is given as the
    `count` of keys up to it; 0 is none."""

    keys: Keys
    """uint64 of shape (n, 2)."""
    space: StateSpace
    kv: Namespace | None = None
    """The namespace of KV with these keys; None: its default one."""

    def key(self, count: int) -> Keys:
        """The one key of the position that ends the first `count` keys."""
        return self.keys[count - 1 : count]


class StateSpaces:
    """State spaces that this process opened, one for each weights version and tenant."""

    def __init__(self, slots: PageIndex | None, host: Cache | None, shared: bool = False) -> None:
        """None yet.

        Args:
            shared: the host's states lie in the cache of KV, and so in KV's namespaces, which KV's
                manager clears.
        """
        self._slots, self._shared = slots, shared
        self._host = None if shared else host
        """A cache of states alone."""
        self._known: dict[tuple[str, str], StateSpace] = {}

    def beside(self, kv: Namespace, good: Callable[[], bool]) -> StateSpace | None:
        """The state space for the weights and tenant of a KV namespace, made if needed. None: the
        namespace was cleared, and its states with it.

        Clearing KV alone, by any call, clears its states as well: the next request brings a new
        namespace of the same name, and the states of the old one are dropped.

        Clearing a tenant or version clears the KV namespace first, and then the state namespaces it
        sees. A process that opens a state namespace re-reads the KV namespace afterwards, so either
        the opener or the clearer sees the other.

        Args:
            good: whether the KV namespace is still in use.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        space = self._usable(kv)
        if space is None and good():  # a request from before the clear must not clear newer states
            self.clear(kv.weights, kv.tenant)
            space = self._open(kv)
            if not good():
                self.clear(kv.weights, kv.tenant)
                return None
        return space

    def _usable(self, kv: Namespace) -> StateSpace | None:
        """The state space opened here for this very KV namespace, unless it was cleared."""
        space = self._known.get((kv.weights, kv.tenant))
        if space is None or (space.kv is not kv and space.kv != kv):  # nearly always the same
            return None
        if space.host is None or self._host is None:
            return space
        if self._host.index.namespace_state(space.host) is NamespaceState.NORMAL:
            return space
        self.clear(kv.weights, kv.tenant)  # on the device, too
        return None

    def _open(self, kv: Namespace) -> StateSpace:
        names = kv.weights, kv.tenant
        space = self._known[names] = StateSpace(
            kv,
            None if self._slots is None else self._slots.namespace(*names),
            kv if self._shared else None if self._host is None else self._host.namespace(*names),
        )
        return space

    def live(self, space: StateSpace) -> bool:
        """Whether this process has not cleared it."""
        return self._known.get((space.kv.weights, space.kv.tenant)) is space

    def clear(self, weights: str, tenant: str | None = None) -> None:
        """Clear the spaces that this process opened for a version, or one of its tenants: no
        process finds or accepts their states any more."""
        for key, space in list(self._known.items()):
            if not _is_of(space.kv, weights, tenant):
                continue
            if self._host is not None and space.host is not None:
                self._host.clear(space.host)
            if self._slots is not None and space.device is not None:
                self._slots.clear(space.device)
            del self._known[key]  # last: after a failure it is cleared again


def clear_states(states: Cache, weights: str, tenant: str | None = None) -> None:
    """Clear a version, or one of its tenants, in a host cache, whichever process opened it. KV must
    be cleared first: see `StateSpaces.beside`."""
    for space in states.index.namespaces():
        if _is_of(space, weights, tenant):
            states.clear(space)


def _is_of(space: Namespace, weights: str, tenant: str | None) -> bool:
    return space.weights == weights and tenant in (None, space.tenant)


# ---- Write-back: a checkpoint goes to the host before its slot is used for another


@dataclass(frozen=True, eq=False)
class _Origin:
    """The checkpoint that a slot holds."""

    path: Path
    count: int

    @property
    def key(self) -> Keys:
        """The one key of its position."""
        return np.ascontiguousarray(self.path.key(self.count))


@dataclass(eq=False)
class _Batch(WrittenBack):
    """Slots being written back."""

    origins: dict[int, _Origin] = field(default_factory=dict)
    """Checkpoints to be written to the host, by slot."""


class StateWriteBack(WriteBack):
    """The write-back of one `Checkpoints`. Its lock is held around every call. Other than a block
    of KV, a checkpoint stays if its copy failed or the host had no room."""

    _new = _Batch

    def __init__(self, owner: Checkpoints) -> None:
        """No slot is being written back."""
        super().__init__()
        self._owner = owner
        self._origins: dict[int, _Origin] = {}

    def note(self, slot: int, path: Path, count: int) -> None:
        """Note a slot whose checkpoint goes to the host before its slot is reused."""
        if self._owner.host is not None:
            self._origins[slot] = _Origin(path, count)

    def overwritten(self, slots: Pages) -> None:
        """Note that the checkpoints in these slots, if any, were evicted."""
        lost = 0
        for slot in slots.tolist():
            origin = self._origins.pop(slot, None)
            if origin is not None and self._owner.write is WritePolicy.BACK:
                known = self._owner.spaces.live(origin.path.space)
                lost += known and not self._there(origin, Tier.HOST)
        self._owner.counts.update(demotions_lost=lost)

    def _index(self) -> PageIndex | None:
        return self._owner.slots

    def _write(self, batch: WrittenBack, pages: Pages, keys: Keys) -> bool:
        assert isinstance(batch, _Batch)
        for slot, key in zip(pages.tolist(), keys, strict=True):
            origin = self._origins.get(slot)
            if origin is None or (origin.key[0] != key).any():
                continue  # evicted and reused
            batch.origins[slot] = origin
            offload = self._owner.offload
            offload(slot, origin.path, origin.count, of=batch.transfers)
        return True

    def _end(self, batch: WrittenBack) -> None:
        assert isinstance(batch, _Batch)
        try:
            with contextlib.suppress(LightcacheError):  # if unanswered, slots are kept
                self._give_up(batch)
        finally:
            batch.lease.close()

    def _give_up(self, batch: _Batch) -> None:
        """Free the slots of a batch, except those whose host copy is missing: these are pinned
        again meanwhile, which counts as a use, so that others are tried next."""
        slots = self._owner.slots
        assert slots is not None
        written = {
            slot: origin for slot, origin in batch.origins.items() if self._there(origin, Tier.HOST)
        }
        with contextlib.ExitStack() as pins:
            for slot in batch.origins.keys() - written.keys():
                origin = batch.origins[slot]
                pins.enter_context(slots.match(origin.key, namespace=origin.path.space.device))
            discarded = slots.discard(batch.lease)
        left = [slot for slot, origin in written.items() if not self._there(origin, Tier.DEVICE)]
        for slot in left:
            self._origins.pop(slot, None)
        self._owner.counts.update(
            demotions=len(left),
            demotions_lost=max(0, discarded - len(left)),
            kept_unwritten=len(batch.origins) - len(written),
        )

    def _there(self, origin: _Origin, tier: Tier) -> bool:
        """Whether a tier has that checkpoint; False if it does not answer."""
        for each, _, index in self._owner.tiers:
            if each is tier:
                with contextlib.suppress(LightcacheError):
                    return bool(index.peek(origin.key, namespace=origin.path.space.of(tier)))
        return False

    def close(self) -> None:
        """See `WriteBack`."""
        super().close()
        self._origins.clear()


# ---- Statistics


@dataclass(frozen=True)
class CheckpointStats:
    """Counters of this process since the checkpoints were made, in checkpoints unless stated
    otherwise."""

    requests: int = 0
    """Requests taken."""
    device_hits: int = 0
    """Requests that continued from a checkpoint of the device."""
    host_hits: int = 0
    storage_hits: int = 0
    """Of the host hits, those read from storage."""
    usable_tokens: int = 0
    """Tokens of prompts that need not be computed."""
    unusable_tokens: int = 0
    """Tokens after the checkpoint whose KV was cached."""
    donated: int = 0
    """Saved states that became checkpoints."""
    merged: int = 0
    """Saved states that were checkpoints already."""
    refused: int = 0
    """Saved states that could not become checkpoints: no room under the key, or cleared weights."""
    bounded: int = 0
    """Checkpoints beyond the bound on their path: evicted from the device, or made the first to be
    evicted on the host."""
    copies: int = 0
    """Copies from a checkpoint to a working slot."""
    loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    failed_offloads: int = 0
    no_room: int = 0
    """Checkpoints not written to the host because there was no room."""
    demotions: int = 0
    """Checkpoints evicted from the device ahead of need, with a copy on the host."""
    demotions_lost: int = 0
    """Checkpoints evicted from the device without a copy on the host: not to be written there; or,
    with write-back, evicted because a slot was needed immediately."""
    kept_unwritten: int = 0
    """Checkpoints that stayed on the device because the host had no room or the write failed."""
    dropped_tokens: int = 0
    """Tokens of KV after the last checkpoint of ended requests, evicted by `drop_tails`."""

    @property
    def request_ratio(self) -> float:
        """Share of requests that continued from a checkpoint, 0 to 1."""
        hits = self.device_hits + self.host_hits
        return hits / self.requests if self.requests else 0.0


_NAMES = tuple(each.name for each in fields(CheckpointStats))

# ---- The bound on checkpoints of one path

PATH_LIMIT = 2
"""Default bound on checkpoints of one path: a conversation continues from its last one, and other
conversations use the slots of earlier ones better (docs/benchmarks.md)."""
_PARTED = 1 << 12  # maximum number of remembered forks
_SUPERSEDED = (
    16  # looked at on the host beside those within the bound; earlier ones were, in their turn
)


class PathBound:
    """Bounds the checkpoints of one path: the first ones beyond it are superseded, but never forks,
    the last, or checkpoints in use, and the newest last. They stay, as the first to be evicted:
    until then a prompt may continue from them, and one that does makes them ordinary checkpoints
    again. Where the device is written back, its own go at once, or they would be copied to the host
    before. The process that adds a checkpoint enforces the bound on the path it knows;
    continuations by other keys are bounded when a checkpoint is added there."""

    def __init__(
        self,
        most: int | None,
        counts: Counter[str],
        parting: Callable[[Path], Pages] | None = None,
        stay: bool = True,
    ) -> None:
        """No fork is known.

        Args:
            most: maximum on one path of either tier; None: no bound.
            stay: whether those of the device stay as well.
            parting: see `Checkpoints`.

        Raises:
            ConfigError: `most` is below 1.
        """
        self._most = None if most is None else _arguments.count(most, "most", 1, 1 << 20)
        self._counts = counts
        self._parting = parting
        self._stay = stay
        self._parted: OrderedDict[bytes, None] = OrderedDict()
        """Keys at which prompts diverge."""

    def note_fork(self, key: Keys) -> None:
        """Note that prompts diverge here, though no checkpoint follows yet."""
        self._parted[key.tobytes()] = None
        if len(self._parted) > _PARTED:
            self._parted.popitem(last=False)

    def enforce(self, index: StateIndex, path: Path, tier: Tier, count: int) -> None:
        """Enforce the bound after a checkpoint was added at position `count` of a path, which may
        continue."""
        if self._most is not None:
            with contextlib.suppress(LightcacheError):  # the next addition enforces it
                self._enforce(index, path, tier, count, self._most)

    def _enforce(self, index: StateIndex, path: Path, tier: Tier, count: int, most: int) -> None:
        space, keys = path.space.of(tier), path.keys
        stay = tier is Tier.HOST or self._stay
        present = _standing(index, keys, space, most + _SUPERSEDED if stay else len(keys))
        excess = len(present) - most
        if excess <= 0:
            return
        children = index.children(keys[present], namespace=space)
        children = np.maximum(children, self._parting_after(path, present))
        forks = self._forks(children, keys[present])
        others = [i for i, fork in zip(present[:-1].tolist(), forks, strict=False) if not fork]
        others.sort(key=lambda position: position == count - 1)
        if stay and others:
            self._counts.update(bounded=index.evict_first(keys[others[:excess]], namespace=space))
            return
        for i in others:
            if excess and index.drop(keys[i : i + 1], namespace=space):
                self._counts.update(bounded=1)
                excess -= 1

    def _parting_after(self, path: Path, present: Positions) -> Pages:
        """The maximum number of continuations of KV between each checkpoint and the next, from any
        process, even if the checkpoints of other branches have been evicted."""
        if self._parting is None:
            return np.zeros(len(present), np.int32)
        return np.maximum.reduceat(self._parting(path), present)

    def _forks(self, children: Pages, keys: Keys) -> list[bool]:
        """Which of these are forks, or were: prompts still diverge at a fork whose branches the
        bound has evicted, and only this record shows it."""
        forks = []
        for count, key in zip(children.tolist(), keys, strict=True):
            if count > 1:
                self.note_fork(key)
            forks.append(key.tobytes() in self._parted)
        return forks


def last_ready(index: StateIndex, parts: list[Keys], space: Namespace) -> list[int]:
    """For each prompt, the number of keys up to its last checkpoint in one tier. A single one is
    looked up directly: joining arrays would cost more than the lookup."""
    if len(parts) == 1:
        return [index.last_ready(parts[0], namespace=space)]
    keys, offsets = joined(parts)
    positions: list[int] = index.last_ready_many(keys, offsets, namespace=space).tolist()
    return positions


def _standing(index: StateIndex, keys: Keys, space: Namespace | None, most: int) -> Positions:
    """Positions of the last `most` checkpoints on a path, ascending. They are few among thousands
    of keys, so `last_ready` steps from one to the next, 5 ns a key in all."""
    positions: list[int] = []
    end = len(keys)
    while len(positions) < most and (end := index.last_ready(keys[:end], namespace=space)):
        end -= 1
        positions.append(end)
    return np.array(positions[::-1], np.int64)


# ---- Checkpoints

_NEW, _PRESENT = int(KeyStatus.NEW), int(KeyStatus.PRESENT)
Found = tuple[Tier, int]
"""A tier, and how many positions of a path end with the checkpoint there: 1 or more."""


class Checkpoints:
    """Device slots and host pages of states, each tier with its own index, order of eviction and
    capacity; either may be missing. They and the KV indexes do not refer to each other.

    A slot is HELD by this process while a request writes it. `donate` gives it a key and so makes
    it a checkpoint, which never changes again. Unused checkpoints are evicted when room is needed,
    least recently used first. Only `close` waits for bytes.
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
        run: Run = PLAIN,
        storage: BaseTier | None = None,
        time_limit: float = 0.02,
        parting: Callable[[Path], Pages] | None = None,
    ) -> None:
        """The caller closes all arguments, after this object.

        Args:
            slots: an independent index whose pages are the device's slots, for checkpoints and for
                running requests; None: the engine has and numbers slots for running requests only.
            host: an independent cache whose pages are states, or with `run` the cache of KV; None:
                none. Without slots and host there are no checkpoints.
            backend: moves bytes between slots and host pages; a page holds one token, the slot.
            copier: copies from slot to slot.
            write: THROUGH: write a checkpoint to the host immediately; BACK: when the device needs
                its slot. Always THROUGH without a device, or with a storage, which is written from
                the host.
            most: maximum number of checkpoints on one path of either tier; beyond it the first
                ones, except forks, are evicted from the device, and are the first to be evicted on
                the host. A conversation continues from its last checkpoint, so other conversations
                use the slots of earlier ones better (docs/benchmarks.md). None: no bound.
            low_water: slots to keep free by writing back early. None: with BACK a fiftieth of all,
                at least 1; else none.
            run: the group of the states in KV's cache, and the pages that each takes there; then
                states are in the namespaces of KV, count for its quotas, and go in one order of
                eviction with it. The default: a cache of states alone.
            storage: a `StorageTier` or `StorageClient` of the host cache; None: none.
            time_limit: maximum seconds that a call waits for a lock.
            parting: the number of KV pages that continue each position of a path, as
                `PageIndex.children` of the KV index: prompts of any process diverge where it is two
                or more. None: only children of checkpoints count.

        Raises:
            ConfigError: arguments that conflict, or an index that is not independent.
        """
        shared = run.group != 0
        for index in (slots, None if host is None or shared else host.index):
            if index is not None and not index.independent:
                raise ConfigError(
                    f"checkpoints: expected indexes made with independent=True, found {index}; "
                    "else "
                    "the last checkpoints would be evicted first"
                )
        if host is not None and backend is None:
            raise ConfigError("checkpoints: a host cache needs a transfer backend; give backend=")
        check_run(backend, run)
        if write not in (WritePolicy.THROUGH, WritePolicy.BACK):
            raise ConfigError(f"write: expected THROUGH or BACK, found {write!r}")
        if storage is not None and host is None:
            raise ConfigError("checkpoints: storage is read and written through a host cache")
        self.slots, self.host, self.copier, self.storage = slots, host, copier, storage
        self.run = run
        self.groups = ((Rule.point(), run),)
        """What storage has of a checkpoint."""
        self.host_states: StateIndex | None = None
        """The states of the host."""
        if host is not None:
            self.host_states = GroupIndex(host.index, run) if shared else host.index
        both = zip(Tier, (slots, self.host_states), strict=True)
        self.tiers = [(tier, tier.value, index) for tier, index in both if index is not None]
        """The existing tiers, their names and indexes; the device first."""
        self._indexes = {tier: index for tier, _, index in self.tiers}
        self.write = write if slots is not None else WritePolicy.THROUGH
        if low_water is None:
            low_water = _low_water(slots) if self.write is WritePolicy.BACK else 0
        self.low_water = _arguments.count(low_water, "low_water", 0, 1 << 20)
        self.lock = threading.RLock()
        self.counts: Counter[str] = Counter()
        """Also of a manager's requests and of its other groups, with names of their own."""
        self.spaces = StateSpaces(slots, host, shared)
        self._backend, self._time_limit = backend, time_limit
        self.transfers = TransferTracker(self.lock, time_limit)
        """Between slots and host pages, and launches from slot to slot."""
        self.back = StateWriteBack(self)
        self._planned: dict[Hashable, Tier] = {}
        self.most = most
        back = self.write is WritePolicy.BACK and host is not None
        self._bound = PathBound(most, self.counts, parting, stay=not back)
        self.loose: list[int] = []
        """Slots without an owner: on their way to a key, or to be freed. A slot enters in the
        instruction in which it leaves its owner. What an interrupt has left here is freed by the
        next `poll`, and before any slot is acquired, while no request can have it. Under `lock`."""
        self._naming: NamingResult | None = None
        """The core's answer, until its pin is taken over."""

    # ---- lookup

    def last_ready(
        self, path: Path, most: int | None = None, *, tiers: frozenset[str] | None = None
    ) -> Found | None:
        """The last checkpoint among the first `most` positions of a path, on the device, or on the
        host if that has a later one; None: there is none. Pins nothing, and is not a use. No lock;
        about 5 ns a position.

        Args:
            tiers: "device", "host": the tiers to look in; None: both.
        """
        best: Found | None = None
        keys, first = path.keys[:most], 0
        for tier, name, index in self.tiers:
            if first == len(keys) or (tiers is not None and name not in tiers):
                continue
            rest, space = keys[first:] if first else keys, path.space
            where = space.device if tier is Tier.DEVICE else space.host
            position = index.last_ready(rest, namespace=where)
            if position:
                first += position
                best = tier, first
        return best

    def plan(self, request: Hashable, path: Path, found: Found, ttl: float) -> bool:
        """Pin a checkpoint tentatively, and drop the request's earlier plan; returns False if the
        checkpoint is gone. `take` returns it as a lease; the plan expires `ttl` seconds after the
        last call for it."""
        tier, count = found
        if self._planned.get(request, tier) is not tier:
            self.cancel(request)
        index = self._indexes[tier]
        self._planned[request] = tier
        key, space = path.keys[count - 1 : count], path.space
        where = space.device if tier is Tier.DEVICE else space.host
        return bool(index.plan(request, key, namespace=where, timeout=ttl, frozen=True))

    def take(self, request: Hashable) -> tuple[Tier, Lease] | None:
        """The planned checkpoint, as a lease; None: there is no plan, or it was cleared meanwhile.

        Raises:
            LeaseLost: the plan has expired.
        """
        tier = self._planned.pop(request, None)
        if tier is None:
            return None
        index = self._indexes[tier]
        lease = index.take(request)
        if len(lease):
            return tier, lease
        lease.release()
        return None

    def cancel(self, request: Hashable) -> None:
        """Drop a plan. Harmless if there is none."""
        tier = self._planned.pop(request, None)
        if tier is not None:
            self._indexes[tier].cancel(request)

    # ---- slots

    def acquire(self, n: int) -> Allocation:
        """n slots for a running request to write; evicts checkpoints if needed. With write-back
        the next ones to evict are written to the host first, if that takes no time; otherwise
        others are evicted without a host copy, and counted as `demotions_lost`.

        Leaving the result's `with`, or dropping it, frees the slots that were not donated; `detach`
        it to keep their numbers.

        Raises:
            OutOfPages: fewer than n are free; none was taken.
            LockTimeout: none was taken.
            ConfigError: the engine has its own slots.
        """
        if self.slots is None:
            raise ConfigError("acquire: there are no device slots here; give the engine's own")
        if n > self.slots.pages:
            raise OutOfPages(
                f"acquire: expected at most {self.slots.pages} slots, all there are, found {n}"
            )
        with self.lock:
            self._free_loose(self.loose[:], self.slots)
            if self.write is WritePolicy.BACK and self.host is not None:
                self._make_room(n, self.slots)
            slots = self.slots.allocate(n)
            self.back.overwritten(slots.pages)
            return slots

    def _make_room(self, n: int, slots: PageIndex) -> None:
        """Slots being written back are pinned, so write back only if enough other slots remain."""
        missing = n - slots.stats().free
        if missing > 0 and slots.can_allocate(n + missing):
            with contextlib.suppress(LightcacheError):  # then they are evicted without a host copy
                self.back.demote(missing)

    def free(self, slots: Pages) -> None:
        """Give back slots that were acquired and not donated. No copy may touch them.

        Raises:
            LeaseLost: this process does not hold some of them; none was given back.
        """
        if len(slots) and self.slots is not None:
            self.slots.free(slots)

    # ---- donation

    def donate(
        self,
        slot: int,
        path: Path,
        count: int,
        *,
        host: bool = True,
        fork: bool = False,
        of: list[BlockTransfer] | None = None,
        on_end: OnEnd | None = None,
    ) -> BlockTransfer | None:
        """Turn a slot's state into the checkpoint at position `count`; nothing is copied. The cache
        owns the slot from then on: the caller must not write, read or free it. If another slot
        holds that state already, this one is freed.

        Its content must be complete for work launched after this call on the computing stream.

        Without device slots the state is copied to the host. The caller keeps the slot, and must
        not write it until the copy has finished.

        Args:
            host: whether it may go to the host.
            fork: prompts diverge here, though no checkpoint follows yet: the bound spares it.
            of: without device slots: the slot owner's list of copies; the copy is appended before
                it begins, so that no interrupt hides it.
            on_end: called when the copy has finished, perhaps twice.

        Returns:
            The copy to the host that reads the slot, if one was begun.

        Raises:
            LeaseLost: this process does not hold the slot.
        """
        with self.lock:
            if fork:
                self._bound.note_fork(path.key(count))
            if self.slots is None:
                return self.offload(slot, path, count, of=of, on_end=on_end) if host else None
            if slot not in self.loose:
                self.loose.append(slot)
            self._name(slot, path, count, self.slots)
            pins = self._pin(self.slots)
            if pins is None:
                self.counts.update(refused=1)
                self.give_back([slot])
                return None
            self.loose.remove(slot)
            pinned = int(pins.pages[0])
            self.counts.update(donated=int(pinned == slot), merged=int(pinned != slot))
            transfer = None
            if host:
                self.back.note(pinned, path, count)
            at_once = self.write is WritePolicy.THROUGH or self.storage is not None
            if host and at_once and self.host is not None:
                transfer = self.offload(pinned, path, count, pins=pins)
            else:
                pins.release()
            self._bound.enforce(self.slots, path, Tier.DEVICE, count)
            return transfer

    def _name(self, slot: int, path: Path, count: int, slots: PageIndex) -> None:
        """Name a slot, if that is possible: `_pin` tells."""
        self._drop_pin(slots)
        space, naming = path.space.device, NamingResult(1)
        try:
            chain = self.chain(Tier.DEVICE, path, count)
            if len(chain) > 1:  # its parent counts as used, and before it
                slots.reserve(chain[:1], 1, namespace=space).release()
            self._naming = naming
            slots.name_pages(
                np.array([slot], np.int32), chain, len(chain) - 1, namespace=space, into=naming
            )
        except LeaseLost:  # the caller's mistake
            self.loose.remove(slot)
            raise
        except LightcacheError:  # weights cleared, lock timeout, or disabled
            pass

    def _pin(self, slots: PageIndex) -> Lease | None:
        """The pin of the slot under the key that was named last. None: naming failed, or the pin
        was taken over before."""
        naming = self._naming
        if naming is None or naming.status[0] not in (_NEW, _PRESENT):
            self._naming = None
            return None
        pins, take = Lease.attached_to(slots.core, naming.pages)
        together(take, partial(setattr, self, "_naming", None))
        return pins

    def _drop_pin(self, slots: PageIndex) -> None:
        """Release the pin of a `donate` that was interrupted."""
        pins = self._pin(slots)
        if pins is not None:
            pins.release()

    def give_back(self, slots: list[int]) -> None:
        """As `free`, now or as soon as the lock is available. Empties the list in the instruction
        in which the slots become loose: so it may be repeated after an interrupt."""
        if self.slots is None:
            return
        with self.lock:
            given = slots[:]
            new = [slot for slot in slots if slot not in self.loose]
            together(partial(self.loose.extend, new), partial(slots.clear))
            with contextlib.suppress(LightcacheError):
                self._free_loose(given, self.slots)

    def _free_loose(self, loose: list[int], slots: PageIndex) -> None:
        """Free these of the loose slots. May be repeated after an interrupt.

        Raises:
            LockTimeout, Detached: they stay loose.
        """
        self._drop_pin(slots)
        if not loose:
            return
        try:
            slots.free(np.array(loose, np.int32))
        except LeaseLost:  # an interrupted call has freed or named some of them
            for slot in loose:
                with contextlib.suppress(LeaseLost):
                    slots.free(np.array([slot], np.int32))
        self.loose[:] = [slot for slot in self.loose if slot not in loose]

    def chain(self, tier: Tier, path: Path, count: int) -> Keys:
        """The key of a new checkpoint, preceded by that of the last checkpoint before it."""
        index = self._indexes[tier]
        before = index.last_ready(path.keys[: count - 1], namespace=path.space.of(tier))
        if not before:
            return path.key(count)
        return np.concatenate([path.key(before), path.key(count)])

    # ---- copies between slots and the host, and their pins

    def offload(
        self,
        slot: int,
        path: Path,
        count: int,
        *,
        pins: Lease | None = None,
        of: list[BlockTransfer] | None = None,
        on_end: OnEnd | None = None,
    ) -> BlockTransfer | None:
        """Write a slot's state to the host, under the key of position `count`. None: the host has
        it already, or has no room.

        Args:
            pins: pins of the slot for this copy: released when it has finished or did not begin.
            of, on_end: as for `TransferTracker.begin`.
        """

        def let_go(ok: bool) -> None:
            if pins is not None:
                pins.close()
            if on_end is not None:
                on_end(ok)

        def on_result(ok: bool, _: int | None) -> None:
            self.counts.update(**{"offloads" if ok else "failed_offloads": 1})
            if ok:
                self.reached_host(path, count)

        with self.lock:
            new = None
            try:
                new = self._reserved(path, count)
            finally:
                if new is None:
                    let_go(False)
            if new is None:
                return None
            position = int(new.new[0]) // self.run.parts
            slots = np.full(position + 1, -1, np.int64)
            slots[-1] = slot
            touched, backend = np.array([slot], np.int32), self._backend
            assert backend is not None
            return self.transfers.begin(
                touched, backend, backend.offload, new, (slots,), on_result, of=of, on_end=let_go
            )

    def _reserved(self, path: Path, count: int) -> Reservation | None:
        assert self.host_states is not None
        assert self._backend is not None
        try:
            chain = self.chain(Tier.HOST, path, count)
            new = self.host_states.reserve(
                chain,
                len(chain) - 1,
                shards=self._backend.shards,
                namespace=path.space.host,
                timeout=self._time_limit,
            )
        except LightcacheError:
            self.counts.update(failed_offloads=1)
            return None
        if len(new.pages):
            return new
        self.counts.update(no_room=int(len(new.missing) > 0))
        new.release()
        return None

    def load(self, lease: Lease, slot: int, **known: Any) -> BlockTransfer:
        """Load a host page's state into a slot. The transfer takes over the lease.

        Args:
            known: of, into, instead_of, as for `TransferTracker.begin`.
        """
        backend = self._backend
        assert backend is not None

        def on_result(ok: bool, _: int | None) -> None:
            self.counts.update(**{"loads" if ok else "failed_loads": 1})

        where, touched = np.array([slot], np.int64), np.array([slot], np.int32)
        with self.lock:
            return self.transfers.begin(
                touched, backend, backend.load, lease, (where, 0), on_result, **known
            )

    def demote(self, n: int) -> int:
        """Begin to write back up to n device checkpoints, least recently used first, and free their
        slots. Checkpoints whose host copy fails stay, and count as just used. Returns the number
        being written back."""
        with self.lock:
            return self.back.demote(n)

    # ---- checkpoints of a path, independent of requests

    def protect(self, path: Path) -> int:
        """Protect the last checkpoint of a path, in each tier, from eviction until `unprotect` or
        a clear. Returns how many are protected: 0 to 2.

        Raises:
            Detached, LockTimeout: as `PageIndex.protect`.
        """
        kept = 0
        for tier, _, index in self.tiers:
            namespace = path.space.of(tier)
            count = index.last_ready(path.keys, namespace=namespace)
            kept += index.protect(path.key(count), namespace=namespace) if count else 0
        return kept

    def unprotect(self, path: Path) -> int:
        """Undo `protect` for all checkpoints of a path. Returns how many were protected; errors as
        `protect`."""
        return sum(
            index.unprotect(path.keys, namespace=path.space.of(tier))
            for tier, _, index in self.tiers
        )

    def drop(self, path: Path, first: int = 0) -> int:
        """Evict the checkpoints after the first `first` positions of a path, except those in use
        and protected ones. Returns how many were evicted, in both tiers; errors as `protect`."""
        dropped = 0
        for tier, _, index in self.tiers:
            namespace = path.space.of(tier)
            for position in _standing(index, path.keys, namespace, len(path.keys)).tolist():
                if position >= first:
                    dropped += index.drop(path.key(position + 1), namespace=namespace)
        return dropped

    # ---- upkeep

    def in_flight(self, slots: Pages | Sequence[int] | None = None) -> Any:
        """Which of these slots a copy reads or writes, or will once transfers are resumed: bool of
        their shape. None: the number of transfers and launches, as `poll`."""
        with self.lock:
            going, busy = self._poll(), self.transfers.busy
            return going if slots is None else busy(np.ascontiguousarray(slots, np.int32))

    def _poll(self) -> int:
        """Notice finished copies and begin waiting ones. Returns the number in flight."""
        self.transfers.poll()
        self.back.poll()
        return self.transfers.in_flight

    def clear(self, weights: str, tenant: str | None = None, *, everywhere: bool = True) -> None:
        """Clear a version, or one of its tenants: the spaces opened here and, if `everywhere`,
        those on the host that other processes opened."""
        with self.lock:
            if everywhere and self.host is not None and self.run == PLAIN:
                clear_states(self.host, weights, tenant)
            self.spaces.clear(weights, tenant)

    def poll(self) -> int:
        """Call in each step: notices finished copies, begins waiting ones. Returns the number in
        flight. Raises exceptions of a transfer backend, copier or storage that are not
        LightcacheErrors, as `KVCacheManager.poll` does."""
        with self.lock:
            self.give_back(self.loose[:])
            if self.slots is not None and self.low_water and self.host is not None:
                missing = self.low_water - self.slots.stats().free - self.back.blocks
                with contextlib.suppress(LightcacheError):  # later, when the indexes answer
                    self.back.demote(missing)
            going = self._poll()
            self.transfers.foreign.raise_first()
            return going

    def reached_host(self, path: Path, count: int) -> None:
        """Note that a checkpoint is on the host. Exceptions of a storage that are not
        LightcacheErrors are raised by `poll`, since this may run within any call that looks for
        finished copies."""
        if self.storage is not None:
            key = np.ascontiguousarray(path.key(count))
            try:
                with contextlib.suppress(LightcacheError):
                    self.storage.write(self.run.keys(key), namespace=path.space.host)
            except Exception as error:
                self.transfers.foreign.note(error)
        if self.host_states is not None:
            self._bound.enforce(self.host_states, path, Tier.HOST, count)

    def stats(self) -> CheckpointStats:
        """Counters of this process."""
        with self.lock:
            return CheckpointStats(**{name: self.counts[name] for name in _NAMES})

    def room(self) -> dict[str, TierCapacity]:
        """Slots and host pages: total, free, and available."""
        rooms = {name: _room(index) for _, name, index in self.tiers}
        return {tier.value: rooms.get(tier.value, capacity_of(None)) for tier in Tier}

    def close(self, timeout: float | None = 10.0) -> None:
        """Wait for copies, give everything back.

        Raises:
            WaitTimeout: a copy is still in flight; call again.
            As `poll`, when all of this is done.
        """
        with self.lock:
            for request in list(self._planned):
                self.cancel(request)
            self.give_back(self.loose[:])
            self.transfers.paused = False
            self.transfers.poll()
        self.transfers.wait(None, timeout)
        with self.lock:
            self._poll()
            self.back.close()
            self.transfers.foreign.raise_first()


def _room(index: StateIndex) -> TierCapacity:
    if isinstance(index, PageIndex):
        return capacity_of(index)
    parts, all_pages = index.run.parts, capacity_of(index.index)
    return TierCapacity(*(pages // parts for pages in astuple(all_pages)))


def _low_water(slots: PageIndex | None) -> int:
    return 0 if slots is None else max(1, slots.pages // 50)


__all__ = [
    "PATH_LIMIT",
    "CheckpointStats",
    "Checkpoints",
    "Found",
    "Path",
    "PathBound",
    "StateSpace",
    "StateSpaces",
    "StateWriteBack",
    "Tier",
    "clear_states",
    "last_ready",
]

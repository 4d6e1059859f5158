"""Requests: prompt, options, match, and the state of a running request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache._arguments import Keys, Pages, count, hint, pages
from lightcache.errors import ConfigError
from lightcache.hashing import KeySpec, PageHasher, Tokens, pack_tokens
from lightcache.kernels.moves import slots_of_blocks
from lightcache.layout import Hint
from lightcache.leases import Lease
from lightcache.manager.blocks import NO_KEYS, NONE, DeviceTier
from lightcache.manager.stats import Counters
from lightcache.namespaces import Namespace
from lightcache.prompt import MultimodalItem, Prompt, TokenIds

if TYPE_CHECKING:
    from lightcache.manager.transfers import BlockTransfer


# ---- Match, request options, manager configuration

TIERS = frozenset({"device", "host", "storage"})
DEVICE_ALONE = frozenset({"device"})
"""Tiers of a manager without a host cache."""
_LOW_WATER = 0.02  # of a device's blocks; a decode step takes less, and a prefill waits once


class MissReason(Enum):
    """Why less than what was found is usable."""

    NOTHING = "all that was found is usable"
    ITEM = "a multimodal item would have been cut"
    BREAK_EVEN = "computing is faster than loading so few pages"
    OPTIONS = "the request does not read, or not from this tier"
    WEIGHTS = (
        "the weights are being changed, another process has cleared their version, or no namespace "
        "is left for the tenant"
    )
    DISABLED = "the manager has disabled itself"
    LOAD_SKIPPED = "there was no room to load it: `KVCacheManager.skip_load`"


@dataclass(frozen=True)
class PrefixMatch:
    """Tokens of a prompt that each tier has. The tiers do not overlap: each counts only what those
    before it do not have."""

    tokens: int
    """Length of the prompt."""
    device: int = 0
    """In device blocks, whole blocks."""
    host: int = 0
    """After these, in host pages."""
    storage: int = 0
    """After these, in storage; includes what was already read to the host for this request."""
    usable: int = 0
    """Tokens that the request need not compute if it takes and loads: never more than the sum,
    never the whole prompt."""
    why: MissReason = MissReason.NOTHING
    """Why `usable` is less than the sum."""
    cut: MultimodalItem | None = None
    """The item that would have been split."""
    pending: bool = False
    """A storage lookup or read is in flight: planning again may find more."""

    waits_for: Hashable | None = None
    """A running request that computes the next part of this prefix: with `same_prefix="wait"`,
    plan again later instead of computing it too. None after `wait_limit`."""

    @property
    def found(self) -> int:
        """Tokens in all tiers together."""
        return self.device + self.host + self.storage

    @property
    def load(self) -> int:
        """Tokens to load to the device."""
        return max(0, self.usable - self.device)


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the cache."""

    read: bool = True
    """False: match nothing, as for prompt log-probabilities."""
    write: bool = True
    """False: publish nothing of the request, on the device neither."""
    tiers: frozenset[str] = TIERS
    """Tiers that it may read from and be written to."""
    priority: int = 0
    """Decides when pages are written, and nothing else. 0: by the write policy. 1: each page is
    written to the host as it fills, under SELECTIVE at first sight too; under BACK as with 0. -1:
    what the request computed is not written to the host.

    Pages are evicted in the order of their index, "hz" or "lru", whatever the priority.
    `KVCacheManager.protect` keeps a prompt, `drop` evicts one at once, and a tenant's quota and
    minimum say how many pages it may have at most and keeps at least."""
    ttl: float | None = None
    """Seconds after which its plan expires; None: `ManagerConfig.plan_ttl`."""
    output: bool = True
    """False: only the prompt is published, not the generated tokens."""
    hint: Hint = Hint.NONE
    """What is expected to follow this request, for its new pages on the host. What a hint is worth
    is learned, with the host's eviction "hz"; with "lru" it says nothing."""

    def within(self, tiers: frozenset[str]) -> RequestOptions:
        """The same options, limited to these tiers."""
        return self if self.tiers <= tiers else replace(self, tiers=self.tiers & tiers)

    def __post_init__(self) -> None:
        wrong = set(self.tiers) - TIERS
        if wrong:
            raise ConfigError(f"tiers: expected some of {sorted(TIERS)}, found {sorted(wrong)}")
        object.__setattr__(self, "tiers", frozenset(self.tiers))
        count(self.priority, "priority", -1, 1)
        if self.ttl is not None and not self.ttl > 0:
            raise ConfigError(f"ttl: expected seconds > 0, found {self.ttl!r}")
        object.__setattr__(self, "hint", hint(self.hint))


ANY = RequestOptions()


class WritePolicy(Enum):
    """When full pages of a request are written to the host. Storage is written from host pages,
    after `release`; so with a storage all are written at `release` at the latest, whatever the
    policy."""

    THROUGH = "through"
    """When `ManagerConfig.write_group` pages have filled, when the prompt is complete, and the rest
    at `release`. With a priority above 0: after each `commit`."""
    BACK = "back"
    """When the device needs room."""
    SELECTIVE = "selective"
    """As THROUGH, but without a priority above 0 only pages that were requested before
    (`ManagerConfig.seen`)."""


@dataclass(frozen=True)
class ManagerConfig:
    """Policy and limits of a manager."""

    write: WritePolicy = WritePolicy.THROUGH
    write_group: int = 8
    """Pages of a request that are written together; the rest is written when it ends."""
    seen: int = 2
    """SELECTIVE: a page is written when it is requested for the `seen`-th time."""
    admission: bool = False
    """True: pages of KV that are not worth what would go for them on the host are not written there
    (`PageIndex.reserve`), nor is what follows them in their request; with the host's eviction "hz".
    A request that may be written to storage is written all the same: storage is written from host
    pages, and has rules of its own."""
    plan_ttl: float = 10.0
    """Seconds that a plan pins what it found; at least half of them after each call of `plan`."""
    reserve_blocks: int = 0
    """Decode reserve: blocks that a running request has beyond its tokens."""
    min_load_tokens: int | None = None
    """Compute fewer tokens than this instead of loading them; None: as the costs say, 0: always
    load."""
    low_water: float | None = None
    """BACK: share of the device's blocks that is kept free by writing back ahead of need; None: a
    fiftieth. If none are free, `allocate` first writes back the blocks it needs."""
    time_limit: float = 0.02
    """Seconds that a call waits for the lock of a tier, at most once a second. The call is then a
    miss, or a later call does its work. No call takes two tiers' locks more than once."""
    failures: int = 3
    """Errors in a row after which the manager disables itself; also, copies to the host that failed
    in a row after which no further ones are made."""
    offload_retry: float = 30.0
    """Seconds after that until one copy to the host is tried."""
    same_prefix: str = "compute"
    """For a request whose prefix another request is computing: "compute" it too, or "wait"."""
    wait_limit: float = 5.0
    """Seconds that a request waits with "wait"; then it computes."""
    window: int = 1000
    """Number of last requests that `KVCacheManager.recent_stats` covers."""

    def __post_init__(self) -> None:
        if type(self.write) is not WritePolicy:
            raise ConfigError(f"write: expected a WritePolicy, found {self.write!r}")
        count(self.write_group, "write_group", 1, 1 << 20)
        count(self.seen, "seen", 1, 1 << 10)
        if type(self.admission) is not bool:
            raise ConfigError(f"admission: expected True or False, found {self.admission!r}")
        count(self.reserve_blocks, "reserve_blocks", 0, 1 << 20)
        count(self.failures, "failures", 1, 1 << 20)
        count(self.window, "window", 1, 1 << 20)
        for name in ("plan_ttl", "time_limit", "wait_limit", "offload_retry"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected seconds > 0, found {getattr(self, name)!r}")
        if self.low_water is not None and not 0 <= self.low_water < 1:
            raise ConfigError(
                f"low_water: expected a share from 0 to less than 1, found {self.low_water!r}"
            )
        if self.same_prefix not in ("compute", "wait"):
            raise ConfigError(
                f"same_prefix: expected 'compute' or 'wait', found {self.same_prefix!r}"
            )

    @property
    def kept_free(self) -> float:
        """`low_water`, or its default."""
        if self.low_water is None:
            return _LOW_WATER if self.write is WritePolicy.BACK else 0.0
        return self.low_water


# ---- Running requests

_MANY = 64  # single keys from which an array is worth its cost

# Kinds of blocks in a request's table (managed blocks).
HELD, PINNED, LEASED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class CacheScope:
    """Namespaces and key specs of one weights version and tenant, in every tier."""

    weights: str
    tenant: str
    host: Namespace
    device: Namespace | None
    host_spec: KeySpec
    device_spec: KeySpec
    """The same object as `host_spec` if both tiers have the same page size."""


class Chain:
    """The keys of a growing sequence, for one page size."""

    def __init__(self, prompt: Prompt, spec: KeySpec) -> None:
        """Nothing is hashed before a key is asked for."""
        self._prompt, self._spec = prompt, spec
        self._known: Keys | None = None
        self._room: Keys = NO_KEYS
        self._more: list[bytes] = []
        """Keys after `_known`, put into the array when one is asked for."""
        self._hasher: PageHasher | None = None
        self._late = b""
        """Appended tokens that are not hashed yet."""

    @property
    def keys(self) -> Keys:
        """Keys of all complete pages, shape (n, 2)."""
        if self._late:
            self._hash_late()
        before = self._known if self._known is not None else self._begin()
        if self._more:
            known = len(before)
            count = known + len(self._more)
            if count > len(self._room):  # the prompt's own keys have no room
                self._room = np.empty((2 * count, 2), np.uint64)
                self._room[:known] = before
            self._room[known:count] = np.frombuffer(b"".join(self._more), np.uint64).reshape(-1, 2)
            self._known = before = self._room[:count]
            self._more = []
        return before

    def packed(self, begin: int, end: int) -> list[bytes]:
        """The bytes of keys [begin, end), in pieces: cheap for recently made keys."""
        if self._late:
            self._hash_late()
        before = self._known if self._known is not None else self._begin()
        if len(self._more) > _MANY:
            before = self.keys
        known = len(before)
        if begin >= known:
            return self._more[begin - known : end - known]
        pieces = self._more[: end - known] if end > known else []
        return [before[begin:end].tobytes(), *pieces]

    def extend(self, tokens: bytes) -> None:
        """Append generated tokens, packed by `pack_tokens`. They are hashed when a key is asked
        for."""
        self._late += tokens

    def unfilled(self, page: int) -> bytes:
        """Packed tokens after the last complete page, if the chain has hashed exactly `page` pages;
        else empty: they are not known any more."""
        hasher = self._hasher
        if hasher is None or hasher.pages != page:
            return b""
        return hasher.tail

    def _hash_late(self) -> None:
        if self._hasher is None:
            self._hasher = self._prompt.hasher(self._spec)
        self._more += self._hasher.append_packed(self._late)
        self._late = b""

    def _begin(self) -> Keys:
        """The prompt's keys, hashed if they are not yet."""
        self._known = self._room = self._prompt.keys(self._spec)
        return self._known


class NoChain(Chain):
    """A chain without keys: for a request whose cache lookup failed."""

    def __init__(self) -> None:
        """Empty, for good."""
        self._known = NO_KEYS
        self._more = []
        self._late = b""

    def extend(self, tokens: bytes) -> None:
        """Does nothing."""


def keys_of(packed: list[bytes]) -> Keys:
    """An array of the pieces of `Chain.packed`, shape (n, 2)."""
    return np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)


@dataclass(eq=False)
class Delivery:
    """Whether a call reached its return, so its caller has the result."""

    done: bool = False


@dataclass(eq=False)
class Owed:
    """Blocks that the caller must exchange in its table, position -> block."""

    changed: Mapping[int, int]
    delivery: Delivery | None = None
    """The last call that returned them, or tried to; None: no call yet."""

    @property
    def told(self) -> bool:
        """Whether the caller knows."""
        return self.delivery is not None and self.delivery.done

    def by(self, delivery: Delivery) -> Mapping[int, int]:
        """The blocks, for a call that returns them with this delivery; none if the caller knows."""
        if self.told:
            return {}
        self.delivery = delivery
        return self.changed


StoredWith = Callable[[Keys, CacheScope], Keys]
"""What storage gets of a request's KV: what is of use there, and pages of other groups."""


@dataclass(eq=False)
class Request:
    """One request, from `take` until `release`."""

    id: Hashable
    prompt: Prompt
    options: RequestOptions
    space: CacheScope | None
    """None: the cache failed when the request began; nothing of it is found or published."""
    match: PrefixMatch
    device_chain: Chain
    host_chain: Chain
    hit: Lease | None = None
    """Device blocks that were found; managed blocks."""
    host: Lease | None = None
    """Host pages that were found, until they are loaded."""
    host_first: int = 0
    """Position of the first of these pages in the host's keys."""
    table: Pages = field(default_factory=lambda: NONE)
    """Device blocks, in order of their tokens."""
    kind: bytearray = field(default_factory=bytearray)
    """HELD, PINNED or LEASED, for each block of the table."""
    named: int = 0
    """Leading blocks that were named, or whose naming was tried."""
    written: int = 0
    """Leading host pages that are there, are being written, or whose write was tried."""
    unwritten: int = 0
    """Host pages up to this position include some whose write was tried and did not happen, or that
    another request was writing; 0: none. See `Offloader`."""
    known: int = 0
    """Tokens whose ids are known: the prompt's and those reported."""
    total: int = 0
    """Tokens computed and accepted."""
    transfers: list[BlockTransfer] = field(default_factory=list)
    """Copies that touch its blocks, offloads included."""
    loading: BlockTransfer | None = None
    """The one of these that loads the host pages."""
    begun: float = 0.0
    """Time of `take`; 0: the time that its prompt takes is not to be noted any more."""
    loaded: bool = False
    """`load` was called."""
    counted: Counters = field(default_factory=Counters)
    """What it added to the manager's counters."""
    aborted: bool = False
    """It ended without its queued copies to the host, and its pages are not written to storage."""
    owed: Owed | None = None
    """Blocks that the last commit exchanged in its table."""
    sound: Callable[[], bool] | None = None
    """Returns False if a load that this KV depends on failed. None: the KV is valid."""
    generated: bytearray | None = None
    """Ids of the tokens after its prompt, packed. None: not kept, as the host notes no ids, or
    they alone do not decide the keys."""
    stored_with: StoredWith | None = None
    """Returns the keys of what storage gets when it ends, given those of its pages. None: its pages
    alone."""
    on_device: bool = field(init=False)
    """Whether its blocks are named."""

    def __post_init__(self) -> None:
        wanted = self.options.write and "device" in self.options.tiers
        self.on_device = wanted and self.space is not None and self.space.device is not None

    def check(self, total: Any, count: int) -> None:
        """Check a new `total`, with the ids of `count` more tokens.

        Raises:
            ConfigError: less than before, or more than the known tokens.
        """
        if type(total) is not int and not isinstance(total, np.integer):
            raise ConfigError(f"commit {self.id!r}: expected a number of tokens, found {total!r}")
        if not self.total <= total <= self.known + count:
            raise ConfigError(
                f"commit {self.id!r}: expected {self.total} to {self.known + count} computed "
                f"tokens, found {total}; give the ids of what was generated as new_tokens="
            )

    def note(self, total: int, new_tokens: bytes) -> None:
        """Note a new `total` that `check` accepted.

        Args:
            new_tokens: packed by `pack_tokens`.
        """
        if new_tokens:
            self.known += len(new_tokens) // 4
            if self.generated is not None:
                self.generated += new_tokens
            self.device_chain.extend(new_tokens)
            if self.host_chain is not self.device_chain:
                self.host_chain.extend(new_tokens)
        self.total = total

    def token_rows(self, first: int, end: int) -> TokenIds | None:
        """Ids of the tokens of host pages [first, end), a row for each; None: they are not kept."""
        if self.generated is None or self.space is None:
            return None
        size, prompt = self.space.host_spec.page_tokens, self.prompt.tokens
        begin, stop = first * size, end * size
        late = slice(*(4 * max(0, token - len(prompt)) for token in (begin, stop)))
        parts = prompt[begin:stop], np.frombuffer(bytes(self.generated[late]), "<u4")
        return np.concatenate(parts).reshape(-1, size)

    def let_go_of_host(self) -> None:
        """Give back the host pages that were found, unless they are being loaded. Safe to repeat,
        and after the cache was closed."""
        lease = self.host
        if lease is not None:
            lease.close()
            self.host = None  # last: after an interrupt before this, the lease is closed again

    def unfilled(self, begin: int) -> TokenIds:
        """Ids of the computed tokens from `begin`, the end of the last full host page; empty if
        they are not known any more."""
        assert self.space is not None
        if self.total <= len(self.prompt):
            return self.prompt.tokens[begin : self.total]
        packed = self.host_chain.unfilled(begin // self.space.host_spec.page_tokens)
        return np.frombuffer(packed, "<u4")[: self.total - begin]

    @property
    def is_loading(self) -> bool:
        """Whether some of its blocks may not be loaded yet, as of the last poll."""
        return self.loading is not None and not self.loading.finished

    def publishable(self) -> int:
        """Tokens that may be shared: computed, and no longer being loaded."""
        if self.space is None:
            return 0
        total = self.total if self.options.output else min(self.total, len(self.prompt.tokens))
        loads = self.loading is not None and not self.loading.finished
        if loads or (self.sound is not None and not self.sound()):
            return min(total, self.match.device)
        return total


def slots_of(table: Pages, block_tokens: int, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Device slots of tokens [begin, end) of a block table."""
    first = begin // block_tokens
    return slots_of_blocks(
        table[first : -(-end // block_tokens)],
        block_tokens,
        first=begin - first * block_tokens,
        tokens=end - begin,
    )


# ---- Argument checks: a refused call changes nothing


def check_ids(requests: Sequence[Hashable], call: str) -> None:
    """Check the request ids of one call.

    Raises:
        ConfigError: an id occurs twice, or is not hashable.
    """
    if check_hashable(requests, call) != len(requests):
        raise ConfigError(f"{call}: one of the requests is named twice; name each once")


def check_hashable(requests: Sequence[Hashable], call: str) -> int:
    """Check request ids; returns how many different ones there are.

    Raises:
        ConfigError: an id is not hashable.
    """
    try:
        return len(set(requests))
    except TypeError as error:
        raise ConfigError(f"{call}: a request's id has to be hashable: {error}") from None


def check_commits(
    device: DeviceTier,
    running: list[Request],
    totals: Sequence[int],
    new_tokens: Sequence[Tokens | None] | None,
    tables: Sequence[Pages] | None,
) -> tuple[list[bytes], Sequence[Pages] | None]:
    """Check the arguments of a commit. Returns the new tokens, packed, and the converted tables.

    Raises:
        ConfigError: says which request's arguments are wrong, and why.
    """
    n = len(running)
    if len(set(map(id, running))) != n:
        raise ConfigError("commit: one of the requests is named twice; name each once")
    for name, values in (("totals", totals), ("new_tokens", new_tokens), ("tables", tables)):
        if values is not None and len(values) != n:
            raise ConfigError(f"{name}: expected one for each of {n} requests, found {len(values)}")
    packed = [b""] * n
    if new_tokens is not None:
        packed = [
            _packed(request, fresh_tokens)
            for request, fresh_tokens in zip(running, new_tokens, strict=True)
        ]
    for request, total, fresh in zip(running, totals, packed, strict=True):
        if type(total) is not int or not request.total <= total <= request.known + len(fresh) // 4:
            request.check(total, len(fresh) // 4)  # raises an error that says what is wrong
    if tables is not None:
        return packed, [
            check_table(device, request, table, total)
            for request, table, total in zip(running, tables, totals, strict=True)
        ]
    if not device.owned and device.index is not None:
        for request, total in zip(running, totals, strict=True):
            if total and not len(request.table):
                raise ConfigError(
                    f"commit {request.id!r}: the engine owns the blocks; give the request's as "
                    "table="
                )
    return packed, None


def _packed(request: Request, tokens: Tokens | None) -> bytes:
    if tokens is None:
        return b""
    try:
        return pack_tokens(tokens)
    except ConfigError as error:
        raise ConfigError(f"commit {request.id!r}: new_tokens: {error}") from None


def check_table(device: DeviceTier, request: Request, table: Any, total: int) -> Pages:
    """Check and convert a request's block table, of mirrored blocks. Only blocks that can be
    named now are checked.

    Raises:
        ConfigError: no row of block numbers, or a table for managed blocks, which the manager has.
    """
    if device.owned:
        raise ConfigError(
            f"table of {request.id!r}: blocks of ManagedBlocks are those that `allocate` returned; "
            "leave the table out"
        )
    numbers = pages(table)
    fresh = numbers[request.named : total // device.block_tokens]
    if device.index is not None and len(fresh):  # rare while single tokens are generated
        least, largest = int(fresh.min()), int(fresh.max())
        if not 0 <= least <= largest < device.blocks:
            raise ConfigError(
                f"table of {request.id!r}: expected blocks of 0 to {device.blocks - 1}, found "
                f"{least} to {largest}"
            )
    return numbers


__all__ = [
    "ANY",
    "DEVICE_ALONE",
    "HELD",
    "LEASED",
    "NO_KEYS",
    "PINNED",
    "TIERS",
    "CacheScope",
    "Chain",
    "Delivery",
    "ManagerConfig",
    "MissReason",
    "MultimodalItem",
    "NoChain",
    "PrefixMatch",
    "Prompt",
    "Request",
    "RequestOptions",
    "StoredWith",
    "WritePolicy",
    "check_commits",
    "check_hashable",
    "check_ids",
    "check_table",
    "keys_of",
    "slots_of",
]

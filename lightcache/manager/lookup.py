"""Lookup: how much of a prompt is on the device, on the host and in storage.

`plan` of one request, `plan_many` of a queue and `peek_many` share one code path for batches. A
plan pins what it finds, a peek does not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from lightcache._arguments import Keys, Offsets
from lightcache.errors import ConfigError, LeaseLost, LightcacheError, WaitTimeout
from lightcache.leases import Lease
from lightcache.manager.blocks import NO_KEYS
from lightcache.manager.limits import FailOpen, nothing
from lightcache.manager.request import (
    ANY,
    TIERS,
    CacheScope,
    MissReason,
    MultimodalItem,
    PrefixMatch,
    Prompt,
    Request,
    RequestOptions,
    check_ids,
)
from lightcache.manager.state import ManagerState
from lightcache.manager.stats import STORAGE_WAIT
from lightcache.plans import TIMEOUT

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.namespaces import Namespace
    from lightcache.page_index import PageIndex
    from lightcache.storage.tasks import StorageTask


M = TypeVar("M")
"""A match."""

# ---- Arguments of a lookup

# Named tuples: one is made for each call, and a frozen dataclass takes a microsecond longer.


class LookupRequest(NamedTuple):
    """The arguments of one request's lookup. Equal arguments have equal results."""

    prompt: Prompt
    options: RequestOptions = ANY
    limit: int | None = None
    """Most tokens to reuse; None: no limit."""

    @property
    def most(self) -> int:
        """Most tokens to reuse: the limit, and at least one token is left to compute."""
        most = max(0, len(self.prompt.tokens) - 1)
        return most if self.limit is None else min(most, self.limit)

    def up_to(self, limit: int | None) -> LookupRequest:
        """The same arguments with another limit."""
        return LookupRequest(self.prompt, self.options, limit)


Arguments = tuple[Prompt, RequestOptions, int | None]
"""As a `LookupRequest`, which is made of them where they are new."""


class LookupBatch(NamedTuple):
    """The ids and arguments of many requests, in pairs: these are walked more than once."""

    entries: Sequence[tuple[Hashable, Arguments]]
    device_tokens: Sequence[int] | None
    """Tokens that the engine found on its device, for each request; None: look there."""


def lookup_batch(
    requests: Sequence[Hashable],
    prompts: Sequence[Prompt],
    options: Sequence[RequestOptions] | None,
    limits: Sequence[int | None] | None,
    device_tokens: Sequence[int] | None,
) -> LookupBatch:
    """Check the arguments of a lookup. Costs about 0.1 us a request: a queue is planned each step.

    Raises:
        ConfigError: says which of the arguments is wrong, and why.
    """
    n = len(requests)
    check_ids(requests, "plan")
    for name, values in (
        ("prompts", prompts),
        ("options", options),
        ("limits", limits),
        ("device_tokens", device_tokens),
    ):
        if values is not None and len(values) != n:
            raise ConfigError(f"{name}: expected one for each of {n} requests, found {len(values)}")
    _check_all(prompts, Prompt, "prompts: expected a Prompt for each request")
    _check_all(options or (), RequestOptions, "options: expected RequestOptions for each request")
    _check_numbers("limit", limits, or_none=True)
    _check_numbers("device_tokens", device_tokens)
    arguments = zip(
        prompts,
        [ANY] * n if options is None else options,
        [None] * n if limits is None else limits,
        strict=True,
    )
    return LookupBatch(list(zip(requests, arguments, strict=True)), device_tokens)


def _check_numbers(name: str, numbers: Any, *, or_none: bool = False) -> None:
    for number in () if numbers is None else numbers:
        if number is None and or_none:
            continue
        if not isinstance(number, (int, np.integer)) or number < 0:
            raise ConfigError(f"{name}: expected tokens >= 0, found {number!r}")


def _check_all(values: Sequence[Any], kind: type, expected: str) -> None:
    if set(map(type, values)) <= {kind}:
        return
    for value in values:
        if not isinstance(value, kind):
            raise ConfigError(f"{expected}, found {type(value).__name__} {value!r}"[:200])


# ---- Waiting requests


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A waiting request: its arguments, and what the lookup found."""

    id: Hashable
    request: LookupRequest
    space: CacheScope | None
    """None: the weights are being changed."""
    most: int
    """Most tokens to reuse."""
    ttl: float
    """Seconds that its pins last."""
    since: float
    """Time when it was first planned."""
    blocks: int
    """Device blocks that may be reused."""
    pages: int
    """Host pages that may be reused, including pages whose tokens the device has."""
    first_block: int = field(default=0, init=False)
    """Block where the device lookup begins: earlier blocks are known to be there."""
    first_page: int = field(default=0, init=False)
    """Page where the host lookup begins, unless the device has more."""
    device: int = field(default=0, init=False)
    """Tokens found on the device."""
    host_first: int = field(default=0, init=False)
    """Position of the first host page after those that the device has."""
    host_pages: int = field(default=0, init=False)
    """Pages found on the host from `host_first` on."""
    absent: int = field(default=0, init=False)
    """Host pages that the lookup missed."""
    on_host: bool = field(default=False, init=False)
    """Whether the host index was looked up."""
    pinned: bool = field(default=False, init=False)
    """Whether an index may have pins of it."""
    nowhere: bool = field(default=False, init=False)
    """Whether its first page was in no tier: nothing is pinned, and no other page was hashed."""
    reading: StorageTask | None = field(default=None, init=False)
    """The task that reads its pages from storage, if one was begun."""
    read_until: float | None = field(default=None, init=False)
    """Time until which `take` waits for this task; None: `take` was not called yet."""
    asked_at: float = field(default=0.0, init=False)
    """Time when `take` was first called."""
    match: PrefixMatch | None = field(default=None, init=False)
    """The last result."""
    matched: tuple[int, int] = field(default=(0, 0), init=False)
    """Device tokens and host pages of `match`."""
    waited: bool = field(default=False, init=False)
    """Whether its match has named another request to wait for."""
    settled: float = field(default=0.0, init=False)
    """Time until which its pins are certain, so that a lookup can only find more."""
    next_device: bytes = field(default=b"", init=False)
    """Key of the first block that was missing; empty: none was."""
    next_host: bytes = field(default=b"", init=False)
    """Key of the first host page that was missing; empty: none was."""

    @property
    def device_keys(self) -> Keys:
        """Keys of the blocks that may be reused. Hashed at the first call."""
        if self.space is None or not self.blocks:
            return NO_KEYS
        return self.request.prompt.keys(self.space.device_spec)[: self.blocks]

    @property
    def host_keys(self) -> Keys:
        """Keys of the host pages that may be reused. Hashed at the first call."""
        if self.space is None or not self.pages:
            return NO_KEYS
        return self.request.prompt.keys(self.space.host_spec)[: self.pages]

    def first_block_key(self) -> bytes:
        """Key of the first block; empty if there is none. Hashes this block alone."""
        if self.space is None or not self.blocks:
            return b""
        return self.request.prompt.first_key(self.space.device_spec)

    def first_page_key(self) -> bytes:
        """Key of the first host page; as `first_block_key`."""
        if self.space is None or not self.pages:
            return b""
        return self.request.prompt.first_key(self.space.host_spec)


def by_space(plans: list[PendingRequest]) -> Iterable[tuple[CacheScope, list[PendingRequest]]]:
    """Requests that may reuse tokens, by their space: nearly always there is one."""
    if len(plans) == 1:
        (plan,) = plans
        return [(plan.space, plans)] if plan.most and plan.space is not None else []
    groups: dict[CacheScope, list[PendingRequest]] = {}
    for plan in plans:
        if plan.most and plan.space is not None:
            members = groups.get(plan.space)
            if members is None:
                members = groups[plan.space] = []
            members.append(plan)
    return groups.items()


# ---- One call of an index for several requests


def there(index: PageIndex, packed: list[bytes], space: Namespace) -> list[int]:
    """Positions of the keys that are ready, each looked up alone; an empty key is not."""
    if not any(packed):
        return []
    asked = [i for i, key in enumerate(packed) if key]
    keys = np.frombuffer(bytearray().join(packed), np.uint64).reshape(-1, 2)
    if len(asked) == 1:
        return asked if index.peek(keys, namespace=space) else []
    found = index.peek_many(keys, np.arange(len(asked) + 1), namespace=space)
    return [i for i, ready in zip(asked, found.tolist(), strict=True) if ready]


def peeked(index: PageIndex, parts: Sequence[Keys], space: Namespace) -> list[int]:
    """Number of leading ready keys of each part. A single part, as when one request is planned, is
    looked up directly: joining arrays would cost more than the lookup."""
    if len(parts) == 1:
        return [index.peek(parts[0], namespace=space)]
    keys, offsets = joined(parts)
    found: list[int] = index.peek_many(keys, offsets, namespace=space).tolist()
    return found


def pinned(
    index: PageIndex, ids: Sequence[Hashable], parts: list[Keys], space: Namespace, ttl: float
) -> list[int]:
    """As `peeked`, and pin the pages tentatively for these requests, for `ttl` seconds. The key
    arrays do not change after the call: prompts are immutable."""
    if len(parts) == 1:
        return [index.plan(ids[0], parts[0], namespace=space, timeout=ttl, frozen=True)]
    keys, offsets = joined(parts)
    found: list[int] = index.plan_many(ids, keys, offsets, namespace=space, timeout=ttl).tolist()
    return found


def joined(parts: Sequence[Keys]) -> tuple[Keys, Offsets]:
    """The keys of several requests in one array, and their offsets."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts) if parts else NO_KEYS, offsets


# ---- Usable tokens

_NOTHING = MissReason.NOTHING  # of its class each time it would be a tenth of a microsecond


class Usable:
    """Limits found tokens to those that are usable: worth loading, and without a split item."""

    def __init__(self, state: ManagerState, costs: Costs | None) -> None:
        """`costs` is None if every page is worth loading."""
        self._state, self._costs = state, costs

    def of(
        self, plan: PendingRequest, device: int, found: int
    ) -> tuple[int, MissReason, MultimodalItem | None]:
        """The number of usable tokens of `found`, of which `device` are on the device; why they are
        fewer; and the item that would have been split."""
        prompt, options, _ = plan.request
        if not options.read:
            return 0, MissReason.OPTIONS, None
        if plan.space is None:
            return 0, MissReason.WEIGHTS, None
        usable, why = found, _NOTHING
        if usable > device and not self._worth_loading(usable - device):
            usable, why = device, MissReason.BREAK_EVEN
        cut = prompt.cut_item(usable) if prompt.items else None
        if cut is None:
            return usable, why, None
        usable = self._uncut(prompt, usable, device)
        if device < usable and not self._worth_loading(usable - device):
            usable = self._uncut(prompt, device, device)
        return usable, MissReason.ITEM, cut

    def without_host(self, prompt: Prompt, match: PrefixMatch) -> int:
        """Tokens of a match that are usable if nothing is loaded."""
        return self._uncut(prompt, min(match.usable, match.device), match.device)

    def _uncut(self, prompt: Prompt, usable: int, device: int) -> int:
        """The last boundary that splits no item. A boundary before one item may split another."""
        while (cut := prompt.cut_item(usable)) is not None:
            usable = self._before(cut.start, device)
        return usable

    def _before(self, position: int, device: int) -> int:
        """The last boundary at or before a position: of a block on the device, of a page on the
        host."""
        block, tokens = self._state.device.block_tokens, self._state.page_tokens
        on_device = min(position, device) // block * block
        if position <= device:
            return on_device
        return max(on_device, position // tokens * tokens)

    def _worth_loading(self, tokens: int) -> bool:
        least = self._state.config.min_load_tokens
        if least is not None:
            return tokens >= least
        pages = -(-tokens // self._state.page_tokens)
        return self._costs is None or bool(self._costs.worth_loading(pages))


# ---- PrefixLookup


class PrefixLookup:
    """The plans of one manager. Its lock is around every call."""

    def __init__(self, state: ManagerState, costs: Costs | None) -> None:
        """Nothing is planned yet.

        Args:
            costs: see `KVCacheManager`.
        """
        self._state, self._storage = state, state.storage
        self.usable = Usable(state, costs)
        self._plans: dict[Hashable, PendingRequest] = {}
        self._failed: dict[Hashable, Prompt] = {}
        """Prompts of requests whose last plan failed."""
        self._computing: dict[bytes, Hashable] = {}
        """With "wait" only: keys of blocks that running requests are computing."""
        self._index = state.device.index
        """The device index that has the plans' pins; a new index has none of them."""

    # ---- Arguments

    def batch_of_one(
        self,
        request: Hashable,
        prompt: Prompt,
        options: RequestOptions,
        limit: int | None,
        device_tokens: int | None,
    ) -> LookupBatch:
        """A batch of one request to plan; raises as `batch`. Costs half a microsecond for usual
        arguments."""
        state = self._state
        usual = (
            type(prompt) is Prompt
            and type(options) is RequestOptions
            and type(request) in (int, str)
        )
        if not usual or device_tokens is not None or state.closed or state.tiers is not TIERS:
            tokens = None if device_tokens is None else [device_tokens]
            return self.batch([request], [prompt], [options], [limit], tokens)
        if limit is not None:
            _check_numbers("limit", (limit,))
        return LookupBatch(((request, (prompt, options, limit)),), None)

    def batch(
        self,
        requests: Sequence[Hashable],
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions] | None,
        limits: Sequence[int | None] | None,
        device_tokens: Sequence[int] | None,
    ) -> LookupBatch:
        """A batch of requests to plan.

        Raises:
            ConfigError: says which of the arguments is wrong, and why.
            Detached: the manager is closed.
        """
        self._state.check_open("plan")
        if device_tokens is not None and self._state.device.owned:
            raise ConfigError("device_tokens: ManagedBlocks know what they have; leave it out")
        return self._within_tiers(lookup_batch(requests, prompts, options, limits, device_tokens))

    def _within_tiers(self, batch: LookupBatch) -> LookupBatch:
        """The batch, limited to the tiers that this manager has."""
        tiers = self._state.tiers
        if tiers is TIERS:
            return batch
        entries = [
            (request, (prompt, options.within(tiers), limit))
            for request, (prompt, options, limit) in batch.entries
        ]
        return LookupBatch(entries, batch.device_tokens)

    # ---- Plans and peeks

    def plan(
        self, batch: LookupBatch, spaces: Mapping[str, CacheScope | None] | None = None
    ) -> list[PrefixMatch]:
        """See `KVCacheManager.plan_many`. An error of the cache is a miss.

        Args:
            spaces: spaces of the prompts' tenants, if this call has looked them up.
        """
        return self._state.fail_open.run(
            partial(self.find, batch, spaces),
            lambda: [self.missed(request, arguments[0]) for request, arguments in batch.entries],
        )

    def find(
        self, batch: LookupBatch, spaces: Mapping[str, CacheScope | None] | None = None
    ) -> list[PrefixMatch]:
        """`plan`, without the guard."""
        now, device_tokens = time.monotonic(), batch.device_tokens
        plans = self._plans_of(batch, spaces, now)
        if self._failed:
            for request, _ in batch.entries:
                self._failed.pop(request, None)
        due = plans if device_tokens is not None else self._due(plans, now)
        if due:
            self._look_up(due, device_tokens, now, pin=True)
        absent, matches = 0, []
        for plan in plans:
            absent += plan.absent
            matches.append(self._match(plan, plan.device, plan.host_pages))
        if absent:
            self._state.counts.add(absent_pages=absent)
        return matches

    def peek(
        self,
        prompts: Sequence[Prompt],
        options: Sequence[RequestOptions] | None,
        limits: Sequence[int | None] | None,
        device_tokens: Sequence[int] | None,
    ) -> list[PrefixMatch]:
        """See `KVCacheManager.peek_many`."""
        ids = range(len(prompts))
        batch = self._within_tiers(lookup_batch(ids, prompts, options, limits, device_tokens))
        return self._state.fail_open.run(
            partial(self._peeked, batch),
            lambda: [PrefixMatch(len(prompt), why=MissReason.DISABLED) for prompt in prompts],
        )

    def _peeked(self, batch: LookupBatch) -> list[PrefixMatch]:
        now, spaces = time.monotonic(), self._spaces_of(batch)
        plans = []
        for request, arguments in batch.entries:
            space = spaces[arguments[0].tenant]
            plans.append(self._new_plan(request, LookupRequest._make(arguments), space, now))
        self._look_up(plans, batch.device_tokens, now, pin=False)
        return [self._match(plan, plan.device, plan.host_pages, waits=False) for plan in plans]

    def peek_beyond(self, request: Hashable, limit: int | None) -> PrefixMatch | None:
        """The match of a request with a higher limit than it was planned with just now. Looks only
        at the part after the plan, and pins nothing. Not for an engine that finds its device tokens
        itself.

        Args:
            limit: most tokens; None: the whole prompt.

        Returns:
            None: that plan has failed.
        """
        if request in self._failed:
            return None
        state, known = self._state, self._plans[request]
        plan = self._new_plan(request, known.request.up_to(limit), known.space, known.since)
        plan.device = known.device
        plan.first_block = known.device // state.device.block_tokens
        plan.first_page = known.host_first + known.host_pages if known.host_pages else 0
        self._look_up([plan], None, known.since, pin=False)
        if known.match is not None and known.matched == (plan.device, plan.host_pages):
            return known.match
        return self._match(plan, plan.device, plan.host_pages, waits=False)

    def _spaces_of(self, batch: LookupBatch) -> Mapping[str, CacheScope | None]:
        spaces: dict[str, CacheScope | None] = {}
        for _, arguments in batch.entries:
            tenant = arguments[0].tenant
            if tenant not in spaces:
                spaces[tenant] = self._state.weights.space_or_none(tenant)
        return spaces

    def _plans_of(
        self, batch: LookupBatch, spaces: Mapping[str, CacheScope | None] | None, now: float
    ) -> list[PendingRequest]:
        """The plan of each request: its present plan, if the arguments are the same."""
        if self._index is not self._state.device.index:
            self._index = self._state.device.index
            for plan in self._plans.values():
                plan.settled = 0.0  # its pins were in the other index
        if spaces is None:  # all of them, before a plan is renewed
            spaces = self._spaces_of(batch)
        plans = []
        for request, arguments in batch.entries:
            space, known = spaces[arguments[0].tenant], self._plans.get(request)
            if known is None or known.request != arguments or known.space is not space:
                if type(arguments) is not LookupRequest:
                    arguments = LookupRequest(*arguments)
                known = self._replaced_plan(request, arguments, space, known, now)
            plans.append(known)
        return plans

    def _new_plan(
        self, request: Hashable, arguments: LookupRequest, space: CacheScope | None, now: float
    ) -> PendingRequest:
        """A plan that was not looked up yet."""
        state, options = self._state, arguments.options
        most, tiers = arguments.most if options.read and space is not None else 0, options.tiers
        blocks = most // state.device.block_tokens if "device" in tiers else 0
        pages = most // state.page_tokens if "host" in tiers else 0
        ttl = options.ttl or state.config.plan_ttl
        return PendingRequest(request, arguments, space, most, ttl, now, blocks, pages)

    def _replaced_plan(
        self,
        request: Hashable,
        arguments: LookupRequest,
        space: CacheScope | None,
        before: PendingRequest | None,
        now: float,
    ) -> PendingRequest:
        """A plan with other arguments, which replaces the one before."""
        same = before is not None and before.request.prompt == arguments.prompt
        if before is not None and same:  # its keys are hashed
            arguments = LookupRequest(before.request.prompt, arguments.options, arguments.limit)
        plan = self._new_plan(request, arguments, space, now)
        if before is not None:
            plan.on_host, plan.pinned = before.on_host, before.pinned
            if same and before.space is space:
                plan.reading, plan.since = before.reading, before.since
                plan.read_until, plan.asked_at = before.read_until, before.asked_at
            else:
                self._stop_reading(before)
        if not plan.most:
            self._let_go(request)  # the pins of the plan before
            plan.on_host = plan.pinned = False
        self._plans[request] = plan
        return plan

    # ---- Lookup, tier by tier

    def _due(self, plans: list[PendingRequest], now: float) -> list[PendingRequest]:
        """Plans that must be looked up again. A plan's pages are pinned, so before half of its time
        has passed a lookup can only find more, and only if the next key has appeared. Clears by
        other processes are noticed when a space is looked up."""
        settled: list[PendingRequest] = []
        due: list[PendingRequest] = []
        for plan in plans:
            (settled if plan.settled > now else due).append(plan)
        if not settled:
            return plans
        host, device = self._state.host.index, self._state.device.index
        host.peek(NO_KEYS)  # raises if the index is closed, or disabled by an operator
        for space, members in by_space(settled):
            next_device, next_host = [], []
            for plan in members:
                next_device.append(plan.next_device)
                next_host.append(plan.next_host)
            assert space.device is not None
            assert device is not None
            changed = {*there(device, next_device, space.device)}
            changed.update(there(host, next_host, space.host))
            for i in changed:
                members[i].settled = 0.0
                due.append(members[i])
        return due

    def _look_up(
        self,
        plans: list[PendingRequest],
        device_tokens: Sequence[int] | None,
        now: float,
        *,
        pin: bool,
    ) -> None:
        """Look in every tier. If a prompt's first page is in no tier, the rest is not hashed.

        Args:
            device_tokens: tokens that the engine found on the device; None: look there.
            pin: whether to pin what is found, and to read the rest from storage.
        """
        if device_tokens is not None:
            block = self._state.device.block_tokens
            for plan, tokens in zip(plans, device_tokens, strict=True):
                plan.device = min(tokens, plan.most) // block * block
                plan.settled = 0.0  # nothing is pinned
        for space, members in by_space(plans):
            fresh = []
            for plan in members:
                plan.nowhere = False
                if not (plan.pinned or plan.device) and self._is_unhashed(plan, space):
                    fresh.append(plan)
            if fresh:
                self._look_for_first_pages(space, fresh, device_tokens is not None)
                members = [plan for plan in members if not plan.nowhere]
            if members and device_tokens is None and space.device is not None:
                self._on_device(space, members, pin=pin)
            if members:
                self._on_host(space, members, pin=pin)
        if pin and device_tokens is None:
            for plan in plans:
                self._note_next_keys(plan, now)

    def _is_unhashed(self, plan: PendingRequest, space: CacheScope) -> bool:
        """Whether its prompt is not hashed yet, and need not be if its first page is nowhere."""
        if self._storage is not None and "storage" in plan.request.options.tiers:
            return False  # storage needs the keys of the following pages
        return not plan.request.prompt.is_hashed(space.device_spec)

    def _look_for_first_pages(
        self, space: CacheScope, fresh: list[PendingRequest], device_known: bool
    ) -> None:
        """Note which prompts have their first page in no tier, as most new prompts do."""
        device, host = self._state.device.index, self._state.host.index
        begun: set[PendingRequest] = set()
        if not device_known and device is not None and space.device is not None:
            keys = [plan.first_block_key() for plan in fresh]
            begun.update(fresh[i] for i in there(device, keys, space.device))
        rest = [plan for plan in fresh if plan not in begun]
        keys = [plan.first_page_key() for plan in rest]
        begun.update(rest[i] for i in there(host, keys, space.host))
        for plan in fresh:
            if plan not in begun:  # the same result as a lookup of all its keys
                plan.nowhere = True
                plan.host_first = plan.host_pages = 0
                plan.absent, plan.on_host = plan.pages, False

    def _on_device(self, space: CacheScope, members: list[PendingRequest], *, pin: bool) -> None:
        device, ttl = self._state.device, 0.0
        ids, parts = [], []
        for plan in members:
            keys, first = plan.device_keys, plan.first_block
            ids.append(plan.id)
            parts.append(keys[first:] if first else keys)
            if plan.ttl > ttl:
                ttl = plan.ttl
        assert space.device is not None
        assert device.index is not None
        if pin and device.owned:
            counts = pinned(device.index, ids, parts, space.device, ttl)
        else:  # nothing to pin for a peek; an engine that owns its blocks keeps them itself
            counts = peeked(device.index, parts, space.device)
        block = device.block_tokens
        for i, plan in enumerate(members):
            plan.device = (plan.first_block + counts[i]) * block
            plan.pinned = pin

    def _on_host(self, space: CacheScope, members: list[PendingRequest], *, pin: bool) -> None:
        """Look up the host pages after those that the device has."""
        index, tokens, ttl = self._state.host.index, self._state.page_tokens, 0.0
        asking, ids, parts = [], [], []
        for plan in members:
            first = plan.host_first = plan.device // tokens
            plan.host_pages = plan.absent = 0
            if plan.ttl > ttl:
                ttl = plan.ttl
            asks = plan.pages > first
            if plan.on_host and not asks:
                index.cancel(plan.id)
            plan.on_host = asks
            if asks:
                asking.append(plan)
                ids.append(plan.id)
                parts.append(plan.host_keys[max(first, plan.first_page) :])
        if not asking:
            return
        if pin:
            counts = pinned(index, ids, parts, space.host, ttl)
        else:
            counts = peeked(index, parts, space.host)
        for plan, pages in zip(asking, counts, strict=True):
            plan.host_pages = max(0, plan.first_page - plan.host_first) + pages
            plan.absent = plan.pages - plan.host_first - plan.host_pages
            if pin:
                plan.pinned = True
                if plan.absent and self._storage is not None:
                    self._read(plan, space)

    def _read(self, plan: PendingRequest, space: CacheScope) -> None:
        """Begin to read the missing pages from storage, once for each request."""
        if plan.reading is not None or "storage" not in plan.request.options.tiers:
            return
        assert self._storage is not None
        first = plan.host_first + plan.host_pages
        plan.reading = self._storage.prefetch(
            plan.host_keys, first, namespace=space.host, tokens=plan.request.prompt.told_tokens
        )
        self._state.tasks.add(plan.reading)

    def _note_next_keys(self, plan: PendingRequest, now: float) -> None:
        """Note the keys that must appear before a lookup can find more."""
        device, space = self._state.device, plan.space
        plan.settled = 0.0
        if space is None or space.device is None or not plan.most or not device.owned:
            return  # nothing was looked up; or an engine may evict what was found
        if plan.nowhere:
            plan.next_device, plan.next_host = plan.first_block_key(), plan.first_page_key()
        else:
            block, page = plan.device // device.block_tokens, plan.host_first + plan.host_pages
            plan.next_device = plan.next_host = b""
            if block < plan.blocks:
                plan.next_device = plan.device_keys[block].tobytes()
            if plan.absent:
                plan.next_host = plan.host_keys[page].tobytes()
        plan.settled = now + plan.ttl / 2

    # ---- Match

    def _match(
        self, plan: PendingRequest, device: int, pages: int, *, waits: bool = True
    ) -> PrefixMatch:
        """The match with `device` tokens on the device and `pages` pages on the host.

        Args:
            waits: whether the match names a running request to wait for.
        """
        computing, reading = self._computing, plan.reading
        if plan.match is not None and plan.matched == (device, pages) and not computing:
            return plan.match
        tokens = self._state.page_tokens
        end = (plan.host_first + pages) * tokens if pages else 0
        host = max(0, end - device)
        from_storage, pending = 0, False
        if reading is not None:
            from_storage = min(host, int(reading.pages_done) * tokens)
            pending = not reading.ended
        usable, why, cut = self.usable.of(plan, device, device + host)
        waits_for = self._other(plan, usable) if computing and waits else None
        # The class is frozen: its own `__init__` sets each field by a call and takes three times as
        # long, which is a microsecond and a half for each request of a queue.
        match = object.__new__(PrefixMatch)
        vars(match).update(
            tokens=len(plan.request.prompt.tokens),
            device=device,
            host=host - from_storage,
            storage=from_storage,
            usable=usable,
            why=why,
            cut=cut,
            pending=pending,
            waits_for=waits_for,
        )
        if reading is None and not computing:
            plan.match, plan.matched = match, (device, pages)
        return match

    def _other(self, plan: PendingRequest, usable: int) -> Hashable | None:
        """The running request that computes the first block that this one would compute."""
        if plan.space is None:
            return None
        block = usable // self._state.device.block_tokens
        if block >= plan.blocks:
            return None
        key = plan.device_keys[block].tobytes() if block else plan.first_block_key()
        other = self._computing.get(key)
        late = time.monotonic() - plan.since >= self._state.config.wait_limit
        if other is None or other == plan.id or late:
            return None
        if not plan.waited:
            plan.waited = True
            self._state.counts.add(waits=1)
        return other

    def computes(self, running: Request) -> None:
        """Note that a request computes the blocks that were not found."""
        if self._state.config.same_prefix == "wait" and running.options.write:
            for key in running.device_chain.keys[running.named :]:
                self._computing.setdefault(key.tobytes(), running.id)

    def computed(self, running: Request) -> None:
        """Note that a request has ended and computes no more blocks."""
        if self._computing:
            for key in running.device_chain.keys:
                if self._computing.get(digest := key.tobytes()) == running.id:
                    del self._computing[digest]

    # ---- Failed plans

    def failed(self, request: Hashable) -> bool:
        """Whether the last plan of a request failed, or was released by `let_go`."""
        return request in self._failed

    def missed(self, request: Hashable, prompt: Prompt) -> PrefixMatch:
        """Note a failed plan. Returns an empty match; `prompt_of` returns the prompt."""
        self._failed[request] = prompt
        return PrefixMatch(len(prompt), why=MissReason.DISABLED)

    def prompt_of(self, request: Hashable) -> Prompt:
        """The prompt of a request whose plan failed, or cannot be taken. Forgets the plan.

        Raises:
            LeaseLost: it was not planned.
        """
        plan, failed = self._plans.get(request), self._failed.pop(request, None)
        if plan is None and failed is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        self.cancel(request)
        return failed if failed is not None else plan.request.prompt  # type: ignore[union-attr]

    def holds(self, request: Hashable, now: float) -> bool:
        """Whether a plan is pinned for at least half of its time still, so that planning again
        would find no less. False if an engine may evict the blocks, and with "wait".

        Args:
            now: `time.monotonic()`.
        """
        plan = self._plans.get(request)
        if plan is None or plan.reading is not None:
            return False
        if self._state.config.same_prefix == "wait":
            return False
        return plan.settled > now or not plan.most

    # ---- Take

    def reading(self, request: Hashable, now: float) -> tuple[StorageTask, float] | None:
        """The storage read of a plan that is to be taken, and the seconds left to wait for it. The
        whole wait, from the first call on, is as long as computing the absent tokens takes. None:
        the read has ended, or the time is up. What the plan has found stays pinned.
        """
        plan = self._plans.get(request)
        if plan is None or plan.space is None or plan.reading is None or plan.reading.ended:
            return None
        if plan.read_until is None:
            absent = plan.absent * self._state.page_tokens
            plan.asked_at, plan.read_until = now, now + self._state.pace.seconds(absent)
        if now >= plan.read_until:
            return None
        if plan.settled <= now:
            self._look_again(plan)
        return plan.reading, plan.read_until - now

    def take(
        self, request: Hashable
    ) -> tuple[PendingRequest, PrefixMatch, Lease | None, Lease | None]:
        """The plan, its usable match, and its pins on the device and the host. An expired plan is
        looked up once more. A read in flight continues, for later requests.

        Raises:
            LeaseLost: there is no plan.
        """
        plan = self._plans.get(request)
        if plan is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        state = self._state
        if plan.space is None or not state.weights.is_valid(plan.space):
            self.cancel(request)
            plan.space = plan.reading = None  # it runs without the cache
            return plan, self._match(plan, 0, 0), None, None
        try:
            if plan.nowhere:
                self._look_again(plan)
            try:
                hit, host = self._leases_of(plan)
            except LeaseLost:
                plan.ttl = max(plan.ttl, TIMEOUT)
                self._look_again(plan)
                hit, host = self._leases_of(plan)
        except BaseException:
            self.cancel(request)
            self._failed[request] = plan.request.prompt  # it may still run without the cache
            raise
        del self._plans[request]
        if plan.read_until is not None:
            waited = int((time.monotonic() - plan.asked_at) * 1e9)
            state.counts.add(**STORAGE_WAIT.of(waited))
        device = len(hit) * state.device.block_tokens if hit is not None else plan.device
        match = self._match(plan, device, len(host) if host is not None else 0)
        return plan, match, hit, host

    def _look_again(self, plan: PendingRequest) -> None:
        """Look up a plan that is to be taken once more."""
        # An engine that owns its blocks has reported its tokens.
        device_tokens = None if self._state.device.owned else [plan.device]
        self._look_up([plan], device_tokens, time.monotonic(), pin=True)

    def _leases_of(self, plan: PendingRequest) -> tuple[Lease | None, Lease | None]:
        """The pages that are pinned for a plan, on the device and the host.

        Raises:
            LeaseLost: the plan has expired.
        """
        state, hit, host = self._state, None, None
        try:
            index = state.device.index if state.device.owned else None
            if index is not None and plan.blocks and not plan.nowhere:
                hit = index.take(plan.id)
            if plan.on_host:
                host = state.host.index.take(plan.id)
        except BaseException:
            if hit is not None:
                hit.release()
            raise
        return hit, host

    # ---- Forgetting plans

    def _let_go(self, request: Hashable) -> None:
        state = self._state
        for index in (state.device.index if state.device.owned else None, state.host.index):
            # A closed index has no pins; otherwise the pins end when the plan expires.
            with contextlib.suppress(LightcacheError):
                if index is not None:
                    index.cancel(request)

    def _stop_reading(self, plan: PendingRequest) -> None:
        if plan.reading is not None:
            self._state.transfers.foreign.cancel(plan.reading)

    def cancel(self, request: Hashable) -> None:
        """Forget a plan."""
        self._failed.pop(request, None)
        plan = self._plans.get(request)
        if plan is None:
            return
        self._stop_reading(plan)
        plan.settled = 0.0
        self._let_go(request)
        self._plans.pop(request, None)  # last: after an interrupt before this, all is repeated

    def let_go(self) -> None:
        """Drop all pins, because the manager has disabled itself. Planned requests may begin, and
        find nothing."""
        for request, plan in list(self._plans.items()):
            self.cancel(request)
            self._failed[request] = plan.request.prompt

    def close(self) -> None:
        """Forget all plans."""
        for request in list(self._plans):
            self.cancel(request)
        self._failed.clear()


def begin_when_read(
    lock: threading.RLock,
    check: Callable[[], None],
    look: Callable[[float], tuple[StorageTask, float] | None],
    begin: Callable[[], M],
    guard: FailOpen,
    wait: bool,
) -> M | None:
    """`take`: begin a request as soon as no storage read holds it up. None: one does.

    Args:
        lock: the manager's, held around all calls and not while waiting.
        check: raises if the request cannot begin at all.
        look: the read, and the seconds left to wait for it, at this time; None: there is none.
        wait: block until then. If the wait fails, pages that were read are there, and count.
    """
    while True:
        with lock:
            check()
            reading = guard.run(partial(look, time.monotonic()), nothing, proves=False)
            if reading is None:
                return begin()
        if not wait:
            return None
        try:
            reading[0].wait(reading[1])  # other threads may call meanwhile
        except WaitTimeout:
            continue
        except LightcacheError:
            with lock:
                check()
                return begin()


__all__ = [
    "LookupBatch",
    "LookupRequest",
    "PendingRequest",
    "PrefixLookup",
    "Usable",
    "begin_when_read",
    "by_space",
    "joined",
    "lookup_batch",
    "peeked",
]

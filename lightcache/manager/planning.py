"""Finding: one match over device, host and storage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightcache._arguments import Keys, Pages, pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LeaseLost, LightcacheError
from lightcache.hashing import Tokens, pack_tokens
from lightcache.leases import Lease
from lightcache.manager.device import DeviceTier, peeked, pinned, there
from lightcache.manager.requests import (
    ANY,
    NO_KEYS,
    ManagerConfig,
    PrefixMatch,
    Prompt,
    Request,
    Space,
    Why,
    Wishes,
)
from lightcache.manager.state import ManagerState
from lightcache.plans import TIMEOUT

if TYPE_CHECKING:
    from lightcache.costs import Costs
    from lightcache.storage.tasks import StorageTask


# ---- What is asked of a plan: the arguments of `KVCacheManager.plan` and `plan_many`, checked,
# as one thing that goes from call to call.


# Tuples with names: one is made for each call, and a frozen dataclass takes a microsecond longer;
# by `_make` it is half of what it is by name.


class Asked(NamedTuple):
    """What one request asks. Who asks for an equal one again has asked for the same."""

    prompt: Prompt
    wishes: Wishes = ANY
    limit: int | None = None
    """Most tokens to reuse; None: no limit."""

    @property
    def most(self) -> int:
        """Tokens that may be reused at most: the limit, and one is left to compute."""
        most = max(0, len(self.prompt) - 1)
        return most if self.limit is None else min(most, self.limit)

    def up_to(self, limit: int | None) -> Asked:
        """The same with another limit."""
        return Asked._make((self[0], self[1], limit))


class AskedMany(NamedTuple):
    """What a whole queue asks; sequences of one length."""

    requests: Sequence[Hashable]
    prompts: Sequence[Prompt]
    wishes: Sequence[Wishes]
    limits: Sequence[int | None]
    given: Sequence[int] | None
    """Tokens of each that an engine has found on its device itself; None: look there."""


# ---- What is known of a request that waits.


@dataclass(eq=False, slots=True)
class Planned:
    """A plan: what was asked, and where the host's part begins."""

    asked: Asked
    space: Space | None
    """None: the weights are being changed."""
    most: int
    """Tokens that may be reused at most."""
    ttl: float
    """Seconds for which what was found stays pinned."""
    since: float
    """When it was first planned."""
    blocks: int
    """Device blocks that may be reused."""
    pages: int
    """Host pages that may be reused, those that the device has included."""
    device: int = 0
    """Tokens found on the device."""
    host_first: int = 0
    """Number of the first host page that is planned."""
    host_pages: int = 0
    reading: Any = None
    """The task that brings pages from storage, if one was begun."""
    read_until: float | None = None
    """Until when `take` waits for that; None: it was not asked for yet."""
    asked_at: float = 0.0
    """When it was."""
    on_host: bool = False
    """Whether anything was asked of the host."""
    match: PrefixMatch | None = None
    """What came of it last, and of what."""
    matched: tuple[int, int] = (0, 0)
    pinned: bool = False
    """Whether it was ever entered where its pages are pinned."""
    nowhere: bool = False
    """Its first page was in no tier: nothing is pinned, and no more of it was hashed."""
    waited: bool = False
    """Whether it was told to wait for another request."""
    absent: int = 0
    """Host pages that were looked for and not there."""
    settled: float = 0.0
    """Until when what was found stays pinned for certain, so that only more can be found."""
    next_device: bytes = b""
    """The key of the first block that was not there; empty: all were."""
    next_host: bytes = b""
    """The same of the host's pages."""

    @property
    def device_keys(self) -> Keys:
        """Of the blocks that may be reused. Hashed at the first call."""
        if self.space is None or not self.blocks:
            return NO_KEYS
        return self.asked.prompt.keys(self.space.device_spec)[: self.blocks]

    @property
    def host_keys(self) -> Keys:
        """Of the host's pages that may be reused. Hashed at the first call."""
        if self.space is None or not self.pages:
            return NO_KEYS
        return self.asked.prompt.keys(self.space.host_spec)[: self.pages]

    def first_block(self) -> bytes:
        """The key of the first of the blocks; empty if there is none. Hashes no more."""
        if self.space is None or not self.blocks:
            return b""
        return self.asked.prompt.first_key(self.space.device_spec)

    def first_page(self) -> bytes:
        """The same of the host's pages."""
        if self.space is None or not self.pages:
            return b""
        return self.asked.prompt.first_key(self.space.host_spec)


Waiting = tuple[Hashable, Planned]
"""A request, and its plan."""


def by_space(plans: list[Waiting]) -> list[tuple[Space, list[Waiting]]]:
    """Plans that may look for anything, by their space: nearly always there is one."""
    found: dict[Space, list[Waiting]] = {}
    for entry in plans:
        plan = entry[1]
        if plan.most and plan.space is not None:
            members = found.get(plan.space)
            if members is None:
                members = found[plan.space] = []
            members.append(entry)
    return list(found.items())


# ---- Looking: what of the prompts that wait is there, tier by tier.


class Looker:
    """Finds and pins what plans can use. The manager's lock is around every call."""

    def __init__(self, state: ManagerState) -> None:
        """Nothing is looked for yet."""
        self._state, self._storage = state, state.storage

    def due(self, plans: list[Waiting], now: float) -> list[Waiting]:
        """Those that have to be looked at. What a plan has found is pinned, so while its time is
        not half over only more can be found: and then the key behind it is there. What another
        process does to the weights is seen when a space is asked for."""
        settled = [plan for _, plan in plans if plan.settled > now]
        if not settled:
            return plans
        host, device = self._state.host.index, self._state.device.index
        host.peek(NO_KEYS)  # raises if it was closed, or disabled by an operator
        for space in {plan.space for plan in settled}:
            assert space is not None
            assert space.device is not None
            assert device is not None
            members = [plan for plan in settled if plan.space is space]
            for i in there(device, [plan.next_device for plan in members], space.device):
                members[i].settled = 0.0
            for i in there(host, [plan.next_host for plan in members], space.host):
                members[i].settled = 0.0
        return [entry for entry in plans if entry[1].settled <= now]

    def look(self, plans: list[Waiting], given: Sequence[int] | None, now: float) -> None:
        """Look in every tier. Where a prompt's first page is in none, the rest is not hashed.

        Args:
            given: tokens that the engine itself found on the device; None: look there.
        """
        if given is not None:
            self._believe(plans, given)
        wanted = self._begun_somewhere(plans, given is not None)
        if given is None:
            self._on_device(wanted)
        self._on_host(wanted)
        if given is None:
            for _, plan in plans:
                self._settle(plan, now)

    def look_one(self, request: Hashable, plan: Planned, given: int | None, now: float) -> None:
        """`look` for one plan alone, without what it takes to gather many."""
        space = plan.space
        if given is not None:
            self._believe([(request, plan)], [given])
        plan.nowhere = False
        if self._is_fresh(plan) and not self._begun_somewhere([(request, plan)], given is not None):
            self._settle(plan, now)
            return
        if not plan.most or space is None:
            plan.settled = 0.0
            return
        ttl, device = plan.ttl, self._state.device
        if given is None and space.device is not None:
            blocks = device.plan(request, plan.device_keys, space.device, ttl)
            plan.device, plan.pinned = blocks * device.block_tokens, True
        if self._asks_host(request, plan):
            keys = plan.host_keys[plan.host_first :]
            index = self._state.host.index
            pages = index.plan(request, keys, namespace=space.host, timeout=ttl, frozen=True)
            self._told_by_host(plan, space, pages)
        if given is None:
            self._settle(plan, now)

    def again(self, request: Hashable, plan: Planned) -> None:
        """Look once more for a plan that is to be taken."""
        # What an engine has on its device is as it said.
        given = None if self._state.device.owned else plan.device
        self.look_one(request, plan, given, time.monotonic())

    # ---- first pages

    def _begun_somewhere(self, plans: list[Waiting], given: bool) -> list[Waiting]:
        """Without those whose first page is in no tier, as most that are quite new."""
        for _, plan in plans:
            plan.nowhere = False
        fresh = [entry for entry in plans if self._is_fresh(entry[1])]
        if not fresh:
            return plans
        for space, members in by_space(fresh):
            begun = self._begun(space, [plan for _, plan in members], given)
            for _, plan in members:
                if plan not in begun:  # it is as a look would have left it
                    plan.nowhere = True
                    plan.host_first = plan.host_pages = 0
                    plan.absent, plan.on_host = plan.pages, False
        return [entry for entry in plans if not entry[1].nowhere]

    def _is_fresh(self, plan: Planned) -> bool:
        """Whether its prompt was not hashed for this look's sake, and may not have to be."""
        if plan.pinned or plan.device or plan.space is None or not plan.most:
            return False
        if self._storage is not None and "storage" in plan.asked.wishes.tiers:
            return False  # storage is asked for what lies behind
        return not plan.asked.prompt.is_hashed(plan.space.device_spec)

    def _begun(self, space: Space, plans: list[Planned], given: bool) -> set[Planned]:
        """Those of them whose first page is there."""
        device, host = self._state.device.index, self._state.host.index
        begun: set[Planned] = set()
        if not given and device is not None and space.device is not None:
            keys = [plan.first_block() for plan in plans]
            begun.update(plans[i] for i in there(device, keys, space.device))
        rest = [plan for plan in plans if plan not in begun]
        keys = [plan.first_page() for plan in rest]
        begun.update(rest[i] for i in there(host, keys, space.host))
        return begun

    # ---- tier by tier

    def _believe(self, plans: list[Waiting], given: Sequence[int]) -> None:
        block = self._state.device.block_tokens
        for (_, plan), tokens in zip(plans, given, strict=True):
            plan.device = min(tokens, plan.most) // block * block
            plan.settled = 0.0  # nothing is pinned

    def _on_device(self, plans: list[Waiting]) -> None:
        device = self._state.device
        for space, members in by_space(plans):
            if space.device is None:
                continue
            ids = [request for request, _ in members]
            parts = [plan.device_keys for _, plan in members]
            counts = device.plan_many(ids, parts, space.device, _longest(members))
            for (_, plan), blocks in zip(members, counts, strict=True):
                plan.device = blocks * device.block_tokens
                plan.pinned = True

    def _on_host(self, plans: list[Waiting]) -> None:
        index = self._state.host.index
        for space, members in by_space(plans):
            asked = [entry for entry in members if self._asks_host(*entry)]
            if not asked:
                continue
            ids = [request for request, _ in asked]
            parts = [plan.host_keys[plan.host_first :] for _, plan in asked]
            counts = pinned(index, ids, parts, space.host, _longest(members))
            for (_, plan), host_pages in zip(asked, counts, strict=True):
                self._told_by_host(plan, space, host_pages)

    def _asks_host(self, request: Hashable, plan: Planned) -> bool:
        """Whether the host may have pages behind what the device has."""
        plan.host_first, plan.host_pages, plan.absent = (
            plan.device // self._state.page_tokens,
            0,
            0,
        )
        asks = plan.pages > plan.host_first
        if plan.on_host and not asks:
            self._state.host.index.cancel(request)
        plan.on_host = asks
        return asks

    def _told_by_host(self, plan: Planned, space: Space, pages: int) -> None:
        plan.host_pages, plan.pinned = pages, True
        plan.absent = plan.pages - plan.host_first - pages
        if plan.absent:
            self._in_storage(plan, space, pages)

    def _in_storage(self, plan: Planned, space: Space, pages: int) -> None:
        """Begin to bring what follows to the host, once for each request."""
        if (
            self._storage is None
            or plan.reading is not None
            or "storage" not in plan.asked.wishes.tiers
        ):
            return
        keys, first = plan.host_keys, plan.host_first + pages
        plan.reading = self._storage.prefetch(keys, first, namespace=space.host)
        self._state.tasks.add(plan.reading)

    # ---- how long it holds

    def _settle(self, plan: Planned, now: float) -> None:
        """Note what has to appear before more of a plan can be found."""
        device, space = self._state.device, plan.space
        plan.settled = 0.0
        if space is None or space.device is None or not plan.most or not device.owned:
            return  # nothing was looked for; or an engine may evict what was found
        if plan.nowhere:
            plan.next_device, plan.next_host = plan.first_block(), plan.first_page()
        else:
            block = plan.device // device.block_tokens
            page = plan.host_first + plan.host_pages
            plan.next_device = plan.device_keys[block : block + 1].tobytes()
            plan.next_host = plan.host_keys[page].tobytes() if plan.absent else b""
        plan.settled = now + plan.ttl / 2


def _longest(members: list[Waiting]) -> float:
    return max([plan.ttl for _, plan in members])


# ---- Peeking: what a plan would find, without references.


def peek(planner: Planner, many: AskedMany) -> list[PrefixMatch]:
    """See `KVCacheManager.peek_many`."""
    state, now = planner.state, time.monotonic()
    plans: list[Waiting] = []
    each = zip(many.prompts, many.wishes, many.limits, strict=True)
    for request, asks in zip(many.requests, each, strict=True):
        asked = Asked(*asks)
        space = state.weights.space_or_none(asked.prompt.tenant)
        plans.append((request, planner.made(asked, space, now)))
    _on_device(state, plans, many.given)
    _on_host(state, plans)
    return [_match(planner, plan) for _, plan in plans]


def peek_behind(planner: Planner, request: Hashable, limit: int | None) -> PrefixMatch:
    """What is there for a request that was planned just now with a lower limit: only what lies
    behind that is looked at. Not for an engine that said itself what its device has."""
    state = planner.state
    block, tokens = state.device.block_tokens, state.page_tokens
    known = planner.planned(request)
    plan = planner.made(known.asked.up_to(limit), known.space, known.since)
    space, index = plan.space, state.device.index
    if space is None or not plan.most:
        return _match(planner, plan)
    plan.device, plan.host_pages = known.device, known.host_pages
    if known.blocks < plan.blocks and known.device == known.blocks * block and index is not None:
        more = plan.device_keys[known.blocks :]
        plan.device += index.peek(more, namespace=space.device) * block
        if plan.device > known.device:
            plan.host_pages = 0
    plan.host_first = plan.device // tokens
    end = plan.host_first + plan.host_pages
    if known.pages <= end < plan.pages:
        plan.host_pages += state.host.index.peek(plan.host_keys[end:], namespace=space.host)
    if known.match is not None and known.matched == (plan.device, plan.host_pages):
        return known.match
    return _match(planner, plan)


def _on_device(state: ManagerState, plans: list[Waiting], given: Sequence[int] | None) -> None:
    block, index = state.device.block_tokens, state.device.index
    if given is not None:
        for (_, plan), tokens in zip(plans, given, strict=True):
            plan.device = min(tokens, plan.most) // block * block
        return
    for space, members in by_space(plans):
        if space.device is None or index is None:
            continue
        counts = peeked(index, [plan.device_keys for _, plan in members], space.device)
        for (_, plan), blocks in zip(members, counts, strict=True):
            plan.device = blocks * block


def _on_host(state: ManagerState, plans: list[Waiting]) -> None:
    tokens = state.page_tokens
    for space, members in by_space(plans):
        parts = []
        for _, plan in members:
            plan.host_first = plan.device // tokens
            parts.append(plan.host_keys[plan.host_first :])
        counts = peeked(state.host.index, parts, space.host)
        for (_, plan), host_pages in zip(members, counts, strict=True):
            plan.host_pages = host_pages


def _match(planner: Planner, plan: Planned) -> PrefixMatch:
    end = (plan.host_first + plan.host_pages) * planner.state.page_tokens if plan.host_pages else 0
    host = max(0, end - plan.device)
    usable, why, cut = planner.usable.of(plan, plan.device, plan.device + host)
    return PrefixMatch(len(plan.asked.prompt), plan.device, host, 0, usable, why, cut)


# ---- How much of what was found a request can use.


class Usable:
    """What the costs say is worth loading, and no item cut in two."""

    def __init__(self, state: ManagerState, costs: Costs | None) -> None:
        """`costs`: None: everything is worth it."""
        self._state, self._costs = state, costs

    def of(self, plan: Planned, device: int, found: int) -> tuple[int, Why, Any]:
        """Usable tokens of so many that were found, so many of them on the device; why they are
        fewer, and the item that would have been cut."""
        prompt, wishes, _ = plan.asked
        if not wishes.read:
            return 0, Why.WISHES, None
        if plan.space is None:
            return 0, Why.WEIGHTS, None
        usable, why = found, Why.NOTHING
        if usable > device and not self._worth_loading(usable - device):
            usable, why = device, Why.BREAK_EVEN
        cut = prompt.cut_item(usable) if prompt.items else None
        if cut is None:
            return usable, why, None
        usable = self._uncut(prompt, usable, device)
        if device < usable and not self._worth_loading(usable - device):
            usable = self._uncut(prompt, device, device)
        return usable, Why.ITEM, cut

    def without_host(self, prompt: Prompt, match: PrefixMatch) -> int:
        """Tokens that are usable of a match if nothing is loaded."""
        return self._uncut(prompt, min(match.usable, match.device), match.device)

    def _uncut(self, prompt: Prompt, usable: int, device: int) -> int:
        """The last boundary that cuts no item. The one before an item may lie in another."""
        while (cut := prompt.cut_item(usable)) is not None:
            usable = self._before(cut.start, device)
        return usable

    def _before(self, position: int, device: int) -> int:
        """The last boundary not beyond a position: of a block on the device, of a page on the
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


# ---- What callers hand in, looked at before anything is done with it: a refused call changes
# nothing.


def check_parts(host: Any, device: Any, mover: Any, config: Any, storage: Any) -> None:
    """What a manager is made of.

    Raises:
        ConfigError: something else; a host cache without a mover, a storage without a host cache.
    """
    for what, found, kind in (
        ("host", host, (Cache, NoneType)),
        ("device", device, (DeviceTier,)),
        ("config", config, (ManagerConfig,)),
    ):
        if not isinstance(found, kind):
            expected = " or ".join("None" if one is NoneType else one.__name__ for one in kind)
            raise ConfigError(f"{what}: expected a {expected}, found {found!r}")
    if host is not None and mover is None:
        raise ConfigError(
            "mover: expected one, such as EngineMover(engine), found None; only a manager "
            "without a host cache moves nothing"
        )
    if host is None and storage is not None:
        raise ConfigError(
            f"storage: expected None without a host cache, found {storage!r}; storage is read into "
            "and written from host pages, so give a host cache, of a few pages at least"
        )


def check_blocks(mover: Any, blocks: int, block_tokens: int) -> None:
    """Device blocks, as far as their mover knows how many there can be.

    Raises:
        ConfigError: more than the device has room for.
    """
    slots = getattr(mover, "slots", None)
    if slots is not None and blocks * block_tokens > slots:
        raise ConfigError(
            f"blocks: {blocks} blocks of {block_tokens} tokens are {blocks * block_tokens} slots, "
            f"and the planes of the mover's engine hold {slots}; give at most "
            f"{slots // block_tokens} blocks, or describe all of the device's memory"
        )


def asked_many(
    requests: Sequence[Hashable],
    prompts: Sequence[Prompt],
    wishes: Sequence[Wishes] | None,
    limits: Sequence[int | None] | None,
    device_tokens: Sequence[int] | None,
) -> AskedMany:
    """What is to be planned. About 0.1 us a request: a queue is planned in every step.

    Raises:
        ConfigError: says which of the arguments is wrong, and why.
    """
    n = len(requests)
    check_ids(requests, "plan")
    for what, given in (
        ("prompts", prompts),
        ("wishes", wishes),
        ("limits", limits),
        ("device_tokens", device_tokens),
    ):
        if given is not None and len(given) != n:
            raise ConfigError(f"{what}: expected one for each of {n} requests, found {len(given)}")
    _check_all(prompts, Prompt, "prompts: expected a Prompt for each request")
    _check_all(wishes or (), Wishes, "wishes: expected Wishes for each request")
    _check_numbers("limit", limits, or_none=True)
    _check_numbers("device_tokens", device_tokens)
    return AskedMany(
        requests,
        prompts,
        [ANY] * n if wishes is None else wishes,
        [None] * n if limits is None else limits,
        device_tokens,
    )


def asked_of(
    request: Hashable,
    prompt: Prompt,
    wishes: Wishes,
    limit: int | None,
    device_tokens: int | None,
) -> Asked:
    """`asked_many` of one. Half a microsecond where all is as it mostly is.

    Raises:
        ConfigError: see there.
    """
    usual = type(prompt) is Prompt and type(wishes) is Wishes and type(request) in (int, str)
    if not usual or limit is not None or device_tokens is not None:
        given = None if device_tokens is None else [device_tokens]
        asked_many([request], [prompt], [wishes], [limit], given)
    return Asked._make((prompt, wishes, limit))


def _check_numbers(what: str, numbers: Any, *, or_none: bool = False) -> None:
    for one in () if numbers is None else numbers:
        if one is None and or_none:
            continue
        if not isinstance(one, (int, np.integer)) or one < 0:
            raise ConfigError(f"{what}: expected tokens >= 0, found {one!r}")


def check_ids(requests: Sequence[Hashable], call: str) -> None:
    """Ids of the requests of one call.

    Raises:
        ConfigError: one is named twice, or cannot be looked up.
    """
    if check_hashable(requests, call) != len(requests):
        raise ConfigError(f"{call}: one of the requests is named twice; name each once")


def check_hashable(requests: Sequence[Hashable], call: str) -> int:
    """Ids of requests; how many different ones.

    Raises:
        ConfigError: one cannot be looked up.
    """
    try:
        return len(set(requests))
    except TypeError as error:
        raise ConfigError(f"{call}: a request's id has to be hashable: {error}") from None


def _check_all(given: Sequence[Any], kind: type, expected: str) -> None:
    if set(map(type, given)) <= {kind}:
        return
    for one in given:
        if not isinstance(one, kind):
            raise ConfigError(f"{expected}, found {type(one).__name__} {one!r}"[:200])


def check_commits(
    device: DeviceTier,
    running: list[Request],
    totals: Sequence[int],
    new_tokens: Sequence[Tokens | None] | None,
    tables: Sequence[Pages] | None,
) -> tuple[list[bytes], Sequence[Pages] | None]:
    """What is to be committed; returns new tokens, packed, and tables as they can be used.

    Raises:
        ConfigError: says which request's arguments are wrong, and why.
    """
    n = len(running)
    if len(set(map(id, running))) != n:
        raise ConfigError("commit: one of the requests is named twice; name each once")
    for what, given in (("totals", totals), ("new_tokens", new_tokens), ("tables", tables)):
        if given is not None and len(given) != n:
            raise ConfigError(f"{what}: expected one for each of {n} requests, found {len(given)}")
    packed = [b""] * n
    if new_tokens is not None:
        packed = [_packed(one, each) for one, each in zip(running, new_tokens, strict=True)]
    for one, total, fresh in zip(running, totals, packed, strict=True):
        if type(total) is not int or not one.total <= total <= one.known + len(fresh) // 4:
            one.check(total, len(fresh) // 4)  # which says what is wrong, if anything is
    if tables is not None:
        return packed, [
            check_table(device, one, table, total)
            for one, table, total in zip(running, tables, totals, strict=True)
        ]
    if not device.owned and device.index is not None:
        for one, total in zip(running, totals, strict=True):
            if total and not len(one.table):
                raise ConfigError(
                    f"commit {one.id!r}: the engine owns the blocks; give the request's as table="
                )
    return packed, None


def _packed(one: Request, tokens: Tokens | None) -> bytes:
    if tokens is None:
        return b""
    try:
        return pack_tokens(tokens)
    except ConfigError as error:
        raise ConfigError(f"commit {one.id!r}: new_tokens: {error}") from None


def check_table(device: DeviceTier, one: Request, table: Any, total: int) -> Pages:
    """A request's blocks, of an attached device. Those that are of no use now are not looked at.

    Raises:
        ConfigError: no row of block numbers, or of an owned device, which knows them.
    """
    if device.owned:
        raise ConfigError(
            f"table of {one.id!r}: blocks of an owned device are those that `allocate` returned; "
            "leave the table out"
        )
    found = pages(table)
    fresh = found[one.named : total // device.block_tokens]
    if device.index is not None and len(fresh):  # seldom, while single tokens are generated
        least, most = int(fresh.min()), int(fresh.max())
        if not 0 <= least <= most < device.blocks:
            raise ConfigError(
                f"table of {one.id!r}: expected blocks of 0 to {device.blocks - 1}, found {least} "
                f"to {most}"
            )
    return found


def numbers_of(blocks: Any) -> Pages:
    """Block numbers from whatever sequence; negative ones are let through.

    Raises:
        ConfigError: no integers.
    """
    try:
        found = np.asarray(blocks)
    except ValueError as error:
        raise ConfigError(f"blocks: expected block numbers: {error}") from None
    if found.size and found.dtype.kind not in "iu":
        raise ConfigError(f"blocks: expected block numbers, found {found.dtype} {found.shape}")
    return np.ascontiguousarray(found, np.int32)


# ---- Finding: one match over device, host and storage.


class Planner:
    """The plans of one manager. Its lock is around every call."""

    def __init__(self, state: ManagerState, costs: Costs | None) -> None:
        """Nothing is planned yet."""
        self.state = state
        self._looker = Looker(state)
        self.usable = Usable(state, costs)
        self._plans: dict[Hashable, Planned] = {}
        self._failed: dict[Hashable, Prompt] = {}
        """Of requests whose last plan failed: what they asked."""
        self._computing: dict[bytes, Hashable] = {}
        """Keys of blocks that running requests will have computed; with "wait" only."""
        self._index = state.device.index
        """What the device's blocks are pinned in: another one has none of these pins."""

    def plan(self, many: AskedMany) -> list[PrefixMatch]:
        """See `KVCacheManager.plan_many`."""
        now = time.monotonic()
        plans = self._known_many(many, now)
        if self._failed:
            for request in many.requests:
                self._failed.pop(request, None)
        due = plans if many.given is not None else self._looker.due(plans, now)
        if due:
            self._looker.look(due, many.given, now)
        absent = sum([plan.absent for _, plan in plans])
        if absent:
            self.state.figures.add(absent_pages=absent)
        return [self._match(request, plan, plan.device, plan.host_pages) for request, plan in plans]

    def plan_one(
        self, request: Hashable, asked: Asked, space: Space | None, given: int | None
    ) -> PrefixMatch:
        """`plan` for one request alone.

        Args:
            space: of its tenant, looked up just now.
            given: device tokens that an engine found itself; None: look.
        """
        now = time.monotonic()
        if self._index is not self.state.device.index:
            self._see_device()
        plan = self._plans.get(request)
        if plan is None or plan.asked != asked or plan.space is not space:
            plan = self._renewed(request, asked, space, plan, now)
        if self._failed:
            self._failed.pop(request, None)
        if given is not None or self._looker.due([(request, plan)], now):
            self._looker.look_one(request, plan, given, now)
        if plan.absent:
            self.state.figures.add(absent_pages=plan.absent)
        return self._match(request, plan, plan.device, plan.host_pages)

    def _known_many(self, many: AskedMany, now: float) -> list[Waiting]:
        """The plan of each request: the one that it has, if it asks for the same as before."""
        if self._index is not self.state.device.index:
            self._see_device()
        tenants = {prompt.tenant for prompt in many.prompts}  # all, before a plan is renewed
        spaces = {each: self.state.weights.space_or_none(each) for each in tenants}
        plans = []
        each = zip(many.prompts, many.wishes, many.limits, strict=True)
        for request, asks in zip(many.requests, each, strict=True):
            space, plan = spaces[asks[0].tenant], self._plans.get(request)
            if plan is None or plan.asked != asks or plan.space is not space:
                plan = self._renewed(request, Asked._make(asks), space, plan, now)
            plans.append((request, plan))
        return plans

    def _see_device(self) -> None:
        """What was pinned in another index of the device is not."""
        self._index = self.state.device.index
        for plan in self._plans.values():
            plan.settled = 0.0

    def _renewed(
        self,
        request: Hashable,
        asked: Asked,
        space: Space | None,
        before: Planned | None,
        now: float,
    ) -> Planned:
        """A plan for something new, in the place of the one before."""
        same = before is not None and before.asked.prompt == asked.prompt
        if before is not None and same:  # its keys are hashed
            asked = Asked._make((before.asked.prompt, asked.wishes, asked.limit))
        made = self.made(asked, space, now)
        if before is not None:
            made.on_host, made.pinned = before.on_host, before.pinned
            if same and before.space is space:
                made.reading, made.since = before.reading, before.since
                made.read_until, made.asked_at = before.read_until, before.asked_at
            else:
                self._stop_reading(before)
        if not made.most:
            self._let_go(request)  # what was planned before
            made.on_host = made.pinned = False
        self._plans[request] = made
        return made

    def made(self, asked: Asked, space: Space | None, now: float) -> Planned:
        """What a request asks; nothing was looked for."""
        wishes = asked.wishes
        most, tiers = asked.most if wishes.read and space is not None else 0, wishes.tiers
        blocks = most // self.state.device.block_tokens if "device" in tiers else 0
        pages = most // self.state.page_tokens if "host" in tiers else 0
        ttl = wishes.ttl or self.state.config.plan_ttl
        return Planned(asked, space, most, ttl, now, blocks, pages)

    def _let_go(self, request: Hashable) -> None:
        for tier in (self.state.device, self.state.host.index):
            # Closed: nothing is pinned any more. Else its pins go at the plan's time limit.
            with contextlib.suppress(LightcacheError):
                tier.cancel(request)

    def _stop_reading(self, plan: Planned) -> None:
        if plan.reading is not None:
            self.state.traffic.foreign.cancel(plan.reading)

    def failed(self, request: Hashable) -> bool:
        """Whether the last plan of a request failed, or was let go of."""
        return request in self._failed

    def missed(self, request: Hashable, prompt: Prompt) -> PrefixMatch:
        """Nothing is found; what was asked is known to `prompt_of`."""
        self._failed[request] = prompt
        return PrefixMatch(len(prompt), why=Why.DISABLED)

    def prompt_of(self, request: Hashable) -> Prompt:
        """What a request asked whose plan failed, or cannot be taken. The plan goes.

        Raises:
            LeaseLost: it was not planned.
        """
        planned, failed = self._plans.get(request), self._failed.pop(request, None)
        if planned is None and failed is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        self.cancel(request)
        return failed if failed is not None else planned.asked.prompt  # type: ignore[union-attr]

    def holds(self, request: Hashable, now: float) -> bool:
        """Whether what was planned is pinned for half of its time still, so that planning it again
        would find no less. Never where an engine may evict it, or others are waited for."""
        plan = self._plans.get(request)
        if plan is None or plan.reading is not None:
            return False
        if self.state.config.same_prefix == "wait":
            return False
        return plan.settled > now or not plan.most

    def planned(self, request: Hashable) -> Planned:
        """The plan of a request that has one."""
        return self._plans[request]

    # ---- what of it can be used

    def _match(self, request: Hashable, plan: Planned, device: int, pages: int) -> PrefixMatch:
        if plan.match is not None and plan.matched == (device, pages) and not self._computing:
            return plan.match
        tokens = self.state.page_tokens
        end = (plan.host_first + pages) * tokens if pages else 0
        host = max(0, end - device)
        from_storage, pending = 0, False
        if plan.reading is not None:
            from_storage = min(host, int(plan.reading.pages_done) * tokens)
            pending = not plan.reading.over
        usable, why, cut = self.usable.of(plan, device, device + host)
        found = PrefixMatch(
            len(plan.asked.prompt),
            device,
            host - from_storage,
            from_storage,
            usable,
            why,
            cut,
            pending,
            self._other(request, plan, usable) if self._computing else None,
        )
        if plan.reading is None and not self._computing:
            plan.match, plan.matched = found, (device, pages)
        return found

    # ---- the same prefix, by two at once

    def _other(self, request: Hashable, plan: Planned, usable: int) -> Hashable | None:
        """Who computes the block that this one would compute first."""
        if plan.space is None:
            return None
        at = usable // self.state.device.block_tokens
        if at >= plan.blocks:
            return None
        key = plan.device_keys[at].tobytes() if at else plan.first_block()
        other = self._computing.get(key)
        late = time.monotonic() - plan.since >= self.state.config.wait_limit
        if other is None or other == request or late:
            return None
        if not plan.waited:
            plan.waited = True
            self.state.figures.add(waits=1)
        return other

    def computes(self, one: Request) -> None:
        """A request begins to compute what it has not."""
        if self.state.config.same_prefix == "wait" and one.wishes.write:
            for key in one.device_chain.keys[one.named :]:
                self._computing.setdefault(key.tobytes(), one.id)

    def computed(self, one: Request) -> None:
        """A request has ended: what it did not compute, it will not."""
        if self._computing:
            for key in one.device_chain.keys:
                if self._computing.get(digest := key.tobytes()) == one.id:
                    del self._computing[digest]

    def without_host(self, prompt: Prompt, match: PrefixMatch) -> int:
        """Tokens that are usable of a match if nothing is loaded."""
        return self.usable.without_host(prompt, match)

    # ---- taking

    def reading(self, request: Hashable, now: float) -> tuple[StorageTask, float] | None:
        """What brings pages from storage for a plan that is to be taken, and for how many seconds
        that is waited for still: as many in all, from the first call on, as computing what it may
        bring takes. None: it is over, or this time is. What the plan has found stays pinned.
        """
        plan = self._plans.get(request)
        if plan is None or plan.space is None or plan.reading is None or plan.reading.over:
            return None
        if plan.read_until is None:
            absent = plan.absent * self.state.page_tokens
            plan.asked_at, plan.read_until = now, now + self.state.pace.seconds(absent)
        if now >= plan.read_until:
            return None
        if plan.settled <= now:
            self._looker.again(request, plan)
        return plan.reading, plan.read_until - now

    def take(self, request: Hashable) -> tuple[Planned, PrefixMatch, Lease | None, Lease | None]:
        """The plan, what can be used of it, and its pins on the device and the host. What was let
        go, since the plan's time was up, is looked for once more. A read that is not over goes on:
        what it brings is for those who come next.

        Raises:
            LeaseLost: there is none.
        """
        plan = self._plans.get(request)
        if plan is None:
            raise LeaseLost(f"take: the request {request!r} was not planned; plan it first")
        state = self.state
        if plan.space is None or not state.weights.good(plan.space):
            self.cancel(request)
            plan.space = plan.reading = None  # it runs without
            return plan, self._match(request, plan, 0, 0), None, None
        try:
            if plan.nowhere:
                self._looker.again(request, plan)
            try:
                hit, host = self._pinned(request, plan)
            except LeaseLost:
                plan.ttl = max(plan.ttl, TIMEOUT)
                self._looker.again(request, plan)
                hit, host = self._pinned(request, plan)
        except BaseException:
            self.cancel(request)
            self._failed[request] = plan.asked.prompt  # it may still run, without the cache
            raise
        del self._plans[request]
        if plan.read_until is not None:
            waited = int((time.monotonic() - plan.asked_at) * 1e9)
            state.figures.add(storage_wait_ns=max(0, waited))
        device = len(hit) * state.device.block_tokens if hit is not None else plan.device
        match = self._match(request, plan, device, len(host) if host is not None else 0)
        return plan, match, hit, host

    def _pinned(self, request: Hashable, plan: Planned) -> tuple[Lease | None, Lease | None]:
        """What is pinned for a plan, on the device and the host, as leases.

        Raises:
            LeaseLost: it was let go, since the plan's time was up.
        """
        state, hit, host = self.state, None, None
        try:
            if state.device.index is not None and plan.blocks and not plan.nowhere:
                hit = state.device.take(request)
            if plan.on_host:
                host = state.host.index.take(request)
        except BaseException:
            if hit is not None:
                hit.release()
            raise
        return hit, host

    def cancel(self, request: Hashable) -> None:
        """Forget a plan."""
        self._failed.pop(request, None)
        plan = self._plans.get(request)
        if plan is None:
            return
        self._stop_reading(plan)
        plan.settled = 0.0
        self._let_go(request)
        self._plans.pop(request, None)  # last: an interrupt before leaves what is cancelled again

    def let_go(self) -> None:
        """The cache is not asked any more: nothing stays pinned. Who was planned may begin, and
        finds nothing."""
        for request, plan in list(self._plans.items()):
            self.cancel(request)
            self._failed[request] = plan.asked.prompt

    def close(self) -> None:
        """Forget all of them."""
        for request in list(self._plans):
            self.cancel(request)
        self._failed.clear()


__all__ = [
    "NO_KEYS",
    "Asked",
    "AskedMany",
    "Looker",
    "Planned",
    "Planner",
    "Usable",
    "Waiting",
    "asked_many",
    "asked_of",
    "by_space",
    "check_blocks",
    "check_commits",
    "check_hashable",
    "check_ids",
    "check_parts",
    "check_table",
    "numbers_of",
    "peek",
    "peek_behind",
]

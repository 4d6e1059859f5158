"""Router: which worker should serve a request, by what is cached where and how busy they are.

It reads shared memory and sends nothing: the lengths of prefixes come from peeking each worker's
device index and the node's host index. Without torch, and cheap enough for every request.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from lightcache import _arguments, namespaces
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LightcacheError
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.shm import names
from lightcache.shm.codes import Code, check

# ---- What a request costs a worker, and who gets it when several cost the same.

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RouterPolicy:
    """What a request costs, in tokens of prefill. For a worker with `device` pages of the prompt, a
    node with `host` pages of it, and n pages in all:

        compute = (n - max(device, host)) * page_tokens
        load    = max(host - device, 0) * page_tokens
        cost    = compute + host_weight * load + load_weight * load_of(worker)
    """

    page_tokens: int | None = None
    """Tokens of a page; None: what the host index says."""
    load_weight: float = 1.0
    """Tokens of prefill that one unit of `loads` is worth: 1 if loads are tokens that wait."""
    host_weight: float = 0.1
    """Loading a token from the host, compared with computing it, 0 to 1; see `costs.Costs`."""
    refresh: float = 1.0
    """Seconds between two looks at whether the indexes are there and their owners live."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a figure out of range.
        """
        if self.page_tokens is not None:
            _arguments.count(self.page_tokens, "page_tokens", 1, 1 << 30)
        check_figure(self.load_weight, "load_weight", math.inf)
        check_figure(self.host_weight, "host_weight", 1.0)
        check_figure(self.refresh, "refresh", math.inf)


def check_figure(value: Any, what: str, most: float) -> None:
    """A finite number from 0 to `most`.

    Raises:
        ConfigError: it is not.
    """
    if type(value) in (int, float) and 0 <= value <= most and value != math.inf:
        return  # the rest costs as much as a peek
    number = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= number <= most or number == math.inf:
        limit = "a finite number of at least 0" if most == math.inf else f"0 to {most:g}"
        raise ConfigError(f"{what}: expected {limit}, found {value!r}")


def seed_of(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mixed(word: int) -> int:
    """A word in which each bit depends on all bits. The worker with the largest one for a key has
    it (rendezvous hashing, Thaler and Ravishankar 1996): when one leaves, only its keys move."""
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return word ^ word >> 32


# ---- The indexes that a router looks at: attached read-only, let go when their owner is gone,
# and attached again when they appear.

_NOT_YET = "was not looked at so far"
_DEAD = "nobody who writes it lives"
_Names = tuple[str, str]


class Source:
    """One index by name, or none. Nothing that becomes of it is an error here: it is `stale` then,
    and has no pages.

    A handle that the caller gave is used as long as it is usable, and never closed. Our own are
    read-only: they take no slot and cannot change anything.
    """

    def __init__(self, given: PageIndex | str | None, *, owned: bool, page_tokens: int) -> None:
        """Nothing is attached yet.

        Args:
            owned: it is of no use when no client that is attached for writing lives.
            page_tokens: of the keys that are looked for.

        Raises:
            ConfigError: neither an index nor a segment's name.
        """
        if given is not None and not isinstance(given, (PageIndex, str)):
            raise ConfigError(f"expected a PageIndex, its name or None, found {given!r}")
        self._index = given if isinstance(given, PageIndex) else None
        self._ours = False
        self._owned, self._page_tokens = owned, page_tokens
        self.name = given.name if isinstance(given, PageIndex) else given
        if self.name is not None:
            names.object_name(self.name)
        self.problem: str | None = None if given is None else _NOT_YET
        """Why it counts as having no pages; None: it has those that are found."""
        self.misfit = False
        """Whether the problem is that its pages have another size than the keys."""
        self._refs: dict[_Names, Namespace | None] = {}

    def refresh(self) -> None:
        """Look whether it is there, and whose. Does not block; some 60 us, and as much again if it
        has to be attached."""
        if self.name is None:
            return
        self._refs.clear()
        self.problem, self.misfit = None, False
        if self._index is not None and not self._usable(self._index):
            self.let_go()
        try:
            if self._index is None:
                self._index = PageIndex.attach(self.name, readonly=True, timeout=0)
                self._ours = True
            living = not self._owned or any(client.alive for client in self._index.clients())
        except LightcacheError as error:
            self._fail(error)
            return
        if not living:
            # A reader keeps a segment from being replaced: its next owner may want another one.
            self.let_go()
            self.problem = _DEAD
        elif (tokens := page_tokens_of(self._index)) not in (None, self._page_tokens):
            name = self._index.name
            self.let_go()
            self.misfit = True
            self.problem = (
                f"index {name!r} has pages of {tokens} tokens, and the keys that are routed are of "
                f"{self._page_tokens}, so none of them can be found there; give the router indexes "
                "of one size, and keys of it (policy.page_tokens=): docs/guides/router.md, Keys"
            )

    def _usable(self, index: PageIndex) -> bool:
        with contextlib.suppress(LightcacheError):
            index.segment.check_usable()
            return True
        return False

    def _fail(self, error: LightcacheError) -> None:
        self.problem = str(error)

    def let_go(self) -> None:
        """Close what is ours."""
        index, self._index = self._index, None
        if index is not None and self._ours:
            with contextlib.suppress(LightcacheError):
                index.close()
        self._ours = False

    def peek(self, keys: Keys, weights: str, tenant: str) -> int:
        """Pages of the longest ready prefix; 0 if it is stale."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek(keys, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return 0

    def peek_many(self, keys: Keys, offsets: Offsets, weights: str, tenant: str) -> Pages:
        """The same for many requests: int32 of shape (requests,)."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek_many(keys, offsets, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return np.zeros(len(offsets) - 1, np.int32)

    def pages_of(self, weights: str, tenant: str) -> tuple[int, list[_Names]]:
        """Pages in the namespace of these names, and the names of all others that have some. About
        a microsecond for each of the 256 namespaces that there may be."""
        own, others = 0, []
        with contextlib.suppress(LightcacheError):
            index = self._index if self.problem is None else None
            for space in index.namespaces() if index is not None else []:
                pages = index.namespace_pages(space) if index is not None else 0
                if (space.weights, space.tenant) == (weights, tenant):
                    own = pages
                elif pages:
                    others.append((space.weights, space.tenant))
        return own, others

    def _space(self, weights: str, tenant: str) -> Namespace | None:
        """The namespace of these names as this index numbers it; it is looked for once between two
        refreshes, since clearing gives the name another number."""
        if self.problem is not None or self._index is None:
            return None
        wanted = weights, tenant
        if wanted not in self._refs:
            found = ctypes.c_uint32()
            encoded = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
            code = self._index.core.quick.lci_namespace_find(
                self._index.core.handle, *encoded, ctypes.byref(found)
            )
            if code != Code.MISSING:
                check(code, "look for a namespace")
            self._refs[wanted] = None if code else Namespace(weights, tenant, found.value)
        return self._refs[wanted]


def page_tokens_of(index: PageIndex) -> int | None:
    """Tokens of an index's page, be it a device block; None: it does not say."""
    config = index.segment.config
    found = config.get("page_tokens", config.get("block_tokens"))
    return found if type(found) is int else None


# ---- Router: which worker should serve a request, by what is cached where and how busy they are.
#
# It reads shared memory and sends nothing: the lengths of prefixes come from peeking each
# worker's device index and the node's host index. Without torch, and cheap enough for every
# request.

_log = logging.getLogger("lightcache.router")
_IN_A_ROW = 64
"""Requests without a page anywhere, one after another, that are told of once."""


@dataclass(frozen=True)
class RoutingDecision:
    """Where a request should go, and why."""

    worker: str
    device_pages: int
    """Pages of the prompt that the worker's device has."""
    host_pages: int
    """Pages of it that the node's host pool has; those beyond `device_pages` can be loaded."""
    costs: Mapping[str, float]
    """Of every worker that was asked for, in tokens of prefill."""
    stale: tuple[str, ...] = ()
    """Workers among these whose device index is gone, or whose owner is dead: counted as having
    nothing. `Router.problems` says why."""


@dataclass(frozen=True)
class RouterStats:
    """What a router has done so far."""

    requests: int
    by_worker: Mapping[str, int]
    pages: int
    """Of all prompts."""
    device_pages: int
    """Of these, on the device of the worker that was chosen."""
    host_pages: int
    """And beyond those in the host pool."""
    stale: int = 0
    """Requests for which a worker counted as having nothing because its index could not be read:
    `RoutingDecision.stale`."""
    missed: int = 0
    """Requests of which no index had the first page."""
    other_namespace: int = 0
    """Of these, requests whose namespace has no page in any index, while other namespaces have."""


@dataclass
class _Tally:
    requests: dict[str, int]
    pages: int = 0
    device: int = 0
    host: int = 0
    stale: int = 0
    missed: int = 0
    other_namespace: int = 0

    def note(self, n: int, choice: RoutingDecision) -> None:
        self.requests[choice.worker] += 1
        self.pages += n
        self.device += choice.device_pages
        self.host += max(choice.host_pages - choice.device_pages, 0)
        self.stale += bool(choice.stale)


@dataclass
class _Asked:
    """The workers of a call, with what is the same for all of its requests."""

    names: list[str]
    loads: list[float]
    weights: str
    tenant: str
    stale: tuple[str, ...] = ()
    named: bool = True
    """Whether the call named a namespace."""


class Router:
    """Picks a worker for each request. Threads may share one; a forked child makes its own.

        router = Router(cache, {"gpu0": "llama-gpu0", "gpu1": "llama-gpu1"})
        choice = router.route(keys, {"gpu0": 1200, "gpu1": 0})

    It takes no slot and no lock of any index and changes nothing in them. An index that is not
    there, was replaced, or has lost its owner is no error: its worker counts as having nothing on
    its device, is named in `RoutingDecision.stale`, and is attached again when it appears.
    """

    def __init__(
        self,
        host: Cache | PageIndex | None,
        workers: Mapping[str, PageIndex | str | None],
        *,
        policy: RouterPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look at all of them once.

        Args:
            host: the node's cache, or its index; None: there is none. Stays the caller's.
            workers: by name, the device index of each worker or data-parallel rank: attached
                already (stays the caller's), or the segment's name, or None if it shows none.
            clock: seconds; tests have their own.

        Raises:
            ConfigError: no worker, a name that is no text, an index that is none, nobody says how
                many tokens a page has, or an index has pages of another size than the keys. An
                index of another size that appears later is no error: see `problems`.
        """
        if not workers:
            raise ConfigError("workers: expected at least one")
        for name in workers:
            if name == "" or not isinstance(name, str):
                raise ConfigError(f"workers: expected names, found {name!r}")
        index = host.index if isinstance(host, Cache) else host
        if index is not None and not isinstance(index, PageIndex):
            raise ConfigError(f"host: expected a Cache, a PageIndex or None, found {host!r}")
        self.policy = RouterPolicy() if policy is None else policy
        tokens = self._page_tokens = _page_tokens(self.policy, index)
        self._index = index
        self._host = Source(index, owned=False, page_tokens=tokens)
        self._workers = {
            name: Source(given, owned=True, page_tokens=tokens) for name, given in workers.items()
        }
        self._seeds = {name: seed_of(name) for name in workers}
        self._tally = _Tally(dict.fromkeys(workers, 0))
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._next = -math.inf
        self._told: set[object] = set()
        """What was logged; it is logged once."""
        self._where: dict[tuple[str, str], tuple[int, set[tuple[str, str]]]] = {}
        """For each namespace in which nothing was found since the last refresh: pages that it has
        in all indexes, and the namespaces that have others."""
        self._in_a_row = 0
        self._look()
        for name, source in {"host": self._host, **self._workers}.items():
            if source.misfit:
                self.close()
                raise ConfigError(f"{name}: {source.problem}")

    # ---- routing

    def route(
        self,
        keys: Keys,
        loads: Mapping[str, float],
        *,
        among: Iterable[str] | None = None,
        namespace: Namespace | None = None,
    ) -> RoutingDecision:
        """The worker at which the request costs least; of equal ones the least loaded, of these one
        that is chosen by the prompt's first key: always the same, so that what a conversation
        leaves behind is where it goes next.

        About 2 us a worker and 5 ns a key of its prefix.

        Args:
            keys: of the prompt's pages, uint64 of shape (n, 2).
            loads: of every worker that may be chosen, at least 0, in units of which one is worth
                `policy.load_weight` tokens of prefill. Others are not looked at.
            among: only these; None: all.
            namespace: of which the keys are, by its names; None: that of the host index.

        Raises:
            ConfigError: keys of another shape, dtype or layout; a load that is missing, negative or
                not finite; a worker that is none, or nobody to choose from.
            Detached: closed.
        """
        n = _arguments.keys(keys)[1]
        with self._lock:
            asked = self._asked(loads, among, namespace)
            host = self._host.peek(keys, asked.weights, asked.tenant)
            device = [
                self._workers[name].peek(keys, asked.weights, asked.tenant) for name in asked.names
            ]
            asked.stale = self._stale(asked.names)
            choice = self._choose(n, int(keys[0, 0]) if n else 0, host, device, asked)
            self._note(n, choice, host or any(device), asked)
            return choice

    def route_many(
        self,
        keys: Keys,
        offsets: Offsets,
        loads: Mapping[str, float],
        *,
        among: Iterable[str] | None = None,
        namespace: Namespace | None = None,
        spread: bool = True,
    ) -> list[RoutingDecision]:
        """`route` for many requests, with one call of the core for each index.

        Args:
            offsets: request i has the keys [offsets[i], offsets[i+1]).
            spread: what a request costs its worker, its load apart, is added to the worker's load
                for the requests behind it: otherwise all of them go to the one that is idle.

        Raises:
            As `route`; also ConfigError for offsets that are not ascending to the number of keys.
        """
        bounds = _arguments.offsets(offsets, _arguments.keys(keys)[1])
        with self._lock:
            asked = self._asked(loads, among, namespace)
            where = asked.weights, asked.tenant
            host = self._host.peek_many(keys, bounds, *where).tolist()
            found = [
                self._workers[name].peek_many(keys, bounds, *where).tolist() for name in asked.names
            ]
            asked.stale = self._stale(asked.names)
            choices = []
            ends = bounds[1:].tolist()
            for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), ends, strict=True)):
                first = int(keys[begin, 0]) if end > begin else 0
                device = [pages[i] for pages in found]
                choice = self._choose(end - begin, first, host[i], device, asked)
                self._note(end - begin, choice, host[i] or any(device), asked)
                choices.append(choice)
                if spread:
                    at = asked.names.index(choice.worker)
                    asked.loads[at] = choice.costs[choice.worker]
            return choices

    def _asked(
        self,
        loads: Mapping[str, float],
        among: Iterable[str] | None,
        namespace: Namespace | None,
    ) -> _Asked:
        if self._closed:
            raise Detached("route: this router was closed; make another one")
        if self._clock() >= self._next:
            self._look()
        names = list(self._workers) if among is None else list(dict.fromkeys(among))
        if not names:
            raise ConfigError("among: expected at least one worker")
        tokens = []
        for name in names:
            if name not in self._workers:
                raise ConfigError(
                    f"among: there is no worker {name!r}; there are {', '.join(self._workers)}"
                )
            load = loads.get(name)
            if load is None:
                raise ConfigError(f"loads: expected one of {name!r} too, or leave it out in among=")
            check_figure(load, f"loads[{name!r}]", math.inf)
            tokens.append(self.policy.load_weight * load)
        space = namespace
        if space is None and self._index is not None:
            space = self._index.default_namespace
        home = ("", "") if space is None else (space.weights, space.tenant)
        return _Asked(names, tokens, *home, named=namespace is not None)

    def _stale(self, names: list[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self._workers[name].problem is not None)

    def _choose(
        self, n: int, first: int, host: int, device: list[int], asked: _Asked
    ) -> RoutingDecision:
        """`asked.loads` are tokens already."""
        page, weight = self._page_tokens, self.policy.host_weight
        costs = [
            ((n - max(pages, host)) + weight * max(host - pages, 0)) * page + load
            for pages, load in zip(device, asked.loads, strict=True)
        ]
        least = min(costs)
        best = [i for i, cost in enumerate(costs) if cost == least]
        if len(best) > 1:
            idlest = min(asked.loads[i] for i in best)
            best = [i for i in best if asked.loads[i] == idlest]
        at = best[0]
        if len(best) > 1:
            at = max(best, key=lambda i: mixed(self._seeds[asked.names[i]] ^ first))
        by_worker = MappingProxyType(dict(zip(asked.names, costs, strict=True)))
        return RoutingDecision(asked.names[at], device[at], host, by_worker, asked.stale)

    # ---- what is never found

    def _note(self, n: int, choice: RoutingDecision, found: int, asked: _Asked) -> None:
        self._tally.note(n, choice)
        if found:
            self._in_a_row = 0
        elif n:
            self._tally.missed += 1
            self._look_elsewhere(asked)

    def _look_elsewhere(self, asked: _Asked) -> None:
        """No index has a page of a request: keys that are made otherwise than the managers' look
        the same as a prompt that is new. Say what can be told apart."""
        names = asked.weights, asked.tenant
        if names not in self._where:
            looked = [self._host, *(self._workers[name] for name in asked.names)]
            found = [source.pages_of(*names) for source in looked]
            self._where[names] = sum(own for own, _ in found), {one for _, o in found for one in o}
        own, others = self._where[names]
        if own:
            self._in_a_row += 1
            if self._in_a_row == _IN_A_ROW:
                self._tell_of_keys()
        elif others:
            self._tally.other_namespace += 1
            self._tell_of_namespace(asked, others)

    def _tell_of_keys(self) -> None:
        if "keys" in self._told:
            return
        self._told.add("keys")
        _log.warning(
            "%d requests one after another had no page in any index; if their prompts have "
            "beginnings in common, their keys are not those of the managers: the fingerprint, the "
            "secret, %d tokens a page, the salt and the namespace must be the same",
            _IN_A_ROW,
            self._page_tokens,
        )

    def _tell_of_namespace(self, asked: _Asked, others: set[tuple[str, str]]) -> None:
        """A tenant that is new is no news, unless its call names none."""
        if asked.named and asked.weights in {weights for weights, _ in others}:
            return
        if ("weights", asked.weights) in self._told:
            return
        self._told.add(("weights", asked.weights))
        _log.warning(
            "requests are routed under weights %r, tenant %r, of which no index has a page; there "
            "are pages under %s: give hash_pages and route the same namespace=, or `use` it in the "
            "cache that the router has",
            asked.weights,
            asked.tenant,
            ", ".join(f"weights {one!r}, tenant {two!r}" for one, two in sorted(others)[:4]),
        )

    # ---- looking after the indexes

    def _look(self) -> None:
        self._where.clear()
        for source in (self._host, *self._workers.values()):
            source.refresh()
            if source.misfit and source.problem not in self._told:
                self._told.add(source.problem)
                _log.warning("%s", source.problem)
        self._next = self._clock() + self.policy.refresh

    @property
    def problems(self) -> Mapping[str, str]:
        """Why a worker is stale, as of the last look; the host index under the name ""."""
        sources = {"": self._host, **self._workers}
        return {name: s.problem for name, s in sources.items() if s.problem is not None}

    @property
    def statistics(self) -> RouterStats:
        """What was routed so far: a snapshot."""
        with self._lock:
            tally, by_worker = self._tally, dict(self._tally.requests)
            return RouterStats(
                sum(by_worker.values()),
                MappingProxyType(by_worker),
                tally.pages,
                tally.device,
                tally.host,
                tally.stale,
                tally.missed,
                tally.other_namespace,
            )

    def close(self) -> None:
        """Let go of the indexes that were attached here. A second call does nothing."""
        with self._lock:
            self._closed = True
            for source in (self._host, *self._workers.values()):
                source.let_go()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _page_tokens(policy: RouterPolicy, host: PageIndex | None) -> int:
    found = None if host is None else page_tokens_of(host)
    if policy.page_tokens is not None:
        if found not in (None, policy.page_tokens):
            raise ConfigError(
                f"policy: expected page_tokens={found}, the size of the host's pages, found "
                f"{policy.page_tokens}; leave one of them out (docs/guides/router.md)"
            )
        return policy.page_tokens
    if host is None:
        raise ConfigError("policy: without a host index, say page_tokens in it")
    return host.page_tokens


__all__ = [
    "Router",
    "RouterPolicy",
    "RouterStats",
    "RoutingDecision",
    "Source",
    "check_figure",
    "mixed",
    "page_tokens_of",
    "seed_of",
]

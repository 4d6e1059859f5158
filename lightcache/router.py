"""Router: picks a worker for each request, by cached prefixes and load.

It only reads shared memory and sends nothing: it gets prefix lengths by peeking each worker's
device index and the node's host index. Needs no torch, and is cheap enough for every request.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from lightcache import _arguments, namespaces
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached, LightcacheError
from lightcache.hashing import KeySpec
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.prompt import Prompt
from lightcache.shm import names
from lightcache.shm.codes import Code, check

# ---- Costs, and ties.

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RouterPolicy:
    """The cost of a request, in tokens of prefill. For a worker with `device` pages of the prompt,
    a node with `host` pages of it, and n pages in total:

        compute = (n - max(device, host)) * page_tokens
        load    = max(host - device, 0) * page_tokens
        cost    = compute + host_weight * load + load_weight * load_of(worker)

    For a `Prompt`, tokens are counted: n is its length, and each index has its own page size.
    """

    page_tokens: int | None = None
    """Tokens of a page, of routed keys; None: as in the host index."""
    load_weight: float = 1.0
    """Tokens of prefill that one unit of `loads` is worth: 1 if loads are waiting tokens."""
    host_weight: float = 0.1
    """Cost of loading a token from the host, relative to computing it, 0 to 1; see
    `costs.Costs`."""
    refresh: float = 1.0
    """Seconds between two checks that the indexes exist and their owners live."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a number is out of range.
        """
        if self.page_tokens is not None:
            _arguments.count(self.page_tokens, "page_tokens", 1, 1 << 30)
        check_figure(self.load_weight, "load_weight", math.inf)
        check_figure(self.host_weight, "host_weight", 1.0)
        check_figure(self.refresh, "refresh", math.inf)


def check_figure(value: Any, name: str, most: float) -> None:
    """Check that a value is a finite number from 0 to `most`.

    Raises:
        ConfigError: it is not.
    """
    if type(value) in (int, float) and 0 <= value <= most and value != math.inf:
        return  # the rest takes as long as a peek
    number = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= number <= most or number == math.inf:
        limit = "a finite number of at least 0" if most == math.inf else f"0 to {most:g}"
        raise ConfigError(f"{name}: expected {limit}, found {value!r}")


def seed_of(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def mixed(word: int) -> int:
    """Mix a word so that each bit depends on all bits. A key goes to the worker with the largest
    mixed word (rendezvous hashing, Thaler and Ravishankar 1996): if a worker leaves, only its keys
    move."""
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    word = (word ^ word >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return word ^ word >> 32


# ---- The indexes of a router: attached read-only, closed when their owner dies, reattached later.

_NOT_YET = "has not been checked yet"
_DEAD = "no client attached for writing lives"
_Names = tuple[str, str]


class Source:
    """One index by name, or none. A missing or broken index is not an error: the source is then
    stale and has no pages.

    A handle that the caller passed is used while it is usable, and never closed. The source's own
    handles are read-only: they take no slot and cannot change anything.
    """

    def __init__(
        self,
        index: PageIndex | str | None,
        *,
        owned: bool,
        page_tokens: int,
        any_size: bool = False,
    ) -> None:
        """Attaches to nothing yet.

        Args:
            owned: True: the index is stale if no client attached for writing lives.
            page_tokens: page size of the keys that are looked up.
            any_size: True: keys are made for the index's own page size, and `page_tokens` is only
                for an index that does not state its own.

        Raises:
            ConfigError: neither an index nor a segment's name.
        """
        if index is not None and not isinstance(index, (PageIndex, str)):
            raise ConfigError(f"expected a PageIndex, its name or None, found {index!r}")
        self._index = index if isinstance(index, PageIndex) else None
        self._ours = False
        self._owned, self._any_size, self._default = owned, any_size, page_tokens
        self.page_tokens = page_tokens
        """Tokens of a page of the keys to look up here, as of the last refresh."""
        self.name = index.name if isinstance(index, PageIndex) else index
        if self.name is not None:
            names.object_name(self.name)
        self.problem: str | None = None if index is None else _NOT_YET
        """Why it counts as having no pages; None: it is usable."""
        self.misfit = False
        """True if the problem is a page size that differs from that of the keys."""
        self._refs: dict[_Names, Namespace | None] = {}

    def refresh(self) -> None:
        """Check that the index exists and has a live owner. Does not block. Takes about 60 us, and
        twice as long if it attaches."""
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
            # A reader prevents replacing a segment, and its next owner may need a different one.
            self.let_go()
            self.problem = _DEAD
        elif self._any_size:
            self.page_tokens = page_tokens_of(self._index) or self._default
        elif (tokens := page_tokens_of(self._index)) not in (None, self._default):
            name = self._index.name
            self.let_go()
            self.misfit = True
            self.problem = (
                f"index {name!r} has pages of {tokens} tokens, and the routed keys are of pages of "
                f"{self._default}, so none of them can be found there; give the router a spec= and "
                "route prompts, or keys of this page size (docs/guides/router.md, Keys)"
            )

    def _usable(self, index: PageIndex) -> bool:
        with contextlib.suppress(LightcacheError):
            index.segment.check_usable()
            return True
        return False

    def _fail(self, error: LightcacheError) -> None:
        self.problem = str(error)

    def let_go(self) -> None:
        """Close the source's own handle."""
        index, self._index = self._index, None
        if index is not None and self._ours:
            with contextlib.suppress(LightcacheError):
                index.close()
        self._ours = False

    def peek(self, keys: Keys, weights: str, tenant: str) -> int:
        """Pages of the longest ready prefix; 0 if the source is stale."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek(keys, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return 0

    def peek_many(self, keys: Keys, offsets: Offsets, weights: str, tenant: str) -> Pages:
        """`peek` for many requests: int32 of shape (requests,)."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                return self._index.peek_many(keys, offsets, namespace=space)
        except LightcacheError as error:
            self._fail(error)
        return np.zeros(len(offsets) - 1, np.int32)

    def pages_of(self, weights: str, tenant: str) -> tuple[int, list[_Names]]:
        """Return the number of pages in this namespace, and the names of all other namespaces that
        have pages. About a microsecond for each of at most 256 namespaces."""
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
        """This index's namespace of these names. Looked up once between two refreshes, because
        clearing gives the name another number."""
        if self.problem is not None or self._index is None:
            return None
        wanted = weights, tenant
        if wanted not in self._refs:
            number = ctypes.c_uint32()
            encoded = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
            code = self._index.core.quick.lci_namespace_find(
                self._index.core.handle, *encoded, ctypes.byref(number)
            )
            if code != Code.MISSING:
                check(code, "look for a namespace")
            self._refs[wanted] = None if code else Namespace(weights, tenant, number.value)
        return self._refs[wanted]


def page_tokens_of(index: PageIndex) -> int | None:
    """Tokens of a page or device block of an index; None: not in its configuration."""
    config = index.segment.config
    tokens = config.get("page_tokens", config.get("block_tokens"))
    return tokens if type(tokens) is int else None


# ---- The router.

_log = logging.getLogger("lightcache.router")
_IN_A_ROW = 64
"""Number of consecutive requests without a page in any index that causes a warning, once."""
_MOST_SPECS = 4096
"""Specs that a router keeps: sixteen times the namespaces of an index."""


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen worker for a request, and the reasons."""

    worker: str
    device_pages: int
    """Pages of the prompt on the worker's device, in pages of its index."""
    host_pages: int
    """Pages of the prompt in the node's host pool, in pages of that; what they have beyond
    `device_pages` can be loaded."""
    costs: Mapping[str, float]
    """Cost of each candidate worker, in tokens of prefill."""
    stale: tuple[str, ...] = ()
    """Candidates whose device index is gone or whose owner is dead. They count as having no pages.
    `Router.problems` has the reasons."""


@dataclass(frozen=True)
class RouterStats:
    """Totals of a router. Pages are those of the routed keys, or of the router's `spec`; then each
    request's are rounded down."""

    requests: int
    by_worker: Mapping[str, int]
    pages: int
    """Pages of all prompts."""
    device_pages: int
    """Of these, pages on the device of the chosen worker."""
    host_pages: int
    """Further pages in the host pool."""
    stale: int = 0
    """Requests for which a worker counted as having no pages because its index could not be read:
    `RoutingDecision.stale`."""
    missed: int = 0
    """Requests whose first page was in no index."""
    other_namespace: int = 0
    """Of these, requests whose namespace has no page in any index, while other namespaces have
    pages."""


@dataclass
class _Tally:
    requests: dict[str, int]
    pages: int = 0
    device: int = 0
    host: int = 0
    stale: int = 0
    missed: int = 0
    other_namespace: int = 0

    def note(self, n: int, decision: RoutingDecision, device: int, host: int) -> None:
        """Count a request, with its pages in one unit."""
        self.requests[decision.worker] += 1
        self.pages += n
        self.device += device
        self.host += max(host - device, 0)
        self.stale += bool(decision.stale)


@dataclass
class _Query:
    """The workers of a call, and the data shared by its requests."""

    names: list[str]
    loads: list[float]
    weights: str
    tenant: str
    stale: tuple[str, ...] = ()
    named: bool = True
    """True if the call passed a namespace."""


class Router:
    """Picks a worker for each request. Threads may share one; a forked child makes its own.

        router = Router(cache, {"gpu0": "llama-gpu0", "gpu1": "llama-gpu1"})
        choice = router.route(keys, {"gpu0": 1200, "gpu1": 0})

    With a `spec` it takes prompts instead of keys, and makes keys for each index, whatever its page
    size:

        router = Router(cache, {"gpu0": "llama-gpu0"}, spec=cache.key_spec())
        choice = router.route(Prompt(tokens, tenant="a"), {"gpu0": 0}, weights="step-1000")

    It takes no slot and no lock of any index and changes nothing in them. An index that is missing,
    was replaced, or has lost its owner is not an error: its worker counts as having no pages on its
    device and is named in `RoutingDecision.stale`. The router attaches again when the index
    appears.
    """

    def __init__(
        self,
        host: Cache | PageIndex | None,
        workers: Mapping[str, PageIndex | str | None],
        *,
        policy: RouterPolicy | None = None,
        spec: KeySpec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Checks all indexes once.

        Args:
            host: the node's cache, or its index; None: there is none. The caller closes it.
            workers: the device index of each worker or data-parallel rank, by name: an attached
                index (the caller closes it), a segment's name, or None if the worker publishes
                none.
            spec: of the managers' keys, as from `Cache.key_spec`: `route` then takes prompts.
                Its page size is that of indexes which do not state their own; its weights are the
                default of `route`. None: `route` takes keys of one page size.
            clock: returns seconds; tests pass their own.

        Raises:
            ConfigError: no worker, a name that is not text, an invalid index or spec, no page size
                given, or two (`policy.page_tokens` and that of `spec`). Without a spec also an
                index whose page size differs from that of the keys; one that appears later is not
                an error: see `problems`.
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
        tokens = self._page_tokens = _page_tokens(self.policy, index, spec)
        self._index, self._spec = index, spec
        self._specs: dict[tuple[int, str, str], KeySpec] = {}
        """Specs by page size, weights and tenant: a prompt knows its keys by the spec's object."""
        any_size = spec is not None
        self._host = Source(index, owned=False, page_tokens=tokens, any_size=any_size)
        self._workers = {
            name: Source(index_or_name, owned=True, page_tokens=tokens, any_size=any_size)
            for name, index_or_name in workers.items()
        }
        self._seeds = {name: seed_of(name) for name in workers}
        self._tally = _Tally(dict.fromkeys(workers, 0))
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._next = -math.inf
        self._told: set[object] = set()
        """Problems that were logged; each is logged once."""
        self._where: dict[tuple[str, str], tuple[int, set[tuple[str, str]]]] = {}
        """For each namespace without a hit since the last refresh: the number of its pages in all
        indexes, and the other namespaces that have pages."""
        self._in_a_row = 0
        self._look()
        for name, source in {"host": self._host, **self._workers}.items():
            if source.misfit:
                self.close()
                raise ConfigError(f"{name}: {source.problem}")

    # ---- routing

    def route(
        self,
        keys: Keys | Prompt,
        loads: Mapping[str, float],
        *,
        among: Iterable[str] | None = None,
        namespace: Namespace | None = None,
        weights: str | None = None,
    ) -> RoutingDecision:
        """Return the worker with the least cost. Ties go to the least loaded worker, then to one
        chosen by the prompt's first key. That choice is always the same, so a conversation returns
        to the pages that it left.

        About 2 us a worker and 5 ns a key of its prefix. The keys of a prompt are hashed once for
        each page size, weights version and router.

        Args:
            keys: of the prompt's pages, uint64 of shape (n, 2); or, for a router with a `spec`, the
                prompt.
            loads: load of each candidate worker, at least 0. One unit is worth `policy.load_weight`
                tokens of prefill. Other entries are ignored.
            among: the candidate workers; None: all.
            namespace: of the keys, by its names; None: that of the host index. Not with a prompt,
                which has its tenant.
            weights: version of the weights, of a prompt; None: that of `spec`.

        Raises:
            ConfigError: keys of another shape, dtype or layout; keys with a spec, or a prompt
                without one; a load that is missing, negative or not finite; an unknown worker, or
                no candidates; names that no namespace can have.
            Detached: closed.
        """
        if isinstance(keys, Prompt):
            if namespace is not None:
                raise ConfigError(
                    "namespace: expected none with a prompt, which has its tenant; give weights="
                )
            return self._route_prompt(keys, loads, among, weights)
        self._check_takes_keys("route", weights)
        n = _arguments.keys(keys)[1]
        with self._lock:
            query = self._query(loads, among, namespace)
            host = self._host.peek(keys, query.weights, query.tenant)
            device = [
                self._workers[name].peek(keys, query.weights, query.tenant) for name in query.names
            ]
            query.stale = self._stale(query.names)
            decision = self._choose(n, int(keys[0, 0]) if n else 0, host, device, query)
            self._note(n, decision, host or any(device), query)
            return decision

    def _check_takes_keys(self, call: str, weights: str | None = None) -> None:
        if self._spec is not None:
            raise ConfigError(
                f"{call}: expected a Prompt for `route`, since this router has a spec= and makes "
                "the keys of each index; found keys or another object"
            )
        if weights is not None:
            raise ConfigError("weights: expected none with keys; give namespace=")

    def _route_prompt(
        self,
        prompt: Prompt,
        loads: Mapping[str, float],
        among: Iterable[str] | None,
        weights: str | None,
    ) -> RoutingDecision:
        if self._spec is None:
            raise ConfigError(
                "route: expected keys, found a Prompt; make the router with spec=, as from "
                "`Cache.key_spec`, to route prompts"
            )
        version = self._spec.weights if weights is None else weights
        names = version, prompt.tenant
        with self._lock:
            query = self._query(loads, among, None)
            query.weights, query.tenant, query.named = *names, True
            first = prompt.first_key(self._spec_of(self._page_tokens, *names))
            sources = [self._host, *(self._workers[name] for name in query.names)]
            sizes = {s.page_tokens for s in sources if s.problem is None and s.name is not None}
            keys = {size: prompt.keys(self._spec_of(size, *names)) for size in sizes}
            pages = [
                source.peek(keys[source.page_tokens], *names) if source.page_tokens in keys else 0
                for source in sources
            ]
            tokens = [n * source.page_tokens for n, source in zip(pages, sources, strict=True)]
            query.stale = self._stale(query.names)
            chosen, costs = self._cheapest(
                len(prompt), int.from_bytes(first[:8], sys.byteorder), tokens[0], tokens[1:], query
            )
            decision = RoutingDecision(
                query.names[chosen], pages[1 + chosen], pages[0], costs, query.stale
            )
            unit = self._page_tokens
            self._tally.note(
                len(prompt) // unit, decision, tokens[1 + chosen] // unit, tokens[0] // unit
            )
            self._note_hits(any(pages), len(prompt) >= min(s.page_tokens for s in sources), query)
            return decision

    def _spec_of(self, page_tokens: int, weights: str, tenant: str) -> KeySpec:
        """The spec of one page size and namespace, the same object at each call.

        Raises:
            ConfigError: a name that no namespace can have.
        """
        spec = self._specs.get((page_tokens, weights, tenant))
        if spec is None:
            assert self._spec is not None
            for what, name in (("weights", weights), ("tenant", tenant)):
                if not isinstance(name, str):
                    raise ConfigError(f"{what}: expected text, found {name!r}")
                namespaces.encoded(name, what)
            if len(self._specs) >= _MOST_SPECS:
                self._specs.clear()
            spec = replace(self._spec, page_tokens=page_tokens, weights=weights, namespace=tenant)
            self._specs[page_tokens, weights, tenant] = spec
        return spec

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
            spread: True: the cost of each request, without the load, is added to its worker's load
                for the requests after it. False: all of them may go to the same idle worker.

        Raises:
            As `route`; also ConfigError for offsets that do not ascend to the number of keys, and
            for a router with a `spec`: route its prompts one by one.
        """
        self._check_takes_keys("route_many")
        bounds = _arguments.offsets(offsets, _arguments.keys(keys)[1])
        with self._lock:
            query = self._query(loads, among, namespace)
            where = query.weights, query.tenant
            host = self._host.peek_many(keys, bounds, *where).tolist()
            pages_by_worker = [
                self._workers[name].peek_many(keys, bounds, *where).tolist() for name in query.names
            ]
            query.stale = self._stale(query.names)
            decisions = []
            ends = bounds[1:].tolist()
            for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), ends, strict=True)):
                first = int(keys[begin, 0]) if end > begin else 0
                device = [pages[i] for pages in pages_by_worker]
                decision = self._choose(end - begin, first, host[i], device, query)
                self._note(end - begin, decision, host[i] or any(device), query)
                decisions.append(decision)
                if spread:
                    chosen = query.names.index(decision.worker)
                    query.loads[chosen] = decision.costs[decision.worker]
            return decisions

    def _query(
        self,
        loads: Mapping[str, float],
        among: Iterable[str] | None,
        namespace: Namespace | None,
    ) -> _Query:
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
                    f"among: expected some of {', '.join(self._workers)}, found {name!r}"
                )
            load = loads.get(name)
            if load is None:
                raise ConfigError(
                    f"loads: expected a load of {name!r} too; or pass among= without it"
                )
            check_figure(load, f"loads[{name!r}]", math.inf)
            tokens.append(self.policy.load_weight * load)
        space = namespace
        if space is None and self._index is not None:
            space = self._index.default_namespace
        home = ("", "") if space is None else (space.weights, space.tenant)
        return _Query(names, tokens, *home, named=namespace is not None)

    def _stale(self, names: list[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self._workers[name].problem is not None)

    def _choose(
        self, n: int, first: int, host: int, device: list[int], query: _Query
    ) -> RoutingDecision:
        """For keys: n, host and device are in pages of one size."""
        page = self._page_tokens
        tokens = [pages * page for pages in device]
        chosen, costs = self._cheapest(n * page, first, host * page, tokens, query)
        return RoutingDecision(query.names[chosen], device[chosen], host, costs, query.stale)

    def _cheapest(
        self, n: int, first: int, host: int, device: list[int], query: _Query
    ) -> tuple[int, Mapping[str, float]]:
        """The number of the chosen worker, and the costs by worker. All in tokens, `query.loads`
        too."""
        weight = self.policy.host_weight
        costs = [
            (n - max(tokens, host)) + weight * max(host - tokens, 0) + load
            for tokens, load in zip(device, query.loads, strict=True)
        ]
        least = min(costs)
        best = [i for i, cost in enumerate(costs) if cost == least]
        if len(best) > 1:
            idlest = min(query.loads[i] for i in best)
            best = [i for i in best if query.loads[i] == idlest]
        chosen = best[0]
        if len(best) > 1:
            chosen = max(best, key=lambda i: mixed(self._seeds[query.names[i]] ^ first))
        return chosen, MappingProxyType(dict(zip(query.names, costs, strict=True)))

    # ---- requests without a hit

    def _note(self, n: int, decision: RoutingDecision, hits: int, query: _Query) -> None:
        self._tally.note(n, decision, decision.device_pages, decision.host_pages)
        self._note_hits(bool(hits), n > 0, query)

    def _note_hits(self, hits: bool, has_keys: bool, query: _Query) -> None:
        if hits:
            self._in_a_row = 0
        elif has_keys:
            self._tally.missed += 1
            self._look_elsewhere(query)

    def _look_elsewhere(self, query: _Query) -> None:
        """Called for a request of which no index has a page. Keys that are not made as the
        managers' keys look like keys of a new prompt, so warn about the cases that differ."""
        names = query.weights, query.tenant
        if names not in self._where:
            sources = [self._host, *(self._workers[name] for name in query.names)]
            counts = [source.pages_of(*names) for source in sources]
            others = {names for _, list_of_others in counts for names in list_of_others}
            self._where[names] = sum(own for own, _ in counts), others
        own, others = self._where[names]
        if own:
            self._in_a_row += 1
            if self._in_a_row == _IN_A_ROW:
                self._tell_of_keys()
        elif others:
            self._tally.other_namespace += 1
            self._tell_of_namespace(query, others)

    def _tell_of_keys(self) -> None:
        if "keys" in self._told:
            return
        self._told.add("keys")
        _log.warning(
            "%d requests in a row had no page in any index; if their prompts share prefixes, their "
            "keys are not the managers' keys: the fingerprint, the secret, %d tokens a page, the "
            "salt and the namespace must be the same",
            _IN_A_ROW,
            self._page_tokens,
        )

    def _tell_of_namespace(self, query: _Query, others: set[tuple[str, str]]) -> None:
        """Warn about a namespace without pages. A new tenant is normal if the call passed its
        namespace."""
        if query.named and query.weights in {weights for weights, _ in others}:
            return
        if ("weights", query.weights) in self._told:
            return
        self._told.add(("weights", query.weights))
        _log.warning(
            "requests are routed with weights %r, tenant %r, and no index has a page of these; "
            "there are pages of %s: pass the same namespace= to hash_pages and route (with a "
            "prompt: weights=), or `use` it in the router's cache",
            query.weights,
            query.tenant,
            ", ".join(f"weights {one!r}, tenant {two!r}" for one, two in sorted(others)[:4]),
        )

    # ---- refresh and statistics

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
        """Why each stale worker is stale, as of the last check. The host index has the name ""."""
        sources = {"": self._host, **self._workers}
        return {name: s.problem for name, s in sources.items() if s.problem is not None}

    @property
    def statistics(self) -> RouterStats:
        """A snapshot of the totals."""
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
        """Close the indexes that the router attached. A second call does nothing."""
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


def _page_tokens(policy: RouterPolicy, host: PageIndex | None, spec: KeySpec | None) -> int:
    if spec is not None:
        if not isinstance(spec, KeySpec):
            raise ConfigError(f"spec: expected a KeySpec, as of `Cache.key_spec`, found {spec!r}")
        if policy.page_tokens not in (None, spec.page_tokens):
            raise ConfigError(
                f"policy: expected no page_tokens beside spec=, which has {spec.page_tokens}, "
                f"found {policy.page_tokens}; leave it out"
            )
        return spec.page_tokens
    tokens = None if host is None else page_tokens_of(host)
    if policy.page_tokens is not None:
        if tokens not in (None, policy.page_tokens):
            raise ConfigError(
                f"policy: expected page_tokens={tokens}, the host's page size, found "
                f"{policy.page_tokens}; leave one of them out (docs/guides/router.md)"
            )
        return policy.page_tokens
    if host is None:
        raise ConfigError("policy: expected page_tokens, as there is no host index; set it")
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

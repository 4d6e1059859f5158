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

# ---- Costs, and ties.

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RouterPolicy:
    """The cost of a request, in tokens of prefill. For a worker with `device` pages of the prompt,
    a node with `host` pages of it, and n pages in total:

        compute = (n - max(device, host)) * page_tokens
        load    = max(host - device, 0) * page_tokens
        cost    = compute + host_weight * load + load_weight * load_of(worker)
    """

    page_tokens: int | None = None
    """Tokens of a page; None: as in the host index."""
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

    def __init__(self, index: PageIndex | str | None, *, owned: bool, page_tokens: int) -> None:
        """Attaches to nothing yet.

        Args:
            owned: True: the index is stale if no client attached for writing lives.
            page_tokens: page size of the keys that are looked up.

        Raises:
            ConfigError: neither an index nor a segment's name.
        """
        if index is not None and not isinstance(index, (PageIndex, str)):
            raise ConfigError(f"expected a PageIndex, its name or None, found {index!r}")
        self._index = index if isinstance(index, PageIndex) else None
        self._ours = False
        self._owned, self._page_tokens = owned, page_tokens
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
        elif (tokens := page_tokens_of(self._index)) not in (None, self._page_tokens):
            name = self._index.name
            self.let_go()
            self.misfit = True
            self.problem = (
                f"index {name!r} has pages of {tokens} tokens, and the routed keys are of pages of "
                f"{self._page_tokens}, so none of them can be found there; give the router indexes "
                "and keys of one page size (policy.page_tokens=): docs/guides/router.md, Keys"
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


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen worker for a request, and the reasons."""

    worker: str
    device_pages: int
    """Pages of the prompt on the worker's device."""
    host_pages: int
    """Pages of the prompt in the node's host pool; those beyond `device_pages` can be loaded."""
    costs: Mapping[str, float]
    """Cost of each candidate worker, in tokens of prefill."""
    stale: tuple[str, ...] = ()
    """Candidates whose device index is gone or whose owner is dead. They count as having no pages.
    `Router.problems` has the reasons."""


@dataclass(frozen=True)
class RouterStats:
    """Totals of a router."""

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

    def note(self, n: int, decision: RoutingDecision) -> None:
        self.requests[decision.worker] += 1
        self.pages += n
        self.device += decision.device_pages
        self.host += max(decision.host_pages - decision.device_pages, 0)
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Checks all indexes once.

        Args:
            host: the node's cache, or its index; None: there is none. The caller closes it.
            workers: the device index of each worker or data-parallel rank, by name: an attached
                index (the caller closes it), a segment's name, or None if the worker publishes
                none.
            clock: returns seconds; tests pass their own.

        Raises:
            ConfigError: no worker, a name that is not text, an invalid index, no page size given,
                or an index whose page size differs from that of the keys. An index of another page
                size that appears later is not an error: see `problems`.
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
            name: Source(index_or_name, owned=True, page_tokens=tokens)
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
        keys: Keys,
        loads: Mapping[str, float],
        *,
        among: Iterable[str] | None = None,
        namespace: Namespace | None = None,
    ) -> RoutingDecision:
        """Return the worker with the least cost. Ties go to the least loaded worker, then to one
        chosen by the prompt's first key. That choice is always the same, so a conversation returns
        to the pages that it left.

        About 2 us a worker and 5 ns a key of its prefix.

        Args:
            keys: of the prompt's pages, uint64 of shape (n, 2).
            loads: load of each candidate worker, at least 0. One unit is worth `policy.load_weight`
                tokens of prefill. Other entries are ignored.
            among: the candidate workers; None: all.
            namespace: of the keys, by its names; None: that of the host index.

        Raises:
            ConfigError: keys of another shape, dtype or layout; a load that is missing, negative or
                not finite; an unknown worker, or no candidates.
            Detached: closed.
        """
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
            As `route`; also ConfigError for offsets that do not ascend to the number of keys.
        """
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
        """`asked.loads` are in tokens."""
        page, weight = self._page_tokens, self.policy.host_weight
        costs = [
            ((n - max(pages, host)) + weight * max(host - pages, 0)) * page + load
            for pages, load in zip(device, query.loads, strict=True)
        ]
        least = min(costs)
        best = [i for i, cost in enumerate(costs) if cost == least]
        if len(best) > 1:
            idlest = min(query.loads[i] for i in best)
            best = [i for i in best if query.loads[i] == idlest]
        chosen = best[0]
        if len(best) > 1:
            chosen = max(best, key=lambda i: mixed(self._seeds[query.names[i]] ^ first))
        by_worker = MappingProxyType(dict(zip(query.names, costs, strict=True)))
        return RoutingDecision(query.names[chosen], device[chosen], host, by_worker, query.stale)

    # ---- requests without a hit

    def _note(self, n: int, decision: RoutingDecision, hits: int, query: _Query) -> None:
        self._tally.note(n, decision)
        if hits:
            self._in_a_row = 0
        elif n:
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
            "there are pages of %s: pass the same namespace= to hash_pages and route, or `use` it "
            "in the router's cache",
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


def _page_tokens(policy: RouterPolicy, host: PageIndex | None) -> int:
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

"""Router: picks a worker for each request, by cached prefixes and load.

It only reads shared memory and sends nothing: it gets prefix lengths by peeking each worker's
device index and the node's host index. Needs no torch, and is cheap enough for every request.
"""

from __future__ import annotations

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

from lightcache import _arguments, namespaces
from lightcache._arguments import Keys, Offsets
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached
from lightcache.groups import Rule
from lightcache.hashing import KeySpec
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.prompt import Prompt
from lightcache.routed_indexes import (
    Indexes,
    Target,
    UsablePrefix,
    joined_layers,
    page_tokens_of,
)

# ---- Costs, and ties.

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RouterPolicy:
    """The cost of a request, in tokens of prefill. For a worker with `device` usable pages of the
    prompt, a node with `host` usable pages of it, and n pages in total:

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
    """Usable pages of the prompt on the worker's device, in pages of its index: of its prefix, if
    it has several indexes."""
    host_pages: int
    """The same in the node's host pool, in pages of that; what they have beyond `device_pages` can
    be loaded."""
    costs: Mapping[str, float]
    """Cost of each candidate worker, in tokens of prefill."""
    stale: tuple[str, ...] = ()
    """Candidates with a device index that is gone or whose owner is dead. It counts as having no
    pages. `Router.problems` has the reasons."""


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
    """Requests of which no index had a page, usable or not."""
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

    Where the layers of a model have indexes of their own, a worker and the host have one for each
    rule, and what counts is what is usable: as far as the layers of every rule have their pages.

        host = {Rule.prefix(): cache, Rule.point(): states}
        gpu0 = {Rule.prefix(): "gpu0", Rule.point(): "gpu0-states"}
        router = Router(host, {"gpu0": gpu0}, spec=cache.key_spec())

    It takes no slot and no lock of any index and changes nothing in them. An index that is missing,
    was replaced, or has lost its owner is not an error: its worker counts as having no pages on its
    device and is named in `RoutingDecision.stale`. The router attaches again when the index
    appears.
    """

    def __init__(
        self,
        host: Cache | PageIndex | Indexes | None,
        workers: Mapping[str, PageIndex | str | Indexes | None],
        *,
        policy: RouterPolicy | None = None,
        spec: KeySpec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Checks all indexes once.

        Args:
            host: the node's cache, or its index; or a dict of these, or of names, by the rules of
                the layers; None: there is none. The caller closes them.
            workers: the device index of each worker or data-parallel rank, by name: an attached
                index (the caller closes it), a segment's name, a dict of these by rule, or None if
                the worker publishes none.
            spec: of the managers' keys, as from `Cache.key_spec`: `route` then takes prompts.
                Its page size is that of indexes which do not state their own; its weights are the
                default of `route`. None: `route` takes keys of one page size.
            clock: returns seconds; tests pass their own.

        Raises:
            ConfigError: no worker, a name that is not text, an invalid index, rule or spec, the
                spec of another cache than the host's first, no page size given, or two
                (`policy.page_tokens` and that of `spec`). Indexes by rule without a spec, none of
                them, or of several page sizes in one dict. Without a spec also an index whose page
                size differs from that of the keys. Sizes of one that appears later are not an
                error: see `problems`.
        """
        if not workers:
            raise ConfigError("workers: expected at least one")
        for name in workers:
            if name == "" or not isinstance(name, str):
                raise ConfigError(f"workers: expected names, found {name!r}")
        index = host.index if isinstance(host, Cache) else host
        if index is not None and not isinstance(index, (PageIndex, Mapping)):
            raise ConfigError(
                "host: expected a Cache, a PageIndex, a dict of these by rule, or None, found "
                f"{host!r}"
            )
        self.policy = RouterPolicy() if policy is None else policy
        self._index = index if isinstance(index, PageIndex) else None
        if spec is None and any(isinstance(one, Mapping) for one in (index, *workers.values())):
            raise ConfigError(
                "spec: expected a KeySpec beside indexes by rule, found None; give that of the "
                "cache whose keys they have, `Cache.key_spec()`, and route prompts"
            )
        tokens = self._page_tokens = _page_tokens(self.policy, self._index, spec)
        _check_fingerprint(host, spec)
        self._spec = spec
        self._specs: dict[tuple[int, str, str], KeySpec] = {}
        """Specs by page size, weights and tenant: a prompt knows its keys by the spec's object."""
        how: dict[str, Any] = {"page_tokens": tokens, "any_size": spec is not None}
        self._host = Target("host", index, owned=False, **how)
        self._workers = {
            name: Target(f"worker {name!r}", indexes, owned=True, **how)
            for name, indexes in workers.items()
        }
        self._layers = {
            name: joined_layers(worker, self._host) for name, worker in self._workers.items()
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
        for name, target in {"host": self._host, **self._workers}.items():
            if target.misfit:
                self.close()
                raise ConfigError(f"{name}: {target.problem}")

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

        About 4 us a worker and 5 ns a key of its prefix; with a prompt 7 us, and 6 more for each
        further rule. The keys of a prompt are hashed once for each page size, weights version and
        router. Of a prompt at most all tokens but the last count, as in a manager's plan.

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
            usable = UsablePrefix(prompt, self._host, self._spec_of, version, self._page_tokens)
            tokens = [usable.of(self._workers[name], self._layers[name]) for name in query.names]
            query.stale = self._stale(query.names)
            chosen, costs = self._cheapest(
                len(prompt), int.from_bytes(first[:8], sys.byteorder), tokens, query
            )
            name, (device, host) = query.names[chosen], tokens[chosen]
            unit = self._page_tokens
            decision = RoutingDecision(
                name,
                device // (self._workers[name].page_tokens or unit),
                host // (self._host.page_tokens or unit),
                costs,
                query.stale,
            )
            self._tally.note(len(prompt) // unit, decision, device // unit, host // unit)
            targets = [self._host, *(self._workers[each] for each in query.names)]
            least = min(filter(None, (one.page_tokens for one in targets)), default=unit)
            self._note_hits(usable.hit, len(prompt) > least, query)
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
        tokens = [(pages * page, host * page) for pages in device]
        chosen, costs = self._cheapest(n * page, first, tokens, query)
        return RoutingDecision(query.names[chosen], device[chosen], host, costs, query.stale)

    def _cheapest(
        self, n: int, first: int, usable: list[tuple[int, int]], query: _Query
    ) -> tuple[int, Mapping[str, float]]:
        """The number of the chosen worker, and the costs by worker. All in tokens, `query.loads`
        too.

        Args:
            usable: on the device of each worker, and on the host.
        """
        weight = self.policy.host_weight
        costs = [
            (n - max(device, host)) + weight * max(host - device, 0) + load
            for (device, host), load in zip(usable, query.loads, strict=True)
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
            targets = [self._host, *(self._workers[name] for name in query.names)]
            sources = [source for target in targets for source in target.groups.values()]
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
        for target in (self._host, *self._workers.values()):
            target.refresh()
            if target.misfit and target.problem not in self._told:
                self._told.add(target.problem)
                _log.warning("%s", target.problem)
        self._next = self._clock() + self.policy.refresh

    @property
    def problems(self) -> Mapping[str, str]:
        """Why each stale worker is stale, as of the last check. The host index has the name ""."""
        targets = {"": self._host, **self._workers}
        return {name: t.problem for name, t in targets.items() if t.problem is not None}

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
            for target in (self._host, *self._workers.values()):
                target.let_go()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_fingerprint(host: object, spec: KeySpec | None) -> None:
    """The host's first cache gives a model's keys."""
    first = host
    if isinstance(host, Mapping):
        first = host.get(Rule.prefix(), next(iter(host.values()), None))
    if isinstance(first, Cache) and spec is not None and first.fingerprint != spec.fingerprint:
        raise ConfigError(
            f"spec: expected the fingerprint {first.fingerprint!r} of the host {first.name!r}, "
            f"found {spec.fingerprint!r}, whose keys are not there; give that cache's `key_spec()`"
        )


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
    "check_figure",
    "mixed",
    "seed_of",
]

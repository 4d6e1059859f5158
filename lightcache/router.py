"""Router: which worker should serve a request, by what is cached where and how busy they are.

It reads shared memory and sends nothing: the lengths of prefixes come from peeking each worker's
device index and the node's host index. Without torch, and cheap enough for every request.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets
from lightcache._router_policy import RouterPolicy, check_figure, mixed, seed_of
from lightcache._router_sources import Source
from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex


@dataclass(frozen=True)
class Choice:
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


@dataclass
class _Tally:
    requests: dict[str, int]
    pages: int = 0
    device: int = 0
    host: int = 0

    def note(self, n: int, choice: Choice) -> None:
        self.requests[choice.worker] += 1
        self.pages += n
        self.device += choice.device_pages
        self.host += max(choice.host_pages - choice.device_pages, 0)


@dataclass
class _Asked:
    """The workers of a call, with what is the same for all of its requests."""

    names: list[str]
    loads: list[float]
    weights: str
    tenant: str
    stale: tuple[str, ...] = ()


class Router:
    """Picks a worker for each request. Threads may share one; a forked child makes its own.

        router = Router(cache, {"gpu0": "llama-gpu0", "gpu1": "llama-gpu1"})
        choice = router.route(keys, {"gpu0": 1200, "gpu1": 0})

    It takes no slot and no lock of any index and changes nothing in them. An index that is not
    there, was replaced, or has lost its owner is no error: its worker counts as having nothing on
    its device, is named in `Choice.stale`, and is attached again when it appears.
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
            ConfigError: no worker, a name that is no text, an index that is none, or nobody says
                how many tokens a page has.
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
        self._host = Source(index, owned=False)
        self._page_tokens = _page_tokens(self.policy, index)
        self._home = ("", "")
        if index is not None:
            self._home = index.default_namespace.weights, index.default_namespace.tenant
        self._workers = {name: Source(given, owned=True) for name, given in workers.items()}
        self._seeds = {name: seed_of(name) for name in workers}
        self._tally = _Tally(dict.fromkeys(workers, 0))
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._next = -math.inf
        self._look()

    # ---- routing

    def route(
        self,
        keys: Keys,
        loads: Mapping[str, float],
        *,
        among: Iterable[str] | None = None,
        namespace: Namespace | None = None,
    ) -> Choice:
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
            self._tally.note(n, choice)
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
    ) -> list[Choice]:
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
                self._tally.note(end - begin, choice)
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
        home = self._home if namespace is None else (namespace.weights, namespace.tenant)
        return _Asked(names, tokens, *home)

    def _stale(self, names: list[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self._workers[name].problem is not None)

    def _choose(self, n: int, first: int, host: int, device: list[int], asked: _Asked) -> Choice:
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
        return Choice(asked.names[at], device[at], host, by_worker, asked.stale)

    # ---- looking after the indexes

    def _look(self) -> None:
        self._host.refresh()
        for source in self._workers.values():
            source.refresh()
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
    if policy.page_tokens is not None:
        return policy.page_tokens
    if host is None:
        raise ConfigError("policy: without a host index, say page_tokens in it")
    return host.page_tokens


__all__ = ["Choice", "Router", "RouterPolicy", "RouterStats"]

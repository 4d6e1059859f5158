"""Plans: pages pinned for requests that wait, until the requests take them.

A scheduler looks up every waiting request in every step, long before it runs. The pages that it
counts on must still be there when the request's turn comes. So the pages of a lookup stay pinned
under the request's id, and repeating the lookup costs next to nothing. docs/design/index.md,
section 7.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets
from lightcache.errors import ConfigError
from lightcache.layout import MAX_PAGES
from lightcache.leases import Lease
from lightcache.namespaces import Namespace

# ---- The plans of one handle, by request and by deadline. Independent of the index.

PlanKey = tuple[int, bytes, int]
"""Identifies the keys of a request: their number, the last key (a digest of the whole prefix, so it
identifies them all), and the namespace."""
_SPARE = 64  # stale heap entries that are not worth removing


@dataclass(frozen=True)
class Plans:
    """The plans of one process."""

    requests: int
    """Requests that have a plan, including plans without pages."""
    pages: int
    """Pages pinned for them. A page that two plans share counts twice."""


class PinnedPrefix:
    """The pages pinned for one request, and the keys that they were pinned for."""

    __slots__ = ("after", "asked", "deadline", "due", "keys", "number", "pinned", "space")

    def __init__(self, keys: Keys, asked: PlanKey, space: Namespace, lease: Lease) -> None:
        """`keys` must not be shared: callers may reuse their buffers, or pass a slice of a large
        one."""
        self.keys = keys
        self.asked = asked
        self.space = space
        self.deadline = self.due = 0.0
        self.number = -1
        self.after: Keys | None = None
        pages = len(lease)
        self.pinned = (lease, pages, keys[max(pages - 1, 0) : pages + 1])

    def pin(self, lease: Lease) -> None:
        """Hold this lease. A single store, so an interrupt leaves either the old or the new
        state."""
        pages = len(lease)
        self.pinned = (lease, pages, self.keys[max(pages - 1, 0) : pages + 1])

    def count(self) -> None:
        """Count its keys, once, as hits and misses of this client: it ends."""
        self.lease.count_lookup(self.asked[0])

    def let_go(self) -> None:
        """Unpin. A second call does nothing."""
        self.lease.__exit__(None, None, None)

    @property
    def lease(self) -> Lease:
        """The lease of the pinned pages."""
        return self.pinned[0]

    @property
    def pages(self) -> int:
        """Number of pinned pages."""
        return self.pinned[1]

    @property
    def edge(self) -> Keys:
        """The last pinned key and the first unpinned one. Looking up these two tells whether the
        namespace is still open and whether the prefix has grown."""
        return self.pinned[2]


class PlanBook:
    """Plans in a dict, and a heap of (deadline, number, request).

    A heap entry is valid while its plan has the same number. An entry may come up too early,
    because renewing only stores the new deadline in the plan: then it is put back. It never comes
    up too late: a plan is pushed before it is stored, and again if its deadline is shortened. So
    renewing costs one store, and expiring one comparison if nothing has expired.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Empty. `clock` returns seconds; tests pass their own."""
        self.clock = clock
        self.lock = threading.RLock()  # re-entrant: a signal's handler may plan or cancel
        self.plans: dict[Hashable, PinnedPrefix] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()

    def enter(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        """Make this the request's plan, then release the pages of its previous plan."""
        if len(self._due) > _SPARE + 4 * len(self.plans):
            self._sort_out()
        self._schedule(request, plan, deadline)
        before = self.plans.get(request)
        self.plans[request] = plan
        if before is not None and before.lease is not plan.lease:
            before.let_go()

    def renew(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        """Set the plan's deadline."""
        if deadline < plan.due:
            self._schedule(request, plan, deadline)
        plan.deadline = deadline

    def _schedule(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        number = next(self._numbers)
        heapq.heappush(self._due, (deadline, number, request))
        # After the push: an interrupt in between leaves an entry that no plan matches.
        plan.number = number
        plan.deadline = plan.due = deadline

    def expire(self) -> float:
        """Drop expired plans. Returns the current time."""
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            _, number, request = self._due[0]
            plan = self.plans.get(request)
            if plan is not None and plan.number == number:
                if plan.deadline > now:
                    heapq.heapreplace(self._due, (plan.deadline, number, request))
                    plan.due = plan.deadline
                    continue
                self.drop(request)
            heapq.heappop(self._due)
        return now

    def drop(self, request: Hashable) -> bool:
        """Drop a plan and release its pages. Returns False if there is none."""
        plan = self.plans.pop(request, None)
        if plan is None:
            return False
        plan.count()
        plan.let_go()
        return True

    def _sort_out(self) -> None:
        self._due = [(p.deadline, p.number, request) for request, p in self.plans.items()]
        heapq.heapify(self._due)
        for plan in self.plans.values():
            plan.due = plan.deadline

    def totals(self) -> Plans:
        """Count the plans and their pages."""
        return Plans(len(self.plans), sum(plan.pages for plan in self.plans.values()))


# ---- Arguments of `plan_many`.

_KEY = np.dtype("V16")


@dataclass
class Queue:
    """A queue of requests: request i has keys[begins[i]:ends[i]]."""

    ids: list[Hashable]
    keys: Keys
    bounds: Offsets
    """The offsets as the caller passed them."""
    begins: Offsets
    ends: Offsets
    asked: list[PlanKey]
    limited: bool
    """True if there may be keys after `ends[i]` that are not looked up."""

    def keys_of(self, i: int) -> Keys:
        """Return a copy of request i's keys, so that a plan does not keep the keys of the whole
        queue."""
        own_keys: Keys = self.keys[self.begins[i] : self.ends[i]].copy()
        return own_keys

    def part(self, which: list[int]) -> tuple[Keys, Offsets]:
        """Return the keys of some requests, concatenated, and their offsets."""
        if len(which) == len(self.ids) and not self.limited and which == sorted(which):
            return self.keys, self.bounds
        return gathered(self.keys, self.begins[which], self.ends[which])


def queue_of(
    ids: Sequence[Hashable], keys: Keys, offsets: Offsets, limit: int | None, ref: int
) -> Queue:
    """Check the arguments of `plan_many`; `ref` is the namespace.

    Raises:
        ConfigError: see `PageIndex.plan_many`.
    """
    n = _arguments.keys(keys)[1]
    bounds = _arguments.offsets(offsets, n)
    begins, ends = bounds[:-1], bounds[1:]
    if limit is not None:
        ends = np.minimum(ends, begins + _arguments.count(limit, "limit", 0, MAX_PAGES))
    names = list(ids)
    if len(names) != len(begins):
        raise ConfigError(
            f"ids: expected one for each of {len(begins)} requests, found {len(names)}"
        )
    try:
        twice = len(set(names)) != len(names)
    except TypeError as error:
        raise ConfigError(f"ids: expected hashable ones: {error}") from None
    if twice:
        raise ConfigError("ids: one of them is named twice; a request has one plan")
    counts = (ends - begins).tolist()
    # A record of 16 bytes becomes one `bytes`, at a third of the cost of a list of two integers.
    # A request without keys gets another's last key: it may count as changed, at no cost.
    lasts = keys[ends - 1].view(_KEY).ravel().tolist() if n else [b""] * len(names)
    plan_keys = list(zip(counts, lasts, itertools.repeat(ref)))
    return Queue(names, keys, bounds, begins, ends, plan_keys, limit is not None)


def gathered(keys: Keys, begins: Offsets, ends: Offsets) -> tuple[Keys, Offsets]:
    """Return runs of keys, concatenated as the core takes them, and their offsets."""
    sizes = ends - begins
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    rows = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], sizes)
    return keys[rows], bounds


def seconds_of(timeout: Any) -> float:
    """Check a time limit.

    Raises:
        ConfigError: not a number of seconds, or below 0.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ConfigError(f"timeout: expected seconds, at least 0, found {timeout!r}")
    return float(timeout)


# ---- The default time limit.

TIMEOUT = 60.0
"""Seconds until a plan expires unless it is renewed: long for a queue, short for a leak."""


__all__ = [
    "TIMEOUT",
    "PinnedPrefix",
    "PlanBook",
    "PlanKey",
    "Plans",
    "Queue",
    "gathered",
    "queue_of",
    "seconds_of",
]

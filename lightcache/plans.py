"""The plans of an index: pages pinned tentatively for requests that wait, until they are taken.

A scheduler looks at every waiting request in every step, long before it runs. What it counted on
must still be there when the request's turn comes; so what a look has found stays pinned, under the
request's name, and looking again costs next to nothing. docs/design/index.md, section 7.
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

# ---- The plans of one handle: by request, and by when they end. Knows nothing of the index.

PlanKey = tuple[int, bytes, int]
"""What tells two requests apart: number of keys, the last of them (a key is a digest of all of its
prefix, so it names them all), namespace."""
_SPARE = 64  # entries of ended plans that are not worth sorting out


@dataclass(frozen=True)
class Plans:
    """What is planned now in one process."""

    requests: int
    """How many of them have a plan, those that found nothing included."""
    pages: int
    """Pages pinned for them; one that two plans share counts twice."""


class PinnedPrefix:
    """What is pinned for one request, and for which keys."""

    __slots__ = ("asked", "deadline", "due", "keys", "number", "pinned", "space")

    def __init__(self, keys: Keys, asked: PlanKey, space: Namespace, lease: Lease) -> None:
        """`keys` is ours alone: callers may use their buffers again, or have cut it from a large
        one."""
        self.keys = keys
        self.asked = asked
        self.space = space
        self.deadline = self.due = 0.0
        self.number = -1
        self.pin(lease)

    def pin(self, lease: Lease) -> None:
        """Hold this lease. One store: an interrupt finds the old or the new, not parts of both."""
        pages = len(lease)
        self.pinned = (lease, pages, self.keys[max(pages - 1, 0) : pages + 1])

    def let_go(self) -> None:
        """Unpin; nothing, if that was done."""
        self.lease.__exit__(None, None, None)

    @property
    def lease(self) -> Lease:
        """What is held."""
        return self.pinned[0]

    @property
    def pages(self) -> int:
        """How many of them."""
        return self.pinned[1]

    @property
    def edge(self) -> Keys:
        """The last key that is pinned, and the first that is not: what a look must cover to learn
        whether the namespace lives, and whether the prefix has grown."""
        return self.pinned[2]


class PlanBook:
    """Plans in a dict, and a heap of (when, number, request).

    An entry of the heap counts when its plan still bears its number. It may come up too early, for
    renewing a plan only notes the new time: then it is put back. Never too late: a plan is entered
    before it is known, and again if its time is shortened. So renewing costs one store, and
    dropping what has ended one comparison when nothing has.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Empty. `clock` gives seconds; tests have their own."""
        self.clock = clock
        self.lock = threading.RLock()  # re-entrant: a signal's handler may plan or cancel
        self.plans: dict[Hashable, PinnedPrefix] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()

    def enter(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        """From now on this is the request's plan; what it had before is let go behind that."""
        if len(self._due) > _SPARE + 4 * len(self.plans):
            self._sort_out()
        self._schedule(request, plan, deadline)
        before = self.plans.get(request)
        self.plans[request] = plan
        if before is not None and before.lease is not plan.lease:
            before.let_go()

    def renew(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        """Let it end then."""
        if deadline < plan.due:
            self._schedule(request, plan, deadline)
        plan.deadline = deadline

    def _schedule(self, request: Hashable, plan: PinnedPrefix, deadline: float) -> None:
        number = next(self._numbers)
        heapq.heappush(self._due, (deadline, number, request))
        # Behind the push: an interrupt in between leaves an entry that counts for nobody.
        plan.number = number
        plan.deadline = plan.due = deadline

    def expire(self) -> float:
        """Let go what has ended. Returns the present."""
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
        """Let its pages go. Whether there was a plan."""
        plan = self.plans.pop(request, None)
        if plan is None:
            return False
        plan.let_go()
        return True

    def _sort_out(self) -> None:
        self._due = [(p.deadline, p.number, request) for request, p in self.plans.items()]
        heapq.heapify(self._due)
        for plan in self.plans.values():
            plan.due = plan.deadline

    def totals(self) -> Plans:
        """How many, and how much."""
        return Plans(len(self.plans), sum(plan.pages for plan in self.plans.values()))


# ---- The arguments of `plan_many`, checked, and keys gathered for the core.

_KEY = np.dtype("V16")


@dataclass
class Queue:
    """A queue: request i asks for keys[begins[i]:ends[i]]."""

    ids: list[Hashable]
    keys: Keys
    bounds: Offsets
    """As they were given."""
    begins: Offsets
    ends: Offsets
    asked: list[PlanKey]
    limited: bool
    """Whether there may be keys behind `ends[i]` that are not asked for."""

    def keys_of(self, i: int) -> Keys:
        """Request i's, copied: a plan must not keep the keys of a whole queue alive."""
        found: Keys = self.keys[self.begins[i] : self.ends[i]].copy()
        return found

    def part(self, which: list[int]) -> tuple[Keys, Offsets]:
        """The keys of some requests, one behind the other, and their offsets."""
        if len(which) == len(self.ids) and not self.limited and which == sorted(which):
            return self.keys, self.bounds
        return gathered(self.keys, self.begins[which], self.ends[which])


def queue_of(
    ids: Sequence[Hashable], keys: Keys, offsets: Offsets, limit: int | None, ref: int
) -> Queue:
    """Check what `plan_many` was given; `ref` names the namespace.

    Raises:
        ConfigError: see there.
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
    # A record of 16 bytes becomes one `bytes`, at a third of what a list of two integers costs. A
    # request without keys gets somebody's: it may count as changed, and is matched in no time.
    lasts = keys[ends - 1].view(_KEY).ravel().tolist() if n else [b""] * len(names)
    asked = list(zip(counts, lasts, itertools.repeat(ref)))
    return Queue(names, keys, bounds, begins, ends, asked, limit is not None)


def gathered(keys: Keys, begins: Offsets, ends: Offsets) -> tuple[Keys, Offsets]:
    """Runs of keys one behind the other, as the core takes them, and their offsets."""
    sizes = ends - begins
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    rows = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], sizes)
    return keys[rows], bounds


def seconds_of(timeout: Any) -> float:
    """A time limit.

    Raises:
        ConfigError: not a number of seconds, or below 0.
    """
    if type(timeout) is float and timeout >= 0:
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ConfigError(f"timeout: expected seconds, at least 0, found {timeout!r}")
    return float(timeout)


# ---- The plans of an index: pages pinned tentatively for requests that wait, until they are
# taken.
#
# A scheduler looks at every waiting request in every step, long before it runs. What it counted
# on must still be there when the request's turn comes; so what a look has found stays pinned,
# under the request's name, and looking again costs next to nothing. docs/design/index.md,
# section 7.

TIMEOUT = 60.0
"""Seconds that a plan holds unless it is planned again: long for a queue, short for a leak."""


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

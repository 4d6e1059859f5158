"""The plans of an index: pages pinned tentatively for requests that wait, until they are taken.

A scheduler looks at every waiting request in every step, long before it runs. What it counted on
must still be there when the request's turn comes; so what a look has found stays pinned, under the
request's name, and looking again costs next to nothing. docs/design.md, section 7.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np

from lightcache import _arguments, namespaces
from lightcache._arguments import Keys, Offsets, Pages
from lightcache._plan_book import Plan, PlanBook, Plans
from lightcache._plan_queue import Queue, gathered, queue_of, seconds_of
from lightcache.attached import MAX_PAGES, Attached
from lightcache.errors import ConfigError, LeaseLost
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.shm.codes import Code, check

TIMEOUT = 60.0
"""Seconds that a plan holds unless it is planned again: long for a queue, short for a leak."""


class Planning(Attached):
    """Part of `PageIndex`: see there."""

    _book: PlanBook
    default_namespace: Namespace

    @property
    def plans(self) -> Plans:
        """How many requests have a plan in this process, and pages pinned for them. 0.2 us each.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        self._check_usable()
        with self._book.lock:
            self._book.expire()
            return self._book.totals()

    def plan(
        self,
        request: Hashable,
        keys: Keys,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
        frozen: bool = False,
    ) -> int:
        """Pin the longest ready prefix tentatively, for a request; returns its pages. `take`
        gives them as a lease, `cancel` lets them go.

        Planning the same keys again keeps what is pinned, looks whether the prefix has grown, and
        renews the time limit: two keys are looked at, however many there are. Other keys, or
        another namespace, replace the plan; pages that both have are not let go in between.

        A plan belongs to this handle. It ends with it, when the process dies, and `timeout` seconds
        after the last call of `plan` for it; its pages are then let go as soon as any of the calls
        about plans is made here. Threads may call all of them. No lock that another process could
        hold; a new plan costs a `match` and 5 us, an unchanged one 4 us, in `plan_many` 0.3 us.

        Args:
            request: its id, anything hashable.
            keys: of the request's whole prompt; copied, unless they are frozen.
            limit: most pages to pin; None: all.
            timeout: seconds; `math.inf`: for ever.
            frozen: nobody will ever write to this array, or use it for something else.

        Raises:
            ConfigError: keys of another shape, dtype or layout; an id that cannot be hashed; limit
                or timeout out of range. What was planned stays planned.
            NoSpace: one of the pages is pinned 65,535 times by this client. What was planned stays.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        count = _arguments.keys(keys)[1]
        if limit is not None:
            count = min(count, _arguments.count(limit, "limit", 0, MAX_PAGES))
            keys = keys[:count]
        seconds = seconds_of(timeout)
        space = self.default_namespace if namespace is None else namespace
        asked = count, keys[-1].tobytes() if count else b"", self._ref_of(space)
        self._check_usable()
        book = self._book
        with book.lock:
            deadline = book.expire() + seconds
            plan = self._plan_of(request)
            if plan is None or plan.asked != asked:
                lease = self._whole.match(keys, namespace=space)
                if plan is not None:
                    lease = self._better(plan, keys, lease, space)
                plan = Plan(keys if frozen else keys.copy(), asked, space, lease)
                book.enter(request, plan, deadline)
            else:
                self._look_again(plan)
                book.renew(request, plan, deadline)
            return plan.pages

    def plan_many(
        self,
        ids: Sequence[Hashable],
        keys: Keys,
        offsets: Offsets,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
    ) -> Pages:
        """`plan` for a whole queue in one call: int32 of shape (requests,), the pages of each. One
        call of the core for those that are known, one for those that are new or have changed or
        grown. About 0.3 us a request that is unchanged.

        Args:
            ids: of the requests, each once.
            limit: most pages to pin for each.

        Raises:
            As `plan`; on an error nothing has changed.
            ConfigError: also when an id is named twice, or their number is not that of `offsets`.
        """
        space = self.default_namespace if namespace is None else namespace
        queue = queue_of(ids, keys, offsets, limit, self._ref_of(space))
        seconds = seconds_of(timeout)
        self._check_usable()
        book = self._book
        with book.lock:
            deadline = book.expire() + seconds
            plans = list(map(book.plans.get, queue.ids))
            same = [
                i
                for i, (plan, asked) in enumerate(zip(plans, queue.asked, strict=True))
                if plan is not None and plan.asked == asked
            ]
            kept = cast(
                "list[Plan]", plans if len(same) == len(plans) else [plans[i] for i in same]
            )
            counts = np.zeros(len(plans), np.int32)
            again: list[int] = []
            if kept:
                counts[same] = [plan.pinned[1] for plan in kept]
                again = self._grown(queue, np.array(same, np.int64), counts, space)
            new = sorted(set(range(len(plans))).difference(same)) if len(kept) < len(plans) else []
            leases = self._match_some(queue, [*again, *new], space)
            for i, plan in zip(same, kept, strict=True):
                if deadline < plan.due:
                    book.renew(queue.ids[i], plan, deadline)
                plan.deadline = deadline
            for i, lease in zip(again, leases, strict=False):
                counts[i] = self._exchange(cast("Plan", plans[i]), lease)
            for i, lease in zip(new, leases[len(again) :], strict=True):
                its = queue.keys_of(i)
                lease = self._better(plans[i], its, lease, space)
                plan = Plan(its, queue.asked[i], space, lease)
                book.enter(queue.ids[i], plan, deadline)
                counts[i] = plan.pages
            return counts

    def take(self, request: Hashable) -> Lease:
        """The plan's pages as a lease: no fewer than were planned, more if the prefix has grown
        (never more than `limit`). The plan is gone then.

        If its namespace was cleared meanwhile the lease is empty: nothing computed with old weights
        is handed out. About 4 us; as `match`, if the prefix has grown.

        Raises:
            LeaseLost: there is no plan of this id: never planned, taken, cancelled, or past its
                time limit.
            ConfigError: an id that cannot be hashed.
            NoSpace: as `plan`. The plan is still there.
            Detached: closed, replaced, or a forked child.
        """
        self._check_usable()
        book = self._book
        with book.lock:
            book.expire()
            plan = self._plan_of(request)
            if plan is None:
                raise LeaseLost(
                    f"take: there is no plan of {request!r}: never made, taken or cancelled, "
                    "or not renewed within its timeout; plan it again, or match"
                )
            self._look_again(plan)
            del book.plans[request]  # an interrupt behind this drops the lease, which releases it
            return plan.lease

    def cancel(self, request: Hashable) -> bool:
        """Let a plan's pages go. False: there was none, or its time limit has passed.

        Raises:
            ConfigError: an id that cannot be hashed.
            Detached: closed, or a forked child.
        """
        if self._unusable():
            self._segment.check_usable()
        book = self._book
        with book.lock:
            book.expire()
            return self._plan_of(request) is not None and book.drop(request)

    # ---- underneath

    def _plan_of(self, request: Hashable) -> Plan | None:
        try:
            return self._book.plans.get(request)
        except TypeError as error:
            raise ConfigError(f"request: expected something hashable: {error}") from None

    def _ref_of(self, space: Namespace) -> int:
        if not isinstance(space, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {space!r}")
        return space.ref

    def _check_usable(self) -> None:
        """Before the book's lock is taken: in a forked child nobody might ever give it back. As
        `Segment.check_usable`, which costs twice as much."""
        code = self._quick.lci_peek1(self._handle, None, 0, 0)
        if code < 0:
            check(code, "plan")

    def _look_again(self, plan: Plan) -> None:
        """Pin more if the prefix has grown, nothing if its namespace is gone. As long as nothing
        has changed the last page that is pinned is found, and none behind it."""
        found = self._whole.peek(plan.edge, namespace=plan.space)
        if found != (plan.pages > 0):
            self._exchange(plan, self._whole.match(plan.keys, namespace=plan.space))

    def _exchange(self, plan: Plan, lease: Lease) -> int:
        """Pin the new before the old is let go. Returns the pages that are pinned now."""
        before = plan.lease
        lease = self._better(plan, plan.keys, lease, plan.space)
        if lease is not before:
            plan.pin(lease)
            before.release()
        return plan.pages

    def _better(self, plan: Plan | None, keys: Keys, lease: Lease, space: Namespace) -> Lease:
        """What the request is to hold now: what was just matched for its keys, or what it has, if
        that is more of the same prefix. Then the match came out short: an evictor is marking one
        of the pages at this instant, and will give it back, for it is pinned (section 7)."""
        if plan is None or len(lease) >= plan.pages or plan.space.ref != space.ref:
            return lease
        last = plan.pages - 1
        if len(keys) <= last or (keys[last] != plan.keys[last]).any() or not self._open(space):
            return lease
        lease.release()
        return plan.lease

    def _open(self, space: Namespace) -> bool:
        """Whether it has not been cleared; of the name there may be a successor."""
        found = ctypes.c_uint32()
        names = (namespaces.encoded(name, "namespace") for name in (space.weights, space.tenant))
        code = self._quick.lci_namespace_find(self._handle, *names, ctypes.byref(found))
        if code == Code.MISSING:
            return False
        check(code, "plan")
        return found.value == space.ref

    def _grown(self, queue: Queue, same: Offsets, counts: Pages, space: Namespace) -> list[int]:
        """Which of the known plans have to be matched again, by one look at the edges of all."""
        pages = counts[same].astype(np.int64)
        begins = queue.begins[same] + np.maximum(pages - 1, 0)
        ends = np.minimum(queue.begins[same] + pages + 1, queue.ends[same])
        edges, bounds = gathered(queue.keys, begins, ends)
        found = self._whole.peek_many(edges, bounds, namespace=space)
        grown: list[int] = same[found != (pages > 0)].tolist()
        return grown

    def _match_some(self, queue: Queue, which: list[int], space: Namespace) -> list[Lease]:
        """A lease for each of these requests, from one call of the core."""
        if not which:
            return []
        keys, bounds = queue.part(which)
        return self._whole.match_many(keys, bounds, namespace=space).split()


__all__ = ["TIMEOUT", "Planning", "Plans"]

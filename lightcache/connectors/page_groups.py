"""What a request finds of all groups of a model: one position, and the pages that each group needs
there, pinned. docs/design/vllm.md has the rules; SGLang's connector keeps to them as well."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightcache import Cache
from lightcache._arguments import Keys
from lightcache.errors import LeaseLost
from lightcache.groups import Group, GroupSet, Rule
from lightcache.hashing import Tokens
from lightcache.leases import Lease
from lightcache.namespaces import Namespace
from lightcache.plans import TIMEOUT
from lightcache.runs import PLAIN, Run
from lightcache.storage.tasks import StorageTask
from lightcache.storage.tier import BaseTier

ATTEMPTS = 8
"""Times that a position is looked for while others evict its pages."""


@dataclass(frozen=True)
class PageGroup:
    """Layers whose pages are found together."""

    name: str
    rule: Rule
    """Which of its pages a position needs."""
    run: Run
    """Its number in the cache: keys of its pages are made with it."""

    @cached_property
    def whole(self) -> bool:
        """Whether a position needs all pages before it, so that they are a chain."""
        return self.rule == Rule.prefix()


def names_of_groups(groups: Sequence[PageGroup]) -> list[str] | None:
    """By their numbers in the cache, for operators; None: there is only number 0."""
    names = {group.run.group: group.name for group in groups}
    last = max(names, default=0)
    return [names.get(number, "none") for number in range(last + 1)] if last else None


class Finder:
    """Finds, pins and takes pages in one namespace. Takes no lock."""

    def __init__(
        self, cache: Cache, space: Namespace, groups: Sequence[PageGroup], page_tokens: int
    ) -> None:
        """Of a model with these groups; at most one of them has keys of its own (`PLAIN`)."""
        self.cache, self.space, self.groups = cache, space, tuple(groups)
        self._page = page_tokens
        self._first = next((group for group in self.groups if group.run == PLAIN), None)
        self._others = [group for group in self.groups if group is not self._first]
        self._set: GroupSet | None = None
        if self._others:
            found = [Group(each.name, each.rule, cache.index, space, each.run)
                     for each in self._others]  # fmt: skip
            self._set = GroupSet(found, page_tokens=page_tokens)

    def first(self, group: PageGroup, pages: int) -> int:
        """The first page of the group that the position after so many pages needs."""
        return group.rule.first(pages, self._page)

    def nothing(self, keys: Keys) -> bool:
        """Whether nothing can be found of a prompt, now or soon: its first page is neither there
        nor being written."""
        index = self.cache.index
        return self._first is not None and not index.peek_ahead(keys[:1], namespace=self.space)

    def plan(
        self,
        request: Hashable,
        keys: Keys,
        limit: int,
        *,
        after: Keys | None = None,
        timeout: float = TIMEOUT,
    ) -> tuple[int, int]:
        """Pin what the deepest position up to this one needs; returns the position, in pages, and
        the pages of the first group before the deepest one that this group alone has.

        Args:
            after, timeout: see `PageIndex.plan`.
        """
        found = whole = limit
        if self._first is not None:
            found = self.cache.index.plan(
                request,
                keys,
                after=after,
                limit=limit,
                namespace=self.space,
                timeout=timeout,
                frozen=True,
            )
            whole = found
        if self._set is None:
            return found, whole
        for _ in range(ATTEMPTS):
            found = self._set.peek(keys[:found]).pages
            if not found:
                break
            if all(self._plan(request, group, keys, found, timeout) for group in self._others):
                return found, whole
        for group in self._others:
            self.cache.cancel(_name(request, group))
        return 0, whole

    def _plan(
        self,
        request: Hashable,
        group: PageGroup,
        keys: Keys,
        pages: int,
        timeout: float = TIMEOUT,
    ) -> bool:
        """Whether all that the group needs there is pinned now."""
        wanted = group.run.keys(keys[self.first(group, pages) : pages])
        found = self.cache.index.plan(
            _name(request, group), wanted, namespace=self.space, timeout=timeout, frozen=True
        )
        return found == len(wanted)

    def ahead(self, keys: Keys, found: int) -> int:
        """Pages after the found ones with which the position grows, if the clients that are writing
        now finish: those who are dead do not count."""
        index, end = self.cache.index, len(keys)
        if self._first is not None:
            end = found + index.peek_ahead(keys[found:], namespace=self.space)
        for group in self._others:
            wanted = group.run.keys(keys[self.first(group, end) : end])
            if index.peek_ahead(wanted, namespace=self.space) < len(wanted):
                return 0
        return end - found

    def cancel(self, request: Hashable) -> None:
        """Unpin what was planned."""
        for group in self.groups:
            self.cache.cancel(_name(request, group))

    def take(self, request: Hashable, keys: Keys, pages: int) -> list[Lease]:
        """The plan as a lease for each group, of the pages that this position needs.

        Raises:
            LeaseLost: some of them have gone; nothing is pinned any more.
        """
        leases: list[Lease] = []
        try:
            for group in self.groups:
                wanted = pages - self.first(group, pages)
                if group is not self._first:
                    self._plan(request, group, keys, pages)  # of this position, not a deeper one
                wanted *= group.run.parts
                leases.append(self.cache.take(_name(request, group), pages=wanted))
                if len(leases[-1]) < wanted:
                    raise LeaseLost(
                        f"expected {wanted} pages of group {group.name!r}, found "
                        f"{len(leases[-1])}: the others have gone"
                    )
        except BaseException:
            for lease in leases:
                lease.release()
            self.cancel(request)
            raise
        return leases

    # ---- a storage

    def read(
        self, tier: BaseTier, keys: Keys, found: int, tokens: Tokens | None = None
    ) -> StorageTask:
        """Begin to read what a position after this one needs. `tokens`: see `Cache.reserve`."""
        if self._set is None:
            return tier.prefetch(keys, found, namespace=self.space, tokens=tokens)
        kinds = [(group.rule, group.run) for group in self.groups]
        return tier.prefetch_last_ready(keys, groups=kinds, start=found, namespace=self.space)

    def write(self, tier: BaseTier, keys: Keys, request: Hashable) -> list[StorageTask]:
        """Store what the position after these keys needs."""
        needed = [group.run.keys(keys[self.first(group, len(keys)) :]) for group in self.groups]
        return [tier.write(each, request, namespace=self.space) for each in needed]


def _name(request: Hashable, group: PageGroup) -> Hashable:
    """Of the group's plan."""
    return request if group.run == PLAIN else (group.run.group, request)


__all__ = ["Finder", "PageGroup", "names_of_groups"]

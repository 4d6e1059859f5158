"""KV groups: layers whose pages are found together, each group by a rule of its own.

A model is a set of groups with one page size in tokens. The rule of a group says which of its pages
a position needs: full attention all before it, a sliding window those of its last tokens, a
recurrent state the one that ends there. A position can be used if every group has all the pages
that it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightcache._arguments import Keys, count
from lightcache.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.leases import Lease
    from lightcache.namespaces import Namespace
    from lightcache.page_index import PageIndex

MOST_GROUPS = 16
"""Groups of one model."""
_EVERYTHING = (1 << 63) - 1


@dataclass(frozen=True)
class Rule:
    """The pages that a position needs: those that hold tokens from
    `floor(position / align) * align - back` to the position. A new kind of rule is another
    constructor here; nothing else knows the kinds."""

    name: str
    align: int
    back: int

    @classmethod
    def prefix(cls) -> Rule:
        """Every page from the first on: full attention."""
        return cls("prefix", _EVERYTHING, 0)

    @classmethod
    def window(cls, tokens: int) -> Rule:
        """The pages of so many tokens before the position: sliding windows. A layer that sees W
        tokens, its own among them, needs W - 1."""
        return cls("window", 1, count(tokens, "window", 1, _EVERYTHING))

    @classmethod
    def chunk(cls, tokens: int) -> Rule:
        """The pages of the position's chunk: attention within chunks of so many tokens. At the
        beginning of a chunk it needs none."""
        return cls("chunk", count(tokens, "chunk", 1, _EVERYTHING), 0)

    @classmethod
    def point(cls) -> Rule:
        """The one page that ends at the position: a recurrent state."""
        return cls("point", 1, 1)

    def first(self, pages: int, page_tokens: int) -> int:
        """The first page needed by the position after so many pages; at most `pages`, which is
        none."""
        position = pages * page_tokens
        token = max(0, position // self.align * self.align - self.back)
        return min(pages, token // page_tokens)


@dataclass(frozen=True, eq=False)
class Group:
    """Layers with pages of one size, and the index that has them."""

    name: str
    rule: Rule
    index: PageIndex
    """Independent, except for rule `prefix`."""
    namespace: Namespace | None = None
    """None: the index's default one."""


class GroupMatch:
    """What a match has pinned. Leave its `with`, or release it."""

    def __init__(
        self, pages: int, leases: Sequence[Lease], first: Sequence[int], limit: str | None
    ) -> None:
        """For `GroupSet`."""
        self.pages = pages
        """The position, in pages: the deepest that every group accepts; 0: none."""
        self.leases = tuple(leases)
        """The pinned pages of each group."""
        self.first = tuple(first)
        """The number of the first of these in the sequence."""
        self.limit = limit
        """Name of the group that has no deeper position; None: no group limits it."""

    def release(self) -> None:
        """Unpin all.

        Raises:
            LeaseLost: released already.
        """
        with contextlib.ExitStack() as stack:
            for lease in self.leases:
                stack.callback(lease.release)

    def __enter__(self) -> GroupMatch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.ExitStack() as stack:
            for lease in self.leases:
                stack.push(lease)


class GroupSet:
    """The groups of one model, matched together."""

    def __init__(self, groups: Sequence[Group], *, page_tokens: int) -> None:
        """Join groups.

        Args:
            page_tokens: tokens of a page, the same in every group.

        Raises:
            ConfigError: none or more than 16 groups, two of one name, or an index that does not fit
                its rule: one of prefixes is not independent, any other is.
        """
        self.groups = tuple(groups)
        self.page_tokens = count(page_tokens, "page_tokens", 1, 1 << 20)
        count(len(self.groups), "groups", 1, MOST_GROUPS)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"groups: expected different names, found {names}")
        for group in self.groups:
            if group.index.independent == (group.rule.name == "prefix"):
                raise ConfigError(
                    f"groups: {group.name!r} has the rule {group.rule.name!r}, and so expected an "
                    f"index with independent={group.rule.name != 'prefix'}, found "
                    f"{group.index.independent} in {group.index.name!r}"
                )

    def match(self, keys: Keys, *, step: int = 1) -> GroupMatch:
        """Pin every page that the deepest position accepted by all groups needs. Takes no lock.

        Args:
            keys: of the pages of a sequence, from its beginning.
            step: positions are multiples of so many pages.

        Raises:
            ConfigError: keys of another shape, dtype or layout, or a step below 1.
            NoSpace, PermissionDenied, Detached: as `PageIndex.match`; nothing is pinned.
        """
        count(step, "step", 1, 1 << 31)
        limit: str | None = None
        pages = len(keys) // step * step
        while True:
            pages, limit = self._accepted(keys, pages, step, limit)
            found = self._pin(keys, pages, limit)
            missing = [i for i, lease in enumerate(found.leases) if not self._whole(found, i)]
            if not missing:
                return found
            short = found.first[missing[0]] + len(found.leases[missing[0]])
            found.release()  # evicted between the two: the positions before the gap are left
            pages, limit = short // step * step, self.groups[missing[0]].name

    def _accepted(
        self, keys: Keys, pages: int, step: int, limit: str | None
    ) -> tuple[int, str | None]:
        """The deepest position up to `pages` that every group accepts, and the last group that
        refused one."""
        unchanged = 0
        while pages and unchanged < len(self.groups):
            for group in self.groups:
                gap = self._gap(group, keys, pages)
                if gap is None:
                    unchanged += 1
                    continue
                # Every position that needs the missing page is refused; those up to it do not.
                pages, limit, unchanged = gap // step * step, group.name, 0
                break
        return pages, limit

    def _gap(self, group: Group, keys: Keys, pages: int) -> int | None:
        """The last page missing among those that a position needs; None: there are all."""
        first = group.rule.first(pages, self.page_tokens)
        if group.rule.name == "prefix":
            found = group.index.peek(keys[:pages], namespace=group.namespace)
            return None if found == pages else found
        for page in reversed(range(first, pages)):
            if not group.index.peek(keys[page : page + 1], namespace=group.namespace):
                return page
        return None

    def _pin(self, keys: Keys, pages: int, limit: str | None) -> GroupMatch:
        leases: list[Lease] = []
        first = [group.rule.first(pages, self.page_tokens) for group in self.groups]
        try:
            for group, begin in zip(self.groups, first, strict=True):
                leases.append(group.index.match(keys[begin:pages], namespace=group.namespace))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return GroupMatch(pages, leases, first, limit)

    def _whole(self, found: GroupMatch, i: int) -> bool:
        return len(found.leases[i]) == found.pages - found.first[i]


__all__ = ["Group", "GroupMatch", "GroupSet", "Rule"]

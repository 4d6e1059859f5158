"""KV groups: layers whose pages are found together, each group by a rule of its own.

A model is a set of groups with one page size in tokens. The rule of a group says which of its pages
a position needs: full attention all before it, a sliding window those of its last tokens, a
recurrent state the one that ends there. A position can be used if every group has all the pages
that it needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from lightcache import _arguments, layout
from lightcache._arguments import Keys, Offsets, Pages, count
from lightcache.errors import ConfigError, LightcacheError
from lightcache.kernels.groups import Rule
from lightcache.leases import Lease, LeaseBatch, buffer_for
from lightcache.namespaces import Namespace
from lightcache.runs import PLAIN, Run
from lightcache.shm.codes import check

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightcache.page_index import PageIndex

_MAX_STEP = 1 << 31


@dataclass(frozen=True, eq=False)
class Group:
    """Layers with pages of one size, and the index that has them."""

    name: str
    rule: Rule
    index: PageIndex
    """Its pages are reserved with `independent=True`, except for rule `prefix`."""
    namespace: Namespace | None = None
    """None: the index's default one."""
    run: Run = PLAIN
    """How its pages lie in the index, with which they were reserved. Groups of one index and one
    namespace have different numbers."""


L = TypeVar("L", Lease, LeaseBatch)


class _Held(Generic[L]):
    """Leases of several groups, released together."""

    def __init__(self, leases: Sequence[L]) -> None:
        self.leases: tuple[L, ...] = tuple(leases)
        """The pinned pages of each group; of a run all parts, page by page."""

    def release(self) -> None:
        """Unpin all.

        Raises:
            LeaseLost: released already.
        """
        refused = None
        for lease in self.leases:
            try:
                lease.release()
            except LightcacheError as error:
                refused = error
        if refused is not None:
            raise refused

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for lease in self.leases:
            lease.__exit__(kind, error, trace)


class GroupMatch(_Held[Lease]):
    """What a match has pinned. Leave its `with`, or release it."""

    def __init__(
        self, pages: int, leases: Sequence[Lease], first: Sequence[int], limit: str | None
    ) -> None:
        """For `GroupSet`."""
        super().__init__(leases)
        self.pages = pages
        """The position, in pages: the deepest that every group accepts; 0: none."""
        self.first = tuple(first)
        """The number of the first of the group's pages in the sequence."""
        self.limit = limit
        """Name of the group that has no deeper position; None: no group limits it."""


class GroupMatches(_Held[LeaseBatch]):
    """What a match of many sequences has pinned. Leave its `with`, release it, or split it."""

    def __init__(
        self, pages: Pages, leases: Sequence[LeaseBatch], first: Pages, limits: Sequence[str | None]
    ) -> None:
        """For `GroupSet`."""
        super().__init__(leases)
        self.pages = pages
        """The position of each sequence, in pages: int32 of shape (sequences,)."""
        self.first = first
        """The number of the first page of each group in each sequence: int32 of shape (groups,
        sequences)."""
        self.limits = tuple(limits)
        """For each sequence the name that a `GroupMatch` has as its `limit`."""

    def split(self) -> list[GroupMatch]:
        """One match for each sequence, each to be released on its own; this object is empty then.

        Raises:
            LeaseLost: released already.
        """
        each = zip(*(batch.split() for batch in self.leases), strict=True)
        rest = zip(self.pages.tolist(), each, self.first.T.tolist(), self.limits, strict=True)
        return [GroupMatch(*one) for one in rest]


class GroupPosition(NamedTuple):
    """What a peek has found, of about that instant."""

    pages: int
    """The position, in pages: the deepest that every group accepts; 0: none."""
    limit: str | None
    """As in `GroupMatch`."""


class GroupSet:
    """The groups of one model, matched together."""

    def __init__(self, groups: Sequence[Group], *, page_tokens: int) -> None:
        """Join groups.

        Args:
            page_tokens: tokens of a page, the same in every group.

        Raises:
            ConfigError: none or more than 16 groups, two of one name, or an index with other
                `page_tokens`.
            Detached: an index is closed, or a forked child's.
        """
        self.groups = tuple(groups)
        self.page_tokens = count(page_tokens, "page_tokens", 1, 1 << 20)
        count(len(self.groups), "groups", 1, layout.GROUPS)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"groups: expected different names, found {names}")
        for group in self.groups:
            self._refuse_misfit(group)
        self._records = (layout.GroupRecord * len(self.groups))(
            *(
                layout.GroupRecord(
                    group.index.core.handle,
                    None,
                    group.rule.align,
                    group.rule.back,
                    number=group.run.group,
                    parts=group.run.parts,
                )
                for group in self.groups
            )
        )
        self._most = [group.rule.most(self.page_tokens) for group in self.groups]
        self._dense = self.groups[0] if self._is_dense() else None
        calls = self.groups[0].index.core.quick
        self._match, self._peek = calls.lci_match_groups, calls.lci_peek_groups
        self._match_many = calls.lci_match_groups_many

    def _refuse_misfit(self, group: Group) -> None:
        group.index.core.check_usable(f"group {group.name!r}")
        if group.namespace is not None and not isinstance(group.namespace, Namespace):
            raise ConfigError(
                f"group {group.name!r}: expected a Namespace or None, found {group.namespace!r}"
            )
        # A cache of states says 1: its pages hold no tokens.
        tokens = group.index.segment.config.get("page_tokens", 1)
        if group.rule != Rule.point() and tokens not in (1, self.page_tokens):
            raise ConfigError(
                f"group {group.name!r}: expected an index of {self.page_tokens} tokens a page, as "
                f"the other groups have, found {tokens} in {group.index.name!r}"
            )

    def _is_dense(self) -> bool:
        """One group that needs all pages: a plain match of its index says the same, with less to
        prepare."""
        only = self.groups[0]
        return len(self.groups) == 1 and only.rule == Rule.prefix() and only.run == PLAIN

    def match(self, keys: Keys, *, step: int = 1) -> GroupMatch:
        """Pin every page that the deepest position accepted by all groups needs. Takes no lock, and
        pages are evicted meanwhile: then it pins the next position, or after 8 attempts none.

        One call of the core: about 12 ns a key for groups of the rule `prefix` alone; beside other
        groups 5 ns more, for the keys are looked up before they are pinned. One group of the rule
        `prefix` is a plain match of its index, and costs as much.

        Args:
            keys: of the pages of a sequence, from its beginning.
            step: positions are multiples of so many pages.

        Raises:
            ConfigError: keys of another shape, dtype or layout, or a step below 1.
            NoSpace, PermissionDenied, Detached: as `PageIndex.match`; nothing is pinned.
        """
        if self._dense is not None and step == 1:
            return self._match_dense(self._dense, keys)
        where, n = _arguments.keys(keys)
        records, each = self._prepared()
        leases = []
        for record, group, most in zip(each, self.groups, self._most, strict=True):
            room = min(n, most) * group.run.parts
            buffer = buffer_for(room)
            buffer[1] = room
            record.lease = ctypes.addressof(buffer)
            # Before the call that pins: an interrupt after it drops the lease, and so releases.
            leases.append(Lease(group.index.core, buffer))
        pages, limit = self._called(self._match, "match", records, where, n, step)
        return GroupMatch(pages, leases, [record.first for record in each], limit)

    def match_many(self, keys: Keys, offsets: Offsets, *, step: int = 1) -> GroupMatches:
        """`match` for many sequences in one call of the core, as for a scheduler's step: `keys` are
        those of all sequences, sequence i has `keys[offsets[i] : offsets[i + 1]]`. Each has its own
        pins. On an error nothing is pinned.

        Raises:
            As `match`; ConfigError also for offsets that do not fit the keys.
        """
        count(step, "step", 1, _MAX_STEP)
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        lengths, groups = np.diff(bounds), len(self.groups)
        found = np.zeros((2 + 2 * groups, len(lengths)), np.int32)
        records, each = self._prepared()
        leases: list[LeaseBatch] = []
        for number, (record, group, most) in enumerate(
            zip(each, self.groups, self._most, strict=True)
        ):
            room = int(np.minimum(lengths, min(n, most)).sum()) * group.run.parts
            buffer = buffer_for(room)
            buffer[1] = room
            record.lease = ctypes.addressof(buffer)
            leases.append(LeaseBatch(group.index.core, buffer, found[2 + groups + number]))
        code = self._match_many(
            records,
            groups,
            where,
            _arguments.address(bounds),
            len(lengths),
            self.page_tokens,
            step,
            _arguments.address(found),
        )
        if code < 0:
            check(code, f"match of group {self.groups[found[1, 0]].name!r}")
        names = [*(group.name for group in self.groups), None]  # the last for -1
        limits = [names[limit] for limit in found[1].tolist()]
        return GroupMatches(found[0], leases, found[2 : 2 + groups], limits)

    @staticmethod
    def _match_dense(group: Group, keys: Keys) -> GroupMatch:
        lease = group.index.match(keys, namespace=group.namespace)
        pages = len(lease)
        return GroupMatch(pages, (lease,), (0,), group.name if pages < len(keys) else None)

    def peek(self, keys: Keys, *, step: int = 1) -> GroupPosition:
        """The position that `match` would find, without pins. Advisory, as `PageIndex.peek`: each
        page was ready at some instant of the call. Takes no lock and writes nothing; works
        read-only.

        Raises:
            ConfigError, Detached: as `match`.
        """
        where, n = _arguments.keys(keys)
        records, _ = self._prepared()
        return GroupPosition(*self._called(self._peek, "peek", records, where, n, step))

    def _prepared(self) -> tuple[Any, list[layout.GroupRecord]]:
        """The groups as one call takes them, and each: threads share this object, and a default
        namespace may change."""
        records = type(self._records).from_buffer_copy(self._records)
        each = list(records)
        for record, group in zip(each, self.groups, strict=True):
            record.ns = (group.namespace or group.index.default_namespace).ref
        return records, each

    def _called(
        self, call: Any, what: str, records: Any, where: Any, n: int, step: int
    ) -> tuple[int, str | None]:
        """The position and the name of the limit.

        Raises:
            ConfigError: a step below 1.
            NoSpace, PermissionDenied, NotReady, Detached: a group's index has refused it.
        """
        count(step, "step", 1, _MAX_STEP)
        found = ctypes.c_int32()
        pages = call(records, len(records), where, n, self.page_tokens, step, ctypes.byref(found))
        limit = self.groups[found.value].name if found.value >= 0 else None
        if pages < 0:
            check(pages, what if limit is None else f"{what} of group {limit!r}")
        return pages, limit


__all__ = ["Group", "GroupMatch", "GroupMatches", "GroupPosition", "GroupSet", "Rule"]

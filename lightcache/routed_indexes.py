"""The indexes that a router reads, and how much of a prompt is usable in them.

They are attached read-only, closed when their owner dies, and attached again later.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightcache import namespaces
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LightcacheError
from lightcache.group_index import GroupIndex
from lightcache.groups import Group, GroupSet, Rule
from lightcache.hashing import KeySpec
from lightcache.namespaces import Namespace
from lightcache.page_index import PageIndex
from lightcache.prompt import Prompt
from lightcache.runs import PLAIN
from lightcache.shm import names
from lightcache.shm.codes import Code, check

_NOT_YET = "has not been checked yet"
_DEAD = "no client attached for writing lives"
_Names = tuple[str, str]
_PREFIX, _POINT = Rule.prefix(), Rule.point()


class Source:
    """One index, by name. A missing or broken index is not an error: the source is then stale and
    has no pages.

    A handle that the caller passed is used while it is usable, and never closed. The source's own
    handles are read-only: they take no slot and cannot change anything.
    """

    def __init__(
        self,
        index: PageIndex | GroupIndex | str,
        *,
        owned: bool,
        page_tokens: int,
        any_size: bool = False,
        rule: Rule = _PREFIX,
    ) -> None:
        """Attaches to nothing yet.

        Args:
            owned: True: the index is stale if no client attached for writing lives.
            page_tokens: page size of the keys that are looked up.
            any_size: True: keys are made for the index's own page size, and `page_tokens` is only
                for an index that does not state its own.
            rule: of the layers whose pages it has.

        Raises:
            ConfigError: neither an index nor a segment's name.
        """
        self._run = index.run if isinstance(index, GroupIndex) else PLAIN
        index = index.index if isinstance(index, GroupIndex) else index
        if not isinstance(index, (PageIndex, str)):
            raise ConfigError(f"expected a PageIndex, a GroupIndex or a name, found {index!r}")
        self._index = index if isinstance(index, PageIndex) else None
        self._ours = False
        self._owned, self._any_size, self._default = owned, any_size, page_tokens
        self._rule = rule
        self.is_prefix, self.is_point = rule == _PREFIX, rule == _POINT
        self.size: int | None = None
        """Tokens of a page, as of the last refresh; None: stale, or states, whose pages hold no
        tokens."""
        self.name = index.name if isinstance(index, PageIndex) else index
        names.object_name(self.name)
        self.problem: str | None = _NOT_YET
        """Why it counts as having no pages; None: it is usable."""
        self.misfit = False
        """True if the problem is a page size that differs from that of the keys, or of the other
        indexes of its target."""
        self._refs: dict[_Names, Namespace | None] = {}
        self._sets: dict[Namespace, GroupSet] = {}
        """Of a window or chunk: the group in each namespace."""

    def refresh(self) -> None:
        """Check that the index exists and has a live owner. Does not block. Takes about 60 us, and
        twice as long if it attaches."""
        self._refs.clear()
        self._sets.clear()
        self.problem, self.misfit, self.size = None, False, None
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
            return
        tokens = page_tokens_of(self._index)
        if not self._any_size and tokens not in (None, self._default):
            self.refuse(
                f"index {self.name!r} has pages of {tokens} tokens, and the routed keys are of "
                f"pages of {self._default}, so none of them can be found there; give the router a "
                "spec= and route prompts, or keys of this page size (docs/guides/router.md, Keys)"
            )
        elif self.is_point:  # its pages hold no tokens, and usually it says 1
            self.size = None if tokens == 1 else tokens
        else:
            self.size = tokens or self._default

    def refuse(self, problem: str) -> None:
        """Count it as having no pages until the next refresh, because of a page size."""
        self.let_go()
        self.problem, self.misfit, self.size = problem, True, None

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
        """Pages of the deepest position that the rule accepts: of a prefix, the longest ready one;
        of a point, the last ready page. 0 if the source is stale."""
        try:
            space = self._space(weights, tenant)
            if space is not None and self._index is not None:
                if self.is_prefix and self._run == PLAIN:
                    return self._index.peek(keys, namespace=space)
                if self.is_point and self._run == PLAIN:
                    return self._index.last_ready(keys, namespace=space)
                if self.is_point:
                    states = GroupIndex(self._index, self._run)
                    return states.last_ready(keys, namespace=space)
                return self._group(self._index, space).peek(keys).pages
        except LightcacheError as error:
            self._fail(error)
        return 0

    def _group(self, index: PageIndex, space: Namespace) -> GroupSet:
        group = self._sets.get(space)
        if group is None:
            assert self.size is not None
            one = Group(self._rule.name, self._rule, index, space, self._run)
            group = self._sets[space] = GroupSet([one], page_tokens=self.size)
        return group

    def peek_many(self, keys: Keys, offsets: Offsets, weights: str, tenant: str) -> Pages:
        """`peek` of a prefix for many requests: int32 of shape (requests,)."""
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


Indexes = Mapping[Rule, Cache | PageIndex | GroupIndex | str]
"""The index of each match rule of a model's layers; a `GroupIndex`, where one has several."""


class Target:
    """The indexes of a worker's device, or of the host: one for each match rule of the model. Most
    models have one rule, a prefix."""

    def __init__(
        self,
        what: str,
        indexes: PageIndex | str | Indexes | None,
        *,
        owned: bool,
        page_tokens: int,
        any_size: bool,
    ) -> None:
        """Attaches to nothing yet.

        Args:
            what: name of the target in errors.
            indexes: one index of a prefix, several by rule, or None: it has none.
            owned, page_tokens, any_size: as `Source`.

        Raises:
            ConfigError: an empty dict, keys that are no rules, or no index of a rule.
        """
        if not isinstance(indexes, Mapping):
            groups: Mapping[Any, Any] = {} if indexes is None else {_PREFIX: indexes}
        elif not indexes:
            raise ConfigError(
                f"{what}: expected an index of one rule at least, found none; give None instead"
            )
        else:
            groups = indexes
        self.groups: dict[Rule, Source] = {}
        for rule, index in groups.items():
            if not isinstance(rule, Rule):
                raise ConfigError(
                    f"{what}: expected a Rule for each index, such as Rule.prefix(), found {rule!r}"
                )
            try:
                self.groups[rule] = Source(
                    index.index if isinstance(index, Cache) else index,
                    owned=owned,
                    page_tokens=page_tokens,
                    any_size=any_size,
                    rule=rule,
                )
            except ConfigError as error:
                raise ConfigError(f"{what}, rule {rule.name!r}: {error}") from None
        self.page_tokens: int | None = None
        """Tokens of a page, as of the last refresh; None: no usable index has a page size."""

    def refresh(self) -> None:
        """Check each index, and that all have pages of one size."""
        sources = self.groups.values()
        for source in sources:
            source.refresh()
        sizes = {source.size for source in sources if source.size is not None}
        if len(sizes) > 1:
            found = ", ".join(f"{s.size} tokens in {s.name!r}" for s in sources if s.size)
            for source in sources:
                source.refuse(
                    f"expected pages of one size in the indexes of all rules, found {found}; make "
                    "them with the same page_tokens"
                )
            sizes.clear()
        self.page_tokens = next(iter(sizes), None)

    @property
    def problem(self) -> str | None:
        """Why one of its indexes counts as having no pages; None: all are usable."""
        for source in self.groups.values():
            if source.problem is not None:
                return source.problem
        return None

    @property
    def misfit(self) -> bool:
        """As `Source.misfit`, of any of them."""
        return any(source.misfit for source in self.groups.values())

    def let_go(self) -> None:
        """Close the target's own handles."""
        for source in self.groups.values():
            source.let_go()

    def peek(self, keys: Keys, weights: str, tenant: str) -> int:
        """Pages of the longest ready prefix, for keys of one page size."""
        source = self.groups.get(_PREFIX)
        return 0 if source is None else source.peek(keys, weights, tenant)

    def peek_many(self, keys: Keys, offsets: Offsets, weights: str, tenant: str) -> Pages:
        """`peek` for many requests: int32 of shape (requests,)."""
        source = self.groups.get(_PREFIX)
        if source is None:
            return np.zeros(len(offsets) - 1, np.int32)
        return source.peek_many(keys, offsets, weights, tenant)


# ---- The usable part of a prompt

_Layers = tuple[Source | None, Source | None]
"""The indexes of the layers with one rule: the worker's, the host's."""


def joined_layers(worker: Target, host: Target) -> list[_Layers]:
    """The layers of a model, by what a worker and the host have of them. A prefix comes first."""
    rules = sorted({**worker.groups, **host.groups}, key=lambda rule: rule != _PREFIX)
    return [(worker.groups.get(rule), host.groups.get(rule)) for rule in rules]


class UsablePrefix:
    """The part of one prompt that a request need not compute, at each worker of a call: as far as
    the layers of every rule have the pages that they need, on the device or on the host. Each index
    is looked up once, however many workers it serves, but for positions that other layers refuse.
    """

    def __init__(
        self,
        prompt: Prompt,
        host: Target,
        spec_of: Callable[[int, str, str], KeySpec],
        weights: str,
        default: int,
    ) -> None:
        """Looks nothing up yet.

        Args:
            spec_of: the spec of a page size, weights version and tenant.
            default: page size where no index of a worker and the host has one.
        """
        self._prompt, self._host, self._spec_of, self._default = prompt, host, spec_of, default
        self._names = weights, prompt.tenant
        self._most = max(0, len(prompt) - 1)  # a request computes its last token
        self._worker = host
        """The one that is being looked at."""
        self._keys: dict[int, Keys] = {}
        self._runs: dict[tuple[Source, int], int] = {}
        self._positions: dict[tuple[Source, int], tuple[int, int]] = {}
        """Of windows and states: the pages that were asked for, and those found."""
        self.hit = False
        """Whether any index had a page, usable or not."""

    def of(self, worker: Target, layers: list[_Layers]) -> tuple[int, int]:
        """Usable tokens: on the device, and on the host, which may include those. The larger of
        both need not be computed. A device's part is that of the first layers."""
        self._worker = worker
        position, agreed = self._most if layers else 0, 0
        for device, host in itertools.cycle(layers):
            deepest = self._accepted(device, host, position)
            agreed = agreed + 1 if deepest == position else 1
            position = deepest
            if agreed >= len(layers):
                cut = self._prompt.cut_item(position) if self._prompt.items else None
                if cut is None:
                    break
                position, agreed = cut.start, 0
        device, host = layers[0] if layers else (None, None)
        on_device = self._tokens(device, position)
        return on_device, position if on_device < position else self._tokens(host, position)

    def _accepted(self, device: Source | None, host: Source | None, position: int) -> int:
        """The deepest position up to this one that these layers accept."""
        on_host = self._tokens(host, position)  # first: it is known from another worker
        if on_host == position:
            return position
        on_device = self._tokens(device, position)
        if host is not None and host.is_prefix and on_device > on_host:
            return max(on_device, self._continued(host, on_device, position))
        return max(on_device, on_host)

    def _continued(self, host: Source, on_device: int, position: int) -> int:
        """The end of the host's pages that continue those of a device."""
        if host.size is None:
            return 0
        first, last = on_device // host.size, position // host.size
        if not self._run(host, host.size) < first < last:
            return 0  # the host lacks the first, or the position needs none
        return min(first + self._run(host, host.size, first), last) * host.size

    def _tokens(self, source: Source | None, position: int) -> int:
        """The deepest position up to this one that one index accepts by itself."""
        if source is None or not position:
            return 0
        size = self._state_size() if source.is_point else source.size
        if size is None:
            return 0
        count = position // size
        if source.is_prefix:
            run = self._run(source, size)
            return (run if run < count else count) * size
        asked, found = self._positions.get((source, size), (-1, 0))
        if not found <= count <= asked:
            found = self._peek(source, self._keys_of(size)[:count])
            self._positions[source, size] = count, found
        return found * size

    def _state_size(self) -> int:
        """Tokens of the keys of states: of the smaller pages, of the device or the host."""
        sizes = self._worker.page_tokens, self._host.page_tokens
        return min(filter(None, sizes), default=self._default)

    def _run(self, source: Source, size: int, first: int = 0) -> int:
        """Pages of a prefix from this one on."""
        known = self._runs.get((source, first))
        if known is None:
            known = self._peek(source, self._keys_of(size)[first:])
            self._runs[source, first] = known
        return known

    def _peek(self, source: Source, keys: Keys) -> int:
        pages = source.peek(keys, *self._names)
        self.hit |= pages > 0
        return pages

    def _keys_of(self, size: int) -> Keys:
        keys = self._keys.get(size)
        if keys is None:
            spec = self._spec_of(size, *self._names)
            keys = self._keys[size] = self._prompt.keys(spec)[: self._most // size]
        return keys


__all__ = ["Indexes", "Source", "Target", "UsablePrefix", "joined_layers", "page_tokens_of"]

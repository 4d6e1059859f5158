"""What the machine of the index is made of: strategies, what clients hold, and helpers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from model.index_model import (
    CacheScope,
    Handoff,
    Page,
    Violation,
    Writing,
)
from support import keys as make

from lightcache import PageIndex
from lightcache._arguments import Generations
from lightcache.leases import Ticket
from lightcache.namespaces import Namespace

CLIENTS = 3
_numbers = itertools.count()
NAMES = [("", ""), ("w1", ""), ("w1", "a"), ("w2", "a")]

# pages, bucket that every key falls into (None: as they come)
CONFIGURATIONS = [(n, b) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32) for b in (None, 7)] + [(44, 7)]

paths = st.one_of(
    st.lists(st.integers(0, 2), max_size=5),
    st.builds(
        lambda trunk, branch: [0] * trunk + branch,
        st.integers(0, 6),
        st.lists(st.integers(0, 3), max_size=4),
    ),
    st.builds(lambda root, n: [root, *range(n)], st.integers(4, 40), st.integers(0, 3)),
    st.builds(lambda n: [9, *[1] * n], st.integers(0, 45)),
)
pick = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Client:
    index: PageIndex
    slot: int
    default: CacheScope


@dataclass(eq=False)
class Held:
    """Something that a client holds, and the pins that go with it."""

    client: Client
    real: Any
    pages: list[int]
    writing: Writing | None = None
    shard: int | None = None
    ticket: Handoff | None = None
    closed: bool = False
    uses: dict[int, tuple[int, ...]] | None = None
    """Of what `oldest` listed: what told then that each page was used."""


@dataclass(eq=False)
class Given:
    client: Client
    real: Ticket
    model: Handoff
    data: bytes
    dropped: bool = False


@dataclass
class Opened:
    space: CacheScope
    real: Namespace
    refs: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Planned:
    """A plan that a client has made, and the pages that it pins."""

    client: Client
    keys: list[make.Pair]
    space: CacheScope
    pages: list[int]


class MachineBase(RuleBasedStateMachine):
    """One index, up to three clients of it in this process; no rule yet."""

    def __init__(self, name: str, independent: bool | None = False, eviction: str = "lru") -> None:
        super().__init__()
        self.eviction = eviction
        self.independent = independent
        """Of which kind all pages are; None: each call draws it."""
        self.name = f"{name}-{next(_numbers)}"
        self.clients: list[Client] = []
        self.held: list[Held] = []
        self.given: list[Given] = []
        self.planned: dict[tuple[int, int], Planned] = {}
        self.told: list[tuple[list[int], Generations, list[Page | None]]] = []
        """Pages that a client pinned when it told others their numbers and generations."""
        self.opened: dict[CacheScope, Namespace] = {}
        self.refs: set[int] = set()

    # ---- helpers

    def choose(self, things: list[Any], number: int) -> Any:
        return things[number % len(things)]

    def kind(self, number: int) -> bool:
        return number % 2 == 1 if self.independent is None else self.independent

    def client(self, number: int) -> Client:
        chosen: Client = self.choose(self.clients, number)
        return chosen

    def keys(self, path: list[int]) -> list[make.Pair]:
        return make.chain(path, self.bucket)

    def space(self, client: Client, number: int) -> tuple[CacheScope, Namespace | None]:
        """Mostly the default one."""
        if number % 3 or not self.opened:
            return client.default, None
        space = self.choose(list(self.opened), number // 3)
        return space, self.opened[space]

    def parent_at(self, keys: list[make.Pair], at: int, space: CacheScope) -> Page | None:
        page = self.model.by_key.get(keys[at - 1]) if at else None
        return page if page and page.space is space else None

    def of(self, kind: type[Any]) -> list[Held]:
        return [h for h in self.held if isinstance(h.real, kind)]

    def expect_lost(self, call: Any, *kinds: type[BaseException]) -> None:
        try:
            call()
        except kinds:
            return
        raise Violation(f"{call}: expected {kinds}, nothing was raised")

    def default_space(self, index: PageIndex) -> CacheScope:
        """What an index that attached, or cleared its own, calls the default namespace."""
        space = self.model.open_space("", "")
        if space is None:
            assert index._namespace not in self.refs
            space = CacheScope("", "", index._namespace & 0xFF)
            self.model.spaces.append(space)
        self.refs.add(index._namespace)
        return space

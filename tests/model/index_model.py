"""A page index in plain Python, as its docstrings describe it: what the real one is compared with.

It has no lock, no chains and no queue. Where the real index has a choice (which of two equally old
pages goes first), the caller says what was chosen and the model says whether that was allowed.
`ranked_model.py` has the other order of eviction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Pair = tuple[int, int]

CHAIN_MAX = 32
BATCH = 32
TICKETS = "tickets"  # pins in this name are those of row 0

NEW, PRESENT, BUSY, MISSING = "new", "present", "busy", "missing"


@dataclass(eq=False)
class CacheScope:
    """A namespace from its opening to its clearing."""

    weights: str
    tenant: str
    id: int
    quota: int = 0
    minimum: int = 0
    open: bool = True


@dataclass(eq=False)
class Page:
    """A named page, and afterwards what is remembered of it."""

    number: int
    key: Pair
    space: CacheScope
    parent: Page | None
    tick: int
    independent: bool = False
    state: str = "writing"
    queued_at_most: int = 0
    kept: bool = False
    group: int = 0
    parked: int = 0
    """It may stand in the queue as if it had been used then."""

    @property
    def named(self) -> bool:
        return self.state in ("writing", "ready")


@dataclass(eq=False)
class Writing:
    """A reservation that has new pages."""

    owner: int | None
    space: CacheScope
    shards: list[int]
    """The slot that owes each shard."""
    pages: list[Page] = field(default_factory=list)
    published: set[int] = field(default_factory=set)
    doomed: bool = False

    @property
    def complete(self) -> bool:
        return len(self.published) == len(self.shards)

    @property
    def active(self) -> bool:
        return not self.doomed and not self.complete


@dataclass(eq=False)
class Handoff:
    """A ticket."""

    giver: int | None
    adopters: set[int]
    pages: list[int]
    late: bool
    writing: Writing | None
    adopted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    pinned: bool = True
    dropped: bool = False
    freed: bool = False

    def settled(self) -> set[int]:
        return self.done | self.failed | (self.adopters - self.adopted if self.late else set())


class Violation(AssertionError):
    """The real index did what the model forbids."""


class Model:
    """All of an index that a caller can observe."""

    by_age = True
    """What was used least recently goes first."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages
        self.by_key: dict[Pair, Page] = {}
        self.doomed: dict[int, Page] = {}
        self.held: dict[int, int] = {}
        """Pages without a key, and the slot of who holds them."""
        self.pins: Counter[tuple[int | str, int]] = Counter()
        self.spaces: list[CacheScope] = [CacheScope("", "", 0)]
        self.minimums: dict[int, int] = {}
        """By group."""
        self.writings: list[Writing] = []
        self.handoffs: list[Handoff] = []

    # ---- looking

    def named(self) -> list[Page]:
        return list(self.by_key.values())

    def children(self, page: Page) -> list[Page]:
        return [p for p in self.named() if p.parent is page]

    def covering(self, page: Page) -> list[Page]:
        """What has to go before it."""
        return [] if page.independent else self.children(page)

    def pinned(self, number: int) -> bool:
        return any(n for (_, page), n in self.pins.items() if page == number)

    def pins_of(self, number: int) -> int:
        return sum(n for (_, page), n in self.pins.items() if page == number)

    def total_pins(self) -> int:
        return sum(self.pins.values())

    def prefix(self, keys: Sequence[Pair], space: CacheScope) -> list[Page]:
        found: list[Page] = []
        for key in keys if space.open else []:
            page = self.by_key.get(key)
            if page is None or page.state != "ready" or page.space is not space:
                break
            found.append(page)
        return found

    def ready(self, key: Pair, space: CacheScope) -> Page | None:
        page = self.by_key.get(key) if space.open else None
        return page if page and page.state == "ready" and page.space is space else None

    def last_ready(self, keys: Sequence[Pair], space: CacheScope) -> int:
        return max((i for i, key in enumerate(keys, 1) if self.ready(key, space)), default=0)

    def writes_any(self, keys: Iterable[Pair], space: CacheScope | None = None) -> bool:
        """Is one of them being written, in this namespace (None: in any)?"""
        pages = [self.by_key[k] for k in keys if k in self.by_key]
        return any(p.state == "writing" and (space is None or p.space is space) for p in pages)

    def space_pages(self, space: CacheScope) -> int:
        return sum(p.space is space for p in self.named())

    def pinned_doomed(self) -> int:
        return sum(self.pinned(number) for number in self.doomed)

    def held_doomed(self) -> int:
        """Doomed pages that a client holds. Pins of tickets count until their deadline only."""
        held = {page for (who, page), n in self.pins.items() if n and who != TICKETS}
        return len(held.intersection(self.doomed))

    def room(self) -> int:
        """Pages that can be handed out without evicting."""
        return self.capacity - len(self.by_key) - len(self.held) - self.pinned_doomed()

    # ---- pins

    def pin(self, who: int | str, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.pins[who, number] += 1

    def unpin(self, who: int | str, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self.pins[who, number] <= 0:
                raise Violation(f"model: {who} does not pin page {number}")
            self.pins[who, number] -= 1

    # ---- pages that go

    def removable(self, page: Page, since: int) -> bool:
        """May go, after everything that hangs on it."""
        return (
            page.state == "ready"
            and not page.kept
            and page.tick < since
            and not self.pinned(page.number)
            and all(self.removable(child, since) for child in self.covering(page))
        )

    def queued(self, page: Page) -> bool:
        return page.state == "ready" and not page.kept and not self.covering(page)

    def in_order(self) -> bool:
        """Every queued page stands where its tick says."""
        return not any(page.tick < page.parked for page in self.named())

    def group_pages(self, group: int) -> int:
        return sum(p.group == group for p in self.named())

    def promises(self, by: CacheScope | None, group: int | None = None) -> bool:
        """Room that is made for `by`, and for pages of `group`, has to leave somebody a minimum."""
        groups = any(least and number != group for number, least in self.minimums.items())
        return groups or any(s.open and s.minimum and s is not by for s in self.spaces)

    def keeps_promises(
        self, gone: set[Page], by: CacheScope | None, group: int | None = None
    ) -> None:
        """After pages have gone to make room."""
        for space in {page.space for page in gone} - {by}:
            if self.space_pages(space) < space.minimum:
                raise Violation(f"{space} has {self.space_pages(space)} pages left")
        paid = {page.group for page in gone if by is not None and by.quota and page.space is by}
        for number in {page.group for page in gone} - {group} - paid:
            if self.group_pages(number) < self.minimums.get(number, 0):
                raise Violation(f"group {number} has {self.group_pages(number)} pages left")

    def nothing_can_go(self, since: int, by: CacheScope | None, group: int | None = None) -> None:
        """All that is left is pinned, kept, used since, or promised to somebody else."""
        for page in self.named():
            if not self.queued(page) or not self.removable(page, since):
                continue
            least = 0 if page.group == group else self.minimums.get(page.group, 0)
            if self.group_pages(page.group) <= least and least:
                continue
            if page.space is by or self.space_pages(page.space) > page.space.minimum:
                raise Violation(f"{page} could have gone")

    # ---- what an engine decides itself

    def evict_first(self, keys: Sequence[Pair], space: CacheScope, now: int) -> list[Page]:
        """The pages that count as used at the queue's present from here on."""
        found = [self.by_key[key] for key in keys if space.open and key in self.by_key]
        changed = [
            page
            for page in found
            if page.state == "ready"
            and page.space is space
            and not page.kept
            and not self.pinned(page.number)
            and page.tick > now
        ]
        for page in changed:
            page.tick, page.parked = now, 0
        return changed

    def drop(self, keys: Sequence[Pair], start: int, space: CacheScope) -> list[Page]:
        """The pages that go, the end first."""
        gone: list[Page] = []
        for key in reversed(keys[start:]) if space.open else []:
            page = self.by_key.get(key)
            if page is None and not gone:
                continue
            if page is None or page.space is not space:
                break
            if not self.queued(page) or self.pinned(page.number):
                break
            self.forget(page)
            gone.append(page)
        return gone

    def discard(self, pages: Sequence[Page], unwanted: set[int]) -> set[Page]:
        """The pages that go: nobody pins them any more, and all that hangs on them goes too."""
        gone: set[Page] = set()
        while True:
            more = [
                page
                for page in pages
                if page not in gone
                and page.number in unwanted
                and self.queued(page)
                and not self.pinned(page.number)
            ]
            if not more:
                return gone
            for page in more:
                self.forget(page, self.by_age)
            gone.update(more)

    def forget(self, page: Page, passes_on: bool = True) -> None:
        """Evict. What it hung on was used when it was."""
        page.state = "free"
        parent = page.parent
        if passes_on and parent and parent.named and not parent.independent:
            parent.tick = max(parent.tick, page.tick)
        del self.by_key[page.key]

    def doom(self, page: Page) -> None:
        page.state = "doomed"
        del self.by_key[page.key]
        self.doomed[page.number] = page

    def give_back(self, number: int) -> None:
        """A page without a key is its client's no more."""
        del self.held[number]
        if self.pinned(number):
            self.doomed[number] = Page(number, (0, 0), self.spaces[0], None, 0, state="doomed")

    def evict_legally(self, gone: set[Page], since: int) -> None:
        """Forget pages in some order from the leaves; each must have been allowed to go."""
        for page in gone:
            if not self.removable(page, since):
                raise Violation(f"{page} was evicted: pinned, writing, used, or a prefix of such")
            if any(child not in gone for child in self.covering(page)):
                raise Violation(f"{page} was evicted although {self.children(page)} hang on it")
        left = set(gone)
        while left:  # a page passes its last use on to what it hangs on
            leaves = {page for page in left if left.isdisjoint(self.children(page))}
            for page in leaves:
                self.forget(page)
            left -= leaves

    def evict_oldest(self, gone: set[Page], count: int, since: int, now: int) -> int:
        """Forget `count` of the pages in `gone`, each the least recently used when it went.

        `now` is the queue's present: pages older than it stand in no order among themselves.
        Returns the new present.
        """
        for _ in range(count):
            while True:
                leaves = [p for p in self.named() if self.queued(p) and p.tick < since]
                if not leaves:
                    raise Violation("a page was evicted that could not be")
                oldest = min(max(p.tick, now) for p in leaves)
                tied = [p for p in leaves if max(p.tick, now) == oldest]
                free = [p for p in tied if not self.pinned(p.number)]
                if free:
                    break
                for page in tied:  # found pinned: as used just now
                    page.tick = since
            chosen = [p for p in free if p in gone]
            if not chosen:
                raise Violation(f"{gone} were evicted before the older {free}")
            now = max(now, oldest)
            self.forget(chosen[0])
            gone.discard(chosen[0])
        return now

    # ---- writing

    def publish(self, writing: Writing, shard: int) -> bool:
        writing.published.add(shard)
        if writing.complete:
            for page in writing.pages:
                if page.state == "writing":
                    page.state = "ready"
        return writing.complete

    def end_writing(self, writing: Writing) -> None:
        """Abandon what is not published."""
        if not writing.active:
            return
        writing.doomed = True
        for page in writing.pages:
            if page.named:
                self.doom(page)

    # ---- namespaces

    def open_space(self, weights: str, tenant: str) -> CacheScope | None:
        for space in self.spaces:
            if space.open and (space.weights, space.tenant) == (weights, tenant):
                return space
        return None

    def clear(self, space: CacheScope) -> None:
        space.open, space.minimum = False, 0
        for page in self.named():
            if page.space is space:
                self.doom(page)

    # ---- tickets

    def settle(self) -> None:
        """What the next holder of the lock does for tickets."""
        for ticket in self.handoffs:
            if ticket.freed:
                continue
            if ticket.pinned and (
                ticket.late or ticket.adopters <= ticket.adopted | ticket.settled()
            ):
                self.unpin(TICKETS, ticket.pages)
                ticket.pinned = False
            over = ticket.adopters <= ticket.settled()
            if ticket.dropped and not (ticket.pinned and ticket.pages) and over:
                ticket.freed = True

    # ---- the end of a client

    def leave(self, slot: int) -> None:
        for writing in self.writings:
            if not writing.active:
                continue
            owes = {s for s, owner in enumerate(writing.shards) if owner == slot}
            if owes - writing.published:
                self.end_writing(writing)
            elif writing.owner == slot:
                writing.owner = None
        for ticket in self.handoffs:
            if ticket.freed:
                continue
            if slot in ticket.adopters and slot not in ticket.done:
                ticket.failed.add(slot)
            if ticket.giver == slot:
                ticket.dropped, ticket.giver = True, None
        for key in list(self.pins):
            if key[0] == slot:
                del self.pins[key]
        for number in [n for n, owner in self.held.items() if owner == slot]:
            del self.held[number]
            self.doomed[number] = Page(number, (0, 0), self.spaces[0], None, 0, state="doomed")
        self.settle()

"""The model and the real index take the same random calls; after each they are compared."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model.index_model import (
    BATCH,
    BUSY,
    CHAIN_MAX,
    MISSING,
    NEW,
    PRESENT,
    TICKETS,
    Handoff,
    Model,
    Page,
    Space,
    Violation,
    Writing,
)
from support import keys as make
from support.index_view import IndexView

from lightcache import (
    Abandoned,
    ConfigError,
    Detached,
    Lease,
    LeaseLost,
    PageIndex,
    Reservation,
    Shard,
    Ticket,
    WaitTimeout,
)
from lightcache.layout import PageState
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
    default: Space


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
    hits: dict[int, int] | None = None
    """Of what `oldest` listed: hits of each page then."""


@dataclass(eq=False)
class Given:
    client: Client
    real: Ticket
    model: Handoff
    data: bytes
    dropped: bool = False


@dataclass
class Opened:
    space: Space
    real: Namespace
    refs: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Planned:
    """A plan that a client has made, and the pages that it pins."""

    client: Client
    keys: list[make.Pair]
    space: Space
    pages: list[int]


class IndexMachine(RuleBasedStateMachine):
    """One index, up to three clients of it in this process."""

    def __init__(self, name: str, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.name = f"{name}-{next(_numbers)}"
        self.clients: list[Client] = []
        self.held: list[Held] = []
        self.given: list[Given] = []
        self.planned: dict[tuple[int, int], Planned] = {}
        self.opened: dict[Space, Namespace] = {}
        self.refs: set[int] = set()

    # ---- helpers

    def choose(self, things: list[Any], number: int) -> Any:
        return things[number % len(things)]

    def client(self, number: int) -> Client:
        chosen: Client = self.choose(self.clients, number)
        return chosen

    def keys(self, path: list[int]) -> list[make.Pair]:
        return make.chain(path, self.bucket)

    def space(self, client: Client, number: int) -> tuple[Space, Namespace | None]:
        """Mostly the default one."""
        if number % 3 or not self.opened:
            return client.default, None
        space = self.choose(list(self.opened), number // 3)
        return space, self.opened[space]

    def of(self, kind: type[Any]) -> list[Held]:
        return [h for h in self.held if isinstance(h.real, kind)]

    def expect_lost(self, call: Any, *kinds: type[BaseException]) -> None:
        try:
            call()
        except kinds:
            return
        raise Violation(f"{call}: expected {kinds}, nothing was raised")

    def default_space(self, index: PageIndex) -> Space:
        """What an index that attached, or cleared its own, calls the default namespace."""
        space = self.model.open_space("", "")
        if space is None:
            assert index._namespace not in self.refs
            space = Space("", "", index._namespace & 0xFF)
            self.model.spaces.append(space)
        self.refs.add(index._namespace)
        return space

    # ---- clients

    @initialize(configuration=st.sampled_from(CONFIGURATIONS))
    def begin(self, configuration: tuple[int, int | None]) -> None:
        pages, self.bucket = configuration
        self.model = Model(pages, flat=self.flat)
        index = PageIndex.create(self.name, pages=pages, flat=self.flat)
        self.view = IndexView(index)
        self.clients = [Client(index, index.client_id.slot, self.model.spaces[0])]

    def attach(self) -> None:
        if len(self.clients) == CLIENTS:
            return
        index = PageIndex.attach(self.name)
        default = self.default_space(index)
        slot = index.client_id.slot
        assert slot not in [c.slot for c in self.clients]
        self.clients.append(Client(index, slot, default))

    def close(self, number: int) -> None:
        if len(self.clients) == 1:
            return
        client = self.client(number)
        client.index.close()
        self.clients.remove(client)
        if self.view._index is client.index:
            self.view = IndexView(self.clients[0].index)
        self.model.leave(client.slot)
        self.planned = {at: p for at, p in self.planned.items() if p.client is not client}
        for held in [h for h in self.held if h.client is client]:
            self.held.remove(held)
            if isinstance(held.real, Lease):
                self.expect_lost(held.real.release, Detached)
            else:  # may hold nothing any more that could be lost
                with held.real:
                    pass
        for given in [g for g in self.given if g.client is client]:
            self.expect_lost(given.real.poll, Detached, LeaseLost)
            given.dropped = True

    # ---- rare: one rule, so that the others make up most of a run

    @rule(
        what=st.sampled_from(["attach", "close", "clear", "namespace", "reap", "repair"]),
        number=pick,
        where=pick,
        name=st.sampled_from(NAMES),
        quota=st.sampled_from([None, None, 0, 1, 2, 4]),
        minimum=st.sampled_from([None, None, None, 0, 1, 2, 5]),
    )
    def rarely(
        self,
        what: str,
        number: int,
        where: int,
        name: tuple[str, str],
        quota: int | None,
        minimum: int | None,
    ) -> None:
        if what == "attach":
            self.attach()
        elif what == "close":
            self.close(number)
        elif what == "clear":
            self.clear(number, where)
        elif what == "namespace":
            self.namespace(number, name, quota, minimum)
        elif what == "reap":
            assert self.client(number).index.reap() == 0
        else:
            self.client(number).index.repair()
            for page in self.model.named():
                page.parked = 0

    # ---- lookups

    @rule(number=pick, path=paths, where=pick)
    def peek(self, number: int, path: list[int], where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        found = client.index.peek(make.array(keys), namespace=real)
        assert found == len(self.model.prefix(keys, space))

    @rule(number=pick, many=st.lists(paths, max_size=4), where=pick)
    def peek_many(self, number: int, many: list[list[int]], where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        chains = [self.keys(path) for path in many]
        offsets = np.cumsum([0, *map(len, chains)])
        keys = make.array(itertools.chain.from_iterable(chains))
        found = client.index.peek_many(keys, offsets, namespace=real)
        assert found.tolist() == [len(self.model.prefix(chain, space)) for chain in chains]

    @rule(number=pick, many=st.lists(paths, max_size=3), where=pick)
    def deepest(self, number: int, many: list[list[int]], where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        chains = [self.keys(path) for path in many]
        expected = [self.model.deepest(chain, space) for chain in chains]
        for chain, deepest in zip(chains, expected, strict=True):
            assert client.index.deepest(make.array(chain), namespace=real) == deepest
        offsets = np.cumsum([0, *map(len, chains)])
        keys = make.array(itertools.chain.from_iterable(chains))
        found = client.index.deepest_many(keys, offsets, namespace=real)
        assert found.tolist() == expected

    @rule(number=pick, path=paths, where=pick)
    def children(self, number: int, path: list[int], where: int) -> None:
        client, model = self.client(number), self.model
        space, real = self.space(client, where)
        pages = [model.ready(key, space) for key in self.keys(path)]
        found = client.index.children(make.array(self.keys(path)), namespace=real)
        assert found.tolist() == [-1 if p is None else len(model.children(p)) for p in pages]

    @rule(number=pick, path=paths, where=pick)
    def match(self, number: int, path: list[int], where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        tick = self.view.clock + 1
        lease = client.index.match(make.array(keys), namespace=real)
        found = self.model.prefix(keys, space)
        assert lease.pages.tolist() == [p.number for p in found]
        for page in found:
            page.tick = tick
        self.model.pin(client.slot, lease.pages.tolist())
        self.held.append(Held(client, lease, lease.pages.tolist()))

    @rule(number=pick, many=st.lists(paths, max_size=4), where=pick, split=st.booleans())
    def match_many(self, number: int, many: list[list[int]], where: int, split: bool) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        chains = [self.keys(path) for path in many]
        offsets = np.cumsum([0, *map(len, chains)])
        tick = self.view.clock
        batch = client.index.match_many(
            make.array(itertools.chain.from_iterable(chains)), offsets, namespace=real
        )
        for i, chain in enumerate(chains):
            found = self.model.prefix(chain, space)
            assert batch[i].tolist() == [p.number for p in found]
            tick += bool(found)
            for page in found:
                page.tick = tick
        numbers = batch.pages.tolist()
        self.model.pin(client.slot, numbers)
        if not split:
            self.held.append(Held(client, batch._lease, numbers))
            return
        at = 0
        for part in batch.split():
            assert part.pages.tolist() == numbers[at : at + len(part)]
            at += len(part)
            self.held.append(Held(client, part, part.pages.tolist()))
        assert at == len(numbers)
        self.expect_lost(batch.release, LeaseLost)

    @rule(number=pick, path=paths)
    def wait(self, number: int, path: list[int]) -> None:
        client = self.client(number)
        keys = self.keys(path)
        if self.model.writes_any(keys):
            self.expect_lost(lambda: client.index.wait(make.array(keys), timeout=0), WaitTimeout)
        else:
            found = client.index.wait(make.array(keys), timeout=0)
            assert found == len(self.model.prefix(keys, client.default))

    # ---- plans

    @rule(number=pick, path=paths, where=pick, name=st.integers(0, 1), many=st.booleans())
    def plan(self, number: int, path: list[int], where: int, name: int, many: bool) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys, tick = self.keys(path), self.view.clock + 1
        if many:
            offsets = np.array([0, len(keys)])
            got = client.index.plan_many([name], make.array(keys), offsets, namespace=real)
            found = int(got[0])
        else:
            found = client.index.plan(name, make.array(keys), namespace=real)
        before = self.planned.get((client.slot, name))
        if before is None or (before.keys, before.space) != (keys, space):
            made = self.planned[client.slot, name] = Planned(client, keys, space, [])
            self.look_again(made, tick)
            if before is not None:
                self.model.unpin(client.slot, before.pages)
        else:
            self.look_again(before, tick)
        assert found == len(self.planned[client.slot, name].pages)

    def look_again(self, plan: Planned, tick: int) -> None:
        """What the index does when the prefix is not what the plan has; a match, so it is used."""
        found = self.model.prefix(plan.keys, plan.space)
        if len(found) == len(plan.pages):
            return
        for page in found:
            page.tick = tick
        numbers = [page.number for page in found]
        self.model.pin(plan.client.slot, numbers)
        self.model.unpin(plan.client.slot, plan.pages)
        plan.pages = numbers

    @precondition(lambda self: self.planned)
    @rule(number=pick, how=st.sampled_from(["take", "take", "cancel"]))
    def end_plan(self, number: int, how: str) -> None:
        slot, name = self.choose(sorted(self.planned), number)
        plan = self.planned.pop((slot, name))
        tick = self.view.clock + 1
        if how == "cancel":
            assert plan.client.index.cancel(name)
            self.model.unpin(slot, plan.pages)
        else:
            lease = plan.client.index.take(name)
            self.look_again(plan, tick)
            assert lease.pages.tolist() == plan.pages
            self.held.append(Held(plan.client, lease, plan.pages))
        assert not plan.client.index.cancel(name)

    # ---- letting go

    @precondition(lambda self: self.of(Lease))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget"]))
    def release(self, number: int, how: str) -> None:
        held = self.choose(self.of(Lease), number)
        self.held.remove(held)
        self.let_go(held, how)
        self.model.unpin(held.client.slot, held.pages)

    def let_go(self, held: Held, how: str) -> None:
        if how == "forget":
            held.real = None
        else:
            if how == "release":
                held.real.release()
            else:
                with held.real:
                    pass
            self.expect_lost(held.real.release, LeaseLost)

    @precondition(lambda self: self.of(Reservation))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget", "abandon"]))
    def end(self, number: int, how: str) -> None:
        held = self.choose(self.of(Reservation), number)
        self.held.remove(held)
        if how == "abandon":
            held.real.abandon()
            self.expect_lost(held.real.abandon, LeaseLost)
        else:
            self.let_go(held, how)
        if held.real is not None:
            self.expect_lost(held.real.publish, Abandoned)
        if held.writing:
            self.model.end_writing(held.writing)
        self.model.unpin(held.client.slot, held.pages)

    @precondition(lambda self: self.of(Shard))
    @rule(number=pick, how=st.sampled_from(["release", "with", "forget"]))
    def end_shard(self, number: int, how: str) -> None:
        held = self.choose(self.of(Shard), number)
        assert held.writing is not None
        assert held.ticket is not None
        self.held.remove(held)
        self.let_go(held, how)
        slot = held.client.slot
        if slot not in held.ticket.done:
            held.ticket.failed.add(slot)
        if held.shard not in held.writing.published:
            self.model.end_writing(held.writing)
        self.model.unpin(slot, held.pages)

    # ---- writing

    @rule(
        number=pick,
        path=paths,
        start=pick,
        shards=st.sampled_from([1, 1, 1, 2, 3]),
        where=pick,
        order=st.sampled_from(["chain", "chain", "chain", "reversed", "twice"]),
    )
    def reserve(
        self, number: int, path: list[int], start: int, shards: int, where: int, order: str
    ) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        if order == "reversed":
            keys = keys[::-1]
        elif order == "twice":
            keys = keys + keys[::2]
        start %= len(keys) + 1
        chain = make.array(keys)
        tick = self.view.clock + 1
        now = self.view.queue_now
        if not space.open:
            self.expect_lost(
                lambda: client.index.reserve(chain, start, shards=shards, namespace=real),
                Abandoned,
            )
            return
        got = client.index.reserve(chain, start, shards=shards, namespace=real)
        self.settle_reserve(client, space, keys, start, shards, got, tick, now)

    @rule(number=pick, path=paths, where=pick)
    def write(self, number: int, path: list[int], where: int) -> None:
        """Reserve, publish and release in one go: what mostly happens, and fills the pool."""
        before = len(self.held)
        self.reserve(number, path, 0, 1, where, "chain")
        if len(self.held) > before:
            self.finish(self.held.pop())

    def finish(self, held: Held) -> None:
        if held.writing:
            assert held.real.publish()
            self.model.publish(held.writing, 0)
        held.real.release()
        self.model.unpin(held.client.slot, held.pages)

    @precondition(lambda self: self.flat)
    @rule(number=pick, path=paths)
    def write_behind(self, number: int, path: list[int]) -> None:
        """As a checkpoint is written: only what it hangs on counts as used."""
        client, keys = self.client(number), self.keys(path)[-2:]
        if not keys or not client.default.open:
            return
        tick, now = self.view.clock + 1, self.view.queue_now
        got = client.index.reserve(make.array(keys), len(keys) - 1)
        self.settle_reserve(client, client.default, keys, len(keys) - 1, 1, got, tick, now)
        self.finish(self.held.pop())

    @rule(number=pick, trunk=st.integers(0, 3), length=st.integers(1, 12), root=st.integers(0, 9))
    def write_prompt(self, number: int, trunk: int, length: int, root: int) -> None:
        self.write(number, [0] * trunk + [root] * length, 1)

    @rule(number=pick, root=st.integers(10, 90))
    def write_page(self, number: int, root: int) -> None:
        self.write(number, [root], 1)

    @rule(number=pick, length=st.integers(1, 12), start=pick, root=st.integers(0, 9))
    def extend(self, number: int, length: int, start: int, root: int) -> None:
        """Go on behind a prefix, and give up."""
        self.reserve(number, [root] * length, start, 1, 1, "chain")

    def settle_reserve(
        self,
        client: Client,
        space: Space,
        keys: list[make.Pair],
        start: int,
        shards: int,
        got: Reservation,
        since: int,
        now: int,
    ) -> None:
        model = self.model
        for key in keys[:start]:
            if key in model.by_key:
                model.by_key[key].tick = since
        rest = keys[start:]
        status: list[str | None] = [None] * len(rest)
        numbers = [-1] * len(rest)
        for i, key in enumerate(rest):
            page = model.by_key.get(key)
            if page and page.state == "ready" and page.space is space:
                status[i], numbers[i], page.tick = PRESENT, page.number, since
                model.pin(client.slot, [page.number])
        if rest:
            model.settle()
        gone = self.evicted()
        made = iter(got.pages.tolist())
        writing: Writing | None = None
        stopped = False
        exact = not space.quota and not self.chains_may_fill(rest) and model.in_order()
        exact = exact and not model.promises(space)
        if not exact:
            model.evict_legally(gone, since)
            model.keeps_promises(gone, space)
            gone = set()
        for begin in range(0, len(rest), BATCH):
            batch = range(begin, min(begin + BATCH, len(rest)))
            if stopped:
                break
            for i in batch:
                page = model.by_key.get(rest[i])
                if page and page.space is not space:
                    status[i] = MISSING
                elif page and page.state == "writing":
                    status[i] = BUSY
            absent = sum(status[i] is None for i in batch)
            if exact:
                lack = max(0, absent - model.room()) if absent else 0
                can = sum(model.removable(p, since) for p in model.named())
                now = model.evict_oldest(gone, min(lack, can), since, now)
            at = start + begin
            parent = self.parent_at(keys, at, space)
            for i in batch:
                if status[i] == MISSING:
                    stopped = True
                    break
                if status[i] is None and rest[i] in model.by_key:
                    status[i] = BUSY  # stands twice among the keys
                if status[i] is None:
                    if not self.may_place(space, i, exact, got, start):
                        stopped = True
                        break
                    number = next(made)
                    self.check_new(number)
                    page = Page(number, rest[i], space, parent, since)
                    model.by_key[rest[i]] = page
                    model.doomed.pop(number, None)
                    model.pin(client.slot, [number])
                    if writing is None:
                        writing = Writing(client.slot, space, [client.slot] * shards)
                        model.writings.append(writing)
                    writing.pages.append(page)
                    status[i], numbers[i] = NEW, number
                page = model.by_key[rest[i]]
                if status[i] == PRESENT:
                    self.readopt(page, parent)
                parent = page
        assert not gone, f"{gone} were evicted for nothing"
        for i in range(len(rest)):
            if status[i] != PRESENT and (
                status[i] is None
                or status[i] == MISSING
                or (stopped and not self.settled(i, status))
            ):
                status[i] = MISSING
        expected = {
            kind: [i + start for i in range(len(rest)) if status[i] == kind]
            for kind in (NEW, PRESENT, BUSY, MISSING)
        }
        found = {
            NEW: got.new.tolist(),
            PRESENT: got.present.tolist(),
            BUSY: got.busy.tolist(),
            MISSING: got.missing.tolist(),
        }
        assert found == expected
        assert got.present_pages.tolist() == [
            n for n, s in zip(numbers, status, strict=True) if s == PRESENT
        ]
        assert (got.why != "") == bool(expected[MISSING])
        if got.why.startswith("every page") and not space.quota:
            model.nothing_can_go(since, space)
        held = [n for n, s in zip(numbers, status, strict=True) if s in (NEW, PRESENT)]
        self.held.append(Held(client, got, held, writing))

    def settled(self, i: int, status: list[str | None]) -> bool:
        """Before the first key without room."""
        return all(s is not None and s != MISSING for s in status[: i + 1])

    def may_place(self, space: Space, i: int, exact: bool, got: Reservation, start: int) -> bool:
        if space.quota and self.model.space_pages(space) >= space.quota:
            return False
        if exact:
            return self.model.room() > 0
        # Whether a chain had room depends on which of its pages could go: believe the answer,
        # the rest of the comparison tells whether it was an honest one.
        return (i + start) in set(got.new.tolist())

    def chains_may_fill(self, rest: list[make.Pair]) -> bool:
        buckets = Counter(p.key[0] & 0x3F for p in self.model.named())  # there are at least 64
        buckets.update(key[0] & 0x3F for key in rest)
        return self.model.capacity > CHAIN_MAX and max(buckets.values(), default=0) > CHAIN_MAX

    def parent_at(self, keys: list[make.Pair], at: int, space: Space) -> Page | None:
        page = self.model.by_key.get(keys[at - 1]) if at else None
        return page if page and page.space is space else None

    def readopt(self, page: Page, parent: Page | None) -> None:
        if parent is None or parent is page or self.model.children(page):
            return
        if page.parent is None or not page.parent.named:
            page.parent = parent

    def check_new(self, number: int) -> None:
        """A page handed out belongs to nobody else."""
        model = self.model
        assert 0 <= number < model.capacity
        assert model.pins_of(number) == 0, f"page {number} was handed out while pinned"
        assert number not in model.held, f"page {number} was handed out while it is held"
        owners = [p for p in model.named() if p.number == number]
        assert not owners, f"page {number} was handed out although it is {owners}"

    def evicted(self) -> set[Page]:
        """Ready pages of the model that the real index has forgotten."""
        raw = self.view.pages()
        return {
            page
            for page in self.model.named()
            if page.state == "ready"
            and (
                raw[page.number].key != page.key
                or raw[page.number].gen != page.gen  # type: ignore[attr-defined]
                or raw[page.number].state is not PageState.READY
            )
        }

    @precondition(lambda self: self.of(Reservation))
    @rule(number=pick, shard=st.one_of(st.none(), st.integers(-1, 3)))
    def publish(self, number: int, shard: int | None) -> None:
        held = self.choose(self.of(Reservation), number)
        real, writing, slot = held.real, held.writing, held.client.slot
        if shard is not None and not 0 <= shard < real.shards:
            self.expect_lost(lambda: real.publish(shard), ConfigError)
            return
        if writing is None:  # nothing was new
            return
        mine = {s for s, owner in enumerate(writing.shards) if owner == slot}
        wanted = sorted(mine - writing.published) if shard is None else [shard]
        if writing.doomed or not writing.space.open:
            self.expect_lost(lambda: real.publish(shard), Abandoned, LeaseLost)
        elif not wanted or not set(wanted) <= mine - writing.published:
            self.expect_lost(lambda: real.publish(shard), LeaseLost, Abandoned)
        else:
            last = False
            ready = real.publish(shard)
            for each in wanted:
                last = self.model.publish(writing, each)
            assert ready == last

    @precondition(lambda self: self.of(Shard))
    @rule(number=pick)
    def publish_shard(self, number: int) -> None:
        held = self.choose(self.of(Shard), number)
        writing = held.writing
        assert writing is not None
        assert held.ticket is not None
        if writing.doomed or not writing.space.open:
            self.expect_lost(held.real.publish, Abandoned, LeaseLost)
        elif held.shard in writing.published:
            self.expect_lost(held.real.publish, LeaseLost, Abandoned)
        else:
            ready = held.real.publish()
            assert ready == self.model.publish(writing, held.shard)
            held.ticket.done.add(held.client.slot)

    # ---- tickets

    @precondition(lambda self: self.of(Lease) and len(self.given) < 12)
    @rule(number=pick, mask=st.integers(1, 7), late=st.sampled_from([False, False, True]))
    def give_lease(self, number: int, mask: int, late: bool) -> None:
        self.give(self.choose(self.of(Lease), number), mask, late)

    @precondition(lambda self: self.of(Reservation) and len(self.given) < 12)
    @rule(number=pick, mask=st.integers(1, 7), late=st.sampled_from([False, False, False, True]))
    def give_reservation(self, number: int, mask: int, late: bool) -> None:
        held = self.choose(self.of(Reservation), number)
        if held.writing is None:
            self.expect_lost(lambda: held.real.ticket([held.client.index.client_id]), ConfigError)
        else:
            self.give(held, mask, late)

    def give(self, held: Held, mask: int, late: bool) -> None:
        chosen = [c for i, c in enumerate(self.clients) if mask >> i & 1] or [self.clients[0]]
        real = held.real.ticket(
            [c.index.client_id for c in chosen], timeout=-1.0 if late else 3600.0
        )
        self.model.settle()
        pages = [p.number for p in held.writing.pages] if held.writing else held.pages
        model = Handoff(
            giver=held.client.slot,
            adopters={c.slot for c in chosen},
            pages=list(pages),
            late=late,
            writing=held.writing,
        )
        self.model.handoffs.append(model)
        self.model.pin(TICKETS, model.pages)
        self.given.append(Given(held.client, real, model, bytes(real)))

    @precondition(lambda self: self.given)
    @rule(number=pick, who=pick, shard=st.one_of(st.none(), st.integers(0, 3)))
    def adopt(self, number: int, who: int, shard: int | None) -> None:
        given = self.choose(self.given, number)
        client = self.client(who)
        ticket, writing = given.model, given.model.writing
        may = (
            not ticket.freed
            and client.slot in ticket.adopters
            and client.slot not in ticket.adopted | ticket.failed
            and not ticket.late
        )
        if not may or (writing and writing.doomed):
            kinds: tuple[type[BaseException], ...] = (LeaseLost,)
        elif writing and writing.complete:  # it may still wait to be collected
            kinds = (LeaseLost, ConfigError)
        elif writing and (shard is None or shard >= len(writing.shards)):
            kinds = (ConfigError,)
        elif writing and (
            shard in writing.published
            or writing.owner is None
            or writing.shards[shard or 0] != writing.owner
        ):
            kinds = (LeaseLost,)
        else:
            kinds = ()
        if kinds:
            self.expect_lost(lambda: client.index.adopt(given.data, shard=shard), *kinds)
            return
        got = client.index.adopt(given.data, shard=shard)
        assert isinstance(got, Shard if writing else Lease)
        assert got.pages.tolist() == ticket.pages
        self.model.pin(client.slot, ticket.pages)
        ticket.adopted.add(client.slot)
        if writing:
            assert shard is not None
            writing.shards[shard] = client.slot
        self.model.settle()
        self.held.append(
            Held(client, got, list(ticket.pages), writing, shard, ticket if writing else None)
        )

    @precondition(lambda self: [g for g in self.given if g.model.writing is None])
    @rule(number=pick, who=pick, ok=st.booleans())
    def done(self, number: int, who: int, ok: bool) -> None:
        given = self.choose([g for g in self.given if g.model.writing is None], number)
        slot, index = self.client(who).slot, self.client(who).index
        ticket = given.model
        if ticket.freed or slot not in ticket.adopted or slot in ticket.done | ticket.failed:
            self.expect_lost(lambda: index.done(given.data, ok), LeaseLost)
            return
        index.done(given.data, ok)
        (ticket.done if ok else ticket.failed).add(slot)

    @precondition(lambda self: [g for g in self.given if not g.dropped])
    @rule(number=pick)
    def drop(self, number: int) -> None:
        given = self.choose([g for g in self.given if not g.dropped], number)
        given.real.drop()
        given.dropped = given.model.dropped = True
        self.model.settle()
        self.expect_lost(given.real.drop, LeaseLost)
        self.expect_lost(given.real.poll, LeaseLost)

    @precondition(lambda self: [g for g in self.given if not g.dropped])
    @rule(number=pick)
    def poll(self, number: int) -> None:
        given = self.choose([g for g in self.given if not g.dropped], number)
        ticket, found = given.model, given.real.poll()
        failed = set(ticket.failed)
        if ticket.late:
            failed |= ticket.adopters - ticket.adopted
        assert found.adopters == ticket.adopters
        assert found.adopted == ticket.adopted
        assert found.done == ticket.done
        assert found.failed == failed
        assert found.late == ticket.late
        verdict = False if failed else True if ticket.done == ticket.adopters else None
        assert found.verdict is verdict

    # ---- room and namespaces

    @rule(number=pick, n=st.integers(0, 8))
    def evict(self, number: int, n: int) -> None:
        since, now = self.view.clock + 1, self.view.queue_now
        if n:
            self.model.settle()
        can = sum(self.model.removable(p, since) for p in self.model.named())
        freed = self.client(number).index.evict(n)
        gone = self.evicted()
        assert len(gone) == freed
        if self.model.promises(None):
            assert freed <= min(n, can)
            self.model.evict_legally(gone, since)
            self.model.keeps_promises(gone, None)
            if freed < n:
                self.model.nothing_can_go(since, None)
        elif not self.model.in_order():
            assert freed == min(n, can)
            self.model.evict_legally(gone, since)
        else:
            assert freed == min(n, can)
            self.model.evict_oldest(gone, freed, since, now)
        self.since = since

    # ---- what an engine decides itself

    @rule(number=pick, path=paths, where=pick, kept=st.sampled_from([True, True, False]))
    def keep(self, number: int, path: list[int], where: int, kept: bool) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        if kept and len(keys) * 2 <= self.model.capacity:  # room for others is wanted as well
            found = self.model.prefix(keys, space)
            assert client.index.keep(make.array(keys), namespace=real) == len(found)
        else:
            kept = False
            pages = [self.model.by_key[key] for key in keys if key in self.model.by_key]
            found = [p for p in pages if p.kept and p.space is space and space.open]
            assert client.index.unkeep(make.array(keys), namespace=real) == len(found)
        for page in found:
            page.kept = kept

    @rule(number=pick, path=paths, start=pick, where=pick)
    def drop_branch(self, number: int, path: list[int], start: int, where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        start %= len(keys) + 1
        self.model.settle()
        freed = client.index.drop(make.array(keys), start=start, namespace=real)
        gone = self.evicted()
        assert freed == len(gone)
        assert set(self.model.drop(keys, start, space)) == gone

    @rule(number=pick, n=st.integers(0, 40), keep_order=st.sampled_from([True, True, True, False]))
    def oldest(self, number: int, n: int, keep_order: bool) -> None:
        client, model = self.client(number), self.model
        since, now = self.view.clock + 1, self.view.queue_now
        model.settle()
        may = {page for page in model.named() if model.removable(page, since)}
        mine = [p for p in model.named() if model.pins[client.slot, p.number] and p.tick < since]
        in_order = model.in_order()
        found = client.index.oldest(n, keep_order=keep_order)
        by_number = {page.number: page for page in model.named()}
        pages = [by_number[number] for number in found.pages.tolist()]
        assert [tuple(key) for key in found.keys.tolist()] == [page.key for page in pages]
        assert (client.index.keys_of(found.pages) == found.keys).all()
        assert len(set(pages)) == len(pages) <= n
        assert set(pages) <= may
        self.check_listed(pages, found.parent.tolist(), now if in_order else None)
        if model.promises(None):
            for space in {page.space for page in pages}:
                listed = sum(page.space is space for page in pages)
                assert model.space_pages(space) - listed >= space.minimum
        elif len(pages) < n:
            assert not [p for p in may - set(pages) if model.queued(p)], "more could go"
        if len(pages) == n and n and in_order and not model.promises(None):
            last = max(max(p.tick, now) for p in pages if model.queued(p))
            rest = [p for p in may - set(pages) if model.queued(p)]
            assert all(max(p.tick, now) >= last for p in rest), "an older one was passed over"
        for page in [*mine, *([] if keep_order else pages)]:
            if model.queued(page):
                page.parked = since
        raw = self.view.pages()
        hits = {page.number: raw[page.number].hits for page in pages}
        numbers = [page.number for page in pages]
        model.pin(client.slot, numbers)
        self.held.append(Held(client, found.lease, numbers, hits=hits))

    def check_listed(self, pages: list[Page], parents: list[int], now: int | None) -> None:
        """Ends of prefixes in order, each followed by what goes with it; `now` None: any order."""
        before = -1
        for i, page in enumerate(pages):
            parent = page.parent if page.parent and page.parent.named else None
            assert parents[i] == (pages.index(parent) if parent in pages else -1)
            if not self.model.queued(page):
                assert set(self.model.children(page)) <= set(pages[:i])
                assert pages[i - 1].parent is page
                assert pages[i - 1].tick == page.tick
            elif now is not None:
                assert max(page.tick, now) >= before
                before = max(page.tick, now)

    @precondition(lambda self: self.of(Lease))
    @rule(number=pick)
    def discard(self, number: int) -> None:
        held = self.choose(self.of(Lease), number)
        index, model = held.client.index, self.model
        if len(set(held.pages)) < len(held.pages):
            self.expect_lost(lambda: index.discard(held.real), ConfigError)
            return
        raw = self.view.pages()
        unwanted = {n for n in held.pages if held.hits is None or held.hits[n] == raw[n].hits}
        by_number = {page.number: page for page in model.named()}
        self.held.remove(held)
        if held.pages:
            model.settle()
        freed = index.discard(held.real)
        model.unpin(held.client.slot, held.pages)
        gone = self.evicted()
        assert freed == len(gone)
        pages = [by_number[n] for n in held.pages if n in by_number]
        assert model.discard(pages, unwanted) == gone
        self.expect_lost(held.real.release, LeaseLost)

    def limits_fit(self, space: Space | None, quota: int | None, minimum: int | None) -> bool:
        quota = quota if quota is not None else space.quota if space else 0
        minimum = minimum if minimum is not None else space.minimum if space else 0
        others = sum(s.minimum for s in self.model.spaces if s.open and s is not space)
        return not minimum or (
            (not quota or minimum <= quota) and others + minimum <= self.model.capacity
        )

    def namespace(
        self, number: int, name: tuple[str, str], quota: int | None, minimum: int | None
    ) -> None:
        index = self.client(number).index
        space = self.model.open_space(*name)
        if not self.limits_fit(space, quota, minimum):
            self.expect_lost(
                lambda: index.namespace(*name, quota=quota, minimum=minimum), ConfigError
            )
            return
        real = index.namespace(*name, quota=quota, minimum=minimum)
        if space is None:
            assert real.ref not in self.refs, "an old handle would speak for a new namespace"
            space = Space(*name, id=real.id)
            self.model.spaces.append(space)
        elif space in self.opened:
            assert real == self.opened[space]
        assert real.id == space.id
        if quota is not None:
            space.quota = quota
        if minimum is not None:
            space.minimum = minimum
        self.refs.add(real.ref)
        self.opened[space] = real

    def clear(self, number: int, where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        client.index.clear(real)
        if space.open:
            self.model.clear(space)
        if space is client.default:
            client.default = self.default_space(client.index)

    # ---- after every step

    @invariant()
    def agrees(self) -> None:
        if not self.clients:
            return
        model, index = self.model, self.clients[0].index
        report = index.check()
        assert report.clean, report.message
        assert report.quiet
        assert report.pins == model.total_pins()
        states = Counter(p.state for p in model.named())
        assert (report.writing, report.ready) == (states["writing"], states["ready"])
        stats = index.stats()
        counted = stats.free + stats.writing + stats.ready + stats.doomed + stats.held
        assert counted == stats.pages
        assert stats.held == report.held == len(model.held)
        assert stats.doomed == report.doomed >= model.pinned_doomed()
        assert stats.tickets == sum(not t.freed for t in model.handoffs)
        assert stats.kept == sum(p.kept for p in model.named())
        self.compare_rows()
        self.compare_pages()

    def compare_rows(self) -> None:
        expected = np.zeros((64, self.model.capacity), np.uint16)
        for (who, number), n in self.model.pins.items():
            expected[0 if who == TICKETS else int(who), number] = n
        assert (self.view.rows() == expected).all(), "pin rows differ from what is held"

    def compare_pages(self) -> None:
        raw = self.view.pages()
        named = {p.number: p for p in self.model.named()}
        assert len(named) == len(self.model.by_key)
        for number, found in enumerate(raw):
            page = named.get(number)
            if number in self.model.held:
                assert page is None
                assert found.state is PageState.HELD
                assert found.namespace == self.model.held[number], "its word says whose it is"
                self.model.doomed.pop(number, None)
                continue
            if page is None:
                assert found.state in (PageState.FREE, PageState.DOOMED)
                if found.state is PageState.FREE:
                    self.model.doomed.pop(number, None)
                    assert not self.model.pinned(number), f"page {number} is free and pinned"
                else:
                    assert number in self.model.doomed, f"page {number} was doomed by nobody"
                continue
            assert number not in self.model.doomed
            assert found.key == page.key
            assert found.state.name.lower() == page.state
            assert found.namespace == page.space.id
            assert found.kept == page.kept
            assert found.children == len(self.model.children(page))
            parent = page.parent if page.parent and page.parent.named else None
            if parent is not None:
                assert (found.parent, found.parent_gen) == (parent.number, raw[parent.number].gen)
            page.gen = found.gen  # type: ignore[attr-defined]
            if found.tick != page.tick:  # found pinned when something was evicted: as used then
                assert found.tick > page.tick
                assert self.model.pinned(number) or page.space.minimum
                assert page.state == "ready"
                page.tick = found.tick

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.release_everything()
        finally:  # after a failure too: hypothesis goes on with smaller examples
            self.held.clear()
            self.given.clear()
            for client in self.clients:
                client.index.close()
            self.clients.clear()

    def release_everything(self) -> None:
        """And look whether anything is left."""
        for (_, name), plan in self.planned.items():
            assert plan.client.index.cancel(name)
        for held in self.held:
            held.real.release()
        for given in self.given:
            if not given.dropped:
                given.real.drop()
        if self.clients:
            report = self.clients[0].index.check()
            assert report.clean, report.message
            # Row 0 holds what was handed to somebody who may still adopt it.
            assert not self.view.rows()[1:].any(), "pins leaked"

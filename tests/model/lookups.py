"""Lookups and plans, in the machine of the index."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import (
    Held,
    MachineBase,
    Planned,
    paths,
    pick,
)
from model.index_model import Page
from support import keys as make

from lightcache import (
    Lease,
    LeaseLost,
    WaitTimeout,
)


class LookupRules(MachineBase):
    """Clients look, match, wait and plan."""

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
    def last_ready(self, number: int, many: list[list[int]], where: int) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        chains = [self.keys(path) for path in many]
        expected = [self.model.last_ready(chain, space) for chain in chains]
        for chain, deepest in zip(chains, expected, strict=True):
            assert client.index.last_ready(make.array(chain), namespace=real) == deepest
        offsets = np.cumsum([0, *map(len, chains)])
        keys = make.array(itertools.chain.from_iterable(chains))
        found = client.index.last_ready_many(keys, offsets, namespace=real)
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
        if found:
            self.tell(self.held[-1])

    @rule(number=pick, path=paths, cut=pick, where=pick, planned=st.booleans())
    def match_rest(self, number: int, path: list[int], cut: int, where: int, planned: bool) -> None:
        """After a head that the caller has: it counts as used, whether the rest is found or not."""
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        if len(keys) < 2:
            return
        cut = 1 + cut % (len(keys) - 1)
        after, rest, tick = make.array(keys[cut - 1 : cut]), keys[cut:], self.view.clock + 1
        head, found = self.parent_at(keys, cut, space), self.model.prefix(rest, space)
        if head and space.open:
            head.tick = tick
            tick += 1
        if planned:
            assert client.index.plan("rest", make.array(rest), after=after, namespace=real) == len(
                found
            )
            lease = client.index.take("rest")
            if not self.model.by_age:  # now it is used, and then the head
                tick = self.view.clock - bool(head and space.open)
                if head and space.open:
                    head.tick = tick + 1
        else:
            lease = client.index.match(make.array(rest), after=after, namespace=real)
        assert lease.pages.tolist() == [page.number for page in found]
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

    # ---- by number

    def living(self, numbers: list[int]) -> list[Page | None]:
        """The ready page of each number; None: none."""
        now = {page.number: page for page in self.model.named() if page.state == "ready"}
        return [now.get(number) for number in numbers]

    @precondition(lambda self: self.of(Lease))
    @rule(number=pick)
    def tell_later(self, number: int) -> None:
        self.tell(self.choose(self.of(Lease), number))

    def tell(self, held: Held) -> None:
        pages, numbers = self.living(held.pages), np.array(held.pages, np.int32)
        if None in pages:
            self.expect_lost(lambda: held.client.index.generations(numbers), LeaseLost)
        else:
            self.told.append((list(held.pages), held.client.index.generations(numbers), pages))

    @precondition(lambda self: self.told)
    @rule(number=pick, which=pick, part=pick)
    def pin_by_number(self, number: int, which: int, part: int) -> None:
        """Rather those whose pages are ready again, in another life."""
        client = self.client(number)
        again = [
            told
            for told in self.told
            if None not in (now := self.living(told[0])) and now != told[2]
        ]
        numbers, generations, pages = self.choose(again or self.told, which)
        some = slice(part % 3, None)
        numbers, generations, pages = numbers[some], generations[some], pages[some]
        now, tick = self.living(numbers), self.view.clock + 1
        same = all(page is told for page, told in zip(now, pages, strict=True))
        if same and len({page.space.id for page in pages}) < 2:
            lease = client.index.pin(np.array(numbers, np.int32), generations)
            assert lease.pages.tolist() == numbers
            for page in pages:
                page.tick = tick
            self.model.pin(client.slot, numbers)
            self.held.append(Held(client, lease, numbers))
            return
        self.expect_lost(
            lambda: client.index.pin(np.array(numbers, np.int32), generations), LeaseLost
        )
        raw = self.view.pages()
        for page in now:  # those before the one that was refused may count as used
            if page is not None:
                assert raw[page.number].tick in (page.tick, tick)
                page.tick = raw[page.number].tick

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
        """What the index does when the prefix is not what the plan has; a match, so it is used with
        LRU. With others it is when the plan is taken."""
        found = self.model.prefix(plan.keys, plan.space)
        if len(found) == len(plan.pages):
            return
        for page in found if self.model.by_age else []:
            page.tick = tick
        numbers = [page.number for page in found]
        self.model.pin(plan.client.slot, numbers)
        self.model.unpin(plan.client.slot, plan.pages)
        plan.pages = numbers

    @precondition(lambda self: self.planned)
    @rule(
        number=pick,
        how=st.sampled_from(["take", "take", "cancel"]),
        pages=st.one_of(st.none(), st.integers(0, 5)),
    )
    def end_plan(self, number: int, how: str, pages: int | None) -> None:
        slot, name = self.choose(sorted(self.planned), number)
        plan = self.planned.pop((slot, name))
        tick = self.view.clock + 1
        if how == "cancel":
            assert plan.client.index.cancel(name)
            self.model.unpin(slot, plan.pages)
        else:
            lease = plan.client.index.take(name, pages=pages)
            self.look_again(plan, tick)
            if pages is not None:
                self.model.unpin(slot, plan.pages[pages:])
                plan.pages = plan.pages[:pages]
            assert lease.pages.tolist() == plan.pages
            for page in self.living(plan.pages) if not self.model.by_age else []:
                if page is not None:
                    page.tick = self.view.clock
            self.held.append(Held(plan.client, lease, plan.pages))
        assert not plan.client.index.cancel(name)

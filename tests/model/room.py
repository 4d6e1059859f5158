"""Eviction, what is kept, and namespaces, in the machine of the index."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import (
    Held,
    MachineBase,
    paths,
    pick,
)
from model.index_model import (
    CacheScope,
    Page,
)
from support import keys as make
from support.index_view import PageView

from lightcache import (
    ConfigError,
    Lease,
    LeaseLost,
)
from lightcache.runs import Run


class RoomRules(MachineBase):
    """Room is made, kept and limited."""

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
    def protect(self, number: int, path: list[int], where: int, kept: bool) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        if kept and len(keys) * 2 <= self.model.capacity:  # room for others is wanted as well
            found = self.model.prefix(keys, space)
            assert client.index.protect(make.array(keys), namespace=real) == len(found)
        else:
            kept = False
            pages = [self.model.by_key[key] for key in keys if key in self.model.by_key]
            found = [p for p in pages if p.kept and p.space is space and space.open]
            assert client.index.unprotect(make.array(keys), namespace=real) == len(found)
        for page in found:
            page.kept = kept

    @rule(number=pick, path=paths, start=pick, where=pick)
    def evict_first(self, number: int, path: list[int], start: int, where: int) -> None:
        client = self.client(number)
        now = self.view.queue_now if self.model.by_age else 0
        space, real = self.space(client, where)
        keys = self.keys(path)
        keys = keys[start % (len(keys) + 1) :]
        changed = self.model.evict_first(keys, space, now)
        assert client.index.evict_first(make.array(keys), namespace=real) == len(changed)

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
        in_order = model.by_age and model.in_order()
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
            for group in {page.group for page in pages}:
                listed = sum(page.group == group for page in pages)
                assert model.group_pages(group) - listed >= model.minimums.get(group, 0)
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
        uses = {page.number: self.uses(raw[page.number]) for page in pages}
        numbers = [page.number for page in pages]
        model.pin(client.slot, numbers)
        self.held.append(Held(client, found.lease, numbers, uses=uses))

    def uses(self, page: PageView) -> tuple[int, ...]:
        """What has changed where a listed page was used since."""
        return (page.hits,) if self.model.by_age else (page.tick, page.hits)

    def check_listed(self, pages: list[Page], parents: list[int], now: int | None) -> None:
        """Ends of prefixes in order, each followed by what goes with it; `now` None: any order."""
        before = -1
        for i, page in enumerate(pages):
            parent = page.parent if page.parent and page.parent.named else None
            assert parents[i] == (pages.index(parent) if parent in pages else -1)
            if not self.model.queued(page):
                assert set(self.model.children(page)) <= set(pages[:i])
                assert pages[i - 1].parent is page
                assert pages[i - 1].tick >= page.tick or not self.model.by_age
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
        unwanted = {n for n in held.pages if held.uses is None or held.uses[n] == self.uses(raw[n])}
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

    def limits_fit(self, space: CacheScope | None, quota: int | None, minimum: int | None) -> bool:
        quota = quota if quota is not None else space.quota if space else 0
        minimum = minimum if minimum is not None else space.minimum if space else 0
        others = sum(s.minimum for s in self.model.spaces if s.open and s is not space)
        others += sum(self.model.minimums.values())
        return not minimum or (
            (not quota or minimum <= quota) and others + minimum <= self.model.capacity
        )

    def group_minimum(self, number: int, run: Run, pages: int) -> None:
        index, model = self.client(number).index, self.model
        least = -(-pages // run.parts) * run.parts
        others = sum(s.minimum for s in model.spaces if s.open)
        others += sum(each for group, each in model.minimums.items() if group != run.group)
        if others + least > model.capacity:
            self.expect_lost(lambda: index.set_minimum(run, pages), ConfigError)
            return
        index.set_minimum(run, pages)
        model.minimums[run.group] = least

    def namespace(
        self, number: int, name: tuple[str, str], quota: int | None, minimum: int | None
    ) -> None:
        index = self.client(number).index
        space = self.model.open_space(*name)
        if not self.limits_fit(space, quota, minimum):
            self.expect_lost(
                lambda: index.namespace(*name, quota_pages=quota, minimum_pages=minimum),
                ConfigError,
            )
            return
        real = index.namespace(*name, quota_pages=quota, minimum_pages=minimum)
        if space is None:
            assert real.ref not in self.refs, "an old handle would speak for a new namespace"
            space = CacheScope(*name, id=real.id)
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

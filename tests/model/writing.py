"""Reserving and publishing, in the machine of the index."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import (
    Client,
    Held,
    MachineBase,
    paths,
    pick,
)
from model.index_model import (
    BATCH,
    BUSY,
    CHAIN_MAX,
    MISSING,
    NEW,
    PRESENT,
    CacheScope,
    Page,
    Writing,
)
from support import keys as make

from lightcache import Abandoned, ConfigError, LeaseLost, Reservation
from lightcache.layout import PageState
from lightcache.reservations import ReservationShard
from lightcache.runs import PLAIN, Run


class WritingRules(MachineBase):
    """Clients write pages."""

    # ---- writing

    @rule(
        number=pick,
        path=paths,
        start=pick,
        shards=st.sampled_from([1, 1, 1, 2, 3]),
        where=pick,
        order=st.sampled_from(["chain", "chain", "chain", "reversed", "twice"]),
        kind=pick,
    )
    def reserve(
        self,
        number: int,
        path: list[int],
        start: int,
        shards: int,
        where: int,
        order: str,
        kind: int = 0,
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
        independent = self.kind(kind)
        said = independent if self.independent is None else None  # else as the index was made

        def call() -> Reservation:
            return client.index.reserve(
                chain, start, shards=shards, independent=said, namespace=real
            )

        if not space.open:
            self.expect_lost(call, Abandoned)
            return
        self.settle_reserve(client, space, keys, start, shards, independent, call(), tick, now)

    @rule(number=pick, path=paths, cut=pick, where=pick, kind=pick)
    def write_piece(self, number: int, path: list[int], cut: int, where: int, kind: int) -> None:
        """A chain in pieces: what hangs on a page that is not there is not made."""
        client = self.client(number)
        space, real = self.space(client, where)
        keys = self.keys(path)
        if len(keys) < 2 or not space.open:
            return
        keys = keys[cut % (len(keys) - 1) :]
        chain = make.array(keys)
        tick, now = self.view.clock + 1, self.view.queue_now
        independent = self.kind(kind)
        said = independent if self.independent is None else None
        got = client.index.reserve(chain[1:], after=chain[:1], independent=said, namespace=real)
        assert (got.new < len(chain) - 1).all()
        if not independent:
            parent, place = self.parent_at(keys, 1, space), Page(-1, keys[0], space, None, tick)
            lacking = any(not self.model.ready(key, space) for key in keys[1:])
            if lacking and self.fit(place, parent) is None:
                self.settle_headless(client, space, keys, got, tick)
                return
        got._start += 1  # positions in `keys`, as the model counts
        self.settle_reserve(client, space, keys, 1, 1, independent, got, tick, now)
        self.finish(self.held.pop())

    def settle_headless(
        self, client: Client, space: CacheScope, keys: list[make.Pair], got: Reservation, since: int
    ) -> None:
        if keys[0] in self.model.by_key:
            self.model.by_key[keys[0]].tick = since
        pages = [self.model.ready(key, space) for key in keys[1:]]
        self.model.settle()
        assert not self.evicted()
        assert got.present_pages.tolist() == [page.number for page in pages if page]
        assert got.missing.tolist() == [i for i, page in enumerate(pages) if not page]
        assert got.why.startswith("the page of the key before")
        for page in filter(None, pages):
            page.tick = since
        got.release()

    @rule(
        number=pick,
        path=paths,
        ranks=st.integers(2, 3),
        kind=pick,
        end=st.sampled_from(["publish", "publish", "abandon", "late", "close"]),
        who=pick,
    )
    def write_together(
        self, number: int, path: list[int], ranks: int, kind: int, end: str, who: int
    ) -> None:
        """Ranks join what the first of them has begun. All publish; or one gives up or dies, which
        dooms what it has not published; or none joins in time."""
        client, keys = self.client(number), self.keys(path)
        peers = [c for c in self.clients if c.default is client.default]
        if not keys or not client.default.open:
            return
        writers = [client, *(peers[(who + rank) % len(peers)] for rank in range(1, ranks))]
        team, timeout = self.view.clock + 1, 0.0 if end == "late" else 3600.0
        held = [self.begin_together(client, keys, ranks, kind, team, timeout)]
        writing = held[0].writing
        if writing is None:
            self.finish(self.held.pop())
            return
        if end == "late":
            client.index.core.locked("lci_settle", what="wait")  # as `wait` does, now and then
            self.model.end_writing(writing)
        else:
            for rank, writer in enumerate(writers[1:], 1):
                held.append(self.join(writer, keys, ranks, rank, kind, team, held[0]))
        self.agrees()  # what was found pinned is so until one of them closes
        if end == "close":
            self.close(self.clients.index(writers[who % ranks]))
        elif end == "abandon":
            held[who % ranks].real.abandon()
            self.model.end_writing(writing)
        for rank, each in enumerate(held):
            if each not in self.held:
                continue  # its client has gone
            self.held.remove(each)
            if writing.doomed:
                self.expect_lost(each.real.publish, Abandoned)
            else:
                assert each.real.publish() == self.model.publish(writing, rank)
            if not each.real.ended:
                each.real.release()
            self.model.unpin(each.client.slot, each.pages)

    def begin_together(
        self,
        client: Client,
        keys: list[make.Pair],
        ranks: int,
        kind: int,
        team: int,
        timeout: float,
    ) -> Held:
        independent = self.kind(kind)
        tick, now = self.view.clock + 1, self.view.queue_now
        got = client.index.reserve(
            make.array(keys),
            shards=ranks,
            shard=0,
            team=team,
            join_timeout=timeout,
            independent=independent if self.independent is None else None,
        )
        space = client.default
        self.settle_reserve(client, space, keys, 0, ranks, independent, got, tick, now)
        return self.held[-1]

    def join(
        self,
        client: Client,
        keys: list[make.Pair],
        ranks: int,
        rank: int,
        kind: int,
        team: int,
        first: Held,
    ) -> Held:
        """A rank has what the first one has, new and present."""
        tick = self.view.clock + 1
        got = client.index.reserve(
            make.array(keys),
            shards=ranks,
            shard=rank,
            team=team,
            independent=self.kind(kind) if self.independent is None else None,
        )
        self.model.settle()
        assert not self.evicted()
        for kind_of in ("new", "present", "pages", "present_pages"):
            assert getattr(got, kind_of).tolist() == getattr(first.real, kind_of).tolist()
        rest = sorted({*first.real.busy.tolist(), *first.real.missing.tolist()})
        busy = [i for i in rest if self.model.writes_any(keys[i : i + 1], client.default)]
        assert got.busy.tolist() == busy  # those after the first missing one as well
        assert got.missing.tolist() == [i for i in rest if i not in busy]
        present = set(got.present_pages.tolist())
        for page in self.model.named():
            if page.number in present:
                page.tick = tick
        assert first.writing is not None
        first.writing.shards[rank] = client.slot
        self.model.pin(client.slot, first.pages)
        held = Held(client, got, list(first.pages), first.writing)
        self.held.append(held)
        return held

    @rule(number=pick, path=paths, where=pick, kind=pick)
    def write(self, number: int, path: list[int], where: int, kind: int = 0) -> None:
        """Reserve, publish and release in one go: what mostly happens, and fills the pool."""
        before = len(self.held)
        self.reserve(number, path, 0, 1, where, "chain", kind)
        if len(self.held) > before:
            self.finish(self.held.pop())

    def finish(self, held: Held) -> None:
        if held.writing:
            assert held.real.publish()
            self.model.publish(held.writing, 0)
        held.real.release()
        self.model.unpin(held.client.slot, held.pages)

    @precondition(lambda self: self.independent is not False)
    @rule(number=pick, path=paths)
    def write_behind(self, number: int, path: list[int]) -> None:
        """As a checkpoint is written: only what it hangs on counts as used."""
        client, keys = self.client(number), self.keys(path)[-2:]
        if not keys or not client.default.open:
            return
        tick, now = self.view.clock + 1, self.view.queue_now
        got = client.index.reserve(make.array(keys), len(keys) - 1, independent=True)
        self.settle_reserve(client, client.default, keys, len(keys) - 1, 1, True, got, tick, now)
        self.finish(self.held.pop())

    @precondition(lambda self: self.independent is not False)
    @rule(number=pick, path=paths, parts=st.sampled_from([1, 2, 3, 5, 40]), group=st.integers(1, 2))
    def write_run(self, number: int, path: list[int], parts: int, group: int) -> None:
        """A state of several parts after the one before it, of which all or nothing is written."""
        client, run = self.client(number), Run(group, parts)
        keys = self.keys(path)[-2:]
        if not keys or not client.default.open:
            return
        chain = run.keys(make.array(keys))
        start = len(chain) - parts
        tick, now = self.view.clock + 1, self.view.queue_now
        got = client.index.reserve(chain, start, independent=True, run=run)
        pairs = [(int(low), int(high)) for low, high in chain]
        self.settle_reserve(client, client.default, pairs, start, 1, True, got, tick, now, run)
        self.finish(self.held.pop())

    @rule(number=pick, trunk=st.integers(0, 3), length=st.integers(1, 12), root=st.integers(0, 9))
    def write_prompt(self, number: int, trunk: int, length: int, root: int) -> None:
        self.write(number, [0] * trunk + [root] * length, 1, root)

    @rule(number=pick, root=st.integers(10, 90))
    def write_page(self, number: int, root: int) -> None:
        self.write(number, [root], 1, root)

    @rule(number=pick, length=st.integers(1, 12), start=pick, root=st.integers(0, 9))
    def extend(self, number: int, length: int, start: int, root: int) -> None:
        """Go on behind a prefix, and give up."""
        self.reserve(number, [root] * length, start, 1, 1, "chain", length)

    def settle_reserve(
        self,
        client: Client,
        space: CacheScope,
        keys: list[make.Pair],
        start: int,
        shards: int,
        independent: bool,
        got: Reservation,
        since: int,
        now: int,
        run: Run = PLAIN,
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
        if run.group and len(got.missing):
            self.settle_nothing(client, space, status, numbers, got, gone, since, run.group)
            return
        made = iter(got.pages.tolist())
        writing: Writing | None = None
        stopped = False
        exact = not space.quota and not self.chains_may_fill(rest) and model.in_order()
        # A call that meets a doomed page that is pinned evicts instead of looking for another.
        exact = exact and not model.promises(space, run.group) and not model.pinned_doomed()
        if not exact:
            model.evict_legally(gone, since)
            model.keeps_promises(gone, space, run.group)
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
                    last = independent and (i + 1) % run.parts == 0
                    page = Page(number, rest[i], space, None, since, last, group=run.group)
                    page.parent = self.fit(page, parent)
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
            model.nothing_can_go(since, space, run.group)
        held = [n for n, s in zip(numbers, status, strict=True) if s in (NEW, PRESENT)]
        self.held.append(Held(client, got, held, writing))

    def settle_nothing(
        self,
        client: Client,
        space: CacheScope,
        status: list[str | None],
        numbers: list[int],
        got: Reservation,
        gone: set[Page],
        since: int,
        group: int,
    ) -> None:
        """Not all of a run found room: none of it was made, and what was there is pinned."""
        model = self.model
        model.evict_legally(gone, since)
        model.keeps_promises(gone, space, group)
        assert not len(got.pages)
        assert got.why
        for number, page in enumerate(self.view.pages()):
            if page.state is PageState.DOOMED and number not in model.doomed:  # was given back
                assert not model.pinned(number)
                model.doomed[number] = Page(number, page.key, space, None, since)
        found = got.present_pages.tolist()
        assert found == [n for n, kind in zip(numbers, status, strict=True) if kind == PRESENT]
        self.held.append(Held(client, got, found, None))

    def settled(self, i: int, status: list[str | None]) -> bool:
        """Before the first key without room."""
        return all(s is not None and s != MISSING for s in status[: i + 1])

    def may_place(
        self, space: CacheScope, i: int, exact: bool, got: Reservation, start: int
    ) -> bool:
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

    def fit(self, page: Page, parent: Page | None) -> Page | None:
        """A page hangs only on one of its own kind; of a run, on any page of its group."""
        if parent is None or parent.group != page.group:
            return None
        return parent if page.group or parent.independent == page.independent else None

    def readopt(self, page: Page, parent: Page | None) -> None:
        parent = self.fit(page, parent)
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

    @precondition(lambda self: self.of(ReservationShard))
    @rule(number=pick)
    def publish_shard(self, number: int) -> None:
        held = self.choose(self.of(ReservationShard), number)
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

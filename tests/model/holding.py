"""Pages without a key, in the machine that compares the model and the real index."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model.base import Client, Held, paths, pick
from model.index_model import BATCH, TICKETS, CacheScope, Page
from model.machine import IndexMachine
from support import keys as make

from lightcache import Abandoned, ConfigError, InUse, LeaseLost, OutOfPages
from lightcache.layout import KeyStatus
from lightcache.leases import NamingResult


class HoldingMachine(IndexMachine):
    """Clients also allocate, name, unname and free pages, and keep numbers."""

    def __init__(self, name: str, independent: bool | None = False, eviction: str = "lru") -> None:
        super().__init__(name, independent, eviction)
        self.named_pins: Counter[tuple[int, int]] = Counter()
        """(slot, page): pins that came with names, which `unpin` gives back."""

    def holding(self, client: Client) -> list[int]:
        return [n for n, slot in self.model.held.items() if slot == client.slot]

    def kept(self, client: Client) -> list[int]:
        """Pages of which the client has a pin that came with a name."""
        return sorted(
            n for (slot, n), pins in self.named_pins.items() if slot == client.slot and pins
        )

    def close(self, number: int) -> None:
        before = {c.slot for c in self.clients}
        super().close(number)
        for key in list(self.named_pins):
            if key[0] in before - {c.slot for c in self.clients}:
                del self.named_pins[key]

    # ---- taking and giving back

    @rule(number=pick, n=st.one_of(st.integers(0, 4), st.integers(0, 45)))
    def allocate(self, number: int, n: int) -> None:
        client, model = self.client(number), self.model
        since, now = self.view.clock + 1, self.view.queue_now
        if n > model.capacity:
            self.expect_lost(lambda: client.index.allocate(n), ConfigError)
            return
        if n:
            model.settle()
        writing = sum(p.state == "writing" for p in model.named())
        fits = writing + len(model.held) + n <= model.capacity
        can = model.room() + sum(model.removable(p, since) for p in model.named())
        promised, numbers = model.promises(None), []
        if not fits or can < n:
            self.expect_lost(lambda: client.index.allocate(n), OutOfPages)
        else:
            # What others were promised is not this call's, so it may lack pages that could go.
            with contextlib.suppress(*[OutOfPages] if promised else []):
                numbers = client.index.allocate(n).detach().tolist()
            assert len(set(numbers)) == (n if numbers else 0)
        if promised:
            gone = self.evicted()
            model.evict_legally(gone, since)
            model.keeps_promises(gone, None)
        else:
            self.evict_for(n if fits else 0, since, now)
        if numbers:
            for each in numbers:
                self.check_new(each)
                model.held[each] = client.slot
                model.doomed.pop(each, None)
            model.pin(client.slot, numbers)

    def evict_for(self, n: int, since: int, now: int) -> None:
        """What making room for n pages takes away, a step at a time, until one has not enough."""
        model, gone, taken = self.model, self.evicted(), 0
        while taken < n:
            want = min(BATCH, n - taken)
            lack = max(0, want + taken - model.room())
            can = sum(model.removable(p, since) for p in model.named())
            now = model.evict_oldest(gone, min(lack, can), since, now)
            if can < lack:
                break
            taken += want
        assert not gone, f"{gone} were evicted for nothing"

    @rule(number=pick, n=st.integers(0, 4), stranger=st.booleans())
    def free(self, number: int, n: int, stranger: bool) -> None:
        client, model = self.client(number), self.model
        mine = self.holding(client)[:n]
        others = [page for page in range(model.capacity) if model.held.get(page) != client.slot]
        if stranger and others:
            wrong = [*mine, self.choose(others, number)]
            self.expect_lost(lambda: client.index.free(np.array(wrong)), LeaseLost)
            return
        client.index.free(np.array(mine, np.int32))
        for page in mine:
            self.lose(client, page)
            model.unpin(client.slot, [page])
            model.give_back(page)

    @rule(number=pick, which=pick)
    def unpin(self, number: int, which: int) -> None:
        client, model = self.client(number), self.model
        kept = self.kept(client)
        if not kept:
            return
        page = self.choose(kept, which)
        pins = model.pins[client.slot, page]
        if model.held.get(page) == client.slot and pins == 1:
            self.expect_lost(lambda: client.index.unpin([page]), LeaseLost)
            return
        if model.held.get(page) == client.slot:
            return  # the pin that it is held by; the other one is a lease's
        client.index.unpin([page])
        model.unpin(client.slot, [page])
        self.named_pins[client.slot, page] -= 1

    # ---- names

    @rule(number=pick, path=paths, start=pick, merge=st.booleans(), where=pick, kind=pick)
    def name_pages(
        self, number: int, path: list[int], start: int, merge: bool, where: int, kind: int
    ) -> None:
        client = self.client(number)
        space, real = self.space(client, where)
        keys, mine = self.keys(path), self.holding(client)
        least = max(0, len(keys) - len(mine))
        start = least + start % (len(keys) - least + 1)
        pages = mine[: len(keys) - start]
        chain, tick = make.array(keys), self.view.clock + 1
        numbers = np.array(pages, np.int32)

        independent = self.kind(kind)
        said = independent if self.independent is None else None

        def call() -> NamingResult:
            return client.index.name_pages(
                numbers, chain, start, merge=merge, independent=said, namespace=real
            )

        if pages and not space.open:
            self.expect_lost(call, Abandoned)
            return
        got = call()
        if space.quota or self.chains_may_fill(keys[start:]):
            self.model.evict_legally(self.evicted_but(pages), tick)
        parent = self.parent_at(keys, start, space)
        for i, key in enumerate(keys[start:]):
            status, stands = int(got.status[i]), int(got.pages[i])
            parent = self.settle_name(
                client, space, key, pages[i], status, stands, parent, tick, merge, independent
            )

    def evicted_but(self, pages: list[int]) -> set[Page]:
        return {page for page in self.evicted() if page.number not in pages or page.named}

    def settle_name(
        self,
        client: Client,
        space: CacheScope,
        key: make.Pair,
        number: int,
        status: int,
        stands: int,
        parent: Page | None,
        tick: int,
        merge: bool,
        independent: bool,
    ) -> Page | None:
        """One key of `name_pages`. Returns what the next page hangs on."""
        model = self.model
        page = model.by_key.get(key)
        if page and page.space is not space:
            assert (status, stands) == (KeyStatus.NO_ROOM, number)
            return None
        if page and page.state == "writing":
            assert (status, stands) == (KeyStatus.BUSY, number)
            return page
        if page:
            assert (status, stands) == (KeyStatus.PRESENT, page.number)
            model.pin(client.slot, [page.number])
            self.named_pins[client.slot, page.number] += 1
            page.tick = tick
            self.readopt(page, parent)
            if merge:
                self.lose(client, number)
                model.unpin(client.slot, [number])
                model.give_back(number)
            return page
        if status == KeyStatus.NO_ROOM:
            full = space.quota and model.space_pages(space) >= space.quota
            assert full or self.chains_may_fill([key]), "there is room"
            assert stands == number
            return None
        assert (status, stands) == (KeyStatus.NEW, number)
        assert not space.quota or model.space_pages(space) < space.quota
        del model.held[number]
        self.lose(client, number)
        self.named_pins[client.slot, number] += 1
        made = Page(number, key, space, None, tick, independent, "ready")
        made.parent = self.fit(made, parent)
        model.by_key[key] = made
        return made

    def lose(self, client: Client, number: int) -> None:
        """The pin that a page is held by may have come with a former name."""
        if self.named_pins[client.slot, number]:
            self.named_pins[client.slot, number] -= 1

    @rule(number=pick, which=st.lists(pick, max_size=3))
    def unname(self, number: int, which: list[int]) -> None:
        client, model = self.client(number), self.model
        kept = [n for n in self.kept(client) if model.held.get(n) != client.slot]
        pages = list(dict.fromkeys(self.choose(kept, each) for each in which)) if kept else []
        ready = {p.number: p for p in model.named() if p.state == "ready"}

        def call() -> None:
            client.index.unname(np.array(pages, np.int32))

        for page in pages:
            others = [who for (who, n), pins in model.pins.items() if n == page and pins]
            if page not in ready:
                self.expect_lost(call, LeaseLost)
                return
            if set(others) - {client.slot}:
                self.expect_lost(call, InUse)
                return
        call()
        for page in pages:
            ready[page].state = "held"
            del model.by_key[ready[page].key]
            model.held[page] = client.slot

    # ---- tickets

    @precondition(lambda self: self.model.held and len(self.given) < 12)
    @rule(
        number=pick,
        n=st.integers(1, 3),
        mask=st.integers(1, 7),
        late=st.sampled_from([False, True]),
    )
    def give_held(self, number: int, n: int, mask: int, late: bool) -> None:
        client = self.client(number)
        pages = self.holding(client)[:n]
        if not pages:
            return

        def ticket(adopters: Any, timeout: float) -> Any:
            return client.index.ticket(np.array(pages), adopters, timeout=timeout)

        self.give(Held(client, SimpleNamespace(ticket=ticket), pages), mask, late)
        assert all(self.model.pins[TICKETS, page] for page in pages) or late

    def release_everything(self) -> None:
        for client in self.clients:
            client.index.free(np.array(self.holding(client), np.int32))
            for page in self.kept(client):
                if self.model.held.get(page) != client.slot:
                    client.index.unpin([page] * self.named_pins[client.slot, page])
        self.named_pins.clear()
        super().release_everything()


__all__ = ["HoldingMachine"]

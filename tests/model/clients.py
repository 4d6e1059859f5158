"""Clients that come and go, in the machine of the index."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from model.base import (
    CLIENTS,
    CONFIGURATIONS,
    NAMES,
    Client,
    MachineBase,
    pick,
)
from model.index_model import (
    Model,
)
from model.ranked_model import RankedModel
from support.index_view import IndexView

from lightcache import (
    Detached,
    Lease,
    LeaseLost,
    PageIndex,
)
from lightcache.runs import Run


class ClientRules(MachineBase):
    """Clients attach and close; what is rare is one rule."""

    # ---- clients

    @initialize(configuration=st.sampled_from(CONFIGURATIONS))
    def begin(self, configuration: tuple[int, int | None]) -> None:
        pages, self.bucket = configuration
        self.model = Model(pages) if self.eviction == "lru" else RankedModel(pages)
        index = PageIndex.create(
            self.name,
            pages=pages,
            independent=bool(self.independent),
            eviction=self.eviction,
        )
        self.stop_clock(index)
        self.view = IndexView(index)
        self.clients = [Client(index, index.client_id.slot, self.model.spaces[0])]

    def stop_clock(self, index: PageIndex) -> None:
        """Where ticks are times they count calls from now on, as they do with LRU."""
        if self.eviction == "hz":
            index.set_clock(1e-9)

    def attach(self) -> None:
        if len(self.clients) == CLIENTS:
            return
        index = PageIndex.attach(self.name)
        self.stop_clock(index)
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
        what=st.sampled_from(["attach", "close", "clear", "namespace", "group", "reap", "repair"]),
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
        elif what == "group":
            group = where % 3
            self.group_minimum(number, Run(group, 2 if group == 2 else 1), minimum or 0)
        elif what == "reap":
            assert self.client(number).index.reap() == 0
        else:
            self.client(number).index.repair()
            for page in self.model.named():
                page.parked = 0

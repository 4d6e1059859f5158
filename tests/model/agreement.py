"""What must hold after every step of the machine of the index."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
from hypothesis.stateful import invariant
from model.base import (
    MachineBase,
)
from model.index_model import (
    TICKETS,
)

from lightcache.layout import PageState


class Agreement(MachineBase):
    """The model and the index say the same."""

    # ---- after every step

    @invariant()
    def agrees(self) -> None:
        if not self.clients:
            return
        model, index = self.model, self.clients[0].index
        report = index.check()
        assert report.clean, report.message
        assert report.quiet
        assert report.pins + report.late_pins == model.total_pins()
        states = Counter(p.state for p in model.named())
        assert (report.writing, report.ready) == (states["writing"], states["ready"])
        stats = index.stats()
        counted = stats.free + stats.writing + stats.ready + stats.doomed + stats.held
        assert counted == stats.pages
        assert stats.held == report.held == len(model.held)
        assert report.doomed >= stats.doomed >= model.held_doomed()
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
            assert found.independent == page.independent
            assert found.group == page.group
            assert found.children == len(self.model.children(page))
            parent = page.parent if page.parent and page.parent.named else None
            if parent is not None:
                assert (found.parent, found.parent_gen) == (parent.number, raw[parent.number].gen)
            page.gen = found.gen  # type: ignore[attr-defined]
            if found.tick != page.tick:  # found pinned when something was evicted: as used then
                assert found.tick > page.tick
                least = page.space.minimum or self.model.minimums.get(page.group)
                assert self.model.pinned(number) or least
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

"""Seeking: checkpoints that only storage has, and KV up to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lightcache.manager.foreign import Foreign
from lightcache.manager.matches import PrefixMatch

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager
    from lightcache.hybrid.planned import HybridPlan
    from lightcache.storage.tasks import StorageTask


@dataclass(eq=False)
class Stored:
    """What storage is asked for a waiting request."""

    state: StorageTask | None = None
    """Brings the deepest checkpoint that is stored to the host."""
    first: int = 0
    """Positions before those that were asked for."""
    kv: StorageTask | None = None
    """Brings KV up to that."""
    seen: bool = False
    """Whether it was noticed that the checkpoint is there."""

    @property
    def going(self) -> list[StorageTask]:
        """Tasks that are not over."""
        every = (self.state, self.kv)
        return [task for task in every if task is not None and not task.over]

    @property
    def pending(self) -> bool:
        """Whether more may be found."""
        state, kv = self.state, self.kv
        return (state is not None and not state.over) or (kv is not None and not kv.over)

    @property
    def news(self) -> bool:
        """Whether the checkpoint has come, and nobody has looked since."""
        return self.state is not None and self.state.over and not self.seen

    @property
    def brought(self) -> int:
        """Positions up to the checkpoint that was brought; 0: none was."""
        if self.state is None or not self.state.over or not self.state.pages_done:
            return 0
        return self.first + self.state.pages_done

    @property
    def kv_pages(self) -> int:
        """Host pages of KV that were brought."""
        return 0 if self.kv is None else self.kv.pages_done

    def attributed(self, kv: PrefixMatch, page_tokens: int) -> PrefixMatch:
        """A match of KV in which these count as storage's."""
        tokens = 0 if self.kv is None else min(kv.host, self.kv_pages * page_tokens)
        if not tokens:
            return kv
        return replace(kv, host=kv.host - tokens, storage=kv.storage + tokens)

    def cancel(self, foreign: Foreign) -> None:
        """Nothing of it is wanted any more."""
        for task in self.going:
            foreign.cancel(task)


class Seeker:
    """Asks storage, once for each request."""

    def __init__(self, owner: HybridManager) -> None:
        """Nothing was asked."""
        self._owner = owner

    def seek(self, plan: HybridPlan) -> None:
        """A plan was looked at: ask for a checkpoint deeper than the one it has; and when that has
        come, for KV that reaches it."""
        tier = self._owner.checkpoints.storage
        if tier is None or plan.path is None or not {"host", "storage"} <= plan.asked.wishes.tiers:
            return
        stored = plan.stored
        if stored.state is None:
            stored.first = 0 if plan.found is None else plan.found[1]
            behind = plan.path.keys[stored.first : self._most(plan)]
            if len(behind):
                keys = np.ascontiguousarray(behind)
                stored.state = tier.prefetch_deepest(keys, namespace=plan.path.space.host)
        elif stored.news:
            stored.seen = True
            self._seek_kv(plan, stored.brought * self._owner.step)

    def _most(self, plan: HybridPlan) -> int:
        """Positions that are worth asking for: storage may have KV behind what we have."""
        tokens = plan.kv.usable if self._owner.inner.storage is None else plan.most
        return tokens // self._owner.step

    def _seek_kv(self, plan: HybridPlan, position: int) -> None:
        manager, space, tier = self._owner.manager, plan.space, self._owner.inner.storage
        if tier is None or space is None or position <= plan.kv.usable:
            return
        keys = plan.asked.prompt.keys(space.host_spec)[: position // manager.page_tokens]
        there = manager.host.peek(keys, namespace=space.host)
        plan.stored.kv = tier.prefetch(keys, there, namespace=space.host)


__all__ = ["Seeker", "Stored"]

"""What a hybrid manager knows of a running request."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field

from lightcache.errors import TransferFailed
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.slots import RequestSlots
from lightcache.hybrid.spaces import StateSpace, Tier
from lightcache.hybrid.statistics import Counts
from lightcache.hybrid.traffic import Copied
from lightcache.leases import Lease
from lightcache.manager.matches import Wishes
from lightcache.manager.prompts import Prompt
from lightcache.manager.requests import Request
from lightcache.manager.traffic import Movement, State

Taken = tuple[Tier, Lease]
"""A checkpoint in use: where it is, and its pin."""


@dataclass(eq=False)
class HybridRequest:
    """One request, from `take` until no copy touches its slots any more."""

    id: Hashable
    prompt: Prompt
    wishes: Wishes
    match: HybridMatch
    states: StateSpace | None
    """None: no checkpoint is made of it."""
    found: Taken | None
    """Until it is restored."""
    running: Request
    """Its KV."""
    slots: RequestSlots | None = None
    """From then on."""
    loading: Movement | None = None
    """What brings the state from the host."""
    movements: list[Movement] = field(default_factory=list)
    """Copies between its slots and the host, that one included."""
    copies: list[Copied] = field(default_factory=list)
    """Launches that write its slots."""
    leaving: list[int] = field(default_factory=list)
    """Of one that has ended: slots to be given back."""

    counted: Counts = field(default_factory=Counts)
    """What it adds to the figures."""

    @property
    def busy(self) -> bool:
        """Whether a copy touches its slots, as far as was looked."""
        self.movements = [each for each in self.movements if not each.over]
        self.copies = [each for each in self.copies if not each.over]
        return bool(self.movements or self.copies)

    @property
    def lost(self) -> bool:
        """Whether its state did not come from the host."""
        return self.loading is not None and self.loading.state in (State.FAILED, State.CANCELLED)

    def sound(self) -> bool:
        """Whether all that it begins with has come: both loads are over, and went well. Until then
        nothing that was computed behind them is anybody's to find. Looks, and does not block."""
        if self.running.match.load > 0 and self.running.loading is None:
            return False  # not fetched yet, or the manager had disabled itself
        return all(
            _went_well(load) for load in (self.loading, self.running.loading) if load is not None
        )

    def let_go(self) -> None:
        """Of a checkpoint that was not restored."""
        found, self.found = self.found, None
        if found is not None:
            found[1].release()


def _went_well(load: Movement) -> bool:
    if not load.over:
        with contextlib.suppress(TransferFailed):
            load.done()
    return load.state is State.DONE


__all__ = ["HybridRequest", "Taken"]

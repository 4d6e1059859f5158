"""What a hybrid manager knows of a running request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.slots import RequestSlots
from lightcache.hybrid.spaces import StateSpace, Tier
from lightcache.hybrid.statistics import Counts
from lightcache.hybrid.traffic import Copied
from lightcache.leases import Lease
from lightcache.manager.matches import Wishes
from lightcache.manager.prompts import Prompt
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

    def let_go(self) -> None:
        """Of a checkpoint that was not restored."""
        found, self.found = self.found, None
        if found is not None:
            found[1].release()


__all__ = ["HybridRequest", "Taken"]

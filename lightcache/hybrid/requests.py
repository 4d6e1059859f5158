"""What a hybrid manager knows of a running request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.spaces import StateSpace, Tier
from lightcache.hybrid.traffic import Copied
from lightcache.leases import Lease
from lightcache.manager.traffic import Movement

Taken = tuple[Tier, Lease]
"""A checkpoint in use: where it is, and its pin."""


@dataclass(eq=False)
class HybridRequest:
    """One request, from `take` until no copy touches its slots any more."""

    id: Hashable
    match: HybridMatch
    states: StateSpace | None
    """None: no checkpoint is made of it."""
    found: Taken | None
    """Until it is restored."""
    loading: Movement | None = None
    """What brings the state from the host."""
    movements: list[Movement] = field(default_factory=list)
    """Copies between its slots and the host."""
    copies: list[Copied] = field(default_factory=list)
    """Launches that write its slots."""

    @property
    def busy(self) -> bool:
        """Whether a copy touches its slots, as far as was looked."""
        moving = any(not each.over for each in self.movements)
        return moving or any(not each.over for each in self.copies)


__all__ = ["HybridRequest", "Taken"]

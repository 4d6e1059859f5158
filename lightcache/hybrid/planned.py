"""What is known of a request that waits for KV and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightcache._arguments import Keys
from lightcache.hybrid.matches import HybridMatch
from lightcache.hybrid.seeking import Stored
from lightcache.hybrid.spaces import Path, StateSpace
from lightcache.manager.asking import Asked
from lightcache.manager.matches import PrefixMatch
from lightcache.manager.requests import Space

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Found

_NONE = PrefixMatch(0)


@dataclass(eq=False, slots=True)
class Edge:
    """What to look at to learn whether KV goes as deep as it did, and no deeper."""

    device: Keys
    """Of the blocks: the last that was there, and the one behind it."""
    host: Keys
    there: tuple[int, int]
    """How many of each are there while nothing has changed."""


@dataclass(eq=False, slots=True)
class HybridPlan:
    """What is known of one request."""

    asked: Asked
    most: int
    """Tokens that may be reused at most."""
    given: int | None
    """Device tokens that an engine found itself."""
    space: Space | None
    """None: the weights are being changed; nothing is found."""
    states: StateSpace | None
    path: Path | None
    """None: nothing is looked for."""
    kv: PrefixMatch = _NONE
    """What there is of KV, beyond the checkpoint too."""
    ends: bool = False
    """Whether the device has no KV behind the checkpoint, as was seen when that was chosen."""
    looked: bool = False
    """Whether that is worth asking if it is still so."""
    edge: Edge | None = None
    """Made when that is asked."""
    found: Found | None = None
    """The checkpoint that is pinned."""
    planned: PrefixMatch = _NONE
    """What the manager has planned up to there."""
    match: HybridMatch | None = None
    of: Any = None
    """What the match was made of."""
    stored: Stored = field(default_factory=Stored)


__all__ = ["Edge", "HybridPlan"]

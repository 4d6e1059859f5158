"""What is known of a request that waits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from lightcache._arguments import Keys
from lightcache.manager.asking import Asked
from lightcache.manager.matches import PrefixMatch
from lightcache.manager.requests import NO_KEYS, Space


@dataclass(eq=False, slots=True)
class Planned:
    """A plan: what was asked, and where the host's part begins."""

    asked: Asked
    space: Space | None
    """None: the weights are being changed."""
    most: int
    """Tokens that may be reused at most."""
    ttl: float
    """Seconds for which what was found stays pinned."""
    since: float
    """When it was first planned."""
    blocks: int
    """Device blocks that may be reused."""
    pages: int
    """Host pages that may be reused, those that the device has included."""
    device: int = 0
    """Tokens found on the device."""
    host_first: int = 0
    """Number of the first host page that is planned."""
    host_pages: int = 0
    reading: Any = None
    """The task that brings pages from storage, if one was begun."""
    on_host: bool = False
    """Whether anything was asked of the host."""
    match: PrefixMatch | None = None
    """What came of it last, and of what."""
    matched: tuple[int, int] = (0, 0)
    pinned: bool = False
    """Whether it was ever entered where its pages are pinned."""
    nowhere_until: float = 0.0
    """Its first page was in no tier: nothing is pinned, and no more of it was hashed. When the
    plan's time is over; 0: it is not so."""
    waited: bool = False
    """Whether it was told to wait for another request."""
    absent: int = 0
    """Host pages that were looked for and not there."""
    settled: float = 0.0
    """Until when what was found stays pinned for certain, so that only more can be found."""
    next_device: bytes = b""
    """The key of the first block that was not there; empty: all were."""
    next_host: bytes = b""
    """The same of the host's pages."""

    @property
    def device_keys(self) -> Keys:
        """Of the blocks that may be reused. Hashed at the first call."""
        if self.space is None or not self.blocks:
            return NO_KEYS
        return self.asked.prompt.keys(self.space.device_spec)[: self.blocks]

    @property
    def host_keys(self) -> Keys:
        """Of the host's pages that may be reused. Hashed at the first call."""
        if self.space is None or not self.pages:
            return NO_KEYS
        return self.asked.prompt.keys(self.space.host_spec)[: self.pages]

    def first_block(self) -> bytes:
        """The key of the first of the blocks; empty if there is none. Hashes no more."""
        if self.space is None or not self.blocks:
            return b""
        return self.asked.prompt.first_key(self.space.device_spec)

    def first_page(self) -> bytes:
        """The same of the host's pages."""
        if self.space is None or not self.pages:
            return b""
        return self.asked.prompt.first_key(self.space.host_spec)


Waiting = tuple[Hashable, Planned]
"""A request, and its plan."""


def by_space(plans: list[Waiting]) -> list[tuple[Space, list[Waiting]]]:
    """Plans that may look for anything, by their space: nearly always there is one."""
    found: dict[Space, list[Waiting]] = {}
    for entry in plans:
        plan = entry[1]
        if plan.most and plan.space is not None:
            members = found.get(plan.space)
            if members is None:
                members = found[plan.space] = []
            members.append(entry)
    return list(found.items())


__all__ = ["NO_KEYS", "Planned", "Waiting", "by_space"]

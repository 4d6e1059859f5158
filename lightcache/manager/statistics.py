"""What a manager counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ManagerStats:
    """One process's figures since the manager began, or since `reset`. Tokens unless said
    otherwise."""

    requests: int = 0
    """Taken."""
    hit_requests: int = 0
    """Of these, with any usable token."""
    prompt_tokens: int = 0
    device_tokens: int = 0
    """Reused from the device's blocks."""
    host_tokens: int = 0
    """Reused from host pages."""
    storage_tokens: int = 0
    """Reused from storage."""
    below_break_even: int = 0
    """Found on the host and computed all the same: so few are computed faster than loaded."""
    cut_items: int = 0
    """Matches that were cut back to the start of a multimodal item."""
    loads: int = 0
    """Transfers to the device that were over."""
    loaded_pages: int = 0
    offloads: int = 0
    offloaded_pages: int = 0
    failed_loads: int = 0
    failed_offloads: int = 0
    absent_pages: int = 0
    """Pages that were looked for on the host and not there; failures are counted apart."""
    no_room_pages: int = 0
    """Pages that were to be written to the host and found no room."""
    duplicates: int = 0
    """Device blocks whose content another one had already."""
    device_evictions: int = 0
    """Blocks that the engine, or we for want of room, evicted."""
    demotions: int = 0
    """Blocks that went from the device to the host for want of room."""
    kept_by_match: int = 0
    """Of those to be demoted, blocks that a request came for meanwhile."""
    dropped: int = 0
    """Blocks and pages evicted by `drop`."""
    waits: int = 0
    """Requests that waited for another one's prefix."""
    errors: int = 0
    """Calls that failed and were answered as a miss."""

    @property
    def hit_ratio(self) -> float:
        """Reused tokens of all prompts' tokens, 0 to 1."""
        reused = self.device_tokens + self.host_tokens + self.storage_tokens
        return reused / self.prompt_tokens if self.prompt_tokens else 0.0


NAMES = frozenset(each.name for each in fields(ManagerStats))


class Figures(Counter[str]):
    """Counts by the names of `ManagerStats`."""

    def add(self, **counts: int) -> None:
        """Raise some of them."""
        for name, count in counts.items():
            assert name in NAMES, name
            self[name] += count

    def snapshot(self) -> ManagerStats:
        """As they are now."""
        return ManagerStats(**self)


__all__ = ["Figures", "ManagerStats"]

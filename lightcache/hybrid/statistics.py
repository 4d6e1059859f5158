"""What checkpoints count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CheckpointStats:
    """Since the checkpoints began, in this process. Checkpoints unless said otherwise."""

    requests: int = 0
    """Taken."""
    device_hits: int = 0
    """Requests that went on from a checkpoint of the device."""
    host_hits: int = 0
    storage_hits: int = 0
    """Of these of the host, from one that storage was read for."""
    usable_tokens: int = 0
    """Of prompts, that need not be computed."""
    unusable_tokens: int = 0
    """Whose KV was there, behind the checkpoint."""
    donated: int = 0
    """Saved states that became checkpoints."""
    merged: int = 0
    """Saved states that were there already."""
    refused: int = 0
    """Saved states that could not become checkpoints: no room under the key, or weights that have
    gone."""
    bounded: int = 0
    """Evicted because their path had too many."""
    copies: int = 0
    """From a checkpoint to a working slot."""
    loads: int = 0
    failed_loads: int = 0
    offloads: int = 0
    failed_offloads: int = 0
    no_room: int = 0
    """That were to be written to the host and found no room."""
    demotions: int = 0
    """That left the device ahead of need, and that the host had then."""
    demotions_lost: int = 0
    """That left the device and that the host had not: not to be written there; or, with write-back,
    evicted because a slot was needed at once."""
    kept_unwritten: int = 0
    """Demotions that were given up, for the host had no room or the write failed: they stayed."""
    dropped_tokens: int = 0
    """KV behind the deepest checkpoint of requests that ended, by policy."""

    @property
    def request_ratio(self) -> float:
        """Requests that went on from a checkpoint, of all, 0 to 1."""
        hits = self.device_hits + self.host_hits
        return hits / self.requests if self.requests else 0.0


_NAMES = frozenset(each.name for each in fields(CheckpointStats))


class Counts(Counter[str]):
    """Counts by the names of `CheckpointStats`."""

    def add(self, **counts: int) -> None:
        """Raise some of them."""
        for name, count in counts.items():
            assert name in _NAMES, name
            self[name] += count

    def snapshot(self) -> CheckpointStats:
        """As they are now."""
        return CheckpointStats(**self)


__all__ = ["CheckpointStats", "Counts"]

"""What a match of a hybrid model's prompt found."""

from __future__ import annotations

from dataclasses import dataclass

from lightcache.hybrid.spaces import Tier
from lightcache.manager.matches import PrefixMatch


@dataclass(frozen=True)
class HybridMatch:
    """How much of a prompt need not be computed: as far as both KV and a checkpoint go. All figures
    are tokens."""

    kv: PrefixMatch
    """KV up to the checkpoint, which is all that is pinned and loaded."""
    kv_tokens: int = 0
    """How deep KV goes, as far as it could be used: advisory, nothing holds what is behind the
    checkpoint."""
    checkpoint: int = 0
    """The position of the checkpoint that is used: state behind so many tokens; 0: none."""
    tier: Tier | None = None
    """Where it is."""
    branching: int | None = None
    """Where the coming prefill should save a state: KV goes deeper than any checkpoint, so other
    prompts have come this way, and the next one that does will hit."""
    pending: bool = False
    """Storage is still being asked or read: planning again may find more."""

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return self.kv.tokens

    @property
    def usable(self) -> int:
        """That need not be computed: 0, or the checkpoint's position."""
        return self.checkpoint

    @property
    def unusable(self) -> int:
        """Whose KV is there, and that must be computed for want of a state."""
        return max(0, self.kv_tokens - self.checkpoint)

    @property
    def device_tokens(self) -> int:
        """Of the usable ones, whose KV is in device blocks."""
        return min(self.kv.device, self.usable)

    @property
    def host_tokens(self) -> int:
        """Of these, whose KV is loaded from host pages."""
        return min(self.usable - self.device_tokens, self.kv.host)

    @property
    def storage_tokens(self) -> int:
        """Of these, whose KV was read from storage for this request."""
        return self.usable - self.device_tokens - self.host_tokens


__all__ = ["HybridMatch"]

"""How a hybrid manager decides."""

from __future__ import annotations

from dataclasses import dataclass

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.hybrid.saving import Saves


@dataclass(frozen=True)
class HybridConfig:
    """What the engine can, and what it wants."""

    saves: Saves = Saves.INTERIOR
    """Which states of a forward pass the engine can save."""
    tail: bool = False
    """Prompts save at their last key, too, and checkpoints are looked for at every key."""
    between: bool = True
    """Long prompts save in each stretch of their prefill."""
    ahead: bool = False
    """The scheduler launches a step before it has seen the results of the one before."""
    alternating: bool = True
    """Running requests have slots beside their working one, to save states in."""
    running: int | None = None
    """Requests at a time. If it is said, all that the manager is made with is checked as one
    `Features`; None: the engine has checked one of its own."""
    drafted: int = 0
    """Drafted tokens of a request in a step; looked at with `running` only, as is the next."""
    draft_slots: int = 0
    """Of the device's slots, those for drafts."""
    drop_tails: bool = False
    """When a request ends, KV behind the deepest checkpoint of its path is evicted, as far as
    nobody else uses it: nothing can begin there. Owned devices, and the host."""

    def __post_init__(self) -> None:
        if type(self.saves) is not Saves:
            raise ConfigError(f"saves: expected a Saves, found {self.saves!r}")
        if self.running is not None:
            count(self.running, "running", 1, 1 << 31)
        for name in ("drafted", "draft_slots"):
            count(getattr(self, name), name, 0, 1 << 31)


__all__ = ["HybridConfig"]

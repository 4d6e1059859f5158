"""How a hybrid manager decides."""

from __future__ import annotations

from dataclasses import dataclass

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
    drop_tails: bool = False
    """When a request ends, KV behind the deepest checkpoint of its path is evicted, as far as
    nobody else uses it: nothing can begin there. Owned devices, and the host."""

    def __post_init__(self) -> None:
        if type(self.saves) is not Saves:
            raise ConfigError(f"saves: expected a Saves, found {self.saves!r}")


__all__ = ["HybridConfig"]

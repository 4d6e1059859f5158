"""What does not go together: checked once, when a model is configured, in one message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.hybrid.drafts import Drafts
from lightcache.hybrid.grids import Grid
from lightcache.hybrid.saving import Saves
from lightcache.hybrid.slots import RequestSlots

if TYPE_CHECKING:
    from lightcache.hybrid.checkpoints import Checkpoints
    from lightcache.hybrid.config import HybridConfig

_COUNTS = ("running", "alternating", "drafted", "draft_slots", "host_states", "path_limit")


@dataclass(frozen=True)
class Features:
    """How a hybrid model is to be served. `check` says whether that can be."""

    grid: Grid
    saves: Saves
    running: int
    """Requests at a time."""
    device_slots: int
    """For states on the device, whoever uses them: requests, drafts, checkpoints."""
    ahead: bool = False
    """The scheduler launches a step before it has seen the results of the one before."""
    alternating: int = 0
    """Slots of a request beside its working one, for what it saves on its way."""
    drafted: int = 0
    """Drafted tokens of a request in a step; 0: no speculative decoding."""
    draft_slots: int = 0
    """Of `device_slots`, those for drafts."""
    device_states: int | None = None
    """Checkpoints that may stay on the device; None: all slots that nothing else needs."""
    host_states: int = 0
    """Checkpoints that the host has room for."""
    storage: bool = False
    """Checkpoints go on from the host to storage."""
    tail: bool = False
    """Save at a prompt's last key: `SavePolicy.tail`."""
    path_limit: int = 0
    """Checkpoints on one path, at most; 0: any number."""
    state_block_tokens: int | None = None
    """The engine addresses states by blocks of so many tokens: `state_block_tables`. None: by
    slots."""

    def __post_init__(self) -> None:
        """Check each figure by itself.

        Raises:
            ConfigError: one that is none.
        """
        for name, kind in (("grid", Grid), ("saves", Saves)):
            if type(getattr(self, name)) is not kind:
                raise ConfigError(
                    f"{name}: expected a {kind.__name__}, found {getattr(self, name)!r}"
                )
        for name in _COUNTS:
            count(getattr(self, name), name, 1 if name == "running" else 0, 1 << 31)
        count(self.device_slots, "device_slots", 0, 1 << 31)
        if self.device_states is not None:
            count(self.device_states, "device_states", 0, 1 << 31)
        if self.state_block_tokens is not None:
            count(self.state_block_tokens, "state_block_tokens", 1, 1 << 20)

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            ConfigError: names every conflict, not only the first, each with what to change.
        """
        found = self.conflicts()
        if found:
            raise ConfigError(
                f"hybrid model: {len(found)} of its settings do not go together:\n"
                + "\n".join(f"{number}. {text}" for number, text in enumerate(found, 1))
            )

    def conflicts(self) -> tuple[str, ...]:
        """What `check` would say."""
        return (*self._of_slots(), *self._of_checkpoints(), *self._of_tables())

    @property
    def spare_slots(self) -> int:
        """Device slots that running requests and drafts leave to checkpoints; negative: they do
        not have enough themselves."""
        return self.device_slots - self.running * (1 + self.alternating) - self.draft_slots

    def _of_slots(self) -> Iterator[str]:
        wanted = RequestSlots.needed(self.ahead)
        if self.alternating not in (0, wanted):
            yield (
                f"alternating={self.alternating}: a scheduler that "
                f"{'runs' if self.ahead else 'does not run'} ahead needs {wanted} for each "
                "request, or none"
            )
        room = Drafts.room(self.running, self.drafted) if self.drafted else 0
        if self.draft_slots < room:
            yield (
                f"draft_slots={self.draft_slots}: {self.drafted} drafted tokens for each of "
                f"{self.running} requests need {room}, as a rejected token cannot be taken out of "
                "a state"
            )
        if self.draft_slots and not self.drafted:
            yield f"draft_slots={self.draft_slots}: nothing is drafted; give them to checkpoints"
        if self.spare_slots < 0:
            yield (
                f"device_slots={self.device_slots}: {self.running} requests with "
                f"{self.alternating} alternating slots, and {self.draft_slots} for drafts, need "
                f"{-self.spare_slots} more"
            )

    def _of_checkpoints(self) -> Iterator[str]:
        on_device = self.device_states is None or self.device_states > 0
        if not on_device and not self.host_states:
            yield (
                "device_states=0: a state is donated by leaving it in its slot, and there is no "
                "host to take it instead; give host_states, or room on the device"
            )
        if self.storage and not self.host_states:
            yield "storage: states go there by way of the host; give host_states"
        if self.device_states is not None and self.device_states > max(0, self.spare_slots):
            yield (
                f"device_states={self.device_states}: of {self.device_slots} device slots, "
                f"requests and drafts leave {max(0, self.spare_slots)}"
            )
        if self.device_states is None and self.spare_slots == 0 and not self.host_states:
            yield (
                f"device_slots={self.device_slots}: requests and drafts need all of them, so no "
                "checkpoint would ever be kept; give more, or host_states"
            )
        if self.saves is Saves.INTERIOR and not self.alternating:
            yield (
                f"interior saves: a state inside of a pass needs a slot beside the working one; "
                f"give alternating={RequestSlots.needed(self.ahead)}, or save end-only"
            )
        if self.tail and self.grid.fine == self.grid.grid:
            yield (
                f"tail: keys and grid both have steps of {self.grid.grid} tokens, so there is no "
                "key behind the grid's last position; use smaller blocks or pages, or leave it off"
            )
        if self.path_limit == 1:
            yield (
                "path_limit=1: a prompt's last state would drop that of the point where others "
                "part from it, before they do; at least 2, or 0 for any number"
            )

    def _of_tables(self) -> Iterator[str]:
        block = self.state_block_tokens
        if block is None:
            return
        if self.grid.grid % block:
            yield (
                f"state_block_tokens={block}: states are saved every {self.grid.grid} tokens, not "
                "always at the end of a block, and the rest of the block would overwrite them; use "
                "a divisor"
            )
        if self.saves is Saves.INTERIOR and block % self.grid.chunk:
            yield (
                f"state_block_tokens={block}: inside of a pass states exist only every "
                f"{self.grid.chunk} tokens, so blocks would end without one; use a multiple, or "
                "save end-only"
            )
        if self.drafted and block < self.drafted + 1:
            yield (
                f"state_block_tokens={block}: a step of {self.drafted} drafted tokens may cross "
                "more than one block, and a table has one slot for what it writes; use larger "
                "blocks, or address states by slots"
            )


def check_features(config: HybridConfig, checkpoints: Checkpoints, grid: Grid) -> None:
    """Check what a manager is made with, if its config says how many requests run. Without device
    slots for checkpoints, requests bring the engine's own.

    Raises:
        ConfigError: see `Features.check`, or a figure that is none.
    """
    running = config.running
    if running is None:
        return
    alternating = RequestSlots.needed(config.ahead) if config.alternating else 0
    slots, host = checkpoints.slots, checkpoints.host
    own = running * (1 + alternating) + config.draft_slots
    Features(
        grid,
        config.saves,
        running,
        device_slots=own if slots is None else slots.pages,
        ahead=config.ahead,
        alternating=alternating,
        drafted=config.drafted,
        draft_slots=config.draft_slots,
        device_states=0 if slots is None else None,
        host_states=0 if host is None else host.pages,
        storage=checkpoints.storage is not None,
        tail=config.tail,
        path_limit=checkpoints.most or 0,
    ).check()


__all__ = ["Features", "check_features"]

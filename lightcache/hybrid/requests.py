"""Requests of a `HybridManager`: what each finds and has, and what is copied for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightcache._arguments import Pages
from lightcache.errors import ConfigError, TransferFailed
from lightcache.hybrid.checkpoints import StateSpace, Tier
from lightcache.kernels.groups import Rule
from lightcache.leases import Lease
from lightcache.manager.load import JointLoad, LoadHandle, wait_on
from lightcache.manager.request import Owed, PrefixMatch, Request
from lightcache.manager.transfers import BlockTransfer, State

if TYPE_CHECKING:
    from lightcache.hybrid.saving import RequestSlots
    from lightcache.hybrid.window_blocks import WindowTable

PREFIX = Rule.prefix().name
"""Full attention, among the names of rules."""
POINT = Rule.point().name
"""States, among them."""

# ---- Matches


@dataclass(frozen=True)
class HybridMatch:
    """The part of a prompt that need not be computed: as far as KV and all other groups reach. All
    numbers are tokens."""

    kv: PrefixMatch
    """KV up to the position. Only this is pinned and loaded."""
    kv_tokens: int = 0
    """All cached KV of the prompt that could be used. Advisory: KV after the position is not
    pinned."""
    usable: int = 0
    """Tokens that need not be computed: the position that all groups accept, or 0."""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """The tier that has what a group needs, by the name of its rule: "point" for the checkpoint.
    Without groups that need nothing here."""
    limit: str | None = None
    """The name of the rule that has no deeper position, "prefix" for KV; None: none limits it."""
    branching: int | None = None
    """The position at which the coming prefill should save. KV reaches further than the other
    groups, so other prompts share this prefix, and the next one will hit."""
    pending: bool = False
    """Storage is still being read: planning again may find more."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return self.kv.tokens

    @property
    def tier(self) -> Tier | None:
        """The tier that has the checkpoint; None: there is none."""
        return self.tiers.get(POINT)

    @property
    def unusable(self) -> int:
        """Tokens with KV that must still be computed, since another group lacks them."""
        return max(0, self.kv_tokens - self.usable)

    @property
    def device_tokens(self) -> int:
        """Usable tokens whose KV is in device blocks."""
        return min(self.kv.device, self.usable)

    @property
    def host_tokens(self) -> int:
        """Usable tokens whose KV is loaded from host pages."""
        return min(self.usable - self.device_tokens, self.kv.host)

    @property
    def storage_tokens(self) -> int:
        """Host tokens whose KV was read from storage for this request."""
        return self.usable - self.device_tokens - self.host_tokens


# ---- A running request

Taken = tuple[Tier, Lease]
"""A checkpoint in use: where it is, and its pin."""


@dataclass(eq=False)
class HybridRequest:
    """One request, from `take` until no copy uses its slots and blocks any more."""

    inner: Request
    """Its request in the KV manager."""
    match: HybridMatch
    states: StateSpace | None
    """None: it saves no checkpoints."""
    found: Taken | None
    """Until it is restored."""
    counted: Counter[str]
    """What it added to the counters."""
    slots: RequestSlots | None = None
    """Its slots, from `restore` on."""
    loading: BlockTransfer | None = None
    """The load of its state from the host."""
    transfers: list[BlockTransfer] = field(default_factory=list)
    """Copies between its slots and the host, including `loading`, and launches that write its
    slots."""
    ended: tuple[bool, Any] = (False, None)
    """At its end: whether no step of it is in flight, and the stream of its last one."""
    leaving: list[int] | None = None
    """After its end: slots to give back. None: not known yet."""

    tables: list[WindowTable] = field(default_factory=list)
    """Its blocks of each window."""
    loads: list[BlockTransfer] = field(default_factory=list)
    """Loads of windows from the host."""
    positions: list[int] = field(default_factory=list)
    """The position with which it began, and those at which its windows were saved, ascending."""
    due: set[int] = field(default_factory=set)
    """Positions of its states: its windows are saved there as well."""
    published: int = -1
    """Full blocks for which windows have all that a commit does."""
    owed: dict[str, Owed] = field(default_factory=dict)
    """Blocks that the caller has to exchange, by rule."""

    @property
    def saved(self) -> int:
        """The last position at which its windows were saved; 0: there is none."""
        return self.positions[-1] if self.positions else 0

    @property
    def own_slots(self) -> RequestSlots:
        """Its slots.

        Raises:
            ConfigError: it was not restored.
        """
        if self.slots is None:
            raise ConfigError(f"the request {self.inner.id!r} has no slots; restore it first")
        return self.slots

    @property
    def busy(self) -> bool:
        """Whether a copy used its slots, or wrote its windows, at the last look."""
        self.transfers = [transfer for transfer in self.transfers if not transfer.finished]
        return bool(self.transfers) or any(not load.finished for load in self.loads)

    def sound(self) -> bool:
        """Whether its loads have finished and succeeded. Until then no other request may find what
        it computes after them. Does not block."""
        inner = self.inner
        if inner.match.load > 0 and inner.loading is None:
            return False  # not loaded yet, or the manager had disabled itself
        if any(table.host is not None for table in self.tables):
            return False  # the same of a window
        loads = inner.loading, self.loading, *self.loads
        return all(load is None or _went_well(load) for load in loads)

    def owe(self, rule: str, changed: Mapping[int, int]) -> None:
        """Note blocks that the caller has to exchange."""
        if changed:
            owed = self.owed.get(rule)
            before = {} if owed is None or owed.told else owed.changed
            self.owed[rule] = Owed({**before, **changed})

    def settle(self) -> None:
        """Note what a naming has done that an interrupt cut short."""
        for table in self.tables:
            self.owe(table.window.rule.name, table.settle())

    def let_go(self) -> None:
        """Release a checkpoint that was not restored."""
        taken, self.found = self.found, None
        if taken is not None:
            taken[1].release()


def _went_well(load: BlockTransfer) -> bool:
    if not load.finished:
        with contextlib.suppress(TransferFailed):
            load.done()
    return load.state is State.DONE


# ---- Restore: a request's initial state in its working slot


@dataclass(frozen=True)
class Restored:
    """Loads and copies that `restore` launched."""

    working: Pages
    """The working slot of each, int32."""
    sources: Pages
    """Slots of checkpoints that one launch copies to `targets`."""
    targets: Pages
    """Working slots."""
    zeroed: Pages
    """Working slots without a match."""
    loads: dict[Hashable, BlockTransfer]
    """Loads of states from the host, by request."""

    def wait_on(self, stream: Any = None) -> None:
        """Let a device stream (None: the current one) wait for the loads. Copies need no wait: they
        are launched on the computing stream.

        Raises:
            TransferFailed: a load has failed already; `HybridLoadHandle.failed` tells whose.
        """
        for transfer in self.loads.values():
            wait_on(transfer, stream)


class HybridLoadHandle(JointLoad):
    """The loads of one request: of its KV, its state and its windows. If one fails, the whole
    match is unusable: call `restart`."""

    def __init__(self, usable: int, kv: LoadHandle, others: Sequence[BlockTransfer]) -> None:
        """For `HybridManager.load`."""
        super().__init__(kv, others)
        self._usable = usable

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as known now: all usable ones, or 0."""
        return 0 if self.failed else self._usable


__all__ = [
    "POINT",
    "PREFIX",
    "HybridLoadHandle",
    "HybridMatch",
    "HybridRequest",
    "Restored",
    "Taken",
]

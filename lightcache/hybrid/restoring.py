"""Restoring: the state that a request begins with gets into its working slot."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightcache._arguments import Pages
from lightcache.errors import ConfigError, OutOfPages
from lightcache.hybrid.requests import HybridRequest
from lightcache.hybrid.slots import RequestSlots
from lightcache.hybrid.spaces import Tier
from lightcache.manager.fetching import Fetch, wait_on
from lightcache.manager.traffic import Movement

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager


@dataclass(frozen=True)
class Restored:
    """What was launched for some requests, in their order where it says so."""

    working: Pages
    """The working slot of each, int32."""
    sources: Pages
    """Slots of checkpoints that are copied, in one launch,"""
    targets: Pages
    """to these working slots."""
    zeroed: Pages
    """Working slots without a match."""
    loads: dict[Hashable, Movement]
    """Of those whose state comes from the host."""

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for the loads (None: the current one). The copies need no
        wait: they are launched on the stream that computes.

        Raises:
            TransferFailed: one is over already, and failed. `HybridFetch.failed` says whose.
        """
        for movement in self.loads.values():
            wait_on(movement, stream)


class HybridFetch:
    """The loads of one request: its KV's, and its state's. If either fails nothing of the match can
    be used: `HybridManager.restart` it."""

    def __init__(self, request: HybridRequest, kv: Fetch) -> None:
        """For `HybridManager.fetch`."""
        self._request, self._kv = request, kv

    @property
    def tokens(self) -> int:
        """Leading tokens that need not be computed, as far as is known: all usable ones, or 0."""
        return 0 if self.failed else self._request.match.usable

    @property
    def failed(self) -> bool:
        """Whether either is over, and failed."""
        return self._kv.tokens < self._request.match.usable or self._request.lost

    def done(self) -> bool:
        """Whether both are over. Does not block.

        Raises:
            TransferFailed: either failed.
        """
        loading = self._request.loading
        state = loading is None or loading.done()
        return self._kv.done() and state

    def wait(self, timeout: float | None = None) -> None:
        """Until both are over. Blocks.

        Raises:
            WaitTimeout: they go on.
            TransferFailed: as `done`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self._kv.wait(timeout)
        if self._request.loading is not None:
            self._request.loading.wait(None if end is None else max(0.0, end - time.monotonic()))

    def wait_on(self, stream: Any = None) -> None:
        """Let a stream of the device wait for both (None: the current one), not this thread.

        Raises:
            TransferFailed: either is over already, and failed.
        """
        self._kv.wait_on(stream)
        if self._request.loading is not None:
            wait_on(self._request.loading, stream)


def restore(
    owner: HybridManager,
    running: list[HybridRequest],
    slots: Sequence[Sequence[int]] | None,
    stream: Any,
) -> Restored:
    """See `HybridManager.restore`."""
    for one in running:
        if one.slots is not None:
            raise ConfigError(f"restore: the request {one.id!r} has its slots already")
    ahead, given = owner.config.ahead, _acquired(owner, len(running)) if slots is None else slots
    made = [
        RequestSlots(numbers[0], numbers[1:], ahead=ahead, keep=one.match.branching)
        for one, numbers in zip(running, given, strict=True)
    ]
    for one, each in zip(running, made, strict=True):
        one.slots = each
    return _launch(owner, running, made, stream)


def _acquired(owner: HybridManager, requests: int) -> list[list[int]]:
    """Slots for each: if there are not as many, those that it cannot do without."""
    beside = RequestSlots.needed(owner.config.ahead) if owner.config.alternating else 0
    try:
        every = owner.checkpoints.acquire(requests * (1 + beside))
    except OutOfPages:
        every = owner.checkpoints.acquire(requests)
    found: list[list[int]] = every.reshape(requests, -1).tolist() if requests else []
    return found


def _launch(
    owner: HybridManager, running: list[HybridRequest], made: list[RequestSlots], stream: Any
) -> Restored:
    traffic, loads = owner.checkpoints.traffic, {}
    pairs: list[tuple[HybridRequest, int, int]] = []
    empty: list[tuple[HybridRequest, int]] = []
    for one, slots in zip(running, made, strict=True):
        if one.found is None:
            empty.append((one, slots.working))
        elif one.found[0] is Tier.DEVICE:
            pairs.append((one, int(one.found[1].pages[0]), slots.working))
        else:
            (_, lease), one.found = one.found, None
            one.loading = loads[one.id] = traffic.load(lease, slots.working, one.movements)
    zeroed = _slots([slot for _, slot in empty])
    sources, targets = _slots([pair[1] for pair in pairs]), _slots([pair[2] for pair in pairs])
    zero([one for one, _ in empty], zeroed, owner, stream)
    if pairs:
        copying = owner.copier.copy(sources, targets, stream)
        leases = []
        for one, _, _ in pairs:
            assert one.found is not None
            leases.append(one.found[1])
            one.found = None
        copied = traffic.copied(copying, targets, leases)
        for one, _, _ in pairs:
            one.copies.append(copied)
        owner.checkpoints.counts.add(copies=len(pairs))
    return Restored(_slots([slots.working for slots in made]), sources, targets, zeroed, loads)


def zero(running: list[HybridRequest], slots: Pages, owner: HybridManager, stream: Any) -> None:
    """Set working slots to zero, on the stream that computes."""
    if not len(slots):
        return
    copied = owner.checkpoints.traffic.copied(owner.copier.zero(slots, stream), slots, [])
    for one in running:
        one.copies.append(copied)


def _slots(numbers: list[int]) -> Pages:
    return np.array(numbers, np.int32)


__all__ = ["HybridFetch", "Restored", "restore", "zero"]

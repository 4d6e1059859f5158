"""KV behind the deepest checkpoint of a path: a policy lets it go first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightcache.errors import LightcacheError
from lightcache.hybrid.spaces import Path
from lightcache.manager.requests import Request

if TYPE_CHECKING:
    from lightcache.hybrid.manager import HybridManager
    from lightcache.hybrid.requests import HybridRequest


@dataclass(eq=False)
class _Tail:
    """Of a request that ends."""

    running: Request
    path: Path


class Tails:
    """Evicts KV of requests that have ended, behind the last position from which anybody could go
    on."""

    def __init__(self, owner: HybridManager) -> None:
        """None."""
        self._owner = owner
        self._waiting: list[_Tail] = []

    def note(self, one: HybridRequest) -> None:
        """A request ends, and the manager does not know yet."""
        owner, running = self._owner, self._owner.inner.running(one.id)
        if not owner.config.drop_tails or one.states is None or running is None:
            return
        if running.space is not None:
            chain = running.device_chain if owner.by_blocks else running.host_chain
            self._waiting.append(_Tail(running, Path(owner.strided(chain.keys), one.states)))

    def poll(self) -> None:
        """Evict what no copy touches any more."""
        still = []
        for tail in self._waiting:
            if self._owner.inner.is_over(tail.running):
                with contextlib.suppress(LightcacheError):  # then it goes in its turn
                    self._drop(tail)
            else:
                still.append(tail)
        self._waiting = still

    def _drop(self, tail: _Tail) -> None:
        owner, one = self._owner, tail.running
        manager, space = owner.manager, one.space
        if space is None or not owner.inner.good(space):
            return
        found = owner.checkpoints.deepest(tail.path)
        begin = 0 if found is None else found[1] * owner.step
        gone = 0
        for index, where, chain, tokens in (
            (manager.device.index, space.device, one.device_chain, manager.device.block_tokens),
            (manager.host.index, space.host, one.host_chain, manager.page_tokens),
        ):
            if (
                index is None
                or where is None
                or (index is not manager.host.index and not owner.owned)
            ):
                continue
            keys, first = chain.keys, -(-begin // tokens)
            if first < len(keys):
                gone += tokens * index.drop(keys, start=first, namespace=where)
        owner.checkpoints.counts.add(dropped_tokens=gone)


__all__ = ["Tails"]

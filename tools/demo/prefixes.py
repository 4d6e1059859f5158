"""Routing by prefixes: who has how much of a prompt, and what a turn would cost there."""

from __future__ import annotations

from collections.abc import Mapping

import lightcache
from lightcache._arguments import Keys
from lightcache.tools.demo.settings import Settings


class Prefixes:
    """A `lightcache.Router` over the workers that live, and what their turns cost by it."""

    def __init__(self, settings: Settings) -> None:
        """Nobody is there yet."""
        self._policy = lightcache.RouterPolicy(page_tokens=settings.page_tokens)
        self._router: lightcache.Router | None = None
        self._costs: dict[int, float] = {}
        """Of each turn where it was sent, without what waited there, in tokens of prefill."""

    def look_at(self, host: lightcache.Cache | None, devices: Mapping[int, str | None]) -> None:
        """From now on at these.

        Args:
            host: the cache of all of them; None: each has one of its own, or none.
            devices: name of each worker's device index.
        """
        self.close()
        named = {str(worker): name for worker, name in devices.items()}
        self._router = lightcache.Router(host, named, policy=self._policy)

    def choose(self, turn: int, keys: Keys, waiting: Mapping[int, list[int]]) -> int:
        """The worker at which a turn costs least.

        Args:
            keys: of its prompt.
            waiting: of each worker that may be chosen, the turns that it has to do or is at.
        """
        assert self._router is not None
        loads = {
            str(worker): sum(self._costs.get(each, 0.0) for each in turns)
            for worker, turns in waiting.items()
        }
        choice = self._router.route(keys, loads, among=loads)
        self._costs[turn] = choice.costs[choice.worker] - loads[choice.worker]
        return int(choice.worker)

    def close(self) -> None:
        """Let go of the indexes."""
        if self._router is not None:
            self._router.close()
            self._router = None

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Weights updates: a version is forgotten in every tier by one call, and every process sees it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from lightcache.errors import ConfigError
from lightcache.manager.requests import Space
from lightcache.namespaces import NamespaceState

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager


class WeightsState(Enum):
    """Of the version that a manager serves."""

    NORMAL = "normal"
    UPDATING = "updating"
    """`begin_update` was called, `finish_update` was not: nothing is found, nothing published."""
    CLEARING = "clearing"
    """Another process has cleared our version: its pages are being given back."""
    CLEARED = "cleared"
    """They are gone. `update_weights` says what is served now."""


_SEEN = {
    NamespaceState.NORMAL: WeightsState.NORMAL,
    NamespaceState.CLEARING: WeightsState.CLEARING,
    NamespaceState.CLEARED: WeightsState.CLEARED,
    NamespaceState.ABSENT: WeightsState.CLEARED,
}


class Weights:
    """The version that one manager serves. The namespaces of the host cache are what says, to every
    process, whether a version is still good: a manager looks before each plan and commit."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Normal."""
        self._manager = manager
        self._updating = False
        self._gone = WeightsState.NORMAL
        """What another process did to our version."""

    @property
    def open(self) -> bool:
        """Whether, as far as was looked, the version is good."""
        return not self._updating and self._gone is WeightsState.NORMAL

    def state(self) -> WeightsState:
        """Looked up in shared memory; about a microsecond for each tenant."""
        if self._updating:
            return WeightsState.UPDATING
        for space in self._manager._spaces.known():
            if not self.good(space):
                break
        return self._gone

    def good(self, space: Space) -> bool:
        """Whether anything of a space may be found or published. If another process has cleared
        it, our device forgets its version, and nothing is opened again before an update: who
        cleared knows of other weights."""
        if self._updating or space.weights != self._manager._spaces.weights:
            return False
        found = _SEEN[self._manager.host.index.namespace_state(space.host)]
        if found is WeightsState.NORMAL:
            return self._gone is WeightsState.NORMAL
        if self._gone is WeightsState.NORMAL:
            self._manager.device.clear_weights(space.weights)
        self._gone = found
        return False

    def begin(self) -> None:
        """From here on nothing of the version is found or published, in any tier and process."""
        manager, version = self._manager, self._manager._spaces.weights
        self._updating = True
        for space in manager.host.index.namespaces():
            if space.weights == version:
                manager.host.clear(space)
        manager.device.clear_weights(version)

    def finish(self, version: str) -> None:
        """Serve another version, or the same name again, which begins empty.

        Raises:
            ConfigError: not begun.
        """
        if not self._updating:
            raise ConfigError("finish_update: no update was begun; call begin_update first")
        self._manager._spaces.switch(version)
        self._updating, self._gone = False, WeightsState.NORMAL


__all__ = ["Weights", "WeightsState"]

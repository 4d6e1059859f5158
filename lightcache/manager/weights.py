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

    def state(self) -> WeightsState:
        """Looked up in shared memory; about a microsecond for each tenant."""
        if self._updating:
            return WeightsState.UPDATING
        manager = self._manager
        for space in manager._spaces.known():
            found = _SEEN[manager.host.index.namespace_state(space.host)]
            if found is not WeightsState.NORMAL:
                return found
        return WeightsState.NORMAL

    def good(self, space: Space) -> bool:
        """Whether anything of a space may be found or published. If another process has cleared it,
        our device forgets it here."""
        if self._updating:
            return False
        manager = self._manager
        if manager.host.index.namespace_state(space.host) is NamespaceState.NORMAL:
            return True
        if manager._spaces.drop(space):
            manager.device.clear_space(space.weights, space.tenant)
        return False

    def begin(self) -> None:
        """From here on nothing of the version is found or published, in any tier and process."""
        manager = self._manager
        self._updating = True
        for space in manager._spaces.known():
            manager.host.clear(space.host)
            manager.device.clear_space(space.weights, space.tenant)

    def finish(self, version: str) -> None:
        """Serve another version, or the same name again, which begins empty.

        Raises:
            ConfigError: not begun.
        """
        if not self._updating:
            raise ConfigError("finish_update: no update was begun; call begin_update first")
        self._manager._spaces.switch(version)
        self._updating = False


__all__ = ["Weights", "WeightsState"]

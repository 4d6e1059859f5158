"""Where states are: tiers, namespaces by weights version and tenant, and the keys of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightcache._arguments import Keys
from lightcache.cache import Cache
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.page_index import PageIndex


class Tier(Enum):
    """Where a checkpoint is."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A weights version and a tenant, on the device and the host; None: there is no such tier."""

    weights: str
    tenant: str
    device: Namespace | None
    host: Namespace | None

    def of(self, tier: Tier) -> Namespace:
        """In a tier that there is."""
        found = self.device if tier is Tier.DEVICE else self.host
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class Path:
    """The positions of a prompt at which checkpoints may be, as keys. The first `count` of them end
    with a position; so 0 is none."""

    keys: Keys
    """uint64 of shape (n, 2)."""
    space: StateSpace

    def key(self, count: int) -> Keys:
        """Of the position that `count` of them end with, alone."""
        return self.keys[count - 1 : count]


class StateSpaces:
    """Those that were opened here."""

    def __init__(self, slots: PageIndex | None, host: Cache | None) -> None:
        """None yet."""
        self._slots, self._host = slots, host
        self._known: dict[tuple[str, str], StateSpace] = {}

    def known(self, weights: str, tenant: str) -> StateSpace | None:
        """One that was opened here, and that nobody has cleared since."""
        found = self._known.get((weights, tenant))
        if found is None or found.host is None or self._host is None:
            return found
        if self._host.index.namespace_state(found.host) is NamespaceState.NORMAL:
            return found
        self.clear(weights, tenant)  # of the device, too
        return None

    def open(self, weights: str, tenant: str) -> StateSpace:
        """Made if need be.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        found = self._known.get((weights, tenant))
        if found is None:
            found = self._known[weights, tenant] = StateSpace(
                weights,
                tenant,
                None if self._slots is None else self._slots.namespace(weights, tenant),
                None if self._host is None else self._host.namespace(weights, tenant),
            )
        return found

    def clear(self, weights: str, tenant: str | None = None) -> None:
        """Forget what was opened here of a version, or of one of its tenants: nothing of it is
        found or accepted any more, in no process."""
        for key, space in list(self._known.items()):
            if space.weights != weights or tenant not in (None, space.tenant):
                continue
            if self._host is not None and space.host is not None:
                self._host.clear(space.host)
            if self._slots is not None and space.device is not None:
                self._slots.clear(space.device)
            del self._known[key]  # behind it: what failed is cleared again

    def clear_everywhere(self, weights: str) -> None:
        """The same, whoever has opened it."""
        if self._host is not None:
            for space in self._host.index.namespaces():
                if space.weights == weights:
                    self._host.clear(space)
        self.clear(weights)


__all__ = ["Path", "StateSpace", "StateSpaces", "Tier"]

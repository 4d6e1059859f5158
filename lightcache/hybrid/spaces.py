"""Where states are: tiers, namespaces by weights version and tenant, and the keys of a prompt."""

from __future__ import annotations

from collections.abc import Callable
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

    kv: Namespace
    """Of the host's KV, beside which it was opened: says whose states these are."""
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
    """Those that were opened here, one for each weights version and tenant."""

    def __init__(self, slots: PageIndex | None, host: Cache | None) -> None:
        """None yet."""
        self._slots, self._host = slots, host
        self._known: dict[tuple[str, str], StateSpace] = {}

    def beside(self, kv: Namespace, good: Callable[[], bool]) -> StateSpace | None:
        """Of the weights and the tenant of a namespace of KV, made if need be. None: that was
        cleared, and its states with it.

        Who clears KV alone, by whatever call, clears its states as well: the first request behind
        that brings another namespace of the same name, and what was beside the former one goes.

        Who forgets a namespace clears KV's first, and then those of states that it sees. Who opens
        one of these looks at KV's behind that: so one of the two sees the other.

        Args:
            good: whether KV's is in use still.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        found = self._usable(kv)
        if found is None and good():  # a request of before the clear must not clear what came after
            self.clear(kv.weights, kv.tenant)
            found = self._open(kv)
            if not good():
                self.clear(kv.weights, kv.tenant)
                return None
        return found

    def _usable(self, kv: Namespace) -> StateSpace | None:
        """One that was opened here beside this very namespace, and that nobody has cleared."""
        found = self._known.get((kv.weights, kv.tenant))
        if found is None or found.kv != kv:
            return None
        if found.host is None or self._host is None:
            return found
        if self._host.index.namespace_state(found.host) is NamespaceState.NORMAL:
            return found
        self.clear(kv.weights, kv.tenant)  # of the device, too
        return None

    def _open(self, kv: Namespace) -> StateSpace:
        names = kv.weights, kv.tenant
        made = self._known[names] = StateSpace(
            kv,
            None if self._slots is None else self._slots.namespace(*names),
            None if self._host is None else self._host.namespace(*names),
        )
        return made

    def live(self, space: StateSpace) -> bool:
        """Whether nobody has forgotten it here."""
        return self._known.get((space.kv.weights, space.kv.tenant)) is space

    def clear(self, weights: str, tenant: str | None = None) -> None:
        """Forget what was opened here of a version, or of one of its tenants: nothing of it is
        found or accepted any more, in no process."""
        for key, space in list(self._known.items()):
            if not _is_of(space.kv, weights, tenant):
                continue
            if self._host is not None and space.host is not None:
                self._host.clear(space.host)
            if self._slots is not None and space.device is not None:
                self._slots.clear(space.device)
            del self._known[key]  # behind it: what failed is cleared again

    def clear_everywhere(self, weights: str, tenant: str | None = None) -> None:
        """The same, whoever has opened it."""
        if self._host is not None:
            clear_states(self._host, weights, tenant)
        self.clear(weights, tenant)


def clear_states(states: Cache, weights: str, tenant: str | None = None) -> None:
    """Forget what a host cache has of a version, or of one of its tenants, whoever opened it. KV's
    is cleared before: see `StateSpaces.beside`."""
    for space in states.index.namespaces():
        if _is_of(space, weights, tenant):
            states.clear(space)


def _is_of(space: Namespace, weights: str, tenant: str | None) -> bool:
    return space.weights == weights and tenant in (None, space.tenant)


__all__ = ["Path", "StateSpace", "StateSpaces", "Tier", "clear_states"]

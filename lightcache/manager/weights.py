"""Weights: the namespaces of a version and its tenants, and clearing a version in every tier and
process by one call."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from lightcache.cache import Cache
from lightcache.errors import ConfigError, OutOfPages
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.request import CacheScope
from lightcache.namespaces import NamespaceState

_KEYS_ALONE = "device alone"
"""Fingerprint of all caches that only make keys. So devices of several ranks have equal keys, and a
router uses the same keys for all of them."""


def open_keys(device: DeviceTier) -> Cache:
    """The cache that makes keys without a host cache: one page, named after the device's index.
    Routers attach to it for `hash_pages`."""
    return Cache.open(
        f"{device.name}.keys",
        pages=1,
        page_bytes=4096,
        page_tokens=device.block_tokens,
        fingerprint=_KEYS_ALONE,
        role="scheduler",
    )


class WeightsState(Enum):
    """State of the version that a manager serves."""

    NORMAL = "normal"
    UPDATING = "updating"
    """Between `begin_update` and `finish_update`: nothing is found or published."""
    CLEARING = "clearing"
    """Another process has cleared our version: its pages are being given back."""
    CLEARED = "cleared"
    """Its pages are gone. Call `finish_update` with the version that is served now."""


_SEEN = {
    NamespaceState.NORMAL: WeightsState.NORMAL,
    NamespaceState.CLEARING: WeightsState.CLEARING,
    NamespaceState.CLEARED: WeightsState.CLEARED,
    NamespaceState.ABSENT: WeightsState.CLEARED,
}


class Weights:
    """The version that one manager serves, and its spaces, one for each tenant. The namespaces of
    the host cache tell every process whether a version is valid: a manager checks before each plan,
    take and commit. Running requests may use a space of a former version; once cleared, it finds
    and accepts nothing.

    A version has a namespace for each tenant, and any process may open another one at any moment.
    The anchor, the namespace without a tenant, stands for all of them: `begin` clears it after the
    others, and then looks again for namespaces that were opened meanwhile. A process that opens one
    re-reads the anchor afterwards, so either the opener or the clearer sees the other."""

    def __init__(self, host: Cache, device: DeviceTier, version: str) -> None:
        """Opens the version's namespace on the host.

        Raises:
            ConfigError: `version` is no text.
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        if not isinstance(version, str):
            raise ConfigError(f"weights: expected a version as text, found {version!r}")
        self._host, self._device = host, device
        self._index = device.index
        self.version = version
        """The version that is served."""
        self._anchor = host.namespace(version, "")
        self._spaces: dict[str, CacheScope] = {}
        """Spaces by tenant."""
        self._updating = self._begun = False
        self.ours = True
        """During an update: whether the version was valid when we began it. If not, another process
        has cleared it, and may serve other weights under its name by now."""
        self._gone = WeightsState.NORMAL
        """The state of our version as other processes have left it."""

    def state(self) -> WeightsState:
        """The state now, read from shared memory in about a microsecond."""
        if self._updating:
            return WeightsState.UPDATING
        self._is_version_valid()
        return self._gone

    # ---- Spaces

    def scope_of(self, tenant: str) -> CacheScope | None:
        """The space where a tenant's tokens may be found and published; None: the version is
        cleared or being updated. A tenant that was cleared alone gets a new, empty space."""
        for _ in range(2):
            if self._updating:
                return None
            space = self._spaces.get(tenant)
            if space is None or self._index is not self._device.index:
                if not self._is_version_valid():
                    return None
                space = self.open_space(tenant)
            if self.is_valid(space):
                return space
        return None

    def space_or_none(self, tenant: str) -> CacheScope | None:
        """As `scope_of`; also None if no namespace is left for the tenant: then nothing of it is
        found or published."""
        space = self._spaces.get(tenant)
        if space is not None and self._index is self._device.index and self.is_valid(space):
            return space  # nearly always
        try:
            return self.scope_of(tenant)
        except OutOfPages:
            return None

    def open_space(self, tenant: str) -> CacheScope:
        """A tenant's space under the present version, even if the version is not valid.

        Raises:
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        if self._index is not self._device.index:  # the number of blocks was set or changed
            self._index = self._device.index
            self._spaces.clear()
        space = self._spaces.get(tenant)
        if space is None:
            space = self._spaces[tenant] = self._new_space(tenant)
        return space

    def _new_space(self, tenant: str) -> CacheScope:
        host = self._host.namespace(self.version, tenant)
        spec = self._host.key_spec(namespace=host)
        blocks = self._device.block_tokens
        return CacheScope(
            self.version,
            tenant,
            host,
            self._device.space(self.version, tenant) if self._device.index is not None else None,
            spec,
            spec if spec.page_tokens == blocks else replace(spec, page_tokens=blocks),
        )

    def is_valid(self, space: CacheScope) -> bool:
        """Whether anything of a space may be found or published. If another process has cleared our
        version, our device forgets it, and no space is opened again before an update: the process
        that cleared it has other weights."""
        if self._updating or not self._is_version_valid():
            return False
        if space.host.ref == self._anchor.ref:
            return True
        if self._host.index.namespace_state(space.host) is NamespaceState.NORMAL:
            return True
        if self._spaces.get(space.tenant) is space:  # else it is forgotten already
            del self._spaces[space.tenant]
            self._device.clear_tenant(space.weights, space.tenant)
        return False

    def _is_version_valid(self) -> bool:
        """Whether our version is valid."""
        seen = _SEEN[self._host.index.namespace_state(self._anchor)]
        if seen is self._gone:
            return seen is WeightsState.NORMAL
        first = self._gone is WeightsState.NORMAL
        self._gone = seen
        if first:
            self._forget()
        return False

    # ---- Clearing

    def _forget(self) -> None:
        """Forget our version after another process has cleared it. Tenants are cleared here too, in
        case that process died before it had cleared all."""
        for space in list(self._spaces.values()):
            self._host.clear(space.host)
        self._device.clear_weights(self.version)

    def begin(self) -> None:
        """Clear the version: from here on nothing of it is found or published, in any tier and
        process. After an error the update is begun but not done: call it again."""
        if self._begun:
            return
        if not self._updating:
            self.ours = self._is_version_valid()
            self._updating = True
        if self.ours:
            self._clear(self.version)
            self._device.clear_weights(self.version)
        else:
            self._forget()  # but not what others serve under this name by now
        self._begun = True

    def clear_tenant(self, tenant: str) -> bool:
        """See `KVCacheManager.clear_tenant`."""
        if not tenant:
            raise ConfigError(
                f"clear_tenant: expected a tenant's name, found {tenant!r}; pages without a tenant "
                "stand for the whole version, which begin_update forgets"
            )
        space = self.scope_of(tenant)
        if space is None:
            return False
        self._host.clear(space.host)
        self.is_valid(space)  # notices the clear, and forgets the tenant here and on the device
        return True

    def _clear(self, version: str) -> None:
        host, anchor = self._host, self._anchor
        for space in host.index.namespaces():
            if space.weights == version and space != anchor:
                host.clear(space)
        host.clear(anchor)
        for space in host.index.namespaces():  # opened before the opener saw the anchor cleared
            if space.weights == version and space.tenant:
                host.clear(space)

    def finish(self, version: str) -> None:
        """Serve another version, or the same name again, which begins empty.

        Raises:
            ConfigError: no update was begun, or `begin` did not finish.
            OutOfPages, LockTimeout: as `PageIndex.namespace`; call it again.
        """
        if not self._begun:
            raise ConfigError("finish_update: no update was begun; call begin_update first")
        self._device.clear_weights(self.version)
        self._anchor = self._host.namespace(version, "")
        self.version = version
        self._spaces.clear()
        self._updating = self._begun = False
        self._gone = WeightsState.NORMAL


__all__ = ["Weights", "WeightsState", "open_keys"]

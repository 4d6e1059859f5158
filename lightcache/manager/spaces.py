"""Which namespaces and keys a request's tokens get: by weights version and tenant, in every
tier."""

from __future__ import annotations

from dataclasses import replace

from lightcache.cache import Cache
from lightcache.errors import ConfigError
from lightcache.manager.device import DeviceTier
from lightcache.manager.requests import Space


class Spaces:
    """The spaces of the weights that are served now. A space of a former version stays usable for
    what runs, and finds and accepts nothing once it was cleared."""

    def __init__(self, host: Cache, device: DeviceTier, weights: str) -> None:
        """Opens the version's namespace on the host.

        Raises:
            ConfigError: no text.
            OutOfPages, LockTimeout: as `PageIndex.namespace`.
        """
        if not isinstance(weights, str):
            raise ConfigError(f"weights: expected a version as text, found {weights!r}")
        self._host, self._device = host, device
        self._index = device.index
        self.weights = weights
        self.anchor = host.namespace(weights, "")
        """Says whether the version is good, for all tenants: it is cleared last."""
        self._known: dict[str, Space] = {}

    def has(self, tenant: str) -> bool:
        """Whether a tenant's is known: `of` opens nothing then."""
        return tenant in self._known and self._index is self._device.index

    def of(self, tenant: str) -> Space:
        """A tenant's, under the present weights."""
        if self._index is not self._device.index:  # the number of blocks is known, or another
            self._index = self._device.index
            self._known.clear()
        found = self._known.get(tenant)
        if found is None:
            found = self._known[tenant] = self._made(tenant)
        return found

    def _made(self, tenant: str) -> Space:
        host = self._host.namespace(self.weights, tenant)
        spec = self._host.key_spec(namespace=host)
        blocks = self._device.block_tokens
        return Space(
            self.weights,
            tenant,
            host,
            self._device.space(self.weights, tenant) if self._device.index is not None else None,
            spec,
            spec if spec.page_tokens == blocks else replace(spec, page_tokens=blocks),
        )

    def known(self) -> list[Space]:
        """Those that requests have had so far."""
        return list(self._known.values())

    def forget(self, space: Space) -> bool:
        """A tenant's was cleared: the next request opens it again, empty. False: that was done
        before, and there may be another by now."""
        if self._known.get(space.tenant) is not space:
            return False
        del self._known[space.tenant]
        return True

    def switch(self, weights: str) -> None:
        """From now on requests get spaces of another version.

        Raises:
            As `__init__`: nothing has changed then.
        """
        self.anchor = self._host.namespace(weights, "")
        self.weights = weights
        self._known.clear()


__all__ = ["Spaces"]

"""Weights updates: a version is forgotten in every tier by one call, and every process sees it."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from lightcache.cache import Cache
from lightcache.errors import ConfigError, OutOfPages
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.request import Space
from lightcache.namespaces import NamespaceState

# ---- Which namespaces and keys a request's tokens get: by weights version and tenant, in every
# tier.


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


_KEYS_ALONE = "device alone"
"""Fingerprint of caches that only make keys. It is the same for all, so devices of several ranks
have equal keys, and a router looks into all of them with the same."""


def open_keys(device: DeviceTier) -> Cache:
    """What keys are made with where there is no host cache: a cache of one page, named after the
    device's index. Routers attach to it for `hash_pages`."""
    return Cache.open(
        f"{device.name}.keys",
        pages=1,
        page_bytes=4096,
        page_tokens=device.block_tokens,
        fingerprint=_KEYS_ALONE,
        role="scheduler",
    )


# ---- Weights updates: a version is forgotten in every tier by one call, and every process sees
# it.


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


class Look:
    """The spaces as one call of a manager finds them: each is looked up when it is first asked for,
    and once."""

    def __init__(self, weights: Weights) -> None:
        """Nothing was looked up."""
        self._weights = weights
        self._found: dict[Space, bool] = {}

    def good(self, space: Space) -> bool:
        """See `Weights.good`."""
        found = self._found.get(space)
        if found is None:
            found = self._found[space] = self._weights.good(space)
        return found


class Weights:
    """The version that one manager serves. The namespaces of the host cache are what says, to every
    process, whether a version is still good: a manager looks before each plan, take and commit.

    A version has a namespace for each tenant, and any process may open one more at any moment. What
    speaks for all of them is the anchor, the namespace without a tenant: `begin` clears it behind
    the others, and then looks once more for what was opened meanwhile; who opens one looks at the
    anchor behind that. So one of the two sees the other."""

    def __init__(self, host: Cache, device: DeviceTier, spaces: Spaces) -> None:
        """Normal."""
        self._host, self._device, self._spaces = host, device, spaces
        self._updating = self._begun = False
        self.ours = True
        """Whether the version was good when we began to update it."""
        self._gone = WeightsState.NORMAL
        """What another process did to our version."""

    def state(self) -> WeightsState:
        """Looked up in shared memory; about a microsecond."""
        if self._updating:
            return WeightsState.UPDATING
        self._look()
        return self._gone

    def space_of(self, tenant: str) -> Space | None:
        """Where a tenant's tokens may be found and published; None: nowhere, the version is gone or
        going. A tenant that was cleared alone begins again, empty."""
        spaces = self._spaces
        for _ in range(2):
            if self._updating or not (spaces.has(tenant) or self._look()):
                return None
            space = spaces.of(tenant)
            if self.good(space):
                return space
        return None

    def space_or_none(self, tenant: str) -> Space | None:
        """As `space_of`; None, too, where no namespace is left for the tenant: nothing of it is
        found or published then."""
        try:
            return self.space_of(tenant)
        except OutOfPages:
            return None

    def good(self, space: Space) -> bool:
        """Whether anything of a space may be found or published. If another process has cleared
        our version, our device forgets it, and nothing is opened again before an update: who
        cleared knows of other weights."""
        if self._updating or not self._look():
            return False
        if space.host.ref == self._spaces.anchor.ref:
            return True
        if self._host.index.namespace_state(space.host) is NamespaceState.NORMAL:
            return True
        if self._spaces.forget(space):
            self._device.clear_tenant(space.weights, space.tenant)
        return False

    def _look(self) -> bool:
        """Whether our version is good."""
        found = _SEEN[self._host.index.namespace_state(self._spaces.anchor)]
        if found is self._gone:
            return found is WeightsState.NORMAL
        first = self._gone is WeightsState.NORMAL
        self._gone = found
        if first:
            self._forget()
        return False

    def _forget(self) -> None:
        """Another process has cleared our version. A tenant that it did not see is one of ours, if
        it died on its way."""
        for space in self._spaces.known():
            self._host.clear(space.host)
        self._device.clear_weights(self._spaces.weights)

    def begin(self) -> None:
        """From here on nothing of the version is found or published, in any tier and process. An
        error leaves it begun and not done: call it again."""
        if self._begun:
            return
        if not self._updating:
            self.ours = self._look()
            self._updating = True
        if self.ours:
            self._clear(self._spaces.weights)
            self._device.clear_weights(self._spaces.weights)
        else:
            self._forget()  # and not what others serve under this name by now
        self._begun = True

    def clear_tenant(self, tenant: str) -> bool:
        """See `KVCacheManager.clear_tenant`."""
        if not tenant:
            raise ConfigError(
                f"clear_tenant: expected a tenant's name, found {tenant!r}; what is of nobody "
                "stands for the whole version, which begin_update forgets"
            )
        space = self.space_of(tenant)
        if space is None:
            return False
        self._host.clear(space.host)
        self.good(space)  # sees it as any process will, and forgets it here and on the device
        return True

    def _clear(self, version: str) -> None:
        host, anchor = self._host, self._spaces.anchor
        for space in host.index.namespaces():
            if space.weights == version and space != anchor:
                host.clear(space)
        host.clear(anchor)
        for space in host.index.namespaces():  # opened by who did not see the anchor's end
            if space.weights == version and space.tenant:
                host.clear(space)

    def finish(self, version: str) -> None:
        """Serve another version, or the same name again, which begins empty.

        Raises:
            ConfigError: not begun, or `begin` was not done.
            OutOfPages, LockTimeout: as `PageIndex.namespace`; call it again.
        """
        if not self._begun:
            raise ConfigError("finish_update: no update was begun; call begin_update first")
        self._device.clear_weights(self._spaces.weights)
        self._spaces.switch(version)
        self._updating = self._begun = False
        self._gone = WeightsState.NORMAL


__all__ = ["Look", "Spaces", "Weights", "WeightsState", "open_keys"]

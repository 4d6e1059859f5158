"""Storage services of tests: one beside its client in one process, so that whatever is true of a
`StorageTier` can be asked of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightcache import Cache
from lightcache.storage import Storage, StorageTier
from lightcache.storage.service import StorageClient, StorageService


class ServedTier(StorageClient):
    """A client that owns its service: made, used and closed as a `StorageTier` is."""

    def __init__(self, cache: Cache, storage: Storage, **how: Any) -> None:
        """`how` is the tier's."""
        self.storage = storage
        self.serving = StorageService(cache, storage, **how)
        try:
            super().__init__(cache, timeout=how.get("timeout", 30.0))
        except BaseException:
            self.serving.close()
            raise

    @property
    def _crew(self) -> Any:
        """The threads of the service's tier, once it has done all that this client asked for."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._asked, 60.0)
        return self.serving._tier._crew

    def close(self, timeout: float = 10.0) -> bool:
        """The client first: what it waits for, the service does."""
        super().close(timeout)
        return self.serving.close(timeout)


KINDS: dict[str, Callable[..., Any]] = {"tier": StorageTier, "service": ServedTier}


@pytest.fixture(params=list(KINDS))
def make_tier(request: Any) -> Callable[..., Any]:
    """Makes a tier of each kind: `make_tier(cache, storage, **how)`."""
    return KINDS[request.param]

"""The transfer backend of one rank, made of arrays: it has its own shard of every page, with
stamps of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.stamped import TOKEN_BYTES, StampedBackend, StampedDevice, StampedMoving, Stamps

from lightcache import Cache
from lightcache.reservations import ReservationShard

SECRET = b"a secret of tests"


def open_sharded(name: str, pages: int, page: int, shards: int, **how: Any) -> Cache:
    """A host cache whose pages hold a stamp for each token and rank, one rank after the other."""
    return Cache.open(
        name,
        pages=pages,
        page_bytes=shards * page * TOKEN_BYTES,
        page_tokens=page,
        fingerprint=f"stamped {shards}",
        secret=SECRET,
        **how,
    )


class ShardBackend(StampedBackend):
    """A `RankBackend`."""

    def __init__(self, cache: Cache, device: StampedDevice, rank: int) -> None:
        super().__init__(cache, device)
        self.rank = rank

    def _page(self, page: int) -> Stamps:
        tokens = self.cache.index.page_tokens
        found: Stamps = np.frombuffer(memoryview(self.cache.pool[page]), np.uint64)
        return found[self.rank * tokens : (self.rank + 1) * tokens]

    def _offload(self, moving: StampedMoving) -> None:
        shard = moving.held
        assert isinstance(shard, ReservationShard)
        assert shard.shard == self.rank
        tokens = self.cache.index.page_tokens
        with shard:
            assert len(moving.slots) == len(shard.pages) * tokens
            for i, page in enumerate(shard.pages.tolist()):
                slots = moving.slots[i * tokens : (i + 1) * tokens]
                assert (slots >= 0).all()
                self._page(page)[:] = 0xDEAD if moving.failed else self.device.slots[slots]
            self._publish(moving)

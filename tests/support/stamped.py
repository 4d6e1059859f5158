"""A device and a transfer backend made of arrays: every token's bytes are a stamp of the prefix
that ends in it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, Lease, Reservation
from lightcache.errors import TransferFailed, WaitTimeout
from lightcache.leases import Allocation

Stamps = npt.NDArray[np.uint64]
TOKEN_BYTES = 8


def stamps_of(tokens: Any, seed: int = 0) -> Stamps:
    """A stamp for each token, of all tokens up to it."""
    found, value = np.empty(len(tokens), np.uint64), 0x9E3779B97F4A7C15 ^ seed
    for i, token in enumerate(np.asarray(tokens).tolist()):
        value = (value * 0x100000001B3 + token + 1) & 0xFFFFFFFFFFFFFFFF
        found[i] = value
    return found


class StampedDevice:
    """The KV of a device: one stamp for each slot."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """Nothing in it is anybody's stamp."""
        self.block_tokens = block_tokens
        self.slots: Stamps = np.zeros(blocks * block_tokens, np.uint64)

    def write(self, table: Any, begin: int, stamps: Stamps) -> None:
        """What computing tokens from `begin` on leaves."""
        at = np.arange(begin, begin + len(stamps))
        where = np.asarray(table)[at // self.block_tokens] * self.block_tokens
        self.slots[where + at % self.block_tokens] = stamps

    def read(self, table: Any, begin: int, end: int) -> Stamps:
        """What tokens [begin, end) have."""
        at = np.arange(begin, end)
        where = np.asarray(table)[at // self.block_tokens] * self.block_tokens
        return self.slots[where + at % self.block_tokens]


class StampedMoving:
    """One copy. It reads and writes when it is finished, the latest moment at which it may."""

    def __init__(
        self, backend: StampedBackend, held: Lease | Reservation | Allocation, slots: Any
    ) -> None:
        self.backend, self.held, self.slots = backend, held, np.asarray(slots)
        self.over = self.failed = self.saves = False

    def done(self) -> bool:
        """See `TransferHandle`."""
        if self.over and self.failed:
            raise TransferFailed("arranged")
        return self.over

    def wait(self, timeout: float | None = None) -> None:
        """See `TransferHandle`. Time passes by finishing what is before it, and itself."""
        if not self.over and timeout == 0:
            raise WaitTimeout("arranged")
        while not self.over:
            self.backend.finish(1)
        self.done()


class StampedBackend:
    """Copies between a StampedDevice and the host pages, now or when told to."""

    shards = 1

    def __init__(self, cache: Cache, device: StampedDevice) -> None:
        self.cache, self.device = cache, device
        self.going: deque[StampedMoving] = deque()
        self.at_once = True
        self.fail_next = 0
        self.loads = self.offloads = 0

    def load(self, lease: Lease, slots: Any, first: int) -> StampedMoving:
        """See `TransferBackend`."""
        assert first == 0
        return self._begin(StampedMoving(self, lease, slots))

    def offload(self, new: Reservation, slots: Any) -> StampedMoving:
        """See `TransferBackend`."""
        return self._begin(StampedMoving(self, new, slots))

    def save(self, held: Any, slots: Any) -> StampedMoving:
        """See `TransferBackend`."""
        moving = StampedMoving(self, held, slots)
        moving.saves = True
        return self._begin(moving)

    def _begin(self, moving: StampedMoving) -> StampedMoving:
        self.going.append(moving)
        if self.at_once:
            self.finish(len(self.going))
        return moving

    def finish(self, count: int | None = None) -> None:
        """Let the oldest copies happen; None: all."""
        for _ in range(len(self.going) if count is None else min(count, len(self.going))):
            moving = self.going.popleft()
            moving.failed = self.fail_next > 0
            self.fail_next -= moving.failed
            if moving.saves:
                self._save(moving)
            elif isinstance(moving.held, Lease):
                self._load(moving)
            else:
                self._offload(moving)
            moving.over = True

    def _page(self, page: int) -> Stamps:
        found: Stamps = np.frombuffer(memoryview(self.cache.pool[page]), np.uint64)
        return found

    def _load(self, moving: StampedMoving) -> None:
        assert isinstance(moving.held, Lease)
        tokens = self.cache.index.page_tokens
        for i, page in enumerate(moving.held.pages.tolist()):
            slots = moving.slots[i * tokens : (i + 1) * tokens]
            wanted = slots >= 0
            if moving.failed:  # what a failed copy leaves is anything
                self.device.slots[slots[wanted]] = 0xDEAD
            else:
                self.device.slots[slots[wanted]] = self._page(page)[wanted]
        self.loads += 1
        moving.held.release()

    def _save(self, moving: StampedMoving) -> None:
        tokens = self.cache.index.page_tokens
        for i, page in enumerate(moving.held.pages.tolist()):
            slots = moving.slots[i * tokens : (i + 1) * tokens]
            if not moving.failed:
                self._page(page)[: len(slots)] = self.device.slots[slots]

    def _offload(self, moving: StampedMoving) -> None:
        new = moving.held
        assert isinstance(new, Reservation)
        tokens = self.cache.index.page_tokens
        with new:
            for position, page in zip(new.new.tolist(), new.pages.tolist(), strict=True):
                slots = moving.slots[position * tokens : (position + 1) * tokens]
                assert (slots >= 0).all()
                view = np.frombuffer(memoryview(self.cache.pool[page]), np.uint64)
                view[:] = 0xDEAD if moving.failed else self.device.slots[slots]
            self._publish(moving)

    def _publish(self, moving: StampedMoving) -> None:
        held: Any = moving.held
        if not moving.failed:
            try:
                held.publish()
            except Exception:
                moving.failed = True
        self.offloads += 1


class PartsBackend(StampedBackend):
    """States that lie in several pages of the host each: every word of a part says whose it is, and
    which part."""

    def __init__(self, cache: Cache, device: StampedDevice, parts: int) -> None:
        super().__init__(cache, device)
        self.parts = parts

    def _words(self, stamp: int, part: int) -> Stamps:
        words = self.cache.page_bytes // TOKEN_BYTES
        return np.uint64(stamp) ^ (np.arange(words, dtype=np.uint64) + np.uint64(part * words))

    def _load(self, moving: StampedMoving) -> None:
        assert isinstance(moving.held, Lease)
        pages = moving.held.pages.tolist()
        assert len(pages) == self.parts
        (slot,) = moving.slots.tolist()
        stamp = int(self._page(pages[0])[0])
        for part, page in enumerate(pages):
            assert (self._page(page) == self._words(stamp, part)).all(), "a part of another state"
        self.device.slots[slot] = 0xDEAD if moving.failed else stamp
        self.loads += 1
        moving.held.release()

    def _offload(self, moving: StampedMoving) -> None:
        new = moving.held
        assert isinstance(new, Reservation)
        with new:
            slot = int(moving.slots[-1])
            for position, page in zip(new.new.tolist(), new.pages.tolist(), strict=True):
                part = position % self.parts
                view = np.frombuffer(memoryview(self.cache.pool[page]), np.uint64)
                stamp = 0xDEAD if moving.failed else int(self.device.slots[slot])
                view[:] = self._words(stamp, part)
            self._publish(moving)

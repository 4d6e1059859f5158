"""Keys and values between pages and a transformers cache, for those who hold leases and
reservations themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, Lease, Load, Offload, Reservation, ReservationShard
from lightcache.connectors.hybrid import HybridPrefixes
from lightcache.connectors.model_pages import ModelPages
from lightcache.connectors.model_watch import ModelWatch
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import PrefixCache, TokenIds, planes_of
from lightcache.errors import ConfigError, Detached, TransferFailed

if TYPE_CHECKING:
    from lightcache.kernels.moves import Engine
    from lightcache.kernels.planes import DevicePlanes


class Transfers:
    """Part of `Connector`: see there."""

    cache: Cache
    pages: ModelPages
    engine: Engine
    hybrid: HybridPrefixes | None
    _config: Any
    _pool: Pooled
    _watch: ModelWatch
    _closed: bool

    def restore(self, lease: Lease, *, window: int | None = None) -> PrefixCache:
        """Load the pages of a lease, and take the lease over as `Load` does: it is released when
        they have been copied.

        On the CPU this blocks until then. On a GPU the current stream waits and this thread does
        not, but for pages that are not pinned yet: use the result on that stream.

        Args:
            lease: of this cache; it may be empty.
            window: layers that arrive together. The model begins when the first have arrived, and
                each layer waits, in `PrefixCache.update`, for its own. Until the model has used
                the result once, nothing else may read its tensors. None: all before anything.

        Raises:
            ConfigError: no lease, or not from this cache object; a window below 1.
            LeaseLost: released before.
            TransferFailed: the copy failed.
            Detached: closed.
        """
        if self.hybrid is not None:
            raise ConfigError(
                "restore: expected a model of keys and values alone, found recurrent states; load "
                "both into `empty`: with `load`, and with `hybrid.checkpoints.load`"
            )
        return self._restore(lease, None, window)

    def _restore(
        self, lease: Lease, ids: TokenIds | None, window: int | None = None
    ) -> PrefixCache:
        past = PrefixCache(self._config, ids)
        past.watch = self._watch
        if window is None:
            self._load_all(past, lease)
        else:
            self.load(past, lease, window=window)
        return past

    def _load_all(self, past: PrefixCache, lease: Lease) -> None:
        load = self.load(past, lease)
        with contextlib.suppress(TransferFailed):  # `done` says it, and gives the lease back
            load.transfer.wait_on()
        load.done()

    def empty(self) -> PrefixCache:
        """A cache with nothing in it, to `load` into or to begin with. Its tokens are not known:
        save it with `offload`."""
        past = PrefixCache(self._config) if self.hybrid is None else self.hybrid.empty(None)
        past.watch = self._watch
        return past

    def load(self, past: PrefixCache, lease: Lease, *, window: int | None = None) -> Load:
        """Begin to load the pages of a lease behind what a cache holds, and take the lease over as
        `Load` does. Blocks for pages that are not pinned yet, and copies what `past` holds to where
        there is room for all.

        With `window` the layers wait by themselves, as in `restore`. Without, it is for the caller
        to wait (`done`, `wait`, `transfer.wait_on`) before anything reads the tensors.

        Args:
            past: of `empty`, `restore` or `prefix`, with the tokens before the lease's pages.
            lease: of this cache; it may be empty.
            window: see `restore`.

        Raises:
            ConfigError: no PrefixCache, no lease, or not from this cache object; a window below 1.
            LeaseLost: released before.
            TransferFailed: an earlier copy into `past` failed.
            Detached: closed.
        """
        self._check_open()
        self.engine.poll()
        if not isinstance(past, PrefixCache):
            raise ConfigError(f"past: expected a PrefixCache, found {type(past).__name__}")
        if not isinstance(lease, Lease):
            raise ConfigError(f"lease: expected a Lease, found {type(lease).__name__}")
        self._check_ours(lease)
        before = past.held
        tokens = len(lease.pages) * self.pages.geometry.page_tokens
        if not tokens:
            return Load(self.engine, lease, np.arange(0))
        past.allocate(self.pages, tokens)
        try:
            self._pool.wait_for(lease.pages)
            slots = np.arange(before, before + tokens)
            load = Load(self.engine, lease, slots, planes=self.planes(past), window=window)
        except BaseException:
            past.withdraw(tokens)
            raise
        if window is not None:
            past.expect(load)
        return load

    def offload(
        self,
        past: Any,
        held: Reservation | ReservationShard,
        *,
        positions: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> Offload:
        """Begin to save pages of a cache, and take the reservation or shard over as `Offload` does:
        they are published when the copy is over and somebody asks for it (`done`, `wait`, or the
        next call here).

        The tensors that `past` has now are read; it may grow, be cropped or dropped meanwhile. Keep
        the result until it is done: a dropped one is aborted.

        Args:
            past: a `PrefixCache`, or a `DynamicCache` of one row, holding all tokens of the pages.
            held: which pages.
            positions: of the pages in the prompt's keys, needed for a shard; see `Offload`.

        Raises:
            ConfigError: a cache of another model, of several rows, or with fewer tokens than the
                pages, one of which a pass was refused, or pages that are not from this cache
                object; `held` is the caller's still.
            LeaseLost: `held` has ended before.
            Detached: closed.
        """
        self._check_open()
        self.engine.poll()
        if not isinstance(held, (Reservation, ReservationShard)):
            raise ConfigError(
                f"held: expected a Reservation or ReservationShard, found {type(held).__name__}"
            )
        self._check_ours(held)
        if isinstance(past, PrefixCache):
            past.check_sound()
        if not len(held.pages):
            return Offload(self.engine, held, np.arange(0), positions=positions)
        planes = self.planes(past)
        length = min(int(past.layers[at].get_seq_length()) for at in self.pages.geometry.layers)
        self._pool.wait_for(held.pages)
        return Offload(self.engine, held, np.arange(length), positions=positions, planes=planes)

    def planes(self, past: Any) -> DevicePlanes:
        """Where a cache has its keys and values now, for calls of `engine` that go page by page;
        slots are positions. Keeps the tensors alive.

        Raises:
            ConfigError: no DynamicCache of this model that keeps every token of one row.
        """
        return planes_of(self.pages, past)

    def _check_ours(self, held: Reservation | ReservationShard | Lease) -> None:
        """Page numbers of another cache would be taken for our own."""
        core = held.hold().core
        if core is not self.cache.index.core:
            raise ConfigError(
                f"expected pages of the cache {self.cache.name!r} as this connector's cache object "
                f"gave them, found those of {core.segment.name!r} from another; use that object"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Detached("this connector is closed; make another one")


__all__ = ["Transfers"]

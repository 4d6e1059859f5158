"""Keys and values between pages and a transformers cache, for callers that manage leases and
reservations themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, Lease, Load, Offload, Reservation, ReservationShard
from lightcache.connectors.hybrid import HybridPrefixes
from lightcache.connectors.model_pages import ModelPages, TokenPages
from lightcache.connectors.model_watch import ModelWatch
from lightcache.connectors.pooled import Pooled
from lightcache.connectors.prefix_cache import PrefixCache, TokenIds, planes_of
from lightcache.errors import ConfigError, Detached, TransferFailed

if TYPE_CHECKING:
    from lightcache.kernels.moves import Engine
    from lightcache.kernels.planes import DevicePlanes


class LeaseCalls:
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
        """Load the pages of a lease, and take over the lease as `Load` does: it is released when
        they have been copied.

        On the CPU this blocks until then. On a GPU the current stream waits; this thread waits only
        for pages that are not pinned yet. Use the result on that stream.

        Args:
            lease: of this cache; it may be empty.
            window: layers that are loaded together. The model begins when the first window has
                arrived; each layer waits for its own in `PrefixCache.update`. Until the model has
                used the result once, nothing else may read its tensors. None: the model waits for
                all layers.

        Raises:
            ConfigError: no lease, or not from this cache object; a window below 1.
            LeaseLost: released before.
            TransferFailed: the copy failed.
            Detached: closed.
        """
        if self.hybrid is not None:
            raise ConfigError(
                "restore: expected a model of full attention alone, found other layers; "
                "load all into `empty`: with `load`, for states with `hybrid.checkpoints.load`"
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
        with contextlib.suppress(TransferFailed):  # `done` raises it, and gives the lease back
            load.transfer.wait_on()
        load.done()

    def empty(self) -> PrefixCache:
        """An empty cache, to `load` into or to begin with. Its tokens are not known: save it with
        `offload`."""
        past = PrefixCache(self._config) if self.hybrid is None else self.hybrid.empty(None)
        past.watch = self._watch
        return past

    def load(self, past: PrefixCache, lease: Lease, *, window: int | None = None) -> Load:
        """Begin to load the pages of a lease after the tokens that a cache holds, and take over the
        lease as `Load` does. Blocks for pages that are not pinned yet, and copies the content of
        `past` to larger tensors.

        With `window` the layers wait by themselves, as in `restore`. Without it the caller waits
        (`done`, `wait`, `transfer.wait_on`) before anything reads the tensors.

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
        full = self._full()
        before = past.held
        tokens = len(lease.pages) * self.pages.page_tokens
        if not tokens:
            return Load(self.engine, lease, np.arange(0))
        past.allocate(full, tokens)
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
        """Begin to save pages of a cache, and take over the reservation or shard as `Offload` does:
        the first call after the copy has finished (`done`, `wait`, or any call here) publishes
        them.

        Reads the current tensors of `past`, which may grow, be cropped or dropped meanwhile. Keep
        the result until it is done: a dropped one is aborted.

        Args:
            past: a `PrefixCache`, or a `DynamicCache` of one row, holding all tokens of the pages.
            held: the pages.
            positions: of the pages in the prompt's keys, needed for a shard; see `Offload`.

        Raises:
            ConfigError: a cache of another model, of several rows, with fewer tokens than the
                pages, or with a refused pass; or pages that are not from this cache object. The
                caller still owns `held`.
            LeaseLost: `held` had ended before.
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
        length = min(
            int(past.layers[number].get_seq_length()) for number in self._full().geometry.layers
        )
        self._pool.wait_for(held.pages)
        return Offload(self.engine, held, np.arange(length), positions=positions, planes=planes)

    def planes(self, past: Any) -> DevicePlanes:
        """The planes of a cache's current keys and values, for calls of `engine`; slots are
        positions. Keeps the tensors alive.

        Raises:
            ConfigError: not a DynamicCache of this model that keeps every token of one row.
        """
        return planes_of(self._full(), past)

    def _full(self) -> TokenPages:
        """The pages of full attention."""
        if self.pages.full:
            return self.pages.attention[0]
        raise ConfigError(
            "expected a model with layers of full attention, found none; its pages are saved and "
            "restored by `prefix` alone"
        )

    def _check_ours(self, held: Reservation | ReservationShard | Lease) -> None:
        """Check the cache object: page numbers of another cache would be mistaken for its own."""
        core = held.hold().core
        if core is not self.cache.index.core:
            raise ConfigError(
                f"expected pages of the cache {self.cache.name!r} as this connector's cache object "
                f"gave them, found those of {core.segment.name!r} from another; use that object"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Detached("this connector is closed; make another one")


__all__ = ["LeaseCalls"]

"""A cache for models of Hugging Face transformers.

    from lightcache.connectors import transformers as lct

    cache = lct.open_cache("llama", model, size="1GiB")
    with lct.Connector(cache, model) as connector:
        with connector.prefix(input_ids) as past:
            output = model.generate(input_ids, past_key_values=past)
            past.extend(output[:, input_ids.shape[1]:])  # to save what was generated as well

`prefix` restores the longest stored prefix, so the model computes only the rest; leaving its `with`
saves the pages that are new. Hybrid models need a second cache, of states: `open_caches`, and
`Connector.prefill`. Needs transformers 5.0 or later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, Lease, Load, Namespace, Offload, Reservation, Shard
from lightcache._arguments import Keys
from lightcache.connectors.checkpoints import Checkpoint
from lightcache.connectors.hybrid import HybridPrefixes, check_states
from lightcache.connectors.hybrid_cache import HybridPrefixCache
from lightcache.connectors.model_pages import ModelPages, describe, describe_for
from lightcache.connectors.opening import Caches, open_cache, open_caches
from lightcache.connectors.pooled import Pooled, check_device
from lightcache.connectors.prefix_cache import PrefixCache, TokenIds, planes_of, token_ids
from lightcache.errors import Abandoned, ConfigError, Detached, NoSpace, TransferFailed

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.planes import DevicePlanes


class Connector:
    """One model and one cache, with the engine that moves pages between them.

    For many requests, also by several threads: one thread to a request. Close it before the cache.
    """

    def __init__(
        self,
        cache: Cache,
        model: Any,
        *,
        states: Cache | None = None,
        pinned: PinnedPages | None = None,
        pinned_states: PinnedPages | None = None,
        chunk: int = 64,
        every: int = 256,
    ) -> None:
        """Join them. Computes one token, see `describe`, and a few more with a hybrid model.

        Args:
            cache: made by `open_cache` or `open_caches`, or with `describe(model).options`.
            model: as `describe`.
            states: for a hybrid model, made by `open_caches`, or with
                `describe(model).states.options`.
            pinned, pinned_states: for a model on a GPU, what `pin` of these caches returned; None:
                pinned here, which takes seconds for a large pool and goes on in the background, and
                unpinned by `close`.
            chunk, every: of a hybrid model's `Grid`: prefills save states at multiples of chunk and
                page_tokens, and decoding at those of `every` as well. Processes may differ in them.

        Raises:
            LayoutMismatch: a cache is of another model; says what differs.
            ConfigError: as `describe`, or no cache, one without page_tokens, none of states for a
                hybrid model or one for another, or for a model on a GPU one that was opened without
                device=True.
            InUse: a pool is pinned already by this process; give `pinned`.
            Detached: a cache is closed.
        """
        if not isinstance(cache, Cache):
            raise ConfigError(f"cache: expected a lightcache.Cache, found {type(cache).__name__}")
        self.cache = cache
        self.pages: ModelPages = describe_for(cache, model)
        check_states(states, model, self.pages)
        for one in (cache, states):
            if one is not None:
                check_device(one, self.pages.device)
        self._config = model.config
        self._closed = False
        with contextlib.ExitStack() as stack:
            seen = PrefixCache(self._config)  # every transfer brings planes of its own
            seen.allocate(self.pages, 1)
            planes = planes_of(self.pages, seen)
            self._pool = Pooled(cache, self.pages.geometry, planes, self.pages.device, pinned)
            stack.callback(self._pool.close)
            self.engine = self._pool.engine
            self.pinned = self._pool.pinned
            """The pool as a GPU sees it; `pinned.wait()` waits for all of it. None on the CPU."""
            self.hybrid: HybridPrefixes | None = None
            """For a model with recurrent states: what finds, takes and saves checkpoints."""
            if states is not None:
                self.hybrid = HybridPrefixes(
                    cache, states, model, self.pages, pinned=pinned_states, chunk=chunk, every=every
                )
            stack.pop_all()

    # ---- one request

    @contextlib.contextmanager
    def prefix(
        self, tokens: Any, *, salt: str | bytes | None = None, namespace: Namespace | None = None
    ) -> Iterator[PrefixCache]:
        """The longest stored prefix of a prompt, as `past_key_values`; at the end of the `with`,
        what was computed is saved.

        At least one token is left to compute. Leaving blocks until the new full pages are copied
        and published, or at once if there are none: those that are stored already are not written
        again, those that another process is writing just now are left to it, and those for which
        there is no room are not saved. Leaving by an exception saves nothing.

        Args:
            tokens: ids of the prompt: a list, an array or a tensor (also of a device), of shape
                (n,) or (1, n).
            salt: keeps tenants or adapters apart, see `Cache.hash_pages`.
            namespace: see `Cache.namespace`; None: the cache's.

        Raises:
            ConfigError: several rows, or tokens that are no ids.
            TransferFailed: a copy failed; on entering, nothing is held.
            LockTimeout, Detached, PermissionDenied: as `Cache.match` and `Cache.reserve`.
        """
        self._check_open()
        ids = token_ids(tokens)
        how = {"salt": b"" if salt is None else salt, "namespace": namespace}
        past = self._found(ids, how)
        yield past
        self._save(past, how)

    def _found(self, ids: TokenIds, how: dict[str, Any]) -> PrefixCache:
        keys = self.cache.hash_pages(ids, **how, leave_one=True)
        if self.hybrid is not None:
            return self.hybrid.found(ids, keys, how["namespace"], self._load_all)
        with self.cache.match(keys, namespace=how["namespace"]) as lease:
            return self._restore(lease, ids)

    def prefill(self, past: Any, tokens: Any = None, *, at_most: int | None = None) -> None:
        """Of a hybrid model: compute a prompt up to the last position at which a state is to be
        saved, in passes that end where one is. Nothing to do for other models.

        That is where the prompt leaves what others computed without leaving a state there, and the
        last multiple of the grid. At least one token is left, for `generate`, unless it was
        computed before. Without this call only states of what is generated are saved. Blocks.

        Args:
            past: of `prefix`.
            tokens: the whole prompt, if it is longer than what was given to `prefix`: the next turn
                of a conversation in one `past`. It begins with the tokens that are held.
            at_most: tokens of a forward pass, to bound its memory; None: any number.

        Raises:
            ConfigError: no cache of `prefix`, or tokens that do not begin with those it holds.
        """
        self._check_open()
        if self.hybrid is not None:
            self.hybrid.prefill(past, tokens, at_most)

    def _save(self, past: PrefixCache, how: dict[str, Any]) -> None:
        self.engine.poll()  # gives back what was pinned for the load
        keys = self.cache.hash_pages(past.tokens, **how)
        if len(keys) * self.pages.geometry.page_tokens > past.reused:
            self._save_pages(past, keys, how["namespace"])
        if self.hybrid is not None and isinstance(past, HybridPrefixCache):
            self.hybrid.save(past, keys, how["namespace"])

    def _save_pages(self, past: PrefixCache, keys: Keys, namespace: Namespace | None) -> None:
        # Without room, or in a namespace that was cleared meanwhile, it is not saved: a later miss.
        with contextlib.suppress(Abandoned, NoSpace):
            # From the first page on: what was restored may have been evicted since, and would leave
            # a hole in front of the new pages.
            with self.cache.reserve(keys, namespace=namespace) as held:
                if len(held.new):
                    self.offload(past, held).wait()

    # ---- its parts, for those who hold leases and reservations themselves

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
        return PrefixCache(self._config) if self.hybrid is None else self.hybrid.empty(None)

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
        held: Reservation | Shard,
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
                pages, or pages that are not from this cache object; `held` is the caller's still.
            LeaseLost: `held` has ended before.
            Detached: closed.
        """
        self._check_open()
        self.engine.poll()
        if not isinstance(held, (Reservation, Shard)):
            raise ConfigError(f"held: expected a Reservation or Shard, found {type(held).__name__}")
        self._check_ours(held)
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

    def _check_ours(self, held: Reservation | Shard | Lease) -> None:
        """Page numbers of another cache would be taken for our own."""
        if held._index is not self.cache.index:
            raise ConfigError(
                f"expected pages of the cache {self.cache.name!r} as this connector's cache object "
                f"gave them, found those of {held._index.name!r} from another; use that object"
            )

    # ---- the end

    def _check_open(self) -> None:
        if self._closed:
            raise Detached("this connector is closed; make another one")

    def close(self) -> None:
        """Wait for copies, publish what they saved, and let go of the caches, which can then be
        closed. A second call does nothing."""
        if self._closed:
            return
        if self.hybrid is not None:
            self.hybrid.close()
        self._pool.close()
        self._closed = True

    def __enter__(self) -> Connector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def prefix(
    cache: Cache,
    model: Any,
    tokens: Any,
    *,
    states: Cache | None = None,
    salt: str | bytes | None = None,
    namespace: Namespace | None = None,
    pinned: PinnedPages | None = None,
) -> Iterator[PrefixCache]:
    """`Connector.prefix`, with a connector for this call alone. That costs a decoding step, threads
    and, on a GPU without `pinned`, registering the pool: for many calls make a `Connector`."""
    with Connector(cache, model, states=states, pinned=pinned) as connector:
        with connector.prefix(tokens, salt=salt, namespace=namespace) as past:
            yield past


__all__ = [
    "Caches",
    "Checkpoint",
    "Connector",
    "HybridPrefixCache",
    "ModelPages",
    "PrefixCache",
    "describe",
    "open_cache",
    "open_caches",
    "prefix",
]

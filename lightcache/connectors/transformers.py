"""A cache for models of Hugging Face transformers.

    from lightcache.connectors import transformers as lct

    cache = lct.open_cache(model, size="1GiB")
    with lct.Connector(cache, model) as connector:
        with connector.prefix(input_ids) as past:
            output = model.generate(input_ids, past_key_values=past)
            past.extend(output[:, input_ids.shape[1]:])  # to save what was generated as well

`prefix` restores the longest stored prefix, so the model computes only the rest; leaving its `with`
saves the new pages. Models with recurrent states also need `Connector.prefill`. Needs transformers
5.0 or later.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightcache import Cache, Lease, Load, Offload, Reservation
from lightcache._arguments import Keys
from lightcache.connectors.hybrid import (
    Checkpoint,
    HybridPrefixCache,
    HybridPrefixes,
    check_kind,
    pool_of_states,
    pool_of_tokens,
)
from lightcache.connectors.model_pages import ModelPages, TokenPages, describe, describe_for
from lightcache.connectors.model_watch import ModelWatch
from lightcache.connectors.node_tally import NodeTally
from lightcache.connectors.opening import open_cache
from lightcache.connectors.pooled import check_device
from lightcache.connectors.prefix_cache import (
    ConnectorStats,
    Counters,
    PrefixCache,
    TokenIds,
    planes_of,
    token_ids,
)
from lightcache.errors import Abandoned, ConfigError, Detached, NoSpace, TransferFailed
from lightcache.hybrid.checkpoints import PATH_LIMIT
from lightcache.namespaces import Namespace
from lightcache.reservations import ReservationShard
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.planes import DevicePlanes


class Connector:
    """One model and one cache, with the engine that moves pages between them.

    Serves many requests, from several threads: one thread for each request. Close it before the
    cache.
    """

    def __init__(
        self,
        cache: Cache,
        model: Any,
        *,
        pinned: PinnedPages | None = None,
        chunk: int = 64,
        every: int = 256,
        path_limit: int = PATH_LIMIT,
    ) -> None:
        """Join a cache and a model. Computes one token, see `describe`, and a few more with a
        hybrid model.

        Args:
            cache: the result of `open_cache`, or made with `describe(model).options`.
            model: as `describe`.
            pinned: for a model on a GPU, the result of `cache.pin`; None: pinned here, in the
                background, which takes seconds for a large pool, and unpinned by `close`.
            chunk, every: of the `Grid` at which states and windows are saved: states of a prompt at
                multiples of chunk and page_tokens, windows at those of page_tokens; while decoding,
                both at those of `every` as well. Processes may use different values.
            path_limit: bound on states of a hybrid model on one path; the first ones beyond it are
                the first to be evicted, except where prompts diverge, and those in use. 0: no
                bound. The default is that of `lightcache.hybrid.Checkpoints`.

        Raises:
            LayoutMismatch: the cache is of another model; says what differs.
            ConfigError: as `describe`; or not a cache, a cache without page_tokens, one whose pages
                are evicted in another order than the model needs, or for a model on a GPU a cache
                opened without device=True; or sizes out of range.
            InUse: this process has pinned the pool already; pass `pinned`.
            Detached: the cache is closed.
        """
        if not isinstance(cache, Cache):
            raise ConfigError(f"cache: expected a lightcache.Cache, found {type(cache).__name__}")
        self.cache = cache
        self.pages: ModelPages = describe_for(self.cache, model)
        check_kind(cache, self.pages)
        check_device(cache, self.pages.device)
        self._config = model.config
        self._figures = Counters()
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._tally = NodeTally(cache)
            stack.callback(self._tally.close)
            first = self.pages.first
            if isinstance(first, TokenPages):
                self._pool = pool_of_tokens(self.cache, first, pinned)
            else:
                self._pool = pool_of_states(self.cache, first, model.config, pinned)
            stack.callback(self._pool.close)
            self._watch = ModelWatch(
                model,
                self.cache.index.default_namespace.weights,
                needs_positions=self.pages.needs_positions,
            )
            stack.callback(self._watch.close)
            weakref.finalize(self, self._watch.close)
            self.engine = self._pool.engine
            self.pinned = self._pool.pinned
            """The pool as a GPU sees it; `pinned.wait()` waits for all of it. None on the CPU."""
            self.hybrid: HybridPrefixes | None = None
            """Of a model with windows, chunks or recurrent states: finds, takes and saves what
            positions need."""
            if not self.pages.dense:
                self.hybrid = HybridPrefixes(
                    self._pool,
                    model,
                    self.pages,
                    chunk=chunk,
                    every=every,
                    path_limit=path_limit,
                    figures=self._figures,
                )
            stack.pop_all()

    # ---- one request

    @contextlib.contextmanager
    def prefix(
        self, tokens: Any, *, salt: str | bytes | None = None, namespace: Namespace | None = None
    ) -> Iterator[PrefixCache]:
        """The longest stored prefix of a prompt, as `past_key_values`; the end of the `with` saves
        new pages.

        At least one token is left to compute. Leaving blocks until the new full pages are copied
        and published. Pages that are stored already are not written again, pages that another
        process is writing are left to it, and pages without room are not saved. Leaving by an
        exception saves nothing.

        Args:
            tokens: ids of the prompt: a list, an array or a tensor (also of a device), of shape
                (n,) or (1, n).
            salt: separates chats or adapters, see `Cache.hash_pages`; a tenant is a namespace.
            namespace: see `Cache.namespace`; None: the cache's.

        Pages are found by tokens alone, so the model's passes are checked. Pages are saved only if
        `model` computed them from these tokens, from position 0 on, with unchanged weights, without
        dropout, and without a mask that hid anything.

        Raises:
            ConfigError: several rows, tokens that are not ids, or a model with dropout. The model's
                call also raises it, for inputs other than these tokens, and so does the end of the
                `with`, if this model did not compute the tokens held. Nothing is saved then.
            LayoutMismatch: the weights changed while the connector was open; nothing is saved.
            TransferFailed: a copy failed; on entry, nothing is held.
            LockTimeout, Detached, PermissionDenied: as `Cache.match` and `Cache.reserve`.
        """
        self._check_open()
        ids = token_ids(tokens)
        how = {"salt": b"" if salt is None else salt, "namespace": namespace}
        self._check_use(namespace)
        past = self._found(ids, how)
        past.watch = self._watch
        hit = past.reused
        self._tally.request(len(ids), host=hit, missed="" if hit else self._missed(ids, how))
        self._figures.add(
            requests=1, prompt_tokens=len(ids), host_hits=int(hit > 0), host_tokens=hit
        )
        try:
            yield past
            if past.spoilt is None:  # else it was raised already, and the caller caught it
                past.check_known()
                self._check_use(namespace)
        except BaseException:
            self._figures.add(refused=1)
            raise
        if past.spoilt is None:
            self._save(past, how)
        else:
            self._figures.add(refused=1)

    def stats(self) -> ConnectorStats:
        """Counters of this connector."""
        checkpoints = None if self.hybrid is None else self.hybrid.checkpoints
        return self._figures.snapshot(None if checkpoints is None else checkpoints.stats())

    def _check_use(self, namespace: Namespace | None) -> None:
        """Check that the cache is open, and its weights current."""
        self.cache.index.segment.mark_used()
        space = self.cache.index.default_namespace if namespace is None else namespace
        self._watch.check_weights(space.weights)

    def _found(self, ids: TokenIds, how: dict[str, Any]) -> PrefixCache:
        begun = time.perf_counter_ns()
        keys = self.cache.hash_pages(ids, **how, leave_one=True)
        if self.hybrid is not None:
            return self.hybrid.found(ids, keys, how["namespace"], self._load_all)
        with self.cache.match(keys, namespace=how["namespace"]) as lease:
            self._tally.looked(begun)
            return self._restore(lease, ids)

    def _missed(self, ids: TokenIds, how: dict[str, Any]) -> str:
        first = ids[: self.pages.page_tokens + 1]
        keys = self.cache.hash_pages(first, **how, leave_one=True)
        return self._tally.missed(keys, how["namespace"])

    def prefill(self, past: Any, tokens: Any = None, *, at_most: int | None = None) -> None:
        """For a hybrid model: compute a prompt up to the last position at which a state is saved,
        in passes that end where one is saved. For one with windows or chunks: only name the prompt
        of the next turn. Does nothing for other models.

        States are saved where the prompt diverges from stored keys and values that have no state
        there, and at the last multiple of the grid. At least one token is left for `generate`,
        unless it was computed before. Without this call, only states of generated tokens are saved.
        Blocks.

        Args:
            past: of `prefix`.
            tokens: the whole prompt, if it is longer than the one given to `prefix`: the next turn
                of a conversation in one `past`. It begins with the tokens held.
            at_most: tokens of a forward pass, to bound its memory; None: any number.

        Raises:
            ConfigError: not a cache of `prefix`, or tokens that do not begin with those it holds.
        """
        self._check_open()
        if self.hybrid is not None:
            self.hybrid.prefill(past, tokens, at_most)

    def _save(self, past: PrefixCache, how: dict[str, Any]) -> None:
        self.engine.poll()  # releases the pages pinned for the load
        keys = self.cache.hash_pages(past.tokens, **how)
        if self.pages.full and len(keys) * self.pages.page_tokens > past.reused:
            told = None if how["salt"] else past.tokens
            self._save_pages(past, keys, how["namespace"], told)
        if self.hybrid is not None and isinstance(past, HybridPrefixCache):
            self.hybrid.save(past, keys, how["namespace"])

    def _save_pages(
        self,
        past: PrefixCache,
        keys: Keys,
        namespace: Namespace | None,
        tokens: TokenIds | None,
    ) -> None:
        # Without room, or in a namespace that was cleared meanwhile, pages are not saved: a later
        # miss.
        try:
            # From the first page on: restored pages may have been evicted since, which would leave
            # a gap before the new pages.
            with self.cache.reserve(keys, namespace=namespace, tokens=tokens) as held:
                new, missing, why = len(held.new), len(held.missing), held.why
                present, busy = len(held.present), len(held.busy)
                if new:
                    copy = self.offload(past, held)
                    copy.wait()
                    self._tally.moved("offload", new, copy.nbytes, copy.begun_ns)
        except Abandoned:
            self._figures.add(cleared=1)
            return
        except NoSpace as error:
            new, missing, present, busy, why = 0, len(keys), 0, 0, str(error)
        self._figures.add(saved_pages=new, present_pages=present, busy_pages=busy)
        if missing:
            self._tally.add(no_room_pages=missing)
            self._figures.no_room(self.cache.name, missing, len(keys), why)

    # ---- pages of callers that manage leases and reservations themselves

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
        if load.done() and load.page_count:
            self._tally.moved("load", load.page_count, load.nbytes, load.begun_ns)

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

    # ---- the end

    def close(self) -> None:
        """Wait for copies, publish saved pages, and release the cache, which can then be closed. A
        second call does nothing."""
        if self._closed:
            return
        if self.hybrid is not None:
            self.hybrid.close()
        self._pool.close()
        self._watch.close()
        self._tally.close()
        self._closed = True

    def __enter__(self) -> Connector:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)


@contextlib.contextmanager
def prefix(
    cache: Cache,
    model: Any,
    tokens: Any,
    *,
    salt: str | bytes | None = None,
    namespace: Namespace | None = None,
    pinned: PinnedPages | None = None,
) -> Iterator[PrefixCache]:
    """`Connector.prefix`, with a connector for this call alone. That costs a decoding step, threads
    and, on a GPU without `pinned`, registration of the pool: for many calls make a `Connector`."""
    with Connector(cache, model, pinned=pinned) as connector:
        with connector.prefix(tokens, salt=salt, namespace=namespace) as past:
            yield past


__all__ = [
    "Checkpoint",
    "Connector",
    "ConnectorStats",
    "HybridPrefixCache",
    "ModelPages",
    "PrefixCache",
    "TokenPages",
    "describe",
    "open_cache",
    "prefix",
]

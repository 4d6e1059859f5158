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
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightcache import Cache, Namespace
from lightcache._arguments import Keys
from lightcache.connectors.hybrid import (
    Checkpoint,
    HybridPrefixCache,
    HybridPrefixes,
    check_kind,
    pool_of_states,
    pool_of_tokens,
)
from lightcache.connectors.lease_calls import LeaseCalls
from lightcache.connectors.model_pages import ModelPages, TokenPages, describe, describe_for
from lightcache.connectors.model_watch import ModelWatch
from lightcache.connectors.opening import open_cache
from lightcache.connectors.pooled import check_device
from lightcache.connectors.prefix_cache import (
    ConnectorStats,
    Counters,
    PrefixCache,
    TokenIds,
    token_ids,
)
from lightcache.errors import Abandoned, ConfigError, NoSpace
from lightcache.hybrid.checkpoints import PATH_LIMIT
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages


class Connector(LeaseCalls):
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
        keys = self.cache.hash_pages(ids, **how, leave_one=True)
        if self.hybrid is not None:
            return self.hybrid.found(ids, keys, how["namespace"], self._load_all)
        with self.cache.match(keys, namespace=how["namespace"]) as lease:
            return self._restore(lease, ids)

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
            self._save_pages(past, keys, how["namespace"])
        if self.hybrid is not None and isinstance(past, HybridPrefixCache):
            self.hybrid.save(past, keys, how["namespace"])

    def _save_pages(self, past: PrefixCache, keys: Keys, namespace: Namespace | None) -> None:
        # Without room, or in a namespace that was cleared meanwhile, pages are not saved: a later
        # miss.
        try:
            # From the first page on: restored pages may have been evicted since, which would leave
            # a gap before the new pages.
            with self.cache.reserve(keys, namespace=namespace) as held:
                new, missing, why = len(held.new), len(held.missing), held.why
                present, busy = len(held.present), len(held.busy)
                if new:
                    self.offload(past, held).wait()
        except Abandoned:
            self._figures.add(cleared=1)
            return
        except NoSpace as error:
            new, missing, present, busy, why = 0, len(keys), 0, 0, str(error)
        self._figures.add(saved_pages=new, present_pages=present, busy_pages=busy)
        if missing:
            self._figures.no_room(self.cache.name, missing, len(keys), why)

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

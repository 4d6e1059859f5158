"""Cache: a page index and a host pool, and the keys that go with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightcache._arguments import Keys, Offsets, Pages
from lightcache._wanted import DEFAULT_SECRET, digest_of, secret_of
from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.hashing import KeySpec, PageHasher, Tokens, hash_pages
from lightcache.leases import Lease, LeaseBatch
from lightcache.namespaces import Namespace
from lightcache.opened import OpenedCache
from lightcache.plans import TIMEOUT, Plans
from lightcache.reservations import Reservation, Shard
from lightcache.shm import ClientInfo
from lightcache.snapshot import CheckReport, IndexStats
from lightcache.tickets import ClientId

if TYPE_CHECKING:
    from lightcache.kernels.geometry import PageGeometry
    from lightcache.kernels.memory import HostPages
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.planes import DevicePlanes
    from lightcache.kernels.registration import Driver
    from lightcache.kernels.transfer import Engine


class Cache(OpenedCache):
    """An attach of this process to a cache: `index` says what is where, `pool` has the bytes.

    `create` fails if the name exists, `attach` if it does not or differs, `open` does either. All
    calls of `PageIndex` that an engine needs are here too, and say the same.
    """

    # ---- keys

    def key_spec(
        self, page_tokens: int | None = None, *, namespace: Namespace | None = None
    ) -> KeySpec:
        """What this cache's keys are seeded with, for `hash_pages` and `PageHasher`.

        Raises:
            ConfigError: `page_tokens` neither here nor in the cache, or they differ.
            LayoutMismatch: our secret is not the one the cache was created with.
        """
        config = self.index.segment.config
        tokens = page_tokens if page_tokens is not None else config.get("page_tokens")
        if tokens is None:
            raise ConfigError("page_tokens: say it here, or when the cache is created")
        if config.get("page_tokens") not in (None, tokens):
            raise ConfigError(
                f"page_tokens: the cache has {config['page_tokens']} tokens a page, found {tokens}"
            )
        chosen = namespace or self.index.default_namespace
        weights, tenant = chosen.weights, chosen.tenant
        spec = self._specs.get((tokens, weights, tenant))
        if spec is None:
            spec = KeySpec(
                fingerprint=self.fingerprint,
                page_tokens=tokens,
                secret=self._checked_secret(),
                weights=weights,
                namespace=tenant,
                algorithm=config["algorithm"],
            )
            self._specs[tokens, weights, tenant] = spec
        return spec

    def _checked_secret(self) -> bytes:
        secret = self._secret = secret_of(self._secret)
        if digest_of(secret) != self.index.segment.config["secret"]:
            raise LayoutMismatch(
                f"the cache {self.index.name!r} was created with another secret; give the same "
                f"secret= to every process, or share {DEFAULT_SECRET} among them"
            )
        return secret

    def hash_pages(
        self,
        tokens: Tokens,
        page_tokens: int | None = None,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        namespace: Namespace | None = None,
        leave_one: bool = False,
    ) -> Keys:
        """Keys of all complete pages of a prompt; see `lightcache.hashing.hash_pages`.

        Args:
            leave_one: no key for a page that would leave no token to compute: for matching a
                whole prompt. `match(keys[:matchable_pages(...)])` does the same without hashing
                twice.
        """
        spec = self.key_spec(page_tokens, namespace=namespace)
        return hash_pages(spec, tokens, salt=salt, lora=lora, extra=extra, leave_one=leave_one)

    def hasher(
        self,
        page_tokens: int | None = None,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        namespace: Namespace | None = None,
    ) -> PageHasher:
        """A resumable hasher, for tokens that come one by one."""
        return PageHasher(self.key_spec(page_tokens, namespace=namespace), salt=salt, lora=lora)

    # ---- the index's calls

    def peek(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """See `PageIndex.peek`."""
        return self.index.peek(keys, namespace=namespace)

    def peek_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """See `PageIndex.peek_many`."""
        return self.index.peek_many(keys, offsets, namespace=namespace)

    def match(self, keys: Keys, *, namespace: Namespace | None = None) -> Lease:
        """See `PageIndex.match`."""
        return self.index.match(keys, namespace=namespace)

    def match_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> LeaseBatch:
        """See `PageIndex.match_many`."""
        return self.index.match_many(keys, offsets, namespace=namespace)

    def plan(
        self,
        request: Hashable,
        keys: Keys,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
    ) -> int:
        """See `PageIndex.plan`."""
        return self.index.plan(request, keys, limit=limit, namespace=namespace, timeout=timeout)

    def plan_many(
        self,
        ids: Sequence[Hashable],
        keys: Keys,
        offsets: Offsets,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
    ) -> Pages:
        """See `PageIndex.plan_many`."""
        return self.index.plan_many(
            ids, keys, offsets, limit=limit, namespace=namespace, timeout=timeout
        )

    def take(self, request: Hashable) -> Lease:
        """See `PageIndex.take`."""
        return self.index.take(request)

    def cancel(self, request: Hashable) -> bool:
        """See `PageIndex.cancel`."""
        return self.index.cancel(request)

    @property
    def plans(self) -> Plans:
        """See `PageIndex.plans`."""
        return self.index.plans

    def reserve(
        self,
        keys: Keys,
        start: int = 0,
        *,
        shards: int = 1,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> Reservation:
        """See `PageIndex.reserve`."""
        return self.index.reserve(keys, start, shards=shards, namespace=namespace, timeout=timeout)

    def wait(
        self,
        keys: Keys,
        *,
        timeout: float | None = None,
        namespace: Namespace | None = None,
    ) -> int:
        """See `PageIndex.wait`."""
        return self.index.wait(keys, timeout=timeout, namespace=namespace)

    def adopt(
        self, ticket: bytes, *, shard: int | None = None, timeout: float | None = None
    ) -> Lease | Shard:
        """See `PageIndex.adopt`."""
        return self.index.adopt(ticket, shard=shard, timeout=timeout)

    def done(self, ticket: bytes, ok: bool = True) -> None:
        """See `PageIndex.done`."""
        self.index.done(ticket, ok)

    def evict(self, n: int) -> int:
        """See `PageIndex.evict`."""
        return self.index.evict(n)

    def namespace(
        self,
        weights: str = "",
        tenant: str = "",
        *,
        quota: int | None = None,
        minimum: int | None = None,
    ) -> Namespace:
        """See `PageIndex.namespace`."""
        return self.index.namespace(weights, tenant, quota=quota, minimum=minimum)

    def use(self, namespace: Namespace) -> None:
        """See `PageIndex.use`; keys are then seeded with it, too."""
        self.index.use(namespace)

    def clear(self, namespace: Namespace | None = None) -> None:
        """See `PageIndex.clear`."""
        self.index.clear(namespace)

    def reap(self) -> int:
        """See `PageIndex.reap`."""
        return self.index.reap()

    def check(self) -> CheckReport:
        """See `PageIndex.check`."""
        return self.index.check()

    def stats(self) -> IndexStats:
        """See `PageIndex.stats`."""
        return self.index.stats()

    def clients(self) -> list[ClientInfo]:
        """See `PageIndex.clients`."""
        return self.index.clients()

    @property
    def client_id(self) -> ClientId:
        """See `PageIndex.client_id`."""
        return self.index.client_id

    @property
    def name(self) -> str:
        """Name of the cache."""
        return self.index.name

    @property
    def pages(self) -> int:
        """Capacity in pages."""
        return self.index.pages

    # ---- devices

    def pin(
        self,
        *,
        device: str | int | None = None,
        threads: int = 4,
        chunk_bytes: int | None = None,
        grow_threads: int = 0,
        progress: Callable[[int, int], None] | None = None,
        driver: Driver | None = None,
    ) -> PinnedPages:
        """Register the pool with the driver of a GPU, in the background: its pages can then be
        copied without the processor, each as soon as its piece is registered. Every process pins
        for itself. Returns at once, loads the driver; `close` undoes it.

        Args:
            device: "cuda:0", or its number; None: the current one. All devices may use it.
            threads, chunk_bytes: see `PinnedPages`.
            grow_threads: that also give memory to the pool meanwhile, faster than the one thread
                that every cache has; 0: leave it to that.
            progress: called with (pages registered, pages).
            driver: instead of the device's; for tests.

        Raises:
            ConfigError: no such device, or counts out of range.
            InUse: it is pinned already by this object.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        self.index.segment.check_usable()
        return self._pin.make(device, driver, threads, chunk_bytes, grow_threads, progress)

    # ---- transfers

    def engine(
        self,
        geometry: PageGeometry,
        planes: DevicePlanes,
        *,
        memory: HostPages | None = None,
        **how: Any,
    ) -> Engine:
        """What moves pages of this cache from and to one rank's planes: a `HostEngine` for planes
        in CPU memory, else a `TransferEngine`. Close it before the cache.

        Args:
            geometry: of the pages. The cache must have been created for it: with
                page_bytes=geometry.page_bytes, and a fingerprint that ends in
                geometry.fingerprint(), behind a space, or has it between spaces.
            memory: None: the pool as it is, for planes in CPU memory. A device needs the pool
                registered with its driver: the `PinnedPages` that `pin` returns, one for all
                engines of this process.
            how: for the engine: share, threads, rate and so on.

        Raises:
            LayoutMismatch: the cache was created for other pages.
            ConfigError: see the engines.
        """
        from lightcache._engines import engine_of

        return engine_of(self, geometry, planes, memory, how)


__all__ = ["Cache"]

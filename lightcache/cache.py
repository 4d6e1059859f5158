"""Cache: a page index and a host pool, and the keys that go with them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets, Pages
from lightcache.errors import CacheCorrupted, ConfigError, LayoutMismatch
from lightcache.hashing import (
    KeySpec,
    PageHasher,
    Tokens,
    hash_pages,
    load_or_create_secret,
)
from lightcache.leases import Lease, LeaseBatch
from lightcache.namespaces import Namespace
from lightcache.page_index import MAX_PAGES, PageIndex
from lightcache.pinning import PoolPin
from lightcache.placement import Numa, check_numa
from lightcache.pool import CHUNK_BYTES, Grower, HostPool
from lightcache.pool_object import make_object
from lightcache.reservations import Reservation, Shard
from lightcache.shm import ClientInfo, Segment
from lightcache.shm.folders import FOLDER_ITEM, checked_path, path_in
from lightcache.sizes import parse_size
from lightcache.snapshot import CheckReport, IndexStats
from lightcache.tickets import ClientId

if TYPE_CHECKING:
    from lightcache.kernels.geometry import PageGeometry
    from lightcache.kernels.memory import HostPages
    from lightcache.kernels.pinned import PinnedPages
    from lightcache.kernels.planes import DevicePlanes
    from lightcache.kernels.registration import Driver
    from lightcache.kernels.transfer import Engine

DEFAULT_SECRET = Path("~/.local/share/lightcache/secret")
_MAX_PAGE = 1 << 40


class Cache:
    """An attach of this process to a cache: `index` says what is where, `pool` has the bytes.

    `create` fails if the name exists, `attach` if it does not or differs, `open` does either. All
    calls of `PageIndex` that an engine needs are here too, and say the same.
    """

    def __init__(
        self,
        index: PageIndex,
        *,
        secret: bytes | None,
        huge_pages: bool = False,
        numa: Numa = None,
        grow: bool = True,
    ) -> None:
        """For `create`, `attach` and `open`."""
        config = index.segment.config
        if "page_bytes" not in config:
            raise ConfigError(
                f"{index.name!r} is an index without a host pool; attach with PageIndex.attach"
            )
        _check_config(index.name, config)
        self.index = index
        self.page_bytes: int = config["page_bytes"]
        self.fingerprint: str = config["fingerprint"]
        self._secret = secret
        self._specs: dict[tuple[int, str, str], KeySpec] = {}
        self.pool = HostPool(index, self.page_bytes, huge_pages=huge_pages, numa=numa)
        self._pin = PoolPin(self.pool)
        self._grower: Grower | None = None
        if grow and not index.readonly and self.pool.grown < self.pool.pages:
            self._grower = Grower(self.pool)

    # ---- making one

    @classmethod
    def create(
        cls,
        name: str,
        *,
        pages: int | None = None,
        size: int | str | None = None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None = None,
        algorithm: str = "xxh3_128",
        secret: bytes | None = None,
        lifetime: str = "attached",
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        pool_path: str | os.PathLike[str] | None = None,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> Cache:
        """Create a cache that does not exist yet.

        Args:
            name: ASCII letters, digits and `._-`, at most 180.
            pages: capacity in pages; or
            size: in bytes, or as "64GiB".
            page_bytes: of one page, in bytes or as "8MiB".
            fingerprint: model, KV dtype and geometry: whatever makes pages of one process
                useless to another must be in it.
            page_tokens: tokens of a page; None: said in each `hash_pages`.
            algorithm: of the keys: "xxh3_128", "blake2b" or "sha256"; see docs/guides/keys.md.
            secret: of the keys, at least 16 bytes, the same in every process; None: the file
                ~/.local/share/lightcache/secret, made if it is not there.
            huge_pages, numa: see `HostPool`.
            pool_path: folder on a tmpfs or hugetlbfs to have the pool in (huge pages, or a size
                limit of its own); None: /dev/shm. Whoever attaches finds it by itself and must
                see the same folder there.
            grow: let a thread give memory to the rest of the pool; else call `pool.prefault`.
            Otherwise as `PageIndex.create`.

        Raises:
            ConfigError, InUse (it exists), NoSpace (with both figures), NotReady,
            PermissionDenied.
        """
        check_numa(numa)
        made = _Wanted(
            pages, size, page_bytes, fingerprint, page_tokens, algorithm, _secret(secret), pool_path
        )
        made.numa = numa
        index = PageIndex.create(
            name,
            pages=made.pages,
            config=made.config,
            grown=made.first,
            lifetime=lifetime,
            group=group,
            role=role,
            device=device,
            initialise=made.initialise,
            lock_timeout=lock_timeout,
            timeout=timeout,
        )
        return cls._over(index, made.secret, huge_pages, numa, grow)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        readonly: bool = False,
        fingerprint: str | None = None,
        secret: bytes | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> Cache:
        """Attach to a cache that exists.

        Args:
            readonly: for routers and tools: `peek` and `hash_pages`; writes nothing at all.
            fingerprint: what it must be for; None: anything.
            Otherwise as `create`.

        Raises:
            NotReady: there is none, or its creator did not finish in time.
            LayoutMismatch: another version or fingerprint.
            InUse: all 63 slots are taken. ConfigError, CacheCorrupted, PermissionDenied.
        """
        index = PageIndex.attach(
            name,
            readonly=readonly,
            group=group,
            role=role,
            device=device,
            lock_timeout=lock_timeout,
            timeout=timeout,
        )
        try:
            found = index.segment.config.get("fingerprint")
            if fingerprint is not None and found != fingerprint:
                raise LayoutMismatch(
                    f"the cache {name!r} is for {found!r}, expected {fingerprint!r}; attach to "
                    "another one, or open your own"
                )
        except BaseException:
            index.close()
            raise
        return cls._over(index, secret, huge_pages, numa, grow)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        pages: int | None = None,
        size: int | str | None = None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None = None,
        algorithm: str = "xxh3_128",
        secret: bytes | None = None,
        lifetime: str | None = None,
        group: str | int | None = None,
        replace: bool = False,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        pool_path: str | os.PathLike[str] | None = None,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> Cache:
        """Attach to a cache with exactly this configuration, or create it. What killed processes
        left goes on warm.

        Args:
            lifetime: None: whatever it has, "attached" for a new one.
            replace: remove one that differs, if nobody lives in it.
            Otherwise as `create`.

        Raises:
            LayoutMismatch: it differs and `replace` is False; names each item.
            InUse: it differs, `replace` is True, and somebody lives in it.
            Otherwise as `create` and `attach`.
        """
        check_numa(numa)
        made = _Wanted(
            pages, size, page_bytes, fingerprint, page_tokens, algorithm, _secret(secret), pool_path
        )
        made.numa = numa
        index = PageIndex.open(
            name,
            pages=made.pages,
            config=made.config,
            grown=made.first,
            lifetime=lifetime,
            group=group,
            replace=replace,
            role=role,
            device=device,
            initialise=made.initialise,
            lock_timeout=lock_timeout,
            timeout=timeout,
        )
        return cls._over(index, made.secret, huge_pages, numa, grow)

    @classmethod
    def _over(
        cls, index: PageIndex, secret: bytes | None, huge: bool, numa: Numa, grow: bool
    ) -> Cache:
        try:
            cache = cls(index, secret=secret, huge_pages=huge, numa=numa, grow=grow)
        except BaseException:
            index.close()
            raise
        if not index.readonly:
            index._need_memory = cache._need_memory  # type: ignore[method-assign]
        return cache

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
        secret = self._secret = _secret(self._secret)
        if _secret_check(secret) != self.index.segment.config["secret"]:
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
        self, weights: str = "", tenant: str = "", *, quota: int | None = None
    ) -> Namespace:
        """See `PageIndex.namespace`."""
        return self.index.namespace(weights, tenant, quota=quota)

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

    # ---- the end

    def _need_memory(self, wanted: int) -> None:
        """Reserve found pages without memory: grow right now, by a chunk at least."""
        self.pool.grow(max(wanted, CHUNK_BYTES // self.page_bytes))

    def close(self) -> None:
        """Leave; see `PageIndex.close`. Stops growing the pool; others carry on. What `pin` made is
        unregistered first: close engines before, and drop arrays and tensors made of the pool.

        Raises:
            InUse: views of the pool live, or engines use its pinned pages. Nothing was changed.
                For views of the array of the pinned pages themselves: those pages were closed.
            Detached: in a forked child.
        """
        if not self.index._unusable():
            self._pin.close()
            self.pool.check_closable()
            if self._grower:
                self._grower.stop()
                self._grower = None
        self.index.close()
        self.pool.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.index._unusable():
            self.close()

    def __repr__(self) -> str:
        return f"<Cache {self.index.name!r} {self.index.pages} pages of {self.page_bytes} bytes>"


class _Wanted:
    """The arguments of create and open, checked, as the index and the pool take them."""

    def __init__(
        self,
        pages: int | None,
        size: int | str | None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None,
        algorithm: str,
        secret: bytes,
        pool_path: str | os.PathLike[str] | None,
    ) -> None:
        each = parse_size(page_bytes, "page_bytes")
        if each > _MAX_PAGE:
            raise ConfigError(f"page_bytes: {each} is more than a page may have ({_MAX_PAGE})")
        if (pages is None) == (size is None):
            raise ConfigError("give the capacity once: pages= or size=")
        if size is not None:
            pages = parse_size(size) // each
            if pages == 0:
                raise ConfigError(f"size: {size!r} is less than one page of {each} bytes")
        self.pages = _arguments.count(pages, "pages", 1, MAX_PAGES)
        self.secret = secret
        self.numa: Numa = None
        folder = None if pool_path is None else checked_path(pool_path)
        self.first = min(self.pages, max(1, CHUNK_BYTES // each))
        KeySpec(  # says what is wrong with the rest
            fingerprint=fingerprint,
            page_tokens=1 if page_tokens is None else page_tokens,
            secret=secret,
            algorithm=algorithm,  # type: ignore[arg-type]
        )
        self.config: dict[str, Any] = {
            "page_bytes": each,
            "page_tokens": page_tokens,
            "fingerprint": fingerprint,
            "algorithm": algorithm,
            "secret": _secret_check(secret),
            **({} if folder is None else {FOLDER_ITEM: folder}),
        }

    def initialise(self, segment: Segment) -> None:
        each = int(self.config["page_bytes"])
        make_object(segment, self.pages * each, self.first * each, self.numa)


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """What `create` has written is of these types; whoever may write the segment may change it."""
    each, tokens = config["page_bytes"], config.get("page_tokens")
    if FOLDER_ITEM in config and path_in(dict(config)) is None:
        raise CacheCorrupted(
            f"the cache {name!r} has the pool's folder {config[FOLDER_ITEM]!r} in its header; "
            "remove it with `lightcache rm`"
        )
    texts = [config.get(item) for item in ("fingerprint", "algorithm", "secret")]
    if (
        type(each) is not int
        or not 1 <= each <= _MAX_PAGE
        or not (tokens is None or type(tokens) is int)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise CacheCorrupted(
            f"the cache {name!r} has page_bytes {each!r}, page_tokens {tokens!r} and (fingerprint, "
            f"algorithm, secret) {texts!r} in its header; remove it with `lightcache rm`"
        )


def _secret(given: bytes | None) -> bytes:
    return given if given is not None else load_or_create_secret(DEFAULT_SECRET.expanduser())


def _secret_check(secret: bytes) -> str:
    """Tells two secrets apart, and nothing about them: 32 bits of a keyed digest."""
    if not isinstance(secret, bytes):
        raise ConfigError(f"secret: expected bytes, found {type(secret).__name__}")
    return hashlib.blake2b(secret, digest_size=4, person=b"lightcache check").hexdigest()


__all__ = ["Cache"]

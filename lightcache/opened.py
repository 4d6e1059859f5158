"""Opening a cache: its index and its pool together, and leaving both again."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TypeVar

from lightcache._wanted import Wanted, check_config, secret_of
from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.hashing import KeySpec
from lightcache.page_index import PageIndex
from lightcache.pinning import PoolPin
from lightcache.placement import Numa, check_numa
from lightcache.pool import CHUNK_BYTES, Grower, HostPool

T = TypeVar("T", bound="OpenedCache")


class OpenedCache:
    """An attach to a cache without its calls: see `Cache`."""

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
        check_config(index.name, config)
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
        cls: type[T],
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
        flat: bool = False,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
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
            flat: for pages that are worth something without those before them, as checkpoints of
                recurrent state are; see `PageIndex.create`.
            grow: let a thread give memory to the rest of the pool; else call `pool.prefault`.
            Otherwise as `PageIndex.create`.

        Raises:
            ConfigError, InUse (it exists), NoSpace (with both figures), NotReady,
            PermissionDenied.
        """
        check_numa(numa)
        made = Wanted(
            pages,
            size,
            page_bytes,
            fingerprint,
            page_tokens,
            algorithm,
            secret_of(secret),
            pool_path,
        )
        made.numa = numa
        index = PageIndex.create(
            name,
            pages=made.pages,
            config=made.config,
            grown=made.first,
            flat=flat,
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
        cls: type[T],
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
        flat: bool | None = None,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to a cache that exists.

        Args:
            readonly: for routers and tools: `peek` and `hash_pages`; writes nothing at all.
            fingerprint: what it must be for; None: anything.
            flat: whether it must be flat; None: either.
            Otherwise as `create`.

        Raises:
            NotReady: there is none, or its creator did not finish in time.
            LayoutMismatch: another version or fingerprint, or it is flat or is not.
            InUse: all 63 slots are taken. ConfigError, CacheCorrupted, PermissionDenied.
        """
        index = PageIndex.attach(
            name,
            readonly=readonly,
            flat=flat,
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
        cls: type[T],
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
        flat: bool = False,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
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
        made = Wanted(
            pages,
            size,
            page_bytes,
            fingerprint,
            page_tokens,
            algorithm,
            secret_of(secret),
            pool_path,
        )
        made.numa = numa
        index = PageIndex.open(
            name,
            pages=made.pages,
            config=made.config,
            grown=made.first,
            flat=flat,
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
        cls: type[T], index: PageIndex, secret: bytes | None, huge: bool, numa: Numa, grow: bool
    ) -> T:
        try:
            cache = cls(index, secret=secret, huge_pages=huge, numa=numa, grow=grow)
        except BaseException:
            index.close()
            raise
        if not index.readonly:
            index._need_memory = cache._need_memory  # type: ignore[method-assign]
        return cache

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

    def __enter__(self: T) -> T:
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


__all__ = ["OpenedCache"]

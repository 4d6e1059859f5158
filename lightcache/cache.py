"""Cache: a page index, its host pool, and the hashing of its keys."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lightcache import _arguments
from lightcache._arguments import Keys, Offsets, Pages, parse_size
from lightcache._sharing import Opening, share
from lightcache.engine_keys import EngineKeys
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    InUse,
    LayoutMismatch,
    LightcacheError,
    NotReady,
    OutOfPages,
)
from lightcache.hashing import (
    SECRET_BYTES,
    KeySpec,
    PageHasher,
    Tokens,
    hash_pages,
    load_or_create_secret,
)
from lightcache.kernels.geometry import PageGeometry, Rule
from lightcache.kernels.host_engine import HostEngine
from lightcache.kernels.moves import Engine
from lightcache.kernels.pinned import HostPages
from lightcache.kernels.planes import DevicePlanes
from lightcache.layout import Hint, default_eviction
from lightcache.leases import ClientId, Lease, LeaseBatch
from lightcache.namespaces import NO_CHANGE, Namespace
from lightcache.page_index import MAX_PAGES, PageIndex, format_hash
from lightcache.plans import TIMEOUT, Plans
from lightcache.pool import (
    CHUNK_BYTES,
    MAX_THREADS,
    Bytes,
    Grower,
    HostPool,
    Numa,
    check_numa,
    check_object,
    lacking_room,
    make_object,
)
from lightcache.prompt import TokenIds
from lightcache.reservations import Reservation, ReservationShard
from lightcache.runs import NAMES_ITEM, PLAIN, Run, checked_names, names_of
from lightcache.shm import Segment
from lightcache.shm.clients import ClientInfo
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave, require
from lightcache.shm.folders import FOLDER_ITEM, checked_path, path_in
from lightcache.shm.listing import of_family
from lightcache.shm.memory import Coming
from lightcache.shm.wanted import FAMILY_ITEM
from lightcache.snapshot import CheckReport, IndexStats
from lightcache.token_records import TOKENS_ITEM, TokenRecords, make_token_records

if TYPE_CHECKING:
    from lightcache.kernels.pinned import Driver, PinnedPages


# ---- Arguments, configuration and secret of a cache.

DEFAULT_SECRET = Path("~/.local/share/lightcache/secret")
SECRET_VARIABLE = "LIGHTCACHE_SECRET_FILE"
"""Environment variable that names the file of the secret."""
ALGORITHM = "xxh3_128"
_MAX_PAGE = 1 << 40
MODEL_ITEM = "model"
"""Item of a configuration: the model of a cache with a name of its own; others have a family."""
_MAX_MODEL = 100  # characters of a model in a cache's name; the rest is for what engines append


def cache_name(model: str, fingerprint: str) -> str:
    """Return the default name of a model's cache: the model, and a digest of what makes its pages
    useless to others, `<model>-<8 hex digits>`. So releases and configurations whose pages or
    segments differ have caches of their own, side by side; see docs/guides/operating.md.

    Args:
        model: such as "meta-llama/Llama-3-8B@5206a32". The name has what is before an "@";
            characters that no name may have become "-".
        fingerprint: as for `Cache.open`.

    Raises:
        ConfigError: not text, or nothing of the model can be in a name.
    """
    given: object = fingerprint
    if not isinstance(given, str) or not given:
        raise ConfigError(f"fingerprint: expected that of the model, found {fingerprint!r}")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", family_name(model)).lstrip("._-")[:_MAX_MODEL]
    if not safe:
        raise ConfigError(f"model: expected a letter or digit in it, found {model!r}")
    facts = f"{format_hash():x} {model} {fingerprint}".encode()
    digest = hashlib.blake2b(facts, digest_size=4, person=b"lightcache name").hexdigest()
    return f"{safe}-{digest}"


def family_name(model: str) -> str:
    """The family of a model's default caches: the model without its revision, the part from an "@"
    on.

    Raises:
        ConfigError: no text, or nothing before an "@".
    """
    given: object = model
    if not isinstance(given, str) or not given.partition("@")[0]:
        raise ConfigError(f'model: expected a name, such as "llama-3-8b@5206a32", found {model!r}')
    return model.partition("@")[0]


def model_in(config: Mapping[str, Any]) -> str:
    """The model that an index's configuration names, without its revision; empty: none."""
    model = config.get(FAMILY_ITEM) or config.get(MODEL_ITEM)
    return model if isinstance(model, str) else ""


def _name_of(name: str | None, model: str | None, fingerprint: str) -> str:
    """The name that was given; None: the model's default."""
    if name is not None:
        return name
    if model is None:
        raise ConfigError(
            "name: expected one, or model= for the default name of a model's cache; found neither"
        )
    return cache_name(model, fingerprint)


def _cache_of(model: str) -> str:
    """The name of the only default cache of a model, for who does not know its fingerprint."""
    found = [
        info.name
        for info in of_family(family_name(model))
        if info.ready and not info.retired and info.problem is None
    ]
    if not found:
        raise NotReady(f"there is no cache of the model {model!r}; `lightcache ls` lists all")
    if len(found) > 1:
        raise ConfigError(
            f"model: expected one cache of {model!r}, found {', '.join(found)}; give the name, or "
            "the fingerprint as well"
        )
    return found[0]


class CacheSpec:
    """The arguments of `create` and `open`, checked, in the form that the index and the pool
    take."""

    def __init__(
        self,
        name: str | None,
        model: str | None,
        pages: int | None,
        size: int | str | None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None,
        algorithm: str | None,
        secret: SecretSource,
        pool_path: str | os.PathLike[str] | None,
        numa: Numa,
        kv_groups: Sequence[str] | None,
        independent: bool | None,
        eviction: str | None,
        token_ids: bool | None,
        minimums: Mapping[str, int | str] | None = None,
    ) -> None:
        """The secret is read, and its file created if needed, after all checks."""
        check_numa(numa)
        self.minimums = minimums
        if token_ids and page_tokens is None:
            raise ConfigError("token_ids: records of token ids need page_tokens; give both")
        self.token_ids = bool(token_ids)
        self.page_bytes = parse_size(page_bytes, "page_bytes")
        if self.page_bytes > _MAX_PAGE:
            raise ConfigError(
                f"page_bytes: {self.page_bytes} is more than a page may have ({_MAX_PAGE})"
            )
        self.pages = self._capacity(pages, size)
        self.numa: Numa = numa
        folder = None if pool_path is None else checked_path(pool_path)
        self.first = min(self.pages, max(1, CHUNK_BYTES // self.page_bytes))
        KeySpec(  # checks the other arguments
            fingerprint=fingerprint,
            page_tokens=1 if page_tokens is None else page_tokens,
            secret=bytes(SECRET_BYTES) if secret.given is None else secret.given,
            algorithm=algorithm or ALGORITHM,  # type: ignore[arg-type]
        )
        self.name = _name_of(name, model, fingerprint)
        family = family_name(model) if name is None and model else None
        self.independent = bool(independent)
        self.eviction = eviction
        self.source, self.secret = secret, secret.read()
        self.config: dict[str, Any] = {
            "page_bytes": self.page_bytes,
            "page_tokens": page_tokens,
            "fingerprint": fingerprint,
            "algorithm": algorithm or ALGORITHM,
            "secret": digest_of(self.secret),
            **({} if folder is None else {FOLDER_ITEM: folder}),
            **({} if kv_groups is None else {NAMES_ITEM: checked_names(kv_groups)}),
            **({} if family is None else {FAMILY_ITEM: family}),
            **({} if family or not model else {MODEL_ITEM: family_name(model)}),
            **({TOKENS_ITEM: True} if self.token_ids else {}),
        }
        given = {
            "page_tokens": page_tokens,
            "algorithm": algorithm,
            FOLDER_ITEM: pool_path,
            NAMES_ITEM: kv_groups,
            "independent": independent,
            "eviction": eviction,
            TOKENS_ITEM: token_ids,
        }
        self.named = {"page_bytes", "fingerprint", "secret", "pages"}
        """What `open` compares with an existing cache: the options that were given. Pages and order
        say the bytes."""
        self.named |= {item for item, value in given.items() if value is not None}
        if family is not None:
            self.named -= {"pages", "eviction", TOKENS_ITEM}

    def _capacity(self, pages: int | None, size: int | str | None) -> int:
        if (pages is None) == (size is None):
            raise ConfigError("give the capacity once: pages= or size=")
        if size is not None:
            pages = parse_size(size) // self.page_bytes
            if pages == 0:
                raise ConfigError(
                    f"size: {size!r} is less than one page of {self.page_bytes} bytes"
                )
        return _arguments.count(pages, "pages", 1, MAX_PAGES)

    def index_arguments(self) -> dict[str, Any]:
        """Arguments for `PageIndex.create` and `PageIndex.open`."""
        return {
            "pages": self.pages,
            "independent": self.independent,
            "eviction": self.order,
            "config": self.config,
            "grown": self.first,
            "initialise": self.initialise,
        }

    def expected(self) -> dict[str, Any]:
        """The configuration of its index."""
        own: dict[str, Any] = {"independent": True} if self.independent else {}
        return {**self.config, "pages": self.pages, **own, "eviction": self.order}

    @property
    def order(self) -> str:
        """Of eviction, of a new cache."""
        if self.eviction is not None:
            return self.eviction
        groups = len(self.config.get(NAMES_ITEM, ()))
        return default_eviction(independent=self.independent, groups=groups)

    def initialise(self, segment: Segment) -> None:
        """Make the pool, unless its minimums cannot be: then no cache is made; and the token
        records.

        Raises:
            ConfigError: see `Cache.set_minimums`.
        """
        self._check_minimums()
        make_object(segment, *self._lengths(), self.numa)
        if self.token_ids:
            make_token_records(segment, self.pages, self.config["page_tokens"])

    def check_new(self, freed: Coming, index_bytes: int) -> None:
        """What `initialise` will refuse, before a cache is removed to make room for this one.

        Args:
            freed: what comes free by that.
            index_bytes: what the index then takes.

        Raises:
            As `initialise`.
        """
        self._check_minimums()
        sizes = (*self._lengths(), index_bytes)
        check_object(self.name, self.config, sizes, self.numa, freed)

    def _lengths(self) -> tuple[int, int]:
        """Of the pool, and of what has memory from the start."""
        return self.pages * self.page_bytes, self.first * self.page_bytes

    def _check_minimums(self) -> None:
        if self.minimums is not None:
            names = names_of(self.config)
            wanted = sum(minimum_pages(self.name, self.minimums, names, self.page_bytes).values())
            if wanted > self.pages:
                raise ConfigError(
                    f"minimums: {self.name!r}: expected at most its {self.pages} pages in all, "
                    f"found {wanted}; lower one of them, or give a larger size"
                )


def minimum_pages(
    name: str, minimums: Mapping[str, int | str], names: list[str], page_bytes: int
) -> dict[str, int]:
    """The minimums of a cache in pages; more than any pool has, of too many bytes.

    Args:
        names: its groups.

    Raises:
        ConfigError: no sizes by name, or a group that there is not.
    """
    given: object = minimums
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'minimums: expected sizes by group, such as {{"kv": "8GiB"}}, found {given!r}'
        )
    if unknown := sorted(minimums.keys() - set(names), key=str):
        expected = f"groups among {names}" if names else "none, since it has one group"
        raise ConfigError(f"minimums: {name!r}: expected {expected}, found {unknown}")
    return {group: pages_for(minimum, page_bytes) for group, minimum in minimums.items()}


def pages_for(minimum: int | str, page_bytes: int) -> int:
    """Pages that hold so many bytes; more than any pool has, of too many."""
    pages = -(-parse_size(minimum, "minimum", zero=True) // page_bytes)
    return min(pages, NO_CHANGE - 1)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Check the types of the configuration that `create` wrote: other writers may have changed
    it."""
    page_bytes, tokens = config["page_bytes"], config.get("page_tokens")
    if FOLDER_ITEM in config and path_in(dict(config)) is None:
        raise CacheCorrupted(
            f"the cache {name!r} has the pool's folder {config[FOLDER_ITEM]!r} in its header; "
            f"remove it with `lightcache rm {name}`"
        )
    texts = [config.get(item) for item in ("fingerprint", "algorithm", "secret")]
    if (
        type(page_bytes) is not int
        or not 1 <= page_bytes <= _MAX_PAGE
        or not (tokens is None or type(tokens) is int)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise CacheCorrupted(
            f"the cache {name!r} has page_bytes {page_bytes!r}, page_tokens {tokens!r} and "
            f"(fingerprint, algorithm, secret) {texts!r} in its header; remove it with "
            f"`lightcache rm {name}`"
        )


def secret_path(secret_file: str | os.PathLike[str] | None) -> Path:
    """The file of the secret: the given one, that of the environment variable, or the default. A
    link is followed if it was named, as an orchestrator mounts secrets as links."""
    given = secret_file or os.environ.get(SECRET_VARIABLE)
    return Path(given).expanduser().resolve() if given else DEFAULT_SECRET.expanduser()


@dataclass(frozen=True)
class SecretSource:
    """Where a process has its secret from.

    Raises:
        ConfigError: two sources were given.
    """

    given: bytes | None = field(default=None, repr=False)
    file: str | os.PathLike[str] | None = None
    """Without `given`; None: see `secret_path`."""

    def __post_init__(self) -> None:
        if self.given is not None and self.file is not None:
            raise ConfigError("give the secret once: secret= or secret_file=")

    def read(self) -> bytes:
        """The secret. Its file is created if it is missing."""
        return load_or_create_secret(secret_path(self.file)) if self.given is None else self.given

    @property
    def differs(self) -> str:
        """What to do if it is not the secret of the cache's creator."""
        origin = "secret=" if self.given is not None else f"the file {secret_path(self.file)}"
        return (
            "The secrets of its creator and of this process differ; that of this process is from "
            f"{origin}: give all the same, by secret=, secret_file= or {SECRET_VARIABLE} (each "
            "container has a file of its own unless one is mounted into all)"
        )


def digest_of(secret: bytes) -> str:
    """Return 32 bits of a keyed digest: tells two secrets apart and reveals nothing about them."""
    if not isinstance(secret, bytes):
        raise ConfigError(f"secret: expected bytes, found {type(secret).__name__}")
    return hashlib.blake2b(secret, digest_size=4, person=b"lightcache check").hexdigest()


# ---- The pool of a cache, pinned for a GPU: once in a process, until the cache closes.


class PoolPin:
    """The pinned memory that `Cache.pin` made, if any."""

    def __init__(self, pool: HostPool) -> None:
        """Pins nothing and loads no driver."""
        self._pool = pool
        self._pinned: PinnedPages | None = None
        self._lock = threading.Lock()
        self.lent: object = None
        """The token under which the pool counts the pinned memory; see `HostPool.lend`."""

    def make(
        self,
        device: str | int | None,
        driver: Driver | None,
        threads: int,
        chunk_bytes: int | None,
        grow_threads: int,
        progress: Callable[[int, int], None] | None,
        shared: bool,
    ) -> PinnedPages:
        """See `Cache.pin`. `shared`: return what another handle has pinned."""
        from lightcache.kernels.pinned import CHUNK_BYTES as PIECE_BYTES
        from lightcache.kernels.pinned import PinnedPages

        _arguments.count(grow_threads, "grow_threads", 0, MAX_THREADS)
        if self._pool.readonly:
            check(Code.READONLY, "pin the pool")
        with self._lock:
            if self._pinned is not None and not self._pinned.closed:
                if shared:
                    return self._pinned
                raise InUse(
                    "pin the pool: it is pinned already in this process; use that, or close it"
                )
            self.lent = object()
            self._pinned = PinnedPages(
                self._pool.lend(self.lent),
                grown=lambda: self._pool.grown,
                grow=(lambda: self._grow(grow_threads)) if grow_threads else None,
                device=device,
                driver=driver,
                threads=threads,
                chunk_bytes=PIECE_BYTES if chunk_bytes is None else chunk_bytes,
                progress=progress,
            )
            return self._pinned

    def _grow(self, threads: int) -> int:
        return self._pool.grow(
            max(1, threads * CHUNK_BYTES // self._pool.page_bytes), threads=threads
        )

    def close(self) -> None:
        """Unregister the pinned memory.

        Raises:
            InUse: transfer engines use it, or other views of the pool exist; nothing was changed.
        """
        self._pool.check_closable(besides=self.lent)
        if self._pinned is not None:
            self._pinned.close()


def _verify(
    config: Mapping[str, Any],
    named: Collection[str],
    group: str | int | None,
    lifetime: str | None,
    source: SecretSource,
    cache: Cache,
) -> None:
    """Compare an open cache with the named items of a configuration, as attaching to it does."""
    name, actual = cache.name, cache.index.segment.lifetime.name.lower()
    if lifetime not in (None, actual):
        raise LayoutMismatch(
            f"the cache {name!r}: lifetime: expected {lifetime}, found {actual}; use what it was "
            "created with"
        )
    with _secret_named(source):
        PageIndex.attach(name, readonly=True, config=config, named=named, group=group).close()


@contextlib.contextmanager
def _secret_named(source: SecretSource) -> Iterator[None]:
    """Say of a mismatch in the secret, of which only digests are shown, what it is."""
    try:
        yield
    except LayoutMismatch as error:
        if "secret: expected" not in str(error):
            raise
        raise LayoutMismatch(f"{error}. {source.differs}") from None


# ---- Shared by the classes below.

T = TypeVar("T", bound="Cache")
_log = logging.getLogger("lightcache.pool")


def _with_minimums(cache: T, minimums: Mapping[str, int | str] | None) -> T:
    """The cache, once it has these; closes it if it cannot."""
    try:
        if minimums is not None:
            cache.set_minimums(minimums)
    except BaseException:
        cache.close()
        raise
    return cache


def _token_records(index: PageIndex) -> TokenRecords | None:
    """Those of an attached index. They are advice for routers: without them a cache works."""
    try:
        return TokenRecords.of(index.segment, index.pages, readonly=index.readonly)
    except LightcacheError as error:
        _log.warning("%s: no token ids are noted: %s", index.name, error)
        return None


# ---- The format of a cache's pages.


def check_format(cache: Cache, geometry: PageGeometry) -> None:
    """Check that a cache was created for pages of this geometry. Equal sizes are not enough:
    reading pages with another geometry than they were written with gives wrong data without an
    error.

    Raises:
        LayoutMismatch: the cache was created for other pages.
    """
    tokens = cache.index.segment.config.get("page_tokens")
    fits = [None, geometry.page_tokens]
    if geometry.rule == Rule.point():
        fits.append(tokens)  # a state covers all tokens before it, however many a key stands for
    if cache.page_bytes != geometry.part_bytes or tokens not in fits:
        raise LayoutMismatch(
            f"the cache {cache.name!r} has pages of {cache.page_bytes} bytes and {tokens} tokens, "
            f"the geometry of {geometry.part_bytes} and {geometry.page_tokens}; create it with "
            "page_bytes=geometry.part_bytes and page_tokens=geometry.page_tokens, or make the "
            f"geometry with part_bytes={cache.page_bytes}"
        )
    # As a whole word: the fingerprint of one geometry may be a prefix of another's.
    if not re.search(rf"(^|\s){re.escape(geometry.fingerprint())}($|\s)", cache.fingerprint):
        raise LayoutMismatch(
            f"the cache {cache.name!r} is for {cache.fingerprint!r}, which does not have the "
            f"geometry's {geometry.fingerprint()!r} as a word of its own; create it with "
            'fingerprint=f"{model} {geometry.fingerprint()}"'
        )


# ---- The cache.


class Cache:
    """This process's handle of a cache: `index` finds pages, `pool` has their bytes.

    `create` fails if the name exists, `attach` if it does not exist or differs; `open` creates or
    attaches. The calls of `PageIndex` that an engine needs are here too, unchanged.
    """

    def __init__(
        self,
        index: PageIndex,
        *,
        secret: SecretSource,
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
        self.token_records = _token_records(index)
        """None: the cache has none, or this process cannot use them, which is logged."""
        self.opening: Opening | None = None
        """The client that this handle shares with others of this process; None: it has its own."""
        if index.readonly or self.pool.grown == self.pool.pages:
            return
        index.grows_by(self.pool)
        self.pool.make_room()
        if lacking := lacking_room(index.segment):
            _log.warning("%s: %s", index.name, lacking)
        if grow:
            self._grower = Grower(self.pool)

    # ---- create, attach, open

    @classmethod
    def create(
        cls: type[T],
        name: str | None = None,
        *,
        model: str | None = None,
        pages: int | None = None,
        size: int | str | None = None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None = None,
        algorithm: str = ALGORITHM,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        lifetime: str = "attached",
        idle_limit: float | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        pool_path: str | os.PathLike[str] | None = None,
        independent: bool = False,
        eviction: str | None = None,
        kv_groups: Sequence[str] | None = None,
        token_ids: bool = False,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Create a cache that does not exist yet.

        Args:
            name: ASCII letters, digits and `._-`, at most 180 characters; or None, and
            model: such as "meta-llama/Llama-3-8B@5206a32": the cache has the model's default name,
                `cache_name(model, fingerprint)`, and is of the model's family, which is the part
                before an "@". If a default cache, or its growth, needs more memory than is
                available, unused ones of this family and user are removed, longest unused first.
                Those in use stay, and count as memory that comes later: the pool grows when they
                have gone. With a name `model` is only shown, as in metrics.
            pages: capacity in pages; or
            size: capacity in bytes, or as "64GiB".
            page_bytes: size of a page, in bytes or as "8MiB".
            fingerprint: model, KV dtype and geometry. Include everything that makes the pages of
                one process useless to another.
            page_tokens: tokens of a page; None: given in each `hash_pages`.
            algorithm: of the keys: "xxh3_128", "blake2b" or "sha256"; see docs/guides/keys.md.
            secret: of the keys, at least 16 bytes, the same in every process; or
            secret_file: the file that holds it, created if it is missing; None: that of the
                environment variable LIGHTCACHE_SECRET_FILE, or ~/.local/share/lightcache/secret.
            huge_pages, numa: see `HostPool`.
            pool_path: folder of the pool on a tmpfs or hugetlbfs (for huge pages, or a separate
                size limit); None: /dev/shm. Other processes find it by themselves and must see the
                same folder there.
            independent: for pages that are useful without their prefix, such as checkpoints of
                recurrent state; see `PageIndex.create`.
            eviction: "hz" (learned), or "lru": see `PageIndex.create`. None: "lru" if `independent`
                or with several `kv_groups`, else "hz".
            kv_groups: names of the KV groups that share the cache, such as ("kv", "states"), for
                `dump` and metrics: the i-th is that of `Run(group=i)`. None: it has one group, or
                they are shown by number.
            grow: True: a thread gives memory to the rest of the pool. False: call `pool.prefault`.
            Otherwise as `PageIndex.create`.

        Raises:
            ConfigError, InUse (it exists), NoSpace (with both figures), NotReady,
            PermissionDenied.
        """
        spec = CacheSpec(
            name,
            model,
            pages,
            size,
            page_bytes,
            fingerprint,
            page_tokens,
            algorithm,
            SecretSource(secret, secret_file),
            pool_path,
            numa,
            kv_groups,
            independent,
            eviction,
            token_ids,
        )
        index = PageIndex.create(
            spec.name,
            **spec.index_arguments(),
            lifetime=lifetime,
            idle_limit=idle_limit,
            group=group,
            role=role,
            device=device,
            lock_timeout=lock_timeout,
            timeout=timeout,
        )
        return cls._over(index, SecretSource(spec.secret), huge_pages, numa, grow)

    @classmethod
    def attach(
        cls: type[T],
        name: str | None = None,
        *,
        model: str | None = None,
        readonly: bool = False,
        pages: int | None = None,
        page_bytes: int | str | None = None,
        fingerprint: str | None = None,
        page_tokens: int | None = None,
        algorithm: str | None = None,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        independent: bool | None = None,
        kv_groups: Sequence[str] | None = None,
        shared: bool = False,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an existing cache. Compares only the options of its configuration that are
        given; the others are as it was created.

        Args:
            name: as it was created with; or None, and
            model: with `fingerprint` the cache of that default name; without, the model's only
                default cache.
            readonly: for routers and tools, which `peek` and `hash_pages`; writes nothing.
            pages, page_bytes, fingerprint, page_tokens, algorithm, independent, kv_groups: what it
                must have been created with; None: anything.
            secret, secret_file: see `create`; compared when keys are made.
            shared: see `open`. Not for readers, which take no slot.
            Otherwise as `create`.

        Raises:
            NotReady: the cache does not exist, or its creator did not finish in time.
            LayoutMismatch: version or options differ; names each that does.
            ConfigError: the model has several caches; names them.
            InUse: all 63 slots are taken. CacheCorrupted, PermissionDenied.
        """
        chosen = (
            _cache_of(model)
            if name is None and model is not None and fingerprint is None
            else _name_of(name, model, fingerprint or "")
        )
        given = {
            "pages": pages,
            "page_bytes": None if page_bytes is None else parse_size(page_bytes, "page_bytes"),
            "fingerprint": fingerprint,
            "page_tokens": page_tokens,
            "algorithm": algorithm,
            "independent": independent,
            NAMES_ITEM: None if kv_groups is None else checked_names(kv_groups),
        }
        named = {item for item, value in given.items() if value is not None}
        if independent is False:
            del given["independent"]  # as in a configuration

        source = SecretSource(secret, secret_file)

        def make() -> T:
            index = PageIndex.attach(
                chosen,
                readonly=readonly,
                config=given,
                named=named,
                group=group,
                role=role,
                device=device,
                lock_timeout=lock_timeout,
                timeout=timeout,
            )
            return cls._over(index, source, huge_pages, numa, grow)

        if not shared:
            return make()
        if readonly:
            raise ConfigError("shared: a reader takes no slot; leave shared= or readonly= out")
        options = {
            "role": role,
            "device": device,
            "huge_pages": huge_pages,
            "numa": numa,
            "group": group,
            "grow": grow,
            "lock_timeout": lock_timeout,
        }
        verify = partial(_verify, given, named, group, None, source)
        handle: T = share(chosen, options, make, verify)
        return handle

    @classmethod
    def open(
        cls: type[T],
        name: str | None = None,
        *,
        model: str | None = None,
        pages: int | None = None,
        size: int | str | None = None,
        page_bytes: int | str,
        fingerprint: str,
        page_tokens: int | None = None,
        algorithm: str | None = None,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        lifetime: str | None = None,
        idle_limit: float | None = None,
        group: str | int | None = None,
        replace: bool = False,
        role: str = "",
        device: bool = False,
        huge_pages: bool = False,
        numa: Numa = None,
        pool_path: str | os.PathLike[str] | None = None,
        independent: bool | None = None,
        eviction: str | None = None,
        kv_groups: Sequence[str] | None = None,
        token_ids: bool | None = None,
        minimums: Mapping[str, int | str] | None = None,
        shared: bool = False,
        grow: bool = True,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to a cache with this configuration, or create it. A cache whose clients have all
        died is attached to with its content. Options that are not given, or None, are the existing
        cache's, and those of `create` for a new one.

        Args:
            name, model: see `create`. Under a default name `size` or `pages`, `eviction` and
                `token_ids` are those of a new cache; an existing one may have others.
            lifetime: None: keep that of an existing cache; "attached" for a new one.
            idle_limit: seconds. A persistent cache that was unused for this long and has no live
                client is removed by the next `open`, `create` or `sweep` that needs its room. None:
                never. If given with lifetime None, a new cache is persistent.
            replace: remove a cache that differs, if it has no live client, and if this one can be
                made: see below.
            minimums: see `set_minimums`; None: unchanged.
            shared: True: all parts of this process that open the cache so are one client: one slot,
                with its pins, plans, tickets, default namespace, counters, pool and pinned memory.
                Each closes its own handle; the last one leaves the cache, and until then a closed
                handle is not told from an open one. Options that are left at their defaults are
                those of the first opening, and so is `role`; others must equal them. A forked child
                opens its own.
            Otherwise as `create`.

        Raises:
            LayoutMismatch: the cache differs and `replace` is False; names each item.
            InUse: the cache differs, `replace` is True, and it has a live client.
            ConfigError: minimums that cannot be: no cache was made, and one that exists was left.
            Otherwise as `create` and `attach`. With `replace` all arguments are checked before a
            cache is removed, and whether there will be room.
        """
        spec = CacheSpec(
            name,
            model,
            pages,
            size,
            page_bytes,
            fingerprint,
            page_tokens,
            algorithm,
            SecretSource(secret, secret_file),
            pool_path,
            numa,
            kv_groups,
            independent,
            eviction,
            token_ids,
            minimums,
        )

        def make() -> T:
            with _secret_named(spec.source):
                index = PageIndex.open(
                    spec.name,
                    **spec.index_arguments(),
                    named=spec.named,
                    lifetime=lifetime,
                    idle_limit=idle_limit,
                    group=group,
                    replace=replace,
                    check_new=spec.check_new,
                    role=role,
                    device=device,
                    lock_timeout=lock_timeout,
                    timeout=timeout,
                )
            if index.pages != spec.pages:
                has = index.name, index.pages
                _log.info("%s: has %d pages, %d were asked for", *has, spec.pages)
            if spec.eviction not in (None, index.eviction):
                _log.warning(
                    '%s: its order of eviction is "%s", "%s" was asked for; to change it, run '
                    "`lightcache rm %s` when no engine uses it",
                    *(index.name, index.eviction, spec.eviction, index.name),
                )
            if spec.token_ids and not index.segment.config.get(TOKENS_ITEM):
                _log.warning(
                    "%s: it notes no token ids, which were asked for; to change it, run "
                    "`lightcache rm %s` when no engine uses it",
                    *(index.name, index.name),
                )
            return cls._over(index, SecretSource(spec.secret), huge_pages, numa, grow)

        if not shared:
            return _with_minimums(make(), minimums)
        options = {
            "role": role,
            "device": device,
            "huge_pages": huge_pages,
            "numa": numa,
            "group": group,
            "grow": grow,
            "lock_timeout": lock_timeout,
        }
        verify = partial(_verify, spec.expected(), spec.named, group, lifetime, spec.source)
        handle: T = share(spec.name, options, make, verify)
        return _with_minimums(handle, minimums)

    @classmethod
    def _over(
        cls: type[T],
        index: PageIndex,
        secret: SecretSource,
        huge: bool,
        numa: Numa,
        grow: bool,
    ) -> T:
        try:
            cache = cls(
                index,
                secret=secret,
                huge_pages=huge,
                numa=numa,
                grow=grow,
            )
        except BaseException:
            index.close()
            raise
        return cache

    # ---- close

    def close(self) -> None:
        """Detach; see `PageIndex.close`. One of several handles that share a client is given up;
        the rest is for the last of them. Stops growing the pool; other processes continue.
        Unregisters the memory that `pin` registered. Close transfer engines first, and drop arrays
        and tensors made of the pool.

        Raises:
            InUse: views of the pool exist, or transfer engines use its pinned pages. Nothing was
                changed, except that pinned pages whose own array has views were closed.
            LockTimeout: the lock's holder did not release it; call again.
            Detached: in a forked child.
        """
        if self.opening is None or self.index.core.unusable():
            self._close()
            return
        with self.opening.leaving(self) as last:
            if last:
                self._close()

    def _close(self) -> None:
        if not self.index.core.unusable():
            self._pin.close()
            self.pool.check_closable()
            if self._grower:
                self._grower.stop()
                self._grower = None
        self.index.close()
        if self.token_records is not None:
            self.token_records.close()
        self.pool.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.index.core.unusable():
            leave(self.close, error)

    def __repr__(self) -> str:
        return f"<Cache {self.index.name!r} {self.index.pages} pages of {self.page_bytes} bytes>"

    # ---- keys

    def key_spec(
        self, page_tokens: int | None = None, *, namespace: Namespace | None = None
    ) -> KeySpec:
        """Return the seeds of this cache's keys, for `hash_pages` and `PageHasher`.

        Raises:
            ConfigError: `page_tokens` is given neither here nor by the cache, or they differ.
            LayoutMismatch: this process's secret is not the one that the cache was created with.
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
        secret = self._secret.read()
        if digest_of(secret) != self.index.segment.config["secret"]:
            raise LayoutMismatch(
                f"the cache {self.index.name!r} was created with another secret. "
                f"{self._secret.differs}"
            )
        self._secret = SecretSource(secret)
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
        """Return the keys of all complete pages of a prompt; see `lightcache.hashing.hash_pages`.

        Args:
            leave_one: omit the key of a page that would leave no token to compute, to match a whole
                prompt. `match(keys[:matchable_pages(...)])` does the same without hashing twice.

        Raises:
            As `key_spec`, and as `lightcache.hashing.hash_pages`.
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
        """Return a resumable hasher, for tokens that arrive one by one.

        Raises:
            As `key_spec`.
        """
        return PageHasher(self.key_spec(page_tokens, namespace=namespace), salt=salt, lora=lora)

    def engine_keys(
        self,
        page_tokens: int | None = None,
        *,
        salt: str | bytes = b"",
        lora: bytes = b"",
        namespace: Namespace | None = None,
    ) -> EngineKeys:
        """Return what turns the hashes of an engine into keys of this cache, and back.

        Raises:
            As `key_spec`.
        """
        return EngineKeys(self.key_spec(page_tokens, namespace=namespace), salt=salt, lora=lora)

    # ---- pages as arrays

    def put(
        self, tokens: Tokens, pages: Any, *, namespace: Namespace | None = None, **how: Any
    ) -> int:
        """Copy the full pages of a prompt into the cache. Skips pages that the cache has or that
        another process is writing. Returns the number of pages copied. `reserve` does the same
        without the copy: the engine writes the pool's pages itself.

        Args:
            tokens: ids of the prompt.
            pages: an array with one row for each full page, `page_bytes` each, of any dtype.
            how: as for `hash_pages`: salt, lora and so on.

        Raises:
            ConfigError: another number or size of rows, or as `hash_pages`.
            OutOfPages: no room for all of them; the leading ones are stored.
            Otherwise as `reserve`.
        """
        keys = self.hash_pages(tokens, namespace=namespace, **how)
        told = None if any(how.get(part) for part in ("salt", "lora", "extra")) else tokens
        rows = np.ascontiguousarray(pages)
        if (len(rows), rows.nbytes) != (len(keys), len(keys) * self.page_bytes):
            raise ConfigError(
                f"pages: expected a row of {self.page_bytes} bytes for each of {len(keys)} full "
                f"pages, found {rows.dtype} {rows.shape}"
            )
        with self.reserve(keys, namespace=namespace, tokens=told) as new:
            self.pool.array[new.pages] = rows.view(np.uint8).reshape(-1, self.page_bytes)[new.new]
            new.publish()
            if len(new.missing):
                raise OutOfPages(
                    f"put: no room for {len(new.missing)} of {len(keys)} pages: {new.why}"
                )
            return len(new.pages)

    def get(self, tokens: Tokens, *, namespace: Namespace | None = None, **how: Any) -> Bytes:
        """Return a copy of the longest cached prefix of a prompt: one row of `page_bytes` uint8 for
        each page. `match` does the same without the copy: it pins the pool's pages.

        Args:
            tokens: ids of the prompt.
            how: as for `hash_pages`: `leave_one=True` leaves a token to compute.

        Raises:
            As `hash_pages` and `match`.
        """
        keys = self.hash_pages(tokens, namespace=namespace, **how)
        with self.match(keys, namespace=namespace) as hit:
            return self.pool.array[hit.pages]

    # ---- calls of the index

    def peek(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """See `PageIndex.peek`."""
        return self.index.peek(keys, namespace=namespace)

    def peek_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """See `PageIndex.peek_many`."""
        return self.index.peek_many(keys, offsets, namespace=namespace)

    def match(
        self,
        keys: Keys,
        *,
        after: Keys | None = None,
        count: bool = True,
        namespace: Namespace | None = None,
    ) -> Lease:
        """See `PageIndex.match`."""
        return self.index.match(keys, after=after, count=count, namespace=namespace)

    def match_many(
        self,
        keys: Keys,
        offsets: Offsets,
        *,
        count: bool = True,
        namespace: Namespace | None = None,
    ) -> LeaseBatch:
        """See `PageIndex.match_many`."""
        return self.index.match_many(keys, offsets, count=count, namespace=namespace)

    def plan(
        self,
        request: Hashable,
        keys: Keys,
        *,
        after: Keys | None = None,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
    ) -> int:
        """See `PageIndex.plan`."""
        return self.index.plan(
            request, keys, after=after, limit=limit, namespace=namespace, timeout=timeout
        )

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

    def take(self, request: Hashable, *, pages: int | None = None) -> Lease:
        """See `PageIndex.take`."""
        return self.index.take(request, pages=pages)

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
        after: Keys | None = None,
        shards: int = 1,
        shard: int | None = None,
        team: int | None = None,
        join_timeout: float = 60.0,
        independent: bool | None = None,
        run: Run = PLAIN,
        admission: bool = False,
        hint: Hint = Hint.NONE,
        namespace: Namespace | None = None,
        timeout: float | None = None,
        tokens: Tokens | None = None,
    ) -> Reservation:
        """See `PageIndex.reserve`.

        Args:
            tokens: ids of the tokens of all `keys`, or more, from those of the first on. A cache
                that was created with `token_ids` notes those of new pages for routers, which find
                blocks by nothing else: give none where a salt, an adapter or an item decides the
                keys as well. Those of a tenant are not noted. Other caches ignore them.

        Raises:
            ConfigError: tokens that are noted are no ids, or fewer than those of the keys.
            Otherwise as `PageIndex.reserve`.
        """
        rows = self.token_rows(tokens, len(keys), namespace)
        new = self.index.reserve(
            keys,
            start,
            after=after,
            shards=shards,
            shard=shard,
            team=team,
            join_timeout=join_timeout,
            independent=independent,
            run=run,
            admission=admission,
            hint=hint,
            namespace=namespace,
            timeout=timeout,
        )
        if rows is not None and not new.joined:  # else another rank of the team notes them
            self.note_tokens(new, keys, rows)
        return new

    def token_rows(
        self, tokens: Tokens | None, pages: int, namespace: Namespace | None
    ) -> TokenIds | None:
        """For modules of lightcache: the ids of a prompt's first pages, as `note_tokens` takes
        them; None: none were given, or they are not noted.

        Raises:
            ConfigError: as `reserve`.
        """
        if self.token_records is None or tokens is None:
            return None
        tenant = (namespace or self.index.default_namespace).tenant
        return None if tenant else self.token_records.rows(tokens, pages)

    def note_tokens(self, new: Reservation, keys: Keys, rows: TokenIds, start: int = 0) -> None:
        """For modules of lightcache: note the token ids of a reservation's new pages, before they
        are published.

        Args:
            keys: those that were reserved, from position `start` on.
            rows: the ids of each, shape (n, page_tokens).
        """
        records, which = self.token_records, new.new - start
        if records is not None and len(which):
            records.write(new.pages, keys[which], rows[which])

    def worth(
        self,
        keys: Keys,
        start: int = 0,
        *,
        refused: bool = False,
        hint: Hint = Hint.NONE,
        namespace: Namespace | None = None,
    ) -> int:
        """See `PageIndex.worth`."""
        return self.index.worth(keys, start, refused=refused, hint=hint, namespace=namespace)

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
    ) -> Lease | ReservationShard:
        """See `PageIndex.adopt`."""
        return self.index.adopt(ticket, shard=shard, timeout=timeout)

    def done(self, ticket: bytes, ok: bool = True) -> None:
        """See `PageIndex.done`."""
        self.index.done(ticket, ok)

    def evict(self, n: int, *, group: int | None = None) -> int:
        """See `PageIndex.evict`."""
        return self.index.evict(n, group=group)

    def namespace(
        self,
        weights: str = "",
        tenant: str = "",
        *,
        quota: int | str | None = None,
        minimum: int | str | None = None,
    ) -> Namespace:
        """See `PageIndex.namespace`.

        Args:
            quota: most bytes that it may have, or a size such as "64GiB", rounded down to pages. 0:
                no limit; None: unchanged.
            minimum: bytes that are safe from other namespaces, or a size, rounded up to pages. 0:
                none; None: unchanged.

        Raises:
            ConfigError: no size, or a quota below one page.
            Otherwise as `PageIndex.namespace`.
        """
        most = None if quota is None else parse_size(quota, "quota", zero=True)
        if most and most < self.page_bytes:
            raise ConfigError(
                f"quota: expected a page of {self.page_bytes} bytes or more, or 0 for no limit, "
                f"found {quota!r}"
            )
        return self.index.namespace(
            weights,
            tenant,
            quota_pages=None if most is None else min(most // self.page_bytes, MAX_PAGES),
            minimum_pages=None if minimum is None else pages_for(minimum, self.page_bytes),
        )

    def set_minimums(self, minimums: Mapping[str, int | str]) -> None:
        """Set how much memory is safe from other KV groups, in all namespaces together: see
        `PageIndex.set_minimum`. For all processes, until it is set again. Takes the lock once for
        each group.

        Args:
            minimums: bytes, or a size such as "16GiB", by the group's name (`kv_groups`), rounded
                up to pages. A page of a group that lies in several is evicted whole all the same,
                so up to one of them less is safe. 0: none. Groups that are not named keep theirs.

        Raises:
            ConfigError: no sizes by name; a group that there is not, or a cache without names of
                groups. Nothing was changed. Or as `PageIndex.set_minimum`, of one group: those
                before it were changed.
            LockTimeout, PermissionDenied, Detached.
        """
        names = names_of(self.index.segment.config)
        pages = minimum_pages(self.name, minimums, names, self.page_bytes)
        had = {group.name: group.minimum_pages for group in self.index.groups()}
        for name in sorted(pages, key=lambda name: pages[name] - had[name]):  # lower ones first
            self.index.set_minimum(Run(names.index(name)), pages[name])

    def use(self, namespace: Namespace) -> None:
        """See `PageIndex.use`; also seeds the keys."""
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
        """Register the pool with the driver of a GPU, in the background. The GPU can then copy each
        page without the CPU, as soon as its piece is registered. Every process pins for itself.
        Loads the driver and returns at once; `close` undoes it.

        Args:
            device: "cuda:0", or its number; None: the current one. All devices may use it.
            threads, chunk_bytes: see `PinnedPages`.
            grow_threads: threads that also give memory to the pool meanwhile, faster than the one
                thread of every cache; 0: only that thread.
            progress: called with (pages registered, pages).
            driver: replaces the device's driver; for tests.

        Raises:
            ConfigError: no such device, or counts out of range.
            InUse: this object has pinned it already. Handles of one client (`shared=True`) get what
                the first of them has pinned, with its options, instead.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        self.index.segment.check_usable()
        shared = self.opening is not None
        return self._pin.make(device, driver, threads, chunk_bytes, grow_threads, progress, shared)

    # ---- transfers

    def transfer_engine(
        self,
        geometry: PageGeometry,
        planes: DevicePlanes,
        *,
        memory: HostPages | None = None,
        **how: Any,
    ) -> Engine:
        """Return a transfer engine, which moves pages between this cache and one rank's planes: a
        `HostEngine` for planes in CPU memory, else a `TransferEngine`. Close it before the cache.

        Args:
            geometry: of the pages. The cache must have been created for it: with
                page_bytes=geometry.part_bytes, and a fingerprint that has geometry.fingerprint() as
                a whole word, separated by spaces.
            memory: None: the pool as it is, for planes in CPU memory. A device needs the pool
                registered with its driver: the `PinnedPages` that `pin` returns, one for all
                transfer engines of this process.
            how: options of the transfer engine: share, threads, rate and so on.

        Raises:
            LayoutMismatch: the cache was created for other pages.
            ConfigError: as `HostEngine` and `TransferEngine`.
        """
        check_format(self, geometry)
        form = self.pages, self.page_bytes
        if memory is not None and (memory.pages, memory.page_bytes) != form:
            raise ConfigError(
                f"memory: expected {self.pages} pages of {self.page_bytes} bytes, found "
                f"{memory.pages} of {memory.page_bytes}; make it of cache.pool.array"
            )
        if planes.device == "cpu":
            return HostEngine(geometry, planes, memory or HostPages(self.pool.array), **how)
        if not planes.device.startswith("cuda"):
            raise ConfigError(
                "planes: expected some on the cpu or a GPU such as 'cuda:0', found "
                f"{planes.device}; give a manager a transfer engine of yours: "
                "docs/integration.md, add a transfer engine"
            )
        if memory is None:
            raise ConfigError(
                f"memory: planes on {planes.device} need the pool registered with its driver; give "
                f"memory=cache.pin(device={planes.device!r}), a PinnedPages"
            )
        require("torch", "kernels", f"a transfer engine for planes on {planes.device}")
        from importlib import import_module  # torch is imported only if there is a device

        engine: Engine = import_module("lightcache.kernels.engine").TransferEngine(
            geometry, planes, memory, **how
        )
        return engine


__all__ = [
    "DEFAULT_SECRET",
    "Cache",
    "CacheSpec",
    "PoolPin",
    "SecretSource",
    "cache_name",
    "check_config",
    "digest_of",
    "family_name",
    "secret_path",
]

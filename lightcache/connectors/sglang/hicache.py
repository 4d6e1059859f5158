"""A storage of SGLang's HiCache: `LightcacheStorage`. HiCache keeps its host pool, which is private
to a rank; what it saves lies in a cache that all processes of the node share, and is copied
straight between the two.

SGLang calls it from threads of HiCache, which may wait, and never raises what it raises: a method
that fails has found or saved nothing.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from time import monotonic, perf_counter_ns
from typing import Any, ClassVar

import numpy as np

from lightcache import Cache, Load, Offload
from lightcache.connectors.engine_cache import (
    LEAVE,
    START,
    CachePart,
    clear_ended,
    open_engine_cache,
    role_name,
    storage_link,
    weights_after_reset,
)
from lightcache.connectors.engine_options import EngineOptions
from lightcache.connectors.link import Link, Voice, guarded
from lightcache.connectors.sglang.pools import Format, check_host_served, describe_host
from lightcache.connectors.sglang.rank import ENGINE, LOCK, SLOW, Opened, launch_of
from lightcache.errors import ConfigError, NotInstalled, WaitTimeout
from lightcache.hashing import Keys
from lightcache.namespaces import Namespace
from lightcache.page_transfers import begun_with
from lightcache.storage.tier import BaseTier

try:
    from sglang.srt.mem_cache import hicache_storage as interface
except ImportError as error:
    raise NotInstalled(
        f"lightcache.connectors.sglang needs SGLang ({error}); install lightcache into the "
        "environment of SGLang with: pip install 'lightcache[sglang]'"
    ) from error

_log = logging.getLogger("lightcache.connectors")
READ = 3.0
"""Seconds that a lookup waits for a storage, in the thread that HiCache has for this. SGLang ends
if that thread does not stop within 10 s."""
LAUNCH = launch_of(secrets.randbits(63))
"""Of this process, which is one rank of one engine. Ranks have nothing that they share with each
other and with no other engine: also one parent may have started several engines."""
KV = "kv"
"""SGLang's name of the pool of KV."""
OTHERS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""What SGLang itself reads in the extra configuration, and leaves in it."""


@dataclass(frozen=True)
class StorageOptions(EngineOptions):
    """Each has a default, so `{}` is a configuration."""

    given_in = "hicache_storage_backend_extra_config"
    elsewhere = frozenset({"token_ids"})


@dataclass
class StorageFigures:
    """What SGLang reads for its metrics: pages and GB/s of each call since the last time."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class LightcacheStorage(CachePart[Opened], interface.HiCacheStorage):
    """See the module. Made by SGLang, in each rank, with
    `--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
    "lightcache", "module_path": "lightcache.connectors.sglang", "class_name": "LightcacheStorage",
    "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "size": "64GiB"}'`."""

    clears: ClassVar[int] = 0
    """Of this process: SGLang may make another storage later, which finds nothing of before either.
    """

    def __init__(self, storage_config: Any, _more: Any = None) -> None:
        """Opens nothing yet; see `register_mem_pool_host`.

        Raises:
            ConfigError: an option that there is not, a value that it cannot have, or no
                `interface_v1`.
        """
        given = dict(storage_config.extra_config or {})
        if not given.get("interface_v1"):
            raise ConfigError(
                f"{StorageOptions.given_in}: expected interface_v1 1, found "
                f"{given.get('interface_v1')!r}: without it SGLang copies each page twice"
            )
        self.options = StorageOptions.of({k: given[k] for k in given if k not in OTHERS})
        if self.options.admission and int(storage_config.tp_size) > 1:
            raise ConfigError("admission: expected false where several ranks save, found true")
        self.config = storage_config
        self.place = int(storage_config.tp_rank), int(storage_config.tp_size)
        self.launch = LAUNCH
        self._thread = threading.get_ident()
        self.weights = self._named()
        self._name = f"lightcache, HiCache of rank {self.place[0]}"
        super().__init__(Voice(self._name, then="SGLang continues without it"))
        self._taken = StorageFigures()
        self._page_tokens = 0
        self._page_bytes = 0

    # ---- the cache

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """See SGLang. Opens the cache, or says once why it is not used."""
        self.mem_pool_host = mem_pool_host
        try:
            check_host_served(mem_pool_host, self.config)
            server, model, release = _engine()
            form, part = describe_host(server, model, mem_pool_host, self.place, release)
        except Exception as error:
            self._refuse(error)
            return
        self._note_flushes(mem_pool_host)
        self._page_tokens, self._page_bytes = form.page_tokens, form.geometry.page_bytes
        self._link = Link(self.voice, partial(self._open, form, part), Opened.close)
        try:
            self._link.start(START)
        except Exception as error:
            self.trouble("start", error)

    def _open(self, of: Format, part: str) -> Opened:
        cache = open_engine_cache(
            self.options,
            model=of.model,
            fingerprint=of.fingerprint,
            page_bytes=of.geometry.page_bytes,
            page_tokens=of.page_tokens,
            role=role_name(ENGINE, self.launch, f"rank {self.place[0]}"),
            device=False,
            order="lru",  # SGLang does not say which pages its device serves
        )
        try:
            share = of.shard.share()
            engine = cache.transfer_engine(of.geometry, of.planes, share=share, threads=1)
        except BaseException:
            cache.close()
            raise
        opened = Opened(cache, self._storage(cache), (engine,), (engine,), None, part=part)
        try:
            opened.space(self.weights)
        except BaseException:
            opened.close()
            raise
        return opened

    def _storage(self, cache: Cache) -> Link[BaseTier] | None:
        """Of each rank: the pages are its own."""
        if not self.options.storage:
            return None
        storage = storage_link(cache, self.options, self._name)
        storage.start(START)
        return storage

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """See SGLang. A model that has other pools beside its KV is not served: pages would be
        found of which a part is missing."""
        if str(host_pool_name) != KV:
            self._refuse(f"expected a pool of KV alone, found {host_pool_name}: not served yet")

    def _refuse(self, why: object) -> None:
        self.voice.trouble("not used", why)
        self.close()

    def _opened(self) -> Opened:
        """What is open. Raises `_Closed` if nothing is, or if something speaks against a call."""
        opened = self.usable()
        if opened is None:
            raise _Closed
        return opened

    def trouble(self, what: str, error: BaseException) -> None:
        """An error of a call: say it once, and learn from it."""
        if not isinstance(error, _Closed):
            super().trouble(what, error)

    # ---- lookups

    @guarded(int)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """See SGLang: the pages of this prefix that are in memory. What lies in a storage alone is
        read before this returns, in 3 s at most, but for the thread that made this object."""
        if not keys:
            return 0
        opened = self._opened()
        space, encoded, after = self._encoded(opened, keys, extra_info)
        index, begun = opened.cache.index, perf_counter_ns()
        found = index.peek(encoded, namespace=space)
        opened.tally.looked(begun)
        self._worked()
        tier = opened.tier
        if found < len(keys) and tier is not None:
            chain, start = encoded, found
            if after is not None:
                chain, start = np.concatenate((after, encoded)), found + 1
            reading = tier.prefetch(chain, start, namespace=space)
            opened.tally.watch(reading)
            # The thread that made us runs the model: for it the next lookup finds what is read.
            if threading.get_ident() != self._thread:
                try:
                    reading.wait(READ)
                except WaitTimeout:
                    self.figures["late_reads"] += 1
            read = index.peek(encoded, namespace=space)
            self.figures["read_pages"] += max(0, read - found)
            found = read
        self.figures["asked_pages"] += len(keys)
        self.figures["found_pages"] += found
        if not self.place[0]:  # one rank counts for all
            missed = "" if found else opened.tally.missed(encoded, space)
            size = self._page_tokens
            opened.tally.request(len(keys) * size, host=found * size, missed=missed)
        return found

    def exists(self, key: str) -> bool:
        """See SGLang."""
        return bool(self.batch_exists([key]))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """See SGLang: nothing, where it needs other pools than KV."""
        alone = all(str(each.name) == KV for each in pool_transfers or ())
        return interface.PoolTransferResult(self.batch_exists(keys, extra_info) if alone else 0, {})

    # ---- copies

    @guarded(tuple)
    def _load(self, keys: Sequence[str], host_indices: Any, extra_info: Any) -> Sequence[bool]:
        opened = self._opened()
        space, encoded, _ = self._encoded(opened, keys, extra_info)
        begun = monotonic()
        lease = opened.cache.index.match(encoded, namespace=space)
        count = len(lease)
        if not count:
            lease.release()
            return ()
        try:
            slots = self._slots(host_indices, len(keys))[: count * self._page_tokens]
            load = Load(opened.readers[0], lease, slots)
        except BaseException:
            if begun_with(lease) is None:
                lease.release()
            raise
        load.wait()  # HiCache gives the slots to others when this has returned
        opened.tally.moved("load", count, load.nbytes, load.begun_ns)
        self._count("prefetch", count, monotonic() - begun)
        return [True] * count

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """See SGLang: copies pages into the host pool. After the first that is not there, none
        is."""
        found = list(self._load(keys, host_indices, extra_info))
        return found + [False] * (len(keys) - len(found))

    @guarded(tuple)
    def _save(self, keys: Sequence[str], host_indices: Any, extra_info: Any) -> Sequence[bool]:
        opened = self._opened()
        space, encoded, after = self._encoded(opened, keys, extra_info)
        slots = self._slots(host_indices, len(keys))
        begun = monotonic()
        admission = self.options.admission and opened.tier is None
        held = opened.cache.reserve(
            encoded, after=after, admission=admission, namespace=space, timeout=LOCK
        )
        missing = set(held.missing)
        saved = [place not in missing for place in range(len(keys))]
        self.figures["absent_pages"] += len(missing)
        self._worked()
        if not len(held.new):
            held.release()
            return saved
        count = len(held.new)
        try:
            save = Offload(opened.writers[0], held, slots, positions=held.new)
        except BaseException:
            if begun_with(held) is None:
                held.abandon()
            raise
        save.wait()
        opened.tally.moved("offload", count, save.nbytes, save.begun_ns)
        self._count("backup", count, monotonic() - begun)
        if opened.tier is not None:
            opened.tally.watch(opened.tier.write(encoded, keys[0], namespace=space))
        return saved

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """See SGLang: copies pages out of the host pool. What is there already, or is being written
        by others, is saved."""
        return list(self._save(keys, host_indices, extra_info)) or [False] * len(keys)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, Any]:
        """See SGLang: of other pools than KV. There are none."""
        return {each.name: [False] * len(each.keys or ()) for each in transfers}

    batch_set_v2 = batch_get_v2

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """See SGLang, which calls `batch_get_v1` instead."""

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """See SGLang, which calls `batch_get_v1` instead."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """See SGLang, which calls `batch_set_v1` instead."""
        return False

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """See SGLang, which calls `batch_set_v1` instead."""
        return False

    # ---- the rest

    @guarded(bool)
    def clear(self) -> bool:
        """See SGLang. Pages saved before are not found by this launch any more; those of others
        stay. With `on_reset` "keep" nothing changes."""
        if self.options.on_reset == "keep":
            return True
        LightcacheStorage.clears += 1  # first: SGLang believes it, whatever fails
        self.weights = self._named()
        if self.place[0] == 1 and getattr(self.config, "is_mla_model", False):
            self.voice.trouble(
                "find latents after a reset",
                "rank 0 alone writes them, under a name of its own, so none are found until SGLang "
                "is started again",
            )
        link = self._link
        opened = None if link is None else link.current
        if link is None or opened is None:
            return True
        try:
            clear_ended(opened.cache, ENGINE, self.launch)
            opened.space(self.weights)
        except Exception as error:
            self.trouble("forget what was saved", error)
            link.lose(opened)  # it is opened again, with the new name
        return True

    def get_stats(self) -> StorageFigures:
        """See SGLang: since the last call."""
        taken, self._taken = self._taken, StorageFigures()
        return taken

    @property
    def used(self) -> bool:
        """Whether it has a cache, or waits for one."""
        return self._link is not None

    def close(self) -> None:
        """Leave the cache."""
        link, self._link = self._link, None
        if link is not None:
            link.close(LEAVE)

    def _note_flushes(self, pool: Any) -> None:
        """SGLang says nothing of a flush, which is how it forgets KV of old weights. But it empties
        the host pool then, with no copy under way: that is a reset."""
        clear = pool.clear
        if isinstance(clear, partial) and clear.func is _cleared:  # of the storage before this one
            _, clear = clear.args
        pool.clear = partial(_cleared, weakref.ref(self), clear)

    def flushed(self) -> None:
        """It is emptied: a clear, which the scheduler waits for."""
        begun = monotonic()
        self.clear()
        if (seconds := monotonic() - begun) >= SLOW:
            self.figures["slow_calls"] += 1
            _log.warning("%s: clear took %.1f s", self._name, seconds)

    # ---- parts

    def _named(self) -> str:
        """The version of the weights that pages are of now."""
        given = self.options.weights
        if not self.clears or self.options.on_reset == "keep":
            return given
        return weights_after_reset(ENGINE, given, self.launch, self.clears)

    def _encoded(
        self, opened: Opened, keys: Sequence[str], extra_info: Any
    ) -> tuple[Namespace, Keys, Keys | None]:
        """The namespace, the keys, and the one before them, if SGLang says it."""
        space, encode = opened.space(self.weights)
        before = (getattr(extra_info, "prefix_keys", None) or [])[-1:]
        encoded = encode.encode([*before, *keys])
        return space, encoded[len(before) :], encoded[:1] if before else None

    def _slots(self, host_indices: Any, pages: int) -> Any:
        slots = host_indices.detach().cpu().numpy()
        if len(slots) != pages * self._page_tokens:
            raise ConfigError(
                f"expected {pages} pages of {self._page_tokens} slots, found {len(slots)} slots"
            )
        return slots

    def _worked(self) -> None:
        if self._rest_until:
            self._rest_until = 0.0
            self.voice.well()

    def _count(self, what: str, pages: int, seconds: float) -> None:
        self.figures["loaded_pages" if what == "prefetch" else "saved_pages"] += pages
        if not self.config.enable_storage_metrics:
            return  # SGLang never takes them
        taken = self._taken
        getattr(taken, f"{what}_pgs").append(pages)
        rate = pages * self._page_bytes / max(seconds, 1e-9) / 1e9
        getattr(taken, f"{what}_bandwidth").append(rate)


def _cleared(storage: weakref.ref[LightcacheStorage], clear: Callable[[], Any]) -> Any:
    """SGLang empties the host pool of a storage that may be gone: one that is made later must not
    find KV of before either."""
    noted = storage()
    if noted is None or not noted.used:
        LightcacheStorage.clears += 1
        return clear()
    noted.flushed()
    return clear()


class _Closed(Exception):
    """Nothing is open, which was said: a miss."""


def _engine() -> tuple[Any, Any, str]:
    """SGLang's arguments, its configuration of the model, and its release."""
    release = str(import_module("sglang.version").__version__)
    try:
        context = import_module("sglang.srt.runtime_context")
        return context.get_server_args(), context.process_model_config(), release
    except (ImportError, AttributeError):  # releases before the linker
        server = import_module("sglang.srt.server_args").get_global_server_args()
        models = import_module("sglang.srt.configs.model_config").ModelConfig
        return server, models.from_server_args(server), release


__all__ = ["LightcacheStorage", "StorageFigures", "StorageOptions"]

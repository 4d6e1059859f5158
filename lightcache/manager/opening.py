"""`open_kv`: a host cache, and the transfer engine that copies its pages, for an engine's KV
tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lightcache._arguments import count
from lightcache.cache import Cache
from lightcache.errors import ConfigError, LightcacheError
from lightcache.hashing import Keys
from lightcache.kernels import layouts
from lightcache.kernels.geometry import PageGeometry
from lightcache.kernels.groups import KVGroup, Rule
from lightcache.kernels.moves import Engine, integers
from lightcache.kernels.planes import DevicePlanes, View, check_axes, view
from lightcache.manager.backend import EngineBackend
from lightcache.manager.blocks import ManagedBlocks
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.stats import NodeCounters
from lightcache.page_transfers import Load, Offload
from lightcache.shm.errors import leave

if TYPE_CHECKING:
    from lightcache.kernels.pinned import PinnedPages

GROUP = "kv"
"""Name of the one KV group of such a cache."""
_log = logging.getLogger("lightcache.manager")
Slots = Sequence[int] | npt.NDArray[Any]


class EngineKV:
    """An engine's KV tensors, their host cache, and the transfer engine that copies pages between
    the two. As a context manager it closes all of them, managers first."""

    def __init__(
        self,
        cache: Cache,
        geometry: PageGeometry,
        planes: DevicePlanes,
        *,
        beside: EngineKV | None = None,
    ) -> None:
        """For `open_kv`. On a GPU the pool is registered with the driver, in the background.

        Args:
            geometry: of the cache's pages, or of pages in parts: `part_bytes == cache.page_bytes`.
            beside: copies other tensors of this cache, and is closed after this.
        """
        self.cache, self.geometry, self.planes = cache, geometry, planes
        self.pinned: PinnedPages | None = None if beside is None else beside.pinned
        """The pool, registered with the GPU; None on a CPU. Its first pages can be used after some
        milliseconds; `pinned.wait()` waits for all."""
        if planes.device.startswith("cuda") and self.pinned is None:
            self.pinned = cache.pin(device=planes.device)
        self.engine: Engine = cache.transfer_engine(geometry, planes, memory=self.pinned)
        self.backend = EngineBackend(self.engine)
        """The transfer backend for a `KVCacheManager`."""
        self._counters: NodeCounters | None = None
        self._closing = contextlib.ExitStack()
        if beside is None:
            self._closing.callback(cache.close)
        self._closing.callback(self.engine.close)

    @property
    def slots(self) -> int:
        """Token slots of the device: the least number of any layer."""
        return min(plane.slots for plane in self.planes.planes.values())

    @property
    def block_tokens(self) -> int:
        """Tokens of a device block; 1 if the tensors have no block axis."""
        return max(plane.block_units for plane in self.planes.planes.values())

    def manager(self, index: str, *, block_tokens: int | None = None, **how: Any) -> KVCacheManager:
        """A manager of all blocks of these tensors, which go in the cache's order of eviction.
        `close` closes it, if it is still open.

        Args:
            index: name of the index of this device's blocks, one for each engine or data-parallel
                rank of the node.
            block_tokens: tokens of a device block; None: as in the tensors.
            how: as for `KVCacheManager`: storage, config, weights, costs, counters. Without
                `counters` it counts for the node (`NodeCounters`), as `lightcache top` shows.

        Raises:
            ConfigError: as `KVCacheManager` and `ManagedBlocks`.
            InUse: another live process has an index of that name.
        """
        size = (
            self.block_tokens
            if block_tokens is None
            else count(block_tokens, "block_tokens", 1, self.slots)
        )
        if "counters" not in how:
            how["counters"] = self._node_counters()
        blocks, order = self.slots // size, self.cache.index.eviction
        device = ManagedBlocks(index, block_tokens=size, blocks=blocks, eviction=order)
        try:
            manager = KVCacheManager(self.cache, device, self.backend, **how)
        except BaseException:
            device.close()
            raise
        self._closing.callback(device.close)
        self._closing.callback(manager.close)
        return manager

    def _node_counters(self) -> NodeCounters | None:
        """The counters of the cache; None: they cannot be opened, which stops nothing."""
        if self._counters is None:
            try:
                self._counters = NodeCounters.open(self.cache)
            except LightcacheError as error:
                _log.warning("managers of %s do not count for the node: %s", self.cache.name, error)
                return None
            self._closing.callback(self._counters.close)
        return self._counters

    def offload(self, keys: Keys, slots: Slots) -> Offload:
        """Copy pages from the device to the host, and publish them when the copy has finished.
        Skips pages that the host has or another process is writing. Returns at once.

        Args:
            keys: keys of a prompt's full pages, (n, 2) uint64.
            slots: device slots of all their tokens, in order: n * page_tokens of int32 or int64.

        Raises:
            ConfigError: too few slots, or slots that the transfer engine does not accept.
            Otherwise as `Cache.reserve`.
        """
        self._check(keys, slots)
        new = self.cache.reserve(keys)
        try:
            return Offload(self.engine, new, slots)
        except BaseException:
            new.release()
            raise

    def load(self, keys: Keys, slots: Slots) -> Load:
        """Copy the pages of a prompt that the host has to the device. Returns at once: `tokens` of
        the result is the number of tokens, `transfer.wait_on()` makes the current stream wait for
        them.

        Args:
            keys: keys of the prompt's full pages, (n, 2) uint64.
            slots: device slots for all their tokens, in order; slots of tokens that the host does
                not have are not written.

        Raises:
            ConfigError: too few slots, or slots that the transfer engine does not accept.
            Otherwise as `Cache.match`.
        """
        self._check(keys, slots)
        hit = self.cache.match(keys)
        try:
            return Load(self.engine, hit, slots[: hit.tokens])
        except BaseException:
            hit.release()
            raise

    def close(self) -> None:
        """Close managers, wait for copies, leave the cache. The tensors stay. Everything is closed
        once, also after an error of one part; what raised is closed again by its own `close`.

        Raises:
            InUse: a lease or a view of the pool is still held.
            WaitTimeout: a manager's copy is still in flight: see `KVCacheManager.close`.
            LockTimeout: the lock of the host cache or of the device's index did not come in time.
        """
        self._closing.close()

    def __enter__(self) -> EngineKV:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        leave(self.close, error)

    def _check(self, keys: Keys, slots: Slots) -> None:
        need, slot_count = len(keys) * self.geometry.page_tokens, len(integers(slots, "slots"))
        if slot_count < need:
            raise ConfigError(
                f"slots: expected those of all tokens of {len(keys)} pages, {need}, found "
                f"{slot_count}"
            )


def open_kv(
    tensors: layouts.Tensors,
    *,
    model: str,
    axes: str,
    name: str | None = None,
    page_tokens: int = 64,
    value_dim: int | None = None,
    **options: Any,
) -> EngineKV:
    """Open a host cache for an engine's KV tensors, with geometry, planes, pinned pool and transfer
    engine. For one process that has all heads, in CPU memory or on one GPU.

        with open_kv(kv_caches, model="llama-3-8b@5206a32", axes="kbnhc", size="64GiB") as kv:
            manager = kv.manager("llama-gpu0")

    Ranks that share pages, and models with several KV groups, describe their part themselves:
    `PageGeometry`, `lightcache.kernels.layouts`, `Cache.transfer_engine`.

    Args:
        tensors: one for each layer, or one for all layers: see `lightcache.kernels.layouts`.
        model: identity of the model whose KV this is: its name, and after an "@" revision and
            quantisation.
        axes: axes of a layer's tensor, one letter each, such as "kbnhc" for vLLM's FlashAttention:
            see `layouts.vllm`. With `h` and without `k`, K and V are the two halves of `c`; without
            both, a row is a latent.
        name: of the host cache, which all engines of the node share; created if missing. None: the
            model's default for these tensors and this release, see `Cache.create`.
        page_tokens: tokens of a host page, a multiple or a divisor of the device's block.
        value_dim: elements of a value if they are not half of `c`.
        options: for `Cache.open`: size or pages, lifetime, secret, numa and so on.

    Raises:
        ConfigError: axes that do not fit, tensors that differ, or options that the tensors decide.
        LayoutMismatch: a cache of the given name exists for other KV.
        Otherwise as `Cache.open` and `Cache.pin`.
    """
    geometry, planes = describe(tensors, axes, page_tokens, value_dim)
    decided: dict[str, Any] = {
        "page_bytes": geometry.page_bytes,
        "page_tokens": page_tokens,
        "model": model,
        "fingerprint": f"{model} {geometry.fingerprint()}",
        "device": planes.device != "cpu",
    }
    cache = open_decided("open_kv", name, decided, options)
    try:
        return EngineKV(cache, geometry, planes)
    except BaseException:
        cache.close()
        raise


def open_decided(
    call: str, name: str | None, decided: Mapping[str, Any], options: Mapping[str, Any]
) -> Cache:
    """`Cache.open` with what tensors decide, and the caller's other options.

    Raises:
        ConfigError: an option that the tensors decide.
        Otherwise as `Cache.open`.
    """
    check_decided(call, decided, options)
    return Cache.open(name, **decided, **options)


def check_decided(call: str, decided: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse options that the tensors decide.

    Raises:
        ConfigError: names them.
    """
    if twice := sorted(decided.keys() & options.keys()):
        raise ConfigError(f"{call}: {', '.join(twice)} follow from the tensors; leave them out")


def describe(
    tensors: layouts.Tensors,
    axes: str,
    page_tokens: int,
    value_dim: int | None,
    *,
    rule: Rule | None = None,
    part_bytes: int | None = None,
) -> tuple[PageGeometry, DevicePlanes]:
    """Geometry and device planes of one group of attention layers.

    Args:
        rule: what they need; None: every token.
        part_bytes: of a page of the host, several of which have a page of them; None: one has.

    Raises:
        ConfigError: see `open_kv`.
    """
    check_axes(axes, "open_kv")
    if "l" in axes:
        whole = view(tensors, axes, "open_kv")
        layers, layer = whole.axis("l").size, whole.take("l", 0)
    else:
        listed = list(tensors.values()) if isinstance(tensors, dict) else list(tensors)
        if not listed:
            raise ConfigError("open_kv: expected the tensors of at least one layer, found none")
        layers, layer = len(listed), view(listed[0], axes, "open_kv: the first layer")
    group = replace(
        _group(layer, layers, page_tokens, value_dim), rule=Rule.prefix() if rule is None else rule
    )
    geometry = PageGeometry([group], part_bytes=part_bytes)
    return geometry, layouts.attention(layouts.Shard(geometry), GROUP, tensors, axes=axes)


def _group(layer: View, layers: int, page_tokens: int, value_dim: int | None) -> KVGroup:
    """The KV group of layers with this view's shape."""
    width, heads = layer.row_bytes // layer.element_bytes, layer.axis("h").size
    shape: dict[str, Any] = {"layers": layers, "heads": heads, "page_tokens": page_tokens}
    shape["dtype_bytes"] = layer.element_bytes
    if layer.has("k"):
        return KVGroup.attention(GROUP, head_dim=width, value_dim=value_dim, **shape)
    if not layer.has("h"):
        return KVGroup.attention(GROUP, head_dim=width, content="single", **shape)
    value = width // 2 if value_dim is None else value_dim
    if not 0 < value < width or (value_dim is None and width % 2):
        raise ConfigError(
            f"open_kv: expected rows of a key and a value, found {width} elements and "
            f"value_dim={value_dim!r}; a latent has no axis of heads"
        )
    return KVGroup.attention(GROUP, head_dim=width - value, value_dim=value, **shape)


__all__ = ["EngineKV", "open_kv"]

"""What a rank finds out about its engine: the format of pages, and what makes their bytes useless
to others. It reads SGLang's objects and imports nothing of SGLang."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightcache.connectors.model_facts import (
    config_digest,
    digest,
    files_of,
    name_of,
    version_of,
    words,
)
from lightcache.connectors.page_groups import PageGroup
from lightcache.errors import ConfigError
from lightcache.groups import Rule
from lightcache.kernels import DevicePlanes, KVGroup, PageGeometry, Plane, Shard, join, layouts
from lightcache.runs import PLAIN, Run

GROUP = "kv"
FULL = PageGroup("full", Rule.prefix(), PLAIN)
"""Layers that need all of a prompt: in most models all layers."""
_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
_WINDOWS = "SWAKVPool"
"""Of two pools: one of full attention, one of windows, each with slots of its own."""
_HYBRID = "HybridLinearKVPool"
"""Of the layers with full attention, beside layers with recurrent states."""
_KINDS = {
    ("FULL",): None,
    ("FULL", "SWA"): _WINDOWS,
    ("FULL", "MAMBA"): _HYBRID,
    ("FULL", "MAMBA", "SWA"): _WINDOWS,
}
"""The pool that has others inside, for the parts of SGLang's tree; None: there is none."""
_STATE = "state"
_STATE_KERNELS = (
    "mamba_backend",
    "linear_attn_backend",
    "linear_attn_prefill_backend",
    "linear_attn_decode_backend",
)
"""SGLang's arguments that choose what computes states."""
_HOST_POOLS = tuple(f"{name}Host" for name in _POOLS)
HOST_AXES = {
    "layer_first": "lthc",
    "page_first": "tlhc",
    "page_first_direct": "blnhc",
    "page_head": "bhnlc",
}
"""SGLang's layouts in host memory. Before them stands an axis of K and V, but for latents."""


@dataclass(frozen=True)
class PoolFormat:
    """Pages of one of SGLang's pools, in one rank."""

    group: PageGroup
    geometry: PageGeometry
    shard: Shard
    planes: DevicePlanes
    layers: Mapping[int, int] = field(default_factory=dict)
    """Where in the pool a layer of the model is; empty: there is one pool, which has all in their
    order."""
    name: str = "KV"
    """SGLang's, of the pool: KV, SWA or MAMBA."""


@dataclass(frozen=True)
class Format:
    """Of one rank."""

    model: str
    fingerprint: str
    page_tokens: int
    pools: tuple[PoolFormat, ...]
    """The first has full attention; then windows, then states, of models that have them."""

    @property
    def geometry(self) -> PageGeometry:
        """Of the first pool. Pages of all pools have the same size in the cache."""
        return self.pools[0].geometry

    @property
    def shard(self) -> Shard:
        """Of the first pool."""
        return self.pools[0].shard

    @property
    def planes(self) -> DevicePlanes:
        """Of the first pool."""
        return self.pools[0].planes

    @property
    def device(self) -> str:
        """Where its tensors are."""
        return self.planes.device

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        """Of all pools."""
        return tuple(pool.group for pool in self.pools)

    def places(self, layer: int) -> dict[int, int]:
        """The pools that have a layer of the model, and where: several, where a layer has attention
        and a state. In each -1, which no layer of a pool is, if the layer is not known."""
        found = {
            number: pool.layers.get(layer, -1) if pool.layers else layer
            for number, pool in enumerate(self.pools)
        }
        own = {number: place for number, place in found.items() if place >= 0}
        return own or found

    @property
    def layers(self) -> int:
        """Of the model, in all pools."""
        counts = (max(pool.layers or pool.shard.share().layers) + 1 for pool in self.pools)
        return max(counts)


def check_served(pool: Any, params: Any, components: Iterable[Any]) -> None:
    """Refuse what the linker does not serve.

    Raises:
        ConfigError: says what.
    """
    kinds = tuple(sorted(getattr(component, "name", str(component)) for component in components))
    if kinds not in _KINDS:
        raise ConfigError(
            "expected a model with full attention, and windows and recurrent states at most, found "
            f"{', '.join(kinds)}: others are not served yet"
        )
    outer = _KINDS[kinds]
    if outer is not None and type(pool).__name__ != outer:
        raise ConfigError(
            f"expected a pool of {outer} for a model with {', '.join(kinds)}, found "
            f"{type(pool).__name__}: compressed and unified ones are not served yet"
        )
    windows = "SWA" in kinds
    _check_pool(pool.full_kv_pool if outer else pool, _POOLS[:1] if windows else _POOLS)
    if windows:
        _check_pool(pool.swa_kv_pool, _POOLS[:1])
    if "MAMBA" in kinds:
        _check_states(params.req_to_token_pool)
    for name in ("pp_size", "attn_cp_size"):
        if getattr(params, name, 1) > 1:
            raise ConfigError(f"expected {name} 1, found {getattr(params, name)}: not served yet")
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if getattr(params, "is_eagle", False) or any(getattr(params, name, ()) for name in drafts):
        raise ConfigError(
            "expected no speculative decoding with a draft's own KV, found one: not served yet"
        )


def _check_states(requests: Any) -> None:
    """What else a state consists of than the tensors of `MambaPool`, or where its slots are others
    than the tree's: what SGLang's own description of pools refuses as well
    (`linker_pool_assembler._mamba_device_pool_entry`)."""
    kinds = type(requests).__name__, type(requests.mamba_pool).__name__
    if kinds != ("HybridReqToTokenPool", "MambaPool"):
        raise ConfigError(
            "expected states in a MambaPool of a HybridReqToTokenPool, found "
            f"{kinds[1]} of {kinds[0]}: unified memory and others are not served yet"
        )
    if getattr(requests, "mamba_ckpt_pool", None) is not None:
        raise ConfigError(
            "expected states as the model has them, found checkpoints of 8 bits: not served yet"
        )
    if len(getattr(requests.mamba_pool, "_slot_siblings", ())):
        raise ConfigError(
            "expected states in one pool, found others beside it (short convolutions, n-grams): "
            "not served yet"
        )


def _check_pool(pool: Any, kinds: Sequence[str]) -> None:
    if type(pool).__name__ not in kinds:
        raise ConfigError(
            f"expected a pool of {' or '.join(kinds)}, found {type(pool).__name__}: sparse "
            "indexes, compressed and quantised caches are not served yet"
        )
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ConfigError(f"expected KV with tokens first (nhd), found {pool.kv_cache_layout}")
    scales = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if any(getattr(pool, name, None) is not None for name in scales):
        raise ConfigError("expected KV without scales, found a quantised cache: not served yet")


def describe(
    server: Any,
    model: Any,
    pool: Any,
    page_tokens: int,
    place: tuple[int, int],
    release: str,
    window: int | None = None,
    states: Any = None,
) -> Format:
    """The format of this rank's pages, from the tensors that SGLang has allocated.

    Args:
        server: SGLang's arguments.
        model: its configuration of the model.
        place: the rank and the number of ranks.
        release: of SGLang.
        window: tokens that SGLang keeps of a window, of a model with a pool of them.
        states: its `HybridReqToTokenPool`, of a model with recurrent states.

    Raises:
        ConfigError: tensors that are not served.
    """
    parts = _attention(model, pool, page_tokens, place, window)
    # With two pools a page of the cache is as large as the larger of the two kinds.
    size = max(PageGeometry([part.kind]).page_bytes for part in parts)
    pools = [part.format(size if len(parts) > 1 else None) for part in parts]
    more = []
    if states is not None:
        pools.append(_state_format(states, size, place, len(pools)))
        more = _state_facts(server, states, pools[0])
    return _format(server, model, pool, release, tuple(pools), *more)


def _attention(
    model: Any, pool: Any, page_tokens: int, place: tuple[int, int], window: int | None
) -> list[_Part]:
    """Of the layers with KV: one pool of them, or two."""
    heads, kind = int(model.get_total_num_kv_heads()), type(pool).__name__
    if kind == _HYBRID:
        layers = dict(pool.full_attention_layer_id_mapping)
        return [_Part(FULL, pool.full_kv_pool, heads, page_tokens, place, layers)]
    if kind != _WINDOWS:
        return [_Part(FULL, pool, heads, page_tokens, place)]
    if not window or min(pool.full_layer_nums, pool.swa_layer_nums) < 1:
        raise ConfigError(
            "expected layers with full attention and layers with a window, found "
            f"{pool.full_layer_nums} and {pool.swa_layer_nums} of {window} tokens"
        )
    # SGLang loads so many whole pages, whatever part of the first one the window has.
    pages = -(-window // page_tokens)
    group = PageGroup(f"window{window}", Rule.window(pages * page_tokens), Run(1))
    other = heads
    if getattr(model, "is_hybrid_swa_compress", False):
        other = int(model.get_swa_num_kv_heads(1))
    full, short = (
        {layer: at for layer, (at, windowed) in pool.layers_mapping.items() if windowed == kept}
        for kept in (False, True)
    )
    return [
        _Part(FULL, pool.full_kv_pool, heads, page_tokens, place, full),
        _Part(group, pool.swa_kv_pool, other, page_tokens, place, short, "SWA"),
    ]


class _Part:
    """One of SGLang's pools, in one rank."""

    def __init__(
        self,
        group: PageGroup,
        pool: Any,
        heads: int,
        page_tokens: int,
        place: tuple[int, int],
        layers: Mapping[int, int] | None = None,
        name: str = "KV",
    ) -> None:
        self.group, self._place, self._layers, self._name = group, place, layers or {}, name
        latent = type(pool).__name__.startswith("MLA")
        self._keys: list[Any] = list(pool.kv_buffer if latent else pool.k_buffer)
        self._values: list[Any] = [] if latent else list(pool.v_buffer)
        _, held, width = _one_form(self._keys)
        heads, (rank, ranks) = 1 if latent else heads, place
        if max(1, heads // ranks) != held:
            raise ConfigError(
                f"expected {max(1, heads // ranks)} of {heads} KV heads in rank {rank} of {ranks}, "
                f"found tensors of {tuple(self._keys[0].shape)}"
            )
        self.kind = _kv_group(
            len(self._keys),
            heads,
            (width, _one_form(self._values)[2] if self._values else None),
            self._keys[0].element_size(),
            page_tokens,
            group.rule,
        )

    def format(self, page_bytes: int | None) -> PoolFormat:
        geometry = PageGeometry([self.kind], part_bytes=page_bytes)
        shard = Shard(geometry, *self._place)
        planes = layouts.sglang(shard, GROUP, self._keys, self._values or None)
        return PoolFormat(self.group, geometry, shard, planes, self._layers, self._name)


def _state_format(states: Any, page_bytes: int, place: tuple[int, int], number: int) -> PoolFormat:
    """Of states: a page is one, in as many pages of the cache as it needs. What a rank has of it is
    opaque: another number of ranks divides a convolution otherwise.

    Args:
        number: of the group in the cache.
    """
    (rank, ranks), tensors = place, _state_tensors(states)
    planes = [
        Plane(name, math.prod(tensor.shape[2:]) * tensor.element_size(), ranks)
        for name, tensor in tensors.items()
    ]
    layers = len(states.mamba_map)
    kind = KVGroup.state(_STATE, layers=layers, parts=planes, head_groups=ranks)
    geometry = PageGeometry([kind], part_bytes=page_bytes)
    shard = Shard(geometry, rank, ranks)
    views = [
        layouts.plane(shard, _STATE, name, list(tensor), axes="t" + "c" * (tensor.dim() - 2))
        for name, tensor in tensors.items()
    ]
    group = PageGroup(_STATE, kind.rule, Run(number, geometry.parts))
    return PoolFormat(group, geometry, shard, join(*views), dict(states.mamba_map), "MAMBA")


def _state_tensors(states: Any) -> dict[str, Any]:
    """Of all layers, `[layers, slots, ...]`, by name. Models of convolutions alone have an empty
    recurrent part."""
    cache = states.mamba_pool.mamba_cache
    named = [("temporal", cache.temporal)]
    named += [(f"conv{number}", tensor) for number, tensor in enumerate(cache.conv)]
    found = {name: tensor for name, tensor in named if tensor.numel()}
    layers = {len(tensor) for tensor in found.values()}
    if layers != {len(states.mamba_map)}:
        raise ConfigError(
            f"expected states of {len(states.mamba_map)} layers, found {sorted(layers) or 'none'}"
        )
    return found


def _state_facts(server: Any, states: Any, kv: PoolFormat) -> list[str]:
    """What decides the bytes of a state. Nothing measures where a kernel puts what: SGLang's
    release, its kernels and the device stand for it."""
    described = [
        (name, tuple(tensor.shape[2:]), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in _state_tensors(states).items()
    ]
    kernels = [str(getattr(server, name, None)) for name in _STATE_KERNELS]
    facts = [described, kernels, kv.planes.device.partition(":")[0]]
    return [f"state={digest(facts)}", f"ranks={kv.shard.ranks}"]


def _kv_group(
    layers: int,
    heads: int,
    widths: tuple[int, int | None],
    element_bytes: int,
    page_tokens: int,
    rule: Rule = FULL.rule,
) -> KVGroup:
    """Of a page. Widths: of a key and a value; None: latents."""
    width, value_width = widths
    return KVGroup.attention(
        GROUP,
        layers=layers,
        heads=heads,
        head_dim=width,
        value_dim=value_width,
        dtype_bytes=element_bytes,
        page_tokens=page_tokens,
        content="single" if value_width is None else "separate",
        rule=rule,
        head_groups=heads,
    )


def _format(
    server: Any,
    model: Any,
    pool: Any,
    release: str,
    pools: tuple[PoolFormat, ...],
    *more: str,
) -> Format:
    page_tokens = pools[0].geometry.page_tokens
    facts = [*_facts(server, model, pool, release), f"page={page_tokens}"]
    for each in pools:
        facts.append(each.geometry.fingerprint())
        if each.layers:
            facts.append(f"layers={digest(sorted(each.layers.items()))}")
    facts += more
    return Format(name_of(str(server.model_path)), " ".join(facts), page_tokens, pools)


def check_host_served(pool: Any, config: Any) -> None:
    """Refuse what the storage of HiCache does not serve.

    Args:
        pool: SGLang's in host memory.
        config: its `HiCacheStorageConfig`.

    Raises:
        ConfigError: says what.
    """
    if type(pool).__name__ not in _HOST_POOLS or pool.layout not in HOST_AXES:
        raise ConfigError(
            f"expected a pool of {' or '.join(_HOST_POOLS)} in one of the layouts "
            f"{', '.join(HOST_AXES)}, found {type(pool).__name__} in {pool.layout}: others are not "
            "served yet"
        )
    if pool.kv_buffer is None or getattr(pool, "storage_format_tag", None):
        raise ConfigError("expected pages of plain KV, found a format of SGLang's own")
    layers = getattr(pool, "target_layer_num", pool.layer_num)
    if layers != pool.layer_num or getattr(pool, "v_head_dim", None) not in (
        None,
        getattr(pool, "head_dim", None),
    ):
        raise ConfigError(
            "expected layers of the model alone, with keys as wide as values, found layers of a "
            "draft or other values: not served yet"
        )
    for name in ("pp_size", "attn_cp_size", "dcp_size"):
        if getattr(config, name, 1) > 1:
            raise ConfigError(f"expected {name} 1, found {getattr(config, name)}: not served yet")


def describe_host(
    server: Any, model: Any, pool: Any, place: tuple[int, int], release: str
) -> tuple[Format, str]:
    """The format of pages of a rank's pool in host memory, which is one tensor; and what its keys
    have beside the hash: the part of the heads that it holds. A page has these heads alone.

    Args:
        server, model, release: as for `describe`.
        place: the rank and the number of ranks.

    Raises:
        ConfigError: a tensor that is not served.
    """
    latent = type(pool).__name__.startswith("MLA")
    axes = HOST_AXES[pool.layout] if latent else f"k{HOST_AXES[pool.layout]}"
    buffer = pool.kv_buffer
    if len(buffer.shape) != len(axes):
        raise ConfigError(f"expected a tensor with the axes {axes}, found {tuple(buffer.shape)}")
    layers, held, width = (int(buffer.shape[axes.index(axis)]) for axis in "lhc")
    heads = 1 if latent else int(model.get_total_num_kv_heads())
    rank, ranks = place
    if max(1, heads // ranks) != held:
        raise ConfigError(
            f"expected {max(1, heads // ranks)} of {heads} KV heads in rank {rank} of {ranks}, "
            f"found a tensor of {tuple(buffer.shape)}"
        )
    widths = (width, None if latent else width)
    group = _kv_group(layers, held, widths, buffer.element_size(), int(pool.page_size))
    shard = Shard(PageGeometry([group]))
    planes = layouts.attention(shard, GROUP, buffer, axes=axes)
    parts = heads // held
    part = f"part {rank * parts // ranks} of {parts}" if parts > 1 else ""
    found = PoolFormat(FULL, shard.geometry, shard, planes)
    return _format(server, model, pool, release, (found,)), part


def _one_form(tensors: Sequence[Any]) -> tuple[int, int, int]:
    forms = {(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors}
    if len(forms) != 1 or len(next(iter(forms))[0]) != 3:
        raise ConfigError(
            "expected layers of one shape [tokens, heads, elements] and one dtype, found "
            f"{sorted(map(str, forms)) or 'none'}"
        )
    tokens, heads, width = forms.pop()[0]
    return tokens, heads, width


def _facts(server: Any, model: Any, pool: Any, release: str) -> list[str]:
    config = getattr(model, "hf_config", None)
    path = str(server.model_path)
    dummy = server.load_format == "dummy"
    backends = [
        getattr(server, f"{part}attention_backend", None) for part in ("", "prefill_", "decode_")
    ]
    facts = {
        "engine": f"sglang-{release}",
        "model": name_of(path),
        "version": version_of(path, config, getattr(server, "revision", None)),
        "config": config_digest(config),
        "quant": getattr(server, "quantization", None),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "kv": _dtype_of(server, pool),
        "scales": _scales(server),
        "dummy": f"dummy-{getattr(server, 'random_seed', None)}" if dummy else None,
        "adapters": _adapters(server),
        "backend": "+".join(str(name) for name in dict.fromkeys(backends) if name),
    }
    return words(facts)


def _dtype_of(server: Any, pool: Any) -> str:
    """Of the KV: host pools of each kind of fp8 have bytes, so the argument names it."""
    name = str(pool.dtype).removeprefix("torch.")
    return f"{name}-{getattr(server, 'kv_cache_dtype', None)}" if name == "uint8" else name


def _scales(server: Any) -> str | None:
    """A digest of the file of KV's scales: what lies in the pool is scaled."""
    path = getattr(server, "quantization_param_path", None)
    if not path:
        return None
    try:
        return digest(Path(path).read_text())
    except OSError:
        return digest(str(path))


def _adapters(server: Any) -> str | None:
    """A digest of the adapters of the start: SGLang's hashes name them by name and path, so they
    would stay the same if their files are replaced. An adapter that is loaded later has a number
    of its own in each engine."""
    adapters = []
    for each in getattr(server, "lora_paths", None) or ():
        path = str(getattr(each, "lora_path", each))
        try:
            files: Any = files_of(Path(path))
        except OSError:
            files = None
        adapters.append((str(getattr(each, "lora_name", "")), path, files))
    return digest(sorted(adapters, key=str)) if adapters else None


__all__ = [
    "FULL",
    "GROUP",
    "HOST_AXES",
    "Format",
    "PoolFormat",
    "check_host_served",
    "check_served",
    "describe",
    "describe_host",
]

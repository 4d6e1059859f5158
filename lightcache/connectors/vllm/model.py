"""What a worker finds out about its engine: the format of pages, and what makes their bytes useless
to others. It reads vLLM's objects and imports nothing of vLLM."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightcache.connectors.vllm.messages import Place
from lightcache.connectors.vllm.options import Options
from lightcache.errors import ConfigError
from lightcache.kernels import DevicePlanes, KVGroup, PageGeometry, Shard, layouts

_log = logging.getLogger("lightcache.connectors")
LEAST_PAGE = 1 << 20
"""Bytes of a page over all ranks, from which on copies reach their full rate."""
GROUP = "kv"
_SERVED = ("FullAttentionSpec", "MLAAttentionSpec")


@dataclass(frozen=True)
class Format:
    """Of one rank."""

    place: Place
    geometry: PageGeometry
    shard: Shard
    planes: DevicePlanes
    block_tokens: int
    ranks: int


def check_served(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what the connector does not serve.

    Raises:
        ConfigError: says what.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in _SERVED:
        raise ConfigError(
            f"expected one group of layers with full attention, found {', '.join(kinds) or 'none'}:"
            " models with windows or recurrent states are not served yet"
        )
    # Without both a backend never sees a prompt's later part alone; vLLM's CPU backend for latents
    # computes it wrongly, so vLLM switches both off.
    alone = vllm_config.cache_config.enable_prefix_caching
    alone = alone or vllm_config.scheduler_config.enable_chunked_prefill
    if kinds[0].startswith("MLA") and not alone:
        raise ConfigError(
            "expected prefix caching or chunked prefill with latent attention (MLA), found both "
            "off: vLLM switches them off where a backend computes wrongly after a cached prefix"
        )
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"expected {name} 1, found {getattr(parallel, name)}: not served yet")


def describe(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], rank: int, options: Options
) -> Format:
    """The format of this rank's pages, from the tensors that vLLM has allocated.

    Raises:
        ConfigError: models or tensors that are not served.
    """
    check_served(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    spec, tokens = group.kv_cache_spec, group.kv_cache_spec.block_size
    layers = _own_tensors(tensors, group.layer_names)
    shape, dtype = _one_form(layers)
    _, heads, _, width = shape
    ranks = vllm_config.parallel_config.tensor_parallel_size
    latent = type(spec).__name__.startswith("MLA")
    model = vllm_config.model_config
    all_heads = 1 if latent else model.get_total_num_kv_heads()
    if max(1, all_heads // ranks) != heads:
        raise ConfigError(
            f"expected {max(1, all_heads // ranks)} of {all_heads} KV heads in rank {rank} of "
            f"{ranks}, found tensors of {tuple(shape)}"
        )
    number = dtype.itemsize
    bytes_of_block = len(layers) * all_heads * tokens * width * number
    most = options.blocks_per_page or blocks_per_page(bytes_of_block)
    attention = KVGroup.attention(
        GROUP,
        layers=len(layers),
        heads=all_heads,
        head_dim=width,
        dtype_bytes=number,
        page_tokens=tokens * most,
        content="single",
        head_groups=all_heads,
    )
    geometry = PageGeometry([attention])
    shard = Shard(geometry, rank, ranks)
    numbered = dict(enumerate(layers.values()))
    planes = layouts.vllm(shard, GROUP, numbered, axes="bhnc")
    facts = [
        *model_facts(vllm_config),
        f"block={tokens}",
        f"element={str(dtype).removeprefix('torch.')}",
        f"layers={_digest(list(layers))}",
        *_layout_facts(vllm_config, layers, tokens),
        geometry.fingerprint(),
    ]
    place = Place(
        name=options.name,
        model=model_name(vllm_config),
        fingerprint=" ".join(facts),
        page_bytes=geometry.part_bytes,
        page_tokens=geometry.page_tokens,
    )
    return Format(place, geometry, shard, planes, tokens, ranks)


def blocks_per_page(bytes_of_block: int) -> int:
    """The least power of two with which a page of all ranks is large enough. It depends on the
    model alone, so engines of any tensor parallelism agree."""
    blocks = 1
    while blocks * bytes_of_block < LEAST_PAGE:
        blocks *= 2
    return blocks


def _own_tensors(tensors: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Those of the group, in the order of their layers; of layers that share one, one."""
    found: dict[int, tuple[str, Any]] = {}
    for name in sorted(set(names) & set(tensors), key=_order):
        found.setdefault(tensors[name].data_ptr(), (name, tensors[name]))
    return dict(found.values())


def _order(name: str) -> list[tuple[int, str]]:
    """Sorts layer 9 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _one_form(layers: Mapping[str, Any]) -> tuple[tuple[int, ...], Any]:
    forms = {(tuple(tensor.shape), tensor.dtype) for tensor in layers.values()}
    if len(forms) != 1 or len(next(iter(forms))[0]) != 4:
        raise ConfigError(
            "expected layers of one shape [blocks, heads, tokens, elements] and one dtype, found "
            f"{sorted(map(str, forms)) or 'none'}"
        )
    return forms.pop()


# ---- What decides the content of a page.


def model_name(vllm_config: Any) -> str:
    """As in caches' names: the one on the hub, or the last folder of a path."""
    name = str(vllm_config.model_config.model)
    return Path(name).resolve().name if Path(name).exists() else name


def model_facts(vllm_config: Any) -> list[str]:
    """Words of the fingerprint: model, revision, quantisation, dtypes, drafts."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config: Any = getattr(model, "hf_config", None)
    folder = Path(str(model.model))
    version = getattr(config, "_commit_hash", None) or getattr(model, "revision", None)
    if folder.is_dir():
        version = _digest(_files(folder))
    load = vllm_config.load_config
    dummy = f"{load.load_format}-{model.seed}" if load.load_format == "dummy" else None
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    own = {name: value for name, value in described.items() if not name.startswith("_")}
    speculative = vllm_config.speculative_config
    drafts = None
    if speculative is not None:
        drafts = f"{getattr(speculative, 'method', None)}:{getattr(speculative, 'model', None)}"
    words = {
        "model": model_name(vllm_config),
        "version": version,
        "config": _digest(own),
        "quant": getattr(model, "quantization", None),
        "kv": cache.cache_dtype,
        "dtype": str(model.dtype).removeprefix("torch."),
        "drafts": drafts,
        "dummy": dummy,
    }
    return [_word(f"{name}={value}") for name, value in words.items() if value is not None]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Of a model in a folder: names, sizes and times, as reading all bytes takes minutes."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _digest(facts: Any) -> str:
    data = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(data, digest_size=6, person=b"lightcache vllm").hexdigest()


def _word(text: str) -> str:
    return re.sub(r"\s+", "_", text)


# ---- The layout of a backend, as measured.


def _layout_facts(vllm_config: Any, layers: Mapping[str, Any], tokens: int) -> list[str]:
    """Names the backend, and where it puts an element within a block."""
    contexts = vllm_config.compilation_config.static_forward_context
    backends = sorted({_backend(contexts.get(name)) for name in layers})
    try:
        measured = measure(contexts, layers, tokens)
    except Exception as error:
        # Then two releases are different though they may not be: a miss, never a wrong byte.
        _log.info("lightcache: the layout of %s is not measured: %s", backends, error)
        measured = f"release-{_release()}"
    return [_word(f"backend={'+'.join(backends)}"), _word(f"layout={measured}")]


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else "unknown"


def _release() -> str:
    version = str(import_module("vllm").__version__)
    return ".".join(version.split("+")[0].split(".")[:2])


def measure(contexts: Mapping[str, Any], layers: Mapping[str, Any], tokens: int) -> str:
    """A digest of one head of a block in which the backend's own operation has put a pattern, the
    same for each head and layer: so it does not depend on the number of ranks.

    Raises:
        Exception: the backend has no such operation, or layers and heads are not alike.
    """
    torch = import_module("torch")
    found: set[str] = set()
    for name, cache in layers.items():
        layer = contexts[name]
        blocks, heads, rows, width = cache.shape
        last = blocks - 1  # no request has a block yet
        before = cache[last].clone()
        values = torch.arange(tokens * (width // 2), device=cache.device)
        # Whole numbers of -8 to 7, which each dtype of KV holds.
        key = ((values * 7 + values // 5) % 16 - 8).reshape(tokens, 1, -1)
        value = ((values * 3 + values // 11) % 16 - 8).reshape(tokens, 1, -1)
        kind = next(layer.parameters(), torch.empty(0, dtype=torch.float32)).dtype
        kind = getattr(layer, "dtype", None) or (cache.dtype if cache.is_floating_point() else kind)
        both = [part.expand(tokens, heads, -1).to(kind).contiguous() for part in (key, value)]
        slots = torch.arange(last * rows, last * rows + rows, device=cache.device)[:tokens]
        if rows != tokens:
            raise ConfigError("the backend cuts vLLM's blocks")
        try:
            layer.impl.do_kv_cache_update(layer, *both, cache, slots)
            for head in range(heads):
                row = cache[last, head].contiguous().view(torch.uint8).cpu().numpy().tobytes()
                found.add(hashlib.blake2b(row, digest_size=8).hexdigest())
        finally:
            cache[last].copy_(before)
    if len(found) != 1:
        raise ConfigError(f"{len(found)} patterns in {len(layers)} layers")
    return found.pop()


__all__ = [
    "Format",
    "blocks_per_page",
    "check_served",
    "describe",
    "measure",
    "model_facts",
    "model_name",
]

"""What a worker finds out about its engine: the format of pages, and what makes their bytes useless
to others. It reads vLLM's objects and imports nothing of vLLM."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lightcache.connectors.model_facts import (
    config_digest,
    digest,
    name_of,
    version_of,
    word,
    words,
)
from lightcache.connectors.vllm.messages import BlockGroup, Place
from lightcache.connectors.vllm.options import Options
from lightcache.errors import ConfigError
from lightcache.kernels import (
    DevicePlanes,
    KVGroup,
    PageGeometry,
    Plane,
    Rule,
    Shard,
    join,
    layouts,
)
from lightcache.layout import GROUPS
from lightcache.runs import Run

_log = logging.getLogger("lightcache.connectors")
LEAST_PAGE = 1 << 20
"""Bytes of a page over all ranks, from which on copies reach their full rate."""
GROUP = "kv"
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
_STATE = "MambaSpec"
_PARTS = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


@dataclass(frozen=True)
class GroupFormat:
    """Pages of a group, and where this rank has them."""

    geometry: PageGeometry
    shard: Shard
    planes: DevicePlanes


@dataclass(frozen=True)
class Format:
    """Of one rank."""

    place: Place
    groups: tuple[GroupFormat, ...]
    """In the order of the place's."""
    ranks: int

    @property
    def device(self) -> str:
        """Where its tensors are."""
        return self.groups[0].planes.device


def check_served(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what the connector does not serve.

    Raises:
        ConfigError: says what.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _specs(group.kv_cache_spec).values()]
    kinds = list(dict.fromkeys(type(spec).__name__ for spec in specs))
    if not 0 < len(groups) <= GROUPS or set(kinds) - {*_WHOLE, *_PARTS, _STATE}:
        raise ConfigError(
            f"expected 1 to {GROUPS} groups of layers with full attention, sliding windows, chunks "
            f"or recurrent states, found {len(groups)} of {', '.join(kinds) or 'none'}"
        )
    several = any(len(_specs(group.kv_cache_spec)) > 1 for group in groups)
    if several and _STATE in kinds:
        raise ConfigError("expected states of one shape in a group, found several")
    modes = {spec.mamba_cache_mode for spec in specs if type(spec).__name__ == _STATE}
    if modes - {"align"}:
        raise ConfigError(
            f"expected mamba_cache_mode 'align' with recurrent states, found {modes.pop()!r}: "
            "start vLLM with --enable-prefix-caching --mamba-cache-mode align"
        )
    if any(
        getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True)
        for group in groups
    ):
        raise ConfigError("expected groups of layers on the device, found one that is not moved")
    # Without both a backend never sees a prompt's later part alone; vLLM's CPU backend for latents
    # computes it wrongly, so vLLM switches both off.
    alone = vllm_config.cache_config.enable_prefix_caching
    alone = alone or vllm_config.scheduler_config.enable_chunked_prefill
    if "MLAAttentionSpec" in kinds and not alone:
        raise ConfigError(
            "expected prefix caching or chunked prefill with latent attention (MLA), found both "
            "off: vLLM switches them off where a backend computes wrongly after a cached prefix"
        )
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"expected {name} 1, found {getattr(parallel, name)}: not served yet")
    if parallel.pipeline_parallel_size > 1 and (len(groups) > 1 or several):
        raise ConfigError(
            "expected one group of layers of one shape with pipeline parallelism, found "
            f"{len(groups)} of {', '.join(kinds)}: a rank does not know to which groups the layers "
            "of other stages belong, or their shapes"
        )


def _specs(spec: Any) -> Mapping[str, Any]:
    """Of a group's layers: where they have several shapes, vLLM has one of each layer."""
    found: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return {"": spec} if found is None else found


def rank_of(parallel_config: Any) -> int:
    """Of a worker, among all of one engine: vLLM counts data-parallel engines first, then stages of
    the pipeline, then tensor-parallel ranks."""
    return int(parallel_config.rank) % ranks_of(parallel_config)


def ranks_of(parallel_config: Any) -> int:
    """Workers of one engine, which write parts of the same pages."""
    return int(parallel_config.pipeline_parallel_size * parallel_config.tensor_parallel_size)


def block_groups(kv_cache_config: Any) -> tuple[BlockGroup, ...]:
    """The groups as the cache has them. The first of full attention has keys of its own, as that of
    a model without others."""
    found: list[BlockGroup] = []
    number = 1
    for group in kv_cache_config.kv_cache_groups:
        spec, run = next(iter(_specs(group.kv_cache_spec).values())), Run(number)
        if type(spec).__name__ in _WHOLE:
            rule, name = Rule.prefix(), "full"
            if not any(each.whole for each in found):
                run = Run()
        elif type(spec).__name__ == _STATE:
            rule, name = Rule.point(), "state"
        elif type(spec).__name__ == "ChunkedLocalAttentionSpec":
            rule = Rule.chunk(spec.attention_chunk_size)
            name = rule.name
        else:
            # A layer that sees W tokens, its own among them; vLLM may keep more for drafts.
            tokens = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
            rule, name = Rule.window(max(1, tokens)), f"window{spec.sliding_window}"
        number += run.group > 0
        alike = sum(each.rule == rule for each in found)
        found.append(
            BlockGroup(f"{name}-{alike + 1}" if alike else name, rule, run, spec.block_size)
        )
    return tuple(found)


def describe(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], rank: int, options: Options
) -> Format:
    """The format of this rank's pages, from the tensors that vLLM has allocated.

    Raises:
        ConfigError: models or tensors that are not served.
    """
    check_served(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    rank %= ranks
    groups = block_groups(kv_cache_config)
    parts = [
        _parts(vllm_config, group, tensors, rank, ranks)
        for group in kv_cache_config.kv_cache_groups
    ]
    unit = math.lcm(*(group.block_tokens for group in groups))
    most = options.blocks_per_page or blocks_per_page(
        max(sum(part.bytes_of(unit) for part in each) for each in parts),
        unit,
        min((_seen(group.rule) for group in groups if not group.whole), default=None),
    )
    kinds = [
        [part.group(unit * most, group.rule) for part in each]
        for each, group in zip(parts, groups, strict=True)
    ]
    size = max(PageGeometry(each).page_bytes for each in kinds)
    formats, facts = [], model_facts(vllm_config)
    for each, forms in zip(parts, kinds, strict=True):
        geometry = PageGeometry(forms, part_bytes=size)
        layers = sorted({number for part in each for number in part.numbers})
        shard = Shard(geometry, rank, ranks, layers=layers)
        planes = join(*(part.planes(shard) for part in each))
        formats.append(GroupFormat(geometry, shard, planes))
        for part in each:
            facts += part.facts(vllm_config)
        facts.append(geometry.fingerprint())
    place = Place(
        name=options.name,
        model=model_name(vllm_config),
        fingerprint=" ".join(facts),
        page_bytes=size,
        page_tokens=unit * most,
        groups=groups,
    )
    return Format(place, tuple(formats), ranks_of(parallel))


def _seen(rule: Rule) -> int:
    """Tokens that a layer sees at most: of a window, or of a chunk."""
    return max(rule.back + 1, rule.align)


def _parts(
    vllm_config: Any, group: Any, tensors: Mapping[str, Any], rank: int, ranks: int
) -> list[_Part]:
    """Of a group, by the shapes of its layers: one, or several where vLLM says them of each layer,
    in the order of their first layers."""
    layers, specs = _own_tensors(tensors, group.layer_names), _specs(group.kv_cache_spec)
    if "" in specs:
        return [_Part(vllm_config, GROUP, specs[""], layers, rank, ranks)]
    forms: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in layers.items():
        form = type(specs[name]).__name__, tuple(tensor.shape[1:]), tensor.dtype
        forms.setdefault(form, {})[name] = tensor
    return [
        _Part(vllm_config, f"{GROUP}{at}", specs[next(iter(own))], own, rank, ranks)
        for at, own in enumerate(forms.values())
    ]


class _Part:
    """Layers of one shape, of one group and in one rank."""

    def __init__(
        self,
        vllm_config: Any,
        name: str,
        spec: Any,
        layers: dict[str, Any],
        rank: int,
        ranks: int,
    ) -> None:
        self.name, self._spec, self.layers = name, spec, layers
        self.state = type(spec).__name__ == _STATE
        self.plane = "state" if self.state else "kv"
        self.tokens = spec.block_size
        self.names, self.numbers = [*self.layers], range(len(self.layers))
        """Of the layers of all stages, and the places of this one's among them."""
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            self.names, self.numbers = _stages(vllm_config, self.names)
        shape, self.dtype = _one_form(self.layers)
        _, heads, rows, self.width = shape
        if self.state:
            # What each rank has is opaque: another number of ranks divides a convolution otherwise.
            self.heads = 1 if spec.tp_replicated else ranks
            if heads != 1 or rows != 1:
                raise ConfigError(f"expected one state in a block, found tensors of {shape}")
            return
        latent = type(spec).__name__.startswith("MLA")
        self.heads = 1 if latent else _kv_heads(vllm_config.model_config, self.names)
        if name != GROUP and (ranks == 1 or heads > 1):
            self.heads = heads * ranks  # the model's number may be that of other layers
        if max(1, self.heads // ranks) != heads:
            raise ConfigError(
                f"expected {max(1, self.heads // ranks)} of {self.heads} KV heads in rank {rank} "
                f"of {ranks}, found tensors of {tuple(shape)}"
            )

    def bytes_of(self, tokens: int) -> int:
        """Over all ranks, of a page of so many tokens."""
        rows = 1 if self.state else tokens
        size: int = len(self.names) * self.heads * rows * self.width * self.dtype.itemsize
        return size

    def group(self, page_tokens: int, rule: Rule) -> KVGroup:
        if self.state:
            part = Plane(self.plane, self.width * self.dtype.itemsize, self.heads)
            layers = len(self.names)
            return KVGroup.state(self.name, layers=layers, parts=[part], head_groups=self.heads)
        return KVGroup.attention(
            self.name,
            layers=len(self.names),
            heads=self.heads,
            head_dim=self.width,
            dtype_bytes=self.dtype.itemsize,
            page_tokens=page_tokens,
            content="single",
            rule=rule,
            head_groups=self.heads,
        )

    def planes(self, shard: Shard) -> DevicePlanes:
        """Where they lie."""
        numbered = dict(zip(self.numbers, self.layers.values(), strict=True))
        return layouts.plane(shard, self.name, self.plane, numbered, axes="bhnc")

    def facts(self, vllm_config: Any) -> list[str]:
        """Words of the fingerprint."""
        layout = (
            self._state_facts(vllm_config)
            if self.state
            else _layout_facts(vllm_config, self.layers, self.tokens)
        )
        return [
            f"block={self.tokens}",
            f"element={str(self.dtype).removeprefix('torch.')}",
            f"layers={digest(self.names)}",
            *layout,
        ]

    def _state_facts(self, vllm_config: Any) -> list[str]:
        """Nothing measures where a backend puts what: release and device stand for it."""
        spec, device = self._spec, next(iter(self.layers.values())).device
        kernels = getattr(getattr(vllm_config, "mamba_config", None), "backend", None)
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        described = [f"{tuple(shape)} {dtype}" for shape, dtype in parts]
        facts = [described, _name(spec.mamba_type), _name(kernels), spec.num_speculative_blocks]
        where = device.type
        if where == "cuda":
            where += ".".join(map(str, import_module("torch").cuda.get_device_capability(device)))
        return [
            f"state={digest(facts)}",
            f"ranks={self.heads}",
            f"layout=release-{_release()}-{where}",
        ]


def _kv_heads(model: Any, names: list[str]) -> int:
    """Of the whole model, in each of these layers: they may be others than in the other layers.

    Raises:
        ConfigError: these differ among themselves.
    """
    whole: int = model.get_total_num_kv_heads()
    parts: Any = getattr(model, "model_arch_config", None)
    if getattr(parts, "per_layer_overrides", None) is None:
        return whole
    heads = set()
    for name in names:
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is None:
            raise ConfigError(f"expected the number of a layer in its name, found {name}")
        heads.add(int(parts[int(layer[1])].total_num_kv_heads))
    if len(heads) != 1:
        raise ConfigError(
            f"expected a group of layers with as many KV heads, found {sorted(heads)}"
        )
    return heads.pop()


def _stages(vllm_config: Any, own: list[str]) -> tuple[list[str], range]:
    """The names of a model's layers in all stages of the pipeline, and where the own ones are.

    Raises:
        ConfigError: the names do not tell.
    """
    model = vllm_config.model_config
    start, end = model.get_layers_start_end_indices(vllm_config.parallel_config)
    forms = {re.sub(r"\d+", "{}", name) for name in own}
    form = forms.pop() if len(forms) == 1 else ""
    if form.count("{}") != 1 or own != [form.format(number) for number in range(start, end)]:
        raise ConfigError(
            f"expected one KV cache for each of layers {start} to {end - 1} in this stage of the "
            f"pipeline, found {', '.join(own)}"
        )
    total = model.get_total_num_hidden_layers()
    return [form.format(number) for number in range(total)], range(start, end)


def blocks_per_page(bytes_of_block: int, tokens: int = 1, window: int | None = None) -> int:
    """The least power of two with which a page of all ranks is large enough. It depends on the
    model alone, so engines of any tensor parallelism agree. A page of several blocks is no longer
    than a window: vLLM still has all of its blocks when the last one is computed."""
    blocks = 1
    while blocks * bytes_of_block < LEAST_PAGE and (
        window is None or 2 * blocks * tokens <= window
    ):
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
    return name_of(str(vllm_config.model_config.model))


def model_facts(vllm_config: Any) -> list[str]:
    """Words of the fingerprint: model, revision, quantisation, dtypes, drafts."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config: Any = getattr(model, "hf_config", None)
    version = version_of(str(model.model), config, getattr(model, "revision", None))
    load = vllm_config.load_config
    dummy = f"{load.load_format}-{model.seed}" if load.load_format == "dummy" else None
    speculative = vllm_config.speculative_config
    drafts = None
    if speculative is not None:
        drafts = f"{getattr(speculative, 'method', None)}:{getattr(speculative, 'model', None)}"
    facts = {
        "model": model_name(vllm_config),
        "version": version,
        "config": config_digest(config),
        "quant": getattr(model, "quantization", None),
        "kv": cache.cache_dtype,
        "dtype": str(model.dtype).removeprefix("torch."),
        "drafts": drafts,
        "dummy": dummy,
    }
    return words(facts)


def _name(value: Any) -> str:
    """Of a member of an enumeration."""
    return str(getattr(value, "name", value))


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
    return [word(f"backend={'+'.join(backends)}"), word(f"layout={measured}")]


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
    "GroupFormat",
    "block_groups",
    "blocks_per_page",
    "check_served",
    "describe",
    "measure",
    "model_facts",
    "model_name",
    "rank_of",
]

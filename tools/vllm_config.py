"""`lightcache vllm-config`: the line that switches the cache on for vLLM, and what does not fit."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lightcache._arguments import format_size, parse_size
from lightcache.cache import cache_name
from lightcache.connectors.vllm.model import blocks_per_page
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.room import shortage
from lightcache.errors import ConfigError
from lightcache.page_index import geometry
from lightcache.shm import list_segments
from lightcache.storage.urls import check_url
from lightcache.tools.output import BROKEN, Command, emit, json_option

CONNECTOR = {
    "kv_connector": "LightcacheConnector",
    "kv_connector_module_path": "lightcache.connectors.vllm",
    "kv_role": "kv_both",
}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
REFUSED = (
    "vLLM itself refuses with every connector: encoder-decoder models, --use-replayssm, and "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True unless sleep mode is enabled"
)
NOT_SERVED = (
    "the connector says so once and vLLM runs as without it for: layers of several shapes, "
    "windows, chunks or states beside other layers in a pipeline, context parallelism, ranks on "
    "other nodes"
)
STATES = (
    "a model with recurrent states is served only with --enable-prefix-caching, and with its "
    "default of --mamba-cache-mode, align. vLLM keeps the state after a prompt's last whole block, "
    "and that after a prefix which prompts share; --prefix-cache-retention-interval N, a "
    "multiple of the block, keeps more of a long prompt: those of steps that end at a multiple of N"
)
STATE_KINDS = {"linear_attention", "mamba", "mamba2", "conv"}
STATE_WORDS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "state_size",
    "mamba_d_state",
    "linear_attn_config",
)


@dataclass(frozen=True)
class Shape:
    """Of a model's KV, as config.json has it."""

    layers: int
    """In the largest group: all, or with windows as many as vLLM puts into one."""
    heads: int
    width: int
    """Elements of a head and token: K and V, or a latent."""
    groups: int = 1
    window: int | None = None
    """Tokens that some layers see at most, of a window or a chunk; None: all see all."""


@dataclass(frozen=True)
class Page:
    """What a page of the cache would be."""

    tokens: int
    bytes: int
    blocks: int
    pages: int
    """Of the size that is wanted."""
    groups: int = 1
    """Of layers: each has pages of its own for the same tokens."""


@click.command(name="vllm-config", cls=Command)
@click.argument("model")
@click.option("--size", default=Options.size, show_default=True, help="Memory for pages.")
@click.option("--storage", multiple=True, metavar="URL", help="A storage; the nearest one first.")
@click.option("--secret-file", help="The file that all containers share.")
@click.option("--pool-path", help="Folder of the pool, such as one of huge pages; else /dev/shm.")
@click.option("--numa", help='"interleave" or the number of a memory node.')
@click.option("--blocks-per-page", type=click.IntRange(1), help="Blocks of vLLM in a page.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True,
              help="That of `vllm serve`: to compute the size of a page.")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", *BYTES]), default="auto",
              show_default=True, help="The same.")  # fmt: skip
@json_option
@click.pass_context
def vllm_config(
    ctx: click.Context,
    /,
    model: str,
    block_size: int,
    kv_cache_dtype: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Print the line of `vllm serve` for MODEL, a folder or a name on the hub.

    Nothing is fetched: of a model that is not on this machine, only the machine is examined.
    Status 1: something would not work; it is named.
    """
    extra = {name: value for name, value in given.items() if value not in (None, ())}
    if isinstance(extra.get("numa"), str) and extra["numa"].isdigit():
        extra["numa"] = int(extra["numa"])
    if "storage" in extra:
        urls = list(extra["storage"])
        check_url(urls)
        extra["storage"] = urls[0] if len(urls) == 1 else urls
    options = Options.of(extra)
    config = read_config(model)
    page = None
    if config is not None and (shape := shape_of(config)) is not None:
        page = page_of(shape, element_bytes(config, kv_cache_dtype), block_size, options)
    problems = [*of_model(config), *of_machine(model, options, page)]
    value = {**CONNECTOR, "kv_connector_extra_config": extra}
    line = f"vllm serve {shlex.quote(model)} --kv-transfer-config {shlex.quote(json.dumps(value))}"
    notes = [*of_page(model, config, page), REFUSED, NOT_SERVED]
    if config is not None and has_states(config):
        line += " --enable-prefix-caching"
        notes.insert(0, STATES)
    if as_json:
        emit(
            {
                "line": line,
                "kv_transfer_config": value,
                "page": None if page is None else asdict(page),
                "problems": problems,
                "notes": notes,
            }
        )
    else:
        click.echo(line)
        for problem in problems:
            click.echo(f"does not work: {problem}", err=True)
        for note in notes:
            click.echo(f"note: {note}", err=True)
    if problems:
        ctx.exit(BROKEN)


# ---- the model


def read_config(model: str) -> Mapping[str, Any] | None:
    """config.json of a folder, or of the hub's cache on this machine; None: it is not here.

    Raises:
        ConfigError: it cannot be read.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    found = [Path(model) / "config.json", *sorted(snapshots.glob("*/config.json"))]
    for path in found:
        if path.is_file():
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{path}: expected the configuration of a model: {error}"
                ) from error
            if not isinstance(config, dict):
                raise ConfigError(f"{path}: expected the configuration of a model, found a list")
            return config
    if Path(model).is_dir():
        raise ConfigError(f"{model}: expected a model's folder, found no config.json in it")
    return None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the language model, where a model has several parts."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """None: the configuration does not say it in the usual words, or the model has states."""
    text = text_config(config)
    if has_states(config):
        return None
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        return None
    if text.get("kv_lora_rank"):
        return Shape(layers, 1, int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0))
    dim = text.get("head_dim") or int(text.get("hidden_size") or 0) // heads
    kv_heads = text.get("num_key_value_heads") or heads
    layers, groups, window = grouped(text, layers)
    return Shape(layers, int(kv_heads), 2 * int(dim), groups, window) if dim else None


def grouped(text: Mapping[str, Any], layers: int) -> tuple[int, int, int | None]:
    """Layers of vLLM's largest group, groups, and the window of some: groups have as many layers as
    the rarer kind, or as the other one if both kinds have about as many."""
    kinds, pattern = text.get("layer_types"), text.get("sliding_window_pattern")
    chunks = isinstance(kinds, list) and "chunked_attention" in kinds
    window = text.get("attention_chunk_size" if chunks else "sliding_window")
    if not isinstance(window, int) or not window or text.get("use_sliding_window") is False:
        return layers, 1, None
    whole = kinds.count("full_attention") if isinstance(kinds, list) else 0
    if not whole and isinstance(pattern, int) and pattern > 1:
        whole = layers // pattern
    few, many = sorted((whole, layers - whole))
    if not few:
        return layers, 1, window if whole < layers else None
    each = many if many < 1.5 * few else few
    return each, -(-few // each) + -(-many // each), window


def element_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of an element of KV."""
    text = text_config(config)
    own = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    # vLLM computes models of float32 in 16 bits, unless it is told otherwise.
    return BYTES[dtype] if dtype != "auto" else 2 if own == "float32" else BYTES.get(own, 2)


def of_model(config: Mapping[str, Any] | None) -> Iterator[str]:
    """What the model itself speaks against."""
    if config is None:
        return
    text = text_config(config)
    if config.get("is_encoder_decoder"):
        yield "not with a connector: vLLM refuses encoder-decoder models with any; leave it out"
    served = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
    if kinds := set(text.get("layer_types") or ()) - served - STATE_KINDS:
        yield f"not served yet: {', '.join(sorted(kinds))}; vLLM runs as without the line"


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether some of its layers have a recurrent state in place of KV."""
    text = text_config(config)
    kinds = set(text.get("layer_types") or ())
    return bool(kinds & STATE_KINDS) or any(text.get(word) for word in STATE_WORDS)


# ---- pages


def page_of(shape: Shape, element: int, block: int, options: Options) -> Page:
    """What the connector would make of it."""
    bytes_of_block = shape.layers * shape.heads * block * shape.width * element
    blocks = options.blocks_per_page or blocks_per_page(bytes_of_block, block, shape.window)
    page_bytes = blocks * bytes_of_block
    pages = parse_size(options.size) // page_bytes
    return Page(blocks * block, page_bytes, blocks, pages, shape.groups)


def of_page(model: str, config: Mapping[str, Any] | None, page: Page | None) -> Iterator[str]:
    """What it holds, and what is lost."""
    if config is None:
        yield (
            f"{model} is not on this machine: whether it is served, and how large a page is, is "
            "not known here; vLLM's log says it at the start"
        )
    elif has_states(config):
        yield (
            "a page is one of vLLM's blocks and a state lies in one. Beside attention vLLM makes "
            "blocks so long that they hold a state, hundreds of tokens, and its log says how long; "
            "the end of a prompt after its last whole block is not saved"
        )
    elif page is None:
        yield "config.json does not say layers and heads in the usual words: no page is computed"
    else:
        each = f", in each of {page.groups} groups of layers" if page.groups > 1 else ""
        yield (
            f"a page has {page.tokens} tokens, {page.blocks} of vLLM's blocks, "
            f"{format_size(page.bytes)} over all ranks{each}; room for "
            f"{page.pages // page.groups * page.tokens:,} tokens. The end of a prompt after its "
            f"last whole page is not saved: {page.tokens // 2} tokens on average"
        )


# ---- the machine


def of_machine(model: str, options: Options, page: Page | None) -> Iterator[str]:
    """What this machine, or container, has too little of."""
    if page is not None and not page.pages:
        yield f"size: expected at least a page of {format_size(page.bytes)}, found {options.size}"
    folder = model if not Path(model).exists() else Path(model).resolve().name
    own = cache_name(options.name or folder, "-").rpartition("-")[0]
    there = [each.name for each in list_segments() if each.name.rpartition("-")[0] == own]
    index = geometry(page.pages).end if page is not None and page.pages else 0
    if not there and (lacking := shortage(options, index)) is not None:
        yield lacking
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield "vLLM refuses PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with any connector"

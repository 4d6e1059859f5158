"""`lightcache vllm-config`: the line that switches the cache on for vLLM, and what does not fit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lightcache._arguments import format_size, parse_size
from lightcache.cache import cache_name
from lightcache.connectors.model_facts import name_of
from lightcache.connectors.vllm.model import blocks_per_page
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.room import shortage
from lightcache.errors import ConfigError
from lightcache.kernels import KVGroup, PageGeometry
from lightcache.page_index import geometry
from lightcache.shm.listing import list_segments
from lightcache.storage.disk.backend import parse
from lightcache.storage.urls import is_service
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
    "the connector says so once and vLLM runs as without it for: windows, chunks, states or layers "
    "of several shapes beside other layers in a pipeline, context parallelism, ranks on other nodes"
)
STATES = (
    "a model with recurrent states is served only with --enable-prefix-caching, and with its "
    "default of --mamba-cache-mode, align. vLLM keeps the state after a prompt's last whole block, "
    "and that after a prefix which prompts share; --prefix-cache-retention-interval N, a "
    "multiple of the block, keeps more of a long prompt: those of steps that end at a multiple of N"
)
FULL, PART = "all tokens", "a window or chunk"
UNUSUAL = "config.json does not say layers and heads in the usual words: no page is computed"
STATE_KINDS = {"linear_attention", "mamba", "mamba2", "conv"}
STATE_WORDS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "state_size",
    "mamba_d_state",
    "linear_attn_config",
)


ALTERNATING = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4}
"""Of models whose config.json may leave it out: one layer of so many, the last, sees all tokens."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
NUMBERS = (
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers"),
    *("sliding_window", "attention_chunk_size"),
    *KV_HEADS,
)
LISTS = ("layer_types", "no_rope_layers")
MOST = 1 << 24
"""Of each number: no model has more."""


@dataclass(frozen=True)
class Layers:
    """Some of a model, all alike."""

    count: int
    heads: int
    width: int
    """Elements of a head and token: K and V, or a latent."""


@dataclass(frozen=True)
class Shape:
    """Of a model's KV, as config.json has it."""

    layers: tuple[Layers, ...]
    """Of the largest group: all, or with windows as many as vLLM puts into one."""
    groups: int = 1
    window: int | None = None
    """Tokens that some layers see at most, of a window or a chunk; None: all see all."""

    def token_bytes(self, element: int) -> int:
        """KV of a token in all groups, with elements of so many bytes."""
        each = sum(layers.count * layers.heads * layers.width for layers in self.layers)
        return each * element * self.groups


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
        extra["storage"] = urls[0] if len(urls) == 1 else urls
    options = Options.of(extra)
    model, config = find_model(model)
    page, why = None, ""
    if config is not None:
        try:
            shape = shape_of(config)
            page = page_of(shape, element_bytes(config, kv_cache_dtype), block_size, options)
        except Unknown as error:
            why = str(error)
    problems = [*of_model(config), *of_machine(model, options, page)]
    value = {**CONNECTOR, "kv_connector_extra_config": extra}
    line = f"vllm serve {shlex.quote(model)} --kv-transfer-config {shlex.quote(json.dumps(value))}"
    second = service_line(model, options)
    notes = [*of_page(model, page, why), REFUSED, NOT_SERVED]
    if config is not None and has_states(config):
        line += " --enable-prefix-caching"
        notes.insert(0, STATES)
    if as_json:
        emit(
            {
                "line": line,
                "storage_line": second,
                "kv_transfer_config": value,
                "page": None if page is None else asdict(page),
                "problems": problems,
                "notes": notes,
            }
        )
    else:
        click.echo(line)
        if second is not None:
            click.echo(f"and, once an engine has made the cache: {second}", err=True)
        for problem in problems:
            click.echo(f"does not work: {problem}", err=True)
        for note in notes:
            click.echo(f"note: {note}", err=True)
    if problems:
        ctx.exit(BROKEN)


def service_line(model: str, options: Options) -> str | None:
    """What starts the storage service that engines with the storage "service:" ask; None: they have
    their own, or none. The URL is an example."""
    if not is_service(options.storage):
        return None
    return (
        f"lightcache storage {shlex.quote(name_of(model))} "
        "--url 'disk:/mnt/nvme/cache?capacity=1TiB'"
    )


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


def find_model(model: str) -> tuple[str, Mapping[str, Any] | None]:
    """Of a folder, the config.json in it, or a name on the hub: the folder or name, and what
    `read_config` has of it.

    Raises:
        ConfigError: a path that is absent, or a configuration that cannot be read.
    """
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return str(path.parent), read_config(str(path.parent))
    is_path = path.is_absolute() or model.startswith(".") or path.name == "config.json"
    if is_path and not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise ConfigError(f"{model}: expected a model's folder or its config.json, found {found}")
    return model, read_config(model)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the language model, where a model has several parts."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


class Unknown(Exception):
    """Why the page of a model is not known here."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Raises Unknown: the configuration does not say it in the usual words, or not alone."""
    text = text_config(config)
    if has_states(config):
        raise Unknown(
            "a page is one of vLLM's blocks and a state lies in one. Beside attention vLLM makes "
            "blocks so long that they hold a state, hundreds of tokens, and its log says how long; "
            "the end of a prompt after its last whole block is not saved"
        )
    check_words(text)
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not layers or not heads:
        raise Unknown(UNUSUAL)
    if text.get("index_topk"):
        raise Unknown(
            "beside its latents it has an indexer, whose cache vLLM's kernels decide: no page is "
            "computed"
        )
    if text.get("kv_lora_rank"):
        width = text["kv_lora_rank"] + (text.get("qk_rope_head_dim") or 0)
        return Shape((Layers(layers, 1, width),))
    kinds, window = kinds_of(text, layers)
    each = [form_of(text, number, kind, heads) for number, kind in enumerate(kinds)]
    each = each[: max(0, layers - (text.get("num_kv_shared_layers") or 0))]
    if not each:
        raise Unknown(UNUSUAL)
    kinds = kinds[: len(each)]
    if len(set(each)) > 1 and len(set(kinds)) > 1:
        pairs = dict.fromkeys(zip(kinds, each, strict=True))
        said = [f"{kind}: {own} heads of {width // 2}" for kind, (own, width) in pairs]
        raise Unknown(
            f"its layers have several shapes ({', '.join(said)}). vLLM then makes blocks of "
            "several lengths, or groups of several shapes, as its layout of memory wants: no page "
            "is computed, and its log says how many tokens and bytes one has"
        )
    if len(set(kinds)) > 1:
        few, many = sorted(kinds.count(kind) for kind in set(kinds))
        largest = many if many < 1.5 * few else few
        groups = -(-few // largest) + -(-many // largest)
        return Shape((Layers(largest, *each[0]),), groups, window)
    forms = tuple(Layers(count, *form) for form, count in Counter(each).items())
    return Shape(forms, window=window if FULL not in kinds else None)


def check_words(text: Mapping[str, Any]) -> None:
    """Raises Unknown: a number is no integer above 0, or a list is none. A word whose value is null
    or 0 counts as left out."""
    for word in (*NUMBERS, *LISTS):
        value = text.get(word)
        fits = isinstance(value, list) if word in LISTS else type(value) is int
        if value and not (fits and (word in LISTS or 0 < value <= MOST)):
            raise Unknown(f"{UNUSUAL}; it has {word}: {repr(value)[:40]}")


def kinds_of(text: Mapping[str, Any], layers: int) -> tuple[list[str], int | None]:
    """What each layer sees: all, or a window or chunk of so many tokens."""
    kinds, model = text.get("layer_types"), text.get("model_type")
    chunks = model == "llama4_text" or (isinstance(kinds, list) and "chunked_attention" in kinds)
    part = text.get("attention_chunk_size" if chunks else "sliding_window")
    if not part or text.get("use_sliding_window") is False:
        return [FULL] * layers, None
    if isinstance(kinds, list) and len(kinds) == layers:
        return [FULL if kind in ("full_attention", "attention") else PART for kind in kinds], part
    ropes = text.get("no_rope_layers") if chunks else None
    if isinstance(ropes, list) and len(ropes) == layers:
        return [PART if rope else FULL for rope in ropes], part
    pattern = text.get("sliding_window_pattern") or ALTERNATING.get(str(model))
    if not isinstance(pattern, int):
        return [PART] * layers, part
    return [PART if number % pattern else FULL for number in range(1, layers + 1)], part


def form_of(text: Mapping[str, Any], number: int, kind: str, heads: int) -> tuple[int, int]:
    """KV heads, and elements of a head and token, of a layer."""
    own = dict(text)
    parts = text.get("per_layer_config")
    if isinstance(parts, dict):
        more = parts.get(str(number)) or {}
        if not isinstance(more, dict):
            raise Unknown(UNUSUAL)
        own |= more
    elif str(text.get("model_type")).startswith("gemma4") and kind == FULL:
        own["head_dim"] = text.get("global_head_dim") or 512
        if text.get("attention_k_eq_v", True) and text.get("num_global_key_value_heads"):
            own["num_key_value_heads"] = text["num_global_key_value_heads"]
    check_words(own)
    kv_heads = next((own[word] for word in KV_HEADS if own.get(word)), heads)
    if own.get("multi_query") and not own.get("new_decoder_architecture"):
        kv_heads = 1
    dim = own.get("head_dim") or (own.get("hidden_size") or 0) // heads
    if not dim:
        raise Unknown(UNUSUAL)
    return kv_heads, dim + (own.get("v_head_dim") or dim)


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
    if kinds := kinds_said(text) - served - STATE_KINDS:
        yield f"not served yet: {', '.join(sorted(kinds))}; vLLM runs as without the line"


def kinds_said(text: Mapping[str, Any]) -> set[str]:
    """The names of `layer_types`; of one that is no list of names, none."""
    kinds = text.get("layer_types")
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether some of its layers have a recurrent state in place of KV."""
    text = text_config(config)
    return bool(kinds_said(text) & STATE_KINDS) or any(text.get(word) for word in STATE_WORDS)


# ---- pages


def page_of(shape: Shape, element: int, block: int, options: Options) -> Page:
    """What the connector would make of it."""
    elements = sum(layers.count * layers.heads * layers.width for layers in shape.layers)
    bytes_of_block = elements * block * element
    blocks = options.blocks_per_page or blocks_per_page(bytes_of_block, block, shape.window)
    page_bytes = geometry_of(shape, element, blocks * block).page_bytes
    pages = parse_size(options.size) // page_bytes
    return Page(blocks * block, page_bytes, blocks, pages, shape.groups)


def geometry_of(shape: Shape, element: int, tokens: int) -> PageGeometry:
    """Of a page with so many tokens, and elements of so many bytes."""
    return PageGeometry(
        [
            KVGroup.attention(
                str(number),
                layers=layers.count,
                heads=layers.heads,
                head_dim=layers.width,
                dtype_bytes=element,
                page_tokens=tokens,
                content="single",
                head_groups=layers.heads,
            )
            for number, layers in enumerate(shape.layers)
        ]
    )


def of_page(model: str, page: Page | None, why: str) -> Iterator[str]:
    """What it holds, and what is lost."""
    if page is None:
        yield why or (
            f"{model} is not on this machine: whether it is served, and how large a page is, is "
            "not known here. When vLLM runs, its log says if it is not served, and `lightcache "
            "dump` how large a page is"
        )
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
    for url in options.storage:
        yield from of_disk(url)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        yield "vLLM refuses PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with any connector"


def of_disk(url: str) -> Iterator[str]:
    """What a `disk:` that is to be made lacks: its files take all their space at once."""
    scheme, _, rest = url.partition(":")
    if scheme != "disk":
        return
    where, _, query = rest.partition("?")
    folder = Path(where).absolute()
    if any(folder.glob("lightcache-*")):  # as `DiskStorage` names the folder of a model's pages
        return
    wanted = parse(where, dict(part.split("=", 1) for part in query.split("&") if part))
    if "capacity" not in wanted:
        yield f"storage: {url}: capacity= is needed, as {folder} has no pages yet"
        return
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if wanted["capacity"] > free:
        mounted = (
            "" if there == folder else f" (it is not there yet: the file system is that of {there})"
        )
        yield (
            f"storage: {folder} is to have {format_size(wanted['capacity'])}, found "
            f"{format_size(free)} free{mounted}; mount the disk there, or give a smaller capacity="
        )

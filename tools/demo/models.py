"""Which model a demo serves: one made up from a seed, or one from a directory. Never the network.

Only `build`, and `preflight` of a directory, import torch and transformers.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from lightcache._arguments import count
from lightcache.errors import ConfigError
from lightcache.tools.demo import model_directory
from lightcache.tools.demo.model_directory import one_line

_PACKAGES = ("torch", "transformers")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_POSITIONS = 1 << 17  # of made-up models: rotary positions cost nothing
HYBRID = "hybrid"
"""The size of a made-up model that is of Qwen3.5's form: three gated delta nets to one layer of
attention."""


@dataclass(frozen=True)
class ModelChoice:
    """What every process of a run must agree on; picklable."""

    directory: str | None = None
    """As `save_pretrained` writes it, weights in safetensors; None: a made-up model."""
    size: str = "small"
    """Of a made-up model: "small", "medium", "8b" or "hybrid". Unused with a directory."""
    seed: int = 0
    """Of a made-up model's weights. Unused with a directory."""
    device: str = "cpu"
    """As torch names it: "cpu", "cuda", "cuda:1"."""
    dtype: str = "float32"
    """Of weights and cache: "float32", "bfloat16" or "float16"."""

    @property
    def hybrid(self) -> bool:
        """Whether it keeps recurrent states beside keys and values."""
        return self.directory is None and self.size == HYBRID


@dataclass(frozen=True)
class ModelFacts:
    """What the cache and the workload must know of a model."""

    vocabulary: int
    """Token ids are 0 to this, exclusive."""
    layers: int
    kv_heads: int
    """For each layer."""
    head_dim: int
    dtype_bytes: int
    positions: int | None
    """Longest prompt and answer together; None: the configuration names no limit."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


# Llama's form, but for "hybrid".
# "small": 35 M parameters; in float32 one core takes 0.9 s to prefill 1000 tokens,
# 13 ms for one more. Two KV heads: 8 KiB a token, so that a demo fits into the 64 MiB of /dev/shm
# of a container. "medium": 101 M, 2.0 s and 28 ms. "8b": the form of Llama 3 8B.
SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "small": {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        "medium": {
            "vocab_size": 16384,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "8b": {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        # 270 KiB a state, as much as 66 tokens of "small".
        HYBRID: {
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    }
)

# Standard deviations of made-up weights, times the root of the hidden size. Larger than what
# training begins with, or attention would count for little: with 0.02 at 512, answers of 32 tokens
# had 2 to 13 different ones, with 0.05 (this) 30 to 32. The head's gives logits a deviation of 2.3.
# In float32 the best token leads the second by a median of 0.43 in log-probability and in 3 of 100
# cases by less than 0.01; prefilling in one piece or in two differs by 2e-5 at most.
_SPREAD = 1.13
_HEAD_SPREAD = 2.26
# A_log of gated delta nets: states lose about 1 % a token. What transformers draws leaves nothing
# of a token after a few others.
_DECAY = -4.6


def build(choice: ModelChoice) -> Any:
    """A causal model of transformers on its device, in eval mode, without gradients.

    Blocks for seconds, and for "8b" needs 16 GiB on the device in bfloat16. A made-up model is made
    on the device itself, equal for equal seeds on the same kind of device and release of torch; the
    random state of the caller is left alone. Transformers says nothing meanwhile; as warnings are
    silenced for the whole process, no other thread should rely on them then.

    Raises:
        ConfigError: a package is missing; an unknown size, dtype or device; no room on the device;
            a directory without a usable causal model (no config.json, damaged weights, another
            architecture, custom code), or one whose cache is not keys and values of all tokens
            in every layer.
    """
    facts = preflight(choice)
    with _quietly_offline():
        device = _device(choice)
        import torch

        try:
            if choice.directory is None:
                model = _made_up(SIZES[choice.size], choice.seed, device, choice.dtype)
            else:
                model = model_directory.load(choice.directory, choice.dtype).to(device)
        except torch.OutOfMemoryError as problem:
            raise ConfigError(
                f"device: no room for the model on {choice.device}: {one_line(problem)}; choose a "
                "smaller one"
            ) from None
        model = model.eval().requires_grad_(False)
        if not choice.hybrid:  # the connector looks at that itself
            _check_cache(model, facts, choice)
    return model


def preflight(choice: ModelChoice) -> ModelFacts:
    """What `build` will make, from configurations alone; a directory's files are seen to be whole.

    Blocks for seconds with a directory, because transformers is imported; else for no time.

    Raises:
        ConfigError: as `build`, but for what only the device or reading the weights can tell:
            no such device, no room there, weights that belong to another configuration.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, not installed here: "
            "pip install 'lightcache[demo]'"
        )
    if choice.dtype not in _DTYPE_BYTES:
        known = ", ".join(_DTYPE_BYTES)
        raise ConfigError(f"dtype: expected one of {known}, found {choice.dtype!r}")
    dtype_bytes = _DTYPE_BYTES[choice.dtype]
    if choice.directory is not None:
        with _quietly_offline():
            config = model_directory.checked(choice.directory)
        return _facts(choice.directory, config, dtype_bytes)
    if choice.size not in SIZES:
        raise ConfigError(f"size: expected one of {', '.join(SIZES)}, found {choice.size!r}")
    count(choice.seed, "seed", 0, (1 << 63) - 1)
    form = SIZES[choice.size]
    return ModelFacts(
        vocabulary=form["vocab_size"],
        layers=form["num_hidden_layers"],
        kv_heads=form["num_key_value_heads"],
        head_dim=form["head_dim"],
        dtype_bytes=dtype_bytes,
        positions=_POSITIONS,
    )


def _facts(directory: str, config: Any, dtype_bytes: int) -> ModelFacts:
    """From a configuration of transformers, where some names have defaults made of others."""
    positions = getattr(config, "max_position_embeddings", None)
    try:
        heads = int(config.num_attention_heads)
        return ModelFacts(
            vocabulary=int(config.vocab_size),
            layers=int(config.num_hidden_layers),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype_bytes=dtype_bytes,
            positions=None if positions is None else int(positions),
        )
    except (AttributeError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{directory}: config.json does not describe layers of attention "
            f"({one_line(problem)}); choose another model"
        ) from None


def _device(choice: ModelChoice) -> Any:
    import torch

    try:
        device = torch.device(choice.device)
        if torch.empty(1, device=device).is_meta:
            raise RuntimeError("it has no memory")
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as problem:
        raise ConfigError(
            "device: expected one that torch can use, such as cpu or cuda:0, found "
            f"{choice.device!r}: {one_line(problem)}"
        ) from None
    return device


def _made_up(form: Mapping[str, int], seed: int, device: Any, dtype: str) -> Any:
    """A model with random weights. Norms become ones; the rest is drawn in the order of names."""
    import torch

    model = _allocated(form, device, dtype)
    # Not torch.manual_seed: it would reset the random states of all devices.
    generator = torch.Generator(device).manual_seed(seed)
    root = form["hidden_size"] ** 0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                parameter.fill_(_DECAY)
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                spread = _HEAD_SPREAD if name.startswith("lm_head") else _SPREAD
                parameter.normal_(0.0, spread / root, generator=generator)
    return model


def _allocated(form: Mapping[str, int], device: Any, dtype: str) -> Any:
    """A model with any weights, made on the device in its final dtype: nothing visits the host."""
    import torch

    transformers: Any = import_module("transformers")
    kind = ("Qwen3_5Text", "Qwen3_5") if "linear_num_key_heads" in form else ("Llama", "Llama")
    config = getattr(transformers, f"{kind[0]}Config")(
        **form, max_position_embeddings=_POSITIONS, tie_word_embeddings=False
    )
    before = torch.get_default_dtype()
    drawing = [] if device.type in ("cpu", "meta") else [device]
    where = device.type if drawing else "cuda"  # the default; unused without devices
    with torch.random.fork_rng(drawing, device_type=where), torch.device(device):
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            return getattr(transformers, f"{kind[1]}ForCausalLM")(config)
        finally:
            torch.set_default_dtype(before)


def _check_cache(model: Any, facts: ModelFacts, choice: ModelChoice) -> None:
    """See that one token leaves in the cache what `facts` says."""
    import torch

    transformers: Any = import_module("transformers")
    name = choice.directory or choice.size
    wanted = (1, facts.kv_heads, 1, facts.head_dim)
    cache = transformers.DynamicCache()
    try:
        with torch.inference_mode():
            tokens = torch.zeros((1, 1), dtype=torch.long, device=choice.device)
            model(tokens, past_key_values=cache, use_cache=True)
        pairs = cache.layers if hasattr(cache, "layers") else cache
        found = [_pair(layer) for layer in pairs]
    except Exception as problem:  # a stranger's forward may raise anything
        raise ConfigError(f"{name}: the model does not run: {one_line(problem)}") from None
    shapes = {tuple(tensor.shape) for pair in found for tensor in pair}
    if len(found) != facts.layers or shapes != {wanted}:
        raise ConfigError(
            f"{name}: expected keys and values of shape {wanted} in {facts.layers} "
            f"layers, found {sorted(shapes)} in {len(found)}: not supported yet, choose another "
            "model"
        )


def _pair(layer: Any) -> tuple[Any, Any]:
    """Keys and values of a layer, before and since transformers 4.54."""
    return (layer.keys, layer.values) if hasattr(layer, "keys") else (layer[0], layer[1])


@contextlib.contextmanager
def _quietly_offline() -> Iterator[None]:
    """Keep transformers from printing and from the network.

    The hub's client reads HF_HUB_OFFLINE once, when it is imported. If that happens here it stays
    offline for good, as this process should; what is loaded names local files only as well.
    """
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging: Any = import_module("transformers.utils.logging")
            verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity(logging.CRITICAL)  # errors are raised, and told once
            logging.disable_progress_bar()
            try:
                yield
            finally:
                logging.set_verbosity(verbosity)
                if bars:
                    logging.enable_progress_bar()
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before

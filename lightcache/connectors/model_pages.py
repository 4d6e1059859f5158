"""A model's pages: their format, and the fingerprint of the model."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightcache.cache import Cache
from lightcache.connectors._requirements import DynamicCache, torch
from lightcache.connectors.cache_layers import rules_of, state_layers, unknown_layers
from lightcache.connectors.state_pages import StatePages, describe_states
from lightcache.connectors.trial import (
    check_evaluated,
    check_passes,
    computed,
    parts_of_model,
    past_argument,
)
from lightcache.errors import ConfigError, LayoutMismatch
from lightcache.group_index import GroupIndex
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.groups import Rule, whole
from lightcache.page_index import PageIndex
from lightcache.runs import PLAIN, Run

GROUP = "kv"
"""Name of the layers of full attention, and of the first shape in every geometry."""
SAMPLES = 64
"""Values of each tensor in the fingerprint."""
_NAMED = "name:"
_UNMASKED = ("moshi",)
"""Model types whose cache keeps a window, and whose mask is that of full attention."""
# Fields about a model's origin or its use by callers, and fields that the fingerprint has already;
# none of these affects keys and values.
_IRRELEVANT = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True)
class TokenPages:
    """Pages of the layers with one rule."""

    name: str
    """"kv": full attention; such as "window4096" and "chunk8192": the layers with that setting."""
    rule: Rule
    """The pages that a position needs."""
    geometry: PageGeometry
    """A group for each shape, "kv", "kv2" and so on: planes `k` and `v` of every layer."""
    dtype: torch.dtype
    """Of keys and values."""
    device: str
    """The model's device: "cpu", or such as "cuda:0"."""
    run: Run = PLAIN
    """How they lie in the cache."""


@dataclass(frozen=True)
class ModelPages:
    """The pages of one model: the configuration of its cache."""

    attention: tuple[TokenPages, ...]
    """Keys and values, by rule: full attention first. Empty for a model of states alone."""
    states: StatePages | None
    """Pages of recurrent states."""
    page_tokens: int
    """Tokens of a page of keys and values; positions are multiples of it."""
    weights: str
    """The first word of the fingerprint."""
    model: str
    """For the default name of its cache."""
    needs_positions: bool = False
    """Whether the model counts positions from 0 in each pass unless it is told (Bamba, in 5.23)."""

    @property
    def first(self) -> TokenPages | StatePages:
        """The pages that lie in the cache as they are: its page is one of these."""
        if self.attention:
            return self.attention[0]
        assert self.states is not None
        return self.states

    @property
    def full(self) -> bool:
        """Whether there are layers of full attention, which need every page of a prefix."""
        return bool(self.attention) and self.attention[0].rule == Rule.prefix()

    @property
    def dense(self) -> bool:
        """Whether full attention is all there is."""
        return self.full and len(self.attention) == 1 and self.states is None

    @property
    def geometry(self) -> PageGeometry:
        """Of `first`."""
        return self.first.geometry

    def indexes(self, cache: Cache) -> dict[Rule, PageIndex | GroupIndex]:
        """For a `Router`: where in this cache the layers of each rule have their pages."""
        found: dict[Rule, PageIndex | GroupIndex] = {}
        every = [(of.rule, of.run) for of in self.attention]
        if self.states is not None:
            every.append((Rule.point(), self.states.run))
        for rule, run in every:
            found[rule] = cache.index if run == PLAIN else GroupIndex(cache.index, run)
        return found

    @property
    def fingerprint(self) -> str:
        """Words: weights, KV dtype, the format of each kind of layers, then the names and dtypes of
        the parts of a state, and its format."""
        words = [self.weights]
        if self.attention:
            words.append(str(self.attention[0].dtype).removeprefix("torch."))
            words += [of.geometry.fingerprint() for of in self.attention]
        if self.states is not None:
            words += [self.states.dtypes, self.states.geometry.fingerprint()]
        return " ".join(words)

    @property
    def device(self) -> str:
        """The model's device: "cpu", or such as "cuda:0"."""
        return self.first.device

    @property
    def options(self) -> dict[str, Any]:
        """For `Cache.create` and `Cache.open`: page_bytes, page_tokens, model, fingerprint, device;
        independent, if no layer needs the pages before a position; kv_groups, if there are
        several."""
        options: dict[str, Any] = {
            "page_bytes": self.geometry.page_bytes,
            "page_tokens": self.page_tokens,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "device": self.device != "cpu",
        }
        if not self.full:
            options["independent"] = True
        if len(names := self._names()) > 1:
            options["kv_groups"] = names
        return options

    def _names(self) -> tuple[str, ...]:
        """Of the groups, by their numbers in the cache."""
        names = [of.name for of in self.attention]
        return (*names, "states") if self.states is not None else tuple(names)


def describe(model: Any, *, page_tokens: int = 16, name: str | None = None) -> ModelPages:
    """The formats of this model's pages, and a fingerprint that keeps other models out.

    Computes one token, and reads the shapes that the model caches; nothing is guessed, since shapes
    differ between releases of transformers for the same configuration (latent attention). Then
    computes four tokens in one pass and in two, and compares: pages can be shared only if keys and
    values of a token depend only on the tokens before it, and are one row.

    The fingerprint is a digest of the configuration and of 64 evenly spaced values of each weight.
    It distinguishes models that differ in architecture, in KV dtype, or in more than a few weights:
    fine-tuned, merged or quantised ones. It does not detect edits of a few single weights, nor
    which LoRA adapter is active if an application switches them (put the adapter's name into
    `salt`). Releases of transformers whose configurations have other fields give other
    fingerprints. `name` replaces the digest of configuration and weights, and is not verified.

    Args:
        model: a `transformers` model for causal language modelling, in evaluation mode, whole on
            one device.
        page_tokens: tokens of a page.
        name: of the checkpoint, without white space, such as "meta-llama/Llama-3.1-8B@0e9e39f";
            None: the digest.

    Cost: some eight small forward passes, and with a digest about 20 us for each tensor (on a CPU).

    Raises:
        ConfigError: not a causal language model; a model in training mode with dropout, one that is
            not causal, adds rows or cannot continue from its cache; layers that keep anything but
            keys and values, of every token, a window or a chunk, or a recurrent state (indexers,
            compressed entries); rotary positions that depend on the length of the prompt; an
            encoder; several devices, tensor parallelism, or weights that are not loaded; an invalid
            name or page_tokens.
    """
    whole(page_tokens, "page_tokens")
    _check_kind(model)
    _check_name(name)
    device = _device_of(model)
    check_evaluated(parts_of_model(model))
    past = computed(model, device, (0,))
    weights = (
        f"{_text_config(model).model_type}:{_digest(model)}" if name is None else _NAMED + name
    )
    attention = _by_rule(model, past, page_tokens, device)
    states = None
    if state_layers(past):
        part = attention[0].geometry.page_bytes if attention else None
        states = describe_states(model, past, device, number=len(attention), part_bytes=part)
    needs_positions = check_passes(
        model, device, _vocabulary(model), several=states is None or states.continues
    )
    called = _called(model) if name is None else name
    return ModelPages(attention, states, page_tokens, weights, called, needs_positions)


def _called(model: Any) -> str:
    """What the model was loaded from, in short; else its type. Two processes that load the same
    weights from other folders have one name for them if the last parts are equal."""
    path = Path(str(getattr(model.config, "_name_or_path", "") or ""))
    hub = [part for part in path.parts if part.startswith("models--")]  # .../snapshots/REVISION
    called = (hub[-1].split("--")[-1] if hub else path.name).partition("@")[0]
    return called if re.search("[A-Za-z0-9]", called) else str(_text_config(model).model_type)


def _by_rule(
    model: Any, past: DynamicCache, page_tokens: int, device: str
) -> tuple[TokenPages, ...]:
    """Pages of keys and values, from the cache of one token. Full attention comes first, and its
    page is one of the cache; other pages take as many as they need."""
    rules = rules_of(past, _text_config(model))
    kept = _kept_of(model, past, tuple(rules))
    found: list[TokenPages] = []
    for rule in sorted(set(rules.values()), key=lambda one: (one != Rule.prefix(), str(one))):
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for number in (number for number in rules if rules[number] == rule):
            keys, values = kept[number]
            shapes.setdefault((keys.shape[1], keys.shape[3], values.shape[3]), []).append(number)
        dtype: torch.dtype = keys.dtype
        geometry = PageGeometry(
            [
                KVGroup.attention(
                    f"{GROUP}{count if count > 1 else ''}",
                    layers=layers,
                    heads=heads,
                    head_dim=key,
                    value_dim=value,
                    dtype_bytes=dtype.itemsize,
                    page_tokens=page_tokens,
                    rule=rule,
                )
                for count, ((heads, key, value), layers) in enumerate(shapes.items(), 1)
            ],
            part_bytes=found[0].geometry.page_bytes if found else None,
        )
        run = Run(len(found), geometry.parts) if found else PLAIN
        found.append(TokenPages(_name_of(rule), rule, geometry, dtype, device, run))
    return tuple(found)


def _name_of(rule: Rule) -> str:
    """A window is named by what models call it: it has the token itself, too."""
    if rule == Rule.prefix():
        return GROUP
    is_window = rule.back > 0 and rule == Rule.window(rule.back)
    return f"window{rule.back + 1}" if is_window else rule.name


def describe_for(cache: Any, model: Any) -> ModelPages:
    """`describe`, for a cache that must be of this model. The weights of a cache that was created
    with a `name` are not verified; format and dtype are still compared.

    Raises:
        LayoutMismatch: it is of another model; says what differs.
        ConfigError: as `describe`.
    """
    first = cache.fingerprint.split(" ")[0]
    name = first.removeprefix(_NAMED) if first.startswith(_NAMED) else None
    pages = describe(model, page_tokens=cache.index.page_tokens, name=name)
    check_model(cache, pages)
    return pages


def check_model(cache: Any, pages: ModelPages) -> None:
    """Check that a cache is for these pages.

    Raises:
        LayoutMismatch: it is of another model; says what differs.
    """
    if pages.fingerprint == cache.fingerprint and pages.geometry.page_bytes == cache.page_bytes:
        return
    raise LayoutMismatch(
        f"the cache {cache.name!r} is of another model: {_difference(cache, pages)} differ. It is "
        f"for {cache.fingerprint!r}, expected {pages.fingerprint!r}; open one for this model, with "
        "open_cache and without name="
    )


def _difference(cache: Any, pages: ModelPages) -> str:
    """The most telling difference: weights of another dtype are always different weights."""
    has, wanted = cache.fingerprint.split(" "), pages.fingerprint.split(" ")
    if len(has) != len(wanted):
        return "kinds of layers" if len(has) > 2 else "fingerprints"
    states = len(wanted) - 2 if pages.states is not None else len(wanted)
    subjects = ["configuration or weights"]
    if pages.attention:
        subjects += ["dtypes of keys and values", *["formats of pages"] * len(pages.attention)]
    subjects[states:] = ["dtypes of states", "formats of states"][: len(wanted) - states]
    order = sorted(range(len(wanted)), key=lambda i: (i == 0, "formats" in subjects[i]))
    other = [subjects[i] for i in order if has[i] != wanted[i]]
    return other[0] if other else "sizes of pages"


def _check_kind(model: Any) -> None:
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "get_text_config"):
        raise ConfigError(f"model: expected a model of transformers, found {type(model).__name__}")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model: expected only a decoder, found {type(model).__name__}, an encoder and a "
            "decoder; these are not supported yet"
        )
    if (getattr(model, "tp_size", None) or 1) != 1:
        raise ConfigError(
            f"model: expected one whole model, found a rank of {model.tp_size} of tensor "
            "parallelism; these are not supported yet"
        )
    if wrong := unknown_layers(DynamicCache(config=config)):
        raise ConfigError(
            f"model: expected layers that keep keys and values, of every token, of a window or of "
            f"chunks, or recurrent states, found {', '.join(wrong)} in {type(model).__name__}; "
            "these are not supported yet"
        )
    if _text_config(model).model_type in _UNMASKED:
        raise ConfigError(
            f"model: expected layers that see what their cache keeps, found windows in "
            f"{type(model).__name__} that a pass of many tokens ignores: its keys depend on how a "
            "prompt is divided into passes; it is not supported"
        )
    _check_positions(model)


def _check_positions(model: Any) -> None:
    """Keys are stored rotated, so the rotation must be the same in every longer prompt."""
    ropes = getattr(_text_config(model), "rope_parameters", None) or {}
    kinds = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    for kind in {str(rope.get("rope_type", "default")) for rope in kinds}:
        if "dynamic" in kind or kind == "longrope":
            raise ConfigError(
                f"model: expected keys that do not depend on what follows them, found rotary "
                f"positions of type {kind!r}, which change with the length of the prompt; these "
                "are not supported"
            )


def _check_name(name: object) -> None:
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"\S{1,200}", name)):
        raise ConfigError(
            f"name: expected 1 to 200 characters without white space, found {name!r}; or None for "
            "a digest of the weights"
        )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _vocabulary(model: Any) -> int:
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    count = getattr(embeddings, "num_embeddings", None) or getattr(
        _text_config(model), "vocab_size", None
    )
    return count if isinstance(count, int) and count > 0 else 1 << 30


def _device_of(model: Any) -> str:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or not re.fullmatch(r"cpu|cuda:\d+", devices[0]):
        raise ConfigError(
            f"model: expected all weights on the CPU or on one CUDA device, found {devices}; load "
            "it without device_map, and move it with model.to(...)"
        )
    return devices[0]


def _kept_of(
    model: Any, past: DynamicCache, layers: tuple[int, ...]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of one token in each layer that keeps them: of one dtype."""
    kept = {number: (past.layers[number].keys, past.layers[number].values) for number in layers}
    tensors = [tensor for pair in kept.values() for tensor in pair]
    if any(tensor is None or tensor.dim() != 4 for tensor in tensors) or not (
        tensors or state_layers(past)
    ):
        raise ConfigError(
            f"model: {type(model).__name__} computed one token and cached no keys and values of "
            f"[batch, heads, tokens, dim]; {_missing(model)}"
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1 or any(keys.shape[:3] != values.shape[:3] for keys, values in kept.values()):
        raise ConfigError(
            f"model: expected keys and values of one dtype and as many heads, found "
            f"{sorted({f'{tensor.dtype} {tuple(tensor.shape)}' for tensor in tensors})} in "
            f"{type(model).__name__}; these are not supported yet"
        )
    return kept


def _missing(model: Any) -> str:
    """Why there may be no keys and values."""
    if past_argument(model) in inspect.signature(model.forward).parameters:
        return "call model.eval(), and see that it uses its cache"
    return (
        "it takes no past_key_values, so what it keeps of earlier tokens lies outside of the "
        "layers of a cache (as in RWKV and XLNet); it is not supported"
    )


def _digest(model: Any) -> str:
    """32 hexadecimal digits of configuration and weights."""
    config = {
        key: value for key, value in _text_config(model).to_dict().items() if key not in _IRRELEVANT
    }
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    weights = [
        (name, tensor) for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    ]
    digest.update(
        repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights]).encode()
    )
    try:
        digest.update(_sampled(tensor for _, tensor in weights))
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"model: the weights of {type(model).__name__} cannot be read ({error}); give "
            "describe(model, name=...) the name of the checkpoint"
        ) from error
    return digest.hexdigest()


def _sampled(tensors: Iterable[torch.Tensor]) -> bytes:
    """Evenly spaced values, including the first and the last. Gathers them first, to wait for a
    device only once."""
    parts = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        count = min(flat.numel(), SAMPLES)
        if count:
            where = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
            parts.append(flat[where.to(flat.device)].contiguous().view(torch.uint8))
    joined: bytes = torch.cat(parts).cpu().numpy().tobytes() if parts else b""
    return joined


__all__ = ["GROUP", "ModelPages", "TokenPages", "check_model", "describe", "describe_for"]

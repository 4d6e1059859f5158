"""Trial passes of a few tokens that show what a model caches, without guessing from its
configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from lightcache.connectors._requirements import DynamicCache, torch
from lightcache.connectors.cache_layers import attention_layers, keep_tails
from lightcache.errors import ConfigError

_PAST = "past_key_values"
_TOKENS = 4
_TRIALS = 3
"""A model is refused if it fails this many trials with different tokens: rounding alone may send a
token to another expert."""
_SIGNS = {"is_causal": False, "is_decoder": False, "use_bidirectional_attention": True}
"""Configuration fields of attention that is not causal."""


def computed(
    model: Any, device: str, *pieces: Sequence[int], positions: bool = True
) -> DynamicCache:
    """The model's cache of some tokens, after one forward pass for each piece.

    Args:
        positions: pass the positions of tokens after the first piece.

    Raises:
        ConfigError: the model cannot compute them with a DynamicCache.
    """
    past = DynamicCache(config=model.config)
    keep_tails(past, model.config.get_text_config(decoder=True), 0, set(), 1)
    held = 0
    # Eagerly, also for a compiled model.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            for piece in pieces:
                ids = torch.tensor([piece], device=device)
                forward(model, past, ids, held, positions=positions)
                held += len(piece)
        except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model: {type(model).__name__} cannot compute a token with a DynamicCache "
                f"({error}); a model with a cache of its own, or with other inputs than ids, is "
                "not supported"
            ) from error
    return past


def forward(model: Any, past: DynamicCache, ids: Any, held: int, *, positions: bool = True) -> Any:
    """One forward pass of tokens after the `held` ones of a cache: ids of shape (1, n)."""
    named = {past_argument(model): past}
    if not held or not positions or not takes_positions(model):
        return model(input_ids=ids, use_cache=True, **named)
    # Bamba, for example, counts positions from zero in every pass unless they are given.
    where = torch.arange(held, held + ids.shape[1], device=ids.device)[None]
    return model(input_ids=ids, position_ids=where, use_cache=True, **named)


def past_argument(model: Any) -> str:
    """The argument of a model that is its cache: `past_key_values`, or `cache_params` for models of
    states alone."""
    known = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in known and _PAST not in known else _PAST


def takes_positions(model: Any) -> bool:
    """Whether a model accepts `position_ids`."""
    known = inspect.signature(model.forward).parameters
    return "position_ids" in known or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()
    )


def parts_of_model(model: Any) -> list[Any]:
    """`model.modules()`, in another order and five times as fast: each request calls this."""
    parts: dict[int, Any] = {}
    open_ = [model]
    while open_:
        part = open_.pop()
        if part is not None and id(part) not in parts:
            parts[id(part)] = part
            open_.extend(part._modules.values())
    return list(parts.values())


def check_evaluated(parts: Iterable[Any]) -> None:
    """Check that these parts of a model compute without randomness.

    Raises:
        ConfigError: a part is in training mode and drops values or adds noise.
    """
    for part in parts:
        if part.training and (chance := _chance(part)):
            raise ConfigError(
                f"model: {type(part).__name__} is in training mode with {chance}, expected "
                "evaluation mode: dropout makes keys and values random; call model.eval()"
            )


def _chance(part: Any) -> str:
    """The attribute by which a part drops values in training mode; empty: none."""
    for name, value in vars(part).items():
        drops = (
            "drop" in name or "jitter" in name or (name == "p" and "Drop" in type(part).__name__)
        )
        if drops and isinstance(value, float) and value > 0:
            return f"{name}={value}"
    return ""


def check_passes(model: Any, device: str, vocabulary: int, *, several: bool = True) -> bool:
    """Check that a token's keys and values depend only on the tokens before it, and are one row:
    compares the keys and values of one pass with those of two.

    Args:
        vocabulary: number of ids.
        several: whether the model may continue with several tokens in one pass.

    Returns:
        Whether the model needs the positions of tokens that continue others.

    Raises:
        ConfigError: the model adds rows, is not causal, or cannot continue from its cache; with the
            cause if the configuration shows it.
    """
    rows = {int(keys.shape[2]) for keys, _ in _kept(computed(model, device, (0,)))}
    if rows - {1}:
        raise ConfigError(
            f"model: expected one row of keys for each token, found {max(rows)} rows for one token "
            f"in {type(model).__name__}; a model that adds rows of its own is not supported"
        )
    wrong = ""
    for trial in range(_TRIALS):
        first = 1 + trial * 2 * _TOKENS
        tokens = [(first + offset) % vocabulary for offset in range(2 * _TOKENS)]
        wrong = _wrong(model, device, tokens, several=several)
        if not wrong:
            return bool(_wrong(model, device, tokens, several=several, positions=False))
    raise ConfigError(f"model: {wrong}; it is not supported")


def _wrong(
    model: Any, device: str, tokens: list[int], *, several: bool, positions: bool = True
) -> str:
    """The error in the keys and values of some tokens; empty: none."""
    prompt, other = tokens[:_TOKENS], tokens[_TOKENS:]
    rest = [prompt[2:]] if several else [[token] for token in prompt[2:]]
    whole = _kept(computed(model, device, prompt))
    parts = _kept(computed(model, device, prompt[:2], *rest, positions=positions))
    # The same last token after other tokens: shows how much it depends on the tokens before it.
    fresh = _kept(computed(model, device, [*other[:-1], prompt[-1]]))
    name = type(model).__name__
    for layer, (all_, split, far) in enumerate(zip(whole, parts, fresh, strict=True)):
        for full, result, another in zip(all_, split, far, strict=True):
            if full.shape != result.shape:
                return (
                    f"expected as many rows of keys from two passes as from one, found "
                    f"{result.shape[2]} and {full.shape[2]} in {name}"
                )
            context = _relative(full[:, :, -1:], another[:, :, -1:])
            for late, rows in ((False, slice(0, 2)), (True, slice(2, None))):
                distance = _relative(full[:, :, rows], result[:, :, rows])
                if distance > _bound(full.dtype, context):
                    return _said(model, layer, distance, late=late)
    return ""


def _said(model: Any, layer: int, distance: float, *, late: bool) -> str:
    name = type(model).__name__
    how = f"differ by {distance:.1e} of their size in attention layer {layer}"
    if late:
        return (
            f"expected that {name} continues from the keys and values it keeps, found that those "
            f"of two passes {how} from those of one"
        )
    config = model.config.get_text_config(decoder=True)
    signs = [
        f"{key}={value}"
        for key, value in _SIGNS.items()
        if getattr(config, key, getattr(model, key, None)) is value
    ]
    return (
        f"expected causal attention, found that keys and values in {name} depend on tokens that "
        f"follow: they {how}{' (' + ', '.join(signs) + ')' if signs else ''}"
    )


def _bound(dtype: torch.dtype, context: float) -> float:
    """How far equal keys may differ by rounding.

    Measured with random weights: 90 tiny models on a CPU were off by 1e-6 at most in float32, and
    by nothing in bfloat16; 32 layers on an H200 by 0.017 of what other tokens before it change of a
    key (`context`) in bfloat16, by 0.003 in float16, by 0.001 in TF32. Models that are not causal
    were off by 0.37 of it or more.
    """
    return max(1e-5, torch.finfo(dtype).eps / 2) + 0.1 * context


def _relative(tensor: torch.Tensor, other: torch.Tensor) -> float:
    size = float(tensor.float().norm())
    return float((tensor.float() - other.float()).norm()) / size if size else 0.0


def _kept(past: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers = [past.layers[number] for number in attention_layers(past)]
    return [
        (layer.keys, layer.values)
        for layer in layers
        if layer.keys is not None and layer.keys.dim() == 4
    ]


__all__ = [
    "check_evaluated",
    "check_passes",
    "computed",
    "forward",
    "parts_of_model",
    "past_argument",
    "takes_positions",
]

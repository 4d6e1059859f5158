"""Checks on a model's inputs and weights while a connector is open.

Pages are found by token ids only, so everything else that affects keys and values must be as
`describe` found it: the weights, no dropout, positions from 0 on, a causal mask, one row a token.
Hooks on the model check each forward pass that has a `PrefixCache`; `check_weights` checks the
weights.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from lightcache.connectors._requirements import PreTrainedModel, torch
from lightcache.connectors.prefix_cache import PrefixCache, one_row
from lightcache.connectors.trial import check_evaluated, parts_of_model
from lightcache.errors import ConfigError, LayoutMismatch

SAMPLE = 16
"""Values of each tensor that are compared, to notice changes that torch does not count."""
_MASK = "attention_mask"


class ModelWatch:
    """Watches one model for one connector, until `close`. Thread-safe."""

    def __init__(
        self, model: Any = None, version: str = "", *, needs_positions: bool = False
    ) -> None:
        """Hook every part of the model that takes token ids.

        Args:
            model: None: a copy of a hooked model was made or loaded; its hooks do nothing.
            version: of the current weights; see `Namespace`.
            needs_positions: whether it counts positions from 0 in each pass unless they are given.
        """
        self._model, self._needs_positions = model, needs_positions
        self._parameters: dict[Any, tuple[str, ...]] = {}
        """Names of the positional arguments of each watched module."""
        self._hooks: list[Any] = []
        self._weights = None if model is None else Weights(model, version)
        for module in () if model is None else _takers(model):
            self._parameters[module] = tuple(inspect.signature(module.forward).parameters)
            self._hooks += [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    def __reduce__(self) -> tuple[type[ModelWatch], tuple[()]]:
        """Copies of the model have the hooks too, where they do nothing."""
        return ModelWatch, ()

    def check_weights(self, version: str) -> None:
        """Check that the weights are those first used under this version, and that no part of the
        model drops values. On a GPU this waits for the current stream.

        Raises:
            LayoutMismatch: they changed since.
            ConfigError: a part is in training mode with dropout.
        """
        if self._weights is not None:
            self._weights.check(version)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._parameters = {}

    # ---- one forward pass

    def _before(self, module: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        names = self._parameters.get(module)
        if names is None:
            return
        inputs = {**dict(zip(names, args, strict=False)), **named}
        past = next((value for value in inputs.values() if isinstance(value, PrefixCache)), None)
        if past is None or past.watch is not self:
            return
        if past.passing and past.passing[0] is not module:
            return  # a part of the model, within a pass that was checked
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids is None and embeds is None:
            return  # a wrapper with other names; the model in it is checked
        past.check_sound()
        if module.training:
            try:
                check_evaluated(parts_of_model(module))
            except ConfigError as error:
                raise past.spoil(str(error)) from None
        self._check_autocast(past, ids if embeds is None else embeds)
        if inputs.get("use_cache") is False:
            raise past.spoil(
                "the model was called with use_cache=False, with which `generate` feeds its whole "
                "input in each step, after the tokens held; give generate use_cache=True (the "
                "generation_config of some models, such as MPT, says False)"
            )
        if ids is None or embeds is not None:
            raise past.spoil(
                "the model was given inputs_embeds, expected only input_ids: pages are found by "
                "token ids, which do not say what these are"
            )
        if ids.dim() != 2:
            return  # the model itself raises
        rows, count = ids.shape
        one_row(rows)
        held = past.held
        _check_alone(past, inputs)
        past.given(ids[0])
        mask = inputs.get(_MASK)
        if not past.attentive and torch.is_tensor(mask) and mask.shape[-1] == count:
            _check_mask(past, mask, 0, count)  # without attention it is of the new tokens alone
        else:
            _check_mask(past, mask, held, count)
        self._check_positions(past, inputs.get("position_ids"), held, count)
        past.begin()
        past.passing = (module, held, held + count)

    def _after(self, module: Any, args: Any, named: Any, output: Any) -> None:
        if module not in self._parameters:
            return
        for past in (*args, *named.values()):
            if isinstance(past, PrefixCache) and past.passing and past.passing[0] is module:
                self._ended(past, output is not None)

    def _ended(self, past: PrefixCache, complete: bool) -> None:
        _, before, wanted = past.passing
        if complete:
            past.passed(wanted)
        rows = past.rows
        # It failed before anything was computed; states do not tell.
        if not complete and rows == {before} and not past.stateful:
            past.passing = ()
            past.forget_given(before)
        elif complete:
            past.passing = ()
            if rows != {wanted}:
                raise past.spoil(
                    f"{type(self._model).__name__} was given {wanted - before} tokens after "
                    f"{before}, so expected {wanted} rows of keys in every layer, found "
                    f"{sorted(rows)}; a model that adds or drops rows is not supported"
                )

    def _check_autocast(self, past: PrefixCache, tensor: Any) -> None:
        """Keys and values would have the dtype of the fingerprint, but be rounded to another dtype:
        0.5 % of a key in bfloat16."""
        device, own = tensor.device.type, getattr(self._model, "dtype", None)
        if not torch.is_autocast_enabled(device):
            return
        dtype = torch.get_autocast_dtype(device)
        if dtype != own:
            raise past.spoil(
                f"the model was called under autocast to {dtype}, expected {own}, in which pages "
                f"of it are kept; call it without, or open a cache for model.to({dtype})"
            )

    def _check_positions(self, past: PrefixCache, positions: Any, held: int, count: int) -> None:
        if positions is None:
            if self._needs_positions and held:
                raise past.spoil(
                    f"{type(self._model).__name__} counts positions from 0 in each pass unless it "
                    f"gets them, and got none after {held} tokens; give position_ids="
                    f"torch.arange({held}, {held + count})[None], or use generate"
                )
            return
        if positions.shape[-1] != count:
            raise past.spoil(
                f"position_ids: expected {held} to {held + count - 1}, found {positions.shape[-1]} "
                f"positions for {count} tokens"
            )
        expected = torch.arange(held, held + count, device=positions.device)
        past.doubt(
            (positions != expected).any(),
            "position_ids: expected those of the tokens in the prompt, 0 for its first, found "
            "others: keys are stored with their positions; compute without padding, or give none",
            soon=count > 1,
        )


def _takers(model: Any) -> list[Any]:
    """The model, and its parts that may be called with token ids in its place."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return parts if model in parts else [model, *parts]


def _check_alone(past: PrefixCache, inputs: Mapping[str, Any]) -> None:
    """Check that the model gets token ids only: keys cover no other inputs."""
    for name, value in inputs.items():
        other = torch.is_tensor(value) and value.is_floating_point() and name != _MASK
        if value is not None and (other or name.endswith("token_type_ids")):
            raise past.spoil(
                f"the model was given {name}, expected only token ids: pages are found by these, "
                "and keys and values that depend on other inputs would be published under them"
            )


def _check_mask(past: PrefixCache, mask: Any, held: int, count: int) -> None:
    """Check that a mask hides no earlier token, and has the right length."""
    if mask is None:
        return
    if isinstance(mask, Mapping):
        for part in mask.values():
            _check_mask(past, part, held, count)
        return
    wanted = held + count
    if not torch.is_tensor(mask) or mask.dim() not in (2, 4):
        raise past.spoil(
            f"attention_mask: expected ones of shape (1, {wanted}) or none, found "
            f"{type(mask).__name__} {tuple(getattr(mask, 'shape', ()))}"
        )
    if mask.shape[-1] < wanted or (mask.dim() == 4 and mask.shape[-2:] != (count, wanted)):
        raise past.spoil(
            f"attention_mask: expected shape (1, {wanted}) for {count} tokens after {held} held "
            f"ones, found {tuple(mask.shape)}; give one for all tokens, held and new, or none"
        )
    if mask.dim() == 2:
        hidden = (mask[:, :wanted] == 0).any()
    else:
        seen = mask.bool() if not mask.is_floating_point() else mask >= 0
        causal = torch.ones(count, wanted, dtype=torch.bool, device=mask.device).tril(held)
        hidden = (seen != causal).any()
    past.doubt(
        hidden,
        "attention_mask: expected one that masks nothing but later tokens, found another: masked "
        "tokens shift positions and change keys. `generate` masks pad tokens of a prompt unless it "
        "is given attention_mask=torch.ones_like(input_ids); give that, and prompts without "
        "padding",
        soon=count > 1,
    )


# ---------------------------------------------------------------- weights


class Weights:
    """Notices changes of a model's weights.

    The address and the version counter of each tensor show a replaced tensor and every change in
    place that torch counts; `SAMPLE` values in the middle of each show changes that bypass the
    counters (`.data`, other libraries). A change that bypasses the counters and touches none of
    these values is not noticed.
    """

    def __init__(self, model: Any, version: str) -> None:
        """The current weights are this version's."""
        self._model = model
        self._lock = threading.Lock()
        self._places: list[tuple[int, int]] = []
        self._windows: dict[Any, list[Any]] = {}
        self._sampled: dict[Any, Any] = {}
        self._generation = 0
        self._look(parts_of_model(model))
        self._used = {version: self._generation}
        """The generation of each version."""

    def check(self, version: str) -> None:
        """See `ModelWatch.check_weights`."""
        parts = parts_of_model(self._model)
        check_evaluated(parts)
        with self._lock:
            self._look(parts)
            now = self._generation
            used = self._used.setdefault(version, now)
        if used != now:
            raise LayoutMismatch(
                f"the weights of {type(self._model).__name__} changed since this connector used "
                f"them as version {version!r}: stored pages are of the former weights. Close the "
                "connector and open a cache for the model as it is now, or name each version of "
                "the weights with namespace=cache.namespace(weights=...)"
            )

    def _look(self, parts: list[Any]) -> None:
        """Begin a new generation if anything in these parts of the model changed."""
        tensors = _saved(parts)
        places = _places(tensors)
        if moved := places != self._places:
            self._places, self._windows = places, _windows(tensors)
        sampled = {
            kind: torch.cat(views).view(torch.uint8) for kind, views in self._windows.items()
        }
        if moved or not all(
            torch.equal(tensor, self._sampled[kind]) for kind, tensor in sampled.items()
        ):
            self._sampled = sampled
            self._generation += 1


def _saved(parts: list[Any]) -> list[Any]:
    """Parameters, and buffers that are saved with them: the tensors of `parameters()` and
    `named_buffers()`, in a tenth of the time."""
    tensors: list[Any] = []
    for part in parts:
        tensors += part._parameters.values()
        passing = part._non_persistent_buffers_set
        for name, tensor in part._buffers.items():
            if name not in passing:
                tensors.append(tensor)
    return [tensor for tensor in tensors if tensor is not None]


def _places(tensors: list[Any]) -> list[tuple[int, int]]:
    """The address and the version counter of each tensor."""
    places = []
    for tensor in tensors:
        try:
            places.append((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version))
        except (RuntimeError, NotImplementedError):  # a kind without memory of its own
            places.append((id(tensor), 0))
    return places


def _windows(tensors: list[Any]) -> dict[Any, list[Any]]:
    """Views of the middle of each tensor, by dtype and device: joined in one call each."""
    windows: dict[Any, list[Any]] = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a packed kind
            rows = tensor.detach()
            rows = rows.reshape(1) if rows.dim() == 0 else rows
            while rows.dim() > 1:
                rows = rows[rows.shape[0] // 2]
            if rows.numel():
                start = max(0, (rows.numel() - SAMPLE) // 2)
                windows.setdefault((rows.dtype, rows.device), []).append(
                    rows[start : start + SAMPLE]
                )
    return windows


__all__ = ["ModelWatch"]

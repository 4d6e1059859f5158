"""The models of the demo, and the memory of a device in which they compute.

An engine has both already. The models are those of transformers, small and with random weights. KV
lies in blocks and recurrent states in slots, as in engines with paged attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from lightcache.errors import ConfigError
from lightcache.tools.demo.messages import DENSE, Answer, ModelSpec

# Standard deviations of random weights, times the root of the hidden size: larger than training
# begins with, so that attention counts and greedy answers vary. The likeliest token then leads the
# second by 0.43 in log-probability (median); prefilling in pieces changes it by 2e-5 at most.
_SPREAD, _HEAD_SPREAD = 1.13, 2.26
# A_log of gated delta nets: a state forgets about 1 % a token, instead of everything at once.
_DECAY = -4.6


# ---- Models


def build(spec: ModelSpec) -> Any:
    """The model, in eval mode. Equal specs give equal weights in every process.

    Raises:
        ConfigError: torch cannot use the device, or the directory has no usable checkpoint.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        torch.empty(1, device=spec.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device: expected one that torch can use, such as cpu or cuda:0, found "
            f"{spec.device!r}: {one_line(error)}"
        ) from None
    model = _drawn(spec) if spec.directory is None else _loaded(spec, spec.directory)
    return model.eval().requires_grad_(False)


def _drawn(spec: ModelSpec) -> Any:
    """A model with random weights, made on its device."""
    kind = transformers.Qwen3_5TextConfig if spec.hybrid else transformers.LlamaConfig
    config = kind(**spec.form, max_position_embeddings=1 << 17, tie_word_embeddings=False)
    with torch.device(spec.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=spec.dtype)
    generator = torch.Generator(spec.device).manual_seed(spec.seed)
    root = spec.form["hidden_size"] ** 0.5
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                weight.fill_(_DECAY)
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                spread = _HEAD_SPREAD if name.startswith("lm_head") else _SPREAD
                weight.normal_(0.0, spread / root, generator=generator)
    return model


def _loaded(spec: ModelSpec, directory: str) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model = load(directory, dtype=spec.dtype, local_files_only=True, use_safetensors=True)
    except Exception as error:  # transformers raises any type for a damaged file
        raise ConfigError(f"{directory}: transformers cannot load it: {one_line(error)}") from None
    if (vocabulary := model.config.get_text_config().vocab_size) < DENSE["vocab_size"]:
        raise ConfigError(
            f"{directory}: expected a vocabulary of {DENSE['vocab_size']} tokens at least, found "
            f"{vocabulary}; choose another model"
        )
    return model.to(spec.device)


def one_line(error: BaseException) -> str:
    """The message of an exception, without line breaks and not too long."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---- Computing


@torch.inference_mode()
def forward(model: Any, tokens: Iterable[int], sequence: Cache | None) -> tuple[int, float]:
    """Compute tokens after those that a sequence holds. Returns the likeliest next token and its
    log-probability.

    Args:
        sequence: of `DeviceMemory`; None: the tokens are the whole prompt, and nothing is kept.
    """
    ids = torch.tensor([list(tokens)], device=model.device)
    cached = {"past_key_values": sequence, "use_cache": sequence is not None}
    logits = model(ids, **cached, logits_to_keep=1).logits[0, -1]
    best, token = logits.float().log_softmax(-1).max(-1)
    return int(token), float(best)


@torch.inference_mode()
def compare(model: Any, answer: Answer) -> tuple[bool, float]:
    """Compute a prompt and its answer in one pass, without any cache. Returns whether each token of
    the answer is the likeliest one, and the largest difference between log-probabilities."""
    n, tokens = len(answer.tokens), np.concatenate([answer.turn.prompt, answer.tokens])
    ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
    logits = model(ids[None, :-1], use_cache=False, logits_to_keep=n).logits[0]
    chances, likeliest = logits.float().log_softmax(-1).max(-1)
    equal = bool((likeliest == ids[-n:]).all())
    return equal, float((chances.cpu() - torch.tensor(answer.logprobs)).abs().max())


def reference(spec: ModelSpec, pipe: Connection) -> None:
    """The whole of the reference process, which never sees a cache: compares what it is sent, until
    the pipe is closed."""
    model = build(spec)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(compare(model, pipe.recv()))


# ---- The memory of a device


class _PagedAttention(DynamicLayer):  # type: ignore[misc]  # transformers has no types for it
    """One attention layer of a sequence: reads and writes rows of the layer's blocks."""

    def __init__(self, rows: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        """Args:
        rows: of shape (2, tokens of the device, heads, dim): keys, then values.
        slots: the row of each token of the sequence.
        length: tokens whose KV is there already.
        """
        super().__init__()
        self._rows, self._slots, self._length = rows, slots, length

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the KV of new tokens. Returns that of all tokens, of shape (1, heads, n, dim)."""
        begin, self._length = self._length, self._length + key_states.shape[-2]
        new, held = self._slots[begin : self._length], self._slots[: self._length]
        keys, values = self._rows
        keys[new], values[new] = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        return keys[held].transpose(0, 1)[None], values[held].transpose(0, 1)[None]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length


class _StateSlot(LinearAttentionLayer):  # type: ignore[misc]  # transformers has no types for it
    """One linear-attention layer of a sequence: transformers updates the slot in place."""

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor, has_state: bool) -> None:
        super().__init__()
        self.conv_states[0], self.recurrent_states[0] = conv, recurrent
        self.conv_kernel_size[0] = conv.shape[-1]
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = has_state


class Sequence(Cache):  # type: ignore[misc]  # transformers has no types for it
    """The tokens of one request in the memory of a device, as the model takes them."""

    def __init__(self, layers: list[Any], slots: torch.Tensor, block_tokens: int) -> None:
        super().__init__(layers=layers)
        self._slots, self._block_tokens = slots, block_tokens

    def replace_block(self, position: int, block: int) -> None:
        """Use another block with the same content at a position of the block table."""
        rows = torch.arange(self._block_tokens, device=self._slots.device)
        self._slots[position * self._block_tokens + rows] = block * self._block_tokens + rows


class DeviceMemory:
    """KV blocks of all attention layers, and state slots of all linear-attention layers."""

    def __init__(self, model: Any, blocks: int, block_tokens: int, slots: int) -> None:
        """Compute one token to see what each layer keeps, and allocate memory for it.

        Raises:
            ConfigError: a layer keeps something other than the KV of all tokens, or a state.
        """
        self._block_tokens = block_tokens
        self.kv: list[torch.Tensor] = []
        """Of each attention layer: (2, blocks, block_tokens, heads, dim)."""
        self.conv: list[torch.Tensor] = []
        """Of each linear-attention layer: (slots, channels, kernel)."""
        self.recurrent: list[torch.Tensor] = []
        """Of each linear-attention layer: (slots, heads, key dim, value dim)."""
        self._layers: list[tuple[torch.Tensor, ...]] = []
        """Of each layer of the model its KV, or its two states."""
        trial = transformers.DynamicCache(config=model.config)
        forward(model, [0], trial)
        for number, layer in enumerate(trial.layers):
            if type(layer) is DynamicLayer and layer.keys.shape == layer.values.shape:
                _, heads, _, dim = layer.keys.shape
                self.kv.append(layer.keys.new_zeros(2, blocks, block_tokens, heads, dim))
                self._layers.append((self.kv[-1],))
            elif type(layer) is LinearAttentionLayer:
                conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
                self.conv.append(conv.new_zeros(slots, *conv.shape[1:]))
                self.recurrent.append(recurrent.new_zeros(slots, *recurrent.shape[1:]))
                self._layers.append((self.conv[-1], self.recurrent[-1]))
            else:
                raise ConfigError(
                    f"model: expected layers of full or linear attention, found layer {number} "
                    f"with a {type(layer).__name__}; choose another model"
                )

    def sequence(self, table: Any, length: int, slot: int = 0) -> Sequence:
        """A request's tokens.

        Args:
            table: the blocks of all its tokens, those to come included.
            length: tokens whose KV and state are there already.
            slot: of its recurrent state, if the model has one.
        """
        size = self._block_tokens
        rows = table.astype(np.int64)[:, None] * size + np.arange(size)
        slots = torch.from_numpy(rows.reshape(-1)).to(self.kv[0].device)
        layers: list[Any] = []
        for memory in self._layers:
            if len(memory) == 1:
                layers.append(_PagedAttention(memory[0].flatten(1, 2), slots, length))
            else:
                conv, recurrent = (states[slot, None] for states in memory)
                layers.append(_StateSlot(conv, recurrent, has_state=length > 0))
        return Sequence(layers, slots, size)

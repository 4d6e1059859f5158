"""What the processes of a demo tell each other, as plain dataclasses that travel through pipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, of shape (n,)."""

SECRET = b"the keys of a demo are no secret"
"""Keys are made with it: pages in a storage are found again only with the same one."""

_TINY = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DENSE = {**_TINY, "intermediate_size": 2048}
"""Llama's form with 35 million parameters; 8 KiB of KV a token in float32."""
HYBRID = {
    **_TINY,
    "intermediate_size": 1536,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Qwen3.5's form: three layers of linear attention to one of attention; 270 KiB a state."""


@dataclass(frozen=True)
class ModelSpec:
    """The model of every process of a run."""

    form: Mapping[str, int] = field(default_factory=lambda: DENSE)
    """Of a model with random weights: arguments of its configuration."""
    seed: int = 0  # of the random weights
    directory: str | None = None
    """A checkpoint, as `save_pretrained` writes it, instead of random weights."""
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def hybrid(self) -> bool:
        """Whether the model keeps recurrent states beside its KV."""
        return self.directory is None and "linear_num_key_heads" in self.form


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is started with."""

    run: str  # the names of all segments of the run begin with it
    model: ModelSpec
    host_bytes: int  # shared memory for pages, of all workers together
    device_tokens: int
    """Tokens that the device has blocks for: at least those of the longest request."""
    storage: str | None = None
    """URL of the storage that pages are written to and read from; None: there is none."""
    page_tokens: int = 16  # of a host page, and of a device block
    threads: int = 1  # of torch

    @property
    def cache(self) -> str:
        """Name of the cache that all workers share."""
        return f"{self.run}-kv"


@dataclass(frozen=True)
class Ready:
    """Worker to router: the model is loaded and the cache is open."""

    pid: int
    device_index: str  # name of the index of its device blocks, which routers look at


@dataclass(frozen=True)
class Request:
    """Router to worker: answer a prompt."""

    number: int
    prompt: Tokens
    answer_tokens: int
    sent: float  # seconds of `time.monotonic`, one clock for all processes of a machine
    hold: bool = False  # stop in the middle of an offload and wait to be killed


@dataclass(frozen=True)
class Answer:
    """Worker to router: a request has finished, and its pages are published."""

    tokens: Tokens  # of the answer
    logprobs: list[float]  # of each token of the answer
    reused: Mapping[str, int]
    """Tokens of the prompt that were not computed, by tier: device, host, storage."""
    first_s: float  # from `Request.sent` to the first token
    alone_s: float | None  # to the first token without the cache, in the same process


@dataclass(frozen=True)
class Holding:
    """Worker to router: an offload is halfway done, and the worker waits to be killed."""

    number: int
    copied: int
    pages: int


@dataclass(frozen=True)
class Failed:
    """Worker to router: it cannot continue, and says why in one line."""

    reason: str

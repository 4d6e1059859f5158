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

DENSE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Llama's form with 35 million parameters; 8 KiB of KV a token in float32."""
HYBRID = {
    **DENSE,
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
    device_tokens: int  # that the device has blocks for: at least those of the longest turn
    storage: str | None = None  # URL of the storage of pages; None: there is none
    page_tokens: int = 16  # of a host page, and of a device block
    threads: int = 1  # of torch

    @property
    def cache(self) -> str:
        """Name of the cache that all workers share."""
        return f"{self.run}-kv"

    def blocks(self, worker: str) -> str:
        """Name of the index of a worker's device blocks, which the router looks at."""
        return f"{self.run}-{worker}-blocks"


@dataclass(frozen=True)
class Ready:
    """Worker to router: the model is loaded and the cache is open."""


@dataclass(frozen=True, eq=False)
class Turn:
    """Router to worker: answer a prompt. It is one turn of a conversation: all turns before it with
    their answers, and a new message."""

    number: int
    conversation: int
    turn: int
    prompt: Tokens
    answer_tokens: int
    worker: str = ""  # that it was sent to, as people call it
    attempts: int = 0  # how often it was sent: again when its worker has died
    sent: float = 0.0  # seconds of `time.monotonic`, one clock for all processes of a machine
    hold: bool = False  # stop in the middle of an offload and wait to be killed


@dataclass
class Answer:
    """Worker to router: a turn has been answered, and its pages are published."""

    turn: Turn
    reused: Mapping[str, int]
    """Tokens of the prompt that were not computed, by tier: device, host, storage."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of each token
    times: list[float] = field(default_factory=list)  # seconds from `Turn.sent` to each token
    alone_s: float = 0.0  # to the first token without the cache, measured after the answer


@dataclass(frozen=True)
class Holding:
    """Worker to router: an offload is halfway done, and the worker waits to be killed. The router
    adds what its death leaves."""

    worker: str
    turn: int
    copied_pages: int
    pages: int
    doomed_pages: int = 0  # pages that it was writing, which have no key any more
    recovered_s: float = 0.0  # from the signal until its pages could be used again


@dataclass(frozen=True)
class Failed:
    """Worker to router: it cannot continue, and says why in one line."""

    reason: str

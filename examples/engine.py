"""The reference for engine authors: a serving engine as small as it can be, around a manager.

The model is one of transformers, tiny and with random weights. Its KV lies in blocks, as in every
engine with paged attention. What a scheduler does is here once, and whole: a queue, prefill in
chunks, decoding in batches, loading before computing, offloading meanwhile, preempting, cancelling.

    python examples/engine.py       # run it twice: the second finds what the first has computed
    lightcache rm example-engine    # until then the cache outlives the engines

Read `Engine.step` first; docs/integration.md explains each call of the manager. There is no code
for an engine that is killed, at whatever instruction: the others take back what it held.
"""

import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from lightcache import OutOfPages, TransferFailed
from lightcache.manager import LoadHandle, PrefixMatch, Prompt, open_kv

BLOCK = 16  # tokens of a block on the device
PAGE = 32  # tokens of a page on the host
BUDGET = 48  # tokens that one pass computes at most: longer prompts are computed in chunks
RUNNING = 8  # requests with blocks at most


# ---- The model. An engine has one already.


def build_model(attention: str = "blocks") -> LlamaForCausalLM:
    """In place of `from_pretrained`: equal weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@dataclass
class Pass:
    """Where the tokens of one forward pass lie: what a paged attention kernel is told."""

    kv: list[torch.Tensor]  # of each layer: (keys and values, slots, heads, dim)
    slots: list[torch.Tensor]  # of each sequence: the slots of all its tokens so far
    new: list[int]  # of each sequence: how many of them, the last ones, this pass computes


def attend(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, batch: Pass, **_: Any
) -> Any:
    """Paged attention, slowly. Write the KV of the new tokens to their slots, then let each
    sequence attend to all of its own. The new tokens of all sequences stand in one row."""
    kv = batch.kv[module.layer_idx]
    written = torch.cat([slots[-new:] for slots, new in zip(batch.slots, batch.new, strict=True)])
    kv[0, written], kv[1, written] = key[0].transpose(0, 1), value[0].transpose(0, 1)
    outputs = []
    for slots, new, own in zip(batch.slots, batch.new, query.split(batch.new, dim=2), strict=True):
        keys, values = kv[:, slots].transpose(1, 2).unsqueeze(1)
        causal = torch.ones(new, len(slots), dtype=torch.bool).tril(len(slots) - new)
        outputs.append(scaled_dot_product_attention(own, keys, values, causal, enable_gqa=True))
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("blocks", attend)


# ---- The engine.


@dataclass(eq=False)
class Request:
    """A request, from `submit` to its end. `tokens` grows by the answer."""

    number: int
    tokens: list[int]
    prompt_tokens: int
    total: int  # tokens at its end
    table: Any = None  # its blocks on the device, in the order of its tokens; None: it waits
    match: PrefixMatch | None = None  # what was found of it when it was admitted
    load: LoadHandle | None = None  # pages of the host on their way to its blocks
    computed: int = 0  # leading tokens whose KV is on the device

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.total


class Engine:
    """One engine of a node. Any number of them share the cache `name`, and each has a `device` of
    its own name. What is there for the cache are calls of `self.manager`, and their answers."""

    def __init__(self, name: str, device: str, *, blocks: int = 64) -> None:
        self.model = build_model()
        config = self.model.config
        shape = (2, blocks, BLOCK, config.num_key_value_heads, config.head_dim)
        self.tensors = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.kv = open_kv(
            self.tensors, axes="kbnhc",  # K and V, blocks, tokens of a block, heads, channels
            model="tiny-llama@0",  # and its revision: other weights must have another name
            name=name, page_tokens=PAGE, size="16MiB", lifetime="persistent",
        )  # fmt: skip
        self.manager = self.kv.manager(f"{name}-{device}")  # storage="disk:..." for more room
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        self.requests = self.preempted = 0
        self.computed = self.from_device = self.from_host = 0  # tokens

    def close(self) -> None:
        """End all requests, wait for copies, leave the cache."""
        for request in [*self.waiting, *self.running]:
            self.cancel(request)
        self.kv.close()

    # ---- what a server calls

    def submit(self, prompt: list[int], answer_tokens: int) -> Request:
        """Queue a request."""
        total, most = len(prompt) + answer_tokens, self.manager.device.blocks * BLOCK
        if not prompt or answer_tokens < 1 or total > most:
            raise ValueError(f"expected prompt and answer, {most} tokens at most, found {total}")
        self.requests += 1
        request = Request(self.requests, list(prompt), len(prompt), total)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Forget a request, wherever it is. What it has committed stays cached."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.manager.cancel(request.number)  # what `plan` has pinned
        elif request in self.running:
            self.running.remove(request)
            self.manager.release(request.number, publish=False)

    def serve(self) -> Iterator[Request]:
        """Step until there is nothing to do. Yields each request when its answer is complete."""
        while self.waiting or self.running:
            yield from self.step()

    def step(self) -> list[Request]:
        """One turn of the scheduler. Returns the requests that it has completed."""
        self.admit()
        batch = self.schedule()
        if batch:
            self.compute(batch)  # loads and offloads continue meanwhile
        else:
            time.sleep(0.0005)  # all wait: for loads, or for blocks that copies still touch
        completed = [request for request in self.running if request.done]
        for request in completed:
            self.running.remove(request)
            self.manager.release(request.number)  # its blocks stay cached until others need them
        self.manager.poll()  # publishes pages whose copies have finished, and frees their blocks
        return completed

    # ---- the three parts of a step

    def admit(self) -> None:
        """Give blocks to waiting requests, in order. Begin to load what the host has of them."""
        while self.waiting and len(self.running) < RUNNING:
            request = self.waiting[0]
            # One at a time: what is found stays pinned from here on, and would be missing to those
            # that run. `plan_many` is for a queue that is sorted by what is found.
            self.manager.plan(request.number, Prompt(request.tokens))
            match = self.manager.take(request.number)
            if match is None:
                break  # a storage is being read for it; a later step asks again
            try:
                request.table = self.manager.allocate(request.number, len(request.tokens))
            except OutOfPages:
                self.manager.release(request.number, publish=False)
                break  # it stays first in the queue, until others have ended
            request.load = self.manager.load(request.number)  # returns at once
            request.match = match
            self.waiting.popleft()
            self.running.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Choose what the next pass computes: so many more tokens of so many requests, the oldest
        first. A request that decodes has one token to compute, one that prefills has many."""
        batch, left = [], BUDGET
        for request in list(self.running):
            if request not in self.running or not self.has_arrived(request):
                continue  # it was preempted just now, or is being loaded
            count = min(len(request.tokens) - request.computed, left)
            if count and self.grow(request):  # which preempts none that is in the batch already
                batch.append((request, count))
                left -= count
        return batch

    def has_arrived(self, request: Request) -> bool:
        """Whether its load has finished. If so, what was not found remains to be computed."""
        if request.load is not None:
            try:
                if not request.load.done():
                    return False
            except TransferFailed:
                pass  # `load.tokens` is less now: more remains
            request.computed, request.load = request.load.tokens, None
            self.from_device += (from_device := min(request.match.device, request.computed))
            self.from_host += request.computed - from_device
        return True

    def grow(self, request: Request) -> bool:
        """Get blocks for generated tokens, or preempt the youngest. False: not in this pass."""
        while True:
            try:
                request.table = self.manager.allocate(request.number, len(request.tokens))
                return True
            except OutOfPages:
                if self.manager.poll():
                    return False  # blocks of an ended request are free when its copies have ended
                self.preempt(youngest := self.running[-1])
                if youngest is request:
                    return False

    def preempt(self, request: Request) -> None:
        """Put a request back to the head of the queue. When it is planned again it finds what it
        has computed, unless others needed the room."""
        self.preempted += 1
        self.running.remove(request)
        self.manager.release(request.number)
        request.table = request.match = request.load = None
        request.computed = 0
        self.waiting.appendleft(request)

    def compute(self, batch: list[tuple[Request, int]]) -> None:
        """One pass of the model. Tell the manager what it has computed."""
        for (request, count), token in zip(batch, self.forward(batch), strict=True):
            request.computed += count
            self.computed += count
            # The token after a chunk counts if the chunk was the last one.
            new_tokens = [token] if request.computed == len(request.tokens) else []
            request.tokens += new_tokens
            # Others find full blocks from now on, and full pages are on their way to the host.
            changed = self.manager.commit(request.number, request.computed, new_tokens=new_tokens)
            for position, block in changed.items():
                request.table[position] = block  # another request has computed the same: share it

    @torch.inference_mode()
    def forward(self, batch: list[tuple[Request, int]]) -> list[int]:
        """Compute tokens of several requests. Returns for each the token that comes next."""
        tokens, positions, slots = [], [], []
        for request, count in batch:
            end = request.computed + count
            tokens += request.tokens[request.computed : end]
            positions += range(request.computed, end)
            table = torch.from_numpy(request.table).long()
            slots.append((table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:end])
        counts = [count for _, count in batch]
        logits = self.model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,  # of transformers: the KV is in blocks
            logits_to_keep=torch.tensor(counts).cumsum(0) - 1,
            batch=Pass([kv.flatten(1, 2) for kv in self.tensors], slots, counts),
        ).logits[0]
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen


# ---- A program that uses it.


def prompts() -> list[list[int]]:
    """Of twelve users who ask about two documents."""
    draw = random.Random(1)
    texts = [draw.choices(range(1, 256), k=k) for k in (200, 150)]
    return [texts[user % 2] + draw.choices(range(1, 256), k=10 + user) for user in range(12)]


def main(name: str = "example-engine", device: str = "gpu0") -> None:
    """Serve the users, and say what was found and what was computed."""
    engine = Engine(name, device)
    for prompt in prompts():
        engine.submit(prompt, answer_tokens=24)
    for request in engine.serve():
        print(f"request {request.number}: {request.answer}", flush=True)
    print(
        f"{engine.computed} tokens computed, {engine.from_device} found on the device, "
        f"{engine.from_host} on the host; {engine.preempted} requests preempted"
    )
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker: a serving engine with one model, as small as it can be, around a cache of the node.

`Worker` is what the engine of a dense model writes around a `KVCacheManager`, `HybridWorker` what
changes for a model with recurrent states, around a `HybridManager`. A worker computes one request
at a time, and all that a turn reuses has been shared; examples/engine.py has a queue and batches.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightcache import Cache, TransferFailed
from lightcache.connectors.model_facts import name_of
from lightcache.hybrid import Grid, HybridConfig, HybridManager, open_hybrid
from lightcache.hybrid.saving import Saves
from lightcache.manager import EngineKV, Prompt, open_kv
from lightcache.storage import StorageTier
from lightcache.tools.demo.messages import SECRET, Answer, Request, Tokens, WorkerConfig
from lightcache.tools.demo.model import DeviceMemory, Sequence, build, forward

_CHUNK = 64  # tokens of a chunk of linear attention: states are saved at its multiples
_STATE_SLOTS = 16  # on the device: the working one of a request, and those it saves


@dataclass
class Running:
    """A request that is being computed."""

    request: Request
    table: Any  # its device blocks, in the order of its tokens
    sequence: Sequence
    computed: int  # leading tokens whose KV is on the device
    reused: dict[str, int]  # tokens that are not computed, by the tier they come from
    tokens: list[int] = field(default_factory=list)  # of the answer
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token of the answer was there


class Worker:
    """An engine with a dense model."""

    slots = 0

    def __init__(self, config: WorkerConfig, name: str, stack: ExitStack) -> None:
        """Load the model, allocate the device's memory, and open the cache. Takes seconds.

        Args:
            name: of this worker, which no other process of the run has.
            stack: closes everything.
        """
        self.config, self.name, size = config, name, config.page_tokens
        self.blocks = -(-config.device_tokens // size)
        self.model = build(config.model)
        self.memory = DeviceMemory(
            self.model, blocks=self.blocks, block_tokens=size, slots=self.slots
        )
        options: dict[str, Any] = {
            "model": self.model_name,
            "axes": "kbnhc",
            "page_tokens": size,
            "size": config.host_bytes,
            "secret": SECRET,
            "lifetime": "attached",  # it ends with its last process
            "role": name,
        }
        self.kv = self.open(stack, options)
        self.storage = tier = self.tier(self.kv.cache, stack)
        self.kv_manager = self.kv.manager(f"{config.run}-{name}-blocks", storage=tier)
        stack.callback(self.kv_manager.close)  # before its tier, which then finishes its writes
        self.manager: Any = self.kv_manager

    def open(self, stack: ExitStack, options: dict[str, Any]) -> EngineKV:
        """Open the cache for what is on the device."""
        kv = open_kv(list(self.memory.kv.values()), name=self.config.cache, **options)
        return stack.enter_context(kv)

    def tier(self, cache: Cache, stack: ExitStack) -> StorageTier | None:
        """The storage behind a cache. Writes may pin every page: one request runs at a time, and
        all of it is wanted back after a restart."""
        if self.config.storage is None:
            return None
        tier = StorageTier.open(cache, self.config.storage, write_pages=cache.pages)
        return stack.enter_context(tier)

    @property
    def model_name(self) -> str:
        """Its name, and whatever makes the KV of another model useless to this one."""
        spec = self.config.model
        name = name_of(str(spec.directory)) if spec.directory else "demo"
        return f"{name}@{spec.directory or sorted(spec.form.items())} {spec.seed} {spec.dtype}"

    # ---- one request

    def serve(self, request: Request) -> Answer:
        """Answer a request. Blocks until its pages are published."""
        running = self._admit(request)
        self.prefill(running)
        self._decode(running)
        self.finish(running)
        return self._answer(running)

    def _admit(self, request: Request) -> Running:
        """Find what exists of the prompt, and bring it to blocks of the device."""
        self.manager.plan(request.number, Prompt(request.prompt))
        match = self.manager.take(request.number, wait=True)  # waits for storage alone
        # Blocks for the answer, too. An engine with a queue allocates them step by step.
        total = len(request.prompt) + request.answer_tokens
        table = self.of_kv(self.manager.allocate(request.number, total))
        sequence, computed = self.load(request, match, table)
        reused = self.tiers(match)
        if computed < sum(reused.values()):  # a load has failed: what is missing is computed
            reused = {"device": computed}
        return Running(request, table, sequence, computed, reused)

    def tiers(self, match: Any) -> dict[str, int]:
        """Tokens that were found."""
        return {"device": match.device, "host": match.host, "storage": match.storage}

    def load(self, request: Request, match: Any, table: Any) -> tuple[Sequence, int]:
        """Copy what was found on the host to the device. Returns how many tokens are there."""
        load = self.manager.load(request.number)
        with contextlib.suppress(TransferFailed):  # `load.tokens` is less then
            load.wait()  # on a GPU `wait_on` would let the computing stream wait instead
        return self.memory.sequence(table, load.tokens), load.tokens

    def prefill(self, running: Running) -> None:
        """Compute the rest of the prompt. Its new pages are on their way to the host from here on,
        while the answer is decoded."""
        self._forward(running, running.request.prompt[running.computed :])
        self._commit(running)

    def _decode(self, running: Running) -> None:
        """The other tokens of the answer. The KV of the last one is never computed."""
        while len(running.tokens) < running.request.answer_tokens:
            self._forward(running, running.tokens[-1:])
        self._commit(running, np.array(running.tokens[:-1], np.int32))

    def _forward(self, running: Running, tokens: Any, *, last: bool = True) -> None:
        """One pass. The next token belongs to the answer, unless the prompt continues."""
        token, logprob = forward(self.model, tokens, running.sequence)
        running.computed += len(tokens)
        if last:
            running.tokens.append(token)
            running.logprobs.append(logprob)
            running.times.append(time.monotonic())

    def _commit(self, running: Running, new_tokens: Tokens | None = None) -> None:
        """Tell the manager what has been computed: it names full blocks and begins to offload them.
        A block that another request has computed as well is shared instead."""
        number, computed = running.request.number, running.computed
        replaced = self.of_kv(self.manager.commit(number, computed, new_tokens=new_tokens))
        for position, block in replaced.items():
            running.table[position] = block
            running.sequence.replace_block(position, block)

    def of_kv(self, what: Any) -> Any:
        """The table or the exchanged blocks of full attention."""
        return what

    def finish(self, running: Running) -> None:
        self.manager.release(running.request.number)
        self.settle()

    def settle(self) -> None:
        """Wait for all copies, since the next turn goes elsewhere, and forget what is on the
        device: what is reused shall have been shared. An engine does neither: it calls `poll` once
        a step, and keeps its blocks."""
        while self.manager.poll():
            time.sleep(0.0005)
        self.kv_manager.can_allocate(self.blocks, evict=True)

    def _answer(self, running: Running) -> Answer:
        request = running.request
        return Answer(
            np.array(running.tokens, np.int32),
            running.logprobs,
            {tier: tokens for tier, tokens in running.reused.items() if tokens},
            running.times[0] - request.sent,
            self.alone(request),
        )

    def alone(self, request: Request) -> float | None:
        """Seconds to the first token without the cache, to compare with."""
        before = time.monotonic()
        forward(self.model, request.prompt, None)
        return time.monotonic() - before


class HybridWorker(Worker):
    """An engine whose model has layers of linear attention as well. These keep a recurrent state:
    a prefix is reused as far as both its KV and a saved state reach."""

    slots = _STATE_SLOTS

    def __init__(self, config: WorkerConfig, name: str, stack: ExitStack) -> None:
        """A manager of states in front of the one for KV."""
        super().__init__(config, name, stack)
        checkpoints = self.states.checkpoints(storage=self.storage)
        stack.callback(checkpoints.close)
        grid = Grid(config.page_tokens, config.page_tokens, chunk=_CHUNK)
        # Transformers shows a state at the end of a pass only.
        ends = HybridConfig(saves=Saves.END_ONLY)
        self.manager = HybridManager(self.kv_manager, checkpoints, grid, config=ends)
        stack.callback(self.manager.close)

    def open(self, stack: ExitStack, options: dict[str, Any]) -> EngineKV:
        """The same cache holds the states."""
        memory = self.memory
        self.states = stack.enter_context(
            open_hybrid(
                list(memory.kv.values()),
                {"conv": list(memory.conv.values()), "recurrent": list(memory.recurrent.values())},
                name=self.config.cache,
                index=f"{self.config.run}-{self.name}-slots",
                **options,
            )
        )
        kv: EngineKV | None = self.states.kv
        assert kv is not None
        return kv

    def of_kv(self, what: Any) -> Any:
        return what.get("prefix", {})  # by the name of a group's rule

    def tiers(self, match: Any) -> dict[str, int]:
        host, storage = match.host_tokens, match.storage_tokens
        return {"device": match.device_tokens, "host": host, "storage": storage}

    def load(self, request: Request, match: Any, table: Any) -> tuple[Sequence, int]:
        """The state, too. Without one of the two the other is of no use."""
        restored = self.manager.restore([request.number])
        computed, slot = match.usable, int(restored.working[0])
        try:
            self.manager.load(request.number).wait()
        except TransferFailed:
            self.manager.restart(request.number)
            tokens = len(table) * self.config.page_tokens
            table[:] = self.of_kv(self.manager.allocate(request.number, tokens))
            computed = 0
        return self.memory.sequence(table, computed, slot), computed

    def prefill(self, running: Running) -> None:
        """In passes that end where the manager wants a state to be saved."""
        number, prompt = running.request.number, running.request.prompt
        while running.computed < len(prompt):
            plan = self.manager.save_plan(number, running.computed, len(prompt))
            tokens = prompt[running.computed : plan.end]
            self._forward(running, tokens, last=plan.end == len(prompt))
            saves = [False]
            if plan.position is not None:  # the end of the pass: copies the slot, after the pass
                saves = self.manager.save([number], [plan.position])
            self._commit(running)
            if saves[0]:
                self.manager.saved(number, plan.end)

    def finish(self, running: Running) -> None:
        """A state at the end is given to the cache, where a later prompt may begin with it."""
        self.manager.release(running.request.number, at=running.computed)
        self.settle()

    def settle(self) -> None:
        super().settle()
        assert self.states.slots is not None
        self.states.slots.evict(self.slots)

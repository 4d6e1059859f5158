"""A worker: a serving engine with one model, as small as it can be, around a cache of the node.

`Worker` is what the engine of a dense model writes around a `KVCacheManager`; read `Worker.serve`
first. `HybridWorker` is what changes for a model with recurrent states, around a `HybridManager`.
A worker computes one turn at a time; examples/engine.py has a queue and batches. What the demo adds
to an engine is at the end: it wants every hit to be a shared one, and a worker to be killed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from lightcache import LightcacheError, TransferFailed
from lightcache.hybrid import Grid, HybridConfig, HybridManager, open_hybrid
from lightcache.hybrid.saving import Saves
from lightcache.kernels import Move
from lightcache.manager import EngineBackend, EngineKV, PrefixMatch, Prompt, open_kv
from lightcache.storage import StorageTier
from lightcache.tools.demo.messages import (
    SECRET,
    Answer,
    Failed,
    Holding,
    Ready,
    Tokens,
    Turn,
    WorkerConfig,
)
from lightcache.tools.demo.model import DeviceMemory, Sequence, build, forward, one_line


@dataclass
class Running:
    """A turn that is being computed."""

    turn: Turn
    table: Any  # its device blocks, in the order of its tokens
    sequence: Sequence  # the same tokens, as the model takes them
    computed: int  # leading tokens whose KV is on the device
    answer: Answer  # so far


class Worker:
    """An engine with a dense model."""

    state_slots = 0  # on the device

    def __init__(self, config: WorkerConfig, name: str, stack: ExitStack) -> None:
        """Load the model, allocate the device's memory, and open the cache. Takes seconds.

        Args:
            name: of this worker, and of a dead one before it, whose index it takes.
            stack: closes everything.
        """
        self.config, self.name, size = config, name, config.page_tokens
        self.blocks = -(-config.device_tokens // size)
        self.model = build(config.model)
        self.memory = DeviceMemory(self.model, self.blocks, size, self.state_slots)
        self.kv: EngineKV = self.open(
            stack,
            name=config.cache,
            model=f"demo@{replace(config.model, device='any')}",  # another's KV is of no use
            axes="kbnhc",
            page_tokens=size,
            size=config.host_bytes,
            secret=SECRET,
            lifetime="attached",  # it ends with its last process
            role=name,
        )
        self.storage: StorageTier | None = None
        if config.storage is not None:
            # Writes may pin every page: one turn runs at a time, and a restart wants all of it.
            pages = self.kv.cache.pages
            tier = StorageTier.open(self.kv.cache, config.storage, write_pages=pages)
            self.storage = stack.enter_context(tier)
        self.blocks_manager = self.kv.manager(config.blocks(name), storage=self.storage)
        stack.callback(self.blocks_manager.close)  # before its tier, which finishes its writes
        self.manager: Any = self.blocks_manager

    def open(self, stack: ExitStack, **options: Any) -> EngineKV:
        """Open the cache for the KV on the device."""
        return stack.enter_context(open_kv(self.memory.kv, **options))

    # ---- one turn: a request of the manager, by its number

    def serve(self, turn: Turn) -> Answer:
        """Answer a turn. Blocks until it is computed; its last pages are still being copied."""
        running = self.admit(turn)
        self.prefill(running)
        self.decode(running)
        self.release(running)
        return running.answer

    def admit(self, turn: Turn) -> Running:
        """Find what exists of the prompt, and bring it to blocks of the device."""
        self.manager.plan(turn.number, Prompt(turn.prompt))
        match = self.manager.take(turn.number, wait=True)  # waits for storage alone
        # Blocks for the answer, too. An engine with a queue allocates them step by step.
        total = len(turn.prompt) + turn.answer_tokens
        table = self.of_kv(self.manager.allocate(turn.number, total))
        return self.load(turn, match, table)

    def load(self, turn: Turn, match: Any, table: Any) -> Running:
        """Copy what was found on the host to the device."""
        load = self.manager.load(turn.number)
        with contextlib.suppress(TransferFailed):  # `load.tokens` is less then
            load.wait()  # on a GPU `wait_on` would let the computing stream wait instead
        sequence = self.memory.sequence(table, load.tokens)
        answer = Answer(turn, by_tier(match, load.tokens))
        return Running(turn, table, sequence, load.tokens, answer)

    def prefill(self, running: Running) -> None:
        """Compute the rest of the prompt. Its new pages are on their way to the host from here on,
        while the answer is decoded."""
        self.forward(running, running.turn.prompt[running.computed :])
        self.commit(running)

    def decode(self, running: Running) -> None:
        """The other tokens of the answer. The KV of the last one is never computed."""
        tokens = running.answer.tokens
        while len(tokens) < running.turn.answer_tokens:
            self.forward(running, tokens[-1:])
        self.commit(running, np.array(tokens[:-1], np.int32))

    def forward(self, running: Running, tokens: Any) -> None:
        """One pass. At the end of the prompt, and from then on, it yields a token of the answer."""
        token, logprob = forward(self.model, tokens, running.sequence)
        running.computed += len(tokens)
        if running.computed >= len(running.turn.prompt):
            answer = running.answer
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.times.append(time.monotonic() - running.turn.sent)

    def commit(self, running: Running, new_tokens: Tokens | None = None) -> None:
        """Tell the manager what has been computed: it names full blocks and begins to offload them.
        A block that another request has computed as well is shared instead."""
        number, computed = running.turn.number, running.computed
        replaced = self.of_kv(self.manager.commit(number, computed, new_tokens=new_tokens))
        for position, block in replaced.items():
            running.table[position] = block
            running.sequence.replace_block(position, block)

    def release(self, running: Running) -> None:
        """End the request. Its blocks stay cached until others need them."""
        self.manager.release(running.turn.number)

    def of_kv(self, tables: Any) -> Any:
        """Of what a manager returns, the part for full attention: here all of it."""
        return tables

    # ---- what an engine does not do

    def settle(self) -> None:
        """Wait for all copies, since the next turn goes elsewhere, and forget what is on the
        device, so that what is reused was shared. An engine calls `poll` once a step instead, and
        keeps its blocks."""
        while self.manager.poll():
            time.sleep(0.0005)
        self.blocks_manager.can_allocate(self.blocks, evict=True)


def by_tier(match: PrefixMatch, computed: int) -> dict[str, int]:
    """The tokens that need not be computed, by the tier that had them. Of a load that failed they
    are fewer than were found."""
    device = min(match.device, computed)
    host = min(match.host, computed - device)
    tiers = {"device": device, "host": host, "storage": computed - device - host}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}


class HybridWorker(Worker):
    """An engine whose model has layers of linear attention as well. These keep a recurrent state:
    a prefix is reused as far as both its KV and a saved state reach."""

    state_slots = 16  # the working one of a request, and those that it saves

    def __init__(self, config: WorkerConfig, name: str, stack: ExitStack) -> None:
        """A manager of KV and states, around the one of KV."""
        super().__init__(config, name, stack)
        checkpoints = self.states.checkpoints(storage=self.storage)
        stack.callback(checkpoints.close)
        # Transformers computes linear attention in chunks of 64 tokens: states are saved at their
        # ends. It shows a state at the end of a pass only.
        grid = Grid(config.page_tokens, config.page_tokens, chunk=64)
        ends = HybridConfig(saves=Saves.END_ONLY)
        self.manager = HybridManager(self.blocks_manager, checkpoints, grid, config=ends)
        stack.callback(self.manager.close)

    def open(self, stack: ExitStack, **options: Any) -> Any:
        """The same cache holds the states."""
        states = {"conv": self.memory.conv, "recurrent": self.memory.recurrent}
        slots = f"{self.config.run}-{self.name}-slots"
        opened: Any = open_hybrid(self.memory.kv, states, index=slots, **options)
        self.states = stack.enter_context(opened)
        return self.states.kv

    def of_kv(self, tables: Any) -> Any:
        return tables.get("prefix", {})  # by the name of a group's rule

    def load(self, turn: Turn, match: Any, table: Any) -> Running:
        """The state, too. Without one of the two the other is of no use."""
        working = int(self.manager.restore([turn.number]).working[0])
        computed = match.usable
        try:
            self.manager.load(turn.number).wait()
        except TransferFailed:
            self.manager.restart(turn.number)
            tokens = len(table) * self.config.page_tokens
            table = self.of_kv(self.manager.allocate(turn.number, tokens))
            computed = 0
        sequence = self.memory.sequence(table, computed, working)
        answer = Answer(turn, by_tier(match.kv, computed))
        return Running(turn, table, sequence, computed, answer)

    def prefill(self, running: Running) -> None:
        """In passes that end where the manager wants a state to be saved."""
        number, prompt = running.turn.number, running.turn.prompt
        while running.computed < len(prompt):
            plan = self.manager.save_plan(number, running.computed, len(prompt))
            self.forward(running, prompt[running.computed : plan.end])
            # After the pass its state is in the working slot, which `save` copies.
            save = plan.position is not None and self.manager.save([number], [plan.position])[0]
            self.commit(running)
            if save:
                self.manager.saved(number, plan.end)

    def release(self, running: Running) -> None:
        """A state at the end is given to the cache, where a later prompt may begin with it."""
        self.manager.release(running.turn.number, at=running.computed)

    def settle(self) -> None:
        """States on the device are forgotten as well."""
        super().settle()
        self.states.slots.evict(self.state_slots)


# ---- The process of a worker


def run(config: WorkerConfig, name: str, pipe: Connection) -> None:
    """The whole of it: serves turns until the router closes the pipe."""
    # Not more than OMP_NUM_THREADS, which torch knows.
    torch.set_num_threads(min(config.threads, torch.get_num_threads()))
    with reporting(pipe), ExitStack() as stack:
        worker = (HybridWorker if config.model.hybrid else Worker)(config, name, stack)
        pipe.send(Ready())
        while True:
            turn = pipe.recv()
            if turn.hold:
                stop_in_offload(worker.kv.backend, turn, pipe)
            answer = worker.serve(turn)
            worker.settle()
            began = time.monotonic()
            forward(worker.model, turn.prompt, None)  # to compare with
            answer.alone_s = time.monotonic() - began
            pipe.send(answer)


@contextlib.contextmanager
def reporting(pipe: Connection) -> Iterator[None]:
    """Within it a process serves: it ends when the pipe does, and says why if it cannot go on."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the router has closed the pipe, or is dead
    except (LightcacheError, OSError, MemoryError, ImportError, RuntimeError) as error:
        kind_of = "" if isinstance(error, LightcacheError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # another worker failed first, and the pipe is closed
            pipe.send(Failed(kind_of + one_line(error)))


def stop_in_offload(backend: EngineBackend, turn: Turn, pipe: Connection) -> None:
    """From here on an offload of several pages copies half of them, tells the router, and waits to
    be killed. An engine has no use for this: the demo kills a worker in a copy every time."""

    def offload(new: Any, slots: Any) -> Any:
        half, tokens = len(new.pages) // 2, backend.engine.geometry.page_tokens
        if not half:
            return EngineBackend.offload(backend, new, slots)
        by_page = slots[: len(slots) // tokens * tokens].reshape(-1, tokens)[new.new[:half]]
        backend.engine.offload(Move(new.pages[:half], by_page.reshape(-1))).wait()
        pipe.send(Holding(turn.worker, turn.number, half, len(new.pages)))
        pipe.poll(None)
        raise EOFError  # the router has closed the pipe instead

    vars(backend)["offload"] = offload

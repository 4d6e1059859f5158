"""An engine as small as it can be: a scheduler, a HybridManager, and a real model on a device of
tensors. It may run one step ahead: what it launches on its stream then happens when results are
asked for, and the next step has been launched before."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.hybrid_case import LateCopier, unused
from support.hybrid_device import ModelDevice
from support.manager_case import SECRET
from support.tiny_models import Answer

from lightcache import Cache
from lightcache.errors import OutOfPages
from lightcache.hybrid import Checkpoints, Grid, HybridConfig, HybridManager
from lightcache.hybrid.opening import create_slots
from lightcache.hybrid.requests import HybridMatch
from lightcache.hybrid.saving import Saves, decode_saves
from lightcache.kernels import StateCopier
from lightcache.manager import EngineBackend, KVCacheManager, ManagedBlocks, Prompt, RequestOptions

WISHES = RequestOptions()
FINE: dict[str, Any] = {"block": 8, "page": 8, "chunk": 16, "every": 16}
"""Sizes with which short requests leave many states."""


class BehindStream(EngineBackend):
    """Loads wait for what was launched before them, as those of a device do."""

    def __init__(self, engine: Any, stream: LateCopier) -> None:
        super().__init__(engine)
        self.stream = stream

    def load(self, lease: Any, slots: Any, first: int) -> Any:
        """See `TransferBackend`."""
        self.stream.finish()
        return super().load(lease, slots, first)


@dataclass(eq=False)
class Step:
    """A pass that was launched, and the position of what it saves."""

    end: int
    position: int | None
    over: bool = False


@dataclass(eq=False)
class One:
    """A running request."""

    prompt: Prompt
    more: int
    """Tokens to be generated."""
    match: HybridMatch
    slot: int
    """Its working one."""
    every: list[int]
    """Its tokens, as the device knows them."""
    at: int
    """Tokens behind which its state stands, when all that was launched has happened."""
    told: int
    """Tokens whose ids the manager knows."""
    committed: int = 0
    scores: list[torch.Tensor] = field(default_factory=list)
    """Log-probabilities behind each token that it computed."""
    flying: deque[Step] = field(default_factory=deque)

    def answer(self) -> Answer:
        """As `tiny_models.answer`."""
        every = torch.tensor([self.every[: len(self.prompt) + self.more]])
        begin = len(self.prompt) - 1 - self.match.usable
        return Answer(every, torch.cat(self.scores)[begin : begin + self.more])


class HybridEngine:
    """One engine. Sizes are in tokens, pages and states."""

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        block: int = 16,
        page: int = 16,
        chunk: int = 32,
        every: int = 32,
        blocks: int = 64,
        pages: int | None = None,
        slots: int = 16,
        states: int | None = 16,
        ahead: bool = False,
        budget: int = 1 << 20,
        saves: Saves = Saves.END_ONLY,
        between: bool = False,
        options: RequestOptions = WISHES,
        spare: int = 0,
        **config: Any,
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            pages: of the host; None: as many as the device has.
            states: pages of the host for states; None: there is no such cache.
            budget: tokens of a prompt that a pass computes, at most.
            options: of all requests.
            spare: slots behind those that are managed.
            config: for the HybridConfig.
        """
        self.budget, self.ahead, self.options = budget, ahead, options
        total = slots + spare
        self.store = ModelDevice(model, blocks=blocks, block=block, slots=total, page=page)
        store, host = self.store, blocks * block // page if pages is None else pages
        self.kv = open_pages(f"{name}.kv", store.kv_geometry, host, page)
        self.kv_engine = self.kv.transfer_engine(store.kv_geometry, store.kv_planes, threads=1)
        self.stream = LateCopier(StateCopier(store.state_geometry, store.state_planes))
        self.stream.at_once = not ahead
        self.device = ManagedBlocks(
            f"{name}.device", block_tokens=block, blocks=blocks, eviction="lru"
        )
        self.manager = KVCacheManager(
            self.kv, self.device, BehindStream(self.kv_engine, self.stream)
        )
        self.slots = create_slots(f"{name}.slots", slots)
        self.states, self.state_engine = None, None
        if states is not None:
            self.states = open_pages(
                f"{name}.states", store.state_geometry, states, 1, independent=True
            )
            self.state_engine = self.states.transfer_engine(
                store.state_geometry, store.state_planes, threads=1
            )
        backend = None if self.state_engine is None else EngineBackend(self.state_engine)
        self.checkpoints = Checkpoints(self.slots, self.states, backend, self.stream, most=None)
        self.grid = Grid(block, page, chunk, every)
        how = HybridConfig(saves=saves, between=between, ahead=ahead, **config)
        self.hybrid = HybridManager(self.manager, self.checkpoints, self.grid, config=how)
        self.running: dict[int, One] = {}
        self.ids = itertools.count()

    # ---- requests

    def plan(self, ids: Any, **how: Any) -> HybridMatch:
        """What a prompt would find now."""
        found = self.hybrid.plan("look", Prompt(ids), options=self.options, **how)
        self.hybrid.cancel("look")
        return found

    def begin(self, ids: Any, more: int) -> int | None:
        """A request; None: there is no room."""
        prompt, hybrid, request = Prompt(ids), self.hybrid, next(self.ids)
        hybrid.plan(request, prompt, options=self.options)
        match = hybrid.take(request)
        try:
            hybrid.allocate(request, len(prompt) + more)
            restored = hybrid.restore([request])
        except OutOfPages:
            hybrid.release(request, publish=False)
            return None
        hybrid.load(request).wait(60)
        slot, every = int(restored.working[0]), prompt.tokens.tolist()
        self.running[request] = One(prompt, more, match, slot, every, match.usable, len(every))
        return request

    def serve(self, prompts: Sequence[Any], more: int = 8) -> list[One]:
        """These at once, as far as there is room, to their ends."""
        served: dict[int, One] = {}
        waiting = deque(prompts)
        while waiting or self.running:
            while waiting:
                request = self.begin(waiting[0], more)
                if request is None:
                    assert self.running or self.hybrid.leaving, "no room for one alone"
                    break
                waiting.popleft()
                served[request] = self.running[request]
            if not self.running:
                self.settle()  # what has just ended has its slots still
            self.step()
        return list(served.values())

    # ---- steps

    def step(self) -> None:
        """A pass of each request that runs; then the results of these, or of those before."""
        for request, one in self.running.items():
            self.launch(request, one)
        for request, one in list(self.running.items()):
            self.results(request, one, left=1 if self.ahead else 0)
        self.hybrid.poll()

    def launch(self, request: int, one: One, *, save: bool = True) -> None:
        """A forward pass on the device's stream."""
        hybrid, begin, known = self.hybrid, one.at, len(one.prompt)
        if begin < known:
            plan = hybrid.save_plan(request, begin, min(known, begin + self.budget))
            end, position = plan.end, plan.position
        else:
            end = begin + 1
            due = decode_saves(self.grid, [begin], [end]).positions.tolist()
            position = due[0] if due and save else None
        step, table = Step(end, None), hybrid.allocate(request, end)["prefix"].copy()
        pieces = [(begin, end, one.slot)]
        if position is not None and position < end:
            slot = hybrid.saving(request, position)
            if slot is not None:
                step.position = position
                pieces = [(begin, position, slot), (position, end, one.slot)]
        self.stream.launch(self.passing(one, table, pieces, step))
        if position == end and hybrid.save([request], [end])[0]:
            step.position = end
        one.at = end
        one.flying.append(step)
        self.stream.launch(lambda: setattr(step, "over", True))

    def passing(
        self, one: One, table: Any, pieces: list[tuple[int, int, int]], step: Step
    ) -> Callable[[], None]:
        """What the device does: tokens [begin, end) of each piece; each leaves its state in a
        slot."""

        kept = one.committed

        def act() -> None:
            reads = one.slot
            for begin, end, writes in pieces:
                ids = one.every[begin:end]
                one.scores.append(self.store.run(ids, table, begin, reads, writes, kept))
                reads = writes
            if step.end == len(one.every):
                one.every.append(int(one.scores[-1][-1].argmax()))

        return act

    def results(self, request: int, one: One, left: int) -> None:
        """The results of its passes have arrived, but for those of the last `left`."""
        known = len(one.prompt)
        while len(one.flying) > left:
            step = one.flying.popleft()
            while not step.over:
                self.stream.finish(1)
            if step.end > one.committed:  # else it was computed again
                fresh = np.array(one.every[one.told : step.end], np.int64)
                self.hybrid.commit(request, step.end, new_tokens=fresh if len(fresh) else None)
                one.told, one.committed = max(one.told, step.end), step.end
            if step.position is not None:
                self.hybrid.saved(request, step.position)
            if step.end >= known + one.more - 1:
                self.end(request)
                return

    def end(self, request: int, *, publish: bool = True) -> int:
        """A request is over; or it is aborted. A step of it may be in flight."""
        one = self.running.pop(request)
        at = None if one.flying else one.at
        return self.hybrid.release(request, at=at, publish=publish)

    # ---- the end

    def settle(self) -> None:
        """Whatever goes on is over."""
        self.stream.finish()
        self.checkpoints.transfers.wait(None, 60)
        self.hybrid.poll()

    def close(self) -> None:
        """Everything that `__init__` opened; nobody may have anything."""
        for request in list(self.running):
            self.end(request, publish=False)
        self.stream.finish()
        self.hybrid.close()
        self.settle()
        indexes = [self.device.index, self.kv.index, self.slots]
        for index in indexes if self.states is None else [*indexes, self.states.index]:
            unused(index)
        self.checkpoints.close()
        self.manager.close()
        self.device.close()
        self.slots.close()
        for engine in (self.kv_engine, self.state_engine):
            if engine is not None:
                engine.close()
        for cache in (self.kv, self.states):
            if cache is not None:
                cache.close()


def open_pages(name: str, geometry: Any, pages: int, page_tokens: int, **how: Any) -> Cache:
    """A host cache for pages of a geometry."""
    return Cache.open(
        name,
        pages=pages,
        page_bytes=geometry.page_bytes,
        page_tokens=page_tokens,
        fingerprint=f"model {geometry.fingerprint()}",
        secret=SECRET,
        **how,
    )


def alone() -> Iterator[None]:
    """For a fixture: torch computes in one thread. These models are too small for several, which
    only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_engines(name: str, model: Any) -> Iterator[Callable[..., HybridEngine]]:
    """For a fixture: `make(**how)` makes a HybridEngine, and all of them are closed."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def make(model: Any = model, **how: Any) -> HybridEngine:
            made = HybridEngine(f"{name}.{next(numbers)}", model, **how)
            stack.callback(made.close)
            return made

        yield make


__all__ = ["FINE", "HybridEngine", "One", "alone", "made_engines"]

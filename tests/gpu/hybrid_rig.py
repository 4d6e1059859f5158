"""An engine of few lines around a HybridManager, with its tensors on a device of `gpu.place`.

The model is a handful of elementwise kernels: a state is a function of all tokens before it, and
so is the KV of a token. A pass begins by looking at the state and all KV behind which it computes:
what its kernels see must be what a model alone would have, in whatever order copies come.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gpu.place import DEADLINE

from lightcache import Cache
from lightcache.errors import WaitTimeout
from lightcache.hybrid import Grid, HybridConfig, HybridManager, open_states
from lightcache.hybrid import opening as opening_module
from lightcache.hybrid.checkpoints import Checkpoints, Path, Tier
from lightcache.hybrid.requests import HybridMatch
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.kernels.layouts import Shard, sglang
from lightcache.kernels.moves import Move
from lightcache.manager import EngineBackend, KVCacheManager, ManagedBlocks, Prompt

LAYERS, HEADS, CHANNELS, DIM = 2, 2, 8, 16
BLOCK = 4
"""Tokens of a device block and of a host page."""
SECRET = bytes(16)
QUEUED = 8


class Model:
    """Two layers, each with a state and with KV. Values are small integers, exact in each dtype."""

    def __init__(self, memory: str, wide: int, slots: int, blocks: int) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=memory) for _ in range(LAYERS)]

        self.conv = zeros(torch.bfloat16, slots, CHANNELS, 3)
        self.recurrent = zeros(torch.float32, slots, HEADS, wide, wide)
        self.keys = zeros(torch.bfloat16, blocks * BLOCK, 1, DIM)
        self.values = zeros(torch.bfloat16, blocks * BLOCK, 1, DIM)
        self._channels = torch.arange(CHANNELS, device=memory)[:, None]
        ramp = torch.arange(HEADS * wide * wide, device=memory, dtype=torch.float32)
        self._weights = (ramp % 97 + 1).view(HEADS, wide, wide)
        self._places = torch.arange(1, BLOCK + 1, device=memory, dtype=torch.float64)[:, None, None]

    def state(self, slot: int) -> list[torch.Tensor]:
        """Views of a slot: of each layer its convolution and its recurrent part."""
        return [one[slot] for pair in zip(self.conv, self.recurrent, strict=True) for one in pair]

    def token(self, token: int, slot: int, place: int) -> None:
        """Compute one token: the state changes, KV is written."""
        for layer in range(LAYERS):
            state, conv = self.recurrent[layer][slot], self.conv[layer][slot]
            state.mul_(31).add_(self._weights, alpha=token % 251 + layer).remainder_(8191)
            fresh = (self._channels + token + layer).remainder(127).to(conv.dtype)
            conv.copy_(torch.cat([conv[:, 1:], fresh], dim=1))
            row = state.view(-1)
            self.keys[layer][place].copy_(row[:DIM].remainder(251)[None])
            self.values[layer][place].copy_(row[-DIM:].remainder(241)[None])

    def look(self, slot: int, table: Sequence[int], tokens: int) -> torch.Tensor:
        """One number of a state and of the KV of so many tokens, where each has its place."""
        found = sum(one.double().sum() * (i + 1) for i, one in enumerate(self.state(slot)))
        for tensor in [*self.keys, *self.values]:
            for at in range(-(-tokens // BLOCK)):
                rows = tensor[table[at] * BLOCK : (table[at] + 1) * BLOCK][: tokens - at * BLOCK]
                found = found + (rows.double() * self._places[: len(rows)]).sum() * (at + 1)
        assert isinstance(found, torch.Tensor)
        return found


@functools.cache
def alone(tokens: tuple[int, ...], wide: int) -> tuple[bytes, float]:
    """What a model without a cache has behind some tokens: the bytes of its state, as a page has
    them, and what it looks at."""
    blocks = -(-len(tokens) // BLOCK) or 1
    model = Model("cpu", wide, 1, blocks)
    for at, token in enumerate(tokens):
        model.token(token, 0, at)
    return bytes_of(model.state(0)), float(model.look(0, range(blocks), len(tokens)))


def bytes_of(state: list[torch.Tensor]) -> bytes:
    """Parts one behind the other."""
    return b"".join(one.cpu().contiguous().view(torch.uint8).numpy().tobytes() for one in state)


@dataclass(eq=False)
class Pass:
    """A forward pass that was launched."""

    mark: Any
    begin: int
    end: int
    saves: int | None
    """A position that it saves."""
    seen: list[torch.Tensor] = field(default_factory=list)
    """What its first kernels saw, when they have run."""


@dataclass(eq=False)
class Running:
    """A request."""

    every: list[int]
    """Its tokens, those to be generated included."""
    prompt: Prompt
    match: HybridMatch
    load: Any
    stream: Any
    at: int
    """Tokens that were launched."""
    passes: deque[Pass] = field(default_factory=deque)


class Rig:
    """A model, its caches, and a scheduler."""

    def __init__(
        self,
        where: Any,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        slots: int = 10,
        state_pages: int = 12,
        blocks: int = 64,
        pages: int = 48,
        states: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            states: for the Checkpoints, without a bound on a path unless it says one.
            config: for the HybridConfig.
        """
        self.where = where
        self.model = model = Model(where.memory, where.wide, slots, blocks)
        where.synchronize()
        group = KVGroup.attention(
            "kv", layers=LAYERS, heads=1, head_dim=DIM, dtype_bytes=2, page_tokens=BLOCK
        )
        geometry = PageGeometry([group])
        self.cache = Cache.create(
            f"{name}-kv",
            pages=pages,
            page_bytes=geometry.page_bytes,
            page_tokens=BLOCK,
            fingerprint=f"model {geometry.fingerprint()}",
            secret=SECRET,
            device=True,
        )
        planes = sglang(Shard(geometry), "kv", model.keys, model.values)
        self.pinned = where.pin(self.cache)
        self.engine = where.engine(self.cache, geometry, planes, self.pinned)
        self.device = ManagedBlocks(f"{name}-blocks", block_tokens=BLOCK, blocks=blocks)
        self.after: list[Any] = []
        """Events that transfers wait for from now on."""
        self.manager = KVCacheManager(
            self.cache, self.device, EngineBackend(self.engine, after=self.after)
        )
        self._on_stand_in(monkeypatch)
        self.states = open_states(
            {"conv": model.conv, "recurrent": model.recurrent},
            name=f"{name}-states",
            model="model",
            index=f"{name}-slots",
            pages=state_pages,
            secret=SECRET,
        )
        assert self.states.slots is not None
        assert self.states.host is not None
        assert self.states.copies is not None
        self.slots, self.host = self.states.slots, self.states.host
        self.copies = self.states.copies
        self.checkpoints = Checkpoints(
            self.slots,
            self.host,
            EngineBackend(self.copies.engine, after=self.after),
            self.states.copier,
            **{"most": None, **(states or {})},
        )
        self.hybrid = HybridManager(
            self.manager,
            self.checkpoints,
            Grid(BLOCK, BLOCK, chunk=4, every=8),
            config=HybridConfig(**config),
        )
        self.running: dict[Hashable, Running] = {}

    def _on_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What `open_states` makes for a GPU is made for the stand-in."""
        if torch.cuda.is_available():
            return
        where, original = self.where, Cache.transfer_engine

        def engine(cache: Cache, geometry: Any, planes: Any, *, memory: Any = None) -> Any:
            with monkeypatch.context() as real:
                real.setattr(Cache, "transfer_engine", original)
                return where.engine(cache, geometry, planes, where.pin(cache))

        monkeypatch.setattr(Cache, "transfer_engine", engine)
        monkeypatch.setattr(opening_module, "StateCopier", where.copier)

    # ---- a request's way

    def begin(
        self, request: Hashable, every: Sequence[int], prompt: int, stream: Any = None
    ) -> HybridMatch:
        """Plan, take, allocate, restore, fetch; nobody waits but the stream."""
        named = Prompt(every[:prompt])
        self.hybrid.plan(request, named)
        match = self.hybrid.take(request)
        self.hybrid.allocate(request, prompt)
        self.hybrid.restore([request], stream=stream)
        load = self.hybrid.load(request)
        load.wait_on(stream)
        made = Running(list(every), named, match, load, stream, match.usable)
        self.running[request] = made
        return match

    def prefill(self, request: Hashable) -> None:
        """In as many passes as the plans want, each behind the results of the one before."""
        one = self.running[request]
        while one.at < len(one.prompt):
            plan = self.hybrid.save_plan(request, one.at, min(one.at + 16, len(one.prompt)))
            self.launch(request, plan.end, plan.position)
            self.arrive(request)

    def decode(self, request: Hashable, *, ahead: bool = True) -> None:
        """The rest of its tokens, one by one; ahead: each is launched before the results of the one
        before have arrived."""
        one, interval = self.running[request], self.hybrid.grid.interval
        while one.at < len(one.every):
            position = one.at + 1
            self.launch(request, position, position if position % interval == 0 else None)
            while len(one.passes) > (1 if ahead else 0):
                self.arrive(request)

    def launch(self, request: Hashable, end: int, position: int | None = None) -> None:
        """A forward pass up to `end` that saves the state at a position."""
        one, model = self.running[request], self.model
        slots = self.hybrid._request(request).slots
        assert slots is not None
        table = self.hybrid.allocate(request, end)["prefix"].tolist()
        inside = position is not None and position < end
        target = self.hybrid.saving(request, position) if inside and position else None
        begin, every, working = one.at, one.every, slots.working
        made = Pass(None, begin, end, None if target is None else position)

        def work() -> None:
            made.seen.append(model.look(working, table, begin))
            for at in range(begin, end):
                model.token(every[at], working, table[at // BLOCK] * BLOCK + at % BLOCK)
                if target is not None and at + 1 == position:
                    for to, of in zip(model.state(target), model.state(working), strict=True):
                        to.copy_(of)

        self.where.nap(one.stream)
        self.where.launch(work, one.stream)
        if position == end and self.hybrid.save([request], [end], one.stream)[0]:
            made.saves = end
        made.mark = self.where.mark(one.stream)
        one.at = end
        one.passes.append(made)

    def arrive(self, request: Hashable) -> None:
        """The results of the oldest pass: what it saw is right, and its tokens are committed."""
        one = self.running[request]
        made = one.passes.popleft()
        made.mark.synchronize()
        (seen,) = made.seen
        wanted = alone(tuple(one.every[: made.begin]), self.where.wide)[1]
        assert float(seen) == wanted, f"{request!r}: not what {made.begin} tokens leave"
        known = max(made.begin, len(one.prompt))
        fresh = np.array(one.every[known : made.end], np.int64)
        self.hybrid.commit(request, made.end, new_tokens=fresh if len(fresh) else None)
        if made.saves is not None:
            self.hybrid.saved(request, made.saves)

    def end(self, request: Hashable, *, publish: bool = True, idle: bool = True) -> None:
        """Release it; idle: behind all of its results, else with its last pass in flight."""
        one = self.running.pop(request)
        if idle:
            self.running[request] = one
            while one.passes:
                self.arrive(request)
            del self.running[request]
        at = one.at if idle else None
        self.hybrid.release(request, at=at, publish=publish, stream=one.stream)

    def run(
        self, request: Hashable, every: Sequence[int], prompt: int | None = None
    ) -> HybridMatch:
        """A whole request. Returns its match."""
        match = self.begin(request, every, len(every) if prompt is None else prompt)
        self.prefill(request)
        self.decode(request)
        self.end(request)
        return match

    # ---- what is there

    def settle(self) -> None:
        """All copies are over, and noticed."""
        end = time.monotonic() + DEADLINE
        while self.hybrid.poll() or self.hybrid.leaving:
            assert time.monotonic() < end, "a copy is never over"
            time.sleep(1e-3)

    def there(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        """Positions of a sequence's checkpoints in each tier. Their bytes are those of a model
        alone."""
        self.where.synchronize()
        found: dict[str, list[int]] = {}
        path = self._path(tokens)
        for tier, _, index in self.checkpoints.tiers:
            found[tier.value] = []
            for at in range(len(path.keys)):
                with index.match(path.keys[at : at + 1], namespace=path.space.of(tier)) as lease:
                    if len(lease):
                        position = (at + 1) * self.hybrid.parts.step
                        wanted = alone(tuple(tokens[:position]), self.where.wide)[0]
                        held = self._bytes(tier, int(lease.pages[0]))
                        assert held == wanted, f"{tier.value}: not the state behind {position}"
                        found[tier.value].append(position)
        return found

    def _path(self, tokens: Sequence[int]) -> Path:
        prompt = Prompt(tokens)
        space = self.manager.state.weights.scope_of(prompt.tenant)
        assert space is not None
        states = self.hybrid.parts.states_of(space)
        assert states is not None
        return Path(self.hybrid.parts.keys_of(prompt, space), states)

    def _bytes(self, tier: Tier, page: int) -> bytes:
        if tier is Tier.DEVICE:
            return bytes_of(self.model.state(page))
        used = self.states.layout.geometry.used_bytes
        return self.host.pool.array[page, :used].tobytes()

    def working(self, request: Hashable) -> int:
        """A request's working slot."""
        slots = self.hybrid._request(request).slots
        assert slots is not None
        return slots.working

    def pinned_checkpoints(self) -> int:
        """Pins of the device's checkpoints; slots that requests hold are none."""
        report = self.slots.check()
        return report.pins - report.held

    def forget_device(self, *, kv: bool = True) -> None:
        """What nobody uses goes from the device."""
        self.slots.evict(self.slots.pages)
        if kv:
            assert self.device.index is not None
            self.device.index.evict(self.device.blocks)

    # ---- around it

    def warm(self) -> None:
        """Compile, load and allocate whatever a test needs while a gate is shut: nothing of that
        may wait for the device then."""
        for pinned in (self.pinned, self.copies.pinned):
            if pinned is not None:
                pinned.wait(timeout=DEADLINE)
        tokens = list(range(900, 937))
        for _ in range(2):
            self.run("warm", tokens, 25)
            self.settle()
            self.forget_device()
        self.run("warm", tokens, 25)  # from the host
        self.settle()
        for cache, engine in ((self.cache, self.engine), (self.host, self.copies.engine)):
            held = cache.reserve(cache.hash_pages(tokens, page_tokens=cache.index.page_tokens)[-1:])
            slots = list(range(len(held.pages) * (cache.index.page_tokens or 1)))
            moves = Move(held.pages, slots)
            for transfer in [engine.offload(moves) for _ in range(QUEUED)]:
                transfer.wait(DEADLINE)
            held.release()
        slots = self.checkpoints.acquire(2).detach()
        self.where.nap()
        copies = [self.states.copier.copy(slots[:1], slots[1:]) for _ in range(QUEUED)]
        for copy in copies:
            copy.wait()
        self.checkpoints.free(slots)
        self.forget_device()
        for cache in (self.cache, self.host):
            cache.evict(cache.pages)
        self.where.synchronize()

    def nothing_left(self) -> None:
        """No request runs: nobody may have anything."""
        self.settle()
        assert not self.running
        assert not self.hybrid._requests
        for index in (self.slots, self.host.index, self.cache.index, self.device.index):
            assert index is not None
            stats = index.stats()
            index.allocate(stats.free + stats.doomed).free()  # doomed ones go for room
            report, stats = index.check(), index.stats()
            assert report.clean, report.message
            assert (report.pins, stats.held, stats.writing, stats.doomed) == (0, 0, 0, 0)

    def close(self) -> None:
        """Everything that `__init__` opened."""
        try:
            self.hybrid.close()
        except WaitTimeout:  # a test that failed with its gate shut: let that be seen
            self.where.synchronize()
            self.hybrid.close()
        self.checkpoints.close()
        self.states.close()
        self.manager.close()
        self.engine.close()
        self.device.close()
        self.cache.close()


__all__ = ["BLOCK", "Rig", "alone"]

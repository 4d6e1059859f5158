"""An engine of few lines around a KVCacheManager, and an oracle that knows what every slot holds.

The engine computes by writing stamps (`support.stamped`). Whatever the manager says is there must
be the stamp of just those tokens, in whatever tier.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.manager_case import open_cache
from support.stamped import StampedBackend, StampedDevice, Stamps, stamps_of

from lightcache import Cache
from lightcache.errors import OutOfPages, TransferFailed
from lightcache.manager import (
    KVCacheManager,
    LoadHandle,
    ManagedBlocks,
    ManagerConfig,
    MirroredBlocks,
    RequestOptions,
    WritePolicy,
)
from lightcache.manager import Prompt as ManagerPrompt
from lightcache.manager.request import ANY


@dataclass
class Running:
    """A request as the engine sees it."""

    prompt: ManagerPrompt
    tokens: list[int]
    """The prompt's, then those generated."""
    computed: int
    """Leading tokens whose KV is on the device, if the fetch is over."""
    table: Any
    load: LoadHandle
    told: int = 0
    """Tokens that the manager knows the ids of."""
    loaded: bool = False


@dataclass
class Blocks:
    """The allocator of an engine that owns its blocks: a free list, and what was freed comes
    last."""

    free: list[int]
    named: set[int] = field(default_factory=set)
    waiting: list[list[int]] = field(default_factory=list)
    """Freed, but a copy may touch them."""

    def collect(self, manager: KVCacheManager) -> None:
        """What no copy touches any more is free."""
        left = []
        for blocks in self.waiting:
            if blocks and manager.in_flight(blocks).any():
                left.append(blocks)
            else:
                self.free.extend(blocks)
        self.waiting = left

    def allocate(self, n: int, manager: KVCacheManager) -> list[int] | None:
        """n blocks, or none."""
        self.collect(manager)
        if len(self.free) < n:
            return None
        taken, self.free = self.free[:n], self.free[n:]
        back = manager.config.write is WritePolicy.BACK
        if back and manager.evicting(taken) and manager.in_flight(taken).any():
            self.waiting.append(taken)
            return None
        manager.evicted(taken)
        return taken


class Engine:
    """A scheduler and a model, as small as they can be."""

    def __init__(
        self,
        name: str,
        *,
        owned: bool,
        blocks: int,
        block: int,
        page: int,
        pages: int,
        cache: Cache | None = None,
        **config: Any,
    ) -> None:
        """Opens everything; `close` closes it."""
        self.closes = cache is None
        self.cache = cache or open_cache(name, pages, page)
        self.store = StampedDevice(blocks, block)
        kind = ManagedBlocks if owned else MirroredBlocks
        self.device = kind(f"{name}.device", block_tokens=block, blocks=blocks)
        self.backend = StampedBackend(self.cache, self.store)
        self.manager = KVCacheManager(
            self.cache, self.device, self.backend, config=ManagerConfig(**config)
        )
        self.blocks = None if owned else Blocks(list(range(blocks)))
        self.block = block
        self.running: dict[int, Running] = {}
        self.weights = 0
        self.skip_load_next = False

    def seed(self) -> int:
        """Stamps of other weights are others."""
        return self.weights * 7919

    def stamps(self, prompt: ManagerPrompt, tokens: Any = None) -> Stamps:
        """What the model computes of a prompt, and perhaps more: with another item in the same
        place something else."""
        every = np.array(prompt.tokens if tokens is None else tokens, np.int64)
        for item in prompt.items:
            every[item.start : item.end] += 1000 * (1 + item.digest[0])
        return stamps_of(every, self.seed())

    def begin(
        self,
        request: int,
        prompt: ManagerPrompt,
        options: RequestOptions = ANY,
        *,
        planned: bool = False,
    ) -> bool:
        """Plan, take, allocate, fetch. False: no room, and nothing is left of it.

        Args:
            planned: that was done before, perhaps long ago.
        """
        manager = self.manager
        if not planned:
            manager.plan(request, prompt, options=options)
        match = manager.take(request)
        assert match.usable < len(prompt)
        assert options.read or not match.usable
        assert prompt.cut_item(match.usable) is None
        if self.blocks is not None:
            return self._begin_attached(request, prompt, options)
        if self.skip_load_next and match.load:
            match, self.skip_load_next = manager.skip_load(request), False
            assert not match.load
        try:
            table = manager.allocate(request, len(prompt)).copy()
        except OutOfPages:
            manager.release(request, publish=False)
            return False
        load = manager.load(request)
        tokens = prompt.tokens.tolist()
        self.running[request] = Running(prompt, tokens, match.usable, table, load, told=len(tokens))
        return True

    def _begin_attached(self, request: int, prompt: ManagerPrompt, options: RequestOptions) -> bool:
        """This engine does not look for prefixes on its device: all of them come from the host."""
        assert self.blocks is not None
        manager = self.manager
        manager.release(request, publish=False)
        match = manager.plan(request, prompt, options=options, device_tokens=0)
        taken = self.blocks.allocate(-(-len(prompt) // self.block), manager)
        if taken is None:
            manager.cancel(request)
            return False
        match = manager.take(request)
        table = np.array(taken, np.int32)
        load = manager.load(request, table)
        tokens = prompt.tokens.tolist()
        self.running[request] = Running(prompt, tokens, match.usable, table, load, told=len(tokens))
        return True

    def compute(self, request: int, count: int, generated: list[int]) -> bool:
        """Compute up to `count` tokens, of the prompt first; commit. False: no room, or not
        loaded."""
        one = self.running[request]
        if not one.loaded and not self._loaded(one):
            return False
        one.tokens = one.tokens + (generated if one.computed + count > len(one.tokens) else [])
        end = min(one.computed + count, len(one.tokens))
        if not self._room(request, one, end):
            return False
        stamps = self.stamps(one.prompt, one.tokens)
        self.store.write(one.table, one.computed, stamps[one.computed : end])
        self._expect(one, end)
        one.computed = end
        fresh = one.tokens[one.told : end] if end > one.told else []
        one.told = max(one.told, end)
        tables = None if self.blocks is None else one.table
        changed = self.manager.commit(
            request, end, new_tokens=np.array(fresh, np.int64), table=tables
        )
        for position, block in changed.items():
            one.table[position] = block
        self._expect(one, end)
        return True

    def _loaded(self, one: Running) -> bool:
        """Whether the fetch is over; what a failed one should have brought is computed."""
        try:
            one.loaded = one.load.done()
        except TransferFailed:
            one.computed, one.loaded = one.load.tokens, True
        return one.loaded

    def _room(self, request: int, one: Running, end: int) -> bool:
        missing = -(-end // self.block) - len(one.table)
        if missing <= 0:
            return True
        if self.blocks is None:
            try:
                one.table = self.manager.allocate(request, end).copy()
            except OutOfPages:
                return False
            return True
        taken = self.blocks.allocate(missing, self.manager)
        if taken is None:
            return False
        one.table = np.concatenate([one.table, np.array(taken, np.int32)])
        return True

    def _expect(self, one: Running, end: int) -> None:
        found = self.store.read(one.table, 0, end)
        wanted = self.stamps(one.prompt, one.tokens)[:end]
        wrong = np.flatnonzero(found != wanted)
        assert not len(wrong), f"token {wrong[0]} of {end} has another prefix's stamp"

    def end(self, request: int, *, publish: bool) -> None:
        """A request is over, or aborted."""
        one = self.running.pop(request)
        self.manager.release(request, publish=publish)
        if self.blocks is not None:
            self.blocks.waiting.append(one.table.tolist())
            self.blocks.collect(self.manager)

    def update(self, weights: int) -> None:
        """Serve other weights; what runs is aborted, as engines do."""
        self.manager.begin_update(wait=False)
        for request in list(self.running):
            self.end(request, publish=True)
        self.backend.finish()
        self.weights = weights
        self.manager.finish_update(str(weights))

    # ---- what must hold

    def check_host(self, prompt: ManagerPrompt) -> int:
        """Every page of the prefix that the host has holds its tokens' stamps. Returns its
        pages."""
        space = self.manager.state.weights.open_space(prompt.tenant)
        wanted = self.stamps(prompt)
        tokens = self.cache.index.page_tokens
        with self.cache.match(prompt.keys(space.host_spec), namespace=space.host) as lease:
            for i, page in enumerate(lease.pages.tolist()):
                found = np.frombuffer(bytes(memoryview(self.cache.pool[page])), np.uint64)
                assert (found == wanted[i * tokens : (i + 1) * tokens]).all(), f"host page {i}"
            return len(lease)

    def check_device(self, prompt: ManagerPrompt) -> int:
        """The same of the device's blocks; managed blocks, which can be pinned."""
        index, space = self.device.index, self.manager.state.weights.open_space(prompt.tenant)
        if self.blocks is not None or index is None:
            return 0
        wanted = self.stamps(prompt)
        with index.match(prompt.keys(space.device_spec), namespace=space.device) as lease:
            found = self.store.read(lease.pages, 0, len(lease) * self.block)
            assert (found == wanted[: len(found)]).all()
            return len(lease)

    def settle(self) -> None:
        """Nothing runs any more, no copy goes on: nothing may be left of anybody."""
        self.manager.resume()
        for request in list(self.running):
            self.end(request, publish=True)
        self.manager.lookup.close()
        self.backend.finish()
        self.manager.poll()
        assert self.manager.in_flight() == 0
        assert self.device.index is not None
        for index in (self.device.index, self.cache.index):
            index.evict(1)  # doomed pages go when somebody makes room
        found, host = self.device.index.stats(), self.cache.stats()
        assert found.writing == host.writing == host.held == 0
        assert found.doomed == host.doomed == 0
        if self.blocks is None:
            assert found.held == 0
            assert found.free + found.ready == found.pages
        else:
            assert found.held + found.ready == found.pages
        for index in (self.device.index, self.cache.index):
            report = index.check()
            assert report.clean, report.message
        assert self.blocks is not None or self.device.index.check().pins == 0

    def close(self) -> None:
        """Everything that `__init__` opened."""
        self.backend.finish()
        self.manager.close()
        self.device.close()
        if self.closes:
            self.cache.close()

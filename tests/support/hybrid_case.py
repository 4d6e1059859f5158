"""A hybrid model's manager, call by call: states are stamps, as KV's tokens are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.index_view import IndexView
from support.manager_case import SECRET, World, open_cache, taken, tokens
from support.stamped import (
    TOKEN_BYTES,
    PartsBackend,
    StampedBackend,
    StampedDevice,
    stamps_of,
)

from lightcache import Cache, PageIndex
from lightcache.errors import ConfigError
from lightcache.group_index import GroupIndex
from lightcache.hybrid.checkpoints import Checkpoints, Path, Tier
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.opening import create_slots
from lightcache.hybrid.requests import HybridMatch
from lightcache.hybrid.saving import Grid, HybridConfig
from lightcache.manager import Prompt
from lightcache.runs import PLAIN, Run


class LateCopying:
    """A launch that happens when it is told to."""

    def __init__(self, act: Callable[[], object], slots: Any = ()) -> None:
        self.act, self.over = act, False
        self.slots = frozenset(int(slot) for slot in slots)
        """Those that it reads or writes."""

    def done(self) -> bool:
        """See `Copying`."""
        return self.over

    def go_on(self) -> None:
        """It happens."""
        if not self.over:
            self.act()
            self.over = True


class LateCopier:
    """A copier whose launches happen in their order, now or later: a stream of the device."""

    def __init__(self, copier: Any) -> None:
        """Args:
        copier: that copies at once.
        """
        self.copier, self.at_once = copier, True
        self.going: list[LateCopying] = []
        self.launches = 0

    def copy(self, sources: Any, targets: Any, stream: Any = None) -> LateCopying:
        """See `StateCopier`."""
        if len(sources) != len(targets) or len(np.intersect1d(sources, targets)):
            raise ConfigError("a test copies a slot onto one that is read")
        return self.launch(lambda: self.copier.copy(sources, targets), [*sources, *targets])

    def zero(self, slots: Any, stream: Any = None) -> LateCopying:
        """See `StateCopier`."""
        return self.launch(lambda: self.copier.zero(slots), slots)

    def launch(self, act: Callable[[], object], slots: Any = ()) -> LateCopying:
        """Anything else on the same stream."""
        self.launches += 1
        made = LateCopying(act, slots)
        self.going.append(made)
        if self.at_once:
            self.finish()
        return made

    def finish(self, count: int | None = None) -> None:
        """The first of what was launched happens; None: all."""
        for _ in range(len(self.going) if count is None else min(count, len(self.going))):
            self.going.pop(0).go_on()


class HybridWorld:
    """A manager's World, slots and host pages of states, and what joins them."""

    def __init__(
        self,
        name: str,
        *,
        slots: int | None = 16,
        state_pages: int | None = 16,
        parts: int | None = None,
        chunk: int = 4,
        every: int = 8,
        tail: bool = False,
        states: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        shared: str | None = None,
        state_storage: Callable[[Cache], Any] | None = None,
        **world: Any,
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            slots: of the device; None: it has none for checkpoints.
            state_pages: of the host; None: there is none.
            parts: pages of KV's cache that a state takes there; None: states have a cache of their
                own.
            states: for the Checkpoints.
            config: for the HybridConfig.
            state_storage: makes the StorageTier of the states' cache.
            shared: name of the host's caches, which others have, too; None: of our own.
            world: for the World.
        """
        self.cache: Cache | None = None
        if shared is not None:
            size = world.get("pages", 32), world.get("page", 4)
            self.cache = open_cache(shared, *size, eviction="lru")
        self.world = World(name, cache=self.cache, eviction="lru", **world)
        manager = self.world.manager
        self.slots = None if slots is None else create_slots(f"{name}.slots", slots)
        self.states = None
        if parts is not None:
            self.states = self.world.cache
        elif state_pages is not None:
            self.states = open_states(f"{shared or name}.states", state_pages)
        self.one_pool = parts is not None
        # An engine without slots for checkpoints has its own for running requests.
        self.store = StampedDevice(slots or 64, 1)
        self.copier = LateCopier(ArrayCopier(self.store.slots))
        self.backend = None
        if self.states is not None:
            self.backend = (
                StampedBackend(self.states, self.store)
                if parts is None
                else PartsBackend(self.states, self.store, parts)
            )
        self.storage = None
        if state_storage is not None and self.states is not None:
            self.storage = state_storage(self.states)
        self.checkpoints = Checkpoints(
            self.slots,
            self.states,
            self.backend,
            self.copier,
            storage=self.storage,
            run=PLAIN if parts is None else Run(1, parts),
            **(states or {}),
        )
        grid = Grid(manager.device.block_tokens, manager.page_tokens, chunk, every)
        self.grid = grid
        self.hybrid = HybridManager(
            manager, self.checkpoints, grid, config=HybridConfig(tail=tail, **(config or {}))
        )

        self.at: dict[Any, int] = {}
        """Of running requests: tokens behind which their state stands."""
        self.every: dict[Any, list[int]] = {}
        self.known: dict[Any, int] = {}
        """Tokens of their prompts."""

    @property
    def manager(self) -> Any:
        """Of KV."""
        return self.world.manager

    def path(self, prompt: Prompt) -> Path:
        """The positions of a prompt."""
        space = self.manager.state.weights.scope_of(prompt.tenant)
        states = self.hybrid.parts.states_of(space)
        assert states is not None
        return Path(self.hybrid.parts.keys_of(prompt, space), states)

    def save(self, what: Any, *positions: int) -> None:
        """Checkpoints of a prompt, as a request that ended would leave them."""
        prompt = as_prompt(what)
        for position in positions:
            assert position % self.hybrid.parts.step == 0
            slot = int(self.checkpoints.acquire(1).detach()[0]) if self.slots is not None else 0
            self.store.slots[slot] = stamps_of(prompt.tokens)[position - 1]
            self.checkpoints.donate(slot, self.path(prompt), position // self.hybrid.parts.step)
            self.settle()

    def compute(self, what: Any) -> None:
        """KV of a prompt, without any state."""
        self.world.run(object(), as_prompt(what))

    def plan(self, what: Any, request: Any = "plan", **how: Any) -> HybridMatch:
        """A plan, which stays."""
        return self.hybrid.plan(request, as_prompt(what), **how)

    def look(self, what: Any, **how: Any) -> HybridMatch:
        """The same, and nothing stays pinned."""
        found = self.plan(what, "look", **how)
        self.hybrid.cancel("look")
        return found

    # ---- a request's way

    def begin(
        self, request: Any, what: Any, *, slots: Any = None, wait: bool = True, **how: Any
    ) -> HybridMatch:
        """Plan, take, allocate, restore, fetch; what was found must be right.

        Args:
            slots: of the engine.
            wait: for the loads.
        """
        prompt = as_prompt(what)
        self.hybrid.plan(request, prompt, **how)
        match = taken(self.manager, request, self.hybrid.take)
        self.hybrid.allocate(request, len(prompt))
        restored = self.hybrid.restore([request], None if slots is None else [slots])
        load = self.hybrid.load(request)
        self.begun(request, prompt, match.usable)
        if wait:
            load.wait()
            stamps = stamps_of(prompt.tokens)[: match.usable]
            assert (self.world.content(request, match.usable) == stamps).all()
            if self.copier.at_once:
                self.check_state(request, int(restored.working[0]))
        return match

    def begun(self, request: Any, prompt: Prompt, at: int) -> None:
        """Its state stands behind so many tokens."""
        self.at[request] = at
        self.every[request] = prompt.tokens.tolist()
        self.known[request] = len(prompt)

    def check_state(self, request: Any, slot: int) -> None:
        """A slot holds the state behind the tokens that were computed."""
        at = self.at[request]
        wanted = stamps_of(self.every[request])[at - 1] if at else 0
        assert self.store.slots[slot] == wanted, f"not the state behind {at} tokens"

    def step(self, request: Any, end: int, *, save: bool = True) -> None:
        """Compute tokens up to `end`; in the prompt in as many passes as the plans want."""
        hybrid, every = self.hybrid, self.every[request]
        while self.at[request] < end:
            begin, stop, position = self.at[request], end, None
            if begin < self.known[request] and save:
                plan = hybrid.save_plan(request, begin, min(end, self.known[request]))
                stop, position = plan.end, plan.position
            elif save:
                stop = min(end, (begin // self.grid.interval + 1) * self.grid.interval)
                position = stop if stop % self.grid.interval == 0 else None
            self.pass_(request, begin, stop, position, stamps_of(every))

    def pass_(self, request: Any, begin: int, end: int, position: int | None, stamps: Any) -> None:
        """One forward pass."""
        hybrid = self.hybrid
        slots = hybrid._request(request).slots
        self.check_state(request, slots.working)  # which the layers begin with
        table = hybrid.allocate(request, end)["prefix"]
        self.world.store.write(table, begin, stamps[begin:end])
        saved = False
        if position is not None and position < end:
            slot = hybrid.saving(request, position)
            saved = slot is not None
            if slot is not None:
                self.store.slots[slot] = stamps[position - 1]
        self.store.slots[slots.working] = stamps[end - 1]
        self.at[request] = end
        if position == end:
            (saved,) = hybrid.save([request], [position])
        known = len(self.manager.request(request).prompt)
        fresh = np.asarray(self.every[request])[max(begin, known) : end]
        hybrid.commit(request, end, new_tokens=fresh if len(fresh) else None)
        if saved:
            hybrid.saved(request, position)

    def end(self, request: Any, *, at: bool = True, kept: int | None = None) -> int:
        """A request is over; `at`: and no step of it is in flight."""
        where = self.at.pop(request)
        return self.hybrid.release(request, at=where if at else None, kept=kept)

    def run(
        self,
        request: Any,
        what: Any,
        *,
        more: int = 0,
        at: bool = True,
        kept: int | None = None,
        slots: Any = None,
        **how: Any,
    ) -> Any:
        """A whole request, which generates `more` tokens. Returns its match, or then all of its
        tokens."""
        prompt = as_prompt(what)
        match = self.begin(request, prompt, slots=slots, **how)
        self.every[request] += tokens(more, 77).tolist()
        self.step(request, len(prompt))
        self.step(request, len(prompt) + more)
        self.end(request, at=at, kept=kept)
        return self.every[request] if more else match

    def there(self, what: Any) -> dict[str, list[int]]:
        """Positions of a prompt's checkpoints, in each tier."""
        path, found = self.path(as_prompt(what)), {}
        for tier, _, index in self.checkpoints.tiers:
            namespace = path.space.of(tier)
            counts = range(1, len(path.keys) + 1)
            at = [n for n in counts if index.peek(path.key(n), namespace=namespace)]
            found[tier.value] = [n * self.hybrid.parts.step for n in at]
        return found

    def ordinary(self, what: Any) -> list[int]:
        """Positions of a prompt's checkpoints on the device that are not superseded."""
        first = self.superseded(what, Tier.DEVICE)
        return [n for n in self.there(what)["device"] if n not in first]

    def superseded(self, what: Any, tier: Tier = Tier.HOST) -> list[int]:
        """Positions of a prompt's checkpoints in a tier that are the first to be evicted."""
        path = self.path(as_prompt(what))
        states = self.checkpoints.host_states if tier is Tier.HOST else self.checkpoints.slots
        assert states is not None
        run = self.checkpoints.run if tier is Tier.HOST else PLAIN
        index = states.index if isinstance(states, GroupIndex) else states
        first = IndexView(index).goes_first()
        keys = [tuple(key) for key in run.last(path.keys).tolist()]
        return [(i + 1) * self.hybrid.parts.step for i, key in enumerate(keys) if key in first]

    def content_of(self, tier: Tier, page: int) -> int:
        """The stamp in a slot or a host page."""
        if tier is Tier.DEVICE:
            return int(self.store.slots[page])
        assert self.states is not None
        return int(np.frombuffer(memoryview(self.states.pool[page]), np.uint64)[0])

    def settle(self) -> None:
        """Copies happen, those too that a poll begins to keep slots free."""
        going = 1
        while going:
            self.copier.finish()
            for backend in (self.backend, self.world.backend):
                if backend is not None:
                    backend.finish()
            going = self.hybrid.poll()

    def nothing_left(self) -> None:
        """No request runs: nobody may have anything."""
        self.settle()
        self.world.nothing_left()
        assert not self.hybrid._requests
        assert not self.hybrid.leaving
        for _, _, index in self.checkpoints.tiers:
            unused(index if isinstance(index, PageIndex) else index.index)

    def close(self) -> None:
        """Everything that `__init__` opened."""
        self.copier.finish()
        if self.backend is not None:
            self.backend.finish()
        self.hybrid.close()
        self.checkpoints.close()
        assert self.storage is None or self.storage.close() is not False
        self.world.close()
        for each in (self.slots, None if self.one_pool else self.states, self.cache):
            if each is not None:
                each.close()


def unused(index: Any) -> None:
    """Nobody has anything of an index."""
    stats = index.stats()
    index.allocate(stats.free + stats.doomed).free()  # doomed ones go for room
    report, stats = index.check(), index.stats()
    assert report.clean, report.message
    assert (report.pins, stats.held, stats.writing, stats.doomed) == (0, 0, 0, 0)
    assert not index.plans.pages


def as_prompt(what: Any) -> Prompt:
    """Token ids as a prompt."""
    return what if isinstance(what, Prompt) else Prompt(what)


def open_states(name: str, pages: int) -> Cache:
    """A host cache whose pages are states: a stamp each."""
    return Cache.open(
        name,
        pages=pages,
        page_bytes=TOKEN_BYTES,
        page_tokens=1,
        fingerprint="stamped states",
        independent=True,
        secret=SECRET,
    )


__all__ = [
    "HybridWorld",
    "LateCopier",
    "as_prompt",
    "open_states",
    "tokens",
    "unused",
]

"""A cache, a device of arrays and a manager, call by call; and a storage of one dict."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.stamped import TOKEN_BYTES, StampedBackend, StampedDevice, stamps_of

from lightcache import Cache
from lightcache.kernels.geometry import PageGeometry
from lightcache.manager import (
    KVCacheManager,
    ManagedBlocks,
    ManagerConfig,
    MirroredBlocks,
    PrefixMatch,
    Prompt,
)
from lightcache.shm.layout import SegmentHeader
from lightcache.storage.common import Deadline
from lightcache.storage.tasks import StorageTask, TaskProgress
from lightcache.storage.tier import BaseTier

SECRET = b"a secret of tests"


def tokens(n: int, seed: int = 0) -> Any:
    """n token ids."""
    return np.random.default_rng(seed).integers(0, 1000, n)


class World:
    """A cache, a device, a manager."""

    def __init__(
        self,
        name: str,
        *,
        owned: bool = True,
        blocks: int | None = 32,
        block: int = 4,
        page: int = 4,
        pages: int = 32,
        cache: Cache | None = None,
        costs: Any = None,
        storage: Any = None,
        weights: str = "",
        eviction: str | None = None,
        **config: Any,
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            blocks: of the device; None: said later.
            cache: the host's; None: one of its own.
            eviction: the order of the device's index and of its own cache.
            config: of the manager.
        """
        self.own = cache is None
        self.cache = cache or open_cache(name, pages, page, eviction)
        self.store = StampedDevice(blocks or 0, block)
        kind = ManagedBlocks if owned else MirroredBlocks
        self.device = kind(f"{name}.device", block_tokens=block, blocks=blocks, eviction=eviction)
        self.backend = StampedBackend(self.cache, self.store)
        try:
            self.manager = KVCacheManager(
                self.cache,
                self.device,
                self.backend,
                config=ManagerConfig(**config),
                costs=costs,
                storage=storage(self.cache) if storage else None,
                weights=weights,
            )
        except BaseException:
            self.device.close()
            self.cache.close()
            raise

    @property
    def index(self) -> Any:
        """Of the device."""
        assert self.device.index is not None
        return self.device.index

    def close(self) -> None:
        """Everything that `__init__` opened."""
        self.backend.finish()
        self.manager.close()
        self.device.close()
        close = getattr(self.manager._storage, "close", None)
        assert close is None or close() is not False
        if self.own:
            self.cache.close()

    def start(self, request: Any, what: Any, **how: Any) -> PrefixMatch:
        """Plan, take, allocate, fetch; without waiting."""
        prompt = what if isinstance(what, Prompt) else Prompt(what)
        self.manager.plan(request, prompt, **how)
        match = taken(self.manager, request)
        self.manager.allocate(request, len(prompt))
        self.manager.load(request)
        return match

    def compute(self, request: Any, every: Any, begin: int, end: int) -> Any:
        """Compute tokens [begin, end) of a sequence, and commit them."""
        known = len(self.manager.request(request).prompt)
        table = self.manager.allocate(request, end)
        self.store.write(table, begin, stamps_of(every)[begin:end])
        fresh = np.asarray(every)[max(begin, known) : end]
        return self.manager.commit(request, end, new_tokens=fresh)

    def run(self, request: Any, what: Any, *, keep: bool = False, **how: Any) -> PrefixMatch:
        """A whole request: everything that is not found is computed. Returns its match."""
        prompt = what if isinstance(what, Prompt) else Prompt(what)
        manager = self.manager
        manager.plan(request, prompt, **how)
        match = taken(manager, request)
        table = manager.allocate(request, len(prompt))
        load = manager.load(request)
        load.wait()
        stamps = stamps_of(prompt.tokens)
        assert (self.store.read(table, 0, match.usable) == stamps[: match.usable]).all()
        self.store.write(table, match.usable, stamps[match.usable :])
        manager.commit(request, len(prompt))
        if not keep:
            manager.release(request)
        return match

    def content(self, request: Any, end: int) -> Any:
        """Stamps that a request's table has."""
        return self.store.read(self.manager.request(request).table, 0, end)

    def nothing_left(self) -> None:
        """No request runs: nobody may have anything."""
        self.backend.finish()
        self.manager.poll()
        found = self.manager.gauges()
        assert (found.running, found.leaving, found.transfers, found.queued) == (0, 0, 0, 0)
        for index in (self.device.index, self.cache.index):
            if index is None:
                continue
            stats = index.stats()
            index.allocate(stats.free + stats.doomed).free()  # doomed ones go for room
            report, stats = index.check(), index.stats()
            assert report.clean, report.message
            assert (stats.writing, stats.doomed) == (0, 0)
            assert not index.plans.pages
            if index is self.cache.index or self.device.owned:
                assert (report.pins, stats.held) == (0, 0)


def switch_off(index: Any, value: int) -> None:
    """An operator's switch: 1 disables an index, 0 enables it again."""
    at = index.segment.address + SegmentHeader.disabled.offset
    ctypes.c_uint32.from_address(at).value = value


def open_cache(name: str, pages: int, page: int, eviction: str | None = None) -> Cache:
    """A host cache whose pages hold a stamp for each token."""
    return Cache.open(
        name,
        pages=pages,
        page_bytes=page * TOKEN_BYTES,
        page_tokens=page,
        fingerprint="stamped",
        secret=SECRET,
        eviction=eviction,
    )


def engine_cache(name: str, geometry: PageGeometry, pages: int) -> Cache:
    """A host cache for a transfer engine, of pages of four tokens."""
    return Cache.create(
        name,
        pages=pages,
        page_bytes=geometry.page_bytes,
        page_tokens=4,
        fingerprint=f"model {geometry.fingerprint()}",
        secret=SECRET,
    )


def on_host(world: World, prompt: Prompt) -> int:
    """Host pages of a prompt's prefix, every one with its stamps."""
    space = world.manager.state.weights.open_space(prompt.tenant)
    wanted, size = stamps_of(prompt.tokens), world.cache.index.page_tokens
    with world.cache.match(prompt.keys(space.host_spec), namespace=space.host) as lease:
        for i, page in enumerate(lease.pages.tolist()):
            found = np.frombuffer(bytes(memoryview(world.cache.pool[page])), np.uint64)
            assert (found == wanted[i * size : (i + 1) * size]).all()
        return len(lease)


def on_device(world: World, prompt: Prompt) -> int:
    """Device tokens of its prefix."""
    space = world.manager.state.weights.open_space(prompt.tenant)
    peeked: int = world.index.peek(prompt.keys(space.device_spec), namespace=space.device)
    return peeked * world.device.block_tokens


class Patient:
    """Computing takes for ever: what storage has is waited for, however busy the machine is."""

    def seconds(self, tokens: int) -> float:
        """See `Pace`."""
        return 600.0


def taken(manager: Any, request: Any, take: Any = None) -> Any:
    """A request begins when nothing is being read for it any more."""
    pace, manager.state.pace = manager.state.pace, Patient()
    try:
        return (take or manager.take)(request, wait=True)
    finally:
        manager.state.pace = pace


class Shelf(BaseTier):
    """A storage of pages in a dict, as a manager sees one: reads when it is told to."""

    def __init__(self, cache: Cache) -> None:
        """Empty."""
        self.cache = cache
        self._page_tokens = None
        self.pages: dict[bytes, bytes] = {}
        self.tasks: list[Reading] = []

    def store(self, prompt: Prompt) -> None:
        """Everything of a prompt."""
        spec = self.cache.key_spec()
        words = stamps_of(prompt.tokens)
        for i, key in enumerate(prompt.keys(spec)):
            part = words[i * spec.page_tokens : (i + 1) * spec.page_tokens]
            self.pages[key.tobytes()] = part.tobytes()

    def _deadline_of(self, timeout: Any, namespace: Any) -> Deadline:
        return Deadline(60.0 if timeout is None else timeout)

    def _start(self, call: Any, keys: Any, namespace: Any, *deadline: Any, **how: Any) -> Any:
        if call == "prefetch":
            self.tasks.append(Reading(self, keys, how["start"], namespace))
            return self.tasks[-1]
        assert call == "write"  # it is filled by the tests
        progress = TaskProgress("write", len(keys), None)
        progress.count(stored=len(keys))
        progress.end(failed=False)
        return StorageTask(progress)

    def stats(self) -> Any:
        """Nobody asks it for that."""
        raise NotImplementedError

    def poll(self) -> None:
        """Nothing is overdue."""

    def close(self, timeout: float = 10.0) -> bool:
        """Nothing is held."""
        return True

    def take_figures(self) -> Any:
        """It has none."""
        return {}


class Reading:
    """One prefetch."""

    kind, seconds = "read", 0.0

    def __init__(self, shelf: Shelf, keys: Any, start: int, namespace: Any) -> None:
        self.shelf, self.keys, self.start, self.namespace = shelf, keys, start, namespace
        self.pages_done = 0
        self.ended = self.cancelled = False

    def go_on(self) -> None:
        """Bring everything to the host."""
        shelf, end = self.shelf, self.start
        while end < len(self.keys) and self.keys[end].tobytes() in shelf.pages:
            end += 1
        cache = shelf.cache
        with cache.reserve(self.keys[:end], self.start, namespace=self.namespace) as new:
            for position, page in zip(new.new.tolist(), new.pages.tolist(), strict=True):
                view = memoryview(cache.pool[page]).cast("B")
                view[:] = shelf.pages[self.keys[position].tobytes()]
            new.publish()
            self.pages_done = end - self.start
        self.ended = True

    def wait(self, timeout: float | None = None) -> None:
        """Nobody brings anything while it is waited for."""
        self.ended = True

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.cancelled = True


def made_worlds(name: str, kind: Callable[..., Any] = World) -> Iterator[Callable[..., Any]]:
    """For a fixture: `make(**how)` makes a World, or a HybridWorld. In the end nothing is held of
    any but those made with `ends_busy=True`, and all of them are closed."""
    made: list[Any] = []
    busy: list[Any] = []

    def make(*, ends_busy: bool = False, **how: Any) -> Any:
        made.append(kind(f"{name}.{len(made)}", **how))
        if ends_busy:
            busy.append(made[-1])
        return made[-1]

    yield make
    try:
        for world in made:
            if world not in busy:
                world.nothing_left()
    finally:
        for world in reversed(made):
            world.close()

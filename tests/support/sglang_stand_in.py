"""A stand-in for SGLang's ranks: they call `Rank` in SGLang's order, over arrays of numpy.

What it "computes" for a position depends on all tokens up to there, on the head and the channel, so
a slot with other bytes than its tokens have is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightcache import Cache
from lightcache.connectors.engine_cache import open_engine_cache
from lightcache.connectors.page_groups import PageGroup
from lightcache.connectors.sglang import rank as module
from lightcache.connectors.sglang.pools import FULL, GROUP, Format, PoolFormat
from lightcache.connectors.sglang.rank import ABSENT, ROOT, Options, Rank
from lightcache.errors import LightcacheError
from lightcache.groups import Rule
from lightcache.kernels import KVGroup, PageGeometry, Plane, Shard, join, layouts
from lightcache.runs import Run
from lightcache.shm import Segment

PAGE, HEADS, WIDTH, LAYERS, TOKENS = 4, 2, 16, 2, 512
STATE, SLOTS = {"temporal": 600, "conv0": 40}, 64
"""Bytes of the parts of a state, of a layer in one rank: with two layers more than a page."""
_numbers = itertools.count()


@pytest.fixture
def engines_apart(monkeypatch: pytest.MonkeyPatch, segment_name: str) -> Iterator[None]:
    """Ranks are processes of their own: here each is a client. Caches outlive them."""
    apart = partial(open_engine_cache, shared=False)
    monkeypatch.setattr(module, "open_engine_cache", apart)
    yield
    with contextlib.suppress(LightcacheError):
        Segment.unlink(segment_name)


def pins(name: str) -> int:
    """After a check of the whole cache."""
    with Cache.attach(name) as cache:
        report = cache.check()
        report.raise_if_broken()
        return int(report.pins)


def hashes_of(tokens: list[int], salt: str = "") -> list[str]:
    """SHA-256 of each whole page, chained, in hex."""
    found, digest = [], salt.encode()
    for end in range(PAGE, len(tokens) + 1, PAGE):
        part = np.asarray(tokens[end - PAGE : end], np.int64).tobytes()
        digest = hashlib.sha256(digest + part).digest()
        found.append(digest.hex())
    return found


def computed(tokens: list[int], layer: int, plane: int, heads: int) -> Any:
    """The KV of all positions: (tokens, heads, elements)."""
    sums = np.cumsum(np.asarray(tokens) + 1) % 251
    marks = np.add.outer(np.arange(heads) * 31, np.arange(WIDTH)) + 7 * layer + 3 * plane
    return ((sums[:, None, None] + marks[None, :, :]) % 256).astype(np.uint8)


def state_of(tokens: list[int], layer: int, part: str, rank: int) -> Any:
    """Bytes of a state after all these tokens."""
    text = f"{tokens} {layer} {part} {rank}".encode()
    return np.frombuffer(hashlib.shake_128(text).digest(STATE[part]), np.uint8)


def kv_group(layers: int, heads: int, latent: bool, rule: Rule) -> KVGroup:
    return KVGroup.attention(
        GROUP,
        layers=layers,
        heads=heads,
        head_dim=WIDTH,
        dtype_bytes=1,
        page_tokens=PAGE,
        content="single" if latent else "separate",
        rule=rule,
        head_groups=heads,
    )


class Engine:
    """One engine: `ranks` of them in one process, each with its tensors."""

    def __init__(
        self,
        name: str,
        launch: str = "11111111",
        ranks: int = 1,
        latent: bool = False,
        window: int = 0,
        states: bool = False,
        **how: Any,
    ) -> None:
        """`window`: pages that a position needs of a third layer, which has a pool of its own.
        `states`: the second layer, and one that has no KV, have recurrent states."""
        self.options = Options.of({"name": name, "size": "1MiB", **how})
        self.heads = 1 if latent else HEADS
        self.latent, self.pages = latent, window
        self.ranks: list[Rank] = []
        self.tensors: list[list[list[Any]]] = []
        self.windows: list[list[list[Any]]] = []
        self.states: list[dict[str, list[Any]]] = []
        for rank in range(ranks):
            pools = self._pools(rank, ranks, window, states)
            text = " ".join(["stand-in", *(pool.geometry.fingerprint() for pool in pools)])
            one = Rank(self.options, launch, rank)
            one.start(Format("stand-in", text, PAGE, tuple(pools)), 7 if ranks > 1 else None)
            self.ranks.append(one)
        self.slots = itertools.cycle(range(PAGE, TOKENS, PAGE))
        self.places = itertools.cycle(range(1, SLOTS))

    def _pools(self, rank: int, ranks: int, window: int, states: bool) -> list[PoolFormat]:
        group = PageGroup("window", Rule.window(window * PAGE), Run(1)) if window else FULL
        kinds = [(FULL, LAYERS, self.tensors, {0: 0, 2: 1}), (group, 1, self.windows, {1: 0})]
        size = PageGeometry([kv_group(LAYERS, self.heads, self.latent, FULL.rule)]).page_bytes
        pools = []
        for group, layers, tensors, numbers in kinds[: 1 + bool(window)]:
            kind = kv_group(layers, self.heads, self.latent, group.rule)
            geometry = PageGeometry([kind], part_bytes=size if window else None)
            shape = (TOKENS, max(1, self.heads // ranks), WIDTH)
            planes = [
                [np.zeros(shape, np.uint8) for _ in range(layers)]
                for _ in range(1 if self.latent else 2)
            ]
            tensors.append(planes)
            shard = Shard(geometry, rank, ranks)
            views = layouts.sglang(shard, GROUP, planes[0], None if self.latent else planes[1])
            several = window or states
            pools.append(PoolFormat(group, geometry, shard, views, numbers if several else {}))
        if states:
            parts = [Plane(name, nbytes, ranks) for name, nbytes in STATE.items()]
            kind = KVGroup.state("state", layers=2, parts=parts, head_groups=ranks)
            shard = Shard(PageGeometry([kind], part_bytes=size), rank, ranks)
            own = {
                name: [np.zeros((SLOTS, nbytes), np.uint8) for _ in range(2)]
                for name, nbytes in STATE.items()
            }
            self.states.append(own)
            views = join(
                *(layouts.plane(shard, "state", name, own[name], axes="tc") for name in own)
            )
            point = PageGroup("state", Rule.point(), Run(len(pools), shard.geometry.parts))
            pools.append(PoolFormat(point, shard.geometry, shard, views, {2: 0, 3: 1}))
        return pools

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- a request, step by step

    def take(self, pages: int) -> Any:
        """Slots for so many pages."""
        starts = [next(self.slots) for _ in range(pages)]
        return (np.asarray(starts, np.int64)[:, None] + np.arange(PAGE)).ravel()

    def lookup(self, request: str, hashes: list[str], before: str | None = ROOT) -> int:
        """Pages that all ranks have, as SGLang finds them."""
        sets = [set(rank.lengths(rank.lookup(request, hashes, before))) for rank in self.ranks]
        return max(set.intersection(*sets), default=0)

    def load(self, request: str, tokens: list[int], hashes: list[str], begin: int = 0) -> bool:
        """Load these pages of a prompt; whether all ranks have them, with the right bytes."""
        slots = self.for_load(len(hashes))
        for rank in self.ranks:
            rank.load(request, hashes, *((lambda own=own: own) for own in slots))
        whole = self.run({request: (tokens, begin * PAGE, slots[0])})[request]
        if whole:
            end = (begin + len(hashes)) * PAGE
            if self.pages:
                self.check(tokens, end - len(slots[1]), slots[1], self.windows)
            self.check_state(tokens[:end], slots[-1])
        return whole

    def for_load(self, pages: int) -> list[Any]:
        """Slots of each pool."""
        slots = [self.take(pages)]
        if self.pages:
            slots.append(self.take(min(self.pages, pages)))
        if self.states:
            slots.append(np.asarray([next(self.places)]))
        return slots

    def run(self, loaded: dict[str, tuple[list[int], int, Any]]) -> dict[str, bool]:
        """A forward pass; whether the loads of all ranks have landed."""
        numbers = [rank.begin(list) for rank in self.ranks]
        for rank, number in zip(self.ranks, numbers, strict=True):
            for layer in range(rank.layers + 1):  # the last is none of the model
                rank.wait(number, layer)
        whole = min([rank.finish(number) for rank, number in zip(self.ranks, numbers, strict=True)])
        if whole:
            for tokens, begin, slots in loaded.values():
                self.check(tokens, begin, slots)
        return dict.fromkeys(loaded, whole)

    def check_state(self, tokens: list[int], slots: Any) -> None:
        """The slot has the state after these tokens."""
        for rank, own in enumerate(self.states):
            for part, layers in own.items():
                for layer, tensor in enumerate(layers):
                    wanted = state_of(tokens, layer, part, rank)
                    np.testing.assert_array_equal(tensor[slots[0]], wanted)

    def check(self, tokens: list[int], begin: int, slots: Any, pool: Any = None) -> None:
        """The slots have what this prompt has from this token on."""
        for rank, number, layer, tensor in self.each(pool):
            wanted = self.part(tokens, layer, number, rank)[begin : begin + len(slots)]
            np.testing.assert_array_equal(tensor[slots], wanted)

    def each(self, pool: Any = None) -> Iterator[tuple[int, int, int, Any]]:
        """Rank, plane, layer and tensor, of a pool."""
        pool = self.tensors if pool is None else pool
        for rank, planes in enumerate(pool):
            for number, plane in enumerate(planes):
                for layer, tensor in enumerate(plane, 10 * (pool is self.windows)):
                    yield rank, number, layer, tensor

    def part(self, tokens: list[int], layer: int, plane: int, rank: int) -> Any:
        """Of the heads of a rank."""
        whole = computed(tokens, layer, plane, self.heads)
        own = max(1, self.heads // len(self.ranks))
        first = rank * own % self.heads
        return whole[:, first : first + own]

    def compute(self, tokens: list[int], begin: int = 0, pool: Any = None) -> Any:
        """Put the KV of whole pages from this page on into slots."""
        pages = len(tokens) // PAGE - begin
        slots = self.take(pages)
        span = slice(begin * PAGE, (begin + pages) * PAGE)
        for rank, number, layer, tensor in self.each(pool):
            tensor[slots] = self.part(tokens, layer, number, rank)[span]
        return slots

    def state(self, tokens: list[int]) -> Any:
        """Put the state after these tokens into a slot."""
        slots = np.asarray([next(self.places)])
        for rank, own in enumerate(self.states):
            for part, layers in own.items():
                for layer, tensor in enumerate(layers):
                    tensor[slots[0]] = state_of(tokens, layer, part, rank)
        return slots

    def offload(
        self,
        tokens: list[int],
        begin: int = 0,
        before: str | None = None,
        after: Any = (),
        windows: int | None = None,
        state: bool = True,
    ) -> None:
        """Save the pages from this one on, as one node of the tree, the windows of as many of its
        last pages (None: of all), and the state at its end."""
        hashes = hashes_of(tokens)
        told = before if before is not None else (hashes[begin - 1] if begin else ROOT)
        slots, found = self.compute(tokens, begin), []
        if self.pages:
            first = begin if windows is None else len(hashes) - windows
            found.append((len(hashes) - first, self.compute(tokens, first, self.windows)))
        if self.states:
            whole = tokens[: len(hashes) * PAGE]
            found.append((1, self.state(whole)) if state else ABSENT)
        more = [(count, lambda own=own: own) if count else ABSENT for count, own in found]
        for rank in self.ranks:
            rank.offload(hashes[begin:], lambda: slots, told, list(after), *more)

    def saved(self, count: int = 1) -> list[bool]:
        """The next results, as SGLang takes them: of all ranks together."""
        while min(rank.completed() for rank in self.ranks) < count:
            assert self.ranks[0]._thread is not None
        return [min([rank.pop() for rank in self.ranks]) for _ in range(count)]

    def ask(self, tokens: list[int], device: int = 0) -> int:
        """Serve a prompt whose first pages the device has; returns the pages that were loaded."""
        hashes = hashes_of(tokens)
        request = f"r{next(_numbers)}"
        before = hashes[device - 1] if device else ROOT
        found = self.lookup(request, hashes[device:], before)
        if found:
            assert self.load(request, tokens, hashes[device : device + found], device)
        if device + found < len(hashes):
            self.offload(tokens, device + found)
            assert self.saved() == [True]
        return found

"""An engine as small as it can be: a scheduler, a HybridManager of windows, and a toy model on a
device of arrays, whose next token depends on every row that its layers see. So a wrong block is a
wrong answer."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from lightcache import Cache, ClientId
from lightcache.errors import Abandoned, OutOfPages, TransferFailed, WaitTimeout
from lightcache.groups import Rule
from lightcache.hybrid import HybridManager
from lightcache.hybrid.requests import PREFIX, HybridMatch
from lightcache.hybrid.window_blocks import WindowBlocks
from lightcache.kernels import KVGroup, PageGeometry, Shard, layouts
from lightcache.manager import (
    EngineBackend,
    KVCacheManager,
    ManagedBlocks,
    ManagerConfig,
    Prompt,
    RequestOptions,
    WritePolicy,
)
from lightcache.manager.ranks.coordinator import RankCoordinator
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.worker import RankWorker
from lightcache.runs import Run
from lightcache.shm import SharedLog

SECRET = bytes(range(16))
M = 2**31 - 1
ANY = RequestOptions()
LAYERS = 2  # of each window: so its page takes two of the cache


def seen(rule: Rule, token: int) -> int:
    """The first token that this one sees."""
    return max(0, token // rule.align * rule.align - rule.back)


def weighed(rows: Any) -> int:
    """What attention makes of rows: their order counts."""
    return int((rows.astype(np.uint64) * np.arange(len(rows), 0, -1, dtype=np.uint64)).sum() % M)


def row_of(token: int, weights: int) -> int:
    """The row of full attention."""
    return (token * 7919 + 3 + weights * 1000003) % M


def window_row(mixed: int, token: int, number: int) -> int:
    """The row of a window's layers: of what full attention made of all tokens."""
    return (mixed * (17 + number) + token) % M


@cache
def uncached(tokens: tuple[int, ...], rules: tuple[Rule, ...], weights: int = 0) -> int:
    """The next token, of a model that has no cache."""
    full = np.array([row_of(token, weights) for token in tokens], np.uint64)
    mixed = [weighed(full[: i + 1]) for i in range(len(tokens))]
    total = mixed[-1]
    for number, rule in enumerate(rules):
        begin = seen(rule, len(tokens) - 1)
        pairs = zip(mixed[begin:], tokens[begin:], strict=True)
        total += weighed(np.array([window_row(*pair, number) for pair in pairs], np.uint64))
    return total % 97 + 1


class AtOnce(EngineBackend):
    """Copies that have happened when the call returns, or soon after."""

    def finish(self, count: int | None = None) -> None:
        """There is nothing to finish."""


class LateCopy:
    """A copy that begins when its backend is told to: the latest moment at which it may."""

    def __init__(self, begin: Any, held: Any) -> None:
        self.begin, self.held = begin, held
        self.real: Any = None
        self.failed = False

    def done(self) -> bool:
        """See `TransferHandle`."""
        if self.failed:
            raise TransferFailed("arranged")
        return self.real is not None and self.real.done()

    def wait(self, timeout: float | None = None) -> None:
        """See `TransferHandle`."""
        if self.real is None and not self.failed:
            raise WaitTimeout("arranged: not begun")
        if not self.done():
            self.real.wait(timeout)


class LateBackend(AtOnce):
    """Copies happen when told to, or fail."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.going: deque[LateCopy] = deque()
        self.fail_next = 0

    def load(self, lease: Any, slots: Any, first: int) -> Any:
        """See `TransferBackend`."""
        return self._later(partial(super().load, lease, slots, first), lease)

    def offload(self, new: Any, slots: Any, **how: Any) -> Any:
        """See `TransferBackend`, and `RankBackend`."""
        return self._later(partial(super().offload, new, slots, **how), new)

    def _later(self, begin: Any, held: Any) -> LateCopy:
        self.going.append(LateCopy(begin, held))
        return self.going[-1]

    def begun(self, held: Any) -> Any:
        """See `TransferBackend`."""
        return next((copy for copy in self.going if copy.held is held), None)

    def finish(self, count: int | None = None) -> None:
        """Let the oldest copies happen; None: all."""
        for _ in range(len(self.going) if count is None else min(count, len(self.going))):
            copy = self.going.popleft()
            if self.fail_next:
                self.fail_next -= 1
                copy.held.close()
                copy.failed = True
            else:
                copy.real = copy.begin()
                with contextlib.suppress(Abandoned):  # which `done` tells
                    copy.real.wait()


@dataclass(eq=False)
class Sequence:
    """A running request."""

    tokens: list[int]
    """The prompt, and what was generated."""
    more: int
    """Tokens to generate."""
    match: HybridMatch
    weights: int = 0
    """The version that it began with."""
    computed: int = -1
    """Tokens with rows on the device; -1: being loaded."""
    tables: dict[str, Any] = field(default_factory=dict)
    load: Any = None


class WindowRank:
    """One rank of an engine: its arrays, and what copies its share of the host's pages."""

    def __init__(
        self, cache: Cache, rank: int, ranks: int, shape: dict[str, Any], wrap: Any
    ) -> None:
        """Args:
        cache: of this rank; the caller closes it.
        shape: of `geometries` and of the arrays: see `WindowEngine`.
        """
        self.cache, self.rank = cache, rank
        self.log: SharedLog | None = None
        self.worker: RankWorker | None = None
        self.engines: list[Any] = []
        self.backends: list[Any] = []
        self.rows: dict[str, list[Any]] = {}
        sizes = [shape["blocks"], *[shape["window_blocks"]] * len(shape["rules"])]
        for geometry, blocks in zip(geometries(shape, ranks), sizes, strict=True):
            (group,) = geometry.groups
            rows = [np.zeros((blocks, shape["block"], 1), np.uint64) for _ in group.layers]
            self.rows[group.name] = rows
            mine = Shard(geometry, rank, ranks)
            planes = layouts.plane(mine, group.name, "kv", dict(enumerate(rows)), axes="bnc")
            how = {} if ranks == 1 else {"share": mine.share()}
            self.engines.append(self.cache.transfer_engine(geometry, planes, threads=1, **how))
            self.backends.append(wrap(self.engines[-1]))

    def join(self, log: str) -> RankWorker:
        """Follow the orders in this log."""
        self.log = SharedLog.attach(log)
        kv, *windows = self.backends
        others = dict(enumerate(windows, 1))
        self.worker = RankWorker(self.log, self.cache, kv, self.rank, groups=others)
        return self.worker

    def close(self) -> None:
        """Leave."""
        for closeable in (self.worker, *self.engines, self.log):
            if closeable is not None:
                closeable.close()


def geometries(shape: dict[str, Any], ranks: int) -> list[PageGeometry]:
    """Of full attention and of each rule. Each rank has a head, if there are several."""
    page, rules = shape["page"], shape["rules"]
    kv = PageGeometry([_group(PREFIX, 1, page, Rule.prefix(), ranks)])
    return [
        kv,
        *(
            PageGeometry([_group(rule.name, LAYERS, page, rule, ranks)], part_bytes=kv.page_bytes)
            for rule in rules
        ),
    ]


class WindowEngine:
    """One engine. Sizes are in tokens, blocks and pages."""

    def __init__(
        self,
        name: str,
        rules: Mapping[str, Rule] | tuple[Rule, ...],
        *,
        host: str | None = None,
        block: int = 4,
        page: int = 8,
        every: int = 16,
        blocks: int = 64,
        window_blocks: int = 64,
        pages: int = 200,
        wrap: Any = AtOnce,
        seed: int = 1,
        weights: str = "",
        storage: Any = None,
        write: WritePolicy = WritePolicy.THROUGH,
        low_water: float | None = None,
        timeout: float | None = 0.0,
        ranks: int = 0,
        others: Callable[[str, str], list[ClientId]] | None = None,
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            host: the cache that engines share; None: its own.
            wrap: makes a transfer backend of a transfer engine.
            storage: makes a tier of the cache; None: there is none.
            timeout: of an allocation.
            ranks: that share each page, in this process; 0: the engine copies by itself.
            others: further ranks, of other processes; given the names of cache and log.
        """
        self.name, self.timeout = name, timeout
        self.rules = tuple(rules.values()) if isinstance(rules, Mapping) else rules
        self.block, self.random = block, np.random.default_rng(seed)
        shape = {
            "rules": self.rules,
            "page": page,
            "block": block,
            "blocks": blocks,
            "window_blocks": window_blocks,
        }
        total = max(1, ranks + (others is not None))
        kv, *windows = geometries(shape, total)
        parts = kv.page_bytes
        words = " ".join(each.fingerprint() for each in (kv, *windows))
        self.host = Cache.open(
            host or f"{name}.host",
            pages=pages,
            page_bytes=parts,
            page_tokens=page,
            fingerprint=f"toy {words}",
            secret=SECRET,
            kv_groups=("kv", *(rule.name for rule in self.rules)),
        )
        self.unit = max(block, page)
        self.caches = [
            Cache.attach(self.host.name, secret=SECRET, role=f"rank {rank}")
            for rank in range(ranks)
        ]
        self.team = [
            WindowRank(cache, rank, total, shape, wrap)
            for rank, cache in enumerate(self.caches or [self.host])
        ]
        self.backends = [backend for rank in self.team for backend in rank.backends]
        self.coordinator: RankCoordinator | None = None
        own: list[Any] = self.team[0].backends
        self.workers: list[RankWorker] = []
        self.log: SharedLog | None = None
        if ranks:
            log = f"{name}.log"
            self.log = SharedLog.create(log, capacity=1024, message_bytes=256)
            self.workers = [rank.join(log) for rank in self.team]
            clients = [rank.cache.client_id for rank in self.team]
            clients += [] if others is None else others(self.host.name, log)
            self.coordinator = RankCoordinator(self.log, clients)
            runs = [Run(number, each.parts) for number, each in enumerate(windows, 1)]
            own = [self.coordinator, *map(self.coordinator.group, runs)]
        self.steps = 0
        self.rows = {
            name: [rows for rank in self.team for rows in rank.rows[name]]
            for name in self.team[0].rows
        }
        self.device = ManagedBlocks(
            f"{name}.device", block_tokens=block, blocks=blocks, eviction="lru"
        )
        self.tier = None if storage is None else storage(self.host)
        self.manager = KVCacheManager(
            self.host,
            self.device,
            own[0],
            weights=weights,
            storage=self.tier,
            config=ManagerConfig(write=write, low_water=low_water),
        )
        self.windows = []
        for number, (rule, geometry) in enumerate(zip(self.rules, windows, strict=True), 1):
            window = WindowBlocks(
                f"{name}.{rule.name}",
                rule=rule,
                block_tokens=block,
                blocks=window_blocks,
                backend=own[number],
                run=Run(number, geometry.parts),
            )
            self.windows.append(window)
        self.manage = HybridManager(self.manager, windows=self.windows, every=every)
        self.weights = 0
        """Counts the changes of weights."""
        self.running: dict[int, Sequence] = {}
        self.ids = itertools.count()

    # ---- requests

    def begin(self, tokens: list[int], more: int, options: RequestOptions = ANY) -> int:
        """Plan and take a request. Returns its number."""
        request = next(self.ids)
        self.manage.plan(request, Prompt(tokens), options=options)
        match = self.manage.take(request, wait=True)
        self.running[request] = Sequence(list(tokens), more, match, self.weights)
        return request

    def step(self, request: int, budget: int = 1 << 20) -> bool:
        """Load, or compute one pass of at most so many tokens. False: it has ended.

        Raises:
            OutOfPages: it needs more blocks.
        """
        self.order()
        seq = self.running[request]
        if seq.load is None:
            self.grow(request, seq.match.usable)
            seq.load = self.manage.load(request)
        if seq.computed < 0:
            try:
                if not seq.load.done():
                    return True
            except TransferFailed:
                seq.match = self.manage.restart(request)
                seq.tables, seq.load = {}, None
                return True
            seq.computed = seq.load.tokens
            assert seq.computed == seq.match.usable
        end = min(seq.computed + budget, len(seq.tokens))
        self.grow(request, end)
        answer = None
        for token in range(seq.computed, end):
            answer = self._forward(seq, token)
        seq.computed = end
        new: list[int] = []
        if end == len(seq.tokens):
            assert answer == uncached(tuple(seq.tokens), self.rules, seq.weights)
            if not seq.more:
                self.tell(request, new)
                return False
            seq.more -= 1
            new = [answer]
            seq.tokens.append(answer)
        self.tell(request, new)
        return True

    def tell(self, request: int, new: list[int]) -> None:
        """Commit what was computed."""
        seq = self.running[request]
        changed = self.manage.commit(request, seq.computed, new_tokens=new)
        for name, blocks in changed.items():
            for position, block in blocks.items():
                seq.tables[name] = seq.tables[name].copy()
                seq.tables[name][position] = block

    def grow(self, request: int, tokens: int) -> None:
        """Blocks for so many tokens. What new ones hold is anybody's."""
        seq = self.running[request]
        before = {name: len(table) for name, table in seq.tables.items()}
        fresh = self.manage.allocate(request, tokens, timeout=self.timeout)
        for name, table in fresh.items():
            begin = before.get(name)
            if begin is None:  # those of the match, if any, are on the device already
                begin = seq.match.usable if seq.match.tiers.get(name) else 0
                begin = seq.match.kv.device if name == PREFIX else begin
                begin = -(-begin // self.block) if self._on_device(seq, name) else 0
            for rows in self.rows[name]:
                own = table[begin:][table[begin:] >= 0]
                rows[own] = self.random.integers(1, M, rows[own].shape, np.uint64)
        seq.tables = fresh

    def _on_device(self, seq: Sequence, name: str) -> bool:
        return name == PREFIX or getattr(seq.match.tiers.get(name), "value", "") == "device"

    def _forward(self, seq: Sequence, token: int) -> int:
        """Compute one token: write its rows, read those that it sees."""
        value = seq.tokens[token]
        self._write(seq, PREFIX, token, row_of(value, seq.weights))
        rows, *others = self._read(seq, PREFIX, 0, token + 1)
        _compare(PREFIX, rows, others)
        mixed = weighed(rows)
        total = mixed
        for number, rule in enumerate(self.rules):
            self._write(seq, rule.name, token, window_row(mixed, value, number))
            rows, *others = self._read(seq, rule.name, seen(rule, token), token + 1)
            _compare(rule.name, rows, others)
            total += weighed(rows)
        return total % 97 + 1

    def _write(self, seq: Sequence, name: str, token: int, value: int) -> None:
        block = int(seq.tables[name][token // self.block])
        assert block >= 0
        for times, rows in enumerate(self.rows[name], 1):
            rows[block, token % self.block, 0] = value * times

    def _read(self, seq: Sequence, name: str, begin: int, end: int) -> list[Any]:
        at = np.arange(begin, end)
        blocks = seq.tables[name][at // self.block]
        assert (blocks >= 0).all(), f"{name}: a block that the window needs was given back"
        return [rows[blocks, at % self.block, 0] for rows in self.rows[name]]

    def run(self, tokens: list[int], more: int = 2, budget: int = 1 << 20) -> Sequence:
        """A request from begin to end. Every answer is compared."""
        request = self.begin(tokens, more)
        while self.step(request, budget):
            pass
        return self.end(request)

    def end(self, request: int, *, publish: bool = True) -> Sequence:
        """Release it."""
        self.manage.release(request, publish=publish)
        return self.running.pop(request)

    # ---- the world around it

    def order(self) -> None:
        """The ranks take the orders that were given, and tell which copies have finished."""
        if self.coordinator is not None:
            self.coordinator.step(Decisions(self.steps))
            self.steps += 1
            for worker in self.workers:
                worker.step(60)
                worker.poll()

    def settle(self) -> None:
        """Let all copies end."""
        while self.manage.poll() or self.manage.leaving:
            self.order()
            for backend in self.backends:
                backend.finish()
            for worker in self.workers:
                worker.drain(60)
            self.manager.wait_blocks()

    def change(self) -> None:
        """Other weights under the same name."""
        self.weights += 1
        self.manager.begin_update(wait=False)
        self.manager.finish_update("")

    def forget_device(self) -> None:
        """Evict every block that no request uses, of KV and of windows."""
        for device in (self.device, *self.windows):
            assert device.index is not None
            device.index.evict(device.blocks)

    def holds(self) -> Iterator[tuple[str, int]]:
        """What each index has pinned or held: 0 when all is given back."""
        for index in (self.host.index, *(each.index for each in (self.device, *self.windows))):
            report = index.check()
            report.raise_if_broken()
            yield index.name, report.pins

    def nothing_left(self) -> None:
        """Every block and page is free, or found and unused."""
        assert not any(pins for _, pins in self.holds()), dict(self.holds())
        for device in (self.device, *self.windows):
            assert device.can_allocate(device.blocks, evict=True)

    def close(self) -> None:
        """Close it all."""
        self.settle()
        self.manage.close()
        self.manager.close()
        if self.tier is not None:
            self.tier.close()
        for closeable in (*self.team, *self.caches, self.log, self.device, *self.windows):
            if closeable is not None:
                closeable.close()
        self.host.close()


def _compare(name: str, rows: Any, others: list[Any]) -> None:
    """Each layer of each rank has a multiple of what the first one has."""
    for times, other in enumerate(others, 2):
        assert (other == rows * np.uint64(times)).all(), f"{name}: layers or ranks disagree"


def _group(name: str, layers: int, page: int, rule: Rule, ranks: int) -> KVGroup:
    return KVGroup.attention(
        name,
        layers=layers,
        heads=ranks,
        head_dim=1,
        dtype_bytes=8,
        page_tokens=page,
        content="single",
        rule=rule,
        head_groups=ranks,
    )


__all__ = [
    "AtOnce",
    "LateBackend",
    "OutOfPages",
    "Sequence",
    "WindowEngine",
    "WindowRank",
    "uncached",
]

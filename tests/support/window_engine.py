"""An engine as small as it can be: a scheduler, a HybridManager of windows, and a toy model on a
device of arrays, whose next token depends on every row that its layers see. So a wrong block is a
wrong answer."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from lightcache import Cache
from lightcache.errors import Abandoned, OutOfPages, TransferFailed, WaitTimeout
from lightcache.groups import Rule
from lightcache.hybrid import HybridManager, HybridMatch
from lightcache.hybrid.requests import PREFIX
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
from lightcache.runs import Run

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

    def offload(self, new: Any, slots: Any) -> Any:
        """See `TransferBackend`."""
        return self._later(partial(super().offload, new, slots), new)

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
    ) -> None:
        """Opens everything; `close` closes it.

        Args:
            host: the cache that engines share; None: its own.
            wrap: makes a transfer backend of a transfer engine.
            storage: makes a tier of the cache; None: there is none.
            timeout: of an allocation.
        """
        self.timeout = timeout
        self.rules = tuple(rules.values()) if isinstance(rules, Mapping) else rules
        self.block, self.random = block, np.random.default_rng(seed)
        kv = PageGeometry([_group("kv", 1, page, Rule.prefix())])
        parts = kv.page_bytes
        geometries = [
            PageGeometry([_group(rule.name, LAYERS, page, rule)], part_bytes=parts)
            for rule in self.rules
        ]
        words = " ".join(each.fingerprint() for each in (kv, *geometries))
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
        self.engines: list[Any] = []
        self.backends: list[Any] = []
        self.rows = {PREFIX: [np.zeros((blocks, block, 1), np.uint64)]}
        self.device = ManagedBlocks(f"{name}.device", block_tokens=block, blocks=blocks)
        self.backends.append(wrap(self._engine(kv, "kv", self.rows[PREFIX])))
        self.tier = None if storage is None else storage(self.host)
        self.manager = KVCacheManager(
            self.host,
            self.device,
            self.backends[0],
            weights=weights,
            storage=self.tier,
            config=ManagerConfig(write=write, low_water=low_water),
        )
        self.windows = []
        for number, (rule, geometry) in enumerate(zip(self.rules, geometries, strict=True), 1):
            rows = [np.zeros((window_blocks, block, 1), np.uint64) for _ in range(LAYERS)]
            self.rows[rule.name] = rows
            self.backends.append(wrap(self._engine(geometry, rule.name, rows)))
            window = WindowBlocks(
                f"{name}.{rule.name}",
                rule=rule,
                block_tokens=block,
                blocks=window_blocks,
                backend=self.backends[-1],
                run=Run(number, geometry.parts),
            )
            self.windows.append(window)
        self.manage = HybridManager(self.manager, windows=self.windows, every=every)
        self.weights = 0
        """Counts the changes of weights."""
        self.running: dict[int, Sequence] = {}
        self.ids = itertools.count()

    def _engine(self, geometry: PageGeometry, group: str, rows: list[Any]) -> Any:
        planes = layouts.plane(Shard(geometry), group, "kv", dict(enumerate(rows)), axes="bnc")
        engine = self.host.transfer_engine(geometry, planes, threads=1)
        self.engines.append(engine)
        return engine

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
        mixed = weighed(self._read(seq, PREFIX, 0, token + 1)[0])
        total = mixed
        for number, rule in enumerate(self.rules):
            self._write(seq, rule.name, token, window_row(mixed, value, number))
            rows, other = self._read(seq, rule.name, seen(rule, token), token + 1)
            assert (other == rows * np.uint64(2)).all(), f"{rule.name}: layers disagree"
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

    def settle(self) -> None:
        """Let all copies end."""
        while self.manage.poll() or self.manage.leaving:
            for backend in self.backends:
                backend.finish()
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
        for closeable in (*self.engines, self.device, *self.windows, self.host):
            closeable.close()


def _group(name: str, layers: int, page: int, rule: Rule) -> KVGroup:
    return KVGroup.attention(
        name,
        layers=layers,
        heads=1,
        head_dim=1,
        dtype_bytes=8,
        page_tokens=page,
        content="single",
        rule=rule,
    )


__all__ = ["AtOnce", "LateBackend", "OutOfPages", "Sequence", "WindowEngine", "uncached"]

"""What a manager costs a scheduler, and what it finds: a step, a trace, nothing ever hit, and a
storage that hangs.

- A step: 64 plans of prompts of 128 pages, a block committed for each of 64 running requests, 8
  releases, in calls batched over the requests. The same work done as engines do it in process, with
  dicts, is measured in turns with it; `_manager_plain` says what that leaves out. Eight of the
  plans are new, as many as leave; the others were planned before. Another row has all of them new.
  Both have hashed the queue's prompts before, and hash what is generated. No garbage is collected
  during a step.
- The trace: each request is planned, taken, computed and released, without bytes. Its prefixes'
  hits are compared with an exact LRU of each tier, in process.
- Nothing is ever hit: what a step of 64 requests, each of which computes one token, pays for
  prompts that share nothing. Committing alone; with eight new prompts planned, whose first pages
  are looked for in vain; and with these taken, hashed, named and written, as in the step that
  prefills their 16,384 tokens. Each is set against the decode step alone, which is the strictest
  reading, the last one against decoding and prefill as well.
- A storage that hangs: no call of it ever returns. The longest single call of the scheduler, of
  steps in which eight requests of 64 that wait are planned for the first time and eight end; and
  for how long a request waited for its read, from the first `take` to the one that began it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightcache.cache import Cache
from lightcache.manager import KVCacheManager, ManagedBlocks, ManagerConfig, NullBackend, Prompt
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.faults import Fault
from lightcache_bench import Row, meets
from lightcache_bench._manager_plain import PlainManager
from lightcache_bench._manager_trace import CAPACITIES, replay
from lightcache_bench._timing import median, spread
from lightcache_bench._traces import hash_ids

BLOCK = 16
PAGES = 128
RUNNING = 64
LEAVING = 8
BLOCKS, HOST = 100_000, 1_000_000
SECRET = b"a secret of benchmarks"
DECODE_MS = 20.0
"""What a step is compared with: tokens of an 8B model on one H200 came every 20 ms
(docs/benchmarks.md, Serving)."""
PREFILL_MS_PER_TOKEN = 121.0 / 4160
"""The same model's first token came after so long behind 4,160 tokens, past the cache."""


def rows(quick: bool, trace: str | Path | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: few steps, the first 500 requests of the trace, and small tiers: there the two sides
            soon find different prompts, since only ours count what waits as used.
        trace: as of `policy`; None: this part is left out.
    """
    yield from _steps(quick)
    yield from _hanging(quick)
    if trace is not None:
        requests = hash_ids(Path(trace))[: 500 if quick else None]
        for pages in CAPACITIES[:2] if quick else CAPACITIES:
            yield from replay(requests, pages)


class Scheduler:
    """A queue and running requests around a manager, or around what stands for one."""

    def __init__(self, manager: Any, filled: int, seed: int) -> None:
        """Computes `filled` prompts first: some of what is asked for later was there before."""
        self.manager = manager
        self.random = np.random.default_rng(seed)
        self.numbers = iter(range(1 << 40))
        self.known = [self.prompt() for _ in range(filled)]
        for prompt in self.known:
            self.manager.release_many([self.admit(prompt)])
        self.running = [self.admit(self.prompt()) for _ in range(RUNNING)]
        self.tokens = dict.fromkeys(self.running, PAGES * BLOCK)
        self.queue = [next(self.numbers) for _ in range(RUNNING)]
        self.asked = {number: self.pick() for number in self.queue}

    def prompt(self) -> Prompt:
        """Of no known beginning."""
        return Prompt(self.random.integers(0, 100_000, PAGES * BLOCK))

    def pick(self) -> Prompt:
        """One that was there before, as most of a chat's are; hashed, as it was when it came."""
        known = self.known[self.random.integers(len(self.known))] if self.known else self.prompt()
        self.manager.hashed(known)
        return known

    def admit(self, prompt: Prompt) -> int:
        """Run a request as far as its prompt is computed."""
        number = next(self.numbers)
        self.manager.plan_many([number], [prompt])
        self.manager.take(number)
        self.manager.allocate(number, len(prompt))
        self.manager.commit_many([number], [len(prompt)], [[]])
        return number

    def step(self, fresh: bool) -> dict[str, float]:
        """One step; seconds of its parts. `fresh`: all plans are new."""
        if fresh:
            for number in self.queue:
                self.manager.cancel(number)
            self.queue = [next(self.numbers) for _ in range(RUNNING)]
            self.asked = {number: self.pick() for number in self.queue}
        answers = [self.random.integers(0, 100_000, BLOCK).tolist() for _ in self.running]
        for number in self.running:
            self.tokens[number] += BLOCK
            self.manager.allocate(number, self.tokens[number])
        totals = [self.tokens[number] for number in self.running]
        prompts = [self.asked[number] for number in self.queue]
        gone, self.running = self.running[:LEAVING], self.running[LEAVING:]
        all_running = gone + self.running
        taken = {
            "plan": _seconds(lambda: self.manager.plan_many(self.queue, prompts)),
            "commit": _seconds(lambda: self.manager.commit_many(all_running, totals, answers)),
            "release": _seconds(lambda: self.manager.release_many(gone)),
        }
        self._follow()
        return taken

    def end(self) -> None:
        """Give back what runs and what waits."""
        for number in self.queue:
            self.manager.cancel(number)
        self.manager.release_many(self.running)

    def _follow(self) -> None:
        """Others take the place of those that have left, in the queue too."""
        for number in self.queue[:LEAVING]:
            self.manager.cancel(number)
        self.queue = self.queue[LEAVING:] + [next(self.numbers) for _ in range(LEAVING)]
        self.asked = {number: self.asked.get(number) or self.pick() for number in self.queue}
        for _ in range(LEAVING):
            number = self.admit(self.prompt())
            self.running.append(number)
            self.tokens[number] = PAGES * BLOCK


class Ours(KVCacheManager):
    """A manager that can be told to hash a prompt ahead, as it is when it comes."""

    def hashed(self, prompt: Prompt) -> None:
        """See `Scheduler.pick`."""
        space = self.state.weights.open_space("")
        prompt.keys(space.host_spec)


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection walks the dicts of both sides, in whosever step it falls."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _steps(quick: bool) -> Iterator[Row]:
    host, steps = (20_000, 10) if quick else (HOST, 200)
    blocks = 20_000 if quick else BLOCKS
    name = f"bench-manager-{os.getpid()}"
    with ExitStack() as stack:
        cache = stack.enter_context(
            Cache.create(
                name,
                pages=host,
                page_bytes=64,
                page_tokens=BLOCK,
                fingerprint="bench",
                secret=SECRET,
                role="bench",
            )
        )
        cache.pool.prefault()
        device = ManagedBlocks(f"{name}.device", block_tokens=BLOCK, blocks=blocks)
        stack.callback(device.close)
        config = ManagerConfig(min_load_tokens=0, plan_ttl=1e6)
        ours = Ours(cache, device, NullBackend(), config=config)
        stack.callback(ours.close)
        filled = blocks // PAGES - 2 * RUNNING
        schedulers = {
            "ours": Scheduler(ours, filled, 1),
            "plain": Scheduler(PlainManager(blocks, host, BLOCK), filled, 1),
        }
        for fresh in (False, True):
            yield from _step_rows(schedulers, steps, fresh, blocks, host)
        schedulers["ours"].end()
        yield from _never_hit(ours, steps)


def _step_rows(
    schedulers: dict[str, Scheduler], steps: int, fresh: bool, blocks: int, host: int
) -> Iterator[Row]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in schedulers}
    with _no_collection():
        for _ in range(steps):
            for name, scheduler in schedulers.items():
                found[name].append(scheduler.step(fresh))
    what = "all plans new" if fresh else "a step"
    sums = {
        name: np.array([sum(step.values()) for step in taken]) * 1e6
        for name, taken in found.items()
    }
    ours, plain = median(sums["ours"]), median(sums["plain"])
    params = {"blocks": blocks, "host_pages": host, **spread(sums["ours"])}
    target = None if fresh else "<= 1000"
    met = None if target is None else meets(ours, target)
    params["plain_us"] = round(plain, 1)
    yield Row(what, params, ours, "us", "dicts in process", ours / plain, target, met)
    for part in ("plan", "commit", "release"):
        values = [median([step[part] * 1e6 for step in found[name]]) for name in ("ours", "plain")]
        yield Row(
            f"{what}: {part}",
            {"plain_us": round(values[1], 1)},
            values[0],
            "us",
            "dicts in process",
            values[0] / values[1],
        )


def _hanging(quick: bool) -> Iterator[Row]:
    """Every call of the storage hangs until the end."""
    steps = 80 if quick else 400  # a read is waited for a second, which is 50 steps
    name, blocks = f"bench-hanging-{os.getpid()}", (RUNNING + 2 * LEAVING) * (PAGES + 1)
    with ExitStack() as stack:
        how: dict[str, Any] = {
            "page_bytes": 64,
            "page_tokens": BLOCK,
            "fingerprint": "bench",
            "secret": SECRET,
        }
        cache = stack.enter_context(Cache.create(name, pages=4 * blocks, role="bench", **how))
        device = ManagedBlocks(f"{name}.device", block_tokens=BLOCK, blocks=blocks)
        stack.callback(device.close)
        script: Any = {call: [Fault("hang")] * (1 << 16) for call in ("contains", "read", "write")}
        flaky = FlakyStorage(MemoryStorage(StorageSpec.of(cache)), script=script)
        tier = StorageTier(cache, flaky, grace=0.0)
        stack.callback(tier.close)
        stack.callback(flaky.let_go)
        manager = KVCacheManager(cache, device, NullBackend(), storage=tier)
        stack.callback(manager.close)
        longest = _hung_steps(manager, steps)
        stats = manager.stats()
    for call, seconds in sorted(longest.items(), key=lambda each: -each[1])[:3]:
        target = "<= 50"
        params = {"steps": steps, "requests": stats.requests}
        met = meets(seconds * 1e3, target)
        yield Row(
            f"storage hangs: longest {call}", params, seconds * 1e3, "ms", None, None, target, met
        )
    waited = stats.storage_wait_seconds / max(1, stats.requests)
    yield Row("storage hangs: a request waits", {"steps": steps}, waited * 1e3, "ms")


def _hung_steps(manager: KVCacheManager, steps: int) -> dict[str, float]:
    """Seconds of the longest call of each kind."""
    random, numbers = np.random.default_rng(3), iter(range(1 << 40))
    longest: dict[str, float] = {}
    waiting: dict[int, Prompt] = {}
    running: list[int] = []

    def timed(name: str, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        longest[name] = max(longest.get(name, 0.0), _seconds(lambda: found.append(call())))
        return found[0]

    for _ in range(steps):
        while len(waiting) < LEAVING:
            waiting[next(numbers)] = Prompt(random.integers(0, 100_000, PAGES * BLOCK))
        timed("plan_many", lambda: manager.plan_many(list(waiting), list(waiting.values())))
        for number in list(waiting):
            if timed("take", partial(manager.take, number)) is not None:
                timed("allocate", partial(manager.allocate, number, PAGES * BLOCK))
                timed("load", partial(manager.load, number))
                timed("commit", partial(manager.commit, number, PAGES * BLOCK))
                running.append(number)
                del waiting[number]
        gone, running = running[:-RUNNING], running[-RUNNING:]
        timed("release_many", partial(manager.release_many, gone))
        timed("poll", manager.poll)
        timed("stats", manager.stats)
        time.sleep(DECODE_MS * 1e-3)  # the model's part of the step
    manager.release_many(running, publish=False)
    return longest


def _miss(manager: Ours, scheduler: Scheduler) -> dict[str, float]:
    """Microseconds of the parts of a step of `_never_hit`."""
    numbers = [next(scheduler.numbers) for _ in range(LEAVING)]
    prompts = [scheduler.prompt() for _ in numbers]
    answers = [scheduler.random.integers(0, 100_000, 1).tolist() for _ in scheduler.running]
    for number in scheduler.running:
        scheduler.tokens[number] += 1
        manager.allocate(number, scheduler.tokens[number])
    totals = [scheduler.tokens[number] for number in scheduler.running]
    planned = _seconds(lambda: manager.plan_many(numbers, prompts))
    committed = _seconds(lambda: manager.commit_many(scheduler.running, totals, answers))
    taken = _seconds(lambda: [manager.take(number) for number in numbers])
    for number in numbers:
        manager.allocate(number, PAGES * BLOCK)
    lengths = [PAGES * BLOCK] * LEAVING
    computed = _seconds(lambda: manager.commit_many(numbers, lengths))
    manager.release_many(numbers)
    parts = {"planned": planned, "committed": committed, "computed": taken + computed}
    return {part: seconds * 1e6 for part, seconds in parts.items()}


def _never_hit(manager: Ours, steps: int) -> Iterator[Row]:
    """One token for each of 64 requests; eight new prompts planned, of which nothing is there.
    Those are hashed when they are computed: that is what a prefill is charged with."""
    scheduler = Scheduler(manager, 0, 7)
    with _no_collection():
        steps_taken = [_miss(manager, scheduler) for _ in range(steps)]
    manager.release_many(scheduler.running, publish=False)
    prefill_ms = PREFILL_MS_PER_TOKEN * LEAVING * PAGES * BLOCK
    whole = ("planned", "committed", "computed")
    for what, parts, against, limit_ms in (
        ("64 tokens committed", ("committed",), "a decode step", DECODE_MS),
        ("and 8 new prompts planned", ("planned", "committed"), "a decode step", DECODE_MS),
        ("and these computed", whole, "a decode step", DECODE_MS),
        ("the same", whole, "a decode step, and their prefill", DECODE_MS + prefill_ms),
    ):
        taken = [sum([step[part] for part in parts]) for step in steps_taken]
        share, target = median(taken) / (limit_ms * 1e3), "<= 0.01"
        yield Row(
            f"nothing ever hit: {what}",
            {"against_ms": round(limit_ms, 1), **spread(taken)},
            median(taken),
            "us",
            f"{against} of {limit_ms:.0f} ms",
            share,
            target,
            meets(share, target),
        )

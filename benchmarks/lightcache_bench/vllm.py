"""The connector for vLLM: the scheduler's calls, their processor time, one pool against many.

The scheduler's half alone, with stand-ins of vLLM's requests in vLLM's order of calls: vLLM is not
needed. Where it can be imported, its own CPUOffloadingManager is asked for the same prompt block by
block, in turns. Times are processor time of the calling thread, so other work on the machine counts
little; the median is judged, and the best turn is given beside it. With a trace
(`--trace FILE`) it is replayed: each request runs alone, on one of four engines at random, its
device empty. On a GPU the worker's half is measured as well. With `--only 6` two real engines with
a small model of random weights, one with the connector and one without, are asked in turns on the
CPU; and one is killed.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightcache.connectors.vllm.messages import Report
from lightcache.errors import ConfigError
from lightcache_bench import Row, _gpu_device, _vllm_engines, _vllm_rates, meets
from lightcache_bench._timing import clocked_cpu, interleaved, median, spread, tails
from lightcache_bench._traces import hash_ids
from lightcache_bench._vllm_stand_in import Output, Request, Scheduler, schedulers

PROMPT = 131_072
BLOCK = 16
"""Tokens of a block of vLLM, and of a page here: of an 8B model it has 2 MiB, so it is a page."""
RUNNING = WAITING = 64
CHUNK = 1024
"""Tokens that a prefill computes in a step."""
LENGTH = 4 * CHUNK
STEP = 0.02
"""Seconds of a model's step, by the clock that the scheduler's half is given."""
PARTS = (1, 2, 3, 4, 5, 6)
ENGINE_PART = 6
"""Of real engines: run only where it is asked for."""
ENGINES = 4
POOLS = {12_000: ">= 2.2", 40_000: ">= 2.2", 120_000: ">= 1.9"}
"""Blocks in all, and what one pool is to find against a pool each."""
TRACE_TOKENS = 512
"""Of a block of the public traces; here two tokens stand for them, as hashing is not measured."""


def rows(quick: bool, trace: str | Path | None = None, only: str | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`. Takes a minute, two more with a trace, and two more on a GPU.

    Args:
        quick: few repetitions; of a trace 1,000 requests and the least pools.
        trace: JSONL with `hash_ids`; None: pools are not compared.
        only: numbers of parts, such as "1,2": 1 a long prompt, 2 steps, 3 the trace, 4 rates of a
            device, 5 the same beside a matrix product, 6 real engines, which takes some minutes and
            is run only if it is named; None: those of the others that can be run.

    Raises:
        ConfigError: the trace cannot be read, there is no such part, or it needs what there is not.
    """
    wanted = _wanted(only)
    if 1 in wanted:
        yield from long_prompt(quick)
    if 2 in wanted:
        yield from steps(quick)
    if 3 in wanted and (trace is not None or only is not None):
        if trace is None:
            raise ConfigError("vllm: part 3 needs a trace; give --trace FILE (JSONL with hash_ids)")
        yield from pools(hash_ids(Path(trace))[: 1000 if quick else None], quick)
    if ENGINE_PART in wanted:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("vllm: part 6 needs vLLM; run it in an environment that has it")
        yield from _vllm_engines.engines(quick)
    if 4 in wanted or 5 in wanted:
        try:
            gpu = _gpu_device.find()
        except ConfigError:  # no torch: the scheduler's half needs none
            if only is None:
                return
            raise
        if only is None and not gpu.cuda:
            return
        yield Row("device", gpu.facts(), float(_gpu_device.devices()), "devices")
        if 4 in wanted:
            yield from _vllm_rates.rates(gpu, quick)
        if 5 in wanted:
            yield from _vllm_rates.beside(gpu, quick)


def _wanted(only: str | None) -> set[int]:
    if only is None:
        return set(PARTS) - {ENGINE_PART}
    chosen = only.split(",")
    if not all(part.isdigit() and int(part) in PARTS for part in chosen):
        raise ConfigError(f"vllm: expected parts such as 1,2 of 1 to {len(PARTS)}, found {only!r}")
    return set(map(int, chosen))


# ---- one long prompt


def long_prompt(quick: bool) -> Iterator[Row]:
    """`get_num_new_matched_tokens` of a prompt whose pages are all resident."""
    turns = 5 if quick else 60
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 128_000, PROMPT + 1)]
    with schedulers(1, 1, PROMPT // BLOCK + 64, BLOCK) as (one,):
        one.serve(Request("first", tokens))
        again = Request("again", tokens)
        one.half.begin(again)
        numbers = itertools.count()

        def look(_: int) -> None:
            one.now += 1.0  # it is looked up, as the last answer is too old
            one.step({}, {})
            found, _later = one.half.look(again, 0)
            assert found == PROMPT

        def end(request: Request) -> None:
            one.half.finish(request)
            one.cache.cancel("none")  # a call about plans releases the pages of those that ended

        def hashed(_: int) -> float:
            new = Request(f"new {next(numbers)}", tokens)
            begin = time.thread_time_ns()
            one.half.begin(new)
            found, _later = one.half.look(new, 0)
            took = (time.thread_time_ns() - begin) / 1e3
            assert found == PROMPT
            end(new)
            return took

        def first(_: int) -> float:
            new = Request(f"new {next(numbers)}", tokens)
            one.half.begin(new)
            begin = time.thread_time_ns()
            one.half.look(new, 0)
            took = (time.thread_time_ns() - begin) / 1e3
            end(new)
            return took

        cases = {"first": first, "again": clocked_cpu(look), "with hashing": hashed}
        if (theirs := vllms_manager(PROMPT // BLOCK)) is not None:
            cases["vLLM"] = clocked_cpu(theirs)
        interleaved(cases, 2)
        times = interleaved(cases, turns)
    params = {"tokens": PROMPT, "pages": PROMPT // BLOCK}
    base = times.get("vLLM")
    for name, target in (("first", "<= 1"), ("again", "<= 1"), ("with hashing", "<= 3")):
        value = median(times[name]) / 1e3
        shown = {**params, "best_ms": _best(times[name] / 1e3), **spread(times[name] / 1e3)}
        row = f"matched tokens, {name}"
        yield Row(row, shown, value, "ms", target=f"{target} ms", met=meets(value, target))
    if base is not None:
        name, limit = "vLLM's CPUOffloadingManager.lookup for each block", ">= 50"
        shown = {**params, "theirs_ms": round(median(base) / 1e3, 3)}
        for which in ("first", "again"):
            ratio = median(base) / median(times[which])
            value, row = median(times[which]) / 1e3, f"matched tokens, {which}, against vLLM"
            yield Row(row, shown, value, "ms", name, ratio, limit, meets(ratio, limit))


def vllms_manager(blocks: int) -> Callable[[int], None] | None:
    """vLLM's own manager on the host, asked for so many resident blocks, one call each, as its
    connector does; None: there is no vLLM here."""
    try:
        base = importlib.import_module("vllm.v1.kv_offload.base")
        cpu = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
    except ImportError:
        return None
    manager = cpu.CPUOffloadingManager(num_chunks=blocks + 64)
    rng = np.random.default_rng(2)
    hashes = [rng.bytes(32) for _ in range(blocks)]
    context = base.ReqContext("writer")
    keys = [base.make_offload_key(each, 0) for each in hashes]
    manager.on_new_request(context)
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    hit = base.LookupResult.HIT

    def ask(_: int) -> None:
        reader = base.ReqContext("reader")
        for each in hashes:
            assert manager.lookup(base.make_offload_key(each, 0), reader) is hit

    return ask


# ---- steps


class Load:
    """Running requests, of which two prefill, and waiting ones: the scheduler's calls of a step."""

    def __init__(self, one: Scheduler, waiting: int, hits: bool) -> None:
        self.one, self.hits = one, hits
        self._numbers = itertools.count()
        self._rng = np.random.default_rng(3)
        self._known = [self._tokens() for _ in range(WAITING)]
        if hits:
            for tokens in self._known:
                one.serve(self._new(tokens))
        self._running: dict[str, Request] = {}
        for number in range(RUNNING):
            request = self._start()
            if number >= 2:
                self._finish_prompt(request)
        self._waiting = [
            self._new(self._known[n] if hits else self._tokens()) for n in range(waiting)
        ]
        for request in self._waiting:
            one.half.begin(request)

    def _tokens(self) -> list[int]:
        return [int(token) for token in self._rng.integers(0, 128_000, LENGTH + 1)]

    def _new(self, tokens: list[int]) -> Request:
        request = Request(f"request {next(self._numbers)}", tokens)
        request.blocks = list(range(-(-2 * LENGTH // BLOCK)))
        return request

    def _start(self) -> Request:
        request = self._new(self._tokens())
        self.one.half.begin(request)
        self._running[request.request_id] = request
        return request

    def _finish_prompt(self, request: Request) -> None:
        rest = request.num_tokens - request.num_computed_tokens
        self.one.run(self.one.step(self._running, {request.request_id: rest}))

    def step(self, _: int) -> float:
        """One step; microseconds of processor time in the scheduler's calls."""
        half, running = self.one.half, self._running
        self.one.now += STEP
        counts = {
            identity: min(CHUNK, max(1, request.num_tokens - request.num_computed_tokens))
            for identity, request in running.items()
        }
        took = 0
        begin = time.thread_time_ns()
        for request in self._waiting:
            found, _later = half.look(request, 0)
            assert bool(found) is self.hits
        took += time.thread_time_ns() - begin
        begin = time.thread_time_ns()
        orders = self._orders(counts)
        took += time.thread_time_ns() - begin
        for identity, count in counts.items():
            request = running[identity]
            request.num_computed_tokens += count
            if request.num_computed_tokens >= request.num_tokens:
                request.all_token_ids.append(7)  # an answer's token
        for order in orders.saves:
            self.one.saver.save(order)
        report = self._report(orders)
        begin = time.thread_time_ns()
        half.report(report, ())
        _ = half.pending
        took += time.thread_time_ns() - begin
        return (took + self._turnover()) / 1e3

    def _orders(self, counts: dict[str, int]) -> Any:
        output = Output(counts)
        return self.one.half.orders(output, lambda identity, _: self._running[identity].blocks)

    def _report(self, orders: Any) -> Report:
        return Report(saved={order.job: 1 for order in orders.saves})

    def _turnover(self) -> int:
        """A request whose prompt is computed takes the place of the oldest, which ends."""
        took = 0
        prefills = [
            r for r in self._running.values() if r.num_computed_tokens < r.num_prompt_tokens
        ]
        while len(prefills) < 2:
            ended = self._running.pop(next(iter(self._running)))
            begun = self._new(self._tokens())
            begin = time.thread_time_ns()
            self.one.half.finish(ended)
            self.one.half.begin(begun)
            found, _later = self.one.half.look(begun, 0)
            took += time.thread_time_ns() - begin
            assert not found
            self._running[begun.request_id] = begun
            prefills.append(begun)
        return took


def steps(quick: bool) -> Iterator[Row]:
    """The scheduler's calls of a step: with 64 waiting requests that are all asked, each with a
    resident prompt; and with none that finds anything, of which vLLM asks one in a step."""
    count = 50 if quick else 1000
    for name, waiting, hits, target in (
        ("step, 64 running, 64 waiting", WAITING, True, "<= 1"),
        ("step, 64 running, 0 % hits", 1, False, "<= 0.2"),
    ):
        with schedulers(1, 1, 2 * (WAITING + RUNNING) * LENGTH // BLOCK, BLOCK) as (one,):
            load = Load(one, waiting, hits)
            for turn in range(20):
                load.step(turn)
            times = np.asarray([load.step(turn) for turn in range(count)]) / 1e3
        params = {"prompt_tokens": LENGTH, "prefills": 2, "mean_ms": round(float(times.mean()), 4)}
        params |= {"best_turn_mean_ms": _best(times.reshape(-1, 50).mean(axis=1)), **spread(times)}
        value = median(times) if hits else float(times.mean())
        yield Row(name, params, value, "ms", target=f"{target} ms", met=meets(value, target))
        p99 = tails(times)[1]
        limit = "<= 3" if hits else None
        met = meets(p99, limit) if limit else None
        yield Row(f"{name}, p99", {}, p99, "ms", target=f"{limit} ms" if limit else None, met=met)


def _best(samples: Any) -> float:
    """The least: on a machine that others use too it is nearest to what it takes."""
    return round(float(np.min(samples)), 4)


# ---- pools


def pools(requests: list[list[int]], quick: bool) -> Iterator[Row]:
    """Tokens found by four engines with one pool, against a pool each of the same size in all."""
    routes = np.random.default_rng(4).integers(0, ENGINES, len(requests))
    total = sum(map(len, requests))
    for blocks, target in itertools.islice(POOLS.items(), 1 if quick else None):
        found = {}
        begin = time.process_time()
        for count in (1, ENGINES):
            found[count] = replay(requests, routes, count, blocks)
        took = time.process_time() - begin
        one, each = found[1], found[ENGINES]
        ratio = one / each if each else float("inf")
        params = {
            "engines": ENGINES,
            "blocks": blocks,
            "requests": len(requests),
            "hit_tokens": one * TRACE_TOKENS,
            "us_a_request": round(took * 1e6 / 2 / len(requests), 1),
        }
        against = f"a pool each: {100 * each / total:.1f} %"
        value = 100 * one / total
        yield Row(
            "trace, one pool", params, value, "%", against, ratio, target, meets(ratio, target)
        )


def replay(requests: list[list[int]], routes: Any, count: int, blocks: int) -> int:
    """Blocks found, with so many pools."""
    found = 0
    with schedulers(ENGINES, count, blocks, 2) as made:
        for number, (ids, route) in enumerate(zip(requests, routes, strict=True)):
            tokens = [part for each in ids for part in (each >> 16, each & 0xFFFF)]
            found += made[route].serve(Request(f"request {number}", [*tokens, 0])) // 2
    return found

"""Rows of a router: one prompt among eight workers and a host, hot. Baseline: the bare look-ups of
the same indexes, one call each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from lightcache import KeySpec, PageIndex, Router
from lightcache.groups import Rule
from lightcache.manager import Prompt
from lightcache_bench import Row
from lightcache_bench._latency import against
from lightcache_bench._timing import clocked, interleaved

WORKERS, TOKENS = 8, 16
SPEC = KeySpec("bench", TOKENS, secret=bytes(16))
PREFIX, POINT = Rule.prefix(), Rule.point()


class _Tiers:
    """A host and eight workers with KV of a prompt and one state within it: worker i has i + 1
    eighths of the prompt, the host a half. States are at half of that."""

    def __init__(self, name: str, prompt: Prompt, stack: ExitStack) -> None:
        self._name, self._keys, self._stack = name, prompt.keys(SPEC), stack
        count = len(self._keys)
        self.host = self._tier("host", count // 2)
        self.workers = {
            f"gpu{i}": self._tier(f"gpu{i}", (i + 1) * count // WORKERS) for i in range(WORKERS)
        }

    def _tier(self, name: str, pages: int) -> dict[Rule, PageIndex]:
        kv = self._index(name, {"page_tokens": TOKENS}, len(self._keys), False)
        states = self._index(f"{name}-states", {}, 64, True)
        for index, first, end in ((kv, 0, pages), (states, pages // 2 - 1, pages // 2)):
            with index.reserve(self._keys[first:end]) as made:
                made.publish()
        return {PREFIX: kv, POINT: states}

    def _index(self, name: str, config: Any, pages: int, independent: bool) -> PageIndex:
        full = f"{self._name}-{name}"
        made = PageIndex.create(full, pages=pages, independent=independent, config=config)
        return self._stack.enter_context(made)

    @property
    def every(self) -> list[dict[Rule, PageIndex]]:
        return [self.host, *self.workers.values()]


def routes(quick: bool) -> Iterator[Row]:
    """A route by keys, by a prompt whose keys are hashed, and by one of a hybrid model."""
    for pages in (128, 2000):
        with ExitStack() as stack:
            yield from _routes(f"bench-{os.getpid()}-route", pages, stack, 40 if quick else 400)


def _routes(name: str, pages: int, stack: ExitStack, rounds: int) -> Iterator[Row]:
    prompt = Prompt(np.arange(pages * TOKENS + 1))
    keys, tiers = prompt.keys(SPEC), _Tiers(name, prompt, stack)
    kv = {worker: indexes[PREFIX] for worker, indexes in tiers.workers.items()}
    loads = {worker: float(i) for i, worker in enumerate(kv)}
    plain = stack.enter_context(Router(tiers.host[PREFIX], kv))
    prompts = stack.enter_context(Router(tiers.host[PREFIX], kv, spec=SPEC))
    hybrid = stack.enter_context(Router(tiers.host, tiers.workers, spec=SPEC))

    def peeks(_: int) -> None:
        for indexes in tiers.every:
            indexes[PREFIX].peek(keys)

    def peeks_and_states(_: int) -> None:
        for indexes in tiers.every:
            indexes[POINT].last_ready(keys[: indexes[PREFIX].peek(keys)])

    cases: dict[str, Callable[[int], object]] = {
        "peeks": peeks,
        "peeks and last_ready": peeks_and_states,
        "keys": lambda _: plain.route(keys, loads),
        "prompt": lambda _: prompts.route(prompt, loads),
        "hybrid prompt": lambda _: hybrid.route(prompt, loads),
    }
    found = interleaved({case: clocked(work) for case, work in cases.items()}, rounds, 10)
    params = {"workers": WORKERS, "keys": pages, "state": "hot"}
    for case, base in (
        ("keys", "peeks"),
        ("prompt", "peeks"),
        ("hybrid prompt", "peeks and last_ready"),
    ):
        baseline = f"{base} of the {WORKERS + 1} indexes' keys"
        yield against(f"route: {case}", params, found[case], baseline, found[base], None)

"""How much of the prompts a hybrid model's prefix cache hits, against simpler ways to keep states.

A model of recurrent layers hits as deep as both KV and a saved state go, and a state is as large as
3,144 tokens of KV: so where states are saved, which of them stay, and how many of the bytes they
get is most of what there is to decide. Requests with token ids run through a real `HybridManager`,
one after the other: planned, taken, prefilled by passes that end where the save plan says, answered
with a state saved at each interval, released. No bytes move. Figures are those of
Qwen3-Next-80B-A3B: 73.7 MiB a state, 24,576 bytes of KV a token; pages of 16 tokens, saves at
multiples of 64 in prompts and of 256 in answers.

- Branching conversations (`_hybrid_traffic`): a system prompt for all, a document for each group of
  conversations, which begin with all or a part of it, turns, answers generated again, turns asked
  in other words, agents sent out from one history. On a device alone, and on a device of 8 GiB
  with a host behind it.
- With --trace: the first 3,000 requests of the public trace that `policy` reads, in pages of 512
  tokens. Answers are in it as parts of later prompts only, so nothing is saved while decoding.

The budget in bytes is divided between states and KV by `hybrid_sizing.best_split`, for device
and host each. Then the host is one pool, beside the same host divided so, and with an eighth for
states. Slots for the request that runs are not of it. The baselines (`_hybrid_plain`) are
simulated, and given what they would not have: the best of 19 divisions of the same bytes, tried
with the requests themselves; and of device and host together, as if nothing were in both. Ours
keeps a copy on the host of all that is on the device.

- *Ends of requests*: a state at the end of the prompt and of the answer, nothing else.
- *On nodes of KV*: states hang on the nodes of a radix tree, and go with these.

`possible` is the share with room for all, and a state wherever the grid has a position. It is no
bound of theirs to the last token: their states stand behind any page.

Before these comes what it costs to plan one long prompt (`_hybrid_plans`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightcache.hybrid import Grid, gated_delta_parts
from lightcache.hybrid.copiers import state_bytes
from lightcache_bench import Row, _hybrid_plans, meets
from lightcache_bench._hybrid_ours import Pool, Room, hit_tokens
from lightcache_bench._hybrid_plain import EndsOnly, TiedToNodes, bound, pages_of
from lightcache_bench._hybrid_traffic import Traffic, Visit
from lightcache_bench._manager_trace import SCALE, TOKENS, tokens_of
from lightcache_bench._traces import hash_ids
from lightcache_bench.hybrid_sizing import best_split, paths_of, reuse_of

MODEL = SimpleNamespace(
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
STATE = state_bytes(gated_delta_parts(MODEL))
KV = 12 * 2 * 2 * 256 * 2
"""Bytes of a token: 12 layers, keys and values, 2 heads of 256 elements of 2 bytes."""
PAGE = 16
CHUNK = 8192
"""Tokens of a pass of prefill."""
BUDGETS = (8, 16, 32, 64)
"""GiB of a device: from 8, where room decides, to 64, where more of it brings next to nothing."""
DEVICE, HOSTS = 8, (16, 24, 32, 64)
"""GiB, of a device with a host behind it."""
TRACE_BUDGETS = (32, 64, 128, 256)
TRACE_REQUESTS = 3000
_TRIED = 19

Simulator = Callable[[int, int, int], Any]
"""Of so many states and pages, and passes of prefill of so many pages."""
BASELINES: dict[str, Simulator] = {
    "states at ends of requests": lambda states, pages, chunk: EndsOnly(states, pages),
    "states on nodes of KV": TiedToNodes,
}


def rows(quick: bool, trace: str | Path | None = None) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: few requests, and smaller budgets.
        trace: as of `policy`; None: this part is left out.
    """
    yield from _hybrid_plans.rows(quick)
    yield from _hits(quick)
    if trace is not None:
        yield from _trace(quick, Path(trace))


def _hits(quick: bool) -> Iterator[Row]:
    traffic = Traffic(groups=3, live=6) if quick else Traffic()
    case = Case("conversations", traffic.visits(), Grid(PAGE, PAGE), KV, CHUNK)
    yield case.possible()
    for gib in (1, 2) if quick else BUDGETS:
        yield from case.compared(gib)
    for gib in (2,) if quick else HOSTS:
        yield from case.compared(1 if quick else DEVICE, gib)
        yield from case.undivided(1 if quick else DEVICE, gib)


def _trace(quick: bool, path: Path) -> Iterator[Row]:
    """The last block of a prompt is not full, and no other prompt has it."""
    blocks = [each[:-1] for each in hash_ids(path)[: 300 if quick else TRACE_REQUESTS]]
    visits = [Visit(tokens_of(each), np.empty(0, np.int64)) for each in blocks]
    grid = Grid(SCALE, SCALE, chunk=SCALE)
    scale = TOKENS // SCALE
    case = Case("trace", visits, grid, KV * scale, CHUNK // scale)
    yield case.possible()
    for gib in TRACE_BUDGETS[:1] if quick else TRACE_BUDGETS:
        yield from case.compared(gib)
        yield from case.undivided(DEVICE, gib)


class Case:
    """Requests, and the figures of a model."""

    def __init__(self, name: str, visits: Sequence[Visit], grid: Grid, kv: int, chunk: int) -> None:
        """Args:
        grid: with blocks and pages of one size.
        kv: bytes of a token.
        chunk: tokens of a pass of prefill.
        """
        self._name, self._visits, self._grid, self._chunk = name, visits, grid, chunk
        self._page_bytes = kv * grid.page_tokens
        self._requests = pages_of(visits, grid.page_tokens)
        prompts = [np.array(each.path[: each.prompt], np.int64) for each in self._requests]
        self._reuse = reuse_of(paths_of(prompts), grid.grid // grid.page_tokens)
        self._tokens = sum(len(visit.prompt) for visit in visits)

    def possible(self) -> Row:
        """With room for everything."""
        params = {"requests": len(self._visits), "prompt_tokens": self._tokens}
        return Row(f"{self._name}: hit tokens, possible", params, self._possible(), "%")

    def _possible(self) -> float:
        pages = bound(self._requests, self._grid.grid // self._grid.page_tokens)
        return self._share(pages * self._grid.page_tokens)

    def _share(self, tokens: int) -> float:
        return 100 * tokens / self._tokens

    def compared(self, device: int, host: int | None = None) -> Iterator[Row]:
        """With so many GiB: ours against both baselines."""
        room, host_room = self._room(device), None if host is None else self._room(host)
        params = {"gib": device, "states": room.states, "pages": room.pages}
        where = f"device of {device} GiB"
        if host is not None and host_room is not None:
            where += f", host of {host}"
            params |= {"host_states": host_room.states, "host_pages": host_room.pages}
        tokens = hit_tokens(self._visits, self._grid, room, host_room, chunk=self._chunk)
        ours = self._share(tokens)
        for against, simulator in BASELINES.items():
            theirs, states = self._best(simulator, device + (host or 0))
            ratio = ours / theirs if theirs else math.inf
            yield Row(
                f"{self._name}: hit tokens, {where}",
                {**params, "theirs": round(theirs, 2), "their_states": states},
                ours,
                "%",
                against,
                ratio,
                ">= 1",
                meets(ratio, ">= 1"),
            )

    def undivided(self, device: int, host: int) -> Iterator[Row]:
        """With one pool on the host: against the same bytes, divided by `best_split`, and with an
        eighth of them for states."""
        room, bytes_ = self._room(device), host << 30
        pool = Pool(bytes_ // self._page_bytes, math.ceil(STATE / self._page_bytes))
        eighth = bytes_ // 8
        divided = {
            "the best division": self._room(host),
            "an eighth for states": Room(eighth // STATE, (bytes_ - eighth) // self._page_bytes),
        }
        ours = hit_tokens(self._visits, self._grid, room, pool, chunk=self._chunk)
        for against, host_room in divided.items():
            theirs = hit_tokens(self._visits, self._grid, room, host_room, chunk=self._chunk)
            ratio = ours / theirs if theirs else math.inf
            target = ">= 0.98" if host_room is divided["the best division"] else ">= 1"
            yield Row(
                f"{self._name}: hit tokens, device of {device} GiB, one pool of {host} on the host",
                {"parts": pool.parts, "theirs": round(self._share(theirs), 2)},
                self._share(ours),
                "%",
                against,
                ratio,
                target,
                meets(ratio, target),
            )

    def _room(self, gib: int) -> Room:
        split = best_split(
            gib << 30,
            state_bytes=STATE,
            page_bytes=self._page_bytes,
            page_tokens=self._grid.page_tokens,
            load=self._reuse,
            grid=self._grid,
        )
        return Room(split.states, split.pages)

    def _best(self, simulator: Simulator, gib: int) -> tuple[float, int]:
        """What a baseline hits with the best division of so many GiB, and that one's states."""
        found = []
        for share in range(1, _TRIED + 1):
            states = (gib << 30) * share // (_TRIED + 1) // STATE
            pages = ((gib << 30) - states * STATE) // self._page_bytes
            cache = simulator(states, pages, self._chunk // self._grid.page_tokens)
            found.append((sum(map(cache.visit, self._requests)), states))
        hits, states = max(found)
        return self._share(hits * self._grid.page_tokens), states


__all__ = ["Case", "rows"]

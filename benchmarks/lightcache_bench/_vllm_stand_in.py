"""vLLM's requests and steps without vLLM: what the connector's halves read of them, in vLLM's order
of calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightcache import Cache
from lightcache.connectors.vllm.messages import (
    Hello,
    Orders,
    Place,
    Report,
    SaveOrder,
    one_group,
)
from lightcache.connectors.vllm.options import Options
from lightcache.connectors.vllm.scheduler import (
    SchedulerHalf,
    launch_of,
    open_cache,
    part_of,
    role_of,
)
from lightcache.namespaces import Namespace
from lightcache.shm import Segment

HOST = "bench"
FINGERPRINT = "as long as that of a model: " + 8 * "words of facts, about its bytes "


@dataclass
class Request:
    """What the scheduler's half reads of `vllm.v1.request.Request`."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    blocks: list[int] = field(default_factory=list)
    """Not vLLM's: those of the device."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)
        self.prompt_token_ids = self.all_token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.all_token_ids)


@dataclass
class Output:
    """What it reads of `SchedulerOutput`."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: Iterable[str] | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0

    def __post_init__(self) -> None:
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())


class Saver:
    """Does a save as a worker's half does, but copies nothing."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._spaces: dict[str, Namespace] = {}

    def save(self, order: SaveOrder) -> None:
        """Reserve, and publish."""
        space = self._spaces.get(order.weights)
        if space is None:
            space = self._spaces[order.weights] = self._cache.namespace(order.weights)
        keys = np.frombuffer(order.keys, np.uint64).reshape(-1, 2)
        how: dict[str, Any] = {"namespace": space}
        if not order.root:
            keys, how["after"] = keys[1:], keys[:1]
        with self._cache.reserve(keys, **how) as held:
            if len(held.new):
                held.publish()


class Scheduler:
    """A scheduler's half on a cache without page contents, and the calls of vLLM's steps."""

    def __init__(self, name: str, pages: int, page_tokens: int, block_tokens: int = 0) -> None:
        """Makes the cache: the caller ends with `close`."""
        self._name = name
        self.block_tokens = block_tokens or page_tokens
        groups = one_group(self.block_tokens)
        place = Place(name, "bench", FINGERPRINT, 64, page_tokens, groups)
        options = Options(size=64 * pages, idle_limit=None)
        self.cache = open_cache(place, options, role=role_of(launch_of(name), part_of(0)))
        self.cache.pool.prefault()
        self.now = 0.0
        """Its clock: a step of this bench takes less time than one of a model."""
        self.half = SchedulerHalf(options, name, lambda: self.now)
        segment = self.cache.index.segment.uuid
        self.half.connect([Hello(0, place, "", segment, os.getpid(), HOST)])
        self.saver = Saver(self.cache)

    def close(self) -> None:
        """Leave, and remove the cache."""
        self.half.close()
        self.cache.close()
        Segment.unlink(self._name, force=True)

    def step(self, scheduled: dict[str, Request], tokens: dict[str, int]) -> Orders:
        """`build_connector_meta`, which vLLM calls before it counts the tokens as computed."""
        orders = self.half.orders(Output(tokens), lambda identity, _: scheduled[identity].blocks)
        for identity, count in tokens.items():
            scheduled[identity].num_computed_tokens += count
        return orders

    def serve(self, request: Request) -> int:
        """A whole request that runs alone, its device empty: returns the tokens that it found."""
        half, identity = self.half, request.request_id
        half.begin(request)
        found, _ = half.look(request, 0)
        request.blocks = list(range(-(-request.num_tokens // self.block_tokens)))
        if found:
            half.allocated(request, [request.blocks], found)
            self.step({identity: request}, {})
            half.report(None, [identity])
            request.num_computed_tokens = found
        rest = request.num_tokens - request.num_computed_tokens
        orders = self.step({identity: request}, {identity: rest})
        self.run(orders)
        half.finish(request)
        return found or 0

    def run(self, orders: Orders) -> set[str]:
        """What a worker does of these orders, at once."""
        for order in orders.saves:
            self.saver.save(order)
        saved = Report(saved={order.job: 1 for order in orders.saves})
        return self.half.report(saved, [order.request for order in orders.loads])


@contextlib.contextmanager
def schedulers(
    count: int, pools: int, pages: int, page_tokens: int, block_tokens: int = 0
) -> Iterator[list[Scheduler]]:
    """So many engines: with one pool among them, or one each, of the same pages in all."""
    with contextlib.ExitStack() as stack:
        made: list[Scheduler] = []
        for _ in range(pools):
            name = f"bench-vllm-{os.getpid()}-{len(made)}"
            one = Scheduler(name, pages // pools, page_tokens, block_tokens)
            stack.callback(one.close)
            made.append(one)
        yield [made[number % pools] for number in range(count)]

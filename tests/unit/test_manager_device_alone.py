"""A manager without a host cache: what is on the device is shared, and nothing is moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support.manager_case import tokens

from lightcache import Cache, Router
from lightcache.manager import (
    KVCacheManager,
    ManagedBlocks,
    ManagerConfig,
    MirroredBlocks,
    Prompt,
    RequestOptions,
    WritePolicy,
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def alone(stack: ExitStack, name: str, *, blocks: int = 32, **config: Any) -> KVCacheManager:
    device = ManagedBlocks(name, block_tokens=4, blocks=blocks, eviction="lru")
    stack.callback(device.close)
    return stack.enter_context(KVCacheManager(None, device, config=ManagerConfig(**config)))


def run(manager: KVCacheManager, request: str, what: Any, **how: Any) -> Any:
    """A request from its plan to its end, and what was found for it."""
    prompt = Prompt(what)
    manager.plan(request, prompt, **how)
    match = manager.take(request)
    manager.allocate(request, len(prompt))
    load = manager.load(request)
    assert load.done()
    assert load.tokens == match.usable
    manager.commit(request, len(prompt))
    manager.release(request)
    manager.poll()
    return match


@pytest.mark.parametrize("policy", WritePolicy)
def test_the_device_is_shared_and_nothing_goes_to_the_host(
    stack: ExitStack, segment_name: str, policy: WritePolicy
) -> None:
    manager = alone(stack, segment_name, write=policy)
    assert run(manager, "a", tokens(18)).usable == 0
    match = run(manager, "b", tokens(18))
    assert (match.device, match.host, match.usable) == (16, 0, 16)
    host = manager.host.index.stats()
    assert (host.ready, host.writing) == (0, 0)
    assert manager.stats().offloads == 0


@pytest.mark.parametrize("policy", WritePolicy)
def test_blocks_of_ended_requests_make_room(
    stack: ExitStack, segment_name: str, policy: WritePolicy
) -> None:
    manager = alone(stack, segment_name, blocks=8, write=policy)
    for request in range(6):
        run(manager, f"r{request}", tokens(24, seed=request))
    assert run(manager, "again", tokens(24, seed=0)).usable == 0
    assert manager.stats().errors == 0
    assert manager.device.index is not None
    assert manager.device.index.check().pins == 0


def test_many_plans_and_options(stack: ExitStack, segment_name: str) -> None:
    manager = alone(stack, segment_name)
    run(manager, "a", tokens(18))
    prompts = [Prompt(tokens(18)), Prompt(tokens(18))]
    options = [RequestOptions(), RequestOptions(read=False)]
    assert [m.usable for m in manager.peek_many(prompts, options=options)] == [16, 0]
    assert [m.usable for m in manager.plan_many("bc", prompts, options=options)] == [16, 0]
    assert (
        manager.plan("d", prompts[0], options=RequestOptions(tiers=frozenset({"host"}))).usable == 0
    )


def test_an_attached_device(stack: ExitStack, segment_name: str) -> None:
    device = MirroredBlocks(segment_name, block_tokens=4, blocks=32)
    stack.callback(device.close)
    manager = stack.enter_context(KVCacheManager(None, device))
    table = np.arange(5, dtype=np.int32)
    manager.plan("a", Prompt(tokens(18)))
    manager.take("a")
    manager.load("a", table)
    manager.commit("a", 18, table=table)
    manager.release("a")
    assert manager.plan("b", Prompt(tokens(18))).device == 16
    manager.cancel("b")
    manager.evicted(table)
    assert manager.plan("b", Prompt(tokens(18))).device == 0


def test_a_change_of_weights(stack: ExitStack, segment_name: str) -> None:
    manager = alone(stack, segment_name)
    run(manager, "a", tokens(18))
    manager.begin_update()
    manager.finish_update("step-2")
    assert run(manager, "b", tokens(18)).usable == 0
    assert run(manager, "c", tokens(18)).usable == 16


def test_a_router_finds_what_two_ranks_have(stack: ExitStack, segment_name: str) -> None:
    names = [f"{segment_name}-{rank}" for rank in range(2)]
    ranks = [alone(stack, name) for name in names]
    run(ranks[0], "a", tokens(18))
    run(ranks[1], "b", tokens(18, seed=1))
    maker = stack.enter_context(Cache.attach(f"{names[0]}.keys", readonly=True))
    devices = dict(zip("01", names, strict=True))
    router = stack.enter_context(Router(None, devices, spec=maker.key_spec()))
    for seed, worker in ((0, "0"), (1, "1")):
        choice = router.route(Prompt(tokens(18, seed=seed)), {"0": 0.0, "1": 0.0})
        assert (choice.worker, choice.device_pages) == (worker, 4)

"""What a KVCacheManager refuses: an error that says why, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from support.manager_case import World, open_cache, tokens
from support.refusals import Table, tried

from lightcache.errors import ConfigError, Detached, LeaseLost, OutOfPages
from lightcache.manager import KVCacheManager, ManagedBlocks, NullBackend, Prompt, RequestOptions
from lightcache.manager.handoff import hand_off, receive

PROMPT = Prompt(tokens(18))
BLOCKS = np.array([3, 9, 4, 1, 7], np.int32)
ANY: Any = None  # what a type would refuse is given all the same


def picture(world: World) -> Any:
    """All that a refused call might have changed."""
    manager = world.manager
    return (
        manager.gauges(),
        manager.stats(),
        world.index.check().pins if world.device.owned else 0,
        world.cache.check().pins,
        {one: plan.request for one, plan in manager.lookup._plans.items()},
        {
            one.id: (one.total, one.known, one.table.tolist(), len(one.device_chain.keys))
            for one in manager.state.requests.values()
        },
    )


@contextmanager
def unchanged(world: World) -> Iterator[KVCacheManager]:
    before = picture(world)
    yield world.manager
    assert picture(world) == before


@pytest.fixture
def idle(world: Any) -> Iterator[KVCacheManager]:
    """Without a request."""
    with unchanged(world) as manager:
        yield manager


@pytest.fixture
def planned(world: Any) -> Iterator[KVCacheManager]:
    """One request has ended, another is planned."""
    world.run("first", PROMPT)
    world.manager.plan("a", PROMPT)
    with unchanged(world) as manager:
        yield manager
    assert manager.take("a").usable == 16
    manager.release("a")


@pytest.fixture
def started(worlds: Any) -> Iterator[KVCacheManager]:
    world = worlds(ends_busy=True)
    world.start("a", PROMPT)
    with unchanged(world) as manager:
        yield manager


@pytest.fixture
def ran(world: Any) -> Iterator[KVCacheManager]:
    """A request runs, with all its blocks computed."""
    world.run("a", PROMPT, keep=True)
    with unchanged(world) as manager:
        yield manager
    for _ in range(2):  # the second time it does nothing
        manager.release("a")


@pytest.fixture
def computed(world: Any) -> Iterator[KVCacheManager]:
    """Two requests with 18 tokens each on the device, not committed."""
    for request in "ab":
        world.start(request, Prompt(tokens(18, ord(request))))
        world.compute(request, tokens(18, ord(request)), 0, 18)
    with unchanged(world) as manager:
        yield manager
    manager.allocate("a", 20)
    manager.commit_many("ab", [20, 19], NEW)  # as if nothing had been
    for request in "ab":
        manager.release(request)
    longer = Prompt(np.concatenate([tokens(18, ord("a")), [8, 9, 1]]))
    assert manager.plan("c", longer).device == 20
    manager.cancel("c")


@pytest.fixture
def mirrored(worlds: Any) -> Iterator[KVCacheManager]:
    """A request of an engine that owns its blocks."""
    world = worlds(owned=False)
    world.manager.plan("a", PROMPT)
    world.manager.take("a")
    with unchanged(world) as manager:
        yield manager
    manager.commit("a", 18, table=BLOCKS.tolist())
    manager.release("a")
    assert manager.plan("b", PROMPT).device == 16


@pytest.fixture
def loading(worlds: Any) -> Iterator[KVCacheManager]:
    """The same engine has all on the host."""
    world = worlds(owned=False)
    manager = world.manager
    manager.plan("a", PROMPT)
    manager.take("a")
    manager.commit("a", 18, table=BLOCKS)
    manager.release("a")
    manager.plan("b", PROMPT, device_tokens=0)
    manager.take("b")
    with unchanged(world):
        yield manager
    assert manager.load("b", [11, 12, 13, 14, 15]).tokens == 16
    manager.release("b")


@pytest.fixture
def alone(segment_name: str) -> Iterator[KVCacheManager]:
    """Of a device alone; a request has its blocks."""
    with ExitStack() as stack:
        device = ManagedBlocks(segment_name, block_tokens=4, blocks=8)
        stack.callback(device.close)
        manager = stack.enter_context(KVCacheManager(None, device))
        manager.plan("a", PROMPT)
        manager.take("a")
        manager.allocate("a", 18)
        yield manager


@pytest.fixture
def closed(segment_name: str) -> KVCacheManager:
    """Its cache as well."""
    world = World(segment_name)
    world.close()
    return world.manager


@pytest.fixture
def parts(world: Any) -> dict[str, Any]:
    return {"host": world.cache, "device": world.device, "backend": world.backend}


def without_host(segment_name: str, host: Any, backend: Any, **more: Any) -> None:
    device = ManagedBlocks(segment_name, block_tokens=4, blocks=8)
    try:
        KVCacheManager(host, device, backend, **more)
    finally:
        device.close()


def without_backend(segment_name: str) -> None:
    with open_cache(f"{segment_name}-host", 4, 4) as cache:
        without_host(segment_name, cache, None)


def planning(words: str, *arguments: Any, **more: Any) -> tuple[Any, ...]:
    return words, lambda planned: planned.plan_many(*arguments, **more)


def committing(words: str, *arguments: Any) -> tuple[Any, ...]:
    return words, lambda computed: computed.commit_many("ab", *arguments)


NEW = [[8, 9], [7]]
TWO = [PROMPT] * 2
WRONG_TOKENS: list[Any] = [[1.0, 2.0], ["a"], [[1, 2], [3]], None, [True], [1 << 70], [-1]]
NO_BLOCKS: tuple[Any, ...] = ("x", [1.5], [[1, 2], [3]])

TABLES_OF_BLOCKS: list[tuple[Any, ...]] = [
    (words, lambda mirrored, tables=tables: mirrored.commit_many(["a"], [18], tables=tables))
    for words, tables in (
        ("give the request's as table=", None),
        ("pages: expected", [BLOCKS.astype(float)]),
        ("found int64", [[BLOCKS.tolist()]]),
        ("tables", [BLOCKS, BLOCKS]),
        ("found -1 to 9", [np.array([3, 9, 4, -1, 7], np.int32)]),
        ("found 3 to 500", [np.array([3, 9, 4, 500, 7], np.int32)]),
    )
]

TABLE: Table = {
    ("took a request that was not planned", LeaseLost): [
        ("plan it first", lambda idle: idle.take("a"))
    ],
    ("took a request that runs", ConfigError): [
        ("runs already", lambda ran: ran.take("a")),
        planning("named twice", "cc", TWO),
        ("named twice", lambda computed: computed.commit_many("aa", [20, 20], NEW)),
        ("hashable", lambda planned: planned.plan([1], PROMPT)),
    ],
    ("called `allocate`, `load` or `commit`", LeaseLost): [
        (
            "no running request 'a'",
            lambda idle: idle.allocate("a", 18),
            lambda idle: idle.load("a"),
            lambda idle: idle.skip_load("a"),
            lambda idle: idle.commit("a", 18),
        ),
        ("'x'", lambda computed: computed.commit_many("ax", [20, 1], NEW)),
    ],
    ("asked for more device blocks", OutOfPages): [
        ("the device has 32", lambda started: started.allocate("a", 10**9))
    ],
    ("loaded without blocks", ConfigError): [
        committing("found 100", [20, 100], NEW),
        *(
            ("expected", lambda loading, table=table: loading.load("b", table))
            for table in ([1.5, 2], [-1] * 5, [100] * 5, [1, 2])
        ),
    ],
    ("gave a table of blocks", ConfigError): [
        committing("leave the table out", [20, 19], NEW, [BLOCKS, BLOCKS]),
        *TABLES_OF_BLOCKS,
    ],
    ("made a manager of a host cache", ConfigError): [
        ("backend: expected one, such as EngineBackend", without_backend)
    ],
    ("gave a manager without a host", ConfigError): [
        (
            "storage: expected None without a host cache",
            lambda segment_name: without_host(segment_name, None, None, storage="memory:"),
        ),
        (
            "hand_off: expected a manager with a host cache",
            lambda alone: hand_off(alone, "a", [alone.host.client_id]),
        ),
        (
            "receive: expected a manager with a host cache",
            lambda alone: receive(alone, "b", PROMPT, b""),
        ),
    ],
    ("", Detached): [
        (
            "after close",
            lambda closed: closed.gauges(),
            lambda closed: closed.weights_state,
            lambda closed: closed.drop(PROMPT),
        )
    ],
    ("", ConfigError): [
        ("tokens: expected", *(lambda wrong=wrong: Prompt(wrong) for wrong in WRONG_TOKENS)),
        ("salt", lambda: Prompt([1, 2], salt=ANY or 3)),
        ("lora", lambda: Prompt([1, 2], lora=ANY or "name")),
        ("tenant", *(lambda tenant=tenant: Prompt([1, 2], tenant=tenant) for tenant in (3, None))),
        planning("prompts", "ab", [PROMPT]),
        planning("options: expected one", "ab", TWO, options=[RequestOptions()]),
        planning("limits", "ab", TWO, limits=[3]),
        ("prompts: expected a Prompt", lambda planned: planned.plan("c", [1, 2, 3])),
        (
            "options: expected RequestOptions",
            lambda planned: planned.plan("c", PROMPT, options=None),
        ),
        planning("limit: expected tokens", "cd", TWO, limits=[3, -1]),
        planning("found 1.5", "cd", TWO, limits=[None, 1.5]),
        (
            "device_tokens: ManagedBlocks",
            lambda planned: planned.plan("c", PROMPT, device_tokens=4),
        ),
        *(
            (
                "device_tokens",
                lambda mirrored, n=n: mirrored.plan_many("xy", TWO, device_tokens=n),
            )
            for n in ([4], [4, -4], [4, 4.0], [4, None])
        ),
        *(
            ("tokens: expected", lambda started, n=n: started.allocate("a", n))
            for n in (-1, 3.5, "3", None)
        ),
        *(
            ("blocks: expected", lambda planned, n=n: planned.set_blocks(n))
            for n in (0, -1, "x", 1 << 40)
        ),
        committing("expected 18 to 19", [20, 3], NEW),
        committing("number of tokens", [20, 18.0], NEW),
        committing("'b': new_tokens: token", [20, 19], [[8, 9], [-1]]),
        committing("'b': new_tokens: tokens must be", [20, 19], [[8, 9], [7.0]]),
        committing("have one dimension", [20, 19], [[8, 9], 5]),
        committing("totals", [20], NEW),
        committing("new_tokens: expected", [20, 19], [[8, 9]]),
        ("loaded already", lambda ran: ran.skip_load("a")),
        ("evict by themselves", lambda ran: ran.evicted([1])),
        ("n: expected an integer", lambda ran: ran.can_allocate("x")),
        ("a token's position", lambda ran: ran.drop(PROMPT, -1)),
        ("has no storage", lambda ran: ran.prefetch(PROMPT), lambda alone: alone.prefetch(PROMPT)),
        ("blocks: expected", lambda mirrored: mirrored.demote("x")),
        *(
            (
                "blocks: expected",
                lambda mirrored, wrong=wrong: mirrored.in_flight(wrong),
                lambda mirrored, wrong=wrong: mirrored.wait_blocks(wrong),
                lambda mirrored, wrong=wrong: mirrored.evicted(wrong),
                lambda mirrored, wrong=wrong: mirrored.evicting(wrong),
            )
            for wrong in NO_BLOCKS
        ),
        *(
            (
                f"{name}: expected a",
                lambda parts, name=name: KVCacheManager(**{**parts, name: {"a": 1}}),
            )
            for name in ("host", "device", "config")
        ),
        (
            "host: expected a Cache or None",
            lambda segment_name: without_host(segment_name, "cache", NullBackend()),
        ),
    ],
}

test_refused = tried(TABLE)

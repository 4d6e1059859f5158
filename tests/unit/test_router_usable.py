"""A router counts what is usable: as far as the layers of every rule have the pages they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import group_oracle as oracle

from lightcache import Cache, KeySpec, PageIndex, Router, RouterPolicy
from lightcache.groups import Group, GroupSet, Rule
from lightcache.manager import Prompt
from lightcache.prompt import MultimodalItem

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "50"))
PREFIX, POINT, WINDOW, CHUNK = Rule.prefix(), Rule.point(), Rule.window(40), Rule.chunk(64)
SPEC = KeySpec("model", 16, secret=bytes(16))
IDS = np.arange(200)
PROMPT = Prompt(IDS)
POLICY = RouterPolicy(host_weight=0.25)
Made = Callable[..., PageIndex]


@pytest.fixture
def index(segment_name: str) -> Iterator[Made]:
    """`index("x", rule, size)` makes one of 64 pages; closed at the end."""
    made: list[PageIndex] = []

    def make(suffix: str, rule: Rule = PREFIX, size: int | None = 16) -> PageIndex:
        config = {} if size is None else {"page_tokens": size}
        name = f"{segment_name}-{suffix}"
        made.append(PageIndex.create(name, pages=64, independent=rule != PREFIX, config=config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def keys_of(size: int, **names: str) -> Any:
    return PROMPT.keys(replace(SPEC, page_tokens=size, **names))


def fill(
    index: PageIndex, pages: Any, size: int = 16, *, tenant: str = "", weights: str = ""
) -> None:
    """Publish these pages of `IDS`, each for itself, as a manager names them."""
    keys, space = keys_of(size, weights=weights, namespace=tenant), index.namespace(weights, tenant)
    for page in pages:
        with index.reserve(keys[page : page + 1], namespace=space) as new:
            assert new.publish()


def usable(router: Router, prompt: Prompt = PROMPT, worker: str = "a", **how: Any) -> int:
    """Tokens that need not be computed, if loading costs nothing."""
    weight, choice = (
        router.policy.host_weight,
        router.route(prompt, {worker: 0}, among=[worker], **how),
    )
    assert weight == 0
    tokens = len(prompt) - choice.costs[worker]
    assert tokens == int(tokens)
    return int(tokens)


def routed(host: Any, worker: Any, spec: KeySpec = SPEC) -> Router:
    return Router(host, {"a": worker}, policy=RouterPolicy(host_weight=0.0), spec=spec)


# ---- models of several rules


def test_a_state_within_kv_is_what_counts(index: Made) -> None:
    a, b = index("a"), index("b")
    states = {name: index(f"{name}-states", POINT, None) for name in "ab"}
    fill(a, range(10))
    fill(states["a"], [3])
    fill(b, range(5))
    fill(states["b"], [4, 11])
    workers = {"a": {PREFIX: a, POINT: states["a"]}, "b": {PREFIX: b.name, POINT: states["b"].name}}
    with Router(None, workers, spec=SPEC) as router:
        choice = router.route(PROMPT, {"a": 0, "b": 0})
        assert choice.costs == {"a": 200 - 64, "b": 200 - 80}
        assert (choice.worker, choice.device_pages, choice.host_pages) == ("b", 5, 0)
        assert router.route(PROMPT, {"a": 0}, among=["a"]).device_pages == 4
        assert states["b"].evict(64) == 2
        choice = router.route(PROMPT, {"a": 0, "b": 0})
        assert choice.costs == {"a": 200 - 64, "b": 200}
        assert router.statistics.missed == 0, "KV without a state is not a miss"
        for each in (a, b, *states.values()):
            assert each.check().pins == 0


def test_a_hole_in_a_window_refuses_the_positions_that_need_it(index: Made) -> None:
    """40 tokens are three pages."""
    full, windows = index("full"), index("windows", WINDOW)
    fill(full, range(12))
    fill(windows, [2, 3, 4, 5, 7, 8, 10, 11])
    with routed(None, {WINDOW: windows, PREFIX: full}) as router:
        assert usable(router) == 6 * 16
        fill(windows, [9])
        assert usable(router) == 12 * 16
        assert usable(router, Prompt(IDS[:192])) == 11 * 16, "the last token is computed"
        assert usable(router, Prompt(IDS[:7])) == 0


def test_a_model_of_states_alone(index: Made, segment_name: str) -> None:
    """Its cache says how many tokens a key stands for."""
    states = index("states", POINT, 32)
    fill(states, [0, 2], 32)
    with routed({POINT: states}, None) as router:
        assert usable(router) == 96
        assert router.route(PROMPT, {"a": 0}).host_pages == 3
        assert usable(router, Prompt(IDS[:96])) == 32


@pytest.mark.parametrize(("block", "page"), [(16, 64), (64, 16)])
def test_states_and_kv_may_be_in_different_tiers(index: Made, block: int, page: int) -> None:
    """Keys of states are those of the smaller pages, wherever the states are."""
    kv, device = index("kv", size=page), index("device", size=block)
    slots, states = index("slots", POINT, None), index("states", POINT, 1)
    fill(device, range(192 // block), block)
    with Router(
        {PREFIX: kv, POINT: states}, {"a": {PREFIX: device, POINT: slots}}, policy=POLICY, spec=SPEC
    ) as router:

        def routed() -> tuple[float, int, int]:
            choice = router.route(PROMPT, {"a": 0})
            return choice.costs["a"], choice.device_pages * block, choice.host_pages * page

        assert routed() == (200, 0, 0)
        fill(states, [7])
        assert routed() == (200 - 128, 128, 0), "KV of the device, a state of the host"
        fill(slots, [3])
        assert routed() == (200 - 128, 128, 0)
        states.evict(1)
        assert routed() == (200 - 64, 64, 0)
        device.evict(64)
        assert routed() == (200, 0, 0)
        fill(kv, range(192 // page), page)
        assert routed() == (200 - 64 + 0.25 * 64, 0, 64), "KV of the host, a state of the device"


def test_host_pages_that_continue_those_of_a_device_count(index: Made) -> None:
    """As in a manager's plan: the host need not have what the device has."""
    host, device = index("host", size=32), index("device")
    fill(device, range(5))
    fill(host, [2, 3, 5], 32)
    with Router(host, {"a": device}, policy=POLICY, spec=SPEC) as router:
        choice = router.route(PROMPT, {"a": 0})
        assert (choice.device_pages, choice.host_pages) == (5, 4)
        assert choice.costs == {"a": 200 - 128 + 0.25 * (128 - 80)}
        fill(host, [4], 32)
        assert router.route(PROMPT, {"a": 0}).host_pages == 6


def test_an_item_is_not_split(index: Made) -> None:
    kv, states = index("kv"), index("states", POINT)
    picture = MultimodalItem(100, 150, b"picture")
    prompt = Prompt(IDS, items=[picture])
    keys = prompt.keys(SPEC)
    kv.reserve(keys).publish()
    for page in (3, 5, 6, 7):
        states.reserve(keys[page : page + 1]).publish()
    with routed(None, {PREFIX: kv, POINT: states}) as router:
        assert usable(router, prompt) == 96
        states.reserve(keys[9:10]).publish()
        assert usable(router, prompt) == 160
    with routed(None, kv) as router:
        kv.drop(keys, start=8)
        assert usable(router, prompt) == 96


def test_tenants_and_weights_have_states_of_their_own(index: Made) -> None:
    kv, states = index("kv"), index("states", POINT)
    for place, names in enumerate([("", ""), ("", "t"), ("w", "t")], start=2):
        weights, tenant = names
        fill(kv, range(10), weights=weights, tenant=tenant)
        fill(states, [place], weights=weights, tenant=tenant)
    with routed({PREFIX: kv, POINT: states}, None) as router:
        tenant = Prompt(IDS, tenant="t")
        assert (usable(router), usable(router, tenant)) == (48, 64)
        assert usable(router, tenant, weights="w") == 80
        assert usable(router, weights="w") == 0
        states.clear(states.namespace("w", "t"))
        assert usable(router, tenant, weights="w") == 0
        assert usable(router, tenant) == 64


# ---- indexes that come and go


def test_an_index_that_is_gone_makes_its_worker_stale(index: Made, segment_name: str) -> None:
    seconds = [0.0]
    kv, states = index("kv"), index("host-states", POINT)
    fill(kv, range(10))
    worker = {PREFIX: kv, POINT: f"{segment_name}-slots"}
    with Router(
        {POINT: states}, {"a": worker}, spec=SPEC, clock=lambda: seconds[0], policy=POLICY
    ) as router:
        choice = router.route(PROMPT, {"a": 0})
        assert (choice.stale, choice.device_pages) == (("a",), 0)
        assert list(router.problems) == ["a"]
        fill(states, [2])
        assert router.route(PROMPT, {"a": 0}).device_pages == 3
        slots = index("slots", POINT)
        fill(slots, [6])
        seconds[0] = 1.0
        choice = router.route(PROMPT, {"a": 0})
        assert (choice.stale, choice.device_pages) == ((), 7)
        slots.close()
        seconds[0] = 2.0
        choice = router.route(PROMPT, {"a": 0})
        assert (choice.stale, choice.device_pages) == (("a",), 3)


def test_a_window_that_was_replaced(index: Made) -> None:
    seconds = [0.0]
    kv, windows = index("kv"), index("windows", WINDOW)
    fill(kv, range(10))
    worker = {PREFIX: kv.name, WINDOW: windows.name}
    with Router(None, {"a": worker}, spec=SPEC, clock=lambda: seconds[0]) as router:
        for pages, expected in (([0, 1], 2), ([5, 6, 7], 8)):
            fill(windows, pages)
            assert router.route(PROMPT, {"a": 0}).device_pages == expected
            windows.close()
            seconds[0] += 1
            choice = router.route(PROMPT, {"a": 0})
            assert (choice.stale, choice.device_pages) == (("a",), 0)
            windows = index("windows", WINDOW)
            seconds[0] += 1


def test_an_index_of_another_page_size_that_appears_later(
    index: Made, segment_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [0.0]
    kv = index("kv")
    fill(kv, range(10))
    worker = {PREFIX: kv, WINDOW: f"{segment_name}-late"}
    with Router(None, {"a": worker}, spec=SPEC, clock=lambda: seconds[0]) as router:
        late = index("late", WINDOW, 32)
        fill(late, range(5), 32)
        for seconds[0] in (1.0, 2.0):
            choice = router.route(PROMPT, {"a": 0})
            assert (choice.stale, choice.costs) == (("a",), {"a": 200})
        assert "16 tokens in" in router.problems["a"]
        assert "32 tokens in" in router.problems["a"]
        assert len(caplog.records) == 1
        late.close()
        fill(index("late", WINDOW), range(10))
        seconds[0] = 3.0
        assert router.route(PROMPT, {"a": 0}).device_pages == 10


# ---- against trying every position


def kinds() -> st.SearchStrategy[Rule]:
    tokens = st.integers(1, 90)
    return st.one_of(
        st.just(PREFIX), st.just(POINT), tokens.map(Rule.window), tokens.map(Rule.chunk)
    )


NEEDS: Mapping[str, Callable[[int], oracle.Need]] = {
    "prefix": lambda _: oracle.prefix(),
    "point": lambda _: oracle.point(),
    "window": oracle.window,
    "chunk": oracle.chunk,
}


def need_of(rule: Rule) -> oracle.Need:
    kind = rule.name.rstrip("0123456789")
    return NEEDS[kind](int(rule.name[len(kind) :] or 0))


@st.composite
def holed(draw: st.DrawFn, pages: int = 12) -> set[int]:
    """Pages of a prompt, mostly there or mostly not."""
    some = draw(st.sets(st.integers(0, pages - 1), max_size=4))
    return some if draw(st.booleans()) else set(range(pages)) - some


@pytest.fixture(scope="module")
def many() -> Iterator[dict[int, list[PageIndex]]]:
    """Six indexes of each page size (1: states), emptied by each example."""
    name = f"test-router-usable-{os.getpid()}"
    made = {
        size: [
            PageIndex.create(
                f"{name}-{size}-{i}", pages=64, independent=True, config={"page_tokens": size}
            )
            for i in range(6)
        ]
        for size in (1, 16, 32)
    }
    yield made
    for indexes in made.values():
        for one in indexes:
            assert one.check().clean
            one.close()


def filled(index: PageIndex, pages: set[int], size: int) -> PageIndex:
    index.evict(64)
    fill(index, sorted(pages), size)
    return index


@settings(max_examples=EXAMPLES, deadline=None)
@given(groups=st.dictionaries(kinds(), holed(), min_size=1, max_size=4), n=st.integers(0, len(IDS)))
def test_a_worker_has_what_its_groups_match(
    many: dict[int, list[PageIndex]], groups: dict[Rule, set[int]], n: int
) -> None:
    worker = {
        rule: filled(one, pages, 16)
        for one, (rule, pages) in zip(many[16], groups.items(), strict=False)
    }
    prompt, most = Prompt(IDS[:n]), max(0, n - 1) // 16
    needs = [(need_of(rule), pages) for rule, pages in groups.items()]
    position, _ = oracle.deepest(needs, most, 16, 1)
    together = GroupSet(
        [Group(rule.name, rule, one) for rule, one in worker.items()], page_tokens=16
    )
    with together.match(PROMPT.keys(SPEC)[:most]) as match:
        assert match.pages == position
    with routed(None, worker) as router:
        assert usable(router, prompt) == position * 16
        assert router.route(prompt, {"a": 0}).device_pages == position
    with routed(worker, None) as router:
        assert usable(router, prompt) == position * 16
        assert router.route(prompt, {"a": 0}).host_pages == position


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.sampled_from([(16, 16), (16, 32), (32, 16)]),
    rules=st.sets(kinds(), min_size=1, max_size=3).filter(lambda rules: rules != {POINT}),
    n=st.integers(0, len(IDS)),
    data=st.data(),
)
def test_two_tiers_have_what_each_position_needs(
    many: dict[int, list[PageIndex]],
    sizes: tuple[int, int],
    rules: set[Rule],
    n: int,
    data: st.DataObject,
) -> None:
    """By trying every number of tokens."""
    fine = min(sizes)
    unit = {rule: [fine, fine] if rule == POINT else list(sizes) for rule in rules}
    tiers: list[dict[Rule, set[int]]] = [{}, {}]
    made: list[dict[Rule, PageIndex]] = [{}, {}]
    free = {size: list(indexes) for size, indexes in many.items()}
    for i, rule in enumerate(sorted(rules, key=lambda rule: (rule == POINT, rule.name))):
        # The first is in both tiers: its pages say what the tier's page size is.
        for tier in data.draw(st.sampled_from([(0, 1), (0,), (1,)])) if i else (0, 1):
            pages = data.draw(holed(192 // unit[rule][tier]), label=f"{rule.name}, tier {tier}")
            index = free[1 if rule == POINT else sizes[tier]].pop()
            tiers[tier][rule] = pages
            made[tier][rule] = filled(index, pages, unit[rule][tier])
    expected = next(
        position
        for position in range(max(0, n - 1), -1, -1)
        if not position or all(accepted(rule, tiers, sizes, fine, position) for rule in rules)
    )
    with routed(made[1], made[0]) as router:
        assert usable(router, Prompt(IDS[:n])) == expected


def accepted(
    rule: Rule, tiers: list[dict[Rule, set[int]]], sizes: tuple[int, int], fine: int, position: int
) -> bool:
    device, host = (has.get(rule) for has in tiers)
    if rule == PREFIX:
        blocks = 0
        while (blocks + 1) * sizes[0] <= position and blocks in (device or ()):
            blocks += 1
        first = blocks * sizes[0] // sizes[1]
        rest = range(first, position // sizes[1])
        return blocks * sizes[0] == position or (
            position % sizes[1] == 0 and host is not None and set(rest) <= host
        )
    return any(
        pages is not None
        and position % size == 0
        and oracle.needed(need_of(rule), position // size, size) <= pages
        for pages, size in zip(
            (device, host), (fine, fine) if rule == POINT else sizes, strict=True
        )
    )


# ---- against a hybrid manager


@pytest.mark.parametrize(
    ("tail", "missing"),
    [(False, {}), (True, {}), (True, {"slots": None}), (False, {"state_pages": None})],
)
@pytest.mark.parametrize(("block", "page"), [(4, 4), (4, 8), (8, 4)])
def test_a_hybrid_manager_plans_what_a_router_counts(
    hybrids: Any, block: int, page: int, tail: bool, missing: dict[str, None]
) -> None:
    tail = tail and block != page  # else no key lies after the grid's last position
    world = hybrids(block=block, page=page, tail=tail, **missing)
    chance = np.random.default_rng(block * page)
    cache: Cache = world.world.cache
    host = cache if world.states is None else {PREFIX: cache, POINT: world.states}
    device = world.world.index.name
    worker = device if world.slots is None else {PREFIX: device, POINT: world.slots}
    step, found = world.hybrid.parts.step, set()
    with routed(host, worker, cache.key_spec()) as router:
        for seed in range(40):
            tokens = np.arange(41) + 1000 * seed
            world.compute(Prompt(tokens[: chance.integers(5, 42)]))
            for position in chance.choice(np.arange(step, 41, step), 2, replace=False):
                world.save(Prompt(tokens), int(position))
            for one in (world.slots, world.states, cache, world.world.index):
                if one is not None:
                    one.evict(int(chance.choice((0, 0, 1, 4, 64))))
            for prompt in (Prompt(tokens), Prompt(tokens[:33]), Prompt(tokens[:20])):
                match = world.look(prompt)
                assert usable(router, prompt) == match.usable
                choice = router.route(prompt, {"a": 0})
                assert choice.device_pages * block == match.device_tokens
                found.add(match.usable)
    assert len(found) >= 4, "many positions"

"""The router with prompts: it makes the keys of each index, whatever its page size, weights and
tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.keys import prompt as keys_of_numbers
from support.refusals import refused

from lightcache import ConfigError, KeySpec, PageIndex, Router, RouterPolicy
from lightcache.manager import Prompt

Made = Callable[..., PageIndex]
SPEC = KeySpec("model", 64, secret=bytes(16), weights="step-1")
IDS = np.arange(300)
IDLE = {"a": 0, "b": 0}
POLICY = RouterPolicy(host_weight=0.25)


@pytest.fixture
def index(segment_name: str) -> Iterator[Made]:
    """`index("x", page_tokens=...)` makes one; closed at the end."""
    made: list[PageIndex] = []

    def make(suffix: str, **config: Any) -> PageIndex:
        made.append(PageIndex.create(f"{segment_name}-{suffix}", pages=64, config=config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def publish(
    index: PageIndex, pages: int, size: int, *, weights: str = "step-1", tenant: str = ""
) -> None:
    """The first pages of `IDS`, under the keys that a manager makes."""
    spec = replace(SPEC, page_tokens=size, weights=weights, namespace=tenant)
    keys = Prompt(IDS).keys(spec)[:pages]
    with index.reserve(keys, namespace=index.namespace(weights, tenant)) as new:
        new.publish()


def test_one_prompt_is_found_in_indexes_of_three_page_sizes(index: Made) -> None:
    host = index("host", page_tokens=64)
    a, b = index("a", block_tokens=16), index("b", block_tokens=32)
    publish(host, 3, 64)  # 192 tokens
    publish(a, 5, 16)  # 80
    publish(b, 8, 32)  # 256
    with Router(host, {"a": a, "b": b.name}, policy=POLICY, spec=SPEC) as router:
        choice = router.route(Prompt(IDS), IDLE)
        assert (choice.worker, choice.device_pages, choice.host_pages) == ("b", 8, 3)
        assert choice.costs == {"a": 300 - 192 + 0.25 * (192 - 80), "b": 300 - 256}
        choice = router.route(Prompt(IDS), IDLE, among=["a"])
        assert (choice.device_pages, choice.host_pages) == (5, 3)
        counted = router.statistics
        assert (counted.pages, counted.device_pages, counted.host_pages) == (8, 4 + 1, 2)
        assert (counted.requests, counted.missed) == (2, 0)


def test_an_index_that_states_no_page_size_has_that_of_the_spec(index: Made) -> None:
    a = index("a")
    publish(a, 2, 64)
    with Router(None, {"a": a, "b": None}, spec=SPEC) as router:
        choice = router.route(Prompt(IDS), IDLE)
        assert (choice.worker, choice.device_pages) == ("a", 2)
        assert choice.costs == {"a": 300 - 128, "b": 300}


def test_weights_and_tenant_are_in_the_keys_and_in_the_namespace(
    index: Made, caplog: pytest.LogCaptureFixture
) -> None:
    host, a = index("host", page_tokens=64), index("a", block_tokens=16)
    publish(host, 1, 64)
    publish(a, 2, 16)
    publish(a, 3, 16, tenant="t")
    publish(a, 4, 16, weights="step-2", tenant="t")

    def pages(tenant: str, weights: str | None = None) -> tuple[int, int]:
        choice = router.route(Prompt(IDS, tenant=tenant), {"a": 0}, weights=weights)
        return choice.device_pages, choice.host_pages

    with Router(host, {"a": a}, spec=SPEC) as router:
        assert pages("") == pages("", "step-1") == (2, 1)
        assert pages("t") == (3, 0)
        assert pages("t", "step-2") == (4, 0)
        assert pages("", "step-2") == pages("u") == (0, 0)
        assert router.statistics.other_namespace == 2
        salted = Prompt(IDS, salt="x")
        assert router.route(salted, {"a": 0}).device_pages == 0
        assert (router.statistics.missed, router.statistics.other_namespace) == (3, 2)
        assert not caplog.records, "a new tenant of known weights is no news"
        pages("", "step-3")
        assert "weights 'step-3'" in caplog.text


def test_a_prompt_is_hashed_once_for_each_page_size(index: Made) -> None:
    hashed: list[int] = []

    class Counted(Prompt):
        def _hash(self, spec: KeySpec) -> Any:
            hashed.append(spec.page_tokens)
            return super()._hash(spec)

    workers = {"a": index("a", block_tokens=16), "b": index("b", block_tokens=16)}
    with Router(index("host", page_tokens=64), workers, spec=SPEC) as router:
        prompt = Counted(IDS)
        for _ in range(3):
            router.route(prompt, IDLE)
        assert sorted(hashed) == [16, 64]
        router.route(prompt, IDLE, weights="step-2")
        assert sorted(hashed) == [16, 16, 64, 64]


def test_sources_that_are_missing_or_dead_are_stale(index: Made, segment_name: str) -> None:
    seconds = [0.0]
    workers = {"a": f"{segment_name}-late", "b": index("b", block_tokens=16)}
    publish(workers["b"], 2, 16)
    with Router(None, workers, spec=SPEC, clock=lambda: seconds[0]) as router:
        choice = router.route(Prompt(IDS), IDLE)
        assert (choice.worker, choice.device_pages, choice.stale) == ("b", 2, ("a",))
        late = index("late", block_tokens=32)  # a size that the router has not seen
        publish(late, 3, 32)
        seconds[0] = 1
        choice = router.route(Prompt(IDS), IDLE)
        assert (choice.worker, choice.device_pages, choice.stale) == ("a", 3, ())
        late.close()
        seconds[0] = 2
        choice = router.route(Prompt(IDS), IDLE)
        assert (choice.worker, choice.device_pages, choice.stale) == ("b", 2, ("a",))


def test_equal_costs_are_spread_and_each_prompt_returns(index: Made) -> None:
    prompts = [Prompt(IDS + number) for number in range(64)]
    with Router(None, {"a": None, "b": None}, spec=SPEC) as router:
        first = [router.route(prompt, IDLE).worker for prompt in prompts]
        assert set(first) == {"a", "b"}
        assert [router.route(prompt, IDLE).worker for prompt in prompts] == first
        assert router.route(Prompt([]), IDLE).costs == {"a": 0, "b": 0}


def test_keys_and_prompts_that_the_router_cannot_take(index: Made) -> None:
    space = index("x").namespace("w", "t")
    with Router(None, {"a": None}, spec=SPEC) as router:
        load = {"a": 0}
        refused(ConfigError, "expected a Prompt", router.route, keys_of_numbers(1, 2), load)
        refused(ConfigError, "expected a Prompt", router.route, [1, 2, 3], load)
        refused(
            ConfigError, "expected a Prompt", router.route_many, keys_of_numbers(1, 2), (0, 2), load
        )
        refused(ConfigError, "namespace", router.route, Prompt(IDS), load, namespace=space)
        refused(ConfigError, "weights: .*text", router.route, Prompt(IDS), load, weights=1)
        refused(ConfigError, "tenant: .*bytes", router.route, Prompt(IDS, tenant="t" * 48), load)
        refused(ConfigError, "loads", router.route, Prompt(IDS), {})
        assert router.statistics.requests == 0
        assert router.route(Prompt(IDS), load).stale == ()
    with Router(None, {"a": None}, policy=RouterPolicy(page_tokens=64)) as router:
        refused(ConfigError, "make the router with spec=", router.route, Prompt(IDS), load)
        keys = keys_of_numbers(1, 2)
        refused(ConfigError, "weights: .*namespace=", router.route, keys, load, weights="w")
    refused(ConfigError, "spec: expected a KeySpec", Router, None, {"a": None}, spec="model")
    policy = RouterPolicy(page_tokens=16)
    refused(ConfigError, "leave it out", Router, None, {"a": None}, spec=SPEC, policy=policy)

"""With a real SGLang: run by `.ci/engines sglang`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import contracts, sharing
from engines.sharing import NAME, until

from lightcache import Cache
from lightcache.shm import Segment

pytestmark = pytest.mark.engines
check_clean = partial(sharing.check_clean, NAME)
OTHERS = ("gemma", "mellum", "lora")
Answer = dict[str, Any]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some that have prefixes in common: 15,700 tokens where there are 48."""
    chance = random.Random(seed)
    roots = [[chance.randrange(3, 500) for _ in range(400)] for _ in range(8)]
    found = []
    for number in range(count):
        head = roots[number % 8][: chance.randrange(50, 400)]
        found.append(head + [chance.randrange(3, 500) for _ in range(chance.randrange(10, 200))])
    return found


MANY = prompts(1, 48)


class Engines:
    """Two that share a cache, and what one without it has answered."""

    def __init__(self, start: Callable[..., Any], folder: Path) -> None:
        self._start, self.secret = start, folder / "secret"
        how = {"name": NAME, "size": "64MiB", "on_reset": "keep", "secret_file": str(self.secret)}
        how["token_ids"] = True
        self._how = json.dumps(how | {"storage": f"disk:{folder}/disk?capacity=1GiB"})
        self.plain_engine = self.start("null")  # alone, as it makes the model
        self.plain: Answer = self.plain_engine("ask", prompts=MANY)
        self.contract: Answer = self.plain_engine("contract")
        self.chains = self.plain_engine("chains", prompts=MANY)
        self.plain_engine.end()
        # The second has a large device: what it looks up are ends of prompts, the heads stay there.
        self.first = self._start(self._how)
        self.second = self._start(self._how, "1", "llama", "32768")
        for engine in (self.first, self.second):
            engine.until("READY")

    def start(self, how: str | None = None, *more: str) -> Any:
        engine = self._start(how or self._how, *more)
        engine.until("READY")
        return engine


@pytest.fixture(scope="module")
def engines(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(start, tmp_path_factory.mktemp("storage"))


def test_its_classes_read_our_events(in_engine: Callable[..., str], segment_name: str) -> None:
    module = "sglang.srt.disaggregation.kv_events"
    sharing.events_agree(in_engine, module, segment_name, "CPU_PINNED")


def test_the_contract(engines: Engines) -> None:
    assert engines.contract["calls"] == contracts.SGLANG
    assert engines.contract["where"].startswith(os.environ["LIGHTCACHE_ENGINE_PATH"])


def test_two_at_once_are_equal_to_plain_and_share(engines: Engines) -> None:
    both = (engines.first, engines.second)
    for engine in both:
        engine.begin("ask", prompts=MANY)
    for engine in both:
        answer = json.loads(engine.until("OUT"))
        assert answer["answers"] == engines.plain["answers"]
        # Of 15,700 tokens: an engine alone 4,400.
        assert sum(answer["cached"]) > 1.5 * sum(engines.plain["cached"])
    again = engines.first("ask", prompts=MANY)
    assert again["answers"] == engines.plain["answers"]
    assert sum(again["cached"]) > 0.93 * sum(map(len, MANY))
    for engine in both:
        assert engine("figures")[0]["count"] == 0
    check_clean()
    sharing.tokens_agree(NAME, MANY)


def test_after_an_eviction_no_page_is_found_whose_head_is_gone(engines: Engines) -> None:
    some = prompts(4, 24)
    assert engines.second("ask", prompts=some)["answers"]
    assert engines.second("ask", prompts=some, flush=False)["answers"]
    engines.second("figures")
    with Cache.attach(NAME, secret_file=engines.secret) as cache:
        keys = cache.engine_keys()
        cache.evict(cache.stats().ready // 2)
        there = 0
        for hashes in engines.chains + engines.second("chains", prompts=some):
            chain = keys.encode(hashes)
            each = [cache.peek(chain[place : place + 1]) for place in range(len(chain))]
            assert each == sorted(each, reverse=True)
            there += sum(each)
        assert there > cache.stats().ready // 2
    answer = engines.first("ask", prompts=MANY)
    assert answer["answers"] == engines.plain["answers"]
    check_clean()


def test_a_restarted_engine_finds_what_whole_chains_would_keep(engines: Engines) -> None:
    """Beginnings that the device keeps stay in the host as well, when half of it is evicted."""
    engine, found = engines.second, []
    for whole in (False, True):
        if whole:
            engine("touch_whole_chains", yes=True)
        with Cache.attach(NAME) as cache:
            cache.evict(cache.pages)
            for some in (MANY, prompts(4, 24), MANY[:16]):
                engine("ask", prompts=some, flush=some is MANY)
            engine("figures")
            cache.evict(cache.stats().ready // 2)
        answer = engine("ask", prompts=MANY)  # its tree is emptied, as a restart does
        assert answer["answers"] == engines.plain["answers"]
        found.append(sum(answer["host"]))
    print("tokens found, in pieces and by whole chains:", *found)
    engine("touch_whole_chains", yes=False)
    assert found[0] >= 0.95 * found[1] > 0


@pytest.fixture(scope="module")
def others(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Engines of other models, each with a cache of its own. They start at once."""
    secret = tmp_path_factory.mktemp("others") / "secret"
    how = {"size": "64MiB", "on_reset": "keep", "secret_file": str(secret)}
    started = {
        model: start(json.dumps(how | {"name": f"{NAME}-{model}"}), "1", model) for model in OTHERS
    }
    for engine in started.values():
        engine.until("READY")
    yield started
    for engine in started.values():
        engine.end()


def test_windows_in_a_pool_of_all_tokens(others: dict[str, Any]) -> None:
    engine, some = others["gemma"], MANY[:3]
    wanted = [engine("ask", prompts=[each])["answers"][0] for each in some]
    engine("figures")
    answer = engine("ask", prompts=some)
    assert answer["answers"] == wanted
    assert sum(answer["host"]) > 0.9 * sum(map(len, some))
    assert engine("figures")[0]["count"] == 0


def test_windows_in_a_pool_of_their_own(others: dict[str, Any]) -> None:
    engine, some = others["mellum"], MANY[:6]
    wanted = [engine("ask", prompts=[each])["answers"][0] for each in some]
    engine("figures")
    answer = engine("ask", prompts=some)
    assert answer["answers"] == wanted
    assert sum(answer["host"]) > 0.9 * sum(map(len, some))
    with Cache.attach(f"{NAME}-mellum") as cache:
        assert cache.index.segment.config["kv_groups"] == ["full", "window63"]
        cache.evict(cache.stats().ready // 2)
    answer = engine("ask", prompts=some)
    assert answer["answers"] == wanted
    assert 0 < sum(answer["host"]) < sum(map(len, some))
    figures = engine("figures")[0]
    assert figures["count"] == figures["absent_pages"] == 0
    sharing.check_clean(f"{NAME}-mellum")


def test_adapters_are_apart(others: dict[str, Any]) -> None:
    engine, one = others["lora"], MANY[:1]
    adapters, wanted = (None, "a", "b"), {}
    for adapter in adapters:
        answer = engine("ask", prompts=one, lora_path=[adapter])
        assert answer["cached"] == [0]
        wanted[adapter] = answer["answers"]
    assert len({str(each) for each in wanted.values()}) == 3
    engine("figures")
    for adapter in adapters:
        answer = engine("ask", prompts=one, lora_path=[adapter])
        assert answer["answers"] == wanted[adapter]
        assert sum(answer["host"]) > 0.9 * len(one[0])


def test_hicache_over_the_same_cache(engines: Engines) -> None:
    """Its storage finds what linkers have saved, and they what it saves."""
    how = json.loads(engines._how) | {"hicache": "layer_first"}
    del how["token_ids"]  # HiCache hands its storage hashes alone
    hicache = engines.start(json.dumps(how))
    answer = hicache("ask", prompts=MANY)
    assert answer["answers"] == engines.plain["answers"]
    assert sum(answer["storage"]) > sum(map(len, MANY)) // 2
    new = prompts(7, 12)
    wanted = hicache("ask", prompts=new)["answers"]

    def found() -> bool:
        """It saves in the background."""
        answer = engines.first("ask", prompts=new)
        assert answer["answers"] == wanted
        return sum(answer["cached"]) > 0.9 * sum(map(len, new))

    until(found)
    hicache.end()
    check_clean()


def test_an_abort_while_loading(engines: Engines) -> None:
    assert engines.first("ask", prompts=MANY[:4])["answers"] == engines.plain["answers"][:4]
    engines.first("figures")
    assert engines.first("abort_while_loading", prompt=MANY[0]) == ["abort"]
    check_clean()
    assert engines.first("ask", prompts=MANY[:4])["answers"] == engines.plain["answers"][:4]


def test_killed_in_a_save(engines: Engines) -> None:
    engines.first("ask", prompts=MANY[:12])
    engines.first("figures")
    engines.first("hold", what="save")
    engines.first("ask", prompts=prompts(5, 2))
    with Cache.attach(NAME, readonly=True) as cache:
        until(lambda: cache.stats().writing)
    engines.first.kill()
    answer = engines.second("ask", prompts=MANY[:12])
    assert answer["answers"] == engines.plain["answers"][:12]
    assert min(answer["host"]) > 0
    engines.second("figures")
    check_clean()


def test_what_is_stored_outlives_all(engines: Engines) -> None:
    engines.second.end()
    Segment.unlink(NAME)
    engines.first = engines.start(None, "2")  # two ranks: they read what one has written

    def found() -> bool:
        """A lookup begins to read, and promises nothing until it is there."""
        answer = engines.first("ask", prompts=MANY[:6])
        assert answer["answers"] == engines.plain["answers"][:6]
        return min(answer["host"]) > 0

    until(found)
    assert [figures["count"] for figures in engines.first("figures")] == [0, 0]


def test_two_ranks_and_a_plan_that_one_of_them_loses(engines: Engines) -> None:
    two, new = engines.first, prompts(6, 4)
    wanted = two("ask", prompts=new)["answers"]
    for figures in two("figures"):
        assert figures["count"] == figures["absent_pages"] == 0
    assert min(two("ask", prompts=new)["host"]) > 0
    two("lose", rank=1)
    assert set(two("ask_each", prompts=MANY[:2])) == {503}
    two("lose", rank=1, lost=False)
    assert two("ask_each", prompts=new) == wanted
    two.end()
    check_clean()


def test_states_over_its_own_pools_and_tree(in_engine: Callable[..., str], caches: None) -> None:
    """Without a model. Each pair is what the device had of a prompt and what was loaded, in tokens;
    -1: the load has failed. The program compares bytes."""
    seen = json.loads(in_engine("sglang_states.py", f"{NAME}-states").partition("SEEN ")[2])
    assert seen["addresses"] == {
        "latents": {"KV": [True, True], "MAMBA": [True, True]},
        "windows": {"KV": [True, True], "SWA": [True, True], "MAMBA": [True, True]},
        "keys and values": "The direct external linker supports FULL + MAMBA models only with a "
        "plain MLA pool, without DCP or packed draft KV.",
    }
    assert seen["alone"] == {
        "first": [0, 0],
        "again": [96, 0],
        "offered": [["KV", "MAMBA"]],
        "other engine": [0, 96],
        "no state at its end": [0, 0],
        "offered at a branch": [],  # SGLang has marked the node as stored
        "on the device": [64, 0],
        "forgotten": [0, 144],
        "aborted": [144, -1, False],
        "lost": [0, -1],
        "after it": [0, 144],
        "flushed": [[0, 0], [144, 0]],
        "the other after that": [0, 144],
        "errors": [0, 1],
    }
    ranks = {"first": [0, 0], "again": [0, 96], "one has lost it": [0, -1], "after it": [0, 144]}
    assert seen["two ranks"] == [{**ranks, "errors": [rank]} for rank in range(2)]
    assert seen["after a kill"] == {"no state": [0, 0], "saved again": [0, 96], "errors": [0]}
    for name in ("", "-2", "-3"):
        sharing.check_clean(f"{NAME}-states{name}")

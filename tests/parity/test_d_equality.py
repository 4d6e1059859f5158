"""Rows D10 and D11: a real hybrid model, driven by a HybridManager, computes what it computes
without a cache; and hits are as deep as predicted.

Every log-probability that an engine computes, of prompts and answers, is compared with those of one
pass over the same tokens without a cache, within 1e-4. Greedy tokens are the largest ones of that
pass, so by induction they are those of an uncached run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hybrid_engine import FINE, alone, made_engines  # noqa: E402
from support.hybrid_models import FEW_EXPERTS, hybrid  # noqa: E402
from support.hybrid_oracle import Oracle  # noqa: E402
from support.hybrid_scores import ask, ids, same  # noqa: E402
from support.tiny_models import answer, assert_same, prompt  # noqa: E402

from lightcache.hybrid.checkpoints import Tier  # noqa: E402
from lightcache.hybrid.saving import Saves  # noqa: E402
from lightcache.manager import RequestOptions  # noqa: E402

pytestmark = pytest.mark.models

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["no overlap", "overlap"])


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid(**FEW_EXPERTS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from alone()


@pytest.fixture
def engines(segment_name: str, qwen: Any) -> Iterator[Any]:
    yield from made_engines(segment_name, qwen)


# ---- D10: page sizes, overlap, no cache


@AHEAD
@pytest.mark.parametrize(
    ("block", "page", "chunk"), [(1, 1, 10), (1, 16, 16), (16, 4, 24), (8, 32, 16)]
)
def test_d10_any_page_size(engines: Any, block: int, page: int, chunk: int, ahead: bool) -> None:
    engine = engines(block=block, page=page, chunk=chunk, blocks=512 // block, ahead=ahead)
    grid = engine.grid.grid
    tokens = ids(2 * grid + 3)
    assert [ask(engine, tokens)[0] for _ in range(2)] == [0, 2 * grid]
    assert ask(engine, [*tokens[: grid + 1], *ids(9, 1)])[0] == 0
    assert ask(engine, [*tokens[: grid + 1], *ids(9, 2)])[0] == grid


@AHEAD
@pytest.mark.parametrize("block", [1, 16])
def test_d10_with_the_cache_off(engines: Any, block: int, ahead: bool) -> None:
    off = RequestOptions(read=False, write=False)
    engine = engines(block=block, blocks=256 // block, ahead=ahead, options=off)
    for _ in range(2):
        assert ask(engine, ids(70))[0] == 0
    indexes = engine.device.index, engine.kv, engine.slots, engine.states
    assert [each.stats().ready for each in indexes] == [0, 0, 0, 0]


# ---- D11: equality


@AHEAD
def test_d11_as_generate_itself(engines: Any, qwen: Any, ahead: bool) -> None:
    """Prefill and decode hits against `generate`, token by token."""
    engine = engines(**FINE, ahead=ahead)
    tokens, hits = prompt(40), []
    for seed in range(3):
        (one,) = engine.serve([tokens[0].tolist()], 12)
        hits.append(one.match.usable)
        expected = answer(qwen, tokens, steps=12)
        assert_same(one.answer(), expected)
        if seed:  # the answer, and more
            tokens = torch.cat([expected.tokens, prompt(9, seed)], 1)
    assert hits == [0, 32, 48]


@AHEAD
def test_d11_branches_that_run_together(engines: Any, ahead: bool) -> None:
    """Five at once down a prefix of which three were served: all hit, share what they read, and
    change nothing of it."""
    engine = engines(ahead=ahead, blocks=96, slots=24)
    stem = ids(71)
    for seed in (1, 2):
        ask(engine, [*stem, *ids(9, seed)])
    served = engine.serve([[*stem, *ids(9 + seed, seed)] for seed in range(3, 8)], 6)
    assert [one.match.usable for one in served] == [64] * 5
    same(engine, *served)
    assert ask(engine, [*stem, *ids(20, 9)])[0] == 64


@AHEAD
@pytest.mark.parametrize("saves", Saves, ids=lambda each: each.value)
@pytest.mark.parametrize("budget", [1 << 20, 21])
def test_d11_a_tree_of_random_requests(
    engines: Any, ahead: bool, saves: Saves, budget: int
) -> None:
    """Branches and turns, of which prompts or answers are hit, against an oracle that knows for
    each prefix what must be usable."""
    how = {"ahead": ahead, "saves": saves, "budget": budget}
    engine = engines(**FINE, **how, blocks=400, slots=80, states=80)
    oracle, chance = Oracle(engine.grid, ahead=ahead), random.Random(7)
    known, hits = [ids(30)], 0
    for number in range(12):
        stem = chance.choice(known)
        cut = chance.choice([len(stem), chance.randrange(len(stem) + 1)])
        tokens = [*stem[:cut], *ids(chance.randrange(1, 24), 100 + number)][:110]
        wanted = oracle.wanted(tuple(tokens))
        found = engine.plan(tokens)
        assert (found.kv_tokens, found.usable, found.branching) == wanted
        hit, every = ask(engine, tokens, chance.choice([1, 2, 5, 12]))
        assert hit == wanted.usable
        hits += hit > 0
        oracle.served(tuple(every), len(tokens))
        known = [*known[-5:], every]
    assert hits >= 5


@AHEAD
def test_d11_states_evicted_under_load(engines: Any, ahead: bool) -> None:
    """Slots for one request and two checkpoints; nothing else keeps states."""
    engine = engines(ahead=ahead, slots=5 if ahead else 4, states=None)
    prompts = [ids(40, seed) for seed in range(3)]
    assert [ask(engine, each)[0] for each in prompts] == [0, 0, 0]
    assert engine.plan(prompts[0]).kv_tokens == 32, "only its state has gone"
    assert [ask(engine, each)[0] for each in prompts[::-1]] == [32, 32, 0]
    assert ask(engine, prompts[0])[0] == 32


@AHEAD
def test_d11_kv_evicted_under_states(engines: Any, ahead: bool) -> None:
    engine = engines(ahead=ahead)
    tokens = ids(75)
    assert [ask(engine, tokens)[0] for _ in range(2)] == [0, 64]
    engine.device.index.evict(99)
    assert engine.kv.evict(1) == 1  # of four pages, the last
    assert engine.plan(tokens).kv_tokens == 48
    assert ask(engine, tokens)[0] == 0  # the state of 64 tokens is of no use, and there is no other
    assert ask(engine, tokens)[0] == 64
    engine.device.index.evict(99)
    engine.kv.evict(99)
    assert engine.slots.stats().ready == 2
    assert [ask(engine, tokens)[0] for _ in range(2)] == [0, 64]


@AHEAD
def test_d11_round_trips_to_the_host(engines: Any, ahead: bool) -> None:
    engine = engines(**FINE, ahead=ahead)
    every, tiers = ids(70), []
    for turn in range(3):
        engine.device.index.evict(99)
        engine.slots.evict(99)
        (one,) = engine.serve([every], 12)
        same(engine, one)
        engine.settle()
        tiers.append((one.match.tier, one.match.usable, one.match.kv.load))
        every = [*one.answer().tokens[0].tolist(), *ids(13, turn + 1)]
    assert tiers == [(None, 0, 0), (Tier.HOST, 80, 80), (Tier.HOST, 96, 96)]


@AHEAD
def test_d11_more_requests_than_slots_and_blocks(engines: Any, ahead: bool) -> None:
    """Some wait; slots and blocks go from one to the next while steps are in flight."""
    engine = engines(**FINE, ahead=ahead, blocks=22, pages=64, slots=7, states=6)
    stem = ids(19)
    prompts = [[*stem[: 3 * seed], *ids(30, seed)] for seed in range(6)]
    for _ in range(2):
        served = engine.serve(prompts, 5)
        same(engine, *served)
    assert sum(one.match.usable > 0 for one in served) >= 1


@AHEAD
def test_d11_a_step_of_an_aborted_request_is_in_flight(engines: Any, ahead: bool) -> None:
    engine = engines(ahead=ahead, slots=4, blocks=24)
    ask(engine, ids(40))
    for seed in range(4):
        request = engine.begin([*ids(40), *ids(seed + 1, seed)], 9)
        for _ in range(2 + seed):
            engine.step()
        engine.end(request, publish=False)
        engine.slots.evict(99)
        assert ask(engine, ids(40))[0] == 32

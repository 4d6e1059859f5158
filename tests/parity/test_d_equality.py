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

from support.hybrid_drafting import Drafting, drafted_wrongly  # noqa: E402
from support.hybrid_engine import HybridEngine, made_engines  # noqa: E402
from support.hybrid_models import hybrid  # noqa: E402
from support.hybrid_oracle import Oracle  # noqa: E402
from support.hybrid_scores import divergence, in_pieces, scores  # noqa: E402
from support.tiny_models import answer, assert_same, prompt  # noqa: E402

from lightcache.hybrid import Drafts, Saves, Tier  # noqa: E402
from lightcache.manager import Wishes  # noqa: E402

DENSE = {"mlp_only_layers": [0, 1, 2]}
"""One layer of experts is enough."""
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["no overlap", "overlap"])
FINE: dict[str, Any] = {"block": 8, "page": 8, "chunk": 16, "every": 16}


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid(**DENSE)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for several, which only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engines(segment_name: str, qwen: Any) -> Iterator[Any]:
    yield from made_engines(segment_name, qwen)


def ids(length: int, seed: int = 0) -> list[int]:
    """Token ids."""
    found: list[int] = prompt(length, seed)[0].tolist()
    return found


def same(engine: HybridEngine, *served: Any) -> None:
    """What was served is what is computed without a cache."""
    for one in served:
        every = torch.tensor([one.answer().tokens[0].tolist()])
        whole, begin = scores(engine.store.model, every[:, :-1]), one.match.usable
        found = torch.cat(one.scores)[: len(whole) - begin]
        torch.testing.assert_close(found, whole[begin:], atol=1e-4, rtol=0)
        known = len(one.prompt)
        assert every[0, known:].tolist() == whole[known - 1 :].argmax(-1).tolist()


def ask(engine: HybridEngine, tokens: list[int], more: int = 3) -> tuple[int, list[int]]:
    """One request, seen to be right. Returns its hit, and prompt and answer."""
    (one,) = engine.serve([tokens], more)
    same(engine, one)
    engine.settle()
    return one.match.usable, one.answer().tokens[0].tolist()


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
    off = Wishes(read=False, write=False)
    engine = engines(block=block, blocks=256 // block, ahead=ahead, wishes=off)
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
@pytest.mark.parametrize("saves", Saves, ids=lambda each: each.value)
@pytest.mark.parametrize("budget", [1 << 20, 21])
def test_d11_branches_down_a_shared_prefix(
    engines: Any, ahead: bool, saves: Saves, budget: int
) -> None:
    """The first leaves no state where they part; the second saves one there; the others hit."""
    engine = engines(ahead=ahead, saves=saves, budget=budget)
    stem = ids(71)
    hits = [ask(engine, [*stem, *ids(25, seed)])[0] for seed in range(1, 5)]
    assert hits == [0, 0, 64, 64]


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
def test_d11_decode_hits(engines: Any, ahead: bool) -> None:
    engine = engines(**FINE, ahead=ahead)
    hit, every = ask(engine, ids(20), 31)
    assert hit == 0
    assert len(every) - 1 == 50  # computed: 16 in the prompt, 32 and 48 behind it
    assert ask(engine, [*every, *ids(5, 1)])[0] == 48
    assert ask(engine, [*every[:40], *ids(5, 2)])[0] == 16  # only the last of an answer stays


@AHEAD
def test_d11_several_turns(engines: Any, ahead: bool) -> None:
    engine = engines(**FINE, ahead=ahead)
    every, hits, ends = ids(21), [], []
    for turn in range(5):
        ends.append(len(every))
        hit, every = ask(engine, every, 8)
        hits.append(hit)
        every = [*every, *ids(6 + turn, turn + 1)]
    assert ends == [21, 35, 50, 66, 83]
    # The last multiple of 16 within the prompt before, or of what was computed behind it.
    assert hits == [0, 16, 32, 48, 64]


@AHEAD
@pytest.mark.parametrize("saves", Saves, ids=lambda each: each.value)
def test_d11_a_tree_of_random_requests(engines: Any, ahead: bool, saves: Saves) -> None:
    """Against an oracle that knows for each prefix what must be usable."""
    engine = engines(**FINE, ahead=ahead, saves=saves, blocks=400, slots=80, states=80)
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
@pytest.mark.parametrize(("states", "hits"), [(None, 1), (2, 2), (12, 4)])
def test_d11_an_undersized_state_pool(
    engines: Any, ahead: bool, states: int | None, hits: int
) -> None:
    """Slots for one request: what it leaves goes when the next one comes, or to the host."""
    engine = engines(ahead=ahead, slots=3 if ahead else 2, states=states)
    prompts = [ids(40, seed) for seed in range(4)]
    assert [ask(engine, each)[0] for each in prompts] == [0] * 4
    assert [ask(engine, each)[0] for each in prompts[::-1]] == [32] * hits + [0] * (4 - hits)


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


# ---- D11: speculative decoding

TREES = {"top-k 1": [-1, 0, 1, 2], "top-k 2": [-1, 0, 0, 1, 1, 2], "a bush": [-1, 0, 0, 0]}


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("wrong", [2, 3, 1000])
def test_d11_speculation_with_rejections(
    engines: Any, qwen: Any, parents: list[int], wrong: int
) -> None:
    """Every `wrong`-th drafted token of the right branch is not what the model says. States of
    accepted tokens are saved where a step crosses a position, and hit."""
    running, drafted = 2, len(parents) - 1
    engine = engines(**FINE, spare=Drafts.room(running, drafted))
    first = ids(37)
    expected = answer(qwen, torch.tensor([first]), steps=32).tokens[0].tolist()
    drafting = Drafting(engine, parents, running)
    request = engine.begin(first, 24)
    rejected = drafting.run(request, expected, wrong)
    assert (rejected > 0) == (wrong < 1000)
    one = drafting.one
    same(engine, one)
    every = one.answer().tokens[0].tolist()
    computed = engine.end(request)
    assert computed == one.at // 16 * 16 >= 48
    assert ask(engine, [*every[: one.at], *ids(5, 1)])[0] == computed


@AHEAD
@pytest.mark.parametrize("accepted", [33, 47, 48])
def test_d11_rejected_tokens_fall_back_to_a_saved_state(
    engines: Any, ahead: bool, accepted: int
) -> None:
    """Without slots for drafts: drafted tokens went into the working slot, over a position that
    was saved. Only so many count; it goes on from a state that was saved before."""
    engine = engines(**FINE, ahead=ahead)
    first = ids(20)
    request = engine.begin(first, 40)
    while engine.running[request].at < 35:
        engine.step()
    one = drafted_wrongly(engine, request, accepted, until=50)
    assert one.at == (48 if accepted == 48 else 32)  # the newest saved state that counts
    while request in engine.running:
        engine.step()
    same(engine, one)
    every = one.answer().tokens[0].tolist()
    assert ask(engine, [*every[:47], *ids(5, 1)])[0] == 16, "of the answer only the last stays"
    assert ask(engine, [*every, *ids(5, 1)])[0] == 48


# ---- D11: bfloat16


@AHEAD
def test_d11_bfloat16_is_as_near_as_computing_in_pieces(engines: Any, ahead: bool) -> None:
    """Prefill hits and decode hits; the noise is that of the same tokens without a cache in passes
    of the same lengths, and in passes that end 27 tokens earlier."""
    model = hybrid(dtype=torch.bfloat16, **DENSE)
    engine = engines(model, **FINE, ahead=ahead)
    found, noise = [], []
    for seed in range(2):
        first = ids(76, seed)
        (one,) = engine.serve([first], 6)
        decoded = one.answer().tokens[0].tolist()
        for tokens, hit, cuts in (
            ([*first, *ids(60, seed + 50)], 64, [64]),
            ([*decoded, *ids(60, seed + 60)], 80, [64, *range(76, 81)]),
        ):
            (one,) = engine.serve([tokens], 1)
            assert one.match.usable == hit
            every = torch.tensor([tokens])
            whole = scores(model, every)[hit:]
            found.append(divergence(torch.cat(one.scores)[: len(whole)], whole))
            for earlier in (0, 27):
                pieces = in_pieces(model, every, [cut - earlier for cut in cuts])
                noise.append(divergence(pieces[hit:], whole) / 2)
    assert max(found) <= 0.003
    assert sum(found) <= 2 * sum(noise) + 1e-6  # what differs by the comparison's own rounding


# ---- D11: the test fails on a wrong checkpoint


WRONG = ["a chunk short", "a token short", "a token long", "of another prompt", "zero"]


@pytest.mark.parametrize("kind", [*WRONG, "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_d11_fails_on_a_stale_checkpoint(engines: Any, dtype: Any, kind: str) -> None:
    """By the comparisons above. The state that is found is overwritten in its slot."""
    model = hybrid(dtype=dtype, **DENSE)
    engine = engines(model, spare=1, states=None)
    tokens = ids(80)
    store, spare, table = engine.store, engine.slots.pages, list(range(8))
    (one,) = engine.serve([tokens], 1)
    position = {"a chunk short": 32, "a token short": 63, "a token long": 65}.get(kind, 64)
    store.put(spare, {key: one * 0 for key, one in store.copy_of(spare).items()})
    if kind != "zero":
        source = ids(80, 1) if kind == "of another prompt" else tokens
        wrong = engines(model)  # computed beside, where nobody's KV is touched
        wrong.store.put(0, store.copy_of(spare))
        wrong.store.run(source[:position], table, 0, 0, 0)
        store.put(spare, wrong.store.copy_of(0))
    with engine.slots.oldest(1) as found:
        store.put(int(found.pages[0]), store.copy_of(spare))
    (one,) = engine.serve([tokens], 1 if dtype == torch.bfloat16 else 3)
    assert one.match.usable == 64
    if dtype == torch.float32:
        if kind == "right":
            same(engine, one)
        else:
            with pytest.raises(AssertionError):
                same(engine, one)
        return
    whole = scores(model, torch.tensor([tokens]))[64:]
    assert (divergence(torch.cat(one.scores), whole) > 0.003) == (kind != "right")
